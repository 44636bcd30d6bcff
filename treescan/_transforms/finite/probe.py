"""What looks at cotangents: a probe that a loop's state holds and no step reads, and rules for derivatives around it.

What was found travels as the cotangent of the probe. Each step hands the probe on. The rules note, for each row, the
first cotangent that is NaN or infinite. Padded steps hand on the cotangent of the probe as they do that of the state,
so that a row notes nothing in its padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import is_key
from ..._axes import LeafAxes
from ..._types import Array
from ..rows.leaves import expand
from .watch import any_of_rows

_BASE = 1 << 16


class Probe(NamedTuple):
    """What its cotangent says of the steps behind it.

    Attributes:
        code: float32[*batch, 3], for each row the number of the step that was found, counted from 1, in two digits, and
            whether the cotangent was bad before that step. 0: there is none.
        after: the last cotangents of the state before that: what this step was given.
        before: the cotangents of the state that were found: what this step made of them.
        y: the cotangents of its outputs; of those without rows, one for each row.
        closed: float32[], whether any row has found one; only where a leaf of the state belongs to all rows.
        reached: float32[*batch, 2], the number of each row's last step; only where the loop may end early.
    """

    code: Array
    after: list[Array]
    before: list[Array]
    y: list[Array]
    closed: Array | None = None
    reached: Array | None = None

    def is_open(self) -> Array:
        """bool[*batch]: in which rows nothing was found."""
        nothing = jnp.all(self.code == 0, -1)
        return nothing if self.closed is None else nothing & (self.closed == 0)

    def axes(self, state: LeafAxes, y: LeafAxes) -> LeafAxes:
        """Where the rows are in each leaf, of where they are in what it notes."""
        of_y = tuple(0 if axis is None else axis for axis in y)
        closed, reached = (() if leaf is None else (axis,) for leaf, axis in ((self.closed, None), (self.reached, 0)))
        return (0, *state, *state, *of_y, *closed, *reached)


def number_of(digits: Array) -> Array:
    """int32[*batch], counted from 0; -1: there is none."""
    digits = digits.astype(jnp.int32)
    return digits[..., 0] * _BASE + digits[..., 1] - 1


def _digits_of(number: Array) -> Array:
    return jnp.stack([(number + 1) // _BASE, (number + 1) % _BASE], -1).astype(jnp.float32)


class Look(NamedTuple):
    """How cotangents of the state are looked at.

    Attributes:
        axes: for each leaf where the rows are; None: it belongs to all.
        of_result: whether no step made them yet.
    """

    axes: LeafAxes
    of_result: bool = False


def pass_state(look: Look, leaves: list[Array], probe: Probe, number: Array) -> tuple[list[Array], Probe]:
    """The state and the probe before or after a step; the cotangents of the state are looked at."""
    return _passed(look, leaves, probe, number)


def _pass(look: Look, leaves: list[Array], probe: Probe, number: Array) -> tuple[list[Array], Probe]:
    del look, number
    return leaves, probe


def _keep_number(look: Look, leaves: list[Array], probe: Probe, number: Array) -> Any:
    del look
    return (leaves, probe), number


def _look(look: Look, number: Array, given: tuple[list[Array], Probe]) -> tuple[list[Array], Probe, None]:
    leaves, probe = given
    is_open, rows = probe.is_open(), probe.code.ndim - 1
    bad = jnp.zeros((1,) * rows, bool)
    for leaf, axis in zip(leaves, look.axes, strict=True):
        bad = bad | any_of_rows(~jnp.isfinite(leaf), axis, rows)
    found, going = is_open & bad, is_open & ~bad
    digits = _digits_of(number)
    code = jnp.concatenate([digits, jnp.full_like(digits[..., :1], look.of_result)], -1)
    closed, any_found, none_found = probe.closed, found, going
    if closed is not None:
        any_found, none_found = jnp.any(found), (closed == 0) & ~jnp.any(found)
        closed = jnp.where(any_found, 1.0, closed)
    noted = Probe(
        jnp.where(found[..., None], code, probe.code),
        _where(going, none_found, leaves, probe.after, look.axes),
        _where(found, any_found, leaves, probe.before, look.axes),
        probe.y,
        closed,
        None if probe.reached is None else jnp.where(probe.reached == 0, digits, probe.reached),
    )
    return leaves, noted, None


_passed: Any = jax.custom_vjp(_pass, nondiff_argnums=(0,))
_passed.defvjp(_keep_number, _look)


def pass_outputs(axes: LeafAxes, leaves: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
    """The outputs of a step and the probe after it; the cotangents of the outputs are noted."""
    return _passed_outputs(axes, leaves, probe)


def _pass_outputs(axes: LeafAxes, leaves: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
    del axes
    return leaves, probe


def _keep_nothing(axes: LeafAxes, leaves: list[Array], probe: Probe) -> Any:
    del axes
    return (leaves, probe), None


def _note(axes: LeafAxes, _: None, given: tuple[list[Array], Probe]) -> tuple[list[Array], Probe]:
    leaves, probe = given
    spread = [
        jnp.broadcast_to(leaf, old.shape) if axis is None else leaf
        for leaf, old, axis in zip(leaves, probe.y, axes, strict=True)
    ]
    where = tuple(0 if axis is None else axis for axis in axes)
    is_open = probe.is_open()
    return leaves, probe._replace(y=_where(is_open, is_open, spread, probe.y, where))


_passed_outputs: Any = jax.custom_vjp(_pass_outputs, nondiff_argnums=(0,))
_passed_outputs.defvjp(_keep_nothing, _note)


def _where(rows: Array, others: Array, new: Sequence[Array], old: Sequence[Array], axes: LeafAxes) -> list[Array]:
    """The new leaves where a row is flagged; of leaves that belong to all rows, where `others` says so."""
    return [
        jnp.where(others if axis is None or not rows.ndim else expand(rows, a, axis), a, b)
        for a, b, axis in zip(new, old, axes, strict=True)
    ]


def zero_of(tree: Any) -> Array:
    """bool[]: False, and mapped where anything in a tree is: JAX adds up the cotangents of what is not."""
    zero = jnp.zeros((), bool)
    for leaf in jax.tree.leaves(tree):
        if not is_key(leaf):
            first = jax.lax.stop_gradient(leaf).reshape(-1)[:1]
            zero = zero | (jnp.any(first != first) & False)
    return zero
