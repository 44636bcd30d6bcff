"""What JAX does to programs and with them happens to treescan's loops as it happens to those of `jax.lax.scan`."""

import functools
import re

import chex
import flax.linen
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify, io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from loops import array, over
from oracle import assert_bitwise
from thin import parametrize

import treescan

XS = array(4)


def both(call):
    """What a program gives with treescan's scan, and with lax.scan."""
    return call(treescan.scan), call(jax.lax.scan)


# Custom derivatives.


@jax.custom_jvp
def scaled_jvp(c, x):
    return jnp.sin(c * x)


@scaled_jvp.defjvp
def _(primals, tangents):
    return scaled_jvp(*primals), 10 * tangents[0] * primals[1]


@jax.custom_vjp
def scaled_vjp(c, x):
    return jnp.sin(c * x)


scaled_vjp.defvjp(lambda c, x: (scaled_vjp(c, x), (c, x)), lambda res, t: (10 * t * res[1], t * res[0]))


DERIVATIVES = (
    jax.value_and_grad,
    lambda f: lambda c, xs: jax.vmap(jax.grad(f), (0, None))(jnp.stack([c, 2 * c]), xs),
    lambda f: lambda c, xs: jax.grad(lambda cs: jax.vmap(f, (0, None))(cs, xs).sum())(c[None]),
)


@parametrize("inner", {"custom_jvp": scaled_jvp, "custom_vjp": scaled_vjp})
def test_custom_derivatives_in_a_body(inner):
    for transform in DERIVATIVES:
        assert_bitwise(
            *both(
                lambda scan, by=transform: by(lambda c, xs: scan(lambda c, x: (inner(c, x), c), c, xs)[0])(array(), XS)
            )
        )


def test_custom_vjp_in_a_body_refuses_forward_mode():
    def call(scan):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda c: scan(lambda c, x: (scaled_vjp(c, x), c), c, XS)[0], (array(),), (array(),))

    both(call)


def test_a_loop_in_a_custom_derivative():
    def call(scan):
        @jax.custom_vjp
        def total(c):
            return scan(lambda c, x: (c * x, None), c, XS)[0]

        total.defvjp(lambda c: (total(c), None), lambda _, t: (scan(lambda t, x: (t + x, None), t, XS)[0],))
        return jax.grad(total)(array())

    assert_bitwise(*both(call))


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


def test_debug_callback_under_vmap_and_grad():
    def call(scan):
        seen = []

        def body(c, x):
            jax.debug.callback(lambda x: seen.append(float(x)), x)
            return jnp.sin(c * x), None

        jax.vmap(jax.grad(lambda c: scan(body, c, XS)[0]))(array(2))
        jax.effects_barrier()
        return sorted(seen)

    ours, lax = both(call)
    assert ours == lax
    assert set(ours) == set(XS.tolist())


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


def test_discharged_checks_in_a_body():
    def call(scan):
        def body(c, x):
            return c / x, c

        error, _ = checkify.checkify(lambda xs: scan(body, jnp.float32(1), xs), errors=checkify.float_checks)(
            jnp.array([1.0, 0.0, 1.0])
        )
        return error.get() is not None and "division by zero" in error.get()

    assert both(call) == (True, True)


POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "all": jax.checkpoint_policies.nothing_saveable,
}


@pytest.mark.parametrize(("where", "policy"), [("around", "dots"), ("inside", "all"), ("inside", "none")])
def test_checkpoint(where, policy):
    policy = POLICIES[policy]

    def call(scan):
        def body(c, x):
            return jnp.tanh(c @ array(3, 3) * x), c

        if where == "inside":
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)

        def run(c, xs):
            c, ys = scan(body, c, xs)
            return jnp.sum(c) + jnp.sum(ys**2)

        run = jax.checkpoint(run, policy=policy) if where == "around" else run
        derivative = jax.grad(run, argnums=(0, 1))
        return derivative(array(3), XS), str(jax.make_jaxpr(derivative)(array(3), XS))

    (ours, our_jaxpr), (lax, lax_jaxpr) = both(call)
    assert_bitwise(ours, lax)
    assert our_jaxpr == lax_jaxpr


