"""An eager call is one compiled program: it is given what its body closes over, and a call of a known body is short."""

import dataclasses
import functools
import gc
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thin import parametrize
from traces import Counted, compilations

import treescan

pytestmark = pytest.mark.quick

WIDTH, STEPS, ROWS = 32, 6, 3
INIT, XS = jnp.ones((ROWS, WIDTH)), jnp.linspace(0, 1, STEPS * ROWS * WIDTH).reshape(STEPS, ROWS, WIDTH)
LENGTHS = jnp.array([6, 0, 3])
CALLS = {
    "scan": lambda body, init, xs: treescan.scan(body, init, xs),
    "save": lambda body, init, xs: treescan.scan(body, init, xs, save="last"),
    "remat": lambda body, init, xs: treescan.scan(body, init, xs, save="last", remat="nested"),
    "key": lambda body, init, xs: treescan.scan(lambda h, x, *, key: body(h, x), init, xs, key=jax.random.key(0)),
    "check_finite": lambda body, init, xs: treescan.scan(body, init, xs, check_finite=True),
    "fold": lambda body, init, xs: treescan.fold(lambda h, x: body(h, x)[0], init, xs),
    "fori": lambda body, init, xs: treescan.fori(0, 4, lambda i, h: body(h, xs[0] * i)[0], init),
    "mask_scan": lambda body, init, xs: treescan.mask_scan(body, init, xs, lengths=LENGTHS),
    "compact": lambda body, init, xs: treescan.mask_scan(body, init, xs, lengths=LENGTHS, compact=True),
    "while_scan": lambda body, init, xs: treescan.while_scan(lambda h: jnp.sum(h) < 9e9, body, init, xs),
    "truncate": lambda body, init, xs: treescan.scan(body, init, xs, truncate=2),
    "resets": lambda body, init, xs: treescan.mask_scan(body, init, xs, lengths=LENGTHS, resets=xs[..., 0] > 0.5),
    "rows that stop": lambda body, init, xs: treescan.while_scan(lambda h: jnp.sum(h, -1) < 9e9, body, init, xs),
    "layers": lambda body, init, xs: treescan.scan_layers(lambda layer, h: body(h, layer), init, xs),
    "turns": lambda body, init, xs: treescan.fold_layers(
        [lambda layer, h: body(h, layer)[0], lambda layer, h: body(h, layer)[1]], init, [xs, xs]
    ),
    "gradient": lambda body, init, xs: jax.grad(lambda h: jnp.sum(treescan.scan(body, h, xs)[0] ** 2))(init),
    "mapped": lambda body, init, xs: jax.vmap(lambda h, x: treescan.scan(body, h, x), (0, 1), (0, 0))(init, xs),
    "chunk_map": lambda body, init, xs: treescan.chunk_map(lambda x: body(x, x)[1], xs, chunk_size=2),
}


def recurrent(weights):
    def body(h, x):
        h = jnp.tanh(h @ weights + x)
        return h, h * 2

    return body


def weights(seed=0):
    return jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH)) * 0.1


@pytest.fixture
def constants_are_refused():
    """Within it, JAX warns of each program that holds an array of the size of the weights."""
    known = jax.config.values["jax_captured_constants_warn_bytes"]
    jax.config.update("jax_captured_constants_warn_bytes", WIDTH * WIDTH)
    yield
    jax.config.update("jax_captured_constants_warn_bytes", known)


def test_jax_alone_would_copy_what_a_body_closes_over(constants_are_refused):
    with pytest.warns(UserWarning, match="large amount of constants"):
        jax.jit(lambda: jax.lax.scan(recurrent(weights()), INIT, XS))()


@parametrize("call", CALLS)
def test_no_program_holds_what_a_body_closes_over(call, constants_are_refused):
    array = weights()
    body, expected = recurrent(array), jax.jit(lambda array, *given: call(recurrent(array), *given))
    for scale in (1.0, 2.0):
        given = INIT * scale, XS * scale
        pair = call(body, *given), expected(array, *given)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *pair)


# What `jax.lax.scan` does outside of `jit`, and `jax.jit` does not.


@dataclasses.dataclass
class Strict:
    """A node of a tree that takes nothing but arrays of JAX."""

    array: jax.Array

    def __post_init__(self):
        assert isinstance(self.array, jax.Array)


jax.tree_util.register_dataclass(Strict, ["array"], [])


@dataclasses.dataclass
class Named:
    """A node with an array in its structure, which has no hash."""

    array: jax.Array
    names: np.ndarray


jax.tree_util.register_dataclass(Named, ["array"], ["names"])


def test_nodes_see_arrays_alone():
    last, ys = treescan.scan(lambda c, x: (Strict(c.array + x), Strict(x * 2)), Strict(INIT), XS)
    np.testing.assert_allclose(last.array, INIT + XS.sum(0), rtol=1e-6)
    np.testing.assert_array_equal(ys.array, XS * 2)


def test_arrays_in_the_structure_of_a_tree():
    names = np.arange(3)
    for _ in range(2):
        last, ys = treescan.scan(lambda c, x: (Named(c.array + x, c.names), Named(x, names)), Named(INIT, names), XS)
        np.testing.assert_allclose(last.array, INIT + XS.sum(0), rtol=1e-6)
        assert last.names is ys.names is names


