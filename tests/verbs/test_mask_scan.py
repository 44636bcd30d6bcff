"""`mask_scan` against each row scanned on its own, unpadded, in a Python loop: values, and every gradient."""

import functools

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jaxprs import equations
from oracle import assert_bitwise

import treescan


def leaky(params, carry, x):
    """Singular at 0 in both of its inputs: log, sqrt and division, as padding with zeros would find out."""
    h = jnp.tanh(params["a"] * carry["h"] + jnp.log(x["u"])) + 2.5
    return {"h": h, "n": carry["n"] + 1}, {"y": h / x["v"] + jnp.sqrt(x["u"]), "n": carry["n"]}


def row_by_row(body, init, xs, valid, *, reverse=False, fill=0.0):
    """The oracle: for each row a Python loop over its valid steps alone; [T, B, ...] data, one batch axis."""
    steps, rows = valid.shape
    finals, columns = [], []
    for b in range(rows):
        carry = jax.tree.map(lambda leaf, b=b: leaf[b], init)
        ys = [None] * steps
        for t in reversed(range(steps)) if reverse else range(steps):
            if valid[t, b]:
                carry, ys[t] = body(carry, jax.tree.map(lambda leaf, t=t, b=b: leaf[t, b], xs))
        finals.append(carry)
        columns.append(ys)
    like = next((y for ys in columns for y in ys if y is not None), None)
    if like is None:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *finals), None
    padding = jax.tree.map(lambda leaf: jnp.full_like(leaf, fill), like)
    stacked = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *[padding if y is None else y for y in ys]) for ys in columns
    ]
    return (
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *finals),
        jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), *stacked),
    )


