"""Cells of the table under the flags of JAX that look for mistakes, and under those that JAX is about to turn on."""

import contextlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thin import parametrize
from works import columns, table
from works.table import Cell

import treescan

pytestmark = pytest.mark.quick

FORMS = {  # those that add a rule, a branch, or a loop
    "scan": ('remat="nested"',),
    "fold": ('remat="nested"',),
    "accumulate": ('remat="step"',),
    "fori": ("traced bounds",),
    "while_scan": (),
    "mask_scan": ('fill="hold"', "compact", 'remat="nested"', "chunk=0", "resets"),
    "scan_layers": ('remat="step"', "pattern"),
    "fold_layers": ('remat="step"',),
    "lift": (),
}


def flag_set(name: str) -> contextlib.AbstractContextManager[None]:
    """A test of a flag that this release of JAX does not have is skipped."""
    if not hasattr(jax.config, name):
        pytest.skip(f"this release of JAX has no {name}")
    return columns.flag_set(name)


def check(flag: str, verb: str, forms: list[tuple[str, ...]], transforms: tuple[str, ...]) -> None:
    with flag_set(flag):
        wrong = table.wrong(Cell(verb, form, f"{flag}, {how}") for form in forms for how in transforms)
    said = set(wrong.values())
    if said and all("_check_closed_call() got an unexpected keyword" in each for each in said):
        pytest.xfail("jax_enable_checks of this release of JAX does not know a parameter of JAX's own closed_call")
    if said and all("float0" in each for each in said) and flag == "jax_remat3":
        pytest.xfail("jax_remat3: the cotangent of an integer that nested chunks carry has the shape of its stack")
    assert not wrong


@pytest.mark.parametrize(("flag", "verb"), columns.FLAGS.items())
def test_a_verb_under_a_flag(flag: str, verb: str) -> None:
    check(flag, verb, [()], ("eager",) if flag == "jax_debug_nans" else ("grad",))


@pytest.mark.parametrize("flag", ["jax_enable_checks", "jax_check_tracer_leaks"])
def test_a_masked_scan_of_several_chunks_under_a_flag(flag: str) -> None:
    def loss(weight: Any, xs: Any) -> Any:
        ys = treescan.mask_scan(lambda h, x: (jnp.tanh(weight * h + x),) * 2, jnp.zeros(3), xs, lengths=lengths)[1]
        return jnp.sum(ys)

    lengths, args = np.array([40, 3, 17]), (0.5, jnp.ones((40, 3)))
    for run in (loss, jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        wanted = run(*args)
        jax.clear_caches()
        with flag_set(flag):
            chex.assert_trees_all_close(run(*args), wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("verb", table.VERBS)
@pytest.mark.parametrize("flag", columns.FLAGS)
def test_all_verbs_under_a_flag(flag: str, verb: str) -> None:
    check(flag, verb, [(), *((form,) for form in FORMS[verb])], ("eager", "grad", "jvp", "vmap of grad"))


LENGTHS = np.array([2, 0, 5], np.int32)


def given() -> tuple[Any, ...]:
    """A matrix, a state, xs that are NaN where a row has no data, the lengths and their flags, all on the device."""
    rng = np.random.default_rng(0)
    w, h, xs = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in [(2, 2), (3, 2), (5, 3, 2)])
    xs[np.arange(5)[:, None] >= LENGTHS] = np.nan
    return jax.device_put((w, h, xs, LENGTHS, np.arange(5)[:, None] == LENGTHS - 1))


def body_of(w: jax.Array) -> Any:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ w + x)
        return carry, jnp.sin(carry)

    return body


RUNS = {
    "scan": lambda f, h, xs, n, r: treescan.scan(f, h, xs, remat="nested"),
    "while_scan": lambda f, h, xs, n, r: treescan.while_scan(lambda c: jnp.sum(c) < jnp.sum(c) + 1, f, h, xs),
    "hold": lambda f, h, xs, n, r: treescan.mask_scan(f, h, xs, lengths=n, fill="hold", reverse=True),
    "compact": lambda f, h, xs, n, r: treescan.mask_scan(f, h, xs, lengths=n, chunk=2, compact=True),
    "resets": lambda f, h, xs, n, r: treescan.mask_scan(f, h, xs, lengths=n, resets=r, chunk=2),
    "fold_layers": lambda f, h, xs, n, r: treescan.fold_layers(lambda x, c: f(c, x)[0], h, xs, remat="step"),
    "lift": lambda f, h, xs, n, r: treescan.lifting.lift(lambda variables, rngs, c, x: (f(c, x), {}))({}, {}, h, xs),
}


@parametrize("run", RUNS)
def test_an_eager_call_moves_nothing_to_the_device(run: Any) -> None:
    w, *arrays = given()
    with jax.transfer_guard("disallow"):
        run(body_of(w), *arrays)


def test_nans_are_told_of_after_a_call_without_the_flag() -> None:
    w, h, xs, lengths, _ = given()

    def total(xs: jax.Array) -> jax.Array:
        carry, ys = treescan.mask_scan(body_of(w), h, xs, lengths=lengths)
        return jnp.sum(carry) + jnp.sum(ys)

    before = jax.grad(total)(xs)
    with jax.debug_nans(True):
        chex.assert_trees_all_close(jax.grad(total)(xs), before)
        with pytest.raises(FloatingPointError):
            total(xs.at[0, 0].set(jnp.nan))


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
    with flag_set("jax_remat3"):
        assert gradient_bytes(lambda *args: treescan.mask_scan(*args, lengths=jnp.full(8, 256))) < 3
        assert gradient_bytes(lambda *args: treescan.scan(*args, remat="nested")) < 1


def test_the_gradient_of_nested_chunks_under_remat3():
    w, h, xs, lengths, _ = given()

    def loss(w):
        options = {"lengths": lengths, "chunk": 2, "compact": True, "remat": "nested"}
        return sum(map(jnp.sum, treescan.mask_scan(body_of(w), h, xs, **options)))

    expected = jax.grad(loss)(w)
    with flag_set("jax_remat3"):
        chex.assert_trees_all_close(jax.grad(lambda w: loss(w))(w), expected, rtol=1e-5)


def test_jax_fails_on_an_output_without_a_cotangent_under_remat3():
    """When this fails, JAX has fixed it, and `remat.checkpoint` needs no barrier any more."""

    def chunk(carry, xs):
        return jax.lax.scan(lambda carry, x: (carry * x, carry), carry, xs)

    def loss(xs):
        return jax.lax.scan(jax.checkpoint(chunk), jnp.float32(1), xs)[0]

    with flag_set("jax_remat3"), pytest.raises(ValueError, match="Expected cotangent type"):
        jax.grad(loss)(jnp.ones((2, 3)))


def test_jax_saves_what_a_checkpoint_leaves_out_in_the_rule_of_a_custom_jvp_under_remat3():
    """When this fails, JAX has fixed it: `write_in_place` may take it, and `docs/what-works.md` less."""

    def run(body, carry, xs):
        def steps(carry, xs):
            return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, xs)

        wrapped = jax.custom_jvp(steps)
        wrapped.defjvp(lambda primals, tangents: jax.jvp(steps, primals, tangents))
        return wrapped(carry, xs)

    plain = gradient_bytes(run)
    with flag_set("jax_remat3"):
        assert gradient_bytes(run) > 2 * plain
