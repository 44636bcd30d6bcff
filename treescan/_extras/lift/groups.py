"""Loops over variables that are shared, carried, or scanned over. `lift` and the integration of flax use them.

A group of variables is any pytree here. `lift` makes groups of collections, flax of scopes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax

from ..._arguments import check_length, infer_length, resolve_axes
from ..._avals import PyTree, describe_argument, describe_leaf, describe_node, exact_int
from ..._body.signature import LIFT, Convention
from ..._body.traced import rename
from ..._errors import BodyFault, Misuse, Row, TypeMisuse, expect, named_fields
from ..._options.progress.meters import shown_as
from ..._outputs.outputs import KeepOutputs, MoveOutputs, check_save
from ..._transforms.axes import spread_axes, static_axes
from ..._transforms.transform import Transform
from ..._tree import Part, Prefix, Root, freeze_static, holds_static, leaves_with_path, named_roots
from ..._types import Axes, ProgressLike, RematLike, Save
from ..._verbs.options import checking, recomputing, recording, showing
from ..._verbs.prepare import Prepared, prepare, refuse_report
from ..._verbs.progress import silent
from .once import ONCE, ComputeOnce

Filter: TypeAlias = bool | str | Iterable[str] | Callable[[str], bool]
"""Of names: all or none of them, one, several, or those for which a function is true."""

NameFilter: TypeAlias = Callable[[str], bool]


@named_fields
@dataclass(frozen=True)
class In:
    """An axis along which a collection is scanned, but not returned.

    Attributes:
        axis: the axis.
    """

    axis: int


@named_fields
@dataclass(frozen=True)
class Out:
    """An axis along which a collection is stacked that the steps return, but do not receive.

    Attributes:
        axis: the axis.
    """

    axis: int


def check_filter(option: str, given: Any) -> NameFilter:
    """A filter of these or of flax, as a function of a name."""
    if callable(given):
        return lambda name: bool(given(name))
    if isinstance(given, bool):
        return lambda name: given
    if isinstance(given, str):
        return lambda name: name == given
    if hasattr(given, "deny"):
        denied = check_filter(option, given.deny)
        return lambda name: not denied(name)
    names = tuple(given) if isinstance(given, Iterable) else (None,)
    cure = (
        "Give a name, a set of names, True for all or False for none, or a function of the name, for example "
        '`lambda name: name != "state"`.'
    )
    expect(all(isinstance(name, str) for name in names), option, "names of collections", given, cure)
    return lambda name: name in names


class Groups(NamedTuple):
    """Variables, by what becomes of them.

    Attributes:
        broadcast: what all steps share.
        carried: what one step hands on to the next.
        scanned: trees of which each step has a slice, each along an axis of its own.
    """

    broadcast: PyTree
    carried: PyTree
    scanned: tuple[PyTree, ...]


class Rngs(NamedTuple):
    """Trees of PRNG keys.

    Attributes:
        shared: every step is given the same.
        split: every step is given its own, split from these.
    """

    shared: PyTree
    split: PyTree


_KEYS_OF_STEP = Root("rngs", numbered=True)
named_roots(Rngs, shared=_KEYS_OF_STEP, split=_KEYS_OF_STEP)


class State(NamedTuple):
    """What is carried."""

    variables: PyTree
    carry: PyTree


named_roots(State, variables=Root("variables", numbered=True), carry=Root("carry"))


class GroupOutputs(NamedTuple):
    """What a step returns beside what is carried."""

    y: PyTree
    variables: tuple[PyTree, ...]
    broadcast: PyTree


_SCANNED = Root("variables", numbered=True, axes="variable_axes")
named_roots(GroupOutputs, y=Root("y"), variables=_SCANNED, broadcast=Root("variables", numbered=True))


CallStep = Callable[[Groups, Rngs, PyTree, tuple[PyTree, ...]], tuple[PyTree, PyTree, Groups]]
"""(variables, rngs, carry, args) to (carry, y, variables)."""

Again = Callable[[PyTree, bool], PyTree]


@dataclass(frozen=True, eq=False)
class GroupStep:
    """A step of such a loop, in the terms of a scan. Looks like the user's function in messages.

    Attributes:
        call: what it calls.
        function: the user's function.
        whole: which arguments it closes over, and these.
    """

    call: CallStep
    function: Callable[..., object]
    whole: tuple[Part, list[Any]] | None = None

    @property
    def __wrapped__(self) -> Callable[..., object]:
        return self.function

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in LIFT.takes])

    def __call__(
        self, state: State, variables: tuple[PyTree, ...], rngs: Rngs, args: tuple[PyTree, ...], broadcast: PyTree
    ) -> tuple[State, GroupOutputs]:
        """Calls the user's function with one step's share of everything."""
        groups = Groups(broadcast, state.variables, variables)
        if self.whole is not None:
            part, leaves = self.whole
            args = part.join(leaves, list(args))
        try:
            carry, y, groups = self.call(groups, rngs, state.carry, args)
        except Exception as error:
            given = (state, StepInputs(variables, rngs, args), GroupOutputs(None, (), broadcast))
            rename(error, (("", tree) for tree in given))
            raise
        refuse_made(state.variables, groups.carried)
        return State(groups.carried, carry), GroupOutputs(y, groups.scanned, groups.broadcast)


def refuse_made(given: PyTree, returned: PyTree) -> None:
    """Refuses carried variables that a step makes: carries keep their structure."""
    before, after = (dict(leaves_with_path("", State(variables, ()))) for variables in (given, returned))
    rows = [Row(path, "(not there)", describe_leaf(leaf)) for path, leaf in after.items() if path not in before]
    if rows:
        raise BodyFault(
            "{body} created variables in a collection that is carried. A carry must exist before the first step.",
            "Create them before the loop: initialize the module of one step on its own. Or give the collection an "
            "axis, or broadcast it.",
            header=("leaf", "before", "after"),
            rows=rows,
        )


def carry_of(state: Any) -> PyTree:
    """The user's carry, for `show` of a `Progress`."""
    return state.carry


