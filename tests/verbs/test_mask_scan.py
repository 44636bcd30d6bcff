"""What `mask_scan` shows a body and takes of it: where rows stand, what they share, mutable arrays, resets alone.

That rows are as if scanned alone, unpadded, is in `test_variable_length.py`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from oracle import assert_bitwise

import treescan


def test_mapped_whole_leaves_of_an_element_without_steps_are_not_read():
    weights, lengths = jnp.array([2.0, jnp.nan, 3.0]), jnp.array([2, 0, 1])

    def one(weight, length):
        xs, axes = {"x": jnp.ones(4), "w": weight}, {"x": 0, "w": None}
        body = lambda c, x: (c + x["w"] * x["x"], None)  # noqa: E731
        return treescan.mask_scan(body, 0.0, xs, time_axis={"xs": axes}, lengths=length)[0]

    value, grads = jax.value_and_grad(lambda weights: jnp.sum(jax.vmap(one)(weights, lengths)))(weights)
    assert value == 7.0
    chex.assert_trees_all_equal(grads, jnp.array([2.0, 0.0, 1.0]))


def test_shared_leaves_hold_while_no_row_is_valid_and_never_meet_a_stale_pair():
    """A row's first pair need not fit what a shared leaf is by now: sqrt(shared - x) is NaN for an x of the start."""
    mask = np.array([[True, True], [True, False], [False, False], [True, False]])
    xs = jnp.where(mask, jnp.array([[9.0, 8.0], [4.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), jnp.nan)

    def body(carry, x, *, valid):
        y = jnp.sqrt(carry["top"] - x)
        return {"h": carry["h"] + y, "top": carry["top"] / 2}, y

    def total(xs, top):
        carry, _ = treescan.mask_scan(
            body, {"h": jnp.zeros(2), "top": top}, xs, mask=mask, row_axes={"carry": {"h": 0, "top": None}}
        )
        return jnp.sum(carry["h"]), carry["top"]

    (got, top), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(xs, jnp.float32(10.0))
    want = np.sqrt([10 - 9, 10 - 8, 5 - 4, 2.5 - 1]).sum()
    assert top == 1.25
    np.testing.assert_allclose(got, want, rtol=1e-6)
    slopes = 0.5 / np.sqrt([1, 2, 1, 1.5])
    np.testing.assert_allclose(grads[0][mask], -slopes, rtol=1e-6)
    assert not grads[0][~mask].any()
    np.testing.assert_allclose(grads[1], slopes @ [1, 1, 1 / 2, 1 / 4], rtol=1e-6)


def test_padding_in_reverse_is_shown_the_pair_with_which_its_row_begins():
    """sqrt(1 - |count - x|) is NaN unless x is the number of steps before. The last row has none, and borrows."""
    lengths = np.array([4, 2, 0])
    xs = jnp.where(np.arange(4)[:, None] < lengths, lengths - 1.0 - np.arange(4)[:, None], jnp.nan)

    def total(scale):
        body = lambda count, x: (count + 1, jnp.sqrt(scale - jnp.abs(count - x)))  # noqa: E731
        return jnp.sum(treescan.mask_scan(body, jnp.zeros(3), xs, lengths=lengths, reverse=True)[1])

    assert jax.grad(total)(1.0) == 6 * 0.5


def test_what_no_step_changes_is_lent_to_a_row_without_any_step():
    """Its own is 0, and divided by 0 its gradient would be NaN."""

    def total(w):
        body = lambda c, x: ({**c, "h": c["h"] + x / c["w"]}, None)  # noqa: E731
        init, xs = {"h": jnp.zeros(2), "w": w}, jnp.ones((3, 2))
        return jnp.sum(treescan.mask_scan(body, init, xs, lengths=jnp.array([2, 0]))[0]["h"])

    assert jax.grad(total)(jnp.array([2.0, 0.0])).tolist() == [-0.5, 0.0]


def test_xs_none_with_length_and_typed_keys_in_y():
    def body(carry, _):
        key = jax.vmap(jax.random.fold_in)(carry["key"], carry["n"])
        return carry | {"n": carry["n"] + 1}, key

    init = {"key": jax.random.split(jax.random.key(0), 2), "n": jnp.zeros(2, jnp.int32)}
    carry, keys = treescan.mask_scan(body, init, length=3, lengths=jnp.array([3, 1]))
    assert carry["n"].tolist() == [3, 1]
    bits = jax.random.key_data(keys)
    assert bits[1:, 1].tolist() == [[0, 0], [0, 0]]
    chex.assert_trees_all_equal(bits[2, 0], jax.random.key_data(jax.random.fold_in(init["key"][0], 2)))


@pytest.mark.parametrize("disable", [False, True])
def test_a_python_scalar_init_is_promoted_as_by_scan(disable):
    """And stays weakly typed if the body leaves it so."""
    with jax.disable_jit(disable):
        for length in (0, 3):
            final, ys = treescan.mask_scan(lambda c, x: (c + x, c), 0, jnp.ones(4), lengths=length)
            assert final == length
            assert final.dtype == ys.dtype == jnp.float32
        doubled, _ = treescan.mask_scan(lambda h, x: (h * 2, x), 1.0, jnp.ones(4), lengths=3)
        assert doubled == 8 and jax.typeof(doubled).weak_type


def test_leaves_given_whole_keep_their_place_and_their_rows():
    xs, axes = {"a": jnp.ones((3, 2)), "t": 3.0}, {"a": 0, "scale": None, "t": None}

    def body(c, x):
        return c + x["a"] * x["t"] * jnp.log(x["scale"]), None

    def total(scale):
        options = {"lengths": jnp.array([3, 0]), "time_axis": {"xs": axes}, "row_axes": {"x": {**axes, "scale": 0}}}
        return jnp.sum(treescan.mask_scan(body, jnp.zeros(2), {**xs, "scale": scale}, **options)[0])

    value, grad = jax.value_and_grad(total)(jnp.array([2.0, 0.0]))
    np.testing.assert_allclose(value, 9 * np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(grad, [4.5, 0.0], rtol=1e-6)  # the row without steps has log(0) in its place


def test_leaves_given_whole_are_those_of_the_row_that_stands_in():
    """Beside a leaf that all rows share, padding is shown another row: the root of its own limit less that is NaN."""
    limits, xs, lengths = jnp.array([9.0, 1.5]), jnp.ones((4, 2)), jnp.array([4, 1])

    def body(carry, given):
        (h, steps), (x, limit) = carry, given
        return (h + x, steps + 1), jnp.sqrt(limit - h - x)

    def total(limits):
        axes = {"time_axis": {"xs": (0, None)}, "row_axes": {"x": (0, 0), "carry": (0, None)}}
        return jnp.sum(treescan.mask_scan(body, (jnp.zeros(2), 0), (xs, limits), lengths=lengths, **axes)[1])

    value, grad = jax.value_and_grad(total)(limits)
    roots = np.sqrt([8, 7, 6, 5])
    np.testing.assert_allclose(value, roots.sum() + np.sqrt(0.5), rtol=1e-6)
    np.testing.assert_allclose(grad, [(0.5 / roots).sum(), 0.5 / np.sqrt(0.5)], rtol=1e-6)


@pytest.mark.parametrize("axis", [0, None])
def test_a_batch_without_rows(axis):
    def body(c, x):
        return c + (jnp.sum(x, axis=0) if axis is None else x), x

    init = jnp.zeros((0, 3)) if axis == 0 else jnp.zeros(3)
    mask = jnp.ones((4, 0), bool)
    final, ys = treescan.mask_scan(body, init, jnp.ones((4, 0, 3)), mask=mask, row_axes={"carry": axis})
    assert final.shape == init.shape
    assert ys.shape == (4, 0, 3)


def test_leaves_without_elements_in_several_batch_axes():
    lengths = jnp.array([[2, 0], [1, 3]])
    final, ys = treescan.mask_scan(
        lambda c, x: (c + x, c), jnp.ones((2, 2, 0)), jnp.ones((3, 2, 2, 0)), lengths=lengths
    )
    assert final.shape == (2, 2, 0) and ys.shape == (3, 2, 2, 0)


@pytest.mark.parametrize("disable", [False, True])
@pytest.mark.parametrize("options", [{"save": "last"}, {"fill": "hold", "reverse": True}])
def test_an_output_without_rows_of_a_batch_without_rows(options, disable):
    with jax.disable_jit(disable):
        none = jnp.zeros((0, 3)), jnp.ones((4, 0, 3))
        lengths = jnp.zeros(0, jnp.int32)
        _, ys = treescan.mask_scan(lambda c, x: (c, 1.0), *none, lengths=lengths, row_axes={"y": None}, **options)
    assert ys.shape == (() if "save" in options else (4,)) and not ys.any()


@pytest.mark.parametrize(("part", "axis"), [("y", 3), ("carry", -1), ("x", 2)])
def test_axes_are_checked_for_a_single_row_too(part, axis):
    with pytest.raises(treescan.errors.ArgumentError, match=rf'row_axes\["{part}"\]'):
        treescan.mask_scan(lambda c, x: (c + x, c), 0.0, jnp.arange(3.0), lengths=2, row_axes={part: axis})


def test_a_loop_without_steps_is_checked_as_any_other():
    def run(steps):
        return treescan.mask_scan(
            lambda c, x: (c + x, x > 0), jnp.zeros(2), jnp.ones((steps, 2)), lengths=jnp.zeros(2, int), fill=7
        )

    for steps in (0, 3):
        with pytest.raises(treescan.errors.ArgumentError, match="fill"):
            run(steps)


def test_lists_of_lengths_and_signed_zeros():
    xs = jnp.ones((3, 2))

    def run(lengths, fill=0.0):
        return treescan.mask_scan(lambda c, x: (c + x, x), jnp.zeros(2), xs, lengths=lengths, fill=fill)

    assert run([1, 2])[0].tolist() == [1.0, 2.0]
    assert jax.jit(lambda n: run([n, 2])[0])(3).tolist() == [3.0, 2.0]
    assert not np.signbit(run([1, 2], 0.0)[1][2, 0])
    assert np.signbit(run([1, 2], -0.0)[1][2, 0])


def test_unroll_true_is_not_unroll_one():
    def body(c, x):
        return c + x, c

    def trips(unroll):
        run = jax.jit(lambda xs: treescan.mask_scan(body, jnp.zeros(()), xs, lengths=5, unroll=unroll))
        return run.lower(jnp.ones(5)).as_text().count("while")

    assert (trips(1), trips(True), trips(1)) == (1, 0, 1)


# What a trace up front must not change.


@pytest.mark.parametrize("disable", [False, True])
def test_constants_that_the_body_returns(disable):
    """A flag that is true in the first step only, and an output that is a number."""

    def body(carry, x):
        total, first = carry
        return (jnp.where(first, x, total + x), jnp.array(False)), 1.0

    with jax.disable_jit(disable):
        (total, first), ys = treescan.mask_scan(body, (0.0, jnp.array(True)), jnp.arange(1.0, 6), lengths=3)
    assert (total, first) == (6, False)
    assert_bitwise(ys, jnp.array([1.0, 1, 1, 0, 0]))


def test_gradients_pass_by_a_mutable_array():
    xs, lengths = jnp.ones((20, 2)), jnp.array([2, 0])

    def loss(p):
        scale = jax.new_ref(jnp.full((), 2.0))
        body = lambda c, x: (c * p + x * scale[...], None)  # noqa: E731
        return jnp.sum(treescan.mask_scan(body, jnp.zeros(2), xs, lengths=lengths)[0])

    assert jax.jit(jax.grad(loss))(0.5) == 2


@pytest.mark.parametrize("reverse", [False, True])
def test_a_mutable_array_is_written_by_a_body_that_knows_its_rows(reverse):
    @jax.jit
    def run(lengths):
        seen, calls = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.int32(0))

        def step(total, x, *, valid):
            seen[...] = jnp.where(valid, seen[...] + x, seen[...])
            calls[...] += jnp.any(valid).astype(jnp.int32)
            return total + x, None

        total, _ = treescan.mask_scan(step, jnp.zeros(3), jnp.ones((9, 3)), lengths=lengths, reverse=reverse)
        return total, seen[...], calls[...]

    total, seen, calls = run(jnp.array([4, 0, 1]))
    assert_bitwise(total, jnp.array([4.0, 0, 1]))
    assert_bitwise(seen, total)
    assert calls == 4


def test_a_mutable_array_is_written_where_nothing_is_padding():
    seen = jax.new_ref(jnp.zeros(3))

    def step(total, x):
        seen[...] += x
        return total + x, None

    final, _ = treescan.mask_scan(step, jnp.zeros(3), jnp.ones((4, 3)), resets=jnp.zeros((4, 3), bool))
    assert_bitwise(final, seen[...])


def test_a_mutable_array_of_the_body_itself_is_no_concern():
    def step(total, x):
        own = jax.new_ref(total)
        own[...] += x
        return own[...], None

    lengths = jnp.array([4, 0, 1])
    final, _ = treescan.mask_scan(step, jnp.zeros(3), jnp.ones((4, 3)), lengths=lengths, compact=True)
    assert_bitwise(final, jnp.array([4.0, 0, 1]))


def discounted(total, reward):
    total = 0.9 * total + reward
    return total, total


def by_hand(last, rewards, begins, reverse):
    """Sums that begin anew; in reverse a segment ends one step before the next begins."""
    flags = np.concatenate([begins[1:], np.zeros_like(begins[:1])]) if reverse else begins
    step = lambda total, x: discounted(jnp.where(x[1], last, total), x[0])  # noqa: E731
    return jax.lax.scan(step, last, (rewards, flags), reverse=reverse)


def ours(last, rewards, begins, reverse):
    return treescan.mask_scan(discounted, last, rewards, resets=begins, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
def test_resets_alone_mask_nothing(reverse):
    """One loop, one selection for the one leaf, and no branch: what a loop by hand has."""
    resets = np.random.default_rng(5).random((64, 3)) < 0.2
    given = jnp.zeros(3), jnp.ones(resets.shape)
    jaxprs = [jax.make_jaxpr(lambda *a, run=run: run(*a, resets, reverse))(*given) for run in (ours, by_hand)]
    for name in ("cond", "cummin", "cummax", "custom_vmap_call", "argmax", "remat2"):
        assert not list(equations(jaxprs[0].jaxpr, name))
    for name in ("scan", "select_n"):
        assert [len(list(equations(jaxpr.jaxpr, name))) for jaxpr in jaxprs] == [1, 1]
