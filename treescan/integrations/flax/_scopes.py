"""flax's functions of scopes as functions of groups, for `scan` and `RNN`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from flax.core import meta

from ..._avals import PyTree, describe_node
from ..._errors import BodyFault
from ..._verbs.groups import Groups, Rngs, check_axes_of, transformed

Group: TypeAlias = Sequence[Mapping[str, Any]]
"""Collections, or rngs, by their names, for each scope."""


Axes: TypeAlias = dict[Any, int]
"""The entries of `variable_axes` that go one way: for each filter of collections the axis of the steps in these."""


def axes_of(variable_axes: Mapping[Any, Any]) -> tuple[Axes, Axes]:
    """The entries that go in, which are all but those of type `Out`, and those that come out, all but `In`."""
    entries = list(zip(variable_axes, check_axes_of(variable_axes), strict=True))
    into = {names: axis.into for names, axis in entries if axis.into is not None}
    return into, {names: axis.out for names, axis in entries if axis.out is not None}


def without_axes(groups: Sequence[Group], axes: Axes, metadata: Mapping[Any, Any]) -> tuple[PyTree, ...]:
    """Scanned groups whose boxes name the axes of one step: what these hold stays as it is."""
    pairs = zip(groups, axes.values(), strict=True)
    return tuple(meta.remove_axis(group, axis, dict(metadata)) for group, axis in pairs)


def with_axes(groups: Sequence[Group], axes: Axes, metadata: Mapping[Any, Any]) -> tuple[PyTree, ...]:
    """Stacked groups whose boxes name the axis of the steps too."""
    pairs = zip(groups, axes.values(), strict=True)
    return tuple(meta.add_axis(group, axis, dict(metadata)) for group, axis in pairs)


def parted_rngs(rngs: Sequence[Group], split: Sequence[bool]) -> Rngs:
    """Groups of rngs by whether each step has its own."""
    return Rngs(
        tuple(None if on else group for group, on in zip(rngs, split, strict=True)),
        tuple(group if on else None for group, on in zip(rngs, split, strict=True)),
    )


@dataclass(eq=False)
class ScopedCall:
    """A function of scopes, in the terms of groups. Flax keeps groups of collections by scope: tuples of dicts.

    Attributes:
        scope_fn: makes scopes of groups, as flax's `pack` has it.
        repack_fn: makes groups of scopes.
        function: the function.
        split: for each group of rngs whether each step has its own.
        data_transform: called with the groups of variables and of keys.
        constant: whether what the function returns for broadcast collections counts.
        changed: whether the last call changed a broadcast variable, or made one that may have been changed since, or
            that a `data_transform` would have shown otherwise.
        counters: for each scope where its rngs count from in each call; None: they count on.
    """

    scope_fn: Callable[..., Any]
    repack_fn: Callable[..., Any]
    function: Callable[..., Any]
    split: Sequence[bool]
    data_transform: Callable[..., Any] | None = None
    constant: bool = True
    changed: bool = False
    counters: list[dict[Any, Any]] | None = None

    def scopes(self, groups: Groups, rngs: Rngs) -> Any:
        """The scopes of one step."""
        variables: Any = (groups.broadcast, groups.carried, *groups.scanned)
        keys: Any = tuple(s if on else k for s, k, on in zip(rngs.split, rngs.shared, self.split, strict=True))
        return self.scope_fn(*transformed(self.data_transform, variables, keys))

    def __call__(
        self, groups: Groups, rngs: Rngs, carry: PyTree, args: tuple[Any, ...]
    ) -> tuple[PyTree, PyTree, Groups]:
        """One step. Carried collections that it may not change are returned as they were given."""
        scopes = self.scopes(groups, rngs)
        if self.counters is not None:
            for scope, counters in zip(scopes, self.counters, strict=True):
                _rewind(scope.rng_counters, counters)
        match self.function(scopes, carry, *args):
            case (carry, y):
                pass
            case returned:
                raise BodyFault(
                    f"{{body}} must return a pair (carry, y), but returned {describe_node(returned)}.",
                    "Return the next carry and this step's output: `return carry, y`, with None for y if there is "
                    "none.",
                )
        shared, carried, *scanned = self.repack_fn(scopes)
        params = {"params"} if self.data_transform is None else set[str]()
        self.changed = _is_changed(groups.broadcast, shared, params)
        broadcast = shared if self.constant else None
        return carry, y, Groups(broadcast, merged(groups.carried, carried), tuple(scanned))


def merged(given: Group, returned: Group) -> Group:
    """Collections with what was returned of them: what may not be changed is not returned."""
    return tuple({**before, **after} for before, after in zip(given, returned, strict=True))


def _is_changed(given: Group, returned: Group, made: set[str]) -> bool:
    """Whether a variable that was there before is another one now, or one was made that may have been changed since.

    Those of the collections `made` are made, and not changed in the same call.
    """
    for before, after in zip(given, returned, strict=True):
        for name, collection in after.items():
            there = dict(jax.tree_util.tree_leaves_with_path(before.get(name, {})))
            for path, leaf in jax.tree_util.tree_leaves_with_path(collection):
                if there.get(path, leaf if name in made else None) is not leaf:
                    return True
    return False


def copied(counters: Mapping[Any, Any]) -> dict[Any, Any]:
    """How far rngs have counted so far."""
    return {key: copied(value) if isinstance(value, dict) else value for key, value in counters.items()}


def _rewind(counters: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Sets counters back, in place: submodules hold on to those that are nested in others."""
    for key, value in counters.items():
        if isinstance(value, dict):
            _rewind(value, saved.get(key, {}))
        else:
            counters[key] = saved.get(key, 0)
