"""A block is traced once for a pattern, however many places it has in it, and named once in messages."""

import functools

import jax
import jax.numpy as jnp
import numpy.testing as npt
import pytest
from jaxprs import equations
from loops import array
from thin import parametrize
from traces import Counted
from works import plain

import treescan

pytestmark = pytest.mark.quick

WIDTH = 4
X = array(3, WIDTH)


def local(layer, x):
    return x + jnp.tanh(x @ layer["w"]), x.sum()


def global_(layer, x):
    return x + jnp.sin(x @ layer["w"]), x.sum()


def stacks_of(*counts):
    return [{"w": array(count, WIDTH, WIDTH, seed=i) / 4} for i, count in enumerate(counts)]


FULL, WITH_REST, SHORT = (3,) * 6, (4, 4, 3, 3, 3, 3), (1, 1, 1, 1, 1, 0)
OPTIONS = {
    "plain": {},
    "remat": {"remat": "step"},
    "nested": {"remat": "nested"},
    "remat_each": {"remat": ("step",) * 5 + (None,)},
    "save": {"save": "last"},
    "reverse": {"reverse": True},
}


@parametrize("options", OPTIONS)
def test_a_block_is_traced_once_for_a_pattern(options):
    for counts in (FULL, WITH_REST, SHORT):
        first, last, stacks = Counted(local), Counted(global_), stacks_of(*counts)
        pattern = [first.body] * 5 + [last.body]

        def loss(x, stacks, pattern=pattern):
            return treescan.scan_layers(pattern, x, stacks, **options)[0].sum()

        jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, stacks)
        assert (first.calls, last.calls) == (1, 1), counts


def test_a_block_is_traced_once_for_each_type():
    """Layers of another shape, and static leaves of another value, are other programs."""
    stacks = stacks_of(2, 2, 2, 2)
    stacks[1] = {"w": stacks[1]["w"], "b": array(2, WIDTH)}
    stacks[3] = {"w": stacks[3]["w"], "act": jnp.sin}

    def block(layer, x):
        return layer.get("act", jnp.tanh)(x @ layer["w"]) + layer.get("b", jnp.zeros(WIDTH))[None]

    want = X
    for layer in (treescan.layer_at(stack, i) for i in range(2) for stack in stacks):
        want = block(layer, want)
    for options in ({}, {"remat": "step"}):
        counted = Counted(block)
        ours = treescan.fold_layers([counted.body] * 4, X, stacks, **options)
        npt.assert_allclose(ours, want, rtol=1e-5)
        assert counted.calls == 3


def test_the_program_is_that_of_a_trace_per_place():
    """The equations of the one trace are copied to the places; in JAX 0.12 when it lowers the calls of them."""
    stacks = stacks_of(2, 2, 2)

    def step(x, layers):
        return functools.reduce(lambda x, layer: local(layer, x)[0], layers, x), None

    def block(layer, x):
        return local(layer, x)[0]

    ours = jax.make_jaxpr(lambda x, stacks: treescan.fold_layers([block] * 3, x, stacks))(X, stacks)
    theirs = jax.make_jaxpr(lambda x, s: jax.lax.scan(step, x, s))(X, stacks)
    (ours,), (theirs,) = (list(equations(jaxpr.jaxpr, "scan")) for jaxpr in (ours, theirs))
    steps = [equations(scan.params["jaxpr"].jaxpr) for scan in (ours, theirs)]
    names = [[eqn.primitive.name for eqn in step if eqn.primitive.name != "jit"] for step in steps]
    assert names[0] == names[1]


def test_a_shared_trace_closes_over_what_an_outer_one_computes():
    """Values of an outer trace, and mutable arrays."""
    stacks = stacks_of(3, 3)

    @jax.jit
    def run(x, scale, stacks):
        seen = jax.new_ref(jnp.zeros(()))

        def block(layer, x):
            seen[...] += 1.0
            return x + jnp.tanh(x @ layer["w"]) * scale

        return treescan.fold_layers([block] * 2, x, stacks), seen[...]

    by_hand = plain.fold_layers([lambda layer, x: x + jnp.tanh(x @ layer["w"]) * 2.0] * 2, X, stacks)
    for _ in range(2):
        x, count = run(X, jnp.float32(2), stacks)
        npt.assert_allclose(x, by_hand, rtol=1e-5)
        assert count == 6
