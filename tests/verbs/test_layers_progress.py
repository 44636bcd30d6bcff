"""`progress` of `scan_layers` and `fold_layers`: what the bar is told, and that results are those without."""

import chex
import jax
import jax.numpy as jnp
import pytest
from bars import bars, labels, progress

import treescan

pytestmark = pytest.mark.quick

D = 3
X = jnp.linspace(0.1, 1, D)


def stack(n):
    return {"w": jnp.linspace(-1, 1, n * D * D).reshape(n, D, D)}


def tanh(layer, x):
    x = jnp.tanh(x @ layer["w"])
    return x, x.sum()


def sin(layer, x):
    x = jnp.sin(x @ layer["w"])
    return x, x.sum()


def told(layers, **options):
    """The steps and values that the bar was told, and that results and the gradient are those without."""

    def run(x, **shown):
        blocks = tanh if isinstance(layers, dict) else [tanh, sin]
        return treescan.scan_layers(blocks, x, layers, **options, **shown)

    def loss(x, **shown):
        y, ys = run(x, **shown)
        return jnp.sum(y) + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(ys))

    found = []
    ((total, steps),) = bars(lambda: found.append(run(X, progress=progress(3, show=_shown))) or found[0])
    chex.assert_trees_all_close(found[0], run(X), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: loss(x, progress=progress(3))))
    chex.assert_trees_all_close(gradient(X), jax.grad(loss)(X), rtol=1e-5, atol=1e-6)
    jax.effects_barrier()
    assert steps[-1] == (total, {"x": pytest.approx(float(found[0][0].sum()), abs=1e-6)})
    return total, [done for done, _ in steps]


def _shown(x):
    return {"x": x.sum()}


@pytest.mark.parametrize("form", [{"reverse": True}, {"remat": "step"}, {"save": 2}], ids=str)
def test_a_bar_counts_layers(form):
    expected = [3, 5] if "reverse" in form else [2, 4, 5]
    assert told(stack(5), **form) == (5, expected)


@pytest.mark.parametrize(("more", "form"), [(0, {"reverse": True}), (1, {"remat": "nested"}), (1, {"save": "last"})])
def test_blocks_that_take_turns_have_one_bar_for_all_layers(form, more):
    total, steps = told([stack(4 + more), stack(4)], **form)
    assert total == 8 + more
    if form.get("reverse"):
        assert steps == [4 + more, 8 + more]
    else:
        assert steps == [4, 8, *[9] * more]


def test_blocks_without_a_whole_round_have_a_bar():
    assert told([stack(1), stack(0)]) == (1, [1])


@pytest.mark.parametrize("pattern", [False, True])
@pytest.mark.parametrize("remat", [None, "step"])
def test_layers_with_states_show_x(pattern, remat):
    def block(layer, x, state):
        return jnp.tanh(x @ layer["w"]), state + x.sum(), x.sum()

    blocks, layers, states = block, stack(4), jnp.zeros(4)
    if pattern:
        blocks, layers, states = [block, block], [stack(3), stack(2)], [jnp.zeros(3), jnp.zeros(2)]
    ((total, steps),) = bars(
        lambda: treescan.scan_layers(blocks, X, layers, state=states, remat=remat, progress=progress(4, show=_shown))
    )
    assert steps[-1][0] == total == (5 if pattern else 4)


def test_a_bar_of_the_gradient_of_layers():
    def loss(layers):
        show = progress(2, backward=True)
        return treescan.fold_layers(lambda layer, x: tanh(layer, x)[0], X, layers, progress=show).sum()

    assert [steps[-1][0] for _, steps in bars(lambda: jax.jit(jax.grad(loss))(stack(4)))] == [4, 4]
    assert labels() == ["loop", "loop (backward)"]


@pytest.mark.parametrize("pattern", [False, True])
def test_each_element_of_a_vmap_has_a_bar(pattern):
    blocks, layers = ([tanh, sin], [stack(3), stack(2)]) if pattern else (tanh, stack(5))
    show = progress(1, batched=True)
    bars(lambda: jax.vmap(lambda x: treescan.scan_layers(blocks, x, layers, progress=show)[0])(jnp.stack([X, X])))
    assert labels() == ["loop [0]", "loop [1]"]
    bars(lambda: jax.vmap(lambda w: treescan.scan_layers(tanh, X, w, progress=show)[0])(jax.tree.map(_twice, stack(5))))
    assert labels() == ["loop [0]", "loop [1]"]


def _twice(leaf):
    return jnp.stack([leaf, leaf])
