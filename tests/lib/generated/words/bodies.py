"""Bodies: one core, and parts that change what it is given, what it carries, or what it returns.

A leaf of the carry changes apart from the others (`m` reads no weights), so that results do not all depend on the same.
Where a program is under a map, its innermost axis is "i"; where it is within a `shard_map`, that axis is "d".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

STEPS, ROWS, UNITS, COUNT = 48, 4, 8, 3
"""Sizes of a loop, and how many elements a map has."""

Part = Callable[[SimpleNamespace], None]


# The core: (weights, h, x) to the next h.


def matmul(w: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(h @ w + x)


def gated(w: Any, h: Any, x: Any) -> Any:
    z = jax.nn.sigmoid(h @ w)
    return (1 - z) * h + z * jnp.tanh(x @ w.T)


def elementwise(w: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(w[:1] * h + x)


def largest(w: Any, h: Any, x: Any) -> Any:
    h = jnp.tanh(h @ w + x)
    return h - 0.1 * jnp.max(h, -1, keepdims=True)


def linear(w: Any, h: Any, x: Any) -> Any:
    return h @ w + x


def decaying(w: Any, h: Any, x: Any) -> Any:
    return 0.9 * h + x


CORES = {core.__name__: core for core in (matmul, gated, elementwise, largest, linear, decaying)}
LINEAR_CORES = ("linear", "decaying")


@jax.custom_jvp
def own_jvp(a: Any) -> Any:
    return jnp.sin(a)


own_jvp.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))


@jax.custom_vjp
def own_vjp(a: Any) -> Any:
    return jnp.sin(a)


own_vjp.defvjp(lambda a: (jnp.sin(a), a), lambda a, t: (t * jnp.cos(a),))


# Parts, each of which changes a step: its h, x, m, term (what m is given), and ys.

PARTS: dict[str, Part] = {}
LINEAR_PARTS: list[str] = []
"""Those in which a step stays linear in the carry and x."""


def part(name: str, *, is_linear: bool = False) -> Callable[[Part], Part]:
    def add(function: Part) -> Part:
        PARTS[name] = function
        LINEAR_PARTS.extend([name] * is_linear)
        return function

    return add


def number(a: Any, like: Any) -> Any:
    return jnp.asarray(a).astype(like.dtype)


@part("m of weights")
def _(s: Any) -> None:
    s.term = s.w[:1] * jnp.ones_like(s.m)


@part("axis_index", is_linear=True)
def _(s: Any) -> None:
    s.term = s.term * (1 + number(lax.axis_index("i"), s.term))


@part("axis_index in h", is_linear=True)
def _(s: Any) -> None:
    s.x = s.x * (1 + 0.2 * number(lax.axis_index("i"), s.x))


@part("random bits of the axis")
def _(s: Any) -> None:
    key = jax.random.fold_in(jax.random.key(3), lax.axis_index("i"))
    s.term = s.term * jax.random.uniform(key, (1, UNITS), s.term.dtype)


@part("psum", is_linear=True)
def _(s: Any) -> None:
    s.term = s.term + 0.1 * lax.psum(s.x, "i")


@part("all_gather", is_linear=True)
def _(s: Any) -> None:
    s.term = jnp.mean(lax.all_gather(s.term, "i"), 0)


@part("ppermute", is_linear=True)
def _(s: Any) -> None:
    s.term = lax.ppermute(s.term, "i", [(n, (n + 1) % COUNT) for n in range(COUNT)])


@part("psum_scatter", is_linear=True)
def _(s: Any) -> None:
    parts = jnp.stack([(n + 1) * s.term for n in range(COUNT)])
    s.term = 0.3 * lax.psum_scatter(parts, "i")


@part("all_to_all", is_linear=True)
def _(s: Any) -> None:
    parts = jnp.stack([(n + 1) * s.term for n in range(COUNT)])
    s.term = jnp.mean(lax.all_to_all(parts, "i", 0, 0), 0)


@part("axis_index of the mesh", is_linear=True)
def _(s: Any) -> None:
    s.term = s.term * (1 + number(lax.axis_index("d"), s.term))


@part("psum of the mesh", is_linear=True)
def _(s: Any) -> None:
    s.term = s.term + 0.1 * lax.psum(s.x, "d")


@part("cond on m")
def _(s: Any) -> None:
    s.h = lax.cond(jnp.sum(s.m) > 0, lambda h: jnp.tanh(h @ s.w), lambda h: jnp.sin(h @ s.w.T), s.h)


@part("cond of each row")
def _(s: Any) -> None:
    s.h = jax.vmap(lambda h, m: lax.cond(jnp.sum(m) > 0, jnp.tanh, lambda h: 0.5 * h, h))(s.h, s.m)


@part("cond on weights", is_linear=True)
def _(s: Any) -> None:
    s.h = lax.cond(s.w[0, 0] > -9, lambda h: 0.5 * h @ s.w + 0.5 * s.x, lambda h: 0.5 * h, s.h)


@part("cond on the axis", is_linear=True)
def _(s: Any) -> None:
    s.term = lax.cond(lax.axis_index("i") > 0, lambda t: 2 * t, lambda t: 0.5 * t, s.term)


@part("switch on a count")
def _(s: Any) -> None:
    branches = [lambda h: h, jnp.sin, lambda h: h - 0.1 * s.x]
    s.h = lax.switch(jnp.max(s.n) % 3, branches, s.h)


@part("inner scan", is_linear=True)
def _(s: Any) -> None:
    s.h = lax.scan(lambda h, c: (0.9 * h + c * s.term, None), s.h, jnp.linspace(0.0, 0.1, 3).astype(s.h.dtype))[0]


@part("inner while_loop")
def _(s: Any) -> None:
    still = lax.stop_gradient(s.h)
    s.ys["halved"] = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * c[1]), (0, still))[1]


@part("checkpoint")
def _(s: Any) -> None:
    s.core = jax.checkpoint(s.core)


@part("jit", is_linear=True)
def _(s: Any) -> None:
    s.core = jax.jit(s.core)


@part("vmap over rows", is_linear=True)
def _(s: Any) -> None:
    s.core = jax.vmap(s.core, (None, 0, 0))


@part("custom_jvp")
def _(s: Any) -> None:
    s.h = own_jvp(s.h)


@part("custom_vjp")
def _(s: Any) -> None:
    s.h = own_vjp(s.h)


@part("key")
def _(s: Any) -> None:
    s.h = s.h * jax.random.uniform(s.key, (1, UNITS), s.h.dtype)


@part("valid")
def _(s: Any) -> None:
    # Rows meet, and padded ones are left out by a sum, which does not hide NaN.
    off = jnp.where(s.valid, 0.0, -1e9).astype(s.x.dtype)
    s.h = s.h + 0.1 * jnp.tanh(jnp.max(s.x + off[:, None], 0, keepdims=True))


@part("first")
def _(s: Any) -> None:
    s.h = jnp.where(s.first[:, None], 0.5 * s.h, s.h)


@part("closure of weights", is_linear=True)
def _(s: Any) -> None:
    s.h = s.h * s.closed[None]


@part("closure of init")
def _(s: Any) -> None:
    s.h = s.h + 0.1 * s.start


@part("tokens")
def _(s: Any) -> None:
    s.x = s.x + 0.3 * s.w[s.tokens]


@part("y is x", is_linear=True)
def _(s: Any) -> None:
    s.ys["x"] = s.given_x


@part("y alone")
def _(s: Any) -> None:
    s.ys["alone"] = jnp.ones_like(s.given_x)


@part("y of weights")
def _(s: Any) -> None:
    s.ys["w"] = jnp.broadcast_to(s.w[0], s.h.shape)


@part("y of integers", is_linear=True)
def _(s: Any) -> None:
    s.ys["n"] = s.n


@part("handed on", is_linear=True)
def _(s: Any) -> None:
    s.h = s.h + 0.1 * s.kept


OF_THE_MESH = tuple(name for name in PARTS if name.endswith("of the mesh"))
OF_THE_AXIS = ("axis_index", "axis_index in h", "random bits of the axis", "cond on the axis", "psum", "all_gather", "ppermute", "psum_scatter", "all_to_all")  # fmt: skip
MIXING = ("psum", "all_gather", "ppermute", "psum_scatter", "all_to_all", "psum of the mesh")
"""Those in which mapped elements meet, so that all of them have to take the same steps."""
MEETING = ("cond on m", "switch on a count")
"""Those in which rows meet: padded ones may be shown any values, so no row is padded."""
KEYWORDS = ("key", "valid", "first")


def body_of(core: str, parts: tuple[str, ...], given: Any) -> Callable[..., Any]:
    """`body(carry, x, [key], [valid], [first])` that closes over the weights, and over what is computed of them."""
    w = given["w"]
    closed, start = 1 + 0.1 * jnp.sin(jnp.sum(w, 0)), jnp.tanh(given["h"])
    is_linear = core in LINEAR_CORES

    def step(carry: Any, x: Any, **keywords: Any) -> Any:
        s = SimpleNamespace(
            w=w, h=carry["h"], m=carry["m"], n=carry["n"], kept=carry.get("kept"), x=x["x"], term=x["x"]
        )
        vars(s).update(
            keywords, given_x=x["x"], tokens=x["tokens"], closed=closed, start=start, ys={}, core=CORES[core]
        )
        for name in parts:
            PARTS[name](s)
        h, m = s.core(s.w, s.h, s.x), 0.9 * s.m + 0.1 * s.term
        new = carry | {"h": h, "m": m, "n": s.n + 1}
        return new, {"y": h + m if is_linear else h * m, **s.ys}

    names = [name for name in KEYWORDS if name in parts]
    place = inspect.Parameter
    signature = [place("carry", place.POSITIONAL_OR_KEYWORD), place("x", place.POSITIONAL_OR_KEYWORD)]
    step.__signature__ = inspect.Signature([*signature, *(place(name, place.KEYWORD_ONLY) for name in names)])  # type: ignore[attr-defined]
    return step
