"""`resets`: a row starts again from its init."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._axes import LeafAxes
from ..._loop.loop import Feed, Loop, Step
from ..._types import Array, PyTree
from .batch_axes import with_axes
from .leaves import expand, select


@dataclass(frozen=True)
class Reset:
    """The step that puts the init back first. Its consts are (init leaves, inner consts), its state a list of leaves.

    Attributes:
        step: the inner step.
        carry_axes: for each leaf of the state, the axis where the batch shape starts; None: shared by all rows, and
            never reset.
    """

    step: Step
    carry_axes: LeafAxes

    def __call__(self, consts: Any, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        inits, inner = consts
        flags = feed.reset
        assert flags is not None
        init = iter(inits)
        state = [
            leaf if axis is None else select(expand(flags, leaf, axis), next(init), leaf)
            for leaf, axis in zip(state, self.carry_axes, strict=True)
        ]
        return self.step(inner, state, feed._replace(reset=None))


@dataclass(frozen=True)
class ResetRows:
    """`resets`: puts the init back before each step that begins a segment, in the order of the run."""

    moves = True

    def __call__(self, loop: Loop) -> Loop:
        return loop if loop.rows.resets is None else reset_rows(loop, loop.rows.resets)


def reset_rows(loop: Loop, resets: Array) -> Loop:
    """The same; `resets`: bool[T, *batch]."""
    axes = loop.rows.axes
    assert loop.xs.valid is not None
    own = [axis for axis in axes.state if axis is not None]
    inits = [leaf for leaf, axis in zip(loop.state, axes.state, strict=True) if axis is not None]
    flags = _shifted(resets) if loop.rows.all_valid and loop.reverse else resets
    if not loop.rows.all_valid:
        flags = beginnings(resets, loop.xs.valid, reverse=loop.reverse)
    loop = dataclasses.replace(
        loop, step=Reset(loop.step, axes.state), consts=(inits, loop.consts), xs=loop.xs._replace(reset=flags)
    )
    return with_axes(loop, consts=(*own, *axes.consts))


def _shifted(resets: Array) -> Array:
    """In reverse a row begins anew one step before each flag, in time; where every step is valid."""
    return jnp.concatenate([resets[1:], jnp.zeros_like(resets[:1])])


def beginnings(resets: Array, valid: Array, *, reverse: bool) -> Array:
    """bool[T, *batch]: where a row begins anew. In reverse, that is the last valid step of each segment.

    Flags at steps that are not valid mean nothing.
    """
    resets = resets & valid
    if not reverse or not valid.shape[0]:
        return resets
    steps = jnp.arange(valid.shape[0]).reshape(-1, *(1 for _ in valid.shape[1:]))
    valid_from = jax.lax.cummin(jnp.where(valid, steps, valid.shape[0]), reverse=True)  # the first valid step >= t
    flag_from = jax.lax.cummin(jnp.where(resets, steps, valid.shape[0]), reverse=True)
    end = jnp.full_like(valid_from[:1], valid.shape[0])
    next_valid = jnp.concatenate([valid_from[1:], end])
    next_flag = jnp.concatenate([flag_from[1:], end])
    return valid & (next_valid == next_flag) & (next_valid < valid.shape[0])
