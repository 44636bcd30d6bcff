"""Findings about the leaves of the carry, of x, and of the values that all steps share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from ..._avals import describe_leaf, is_weak
from ..._trace.buffers import bytes_of
from ..._trace.smooth import is_smooth
from ..._transforms.budget import describe_bytes
from ..._transforms.weights.products import ELEMENTWISE
from ..bodies import TracedBody
from ..facts import Finding
from .case import Case, constants_of

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
