"""Families of steps: what the defaults of `mask_scan` and of `scan(remat="auto")` cost, over many kinds of work.

Each family is one step at a size at which people run it. Every second one in the order of this file, from the first on,
is *fitted*: constants of the library may be chosen with it. The others are *held back*: they only judge. A new family
goes to the end of its group, or the halves change.

A gradient is that of the sum of squares of all results that have one, with respect to params, init and, where a layer
below would have made them (`inputs`), xs. Steps that decide something do so on numbers that are exact in floating
point, multiples of 1/64 that are only added, so that two programs never decide differently.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import treescan
from benchmarks._by_hand import safe_where_scan, where_scan
from benchmarks._harness import (
    Comparison,
    Distribution,
    Effort,
    Measurement,
    Memory,
    MemoryMeasurement,
    ratio_of,
)
from benchmarks._lstm import Params, State, lstm, normal
from benchmarks.bodies import Body, Step, delta_rule, gru, hmm, kalman, one_row, rnn
from benchmarks.masked import Program, memory

FORWARD, GRADIENT = "forward", "gradient"
FULL, UNIFORM, SAFE_KIND = "full", "uniform", "full against safe"
WHERE, SAFE, SCAN = "where by hand", "safe where by hand", "jax.lax.scan"
TARGET, SLACK = 1.15, 0.03e-3  # a ratio, or a difference in seconds
EFFORT = Effort(seconds=0.6, min_blocks=5, max_blocks=60)  # so that all of it takes minutes
FITTED, HELD_BACK = "fitted", "held back"


@dataclasses.dataclass(frozen=True)
class Family(Body):
    """A step, and what it is run on.

    Attributes:
        name: what it is called in results; unique.
        step: (params, carry, x) to (carry, y).
        params: what is the same in every step.
        init: the carry, leaves `[B, ...]`.
        xs: leaves `[T, B, ...]`.
        inputs: whether the gradient is with respect to xs too.
    """

    inputs: bool = False

    @property
    def steps(self) -> int:
        """T."""
        return jax.tree.leaves(self.xs)[0].shape[0]

    @property
    def rows(self) -> int:
        """B."""
        return jax.tree.leaves(self.xs)[0].shape[1]


def families() -> Iterator[Family]:
    """All of them, in the order that decides which are fitted."""
    return itertools.chain(
        _cells(),
        _diagonal(),
        _tokens(),
        _grids(),
        _attention(),
        _matrices(),
        _chains(),
        _filters(),
        _equations(),
        _averages(),
        _decisions(),
        _branches(),
        _blocks(),
        _selections(),
        _optimizers(),
    )


def families_by_half() -> Iterator[tuple[Family, bool]]:
    """Each with whether it is fitted: every second one, from the first on."""
    return ((family, n % 2 == 0) for n, family in enumerate(families()))


def _weights(seed: int, *shape: int) -> Array:
    """Of a size that keeps activations of order 1: the second to last axis is that of the inputs."""
    return jnp.asarray(np.asarray(normal(seed, shape)) * shape[-2] ** -0.5, jnp.float32)


def _exact(seed: int, *shape: int) -> Array:
    """Multiples of 1/64, whose sums are exact."""
    return jnp.asarray(np.round(np.asarray(normal(seed, shape)) * 64) / 64, jnp.float32)


def _integers(seed: int, below: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)


def zeros(shape: int | tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """As `jnp.zeros`, but nothing is compiled."""
    return jnp.asarray(np.zeros(shape, dtype))


def ones(shape: int | tuple[int, ...]) -> Array:
    """As `jnp.ones`, but nothing is compiled."""
    return jnp.asarray(np.ones(shape, np.float32))


sigmoid, logsumexp = jax.nn.sigmoid, jax.nn.logsumexp


# Recurrent cells.


def _lstm(p: Any, state: Any, x: Array) -> tuple[Any, Array]:
    return lstm(Params(p["x"], p["h"], p["b"]), state, x)


def _normalized_lstm(p: Any, state: State, x: Array) -> tuple[State, Array]:
    """The gates are normalized over the layer."""
    gates = x @ p["x"] + state.h @ p["h"]
    gates = (gates - gates.mean(-1, keepdims=True)) * jax.lax.rsqrt(gates.var(-1, keepdims=True) + 1e-5) + p["b"]
    i, f, g, o = jnp.split(gates, 4, -1)
    c = sigmoid(f + 1) * state.c + sigmoid(i) * jnp.tanh(g)
    h = sigmoid(o) * jnp.tanh(c)
    return State(h, c), h


def _minimal(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """The minimal gated unit: one gate both forgets and resets."""
    of_gate, of_h = jnp.split(p["h"], 2, -1)
    x_gate, x_h = jnp.split(x @ p["x"] + p["b"], 2, -1)
    f = sigmoid(x_gate + h @ of_gate)
    h = (1 - f) * h + f * jnp.tanh(x_h + (f * h) @ of_h)
    return h, h


def _leaky(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """A reservoir: leaky units."""
    h = 0.7 * h + 0.3 * jnp.tanh(x @ p["x"] + h @ p["h"] + p["b"])
    return h, h


def _two_layers(p: Any, states: Any, x: Array) -> tuple[Any, Array]:
    new = []
    for layer, state in zip(p, states, strict=True):
        state, x = gru(layer, state, x)
        new.append(state)
    return tuple(new), x


CELLS: Sequence[tuple[str, Step, int, tuple[int, int, int, int], bool]] = (  # gates; T, B, F, H; inputs
    ("LSTM", _lstm, 4, (128, 16, 64, 128), True),
    ("LSTM, layer norm", _normalized_lstm, 4, (200, 24, 32, 64), True),
    ("GRU", gru, 3, (200, 32, 32, 64), True),
    ("minimal gated unit", _minimal, 2, (256, 32, 32, 64), False),
    ("small RNN", rnn, 1, (400, 64, 16, 32), False),
    ("wide RNN", rnn, 1, (40, 64, 64, 256), True),
    ("mapped rows", one_row, 1, (256, 16, 24, 48), False),
    ("GRU, one row", gru, 3, (500, 1, 32, 64), False),
    ("reservoir", _leaky, 1, (200, 4, 8, 200), False),
    ("tiny RNN, long", rnn, 1, (2000, 8, 4, 8), True),
)


def _cell(features: int, hidden: int, gates: int, seed: int = 0) -> dict[str, Array]:
    x, h = _weights(seed + 2, features, gates * hidden), _weights(seed + 3, hidden, gates * hidden)
    return {"x": x, "h": 0.8 * h, "b": zeros(gates * hidden)}


def _cells() -> Iterator[Family]:
    for name, step, gates, (steps, rows, features, hidden), inputs in CELLS:
        h = zeros((rows, hidden))
        init = State(h, h) if gates == 4 else h
        yield Family(name, step, _cell(features, hidden, gates), init, normal(0, (steps, rows, features)), inputs)
    layers = (_cell(32, 48, 3), _cell(48, 48, 3, seed=10))
    yield Family("GRU, two layers", _two_layers, layers, (zeros((16, 48)),) * 2, normal(0, (128, 16, 32)), True)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _cell(64, 64, 4))
    state = State(zeros((32, 64), jnp.bfloat16), zeros((32, 64), jnp.bfloat16))
    yield Family("LSTM, bfloat16", _lstm, half, state, normal(0, (100, 32, 64)).astype(jnp.bfloat16), True)


# Recurrences without a product of matrices in the carry.


def _simple_unit(p: Any, c: Array, x: Array) -> tuple[Array, Array]:
    """The simple recurrent unit: products of x alone, which a layer makes beforehand."""
    new, f, r = jnp.split(x, 3, -1)
    f, r = sigmoid(f + p["f"] * c), sigmoid(r + p["r"] * c)
    c = f * c + (1 - f) * new
    return c, r * jnp.tanh(c)


def _selective(p: Any, h: Array, x: Any) -> tuple[Array, Array]:
    """A selective state space, h `[B, D, N]`: how much is kept depends on x."""
    u, delta, b, c = x
    step = jax.nn.softplus(delta)
    h = jnp.exp(-step[..., None] * jnp.exp(p["a"])) * h + (step * u)[..., None] * b[:, None]
    return h, jnp.einsum("bdn,bn->bd", h, c) + p["d"] * u


def _rotating(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """A linear recurrent unit: a complex diagonal."""
    h = jnp.exp(-jnp.exp(p["size"]) + 1j * p["angle"]) * h + x @ p["x"]
    return h, h.real @ p["y"]


def _weighted_averages(p: Any, carry: Any, x: Any) -> tuple[Any, Array]:
    """RWKV's time mixing: averages of v, weighted by exp(k), kept stable by the largest exponent."""
    total, weight, top = carry
    k, v = x
    now = jnp.maximum(top, k + p["u"])
    old, new = jnp.exp(top - now), jnp.exp(k + p["u"] - now)
    y = (old * total + new * v) / (old * weight + new)
    decayed = top - jnp.exp(p["w"])
    now = jnp.maximum(decayed, k)
    old, new = jnp.exp(decayed - now), jnp.exp(k - now)
    return (old * total + new * v, old * weight + new, now), y


