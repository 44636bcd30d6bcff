"""Stacked layers: Llama blocks under `fold_layers`, against more of them, against a loop, and against peers' stacks.

The time to compile is that of tracing, lowering and compiling. Each repetition has a new function and a new block, so
that no cache of JAX holds either of them; the persistent cache is off. It depends little on the sizes of arrays, so
these are small there.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import treescan
from benchmarks._harness import Comparison, Compiled, Memory, Thunk, compiling, off_disk
from benchmarks._layer_peers import equinox_scan, flax_scan, haiku_stack, lax_scan, lax_scan_remat, python_loop
from benchmarks._llama import Block, Layer, Rotation, Size, block, make_layer, make_rotation
from benchmarks._lstm import normal

RUN = Size(rows=4, tokens=64, width=256, kv_heads=4, groups=2, head=32, hidden=704)
COMPILE = Size(rows=2, tokens=16, width=32, kv_heads=2, groups=2, head=8, hidden=64)
RUN_LAYERS, FEW_LAYERS = 8, 2

BASE = 4  # layers; compiling more of them is compared with compiling these
DEPTHS = {4: 4, 16: 4, 64: 2}  # layers that the loop compiles too, and blocks to measure: 64 take seconds
COMPILE_TARGET = 1.2  # a scan compiles one layer, however many there are
COMPILE_BLOCKS = 6

LAX, LOOP = "lax.scan by hand", "unrolled loop"
FORWARD, GRADIENT = "forward", "gradient"
RUN_TARGET = 1.05  # the programs are the same; what the interleaved runs leave of the noise
MEMORY_TARGET = 1.0
REMAT_TARGET = 1.05

Program = Callable[..., Array]  # (layers, x, rotation) -> x
Inputs = tuple[Any, Array, Rotation]  # layers, stacked or a list; x [B, T, D]; rotation


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    off_disk()
    yield from _compile_more_layers((BASE, 16, 64), (FORWARD, GRADIENT), COMPILE_TARGET)
    for kind in (FORWARD, GRADIENT):
        for depth, blocks in DEPTHS.items():
            yield _compile_against_loop(kind, depth, blocks)
    yield from _memory(RUN, RUN_LAYERS, MEMORY_TARGET, REMAT_TARGET)
    yield from _run(RUN, RUN_LAYERS, RUN_TARGET)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with few small layers, without targets."""
    off_disk()
    yield from _compile_more_layers((BASE, 16), (FORWARD,), None)
    yield _compile_against_loop(FORWARD, FEW_LAYERS, blocks=1)
    yield from _memory(COMPILE, FEW_LAYERS, None, None)
    yield from _run(COMPILE, FEW_LAYERS, None)


def _fold(layers: Layer, x: Array, rotation: Rotation, block: Block = block) -> Array:
    """What is measured of treescan."""
    return treescan.fold_layers(block, x, layers, args=(rotation,))


def _fold_remat(layers: Layer, x: Array, rotation: Rotation) -> Array:
    """Each layer is run again in the backward pass."""
    return treescan.fold_layers(block, x, layers, args=(rotation,), remat="step")


def _compile_more_layers(depths: tuple[int, ...], kinds: tuple[str, ...], target: float | None) -> Iterator[Comparison]:
    """treescan against itself at the first of the depths; of that depth too, which is the control."""
    base = depths[0]
    for kind in kinds:
        peer = _compiling(kind, _fold, _shapes(COMPILE, base))
        for depth in depths:
            yield Comparison(
                f"{'control, ' if depth == base else ''}compile {depth} layers, {kind}",
                "itself" if depth == base else f"treescan, {base} layers",
                _compiling(kind, _fold, _shapes(COMPILE, depth)),
                peer,
                None if depth == base else target,
                blocks=COMPILE_BLOCKS,
            )


