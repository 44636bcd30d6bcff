"""Things in a call that are worth changing: a table of codes, and a function for each code."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from .._avals import describe_leaf, is_sharded, is_weak
from .._loop.rewrite import is_rewriting
from .._remat import Remat
from .._trace.blame import place_of
from .._trace.cost import bytes_of, count_operations
from .._trace.dependence import dependent, readers, unread_outputs
from .._trace.equations import PRODUCTS
from .._trace.hoist import is_smooth
from .._transforms.budget import describe_bytes
from .._transforms.checkpoint import levels_in
from .._transforms.layers.pattern import Pattern
from .._transforms.outputs import KeepOutputs
from .._transforms.program import Call, Transformed
from .._transforms.remat import AUTO, OPERATIONS_PER_STEP, Recompute
from .._transforms.rows.fill import KeepRows
from .._transforms.rows.over_rows import OverRows
from .._transforms.rows.skip import Skip
from .._transforms.until.condition import StopRows
from .._transforms.until.program import Until
from .._transforms.weights.products import ELEMENTWISE
from .description import Finding
from .plans import Named, TracedBody, spec_of

_T = TypeVar("_T")


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
    program: Any
    bodies: list[TracedBody]

    @property
    def calls(self) -> tuple[Call, ...]:
        """For each body how it is called."""
        return calls_of(self.program)

    @property
    def compact(self) -> bool:
        """Whether rows are brought together, so that a body is given fewer than there are."""
        rows = self.transform(OverRows) or self.transform(StopRows)
        return rows is not None and bool(rows.compact)

    @property
    def ends_early(self) -> bool:
        """Whether the number of steps is known at run time alone."""
        return isinstance(self.program, Until)

    def transform(self, kind: type[_T]) -> _T | None:
        """The transform of a kind, if the call has one."""
        transforms = getattr(self.program, "transforms", ())
        return next((each for each in transforms if isinstance(each, kind)), None)

    @functools.cached_property
    def operations(self) -> int:
        """Those of one step of each body."""
        return sum(count_operations(body.jaxpr) for body in self.bodies)


def calls_of(program: Any) -> tuple[Call, ...]:
    """For each body of a program how it is called."""
    return (program.call,) if isinstance(program, Transformed | Until) else program.blocks


def constants_of(body: TracedBody) -> Iterator[tuple[Named, Any, set[str]]]:
    """The values that all steps of a body share: each with its variable, and the operations that read it."""
    for constant, variable in zip(body.constants, body.closed_vars, strict=True):
        yield constant, variable, readers(body.jaxpr, variable)


def is_weight(reading: set[str]) -> bool:
    """Whether what reads a constant is a product."""
    return not reading.isdisjoint(PRODUCTS)


def gathered_weights(case: Case) -> Iterator[Finding]:
    """TS010: weights that are sharded over the same mesh axis as their operands, so each device needs all of them."""
    for body in case.bodies:
        used = _axes_of(body.carry) if isinstance(case.program, Pattern) else _axes_of([*body.carry, *body.x])
        paths = [leaf.path for leaf in _weights(case, body) if used & _axes_of([leaf])]
        if paths and used and not getattr(case.program, "prefetch", None):
            layers = isinstance(case.program, Pattern)
            yield Finding(
                "TS010",
                f"{', '.join(paths[:3])}{' and others' if len(paths) > 3 else ''}: sharded over {_shown(used)}, "
                "like the carry, so every device gathers the whole arrays {'in each layer, and computes nothing "
                "meanwhile' if layers else 'for the loop'}.",
                "Pass `prefetch=1`: it gathers the weights of the next layer while the current layer is computed."
                if layers
                else "Replicate them on all devices, if they fit, or shard them over another mesh axis.",
            )


def _weights(case: Case, body: TracedBody) -> Iterable[Named]:
    if isinstance(case.program, Pattern):
        return body.x
    return [constant for constant, _, reading in constants_of(body) if is_weight(reading)]


def _axes_of(leaves: Iterable[Named]) -> set[str]:
    """The mesh axes over which any of these is spread."""
    found = set[str]()
    for leaf in leaves:
        for part in spec_of(leaf.value):
            found.update(_names(part))
    return found


def _names(part: Any) -> Iterable[str]:
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _shown(axes: set[str]) -> str:
    return ", ".join(f"`{axis}`" for axis in sorted(axes))


LARGE = 4096
"""The smallest constant, in bytes, that is reported."""

MANY = 16
"""The number of scalar leaves from which it pays to combine them into one array."""


def unchanged_leaves(case: Case) -> Iterator[Finding]:
    """TS001: leaves of the carry that no step changes, except leaves with rows, which belong there."""
    fixed = [all(flags) for flags in zip(*(body.fixed for body in case.bodies), strict=True)]
    leaves = [leaf for leaf, is_fixed in zip(case.bodies[0].carry, fixed, strict=True) if is_fixed]
    paths = [leaf.path for leaf in leaves if not _has_rows(leaf.value, case.bodies[0])]
    if paths and not any(call.custom for call in case.calls):
        instead = "Pass it in `args`." if case.unit != "step" else "Let the body close over it."
        yield Finding(
            "TS001", f"{_listed(paths)}: no {case.unit} changes it.", f"{instead} The carry is for values that change."
        )


def _has_rows(value: Any, body: TracedBody) -> bool:
    """Whether a leaf of a loop over rows may have an entry for each of them."""
    return bool(body.batch) and jax.typeof(value).shape[: len(body.batch)] == body.batch


def large_constants(case: Case) -> Iterator[Finding]:
    """TS004: constants as large as the carry which each step reads, whole or in part, but not for a product."""
    for body, call in zip(case.bodies, case.calls, strict=True):
        flags = zip(body.carry, body.fixed, strict=True)
        carry = sum(bytes_of(jax.typeof(leaf.value)) for leaf, is_fixed in flags if not is_fixed)
        for constant, variable, reading in constants_of(body):
            size, is_large = bytes_of(variable.aval), bytes_of(variable.aval) >= max(carry, LARGE)
            cure = _instead_of_constant(reading, variable.aval.shape[:1] == (call.length,)) if is_large else None
            if cure is not None and is_smooth(constant.value):
                yield Finding(
                    "TS004",
                    f"{constant.path}: {variable.aval}, {describe_bytes(size)}, is as large as the carry, "
                    f"{describe_bytes(carry)}. Each {case.unit} of the gradient adds to an array of this size.",
                    cure,
                )


def _instead_of_constant(reading: set[str], has_steps: bool) -> str | None:
    """What to do about a constant that these operations read; None: nothing."""
    if has_steps and reading and reading <= _PARTS:
        return "If each step reads its own part, pass it through xs."
    if reading and reading <= ELEMENTWISE:
        return "Apply `jax.lax.stop_gradient` to it if it is not trained, or combine it with the result of the loop."
    return None


_PARTS = frozenset({"dynamic_slice", "gather"})


def many_scalars(case: Case) -> Iterator[Finding]:
    """TS005: many leaves of a single number."""
    scalars = dict[str, None]()
    for body in case.bodies:
        variables = [*body.closed_vars, *body.x_vars]
        named = zip([*body.constants, *body.x], variables, strict=True)
        scalars |= {leaf.path: None for leaf, variable in named if variable.aval.shape == () and is_smooth(leaf.value)}
        scalars |= {
            leaf.path: None for leaf in body.carry if jax.numpy.shape(leaf.value) == () and is_smooth(leaf.value)
        }
    if len(scalars) >= MANY:
        yield Finding(
            "TS005",
            f"{len(scalars)} leaves are single numbers, for example {_listed(list(scalars))}. Each is a separate "
            "array, which separate operations read and write.",
            "Combine them into one array.",
        )


def promoted_leaves(case: Case) -> Iterator[Finding]:
    """TS006: weakly typed leaves that the body promotes."""
    for body in case.bodies:
        settled = body.hoisted.settled[len(body.hoisted.fixed) - len(body.carry) :]
        for leaf, after in zip(body.carry, settled, strict=True):
            dtype = jax.typeof(after).dtype
            if is_weak(leaf.value) and jax.typeof(leaf.value).dtype != dtype:
                yield Finding(
                    "TS006",
                    f"{leaf.path}: {describe_leaf(leaf.value)} becomes {describe_leaf(after).lstrip('~')} in the "
                    f"first {case.unit}, so the body is traced twice.",
                    f"Start from an array: `jnp.asarray({leaf.path}, jnp.{dtype})`.",
                )


def _listed(paths: list[str]) -> str:
    return ", ".join(paths) if len(paths) <= 3 else f"{', '.join(paths[:3])} and {len(paths) - 3} more"


FEW_STEPS, FEW_OPERATIONS = 8, OPERATIONS_PER_STEP // 10
"""Loops of so many steps, or fewer, are better unrolled where a step takes so few operations."""


def rows_closed_over(case: Case) -> Iterator[Finding]:
    """TS007: an array with rows that the body closes over, under `compact`."""
    for body in case.bodies if case.compact else ():
        rows = body.batch[0]
        for constant, variable, reading in constants_of(body):
            if variable.aval.shape[:1] == (rows,) and reading and not is_weight(reading):
                yield Finding(
                    "TS007",
                    f"{constant.path}: the body closes over {variable.aval}, which seems to have an entry for each "
                    f"of the {rows} rows. `compact` calls the body with fewer rows, but cannot select the rows of "
                    "this array.",
                    "Pass it through the carry, or through xs with None in `in_axes` and a tree as `x_axes`.",
                )


def separate_products(case: Case) -> Iterator[Finding]:
    """TS008: products with weights that the gradient takes in each step, where chunks would take them together."""
    for body in case.bodies:
        weights = [constant.path for constant, _, reading in constants_of(body) if is_weight(reading)]
        reason = _why_separate(case, body) if weights and _would_take_together(case) else None
        if reason is not None:
            yield Finding(
                "TS008",
                f"the products with {', '.join(weights)} are computed in each {case.unit}, not once per chunk. The "
                f"reason: {reason[0]}.",
                reason[1],
            )


def _would_take_together(case: Case) -> bool:
    """Whether the call has chunks that compute products at once where nothing is in the way."""
    recompute = case.transform(Recompute)
    return case.transform(Skip) is not None or case.ends_early or (recompute is not None and recompute.remat == AUTO)


def _why_separate(case: Case, body: TracedBody) -> tuple[str, str] | None:
    skip, recompute, trace = case.transform(Skip), case.transform(Recompute), body.hoisted
    remat = getattr(recompute, "remat", None) if recompute else getattr(case.program, "remat", None)
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
            _recomputes_steps(remat),
            "`remat` recomputes each of them",
            'Use `Remat("everything_saveable", levels=2)`, or leave `remat` out, if there is enough memory.',
        ),
        (
            save is not None and any(keep not in (1, None) for keep in save.leaves),
            "`save` keeps some outputs",
            "Keep all of them, if there is enough memory.",
        ),
        (
            any(map(is_sharded, _leaves(body))),
            "the carry or xs is sharded over an explicit mesh",
            "Run the loop within `jax.shard_map`.",
        ),
    ]
    return next(((why, cure) for holds, why, cure in reasons if holds), None)


def _recomputes_steps(remat: object) -> bool:
    return isinstance(remat, Remat) and levels_in(remat) >= 1 and remat.budget is None and not _saves_steps(remat)


def _saves_steps(remat: Remat) -> bool:
    return getattr(remat.policy, "__name__", None) == "everything_saveable"


def _leaves(body: TracedBody) -> list[object]:
    return [leaf.value for leaf in itertools.chain(body.x, body.carry) if spec_of(leaf.value)]


def short_loop(case: Case) -> Iterator[Finding]:
    """TS009: a loop that is too short for its overhead."""
    steps, unroll = case.calls[-1].length, case.calls[-1].unroll
    unrolled = unroll is True or unroll == 0 or unroll >= steps
    if 0 < steps <= FEW_STEPS and case.operations < FEW_OPERATIONS and not (unrolled or case.ends_early):
        yield Finding(
            "TS009",
            f"{steps} {case.unit}s of about {case.operations:,} operations each: the loop itself takes longer than "
            f"its {case.unit}s.",
            "Pass `unroll=True`.",
        )


def unread(case: Case) -> Iterator[Finding]:
    """TS002: outputs of loops in the body that the body does not read."""
    for body in case.bodies:
        for equation, variable in unread_outputs(body.jaxpr):
            where = place_of(equation) or "in the body"
            yield Finding(
                "TS002",
                f"{where}: a loop in the body stacks {variable.aval}, and nothing reads it.",
                "Let its body return None there, or use `treescan.fold`.",
            )


def constant_outputs(case: Case) -> Iterator[Finding]:
    """TS003: outputs that are the same in every step."""
    for body in case.bodies:
        consts = body.counts[0]
        flags = [place >= consts for place in range(len(body.jaxpr.invars))]
        varying = dependent(body.jaxpr, flags)
        for path, variable in body.y_vars:
            if hasattr(variable, "val") or variable not in varying:
                yield Finding(
                    "TS003",
                    f"{path}: {variable.aval} is the same in every {case.unit}, but it is stacked.",
                    "Return None instead, and use the value outside the loop.",
                )


FINDINGS: dict[str, tuple[str, Callable[[Case], Iterator[Finding]]]] = {
    "TS001": ("A leaf of the carry that no step changes", unchanged_leaves),
    "TS002": ("An output that nothing reads", unread),
    "TS003": ("An output that is the same in every step", constant_outputs),
    "TS004": ("A constant as large as the carry", large_constants),
    "TS005": ("Many leaves of a single number", many_scalars),
    "TS006": ("A weak type that is promoted", promoted_leaves),
    "TS007": ("An array with rows that the body closes over, under `compact`", rows_closed_over),
    "TS008": ("Products that are not taken together", separate_products),
    "TS009": ("A loop too short for its overhead", short_loop),
    "TS010": ("Weights that are gathered whole", gathered_weights),
}
"""For each code its title, and what finds it. A code keeps its meaning for good."""


def find(case: Case) -> tuple[Finding, ...]:
    """All that is found in a call, in the order of the codes."""
    return tuple(finding for _, finder in FINDINGS.values() for finding in finder(case))
