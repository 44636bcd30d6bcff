"""`flax.linen.scan` on treescan: the same arguments and variables; flax's scopes are groups of variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import jax
from flax.core import FrozenDict, broadcast, meta
from flax.core.lift import pack
from flax.core.scope import CollectionFilter, PRNGSequenceFilter, Scope
from flax.linen.transforms import lift_transform

from ..._avals import PyTree, describe_node
from ..._body.signature import LIFT
from ..._errors import GROUP_WORDS, BodyFault, Fault, explain, named_options, verb
from ..._extras.lift.groups import (
    Groups,
    GroupStep,
    Rngs,
    Roles,
    State,
    check_axes_of,
    check_hook,
    check_split,
    run_groups,
    transformed,
)
from ..._types import ProgressLike, RematLike, Save

Group: TypeAlias = Sequence[Mapping[str, PyTree]]
"""Collections, or rngs, by their names, for each scope."""

ScopeFn: TypeAlias = Callable[..., Sequence[Scope]]
"""Makes scopes of groups, as flax's `pack` has it."""

RepackFn: TypeAlias = Callable[[Sequence[Scope]], Sequence[Group]]
"""Makes groups of scopes."""

Axes: TypeAlias = dict[CollectionFilter, int]
"""The entries of `variable_axes` that go one way: for each filter of collections the axis of the steps in these."""


def axes_of(variable_axes: Mapping[CollectionFilter, object]) -> tuple[Axes, Axes]:
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
        scope_fn: makes scopes of groups.
        repack_fn: makes groups of scopes.
        function: the function.
        split: for each group of rngs whether each step has its own.
        data_transform: called with the groups of variables and of keys.
        constant: whether what the function returns for broadcast collections counts.
        changed: whether the last call changed a broadcast variable, or made one that may have been changed since, or
            that a `data_transform` would have shown otherwise.
        counters: for each scope where its rngs count from in each call; None: they count on.
    """

    scope_fn: ScopeFn
    repack_fn: RepackFn
    function: Callable[..., object]
    split: Sequence[bool]
    data_transform: Callable[..., object] | None = None
    constant: bool = True
    changed: bool = False
    counters: list[dict[Any, Any]] | None = None

    def scopes(self, groups: Groups, rngs: Rngs) -> Sequence[Scope]:
        """The scopes of one step."""
        variables = (groups.broadcast, groups.carried, *groups.scanned)
        keys = tuple(s if on else k for s, k, on in zip(rngs.split, rngs.shared, self.split, strict=True))
        return self.scope_fn(*transformed(self.data_transform, variables, keys))

    def __call__(
        self, groups: Groups, rngs: Rngs, carry: PyTree, args: tuple[PyTree, ...]
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


ELSEWHERE = dict.fromkeys(
    ("lengths", "seq_lengths", "mask"),
    "For rows of unequal length, `treescan.integrations.flax.RNN(cell)(xs, seq_lengths=...)` runs a cell, and "
    "`treescan.mask_scan(..., lengths=...)` a function.",
)
"""What others take; see `named_options`."""
Target = TypeVar("Target")
FLAX = dataclasses.replace(LIFT, verb="flax.scan")


@dataclass(frozen=True)
class Settings:
    """What flax says of a loop: the arguments of its `scan`, with the defaults of those that `methods` leaves out."""

    variable_axes: Mapping[CollectionFilter, object] = FrozenDict()
    variable_broadcast: CollectionFilter = False
    variable_carry: CollectionFilter = False
    split_rngs: Mapping[PRNGSequenceFilter, bool] = FrozenDict()
    in_axes: PyTree = 0
    out_axes: PyTree = 0
    length: int | None = None
    reverse: bool = False
    unroll: int | bool = 1
    _split_transpose: bool = False
    data_transform: Callable[..., object] | None = None
    metadata_params: Mapping[Any, Any] = FrozenDict()
    check_constancy_invariants: bool = True

    def roles(self, into: Axes, out: Axes, more: Mapping[str, Any]) -> Roles:
        """What becomes of variables, keys and arguments, with what treescan takes beside flax's arguments."""
        return Roles(
            tuple(into.values()),
            tuple(out.values()),
            _plain(self.in_axes),
            _plain(self.out_axes),
            self.length,
            self.reverse,
            self.unroll,
            lowering=(("_split_transpose", True),) if self._split_transpose else (),
            closes_over=True,
            convention=FLAX,
            **more,
        )


def _plain(axes: PyTree) -> PyTree:
    """Axes with None for what flax calls broadcast."""
    return jax.tree.map(lambda axis: None if axis is broadcast else axis, axes)


def _lift(
    function: Callable[..., object], target: Any, settings: Settings, more: Mapping[str, Any]
) -> Callable[..., Any]:
    """A function of a scope, of one step, as that of all steps."""
    try:
        into, out = axes_of(settings.variable_axes)
        check_split(settings.split_rngs)
        check_hook("data_transform", settings.data_transform)
    except Fault as error:
        raise explain(error, "flax.scan", target) from None
    roles, split = settings.roles(into, out, more), tuple(settings.split_rngs.values())
    metadata, constant = settings.metadata_params, settings.check_constancy_invariants

    def run(
        scope_fn: ScopeFn,
        repack_fn: RepackFn,
        variables: Sequence[Group],
        rngs: Sequence[Group],
        init: PyTree,
        *args: PyTree,
    ) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, ...]]:
        shared, carried, *scanned = variables
        call = ScopedCall(scope_fn, repack_fn, function, split, settings.data_transform, constant=constant)

        def again(made: Group, reads_keys: bool) -> Group | None:
            """Broadcast variables for a second trace, where flax's shows: it counts on from the keys of the first."""
            return merged(shared, made) if constant and (call.changed or reads_keys) else None

        groups, keys = Groups(shared, carried, without_axes(scanned, into, metadata)), parted_rngs(rngs, split)
        try:
            carry, ys, found = run_groups(GroupStep(call, target), roles, groups, keys, init, args, again)
        except Exception as error:
            failure = explain(error, "flax.scan", target, State((), init), GROUP_WORDS)
        else:
            stacked = with_axes(found.scanned, out, metadata)
            return (carry, ys), (found.broadcast if constant else shared, found.carried, *stacked)
        raise failure

    first = (settings.variable_broadcast, settings.variable_carry)
    return pack(verb(run), (*first, *into), (*first, *out), tuple(settings.split_rngs), name="scan")


