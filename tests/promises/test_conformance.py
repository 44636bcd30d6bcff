"""Against `jax.lax.scan`, Python loops and `jax.lax.fori_loop`: values to the bit, and derivatives."""

import itertools

import chex
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from loops import CASES, TRANSFORMS, State, array, grad
from oracle import assert_bitwise, python_scan
from thin import parametrize

import treescan


@parametrize("case", CASES)
def test_scan_is_a_python_loop(case):
    """That its program is lax.scan's, under every transform, is in `test_same_program.py`."""
    xs = case.make_xs(7)
    actual = grad(lambda init, xs: treescan.scan(case.body, init, xs, 7, True), case.init, xs)
    expected = grad(lambda init, xs: python_scan(case.body, init, xs, 7, True), case.init, xs)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


# fold and accumulate: the scan that returns its carry as y.


def test_accumulate_is_itertools_accumulate():
    xs = jnp.array([3, 1, 4, 1, 5])
    expected = list(itertools.accumulate(xs.tolist(), lambda a, b: 2 * a - b, initial=7))[1:]
    assert treescan.accumulate(lambda a, b: 2 * a - b, 7, xs).tolist() == expected


def test_length_of_a_fold_may_stand_fourth():
    assert treescan.fold(lambda c, x: c + 1, 0, None, 4) == 4
    assert treescan.accumulate(lambda c, x: c + 1, 0, None, 4).tolist() == [1, 2, 3, 4]


# fori.


def index_body(i, carry):
    t = i.astype(jnp.float32)
    return State(jnp.sin(carry.h + t * carry.c), carry.c + 0.1 * jnp.cos(t))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_fori_is_fori_loop(transform):
    by = TRANSFORMS[transform]
    reference_by = TRANSFORMS["jit"] if transform == "disable_jit" else by  # where fori_loop gives Python ints
    init = State(array(3), array(3, seed=1))
    for lower, upper in ((-2, 3), (3, 4), (5, 1)):
        actual = by(lambda c, _, a=lower, b=upper: treescan.fori(a, b, index_body, c), init, None)
        expected = reference_by(lambda c, _, a=lower, b=upper: jax.lax.fori_loop(a, b, index_body, c), init, None)
        chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)


BOUNDS = {
    "python": (0, 3),
    "int8": (np.int8(0), np.int8(3)),
    "mixed": (0, np.int16(3)),
    "array": (jnp.uint32(1), jnp.uint32(3)),
}


@parametrize("bounds", BOUNDS)
def test_index_has_the_type_that_fori_loop_gives_it(bounds):
    def type_of_index(loop):
        seen = []
        loop(*bounds, lambda i, carry: seen.append(jax.typeof(i)) or carry, jnp.float32(0))
        return seen[0]

    assert type_of_index(treescan.fori) == type_of_index(jax.lax.fori_loop)


def test_index_mixes_with_a_narrow_carry_as_in_fori_loop():
    """Its type is weak: it takes on the carry's, also under strict promotion."""
    for dtype in (jnp.int8, jnp.float16):
        actual, expected = (
            loop(0, 3, lambda i, carry: carry + i, dtype(0)) for loop in (treescan.fori, jax.lax.fori_loop)
        )
        assert_bitwise(actual, expected)


# Random pytrees, with a body in which every output depends on all of the carry and all of x.


@st.composite
def trees(draw, leading=()):
    """A tree of dicts, lists, tuples, NamedTuples and None over small arrays."""
    shape = hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)
    leaf = shape.flatmap(
        lambda s: st.tuples(st.sampled_from(["float32", "float16", "int32"]), st.integers(0, 99)).map(
            lambda d: jnp.asarray(np.random.default_rng(d[1]).uniform(-3, 3, (*leading, *s)).astype(d[0]))
        )
    )
    return draw(
        st.recursive(
            leaf | st.none(),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
                st.tuples(inner, inner).map(tuple),
                st.tuples(inner, inner).map(lambda t: State(*t)),
            ),
            max_leaves=4,
        )
    )


def mixing_body(carry, x):
    total = sum((jnp.mean(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves((carry, x))), start=jnp.float32(0))

    def mix(k, leaf):
        return (jnp.sin(leaf.astype(jnp.float32) * (k + 1) + total) * 3).astype(leaf.dtype)

    leaves, treedef = jax.tree.flatten((carry, x))
    return jax.tree.unflatten(treedef, list(map(mix, range(len(leaves)), leaves)))


# Every example compiles its own loop, and runs another step by step.
@settings(max_examples=8)
@given(st.data(), st.integers(1, 5), st.booleans(), st.sampled_from([1, 2, True]))
def test_random_trees(data, length, reverse, unroll):
    init, xs = data.draw(trees()), data.draw(trees(leading=(length,)))
    actual = treescan.scan(mixing_body, init, xs, length, reverse, unroll)
    assert_bitwise(actual, jax.lax.scan(mixing_body, init, xs, length, reverse, unroll))
    with jax.disable_jit():
        stepwise = treescan.scan(mixing_body, init, xs, length, reverse, unroll)
        assert_bitwise(stepwise, python_scan(mixing_body, init, xs, length, reverse))
