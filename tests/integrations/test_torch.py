"""`mask_scan` equals torch's LSTM and GRU on packed sequences: outputs, final states, and every gradient.

torch's numbers are in fixtures/torch_rnn.npz, which scripts/make_torch_fixtures.py writes and describes.
"""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thin import parametrize

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

# Options of mask_scan that are to change no number.
OPTIONS = {"plain": {}, "compact": {"chunk": 4, "compact": True}, "nested": {"chunk": 3, "remat": "nested"}}
DTYPES = {  # with the tolerance, relative and absolute
    "float64": (np.float64, 1e-12),
    "float32": (np.float32, 1e-5),
}


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


def run(cell, inputs, lengths, options):
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
            **options,
        )
        outputs.append(ys)
        finals.append(final)
    return {"outputs": jnp.concatenate(outputs, axis=-1), "final": jax.tree.map(lambda *s: jnp.stack(s), *finals)}


def outs_and_grads(cell, inputs, case, options):
    """What the RNN returns, and the gradients of the fixtures' loss."""

    def loss(inputs):
        outs = run(cell, inputs, case["lengths"], options)
        products = jax.tree.map(lambda weights, out: jnp.sum(weights.astype(out.dtype) * out), case["weights"], outs)
        return sum(jax.tree.leaves(products)), outs

    grads, outs = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    return {**outs, "grads": grads}


def padding_of(case):
    return np.arange(len(case["xs"]))[:, None] >= case["lengths"]


@pytest.mark.parametrize("name", CASES)
@parametrize("dtype_and_tolerance", DTYPES)
@pytest.mark.parametrize(
    "options", [pytest.param(o, id=n, marks=[] if n == "plain" else [pytest.mark.slow]) for n, o in OPTIONS.items()]
)
def test_equals_torch_on_packed_sequences(name, dtype_and_tolerance, options):
    case, padding, (dtype, tolerance) = CASES[name], padding_of(CASES[name]), dtype_and_tolerance
    expected = {key: case[key] for key in ("outputs", "final", "grads")}
    inputs = {key: case[key] for key in ("params", "init")}
    inputs["xs"] = np.where(padding[..., None], np.nan, case["xs"])
    with jax.enable_x64(dtype == np.float64):
        inputs = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), inputs)
        actual = jax.device_get(outs_and_grads(CELLS[name.split("_")[0]], inputs, case, options))
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {np.dtype(dtype)}
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)
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