def batch(valid, padding, seed=0, width=2):
    """Data [T, B, width] that is good where valid, and `padding` elsewhere."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (*valid.shape, width)
    where = jnp.asarray(valid)[..., None]
    xs = {
        "u": jnp.where(where, jax.random.uniform(keys[0], shape, minval=0.5, maxval=2.0), padding),
        "v": jnp.where(where, jax.random.uniform(keys[1], shape, minval=0.5, maxval=2.0), padding),
    }
    init = {"h": jax.random.normal(keys[2], (valid.shape[1], width)), "n": jnp.zeros(valid.shape[1], jnp.int32)}
    return {"a": jnp.float32(0.8)}, init, xs


def summed(carry, ys, weights):
    total = jnp.sum(jnp.sin(carry["h"]))
    return total if ys is None else total + jnp.sum(jnp.where(weights[..., None], ys["y"], 0.0) * 0.3)


masks = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.tuples(st.sampled_from([1, 2, 3, 5]), st.integers(1, 3), st.sampled_from([0.0, 0.3, 0.7, 1.0])).map(
        lambda s: np.random.default_rng(seed).random((s[0], s[1])) < s[2]
    )
)


def check_against_the_unpadded_rows(valid, padding, reverse):
    params, init, xs = batch(valid, padding)
    mask = jnp.asarray(valid)

    def ours(params, h, xs):
        carry, ys = treescan.mask_scan(
            functools.partial(leaky, params), init | {"h": h}, xs, mask=mask, reverse=reverse, fill=7
        )
        return summed(carry, ys, mask), (carry, ys)

    def oracle(params, h, xs):
        carry, ys = row_by_row(functools.partial(leaky, params), init | {"h": h}, xs, valid, reverse=reverse, fill=7)
        return summed(carry, ys, mask), (carry, ys)

    got, got_grads = jax.value_and_grad(ours, (0, 1, 2), has_aux=True)(params, init["h"], xs)
    want, want_grads = jax.value_and_grad(oracle, (0, 1, 2), has_aux=True)(params, init["h"], xs)
    chex.assert_trees_all_close(got[1][0], want[1][0], rtol=1e-6)
    if want[1][1] is not None:
        chex.assert_trees_all_close(got[1][1], want[1][1], rtol=1e-6)
    chex.assert_trees_all_close(got_grads, want_grads, rtol=2e-5, atol=1e-5)
    assert all(bool(jnp.all(leaf[~valid] == 0)) for leaf in jax.tree.leaves(got_grads[2]))  # exactly, not nearly


paddings = st.sampled_from([np.nan, np.inf, 0.0, -1.0])


# Every example compiles a Python loop over all rows anew: four for every day.
@settings(max_examples=4)
@given(masks, paddings, st.booleans())
def test_equals_the_unpadded_rows_in_value_and_gradient(valid, padding, reverse):
    check_against_the_unpadded_rows(valid, padding, reverse)


@pytest.mark.slow
@given(masks, paddings, st.booleans())
def test_equals_the_unpadded_rows_of_many_masks(valid, padding, reverse):
    check_against_the_unpadded_rows(valid, padding, reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [[3, 0, 5], [0, 0, 0], [5, 5, 5], [1, 2, 0]])
def test_lengths_are_masks(lengths, reverse):
    valid = np.arange(5)[:, None] < np.array(lengths)
    params, init, xs = batch(valid, np.nan)
    body = functools.partial(leaky, params)
    by_lengths = treescan.mask_scan(body, init, xs, lengths=jnp.array(lengths), reverse=reverse)
    by_mask = treescan.mask_scan(body, init, xs, mask=valid, reverse=reverse)
    chex.assert_trees_all_equal(by_lengths, by_mask)
    chex.assert_trees_all_equal(by_lengths[0]["n"], jnp.array(lengths))


@pytest.mark.parametrize("shape", [(), (2, 3), *(pytest.param(s, marks=pytest.mark.slow) for s in [(1,), (2, 1, 2)])])
def test_any_number_of_batch_axes(shape):
    rng = np.random.default_rng(1)
    valid = rng.random((6, *shape)) < 0.6
    flat = valid.reshape(6, -1)
    params, init, xs = batch(flat, np.nan)
    body = functools.partial(leaky, params)
    want = row_by_row(body, init, xs, flat)

    def shaped(tree, lead):
        return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[:lead] + shape + leaf.shape[lead + 1 :]), tree)

    got = treescan.mask_scan(body, shaped(init, 0), shaped(xs, 1), mask=valid)
    chex.assert_trees_all_close(got, (shaped(want[0], 0), shaped(want[1], 1)), rtol=1e-6)


@pytest.mark.parametrize(
    "lengths", [[3, 0, 5], *(pytest.param(n, marks=pytest.mark.slow) for n in ([0, 0, 0], [0, 4, 0]))]
)
def test_vmap_over_scalar_lengths(lengths):
    """An element with nothing valid borrows its pair from another one; if none has any, the body does not run."""
    valid = np.arange(5)[:, None] < np.array(lengths)
    params, init, xs = batch(valid, np.nan)
    want = treescan.mask_scan(functools.partial(leaky, params), init, xs, lengths=jnp.array(lengths))

    def one(params, init, xs, length):
        return treescan.mask_scan(functools.partial(leaky, params), init, xs, lengths=length)

    got = jax.vmap(one, in_axes=(None, 0, 1, 0), out_axes=(0, 1))(params, init, xs, jnp.array(lengths))
    chex.assert_trees_all_close(got, want, rtol=1e-6)

    def loss(h, xs):
        carry, ys = jax.vmap(one, in_axes=(None, 0, 1, 0), out_axes=(0, 1))(
            params, init | {"h": h}, xs, jnp.array(lengths)
        )
        return summed(carry, ys, jnp.asarray(valid))

    def loss_by_row(xs_row, init_row, length):
        carry, ys = one(params, init_row, xs_row, length)
        return jnp.sum(jnp.sin(carry["h"])) + 0.3 * jnp.sum(jnp.where((jnp.arange(5) < length)[:, None], ys["y"], 0.0))

    grad_of_vmap = jax.grad(loss, argnums=1)(init["h"], xs)
    vmap_of_grad = jax.vmap(jax.grad(loss_by_row), in_axes=(1, 0, 0), out_axes=1)(xs, init, jnp.array(lengths))
    chex.assert_trees_all_close(grad_of_vmap, vmap_of_grad, rtol=1e-5, atol=1e-6)
    chex.assert_tree_all_finite(grad_of_vmap)


def test_nested_vmap_borrows_across_both_axes():
    lengths = jnp.array([[0, 0], [0, 3]])
    xs = jnp.where(jnp.arange(4)[:, None, None] < lengths[None], 1.5, jnp.nan)

    def body(carry, x):
        return carry + jnp.log(x), carry / x

    def one(init, xs, length):
        return treescan.mask_scan(body, init, xs, lengths=length)[0]

    total = jax.vmap(jax.vmap(one, (0, 1, 0)), (0, 1, 0))
    init = jnp.ones((2, 2))
    chex.assert_trees_all_close(total(init, xs, lengths), 1 + np.asarray(lengths) * np.log(1.5), rtol=1e-6)
    grads = jax.grad(lambda xs: jnp.sum(total(init, xs, lengths)))(xs)
    chex.assert_trees_all_close(grads, jnp.where(jnp.isnan(xs), 0.0, 1 / 1.5), rtol=1e-6)


def test_whole_leaves_beside_leaves_with_rows():
    """A row's padding is shown in no step, whatever leads x."""
    valid = np.array([[True, True], [True, False], [True, False]])
    xs = {"all": jnp.float32(2.0), "x": jnp.where(valid, jnp.array([[2.0, 3.0]]), 0.0)}

    def total(xs):
        body = lambda h, x: (h + jnp.log(x["x"]) * x["all"], None)  # noqa: E731
        return treescan.mask_scan(body, jnp.zeros(2), xs, in_axes={"all": None, "x": 0}, mask=valid)[0].sum()

    got = jax.jit(jax.grad(total))(xs)
    np.testing.assert_allclose(got["all"], 3 * np.log(2) + np.log(3), rtol=1e-6)
    np.testing.assert_allclose(got["x"][valid], [1, 2 / 3, 1, 1], rtol=1e-6)


