"""Loops over variables that are shared, carried, or scanned over. `lift` and the integration of flax use them.

A group of variables is any pytree here. `lift` makes groups of collections, flax of scopes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .._avals import describe_leaf
from .._axes import spread_axes, static_axes
from .._body.conventions import LIFT, Convention
from .._checks.arguments import check_length, check_name, check_reverse, check_unroll, infer_length, resolve_axes
from .._errors import ArgumentError, BodyError, Fault, Row
from .._progress import shown_as
from .._transforms.once import OncePlan, WithOnce
from .._transforms.outputs import KeepOutputs, check_save
from .._transforms.program import Arguments, Call
from .._transforms.remat import Recompute
from .._tree import Prefix, Root, freeze_static, holds_static, leaves_with_path, named_roots
from .._types import Axes, FiniteCheck, ProgressLike, PyTree, RematLike, Save
from ..carries._registry import adopt
from .prepare import Prepared, body_of, present


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


CallStep = Callable[[Groups, Rngs, PyTree, tuple[Any, ...]], tuple[PyTree, PyTree, Groups]]
"""(variables, rngs, carry, args) to (carry, y, variables)."""

Again = Callable[[PyTree, bool], PyTree]


class _Whole(NamedTuple):
    """The arguments of which each step is given the whole.

    Attributes:
        structure: of all arguments.
        axes: for each leaf its axis, None for those that are whole.
        leaves: these.
    """

    structure: Any
    axes: tuple[int | None, ...]
    leaves: list[Any]

    @classmethod
    def part(cls, args: tuple[Any, ...], axes: Sequence[int | None]) -> tuple[_Whole, list[Any]]:
        """These, and the leaves of the others."""
        leaves, structure = jax.tree.flatten(args)
        whole = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is None]
        return cls(structure, tuple(axes), whole), [
            leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None
        ]

    @property
    def sliced_axes(self) -> list[int]:
        """The axes of the others."""
        return [axis for axis in self.axes if axis is not None]

    def among(self, sliced: Any) -> tuple[Any, ...]:
        """All arguments, with a step's slices of the others."""
        whole, others = iter(self.leaves), iter(sliced)
        leaves = [next(whole if axis is None else others) for axis in self.axes]
        return jax.tree.unflatten(self.structure, leaves)


@dataclass(frozen=True, eq=False)
class GroupStep:
    """A step of such a loop, in the terms of a scan. Looks like the user's function in messages.

    Attributes:
        call: what it calls.
        function: the user's function.
        whole: arguments that it closes over.
    """

    call: CallStep
    function: Any
    whole: _Whole | None = None

    @property
    def __wrapped__(self) -> Any:
        return self.function

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in LIFT.takes])

    def __call__(
        self, state: State, variables: tuple[PyTree, ...], rngs: Rngs, args: tuple[Any, ...], broadcast: PyTree
    ) -> tuple[State, GroupOutputs]:
        """Calls the user's function with one step's share of everything."""
        groups = Groups(broadcast, state.variables, variables)
        args = args if self.whole is None else self.whole.among(args)
        carry, y, groups = self.call(groups, rngs, state.carry, args)
        refuse_made(state.variables, groups.carried)
        return State(groups.carried, carry), GroupOutputs(y, groups.scanned, groups.broadcast)


