"""What JAX does to programs and with them happens to treescan's loops as it happens to those of `jax.lax.scan`."""

import functools
import re

import chex
import flax.linen
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, PartitionSpec as P
from loops import array, over
from oracle import assert_bitwise
from thin import parametrize

import treescan

XS = array(4)


def both(call):
    """What a program gives with treescan's scan, and with lax.scan."""
    return call(treescan.scan), call(jax.lax.scan)


# Effects.


@parametrize("transform", {"eager": lambda f: f, "jit": jax.jit, "grad": jax.grad, "disable_jit": jax.disable_jit()})
def test_debug_print(capfd, transform):
    def call(scan):
        def body(c, x):
            jax.debug.print("{} {}", c, x, ordered=True)
            return c + x, None

        transform(lambda c: scan(body, c, jnp.arange(3.0), reverse=True)[0])(jnp.float32(1))
        jax.effects_barrier()
        return capfd.readouterr().out

    ours, lax = both(call)
    assert ours == lax
    assert len(ours.splitlines()) == 3


@pytest.mark.parametrize(("ordered", "context"), [(False, "eager"), (True, "jit"), (True, "disable_jit")])
def test_io_callback(ordered, context):
    def call(scan):
        def body(c, x):
            return c + io_callback(
                lambda x: np.float32(2 * x), jax.ShapeDtypeStruct((), jnp.float32), x, ordered=ordered
            ), c

        run = functools.partial(scan, body)
        with jax.disable_jit(context == "disable_jit"):
            return (jax.jit(run) if context == "jit" else run)(jnp.float32(0), XS)

    assert_bitwise(*both(call))


@parametrize("run", {"plain": over(treescan.scan), "out_axes": over(treescan.scan, out_axes=0, key=jax.random.key(0))})
def test_effects_survive_options(run):
    seen = []

    def body(c, x, key=None):
        io_callback(lambda x: seen.append(int(x)), None, x, ordered=True)
        return c, x

    jax.block_until_ready(run(body, 0, jnp.arange(3)))
    jax.effects_barrier()
    assert seen == [0, 1, 2]


new_ref = getattr(jax, "new_ref", None) or jax.array_ref


@pytest.mark.parametrize("context", ["eager", "jit"])
def test_refs_that_a_body_closes_over(context):
    def call(scan):
        def run(xs):
            ref = new_ref(jnp.float32(1))

            def body(c, x):
                ref[...] = ref[...] * 2 + x
                return c + ref[...], ref[...]

            return scan(body, jnp.float32(0), xs), ref[...]

        return (jax.jit(run) if context == "jit" else run)(XS)

    assert_bitwise(*both(call))


def test_a_ref_outlives_calls():
    ref = new_ref(jnp.int32(0))

    def body(c, x):
        ref[...] += x
        return c, None

    for _ in range(2):
        treescan.scan(body, 0, jnp.arange(4))
    assert ref[...] == 12


# Checkify, checkpoint, export.


@pytest.mark.parametrize("bad", [False, True])
def test_checkify(bad):
    def call(scan):
        def body(c, x):
            checkify.check(x < 3, "x is {x}", x=x)
            return c + x, jnp.log(c)

        checked = checkify.checkify(
            jax.jit(lambda xs: scan(body, jnp.float32(1), xs)), errors=checkify.user_checks | checkify.nan_checks
        )
        error, out = checked(jnp.arange(4.0) if bad else jnp.arange(3.0))
        return str(error.get()), out

    (ours, ours_out), (lax, lax_out) = both(call)
    assert ours.split(" (")[0] == lax.split(" (")[0]
    assert ("x is 3.0" in ours) is bad
    assert_bitwise(ours_out, lax_out)


# Shardings.


def mesh(kind):
    return jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])


@pytest.mark.devices
@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(check_vma):
    """The carry varies over the mesh, and a collective runs in the body."""

    def call(scan):
        def run(c, xs):
            return scan(lambda c, x: (jnp.sin(c + x), jax.lax.psum(c, "d")), c, xs)

        sharded = jax.shard_map(
            run, mesh=mesh(AxisType.Auto), in_specs=(P("d"), P(None, "d")), out_specs=(P("d"), P()), check_vma=check_vma
        )
        return sharded(array(8), array(3, 8)), jax.jit(jax.grad(lambda c: jnp.sum(sharded(c, array(3, 8))[0])))(
            array(8)
        )

    assert_bitwise(*both(call))


