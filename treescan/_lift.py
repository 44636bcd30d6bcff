"""`lift`: the vocabulary of `flax.linen.scan` for functions of plain collections of variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ._arguments import exact_int
from ._avals import describe_argument, describe_node
from ._errors import ArgumentError, ArgumentTypeError, BodyError, Fault, explain, verb
from ._filters import Filter, In, Out, check_filter, is_for
from ._groups import Groups, Rngs, Roles, Step, run_groups
from ._transforms.body import check_callable
from ._transforms.conventions import LIFT
from ._types import Axes, PyTree, RematLike, Save

Collections = dict[str, PyTree]
Lifted = Callable[..., tuple[tuple[PyTree, PyTree], Collections]]

BROADCAST, CARRY = "variable_broadcast", "variable_carry"


class Axis(NamedTuple):
    """A filter of `variable_axes`, and the axis of its collections on the way in and out; None: not that way."""

    filter: Any
    into: int | None
    out: int | None


def check_axes_of(variable_axes: Any) -> tuple[Axis, ...]:
    """The entries of `variable_axes`."""
    if not isinstance(variable_axes, Mapping):
        raise Fault(
            ArgumentTypeError,
            "{verb} over {body}: `variable_axes` maps names of collections to axes, got "
            f"{describe_argument(variable_axes)}.",
            'Write `variable_axes={"params": 0}`.',
        )
    return tuple(_axis(check_filter("variable_axes", name), axis) for name, axis in variable_axes.items())


def _axis(names: Any, axis: Any) -> Axis:
    number = exact_int(getattr(axis, "axis", axis))
    if number is None:
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: an axis of `variable_axes` is an int, got {describe_argument(axis)}.",
            "Or `treescan.In(axis)` or `treescan.Out(axis)`, for collections that go one way alone. What has no axis "
            "belongs in `variable_broadcast` or `variable_carry`.",
        )
    kind = type(axis).__name__  # flax has an In and an Out of its own
    return Axis(names, None if kind == "Out" else number, None if kind == "In" else number)


@dataclass(frozen=True, eq=False)
class _Collections:
    """Which role each collection has.

    Attributes:
        broadcast: the filter of those that all steps share.
        carried: that of those that are carried.
        axes: those that are scanned or stacked.
        split: filters of streams of keys, each with whether its keys are split.
    """

    broadcast: Any
    carried: Any
    axes: tuple[Axis, ...]
    split: tuple[tuple[Any, bool], ...]

    def group(self, variables: Mapping[str, PyTree], *, out: bool) -> tuple[Groups, list[str]]:
        """Collections by their roles, those that are scanned one tree for each axis; and those that have no role."""
        broadcast: Collections = {}
        carried: Collections = {}
        scanned: list[Collections] = [{} for axis in self.axes if self._axis(axis, out) is not None]
        left = []
        for name, tree in variables.items():
            if is_for(self.broadcast, name):
                broadcast[name] = tree
            elif is_for(self.carried, name):
                carried[name] = tree
            elif (place := self._place(name, out)) is not None:
                scanned[place][name] = tree
            elif out or self._place(name, out=True) is None:
                left.append(name)
        return Groups(broadcast, carried, tuple(scanned)), left

    @staticmethod
    def _axis(axis: Axis, out: bool) -> int | None:
        return axis.out if out else axis.into

    def _place(self, name: str, out: bool) -> int | None:
        axes = [axis for axis in self.axes if self._axis(axis, out) is not None]
        return next((place for place, axis in enumerate(axes) if is_for(axis.filter, name)), None)

    def numbers(self, *, out: bool) -> tuple[int, ...]:
        """The axis of each tree that is scanned, or stacked."""
        found = (self._axis(axis, out) for axis in self.axes)
        return tuple(number for number in found if number is not None)

    def rngs(self, rngs: Mapping[str, PyTree]) -> tuple[Rngs, list[str]]:
        """Keys by whether they are split, and the streams of which that is not said."""
        shared: Collections = {}
        split: Collections = {}
        left = []
        for name, key in rngs.items():
            found = next((flag for names, flag in self.split if is_for(names, name)), None)
            if found is None:
                left.append(name)
            else:
                (split if found else shared)[name] = key
        return Rngs(shared, split), left


def _ungroup(groups: Groups) -> Collections:
    merged: Collections = {**groups.broadcast, **groups.carried}
    for group in groups.scanned:
        merged.update(group)
    return merged


@dataclass(frozen=True, eq=False)
class _Call:
    """The user's function, in the terms of groups."""

    function: Callable[..., Any]
    collections: _Collections
    data_transform: Callable[..., Any] | None

    def __call__(
        self, groups: Groups, rngs: Rngs, carry: PyTree, args: tuple[Any, ...]
    ) -> tuple[PyTree, PyTree, Groups]:
        variables, keys = _ungroup(groups), {**rngs.shared, **rngs.split}
        if self.data_transform is not None:
            variables, keys = self.data_transform(variables, keys)
        carry, y, updates = _parts(self.function(variables, keys, carry, *args))
        found, left = self.collections.group(updates, out=True)
        if left:
            raise Fault(
                BodyError,
                f"{{body}} returned collections that have no role: {_listed(left)}.",
                "Name each in `variable_axes`, `variable_broadcast` or `variable_carry`, or do not return it.",
            )
        return carry, y, found._replace(carried={**groups.carried, **found.carried})