def refuse_made(given: PyTree, returned: PyTree) -> None:
    """Refuses carried variables that a step makes: carries keep their structure."""
    before = {path for path, _ in leaves_with_path("", State(given, ()))}
    rows = [
        Row(path, "(not there)", describe_leaf(leaf), "")
        for path, leaf in leaves_with_path("", State(returned, ()))
        if path not in before
    ]
    if rows:
        raise Fault(
            BodyError,
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
        name: as for `treescan.scan`.
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
    name: str | None = None
    lowering: tuple[tuple[str, Any], ...] = ()
    progress: ProgressLike = None
    check_finite: FiniteCheck = False
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
    step: GroupStep, roles: Roles, groups: Groups, rngs: Rngs, carry: PyTree, args: tuple[Any, ...], again: Again | None
) -> tuple[WithOnce, Prepared]:
    adopted = adopt(State(groups.carried, carry))
    of_args = spread_axes("in_axes", roles.in_axes, args, "args", none=True)
    axes = StepInputs(roles.scanned_in, Rngs(None, 0), roles.in_axes)
    frozen_xs = freeze_static(StepInputs(groups.scanned, Rngs(None, None), args))
    length = infer_length(frozen_xs, check_length(roles.length), resolve_axes(axes, frozen_xs))
    keys = Rngs(rngs.shared, split_keys(rngs.split, length))
    given: Any = _freeze_numbers(args, of_args)
    if roles.closes_over:
        whole, given = _Whole.part(args, of_args)
        step, axes = dataclasses.replace(step, whole=whole), axes._replace(args=whole.sliced_axes)
    body, alive = body_of(step, roles.convention)
    frozen_init, frozen_xs = map(freeze_static, (adopted.init, StepInputs(groups.scanned, keys, given)))
    broadcast = freeze_static(groups.broadcast, scalars=True)
    out_axes, wanted = _outputs(roles)
    call = Call(
        body,
        roles.convention,
        length,
        reverse=check_reverse(roles.reverse),
        unroll=check_unroll(roles.unroll, length),
        frozen=any(map(holds_static, (frozen_init, frozen_xs, broadcast))),
        custom=adopted.custom,
        name=check_name(roles.name),
        lowering=roles.lowering,
    )
    once = OncePlan(wanted, None if again is None else lambda y, keys: again(y.broadcast, keys), _KEYS)
    over, save = resolve_axes(axes, frozen_xs), _saved(roles)
    prepared = Prepared(call, Arguments(frozen_init, frozen_xs, args=(broadcast,)), over, adopted, alive)
    program = WithOnce(
        call,
        once,
        prepared.over_axes,
        prepared.checking(roles.check_finite),
        present(Recompute.of(roles.remat), KeepOutputs.of(save), prepared.showing(shown_as(roles.progress, carry_of))),
        static_axes("out_axes", out_axes),
        check_save(save),
    )
    return program, prepared


def _freeze_numbers(args: tuple[Any, ...], axes: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments in which Python's numbers, of which each step is given the whole, are a part of the program."""
    leaves, structure = jax.tree.flatten(args)
    return jax.tree.unflatten(
        structure,
        [freeze_static(leaf, scalars=axis is None) for leaf, axis in zip(leaves, axes, strict=True)],
    )


def run_groups(
    step: GroupStep,
    roles: Roles,
    groups: Groups,
    rngs: Rngs,
    carry: PyTree,
    args: tuple[Any, ...],
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
    program, call = _prepare(step, roles, groups, rngs, carry, args, again)
    told = present(program.checks, *program.transforms)
    state, (stacked, once) = call.run_program(program, told, compiles=not roles.closes_over)
    y = jax.tree.map(_either, stacked.y, once.y, is_leaf=_is_none) if _has_once(roles) else stacked.y
    return state.carry, y, Groups(once.broadcast, state.variables, stacked.variables)


def broadcast_of(
    step: GroupStep, roles: Roles, groups: Groups, rngs: Rngs, carry: PyTree, args: tuple[Any, ...]
) -> PyTree:
    """What the steps make of the broadcast variables: as `run_groups` returns it, but no step is run."""
    program, call = _prepare(step, roles, groups, rngs, carry, args, None)
    return program.constant_outputs(call.given).broadcast


def _outputs(roles: Roles) -> tuple[PyTree, Prefix]:
    """The axes of outputs that are stacked, and which are not, but the same in every step."""
    axes = jax.tree.map(lambda axis: 0 if axis is None else axis, roles.out_axes, is_leaf=_is_none)
    once = jax.tree.map(_is_none, roles.out_axes, is_leaf=_is_none)
    return GroupOutputs(axes, roles.scanned_out, 0), Prefix.of(
        GroupOutputs(once, (False,) * len(roles.scanned_out), True)
    )


def _saved(roles: Roles) -> Save:
    """What is kept of all outputs."""
    if isinstance(roles.save, str) and roles.save == "all":
        return roles.save
    if _has_once(roles):
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `save` selects from stacked outputs, but `out_axes` has None for some, which are not "
            "stacked.",
            "Give each output an axis, or leave `save` out.",
        )
    return GroupOutputs(roles.save, ("all",) * len(roles.scanned_out), "all")


def _has_once(roles: Roles) -> bool:
    return any(map(_is_none, jax.tree.leaves(roles.out_axes, is_leaf=_is_none)))


def _is_none(node: Any) -> bool:
    return node is None


def _either(stacked: Any, once: Any) -> Any:
    return once if stacked is None else stacked


def split_keys(keys: PyTree, length: int) -> PyTree:
    """Keys for so many steps from each of the keys, which lead: as `flax.linen.scan` splits them."""
    return jax.tree.map(lambda key: jax.random.split(jax.random.clone(key), length), keys)
