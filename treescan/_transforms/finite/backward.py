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

from ..._axes import LeafAxes
from ..._errors import ArgumentError, Fault
from ..._loop.loop import Feed, Loop
from ..._trace.hoist import is_smooth, merge, replaced, split, zeros_like
from ..._types import Array, PyTree, TreeDef
from ..refuse import in_reverse_alone
from ..rows.axes import spread_batch_axes
from .again import (
    At,
    Found,
    Look,
    Noted,
    Probe,
    Told,
    case_of,
    evidence_of,
    in_branch,
    pass_outputs,
    pass_state,
    state_before,
    tapped,
    zero_of,
)
from .case import Evidence, OuterSteps, looks_backward, outer_steps
from .check import Check, CheckLayers, before_layer, numbered_layers, tell
from .site import Numbering, Reads, Site, batch_of, of_rows


@dataclass(frozen=True, eq=False, kw_only=True)
class WatchedBackward(Numbering):
    """A step that hands on a probe. Its state: [*the leaves of the probe, with `counts` its number, *the inner state].

    Attributes:
        probe: the structure of the probe.
        noted: which cotangents of its own state are looked at.
        looks_after: whether it looks at the cotangents too that the step is given: some come from beside the loop.
        y_from: which of the outputs that the probe notes is the first of this step's.
    """

    probe: TreeDef
    noted: Noted
    looks_after: bool = False
    y_from: int = 0

    def __call__(self, consts: PyTree, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        probe, count, given = self.split(state)
        number = self.number(count, feed)
        given, probe = self.look(given, probe, number)
        new, y = self.run(consts, given, feed)
        outputs, structure = jax.tree.flatten(y)
        flags = list(map(is_smooth, outputs))
        noted, _ = split(flags, outputs)
        first, last = self.y_from, self.y_from + len(noted)
        noted, own = pass_outputs(self.noted.y_axes, noted, probe._replace(y=probe.y[first:last]))
        probe = own._replace(y=[*probe.y[:first], *own.y, *probe.y[last:]])
        if self.looks_after:
            new, probe = self.look(new, probe, number, of_result=True)
        y = jax.tree.unflatten(structure, replaced(flags, outputs, noted))
        return [*jax.tree.leaves(probe), *(n + 1 for n in count), *new], y

    def look(
        self, state: list[Array], probe: Probe, number: Array, *, of_result: bool = False
    ) -> tuple[list[Array], Probe]:
        """The inner state and the probe; the cotangents of the state are looked at."""
        seen, probe = pass_state(Look(self.noted.axes, of_result), self.noted.pick(state), probe, number)
        return replaced(self.noted.flags, state, seen), probe

    def split(self, state: list[Array]) -> tuple[Probe, list[Array], list[Array]]:
        """The probe, the number if there is one, and the inner state."""
        size = self.probe.num_leaves
        start = size + self.counts
        return jax.tree.unflatten(self.probe, state[:size]), state[size:start], state[start:]

    def end(self, state: list[Array], last: Any) -> list[Array]:
        """The inner state after the last step, of this number. Where no step looks at what it is given, this does."""
        probe, _, inner = self.split(state)
        if self.looks_after:
            return inner
        return self.look(inner, probe, jnp.asarray(last, jnp.int32), of_result=True)[0]


@dataclass(frozen=True)
class CheckCotangents(Check):
    """`check_finite="backward"`."""

    def watch(self, loop: Loop, site: Site) -> Loop:
        """The checked loop, of its site."""
        plain, early, rows = self.in_leaves(loop, site), self.about.ends_early, loop.rows
        noted, batch = _noted(site, rows, batch_of(loop)), batch_of(loop)
        own = noted
        if len(plain.state) < len(noted.flags):  # those that no step changes have left the state
            own = dataclasses.replace(noted, flags=tuple(split(site.fixed, noted.flags)[1]))
        leaves = own.pick(plain.state)

        def of_each_row(*shape: int, dtype: Any = jnp.float32) -> Array:
            return of_rows(jnp.zeros((*batch, *shape), dtype), site.given)

        y = [
            of_each_row(*aval.shape, dtype=aval.dtype) if axis is None and batch else zeros_like(aval)
            for aval, axis in zip(_y_of(site), noted.y_axes, strict=True)
        ]
        probe = Probe(
            of_each_row(3),
            list(map(jnp.zeros_like, leaves)),
            list(map(jnp.zeros_like, leaves)),
            y,
            jnp.zeros((), jnp.float32) if rows is not None and None in noted.axes else None,
            of_each_row(2) if early and rows is not None else None,
        )
        outer = outer_steps()

        def told(given: tuple[Reads, Any], probe: Probe) -> None:
            (reads, positions), found = given, Found.of(probe)

            def explain(told: Told, found: Found, reads: Reads) -> Evidence:
                loop = site.once_more(reads, found.taken)
                at = At.of(found.number, loop, reads.last)
                return evidence_of(told, site, noted, found, loop, at, state_before(at, site, loop))

            evidence, static = in_branch(found.number >= 0, explain, found, reads)
            tell(evidence, case_of(site, self.about, static, noted.flags), outer._replace(positions=positions))

        seen, probe = begin(told, (site.reads, outer.positions), leaves, probe)
        parts, structure = jax.tree.flatten(probe)
        count = [of_rows(jnp.zeros(batch, jnp.int32), loop)] * early
        plain = dataclasses.replace(plain, state=replaced(own.flags, plain.state, seen))
        if rows is not None:
            plain = dataclasses.replace(plain, trace=plain.trace._replace(reverse_rule=True))
        heads, axes = [*parts, *count], (*probe.axes(own.axes, own.y_axes), *(0 for _ in count))
        looks_after = early or rows is not None
        checked = self.around_steps(
            WatchedBackward, plain, heads, axes, probe=structure, noted=own, looks_after=looks_after
        )
        step = cast(WatchedBackward, checked.step)
        return checked.finished(lambda state: step.end(state, loop.length - 1))


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

    def tell_what_was_found(reads: Any, given: tuple[list[Array], Probe]) -> tuple[list[Array], None, None]:
        leaves, probe = given
        told(*jax.lax.stop_gradient((reads, probe)))
        return leaves, None, None

    return tapped(tell_what_was_found, leaves, probe, reads)


def _changing(site: Site) -> list[bool]:
    """For each leaf of the whole state whether a step may change it, and it has a cotangent."""
    return [not fixed and is_smooth(leaf) for leaf, fixed in zip(site.hoisted.settled, site.fixed, strict=True)]


def _y_of(site: Site) -> list[Any]:
    """The types of the leaves of one step's y that have a cotangent."""
    return list(filter(is_smooth, site.hoisted.y_avals))


def _noted(site: Site, rows: Any, batch: tuple[int, ...]) -> Noted:
    """Which cotangents of a loop are looked at, of the leaves of its whole state."""
    flags = tuple(_changing(site))
    axes = site.row_axes(None)
    y_axes: LeafAxes = (None,) * len(_y_of(site))
    if rows is not None:
        axes = site.row_axes(site.hoisted.loop.rows)
        y_axes = spread_batch_axes("y_axes", rows.y_axes, site.hoisted.y, "y", batch)
        y_axes = tuple(split(list(map(is_smooth, site.hoisted.y_avals)), y_axes)[0])
    return Noted(flags, tuple(split(flags, axes)[0]), y_axes)


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
    return in_reverse_alone(
        lambda: Fault(
            ArgumentError,
            '{verb} over {body}: forward mode was asked for, and `check_finite="backward"` looks at cotangents, which '
            "reverse mode alone has.",
            "Leave it out there. True looks at the carry, in forward mode too.",
        )
    )


def no_forward_mode_early() -> Fault:
    """Says why a loop that ends early has no forward mode here, where JAX would refuse it."""
    return Fault(
        ArgumentError,
        '{verb} over {body}: `check_finite="backward"` looks at cotangents, which reverse mode alone has. Forward mode '
        "was asked for, or the gradient of a `jax.vmap`, for which JAX needs it here.",
        "Take `jax.vmap` of `jax.grad` in place of `jax.grad` of `jax.vmap`. Or leave it out there: True looks at the "
        "carry, in forward mode too.",
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
        flags, leaves = tuple(map(any, zip(*map(_changing, sites), strict=True))), sites[0].hoisted.settled
        noted = [Noted(flags, (None,) * sum(flags), (None,) * len(_y_of(site))) for site in sites]
        y_from = tuple(itertools.accumulate((len(each.y_axes) for each in noted), initial=0))
        zeros = list(map(jnp.zeros_like, noted[0].pick(leaves)))
        y = [zeros_like(aval) for site in sites for aval in _y_of(site)]
        told = functools.partial(self._tell, sites, noted, y_from, outer_steps())
        reads = tuple(site.reads for site in sites), outer_steps().positions
        probe = Probe(jnp.zeros(3, jnp.float32), zeros, zeros, y)
        seen, probe = begin(told, reads, noted[0].pick(leaves), probe)
        parts, structure = jax.tree.flatten(probe)
        others = [
            {"probe": structure, "noted": each, "y_from": first} for each, first in zip(noted, y_from, strict=False)
        ]
        state = [*parts, *replaced(flags, leaves, seen)]
        checked = numbered_layers(sites, WatchedBackward, state, others)
        return checked, WatchBackward(sites[0], checked[0].step)

    def _tell(
        self,
        sites: Sequence[Site],
        noted: Sequence[Noted],
        y_from: Sequence[int],
        outer: OuterSteps,
        given: tuple[tuple[Reads, ...], Any],
        probe: Probe,
    ) -> None:
        """Tells what a probe found, in the arrays of the loops; with them come the positions of the outer steps."""
        (reads, positions), found, site, count = given, Found.of(probe), sites[0], len(sites)
        loops = [site.once_more(each) for site, each in zip(sites, reads, strict=True)]
        unchanged, _ = loops[0].consts
        before = before_layer(sites, loops, found.number, merge(site.fixed, unchanged, loops[0].state))
        position = reads[0].last - found.number if site.given.reverse else found.number
        for place, (site, loop) in enumerate(zip(sites, loops, strict=True)):

            def explain(
                told: Told, found: Found, position: Array, before: list[Array], reads: Any, place: int = place
            ) -> Evidence:
                site, loop = sites[place], dataclasses.replace(loops[place], consts=reads[0], xs=reads[1])
                there, changing = site.in_layer(loop, before)
                own = found._replace(y=found.y[y_from[place] : y_from[place + 1]])
                at = At(found.number, position // count, position)
                return evidence_of(told, site, noted[place], own, there, at, changing)

            if loop.length:
                here = (found.number >= 0) & (position % count == place)
                evidence, told = in_branch(here, explain, found, position, before, (loop.consts, loop.xs))
                case = case_of(site, self.layers.abouts[place], told, noted[place].flags)
                tell(evidence, case, outer._replace(positions=positions))


@dataclass(frozen=True, eq=False)
class WatchBackward:
    """Layers whose cotangents are looked at, and that have run.

    Attributes:
        site: the first block.
        step: its step.
    """

    site: Site
    step: Any

    def x_of(self, state: list[Array]) -> PyTree:
        """What the last layer returned, of a state."""
        return jax.tree.unflatten(self.site.hoisted.structure, self.step.end(state, self.site.last))

    def evidence(self, state: list[Array], ys: PyTree) -> PyTree:
        """The outputs: what was found is told in the gradient."""
        del state
        return ys