def _parts(returned: Any) -> tuple[PyTree, PyTree, Mapping[str, PyTree]]:
    match returned:
        case ((carry, y), Mapping() as updates):
            return carry, y, updates
        case _:
            raise Fault(
                BodyError,
                f"{{body}} must return a pair ((carry, y), variables), but returned {describe_node(returned)}.",
                "The second item is a dict of the collections that changed, `{}` if none did: what "
                "`module.apply(..., mutable=[...])` of flax returns.",
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


@verb
def lift(
    fn: Callable[..., Any],
    *,
    variable_axes: Mapping[Any, int | In | Out] | None = None,
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    split_rngs: Mapping[Any, bool] | None = None,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    data_transform: Callable[..., Any] | None = None,
    metadata_fn: Callable[[PyTree, int, bool], PyTree] | None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    name: str | None = None,
) -> Lifted:
    """A function of one step, with variables in named collections, as a function of all steps.

    The vocabulary is that of `flax.linen.scan`, for plain dicts and without any framework. Each collection has one role:
    it is *scanned* over (each step has its slice, and what steps return is stacked), *carried* from step to step, or
    *broadcast* (all steps share it). The first role that names it counts, in the order broadcast, carry, axes.

        def step(variables, rngs, carry, *args):
            ...
            return (carry, y), {"cache": cache}  # the collections that changed

        run = treescan.lift(step, variable_broadcast="params", variable_axes={"cache": 0}, split_rngs={"dropout": True})
        (carry, ys), updated = run(variables, rngs, carry, *args)

    Args:
        fn: `fn(variables, rngs, carry, *args) -> ((carry, y), updates)`. It is traced once.
        variable_axes: for collections, the axis that they are scanned over and stacked along. `In(axis)` for those that
            are only read, `Out(axis)` for those that are only returned.
        variable_broadcast: the collections that all steps share. A step may make or change them, but from constants,
            shared keys and other broadcast values alone, which is proven from its trace; they are computed once.
        variable_carry: the collections that are carried. They exist before the loop, with the types that they keep.
        split_rngs: for streams of keys, whether each step has a key of its own, `jax.random.split(key, T)[i]`, or all
            the same. Every stream that is given must be named.
        in_axes: a prefix of args: the axis that each is scanned over, None for what every step is given whole.
        out_axes: a prefix of y: where its stacked axis goes, None for what is the same in every step and returned once.
        length: the number of steps T. Not needed where anything is scanned over.
        reverse: whether the last step comes first.
        unroll: as for `treescan.scan`.
        data_transform: `data_transform(variables, rngs) -> (variables, rngs)`, called within each step before `fn`: the
            place for sharding constraints.
        metadata_fn: `metadata_fn(collection, axis, added) -> collection`, for metadata that names axes: called before the
            loop on each scanned collection, `added` False, and on each stacked one after it, `added` True.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`: what is kept of y.
        name: as for `treescan.scan`.

    Returns:
        `run(variables, rngs, carry, *args) -> ((carry, ys), updates)`. The updates hold the collections that `fn`
        returned: stacked, carried to the end, or computed once.

    Raises:
        ArgumentError: for collections, streams or axes that do not fit.
        ArgumentTypeError: for filters and axes that are none.
        BodyError: if `fn` returns something else, collections without a role, or broadcast values that vary.
        CarryError: if the carry or a carried collection changes its structure or types.
    """
    try:
        check_callable(fn, LIFT.call)
        collections = _Collections(
            check_filter(BROADCAST, variable_broadcast),
            check_filter(CARRY, variable_carry),
            check_axes_of({} if variable_axes is None else variable_axes),
            tuple((check_filter("split_rngs", names), bool(on)) for names, on in (split_rngs or {}).items()),
        )
        roles = Roles(
            collections.numbers(out=False), collections.numbers(out=True), in_axes, out_axes, length, reverse, unroll,
            remat, save, name,
        )  # fmt: skip
        step = Step(_Call(fn, collections, data_transform), fn)
    except Exception as error:
        failure = explain(error, "lift", fn)
    else:
        return functools.partial(_run, step, collections, roles, metadata_fn)
    raise failure


@verb
def _run(
    step: Step,
    collections: _Collections,
    roles: Roles,
    metadata_fn: Callable[[PyTree, int, bool], PyTree] | None,
    variables: Mapping[str, PyTree],
    rngs: Mapping[str, PyTree] | None,
    carry: PyTree,
    *args: Any,
) -> tuple[tuple[PyTree, PyTree], Collections]:
    try:
        groups, left = collections.group(_checked("variables", variables), out=False)
        keys, unsaid = collections.rngs(_checked("rngs", rngs or {}))
        _refuse_left("variables", left, "`variable_axes`, `variable_broadcast` or `variable_carry`")
        _refuse_left("rngs", unsaid, "`split_rngs`, whether each step has its own key or all the same")
        scanned = _with_metadata(groups.scanned, roles.scanned_in, metadata_fn, added=False)
        carry, ys, found = run_groups(step, roles, groups._replace(scanned=scanned), keys, carry, args)
        stacked = _with_metadata(found.scanned, roles.scanned_out, metadata_fn, added=True)
        updates = _ungroup(found._replace(scanned=stacked))
    except Exception as error:
        failure = explain(error, "lift", step.function, carry)
    else:
        return (carry, ys), updates
    raise failure


def _with_metadata(groups: Any, axes: tuple[int, ...], metadata_fn: Any, *, added: bool) -> tuple[Collections, ...]:
    if metadata_fn is None:
        return tuple(groups)
    return tuple(
        {name: metadata_fn(tree, axis, added) for name, tree in group.items()}
        for group, axis in zip(groups, axes, strict=True)
    )


def _checked(what: str, given: Any) -> Mapping[str, PyTree]:
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return given
    raise Fault(
        ArgumentTypeError,
        f"{{verb}} over {{body}}: `{what}` is a dict by name, got {describe_argument(given)}.",
        "What `lift` returns is called as `run(variables, rngs, carry, *args)`, with `{}` where there are none.",
    )


def _refuse_left(what: str, left: list[str], where: str) -> None:
    if left:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: {_listed(left)} in `{what}` has no role.",
            f"Name it in {where}, or leave it out of `{what}`.",
        )
