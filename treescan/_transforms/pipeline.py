"""From a verb's arguments to its results: the order of the transforms, and what is cached for eager calls."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._loop import Body, Feed, Loop, debugs_nans, is_jit_disabled, run
from .._retrace import under_a_trace
from .._rewrite import is_rewriting
from .._tree import Prefix
from .._types import Array, ArrayLike, PyTree
from .axes import LeafAxes, scan_over_axes
from .body import CallBody, Shared
from .chunked import PLAIN, ChunkPlan, run_planned
from .conventions import Convention
from .count import count
from .masking import MaskPlan, run_masked
from .once import OncePlan, Outputs, Parted, drop_outputs, part_outputs
from .outputs import move_kept
from .rows import mask_of_lengths


@dataclass(frozen=True)
class Plan:
    """All that a verb was told, less its arrays: hashable, so that what is made for it can be found again.

    Attributes:
        convention: how the body is called, and what it returns.
        length: the number of steps.
        reverse: whether to run from the last position to the first.
        unroll: as for `jax.lax.scan`.
        in_axes: for each leaf of xs the axis scanned over, or None; None as a whole: axis 0 for all.
        out_axes: prefix of ys; None as a whole: axis 0 for all.
        frozen: whether init or xs hold static leaves.
        custom: the classes of the custom carries that init holds.
        sees_valid: whether the body takes `valid`.
        name: the profiler's name for the loop.
        chunks: what the gradient recomputes, where it is cut, and what is kept of the outputs.
        mask: the axes and the fill of a masked scan.
        lowering: further keyword arguments of `jax.lax.scan`.
        once: the outputs that are the same in every step.
    """

    convention: Convention
    length: int
    reverse: bool = False
    unroll: int | bool = 1
    in_axes: LeafAxes | None = None
    out_axes: Prefix | None = None
    frozen: bool = False
    custom: tuple[type, ...] = ()
    sees_valid: bool = False
    name: str | None = None
    chunks: ChunkPlan = PLAIN
    mask: MaskPlan | None = None
    lowering: tuple[tuple[str, Any], ...] = ()
    once: OncePlan | None = None


class Given(NamedTuple):
    """The arrays that a verb was given; static leaves of init and xs are frozen into their structure.

    Attributes:
        init: the carry that the first step is given.
        xs: what is scanned over.
        key: the loop's PRNG key.
        lengths: int[*batch] of a masked scan, or None.
        mask: bool[T, *batch] of a masked scan, or None.
        resets: bool[T, *batch] of a masked scan, or None.
        lower: the first index of `fori`.
        args: what every layer is given beside its own.
    """

    init: PyTree
    xs: PyTree = None
    key: Array | None = None
    lengths: ArrayLike | None = None
    mask: ArrayLike | None = None
    resets: ArrayLike | None = None
    lower: int | None = None
    args: tuple[PyTree, ...] = ()


def execute(body: Body, plan: Plan, given: Given) -> tuple[PyTree, PyTree]:
    """Runs a verb.

    A scan without options is nothing but its lax.scan, eager or not. With options there is work around the loop: an
    eager call puts the whole of it under one `jax.jit`, kept with the body, so that the second call neither traces nor
    compiles anything. Under an outer trace, that trace is the one that counts.
    """
    if _has_work(plan, given) and not is_jit_disabled() and not under_a_trace():
        key = ("jit", plan, is_rewriting(), debugs_nans())
        return body.programs(key, lambda: jax.jit(functools.partial(assemble, body, plan)))(given)
    return assemble(body, plan, given)


def _has_work(plan: Plan, given: Given) -> bool:
    moves = any(plan.in_axes or ()) or None in (plan.in_axes or ()) or plan.out_axes is not None
    return moves or given.key is not None or plan.mask is not None or plan.once is not None or not plan.chunks.is_plain


def assemble(body: Body, plan: Plan, given: Given) -> tuple[PyTree, PyTree]:
    """Builds the loop, transforms it, runs it.

    The order of the transforms, innermost first:
    call the body (keywords, static leaves, annotations, invariance of the carry) -> index or axes -> leaves that no
    step changes -> mask -> resets -> held outputs -> remat of a step -> products of a chunk -> skip -> remat of a chunk
    -> run.
    """
    loop = make_loop(body, plan, given)
    with jax.named_scope(plan.name) if plan.name else contextlib.nullcontext():
        if given.lower is not None:
            (_, state), ys = run(count(loop, given.lower))
            return state, ys
        if plan.mask is not None:  # it follows the axes too: rows stand where they do in the user's x
            valid, resets = _flags(plan, given)
            names = names_of(body, plan.convention)
            result = run_masked(loop, valid, resets, plan.mask, plan.chunks, names, plan.in_axes)
        else:
            loop = loop if plan.in_axes is None else scan_over_axes(loop, plan.in_axes)
            result = run_planned(loop, plan.chunks) if plan.once is None else _run_once(body, plan, given, loop)
        if plan.out_axes is None:
            return result
        state, ys = result
        if plan.once is not None:
            return state, ys._replace(stacked=move_kept(ys.stacked, plan.out_axes.tree, plan.chunks.save))
        return state, move_kept(ys, plan.out_axes.tree, plan.chunks.save)


def _run_once(body: Body, plan: Plan, given: Given, loop: Loop) -> tuple[PyTree, Outputs]:
    """Runs a loop of which some outputs are the same in every step."""
    assert plan.once is not None
    parted = part_outputs(loop, plan.once.wanted)
    again = None if plan.once.again is None else plan.once.again(parted.once, _reads_watched(plan, given, parted))
    if again is None:
        state, stacked = run_planned(parted.loop, plan.chunks)
        return parted.hoisted.restore(state), Outputs(stacked, parted.once)
    loop = make_loop(body, plan, given._replace(args=(*given.args[:-1], again)))
    loop = loop if plan.in_axes is None else scan_over_axes(loop, plan.in_axes)
    state, stacked = run_planned(drop_outputs(loop, plan.once.wanted), plan.chunks)
    return state, Outputs(stacked, parted.once)


def constant_outputs(body: Body, plan: Plan, given: Given) -> PyTree:
    """Y with the outputs that are the same in every step, and None in place of the others. No step is run."""
    assert plan.once is not None
    loop = make_loop(body, plan, given)
    loop = loop if plan.in_axes is None else scan_over_axes(loop, plan.in_axes)
    return part_outputs(loop, plan.once.wanted).once


def _reads_watched(plan: Plan, given: Given, parted: Parted) -> bool:
    """Whether what is left of a loop reads one of the leaves of xs that are watched."""
    assert plan.once is not None
    if plan.once.watched is None:
        return False
    watched = plan.once.watched.spread(given.xs, "xs")
    axes = plan.in_axes or (0,) * len(watched)
    whole = [flag for flag, axis in zip(watched, axes, strict=True) if axis is None]
    sliced = [flag for flag, axis in zip(watched, axes, strict=True) if axis is not None]
    consts, fed = parted.reads  # whole leaves lead the consts: see `scan_over_axes`
    pairs = [*zip(whole, consts, strict=False), *zip(sliced, fed, strict=False)]
    return any(watch and read for watch, read in pairs)


def make_loop(body: Body, plan: Plan, given: Given) -> Loop:
    """The loop before any transform: it calls the body, on what the user gave."""
    return Loop(
        body=body,
        step=CallBody(body, plan.convention, plan.sees_valid, plan.frozen, plan.custom),
        consts=Shared(given.key, given.args) if given.key is not None or given.args else None,
        state=given.init,
        xs=Feed(given.xs, position=jnp.arange(plan.length) if given.key is not None else None),
        length=plan.length,
        reverse=plan.reverse,
        unroll=plan.unroll,
        lowering=plan.lowering,
        names=names_of(body, plan.convention),
    )


def _flags(plan: Plan, given: Given) -> tuple[Array, Array | None]:
    """bool[T, *batch]: which steps of which rows are data, and which begin a segment."""
    assert plan.mask is not None
    resets = None if given.resets is None else jnp.moveaxis(jnp.asarray(given.resets), plan.mask.time_axis, 0)
    if given.lengths is not None:
        return mask_of_lengths(given.lengths, plan.length), resets
    if given.mask is not None:
        return jnp.moveaxis(jnp.asarray(given.mask), plan.mask.time_axis, 0), resets
    assert resets is not None
    return jnp.ones_like(resets), resets


def names_of(body: Body, convention: Convention) -> tuple[str, str]:
    """The body's own names for its carry and its x."""
    names = body.names if len(body.names) > 1 and body.names[0] != body.names[1] else convention.takes
    place = convention.place
    return names[place], names[1 - place]
