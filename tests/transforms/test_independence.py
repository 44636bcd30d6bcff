"""Whether a trace treats rows independently: what is proven holds, and of plain bodies it is proven."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from loops import array
from primitive_cases import ENTRIES, GRID, Operand, examples
from thin import shares

import treescan
from treescan._trace import independence
from treescan._trace.independence import keeps_rows_apart

pytestmark = pytest.mark.quick

ROWS = 4


@pytest.fixture(autouse=True)
def ranks_may_differ():
    with jax.numpy_rank_promotion("allow"):
        yield


W = array(3, 3, seed=8)
TABLE = array(7, 3, seed=9)


def numbers(h):
    """An index per row."""
    return jnp.argmax(h, -1)


APART = {
    "elementwise": lambda h, x: jnp.tanh(h) * x + jax.nn.sigmoid(x) ** 2 - jnp.where(h > 0, h, jnp.exp(-x)),
    "product": lambda h, x: h @ W + x @ W.T,
    "product on the left": lambda h, x: (W @ h.T).T + x,
    "batched product": lambda h, x: jnp.einsum("bi,bj->bij", h, x) @ h[..., None],
    "quadratic form": lambda h, x: jnp.einsum("bi,ij,bj->b", h, W, x),
    "attention": lambda h, x: jax.nn.softmax(jnp.einsum("bi,ji->bj", h, TABLE)) @ TABLE,
    "reductions": lambda h, x: (h.sum(-1) + x.max(-1) - jnp.prod(h, -1), jnp.argmin(x, 1)),
    "norms": lambda h, x: (h - h.mean(-1, keepdims=True)) / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "logsumexp": lambda h, x: jax.nn.logsumexp(h[:, :, None] + W, axis=1) + x,
    "split and concatenate": lambda h, x: jnp.concatenate([*jnp.split(h, [1, 2], -1), x], -1),
    "stack": lambda h, x: jnp.stack([h, x], 1).reshape(ROWS, 6),
    "heads": lambda h, x: jnp.concatenate([h, x], -1).reshape(ROWS, 2, 3).transpose(0, 2, 1),
    "rows last": lambda h, x: jnp.moveaxis(h[None, :, :] * x, 1, 2),
    "columns": lambda h, x: (h[:, 1], x[:, ::2], h[:, ::-1], x[:, None, 1:]),
    "columns by index": lambda h, x: h[:, jnp.array([2, 0])] + x[:, 1:],
    "embedding": lambda h, x: TABLE[numbers(h)] + x,
    "own entry": lambda h, x: jnp.take_along_axis(h, numbers(x)[:, None], 1),
    "padding": lambda h, x: jnp.pad(h, [(0, 0), (1, 2)]) + jnp.pad(x, [(0, 0), (2, 1)]),
    "cumulative": lambda h, x: jnp.cumsum(h, 1) + lax.cummax(x, 1),
    "sort": lambda h, x: jnp.sort(h, -1) + jnp.take_along_axis(x, jnp.argsort(h, -1), -1),
    "mapped": lambda h, x: jax.vmap(lambda h, x: W @ h + jnp.dot(h, x) * x)(h, x),
    "branch": lambda h, x: lax.cond(W[0, 0] > 0, lambda h: jnp.sin(h), lambda h: h * 2, h) + x,
    "loop": lambda h, x: lax.scan(lambda c, w: (jnp.tanh(c + w), c), h, W)[0] * x,
    "loop over the columns": lambda h, x: lax.scan(lambda c, row: (c + row, c * row), x[:, 0], h.T)[1].T,
    "loop that begins without rows": lambda h, x: lax.fori_loop(0, 3, lambda i, c: c * 2 + h, jnp.zeros_like(x)),
    "remat": lambda h, x: jax.checkpoint(lambda h, x: jnp.sin(h) @ W * x)(h, x),
    "cholesky": lambda h, x: jnp.linalg.cholesky(h[:, :, None] * h[:, None] + 9 * jnp.eye(3)) @ x[..., None],
    "update": lambda h, x: lax.dynamic_update_slice(h, x[:, :1], (0, 1)),
    "column set": lambda h, x: h.at[:, 1].set(x[:, 0]) + jnp.zeros((ROWS, 3)).at[:, jnp.array([2, 0])].add(x[:, :2]),
    "own entry by number": lambda h, x: h[jnp.arange(ROWS), numbers(x)] + x[jnp.arange(ROWS)[:, None], [[2, 1]]].sum(1),
    "own entry set by number": lambda h, x: h.at[jnp.arange(ROWS), numbers(x)].set(x[:, 0]),
    "own entry of a constant": lambda h, x: jnp.zeros((ROWS, 3)).at[jnp.arange(ROWS), numbers(x)].add(h[:, 1]),
    "own row by number": lambda h, x: h.at[jnp.arange(ROWS)].multiply(x[jnp.arange(ROWS)]),
    "own entries": lambda h, x: h.at[jnp.arange(ROWS)[:, None], jnp.stack([numbers(x), numbers(h)], 1)].max(x[:, :2]),
    "rows second": lambda h, x: h.T.at[numbers(x), jnp.arange(ROWS)].set(x[:, 0]).T,
    "mapped index": lambda h, x: jax.vmap(lambda h, x, i: h.at[i].set(x[0]) + x[i])(h, x, numbers(x)),
    "mapped constant": lambda h, x: jax.vmap(lambda x, i: jnp.zeros(3).at[i].add(x[0]), (0, 0))(x, numbers(h)),
    "convolution": lambda h, x: lax.conv_general_dilated(h[:, None], W[None, None, 0], (1,), "SAME")[:, 0] + x,
    "convolution, rows last": lambda h, x: (
        lax.conv_general_dilated(h.T[:, None], W[None, None, 0], (1,), "SAME", dimension_numbers=("WCN", "OIW", "WCN"))[
            :, 0
        ].T
    ),
    "fourier": lambda h, x: jnp.abs(jnp.fft.rfft(h, axis=1)) + jnp.fft.irfft(x, 2, axis=1),
    "top": lambda h, x: (*lax.top_k(h, 2), x),
    "solve": lambda h, x: jnp.linalg.solve(h[:, :, None] * h[:, None] + 9 * jnp.eye(3), x[..., None]),
    "determinant": lambda h, x: jnp.linalg.det(h[:, :, None] * x[:, None] + 9 * jnp.eye(3)),
    "eigenvalues": lambda h, x: jnp.linalg.eigh(h[:, :, None] * h[:, None] + jnp.eye(3))[0] + x,
    "singular values": lambda h, x: jnp.linalg.svd(h[:, :, None] * x[:, None])[1],
    "a constant": lambda h, x: (jnp.ones((ROWS, 2)), x),
}
TOGETHER = {
    "sum": lambda h, x: h + x.sum(0),
    "batch norm": lambda h, x: (h - h.mean(0)) / h.std(0) + x,
    "products of rows": lambda h, x: h @ x.T @ x,
    "shifted": lambda h, x: jnp.roll(h, 1, 0) + x,
    "reversed": lambda h, x: h[::-1] + x,
    "sorted rows": lambda h, x: jnp.sort(h, 0) + x,
    "cumulative rows": lambda h, x: jnp.cumsum(h, 0) + x,
    "first row": lambda h, x: h + x[0],
    "a row by index": lambda h, x: h + x[jnp.argmax(TABLE[0])],
    "rows by index": lambda h, x: h[numbers(x) % ROWS],
    "another order": lambda h, x: h[jnp.array([1, 0, 2, 3])] + x,
    "all of one": lambda h, x: jnp.broadcast_to(h.reshape(-1)[:3], h.shape) + x,
    "transposed": lambda h, x: jnp.concatenate([h, x[:, :1]], 1).T,
    "merged axes": lambda h, x: jnp.concatenate([h, x[:, :1]], 1).reshape(2, 2, 4).swapaxes(0, 1).reshape(4, 4),
    "a row set": lambda h, x: h.at[1].set(x[2]),
    "rows set by index": lambda h, x: h.at[numbers(x)].set(x),
    "rows set in another order": lambda h, x: h.at[jnp.array([1, 0, 2, 3])].set(x),
    "a shared table": lambda h, x: h + jnp.zeros(3).at[numbers(x)].add(x[:, 0]),
    "entries of other rows": lambda h, x: h.at[(jnp.arange(ROWS) + 1) % ROWS, numbers(x)].set(x[:, 0]),
    "entries of later rows": lambda h, x: h.at[jnp.arange(ROWS) + 1, numbers(x)].set(x[:, 0]),
    "entries read from the end": lambda h, x: x[jnp.arange(ROWS) - ROWS + 1, numbers(h)],
    "the number as a column": lambda h, x: jnp.concatenate([h, x[:, :1]], 1)[numbers(x), jnp.arange(ROWS)],
    "columns set by number": lambda h, x: jnp.concatenate([h, x[:, :1]], 1).at[numbers(x), jnp.arange(ROWS)].set(1.0),
    "filters": lambda h, x: lax.conv_general_dilated(h.T[None], x[..., None], (1,), "SAME")[0],
    "convolved rows": lambda h, x: lax.conv_general_dilated(h.T[:, None], W[None, None, 0], (1,), "SAME")[:, 0].T + x,
    "fourier over rows": lambda h, x: jnp.abs(jnp.fft.fft(h, axis=0)) + x,
    "top rows": lambda h, x: lax.top_k(h.T, ROWS)[0].T + x,
    "a matrix of rows": lambda h, x: jnp.linalg.solve(h.T @ h + 9 * jnp.eye(3), x.T).T,
    "any row": lambda h, x: jnp.where(jnp.any(h > 0), h, x),
    "a branch on rows": lambda h, x: lax.cond(h.sum() > 0, lambda h: h, lambda h: -h, x),
    "a loop over rows": lambda h, x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(3), h)[1] + x,
    "a loop until all": lambda h, x: lax.while_loop(lambda c: jnp.any(c < 1), lambda c: c + 1, jnp.abs(h)) + x,
}


def is_proven(body):
    traced, out = jax.make_jaxpr(body, return_shape=True)(*given())
    returned = [0] * len(jax.tree.leaves(out))
    return keeps_rows_apart(traced.jaxpr, (0, 0), returned, ROWS)


def given():
    return array(ROWS, 3, seed=1), array(ROWS, 3, seed=2)


def meet(body):
    """Whether a row of the results changes with another row of what is given."""
    h, x = given()
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(body(h, x))]
    for row in range(ROWS):
        others = np.arange(ROWS) != row
        for bad in (jnp.nan, 50.0, -0.3):
            after = jax.tree.leaves(body(h.at[row].set(bad), x.at[row].set(bad)))
            if any(not np.array_equal(np.asarray(a)[others], b[others]) for a, b in zip(after, before, strict=True)):
                return True
    return False


BY_INDEX = ["columns by index", "embedding", "own entry", "own entry set by number", "mapped index"]


@pytest.mark.parametrize(
    "names", [pytest.param(BY_INDEX, id="by index"), *shares(APART.keys() - {"rows last", *BY_INDEX})]
)
def test_rows_that_are_apart_are_proven_so(names):
    for name in names:
        assert not meet(APART[name]), name
        assert is_proven(APART[name]), name


def test_rows_of_a_result_may_lie_along_another_axis():
    traced = jax.make_jaxpr(APART["rows last"])(*given())
    assert keeps_rows_apart(traced.jaxpr, (0, 0), [2], ROWS)
    assert not keeps_rows_apart(traced.jaxpr, (0, 0), [0], ROWS)


@pytest.mark.parametrize("names", shares(TOGETHER))
def test_rows_that_meet_are_not(names):
    for name in names:
        assert not is_proven(TOGETHER[name]), name
        assert meet(TOGETHER[name]) or name in {"any row", "a loop until all"}, name  # with other numbers


def example_of(name):
    """A function that evaluates a primitive, and two draws of its operands, each of which has rows."""
    if name in ENTRIES:
        found = examples(name, ENTRIES[name].types[0])
        function, operands = next(e[1:] for e in found if all(operand.shape == GRID for operand in e.operands))
    else:  # nothing else treats it specially
        function, operands = getattr(lax, name), [Operand(GRID, "float32", 0.5, 1.5)] * (1 + (name == "nextafter"))
    rng = np.random.default_rng(0)
    return function, *([jnp.asarray(operand.draw(rng)) for operand in operands] for _ in range(2))


HERE = {name for name in independence.ELEMENTWISE if name in ENTRIES or hasattr(lax, name)}  # a release may lack some


@pytest.mark.parametrize("names", shares(HERE - {"name"}))
def test_what_counts_as_elementwise_is(names):
    for name in names:
        function, given, other = example_of(name)
        jaxpr = jax.make_jaxpr(function)(*given).jaxpr
        assert name in {each.primitive.name for each in equations(jaxpr)}
        assert keeps_rows_apart(jaxpr, [0] * len(given), [0], GRID[0]), name
        mixed = [jnp.concatenate([a[:1], b[1:]]) for a, b in zip(given, other, strict=True)]
        np.testing.assert_array_equal(function(*mixed)[:1], function(*given)[:1], name)
        np.testing.assert_array_equal(function(*mixed)[1:], function(*other)[1:], name)


def test_what_all_rows_share_may_not_depend_on_any():
    traced = jax.make_jaxpr(lambda h, x: (h + x, h * 2, W * 3))(*given())
    assert keeps_rows_apart(traced.jaxpr, (0, 0), [0, 0, None], ROWS)
    assert keeps_rows_apart(traced.jaxpr, (0, 0), [0, 0, 0], ROWS)  # the same for all of them
    assert not keeps_rows_apart(traced.jaxpr, (0, 0), [0, None, None], ROWS)


def selections(body, *, rows=ROWS):
    """How many selections the step makes where nothing is differentiated."""
    init, xs = array(rows, 3, seed=1), array(32, rows, 3, seed=2)

    def run(init, xs, lengths):
        return treescan.mask_scan(lambda h, x: (body(h, x),) * 2, init, xs, lengths=lengths, chunk=8)

    program = jax.make_jaxpr(run)(init, xs, jnp.full(rows, 30))
    loops = list(equations(program.jaxpr, "custom_jvp_call"))
    names = [each.primitive.name for each in equations(loops[0].params["call_jaxpr"].jaxpr)]
    return names.count("select_n")


def test_a_step_that_nobody_differentiates_has_no_stand_ins():
    apart, together = APART["product"], TOGETHER["sum"]
    assert selections(together) - selections(apart) == 2  # of the state and of x, before the body


def test_a_single_row_is_apart_from_others_if_its_padding_does_no_harm():
    def rest(h, x):
        return jnp.where(jnp.any(h > 0), h.sum(0, keepdims=True), x)

    def until(h, x):
        return lax.while_loop(lambda c: jnp.any(c < 1), lambda c: c + 1, jnp.abs(h)) + x

    def outside(h, x):
        return jax.pure_callback(np.sin, x, h)

    def proven(body, returned, rows=1):
        given = array(rows, 3, seed=1), array(rows, 3, seed=2)
        return keeps_rows_apart(jax.make_jaxpr(body)(*given).jaxpr, (0, 0), returned, rows)

    assert proven(rest, [0])
    assert not proven(rest, [0], rows=2)
    assert not proven(rest, [None])
    assert not proven(until, [0])
    assert not proven(outside, [0])