@parametrize(
    "case",
    {
        "key": (over(treescan.scan, key=jax.random.key(0)), 0),
        "in_axes": (over(treescan.scan, in_axes=1), 1),
        "out_axes": (over(treescan.scan, out_axes=0, unroll=2, name="cell"), 0),
    },
)
@pytest.mark.devices
def test_options_in_shard_map(case):
    verb, axis = case

    def run(c, xs):
        return verb(lambda c, x, key=None: (c + x, c), c, xs)

    specs = (P("d"), P("d") if axis else P(None, "d"))
    sharded = jax.shard_map(run, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=(P("d"), P(None, "d")))
    xs = array(3, 8)
    expected = jax.lax.scan(lambda c, x: (c + x, c), array(8), xs)
    assert_bitwise(
        jax.tree.map(np.asarray, sharded(array(8), xs.T if axis else xs)), jax.tree.map(np.asarray, expected)
    )


# Types.


def test_x64_after_x32_is_another_trace():
    def body(c, x):
        return c + x, c

    assert treescan.scan(body, 0.0, np.arange(3.0))[0].dtype == np.float32
    with jax.enable_x64(True):
        assert treescan.scan(body, 0.0, np.arange(3.0))[0].dtype == np.float64
        assert treescan.mask_scan(body, np.zeros(()), np.arange(3.0), lengths=2)[0].dtype == np.float64
        assert treescan.fori(0, 3, lambda i, c: c + i, 0).dtype == jax.lax.fori_loop(0, 3, lambda i, c: c + i, 0).dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "complex64", "bool"])
def test_extended_dtypes(dtype):
    values = jnp.asarray([1, 0, 1, 1], dtype)
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            assert_bitwise(*both(lambda scan: scan(lambda c, x: (x, c), values[0], values)))


# Keywords, messages, leaks.


def test_split_transpose_reaches_lax_scan(monkeypatch):
    """Newer releases accept and ignore it, so that no jaxpr shows it."""
    came = []

    def spy(*args, **keywords):
        came.append(keywords.get("_split_transpose", False))
        return jax.lax.scan(*args, **keywords)

    monkeypatch.setattr("treescan._loop.run._lax_scan", spy)
    for split in (False, True):
        treescan.scan(lambda c, x: (c * x, c), array(), XS, _split_transpose=split)
    treescan.scan(lambda c, x: (c * x, c), array(), XS, None, False, 1, True)
    assert came == [False, True, True]


def test_a_leaked_tracer_is_traced_to_the_users_body():
    leaked = []

    def leaky_body(c, x):
        leaked.append(c)
        return c, x

    treescan.scan(leaky_body, jnp.float32(0), XS)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        leaked[0] + 1
    assert "leaky_body" in str(caught.value)
    assert __file__ in str(caught.value)


CONCRETE = {
    "if": lambda c: c > 0 and c,
    "float": float,
    "numpy": np.asarray,
}


@pytest.mark.parametrize(
    ("use", "name"),
    [
        *((use, "scan") for use in CONCRETE),
        *(("if", name) for name in ("fold", "accumulate", "mask_scan", "out_axes", "key")),
    ],
)
def test_a_message_about_concrete_values_names_the_users_body(use, name):
    def call(verb, **options):
        def bodily(state, observation, key=None):
            CONCRETE[use](state)
            return state, observation

        with pytest.raises((jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)) as caught:
            verb(bodily, jnp.float32(0), XS, **options)
        return str(caught.value)

    verb = getattr(treescan, name, treescan.scan)
    options = {"mask_scan": {"lengths": 4}, "out_axes": {"out_axes": -1}, "key": {"key": jax.random.key(0)}}.get(
        name, {}
    )
    text = call(verb, **options)
    assert "bodily" in text
    assert __file__ in text
    if name == "scan":
        assert text == call(jax.lax.scan)


