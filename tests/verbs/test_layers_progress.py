"""`progress` of `scan_layers` and `fold_layers`: what the bar is told. `works` has that results are those without."""

import functools

import jax.numpy as jnp
import pytest
from bars import bars, progress

import treescan

pytestmark = pytest.mark.quick

D = 3
X = jnp.linspace(0.1, 1, D)


def stack(n):
    return {"w": jnp.linspace(-1, 1, n * D * D).reshape(n, D, D)}


def tanh(layer, x):
    x = jnp.tanh(x @ layer["w"])
    return x, x.sum()


def told(layers, **options):
    """The steps that the bar was told; with the last come the values of the result."""
    blocks = tanh if isinstance(layers, dict) else [tanh, tanh]
    run = functools.partial(treescan.scan_layers, blocks, X, layers, **options)
    ((total, steps),) = bars(lambda: run(progress=progress(3, show=_shown)))
    assert steps[-1] == (total, {"x": pytest.approx(float(run()[0].sum()), abs=1e-6)})
    return total, [done for done, _ in steps]


def _shown(x):
    return {"x": x.sum()}


@pytest.mark.parametrize(
    ("counts", "form", "steps"),
    [
        ((5,), {"reverse": True}, [3, 5]),
        ((5,), {"save": 2}, [2, 4, 5]),
        ((5, 4), {"remat": "nested"}, [4, 8, 9]),
        ((5, 4), {"save": "last"}, [4, 8, 9]),
        ((1, 0), {}, [1]),  # without a whole round
    ],
    ids=str,
)
def test_a_bar_counts_layers_of_all_blocks_together(counts, form, steps):
    stacks = [stack(count) for count in counts]
    assert told(stacks if len(stacks) > 1 else stacks[0], **form) == (sum(counts), steps)


@pytest.mark.parametrize("remat", [None, "step"])
def test_layers_with_states_show_x(remat):
    def block(layer, x, state):
        return jnp.tanh(x @ layer["w"]), state + x.sum(), x.sum()

    given = [block, block], X, [stack(3), stack(2)]
    options = {"state": [jnp.zeros(3), jnp.zeros(2)], "remat": remat, "progress": progress(4, show=_shown)}
    ((total, steps),) = bars(lambda: treescan.scan_layers(*given, **options))
    assert steps[-1][0] == total == 5
