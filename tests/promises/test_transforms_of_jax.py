"""What JAX does to programs and with them happens to treescan's loops as it happens to those of `jax.lax.scan`."""

import functools
import gc
import weakref

import chex
import flax.linen
import flax.nnx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from loops import array, over
from oracle import assert_bitwise
from thin import parametrize
from traces import Counted

import treescan
from treescan._loop.replaced import find_own
from treescan.carries import ema
from treescan.integrations.nnx import scan as nnx_scan

XS = array(4)


def both(call):
    """What a program gives with treescan's scan, and with lax.scan."""
    return call(treescan.scan), call(jax.lax.scan)


# Effects.


@parametrize("run", {"plain": over(treescan.scan), "options": over(treescan.scan, out_axes=0, key=jax.random.key(0))})
@pytest.mark.parametrize("disabled", [False, True])
def test_effects_happen_in_the_order_of_the_steps(run, disabled):
    seen = []

    def body(c, x, key=None):
        io_callback(lambda x: seen.append(int(x)), None, x, ordered=True)
        return c, x

    with jax.disable_jit(disabled):
        jax.block_until_ready(run(body, 0, jnp.arange(3)))
    jax.effects_barrier()
    assert seen == [0, 1, 2]


new_ref = getattr(jax, "new_ref", None) or jax.array_ref


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_ref_that_a_body_closes_over_outlives_calls(transform):
    def call(scan):
        def run(xs):
            ref = new_ref(jnp.float32(1))

            def body(c, x):
                ref[...] = ref[...] * 2 + x
                return c + ref[...], ref[...]

            return [scan(body, jnp.float32(0), xs) for _ in range(2)], ref[...]

        return transform(run)(XS)

    assert_bitwise(*both(call))


# Types.


def test_x64_after_x32_is_another_trace():
    def body(c, x):
        return c + x, c

    for dtype in (np.float32, np.float64):
        with jax.enable_x64(dtype is np.float64):
            assert treescan.scan(body, 0.0, np.arange(3.0))[0].dtype == dtype
            assert treescan.mask_scan(body, np.zeros(()), np.arange(3.0), lengths=2)[0].dtype == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "complex64", "bool"])
def test_extended_dtypes(dtype):
    values = jnp.asarray([1, 0, 1, 1], dtype)
    for disabled in (False, True):
        with jax.disable_jit(disabled):
            assert_bitwise(*both(lambda scan: scan(lambda c, x: (x, c), values[0], values)))


# Keywords, messages, leaks.


def test_split_transpose_reaches_lax_scan(monkeypatch):
    """Newer releases accept and ignore it, so that no jaxpr shows it."""
    came, scan = [], jax.lax.scan

    def spy(*args, **keywords):
        came.append(keywords.get("_split_transpose", False))
        return scan(*args, **keywords)

    monkeypatch.setattr(jax.lax, "scan", spy)
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


CONCRETE = {"if": lambda c: c > 0 and c, "float": float, "numpy": np.asarray}
NOT_CONCRETE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


def message(run):
    with pytest.raises(NOT_CONCRETE) as caught:
        run()
    return str(caught.value)


@parametrize("use", CONCRETE)
def test_a_message_about_concrete_values_is_that_of_lax_scan(use):
    def bodily(state, observation):
        use(state)
        return state, observation

    ours, lax = both(lambda scan: message(lambda: scan(bodily, jnp.float32(0), XS)))
    assert ours == lax


RUNS = {
    "accumulate": lambda body: treescan.accumulate(body, jnp.float32(0), XS),
    "fori": lambda body: treescan.fori(0, 3, body, jnp.float32(0)),
    "mask_scan": lambda body: treescan.mask_scan(body, jnp.float32(0), XS, lengths=4),
    "options": lambda body: treescan.scan(body, jnp.float32(0), XS, out_axes=-1, key=jax.random.key(0)),
    "layers": lambda body: treescan.fold_layers([body, body], jnp.float32(0), [XS, XS[:-1]], remat="step"),
}


