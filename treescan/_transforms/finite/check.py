"""`check_finite`: notes the first step whose carry became NaN or infinite, with what is needed to say why.

One int rides along. Only if it says that a step went wrong, a branch after the loop runs the steps before it once more,
and evaluates that step operation by operation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..._loop.body import Memo
from ..._loop.loop import Loop, Transform
from ..._loop.run import as_arrays, is_jit_disabled
from ..._trace.hoist import as_loop, flattened
from ..._types import Array, PyTree
from ..whole_state import in_whole_state
from .again import gather
from .case import About
from .deliver import WithEvidence
from .refuse import refuse_devices, refuse_effects
from .rows import batch_of, with_heads
from .site import Site, Slices, site_of
from .watch import GOOD, Watched, earliest
from .within import numbered


@dataclass(frozen=True)
class CheckFinite:
    """`check_finite`.

    Attributes:
        about: the words for messages about the loop.
        slices: what is scanned over, where some leaves are given whole; None: none are.
        around: what is put around a step of rows.
    """

    about: About
    slices: Slices | None = None
    around: tuple[Transform, ...] = ()
    moves = True

    def __call__(self, loop: Loop, last: Any = None) -> Loop:
        """The checked loop. `last` is the position that a loop in reverse begins with, if not its highest."""
        if not loop.length:
            return loop
        refuse_devices()
        loop = dataclasses.replace(loop, state=as_arrays(loop.state))
        site = site_of(
            loop, self.slices, self.around, loop.length - 1 if last is None else last, self.about.numbers(loop)
        )
        refuse_effects(site.hoisted)
        plain, watched = self._in_leaves(loop, site)
        heads = [jnp.full(batch_of(loop), number, jnp.int32) for number in (GOOD, 0)[: 1 + self.about.ends_early]]
        axes = (None,) * len(watched) if loop.rows is None else loop.rows.axes.state
        last = loop.length - 1 if loop.reverse else None
        keyed = plain.xs.position is not None
        step = Watched(plain.step, keyed, watched, axes, counts=self.about.ends_early, last=last)
        position = plain.xs.position if self.about.ends_early else jnp.arange(loop.length, dtype=jnp.int32)
        checked = dataclasses.replace(
            with_heads(plain, heads), step=step, xs=plain.xs._replace(position=position), memo=Memo()
        )

        def ys_of(state: list[Array], ys: PyTree) -> PyTree:
            evidence, case = gather(earliest(state[0]), site, self.about, state[1] if self.about.ends_early else None)
            return WithEvidence(ys, (evidence,), (case,))

        return checked.finished(lambda state: state[len(heads) :], ys_of)

    def _in_leaves(self, loop: Loop, site: Site) -> tuple[Loop, tuple[bool, ...]]:
        """The loop with a list of leaves as its state, and for each whether it is looked at: a step may change it."""
        changing = tuple(not fixed for fixed in site.fixed)
        if loop.rows is not None:
            return loop, changing if is_jit_disabled() else (True,) * len(loop.state)
        if is_jit_disabled():
            call = self.about.numbers(loop)
            return dataclasses.replace(flattened(loop if call is None else numbered(loop, call)), trace=None), changing
        if self.about.ends_early:
            return in_whole_state(site.hoisted), changing
        return dataclasses.replace(as_loop(site.hoisted), trace=None), (True,) * sum(changing)