def _diagonal() -> Iterator[Family]:
    gates = {"f": 0.5 * normal(1, (128,)), "r": 0.5 * normal(2, (128,))}
    yield Family("simple recurrent unit", _simple_unit, gates, zeros((16, 128)), normal(0, (256, 16, 384)), True)
    space = {"a": jnp.log(jnp.broadcast_to(jnp.arange(1.0, 17), (64, 16))), "d": ones(64)}
    xs = tuple(normal(seed, (128, 4, size)) for seed, size in enumerate((64, 64, 16, 16)))
    yield Family("selective state space", _selective, space, zeros((4, 64, 16)), xs, True)
    unit = {"size": normal(1, (64,)) - 2, "angle": normal(2, (64,)), "x": _weights(3, 32, 64), "y": _weights(4, 64, 32)}
    yield Family("complex diagonal", _rotating, unit, zeros((8, 64), jnp.complex64), normal(0, (200, 8, 32)))
    mixing = {"u": normal(1, (128,)), "w": normal(2, (128,)) - 2}
    init = zeros((8, 128)), zeros((8, 128)), jnp.full((8, 128), -10.0)
    xs = normal(3, (128, 8, 128)), normal(4, (128, 8, 128))
    yield Family("weighted averages", _weighted_averages, mixing, init, xs, True)


# Tokens.


def _embedded(p: Any, h: Array, token: Array) -> tuple[Array, Array]:
    h = jnp.tanh(p["e"][token] + h @ p["h"])
    return h, h


def _language(p: Any, h: Array, x: Any) -> tuple[Array, Array]:
    """A language model: embedding, GRU, and the log-likelihood of the next token."""
    token, following = x
    h, _ = gru(p["cell"], h, p["e"][token])
    scores = jax.nn.log_softmax(h @ p["y"])
    return h, jnp.take_along_axis(scores, following[:, None], 1)[:, 0]


def _tokens() -> Iterator[Family]:
    embedding = {"e": normal(1, (100, 48)), "h": _weights(2, 48, 48)}
    yield Family("embedding", _embedded, embedding, zeros((32, 48)), _integers(0, 100, 300, 32))
    model = {"e": normal(1, (64, 32)), "cell": _cell(32, 64, 3), "y": _weights(5, 64, 64)}
    text = _integers(0, 64, 129, 16)
    yield Family("language model", _language, model, zeros((16, 64)), (text[:-1], text[1:]))


# Steps on grids: convolutions and stencils.


def _convolve(image: Array, kernel: Array) -> Array:
    axes = ("NWC", "WIO", "NWC") if image.ndim == 3 else ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, kernel, (1,) * (image.ndim - 2), "SAME", dimension_numbers=axes)