@parametrize("run", RUNS)
@pytest.mark.parametrize("place", [0, 1])
def test_a_message_about_concrete_values_names_the_users_body_and_argument(run, place):
    """The carry of a body of `fori` or of layers comes second."""

    def bodily(first, second, key=None):
        return first if (first, second)[place].sum() > 0 else second

    text = message(lambda: run(bodily))
    assert "bodily" in text
    assert __file__ in text
    assert f"the value of the argument {('first', 'second')[place]}." in text


def truth(leaf, kept):
    """A use of a leaf as a Python bool."""
    bool(jnp.sum(leaf) > 0)
    return kept


ROWS, LENGTHS, KEY = {"a": array(4, 3), "b": array(4, 3)}, jnp.array([4, 2, 1]), jax.random.key(0)
CARRY = {"h": (array(3), array(3))}
STEP = lambda c, x: (truth(jnp.tanh(c["h"][1] + x["b"]), c), x["a"])  # noqa: E731
LEAVES = {
    "key": (lambda: treescan.scan(lambda c, x, *, key: (truth(c["h"][1], c), x), CARRY, XS, key=KEY), 'c["h"][1]'),
    "of_key": (
        lambda: treescan.scan(lambda c, x, *, key: (truth(jax.random.uniform(key), c), x), CARRY, XS, key=KEY),
        "key",
    ),
    "whole": (
        lambda: treescan.scan(lambda c, x: (truth(x[0]["a"], c), x), 0, (ROWS, XS), in_axes=(None, 0)),
        'x[0]["a"]',
    ),
    "check_finite": (lambda: treescan.scan(STEP, CARRY, ROWS, check_finite=True, remat="step"), 'c["h"][1] and x["b"]'),
    "truncate": (lambda: treescan.scan(STEP, CARRY, ROWS, truncate=2, save=2), 'c["h"][1] and x["b"]'),
    "rows": (lambda: treescan.mask_scan(STEP, CARRY, ROWS, lengths=LENGTHS), 'c["h"][1] and x["b"]'),
    "compact": (lambda: treescan.mask_scan(STEP, CARRY, ROWS, lengths=LENGTHS, compact=True), 'c["h"][1] and x["b"]'),
    "gradient": (
        lambda: jax.grad(lambda c: treescan.mask_scan(STEP, c, ROWS, lengths=LENGTHS)[1].sum())(CARRY),
        'c["h"][1] and x["b"]',
    ),
    "valid": (
        lambda: treescan.mask_scan(lambda c, x, *, valid: (truth(valid, c), x), CARRY, ROWS, lengths=LENGTHS),
        "valid",
    ),
    "while": (lambda: treescan.while_scan(lambda c: c["h"][0] < 2, STEP, CARRY, ROWS), 'c["h"][1] and x["b"]'),
    "condition": (lambda: treescan.while_scan(lambda c: int(c["a"][0]) < 2, STEP, {"a": ema(XS, 0.9)}, ROWS), 'c["a"]'),
    "carries": (lambda: treescan.fold(lambda c, x: truth(c["a"], c), {"a": ema(XS, 0.9)}, XS), 'c["a"]'),
    "fori": (lambda: treescan.fori(0, jnp.int32(3), lambda i, c: truth(c["h"][1] + i, c), CARRY), 'i and c["h"][1]'),
    "state": (
        lambda: treescan.fold_layers(lambda layer, x, s: (truth(s["m"], x), s), 0.0, ROWS, state={"m": XS}),
        's["m"]',
    ),
    "args": (
        lambda: treescan.fold_layers(lambda layer, x, a: truth(a["m"], x), 0.0, ROWS, args=({"m": XS},), remat="step"),
        'a["m"]',
    ),
    "layers": (
        lambda: treescan.scan_layers(lambda w, x: (truth(w["b"], x), x), 0.0, ROWS, check_finite=True),
        'w["b"]',
    ),
    "chunk_map": (lambda: treescan.chunk_map(lambda c: truth(c["b"], c["a"]), ROWS, 2), 'c["b"]'),
    "lift": (
        lambda: treescan.lifting.lift(lambda v, r, c, x: ((truth(v["p"]["w"], c), x), {}), variable_broadcast="p")(
            {"p": {"w": XS}}, {}, CARRY, XS
        ),
        'variables["p"]["w"]',
    ),
    "init_layers": (lambda: treescan.init_layers(lambda key, n: truth(n["m"], XS), KEY, 2, {"m": XS}), 'n["m"]'),
    "describe": (
        lambda: treescan.describe(treescan.mask_scan, STEP, CARRY, ROWS, lengths=LENGTHS),
        'c["h"][1] and x["b"]',
    ),
    "jit_within": (
        lambda: treescan.scan(lambda c, x, key: (jax.jit(lambda q: truth(q, q))(x), c), 0.0, XS, key=KEY),
        "q",
    ),
}