def test_export():
    def call(scan):
        exported = jax.export.export(jax.jit(lambda c, xs: scan(lambda c, x: (c * x, c + x), c, xs)))(array(), XS)
        return exported.call(array(), XS)

    assert_bitwise(*both(call))


def test_linearize_and_transpose():
    def call(scan):
        def linear(c):
            return scan(lambda c, x: (c * x, 2 * c), c, XS)

        out, tangent = jax.linearize(linear, array())
        return out, tangent(array()), jax.linear_transpose(linear, array())(out)

    assert_bitwise(*both(call))


def test_hessian_and_jacobians():
    def call(scan):
        def run(c):
            return scan(lambda c, x: (jnp.sin(c * x), jnp.sum(c)), c, XS)

        return jax.jacfwd(run)(array(2)), jax.jacrev(run)(array(2)), jax.hessian(lambda c: run(c)[1])(array(2))

    assert_bitwise(*both(call))


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


@pytest.mark.devices
def test_explicit_shardings():
    def call(scan):
        with jax.set_mesh(mesh(AxisType.Explicit)):
            c = jax.device_put(array(8, 2), P("d"))
            xs = jax.device_put(array(3, 8, 2), P(None, "d"))

            def run(c, xs):
                return scan(lambda c, x: (jnp.sin(c + x), c * x), c, xs)

            eager, jitted = run(c, xs), jax.jit(run)(c, xs)
            gradient = jax.grad(lambda c: jnp.sum(run(c, xs)[0]))(c)
            specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, (eager, jitted, gradient))
            return jax.tree.map(np.asarray, (eager, jitted, gradient)), specs

    (ours, our_specs), (lax, lax_specs) = both(call)
    assert our_specs == lax_specs
    assert_bitwise(ours, lax)


@pytest.mark.devices
def test_shardings_of_jit():
    def call(scan):
        sharding = NamedSharding(mesh(AxisType.Auto), P("d"))
        run = jax.jit(lambda c, xs: scan(lambda c, x: (c + x, c), c, xs), in_shardings=(sharding, None))
        return run(array(8), array(3, 8))

    assert_bitwise(*both(call))


# Types.


@pytest.mark.parametrize(
    ("impl", "context"), [("threefry2x32", "jit"), ("rbg", "eager"), ("rbg", "vmap"), ("threefry2x32", "disable_jit")]
)
def test_typed_keys_everywhere(impl, context):
    def call(scan):
        def body(key, x):
            key, sub = jax.random.split(key)
            return key, (sub, jax.random.normal(x["key"]) + x["x"])

        def run(key):
            return scan(body, key, {"key": jax.random.split(jax.random.key(1, impl=impl), 4), "x": XS})

        key = jax.random.key(0, impl=impl)
        if context == "vmap":
            return jax.vmap(run)(jax.random.split(key, 3))
        with jax.disable_jit(context == "disable_jit"):
            return (jax.jit(run) if context == "jit" else run)(key)

    assert_bitwise(*both(call))


@pytest.mark.parametrize("context", ["eager", "jit", "grad", "disable_jit"])
def test_x64(context):
    def call(scan):
        with jax.enable_x64(True):
            init, xs = (jnp.float64(1), jnp.int64(0)), jnp.arange(1.0, 4.0)

            def run(c):
                return scan(lambda c, x: ((jnp.sin(c[0] * x), c[1] + 1), (c[0], x)), (c, init[1]), xs)

            if context == "grad":
                return jax.grad(lambda c: run(c)[0][0])(init[0])
            with jax.disable_jit(context == "disable_jit"):
                return (jax.jit(run) if context == "jit" else run)(init[0])

    ours, lax = both(call)
    assert_bitwise(ours, lax)
    assert jax.tree.leaves(ours)[0].dtype == np.float64


