"""A decode step: one token through layers that read and write a cache each, against the loop that one writes by hand.

By hand the caches of all layers are carried, and each step indexes and updates them. The caller donates the caches, on
both sides. A pattern has five blocks that see a window and one that sees all, each with a stack of its own.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import treescan
from benchmarks._harness import Comparison, Memory
from benchmarks._lstm import normal

WIDTH, POSITIONS, SMALL = 512, 2048, 64
LAYERS, PERIODS, PERIOD = 8, 2, 6
WINDOW = 512
TARGET = 1.05
HAND = "a carried cache by hand"

Weights = dict[str, Array]
Cache = dict[str, Array]
Block = Callable[[Weights, Array, Cache, Array], tuple[Array, Cache]]


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _all(POSITIONS, TARGET)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with short caches, without targets."""
    yield from _all(SMALL, None)


def _all(positions: int, target: float | None) -> Iterator[Comparison | Memory]:
    for name, blocks, count in (("one stack", [see_all], LAYERS), ("pattern", [see_window] * 5 + [see_all], PERIODS)):
        ours = Decoder(functools.partial(_ours, blocks), len(blocks), count, positions)
        hand = Decoder(functools.partial(_by_hand, blocks), len(blocks), count, positions)
        cache = {"MB of cache": ours.cache_bytes / 1e6}
        yield Comparison(f"{name}, a step", HAND, ours, hand, target, cache)
        yield Memory(f"{name}, memory", HAND, ours.temporaries, hand.temporaries, target)


class Decoder:
    """A compiled step, with caches that it is given and gives back."""

    def __init__(self, step: Callable[..., Any], places: int, count: int, positions: int) -> None:
        cache = jnp.zeros((count, positions, WIDTH))
        self._layers = [{"w": normal(i, (count, WIDTH, WIDTH)) / WIDTH**0.5} for i in range(places)]
        self._caches: Any = [{"k": jnp.copy(cache), "v": jnp.copy(cache)} for _ in range(places)]
        self._x, self._position = normal(9, (1, WIDTH)), jnp.int32(positions // 2)
        given = self._x, self._layers, self._caches, self._position
        self.cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._caches))
        self._compiled: Any = jax.jit(step, donate_argnums=2).lower(*given).compile()

    def __call__(self) -> Array:
        """One step; it writes the same position each time."""
        x, self._caches = self._compiled(self._x, self._layers, self._caches, self._position)
        return x

    def temporaries(self) -> int:
        """The bytes it allocates beside its inputs and results."""
        return self._compiled.memory_analysis().temp_size_in_bytes


def _see(layer: Weights, x: Array, cache: Cache, position: Array, window: int) -> tuple[Array, Cache]:
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=position, axis=0)
    cache = {"k": put(cache["k"], x @ layer["w"]), "v": put(cache["v"], x)}
    distance = position - jnp.arange(cache["k"].shape[0])
    seen = (distance >= 0) & (distance < window)
    scores = jnp.where(seen[None], x @ cache["k"].T, -jnp.inf)
    return x + jax.nn.softmax(scores) @ cache["v"], cache


def see_all(layer: Weights, x: Array, cache: Cache, position: Array) -> tuple[Array, Cache]:
    """A block that attends to all positions so far."""
    return _see(layer, x, cache, position, cache["k"].shape[0])


def see_window(layer: Weights, x: Array, cache: Cache, position: Array) -> tuple[Array, Cache]:
    """A block that attends to the last ones."""
    return _see(layer, x, cache, position, WINDOW)


def _ours(blocks: Sequence[Block], x: Array, layers: Any, caches: Any, position: Array) -> Any:
    x, caches = treescan.fold_layers(list(blocks), x, layers, state=caches, args=(position,))
    return x, list(caches)


def _by_hand(blocks: Sequence[Block], x: Array, layers: Any, caches: Any, position: Array) -> Any:
    def step(carry: Any, one: Any) -> tuple[Any, None]:
        (x, caches), (i, weights) = carry, one
        caches = list(caches)
        for place, block in enumerate(blocks):
            own = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), caches[place])
            x, own = block(weights[place], x, own, position)
            put = functools.partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
            caches[place] = jax.tree.map(put, caches[place], own)
        return (x, caches), None

    return lax.scan(step, (x, caches), (jnp.arange(layers[0]["w"].shape[0]), layers))[0]
