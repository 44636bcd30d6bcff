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
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax

from .._avals import Array, PyTree, stacked_type, vary_over, varying_axes
from .._loop.feed import Feed
from .._loop.loop import Loop
from .._outputs.outputs import emitting, is_thinned, run_keeping
from .._remat.checkpoint import is_remat3
from .._rows.axes import without_arrays
from .._rows.mask import masked_step, without_pairs
from .._trace.rewriting import Unproven
from .._trace.rules import with_rule
from .._trace.transposed import push_plainly
from .._transforms.plan import plan
from .products import has_large_products
from .saved import push_forward
from .writing import Result, write_chunks


class _Given(NamedTuple):
    consts: PyTree
    state: PyTree
    xs: Feed

    def put_into(self, loop: Loop) -> Loop:
        return loop.having(consts=self.consts, state=self.state, xs=self.xs)


def write_in_place(loop: Loop, tiers: tuple[int, ...], *, saves: bool) -> Loop:
    """The loop with a runner that writes its outputs in place. If that is impossible or useless, the loop itself.

    Under `jax_remat3` the derivative of a rule like that of `InPlace` saves what its checkpoints were to leave out.
    """
    chunks = loop.wishes[0].size < loop.length and len(loop.wishes) == 1
    held = [slot for slot in loop.masked.outputs.idle.held or () if slot is not None]
    changed = loop.remat is not None or is_thinned(loop.keeps) or held
    fits = chunks and not is_remat3() and not changed
    return loop.having(runner=InPlace(tiers, loop.masked.own_values, saves)) if fits else loop


def _without_arrays(loop: Loop) -> Loop:
    """A loop with types in place of the arrays of its trace, and without those of its rows."""
    traced = loop.hoisted.loop
    types = _Given(*jax.tree.map(jax.typeof, (traced.consts, traced.state, traced.xs)))
    traced = types.put_into(traced).having(given=None, rows=None, trace=None, finish=())
    return loop.having(trace=loop.hoisted._replace(loop=traced), rows=without_arrays(loop.masked), finish=())


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
        keeps = loop.keeps or ()
        given = _Given(stacked.consts, stacked.state, stacked.xs)
        empty = _Given(None, None, Feed(None))  # the rule may not hold tracers
        stacked, loop = _without_arrays(empty.put_into(stacked)), _without_arrays(empty.put_into(loop))
        plain = loop.step
        step = masked_step(loop.step, stands_in=False) if self.own_values else loop.step
        loop = loop.having(step=emitting(step, keeps))

        def rule(primals: tuple[_Given], tangents: tuple[_Given]) -> tuple[Any, Any]:
            if self.saves and len(levels) == 1:
                whole = primals[0].put_into(stacked.having(step=emitting(plain, keeps)))
                with contextlib.suppress(Unproven):
                    return push_forward(whole, levels[0].size, self._outputs(whole), tangents[0])

            def stack(given: _Given) -> Result:
                return run_keeping(given.put_into(stacked), levels, keeps)

            return push_plainly(stack, *primals, *tangents, branches=loop.hoisted.branches)

        return with_rule(lambda given: self._run(given.put_into(loop), levels[0].size), rule, sources=without_pairs)(
            given
        )

    def _run(self, loop: Loop, size: int) -> Result:
        if self.own_values and len(self.tiers) == 1:
            loop = loop.having(consts=without_pairs(loop.consts))
        products = has_large_products(loop.hoisted.jaxpr)
        return write_chunks(loop, size, self._outputs(loop), self.tiers, loop.masked.axes, products=products)

    @staticmethod
    def _outputs(loop: Loop) -> list[Array]:
        """The outputs of a loop that runs nothing."""
        kept = zip(loop.hoisted.y_avals, loop.keeps or (), strict=True)
        y = [aval for aval, keep in kept if keep is not None]
        types = [stacked_type(leaf, loop.length) for leaf in y]
        idle = loop.masked.outputs.idle(loop.state, types)
        masked = varying_axes(jax.typeof(loop.xs.valid))
        return [vary_over(leaf, varying_axes(of) | masked) for leaf, of in zip(idle, y, strict=True)]
