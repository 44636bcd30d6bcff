"""Bodies and batches of variable length, and what they come to: each row by itself, step by step, by `plain.mask_scan`.

Padding does not exist there: of xs, only the valid steps are ever touched. Outputs are added up with weights to a loss.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from oracle import assert_close, is_inexact
from works import plain

import treescan

H, D = 3, 2


# Bodies: `body(params, rows, x)` over any batch shape, none included. All count steps in an integer leaf.


def joined(*parts):
    return jnp.concatenate([*parts, jnp.ones_like(parts[0][..., :1])], -1)


def lstm(params, rows, x):
    i, f, g, o = jnp.split(joined(x["a"], rows["h"]) @ params["w"], 4, -1)
    c = jax.nn.sigmoid(f) * rows["c"] + jax.nn.sigmoid(i) * params["act"](g)
    h = jax.nn.sigmoid(o) * params["act"](c)
    return {"h": h, "c": c, "n": rows["n"] + 1}, {"y": h, "n": rows["n"]}


def gru(params, rows, x):
    z, r = jnp.split(jax.nn.sigmoid(joined(x["a"], rows["h"]) @ params["gates"]), 2, -1)
    h = (1 - z) * rows["h"] + z * params["act"](joined(x["a"], r * rows["h"]) @ params["new"])
    return {"h": h, "n": rows["n"] + 1}, {"y": h * h, "n": rows["n"]}


def singular(params, rows, x):
    """Divides by the carry and by x and takes roots and logarithms of both; one leaf of the carry is x."""
    h = params["a"] * jnp.sqrt(rows["h"]) / x["u"] + jnp.log(x["v"]) + params["act"](params["a"]) + 2
    y = x["v"] / rows["h"] + jnp.log(rows["last"])
    return {"h": h, "last": x["u"], "n": rows["n"] + 1}, {"y": y, "n": rows["n"]}


def noisy(params, rows, x):
    """Draws from each row's own key, and adds up integers."""

    def draw(key):
        return jax.random.fold_in(key, 1), jax.random.uniform(key, (H,))

    each: Callable[..., Any] = draw
    for _ in range(rows["key"].ndim):
        each = jax.vmap(each)
    key, noise = each(rows["key"])
    h = params["act"](params["b"] * rows["h"] + noise + jnp.log(x["u"]))
    return {"h": h, "key": key, "n": rows["n"] + x["i"]}, {"y": h / x["u"], "n": x["i"]}


def uniform(rng, *shape, low=-1.0, high=1.0):
    return rng.uniform(low, high, shape).astype(np.float32)


def positive(rng, *shape):
    return uniform(rng, *shape, low=0.5, high=2.0)


class Case(NamedTuple):
    """A body, its params, what each row's carry begins with (beside the count), and xs."""

    body: Callable[..., Any]
    params: dict[str, tuple[int, ...]]
    rows: Callable[..., dict[str, Any]]
    xs: Callable[..., dict[str, Any]]


def _keys(rng, *shape):
    return jax.random.split(jax.random.key(int(rng.integers(1000))), shape)


CASES = {
    "lstm": Case(
        lstm,
        {"w": (D + H + 1, 4 * H)},
        lambda rng, b: {"h": uniform(rng, *b, H), "c": uniform(rng, *b, H)},
        lambda rng, s: {"a": uniform(rng, *s, D)},
    ),
    "gru": Case(
        gru,
        {"gates": (D + H + 1, 2 * H), "new": (D + H + 1, H)},
        lambda rng, b: {"h": uniform(rng, *b, H)},
        lambda rng, s: {"a": uniform(rng, *s, D)},
    ),
    "singular": Case(
        singular,
        {"a": ()},
        lambda rng, b: {"h": positive(rng, *b, H), "last": positive(rng, *b, H)},
        lambda rng, s: {"u": positive(rng, *s, H), "v": positive(rng, *s, H)},
    ),
    "noisy": Case(
        noisy,
        {"b": ()},
        lambda rng, b: {"h": uniform(rng, *b, H), "key": _keys(rng, *b)},
        lambda rng, s: {"u": positive(rng, *s, H), "i": rng.integers(0, 9, s).astype(np.int32)},
    ),
}


