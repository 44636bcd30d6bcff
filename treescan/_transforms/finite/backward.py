"""`check_finite="backward"`: looks at the cotangents of the carry, in reverse mode.

The state holds a probe, whose cotangent notes what is found (`Probe` in `again.py`). A rule before the first step reads
it once the gradient has come through all steps. Nothing is told in a program that is not differentiated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from ..._avals import place_like
from ..._axes import LeafAxes
from ..._errors import ArgumentError, Fault
from ..._loop.body import Memo
from ..._loop.loop import Feed, Loop, Step, Transform
from ..._loop.run import as_arrays
from ..._trace.blame import is_checked
from ..._trace.hoist import Repeatable, as_loop, merge
from ..._trace.raw_keys import with_raw_keys
from ..._types import Array, PyTree, TreeDef
from ..nest import in_whole_state
from ..refuse import in_reverse_alone
from ..rows.axes import spread_batch_axes
from .again import (
    At,
    Found,
    Look,
    Probe,
    Pulled,
    Reads,
    Told,
    case_of_pulled,
    evidence_of,
    evidence_there,
    in_branch,
    pass_outputs,
    pass_state,
    zero_of,
)
from .case import About, Case, Evidence, Outer, looks_backward, outer_steps, refuse_devices, refuse_effects
from .check import CheckLayers, at_layer, before_layer, in_leaves, positions_of, tell
from .site import Site, Slices, batch_of, number_of_position, of_rows, site_of, with_heads


@dataclass(frozen=True)
class Watched:
    """Which leaves are looked at.

    Attributes:
        flags: for each leaf of the state whether a step may change it, and it has a cotangent.
        axes: for each of these where the rows are; None: it belongs to all rows, or there are none.
        y_axes: the same for each leaf of one step's y that has a cotangent.
    """

    flags: tuple[bool, ...]
    axes: LeafAxes
    y_axes: LeafAxes

    def pick(self, leaves: Sequence[Any]) -> list[Any]:
        """Those of the leaves."""
        return [leaf for leaf, watched in zip(leaves, self.flags, strict=True) if watched]

    def put(self, leaves: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        """The leaves, those replaced."""
        others = iter(new)
        return [next(others) if watched else leaf for leaf, watched in zip(leaves, self.flags, strict=True)]


def smooth(leaves: Sequence[Any]) -> list[Any]:
    """The leaves that have a cotangent."""
    return [leaf for leaf in leaves if is_checked(leaf)]


def put_smooth(leaves: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """The leaves, those that have a cotangent replaced."""
    others = iter(new)
    return [next(others) if is_checked(leaf) else leaf for leaf in leaves]


@dataclass(frozen=True, eq=False)
class WatchedBackward:
    """A step that hands on a probe. Its state: [*the leaves of the probe, with `counts` its number, *the inner state].

    Attributes:
        step: the inner step; its state is a list of leaves.
        keyed: whether the inner step is fed its position too.
        probe: the structure of the probe.
        watched: which leaves are looked at.
        counts: whether the state counts the steps; else the feed has their positions.
        last: the highest position, of a loop in reverse; else None.
        looks_after: whether it looks at the cotangents too that the step is given: some come from beside the loop.
        y_from: which of the outputs that the probe notes is the first of this step's.
    """

    step: Step
    keyed: bool
    probe: TreeDef
    watched: Watched
    counts: bool = False
    last: Any = None
    looks_after: bool = False
    y_from: int = 0

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        leaves, count, given = self.split(state)
        probe = jax.tree.unflatten(self.probe, leaves)
        number = count[0] if count else number_of_position(feed.position, self.last)
        seen, probe = pass_state(Look(self.watched.axes), self.watched.pick(given), probe, number)
        given = self.watched.put(given, seen)
        new, y = self.step(consts, given, feed if self.keyed else feed._replace(position=None))
        outputs, structure = jax.tree.flatten(y)
        noted, probe = self._noted(smooth(outputs), probe)
        if self.looks_after:
            seen, probe = pass_state(Look(self.watched.axes, of_result=True), self.watched.pick(new), probe, number)
            new = self.watched.put(new, seen)
        y = jax.tree.unflatten(structure, put_smooth(outputs, noted))
        return [*jax.tree.leaves(probe), *(n + 1 for n in count), *new], y

    def _noted(self, outputs: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
        first, last = self.y_from, self.y_from + len(outputs)
        noted, own = pass_outputs(self.watched.y_axes, outputs, probe._replace(y=probe.y[first:last]))
        return noted, own._replace(y=[*probe.y[:first], *own.y, *probe.y[last:]])

    def split(self, state: list[Array]) -> tuple[list[Array], list[Array], list[Array]]:
        """The leaves of the probe, the number if there is one, and the inner state."""
        size = self.probe.num_leaves
        return state[:size], state[size : size + self.counts], state[size + self.counts :]

    @property
    def once_only(self) -> bool:
        """Whether it has effects that JAX refuses to repeat."""
        return cast(Repeatable, self.step).once_only

    def silenced(self) -> WatchedBackward:
        """The step without the callbacks of the body, for a second run that must not report again."""
        return dataclasses.replace(self, step=cast(Repeatable, self.step).silenced())


@dataclass(frozen=True)
class CheckCotangents:
    """`check_finite="backward"`.

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
        if not loop.length or 0 in batch_of(loop):  # there is nothing to look at
            return loop
        refuse_devices()
        loop = with_raw_keys(dataclasses.replace(loop, state=as_arrays(loop.state)))
        site = site_of(
            loop, self.slices, self.around, loop.length - 1 if last is None else last, self.about.numbers(loop)
        )
        refuse_effects(site.hoisted)
        plain, early = self._in_leaves(loop, site), self.about.ends_early
        watched = _watched(plain, site)
        leaves, probe = self._begin(plain.state, site, watched)
        parts, structure = jax.tree.flatten(probe)
        count = [of_rows(jnp.zeros(batch_of(loop), jnp.int32), loop)] * early
        step = WatchedBackward(
            plain.step,
            keyed=plain.xs.position is not None,
            probe=structure,
            watched=watched,
            counts=early,
            last=loop.length - 1 if loop.reverse else None,
            looks_after=early or loop.rows is not None,
        )
        position = plain.xs.position if early else jnp.arange(loop.length, dtype=jnp.int32)
        axes = (*probe.axes(watched.axes, watched.y_axes), *(0 for _ in count))
        plain = with_heads(dataclasses.replace(plain, state=leaves), [*parts, *count], axes)
        if plain.rows is not None:
            plain = dataclasses.replace(plain, trace=plain.trace._replace(reverse_rule=True))
        checked = dataclasses.replace(plain, step=step, xs=plain.xs._replace(position=position), memo=Memo())
        return checked.finished(lambda state: _end(step, state, loop.length))

    def _in_leaves(self, loop: Loop, site: Site) -> Loop:
        """The loop with a list of leaves as its state."""
        if loop.rows is not None:
            return loop
        return (
            in_whole_state(site.hoisted)
            if self.about.ends_early
            else dataclasses.replace(as_loop(site.hoisted), trace=None)
        )

    def _begin(self, state: list[Array], site: Site, watched: Watched) -> tuple[list[Array], Probe]:
        """The state before the first step, and a probe; what its cotangent says is told in the gradient."""
        pulled = Pulled.of(site, changing_of(site), watched.axes, watched.y_axes)

        outer, places, _ = outer_steps()

        def told(given: Any, probe: Probe) -> None:
            (reads, positions), found = given, Found.of(probe)
            evidence, told = in_branch(
                found.number >= 0, lambda told, *given: evidence_of(told, pulled, *given), found, reads
            )
            tell(evidence, case_of_pulled(pulled, self.about, told), outer, positions)

        rows = None if site.given.rows is None else batch_of(site.given)
        picked = watched.pick(state)
        probe = _probe(picked, site, watched, rows, ends_early=self.about.ends_early)
        seen, probe = begin(told, (pulled.reads, places), picked, probe)
        return watched.put(state, seen), probe


