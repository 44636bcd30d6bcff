"""`mask_scan` inside of `jax.shard_map`, and on batches that are sharded outside of it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import treescan

pytestmark = pytest.mark.devices

LENGTHS = np.array([3, 0, 5, 1, 0, 0, 2, 4])


def data():
    valid = np.arange(5)[:, None] < LENGTHS
    xs = jnp.where(valid, jax.random.uniform(jax.random.key(0), (5, 8), minval=0.5, maxval=2.0), jnp.nan)
    return jnp.linspace(0.5, 1.5, 8), xs, jnp.asarray(LENGTHS)


def body(carry, x):
    return carry + jnp.log(x), carry / x


def loss(init, xs, lengths):
    carry, ys = treescan.mask_scan(body, init, xs, lengths=lengths)
    return jnp.sum(jnp.sin(carry)) + jnp.sum(ys)


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_equals_outside(mesh, check_vma):
    """One row a device, three of them without any step: these borrow a pair from another device."""
    init, xs, lengths = data()
    run = functools.partial(treescan.mask_scan, body)
    specs = {"in_specs": (P("i"), P(None, "i"), P("i")), "out_specs": (P("i"), P(None, "i"))}

    def local(init, xs, lengths):
        return run(init, xs, lengths=lengths)

    sharded = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
    chex.assert_trees_all_close(jax.jit(sharded)(init, xs, lengths), run(init, xs, lengths=lengths), rtol=1e-6)

    if check_vma:  # without it JAX does not tell which values vary, and nothing can be borrowed from another device

        def local_loss(init, xs, lengths):
            return jax.lax.psum(loss(init, xs, lengths), "i")

        total = jax.shard_map(local_loss, mesh=mesh, in_specs=specs["in_specs"], out_specs=P())
        got = jax.jit(jax.grad(total, argnums=(0, 1)))(init, xs, lengths)
        want = jax.grad(loss, argnums=(0, 1))(init, xs, lengths)
        chex.assert_trees_all_close(got, want, rtol=1e-5)
        chex.assert_tree_all_finite(got)


def test_an_init_that_does_not_vary_takes_on_the_axes_of_the_mask(mesh):
    """Zeros made inside of shard_map vary over no axis; held by a mask that varies, they do."""
    _, xs, lengths = data()

    def local(xs, lengths):
        return treescan.mask_scan(lambda c, x: (c + jnp.nan_to_num(x), None), jnp.zeros(1), xs, lengths=lengths)[0]

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "i"), P("i")), out_specs=P("i"))
    want = [np.asarray(xs)[: LENGTHS[row], row].sum() for row in range(8)]
    np.testing.assert_allclose(run(xs, lengths), want, rtol=1e-6)


def test_a_padded_row_of_an_explicitly_sharded_batch_is_shown_a_flag_that_some_row_has():
    """With a flag that no row has, the gradient of the weight would be log(0) at the padding, times zero: NaN."""
    init, xs, lengths = data()

    def total(w, init, xs, flags, lengths):
        def flagged(carry, x):
            value, flag = x
            return carry + w * jnp.log(jnp.where(flag, 0.0, value)), None

        return treescan.mask_scan(flagged, init, (xs, flags), lengths=lengths)[0].sum()

    flags = np.arange(5)[:, None] >= LENGTHS  # set at the padding alone
    derive = jax.grad(total, argnums=(0, 1, 2))
    want = derive(2.0, init, xs, flags, lengths)
    with jax.set_mesh(jax.make_mesh((8,), ("i",), axis_types=(AxisType.Explicit,))):
        specs = (P("i"), P(None, "i"), P(None, "i"), P("i"))
        given = [jax.sharding.reshard(*pair) for pair in zip((init, xs, flags, lengths), specs, strict=True)]
        got = jax.jit(derive)(2.0, *given)
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-6)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="JAX 0.8 cannot map what adds up over devices")
def test_an_element_without_any_step_on_any_device_borrows_another_elements_pair(mesh):
    """Its own x, or none at all, would make the gradient of the weight NaN."""
    init, xs, lengths = data()
    inits, lengths = jnp.stack([init, init]), jnp.stack([lengths * 0, lengths])
    xs = jnp.stack([jnp.zeros_like(xs), xs])

    def total(w, init, xs, lengths):
        return treescan.mask_scan(lambda c, x: (c + w * jnp.log(x), None), init, xs, lengths=lengths)[0].sum()

    def local(w, *given):
        return jax.lax.psum(jax.vmap(functools.partial(total, w))(*given).sum(), "i")

    specs = (P(), P(None, "i"), P(None, None, "i"), P(None, "i"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    got = jax.jit(jax.grad(sharded))(2.0, inits, xs, lengths)
    np.testing.assert_allclose(got, np.nansum(np.log(np.asarray(xs[1]))), rtol=1e-6)


def packed_over(placed):
    return treescan.mask_scan(lambda carry, x: (carry + x, carry + x), jnp.zeros(placed.rows), placed)[1]


def test_rows_of_a_packed_batch_that_are_spread():
    """Its index counts the rows of all devices: refused where a device sees its own alone, with that index."""
    packed = treescan.pack([jnp.ones(n) for n in (3, 1, 2, 2)], rows=2, init=[100.0, 200.0, 300.0, 400.0])
    in_rows = treescan.Packed(*[P(None, "i")] * 3, P(), P())
    two = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    for check_vma in (True, False):
        spread = jax.shard_map(packed_over, mesh=two, in_specs=(in_rows,), out_specs=P(None, "i"), check_vma=check_vma)
        with pytest.raises(treescan.errors.ArgumentError, match="sharded over devices"):
            jax.jit(spread)(packed)
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), packed)
    own = jax.shard_map(
        lambda packed: packed_over(jax.tree.map(lambda leaf: leaf[0], packed))[None],
        mesh=two, in_specs=P("i"), out_specs=P("i"),
    )  # fmt: skip
    chex.assert_trees_all_close(jax.jit(own)(twice), jnp.stack([packed_over(packed)] * 2))
