"""`mask_scan` equals torch's LSTM and GRU on packed sequences: outputs, final states, and every gradient.

torch's numbers are in fixtures/torch_rnn.npz, which scripts/make_torch_fixtures.py writes and describes.
"""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan


def load(file):
    """The fixtures as a tree: `cases["lstm_both"]["grads"]["init"]["h"]`."""
    tree = {}
    with np.load(file) as arrays:
        for path, leaf in arrays.items():
            *parents, name = path.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = leaf
    return tree


CASES = load(Path(__file__).parents[1] / "fixtures" / "torch_rnn.npz")
TORCH_VERSION = str(CASES.pop("torch_version"))

TOLERANCE = 1e-12  # relative and absolute, in float64


# torch's cells, by the equations and with the order of the gates that its documentation gives.


def affine(params, kind, x):
    return x @ params[f"weight_{kind}"].T + params[f"bias_{kind}"][None]


def lstm(params, state, x):
    i, f, g, o = jnp.split(affine(params, "ih", x) + affine(params, "hh", state["h"]), 4, axis=-1)
    c = jax.nn.sigmoid(f) * state["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"h": h, "c": c}, h


def gru(params, state, x):
    r_x, z_x, n_x = jnp.split(affine(params, "ih", x), 3, axis=-1)
    r_h, z_h, n_h = jnp.split(affine(params, "hh", state["h"]), 3, axis=-1)
    z = jax.nn.sigmoid(z_x + z_h)
    n = jnp.tanh(n_x + jax.nn.sigmoid(r_x + r_h) * n_h)
    h = (1 - z) * n + z * state["h"]
    return {"h": h}, h


CELLS = {"lstm": lstm, "gru": gru}


def run(cell, inputs, lengths):
    """All directions: outputs side by side, final states one above the other."""
    outputs, finals = [], []
    for direction, suffix in enumerate(["_l0", "_l0_reverse"][: len(inputs["init"]["h"])]):
        params = {name.removesuffix(suffix): p for name, p in inputs["params"].items() if name.endswith(suffix)}
        final, ys = treescan.mask_scan(
            lambda state, x, params=params: cell(params, state, x),
            {name: state[direction] for name, state in inputs["init"].items()},
            inputs["xs"],
            lengths=lengths,
            reverse=direction == 1,
        )
        outputs.append(ys)
        finals.append(final)
    return {"outputs": jnp.concatenate(outputs, axis=-1), "final": jax.tree.map(lambda *s: jnp.stack(s), *finals)}


def outs_and_grads(cell, inputs, case):
    """What the RNN returns, and the gradients of the fixtures' loss."""

    def loss(inputs):
        outs = run(cell, inputs, case["lengths"])
        products = jax.tree.map(lambda weights, out: jnp.sum(weights.astype(out.dtype) * out), case["weights"], outs)
        return sum(jax.tree.leaves(products)), outs

    grads, outs = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    return {**outs, "grads": grads}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch_on_packed_sequences(name):
    """With the options of `mask_scan` as they come: that they change no number is tested with the verb."""
    case = CASES[name]
    padding = np.arange(len(case["xs"]))[:, None] >= case["lengths"]
    expected = {key: case[key] for key in ("outputs", "final", "grads")}
    inputs = {key: case[key] for key in ("params", "init")}
    inputs["xs"] = np.where(padding[..., None], np.nan, case["xs"])
    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda leaf: jnp.asarray(leaf, np.float64), inputs)
        actual = jax.device_get(outs_and_grads(CELLS[name.split("_")[0]], inputs, case))
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {np.dtype(np.float64)}
    chex.assert_trees_all_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert not np.any(actual["outputs"][padding])
    assert not np.any(actual["grads"]["xs"][padding])


def test_the_fixtures_are_what_they_should_be():
    assert TORCH_VERSION
    assert set(CASES) == {f"{cell}_{directions}" for cell in CELLS for directions in ("forward", "both")}
    for case in CASES.values():
        steps, lengths = len(case["xs"]), list(case["lengths"])
        assert {1, steps} <= set(lengths)
        assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))
        assert all(np.all(leaf != 0) for leaf in jax.tree.leaves([case["params"], case["init"], case["weights"]]))
        assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(case["grads"]))
        chex.assert_trees_all_equal_shapes(case["grads"], {key: case[key] for key in case["grads"]})