@pytest.mark.parametrize("verb", ["scan", "fori", "fold_layers", "remat", "pattern"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_message_about_concrete_values_names_the_users_argument(verb, place):
    """The carry of a body of `fori` or of layers comes second."""

    def body(first, second):
        if (first, second)[place].sum() > 0:
            return first
        return second

    runs = {
        "scan": lambda: treescan.fold(body, jnp.float32(0), XS),
        "fori": lambda: treescan.fori(0, 3, body, jnp.float32(0)),
        "fold_layers": lambda: treescan.fold_layers(body, jnp.float32(0), XS),
        "remat": lambda: treescan.fold_layers(body, jnp.float32(0), XS, remat="step"),
        "pattern": lambda: treescan.fold_layers([body, body], jnp.float32(0), [XS, XS[:-1]]),
    }
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        runs[verb]()
    named = re.search(r"argument ((?:first|second)\b\S*)", str(caught.value))
    assert named, str(caught.value)
    if verb != "fori":  # its index travels with the carry
        assert named[1].startswith(("first", "second")[place])


# In the place of lax.scan.


def test_flax_notices_nothing(monkeypatch):
    def train(xs):
        model = flax.linen.RNN(flax.linen.LSTMCell(4), return_carry=True)
        variables = model.init(jax.random.key(0), xs)
        (loss, carry), grads = jax.value_and_grad(
            lambda v: (lambda out: (jnp.sum(out[1] ** 2), out[0]))(model.apply(v, xs, seq_lengths=jnp.array([2, 5]))),
            has_aux=True,
        )(variables)
        return loss, carry, grads

    expected = train(array(2, 5, 3))
    monkeypatch.setattr(jax.lax, "scan", treescan.scan)
    assert_bitwise(train(array(2, 5, 3)), expected)


def test_the_patched_scan_is_treescans_and_ends(monkeypatch):
    monkeypatch.setattr(jax.lax, "scan", treescan.scan)
    with pytest.raises(treescan.CarryError):
        jax.lax.scan(lambda c, x: (c[None], x), jnp.zeros(1), XS)
    assert jax.lax.scan(lambda c, x: (c + x, None), 0.0, jnp.ones(3))[0] == 3


@pytest.mark.parametrize("verb", ["scan", "key", "mask_scan"])
def test_a_symbolic_number_of_steps(verb):
    """jax.export over a length that is not known yet, as lax.scan takes it."""

    def body(c, x):
        return c + x, c

    def run(init, xs):
        if verb == "mask_scan":
            return treescan.mask_scan(body, init, xs, lengths=jnp.array([2, 3]))
        if verb == "key":
            return treescan.scan(lambda c, x, *, key: (c + x, jax.random.uniform(key)), init, xs, key=jax.random.key(0))
        return treescan.scan(body, init, xs)

    steps = jax.export.symbolic_shape("t")[0]
    shape = jax.ShapeDtypeStruct((steps, 2), jnp.float32)
    exported = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct((2,), jnp.float32), shape)
    want = run(jnp.zeros(2), jnp.ones((4, 2)))
    chex.assert_trees_all_close(exported.call(jnp.zeros(2), jnp.ones((4, 2))), want)


@jax.custom_jvp
def _no_derivative(x):
    return jnp.sin(x)


_no_derivative.defjvp(lambda x, dx: (_no_derivative(*x), 2 * jnp.cos(x[0]) * dx[0]))


@jax.custom_jvp
def _sine_within(x):
    return jnp.sin(x)


_sine_within.defjvp(lambda x, dx: (jnp.sin(*x), 2 * jnp.cos(x[0]) * dx[0]))


@pytest.mark.slow
def test_grad_of_jvp_of_a_rule_that_is_no_derivative():
    """It is documented that a rewritten step does not apply such a rule to what the rule itself calls."""
    xs, lengths = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2, 2)), jnp.float32), jnp.array([6, 3])
    weights = jnp.array([[0.5, -0.3], [0.2, 0.4]])

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def derivatives(function, chunk):
        def loss(weights):
            def step(h, x):
                h = function(h @ weights + x)
                return h, h

            return jnp.sum(treescan.mask_scan(step, jnp.zeros((2, 2)), xs, lengths=lengths, chunk=chunk)[1] ** 2)

        along = jnp.ones_like(weights)
        first = jax.jvp(loss, (weights,), (along,))[1], jax.grad(loss)(weights)
        return first, jax.grad(lambda weights: jax.jvp(loss, (weights,), (along,))[1])(weights)

    first, rewritten = derivatives(_no_derivative, None)
    same, plain = derivatives(_no_derivative, 0)
    chex.assert_trees_all_close(first, same, rtol=1e-4)
    assert not np.allclose(rewritten, plain, rtol=0.1)
    for chunk in (None, 0):
        np.testing.assert_allclose(derivatives(_sine_within, chunk)[1], rewritten, rtol=1e-4)
