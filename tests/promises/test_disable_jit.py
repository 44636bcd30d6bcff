"""Under `jax.disable_jit` the body runs step by step, on values, with every option and every check."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import LENGTH, OPTIONS, array
from thin import parametrize
from works import table
from works.columns import STEPWISE
from works.table import Cell

import treescan

pytestmark = pytest.mark.quick


def is_traced(tree):
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


OF_EACH_KIND = (
    "in_axes", "key", "accumulate", "fori", "valid", "mask_key", "fill_nan", "chunk", "compact", "resets_alone",
    "hold", "padded", "remat_nested", "scan_layers", "layers_of_all_kinds", "pattern_reverse", "mask_remat_nested",
)  # fmt: skip


@parametrize("option", {name: OPTIONS[name] for name in OF_EACH_KIND})
def test_the_body_sees_values(option):
    steps = []

    @functools.wraps(option.body)
    def body(*args, **keywords):
        assert not is_traced((args, keywords))
        x = [leaf for leaf in jax.tree.leaves(args) if hasattr(leaf, "shape")][-1]
        steps.append(-1 if x.ravel()[0] > 0 else 1)  # Python decides on a value
        return option.body(*args, **keywords)

    with jax.disable_jit():
        option.call(body)
    assert len(steps) == LENGTH


def cells(verb):
    """Each form of each option, and none, in a gradient or in a batch, by turns; `works` has a column of values."""
    forms = [(), *((form,) for form in table.VERBS[verb].forms)]
    return [Cell(verb, form, [*STEPWISE][place % 2]) for place, form in enumerate(forms)]


@pytest.mark.parametrize("verb", table.VERBS)
def test_a_share_of_the_cells(verb):
    assert not table.wrong(cell for place, cell in enumerate(cells(verb)) if place < 2 or table.share(cell, 120))


@pytest.mark.slow
@pytest.mark.parametrize("verb", table.VERBS)
def test_all_cells(verb):
    assert not table.wrong(cells(verb))


WEAK = {
    "int to float": (0, lambda c, x: (c + x, c)),
    "float to float32": (0.0, lambda c, x: (c * x, c)),
    "stays int": (0, lambda c, x: (c + 1, x)),
    "to the other leaf": ((0, 1.0), lambda c, x: ((c[0] + c[1], c[1] * x), c)),
    "numpy scalar": (np.float32(0), lambda c, x: (c * x, c)),
    "python bool": (True, lambda c, x: (c, x)),
}


@parametrize("weak", WEAK)
def test_weak_types_are_promoted_as_under_jit(weak):
    init, pair = weak
    for verb, length in (("scan", 1), ("scan", 3), ("accumulate", 3), ("mask_scan", 3)):
        body = pair if "scan" in verb else (lambda c, x: pair(c, x)[0])
        options = {"lengths": length} if verb == "mask_scan" else {}
        run = functools.partial(getattr(treescan, verb), body, init, **options)
        expected = jax.jit(run)(array(length))
        with jax.disable_jit():
            actual = run(array(length))
        chex.assert_trees_all_equal(actual, expected)
        chex.assert_trees_all_equal_dtypes(actual, expected)  # weak or not: lax.scan does not keep that either


def test_a_fault_of_a_late_step_is_found():
    """Under disable_jit a body may decide on values: its types may change in any step, and are compared in each."""
    seen = []

    def body(c, x):
        seen.append(None)
        return (c if x < 3 else c.astype(jnp.float16)), None

    with jax.disable_jit(), pytest.raises(treescan.errors.CarryError, match=re.escape("float32[]   float16[]")):
        treescan.scan(body, jnp.float32(0), jnp.arange(6.0))
    assert len(seen) == 4


def test_a_weak_type_may_change_in_a_late_step():
    """Of `while_scan`, the first step alone begins anew with another type: later, steps that were taken would go."""

    def body(c, x):
        i, h = c
        return (i + 1, np.float32(1.5) if i == 3 else h), i

    with jax.disable_jit():
        result = treescan.while_scan(lambda c: c[0] < 6, body, (0, 1), jnp.arange(8.0))
    assert int(result.steps) == 6
    assert result.ys.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


def test_values_of_a_mapped_or_differentiated_loop_come_step_by_step():
    """Tracers of vmap and grad there are, but none of jit: the Python body runs once a step."""
    seen = []

    def body(c, x):
        seen.append(None)
        return jnp.sin(c * x), c

    with jax.disable_jit():
        jax.vmap(lambda c: treescan.scan(body, c, array(4)))(array(2))
        jax.grad(lambda c: treescan.scan(body, c, array(4))[0])(jnp.float32(1))
    assert len(seen) == 8


def test_no_step_runs_where_no_row_is_valid():
    seen = []

    def body(c, x):
        seen.append(is_traced(x))
        return c + x, c

    with jax.disable_jit():
        carry, ys = treescan.mask_scan(body, array(2), array(4, 2), lengths=jnp.zeros(2, int), fill=-1)
    assert all(seen)  # its types are asked for
    chex.assert_trees_all_equal((carry, ys), (array(2), jnp.full((4, 2), -1.0)))