@dataclass(frozen=True)
class Roles:
    """How such a loop is run.

    Attributes:
        scanned_in: the axis of each scanned tree.
        scanned_out: the axis along which each of those that are returned is stacked.
        in_axes: a prefix of args: the axis of each, None for what is given whole to every step.
        out_axes: a prefix of y: where the stacked axis goes, None for what is the same in every step.
        length: the number of steps, None where the arrays say it.
        reverse: whether the last step comes first.
        unroll: as for `treescan.scan`.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`.
        lowering: further keyword arguments of `jax.lax.scan`.
        progress: as for `treescan.scan`.
        check_finite: as for `treescan.scan`.
        closes_over: whether steps are given what is given whole as it came, concrete where that is, in eager calls too.
            These are then not compiled as a whole. Without it Python's numbers come as they are, and nothing else.
        convention: how messages name the verb.
    """

    scanned_in: tuple[int, ...]
    scanned_out: tuple[int, ...]
    in_axes: Axes = 0
    out_axes: Axes = 0
    length: int | None = None
    reverse: bool = False
    unroll: int | bool = 1
    remat: RematLike | None = None
    save: Save = "all"
    lowering: tuple[tuple[str, Any], ...] = ()
    progress: ProgressLike = None
    check_finite: bool = False
    closes_over: bool = False
    convention: Convention = LIFT


class StepInputs(NamedTuple):
    """What one step receives beside what is carried."""

    variables: PyTree
    rngs: Rngs
    args: PyTree


named_roots(StepInputs, variables=_SCANNED, rngs=Root("rngs"), args=Root("args"))
_KEYS = Prefix.of(StepInputs(False, Rngs(True, True), False))


def _prepare(
    step: GroupStep,
    roles: Roles,
    groups: Groups,
    rngs: Rngs,
    carry: PyTree,
    args: tuple[PyTree, ...],
    again: Again | None,
) -> tuple[Prepared, ComputeOnce, tuple[Transform | None, ...]]:
    of_args = spread_axes("in_axes", roles.in_axes, args, "args", none=True)
    axes = StepInputs(roles.scanned_in, Rngs(None, 0), roles.in_axes)
    inputs = freeze_static(StepInputs(groups.scanned, Rngs(None, None), args))
    length = infer_length(inputs, check_length(roles.length), resolve_axes(axes, inputs))
    keys = Rngs(rngs.shared, split_keys(rngs.split, length))
    leaves, structure = jax.tree.flatten(args)
    numbers = [freeze_static(leaf, scalars=axis is None) for leaf, axis in zip(leaves, of_args, strict=True)]
    given: PyTree = jax.tree.unflatten(structure, numbers)  # a number that all steps share is a part of the program
    if roles.closes_over:
        part = Part(structure, tuple(axis is None for axis in of_args))
        whole, given = part.split(args)
        step = dataclasses.replace(step, whole=(part, whole))
        axes = axes._replace(args=[axis for axis in of_args if axis is not None])
    prepared = prepare(
        roles.convention,
        step,
        State(groups.carried, carry),
        StepInputs(groups.scanned, keys, given),
        length,
        reverse=roles.reverse,
        unroll=roles.unroll,
        in_axes=axes,
        lowering=roles.lowering,
    )
    broadcast = freeze_static(groups.broadcast, scalars=True)
    call = dataclasses.replace(prepared.call, frozen=prepared.call.frozen or holds_static((given, broadcast)))
    prepared = dataclasses.replace(prepared, call=call, given=prepared.given._replace(args=(broadcast,)))
    stacked = jax.tree.map(lambda axis: 0 if axis is None else axis, roles.out_axes, is_leaf=_is_none)
    is_once = jax.tree.map(_is_none, roles.out_axes, is_leaf=_is_none)
    wanted = Prefix.of(GroupOutputs(is_once, (False,) * len(roles.scanned_out), True))
    save = _saved(roles)
    refuse_report(roles.check_finite)
    checks = checking(roles.check_finite, prepared)
    reading = None if again is None else lambda y, keys: again(y.broadcast, keys)
    once = ComputeOnce(wanted, prepared.over_axes, checks is not None, reading, _KEYS)
    transforms = (
        checks,
        MoveOutputs(static_axes("out_axes", GroupOutputs(stacked, roles.scanned_out, 0)), check_save(save)),
        recomputing(roles.remat),
        recording(save),
        KeepOutputs.of(save),
        showing(shown_as(roles.progress, carry_of), prepared),
    )
    return prepared, once, transforms