def begin(told: Any, reads: Any, leaves: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
    """The state before the first step, and the probe; what its cotangent says is told in the gradient.

    Args:
        told: tells what a probe says, of what the loop reads.
        reads: what the loop reads.
        leaves: the leaves of the state that are looked at.
        probe: the probe.
    """
    zero = zero_of((reads, leaves))
    probe = jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), probe)

    @jax.custom_vjp
    def begin(leaves: list[Array], reads: Any, probe: Probe) -> tuple[list[Array], Probe]:
        del reads
        return leaves, probe

    def forward(leaves: list[Array], reads: Any, probe: Probe) -> Any:
        return (leaves, probe), reads

    def backward(reads: Any, given: tuple[list[Array], Probe]) -> Any:
        leaves, probe = given
        told(*jax.lax.stop_gradient((reads, probe)))
        return leaves, None, None

    begin.defvjp(forward, backward)
    return begin(leaves, reads, probe)


def changing_of(site: Site) -> tuple[bool, ...]:
    """For each leaf of the whole state whether a step may change it, and it has a cotangent."""
    return tuple(not fixed and is_checked(leaf) for leaf, fixed in zip(site.hoisted.settled, site.fixed, strict=True))


def _watched(loop: Loop, site: Site) -> Watched:
    flags = changing_of(site)
    if len(loop.state) < len(flags):  # those that no step changes have left the state
        flags = tuple(flag for flag, fixed in zip(flags, site.fixed, strict=True) if not fixed)
    y = [is_checked(jnp.zeros((), aval.dtype)) for aval in site.hoisted.y_avals]
    axes: LeafAxes = (None,) * len(flags)
    y_axes: LeafAxes = (None,) * len(y)
    if loop.rows is not None:
        axes = loop.rows.axes.state
        y_axes = spread_batch_axes("y_axes", loop.rows.y_axes, site.hoisted.y, "y", batch_of(loop))
    return Watched(
        flags,
        tuple(axis for axis, on in zip(axes, flags, strict=True) if on),
        tuple(axis for axis, on in zip(y_axes, y, strict=True) if on),
    )