@pytest.mark.parametrize("leaf", [weights(), np.array([2**40]), np.float64(0.1), 0.1, True, 3], ids=repr)
def test_what_comes_back_as_it_was_given_is_not_copied(leaf):
    def body(carry, x):
        return (carry[0] + x, carry[1]), x

    for scan in (jax.lax.scan, treescan.scan):
        for _ in range(2):
            (last, same), ys = scan(body, (INIT, leaf), XS)
            assert same is leaf and ys is XS
            np.testing.assert_allclose(last, INIT + XS.sum(0), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float32])
def test_numpy_xs_come_back_as_arrays_of_jax(dtype):
    given = np.arange(4).astype(dtype)
    found, expected = (scan(lambda c, x: (c, x), 0.0, given)[1] for scan in (treescan.scan, jax.lax.scan))
    assert isinstance(found, jax.Array) and found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX copies such an array while it traces")
def test_a_numpy_array_that_is_changed_in_place_is_read_again():
    array = np.ones(WIDTH, np.float32)

    def body(h, x):
        return h + array, None

    for scan in (jax.lax.scan, treescan.scan):
        array[:] = 1
        np.testing.assert_array_equal(scan(body, jnp.zeros(WIDTH), XS)[0], STEPS)
        array[:] = 5
        np.testing.assert_array_equal(scan(body, jnp.zeros(WIDTH), XS)[0], 5 * STEPS)


def test_results_that_are_known_while_tracing():
    last, ys = treescan.scan(lambda c, x: (c, 3.0), INIT, XS[:0])
    assert last is INIT and ys.shape == (0,)
    found = treescan.while_scan(lambda c: c[0, 0] < 0, lambda c, x: (c + x, x), INIT, XS[:0])
    np.testing.assert_array_equal(found.carry, INIT)


def test_weights_in_the_carry_of_a_masked_scan_are_not_copied():
    array = weights()
    (last, same), _ = treescan.mask_scan(
        lambda c, x: ((jnp.tanh(c[0] @ c[1] + x), c[1]), None),
        (INIT, array),
        XS,
        lengths=LENGTHS,
        row_axes={"carry": (0, None)},
    )
    assert same is array and last.shape == INIT.shape


@pytest.mark.devices
def test_what_is_not_read_may_be_on_another_device():
    first, second = (jax.device_put(INIT, device) for device in jax.devices()[:2])
    (same, last), _ = treescan.scan(lambda c, x: ((c[0], c[1] + x), None), (first, second), XS)
    assert same is first and last.devices() == second.devices()


@pytest.mark.parametrize("first", [True, False])
def test_a_setting_holds_for_a_body_that_was_seen_under_another(first):
    counted = Counted(recurrent(weights()))
    for enabled in (first, not first):
        with treescan.rewriting(enabled):
            assert counted.traces(lambda f: treescan.mask_scan(f, INIT, XS, lengths=LENGTHS)) == 1
    with jax.default_matmul_precision("highest"):
        assert counted.traces(lambda f: treescan.mask_scan(f, INIT, XS, lengths=LENGTHS)) == 1
    for enabled in (first, not first):
        with treescan.rewriting(enabled):
            assert counted.traces(lambda f: treescan.mask_scan(f, INIT, XS, lengths=LENGTHS)) == 0


def test_a_hundred_lengths_are_compiled_once():
    counted = Counted(lambda h, x: (h + x, None))
    init, given = jnp.zeros(3), [jnp.ones((length, 3)) for length in range(1, 101)]
    for expected in (100, 0):
        made = [name for x in given for name in compilations(lambda x=x: treescan.scan(counted.body, init, x))]
        assert len([name for name in made if "backend_compile" in name]) == expected


def test_a_trace_that_closes_over_another_array_takes_its_place():
    held = {"w": weights()}

    def body(h, x):
        return h @ held["w"] + x, None

    first = weakref.ref(held["w"])
    treescan.scan(body, INIT, XS)
    held["w"] = weights(1)
    jax.clear_caches()
    last, _ = treescan.scan(body, INIT, XS)
    expected, _ = jax.lax.scan(lambda h, x: (h @ held["w"] + x, None), INIT, XS)
    np.testing.assert_allclose(last, expected, rtol=1e-5)
    gc.collect()
    assert first() is None


def test_functions_in_the_carry_go_with_the_body():
    def run():
        array = weights()

        def function(h):
            return jnp.tanh(h @ array)

        treescan.scan(lambda c, x: ((c[0], c[0](c[1]) + x), None), (function, INIT), XS)
        return weakref.ref(array)

    found = [run() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in found] == [None] * 3


# One trace, one program.


def test_a_body_that_closes_over_other_arrays_for_other_types():
    own, other, counted = weights(), weights(1), Counted(lambda h, x: (h @ (own if len(h) == ROWS else other), x))
    for rows in (ROWS, 2, ROWS, 2):
        last, _ = treescan.scan(counted.body, INIT[:rows], XS[:, :rows])
        expected = INIT[:rows] @ np.linalg.matrix_power(own if rows == ROWS else other, STEPS)
        np.testing.assert_allclose(last, expected, rtol=1e-3, atol=1e-6)
    assert counted.calls == 2