def run_groups(
    step: GroupStep,
    roles: Roles,
    groups: Groups,
    rngs: Rngs,
    carry: PyTree,
    args: tuple[PyTree, ...],
    again: Again | None = None,
) -> tuple[PyTree, PyTree, Groups]:
    """Runs the loop.

    Args:
        step: the step.
        roles: how it is run.
        groups: the variables.
        rngs: the keys.
        carry: what is carried beside variables.
        args: what is scanned over, or given whole.
        again: given the broadcast variables after the trace, and whether the steps read keys for anything else: what
            these are to be when the body is traced again, or None if it is not.

    Returns:
        The carry, ys, and the variables that the steps returned: stacked where they have an axis.
    """
    call, computing, transforms = _prepare(step, roles, groups, rngs, carry, args, again)
    result = call.run(computing, *transforms, compiles=not roles.closes_over)
    state, stacked = result[:2]
    once = ONCE.read(result)
    y = jax.tree.map(lambda one, of_all: of_all if one is None else one, stacked.y, once.y, is_leaf=_is_none)
    return state.carry, y, Groups(once.broadcast, state.variables, stacked.variables)


def broadcast_of(
    step: GroupStep, roles: Roles, groups: Groups, rngs: Rngs, carry: PyTree, args: tuple[PyTree, ...]
) -> PyTree:
    """What the steps make of the broadcast variables: as `run_groups` returns it, but no step is run."""
    call, once, _ = _prepare(step, roles, groups, rngs, carry, args, None)
    with silent():
        return once.part(call.call.lay(call.given)).once.broadcast


def _saved(roles: Roles) -> Save:
    """What is kept of all outputs."""
    if isinstance(roles.save, str) and roles.save == "all":
        return roles.save
    if None in jax.tree.leaves(roles.out_axes, is_leaf=_is_none):
        raise Misuse(
            "{call}: `save` selects from stacked outputs, but `out_axes` has None for some, which are not stacked.",
            "Give each output an axis, or leave `save` out.",
        )
    return GroupOutputs(roles.save, ("all",) * len(roles.scanned_out), "all")


def _is_none(node: object) -> bool:
    return node is None


def split_keys(keys: PyTree, length: int) -> PyTree:
    """Keys for so many steps from each of the keys, which lead: as `flax.linen.scan` splits them."""
    return jax.tree.map(lambda key: jax.random.split(jax.random.clone(key), length), keys)


Collections: TypeAlias = dict[str, PyTree]


class Axis(NamedTuple):
    """A filter of `variable_axes`, and the axis of its collections on the way in and out; None: not that way."""

    filter: NameFilter
    into: int | None
    out: int | None


def check_axes_of(variable_axes: Any) -> tuple[Axis, ...]:
    """The entries of `variable_axes`."""
    cure = 'Write `variable_axes={"params": 0}`.'
    kind = "a dict from names of collections to axes"
    expect(isinstance(variable_axes, Mapping), "variable_axes", kind, variable_axes, cure)
    axes: list[Axis] = []
    for names, axis in variable_axes.items():
        number, names = exact_int(getattr(axis, "axis", axis)), check_filter("variable_axes", names)
        if number is None:
            raise TypeMisuse(
                f"{{call}}: an axis of `variable_axes` must be an int, got {describe_argument(axis)}.",
                "Or use `treescan.lifting.In(axis)` for a collection that is only read, and "
                "`treescan.lifting.Out(axis)` for one that is only written. Collections without an axis belong in "
                "`variable_broadcast` or `variable_carry`.",
            )
        way = type(axis).__name__  # flax has an In and an Out of its own
        axes.append(Axis(names, None if way == "Out" else number, None if way == "In" else number))
    return tuple(axes)


