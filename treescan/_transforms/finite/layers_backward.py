"""`check_finite="backward"` over layers: the blocks that take turns share one probe."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._loop.body import Memo
from ..._loop.loop import Loop
from ..._trace.hoist import merge
from ..._types import Array, PyTree
from .again import At, Told, in_branch
from .backward import Watched, WatchedBackward, begin, changing_of
from .case import Case, Evidence
from .deliver import tell
from .layers import CheckLayers, at_layer, before_layer, in_leaves, positions_of
from .probe import Look, Probe, pass_state
from .pull import Found, Pulled, Reads, case_of_pulled, evidence_there
from .site import Site
from .within import Outer, outer_steps


@dataclass(frozen=True)
class CheckLayerCotangents:
    """`check_finite="backward"` of a verb over layers.

    Attributes:
        layers: what it is told of the blocks.
    """

    layers: CheckLayers

    def watch(self, loops: Sequence[Loop]) -> tuple[list[Loop], WatchBackward]:
        """The checked loops, whose state is [*the leaves of a probe, *the leaves of x]."""
        sites = self.layers.sites_of(loops)
        pulled = _Pulled.of(self.layers, sites)
        leaves, watched = sites[0].hoisted.settled, pulled.watched
        probe = pulled.probe(watched[0].pick(leaves))
        outer, places, _ = outer_steps()
        told = functools.partial(pulled.tell, outer)
        seen, probe = begin(told, (pulled.reads, places), watched[0].pick(leaves), probe)
        parts, structure = jax.tree.flatten(probe)
        state = [*parts, *watched[0].put(leaves, seen)]
        checked = list[Loop]()
        for place, site in enumerate(sites):
            loop = in_leaves(site)
            last = site.last if loop.reverse else None
            first_y = pulled.y_from[place]
            step = WatchedBackward(loop.step, site.keyed, structure, watched[place], last=last, y_from=first_y)
            xs = loop.xs._replace(position=positions_of(loop, place, len(sites)))
            checked.append(dataclasses.replace(loop, step=step, state=state, xs=xs, memo=Memo(), trace=None, finish=()))
        return checked, WatchBackward(sites[0], watched[0], checked[0].step)


@dataclass(frozen=True, eq=False)
class WatchBackward:
    """Layers whose cotangents are looked at, and that have run.

    Attributes:
        site: the first block.
        watched: which leaves of x are looked at.
        step: its step.
    """

    site: Site
    watched: Watched
    step: Any

    def x_of(self, state: list[Array]) -> PyTree:
        """What the last layer returned, of a state."""
        leaves, _, inner = self.step.split(state)
        look, number = Look(self.watched.axes, of_result=True), jnp.asarray(self.site.last, jnp.int32)
        seen, _ = pass_state(look, self.watched.pick(inner), jax.tree.unflatten(self.step.probe, leaves), number)
        return jax.tree.unflatten(self.site.hoisted.structure, self.watched.put(inner, seen))

    def evidence(self, state: list[Array], ys: PyTree) -> PyTree:
        """The outputs: what was found is told in the gradient."""
        del state
        return ys


@dataclass(frozen=True, eq=False)
class _Pulled:
    """The blocks, for the evidence of a bad cotangent.

    Attributes:
        layers: what is told of them.
        sites: what they are called; their arrays are not used.
        blocks: their loops.
        watched: of each block which leaves are looked at: those that any of them changes.
    """

    layers: CheckLayers
    sites: tuple[Site, ...]
    blocks: tuple[Pulled, ...]
    watched: tuple[Watched, ...]

    @classmethod
    def of(cls, layers: CheckLayers, sites: Sequence[Site]) -> _Pulled:
        """Of the sites of the blocks."""
        flags = tuple(map(any, zip(*map(changing_of, sites), strict=True)))
        axes, y_axes = (None,) * sum(flags), [(None,) * len(_y_of(site)) for site in sites]
        blocks = tuple(Pulled.of(site, flags, axes, y) for site, y in zip(sites, y_axes, strict=True))
        return cls(layers, tuple(sites), blocks, tuple(Watched(flags, axes, y) for y in y_axes))

    @property
    def reads(self) -> tuple[Reads, ...]:
        """The arrays of the blocks."""
        return tuple(block.reads for block in self.blocks)

    @property
    def y_from(self) -> tuple[int, ...]:
        """For each block how many outputs of others lead those that the probe notes of it."""
        return tuple(itertools.accumulate((len(block.y_axes) for block in self.blocks), initial=0))

    def probe(self, leaves: list[Array]) -> Probe:
        """A probe that notes nothing yet; `leaves` are those of x that are looked at."""
        y = [jnp.zeros(aval.shape, aval.dtype) for site in self.sites for aval in _y_of(site)]
        zeros = list(map(jnp.zeros_like, leaves))
        return Probe(jnp.zeros(3, jnp.float32), zeros, zeros, y)

    def tell(self, outer: tuple[Outer, ...], given: tuple[tuple[Reads, ...], tuple[Array, ...]], probe: Probe) -> None:
        """Tells what a probe found, of loops in steps of others, whose positions are the last of what is given."""
        reads, positions = given
        found, site = Found.of(probe), self.sites[0]
        loops = [block.laid(each) for block, each in zip(self.blocks, reads, strict=True)]
        unchanged, _ = loops[0].consts
        before = before_layer(self.sites, loops, found.number, merge(site.fixed, unchanged, loops[0].state))
        position = reads[0].last - found.number if site.given.reverse else found.number
        for place, loop in enumerate(loops):
            if loop.length:
                evidence, case = self._of_block(place, loop, found, position, before)
                tell(evidence, case, outer, positions)

    def _of_block(
        self, place: int, loop: Loop, found: Found, position: Array, before: list[Array]
    ) -> tuple[Evidence, Case]:
        """What is known of a layer, if it is this block's."""
        block, count, first = self.blocks[place], len(self.blocks), self.y_from[place]

        def explain(told: Told, found: Found, position: Array, before: list[Array], loop_reads: Any) -> Evidence:
            there = dataclasses.replace(loop, consts=loop_reads[0], xs=loop_reads[1])
            there, changing = at_layer(block.site, there, before)
            own = found._replace(y=found.y[first : first + len(block.y_axes)])
            return evidence_there(told, block, own, there, At(found.number, position // count, position), changing)

        here = (found.number >= 0) & (position % count == place)
        evidence, told = in_branch(here, explain, found, position, before, (loop.consts, loop.xs))
        return evidence, case_of_pulled(block, self.layers.abouts[place], told)


def _y_of(site: Site) -> list[Any]:
    """The types of the leaves of one layer's y that have a cotangent."""
    return [aval for aval in site.hoisted.y_avals if jnp.issubdtype(aval.dtype, jnp.inexact)]
