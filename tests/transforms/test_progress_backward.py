"""A bar for the gradient, one for each element of a vmap: what they are told, and that numbers are those without."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from bars import BATCH, LOG, TRANSFORMS, XS, H, T, W, bars, init, labels, noted, progress, step

import treescan

pytestmark = pytest.mark.quick

BACK = {"backward": True}
SHOW = progress(**BACK)


def loss(h, length=T, show=SHOW, **options):
    carry, ys = treescan.scan(step, init(h), XS[:length], progress=show, **options)
    return jnp.sum(carry["h"]) + jnp.sum(jnp.sin(ys))


def both_ways(run):
    """The steps that each of the two bars was told, and that there are two, forwards first."""
    told = bars(run)
    assert labels() == ["loop", "loop (backward)"]
    (_, forward), (total, backward) = told
    assert backward[-1][0] == total
    return [[done for done, _ in steps] for steps in (forward, backward)]


@pytest.mark.parametrize(("length", "reverse"), [(1, True), (11, False), (11, True)])
def test_the_backward_pass_counts_the_steps_from_the_other_end(length, reverse):
    forward, backward = both_ways(lambda: jax.jit(jax.grad(lambda h: loss(h, length, reverse=reverse)))(H))
    size = -(-length // 4)
    starts = range(0, length, size)
    ends = sorted(min(start + size, length) for start in starts)
    assert backward == ([*ends] if reverse else [length - start for start in reversed(starts)])
    assert forward[-1] == length


def test_each_report_comes_after_the_steps_that_it_counts():
    def speaking(h, x):
        @jax.custom_vjp
        def heard(h):
            return h

        def backwards(_, d):
            jax.debug.callback(lambda _: LOG.append(("body", "said")), d[0])
            return (d,)

        heard.defvjp(lambda h: (h, None), backwards)
        return jnp.tanh(heard(h) + x), None

    def run(h):
        return jnp.sum(treescan.scan(speaking, h, XS[:8], progress=progress(**BACK))[0])

    kinds = [entry[1] for entry in noted(LOG, lambda: jax.jit(jax.grad(run))(H))[0]]
    assert kinds[kinds.index("close") + 1 :] == ["init", *["said", "said", "step"] * 4, "close"]


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in ("vmap", "jvp")])
def test_every_transform_has_two_bars_and_the_numbers_without(name):
    found, transform = [], TRANSFORMS[name]
    forward, backward = both_ways(lambda: found.append(transform(loss)) or found[0])
    assert forward == backward == [3, 6, 9, 12]
    chex.assert_trees_all_close(found[0], transform(functools.partial(loss, show=None)), rtol=1e-5, atol=1e-5)


def rows(h, lengths, show, **options):
    start = {"h": jnp.stack([h, h]), "n": jnp.zeros(2, int)}
    given = jnp.stack([XS, XS], 1)
    return treescan.mask_scan(step, start, given, lengths=lengths, progress=show, **options)[0]["h"].sum()


def test_a_masked_scan_counts_live_steps_backwards():
    run = functools.partial(rows, lengths=jnp.array([7, 4]), show=progress(6, **BACK), chunk=2)
    assert both_ways(lambda: jax.jit(jax.grad(run))(H)) == [[2, 4, 6, 7], [1, 3, 5, 7]]


def test_a_loop_that_carries_nothing_differentiable_counts_too():
    def run(w):
        ys = treescan.scan(lambda n, x: (n + 1, jnp.tanh(x @ w)), 0, XS[:8], progress=progress(**BACK))[1]
        return jnp.sum(ys)

    assert both_ways(lambda: jax.grad(run)(W)) == [[2, 4, 6, 8]] * 2


def test_without_the_option_no_gradient_has_a_rule_of_its_own():
    assert "custom_vjp" not in str(jax.make_jaxpr(lambda h: loss(h, show=progress()))(H))
    assert "custom_vjp" in str(jax.make_jaxpr(loss)(H))


# One bar for each element.


def each(run):
    told = bars(run)
    return dict(zip(labels(), told, strict=True))


def test_each_element_has_a_bar_with_its_place_and_its_values():
    def run(h):
        show = progress(2, batched=True, show=lambda carry: {"h": carry["h"][0]})
        return treescan.scan(step, init(h), XS, progress=show)[0]["h"]

    found = []
    told = each(lambda: found.append(jax.vmap(run)(BATCH)) or found[0])
    assert list(told) == ["loop [0]", "loop [1]", "loop [2]"]
    for (total, steps), last in zip(told.values(), found[0], strict=True):
        assert (total, [done for done, _ in steps]) == (T, [6, T])
        assert steps[-1][1] == {"h": pytest.approx(float(last[0]), abs=1e-6)}
    (total, steps), = each(lambda: run(H)).values()  # fmt: skip
    assert (total, len(steps)) == (T, 2)


def test_an_element_is_mapped_by_what_the_body_closes_over_too():
    def run(w):
        return treescan.fold(lambda h, x: jnp.tanh(h @ w + x), H, XS, progress=progress(1, batched=True))

    assert list(each(lambda: jax.vmap(run)(jnp.stack([W, 2 * W])))) == ["loop [0]", "loop [1]"]

    def until(w):
        show = progress(20, batched=True)
        return treescan.while_scan(lambda h: h > 1, lambda h, _: (h * w, None), 100.0, max_length=40, progress=show)[0]

    told = each(lambda: jax.vmap(until)(jnp.array([0.5, 0.25])))
    assert [steps[-1][0] for _, steps in told.values()] == [7, 4]


def test_each_element_counts_its_own_steps():
    run = functools.partial(rows, H, show=progress(4, batched=True))
    told = each(lambda: jax.vmap(run)(jnp.array([[3, 2], [7, 11], [0, 0]])))
    assert [total for total, _ in told.values()] == [3, 11, 0]


def test_elements_have_bars_of_their_gradients():
    show = progress(1, batched=True, **BACK)
    told = each(lambda: jax.vmap(jax.grad(lambda h: loss(h, show=show)))(BATCH[:2]))
    assert list(told) == ["loop [0]", "loop [1]", "loop (backward) [0]", "loop (backward) [1]"]
    assert all(steps == [(T, {})] for _, steps in told.values())
    run = jax.jit(jax.vmap(jax.vmap(jax.grad(lambda h: loss(h, show=progress(1, batched=True))))))
    assert list(each(lambda: run(BATCH[None, :2]))) == ["loop [0, 0]", "loop [0, 1]"]
