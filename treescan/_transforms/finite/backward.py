"""`check_finite="backward"`: looks at the cotangents of the carry, in reverse mode.

What was found travels as the cotangent of a probe, which the state holds and no step reads: each step hands it on, and
its rule for derivatives notes the first cotangent that is NaN or infinite. A rule before the first step reads it, when
the gradient has come through all steps. Nothing of this is in a program that is not differentiated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import is_key
from ..._errors import ArgumentError, Fault
from ..._loop.body import Memo
from ..._loop.loop import Feed, Loop, Step
from ..._loop.run import as_arrays
from ..._trace.blame import is_checked
from ..._trace.hoist import as_loop
from ..._types import Array, PyTree
from ..refuse import in_reverse_alone
from .again import in_branch
from .case import About
from .deliver import tell
from .pull import Found, Pulled, case_of_pulled, evidence_of
from .refuse import refuse_devices, refuse_effects
from .site import Slices, site_of
from .watch import numbers_of

_BASE = 1 << 16


class Probe(NamedTuple):
    """What its cotangent says of the steps behind it.

    Attributes:
        code: float32[2], the number of the step that was found, counted from 1, in two digits; 0: there is none.
        after: the last cotangent of the state before that: what this step was given.
        before: the cotangent of the state that was found: what this step made of it.
        y: the cotangent of its outputs.
    """

    code: Array
    after: list[Array]
    before: list[Array]
    y: list[Array]

    @property
    def is_open(self) -> Array:
        """bool[]: whether nothing was found."""
        return jnp.all(self.code == 0)


def _number_of(code: Array) -> Array:
    """int32[], counted from 0; -1: there is none."""
    high, low = code.astype(jnp.int32)
    return high * _BASE + low - 1


def _code_of(number: Array) -> Array:
    return jnp.stack([(number + 1) // _BASE, (number + 1) % _BASE]).astype(jnp.float32)


@jax.custom_vjp
def pass_state(leaves: list[Array], probe: Probe, number: Array) -> tuple[list[Array], Probe]:
    """The state and the probe before a step; the cotangent of the state is looked at."""
    del number
    return leaves, probe


def _look(number: Array, given: tuple[list[Array], Probe]) -> tuple[list[Array], Probe, None]:
    leaves, probe = given
    bad = jnp.zeros((), bool)
    for leaf in leaves:
        bad = bad | jnp.any(~jnp.isfinite(leaf))
    found, going = probe.is_open & bad, probe.is_open & ~bad
    code = jnp.where(found, _code_of(number), probe.code)
    after, before = _where(going, leaves, probe.after), _where(found, leaves, probe.before)
    return leaves, Probe(code, after, before, probe.y), None


pass_state.defvjp(lambda leaves, probe, number: ((leaves, probe), number), _look)


@jax.custom_vjp
def pass_outputs(leaves: list[Array], probe: Probe) -> tuple[list[Array], Probe]:
    """The outputs of a step and the probe after it; the cotangent of the outputs is noted."""
    return leaves, probe


def _note(_: None, given: tuple[list[Array], Probe]) -> tuple[list[Array], Probe]:
    leaves, probe = given
    return leaves, probe._replace(y=_where(probe.is_open, leaves, probe.y))


pass_outputs.defvjp(lambda leaves, probe: ((leaves, probe), None), _note)


def _zero_of(tree: Any) -> Array:
    """bool[]: False, and mapped where anything in a tree is: JAX adds up the cotangents of what is not."""
    zero = jnp.zeros((), bool)
    for leaf in jax.tree.leaves(tree):
        if not is_key(leaf):
            first = jax.lax.stop_gradient(leaf).reshape(-1)[:1]
            zero = zero | (jnp.any(first != first) & False)
    return zero


def _where(flag: Array, new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    return [jnp.where(flag, a, b) for a, b in zip(new, old, strict=True)]


def smooth(leaves: Sequence[Any]) -> list[Any]:
    """The leaves that have a cotangent."""
    return [leaf for leaf in leaves if is_checked(leaf)]


def put_smooth(leaves: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """The leaves, those that have a cotangent replaced."""
    others = iter(new)
    return [next(others) if is_checked(leaf) else leaf for leaf in leaves]


@dataclass(frozen=True, eq=False)
class WatchedBackward:
    """A step that hands on a probe. Its state is (the probe, the inner state, a list), its x (its number, inner x)."""

    step: Step

    def __call__(self, consts: PyTree, state: tuple[Probe, list[Array]], feed: Feed) -> tuple[PyTree, PyTree]:
        probe, leaves = state
        number, x = feed.x
        seen, probe = pass_state(smooth(leaves), probe, number)
        new, y = self.step(consts, put_smooth(leaves, seen), feed._replace(x=x))
        outputs, structure = jax.tree.flatten(y)
        noted, probe = pass_outputs(smooth(outputs), probe)
        return (probe, new), jax.tree.unflatten(structure, put_smooth(outputs, noted))


@dataclass(frozen=True)
class CheckCotangents:
    """`check_finite="backward"`.

    Attributes:
        about: the words for messages about the loop.
        slices: what is scanned over, where some leaves are given whole; None: none are.
    """

    about: About
    slices: Slices | None = None
    moves = True

    def __call__(self, loop: Loop) -> Loop:
        if not loop.length:
            return loop
        refuse_devices()
        loop = dataclasses.replace(loop, state=as_arrays(loop.state))
        site = site_of(loop, self.slices, (), loop.length - 1)
        refuse_effects(site.hoisted)
        plain = dataclasses.replace(as_loop(site.hoisted), trace=None)
        pulled = Pulled.of(site)
        y = [aval for aval in site.hoisted.y_avals if jnp.issubdtype(aval.dtype, jnp.inexact)]
        leaves, probe = self._begin(pulled, plain, y)
        xs = plain.xs._replace(x=(numbers_of(loop), plain.xs.x))
        step = WatchedBackward(plain.step)
        watched = dataclasses.replace(plain, step=step, state=(probe, leaves), xs=xs, memo=Memo())

        def restored(state: Any) -> list[Array]:
            probe, leaves = state
            seen, _ = pass_state(smooth(leaves), probe, jnp.int32(loop.length))
            return put_smooth(leaves, seen)

        return watched.finished(restored)

    def _begin(self, pulled: Pulled, loop: Loop, y: list[Any]) -> tuple[list[Array], Probe]:
        """The state before the first step, and a probe; what its cotangent says is told in the gradient."""
        reads = (loop.consts, loop.state, loop.xs)
        zero = _zero_of(reads)
        zeros = [jnp.broadcast_to(zero.astype(leaf.dtype), leaf.shape) for leaf in (*smooth(loop.state), *y)]
        count = len(zeros) - len(y)

        @jax.custom_vjp
        def begin(leaves: list[Array], reads: Any, probe: Probe) -> tuple[list[Array], Probe]:
            del reads
            return leaves, probe

        def forward(leaves: list[Array], reads: Any, probe: Probe) -> Any:
            return (leaves, probe), reads

        def backward(reads: Any, given: tuple[list[Array], Probe]) -> Any:
            leaves, probe = given
            self._tell(pulled, reads, jax.lax.stop_gradient(probe))
            return leaves, None, None

        begin.defvjp(forward, backward)
        code = jnp.broadcast_to(zero.astype(jnp.float32), (2,))
        seen, probe = begin(smooth(loop.state), reads, Probe(code, zeros[:count], zeros[:count], zeros[count:]))
        return put_smooth(loop.state, seen), probe

    def _tell(self, pulled: Pulled, reads: Any, probe: Probe) -> None:
        number = _number_of(probe.code)
        found = Found(number, probe.after, probe.before, probe.y)
        evidence, told = in_branch(number >= 0, lambda told, *given: evidence_of(told, pulled, *given), found, reads)
        tell(evidence, case_of_pulled(pulled, self.about, told))


def refuse_truncate(truncate: Any) -> None:
    """Refuses cotangents that are cut: what was found would be cut with them."""
    if truncate is not None:
        raise Fault(
            ArgumentError,
            '{verb} over {body}: `check_finite="backward"` does not look at cotangents that `truncate` cuts.',
            "Leave out one of the two.",
        )


def in_reverse_mode() -> contextlib.AbstractContextManager[None]:
    """Says it in these terms where JAX refuses forward mode."""
    return in_reverse_alone(_no_forward_mode)


def _no_forward_mode() -> Fault:
    return Fault(
        ArgumentError,
        '{verb} over {body}: forward mode was asked for, and `check_finite="backward"` looks at cotangents, which '
        "reverse mode alone has.",
        "Leave it out there. True looks at the carry, in forward mode too.",
    )
