"""`chunk_map`: the loss over a vocabulary and its gradient, in chunks of tokens, against all at once and `lax.map`."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

import treescan
from benchmarks._harness import Comparison, Compiled, Memory
from benchmarks._lstm import normal

TOKENS, FEATURES, VOCABULARY, CHUNK = 4000, 64, 1000, 500
FEW, SMALL = 40, 5  # tokens and their chunks, in a smoke test

PLAIN, BY_HAND = "all tokens at once", "lax.map and jax.checkpoint by hand"
SAME = 1.05  # programs that do the same work
LESS = 0.15  # of the memory without chunks


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _losses(TOKENS, CHUNK, SAME, LESS)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with few tokens, without targets."""
    yield from _losses(FEW, SMALL, None, None)


def _loss(weights: Array, hidden: Array, targets: Array) -> Array:
    logits = hidden @ weights
    right = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=1) - right)


def _chunk_map(size: int, weights: Array, hidden: Array, targets: Array) -> Array:
    return treescan.chunk_map(lambda x: _loss(weights, *x), (hidden, targets), size, reduce="sum")


def _lax_map(size: int, weights: Array, hidden: Array, targets: Array) -> Array:
    cut = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (hidden, targets))
    return jnp.sum(jax.lax.map(jax.checkpoint(lambda x: _loss(weights, *x), prevent_cse=False), cut))


def _in_one_pass(size: int, weights: Array, hidden: Array, targets: Array) -> tuple[Array, Array]:
    """The loss and the gradient of the weights, which each chunk returns."""

    def both(x: tuple[Array, Array]) -> tuple[Array, Array]:
        return jax.value_and_grad(_loss)(weights, *x)

    return treescan.chunk_map(both, (hidden, targets), size, reduce="sum")


def _inputs(tokens: int) -> tuple[Array, Array, Array]:
    targets = jax.random.randint(jax.random.key(2), (tokens,), 0, VOCABULARY)
    return normal(0, (FEATURES, VOCABULARY)) / FEATURES**0.5, normal(1, (tokens, FEATURES)), targets


def _losses(tokens: int, size: int, same: float | None, less: float | None) -> Iterator[Comparison | Memory]:
    inputs = _inputs(tokens)
    for name, argnums, ours in (
        ("loss and gradient", (0, 1), None),
        ("loss and gradient of the weights in one pass", 0, functools.partial(_in_one_pass, size)),
    ):
        plain, hand, chunks = (
            Compiled(jax.jit(jax.value_and_grad(loss, argnums)), inputs)
            for loss in (_loss, functools.partial(_lax_map, size), functools.partial(_chunk_map, size))
        )
        chunks = chunks if ours is None else Compiled(jax.jit(ours), inputs)
        yield Comparison(name, PLAIN, chunks, plain)
        yield Memory(f"memory, {name}", PLAIN, chunks.temporaries, plain.temporaries, less)
        yield Comparison(name, BY_HAND, chunks, hand, same)
        yield Memory(f"memory, {name}", BY_HAND, chunks.temporaries, hand.temporaries, same)
