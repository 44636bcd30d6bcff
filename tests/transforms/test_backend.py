"""What the defaults do where programs do not run on a CPU, as `benchmarks/gpu.py` measures it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

import treescan
from treescan._cpu import backend

STEPS, ROWS = 512, 8
LENGTHS = jnp.array([512, 300, 0, 1, 64, 65, 511, 100])


def test_tests_run_on_a_cpu():
    assert backend.on_cpu()


@pytest.fixture(params=["cpu", "elsewhere"])
def kind(request, monkeypatch):
    monkeypatch.setattr(backend, "on_cpu", lambda: request.param == "cpu")
    return request.param


def cell(w, h, x):
    h = jnp.tanh(x @ w + h @ w)
    return h, h


def masked(w, h, xs, lengths=LENGTHS):
    return treescan.mask_scan(functools.partial(cell, w), h, xs, lengths=lengths)


def given(width):
    rng = np.random.default_rng(0)
    shapes = (width, width), (ROWS, width), (STEPS, ROWS, width)
    return [jnp.asarray(rng.standard_normal(shape) / width**0.5, jnp.float32) for shape in shapes]


def lengths_of_loops(function, *args):
    jax.clear_caches()  # a trace does not depend on the backend for JAX
    return {e.params["length"] for e in equations(jax.make_jaxpr(function)(*args).jaxpr) if e.primitive.name == "scan"}


def test_chunks_are_fewer_where_each_branch_waits_for_the_host(kind):
    wanted = {"cpu": {STEPS // 16, 16}, "elsewhere": {8, STEPS // 8}}
    assert lengths_of_loops(masked, *given(3)) == wanted[kind]
    short = lengths_of_loops(lambda w, h, xs: masked(w, h, xs[:20], LENGTHS % 20), *given(3))
    assert short == {2, 10}  # on every backend


@pytest.mark.parametrize(("width", "pays"), [(64, {"cpu"}), (2048, {"cpu", "elsewhere"})])
def test_products_of_small_weights_are_computed_step_by_step(kind, width, pays):
    def loss(w, h, xs):
        return jnp.sum(treescan.scan(functools.partial(cell, w), h, xs, remat="auto")[0])

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width, width), (64, width), (64, 64, width))]
    loops = lengths_of_loops(jax.grad(loss), *args)
    assert (loops == {64}) == (kind not in pays)  # otherwise it has chunks