def _transform(target: Any, more: Mapping[str, Any]) -> Callable[..., Callable[..., Any]]:
    """The transform that flax applies to functions of scopes, with what treescan takes beside flax's arguments."""

    # Flax makes the names of transformed modules, under which their parameters are stored, of that of the transform.
    def scan(fn: Callable[..., object], **given: Any) -> Callable[..., Any]:
        return _lift(fn, target, Settings(**given), more)

    return scan


@named_options
def scan(
    target: Target,
    variable_axes: Mapping[Any, Any] = FrozenDict(),
    variable_broadcast: CollectionFilter = False,
    variable_carry: CollectionFilter = False,
    split_rngs: Mapping[Any, bool] = FrozenDict(),
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    data_transform: Callable[..., Any] | None = None,
    metadata_params: Mapping[Any, Any] = FrozenDict(),
    methods: Any = None,
    _split_transpose: bool = False,
    check_constancy_invariants: bool = True,
    *,
    remat: RematLike | None = None,
    save: Save = "all",
    progress: ProgressLike = None,
    check_finite: bool = False,
) -> Target:
    """`flax.linen.scan` on treescan.

    Arguments, names of variables and results are the same as in `flax.linen.scan`, also for the same seeds, so
    checkpoints are interchangeable. flax traces the body twice; here it is traced once, and the trace shows that
    broadcast variables do not depend on the loop. The body is traced a second time if it uses keys in the loop, for
    example for dropout, or changes a broadcast variable. flax counts the keys of its first trace, so this is needed for
    equal results.

    During init, flax's second trace has two effects that are missing here. If a body asks `has_variable` for a
    parameter that it makes, the answer here is no. If a key becomes both the value of a parameter and something else,
    both are made here.

    Carries may contain custom carries of `treescan.carries`. Carried collections that are not mutable do not change.

    Args:
        target: a Module class, or a function of a module (or modules), the carry and the scanned arguments, as in
            `flax.linen.scan`, within `nn.compact` and `setup`.
        variable_axes: for filters of collections, the axis to scan over and to stack along, or flax's `In(axis)` or
            `Out(axis)`.
        variable_broadcast: a filter of the collections that all steps share.
        variable_carry: a filter of the collections that are carried. They are made before the loop.
        split_rngs: for filters of streams of keys, whether each step has its own key.
        in_axes: a prefix of the arguments after the carry: the axis to scan over, or `nn.broadcast` (or None) if every
            step receives the whole argument.
        out_axes: a prefix of y: the axis to stack along, or `nn.broadcast` (or None) for an output that is the same in
            every step.
        length: the number of steps; not needed if anything is scanned over.
        reverse: whether the last step comes first.
        unroll: as for `treescan.scan`.
        data_transform: called in each step with the groups of variables and of keys, and returns both.
        metadata_params: passed to the boxes of variables that name their axes, for example `nn.Partitioned`.
        methods: the methods of a Module class to transform, or a dict of them with the arguments of each.
        _split_transpose: as for `treescan.scan`.
        check_constancy_invariants: False: broadcast variables are only read, and nothing is proven.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`.
        progress: as for `treescan.scan`. `show` receives the carry, and `init` shows the bar too.
        check_finite: as for `treescan.scan`, of the carry and the carried variables.

    Returns:
        The transformed class or function. Call it as `(carry, *args) -> (carry, ys)`.

    Raises:
        ArgumentError: for axes and lengths that do not fit.
        ArgumentTypeError: if an axis of `variable_axes` is not an int.
        BodyError: if the body does not return a pair, or returns broadcast values that depend on the loop, or carried
            variables that did not exist before the loop.
        CarryError: if the carry, or a carried collection, changes its structure or types.
        NonFiniteError: if `check_finite` finds something.

    Examples:
        >>> import flax.linen as nn
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from treescan.integrations.flax import scan
        >>> cells = scan(
        ...     nn.GRUCell, variable_broadcast="params", split_rngs={"params": False}
        ... )
        >>> carry, xs = jnp.zeros((2, 4)), jnp.ones((5, 2, 3))
        >>> (carry, ys), variables = cells(4).init_with_output(
        ...     jax.random.key(0), carry, xs
        ... )
        >>> print(ys.shape)
        (5, 2, 4)
    """
    given = {
        "variable_axes": variable_axes,
        "variable_broadcast": variable_broadcast,
        "variable_carry": variable_carry,
        "split_rngs": split_rngs,
        "in_axes": in_axes,
        "out_axes": out_axes,
        "length": length,
        "reverse": reverse,
        "unroll": unroll,
        "data_transform": data_transform,
        "metadata_params": metadata_params,
        "_split_transpose": _split_transpose,
        "check_constancy_invariants": check_constancy_invariants,
    }
    watch = {"progress": progress, "check_finite": check_finite}
    transform = _transform(target, {"remat": remat, "save": save, **watch})
    return cast("Target", lift_transform(transform, target, methods=methods, **given))
