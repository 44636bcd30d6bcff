"""What a description says of a call: facts of its bodies, and what is worth changing, as a table of codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from .._avals import bytes_of, describe_leaf, is_sharded, is_weak
from .._errors import Fault, Misuse, TreescanError, describe_body
from .._loop.sizes import chunk_size
from .._trace.blame import place_of
from .._trace.cost import count_operations
from .._trace.dependence import dependent, readers, unread_outputs, written_in_place
from .._trace.equations import PRODUCTS
from .._trace.hoist import is_rewriting, is_smooth
from .._transforms.budget import describe_bytes
from .._transforms.call import Call
from .._transforms.checkpoint import levels_in
from .._transforms.outputs import ALL, LAST, KeepOutputs
from .._transforms.products import ELEMENTWISE
from .._transforms.program import Program, Taken
from .._transforms.remat import AUTO, Recompute
from .._transforms.rows.fill import KeepRows
from .._transforms.rows.over_rows import OverRows
from .._transforms.rows.skip import Skip
from .._transforms.until.end_early import EndEarly
from .._tree import split
from .._types import Remat
from .description import Description, Finding, Leaf, Plan
from .plans import (
    Named,
    TracedBody,
    of_types,
    other_plans,
    plan_of,
    saved_by_steps,
    sharding_of,
    spec_of,
    trace_bodies,
)

_T = TypeVar("_T")

Said = tuple[str, str]
"""What was found, and what to do about it."""


@dataclass(frozen=True, eq=False)
class Case:
    """A call of a verb.

    Attributes:
        verb: its name.
        unit: what a step is called there.
        program: what the verb would run.
        bodies: its bodies.
    """

    verb: str
    unit: str
    program: Program
    bodies: list[TracedBody]

    @property
    def calls(self) -> tuple[Call, ...]:
        """For each body how it is called."""
        return self.program.call.each

    @property
    def compact(self) -> bool:
        """Whether rows are brought together, so that a body is given fewer than there are."""
        rows = self.transform(OverRows) or self.transform(EndEarly)
        return rows is not None and bool(rows.compact)

    @property
    def ends_early(self) -> bool:
        """Whether the number of steps is known at run time alone."""
        return self.transform(EndEarly) is not None

    def transform(self, kind: type[_T]) -> _T | None:
        """The transform of a kind, if the call has one."""
        return next((each for each in self.program.transforms if isinstance(each, kind)), None)


def constants_of(body: TracedBody) -> Iterator[tuple[Named, Any, set[str]]]:
    """The values that all steps of a body share: each with its variable, and the operations that read it."""
    for constant, variable in zip(body.constants, body.closed_vars, strict=True):
        yield constant, variable, readers(body.jaxpr, variable)


def is_weight(reading: set[str]) -> bool:
    """Whether what reads a constant is a product."""
    return not reading.isdisjoint(PRODUCTS)


def gathered_weights(case: Case) -> Iterator[Said]:
    """TS010: weights that are sharded over the same mesh axis as their operands, so each device needs all of them."""
    layers = case.unit != "step"
    for body in case.bodies:
        used = _axes_of(body.carry if layers else [*body.carry, *body.x])
        weights = body.x if layers else [each for each, _, reading in constants_of(body) if is_weight(reading)]
        paths = [leaf.path for leaf in weights if used & _axes_of([leaf])]
        if paths and used:
            yield (
                f"{', '.join(paths[:3])}{' and others' if len(paths) > 3 else ''}: sharded over "
                f"{', '.join(f'`{axis}`' for axis in sorted(used))}, like the carry, so every device gathers the whole "
                f"arrays {'in each layer' if layers else 'for the loop'}.",
                "Replicate them on all devices, if they fit, or shard them over another mesh axis.",
            )


def _axes_of(leaves: Iterable[Named]) -> set[str]:
    """The mesh axes over which any of these is spread."""
    parts = [part for leaf in leaves for part in spec_of(leaf.value) if part is not None]
    return {axis for part in parts for axis in (part if isinstance(part, tuple) else (part,))}


LARGE = 4096
"""The smallest constant, in bytes, that is reported."""

MANY = 16
"""The number of scalar leaves from which it pays to combine them into one array."""


def unchanged_leaves(case: Case) -> Iterator[Said]:
    """TS001: leaves of the carry that no step changes, except leaves with rows, which belong there."""
    fixed = [all(flags) for flags in zip(*(body.fixed for body in case.bodies), strict=True)]
    leaves, _ = split(fixed, case.bodies[0].carry)
    batch = case.bodies[0].batch  # a leaf of a loop over rows may have an entry for each of them
    paths = [leaf.path for leaf in leaves if not batch or jax.typeof(leaf.value).shape[: len(batch)] != batch]
    if paths and not any(call.custom for call in case.calls):
        instead = "Pass it in `args`." if case.unit != "step" else "Let the body close over it."
        yield (f"{_listed(paths)}: no {case.unit} changes it.", f"{instead} The carry is for values that change.")


def large_constants(case: Case) -> Iterator[Said]:
    """TS004: constants as large as the carry which each step reads, whole or in part, but not for a product."""
    for body, call in zip(case.bodies, case.calls, strict=True):
        carry = sum(bytes_of(jax.typeof(leaf.value)) for leaf in split(body.fixed, body.carry)[1])
        for constant, variable, reading in constants_of(body):
            size, cure = bytes_of(variable.aval), None
            if reading and reading <= ELEMENTWISE:
                cure = (
                    "Apply `jax.lax.stop_gradient` to it if it is not trained, or combine it with the result of the "
                    "loop."
                )
            elif reading and reading <= _PARTS and variable.aval.shape[:1] == (call.length,):
                cure = "If each step reads its own part, pass it through xs."
            if cure is not None and size >= max(carry, LARGE) and is_smooth(constant.value):
                yield (
                    f"{constant.path}: {variable.aval}, {describe_bytes(size)}, is as large as the carry, "
                    f"{describe_bytes(carry)}. Each {case.unit} of the gradient adds to an array of this size.",
                    cure,
                )


_PARTS = frozenset({"dynamic_slice", "gather"})


def many_scalars(case: Case) -> Iterator[Said]:
    """TS005: many leaves of a single number."""
    scalars = dict[str, None]()
    for body in case.bodies:
        named = zip([*body.constants, *body.x], [*body.closed_vars, *body.x_vars], strict=True)
        pairs = [(leaf, variable.aval.shape) for leaf, variable in named]
        pairs += [(leaf, jax.typeof(leaf.value).shape) for leaf in body.carry]
        scalars |= {leaf.path: None for leaf, shape in pairs if shape == () and is_smooth(leaf.value)}
    if len(scalars) >= MANY:
        yield (
            f"{len(scalars)} leaves are single numbers, for example {_listed(list(scalars))}. Each is a separate "
            "array, which separate operations read and write.",
            "Combine them into one array.",
        )


def promoted_leaves(case: Case) -> Iterator[Said]:
    """TS006: weakly typed leaves that the body promotes."""
    for body in case.bodies:
        settled = body.hoisted.settled[len(body.hoisted.fixed) - len(body.carry) :]
        for leaf, after in zip(body.carry, settled, strict=True):
            dtype = jax.typeof(after).dtype
            if is_weak(leaf.value) and jax.typeof(leaf.value).dtype != dtype:
                yield (
                    f"{leaf.path}: {describe_leaf(leaf.value)} becomes {describe_leaf(after).lstrip('~')} in the "
                    f"first {case.unit}, so the body is traced twice.",
                    f"Start from an array: `jnp.asarray({leaf.path}, jnp.{dtype})`.",
                )


def _listed(paths: list[str]) -> str:
    return ", ".join(paths) if len(paths) <= 3 else f"{', '.join(paths[:3])} and {len(paths) - 3} more"


FEW_STEPS, FEW_OPERATIONS = 8, 10_000
"""Loops of so many steps, or fewer, are better unrolled where a step takes so few operations."""


def rows_closed_over(case: Case) -> Iterator[Said]:
    """TS007: an array with rows that the body closes over, under `compact`."""
    for body in case.bodies if case.compact else ():
        rows = body.batch[0]
        for constant, variable, reading in constants_of(body):
            if variable.aval.shape[:1] == (rows,) and reading and not is_weight(reading):
                yield (
                    f"{constant.path}: the body closes over {variable.aval}, which seems to have an entry for each "
                    f"of the {rows} rows. `compact` calls the body with fewer rows, but cannot select the rows of "
                    "this array.",
                    "Pass it through the carry, or through xs with None in `in_axes` and a tree as `x_axes`.",
                )


def separate_products(case: Case) -> Iterator[Said]:
    """TS008: products with weights that the gradient takes in each step, where chunks would take them together."""
    recompute = case.transform(Recompute)
    chunks = case.transform(Skip) is not None or case.ends_early
    for body in case.bodies if chunks or (recompute is not None and recompute.remat == AUTO) else ():
        weights = [constant.path for constant, _, reading in constants_of(body) if is_weight(reading)]
        reason = _why_separate(case, body) if weights else None
        if reason is not None:
            yield (
                f"the products with {', '.join(weights)} are computed in each {case.unit}, not once per chunk. The "
                f"reason: {reason[0]}.",
                reason[1],
            )


def _why_separate(case: Case, body: TracedBody) -> tuple[str, str] | None:
    skip, recompute, trace = case.transform(Skip), case.transform(Recompute), body.hoisted
    remat = None if recompute is None else recompute.remat
    saves_steps = isinstance(remat, Remat) and getattr(remat.policy, "__name__", None) == "everything_saveable"
    save = getattr(case.transform(KeepRows) or case.transform(KeepOutputs), "save", None)
    reasons = [
        (not is_rewriting(), "rewriting is off", "Leave `rewriting(False)` and `TREESCAN_REWRITE=0` out."),
        (trace.effects, "the body has a side effect", "Leave the callback out when training."),
        (
            trace.reverse_rule,
            "the body calls a function with a `jax.custom_vjp`",
            "Give it a `jax.custom_jvp` instead, if possible.",
        ),
        (skip is not None and skip.chunk == 0, "`chunk=0`", "Leave `chunk` out."),
        (
            isinstance(remat, Remat) and levels_in(remat) >= 1 and remat.budget is None and not saves_steps,
            "`remat` recomputes each of them",
            'Use `Remat("everything_saveable", levels=2)`, or leave `remat` out, if there is enough memory.',
        ),
        (
            save is not None and any(_cuts_chunks(case, keep) for keep in save.leaves),
            "`save` keeps outputs within a chunk",
            "Keep all of them, if there is enough memory, or fewer.",
        ),
        (
            all(is_sharded(var.aval) for _, var, reading in constants_of(body) if is_weight(reading)),
            "the weights are sharded over an explicit mesh",
            "Run the loop within `jax.shard_map`.",
        ),
    ]
    return next(((why, cure) for holds, why, cure in reasons if holds), None)


def _cuts_chunks(case: Case, keep: int | None) -> bool:
    """Whether an output is kept so often that the loop is cut there, into parts too short for one product each."""
    skip, length = case.transform(Skip), case.calls[0].length
    size = (None if skip is None else skip.chunk) or chunk_size(length)
    return keep not in (ALL, None) and (case.ends_early or (keep != LAST and 2 * keep <= size))


def short_loop(case: Case) -> Iterator[Said]:
    """TS009: a loop that is too short for its overhead."""
    steps, unroll = case.calls[-1].length, case.calls[-1].unroll
    unrolled = unroll is True or unroll == 0 or unroll >= steps
    operations = sum(count_operations(body.jaxpr) for body in case.bodies)
    if 0 < steps <= FEW_STEPS and operations < FEW_OPERATIONS and not (unrolled or case.ends_early):
        yield (
            f"{steps} {case.unit}s of about {operations:,} operations each: the loop itself takes longer than "
            f"its {case.unit}s.",
            "Pass `unroll=True`.",
        )


def unread(case: Case) -> Iterator[Said]:
    """TS002: outputs of loops in the body that the body does not read."""
    for body in case.bodies:
        for equation, variable in unread_outputs(body.jaxpr):
            where = place_of(equation) or "in the body"
            yield (
                f"{where}: a loop in the body stacks {variable.aval}, and nothing reads it.",
                "Let its body return None there, or use `treescan.fold`.",
            )


def constant_outputs(case: Case) -> Iterator[Said]:
    """TS003: outputs that are the same in every step."""
    for body in case.bodies:
        varying = dependent(body.jaxpr, [place >= body.counts[0] for place in range(len(body.jaxpr.invars))])
        for path, variable in body.y_vars:
            if hasattr(variable, "val") or variable not in varying:
                yield (
                    f"{path}: {variable.aval} is the same in every {case.unit}, but it is stacked.",
                    "Return None instead, and use the value outside the loop.",
                )


SELECTED, PARTS = 2**16, 16
"""The smallest leaf, in bytes, whose selection is reported, and how many times what a step writes it has to be."""


def selected_leaves(case: Case) -> Iterator[Said]:
    """TS011: large leaves of which a step writes a small part, and then selects all, for rows that it does not run."""
    for body in case.bodies if not case.compact else ():
        start, count = body.counts
        changing = split(body.fixed, body.carry)[1]
        first = count - len(changing)  # an index may lead the state
        before, after = body.jaxpr.invars[start + first : start + count], body.jaxpr.outvars[first:count]
        for leaf, old, new, axis in zip(changing, before, after, body.axes[first:], strict=False):
            size, written = bytes_of(old.aval), written_in_place(body.jaxpr, old, new)
            shared = axis is None and case.ends_early  # nothing is selected there
            if body.batch and written and size >= max(SELECTED, PARTS * written) and not shared:
                yield (
                    f"{leaf.path}: {old.aval}, {describe_bytes(size)}. A {case.unit} writes {describe_bytes(written)} "
                    "of it, and then copies all of it, because a row that does not run keeps what it has.",
                    f"{_SHARE if case.ends_early else _COUNT}, and write nothing where it is False.",
                )


_SHARE = "Declare it as shared by all rows (None in `carry_axes`), take the keyword `valid`"
_COUNT = (
    "Use `while_scan` with a condition that counts the steps. Declare the leaf as shared by all rows there (None in "
    "`carry_axes`), take the keyword `valid`"
)


FINDINGS: dict[str, Callable[[Case], Iterator[Said]]] = {
    "TS001": unchanged_leaves,
    "TS002": unread,
    "TS003": constant_outputs,
    "TS004": large_constants,
    "TS005": many_scalars,
    "TS006": promoted_leaves,
    "TS007": rows_closed_over,
    "TS008": separate_products,
    "TS009": short_loop,
    "TS010": gathered_weights,
    "TS011": selected_leaves,
}
"""For each code what finds it. A code keeps its meaning for good."""


def find(case: Case) -> tuple[Finding, ...]:
    """All that is found in a call, in the order of the codes."""
    return tuple(Finding(code, *said) for code, finder in FINDINGS.items() for said in finder(case))


def gather(verb: str, unit: str, taken: Taken, remat: Any, retake: Callable[[Any], Taken]) -> Description:
    """What is known of a call. Its bodies are traced; nothing is run.

    Args:
        verb: its name.
        unit: what a step is called there.
        taken: the call.
        remat: what it says of `remat`.
        retake: the same call with another `remat`.
    """
    program = taken.program
    _check_steps(program)

    def look(given: Any) -> tuple[dict[str, Any], Case]:
        bodies = trace_bodies(program, taken.given, given)
        case = Case(verb, unit if len(bodies) == 1 else "period", program, bodies)
        return {**_of_bodies(bodies), "findings": find(case)}, case

    facts, case = of_types(look, taken.given)
    call = case.calls[-1]
    plan, tiers = _plan_of(taken, remat, facts["findings"])
    known = plan.refusal != _UNKNOWN
    return Description(
        verb=verb,
        body=describe_body([each.body.function for each in case.bodies]),
        unit=case.unit,
        steps=call.length,
        at_most=case.ends_early,
        reverse=call.reverse,
        tiers=tiers,
        plans=(plan, *(other_plans(plan, retake) if known else ())),
        **facts,
    )


def _check_steps(program: Program) -> None:
    """Refuses what has no step to trace, and sizes that are symbols.

    Raises:
        Fault: for an `ArgumentError`.
    """
    lengths = [call.length for call in program.call.each]
    says = "the loop has no {unit}s", "Describe a call with at least one."
    if any(not isinstance(length, int) for length in lengths):
        says = "the number of {unit}s is symbolic", "Describe a call with a known number of {unit}s."
    elif all(lengths):
        return
    raise Misuse(f"`describe` of {{verb}} over {{body}}: {says[0]}.", says[1])


_UNKNOWN = "the body cannot be called with fewer rows"


def _plan_of(taken: Taken, remat: Any, findings: Any) -> tuple[Plan, tuple[int, ...]]:
    """The plan of the call. Where a finding says why it cannot run, that is its plan."""
    try:
        return plan_of(taken, remat, used=True)
    except (Fault, TreescanError):
        if not any(finding.code == "TS007" for finding in findings):
            raise
    return Plan(remat, True, (), None, 0, _UNKNOWN), ()


def _of_bodies(bodies: list[TracedBody]) -> dict[str, Any]:
    fixed = map(all, zip(*(body.fixed for body in bodies), strict=True))
    carry = [
        _leaf(leaf.path, jax.typeof(leaf.value), leaf.value, not each)
        for leaf, each in zip(bodies[0].carry, fixed, strict=True)
    ]
    x, y, constants = list[Leaf](), list[Leaf](), dict[str, Leaf]()
    for number, body in enumerate(bodies):
        place = f" of [{number}]" if len(bodies) > 1 else ""
        of_x = zip(body.x, body.x_vars, strict=True)
        x += [_leaf(f"{leaf.path}{place}", variable.aval, leaf.value) for leaf, variable in of_x]
        y += [_leaf(f"{path}{place}", variable.aval) for path, variable in body.y_vars]
        named = zip(body.constants, body.closed_vars, strict=True)
        constants |= {each.path: _leaf(each.path, variable.aval, each.value) for each, variable in named}
    return {
        "carry": tuple(carry),
        "x": tuple(x),
        "y": tuple(y),
        "constants": tuple(constants.values()),
        "saved": saved_by_steps(bodies),
        "operations": sum(count_operations(body.jaxpr) for body in bodies),
        "flops": sum(count_operations(body.jaxpr, transcendental=1) for body in bodies),
    }


def _leaf(path: str, aval: Any, value: Any = None, changes: bool = True) -> Leaf:
    whole = value is not None and getattr(value, "shape", ()) == aval.shape
    return Leaf(path, describe_leaf(value) if whole else str(aval), bytes_of(aval), sharding_of(value), changes)
