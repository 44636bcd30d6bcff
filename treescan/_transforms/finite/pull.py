"""Evidence of a bad cotangent: the derivative of the step that made it, evaluated operation by operation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._loop.body import Memo
from ..._loop.loop import Loop
from ..._trace.blame import is_checked
from ..._trace.hoist import merge
from ..._types import Array
from .again import At, Told, state_before
from .case import CONSTANT, About, Case, Evidence
from .site import Site


class Found(NamedTuple):
    """A bad cotangent.

    Attributes:
        number: int32[], of the step, in the order of the run; the length of the loop: it was bad before the last step.
        after: the cotangents of the state that the step was given, of leaves that have one.
        before: those that it made.
        y: those of its outputs.
    """

    number: Array
    after: list[Array]
    before: list[Array]
    y: list[Array]


@dataclass(frozen=True, eq=False)
class Pulled:
    """A loop, less its arrays, whose cotangents are looked at: rules for derivatives may not hold tracers.

    Attributes:
        loop: the loop.
        site: what it is called; its arrays are not used.
        paths: what each leaf of the state is called.
        fed: what the leaves that are given whole are called, and those that a step is fed.
    """

    loop: Loop
    site: Site
    paths: tuple[str, ...]
    fed: tuple[list[str], list[str]]

    @classmethod
    def of(cls, site: Site) -> Pulled:
        """Of a loop before it was checked."""
        loop = dataclasses.replace(site.once_more(), consts=None, state=None)
        return cls(loop, site, site.names_of_state(), site.names_of_feed())


def evidence_of(told: Told, pulled: Pulled, found: Found, reads: Any) -> Evidence:
    """What is known of a bad cotangent. Its `before` is the carry of the step, its `after` the cotangents."""
    consts, state, xs = reads
    site, length = pulled.site, pulled.loop.length
    loop = dataclasses.replace(pulled.loop, consts=consts, state=state, xs=xs, memo=Memo())
    first = jnp.minimum(found.number, length - 1)
    at = At(first, length - 1 - first if loop.reverse else first, None)
    leaves = state_before(at, site, loop)
    feed = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at.place, keepdims=False), xs)

    def pull(consts: Any, leaves: list[Array], feed: Any, after: list[Array], y: list[Array]) -> list[Array]:
        def outputs(smooth: list[Array]) -> tuple[list[Array], list[Array]]:
            given = iter(smooth)
            state = [next(given) if is_checked(leaf) else leaf for leaf in leaves]
            new, ys = loop.step(consts, state, feed)
            return list(filter(is_checked, new)), list(filter(is_checked, jax.tree.leaves(ys)))

        _, back = jax.vjp(outputs, list(filter(is_checked, leaves)))
        return back((after, y))[0]

    given = (consts, leaves, feed, found.after, found.y)
    jaxpr = jax.make_jaxpr(pull)(*given)
    told.names += _names(pulled, given, leaves, len(jaxpr.consts))
    opened = jaxpr.jaxpr.replace(constvars=[], invars=[*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars])
    told.blame.evaluate(opened, [*jaxpr.consts, *jax.tree.leaves(given)])
    unchanged, _ = consts
    cotangents = iter(found.before)
    after = [next(cotangents) if is_checked(leaf) else jnp.zeros(()) for leaf in leaves]
    none = [jnp.zeros(()) for _ in unchanged]
    position = jnp.asarray(at.place, jnp.int32)
    before = merge(site.fixed, unchanged, leaves)
    x = feed.x if site.slices is None else site.slices.join(consts[1][1][0], jax.tree.leaves(feed.x))
    return Evidence(found.number, position, before, merge(site.fixed, none, after), x, None, jnp.stack(told.blame.bits))


def _names(pulled: Pulled, given: Any, leaves: list[Array], closed: int) -> list[str]:
    """What the inputs of the derivative of a step are called."""
    consts, _, _, _, y = given
    unchanged, (held, inner) = consts
    whole, fed = pulled.fed
    changing = [path for path, fixed in zip(pulled.paths, pulled.site.fixed, strict=True) if not fixed]
    fixed = [path for path, is_fixed in zip(pulled.paths, pulled.site.fixed, strict=True) if is_fixed]
    others = len(jax.tree.leaves(inner)) - len(whole)
    smooth = [path for path, leaf in zip(changing, leaves, strict=True) if is_checked(leaf)]
    constants = [*[CONSTANT] * (closed), *fixed, *[CONSTANT] * len(held), *whole, *[CONSTANT] * others]
    assert len(unchanged) == len(fixed)
    cotangents = [*(f"the cotangent of {path} after it" for path in smooth), *(["the cotangent of y"] * len(y))]
    return [*constants, *changing, *fed, *cotangents]


def case_of_pulled(pulled: Pulled, about: About, told: Told) -> Case:
    """What is static of the evidence."""
    site, count = pulled.site, len(pulled.site.fixed)
    carry = site.carry_of(range(count))
    made = iter(told.blame.results)
    kinds = [is_checked(leaf) for leaf in site.hoisted.settled]
    results = [next(made) if kind and not fixed else None for kind, fixed in zip(kinds, site.fixed, strict=True)]
    return Case(
        about,
        site.given.length,
        tuple(told.blame.operations),
        tuple(results),
        tuple(told.names),
        pulled.paths,
        site.fixed,
        (None,) * count,
        tuple(jax.tree.leaves(carry)),
        jax.tree.structure(carry),
        site.given.names[0],
    )
