"""Every built-in carry in a body of its own, and the Python loop over one unpadded row that it stands for."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from oracle import is_inexact

from treescan.carries import (
    best,
    buffer,
    cast,
    clip_gradient,
    ema,
    keys,
    moments,
    read_tree,
    stop_gradient,
    sum_,
    window,
)

DECAYS, LIMIT, CAPACITY = {"a": 0.75, "b": 0.5}, 0.3, 3


class Case(NamedTuple):
    """A body, whose y is what it sees, and its oracle.

    Attributes:
        init: makes the init of rows, of any batch shape, from numbers and keys [*batch].
        step: what the body returns, of what it sees and x [*batch].
        view: what the body sees, as arrays [*batch, ...].
        oracle: the views of one row before each of its steps, and after the last.
        rtol: of values and gradients.
    """

    init: Callable[[Any, Any], Any]
    step: Callable[[Any, Any], Any]
    view: Callable[[Any], Any]
    oracle: Callable[[Any, Any, list[Any]], list[Any]]
    rtol: float = 2e-5


def pair(x):
    return jnp.stack([x, x * x], -1)


def last(values):
    return jnp.moveaxis(values, 0, -1)


def draw(key):
    """A number of a key, or of each."""
    return (jax.random.key_data(key)[..., 0] >> 8).astype(jnp.float32) * 2.0**-24


def walk(start, key, xs):
    places = [start]
    for n, x in enumerate(xs):
        places.append(places[-1] + x * draw(jax.random.fold_in(key, n)))
    return places


def in_bfloat16(start, _, xs):
    values = [start.astype(jnp.bfloat16)]
    for x in xs:
        values.append((0.5 * values[-1].astype(jnp.float32) + x).astype(jnp.bfloat16))
    return [h.astype(jnp.float32) for h in values]


def autoregression(start, _, xs):
    values = [start, 2 * start, 3 * start]
    for x in xs:
        values.append(0.5 * values[-1] - 0.25 * values[-3] + x)
    return [jnp.stack(values[n : n + 3]) for n in range(len(xs) + 1)]


def averages(debias, start, _, xs):
    value, came = {"a": start, "b": pair(start)}, [{"a": x, "b": pair(x)} for x in xs]
    seen = [dict(value) for _ in range(len(xs) + 1)]
    for name, decay in DECAYS.items():
        transform = optax.ema(decay, debias)
        begin = jnp.zeros_like(value[name]) if debias else value[name]
        state = optax.EmaState(jnp.zeros((), jnp.int32), begin)
        for n, x in enumerate(came):
            with jax.numpy_dtype_promotion("standard"):  # which optax needs
                seen[n + 1][name], state = transform.update(x[name], state)
    return seen


def statistics(_start, _, xs):
    seen = [(jnp.int32(0), jnp.zeros(()), jnp.zeros(()))]
    for n in range(1, len(xs) + 1):
        mean = sum(xs[:n]) / n
        seen.append((jnp.int32(n), mean, sum((x - mean) ** 2 for x in xs[:n]) / n))
    return seen


def sums(start, _, xs):
    return [start + sum(xs[:n], jnp.zeros(())) for n in range(len(xs) + 1)]


def score(x):
    return jnp.sin(5 * x)


def records(start, _, xs):
    seen = [(jnp.zeros(()), {"x": start, "pair": pair(start)})]
    for x in xs:
        better = score(x) > seen[-1][0]
        seen.append((score(x), {"x": x, "pair": pair(x)}) if better else seen[-1])
    return seen


def steep(h, x):
    return 3 * jnp.sin(h) * x + x


def steep_pair(h, x):
    return 3 * jnp.sin(h[..., ::-1]) * x[..., None] + h


@jax.custom_gradient
def limited(h):
    return h, lambda g: jnp.clip(g, -LIMIT, LIMIT)


@jax.custom_gradient
def limited_norm(h):
    return h, lambda g: g * jnp.minimum(1.0, LIMIT / jnp.maximum(jnp.linalg.norm(g), 1e-30))


def loop_of(step, show):
    def loop(start, _, xs):
        seen = [show(start)]
        for x in xs:
            seen.append(show(step(seen[-1], x)))
        return seen

    return loop


def stopped(seen, x):
    h = jnp.sin(3 * seen["h"]) * x
    return {"h": h, "loss": seen["loss"] + h * h}


def stop_h(seen):
    return {"h": jax.lax.stop_gradient(seen["h"]), "loss": seen["loss"]}


def positives(_start, _, xs):
    seen, values = [], []
    for n in range(len(xs) + 1):
        values = [x for x in xs[:n] if x > 0]
        kept = [*values, *[jnp.zeros(())] * CAPACITY][:CAPACITY]
        seen.append((jnp.stack(kept), jnp.int32(len(values))))
    return seen


def averaged(*, debias):
    def init(start, _):
        return ema({"a": start, "b": pair(start)}, DECAYS, debias=debias)

    return Case(init, lambda _, x: {"a": x, "b": pair(x)}, lambda seen: seen, functools.partial(averages, debias))


CASES = {
    "keys": Case(
        lambda start, key: {"rng": keys(key), "place": start},
        lambda seen, x: {"rng": None, "place": seen["place"] + x * draw(seen["rng"])},
        lambda seen: seen["place"],
        walk,
    ),
    "cast": Case(
        lambda start, _: cast(start.astype(jnp.bfloat16)),
        lambda h, x: 0.5 * h.astype(jnp.float32) + x,
        lambda h: h.astype(jnp.float32),
        in_bfloat16,
        rtol=2e-2,
    ),
    "window": Case(
        lambda start, _: window(jnp.stack([start, 2 * start, 3 * start])),
        lambda w, x: 0.5 * w[-1] - 0.25 * w[-3] + x,
        last,
        autoregression,
    ),
    "ema": averaged(debias=False),
    "debiased ema": averaged(debias=True),
    "moments": Case(
        lambda start, _: moments(start.shape),
        lambda _, x: x,
        lambda seen: (seen.count, seen.mean, seen.variance),
        statistics,
    ),
    "sum": Case(lambda start, _: sum_(start), lambda _, x: x, lambda seen: seen, sums),
    "best": Case(
        lambda start, _: best({"x": start, "pair": pair(start)}, jnp.zeros(start.shape)),
        lambda _, x: (score(x), {"x": x, "pair": pair(x)}),
        lambda seen: seen,
        records,
    ),
    "clip": Case(lambda start, _: clip_gradient(start, LIMIT), steep, lambda h: h, loop_of(steep, limited)),
    "clip norm": Case(
        lambda start, _: clip_gradient(pair(start), max_norm=LIMIT),
        steep_pair,
        lambda h: h,
        lambda start, key, xs: loop_of(steep_pair, limited_norm)(pair(start), key, xs),
    ),
    "stop": Case(
        lambda start, _: {"h": stop_gradient(start), "loss": start},
        stopped,
        lambda seen: seen["loss"],
        lambda start, key, xs: [
            seen["loss"] for seen in loop_of(stopped, stop_h)({"h": start, "loss": start}, key, xs)
        ],
    ),
    "buffer": Case(
        lambda start, _: buffer({"x": 0.0}, CAPACITY, batch=start.shape),
        lambda _, x: ({"x": x}, x > 0),
        lambda seen: (last(seen[0]["x"]), seen[1]),
        positives,
    ),
}
NAMES = tuple(CASES)
EVERY_DAY = ("window", "moments", "stop")  # a program of these few compiles in a fraction of the time
FORWARD = tuple(name for name in NAMES if not name.startswith("clip"))  # those that have a forward mode


def group_of(name):
    """Those that share a program with a case."""
    return EVERY_DAY if name in EVERY_DAY else tuple(other for other in NAMES if other not in EVERY_DAY)


@functools.cache
def body_of(names):
    """A body that carries some of the cases side by side; one and the same function for the same names."""

    def body(carry, x):
        return (
            {name: CASES[name].step(carry[name], x[name]) for name in names},
            {name: CASES[name].view(carry[name]) for name in names},
        )

    return body


def init_of(names, start, key):
    return {name: CASES[name].init(start[name], key) for name in names}


def run(names, scan, start, key, xs, **options):
    """For each case the outputs, and what the final carry shows."""
    final, ys = scan(body_of(names), init_of(names, start, key), xs, **options)
    return {name: (ys[name], CASES[name].view(read_tree(final[name]))) for name in names}


# The oracle, over rows.


def run_row(name, start, key, xs, valid):
    """The outputs of one row, zero where padded, and its last view; gradients of its loss by start and by each x."""
    steps = [int(t) for t in np.flatnonzero(valid)]

    def loss(start, xs):
        seen = CASES[name].oracle(start, key, [xs[t] for t in steps])
        numbers = [[leaf for leaf in jax.tree.leaves(view) if is_inexact(leaf)] for view in seen]
        terms = [
            jnp.sum(jnp.sin((k + 2 + (i == len(steps)) * len(leaves)) * leaf))
            for i, leaves in enumerate(numbers)
            for k, leaf in enumerate(leaves)
        ]
        return sum(terms), seen

    of_xs = np.zeros_like(xs)
    (of_start, by_step), seen = jax.grad(loss, (0, 1), has_aux=True)(start, {t: jnp.float32(xs[t]) for t in steps})
    for t, slope in by_step.items():
        of_xs[t] = slope
    shown, zero = dict(zip(steps, seen[:-1], strict=True)), jax.tree.map(np.zeros_like, seen[-1])
    return (stack([shown.get(t, zero) for t in range(len(valid))]), seen[-1]), (of_start, of_xs)


def run_rows(name, start, keys, xs, valid):
    """What `with_gradients(run)` is to be for a case: each row by itself, of which only the valid steps are touched."""
    xs = np.asarray(xs)
    rows = [run_row(name, start[b], keys[b], xs[:, b], valid[:, b]) for b in range(len(start))]
    ys, final = stack([outs[0] for outs, _ in rows], 1), stack([outs[1] for outs, _ in rows])
    return (ys, final), (stack([g for _, (g, _) in rows]), stack([g for _, (_, g) in rows], 1))


def stack(trees, axis=0):
    return jax.tree.map(lambda *leaves: np.stack(list(map(np.asarray, leaves)), axis), *trees)


def losses(outs):
    """For each case a number in which all its outputs count."""

    def loss(out):
        leaves = filter(is_inexact, jax.tree.leaves(out))
        return sum((jnp.sum(jnp.sin((k + 2) * leaf)) for k, leaf in enumerate(leaves)), jnp.zeros(()))

    return {name: loss(out) for name, out in outs.items()}


def with_gradients(call, start, xs):
    """For each case the outputs of `call(start, xs)`, and the gradients of its loss."""

    def total(start, xs):
        outs = call(start, xs)
        return sum(losses(outs).values()), outs

    gradients, outs = jax.grad(total, (0, 1), has_aux=True)(start, xs)
    return {name: (outs[name], tuple(part[name] for part in gradients)) for name in outs}
