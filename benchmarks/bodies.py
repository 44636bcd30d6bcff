"""Steps of many kinds: `mask_scan` against a mask by hand, and `remat="auto"` against `jax.lax.scan`.

No size or constant of the library was chosen with these bodies, but for those that the changelog names.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import treescan
from benchmarks._by_hand import where_scan
from benchmarks._harness import Comparison, Memory
from benchmarks._lstm import State, lstm, make_params, normal
from benchmarks.masked import Program, memory

STEPS = 256
FORWARD, GRADIENT = "forward", "gradient"
FULL, UNIFORM = "full", "uniform"
WHERE, SCAN = "where by hand", "jax.lax.scan"
TARGET = 1.05  # of a mask by hand
AUTO_TARGETS = {"LSTM": 0.75, "GRU": 0.9, "small RNN": 0.9}
RESETS_TARGET = 1.2

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Body:
    """A step, and what it is run on.

    Attributes:
        name: what it is called in results.
        step: (params, carry, x) to (carry, y).
        params: what is the same in every step.
        init: the carry, leaves `[B, ...]`.
        xs: leaves `[T, B, ...]`.
    """

    name: str
    step: Step
    params: Any
    init: Any
    xs: Any

    @property
    def tolerance(self) -> float:
        """By how much results may differ: the gradient by hand is rounded to bfloat16 once per step."""
        return 0.1 if jax.tree.leaves(self.init)[0].dtype == jnp.bfloat16 else 1e-4

    @property
    def rows(self) -> int:
        """B."""
        return jax.tree.leaves(self.init)[0].shape[0]


def gru(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """The reset gate comes after the product, as in cuDNN and torch."""
    of_x, of_h = x @ p["x"] + p["b"], h @ p["h"]
    (xr, xz, xn), (hr, hz, hn) = jnp.split(of_x, 3, -1), jnp.split(of_h, 3, -1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
    return h, h


def rnn(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """Elman's."""
    h = jnp.tanh(x @ p["x"] + h @ p["h"] + p["b"])
    return h, h


def hmm(p: Any, log_alpha: Array, x: Array) -> tuple[Array, Array]:
    """The forward pass of a hidden Markov model, in logarithms."""
    log_alpha = jax.nn.logsumexp(log_alpha[:, :, None] + p["transition"], axis=1) + x
    return log_alpha, jax.nn.logsumexp(log_alpha, -1)


def kalman(p: Any, carry: Any, y: Array) -> tuple[Any, Array]:
    """A Kalman filter, with a solve in each step."""
    mean, cov = carry
    mean, cov = mean @ p["a"].T, p["a"] @ cov @ p["a"].T + p["q"]
    innovation = p["c"] @ cov @ p["c"].T + p["r"]
    gain = jnp.linalg.solve(innovation, p["c"] @ cov).swapaxes(-1, -2)
    mean = mean + jnp.einsum("bij,bj->bi", gain, y - mean @ p["c"].T)
    cov = cov - gain @ p["c"] @ cov
    return (mean, cov), mean


def delta_rule(p: Any, memory: Array, x: Array) -> tuple[Array, Array]:
    """Linear attention that corrects what it has stored: the state is a matrix."""
    k, v, q = jnp.split(x @ p["x"], 3, -1)
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    error = v - jnp.einsum("bij,bj->bi", memory, k)
    memory = memory + 0.5 * jnp.einsum("bi,bj->bij", error, k)
    return memory, jnp.einsum("bij,bj->bi", memory, q)


def deep_lstm(p: Any, states: Any, x: Array) -> tuple[Any, Array]:
    """Three layers."""
    new = []
    for layer, state in zip(p, states, strict=True):
        state, x = lstm(layer, state, x)
        new.append(state)
    return tuple(new), x


def one_row(p: Any, h: Array, x: Array) -> tuple[Array, Array]:
    """A step that is written for one row, and mapped over the batch."""

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(p["x"].T @ x + p["h"].T @ h + p["b"])
        return h, h

    return jax.vmap(step)(h, x)


def bodies() -> Iterator[Body]:
    """All of them, each at a size at which people run it."""

    def dense(features: int, hidden: int, gates: int = 1) -> dict[str, Array]:
        x, h = normal(2, (features, gates * hidden)), normal(3, (hidden, gates * hidden))
        return {"x": x * features**-0.5, "h": h * hidden**-0.5, "b": jnp.zeros(gates * hidden)}

    def data(rows: int, features: int) -> Array:
        return normal(0, (STEPS, rows, features))

    zeros = jnp.zeros
    yield Body("LSTM", lstm, make_params(64, 128), State(zeros((32, 128)), zeros((32, 128))), data(32, 64))
    yield Body("GRU", gru, dense(32, 96, 3), zeros((48, 96)), data(48, 32))
    yield Body("small RNN", rnn, dense(16, 32), zeros((256, 32)), data(256, 16))
    yield Body("mapped rows", one_row, dense(32, 64), zeros((32, 64)), data(32, 32))
    transition = jax.nn.log_softmax(normal(1, (16, 16)))
    yield Body("HMM", hmm, {"transition": transition}, jnp.full((32, 16), -2.77), data(32, 16))
    system = {
        "a": 0.9 * jnp.eye(6) + 0.01 * normal(4, (6, 6)),
        "c": normal(5, (3, 6)),
        "q": jnp.eye(6),
        "r": jnp.eye(3),
    }
    covariances = jnp.broadcast_to(jnp.eye(6), (32, 6, 6))
    yield Body("Kalman filter", kalman, system, (zeros((32, 6)), covariances), data(32, 3))
    yield Body("delta rule", delta_rule, {"x": normal(6, (32, 96)) / 6}, zeros((16, 32, 32)), data(16, 32))
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tuple(make_params(64, 64) for _ in range(3)))
    states = tuple(State(zeros((16, 64), jnp.bfloat16), zeros((16, 64), jnp.bfloat16)) for _ in range(3))
    yield Body("LSTM, 3 layers, bfloat16", deep_lstm, halves, states, data(16, 64).astype(jnp.bfloat16))


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    everything = list(bodies())
    yield from _control(everything[0])
    for body in everything:
        yield from _masked(body)
    for body in everything:
        yield from _auto(body)
    for steps in (128, 1024, 4096):
        yield from _returns(steps)