def _convolved(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    h = jnp.tanh(_convolve(x, p["x"]) + _convolve(h, p["h"]))
    return h, h.mean(tuple(range(1, h.ndim)))


def _convolved_gru(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    z, r = jnp.split(sigmoid(_convolve(x, p["x"]) + _convolve(h, p["h"])), 2, -1)
    h = (1 - z) * h + z * jnp.tanh(_convolve(r * h, p["n"]))
    return h, h.mean((1, 2))


def _neighbours(field: Array) -> Array:
    """The Laplacian on a torus."""
    return sum((jnp.roll(field, by, axis) for by in (1, -1) for axis in (1, 2)), -4 * field)


def _reaction(p: Any, fields: Any, feed: Array) -> tuple[Any, Array]:
    """Gray and Scott's two chemicals."""
    u, v = fields
    reaction = u * v * v
    u = u + 0.16 * _neighbours(u) - reaction + (p["f"] + feed)[:, None, None] * (1 - u)
    v = v + 0.08 * _neighbours(v) + reaction - (p["f"] + p["k"]) * v
    return (u, v), v.mean((1, 2))


def _spectral(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """Diffusion in the frequencies."""
    h = jnp.fft.irfft(jnp.fft.rfft(h) * jnp.exp(-0.01 * p["k"] ** 2), n=64) + 0.1 * x
    return h, (h**2).mean(-1)


def _grids() -> Iterator[Family]:
    line = {"x": 0.2 * normal(1, (3, 8, 16)), "h": 0.1 * normal(2, (3, 16, 16))}
    yield Family("convolution, 1-D", _convolved, line, zeros((8, 32, 16)), normal(0, (60, 8, 32, 8)))
    image = {
        "x": 0.1 * normal(1, (3, 3, 4, 16)),
        "h": 0.1 * normal(2, (3, 3, 8, 16)),
        "n": 0.1 * normal(3, (3, 3, 8, 8)),
    }
    yield Family("convolutional GRU, 2-D", _convolved_gru, image, zeros((4, 12, 12, 8)), normal(0, (16, 4, 12, 12, 4)))
    chemistry = {"f": jnp.float32(0.035), "k": jnp.float32(0.06)}
    seeds = 0.5 + 0.1 * normal(1, (4, 32, 32)), 0.25 + 0.05 * normal(2, (4, 32, 32))
    yield Family("reaction and diffusion", _reaction, chemistry, seeds, 0.001 * normal(0, (100, 4)))
    yield Family("frequencies", _spectral, {"k": normal(1, (33,))}, zeros((16, 64)), normal(0, (150, 16, 64)))


# Attention in a step.


def _remembering(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """Attention over a memory that stays as it is."""
    weights = jax.nn.softmax(h @ p["q"] @ p["m"].T / 6)
    h = jnp.tanh(x @ p["x"] + weights @ p["m"])
    return h, h


def _decoder(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """A GRU that attends over what an encoder made of its row."""
    scores = jnp.tanh((h @ p["q"])[:, None] + p["keys"]) @ p["v"]
    context = jnp.einsum("bs,bsd->bd", jax.nn.softmax(scores), p["keys"])
    return gru(p["cell"], h, jnp.concatenate([x, context], -1))


def _attend(q: Array, keys: Array, values: Array, valid: Array) -> Array:
    scores = jnp.where(valid, jnp.einsum("bd,bsd->bs", q, keys) * q.shape[-1] ** -0.5, -1e9)
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(scores), values)


def _cached(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """One head over a cache into which each step writes its place."""
    keys, values, place = carry
    q, k, v = jnp.split(x @ p["x"], 3, -1)
    at = jnp.arange(x.shape[0]), place
    keys, values = keys.at[at].set(k), values.at[at].set(v)
    y = _attend(q, keys, values, jnp.arange(keys.shape[1]) <= place[:, None])
    return (keys, values, place + 1), y @ p["y"]


def _window(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """One head over the last steps, which move along."""
    q, k, v = jnp.split(x @ p["x"], 3, -1)
    keys, values = (jnp.concatenate([old[:, 1:], new[:, None]], 1) for old, new in zip(carry, (k, v), strict=True))
    return (keys, values), _attend(q, keys, values, jnp.full(keys.shape[:2], True)) @ p["y"]


def _attention() -> Iterator[Family]:
    memory = {"m": normal(1, (64, 32)), "q": _weights(2, 32, 32), "x": _weights(3, 32, 32)}
    yield Family("memory", _remembering, memory, zeros((16, 32)), normal(0, (200, 16, 32)))
    decoder = {
        "cell": _cell(48, 32, 3),
        "keys": normal(5, (16, 30, 32)),
        "q": _weights(6, 32, 32),
        "v": normal(7, (32,)),
    }
    yield Family("attending decoder", _decoder, decoder, zeros((16, 32)), normal(0, (50, 16, 16)), True)
    head = {"x": _weights(1, 32, 96), "y": _weights(2, 32, 32)}
    cache = zeros((4, 64, 32)), zeros((4, 64, 32)), zeros(4, jnp.int32)
    yield Family("attention, cache", _cached, head, cache, normal(0, (64, 4, 32)))
    yield Family("attention, window", _window, head, (zeros((8, 16, 32)),) * 2, normal(0, (128, 8, 32)), True)


# States that are matrices.


def _linear_attention(p: Any, memory: Array, x: Array) -> tuple[Array, Array]:
    k, v, q = jnp.split(x @ p["x"], 3, -1)
    memory = 0.97 * memory + k[:, :, None] * v[:, None]
    return memory, jnp.einsum("bk,bkv->bv", q, memory)


def _gated_attention(p: Any, memory: Array, x: Any) -> tuple[Array, Array]:
    """Four heads, with a decay of their own in each step."""
    q, k, v, decay = x
    memory = sigmoid(decay + p["b"])[..., None, None] * memory + jnp.einsum("bhk,bhv->bhkv", k, v)
    return memory, jnp.einsum("bhk,bhkv->bhv", q, memory)


def _matrices() -> Iterator[Family]:
    product = {"x": _weights(1, 64, 192)}
    yield Family("linear attention", _linear_attention, product, zeros((8, 64, 64)), normal(0, (100, 8, 64)))
    yield Family(
        "delta rule", delta_rule, {"x": _weights(6, 32, 96)}, zeros((8, 32, 32)), normal(0, (150, 8, 32)), True
    )
    heads = [0.3 * normal(seed, (128, 4, 4, 16)) for seed in range(3)]
    xs = (*heads, normal(3, (128, 4, 4)))
    yield Family(
        "linear attention, four heads", _gated_attention, {"b": jnp.full(4, 3.0)}, zeros((4, 4, 16, 16)), xs, True
    )


# Chains of states, alignments.


def _crf(p: Any, scores: Array, x: Array) -> tuple[Array, None]:
    """The partition function of a conditional random field: nothing but the last scores is wanted."""
    return logsumexp(scores[:, :, None] + p["transition"], axis=1) + x, None


def _scaled(p: Any, alpha: Array, x: Array) -> tuple[Array, Array]:
    """A hidden Markov model in probabilities, made to sum to 1 again in each step."""
    alpha = (alpha @ jax.nn.softmax(p["transition"])) * jnp.exp(x)
    total = alpha.sum(-1, keepdims=True)
    return alpha / total, jnp.log(total[:, 0])


def _viterbi(p: Any, best: Array, x: Array) -> tuple[Array, Array]:
    scores = best[:, :, None] + p["transition"]
    return scores.max(1) + x, scores.argmax(1).astype(jnp.int32)


def _ctc(p: Any, alpha: Array, x: Array) -> tuple[Array, Array]:
    """Over labels with a blank between any two: stay, go on, or leave out a blank."""
    once, twice = (jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=-30)[:, :-by] for by in (1, 2))
    odd = jnp.arange(alpha.shape[1]) % 2 == 1
    alpha = jnp.logaddexp(jnp.logaddexp(alpha, once), jnp.where(odd, twice, -30)) + x + p["b"]
    return alpha, logsumexp(alpha[:, -2:], -1)


def _aligned(p: Any, diagonals: Any, x: Array) -> tuple[Any, Array]:
    """A soft alignment of two sequences, diagonal by diagonal: the sum over all ways to get there."""
    before, last = diagonals
    shifted, aligned = (jnp.pad(d, ((0, 0), (1, 0)), constant_values=-30)[:, :-1] for d in (last, before))
    new = jnp.logaddexp(jnp.logaddexp(last, shifted) + p["gap"], aligned + x)
    return (last, new), new[:, -1]


CHAINS: Sequence[tuple[str, Step, tuple[int, int, int]]] = (  # T, B, states
    ("CRF, 8 states", _crf, (200, 16, 8)),
    ("CRF, 32 states", _crf, (60, 16, 32)),
    ("HMM, 4 states", hmm, (400, 32, 4)),
    ("HMM, 16 states", hmm, (200, 16, 16)),
    ("HMM, 48 states", hmm, (60, 8, 48)),
    ("HMM, scaled, 32 states", _scaled, (200, 32, 32)),
    ("HMM, scaled, 6 states", _scaled, (500, 16, 6)),
)


def _chains() -> Iterator[Family]:
    for name, step, (steps, rows, states) in CHAINS:
        transition = jax.nn.log_softmax(normal(1, (states, states)))
        init = jnp.full((rows, states), 1 / states)
        xs = normal(0, (steps, rows, states))
        yield Family(name, step, {"transition": transition}, init if step is _scaled else jnp.log(init), xs)
    yield Family("Viterbi", _viterbi, {"transition": _exact(1, 24, 24)}, zeros((16, 24)), _exact(0, 120, 16, 24))
    labels = jnp.full((16, 41), -30.0).at[:, 0].set(0)
    frames = jax.nn.log_softmax(normal(0, (150, 16, 41)))
    yield Family("CTC", _ctc, {"b": zeros(41)}, labels, frames, True)
    diagonals = zeros((16, 50)), zeros((16, 50))
    xs = normal(0, (100, 16, 50))
    yield Family("soft alignment", _aligned, {"gap": jnp.float32(-0.5)}, diagonals, xs, True)


# Filters.


def _level(p: Any, carry: Any, y: Array) -> tuple[Any, Array]:
    """A level that moves, in numbers: the smallest Kalman filter."""
    mean, var = carry
    var = var + jnp.exp(p["q"])
    total = var + jnp.exp(p["r"])
    error = y - mean
    mean, var = mean + var / total * error, var * jnp.exp(p["r"]) / total
    return (mean, var), -0.5 * (jnp.log(total) + error**2 / total)


def _particles(p: Any, places: Array, x: Any) -> tuple[Array, Array]:
    """Particles on a ring of 32 places, drawn anew in each step by the weights of a table."""
    moves, seen = x
    places = (places + moves) % 32
    weights = p["table"][seen[:, None], places]
    sums = jnp.cumsum(weights, -1)
    at = (jnp.arange(places.shape[1]) + 0.5) / places.shape[1] * sums[:, -1:]
    chosen = jnp.sum(sums[:, None] < at[..., None], -1)
    return jnp.take_along_axis(places, chosen, 1), jnp.log(sums[:, -1] / places.shape[1])


def _biquad(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """A filter of sound, of the second order."""
    first, second = carry
    y = p["b0"] * x + first
    return (p["b1"] * x - p["a1"] * y + second, p["b2"] * x - p["a2"] * y), y


def _system(states: int, seen: int) -> dict[str, Array]:
    return {
        "a": 0.9 * jnp.eye(states) + 0.01 * normal(4, (states, states)),
        "c": normal(5, (seen, states)),
        "q": jnp.eye(states),
        "r": jnp.eye(seen),
    }


def _filters() -> Iterator[Family]:
    for states, seen, steps, rows in ((4, 2, 150, 16), (10, 4, 60, 8)):
        init = zeros((rows, states)), jnp.broadcast_to(jnp.eye(states), (rows, states, states))
        xs = normal(0, (steps, rows, seen))
        yield Family(f"Kalman filter, {states} states", kalman, _system(states, seen), init, xs)
    level = {"q": jnp.float32(-1.0), "r": jnp.float32(0.5)}
    yield Family("local level", _level, level, (zeros(100), ones(100)), normal(0, (500, 100)))
    table = (1 + _integers(1, 64, 32, 32)) / 64
    xs = _integers(2, 3, 100, 8, 64), _integers(3, 32, 100, 8)
    yield Family("particle filter", _particles, {"table": table}, _integers(4, 32, 8, 64), xs)
    sound = {
        name: jnp.float32(value)
        for name, value in zip(("b0", "b1", "b2", "a1", "a2"), (0.2, 0.4, 0.2, -0.4, 0.2), strict=True)
    }
    yield Family("biquad", _biquad, sound, (zeros(16), zeros(16)), normal(0, (2000, 16)), True)


# Differential equations and physics.


def _euler(p: Any, z: Any, u: Array) -> tuple[Any, Array]:
    """Van der Pol's oscillator."""
    place, speed = z
    place, speed = place + 0.01 * speed, speed + 0.01 * (p["mu"] * (1 - place**2) * speed - place + u)
    return (place, speed), place


def _runge_kutta(slope: Callable[[Array], Array], z: Array, dt: float) -> Array:
    a = slope(z)
    b = slope(z + dt / 2 * a)
    c = slope(z + dt / 2 * b)
    d = slope(z + dt * c)
    return z + dt / 6 * (a + 2 * b + 2 * c + d)


def _hunters(p: Any, z: Array, u: Array) -> tuple[Array, Array]:
    """Lotka and Volterra's hunters and prey, RK4."""
    a, b, c, d = p["rates"]

    def slope(z: Array) -> Array:
        prey, hunters = z[:, 0], z[:, 1]
        return jnp.stack([prey * (a - b * hunters) + u, hunters * (c * prey - d)], 1)

    z = _runge_kutta(slope, z, 0.01)
    return z, z


def _neural_ode(p: Any, z: Array, u: Array) -> tuple[Array, Array]:
    """RK4 of a small network."""
    z = _runge_kutta(lambda z: jnp.tanh(z @ p["in"] + u) @ p["out"], z, 0.1)
    return z, z


def _gravity(p: Any, carry: Any, push: Array) -> tuple[Any, Array]:
    """Eight bodies, leapfrog."""
    places, speeds = carry
    apart = places[:, None] - places[:, :, None]
    pull = apart * ((apart**2).sum(-1, keepdims=True) + 1) ** -1.5
    speeds = speeds + 0.02 * (jnp.einsum("bijd,j->bid", pull, p["mass"]) + push[:, None])
    places = places + 0.02 * speeds
    return (places, speeds), (speeds**2).sum((1, 2))


def _springs(p: Any, carry: Any, push: Array) -> tuple[Any, Array]:
    """A string of 32 weights, moved at one end."""
    places, speeds = carry
    padded = jnp.pad(places, ((0, 0), (1, 1))).at[:, 0].set(push)
    force = p["k"] * (padded[:, :-2] - 2 * places + padded[:, 2:]) - 0.1 * speeds
    speeds = speeds + 0.05 * force
    return (places + 0.05 * speeds, speeds), places[:, -1]


def _pendulum(p: Any, carry: Any, noise: Array) -> tuple[Any, Any]:
    """A game: a pendulum with friction that a small network moves, and its rewards."""
    angle, speed = carry
    seen = jnp.stack([jnp.cos(angle), jnp.sin(angle), speed], -1)
    force = jnp.tanh(jnp.tanh(seen @ p["in"] + p["b"]) @ p["out"])[:, 0] + noise
    speed = speed + 0.05 * (-5 * jnp.sin(angle) - 0.5 * speed + force)
    angle = angle + 0.05 * speed
    return (angle, speed), (angle**2 + 0.1 * speed**2 + 0.01 * force**2)


def _epidemic(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """Susceptible, infected, recovered, in eight groups of age."""
    s, i, r = carry
    caught = 0.1 * s * (i @ jnp.exp(p["contacts"])) * x[:, None]
    healed = sigmoid(p["heal"]) * i
    return (s - caught, i + caught - healed, r + healed), caught.sum(-1)


def _equations() -> Iterator[Family]:
    yield Family("Euler", _euler, {"mu": jnp.float32(0.5)}, (ones(64), zeros(64)), 0.1 * normal(0, (1000, 64)))
    rates = {"rates": jnp.asarray([1.1, 0.4, 0.1, 0.4])}
    yield Family("RK4", _hunters, rates, ones((128, 2)), 0.1 * normal(0, (300, 128)))
    network = {"in": _weights(1, 16, 32), "out": _weights(2, 32, 16)}
    yield Family("RK4 of a network", _neural_ode, network, normal(3, (16, 16)), 0.1 * normal(0, (40, 16, 32)))
    bodies = normal(1, (8, 8, 3)), 0.1 * normal(2, (8, 8, 3))
    yield Family("gravity", _gravity, {"mass": ones(8)}, bodies, 0.1 * normal(0, (100, 8, 3)))
    yield Family("springs", _springs, {"k": jnp.full(32, 4.0)}, (zeros((16, 32)),) * 2, normal(0, (300, 16)), True)
    policy = {"in": _weights(1, 3, 16), "b": zeros(16), "out": _weights(2, 16, 1)}
    yield Family("pendulum", _pendulum, policy, (normal(3, (32,)), zeros(32)), 0.1 * normal(0, (200, 32)))
    groups = jnp.full((50, 8), 0.9), jnp.full((50, 8), 0.1), zeros((50, 8))
    disease = {"contacts": 0.3 * normal(1, (8, 8)) - 1, "heal": jnp.float32(-2.0)}
    yield Family("epidemic", _epidemic, disease, groups, jnp.exp(0.1 * normal(0, (180, 50))))


# Averages and returns.


def _average(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    h = h + sigmoid(p["a"]) * (x - h)
    return h, h


def _normalizer(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """Welford's mean and variance, and x normalized by them."""
    count, mean, squares = carry
    count = count + 1
    apart = x - mean
    mean = mean + apart / count[:, None]
    squares = squares + apart * (x - mean)
    return (count, mean, squares), p["scale"] * (x - mean) * jax.lax.rsqrt(squares / count[:, None] + 1)


def _smoothing(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """Holt's level and trend."""
    level, trend = carry
    a, b = sigmoid(p["a"]), sigmoid(p["b"])
    new = a * x + (1 - a) * (level + trend)
    return (new, b * (new - level) + (1 - b) * trend), x - level - trend


def _volatility(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """GARCH(1, 1): the likelihood of returns whose variance moves."""
    var, last = carry
    var = 0.1 + sigmoid(p["a"]) * last**2 + sigmoid(p["b"]) * var
    return (var, x), -0.5 * (jnp.log(var) + x**2 / var)


def _advantages(p: Any, total: Array, x: Any) -> tuple[Array, Array]:
    """Generalised advantages; the arrays are in reverse already."""
    delta, goes_on = x
    total = delta + p["gamma"] * 0.95 * goes_on * total
    return total, total


def _averages() -> Iterator[Family]:
    yield Family("average", _average, {"a": jnp.float32(-1.0)}, zeros(256), normal(0, (1000, 256)))
    init = zeros(32), zeros((32, 8)), zeros((32, 8))
    yield Family("running normalization", _normalizer, {"scale": ones(8)}, init, normal(0, (400, 32, 8)))
    smoothing = {"a": jnp.float32(-1.0), "b": jnp.float32(-2.0)}
    yield Family("level and trend", _smoothing, smoothing, (zeros(128), zeros(128)), normal(0, (365, 128)))
    yield Family("volatility", _volatility, smoothing, (ones(50), zeros(50)), normal(0, (750, 50)))
    goes_on = (_integers(1, 50, 500, 64) > 0).astype(jnp.float32)
    yield Family(
        "advantages", _advantages, {"gamma": jnp.float32(0.99)}, zeros(64), (normal(0, (500, 64)), goes_on), True
    )


# Learning from decisions, and spikes.


def _bandit(p: Any, carry: Any, x: Any) -> tuple[Any, Array]:
    """A gradient bandit; which arm was pulled is in the data."""
    preferences, baseline = carry
    arm, reward = x
    chance = jax.nn.softmax(preferences)
    pulled = jax.nn.one_hot(arm, chance.shape[-1])
    preferences = preferences + sigmoid(p["rate"]) * (reward - baseline)[:, None] * (pulled - chance)
    return (preferences, baseline + 0.1 * (reward - baseline)), jnp.log(jnp.sum(chance * pulled, -1))


def _table_learning(p: Any, values: Array, x: Any) -> tuple[Array, Array]:
    """Q-learning in a table, values `[B, states, actions]`."""
    state, action, reward, following = x
    rows = jnp.arange(values.shape[0])
    error = reward + 0.9 * values[rows, following].max(-1) - values[rows, state, action]
    return values.at[rows, state, action].add(sigmoid(p["rate"]) * error), error


@jax.custom_jvp
def _spike(v: Array) -> Array:
    return (v > 0).astype(v.dtype)


@_spike.defjvp
def _spike_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:  # pyright: ignore[reportUnusedFunction]
    return _spike(*primals), tangents[0] / (1 + 10 * jnp.abs(primals[0])) ** 2


def _spiking(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """Units that leak a fixed amount and fire at 1."""
    v, fired = carry
    v = jax.nn.relu(v * (1 - fired) - 1 / 32) + x @ p["x"] + fired @ p["h"]
    fired = _spike(v - 1)
    return (v, fired), fired


def _decisions() -> Iterator[Family]:
    arms = _integers(1, 10, 300, 64), normal(0, (300, 64))
    yield Family("bandit", _bandit, {"rate": jnp.float32(-2.0)}, (zeros((64, 10)), zeros(64)), arms)
    moves = _integers(1, 25, 300, 32), _integers(2, 4, 300, 32), normal(0, (300, 32)), _integers(3, 25, 300, 32)
    yield Family("Q-learning", _table_learning, {"rate": jnp.float32(-1.0)}, normal(4, (32, 25, 4)), moves)
    synapses = {"x": jnp.round(normal(1, (20, 80)) * 8) / 64, "h": jnp.round(normal(2, (80, 80)) * 2) / 64}
    spikes = (_integers(0, 4, 200, 16, 20) == 0).astype(jnp.float32)
    yield Family("spikes", _spiking, synapses, (zeros((16, 80)),) * 2, spikes)


# Branches, and loops within a step. Those of one row may branch on it; those of many on how far the longest has come.


def _either(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    h = jax.lax.cond(x[0, 0] > 0, lambda h: jnp.tanh(h @ p["a"] + x), lambda h: jnp.sin(h @ p["b"]), h)
    return h, h


def _now_and_then(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """A slow layer moves in every fourth step."""
    fast, slow, count = carry
    fast = jnp.tanh(x @ p["x"] + fast @ p["fast"] + slow)
    slow = jax.lax.cond(
        count.max() % 4 == 0, lambda slow: jnp.tanh(fast @ p["up"] + slow @ p["slow"]), lambda slow: slow, slow
    )
    return (fast, slow, count + 1), fast


def _mapped_branch(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """A branch for one row, mapped over many: both sides run."""

    def row(h: Array, x: Array) -> Array:
        return jax.lax.cond(x[0] > 0, lambda: jnp.tanh(p["a"].T @ h + x), lambda: 0.9 * h)

    h = jax.vmap(row)(h, x)
    return h, h


def _machine(p: Any, carry: Any, x: Any) -> tuple[Any, Array]:
    """An interpreter of one program: a stack and a switch over what is to be done."""
    stack, top = carry
    what, value = x

    def write(at: Array, new: Array) -> tuple[Array, Array]:
        at = jnp.clip(at, 2, stack.shape[1] - 1)
        return stack.at[:, at[0]].set(new), at

    first, second = stack[:, top[0]], stack[:, top[0] - 1]
    operations = (
        lambda: write(top + 1, value),
        lambda: write(top - 1, first + second),
        lambda: write(top - 1, jnp.tanh(first * second)),
        lambda: write(top, p["scale"] * first),
    )
    stack, top = jax.lax.switch(what[0], operations)
    return (stack, top), stack[:, top[0]]


def _inner_loop(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """Five rounds of the same in each step."""
    of_x = x @ p["x"]
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(of_x + h @ p["h"]), None), h, length=5)
    return h, h


def _branches() -> Iterator[Family]:
    sides = {"a": _weights(1, 32, 32), "b": _weights(2, 32, 32)}
    yield Family("branch, one row", _either, sides, zeros((1, 32)), normal(0, (400, 1, 32)))
    slow = {
        "x": _weights(1, 16, 64),
        "fast": _weights(2, 64, 64),
        "up": _weights(3, 64, 64),
        "slow": _weights(4, 64, 64),
    }
    init = zeros((16, 64)), zeros((16, 64)), zeros(16, jnp.int32)
    yield Family("branch, every fourth step", _now_and_then, slow, init, normal(0, (160, 16, 16)))
    yield Family("branch, mapped", _mapped_branch, sides, zeros((16, 32)), normal(0, (200, 16, 32)))
    program = _integers(1, 4, 500, 1), normal(0, (500, 1))
    init = zeros((1, 16)), jnp.full(1, 8, jnp.int32)
    yield Family("stack machine, one row", _machine, {"scale": jnp.float32(0.9)}, init, program)
    rounds = {"x": _weights(1, 16, 32), "h": _weights(2, 32, 32)}
    yield Family("inner loop", _inner_loop, rounds, zeros((16, 32)), normal(0, (60, 16, 16)))


# Blocks of networks, and many leaves.


def _leaves(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    carry = [jnp.tanh(leaf * weight + x) for leaf, weight in zip(carry, p, strict=True)]
    return carry, sum(carry, jnp.zeros(()))


def _named_leaves(p: Any, carry: Any, x: Array) -> tuple[Any, Any]:
    """Many small states, each of another shape and kind."""
    new = {
        name: leaf + 0.1 * (x.sum(-1).reshape(-1, *(1,) * (leaf.ndim - 1)) * p[name] - leaf)
        for name, leaf in carry.items()
    }
    return new, {name: leaf.reshape(leaf.shape[0], -1).mean(-1) for name, leaf in new.items()}


def _residual(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """A block of a transformer without attention, applied again and again."""
    h = h + x
    rms = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-5)
    h = 0.9 * h + jax.nn.gelu(rms @ p["in"]) @ p["out"]
    return h, h


def _experts(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """Two of eight experts, chosen by x."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["gate"]), 2)
    made = jnp.tanh(jnp.einsum("bd,bedh->beh", h + x, p["experts"][chosen]))
    h = 0.5 * h + jnp.einsum("be,beh->bh", weights, made)
    return h, h


def _blocks() -> Iterator[Family]:
    yield Family(
        "12 leaves", _leaves, [normal(n, (8,)) for n in range(12)], [zeros((32, 8))] * 12, normal(0, (200, 32, 8))
    )
    shapes: tuple[tuple[int, ...], ...] = ((4,), (3, 5), (1,), (2, 2, 2), (7,), (), (6,), (4, 4))
    states = {str(n): zeros((16, *shape)) for n, shape in enumerate(shapes)}
    scales = {str(n): normal(n, shape) for n, shape in enumerate(shapes)}
    yield Family("8 leaves of many shapes", _named_leaves, scales, states, normal(0, (200, 16, 4)))
    block = {"in": _weights(1, 64, 256), "out": 0.1 * _weights(2, 256, 64)}
    yield Family("residual block", _residual, block, zeros((32, 64)), normal(0, (48, 32, 64)), True)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), block)
    xs = normal(0, (32, 16, 64)).astype(jnp.bfloat16)
    yield Family("residual block, bfloat16", _residual, half, zeros((16, 64), jnp.bfloat16), xs)
    experts = {"gate": normal(1, (32, 8)), "experts": _weights(2, 8, 32, 32)}
    yield Family("mixture of experts", _experts, experts, zeros((8, 32)), normal(0, (60, 8, 32)))


# Sorting, searching, reading and writing at places.


def _median(p: Any, last: Array, x: Array) -> tuple[Array, Array]:
    """The median of the last nine."""
    last = jnp.concatenate([last[:, 1:], x[:, None]], 1)
    return last, p["scale"] * jnp.sort(last, -1)[:, 4]


def _beams(p: Any, carry: Any, x: Array) -> tuple[Any, Array]:
    """The best four of four times 32."""
    tokens, scores = carry
    scores, chosen = jax.lax.top_k((scores[:, :, None] + p["next"][tokens] + x[:, None]).reshape(len(x), -1), 4)
    tokens = (chosen % x.shape[1]).astype(jnp.int32)
    return (tokens, scores), tokens


def _histogram(p: Any, counts: Array, x: Any) -> tuple[Array, Array]:
    """How often each was seen before, with old ones fading."""
    token, weight = x
    rows = jnp.arange(counts.shape[0])
    counts = (sigmoid(p["keep"]) * counts).at[rows, token].add(weight)
    return counts, counts[rows, token]


def _pushdown(p: Any, carry: Any, x: Any) -> tuple[Any, Array]:
    """An RNN with a stack of its own in each row: pushes and pops are in the data."""
    h, stack, top = carry
    value, push = x
    rows = jnp.arange(h.shape[0])
    h = jnp.tanh(value @ p["x"] + h @ p["h"] + stack[rows, top])
    top = jnp.clip(top + 2 * push - 1, 0, stack.shape[1] - 1)
    stack = stack.at[rows, top].set(jnp.where(push[:, None] == 1, h, stack[rows, top]))
    return (h, stack, top), h


def _selections() -> Iterator[Family]:
    yield Family("running median", _median, {"scale": jnp.float32(1.5)}, zeros((64, 9)), normal(0, (200, 64)))
    init = _integers(1, 32, 8, 4), zeros((8, 4))
    yield Family("beam search", _beams, {"next": _exact(1, 32, 32)}, init, _exact(0, 60, 8, 32))
    seen = _integers(0, 50, 300, 32), normal(1, (300, 32))
    yield Family("fading histogram", _histogram, {"keep": jnp.float32(3.0)}, zeros((32, 50)), seen)
    pushdown = {"x": _weights(1, 16, 32), "h": 0.5 * _weights(2, 32, 32)}
    init = zeros((16, 32)), zeros((16, 12, 32)), zeros(16, jnp.int32)
    yield Family("stack in each row", _pushdown, pushdown, init, (normal(0, (100, 16, 16)), _integers(3, 2, 100, 16)))


# Optimizers and solvers.


def _momentum(p: Any, carry: Any, batch: Any) -> tuple[Any, Array]:
    """SGD with momentum on a regression, through which a rate is learned."""
    weights, speed = carry
    inputs, wanted = batch

    def loss(weights: Array) -> Array:
        return jnp.mean((jnp.einsum("bnd,bd->bn", inputs, weights) - wanted) ** 2, -1)

    value, pull = jax.vjp(loss, weights)
    speed = 0.9 * speed - jnp.exp(p["rate"]) * pull(jnp.ones_like(value))[0]
    return (weights + speed, speed), value


def _adam(p: Any, carry: Any, batch: Array) -> tuple[Any, Array]:
    """Adam on a small network in each row."""
    weights, mean, square = carry

    def loss(weights: Any) -> Array:
        made = jnp.einsum("bnh,bho->bno", jnp.tanh(jnp.einsum("bnd,bdh->bnh", batch, weights["in"])), weights["out"])
        return jnp.sum((made - jnp.sin(batch)) ** 2)

    pull = jax.grad(loss)(weights)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, pull)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, pull)
    moved = jax.tree.map(lambda w, m, s: w - jnp.exp(p["rate"]) * m / jnp.sqrt(s + 1e-2), weights, mean, square)
    return (moved, mean, square), sum((m.mean((1, 2)) for m in jax.tree.leaves(mean)), jnp.zeros(()))


def _newton(p: Any, z: Array, x: Array) -> tuple[Array, Array]:
    """One step of Newton's method after a root that moves."""
    inner = jnp.tanh(z @ p["a"].T)
    error = z + 0.3 * inner - x
    jacobian = jnp.eye(z.shape[1]) + 0.3 * (1 - inner**2)[:, :, None] * p["a"]
    z = z - jnp.linalg.solve(jacobian, error[..., None])[..., 0]
    return z, error


def _sinkhorn(p: Any, carry: Any, heat: Array) -> tuple[Any, Array]:
    """A round of optimal transport in logarithms."""
    _, g = carry
    heat = heat[:, None]
    f = -heat * logsumexp((g[:, None] - p["cost"]) / heat[..., None], -1)
    g = -heat * logsumexp((f[:, :, None] - p["cost"]) / heat[..., None], 1)
    return (f, g), f.mean(-1) + g.mean(-1)


def _jacobi(p: Any, z: Array, x: Array) -> tuple[Array, Array]:
    """A round of an iteration for A z = x."""
    error = x - z @ p["a"] - 2 * z
    return z + 0.3 * error, (error**2).mean(-1)


def _optimizers() -> Iterator[Family]:
    batches = normal(0, (100, 16, 8, 8)), normal(1, (100, 16, 8))
    yield Family("momentum", _momentum, {"rate": jnp.float32(-4.0)}, (zeros((16, 8)),) * 2, batches)
    weights = {"in": _weights(1, 8, 4, 16), "out": _weights(2, 8, 16, 4)}
    nothing = jax.tree.map(jnp.zeros_like, weights)
    yield Family("Adam", _adam, {"rate": jnp.float32(-4.0)}, (weights, nothing, nothing), normal(0, (50, 8, 16, 4)))
    roots = 0.1 * jnp.cumsum(normal(0, (60, 16, 6)), 0)
    yield Family("Newton", _newton, {"a": _weights(1, 6, 6)}, zeros((16, 6)), roots)
    transport = {"cost": normal(1, (24, 24)) ** 2}
    heat = jnp.broadcast_to(jnp.linspace(2, 0.5, 50)[:, None], (50, 8))
    yield Family("Sinkhorn", _sinkhorn, transport, (zeros((8, 24)),) * 2, heat)
    yield Family("iterative solver", _jacobi, {"a": 0.3 * _weights(1, 64, 64)}, zeros((8, 64)), normal(0, (100, 8, 64)))


# What is compared.


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from of(families_by_half())


def smoke() -> Iterator[Comparison | Memory]:
    """A few of them."""
    yield from of(itertools.islice(families_by_half(), 4, 5))


def distribution(measured: Sequence[Measurement | MemoryMeasurement]) -> list[Distribution]:
    """For each kind of comparison what all families, the fitted and those held back say together."""
    half: dict[str, str] = {}
    kinds: dict[str, list[tuple[str, Measurement | MemoryMeasurement]]] = {}
    for each in measured:
        if each.target is None:
            continue
        family, kind = _split(each.name)
        kinds.setdefault(kind, []).append((family, each))
        if isinstance(each, Measurement):
            half[family] = FITTED if each.details["fitted"] else HELD_BACK
    found: list[Distribution] = []
    for kind, rows in kinds.items():
        for which in ("all", FITTED, HELD_BACK):
            chosen = [(family, each) for family, each in rows if which in ("all", half.get(family))]
            if chosen:
                found.append(_distribution(kind, which, chosen))
    return found


def _distribution(kind: str, which: str, rows: list[tuple[str, Measurement | MemoryMeasurement]]) -> Distribution:
    ratios = {family: ratio_of(each) for family, each in rows}
    over = sum(ratio > TARGET for ratio in ratios.values())
    missed = sum(each.passed is False for _, each in rows)
    return Distribution.of_ratios(kind, which, ratios, over=over, missed=missed)


def _split(name: str) -> tuple[str, str]:
    """The family and the kind of a comparison, whose name ends in two words for the kind."""
    family, *kind = name.rsplit(", ", 2)
    return family, ", ".join(kind)


def of(chosen: Iterable[tuple[Family, bool]]) -> Iterator[Comparison | Memory]:
    """The comparisons of some families, each with whether it is fitted."""
    for n, (family, fitted) in enumerate(chosen):
        details = {"fitted": float(fitted)}
        yield from _masked(family, details, control=n == 0)
        yield from _auto(family, details, control=n == 0)


def _masked(family: Family, details: dict[str, float], *, control: bool) -> Iterator[Comparison | Memory]:
    def ours(params: Any, init: Any, xs: Any, lengths: Array) -> Any:
        return treescan.mask_scan(functools.partial(family.step, params), init, xs, lengths=lengths)

    def by_hand(params: Any, init: Any, xs: Any, lengths: Array) -> Any:
        return where_scan(functools.partial(family.step, params), init, xs, lengths)

    def safe(params: Any, init: Any, xs: Any, lengths: Array) -> Any:
        return safe_where_scan(functools.partial(family.step, params), init, xs, lengths)

    args = family.params, family.init, family.xs
    everything = *args, _lengths(family)[FULL]
    for kind, made in ((FORWARD, Program), (GRADIENT, lambda scan: Program(gradient(scan, inputs=family.inputs)))):
        candidate, peer = made(ours), made(by_hand)
        for name, lengths in _lengths(family).items():
            run, other = functools.partial(candidate, *args, lengths), functools.partial(peer, *args, lengths)
            if control:
                yield Comparison(f"control, {name}, {kind}", "itself", other, other)
            yield _comparison(family, f"{name}, {kind}", WHERE, run, other, details)
        if kind == GRADIENT:
            run, other = functools.partial(candidate, *everything), functools.partial(made(safe), *everything)
            yield _comparison(family, f"{SAFE_KIND}, {kind}", SAFE, run, other, details)
            yield memory(f"{family.name}, {FULL}, memory", WHERE, candidate, peer, everything, TARGET)


def _auto(family: Family, details: dict[str, float], *, control: bool) -> Iterator[Comparison | Memory]:
    def ours(params: Any, init: Any, xs: Any) -> Any:
        return treescan.scan(functools.partial(family.step, params), init, xs, remat="auto")

    def theirs(params: Any, init: Any, xs: Any) -> Any:
        return jax.lax.scan(functools.partial(family.step, params), init, xs)

    args = family.params, family.init, family.xs
    candidate, peer = (Program(gradient(scan, inputs=family.inputs)) for scan in (ours, theirs))
    run, other = functools.partial(candidate, *args), functools.partial(peer, *args)
    if control:
        yield Comparison(f"control, remat auto, {GRADIENT}", "itself", other, other)
    yield _comparison(family, f"remat auto, {GRADIENT}", SCAN, run, other, details)
    yield memory(f"{family.name}, remat auto, memory", SCAN, candidate, peer, args, TARGET)


def _comparison(
    family: Family, what: str, against: str, run: Callable[[], Any], other: Callable[[], Any], details: dict[str, float]
) -> Comparison:
    return Comparison(
        f"{family.name}, {what}",
        against,
        run,
        other,
        TARGET,
        details,
        tolerance=family.tolerance,
        slack_seconds=SLACK,
    )


def _lengths(family: Family) -> dict[str, Array]:
    """By name; uniform ones are spread evenly from short to long, in an order by chance."""
    spread = np.ceil((np.random.default_rng(0).permutation(family.rows) + 0.5) / family.rows * family.steps)
    return {FULL: jnp.full(family.rows, family.steps), UNIFORM: jnp.asarray(spread, jnp.int32)}


def gradient(scan: Callable[..., Any], *, inputs: bool) -> Callable[..., Any]:
    """The gradient of a scan, as this module's docstring says."""

    def run(params: Any, init: Any, xs: Any, *rest: Any) -> Any:
        leaves, tree = jax.tree.flatten((params, init, xs) if inputs else (params, init))
        chosen = [n for n, leaf in enumerate(leaves) if _is_real(leaf)]

        def loss(values: list[Array]) -> Array:
            every = dict(enumerate(leaves)) | dict(zip(chosen, values, strict=True))
            args = jax.tree.unflatten(tree, every.values())
            results = jax.tree.leaves(scan(*args, *(() if inputs else (xs,)), *rest))
            squares = (jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in results if _is_real(leaf))
            return sum(squares, jnp.zeros(()))

        return jax.grad(loss)([leaves[n] for n in chosen])

    return run


def _is_real(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