def test_mapped_whole_leaves_of_an_element_without_steps_are_not_read():
    weights = jnp.array([2.0, jnp.nan, 3.0])
    lengths = jnp.array([2, 0, 1])

    def one(init, xs, weight, length):
        return treescan.mask_scan(
            lambda c, x: (c + x["w"] * x["x"], None),
            init,
            {"x": xs, "w": weight},
            in_axes={"x": 0, "w": None},
            lengths=length,
        )[0]

    def loss(weights):
        return jnp.sum(jax.vmap(one, (0, None, 0, 0))(jnp.zeros(3), jnp.ones(4), weights, lengths))

    assert loss(weights) == 7.0
    chex.assert_trees_all_equal(jax.grad(loss)(weights), jnp.array([2.0, 0.0, 1.0]))


@pytest.mark.parametrize(
    "order", ["jvp", *(pytest.param(o, marks=pytest.mark.slow) for o in ("grad_of_vmap", "hessian"))]
)
def test_higher_and_forward_derivatives_are_finite_and_right(order):
    valid = np.array([[True, False, True], [True, False, False], [False, False, True]])
    params, init, xs = batch(valid, np.nan)

    def ours(h, params=params):
        carry, ys = treescan.mask_scan(functools.partial(leaky, params), init | {"h": h}, xs, mask=valid)
        return summed(carry, ys, jnp.asarray(valid))

    def oracle(h):
        carry, ys = row_by_row(functools.partial(leaky, params), init | {"h": h}, xs, valid)
        return summed(carry, ys, jnp.asarray(valid))

    h = init["h"]
    if order == "jvp":
        got, want = (jax.jvp(f, (h,), (jnp.ones_like(h),)) for f in (ours, oracle))
    elif order == "hessian":
        got, want = (jax.hessian(f)(h) for f in (ours, oracle))
    else:
        hs = jnp.stack([h, 2 * h])
        got, want = (jax.grad(lambda hs, f=f: jnp.sum(jax.vmap(f)(hs)))(hs) for f in (ours, oracle))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-6)


