"""Rewritten steps where a rewriting was once wrong, or failed in JAX's words; and `rewriting(False)`, which does none.

The oracle is the same call without any rewriting, which is tried against unpadded rows elsewhere, or a Python loop.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P
from oracle import compiled

import treescan
from treescan import fori, mask_scan, rewriting, scan, while_scan

T, CHUNK = 12, 4
close = functools.partial(chex.assert_trees_all_close, rtol=2e-5, atol=2e-5)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.5, jnp.float32)


def plainly(function, *given):
    with rewriting(False):
        return compiled(lambda *given: function(*given), *given)


# A product of rank 0 among arrays: its tangent is a number per step.


@pytest.mark.parametrize("rows", [(), (3,)])
@pytest.mark.parametrize("size", [CHUNK, CHUNK + 1])
def test_a_product_of_rank_0_that_is_added_to_an_array(size, rows):
    def loss(given):
        w, matrix, bias, xs = given

        def one(h, x):
            return jnp.tanh((w @ h) + (matrix @ h) + x + (bias @ x) + w @ x + bias @ h)

        def step(h, x):
            h = (jax.vmap(one) if rows else one)(h, x)
            return h, h @ w

        final, ys = mask_scan(step, jnp.zeros((*rows, size)), xs, lengths=jnp.full(rows, T - 1), chunk=CHUNK)
        return (final * final).sum() + (ys * ys).sum()

    given = array(size), array(size, size, seed=1), array(size, seed=2), array(T, *rows, size, seed=3)
    every = lambda given: (loss(given), jax.grad(loss)(given), jax.jvp(loss, (given,), (given,)))  # noqa: E731
    close(compiled(every, given), plainly(every, given))


both = jax.jit(lambda w, x: (jnp.sin(w), x * 2))


def adds_up(w, h, x):
    """Products of rank 0 that are added up in a batch."""
    return h + jnp.einsum("bi,i->", h, w[0]) + jnp.einsum("bi,bi->", x, x * w[:1]) + x


def calls(w, h, x):
    """Weights that come out of a call beside what depends on x."""
    w, x = both(w, x)
    return h @ w + x


@pytest.mark.parametrize("function", [adds_up, calls])
def test_the_gradient_of_weights(function):
    def loss(w):
        def step(h, x):
            h = jnp.tanh(function(w, h, x))
            return h, h

        return mask_scan(step, jnp.zeros((3, 4)), array(T, 3, 4), lengths=jnp.array([8, 3, 0]), chunk=CHUNK)[1].sum()

    w = array(4, 4, seed=1)
    close(compiled(jax.grad(loss), w), plainly(jax.grad(loss), w))


# What the body closes over, mapped, where an element has nothing valid.


@pytest.mark.parametrize("chunk", [None, 0])
@pytest.mark.parametrize("effects", [False, True], ids=["pure", "effects"])
def test_an_element_without_steps_borrows_what_the_body_closes_over(chunk, effects):
    def loss(s, xs, length):
        def step(h, x):
            if effects:
                jax.debug.callback(lambda: None)
            h = jnp.tanh(h + x / s)
            return h, h

        final, ys = mask_scan(step, jnp.zeros(2), xs, lengths=length, chunk=chunk)
        return ys.sum() + final.sum()

    s, xs, lengths = jnp.array([2.0, 0.0, jnp.nan, 3.0]), array(4, T, 2), jnp.array([3, 0, 0, T])
    one = jax.jit(jax.grad(loss))
    one_by_one = [one(s[i], xs[i], lengths[i]) for i in range(4)]
    close(jax.jit(jax.vmap(jax.grad(loss)))(s, xs, lengths), jnp.stack(one_by_one))
    close(jax.jit(jax.grad(lambda s: jax.vmap(loss)(s, xs, lengths).sum()))(s), jnp.stack(one_by_one))
    assert one_by_one[1] == 0


@pytest.mark.devices
def test_devices_do_not_lend_what_a_body_gathers():
    """Each device holds a part of the weights; one of them has no valid row, and the others count on its part."""
    mesh = jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    P = jax.sharding.PartitionSpec

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("d"), P(None, "d"), P("d")), out_specs=P(None, "d"))
    def run(part, xs, lengths):
        def step(h, x):
            h = jnp.tanh(h + x * jax.lax.all_gather(part, "d", tiled=True)[None])
            return h, h

        return mask_scan(step, xs[0] * 0, xs, lengths=lengths, chunk=CHUNK)[1]

    w, xs, lengths = array(4), array(T, 4, 4, seed=1), jnp.array([T, 0, 3, 5])
    expected = mask_scan(lambda h, x: (jnp.tanh(h + x * w[None]),) * 2, xs[0] * 0, xs, lengths=lengths)[1]
    close(jax.jit(run)(w, xs, lengths), expected)


# What failed in JAX's words.


@pytest.mark.parametrize("verb", ["mask_scan", "while_scan", "remat"])
def test_complex_products(verb):
    def loss(matrix):
        def step(z, x):
            z = jnp.sin(z @ matrix) + x
            return z, z

        init, xs = jnp.zeros((3, 2), jnp.complex64), jax.lax.complex(array(T, 3, 2), array(T, 3, 2, seed=1))
        if verb == "mask_scan":
            ys = mask_scan(step, init, xs, lengths=jnp.array([T, 3, 0]), chunk=CHUNK)[1]
        elif verb == "while_scan":
            ys = while_scan(lambda z: jnp.abs(z).sum() < 100, step, init, xs).ys
        else:
            ys = scan(step, init, xs, remat=treescan.Remat(policy=jax.checkpoint_policies.dots_saveable))[1]
        return (jnp.abs(ys) ** 2).sum()

    matrix = jax.lax.complex(array(2, 2, seed=2), array(2, 2, seed=3))
    close(compiled(jax.grad(loss), matrix), plainly(jax.grad(loss), matrix))


def test_a_mapped_axis_of_size_0():
    xs, counts = jnp.zeros((0, T, 2)), jnp.zeros((0,), jnp.int32)

    def masked(xs, length):
        return mask_scan(lambda h, x: (h + x, h), jnp.zeros(2), xs, lengths=length)[0].sum()

    def early(xs):
        return while_scan(lambda h: h.sum() < 3, lambda h, x: (h + x, h), jnp.zeros(2), xs).carry.sum()

    assert jax.vmap(masked)(xs, counts).shape == (0,)
    assert jax.vmap(jax.grad(masked))(xs, counts).shape == (0, T, 2)
    assert jax.vmap(jax.grad(early))(xs).shape == (0, T, 2)
    assert jax.vmap(lambda n: fori(0, n, lambda i, h: h + i, 0, max_length=5))(counts).shape == (0,)
    assert jax.vmap(jax.vmap(masked))(xs[None], counts[None]).shape == (1, 0)


_slow = pytest.mark.slow


@pytest.mark.parametrize("where", ["step", pytest.param("loop", marks=_slow), pytest.param("function", marks=_slow)])
@pytest.mark.parametrize("verb", ["mask_scan", "while_scan"])
def test_the_gradient_of_a_mapped_loop_whose_body_branches(verb, where):
    def loss(matrix, xs, length):
        def branch(h, x):
            return jax.lax.switch(
                (x.sum() > 0).astype(jnp.int32) + (h.sum() > 1).astype(jnp.int32),
                [lambda h: jnp.tanh(matrix @ h), lambda h: h * x, lambda h: jnp.sqrt(jnp.abs(h) + 1) + matrix @ x],
                h,
            )

        def step(h, x):
            if where == "step":
                h = branch(h, x)
            elif where == "loop":
                h, _ = jax.lax.scan(lambda h, x: (branch(h, x), None), h, jnp.stack([x, -x]))
            else:
                h = jax.checkpoint(jax.jit(branch))(h, x)
            return h, h

        if verb == "mask_scan":
            final, ys = mask_scan(step, jnp.ones(2), xs, lengths=length, chunk=CHUNK)
        else:
            final, ys, _, _ = while_scan(lambda h: jnp.abs(h).sum() < length.astype(jnp.float32), step, jnp.ones(2), xs)
        return final.sum() + (ys * ys).sum()

    matrix, xs, lengths = array(2, 2), array(4, T, 2, seed=1), jnp.array([T, 3, 0, 5])
    one = jax.jit(jax.grad(loss))
    expected = sum(one(matrix, xs[i], lengths[i]) for i in range(4))
    close(jax.jit(jax.grad(lambda w: jax.vmap(loss, (None, 0, 0))(w, xs, lengths).sum()))(matrix), expected)
    close(jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(matrix, xs, lengths).sum(0), expected)


def test_second_derivatives_of_a_mapped_loop_whose_body_branches():
    """Its steps are saved: the rule of the saved steps is differentiated too."""

    def loss(matrix, xs):
        def step(h, x):
            h = jax.lax.cond(h.sum() > 0, lambda h: jnp.tanh(matrix @ h), lambda h: h * x + jnp.sin(matrix @ x), h)
            return h, h

        final, ys = mask_scan(step, jnp.ones(2), xs, lengths=5)
        return final.sum() + (ys * ys).sum()

    matrix, xs = array(2, 2), array(3, 7, 2, seed=1)
    expected = sum(jax.hessian(loss)(matrix, x) for x in xs)
    mapped = jax.grad(lambda w: jax.vmap(loss, (None, 0))(w, xs).sum())
    close(jax.jit(jax.jacfwd(mapped))(matrix), expected)
    close(jax.jit(jax.jacrev(mapped))(matrix), expected)


@pytest.mark.parametrize("wrap", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_the_gradient_of_while_scan_says_what_the_body_says_once(wrap):
    """That a callback which returns something is refused there is in `test_errors.py`."""
    said = []

    def loss(w):
        def step(h, x):
            io_callback(lambda: said.append(1), None)
            h = jnp.tanh(h * w + x)
            return h, h

        return while_scan(lambda h: h.sum() < 30, step, jnp.zeros(2), jnp.ones((3, 2))).carry.sum()

    assert jnp.isfinite(wrap(jax.grad(loss))(1.0))
    jax.effects_barrier()
    assert len(said) == 3


@pytest.mark.devices
@pytest.mark.parametrize("verb", ["mask_scan", "while_scan"])
def test_the_gradient_of_a_body_that_branches_in_a_shard_map(verb):
    """Each device branches on a value of its own: the branch is left as JAX has it."""
    mesh = jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    def one(w, h, xs):
        def step(h, x):
            h = jax.lax.cond(x > 0, lambda h: jnp.sin(h * w), lambda h: h + w * x, h)
            return h, h

        if verb == "mask_scan":
            return mask_scan(step, h, xs, lengths=5, chunk=2)[0]
        return while_scan(lambda h: h < 100, step, h, xs).carry

    local = lambda w, h, xs: jax.lax.psum(one(w, h[0], xs[0]), "d")  # noqa: E731
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P())
    given = 0.7, array(4), array(4, 6, seed=1)
    got = jax.jit(jax.grad(sharded, argnums=(0, 1)))(*given)
    close(got, jax.grad(lambda w, h, xs: sum(map(functools.partial(one, w), h, xs)), argnums=(0, 1))(*given))


# No rewriting at all.


def counted(function, *given):
    return str(jax.make_jaxpr(function)(*given))


@pytest.mark.parametrize("verb", ["mask_scan", "while_scan"])
def test_rewriting_off(verb):
    """Neither a rule for a derivative nor a product outside of the steps; the same numbers, and other programs."""

    def loss(w):
        def step(carry, x):
            w, h = carry
            h = jnp.tanh(h @ w + x)
            return (w, h), h

        init, xs = (w, jnp.zeros((3, 2))), array(T, 3, 2)
        if verb == "mask_scan":
            lengths = jnp.array([T, 3, 0])
            (_, h), ys = mask_scan(step, init, xs, lengths=lengths, row_axes={"carry": (None, 0)}, save="last")
        else:
            (_, h), ys, _, _ = while_scan(lambda c: c[1].sum() > -2, step, init, xs, save=3)  # 3 steps
        return h.sum() + (ys * ys).sum()

    w = array(2, 2, seed=1)
    every = lambda w: (loss(w), jax.grad(loss)(w), jax.hessian(loss)(w))  # noqa: E731
    with rewriting(False):
        off = counted(loss, w)
        with rewriting(True):
            assert "custom_jvp_call" in counted(lambda w: loss(w), w)
        eager = jax.grad(loss)(w)
    assert "custom_jvp_call" not in off.replace("name=_where", "")
    close(compiled(every, w), plainly(every, w))
    close(eager, jax.grad(loss)(w))


def test_the_environment_turns_rewriting_off(monkeypatch):
    def program():
        def final(w):
            return mask_scan(lambda h, x: (jnp.tanh(w @ h + x), None), jnp.zeros(2), jnp.ones((T, 2)), lengths=3)[0]

        return counted(final, array(2, 2)).replace("name=_where", "")

    assert "custom_jvp_call" in program()
    monkeypatch.setenv("TREESCAN_REWRITE", "0")
    assert "custom_jvp_call" not in program()


def test_rewriting_takes_a_bool():
    with pytest.raises(treescan.errors.ArgumentTypeError, match="`rewriting` takes True or False, got 0"):
        rewriting(0).__enter__()