class Batch(NamedTuple):
    """Arguments (params, rows, xs), the weights of the outputs in the loss, and a direction for the arguments."""

    given: tuple[Any, Any, Any]
    weights: tuple[Any, Any]
    direction: tuple[Any, Any, Any]


def make_batch(name: str, valid: np.ndarray, padding: float, seed: int = 0) -> Batch:
    """Good data where `valid`; elsewhere `padding`, and so is the init of rows without any valid step."""
    rng, case = np.random.default_rng(seed), CASES[name]
    batch = valid.shape[1:]

    def spoiled(leaf, good):
        if not isinstance(leaf, np.ndarray):
            return leaf
        bad = padding if is_inexact(leaf) else np.iinfo(leaf.dtype).max
        return np.where(good.reshape(good.shape + (1,) * (leaf.ndim - good.ndim)), leaf, np.asarray(bad, leaf.dtype))

    def like(leaf):
        return uniform(rng, *np.shape(leaf)) if is_inexact(leaf) else None

    params = {key: positive(rng, *shape) / (1 + 2 * len(shape)) for key, shape in case.params.items()}
    rows = case.rows(rng, batch) | {"n": np.zeros(batch, np.int32)}
    xs = case.xs(rng, valid.shape)
    given = (params, rows, xs)
    weights = jax.tree.map(like, rows), {"y": uniform(rng, *valid.shape, H), "n": None}
    direction = jax.tree.map(like, given)
    some = np.asarray(valid.any(axis=0))
    given, direction = (
        (p, jax.tree.map(lambda leaf: spoiled(leaf, some), r), jax.tree.map(lambda leaf: spoiled(leaf, valid), x))
        for p, r, x in (given, direction)
    )
    return Batch(given, weights, direction)


# Derivatives, of a batch and of a segment alike.


def partition(tree: Any) -> tuple[Any, Any]:
    """The inexact leaves, and all others, each with None in place of the rest."""
    return (
        jax.tree.map(lambda leaf: leaf if is_inexact(leaf) else None, tree),
        jax.tree.map(lambda leaf: None if is_inexact(leaf) else leaf, tree),
    )


def combine(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=lambda leaf: leaf is None)


def inner(a: Any, b: Any) -> Any:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum((jnp.sum(x * y) for x, y in pairs), start=jnp.float32(0))


def derive(kind: str, run: Callable[..., Any], batch: Batch) -> tuple[Any, Any]:
    """What `run(*given)` returns, and the loss's gradient, its product with the Hessian, or the jvp."""
    floats, others = partition(batch.given)

    def outputs(floats):
        return partition(run(*combine(floats, others)))

    def loss(floats):
        out = outputs(floats)
        return inner(jax.tree.map(jnp.sin, out[0]), batch.weights), out

    def slope(floats):
        gradient, out = jax.grad(loss, has_aux=True)(floats)
        return inner(gradient, batch.direction), out

    if kind == "jvp":
        out, tangents, rest = jax.jvp(outputs, (floats,), (batch.direction,), has_aux=True)
        return combine(out, rest), tangents
    gradient, out = jax.grad({"grad": loss, "hvp": slope}[kind], has_aux=True)(floats)
    return combine(*out), gradient


# The oracle.


def expected(
    name: str, kind: str, batch: Batch, valid: np.ndarray, resets: np.ndarray, *, reverse: bool = False, fill: Any = 0
) -> tuple[Any, Any]:
    """What `derive(kind, ...)` of the masked scan is to return."""

    def run(params: Any, rows: Any, xs: Any) -> Any:
        body = functools.partial(CASES[name].body, params | {"act": jnp.tanh})
        rows, xs = jax.tree.map(jnp.asarray, (rows, xs))
        return plain.mask_scan(body, rows, xs, mask=valid, resets=resets, reverse=reverse, fill=fill)

    return derive(kind, run, batch)


# The masked scan.


