"""The gradient of independent rows whose padding is NaN, or infinite, is that of each row alone, of any order.

Each body has another way in which the tangent of something that all rows share becomes one of rows.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import array

import treescan
from treescan._transforms.rows import guarded

ROWS, WIDTH, STEPS = 4, 3, 21
LENGTHS = (STEPS, 7, 0, 10)
PARAMS = {
    "number": np.float32(0.6),
    "vector": array(1, WIDTH, seed=3),
    "matrix": array(WIDTH, WIDTH, seed=5) * 0.4,
    "table": array(5, WIDTH, seed=6),
    "kernel": array(3, 1, 1, seed=7),
}


def number(p, h, x):
    h = jnp.tanh(p["number"] * h + jnp.sqrt(x * x + 1))
    return h, h


def vector(p, h, x):
    h = jnp.sin(h * p["vector"] + x) / (1 + p["vector"] ** 2)
    return h, jnp.log(x * x + h * h + 0.1)


def product(p, h, x):
    h = jnp.tanh(x @ p["matrix"] + h @ p["matrix"].T)
    return h, h.max(-1)


def three_operands(p, h, x):
    h = jnp.tanh(jnp.einsum("bi,ij,bj->bi", h, p["matrix"], jnp.exp(-x)) + x)
    return h, h


def looked_up(p, h, x):
    at = jnp.nan_to_num(jnp.floor(jnp.abs(x[:, 0]))).astype(jnp.int32) % 5
    h = jnp.tanh(h + p["table"][at] * x)
    return h, h


def joined(p, h, x):
    both = jnp.concatenate([h * x, jnp.broadcast_to(p["vector"], h.shape)], 1)
    h = jnp.cos(both[:, :WIDTH] + both[:, WIDTH:])
    return h, both


def convolved(p, h, x):
    dims = ("NWC", "WIO", "NWC")
    h = jax.lax.conv_general_dilated((h + x)[..., None], p["kernel"], (1,), "SAME", dimension_numbers=dims)
    return jnp.tanh(h[..., 0]), x.sum(-1)


def written(p, h, x):
    h = jax.lax.dynamic_update_slice(h, jnp.sin(x[:, :1]) * p["vector"][:, :1], (0, 1))
    return h / 2, h.cumsum(-1) * p["number"]


def chosen(p, h, x):
    h = jnp.where(x > 0, p["vector"], jnp.where(h > 0, h * p["number"], x))
    return h, jnp.maximum(h, p["vector"])


def divided(p, h, x):
    h = p["vector"] / (2 + h / x) ** 2 + p["number"] * jax.nn.softmax(h - x, -1)
    return h, h


def with_rule(p, h, x):
    h = jax.nn.relu(h * p["vector"] + x) + jax.nn.logsumexp(x + p["vector"], -1, keepdims=True)
    return jax.nn.gelu(h) / 3, h


def unread(p, h, x):
    return jnp.sin(h) + p["number"], x * p["vector"]


BODIES = [
    number,
    vector,
    product,
    three_operands,
    looked_up,
    joined,
    convolved,
    written,
    chosen,
    divided,
    with_rule,
    unread,
]


def of_all(body, lengths, reverse=False):
    def loss(params, init, xs):
        step = functools.partial(body, params)
        state, ys = treescan.mask_scan(step, init, xs, lengths=lengths, reverse=reverse)
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves((state, ys)))

    return loss


def of_each(body, lengths, reverse=False):
    """Row by row, without what is padding."""

    def loss(params, init, xs):
        total = jnp.float32(0)
        for row, length in enumerate(lengths):
            step = functools.partial(body, params)
            mine = xs[:length, row : row + 1]
            state, ys = jax.lax.scan(step, init[row : row + 1], mine, reverse=reverse)
            total += sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves((state, ys)))
        return total

    return loss


def given(fill):
    xs = np.array(array(STEPS, ROWS, WIDTH, seed=2))
    for row, length in enumerate(LENGTHS):
        xs[length:, row] = fill
    return PARAMS, array(ROWS, WIDTH, seed=1), jnp.asarray(xs)


def squared(loss):
    return lambda *args: sum(jnp.sum(g * g) for g in jax.tree.leaves(jax.grad(loss, (0, 1))(*args)))


DERIVATIVES = {
    "gradient": lambda f, args, tangents: jax.grad(f, (0, 1, 2))(*args),
    "of weights": lambda f, args, tangents: jax.grad(f)(*args),
    "of x": lambda f, args, tangents: jax.grad(f, 2)(*args),
    "forward": lambda f, args, tangents: jax.jvp(f, args, tangents),
    "reverse over reverse": lambda f, args, tangents: jax.grad(squared(f), (0, 1, 2))(*args),
    "forward over reverse": lambda f, args, tangents: jax.jvp(jax.grad(f, (0, 1, 2)), args, tangents),
    "reverse over forward": lambda f, args, tangents: jax.grad(lambda *a: jax.jvp(f, a, tangents)[1])(*args),
}


def assert_alike(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * max(1, np.abs(b).max(initial=0)))


@pytest.fixture
def proofs(monkeypatch):
    """Notes each tangent that was proven to be free of what padded rows are shown."""
    found, prove = [], guarded.Guarded.of
    monkeypatch.setattr(guarded.Guarded, "of", lambda *args, **how: found.append(prove(*args, **how)) or found[-1])
    return found


DAILY = {
    *itertools.product([product, looked_up, with_rule], ["gradient"]),
    (product, "forward"),
    (vector, "reverse over reverse"),
    (number, "reverse over forward"),
}


def _case(body, kind, fill):
    daily = fill is np.nan and (body, kind) in DAILY
    return pytest.param(body, kind, fill, marks=[] if daily else pytest.mark.slow, id=f"{body.__name__}-{kind}-{fill}")


@pytest.mark.parametrize(
    ("body", "kind", "fill"), [_case(*each) for each in itertools.product(BODIES, DERIVATIVES, [np.nan, np.inf])]
)
def test_each_row_alone(body, kind, fill, proofs):
    args = given(fill)
    tangents = jax.tree.map(lambda leaf: jnp.cos(jnp.nan_to_num(leaf, posinf=1.0)), args)
    derivative = DERIVATIVES[kind]
    lengths = jnp.array(LENGTHS)
    got = jax.jit(lambda args: derivative(of_all(body, lengths), args, tangents))(args)
    assert proofs
    wanted = derivative(of_each(body, LENGTHS), given(0.5), tangents)
    assert_alike(got, wanted)


@pytest.mark.parametrize(
    "body", [product, *(pytest.param(body, marks=pytest.mark.slow) for body in BODIES if body is not product)]
)
def test_elements_of_a_vmap_in_reverse(body, proofs):
    args, lengths = given(np.nan), jnp.array([LENGTHS, LENGTHS[::-1]])
    flipped = (args[0], args[1][::-1], args[2][:, ::-1])
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), args, flipped)
    # In reverse, padding comes first.
    got = jax.vmap(lambda lengths, args: jax.grad(of_all(body, lengths, True), (0, 1, 2))(*args))(lengths, both)
    assert proofs
    params, init, xs = given(0.5)
    clean = (LENGTHS, (params, init, xs)), (LENGTHS[::-1], (params, init[::-1], xs[:, ::-1]))
    wanted = [jax.grad(of_each(body, lengths, True), (0, 1, 2))(*args) for lengths, args in clean]
    assert_alike(got, jax.tree.map(lambda *leaves: jnp.stack(leaves), *wanted))


@jax.custom_jvp
def reversed_sign(x):
    return x


reversed_sign.defjvp(lambda primals, tangents: (reversed_sign(*primals), -2 * tangents[0]))


def of_loop(body, lengths):
    """`of_each`, in a loop of Python: `jax.lax.scan` loses the rule of `reversed_sign` in a second derivative."""

    def loss(params, init, xs):
        total = 0.0
        for row, length in enumerate(lengths):
            state = init[row : row + 1]
            for x in xs[:length, row : row + 1]:
                state, y = body(params, state, x)
                total += jnp.sum(jnp.sin(y))
            total += jnp.sum(jnp.sin(state))
        return total

    return loss


@pytest.mark.parametrize("kind", ["forward over reverse", pytest.param("reverse over reverse", marks=pytest.mark.slow)])
def test_a_rule_of_an_identity_is_kept_for_the_next_derivative(kind, proofs):
    def body(p, h, x):
        h = jnp.sin(reversed_sign(x) * h * p["number"])
        return h, h

    args = given(np.nan)
    tangents = jax.tree.map(lambda leaf: jnp.cos(jnp.nan_to_num(leaf)), args)
    got = DERIVATIVES[kind](of_all(body, jnp.array(LENGTHS)), args, tangents)
    assert proofs
    assert_alike(got, DERIVATIVES[kind](of_loop(body, LENGTHS), given(0.5), tangents))


@jax.custom_jvp
def twice_as_steep(weight, valid):
    return weight


twice_as_steep.defjvp(lambda primals, tangents: (twice_as_steep(*primals), 2 * tangents[0]))


@pytest.mark.slow
def test_a_rule_of_the_users_that_is_told_the_mask_is_kept_too(proofs):
    """It looks like what guards a leaf of padded rows."""

    def body(p, h, x, *, valid=True):
        h = jnp.tanh(h * twice_as_steep(p["number"], valid) + x)
        return h, h

    def squared(loss, args):
        return jax.grad(lambda number: (jax.grad(loss, 1)({**args[0], "number": number}, *args[1:]) ** 2).sum())

    wanted = squared(of_loop(body, LENGTHS), given(0.5))(jnp.float32(0.7))
    got = squared(of_all(body, jnp.array(LENGTHS)), given(0.5))(jnp.float32(0.7))
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize("kind", ["reverse over reverse", pytest.param("reverse over forward", marks=pytest.mark.slow)])
def test_a_tangent_that_divides_by_an_integer(kind):
    """It is zero in padding, and read by the tangent where a checkpoint computes its quotient again."""

    def body(p, h, x):
        divided = jax.checkpoint(lambda h, count: h * p["number"] / count.astype(jnp.float32))
        h = jnp.tanh(divided(h, jnp.round(jnp.nan_to_num(x)).astype(jnp.int32)) + jnp.sin(h))
        return h, h

    def with_counts(fill):
        params, init, xs = given(fill)
        return params, init, jnp.where(jnp.isnan(xs), 0, 1 + jnp.abs(jnp.round(xs)))

    derivative = DERIVATIVES[kind]
    tangents = jax.tree.map(jnp.ones_like, with_counts(0.5))
    got = derivative(of_all(body, jnp.array(LENGTHS)), with_counts(np.nan), tangents)
    assert_alike(got, derivative(of_each(body, LENGTHS), with_counts(0.5), tangents))


def test_what_padded_rows_see_does_not_overflow(proofs):
    """In half precision, where the small values of valid rows do not."""
    values = {"a": 1.0, "b": 60.0, "c": 60.0, "d": 60.0, "e": 1 / 60}
    params = jax.tree.map(jnp.float16, values)
    init, xs = (array(ROWS, WIDTH, seed=1) * 1e-3).astype(jnp.float16), (given(0.0)[2] * 1e-3).astype(jnp.float16)

    def body(p, h, x):
        h = x * jnp.cos(h * p["a"] * p["b"] * p["c"] * p["d"] * p["e"])
        return h, h

    tangents = {name: jnp.float16(0.5 if name == "a" else 0) for name in params}

    def derivative(loss):
        return jax.grad(lambda p: jax.jvp(lambda p: loss(p, init, xs), (p,), (tangents,))[1])(params)

    got, wanted = derivative(of_all(body, jnp.array(LENGTHS))), derivative(of_loop(body, LENGTHS))
    assert proofs
    for name in params:
        np.testing.assert_allclose(got[name], wanted[name], rtol=0.05)