def test_nothing_valid_does_not_evaluate_the_body():
    calls = []

    def body(carry, x):
        jax.debug.callback(lambda: calls.append(1))
        return carry + x, carry

    final, ys = treescan.mask_scan(body, jnp.ones(2), jnp.full((3, 2), jnp.nan), lengths=jnp.zeros(2, int), fill=-1)
    jax.effects_barrier()
    assert not calls
    chex.assert_trees_all_equal((final, ys), (jnp.ones(2), jnp.full((3, 2), -1.0)))


def test_valid_is_shown_and_tells_the_rows_apart():
    def body(mean, x, *, valid):
        return jnp.where(valid, jnp.mean(x, where=valid), mean), valid

    xs = jnp.array([[1.0, 3.0], [5.0, jnp.nan]])
    means, seen = treescan.mask_scan(body, jnp.zeros(2), xs, lengths=jnp.array([2, 1]))
    chex.assert_trees_all_equal(means, jnp.array([5.0, 2.0]))
    chex.assert_trees_all_equal(seen, jnp.array([[True, True], [True, False]]))


def test_axes_say_where_the_batch_stands():
    """A square leaf does not take the mask along its features, and other positions of the batch are followed."""
    lengths = jnp.array([2, 0, 1])
    valid = np.arange(2)[:, None] < np.asarray(lengths)
    xs = {"x": jnp.arange(18.0).reshape(2, 3, 3), "t": jnp.arange(2)}

    def body(carry, x):
        h = carry["h"] + x["x"].T
        return {"h": h, "steps": carry["steps"] + 1}, {"h": h, "t": x["t"]}

    init = {"h": jnp.zeros((3, 3)), "steps": jnp.int32(0)}
    carry, ys = treescan.mask_scan(
        body,
        init,
        xs,
        lengths=lengths,
        carry_axes={"h": -1, "steps": None},
        x_axes={"x": 0, "t": None},
        y_axes={"h": 1, "t": None},
        fill={"h": 0.5, "t": -1},
    )
    want = jnp.sum(jnp.where(valid[..., None], xs["x"], 0), axis=0).T
    chex.assert_trees_all_close(carry["h"], want)
    assert carry["steps"] == 2
    assert ys["t"].tolist() == [0, 1]
    assert bool(jnp.all(ys["h"][1][:, 1:] == 0.5))


def test_a_plain_number_stays_weakly_typed():
    """As in lax.scan, so that what is computed with it afterwards has the other's type."""
    carry, _ = treescan.mask_scan(lambda h, x: (h * 2, x), 1.0, jnp.ones(4), lengths=3)
    assert carry == 8 and jax.typeof(carry).weak_type


@pytest.mark.parametrize("reverse", [False, True])
def test_a_row_without_steps_borrows_the_pair_of_another(reverse):
    """Its own x would make the gradient of the weight NaN, in the order of the run as in reverse."""
    xs, lengths = jnp.array([[0.0, 2.0], [0.0, 3.0], [0.0, 0.0]]), np.array([0, 2])

    def total(w, xs):
        body = lambda h, x: (h + w * jnp.log(x), h)  # noqa: E731
        return treescan.mask_scan(body, jnp.ones(2), xs, lengths=lengths, reverse=reverse)[0].sum()

    got = jax.jit(jax.grad(total, argnums=(0, 1)))(1.0, xs)
    chex.assert_trees_all_close(got, (jnp.log(6), jnp.array([[0, 1 / 2], [0, 1 / 3], [0, 0]])), rtol=1e-6)