def _probe(
    leaves: list[Array], site: Site, watched: Watched, batch: tuple[int, ...] | None, *, ends_early: bool
) -> Probe:
    rows = batch or ()
    y = [aval for aval in site.hoisted.y_avals if jnp.issubdtype(aval.dtype, jnp.inexact)]
    zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in y]
    pairs = zip(zeros, y, watched.y_axes, strict=True)
    shared = batch is not None and None in watched.axes
    return Probe(
        of_rows(jnp.zeros((*rows, 3), jnp.float32), site.given),
        list(map(jnp.zeros_like, leaves)),
        list(map(jnp.zeros_like, leaves)),
        [
            _of_each_row(zero, site.given, rows) if axis is None and rows else place_like(zero, aval)
            for zero, aval, axis in pairs
        ],
        jnp.zeros((), jnp.float32) if shared else None,
        of_rows(jnp.zeros((*rows, 2), jnp.float32), site.given) if ends_early and batch is not None else None,
    )


def _of_each_row(leaf: Array, loop: Loop, rows: tuple[int, ...]) -> Array:
    return of_rows(jnp.broadcast_to(leaf, (*rows, *leaf.shape)), loop)


def _end(step: WatchedBackward, state: list[Array], length: Any) -> list[Array]:
    """The inner state after the last step; a loop that does not look at it in each step does so here."""
    leaves, _, inner = step.split(state)
    if step.looks_after:
        return inner
    probe, number = jax.tree.unflatten(step.probe, leaves), jnp.asarray(length - 1, jnp.int32)
    look = Look(step.watched.axes, of_result=True)
    seen, _ = pass_state(look, step.watched.pick(inner), probe, number)
    return step.watched.put(inner, seen)


def refuse_truncate(truncate: Any, check_finite: Any) -> None:
    """Refuses to look at cotangents that are cut: what was found would be cut with them."""
    if truncate is not None and looks_backward(check_finite):
        raise Fault(
            ArgumentError,
            '{verb} over {body}: `check_finite="backward"` does not look at cotangents that `truncate` cuts.',
            "Leave out one of the two.",
        )


def in_reverse_mode() -> contextlib.AbstractContextManager[None]:
    """Says it in these terms where JAX refuses forward mode."""
    return in_reverse_alone(no_forward_mode)


def no_forward_mode_early() -> Fault:
    """Says why a loop that ends early has no forward mode here, where JAX would refuse it."""
    return Fault(
        ArgumentError,
        '{verb} over {body}: `check_finite="backward"` looks at cotangents, which reverse mode alone has. Forward mode '
        "was asked for, or the gradient of a `jax.vmap`, for which JAX needs it here.",
        "Take `jax.vmap` of `jax.grad` in place of `jax.grad` of `jax.vmap`. Or leave it out there: True looks at the "
        "carry, in forward mode too.",
    )


def no_forward_mode() -> Fault:
    """What is wrong with forward mode."""
    return Fault(
        ArgumentError,
        '{verb} over {body}: forward mode was asked for, and `check_finite="backward"` looks at cotangents, which '
        "reverse mode alone has.",
        "Leave it out there. True looks at the carry, in forward mode too.",
    )


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
        y = [place_like(jnp.zeros(a.shape, a.dtype), a) for site in self.sites for a in _y_of(site)]
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
