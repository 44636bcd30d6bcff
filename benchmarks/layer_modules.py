"""Stacks of modules: one Llama block in equinox, flax.linen and flax.nnx, under `fold_layers` and under their own scan.

Both run the same modules on the same stack of weights: `eqx.filter_vmap` with `lax.scan`, `nn.scan` and `nnx.scan` are
what the frameworks' documentation recommends. The gradient is that of the sum of squares with respect to all weights
and x. Tracing and compiling are timed by this process's own processor time, each time with new functions.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

import treescan
from benchmarks._harness import Comparison, Compiled, Elsewhere, Memory
from benchmarks._layer_peers import EquinoxBlock, FlaxBlock, flax_scan
from benchmarks._llama import Layer, Rotation, Size, block, make_layer, make_rotation
from benchmarks._lstm import normal

RUN = Size(rows=4, tokens=64, width=256, kv_heads=4, groups=2, head=32, hidden=704)
COMPILE = Size(rows=2, tokens=16, width=32, kv_heads=2, groups=2, head=8, hidden=64)
LAYERS, FEW_LAYERS = 8, 2
TRACES, COMPILATIONS = 15, 5  # blocks to measure
RUN_TARGET, MEMORY_TARGET = 1.05, 1.0

Program = Callable[[Layer, Array, Rotation], Array]


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _all(RUN, LAYERS, RUN_TARGET, MEMORY_TARGET)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with few small layers, without targets."""
    yield from _all(COMPILE, FEW_LAYERS, None, None)


def _all(
    size: Size, depth: int, run_target: float | None, memory_target: float | None
) -> Iterator[Comparison | Memory]:
    inputs, small = _inputs(size, depth), jax.eval_shape(lambda: _inputs(COMPILE, depth))
    for framework, (ours, native, against) in PAIRS.items():
        yield Comparison(
            f"{framework}, tracing",
            against,
            ProcessorTime(lambda ours=ours: _trace(ours, small)),
            ProcessorTime(lambda native=native: _trace(native, small)),
            blocks=TRACES,
        )
        yield Comparison(
            f"{framework}, compiling",
            against,
            ProcessorTime(lambda ours=ours: _compile(ours, small)),
            ProcessorTime(lambda native=native: _compile(native, small)),
            blocks=COMPILATIONS,
        )
        a, b = (Compiled(_gradient(program), inputs) for program in (ours, native))
        details = {"differs by": _difference(a(), b())}
        yield Comparison(f"{framework}, value and gradient", against, a, b, run_target, details)
        yield Memory(f"{framework}, memory", against, a.temporaries, b.temporaries, memory_target)


class ProcessorTime(Elsewhere):
    """Timed by the processor time that this process takes: other work on the machine counts little."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self) -> object:
        """Runs it."""
        return self._function()

    def seconds(self, calls: int) -> float:
        """Runs it `calls` times."""
        start = time.process_time()
        for _ in range(calls):
            self._function()
        return time.process_time() - start


def _gradient(program: Program) -> Any:
    """A new function of a program: its value and its gradient."""

    def loss(layers: Layer, x: Array, rotation: Rotation) -> Array:
        return jnp.sum(program(layers, x, rotation) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def _trace(program: Program, inputs: Any) -> None:
    _gradient(program).trace(*inputs)


def _compile(program: Program, inputs: Any) -> None:
    _gradient(program).lower(*inputs).compile()


def _difference(ours: Any, theirs: Any) -> float:
    """By how much two results differ at most, as a part of the largest entry of each array."""

    def of(a: Array, b: Array) -> float:
        return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))

    return max(of(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


def _inputs(size: Size, depth: int) -> tuple[Layer, Array, Rotation]:
    layers = treescan.init_layers(functools.partial(make_layer, size=size), jax.random.key(0), depth)
    return layers, normal(1, (size.rows, size.tokens, size.width)), make_rotation(size)


# The programs. How a framework's tree of weights is put together from the stack is a part of tracing, on both sides.


def equinox_layers(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """`fold_layers` over a module of equinox."""
    return treescan.fold_layers(
        lambda module, x, rotation: module(x, rotation), x, eqx.filter_vmap(EquinoxBlock)(layers), args=(rotation,)
    )


def equinox_native(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """The recipe of equinox's documentation."""
    dynamic, static = eqx.partition(eqx.filter_vmap(EquinoxBlock)(layers), eqx.is_array)

    def step(x: Array, dynamic: EquinoxBlock) -> tuple[Array, None]:
        return eqx.combine(dynamic, static)(x, rotation), None

    return lax.scan(step, x, dynamic)[0]


def linen_layers(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """`fold_layers` over the parameters of a module of linen."""
    weights: dict[str, Any] = layers._asdict()
    module: Any = FlaxBlock({name: leaf.shape[1:] for name, leaf in weights.items()})

    def run(params: dict[str, Any], x: Array, rotation: Rotation) -> Array:
        return module.apply({"params": params}, x, rotation)[0]

    return treescan.fold_layers(run, x, weights, args=(rotation,))


class NnxBlock(nnx.Module):
    """The block as a module of nnx."""

    def __init__(self, layer: Layer) -> None:
        for name, leaf in layer._asdict().items():
            setattr(self, name, nnx.Param(leaf))

    def __call__(self, x: Array, rotation: Rotation) -> Array:
        """One layer."""
        return block(Layer(*(getattr(self, name)[...] for name in Layer._fields)), x, rotation)


def nnx_layers(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """`fold_layers` over a module of nnx."""
    return treescan.fold_layers(lambda module, x, rotation: module(x, rotation), x, NnxBlock(layers), args=(rotation,))


def nnx_native(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """`nnx.scan` over the module."""
    scan: Any = nnx.scan

    def step(x: Array, module: NnxBlock, rotation: Rotation) -> Array:
        return module(x, rotation)

    return scan(step, in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)(x, NnxBlock(layers), rotation)


PAIRS: dict[str, tuple[Program, Program, str]] = {
    "equinox": (equinox_layers, equinox_native, "filter_vmap and lax.scan"),
    "linen": (linen_layers, flax_scan, "nn.scan"),
    "nnx": (nnx_layers, nnx_native, "nnx.scan"),
}
