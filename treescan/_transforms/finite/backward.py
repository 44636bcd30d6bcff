"""`check_finite="backward"`: looks at the cotangents of the carry, in reverse mode.

The state holds a probe, whose cotangent notes what is found; see `probe.py`. A rule before the first step reads it once
the gradient has come through all steps. Nothing is told in a program that is not differentiated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from ..._axes import LeafAxes
from ..._errors import ArgumentError, Fault
from ..._loop.body import Memo
from ..._loop.loop import Feed, Loop, Step, Transform
from ..._loop.run import as_arrays
from ..._trace.blame import is_checked
from ..._trace.hoist import Repeatable, as_loop
from ..._types import Array, PyTree, TreeDef
from ..refuse import in_reverse_alone
from ..rows.batch_axes import spread_batch_axes
from ..whole_state import in_whole_state
from .again import in_branch
from .case import About
from .deliver import tell
from .probe import Look, Probe, pass_outputs, pass_state, zero_of
from .pull import Found, Pulled, case_of_pulled, evidence_of
from .refuse import looks_backward, refuse_devices, refuse_effects
from .rows import batch_of, with_heads
from .site import Site, Slices, site_of
from .watch import number_of_position
from .within import outer_steps


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
        """The same without what the body says in callbacks."""
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
        if not loop.length:
            return loop
        refuse_devices()
        loop = dataclasses.replace(loop, state=as_arrays(loop.state))
        site = site_of(
            loop, self.slices, self.around, loop.length - 1 if last is None else last, self.about.numbers(loop)
        )
        refuse_effects(site.hoisted)
        plain, early = self._in_leaves(loop, site), self.about.ends_early
        watched = _watched(plain, site)
        leaves, probe = self._begin(plain.state, site, watched)
        parts, structure = jax.tree.flatten(probe)
        count = [jnp.zeros(batch_of(loop), jnp.int32)] * early
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
    pairs = zip(y, watched.y_axes, strict=True)
    shapes = [aval.shape if axis is not None else (*rows, *aval.shape) for aval, axis in pairs]
    shared = batch is not None and None in watched.axes
    return Probe(
        jnp.zeros((*rows, 3), jnp.float32),
        list(map(jnp.zeros_like, leaves)),
        list(map(jnp.zeros_like, leaves)),
        [jnp.zeros(shape, aval.dtype) for shape, aval in zip(shapes, y, strict=True)],
        jnp.zeros((), jnp.float32) if shared else None,
        jnp.zeros((*rows, 2), jnp.float32) if ends_early and batch is not None else None,
    )


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
    """The same, of a loop that ends early."""
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
