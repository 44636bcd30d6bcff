"""`Progress(backward=True)`: the backward pass of each chunk reports that it is done.

The inputs of a chunk pass through an identity whose rule for reverse mode is a callback: the
cotangents are known when the chunk has been differentiated. There is no rule for forward mode, so JAX refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from .._errors import ArgumentError, Fault
from .._loop.loop import Feed, Loop, Step
from .._loop.reports import Reporter, Tick, probes_of
from .._trace.smooth import smooth_part
from .._types import Array, PyTree
from .nest import plan, run_levels


@dataclass(frozen=True, eq=False)
class Backward:
    """Reports how far the backward pass of a loop has come."""

    reporter: Reporter

    def around(self, step: Step, tick: Tick, *, leads: bool) -> Step:
        """A chunk whose backward pass reports.

        What it was given may have no tangent if it runs before all others and outside of a loop, and has none if the
        loop carries none. Then what comes out of the chunk is looked at: the report is early by this chunk.
        """

        def reporting(consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
            if leads:
                return self._tapped(tick, step(consts, state, feed))
            if not _has_tangents(state):
                return self.after(tick, *step(consts, state, feed))
            return step(consts, self._tapped(tick, state), feed)

        return reporting

    def after(self, tick: Tick, state: PyTree, ys: PyTree) -> tuple[PyTree, PyTree]:
        """The same. Once the cotangents of the state are known, or of ys if it has none, the tick is reported.

        Where ys are not used they have no cotangents, and JAX would make zeros for them to be looked at.
        """
        return (self._tapped(tick, state), ys) if _has_tangents(state) else (state, self._tapped(tick, ys))

    def _tapped(self, tick: Tick, tree: PyTree) -> PyTree:
        part = smooth_part(tree)
        on, off = part.split(tree)
        if not on:
            return tree
        same = jax.custom_vjp(lambda tick, leaves: leaves)
        same.defvjp(lambda tick, leaves: (leaves, (tick, probes_of(leaves))), self._backwards)
        return part.join(same(tick, on), off)

    def _backwards(self, saved: tuple[Tick, list[Array]], cotangents: list[Any]) -> tuple[None, list[Any]]:
        tick, probes = saved  # a cotangent may be known before the forward pass is
        self.reporter.step(tick, [], [*probes, *probes_of(*cotangents)])
        return None, cotangents


def _has_tangents(tree: PyTree) -> bool:
    return any(smooth_part(tree).on)


@dataclass(frozen=True, eq=False)
class RunBackward:
    """Runs a loop; its backward pass reports when it begins.

    Attributes:
        back: reports it.
        ending: what is reported then.
    """

    back: Backward
    ending: Tick

    def __call__(self, loop: Loop) -> tuple[PyTree, PyTree]:
        loop, levels = plan(loop)
        results = run_levels(loop, levels)
        if any(level.ticked and level.size >= loop.length for level in levels):  # one chunk, which reports its end
            return results
        return self.back.after(self.ending, *results)


def no_forward_mode() -> Fault:
    """The error for forward mode of such a loop."""
    return Fault(
        ArgumentError,
        "{verb} over {body}: this is forward mode, but JAX differentiates a loop whose `Progress` has "
        "`backward=True` only in reverse mode, like any function with a `jax.custom_vjp`.",
        "Leave `backward` out there. `jax.grad`, `jax.vmap`, and forward mode of a gradient work with it.",
    )