def _compile_against_loop(kind: str, depth: int, blocks: int) -> Comparison:
    stacked = _shapes(COMPILE, depth)
    return Comparison(
        f"compile {depth} layers, {kind}",
        LOOP,
        _compiling(kind, _fold, stacked),
        _compiling(kind, python_loop, jax.eval_shape(_unstacked, stacked)),
        blocks=blocks,
    )


def _compiling(kind: str, program: Program, shapes: Inputs) -> Thunk:
    """Traces, lowers and compiles a new function of a new block."""

    def make() -> Any:
        def new_block(layer: Layer, x: Array, rotation: Rotation) -> Array:
            return block(layer, x, rotation)

        return _jit(kind, functools.partial(program, block=new_block))

    return compiling(make, shapes)


def _jit(kind: str, program: Program) -> Any:
    """The program, or the gradient of the sum of its result's squares with respect to all weights and x."""

    def loss(*inputs: Any) -> Array:
        return jnp.sum(program(*inputs) ** 2)

    return jax.jit(program if kind == FORWARD else jax.grad(loss, argnums=(0, 1)))


def _memory(size: Size, depth: int, target: float | None, remat_target: float | None) -> Iterator[Memory]:
    """What the gradients need."""
    stacked = _inputs(size, depth)
    ours = Compiled(_jit(GRADIENT, _fold), stacked).temporaries
    remat = Compiled(_jit(GRADIENT, _fold_remat), stacked).temporaries
    loop = Compiled(_jit(GRADIENT, python_loop), _unstacked(stacked)).temporaries
    yield Memory(f"memory, {GRADIENT}", LAX, ours, Compiled(_jit(GRADIENT, lax_scan), stacked).temporaries, target)
    by_hand = Compiled(_jit(GRADIENT, lax_scan_remat), stacked).temporaries
    yield Memory(f"memory, remat, {GRADIENT}", "jax.checkpoint by hand", remat, by_hand, remat_target)
    yield Memory(f"memory, {GRADIENT}", LOOP, ours, loop)


def _run(size: Size, depth: int, target: float | None) -> Iterator[Comparison]:
    """The compiled programs."""
    stacked = _inputs(size, depth)
    unstacked = _unstacked(stacked)
    details = {"layers": float(depth)}
    peers = {LAX: lax_scan, "haiku's layer_stack": haiku_stack, "flax.linen.scan": flax_scan, "equinox": equinox_scan}
    for kind in (FORWARD, GRADIENT):
        ours, by_hand = Compiled(_jit(kind, _fold), stacked), Compiled(_jit(kind, lax_scan), stacked)
        yield Comparison(f"control, run, {kind}", "itself", by_hand, by_hand, details=details)
        for against, peer in peers.items():
            theirs = by_hand if peer is lax_scan else Compiled(_jit(kind, peer), stacked)
            yield Comparison(f"run, {kind}", against, ours, theirs, target, details)
        remat, checkpoint = Compiled(_jit(kind, _fold_remat), stacked), Compiled(_jit(kind, lax_scan_remat), stacked)
        if kind == GRADIENT:
            yield Comparison(f"run, remat, {kind}", "jax.checkpoint by hand", remat, checkpoint, target, details)
        loop = Compiled(_jit(kind, python_loop), unstacked)
        yield Comparison(f"run, {kind}", LOOP, ours, loop, details=details, peer_result=_stack_gradients)


def _inputs(size: Size, depth: int) -> Inputs:
    layers = treescan.init_layers(functools.partial(make_layer, size=size), jax.random.key(0), depth)
    return layers, normal(1, (size.rows, size.tokens, size.width)), make_rotation(size)


def _shapes(size: Size, depth: int) -> Inputs:
    return jax.eval_shape(functools.partial(_inputs, size, depth))


def _unstacked(inputs: Inputs) -> Inputs:
    layers, x, rotation = inputs
    return treescan.unstack(layers), x, rotation


def _stack_gradients(result: Any) -> Any:
    """The loop's result, its gradients stacked if it has some, as treescan's are."""
    if isinstance(result, Array):
        return result
    layers, x = result
    return treescan.stack(layers), x