def test_x64_after_x32_is_another_trace():
    def body(c, x):
        return c + x, c

    assert treescan.scan(body, 0.0, np.arange(3.0))[0].dtype == np.float32
    with jax.enable_x64(True):
        assert treescan.scan(body, 0.0, np.arange(3.0))[0].dtype == np.float64
        assert treescan.mask_scan(body, np.zeros(()), np.arange(3.0), lengths=2)[0].dtype == np.float64
        assert treescan.fori(0, 3, lambda i, c: c + i, 0).dtype == jax.lax.fori_loop(0, 3, lambda i, c: c + i, 0).dtype


def test_float0_tangents():
    def call(scan):
        def run(init, xs):
            (_, c), ys = scan(lambda c, x: ((c[0] + x[0], jnp.sin(c[1] * x[1])), c), init, xs)
            return c + jnp.sum(ys[1])

        args = ((jnp.int32(1), array()), (jnp.arange(4), XS))
        zeros = jax.tree.map(
            lambda a: np.zeros(a.shape, jax.dtypes.float0) if a.dtype == jnp.int32 else jnp.ones_like(a), args
        )
        return jax.grad(run, argnums=(0, 1), allow_int=True)(*args), jax.jvp(run, args, zeros)

    (ours_grad, ours_jvp), (lax_grad, lax_jvp) = both(call)
    assert_bitwise(ours_jvp, lax_jvp)
    for a, b in zip(jax.tree.leaves(ours_grad), jax.tree.leaves(lax_grad), strict=True):
        assert a.dtype == b.dtype
        assert a.dtype == jax.dtypes.float0 or np.array_equal(a, b)
    assert ours_grad[0][0].dtype == ours_grad[1][0].dtype == jax.dtypes.float0


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "complex64", "bool"])
def test_extended_dtypes(dtype):
    values = jnp.asarray([1, 0, 1, 1], dtype)
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            assert_bitwise(*both(lambda scan: scan(lambda c, x: (x, c), values[0], values)))


def test_weak_types_come_out_as_they_do_from_lax_scan():
    for init in (0, 1.0, 2j):
        assert_bitwise(*both(lambda scan, init=init: scan(lambda c, x: (c * 2, c), init, XS)))


def test_numpy_arrays():
    assert_bitwise(*both(lambda scan: scan(lambda c, x: (c + x, c), np.float32(0), np.asarray(XS))))


# Keywords, messages, leaks.


@pytest.mark.parametrize("split", [False, True])
def test_split_transpose_is_forwarded(split):
    def call(scan):
        def loss(w, xs):
            return jnp.sum(scan(lambda c, x: (jnp.tanh(c @ w + x), c), array(3), xs, _split_transpose=split)[0])

        return str(jax.make_jaxpr(jax.grad(loss))(array(3, 3), array(4, 3)))

    ours, lax = both(call)
    assert ours == lax


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


def test_jax_and_optax_notice_nothing(monkeypatch):
    @jax.numpy_dtype_promotion("standard")  # which optax relies on
    def run():
        def step(state, _):
            params, opt = state
            grads = jax.grad(lambda p: jnp.sum((p - 1) ** 2))(params)
            updates, opt = optimizer.update(grads, opt, params)
            return (optax.apply_updates(params, updates), opt), None

        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
        params = array(3)
        return (
            jax.lax.scan(step, (params, optimizer.init(params)), None, 5),
            jax.lax.map(jnp.sin, XS),
            jax.lax.map(jnp.sin, array(5), batch_size=2),
            jnp.polyval(array(3), XS),
        )

    expected = run()
    monkeypatch.setattr(jax.lax, "scan", treescan.scan)
    assert_bitwise(run(), expected)


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