def smoke() -> Iterator[Comparison | Memory]:
    """A few of them."""
    body = list(bodies())[2]
    yield from _auto(body)
    yield from _returns(128)


def gradient_of(scan: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of the sum of squares of all results, with respect to all arguments."""

    def loss(*args: Any) -> Array:
        leaves = jax.tree.leaves(scan(*args))
        return sum((jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves), jnp.zeros(()))

    return jax.grad(loss, argnums=(0, 1, 2))


def _control(body: Body) -> Iterator[Comparison]:
    def plain(params: Any, init: Any, xs: Any) -> Any:
        return jax.lax.scan(functools.partial(body.step, params), init, xs)

    for kind, program in ((FORWARD, Program(plain)), (GRADIENT, Program(gradient_of(plain)))):
        run = functools.partial(program, body.params, body.init, body.xs)
        yield Comparison(f"control, {kind}", "itself", run, run)


def _masked(body: Body) -> Iterator[Comparison]:
    lengths = {
        FULL: jnp.full(body.rows, STEPS),
        UNIFORM: jnp.asarray(np.random.default_rng(0).integers(1, STEPS + 1, body.rows)),
    }

    def ours(params: Any, init: Any, xs: Any, lengths: Array) -> Any:
        return treescan.mask_scan(functools.partial(body.step, params), init, xs, lengths=lengths)

    def by_hand(params: Any, init: Any, xs: Any, lengths: Array) -> Any:
        return where_scan(functools.partial(body.step, params), init, xs, lengths)

    for kind, made in ((FORWARD, Program), (GRADIENT, lambda scan: Program(gradient_of(scan)))):
        candidate, peer = made(ours), made(by_hand)
        for name, each in lengths.items():
            args = body.params, body.init, body.xs, each
            yield Comparison(
                f"{body.name}, {name}, {kind}",
                WHERE,
                functools.partial(candidate, *args),
                functools.partial(peer, *args),
                TARGET,
                tolerance=body.tolerance,
            )


def _auto(body: Body) -> Iterator[Comparison | Memory]:
    def ours(params: Any, init: Any, xs: Any, remat: Any = "auto") -> Any:
        return treescan.scan(functools.partial(body.step, params), init, xs, remat=remat)

    def theirs(params: Any, init: Any, xs: Any) -> Any:
        return jax.lax.scan(functools.partial(body.step, params), init, xs)

    whole = functools.partial(ours, remat=treescan.Remat("everything_saveable", levels=2, chunk=32))
    args = body.params, body.init, body.xs
    peer = Program(gradient_of(theirs))
    for name, scan, target in (("auto", ours, AUTO_TARGETS.get(body.name, TARGET)), ("chunks of 32", whole, None)):
        candidate = Program(gradient_of(scan))
        run, other = functools.partial(candidate, *args), functools.partial(peer, *args)
        yield Comparison(f"{body.name}, remat {name}, {GRADIENT}", SCAN, run, other, target, tolerance=body.tolerance)
        most = TARGET if name == "auto" else None
        yield memory(f"{body.name}, remat {name}, memory", SCAN, candidate, peer, args, most)


def _returns(steps: int) -> Iterator[Comparison]:
    """Generalised advantages of episodes that follow one another, in reverse."""
    rows = 32
    rewards, values = normal(0, (steps, rows)), normal(1, (steps, rows))
    begins = jnp.asarray(np.random.default_rng(0).random((steps, rows)) < 0.02)

    def step(total: Array, x: Any) -> tuple[Array, Array]:
        reward, value = x
        total = reward + 0.95 * total
        return total + 0.1 * value, total

    def ours(init: Array, rewards: Array, values: Array) -> Any:
        return treescan.mask_scan(step, init, (rewards, values), resets=begins, reverse=True)

    def by_hand(init: Array, rewards: Array, values: Array) -> Any:
        ends = jnp.concatenate([begins[1:], jnp.zeros_like(begins[:1])])

        def body(total: Array, x: Any) -> tuple[Array, Array]:
            (reward, value), end = x
            return step(jnp.where(end, init, total), (reward, value))

        return jax.lax.scan(body, init, ((rewards, values), ends), reverse=True)

    args = jnp.zeros(rows), rewards, values
    for kind, made in ((FORWARD, Program), (GRADIENT, lambda scan: Program(gradient_of(scan)))):
        yield Comparison(
            f"returns in reverse, T={steps}, {kind}",
            WHERE,
            functools.partial(made(ours), *args),
            functools.partial(made(by_hand), *args),
            RESETS_TARGET,
        )
