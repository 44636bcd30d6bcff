"""Layers run one after the other: a Python loop over them is the oracle, for values and every gradient."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
from hypothesis import example, given, settings, strategies as st
from loops import array
from works import plain

import treescan

WIDTH = 4


class Attention(NamedTuple):
    q: Any
    out: Any


class Layer(NamedTuple):
    norm: Any
    attention: Attention
    mlp: dict[str, Any]


def make(seed: int) -> Layer:
    a, b, c, d = (array(*shape, seed=7 * seed + i) for i, shape in enumerate([(4,), (4, 3), (3, 4), (4, 4)]))
    return Layer(1 + a / 4, Attention(b, c), {"w": d / 2})


def make_stack(count: int, seed: int = 0) -> Layer:
    if not count:
        return jax.tree.map(lambda leaf: leaf[:0], make_stack(1))
    return treescan.stack([make(100 * seed + i) for i in range(count)])


def mix(layer, x):
    h = jnp.tanh(x * layer.norm[None]) @ layer.attention.q @ layer.attention.out
    return x + h / 4


def block(layer, x, *others, key=None):
    """What a block of any call here does: all that it is given counts."""
    x = mix(layer, x)
    for other in others:
        x = x + jnp.sin(x * other)
    if key is not None:
        x = x + jax.random.uniform(key, x.shape) / 8
    return x, {"mean": x.mean(-1), "mlp": x @ layer.mlp["w"]}


def other_block(layer, x, *others, key=None):
    """Another, whose outputs have other types."""
    x = jnp.cos(x) + sum((other.sum() / 8 for other in others), start=jnp.float32(0))
    return (x, (x @ layer.mlp["w"]).sum()) if key is None else (x + jax.random.normal(key, (WIDTH,))[None] / 8, x.sum())


def without_y(function):
    @functools.wraps(function)
    def folded(*args, **keywords):
        return function(*args, **keywords)[0]

    return folded


def outcome(run, *given, compiled=True):
    """What a function gives, and the gradient of all of it with respect to everything."""

    def loss(floats):
        structure = jax.tree.structure(given)
        out = run(*jax.tree.unflatten(structure, floats))
        return sum(
            (jnp.sum(jnp.sin((k + 2) * leaf)) for k, leaf in enumerate(jax.tree.leaves(out))), jnp.float32(0)
        ), out

    both = jax.value_and_grad(loss, has_aux=True)
    (_, out), gradient = (jax.jit(both) if compiled else both)(jax.tree.leaves(given))
    return out, gradient


def assert_same(ours, theirs):
    chex.assert_trees_all_close(ours[0], theirs[0], rtol=2e-5, atol=2e-5)
    for a, b in zip(ours[1], theirs[1], strict=True):  # a sum of many terms: what is small is compared with the largest
        npt.assert_allclose(a, b, rtol=0, atol=1e-4 * (1 + float(np.max(np.abs(b), initial=0))))


X = array(3, WIDTH, seed=9)


def test_outputs_of_an_empty_stack_have_their_types():
    stacks = (make_stack(1), make_stack(0))
    _, (first, second) = treescan.scan_layers([block, other_block], X, stacks)
    assert [leaf.shape for leaf in jax.tree.leaves(first)] == [(1, 3), (1, 3, 4)]
    assert second.shape == (0,)


@st.composite
def programs(draw):
    period = draw(st.integers(1, 3))
    rounds, rest = draw(st.integers(0, 3)), draw(st.integers(0, period - 1))
    if not rounds and not rest:
        rounds = 1
    counts = [rounds + (i < rest) for i in range(period)]
    plan = draw(st.sampled_from([None, "step", "nested", "each"]))
    return (
        counts,
        [draw(st.sampled_from([block, other_block])) for _ in counts],
        [draw(st.sampled_from(["step", None])) for _ in counts] if plan == "each" else plan,
        draw(st.booleans()),  # reverse
        [draw(st.booleans()) for _ in counts],  # has xs
        draw(st.integers(0, 2)),  # args
        draw(st.booleans()),  # key
        draw(st.sampled_from([1, 2, True])),  # unroll
        draw(st.booleans()),  # fold_layers
    )


@settings(max_examples=5)
@given(programs())
@example(([7], [block], "nested", True, [True], 1, True, 1, False))
@example(([3, 2, 2], [block, other_block, block], ["step", None, None], True, [True] * 3, 1, True, 1, False))
@example(([1, 1, 0], [block, other_block, block], "step", False, [True, False, True], 1, False, 2, False))
def test_any_pattern(program):
    counts, blocks, remat, reverse, has_own, args, keyed, unroll, folds = program
    stacks = [make_stack(count, seed) for seed, count in enumerate(counts)]
    own = [
        array(count, 3, WIDTH, seed=i) if has else None
        for i, (has, count) in enumerate(zip(has_own, counts, strict=True))
    ]
    shared = tuple(array(1, WIDTH, seed=50 + i) for i in range(args))
    key = jax.random.key(1) if keyed else None
    options = {"remat": remat, "reverse": reverse, "unroll": unroll, "key": key}

    def run(x, stacks, own, shared):
        if folds:
            return treescan.fold_layers([without_y(b) for b in blocks], x, stacks, own, args=shared, **options)
        x, ys = treescan.scan_layers(blocks, x, stacks, own, args=shared, **options)
        return x, tuple(y if count else None for y, count in zip(ys, counts, strict=True))

    def expected(x, stacks, own, shared):
        x, ys = plain.scan_layers(blocks, x, stacks, own, args=shared, key=key, reverse=reverse)
        return x if folds else (x, ys)

    assert_same(outcome(run, X, stacks, own, shared), outcome(expected, X, stacks, own, shared, compiled=False))


# What goes in and out


def test_args_that_are_no_arrays_stay_what_they_are():
    seen = []

    def step(layer, x, causal, power, name, scale, options):
        seen.append((causal, power, name, options["depth"]))
        return mix(layer, x) * scale**power if causal else x

    args = (True, 2, "attention", np.float32(0.5), {"depth": 3.0})
    x = treescan.fold_layers(step, X, make_stack(2), args=args)
    assert seen == [(True, 2, "attention", 3.0)]
    npt.assert_allclose(x, plain.fold_layers(step, X, make_stack(2), args=args), rtol=1e-5)


def test_other_args_are_another_program_and_equal_ones_are_not():
    calls = []

    def step(layer, x, factor):
        calls.append(factor)
        return x * factor

    for factor in (1.0, 2.0, 1, 0.0, -0.0, 1.0, math.nan):
        y = treescan.fold_layers(step, X, make_stack(2), args=(factor,))
        npt.assert_array_equal(y, X * factor * factor)
    assert repr(calls) == "[1.0, 2.0, 1, 0.0, -0.0, nan]"


def test_axes_in_a_pattern():
    stacks, own = (make_stack(3), make_stack(2, 1)), (array(3, 3, WIDTH, seed=5), array(2, 3, WIDTH, seed=6))
    moved = (own[0], jnp.moveaxis(own[1], 0, -1))
    x, ys = treescan.scan_layers([block, block], X, stacks, moved, in_axes=(0, -1), out_axes=(1, 0))
    wanted, each = plain.scan_layers([block, block], X, stacks, own)
    chex.assert_trees_all_close(x, wanted, rtol=1e-5)
    chex.assert_trees_all_close(ys[0], jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), each[0]), rtol=1e-5)
    chex.assert_trees_all_close(ys[1], each[1], rtol=1e-5)


def test_weak_types_settle_in_every_block():
    """The second block of a period makes floats of what the first hands on as it was."""

    def keeps(layer, x):
        return x

    def floats(layer, x):
        return x * layer

    for counts in ((2, 2), (3, 2)):
        stacks = (jnp.ones((counts[0], 1)), jnp.full(counts[1], 2.0))
        for remat in (None, "step"):
            x = treescan.fold_layers([keeps, floats], 1, stacks, remat=remat)
            assert (x, x.dtype) == (4, jnp.float32)


def test_a_pair_of_any_kind():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Out:
        x: Any
        y: Any

    class Pair(NamedTuple):
        x: Any
        y: Any

    for pair in (Out, Pair, lambda *parts: list(parts)):
        for counts, remat in (((3,), None), ((2, 2), None), ((2, 1), "step"), ((3,), "nested")):
            stacks = [make_stack(count) for count in counts]
            blocks = [lambda layer, x, pair=pair: pair(*block(layer, x))] * len(counts)
            x, ys = treescan.scan_layers(blocks, X, stacks, remat=remat)
            expected = plain.scan_layers([block] * len(counts), X, stacks)
            chex.assert_trees_all_close((x, ys), expected, rtol=1e-5, atol=1e-6)


def test_out_axes_as_a_list():
    stacks = (make_stack(2), make_stack(2))
    _, ys = treescan.scan_layers([block, block], X, stacks, out_axes=[1, 0])
    assert (ys[0]["mean"].shape, ys[1]["mean"].shape) == ((3, 2), (2, 3))
