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
from loops import CASES, TRANSFORMS, State, array, grad, named_body, nested_body
from oracle import assert_bitwise, python_scan
from thin import all_pairs, by_turns, parametrize

import treescan

LENGTHS = (0, 1, 7, 64)
UNROLLS = (1, 0, 3, True, 100)


def is_affordable(case, length, reverse, unroll, transform):
    """XLA takes minutes over the derivatives of a long loop that is unrolled as a whole."""
    whole = unroll in (0, 100) or unroll is True
    return length < 64 or not whole or transform in ("disable_jit", "jit")


GRID = [row for row in itertools.product(CASES, LENGTHS, (False, True), UNROLLS, TRANSFORMS) if is_affordable(*row)]
EVERYDAY = all_pairs(GRID)


def check_against_lax(case_name, length, reverse, unroll, transform_name):
    case, transform = CASES[case_name], TRANSFORMS[transform_name]
    init, xs = case.init, case.make_xs(length)
    expected_transform = transform
    if transform_name == "disable_jit" and length == 0:  # where lax.scan raises
        expected_transform = TRANSFORMS["jit"]
    actual = transform(lambda *a: treescan.scan(case.body, *a, length, reverse, unroll), init, xs)
    # The oldest supported release of lax.scan does not know 0, which is documented as the same as True.
    expected = expected_transform(lambda *a: jax.lax.scan(case.body, *a, length, reverse, unroll or True), init, xs)
    assert_bitwise(actual, expected)


@pytest.mark.parametrize(
    ("case", "length", "reverse", "unroll", "transform"),
    [
        pytest.param(*row, marks=pytest.mark.slow if row[1] == 64 and row[4] in ("disable_jit", "grad_of_grad") else ())
        for row in EVERYDAY
    ],
)
def test_scan_is_lax_scan(case, length, reverse, unroll, transform):
    check_against_lax(case, length, reverse, unroll, transform)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "length", "reverse", "unroll", "transform"),
    [row for row in GRID if repr(row) not in map(repr, EVERYDAY)][::3],
)
def test_scan_is_lax_scan_on_a_third_of_the_grid(case, length, reverse, unroll, transform):
    check_against_lax(case, length, reverse, unroll, transform)


@pytest.mark.parametrize("reverse", [False, True])
@parametrize("case", CASES)
def test_scan_is_a_python_loop(case, reverse):
    """An oracle that shares nothing with lax.scan, for the one above to be checked against."""
    xs = case.make_xs(7)
    actual = grad(lambda init, xs: treescan.scan(case.body, init, xs, 7, reverse), case.init, xs)
    expected = grad(lambda init, xs: python_scan(case.body, init, xs, 7, reverse), case.init, xs)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("init", [0, 0.0, True, 1j, np.float32(1), np.int8(3)], ids=repr)
@pytest.mark.parametrize("transform", ["eager", "jit", "disable_jit"])
@pytest.mark.parametrize("length", [1, 3])
def test_scalars_are_promoted_as_by_lax_scan(init, transform, length):
    def body(carry, x):
        return carry * x, carry

    xs = jnp.ones(length, jnp.asarray(init).dtype)
    actual, expected = (
        TRANSFORMS[transform](lambda xs, _, scan=scan: scan(body, init, xs), xs, None)
        for scan in (treescan.scan, jax.lax.scan)
    )
    assert_bitwise(actual, expected)


# fold and accumulate: the scan that returns its carry as y.

FOLDS = {
    name: (lambda carry, x, body=body: body(carry, x)[0], CASES[name])
    for name, body in {"namedtuple": named_body, "nested": nested_body}.items()
}


@by_turns(
    2,
    fold=FOLDS,
    options=[(True, 3, 7), (False, 0, 1), (False, 1, 0)],
    transform=["jit", "vmap", "grad", "disable_jit"],
)
def test_fold_and_accumulate_are_scans(fold, options, transform):
    reverse, unroll, length = options
    body, case = fold
    xs, by = case.make_xs(length), TRANSFORMS[transform]
    reference_by = TRANSFORMS["jit"] if length == 0 and transform == "disable_jit" else by

    def reference(init, xs):
        return jax.lax.scan(lambda c, x: (body(c, x),) * 2, init, xs, reverse=reverse, unroll=unroll or True)

    for verb, i in ((treescan.fold, 0), (treescan.accumulate, 1)):
        actual = by(lambda c, x, v=verb: v(body, c, x, reverse=reverse, unroll=unroll), case.init, xs)
        expected = reference_by(lambda c, x, i=i: reference(c, x)[i], case.init, xs)
        chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)
        assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)


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


@by_turns(
    2,
    bounds=[(0, 5), (-2, 3), (3, 4), (2, 2), (5, 1)],
    transform=["eager", "jit", "vmap", "grad", "jvp", "grad_of_grad", "disable_jit"],
)
def test_fori_is_fori_loop(bounds, transform):
    lower, upper = bounds
    init = State(array(3), array(3, seed=1))
    by = TRANSFORMS[transform]
    actual = by(lambda c, _: treescan.fori(lower, upper, index_body, c), init, None)
    if transform == "disable_jit":  # where fori_loop gives the body Python ints
        by = TRANSFORMS["jit"]
    expected = by(lambda c, _: jax.lax.fori_loop(lower, upper, index_body, c), init, None)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, expected)


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 0}, {"unroll": 3, "reverse": True}], ids=str)
def test_fori_is_a_python_loop(options):
    def python_fori(lower, upper, body, carry, reverse=False, unroll=1):
        for i in range(lower, upper)[::-1] if reverse else range(lower, upper):
            carry = body(jnp.int32(i), carry)
        return carry

    init = State(array(3), array(3, seed=1))
    actual, expected = (
        grad(lambda c, _, f=f: f(-2, 5, index_body, c, **options), init, None) for f in (treescan.fori, python_fori)
    )
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


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


def check_random_trees(data, length, reverse, unroll):
    init, xs = data.draw(trees()), data.draw(trees(leading=(length,)))
    actual = treescan.scan(mixing_body, init, xs, length, reverse, unroll)
    assert_bitwise(actual, jax.lax.scan(mixing_body, init, xs, length, reverse, unroll))
    with jax.disable_jit():
        stepwise = treescan.scan(mixing_body, init, xs, length, reverse, unroll)
        assert_bitwise(stepwise, python_scan(mixing_body, init, xs, length, reverse))


unrolled = st.sampled_from([1, 2, True])


# Every example compiles its own loop, and runs another step by step.
@settings(max_examples=8)
@given(st.data(), st.integers(1, 5), st.booleans(), unrolled)
def test_random_trees(data, length, reverse, unroll):
    check_random_trees(data, length, reverse, unroll)


@pytest.mark.slow
@given(st.data(), st.integers(1, 5), st.booleans(), unrolled)
def test_many_random_trees(data, length, reverse, unroll):
    check_random_trees(data, length, reverse, unroll)
