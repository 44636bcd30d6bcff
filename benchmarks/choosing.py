"""One RNN of 1,024 steps, written in the ways that `docs/choosing.md` compares: what each costs to compile and to run.

Each way stands in the candidate's place, and its peer is `treescan.scan`: a ratio says how many times as long it takes.
Compiling is tracing, lowering and compiling a new function, in which the body is new too; the persistent cache is off.
A Python loop over 1,024 steps takes a minute or more to compile, so there are two blocks of that, and its gradient is
compiled for fewer steps alone.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import treescan
from benchmarks._harness import Comparison, Compiled, Memory, Thunk, compiling, off_disk
from benchmarks._lstm import normal

STEPS, ROWS, FEATURES, HIDDEN = 1_024, 16, 32, 64
FEW_STEPS = 8
SHORT_LOOPS = {
    "forward": (64, 256),
    "gradient": (64,),
}  # steps of the Python loops that are compiled beside the long one
COMPILE_BLOCKS, SLOW_BLOCKS = 4, 2
INDEXED_BLOCKS = 4  # a gradient of index updates takes seconds

FORWARD, GRADIENT = "forward", "gradient"
SCAN, INDEXED, LOOP = "treescan.scan", "fori, index updates", "Python for"


class Inputs(NamedTuple):
    """What the programs are given: weights [F, H] and [H, H], the first state [B, H], and xs [T, B, F]."""

    inputs: Array
    hidden: Array
    state: Array
    xs: Array


Program = Callable[[Inputs], tuple[Array, Array]]  # the last state [B, H], and all states [T, B, H]


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _compare(STEPS, COMPILE_BLOCKS)
    yield from _loops(STEPS, SHORT_LOOPS, SLOW_BLOCKS)


def smoke() -> Iterator[Comparison | Memory]:
    """The same with few steps."""
    yield from _compare(FEW_STEPS, 1)
    yield from _loops(FEW_STEPS, {FORWARD: (2,), GRADIENT: (2,)}, 1)


def _cell(given: Inputs, state: Array, x: Array) -> Array:
    return jnp.tanh(x @ given.inputs + state @ given.hidden)


def _scan(given: Inputs, unroll: int = 1) -> tuple[Array, Array]:
    def step(state: Array, x: Array) -> tuple[Array, Array]:
        state = _cell(given, state, x)
        return state, state

    return treescan.scan(step, given.state, given.xs, unroll=unroll)


def _mask_scan(given: Inputs) -> tuple[Array, Array]:
    def step(state: Array, x: Array) -> tuple[Array, Array]:
        state = _cell(given, state, x)
        return state, state

    steps, rows, _ = given.xs.shape
    return treescan.mask_scan(step, given.state, given.xs, lengths=jnp.full(rows, steps))


def _while_scan(given: Inputs) -> tuple[Array, Array]:
    def going(state: Array) -> Array:
        return jnp.all(jnp.isfinite(state))

    def step(state: Array, x: Array) -> tuple[Array, Array]:
        state = _cell(given, state, x)
        return state, state

    ended = treescan.while_scan(going, step, given.state, given.xs)
    return ended.carry, ended.ys


def _indexed(given: Inputs) -> tuple[Array, Array]:
    def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, states = carry
        state = _cell(given, state, given.xs[i])
        return state, states.at[i].set(state)

    steps = given.xs.shape[0]
    return treescan.fori(0, steps, step, (given.state, jnp.zeros((steps, *given.state.shape))))


def _loop(given: Inputs) -> tuple[Array, Array]:
    state, states = given.state, []
    for x in given.xs:
        state = _cell(given, state, x)
        states.append(state)
    return state, jnp.stack(states)


WAYS: dict[str, Program] = {
    "scan, unroll=8": functools.partial(_scan, unroll=8),
    INDEXED: _indexed,
    "while_scan": _while_scan,
    "mask_scan, full": _mask_scan,
}


def _compare(steps: int, blocks: int) -> Iterator[Comparison | Memory]:
    """All but the Python loop."""
    off_disk()
    given, details = _inputs(steps), {"steps": float(steps)}
    for kind in (FORWARD, GRADIENT):
        base = _compiling(kind, _scan, given)
        yield Comparison(f"control, compile, {kind}", "itself", base, base, details=details, blocks=blocks)
        for way, program in WAYS.items():
            mine = _compiling(kind, program, given)
            yield Comparison(f"compile, {way}, {kind}", SCAN, mine, base, details=details, blocks=blocks)
    for kind in (FORWARD, GRADIENT):
        scan = Compiled(_jit(kind, _scan), (given,))
        yield Comparison(f"control, run, {kind}", "itself", scan, scan, details=details)
        for way, program in WAYS.items():
            mine = Compiled(_jit(kind, program), (given,))
            few = INDEXED_BLOCKS if way == INDEXED and kind == GRADIENT else None
            yield Comparison(f"run, {way}, {kind}", SCAN, mine, scan, details=details, blocks=few)
            if kind == GRADIENT:
                yield Memory(f"memory, {way}, {kind}", SCAN, mine.temporaries, scan.temporaries)


def _loops(steps: int, short: dict[str, tuple[int, ...]], blocks: int) -> Iterator[Comparison]:
    """The Python loop: compiled for few steps and for all, and run."""
    for kind, lengths in short.items():
        for length in (*lengths, *((steps,) if kind == FORWARD else ())):
            given, details = _inputs(length), {"steps": float(length)}
            mine, base = _compiling(kind, _loop, given), _compiling(kind, _scan, given)
            name = f"compile, {LOOP}, {length:,} steps, {kind}"
            yield Comparison(name, SCAN, mine, base, details=details, blocks=blocks)
    given, details = _inputs(steps), {"steps": float(steps)}
    mine, scan = Compiled(_jit(FORWARD, _loop), (given,)), Compiled(_jit(FORWARD, _scan), (given,))
    yield Comparison(f"run, {LOOP}, {FORWARD}", SCAN, mine, scan, details=details)


def _jit(kind: str, program: Program) -> Any:
    """The program, or the gradient of the sum of the states' squares with respect to the weights and the first state.

    A new function each time.
    """

    def loss(weights: tuple[Array, Array, Array], xs: Array) -> Array:
        return jnp.sum(program(Inputs(*weights, xs))[1] ** 2)

    def gradient(given: Inputs) -> Any:
        *weights, xs = given
        return jax.grad(loss)(tuple(weights), xs)

    return jax.jit((lambda given: program(given)) if kind == FORWARD else gradient)


def _compiling(kind: str, program: Program, given: Inputs) -> Thunk:
    return compiling(functools.partial(_jit, kind, program), (given,))


def _inputs(steps: int) -> Inputs:
    return Inputs(
        normal(0, (FEATURES, HIDDEN)) / FEATURES**0.5,
        normal(1, (HIDDEN, HIDDEN)) / HIDDEN**0.5,
        jnp.zeros((ROWS, HIDDEN)),
        normal(2, (steps, ROWS, FEATURES)),
    )