@parametrize("case", LEAVES)
def test_a_message_about_concrete_values_names_leaves_as_the_body_does(case):
    run, names = case
    many = "s" * (" and " in names)
    assert f"the value{many} of the argument{many} {names}." in message(run)


def test_a_message_about_a_number_in_the_carry_says_what_helps():
    def step(carry, x):
        return (truth(carry[0], carry) if carry[1] else carry), x

    with pytest.raises(NOT_CONCRETE) as caught:
        treescan.scan(step, (XS, True), XS, truncate=2)
    assert any("carry[1] was True" in note and "close over it." in note for note in caught.value.__notes__)
    with pytest.raises(NOT_CONCRETE) as caught:
        treescan.scan(step, (XS, jnp.bool_(True)), XS, truncate=2)
    assert not any("close over" in note for note in caught.value.__notes__)
    with pytest.raises(NOT_CONCRETE) as caught:
        treescan.fold_layers(lambda layer, x: step(x, None)[0], (XS, True), ROWS)
    assert any("pass it in `args`." in note for note in caught.value.__notes__)


# In the place of lax.scan.


def test_flax_notices_nothing(monkeypatch):
    def train(xs):
        model = flax.linen.RNN(flax.linen.LSTMCell(4))
        variables = model.init(jax.random.key(0), xs)
        return jax.value_and_grad(lambda v: jnp.sum(model.apply(v, xs, seq_lengths=jnp.array([2, 5])) ** 2))(variables)

    expected = train(array(2, 5, 3))
    monkeypatch.setattr(jax.lax, "scan", treescan.scan)
    assert_bitwise(train(array(2, 5, 3)), expected)


def observing(orig, seen):
    """What a tool puts in the place of `jax.lax.scan`: it has the body in a function of its own."""

    def scan(f, init, xs=None, length=None, **options):
        seen.append(f)
        return orig(lambda carry, x: f(carry, x), init, xs, length, **options)

    return scan


LAX_SCAN = jax.lax.scan
INSTEAD = {
    "itself": (lambda seen: treescan.scan, 0),
    "with an option": (lambda seen: functools.partial(treescan.scan, remat="step"), 0),
    "within a function": (lambda seen: lambda *given, **options: treescan.scan(*given, **options), 0),
    "by a tool": (functools.partial(observing, LAX_SCAN), 1),
    "by a tool, over itself": (functools.partial(observing, treescan.scan), 1),
}


def nested(carry, x):
    (h, average), (name, steps) = carry
    h, _ = jax.lax.scan(lambda h, y: (h * x + y, y), h, XS)
    return ((h, h), (name, steps + 1)), average


@parametrize("instead", INSTEAD)
def test_lax_scan_is_what_a_program_has_put_there(instead, monkeypatch):
    """Each eager call runs it while it is there, for loops in bodies too, and no call does after that."""

    def run():
        init = (jnp.zeros(()), treescan.carries.ema(jnp.zeros(()), 0.9)), ("a static leaf", 0)
        (carried, (_, steps)), ys = treescan.scan(nested, init, XS)
        folded = treescan.fold(lambda h, x: jnp.sin(h + x), array(), XS, lengths=2)
        return carried, steps, ys, folded, treescan.fori(0, 3, lambda i, h: jnp.sin(h), array(), remat="nested")

    seen, (make, tool) = [], instead
    expected = run()
    with monkeypatch.context() as patched:
        patched.setattr(jax.lax, "scan", make(seen))
        assert find_own() is LAX_SCAN  # where a program comes first
        for _ in range(2):
            seen.clear()
            assert_bitwise(run(), expected)
            assert len(seen) >= 4 * tool
    seen.clear()
    assert_bitwise(run(), expected)
    assert not seen


