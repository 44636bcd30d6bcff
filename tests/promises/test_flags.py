"""A part of every verb under the flags of JAX that look for mistakes, and under those that JAX is about to turn on."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import chex
import flag_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan

pytestmark = pytest.mark.quick

FLAGS = {
    "remat3": ("jax_remat3", True),
    "custom_vjp3": ("jax_custom_vjp3", True),
    "enable_checks": ("jax_enable_checks", True),
    "tracer_leaks": ("jax_check_tracer_leaks", True),
    "debug_nans": ("jax_debug_nans", True),
    "x64": ("jax_enable_x64", True),
    "strict_promotion": ("jax_numpy_dtype_promotion", "strict"),
    "rank_promotion": ("jax_numpy_rank_promotion", "raise"),
}


@contextlib.contextmanager
def flag_set(name: str, value: Any) -> Iterator[None]:
    """Within it a flag has a value; a test of a flag that this release of JAX does not have is skipped."""
    if not hasattr(jax.config, name):
        pytest.skip(f"this release of JAX has no {name}")
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def compare(name: str, dtype: Any, *, compiled: bool, within: Any) -> None:
    expected = programs.expected(name, dtype)
    try:
        with within:
            actual = programs.actual(name, dtype, compiled=compiled)
    except TypeError as error:
        if "_check_closed_call() got an unexpected keyword argument" not in str(error):
            raise
        pytest.xfail("jax_enable_checks of this release of JAX does not know a parameter of JAX's own closed_call")
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def a_few(everyday, *dimensions):
    """All combinations as parameters, of which those that `everyday` says yes to are for every day."""
    rows = itertools.product(*dimensions)
    return [
        pytest.param(*row, marks=() if everyday(*row) else pytest.mark.slow, id="-".join(map(str, row))) for row in rows
    ]


EVERYDAY = {"remat3": "while_scan", "enable_checks": "scan_layers", "x64": "lift", "rank_promotion": "accumulate"}


@pytest.mark.parametrize(
    ("flag", "name", "compiled"),
    a_few(
        lambda flag, name, compiled: name == EVERYDAY.get(flag, "mask_scan") and compiled == (flag != "debug_nans"),
        FLAGS,
        programs.PROGRAMS,
        [True, False],
    ),
)
def test_programs_under_a_flag(flag, name, compiled):
    compare(name, np.float32, compiled=compiled, within=flag_set(*FLAGS[flag]))


@pytest.mark.parametrize("name", a_few(lambda name: name == "scan", programs.PROGRAMS))
def test_double_precision(name):
    with flag_set("jax_enable_x64", True):
        compare(name, np.float64, compiled=True, within=contextlib.nullcontext())
        assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(programs.expected(name, np.float64)))


@pytest.mark.parametrize(
    "name",
    a_few(
        lambda name: name in ("fold", "while_scan", "mask_scan"),
        [name for name in programs.PROGRAMS if name != "fori"],  # whose index is the host's
    ),
)
def test_an_eager_call_moves_nothing_to_the_device(name):
    given = programs.given()
    expected = programs.PROGRAMS[name].oracle(given)
    with jax.transfer_guard("disallow"):
        actual = programs.PROGRAMS[name].run(given)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_nans_are_told_of_after_a_call_without_the_flag():
    given = programs.given()
    body = programs.body_of(given.w)

    def total(xs):
        carry, ys = treescan.mask_scan(body, given.h, xs, lengths=given.lengths)
        return jnp.sum(carry) + jnp.sum(ys)

    before = jax.grad(total)(given.xs)
    with jax.debug_nans(True):
        chex.assert_trees_all_close(jax.grad(total)(given.xs), before)
        with pytest.raises(FloatingPointError):
            total(given.xs.at[0, 0].set(jnp.nan))


# The checkpoint that JAX is about to turn on.


def gradient_bytes(run: Any) -> int:
    """The temporary memory of the gradient of a loop over 256 steps, in sizes of its xs."""
    steps, rows, width = 256, 8, 16
    given = jnp.eye(width), jnp.ones((steps, rows, width))

    def loss(w, xs):
        def body(carry, x):
            carry = jnp.sin(jnp.tanh(carry @ w + x)) * jnp.cos(x)
            return carry, carry

        return jnp.sum(run(body, jnp.zeros((rows, width)), xs)[0])

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile()
    return compiled.memory_analysis().temp_size_in_bytes / given[1].nbytes


def test_memory_under_remat3():
    with flag_set("jax_remat3", True):
        assert gradient_bytes(lambda *args: treescan.mask_scan(*args, lengths=jnp.full(8, 256))) < 3
        assert gradient_bytes(lambda *args: treescan.scan(*args, remat="nested")) < 1


def test_jax_fails_on_an_output_without_a_cotangent_under_remat3():
    """When this fails, JAX has fixed it, and `remat.checkpoint` needs no barrier any more."""

    def chunk(carry, xs):
        return jax.lax.scan(lambda carry, x: (carry * x, carry), carry, xs)

    def loss(xs):
        return jax.lax.scan(jax.checkpoint(chunk), jnp.float32(1), xs)[0]

    with flag_set("jax_remat3", True), pytest.raises(ValueError, match="Expected cotangent type"):
        jax.grad(loss)(jnp.ones((2, 3)))


def test_jax_saves_what_a_checkpoint_leaves_out_in_the_rule_of_a_custom_jvp_under_remat3():
    """When this fails, JAX has fixed it: `write_in_place` may take it, and `docs/compatibility.md` less."""

    def run(body, carry, xs):
        def steps(carry, xs):
            return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, xs)

        wrapped = jax.custom_jvp(steps)
        wrapped.defjvp(lambda primals, tangents: jax.jvp(steps, primals, tangents))
        return wrapped(carry, xs)

    plain = gradient_bytes(run)
    with flag_set("jax_remat3", True):
        assert gradient_bytes(run) > 2 * plain
