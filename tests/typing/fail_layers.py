"""Layers: what a stack, its blocks and their results are; exactly the lines marked `# error` are errors. Never run."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
from jax import Array

from treescan import Remat, fold_layers, init_layers, layer_at, scan_layers, set_layer, stack, unstack
from treescan.state_dict import layers_from_state_dict, layers_to_state_dict

x, key = jnp.ones((2, 3)), jax.random.key(0)


class Layer(NamedTuple):
    w: Array


class Cache(NamedTuple):
    k: Array


def init(key: Array, width: int = 3) -> Layer:
    return Layer(jax.random.normal(key, (width, width)))


layers = init_layers(init, key, 4, 3)
cache = Cache(jnp.zeros((4, 2)))

assert_type(layers, Layer)
assert_type(stack([Layer(x), Layer(x)]), Layer)
assert_type(unstack(layers), list[Layer])
assert_type(layer_at(layers, 0), Layer)
assert_type(set_layer(layers, 0, Layer(x)), Layer)
assert_type(layers_to_state_dict(layers, prefix="model"), dict[str, Array])
assert_type(layers_from_state_dict({"layers.0.w": x}, layers), Layer)
assert_type(layers_from_state_dict({"layers.0.w": x}), Any)
assert_type(layers_from_state_dict({"layers.0.w": x}, [Layer(x), Layer(x)], order="turns"), list[Layer])
assert_type(layers_to_state_dict([layers, layers], order="turns", names=[{"w": "v"}, None]), dict[str, Array])


def fold_block(layer: Layer, x: Array) -> Array:
    return x @ layer.w


def block(layer: Layer, x: Array) -> tuple[Array, Cache]:
    return x, Cache(x)


def cached(layer: Layer, x: Array, cache: Cache, position: int) -> tuple[Array, Cache]:
    return x, cache


def shared(layer: Layer, x: Array, mask: Array, name: str) -> Array:
    return x


def keyed(layer: Layer, x: Array, *, key: Array) -> tuple[Array, Cache]:
    return x, Cache(x)


def keyed_fold(layer: Layer, x: Array, mask: Array, *, key: Array) -> Array:
    return x


def decode(layer: Layer, x: Array, cache: Cache) -> tuple[Array, Cache]:
    return x, cache


def decode_at(layer: Layer, x: Array, cache: Cache, position: int) -> tuple[Array, Cache]:
    return x, cache


def decode_noted(layer: Layer, x: Array, own: Array, cache: Cache) -> tuple[Array, Cache, Array]:
    return x, cache, x


def keyed_decode(layer: Layer, x: Array, cache: Cache, *, key: Array) -> tuple[Array, Cache]:
    return x, cache


def scaled(scale: float, layer: Layer, x: Array) -> Array:
    return x


def other(layer: Cache, x: Array) -> Array:
    return x


assert_type(fold_layers(fold_block, x, layers), Array)
assert_type(fold_layers(fold_block, x, layers, remat="step", reverse=True, unroll=2), Array)
assert_type(fold_layers(shared, x, layers, args=(x, "a")), Array)
assert_type(fold_layers(lambda layer, x: x @ layer.w, x, layers), Array)
assert_type(fold_layers(functools.partial(scaled, 0.5), x, layers), Array)
assert_type(fold_layers(keyed_fold, x, layers, args=(x,), key=key), Array)
assert_type(fold_layers((fold_block, other), x, (layers, cache)), Array)
assert_type(scan_layers(block, x, layers), tuple[Array, Cache])
assert_type(scan_layers(block, x, layers, save=2, remat=Remat(levels=2)), tuple[Array, Cache])
assert_type(scan_layers(cached, x, layers, cache, args=(3,), in_axes=1, out_axes=1), tuple[Array, Cache])
assert_type(scan_layers(keyed, x, layers, key=key), tuple[Array, Cache])
assert_type(scan_layers([block, block], x, [layers, layers]), tuple[Array, tuple[Any, ...]])
assert_type(scan_layers([cached], x, [layers], [cache], args=(3,), key=None), tuple[Array, tuple[Any, ...]])

untyped: Callable[..., Array] = fold_block
untyped_pair: Callable[..., tuple[Array, Cache]] = block
assert_type(fold_layers(untyped, x, layers, cache, args=(1,)), Array)
assert_type(scan_layers(untyped_pair, x, layers), tuple[Array, Cache])
fold_layers(jax.jit(fold_block), x, layers)
scan_layers(jax.jit(block), x, layers)

assert_type(fold_layers(decode, x, layers, state=cache), tuple[Array, Cache])
assert_type(fold_layers(decode_at, x, layers, state=cache, args=(3,)), tuple[Array, Cache])
assert_type(fold_layers(keyed_decode, x, layers, state=cache, key=key), tuple[Array, Cache])
assert_type(fold_layers([decode, decode], x, [layers, layers], state=[cache, cache]), tuple[Array, list[Cache]])
assert_type(scan_layers(decode_noted, x, layers, x, state=cache, save=2), tuple[Array, Cache, Array])
assert_type(scan_layers([decode_noted], x, [layers], [x], state=(cache,)), tuple[Array, tuple[Cache], tuple[Any, ...]])

fold_layers(decode, x, layers)  # error
fold_layers(decode, x, layers, state=x)  # error
fold_layers(fold_block, x, layers, state=cache)  # error
scan_layers(decode, x, layers, state=cache)  # error
fold_layers(fold_block, x, cache)  # error
fold_layers(fold_block, "x", layers)  # error
fold_layers(shared, x, layers)  # error
fold_layers(fold_block, x, layers, cache)  # error
fold_layers(fold_block, x, layers, length="4")  # error
fold_layers(fold_block, x, layers, save="last")  # error
scan_layers(block, x, layers, truncate=2)  # error
scan_layers(fold_block, x, layers)  # error
scan_layers(block, x, layers, remat=["all"])  # error
scan_layers(keyed, x, layers, key=0)  # error
layer_at(layers, "0")  # error
init_layers(fold_block, key, "4")  # error
layers_to_state_dict([layers], order="alternating")  # error
layers_from_state_dict({"layers.0.w": x}, order="turns")  # error
layers_from_state_dict([x])  # error
