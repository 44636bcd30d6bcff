"""Skipped chunks and ordered rows on many devices: decided once, before the loop, and by all devices alike."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bars import noted
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treescan

pytestmark = pytest.mark.devices

DEVICES, STEPS, ROWS, WIDTH = 8, 8, 16, 3  # two rows a device
LENGTHS = np.array([5, 0, 0, 0, 1, 2, 5, 5, 0, 3, 0, 0, 4, 4, 0, 1])  # by device: 1, 0, 2, 2, 1, 0, 2, 1 rows with data
SPECS = (P("i"), P(None, "i"), P("i"))
DEAD = np.zeros(ROWS, int)


def data(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    valid = np.arange(STEPS)[:, None] < lengths
    xs = np.where(valid[..., None], rng.uniform(0.5, 2.0, (STEPS, ROWS, WIDTH)), np.nan)
    init = rng.uniform(-1, 1, (ROWS, WIDTH))
    return jnp.asarray(init, jnp.float32), jnp.asarray(xs, jnp.float32), jnp.asarray(lengths)


def cell(carry, x):
    h = jnp.tanh(carry + jnp.log(x))
    return h, h * x


def run(init, xs, lengths, body=cell, **options):
    return treescan.mask_scan(body, init, xs, lengths=lengths, **options)


def loss(*args, **options):
    final, ys = run(*args, **options)
    return jnp.sum(final * final) + jnp.sum(ys)


def gradient(*args, **options):
    return jax.grad(functools.partial(loss, **options), argnums=(0, 1))(*args)


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("i",), axis_types=(kind,))


def spread(mesh, args):
    return [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(args, SPECS, strict=True)]


# A batch that is sharded from outside.


@pytest.mark.parametrize("function", [run, gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("chunk", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_loop_does_not_communicate_to_decide(function, chunk):
    args = spread(mesh_of(), data())
    program = Program(functools.partial(function, chunk=chunk), *args)
    assert program.collectives() > 0  # before the loops, for all chunks
    assert program.collectives_in_loops() == 0
    assert program.branches()
    chex.assert_trees_all_close(
        jax.jit(functools.partial(function, chunk=chunk))(*args), function(*data(), chunk=0), rtol=1e-5
    )


@pytest.mark.parametrize("tiers", [(2,), (1, 3)])
def test_compact_of_a_sharded_batch(tiers):
    few = data(np.minimum(LENGTHS, np.where(np.arange(ROWS) == 6, 5, 2)))  # after two steps one row is left
    for given in (data(), few):
        got = jax.jit(functools.partial(run, chunk=2, compact=tiers))(*spread(mesh_of(), given))
        chex.assert_trees_all_close(got, run(*given, chunk=0), rtol=1e-5)


def test_an_explicit_mesh_skips_chunks():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        args = spread(mesh, data())
        carry, ys = jax.jit(functools.partial(run, chunk=3))(*args)
        assert jax.typeof(carry).sharding.spec[0] == "i"
        got = jax.device_get((carry, ys))
    chex.assert_trees_all_close(got, jax.device_get(run(*data(), chunk=0)), rtol=1e-5)


# Inside of `jax.shard_map`.


def inside(function, check_vma=True, **options):
    local = functools.partial(function, **options)
    return jax.jit(jax.shard_map(local, mesh=mesh_of(), in_specs=SPECS, out_specs=SPECS[:2], check_vma=check_vma))


RAN = []


def reducing(carry, x, *, valid):
    """Adds up over all rows of all devices."""
    jax.debug.callback(lambda _: RAN.append(x.shape[0]), x[0, 0])
    total = jax.lax.psum(jnp.sum(jnp.where(valid[:, None], x, 0.0), axis=0, keepdims=True), "i")
    return jnp.tanh(carry + total), carry


def test_devices_that_skip_would_wait_for_each_other_and_do_not():
    """In no chunk but the first have all devices data; a collective in the body needs all of them or none."""
    skipping, all_steps = (inside(run, body=reducing, chunk=chunk) for chunk in (2, 0))
    for lengths, steps in ((LENGTHS, 6), (np.where(np.arange(ROWS) == 5, 3, 0), 4), (DEAD, 0)):
        ran, got = noted(RAN, functools.partial(skipping, *data(lengths)))
        assert ran == [2] * steps * DEVICES
        chex.assert_trees_all_close(got, all_steps(*data(lengths)), rtol=1e-5)


def test_devices_with_unlike_numbers_of_live_rows_run_the_largest():
    compacted, plain = inside(run, body=reducing, chunk=2, compact=True), inside(run, body=reducing, chunk=0)
    one_a_device = LENGTHS * (np.arange(ROWS) % 2)  # the second row of a device, or none
    for lengths, rows in ((LENGTHS, 2), (one_a_device, 1)):
        ran, got = noted(RAN, functools.partial(compacted, *data(lengths)))
        assert ran[:DEVICES] == [rows] * DEVICES
        chex.assert_trees_all_close(got, plain(*data(lengths)), rtol=1e-5)
    assert noted(RAN, lambda: compacted(*data(DEAD)))[0] == []


def test_without_check_vma_nothing_is_skipped():
    """What varies is not known there, so that devices could part."""
    unchecked = inside(run, body=reducing, check_vma=False, chunk=2)
    ran, got = noted(RAN, lambda: unchecked(*data()))
    assert ran == [2] * STEPS * DEVICES
    chex.assert_trees_all_close(got, inside(run, body=reducing, chunk=0)(*data()), rtol=1e-5)


# Products of a chunk


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_gradient_of_weights_is_summed_once_per_chunk(kind):
    """Not in each step; and once per call where they vary before the loop within `shard_map`."""

    def lstm(w, carry, x):
        h, s = carry
        i, f, o, g = jnp.split(x @ w[:32] + h @ w[32:], 4, -1)
        s = jax.nn.sigmoid(f) * s + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(s)
        return (h, s), h

    def of_weights(w, xs, lengths):
        init = (jnp.zeros_like(xs[0]),) * 2
        _, ys = treescan.mask_scan(functools.partial(lstm, w), init, xs, lengths=lengths, chunk=8)
        return jnp.sum(ys**2)

    def local(w, xs, lengths):
        return jax.lax.psum(of_weights(jax.lax.pcast(w, "i", to="varying"), xs, lengths), "i")

    rng = np.random.default_rng(0)
    args = rng.normal(size=(64, 128)).astype("f") / 8, rng.normal(size=(32, 16, 32)).astype("f"), LENGTHS * 6
    mesh, specs = mesh_of(kind), (P(), *SPECS[1:])
    given = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(args, specs, strict=True)]
    over_devices = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    expected = jax.jit(jax.grad(of_weights))(*args)
    for function, within in ((of_weights, [1]), (over_devices, [])):
        chex.assert_trees_all_close(jax.device_get(jax.jit(jax.grad(function))(*given)), expected, rtol=1e-4, atol=1e-5)
        texts = Program(jax.grad(function), *given).loops()
        # A loop over chunks has the text of the loops in it too: a sum in each step would be found twice.
        assert [text.count(" all-reduce(") for text in texts if " all-reduce(" in text] == within


@pytest.mark.parametrize(
    ("kind", "options", "in_steps"),
    [
        (AxisType.Auto, {}, True),
        (AxisType.Auto, {"chunk": 8}, False),
        (AxisType.Explicit, {}, False),
    ],
    ids=str,
)
def test_where_the_gradient_of_small_weights_is_summed(kind, options, in_steps):
    """With automatic axes and without `chunk`, in each step: such a product is not most of a step."""

    def of_weights(w, init, xs, lengths):
        return loss(init, xs, lengths, body=lambda h, x: (jnp.tanh(h @ w + x),) * 2, **options)

    args = np.eye(WIDTH, dtype="f"), *data(LENGTHS * 6)[:1], jnp.ones((32, ROWS, WIDTH)), LENGTHS * 6
    mesh = mesh_of(kind)
    places = (NamedSharding(mesh, spec) for spec in (P(), *SPECS))
    given = [jax.device_put(value, place) for value, place in zip(args, places, strict=True)]
    chex.assert_trees_all_close(
        jax.device_get(jax.jit(jax.grad(of_weights))(*given)), jax.jit(jax.grad(of_weights))(*args), rtol=1e-4
    )
    texts = Program(jax.grad(of_weights), *given).loops()
    steps = [text for text in texts if " while(" not in text]
    assert any(" all-reduce(" in text for text in texts)
    assert any(" all-reduce(" in text for text in steps) == in_steps
