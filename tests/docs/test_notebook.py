"""tqdm's bars in a notebook: a kernel runs the cells, and the state of the widgets is looked at."""

import os
from pathlib import Path

import pytest

pytest.importorskip("tqdm")
pytest.importorskip("ipykernel")
pytest.importorskip("ipywidgets")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[2]
CELL = """
import jax, jax.numpy as jnp, treescan
bar = treescan.meters.Progress("cells", show=lambda h: {"h": h}, updates=20)
loss = lambda h: treescan.fold(lambda h, x: jnp.tanh(h + x), h, jnp.linspace(-1, 1, 1000), progress=bar)
jax.block_until_ready(jax.grad(loss)(0.0))
jax.effects_barrier()
"""


@pytest.mark.slow
def test_a_widget_stays_and_says_how_far_the_loop_came(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", store_widget_state=True).execute()
    shown = [output["output_type"] for output in notebook.cells[0].outputs]
    assert shown == ["display_data"]
    models = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    states = [(model["model_name"], model["state"]) for model in models]
    bars = [state for name, state in states if name == "FloatProgressModel"]
    assert [(bar["value"], bar["bar_style"]) for bar in bars] == [(1000.0, "success")]
    texts = " ".join(state["value"] for name, state in states if name == "HTMLModel").replace("\u2007", " ")
    assert "cells: 100%" in texts
    assert "h=0.961" in texts
