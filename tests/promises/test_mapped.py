"""`grad` of `vmap` of `jit`, where only one argument is mapped: the sum of what each element gives alone.

JAX asks a staged function alone, and not the rule for its derivative, which of its results are mapped, and where; see
`_trace/rules.py`. So here are results that do not depend on what is mapped, and results that are handed on.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import treescan

T, B, D, COUNT = 48, 4, 8, 3
RNG = np.random.default_rng(0)


def numbers(*shape):
    return jnp.asarray(0.5 * RNG.normal(size=shape), jnp.float32)


W, H0, XS = numbers(COUNT, D, D), numbers(COUNT, B, D), numbers(COUNT, T, B, D)
LENGTHS, RESETS = jnp.array([T, 3, 20, 0]), jnp.asarray(RNG.random((T, B)) < 0.1)


def apart(w, carry, x):
    """The second leaf depends on no weights, the last output is x, handed on."""
    h, m = carry
    h, m = jnp.tanh(h @ w + x), 0.9 * m + 0.1 * x
    return (h, m), (h * m, m, x)


def decided(w, carry, x):
    h, m = carry
    h = jax.lax.cond(m.sum() > 0, lambda h: jnp.tanh(h @ w), lambda h: jnp.sin(h @ w.T), h) + x
    return (h, 0.9 * m + 0.1 * x), (h, m, x)


def elementwise(w, carry, x):
    h, m = carry
    return (jnp.tanh(w[:1] * h + x), 0.9 * m + 0.1 * x), (h, m, x)


def both(h):
    return h if isinstance(h, tuple) else (h, h)


def scan(body, h, xs, **options):
    return treescan.scan(body, both(h), xs, **options)


def mask_scan(body, h, xs, **options):
    return treescan.mask_scan(body, both(h), xs, **{"lengths": LENGTHS} | options)


def while_scan(body, h, xs, **options):
    return treescan.while_scan(lambda carry: jnp.abs(carry[1]).max() < 4.0, body, both(h), xs, **options)[:2]


def rows_while_scan(body, h, xs, **options):
    return treescan.while_scan(lambda carry: jnp.abs(carry[1][:, 0]) < 0.7, body, both(h), xs, **options)[:2]


def linear(body, h, xs, **options):
    del body
    return treescan.linear_scan(jnp.tanh(xs), xs * 0.5, h, **options)


def linear_of_h(body, h, xs, **options):
    """Only what is added depends on xs."""
    del body
    return treescan.linear_scan(0.5, xs, h, **options)


def flagged(body, h, xs, **options):
    return treescan.mask_scan(body, both(h), xs, resets=RESETS, **options)


CASES = [
    *((scan, options) for options in ({"remat": "auto"}, {"remat": "nested"}, {"remat": treescan.Remat(chunk=8)})),
    (scan, {"remat": treescan.Remat("everything_saveable", chunk=8)}),
    (scan, {"save": 4, "remat": "auto"}),
    *((mask_scan, options) for options in ({}, {"chunk": 8}, {"compact": True}, {"remat": "step"}, {"fill": "hold"})),
    *((mask_scan, options) for options in ({"save": "last"}, {"reverse": True}, {"save": 4}, {"resets": RESETS})),
    *((flagged, options) for options in ({}, {"chunk": 8}, {"reset_to": 0.5})),
    *((run, options) for run in (while_scan, rows_while_scan) for options in ({}, {"remat": "step"})),
]
LINEAR = [
    (run, {"lengths": LENGTHS, **options})
    for run in (linear, linear_of_h)
    for options in ({}, {"fill": "hold"}, {"method": "chunked"}, {"method": "parallel", "reverse": True})
]
EVERY = [
    *((body, *case) for body in (apart, decided, elementwise) for case in CASES),
    *((apart, *case) for case in LINEAR),
]
EVERYDAY = {(apart, mask_scan, "{}"), (decided, mask_scan, "{'chunk': 8}"), (apart, scan, "{'remat': 'auto'}")}


@pytest.mark.parametrize(
    ("body", "run", "options"),
    [
        pytest.param(*case, id=f"{case[0].__name__}-{case[1].__name__}-{case[2]}"[:90], marks=marks)
        for i, case in enumerate(EVERY)
        for marks in [() if (*case[:2], str(case[2])) in EVERYDAY or i % 9 == 0 else pytest.mark.slow]
    ],
)
def test_a_gradient_of_a_map_over_one_argument(body, run, options):
    def loss(w, h, xs):
        leaves = jax.tree.leaves(run(functools.partial(body, w), h, xs, **options))
        weights = [jnp.arange(1.0, leaf.size + 1).reshape(leaf.shape) / leaf.size for leaf in leaves]
        return sum(jnp.sum(leaf * own) for leaf, own in zip(leaves, weights, strict=True))

    alone = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    for mapped in range(3):
        args = [one if i == mapped else one[0] for i, one in enumerate((W, H0, XS))]
        axes = tuple(0 if i == mapped else None for i in range(3))
        each = [alone(*(arg[i] if arg is args[mapped] else arg for arg in args)) for i in range(COUNT)]
        value, gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        gradients = tuple(one if i == mapped else one.sum(0) for i, one in enumerate(gradients))
        over = jax.vmap(jax.jit(loss), axes)
        got = jax.jit(jax.value_and_grad(lambda *args, over=over: jnp.sum(over(*args)), (0, 1, 2)))(*args)
        chex.assert_trees_all_close(got, (value.sum(), gradients), rtol=2e-4, atol=2e-4)


def place():
    return 1.0 + jax.lax.axis_index("i").astype(jnp.float32)


def placed(w, carry, x):
    """The second leaf differs between elements of a map that maps no argument."""
    h, m = carry
    return (jnp.tanh(h @ w + x), 0.9 * m + 0.1 * x * place()), (h * m, m)


def scattered(w, carry, x):
    """As `placed`, by an operation that maps what is not mapped."""
    h, m = carry
    own = jax.lax.psum_scatter(jnp.arange(float(COUNT)), "i", tiled=False)
    return (jnp.tanh(h @ w + x), 0.9 * m + 0.1 * x * own), (h * m, m)


def decided_by_place(w, carry, x):
    h, m = carry
    return (jnp.tanh(h @ w + x), jax.lax.cond(place() > 1, jnp.sin, jnp.cos, m) + 0.1 * x), (h * m, m)


def asked_of_h(body, h, xs, **options):
    """The condition reads what no element has of its own."""
    return treescan.while_scan(lambda carry: jnp.abs(carry[0]).max() < 9.0, body, both(h), xs, **options)[:2]


def asked_by_place(body, h, xs, **options):
    """The condition alone differs between elements."""

    def goes_on(carry):
        return jnp.abs(carry[1]).max() < 0.5 + 0.1 * place()

    return treescan.while_scan(goes_on, body, both(h), xs, **options)[:2]


PLACED = [
    *(
        (body, run, {})
        for body in (placed, scattered, decided_by_place)
        for run in (mask_scan, asked_of_h, rows_while_scan)
    ),
    *((placed, mask_scan, options) for options in ({"chunk": 8}, {"remat": "step"}, {"resets": RESETS})),
    *((placed, scan, options) for options in ({"remat": "auto"}, {"remat": treescan.Remat(chunk=8)})),
    (apart, asked_by_place, {}),
]


@pytest.mark.parametrize(
    ("body", "run", "options"),
    [
        pytest.param(*case, id=f"{case[0].__name__}-{case[1].__name__}-{case[2]}"[:90], marks=marks)
        for i, case in enumerate(PLACED)
        for marks in [() if i in (0, 1, 3, len(PLACED) - 1) else pytest.mark.slow]
    ],
)
@pytest.mark.parametrize("staged", [False, True], ids=["", "jit"])
def test_a_gradient_of_a_map_that_maps_no_argument_of_the_loop(body, run, options, staged):
    """Elements differ by where along a named axis they are."""
    times = jnp.arange(1.0, COUNT + 1)

    def loss(w, over):
        def of_one(t):
            call = functools.partial(run, functools.partial(body, w), H0[0], XS[0], **options)
            (h, m), (y, *_) = (jax.jit(call) if staged else call)()
            return t * (jnp.sum(h) + jnp.sum(m) + jnp.sum(jnp.sin(y)))

        return jnp.sum(over(of_one))

    def mapped(of_one):
        return jax.vmap(of_one, axis_name="i")(times)

    def plainly(of_one):
        with treescan.rewriting(False):
            return mapped(of_one)

    got, want = (jax.value_and_grad(functools.partial(loss, over=over))(W[0]) for over in (mapped, plainly))
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


def exchanged(w, carry, x):
    """By operations that map nothing, which are gone after the map all the same."""
    h, m = carry
    m = jax.lax.ppermute(0.9 * m, "i", [(k, (k + 1) % COUNT) for k in range(COUNT)])
    return (jnp.tanh(h @ w + x), m + 0.1 * jax.lax.pmean(x, "i")), (h * m, m)


@pytest.mark.parametrize("body", [placed, exchanged])
@pytest.mark.parametrize(
    ("run", "options"),
    [
        pytest.param(mask_scan, {}, id="mask_scan"),
        pytest.param(mask_scan, {"chunk": 8}, id="mask_scan-chunk", marks=pytest.mark.slow),
        pytest.param(scan, {"remat": "auto"}, id="scan-auto"),
        pytest.param(scan, {"remat": treescan.Remat(chunk=8)}, id="scan-chunk", marks=pytest.mark.slow),
    ],
)
def test_a_derivative_outside_of_a_staged_map_with_a_named_axis(body, run, options):
    """JAX has no such axis any more when it asks for the derivative."""

    def mapped(w, xs):
        (h, m), ys = jax.vmap(lambda xs: run(functools.partial(body, w), H0[0], xs, **options), axis_name="i")(xs)
        return sum(map(jnp.sum, (h, m, *ys)))

    got = jax.grad(jax.jit(mapped), (0, 1))(W[0], XS)
    with treescan.rewriting(False):
        want = jax.grad(mapped, (0, 1))(W[0], XS)
    chex.assert_trees_all_close(got, want, rtol=2e-4, atol=2e-4)


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
SPECS = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(None, None, "d")


def apart_from_x(w, carry, x):
    """The second leaf reads no x: in a `shard_map` it does not vary as the first does."""
    h, m = carry
    return (jnp.tanh(h @ w + x), 0.9 * m), (h * 0.5, m)


def decided_apart_from_x(w, carry, x):
    h, m = carry
    h = jax.lax.cond(w[0, 0] > 0, lambda h: jnp.tanh(h @ w + x), lambda h: jnp.sin(2 * h), h)
    return (h, m * w[0, 0]), (h, m)


ON_DEVICES = [
    *((mask_scan, options) for options in ({}, {"chunk": 8})),
    (asked_of_h, {}),
    (rows_while_scan, {}),
    (flagged, {}),
    *((scan, options) for options in ({"remat": "auto"}, {"remat": "nested"})),
]


@pytest.mark.parametrize("body", [apart_from_x, decided_apart_from_x])
@pytest.mark.parametrize(
    ("run", "options"),
    [
        pytest.param(*case, id=f"{case[0].__name__}-{case[1]}", marks=() if i < 3 else pytest.mark.slow)
        for i, case in enumerate(ON_DEVICES)
    ],
)
@pytest.mark.parametrize("varies", [False, True], ids=["", "weights_vary"])
@pytest.mark.parametrize("mapped", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "vmap"])
def test_devices_of_which_not_all_values_vary(body, run, options, varies, mapped):
    """In a `shard_map` of one device: the gradient is that without one."""
    if mapped and run in (asked_of_h, rows_while_scan) and jax.__version_info__ < (0, 9):
        pytest.skip("JAX 0.8 cannot map the sum over devices by which they agree on whether to go on")

    def loss(w, xs):
        (h, m), ys = run(functools.partial(body, w), (xs[0] * 0.1, H0[0] + 0 * w[0, 0]), xs, **options)
        return sum(map(jnp.sum, (h, m, *ys)))

    def every(ws, xs):
        if mapped:
            return jnp.sum(jax.vmap(jax.jit(loss), (0, None))(ws, xs))
        return loss(ws[0], xs)

    def of_device(ws, xs):
        ws = jax.lax.pcast(ws, "d", to="varying") if varies else ws
        gradient = jax.grad(every)(ws, xs)
        return jax.lax.psum(gradient, "d") if varies else gradient

    ws, (replicated, split) = jnp.stack([W[0], -W[0]]), SPECS
    sharded = jax.shard_map(of_device, mesh=MESH, in_specs=(replicated, split), out_specs=replicated)
    chex.assert_trees_all_close(jax.jit(sharded)(ws, XS[0]), jax.grad(every)(ws, XS[0]), rtol=2e-4, atol=2e-4)


PADDED = jnp.where((jnp.arange(T)[:, None] < LENGTHS[None])[..., None], XS[0], jnp.nan)


@pytest.mark.parametrize("options", [{}, {"chunk": 8}, {"remat": "step"}], ids=str)
def test_what_results_depend_on_is_no_alarm_about_padding(options):
    def loss(xs):
        (h, m), ys = mask_scan(functools.partial(apart, W[0]), H0[0], xs, **options)
        return jnp.sum(h) + jnp.sum(m) + jnp.sum(ys[0])

    error, _ = checkify.checkify(jax.jit(jax.grad(loss)), errors=checkify.float_checks)(PADDED)
    assert error.get() is None


@pytest.mark.parametrize("method", ["sequential", "parallel"])
def test_debug_nans_does_not_see_padding(method):
    def loss(xs):
        return treescan.linear_scan(0.5, xs, lengths=LENGTHS, method=method)[1].sum()

    with jax.debug_nans(True):
        gradient = jax.grad(loss)(PADDED)
    assert jnp.isfinite(gradient).all()