class Setup(NamedTuple):
    """A masked scan and what is static in it.

    Attributes:
        case: the body's name.
        carried: whether the params travel in the carry, a static leaf beside them, or are closed over.
        given: which of lengths, mask and resets are passed.
        options: of `mask_scan`; a dict as its items, so that programs are found by their setup.
    """

    case: str = "singular"
    carried: bool = False
    given: tuple[str, ...] = ("mask",)
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def option(self) -> dict[str, Any]:
        return {
            name: dict(value) if name == "fill" and isinstance(value, tuple) else value for name, value in self.options
        }

    def runner(self, valid: Any, resets: Any) -> Callable[..., Any]:
        """`run(params, rows, xs)`, time leading whatever `time_axis` is."""
        option = self.option
        axis = option.get("time_axis", 0)
        flags = {"lengths": jnp.sum(valid, axis=0), "mask": jnp.moveaxis(valid, 0, axis)}
        flags |= {"resets": jnp.moveaxis(resets, 0, axis)}
        flags = {key: flags[key] for key in self.given}
        body = CASES[self.case].body

        def closed(params, rows, xs):
            cell = functools.partial(body, params | {"act": jnp.tanh})
            return treescan.mask_scan(cell, rows, xs, **flags, **option)

        def carried(params, rows, xs):
            def step(carry, x):
                rows, y = body(carry["params"] | {"act": carry["act"]}, carry["rows"], x)
                return carry | {"rows": rows}, y

            init = {"rows": rows, "params": params, "act": jnp.tanh}
            axes = {"rows": 0, "params": None, "act": None}
            final, ys = treescan.mask_scan(step, init, xs, **flags, carry_axes=axes, **option)
            assert final["act"] is jnp.tanh
            return final["rows"], ys

        def run(params, rows, xs):
            xs = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, axis), xs)
            final, ys = (carried if self.carried else closed)(params, rows, xs)
            return final, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0), ys)

        return run


@functools.cache
def masked_program(setup: Setup, kind: str) -> Callable[..., Any]:
    """`derive(kind, ...)` of data, mask and resets, all traced: examples of one shape cost one compilation."""
    return jax.jit(lambda batch, valid, resets: derive(kind, setup.runner(valid, resets), batch))


def draw_rows(
    given: tuple[str, ...], shape: tuple[int, ...], density: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(valid, resets), [T, *batch]; prefixes for lengths, everything for resets alone. Flags stand in padding too."""
    rng = np.random.default_rng(seed)
    valid = rng.random(shape) < density
    if "lengths" in given:
        lengths = rng.choice([0, min(1, shape[0]), shape[0], *rng.integers(0, shape[0] + 1, 3)], shape[1:])
        valid = np.arange(shape[0]).reshape(-1, *(1 for _ in shape[1:])) < lengths
    elif given == ("resets",):
        valid = np.ones(shape, bool)
    resets = rng.random(shape) < rng.choice([0.1, 0.4]) if "resets" in given else np.zeros(shape, bool)
    return valid, resets


def assert_equals_the_rows(setup: Setup, kind: str, batch: Batch, valid: np.ndarray, resets: np.ndarray) -> None:
    """The masked scan against the oracle: outputs and a derivative; exactly 0 with respect to padding."""
    option = setup.option
    if jax.__version_info__ < (0, 10) and setup.case == "noisy" and option.get("remat") and kind != "jvp":
        pytest.skip("jax 0.8.2: no gradient of a cond in which a checkpoint saves a typed key")
    got = masked_program(setup, kind)(batch, valid, resets)
    want = expected(
        setup.case, kind, batch, valid, resets, reverse=option.get("reverse", False), fill=option.get("fill", 0)
    )
    assert_close(got, want)
    if kind != "jvp":
        assert_no_gradient_of_padding(got[1][2], valid)


def assert_no_gradient_of_padding(xs: Any, valid: np.ndarray) -> None:
    for leaf in jax.tree.leaves(xs):
        npt.assert_array_equal(np.asarray(leaf)[~valid], 0)