@parametrize("call", {name: call for name, call in CALLS.items() if name not in ("while_scan", "rows that stop")})
def test_what_a_body_closes_over_goes_with_its_last_reference(call):
    """Python's collector need not run first: only what JAX 0.12 makes of a `while_scan` waits for it."""
    array = weights()
    body, reference = recurrent(array), weakref.ref(array)
    del array
    call(body, INIT, XS)
    assert reference() is not None
    del body
    assert reference() is None


def test_a_mutable_array_is_no_argument():
    total, factor = jax.new_ref(jnp.zeros(WIDTH)), weights()

    def body(h, x):
        total[...] += x
        return h @ factor, None

    for number in (1, 2):
        treescan.scan(body, INIT[0], XS[:, 0])
        np.testing.assert_allclose(total[...], number * XS[:, 0].sum(0), rtol=1e-5)


def test_a_callback_that_runs_a_loop_of_its_own():
    """Its program is another than that which is traced first, or runs, around it."""
    outer, inner = weights(), weights(1)
    of_inner, expected = recurrent(inner), treescan.scan(recurrent(inner), INIT[0], XS[:, 0])[0]

    def on_host(h):
        return np.asarray(treescan.scan(of_inner, INIT[0], XS[:, 0])[0] + h)

    def body(h, x):
        h = jax.pure_callback(on_host, jax.ShapeDtypeStruct((WIDTH,), jnp.float32), h)
        return h, h @ outer

    last, _ = treescan.scan(body, jnp.zeros(WIDTH), XS[:1, 0])
    np.testing.assert_allclose(last, expected, rtol=1e-5)


def test_threads_that_begin_with_the_same_body():
    body, found = recurrent(weights()), [None] * 8
    ready = threading.Barrier(len(found))

    def run(number):
        ready.wait()
        found[number] = treescan.scan(body, INIT * number, XS)[0]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, last in enumerate(found):
        np.testing.assert_allclose(last, jax.lax.scan(body, INIT * number, XS)[0], rtol=1e-6)


def test_threads_that_begin_with_other_types_for_which_a_body_closes_over_other_arrays():
    by_rows, both = {rows: weights(rows) for rows in (2, ROWS)}, threading.Barrier(2)
    found = {}

    def body(h, x):
        both.wait(timeout=60)  # each is traced before either knows what the other closes over
        return h @ by_rows[len(h)] + x, None

    def run(rows):
        found[rows] = [treescan.scan(body, INIT[:rows], XS[:, :rows])[0] for _ in range(2)]

    threads = [threading.Thread(target=run, args=(rows,)) for rows in by_rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows, array in by_rows.items():
        expected, _ = jax.lax.scan(lambda h, x, array=array: (h @ array + x, None), INIT[:rows], XS[:, :rows])
        for last in found[rows]:
            np.testing.assert_allclose(last, expected, rtol=1e-5)


@pytest.mark.parametrize("verb", ["scan", "mask_scan"])
def test_a_gradient_of_a_known_body_traces_nothing(verb):
    """JAX keeps the gradient of a program. It differentiates an eager `jax.lax.scan` in each call."""
    counted = Counted(lambda carry, x: ((jnp.tanh(carry[0] @ carry[1] + x), carry[1]), None))
    options = {"lengths": LENGTHS, "row_axes": {"carry": (0, None)}} if verb == "mask_scan" else {}

    def loss(array):
        (h, _), _ = getattr(treescan, verb)(counted.body, (INIT, array), XS, **options)
        return jnp.sum(h**2)

    gradient = jax.grad(loss)
    expected = jax.jit(gradient)(weights())
    assert any("backend_compile" in name for name in compilations(lambda: gradient(weights())))
    calls, array = counted.calls, weights()
    assert compilations(lambda: np.testing.assert_allclose(gradient(array), expected, rtol=1e-5)) == []
    assert counted.calls == calls


def python_calls(run):
    count = [0]

    def profile(frame, event, arg):
        del frame, arg
        count[0] += event == "call"

    run()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count[0]


@pytest.mark.parametrize("leaves", [1, 100])
@pytest.mark.parametrize(("verb", "most"), [("scan", 0.8), ("mask_scan", 1.15), ("while_scan", 1.15)])
def test_the_python_calls_of_a_call_of_a_known_body_beside_those_of_lax_scan(verb, most, leaves):
    def body(carry, x):
        return [leaf + x for leaf in carry], x

    init = [jnp.zeros(3) for _ in range(leaves)]
    options = {"mask_scan": {"lengths": jnp.array([2, 3, 1])}}.get(verb, {})
    before = [lambda carry: carry[0][0] < 9] * (verb == "while_scan")
    ours = python_calls(lambda: getattr(treescan, verb)(*before, body, init, jnp.ones((4, 3)), **options))
    assert ours < most * python_calls(lambda: jax.lax.scan(body, init, jnp.ones((4, 3))))
