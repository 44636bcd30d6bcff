"""`check_finite` over layers: the blocks that take turns share one int, the number of the first bad layer among all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..._errors import speaking_of
from ..._loop.body import Memo
from ..._loop.loop import Loop
from ..._loop.run import is_jit_disabled
from ..._trace.hoist import flattened, lift
from ..._types import Array, PyTree
from ..layers.turns import run_turns, trace_turns
from ..whole_state import KeepUnchanged, in_whole_state
from .again import At, Before, Told, case_of, evidence_at, in_branch
from .case import About, Case, Evidence
from .deliver import WithEvidence
from .refuse import refuse_devices, refuse_effects
from .site import Site, Slices, whole_of
from .watch import GOOD, Watched


@dataclass(frozen=True)
class CheckLayers:
    """`check_finite` of a verb over layers.

    Attributes:
        abouts: the words for messages about each block.
        slices: what the layers of each are scanned over, where some leaves are given whole; None: none are.
        roots: what the arguments of each are called that are a layer's own.
    """

    abouts: tuple[About, ...]
    slices: tuple[Slices | None, ...]
    roots: tuple[tuple[str, ...], ...]

    def watch(self, loops: Sequence[Loop]) -> tuple[list[Loop], Watch]:
        """The checked loops, whose state is [the number of the first bad layer, *the leaves of x]."""
        sites = self.sites_of(loops)
        return [_checked(site, place, len(loops)) for place, site in enumerate(sites)], Watch(self, tuple(sites))

    def sites_of(self, loops: Sequence[Loop]) -> list[Site]:
        """The sites of the blocks.

        Raises:
            Fault: for an `ArgumentError` if a block cannot be run once more, or devices run parts of it.
        """
        refuse_devices()
        with jax.disable_jit(False):
            traced = [lift(hoisted) for hoisted in trace_turns(loops)]
        last, sites = sum(loop.length for loop in loops) - 1, list[Site]()
        for loop, hoisted, slices, roots in zip(loops, traced, self.slices, self.roots, strict=True):
            with speaking_of(loop.body.function):
                refuse_effects(hoisted)
            sites.append(Site(loop, hoisted, slices, [] if slices is None else whole_of(loop), (), last, roots))
        return sites


def _checked(site: Site, place: int, blocks: int) -> Loop:
    """One of the loops, its layers numbered among those of all."""
    loop = in_leaves(site)
    last = site.last if loop.reverse else None
    changing = tuple(not fixed for fixed in site.fixed)
    step = Watched(loop.step, site.keyed, changing, (None,) * len(changing), last=last)
    xs = loop.xs._replace(position=positions_of(loop, place, blocks))
    state = [jnp.int32(GOOD), *site.hoisted.settled]
    return dataclasses.replace(loop, step=step, state=state, xs=xs, memo=Memo(), trace=None, finish=())


def in_leaves(site: Site) -> Loop:
    """The loop of one block with all leaves of x as its state."""
    return flattened(site.given) if is_jit_disabled() else in_whole_state(site.hoisted)


def positions_of(loop: Loop, place: int, blocks: int) -> Array:
    """int32[n]: the numbers of a block's layers among those of all."""
    return place + blocks * jnp.arange(loop.length, dtype=jnp.int32)


@dataclass(frozen=True, eq=False)
class Watch:
    """Checked layers that have run, for their evidence."""

    check: CheckLayers
    sites: tuple[Site, ...]

    def x_of(self, state: list[Array]) -> PyTree:
        """What the last layer returned, of a state."""
        return jax.tree.unflatten(self.sites[0].hoisted.structure, state[1:])

    def evidence(self, state: list[Array], ys: PyTree) -> WithEvidence:
        """The outputs, with what is known of the first bad layer."""
        first, site = state[0], self.sites[0]
        loops = [site.once_more() for site in self.sites]
        position = site.last - first if site.given.reverse else first
        before = before_layer(self.sites, loops, first, jax.lax.stop_gradient(site.hoisted.settled))
        pairs = [self._of_block(place, loop, first, position, before) for place, loop in enumerate(loops)]
        return WithEvidence(ys, tuple(evidence for evidence, _ in pairs), tuple(case for _, case in pairs))

    def _of_block(
        self, place: int, loop: Loop, first: Array, position: Array, before: list[Array]
    ) -> tuple[Evidence, Case]:
        """What is known of a layer, if it is this block's."""
        site, blocks = self.sites[place], len(self.sites)

        def explain(told: Told, first: Array, position: Array, before: list[Array]) -> Evidence:
            there, changing = at_layer(site, loop, before)
            return evidence_at(told, At(first, position // blocks, position), changing, site, there)

        here = (first != GOOD) & (position % blocks == place)
        if not loop.length:
            here = here & False
        evidence, told = in_branch(here, explain, first, position, before)
        return evidence, case_of(site, self.check.abouts[place], told)


def at_layer(site: Site, loop: Loop, leaves: list[Array]) -> tuple[Loop, list[Array]]:
    """The loop of one block where x is known, and the leaves of x that it changes."""
    changing = [leaf for leaf, fixed in zip(leaves, site.fixed, strict=True) if not fixed]
    unchanged = [leaf for leaf, fixed in zip(leaves, site.fixed, strict=True) if fixed]
    return dataclasses.replace(loop, consts=(unchanged, loop.consts[1])), changing


def before_layer(sites: Sequence[Site], loops: Sequence[Loop], first: Array, leaves: list[Array]) -> list[Array]:
    """The leaves of x before a layer: all layers before it run again, in a branch that is taken if there is one.

    Args:
        sites: the blocks.
        loops: their loops as they run once more.
        first: int32[], how many layers run before it; -1: there is none.
        leaves: those of x before the first layer.
    """

    def again(first: Array, leaves: list[Array]) -> list[Array]:
        pairs = enumerate(zip(sites, loops, strict=True))
        before = [_before(site, loop, (place, len(sites)), first, leaves) for place, (site, loop) in pairs]
        state, _ = run_turns(before, None, (None,) * len(before), Memo())
        return state

    return jax.lax.cond(first != GOOD, again, lambda _, leaves: leaves, first, leaves)


def _before(site: Site, loop: Loop, place: tuple[int, int], first: Array, leaves: list[Array]) -> Loop:
    positions = positions_of(loop, *place)
    numbers = site.last - positions if loop.reverse else positions
    step = Before(KeepUnchanged(loop.step, site.fixed), site.keyed)
    xs = loop.xs._replace(x=(numbers, loop.xs.x))
    return dataclasses.replace(loop, step=step, consts=(first, loop.consts[1]), state=leaves, xs=xs)
