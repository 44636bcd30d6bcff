"""One nest of chunks serves every option: in the program, however they are combined, the body stands twice at most."""

import functools
import itertools
import math
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from loops import array
from thin import all_pairs
from traces import Counted

import treescan
from treescan import Remat
from treescan._loop.sizes import Wish, plan_sizes

pytestmark = pytest.mark.quick

SAVES = {
    "all": "all",
    "none": None,
    "several": {"a": "last", "b": 8, "c": None, "d": 16},
    "uneven": {"a": 3, "b": 4, "c": "all", "d": "last"},
}
REMATS = {
    "none": None,
    "step": "step",
    "levels": Remat(levels=3),
    "chunk": Remat(chunk=16),
    "policy": Remat("everything_saveable", levels=3),
}
GRID = list(itertools.product([97, 1000], REMATS, SAVES, [None, 16], [False, True]))


def body(carry, x):
    h = jnp.tanh(carry["h"] * carry["w"] + x)
    return {"h": h, "w": carry["w"]}, {"a": h * x, "b": h + x, "c": h * h, "d": h - x}


def program(run, *args):
    """The program as it is handed to the compiler, of which no copy of a body has been made or merged yet."""
    return jax.jit(run).lower(*args).as_text()


def copies_of(text):
    return text.count("stablehlo.tanh")


def calls_of(text):
    """How often a program runs the body: where it stands in a function of its own, that one's calls."""
    functions = re.findall(r"func\.func \w* ?@([\w.\-]+)\((.*?)\n  }", text, re.DOTALL)
    return sum(copies_of(code) * (1 if name == "main" else text.count(f"call @{name}(")) for name, code in functions)


@pytest.mark.parametrize(("steps", "remat", "save", "truncate", "reverse"), all_pairs(GRID))
def test_scan_has_the_body_twice_at_most(steps, remat, save, truncate, reverse):
    def run(h, w, xs):
        options = {"remat": REMATS[remat], "save": SAVES[save], "truncate": truncate, "reverse": reverse}
        return treescan.scan(body, {"h": h, "w": w}, xs, **options)

    text = program(run, array(3), array(3, seed=1), array(steps, 3, seed=2))
    calls = 2 * (4 if save == "uneven" else 2)
    assert 1 <= copies_of(text) <= (2 if "@closed_call" in text else calls)  # JAX 0.12 writes a copy for each call
    assert 1 <= calls_of(text) <= calls


MASKED_GRID = list(itertools.product([97, 128], REMATS, SAVES, [None, 16], [None, 0, 16, 10]))


@pytest.mark.parametrize(("steps", "remat", "save", "truncate", "chunk"), all_pairs(MASKED_GRID))
def test_mask_scan_has_the_body_four_times_at_most(steps, remat, save, truncate, chunk):
    def run(h, w, xs, lengths):
        options = {"remat": REMATS[remat], "save": SAVES[save], "truncate": truncate, "chunk": chunk}
        return treescan.mask_scan(body, {"h": h, "w": w}, xs, lengths=lengths, **options)

    given = array(2, 3), array(2, 3, seed=1), array(steps, 2, 3, seed=2), np.array([steps, 5])
    assert 1 <= copies_of(program(run, *given)) <= 4


@pytest.mark.parametrize(("remat", "save"), [(None, 4), ("step", "last"), ("nested", 4), ("nested", None)])
def test_layers_have_the_block_twice_at_most(remat, save):
    def block(layer, x):
        return jnp.tanh(x * layer), x

    run = functools.partial(treescan.scan_layers, block, remat=remat, save=save)
    assert 1 <= copies_of(program(run, 1.0, array(37))) <= 2


def test_the_counter_counts():
    def twice(x):
        return jnp.tanh(jnp.tanh(x))

    inner = jax.jit(twice)
    assert copies_of(program(lambda x: twice(x) + twice(2 * x), 1.0)) == 4
    text = program(lambda x: inner(x) + inner(2 * x) + jnp.tanh(x), 1.0)
    assert (copies_of(text), calls_of(text)) == (3, 5)


@pytest.mark.parametrize(
    "options",
    [{"save": SAVES["several"]}, {"save": SAVES["uneven"], "remat": "nested", "truncate": 5}],
    ids=str,
)
def test_the_body_is_traced_once(options):
    """`test_traces.py` shows so of the other options."""
    run = lambda f: treescan.scan(f, {"h": array(2, 3), "w": array(2, 3)}, array(97, 2, 3), **options)  # noqa: E731
    assert Counted(body).traces(run) == 1


# The sizes of chunks.


def test_planner_by_example():
    assert plan_sizes(100, []) == ()
    assert plan_sizes(100, [Wish(10)]) == (10,)
    assert plan_sizes(100, [Wish(10), Wish(12)]) == (10,)  # near enough: one chunk serves both
    assert plan_sizes(100, [Wish(6, exact=True), Wish(7)]) == (6,)
    assert plan_sizes(1000, [Wish(6, exact=True), Wish(40)]) == (6, 42)
    assert plan_sizes(1000, [Wish(96, exact=True), Wish(7)]) == (8, 96)
    assert plan_sizes(1000, [Wish(6, exact=True), Wish(4, exact=True)]) == (2,)
    assert plan_sizes(8, [Wish(8), Wish(200)]) == ()  # a chunk as long as the loop is no chunk


@given(
    st.integers(0, 5000),
    st.lists(
        st.builds(
            Wish,
            size=st.integers(1, 600),
            exact=st.booleans(),
            put=st.none(),
            slots=st.just(()),
            outside=st.just(False),
        ),
        max_size=5,
    ),
)
def test_planner_laws(length, wishes):
    sizes = plan_sizes(length, wishes)
    assert all(1 < size < length for size in sizes)
    assert all(large % small == 0 and small < large for small, large in itertools.pairwise(sizes))
    exact = [wish.size for wish in wishes if wish.exact]
    if exact and sizes and math.gcd(*exact) > 1:
        for wish in exact:  # every exact boundary is a boundary of some chunk
            assert wish >= length or any(wish % size == 0 for size in sizes)