def test_shared_leaves_hold_while_no_row_is_valid_and_never_meet_a_stale_pair():
    """A row's first pair need not fit what a shared leaf is by now: sqrt(shared - x) is NaN for an x of the start."""
    mask = np.array([[True, True], [True, False], [False, False], [True, False]])
    xs = jnp.where(mask, jnp.array([[9.0, 8.0], [4.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), jnp.nan)

    def body(carry, x, *, valid):
        y = jnp.sqrt(carry["top"] - x)
        return {"h": carry["h"] + y, "top": carry["top"] / 2}, y

    def total(xs, top):
        carry, _ = treescan.mask_scan(
            body, {"h": jnp.zeros(2), "top": top}, xs, mask=mask, carry_axes={"h": 0, "top": None}
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


def test_keys_and_axes_compose():
    valid = np.array([[True, True, False], [True, False, False]]).T  # [T=3, B=2]
    xs = jnp.where(valid.T, 1.0, jnp.nan)  # batch first
    key = jax.random.key(3)

    def body(carry, x, *, key):
        return carry + x * jax.random.uniform(key), carry

    got, ys = treescan.mask_scan(body, jnp.zeros(2), xs, mask=valid, in_axes=1, out_axes=1, key=key)
    draws = [float(jax.random.uniform(jax.random.fold_in(key, t))) for t in range(3)]
    np.testing.assert_allclose(got, [draws[0] + draws[1], draws[0]], rtol=1e-6)
    assert ys.shape == (2, 3)


def test_an_unchanged_leaf_is_a_constant_of_the_loop():
    def body(carry, x):
        return {"h": carry["h"] * carry["w"] + x, "w": carry["w"]}, None

    def program(w):
        return treescan.mask_scan(
            body, {"h": jnp.zeros((2, 3)), "w": w}, jnp.ones((5, 2, 3)), lengths=jnp.array([5, 2])
        )

    [eqn] = equations(jax.make_jaxpr(program)(jnp.ones((2, 3))).jaxpr, "scan")
    carried = len(eqn.outvars)  # there are no ys: what comes out is what is carried
    assert carried == 1, eqn
    assert jax.eval_shape(program, jnp.ones((2, 3)))[0]["w"].shape == (2, 3)


@pytest.mark.parametrize("length", [0, 1])
def test_short_loops(length):
    xs = jnp.ones((length, 2))
    final, ys = treescan.mask_scan(lambda c, x: (c + x, c), jnp.zeros(2), xs, lengths=jnp.zeros(2, int))
    chex.assert_trees_all_equal(final, jnp.zeros(2))
    assert ys.shape == (length, 2)


def test_traced_lengths_are_clamped():
    run = jax.jit(
        lambda lengths: treescan.mask_scan(lambda c, x: (c + x, None), jnp.zeros(2), jnp.ones((3, 2)), lengths=lengths)
    )
    assert run(jnp.array([9, -4]))[0].tolist() == [3.0, 0.0]


def test_batch_is_one_branch_under_vmap():
    """The predicate stays unbatched under vmap, so the loop stays behind a branch instead of becoming a select."""

    def one(xs, length):
        return treescan.mask_scan(lambda c, x: (c + x, c), jnp.zeros(()), xs, lengths=length)

    text = str(jax.make_jaxpr(jax.vmap(one))(jnp.ones((4, 3)), jnp.array([1, 0, 2, 3])))
    assert "cond[" in text


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("disable", [False, True])
def test_a_python_scalar_init_is_promoted_as_by_scan(length, disable):
    with jax.disable_jit(disable):
        final, ys = treescan.mask_scan(lambda c, x: (c + x, c), 0, jnp.ones(4), lengths=length)
    assert final == length
    assert final.dtype == ys.dtype == jnp.float32


def test_carried_weights_are_not_stacked_in_the_gradient():
    """A shared leaf that never changes costs its own size, carried or closed over, and not T times that."""
    steps, rows, width = 100, 4, 64
    xs, lengths = jnp.ones((steps, rows, width)), jnp.array([steps, 5, 0, 7])

    def loss(w):
        init = {"h": jnp.zeros((rows, width)), "w": w}
        final, _ = treescan.mask_scan(
            lambda c, x: ({"h": jnp.tanh(c["h"] @ c["w"] + x), "w": c["w"]}, None),
            init,
            xs,
            lengths=lengths,
            carry_axes={"h": 0, "w": None},
        )
        return jnp.sum(final["h"])

    compiled = jax.jit(jax.grad(loss)).lower(jnp.eye(width)).compile()
    stacked = steps * width * width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < stacked


def test_leaves_given_whole_keep_their_place_and_their_rows():
    xs = jnp.ones((3, 2))
    data = {"a": xs, "scale": jnp.array([2.0, 0.0]), "t": 3.0}
    axes = {"a": 0, "scale": None, "t": None}

    def total(scale, x_axes):
        final, _ = treescan.mask_scan(
            lambda c, x: (c + x["a"] * x["t"] * jnp.log(x["scale"]), None),
            jnp.zeros(2),
            data | {"scale": scale},
            lengths=jnp.array([3, 0]),
            in_axes=axes,
            x_axes=x_axes,
        )
        return jnp.sum(final)

    rows = {"a": 0, "scale": 0, "t": None}
    value, grad = jax.value_and_grad(total)(data["scale"], rows)
    np.testing.assert_allclose(value, 9 * np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(grad, [4.5, 0.0], rtol=1e-6)  # the row without steps has log(0) in its place


@pytest.mark.parametrize("carry_axes", [0, None])
def test_a_batch_without_rows(carry_axes):
    init = jnp.zeros((0, 3)) if carry_axes == 0 else jnp.zeros(3)
    final, ys = treescan.mask_scan(
        lambda c, x: (c + jnp.sum(x, axis=0) if carry_axes is None else c + x, x),
        init,
        jnp.ones((4, 0, 3)),
        mask=jnp.ones((4, 0), bool),
        carry_axes=carry_axes,
    )
    assert final.shape == init.shape
    assert ys.shape == (4, 0, 3)


@pytest.mark.parametrize(("option", "axis"), [("y_axes", 3), ("carry_axes", 1), ("x_axes", 2), ("carry_axes", -1)])
def test_axes_are_checked_for_a_single_row_too(option, axis):
    with pytest.raises(treescan.ArgumentError, match=option):
        treescan.mask_scan(lambda c, x: (c + x, c), 0.0, jnp.arange(3.0), lengths=2, **{option: axis})


def test_a_loop_without_steps_is_checked_as_any_other():
    def run(steps):
        return treescan.mask_scan(
            lambda c, x: (c + x, x > 0), jnp.zeros(2), jnp.ones((steps, 2)), lengths=jnp.zeros(2, int), fill=7
        )

    for steps in (0, 3):
        with pytest.raises(treescan.ArgumentError, match="fill"):
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
    new_ref = getattr(jax, "new_ref", None) or jax.array_ref

    def loss(p):
        scale = new_ref(jnp.full((), 2.0))
        return jnp.sum(treescan.mask_scan(lambda c, x: (c * p + x * scale[...], None), jnp.zeros(2), XS, lengths=N)[0])

    XS, N = jnp.ones((20, 2)), jnp.array([2, 0])
    assert jax.jit(jax.grad(loss))(0.5) == 2


@pytest.mark.parametrize("lengths", [pytest.param([0, 0, 0], marks=pytest.mark.slow), [2, 0, 4]])
def test_held_outputs_step_by_step(lengths):
    def run(init):
        held = {"lengths": jnp.array(lengths), "fill": "hold", "chunk": 2}
        return treescan.mask_scan(lambda c, x: (c + 1, (x, c[:, 0])), init, jnp.arange(15.0).reshape(5, 3), **held)

    with jax.disable_jit():
        stepwise = run(jnp.zeros((3, 2)))
    assert_bitwise(stepwise, run(jnp.zeros((3, 2))))


def _returns_by_hand(last, rewards, begins, reverse):
    """Discounted sums that begin anew, in a loop by hand; in reverse a segment ends one step before the next begins."""
    flags = np.concatenate([begins[1:], np.zeros_like(begins[:1])]) if reverse else begins

    def step(total, x):
        reward, flag = x
        total = 0.9 * jnp.where(flag, last, total) + reward
        return total, total

    return jax.lax.scan(step, last, (rewards, flags), reverse=reverse)


def _returns(last, rewards, begins, reverse, **options):
    def step(total, reward):
        total = 0.9 * total + reward
        return total, total

    return treescan.mask_scan(step, last, rewards, resets=begins, reverse=reverse, **options)


RESETS = np.random.default_rng(5).random((64, 3)) < 0.2


@pytest.mark.parametrize("options", [{}, {"chunk": 5}, {"chunk": 0}, {"remat": "nested"}, {"compact": True}], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_resets_alone_are_a_loop_by_hand(reverse, options):
    args = jnp.arange(3.0), jnp.asarray(np.random.default_rng(6).normal(size=RESETS.shape), jnp.float32)

    def loss(run, *args):
        final, ys = run(*args, RESETS, reverse)
        return jnp.sum(final**2) + jnp.sum(jnp.sin(ys))

    ours = functools.partial(_returns, **options)
    chex.assert_trees_all_close(ours(*args, RESETS, reverse), _returns_by_hand(*args, RESETS, reverse), rtol=1e-5)
    gradients = [jax.jit(jax.grad(functools.partial(loss, run), (0, 1)))(*args) for run in (ours, _returns_by_hand)]
    chex.assert_trees_all_close(*gradients, rtol=1e-4)


@pytest.mark.parametrize("save", ["last", 5, None])
@pytest.mark.parametrize("fill", [0, "hold"])
def test_resets_alone_keep_outputs(save, fill):
    final, ys = _returns(jnp.zeros(3), jnp.ones(RESETS.shape), RESETS, True)
    kept_final, kept = _returns(jnp.zeros(3), jnp.ones(RESETS.shape), RESETS, True, save=save, fill=fill)
    chex.assert_trees_all_close(kept_final, final)
    chex.assert_trees_all_close(kept, {"last": ys[0], 5: ys[4::5], None: None}[save])


@pytest.mark.parametrize("reverse", [False, True])
def test_resets_alone_mask_nothing(reverse):
    """One loop, one selection for the one leaf, and no branch: what a loop by hand has."""
    jaxprs = [
        jax.make_jaxpr(lambda *a, run=run: run(*a, RESETS, reverse))(jnp.zeros(3), jnp.ones(RESETS.shape))
        for run in (_returns, _returns_by_hand)
    ]
    for name in ("cond", "cummin", "cummax", "custom_vmap_call", "argmax", "remat2"):
        assert not list(equations(jaxprs[0].jaxpr, name))
    for name in ("scan", "select_n"):
        assert [len(list(equations(jaxpr.jaxpr, name))) for jaxpr in jaxprs] == [1, 1]


def test_a_padded_batch_takes_resets():
    """Its lengths say where rows end; where segments begin in them it does not know."""
    padded, resets = treescan.pad([np.arange(4.0), np.arange(2.0)]), np.array([[0, 0], [0, 1], [1, 0], [0, 1]], bool)
    got = treescan.mask_scan(lambda c, x: (c + x, c + x), jnp.zeros(2), padded, resets=resets)
    want = treescan.mask_scan(
        lambda c, x: (c + x, c + x), jnp.zeros(2), padded.data, lengths=padded.lengths, resets=resets
    )
    assert_bitwise(got, want)
    assert_bitwise(got[0], jnp.array([5.0, 1.0]))