def seen_by(orig, seen):
    """A tool that hands the body on as it is: a profiler, or a program's own wrapper."""

    def scan(*args, **options):
        seen.append(args[0])
        return orig(*args, **options)

    return scan


def as_module(step):
    return flax.nnx.scan(step, in_axes=(flax.nnx.Carry, 0), out_axes=(flax.nnx.Carry, 0))


def as_fold(step):
    return functools.partial(treescan.fold, lambda c, x: step(c, x)[0])


EAGER = {
    "jax": lambda step: lambda *given: jax.lax.scan(step, *given),
    "scan": lambda step: functools.partial(treescan.scan, step),
    "fold": as_fold,
    "layers": lambda step: functools.partial(treescan.fold_layers, lambda layer, x: step(x, layer)[0]),
    "flax": as_module,
    "nnx": lambda step: nnx_scan(step, in_axes=(flax.nnx.Carry, 0), out_axes=(flax.nnx.Carry, 0)),
}


@parametrize("make", EAGER)
@pytest.mark.parametrize("orig", [LAX_SCAN, treescan.scan], ids=["jax", "treescan"])
def test_a_tool_in_the_place_of_lax_scan_costs_no_traces(make, orig, monkeypatch):
    """As without it: and it sees a loop in each call all the same."""
    seen, counted = [], Counted(lambda c, x: (c + x, x))
    run = make(counted.body)
    monkeypatch.setattr(jax.lax, "scan", seen_by(orig, seen))
    for expected in (1, 0, 0):
        seen.clear()
        assert counted.traces(lambda _: run(array(), XS)) == expected
        assert seen


def test_a_tool_that_goes_takes_what_was_made_for_it(monkeypatch):
    """Neither does it live on with the body, nor does what was traced through it."""

    def within(carry, x):
        return carry + jax.lax.scan(lambda c, y: (c + y, y), x, XS)[0], x

    def used(factor):
        def scaled(*args, **options):
            carry, ys = LAX_SCAN(*args, **options)
            return carry * factor, ys

        tool = seen_by(scaled, [])
        with monkeypatch.context() as patched:
            patched.setattr(jax.lax, "scan", tool)
            result = float(treescan.scan(within, jnp.float32(0), XS)[0])
            assert result == float(treescan.scan(within, jnp.float32(0), XS)[0])
        return weakref.ref(tool), result

    plain = float(treescan.scan(within, jnp.float32(0), XS)[0])
    (first, one), (second, two) = used(1), used(2)
    gc.collect()
    assert (first(), second()) == (None, None)
    assert one == plain != two
    assert float(treescan.scan(within, jnp.float32(0), XS)[0]) == plain


OF_STEPS = {
    "key": over(treescan.scan, key=jax.random.key(0)),
    "mask_scan": over(treescan.mask_scan, lengths=jnp.array([2, 3])),
}


@parametrize("run", OF_STEPS)
def test_a_symbolic_number_of_steps(run):
    """jax.export over a length that is not known yet, as lax.scan takes it."""
    run = functools.partial(run, lambda c, x, key=None: (c + x, c))
    steps = jax.export.symbolic_shape("t")[0]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2,), (steps, 2))]
    given = jnp.zeros(2), jnp.ones((4, 2))
    chex.assert_trees_all_close(jax.export.export(jax.jit(run))(*shapes).call(*given), run(*given))


def _with_a_rule(sine):
    function = jax.custom_jvp(jnp.sin)
    function.defjvp(lambda x, dx: (sine(function)(*x), 2 * jnp.cos(x[0]) * dx[0]))
    return function


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

    no_derivative, sine_within = _with_a_rule(lambda itself: itself), _with_a_rule(lambda itself: jnp.sin)
    first, rewritten = derivatives(no_derivative, None)
    same, plain = derivatives(no_derivative, 0)
    chex.assert_trees_all_close(first, same, rtol=1e-4)
    assert not np.allclose(rewritten, plain, rtol=0.1)
    for chunk in (None, 0):
        np.testing.assert_allclose(derivatives(sine_within, chunk)[1], rewritten, rtol=1e-4)