def check_split(split_rngs: Any) -> tuple[tuple[NameFilter, bool], ...]:
    """The entries of `split_rngs`."""
    cure = 'Write `split_rngs={"dropout": True}`: each step has its own key.'
    kind = "a dict from names of streams to True or False"
    wrong = [split_rngs]
    if isinstance(split_rngs, Mapping):
        wrong = [on for on in split_rngs.values() if not isinstance(on, bool)]
    expect(not wrong, "split_rngs", kind, next(iter(wrong), None), cure)
    return tuple((check_filter("split_rngs", names), on) for names, on in split_rngs.items())


def check_hook(option: str, hook: object) -> None:
    """Refuses hooks that are not functions."""
    cure = (
        "`data_transform(variables, rngs)` returns both, and `metadata_fn(collection, axis, added)` returns a "
        "collection."
    )
    expect(hook is None or callable(hook), option, "a function", hook, cure)


def transformed(data_transform: Callable[..., object] | None, variables: PyTree, rngs: PyTree) -> tuple[PyTree, PyTree]:
    """Variables and keys as a step is to see them."""
    if data_transform is None:
        return variables, rngs
    match data_transform(variables, rngs):
        case (variables, rngs):
            return variables, rngs
        case other:
            raise BodyFault(
                f"`data_transform` of {{body}} must return a pair (variables, rngs), but returned "
                f"{describe_node(other)}.",
                "Return both, changed or not: `return variables, rngs`.",
            )


@dataclass(frozen=True, eq=False)
class CollectionRoles:
    """Which role each collection has, and whether the keys of a stream are split.

    Attributes:
        broadcast: the filter of those that all steps share.
        carried: that of those that are carried.
        axes: those that are scanned or stacked.
        split: filters of streams of keys, each with whether its keys are split.
    """

    broadcast: NameFilter
    carried: NameFilter
    axes: tuple[Axis, ...]
    split: tuple[tuple[NameFilter, bool], ...]

    def group(self, variables: Mapping[str, PyTree], *, out: bool) -> tuple[Groups, list[str]]:
        """Collections by their roles, those that are scanned one tree for each axis; and those that have no role."""
        broadcast, carried, left = Collections(), Collections(), list[str]()
        scanned: list[Collections] = [{} for _ in self.numbers(out=out)]
        for name, tree in variables.items():
            if self.broadcast(name):
                broadcast[name] = tree
            elif self.carried(name):
                carried[name] = tree
            elif (place := self._place(name, out)) is not None:
                scanned[place][name] = tree
            elif out or self._place(name, out=True) is None:
                left.append(name)
        return Groups(broadcast, carried, tuple(scanned)), left

    def is_only_read(self, name: str) -> bool:
        """Whether a collection goes in, but not out."""
        return self._place(name, out=False) is not None and self._place(name, out=True) is None

    def _place(self, name: str, out: bool) -> int | None:
        """Which of the trees that are stacked, or scanned, a collection is in."""
        filters = [axis.filter for axis in self.axes if (axis.out if out else axis.into) is not None]
        return next((place for place, names in enumerate(filters) if names(name)), None)

    def numbers(self, *, out: bool) -> tuple[int, ...]:
        """The axis of each tree that is scanned, or stacked."""
        numbers = [axis.out if out else axis.into for axis in self.axes]
        return tuple(number for number in numbers if number is not None)

    def rngs(self, rngs: Mapping[str, PyTree]) -> tuple[Rngs, list[str]]:
        """Keys by whether they are split, and the streams of which that is not said."""
        found = {name: next((flag for names, flag in self.split if names(name)), None) for name in rngs}
        shared, split = ({name: rngs[name] for name, flag in found.items() if flag is on} for on in (False, True))
        return Rngs(shared, split), [name for name, flag in found.items() if flag is None]


def merged(groups: Groups) -> Collections:
    """The collections of all roles."""
    return {name: tree for group in (groups.broadcast, groups.carried, *groups.scanned) for name, tree in group.items()}


def quoted(names: Iterable[str]) -> str:
    """Names, for a list in a message."""
    return ", ".join(repr(name) for name in names)
