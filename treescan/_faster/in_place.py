"""Writes the outputs of a masked loop in place, while nothing is differentiated.

A branch that returns the outputs of a chunk writes them, or what represents them, has them copied out of it, and the
loop around copies them to their places. Here arrays for the outputs of all steps are carried instead: a chunk that is
run writes into them step by step, and one that is not leaves them alone. Of two branches XLA copies nothing if one
only hands on what it is given; so the tiers of `compact` are tried one after the other. The derivative is that of the
loop that stacks, as what is carried would be saved for each chunk.

That was measured on CPUs and on GPUs of NVIDIA. jaxlib 0.11.1 copies the whole array for some small writes on CPUs:
https://github.com/jax-ml/jax/issues/40101.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from .._avals import Array, stacked_type, vary_over, varying_axes
from .._loop.loop import Arrays, Loop
from .._outputs.outputs import emitting, is_thinned, run_keeping
from .._program.plan import plan
from .._remat.checkpoint import is_remat3
from .._rows.axes import Rows
from .._rows.leaves import SCHEDULE
from .._rows.mask import without_good
from .._trace.on_in_steps import state_in_steps
from .._trace.rewriting import Unproven
from .._trace.rules import with_rule
from .._trace.trace import Trace
from .._trace.transposed import push_plainly
from .products import has_large_products
from .saved import push_forward
from .writing import Result, write_chunks


def write_in_place(loop: Loop, tiers: tuple[int, ...], *, saves: bool) -> Loop:
    """The loop with a runner that writes its outputs in place. If that is impossible or useless, the loop itself.

    Under `jax_remat3` the derivative of a rule like that of `InPlace` saves what its checkpoints were to leave out.
    """
    chunks = loop.wishes[0].size < loop.length and len(loop.wishes) == 1
    held = [slot for slot in loop.masked.outputs.idle.held or () if slot is not None]
    changed = loop.remat is not None or is_thinned(loop.keeps) or held
    fits = chunks and not is_remat3() and not changed
    return loop.having(runner=InPlace(tiers, loop.masked.own_values, saves)) if fits else loop


@dataclass(frozen=True)
class InPlace:
    """Runs a masked loop in chunks that write their outputs.

    Attributes:
        tiers: the numbers of rows to choose from; only the last, all of them, where rows are not ordered.
        own_values: whether padded rows are shown their own values, unless something is differentiated.
        saves: whether the gradient saves each step, in place too, if it may; else it is that of the loop that stacks.
    """

    tiers: tuple[int, ...]
    own_values: bool
    saves: bool
    limit: ClassVar[None] = None

    def __call__(self, loop: Loop) -> Result:
        stacked, levels = plan(loop)
        # The rule may not hold tracers.
        trace, rows, keeps, size = loop.hoisted, loop.masked, loop.keeps or (), levels[0].size
        whole = stacked.plan
        emits = whole.having(step=emitting(whole.step, keeps))
        outputs = functools.partial(_outputs, trace, rows, keeps, loop.length)
        products = has_large_products(trace.jaxpr)

        def write(given: Arrays) -> Result:
            empty = outputs(given)
            given = without_good(given) if self.own_values else given
            return write_chunks(emits, given, size, empty, self.tiers, rows.axes, products=products)

        def stack(given: Arrays) -> Result:
            return run_keeping(whole, levels, given, keeps)

        def rule(primals: tuple[Arrays], tangents: tuple[Arrays]) -> tuple[Any, Any]:
            if self.saves and len(levels) == 1:
                with contextlib.suppress(Unproven):
                    return push_forward(emits, trace, size, outputs(*primals), *primals, *tangents)
            given, d_given = primals[0], tangents[0]
            of_steps, d_of_steps = (each._replace(xs=SCHEDULE.put(each.xs, None)) for each in (given, d_given))
            d_given = d_given._replace(state=state_in_steps(whole.step, of_steps, d_of_steps))
            return push_plainly(stack, given, d_given, branches=trace.branches)

        return with_rule(write, rule, sources=without_good)(stacked.arrays)


def _outputs(trace: Trace, rows: Rows, keeps: tuple[int | None, ...], length: int, given: Arrays) -> list[Array]:
    """The outputs of a loop that runs nothing."""
    y = [aval for aval, keep in zip(trace.y_avals, keeps, strict=True) if keep is not None]
    idle = rows.outputs.idle(given.state, [stacked_type(leaf, length) for leaf in y])
    masked = varying_axes(jax.typeof(given.xs.valid))
    return [vary_over(leaf, varying_axes(of) | masked) for leaf, of in zip(idle, y, strict=True)]
