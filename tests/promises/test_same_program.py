"""With no option treescan traces to `jax.lax.scan`'s own program; with options, to no more than what they do."""

import functools
import re

import jax
import jax.numpy as jnp
import loops
import pytest
from jaxprs import equations, num_consts, shapes
from loops import CASES, LENGTHS, OPTIONS, array, arrays, loss_of, over
from thin import parametrize

import treescan

pytestmark = pytest.mark.quick


def draws(key, x):
    key, now = jax.random.split(key)
    return key, jax.random.normal(now) * x


@jax.custom_jvp
def with_jvp(carry, x):
    return jnp.sin(carry * x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 10 * tangents[0] * primals[1]))


@jax.custom_vjp
def with_vjp(carry, x):
    return jnp.sin(carry * x)


with_vjp.defvjp(lambda c, x: (with_vjp(c, x), (c, x)), lambda res, t: (10 * t * res[1], t * res[0]))


PROGRAMS = {name: (case.body, case.init, case.make_xs(7)) for name, case in CASES.items()} | {
    "closure": (lambda c, x: (c + array(3) @ array(3, 2), x), array(2), array(4)),
    "constants": (lambda c, x: (c, (c[0], x)), (array(3), array(2)), array(4)),
    "swap": (lambda c, x: (c[::-1], x), (array(3), array(3, seed=1)), array(4)),
    "nested scan": (lambda c, x: jax.lax.scan(lambda c, y: (jnp.sin(c) * y, c), c, x), array(), array(4, 5)),
    "cond, jit": (lambda c, x: (jax.lax.cond(x > 0, jnp.sin, jnp.cos, c), jax.jit(jnp.exp)(x)), array(), array(4)),
    "weak type": (lambda c, x: (c * x, x), 1, array(4)),
    "keys": (draws, jax.random.key(0), array(4)),
    "custom_jvp": (lambda c, x: (with_jvp(c, x), c), array(), array(4)),
    "custom_vjp": (lambda c, x: (with_vjp(c, x), c), array(), array(4)),
    "checkpoint": (lambda c, x: (jax.checkpoint(jnp.tanh)(c * x), c), array(), array(4)),
    "effects": (lambda c, x: (c * x, jax.debug.callback(lambda _: None, x)), array(), array(4)),
}
OPTIONS_OF_LAX = {
    "reverse": {"reverse": True},
    "unroll": {"unroll": 3},
    "whole": {"unroll": True},
    "split": {"_split_transpose": True},
}


def traced(scan, program, transform, options):
    body, init, xs = program
    length = None if jax.tree.leaves(xs) else 7

    def run(init, xs):
        return scan(body, init, xs, length, **options)

    return jax.make_jaxpr(transform(run, init, xs))(init, xs)


def under_grad(run, init, xs):
    def derivative(init, xs):
        loss, floats = loss_of(run, init, xs)
        return jax.grad(loss)(floats)

    return derivative


def under_vmap(run, init, xs):
    def batched(init, xs):
        stacked = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 2), (init, xs))
        return jax.vmap(run)(*stacked)

    return batched


def under_checkpoint(run, init, xs):
    return under_grad(jax.checkpoint(run), init, xs)


def assert_same(program, transform, options):
    jaxprs = (traced(scan, program, transform, options) for scan in (treescan.scan, jax.lax.scan))
    ours, lax = (re.sub(r"0x[0-9a-f]+", "", str(jaxpr)) for jaxpr in jaxprs)  # of a callback, in JAX 0.8
    assert ours == lax, (options, transform)
    assert "scan" in ours


def no_transform(run, init, xs):
    return run


@parametrize("program", PROGRAMS)
def test_jaxpr_is_lax_scans(program):
    for transform in (no_transform, under_grad, under_vmap, under_checkpoint):
        assert_same(program, transform, {})
    for options in OPTIONS_OF_LAX.values():
        assert_same(program, under_grad, options)


@parametrize("case", {name: case for name, case in CASES.items() if name != "no_xs"})
def test_jaxpr_of_no_steps_and_of_one_is_lax_scans(case):
    for steps in (0, 1):
        assert_same((case.body, case.init, case.make_xs(steps)), no_transform, {})


# What is off leaves no trace.

BAR = treescan.meters.Progress("loop", meter=treescan.meters.Text())
OFF = {"progress": ((None, False), BAR), "check_finite": ((False,), True)}
OF_LAYERS = ("scan_layers", "fold_layers", "pattern")
WITH = {
    "progress": ("scan", "fold", "fori", "lengths", *OF_LAYERS),
    "check_finite": ("scan", "fold", "fori", "lengths", *OF_LAYERS),
}


@pytest.mark.parametrize(("option", "verb"), [(option, verb) for option, verbs in WITH.items() for verb in verbs])
def test_an_option_that_is_off_is_the_same_program(option, verb):
    ways = {
        "fori": loops.over_indices, "lengths": functools.partial(over, treescan.mask_scan, lengths=LENGTHS),
        "pattern": functools.partial(loops.over_pattern, treescan.scan_layers),
    }  # fmt: skip
    way = ways.get(verb) or functools.partial(over, getattr(treescan, verb))

    def program(**options):
        return str(jax.make_jaxpr(functools.partial(way(**options), OPTIONS[verb].body))(*arrays()))

    off, on = OFF[option]
    assert {program(**{option: value}) for value in off} == {program()} != {program(**{option: on})}


# A carry leaf that the body returns as it came is a constant of the loop, whatever the option.


def innermost(jaxpr):
    """The loops that run the body itself: with chunks, main part and remainder, and a branch for each tier."""
    return [eqn for eqn in equations(jaxpr, "scan") if not any(equations(eqn.params["jaxpr"].jaxpr, "scan"))]


@parametrize("option", OPTIONS)
def test_unchanged_leaf_is_a_constant(option):
    jaxpr = jax.make_jaxpr(lambda init, xs: option.call(option.body, init, xs))(*arrays()).jaxpr
    weights = arrays()[0]["w"].shape
    for eqn in equations(jaxpr, "scan"):
        consts, others = shapes(eqn)
        assert weights in consts
        assert weights not in others
    expected = option.consts if isinstance(option.consts, tuple) else (option.consts,)
    assert {num_consts(eqn) for eqn in innermost(jaxpr)} == set(expected)


@parametrize("option", OPTIONS)
def test_unchanged_leaf_is_saved_once_for_the_gradient(option):
    """No stack [T, ...] of the weights, forward or backward, but where they are outputs."""

    def loss(init, xs):
        out = option.call(option.body, init, xs)
        return jnp.sum(out[0]["h"] if isinstance(out, tuple) else out["h"])

    jaxpr = jax.make_jaxpr(jax.grad(loss))(*arrays())
    weights = arrays()[0]["w"].shape
    for eqn in equations(jaxpr.jaxpr, "scan"):
        assert weights not in [var.aval.shape[1:] for var in eqn.invars[num_consts(eqn) :]]


def test_static_leaf_costs_nothing():
    def with_static(carry, x):
        h = carry["act"](carry["h"] + x)
        return carry | {"h": h}, h

    jaxpr = jax.make_jaxpr(lambda i, x: treescan.scan(with_static, i | {"act": jnp.sin}, x)[1])(*arrays())
    [eqn] = equations(jaxpr.jaxpr, "scan")
    assert num_consts(eqn) == 1
    assert len(eqn.invars) == 3  # w, h and xs


# How often the body stands in the program.


def marked(carry, x):
    h = jax.lax.cbrt(carry["h"] + x)
    return {"h": h, "w": carry["w"]}, h


def count(jaxpr):
    return len(list(equations(jaxpr.jaxpr, "cbrt")))


MASKED = {"lengths": LENGTHS}
COPIES = {
    "scan": (treescan.scan, {}, 1),
    "in_axes": (lambda f, c, x, **o: treescan.scan(f, c, jnp.moveaxis(x, 0, 1), **o), {"in_axes": 1}, 1),
    "lengths": (treescan.mask_scan, MASKED, 1),
    "mask_reverse": (treescan.mask_scan, MASKED | {"reverse": True}, 1),
    "shared": (treescan.mask_scan, MASKED | {"row_axes": {"carry": {"h": 0, "w": None}}}, 1),
    "chunks": (treescan.mask_scan, MASKED | {"chunk": 1}, 1),
    "unskipped": (treescan.mask_scan, MASKED | {"chunk": 0}, 1),
    "remainder": (treescan.mask_scan, MASKED | {"chunk": 2}, 2),
    "nested": (treescan.mask_scan, MASKED | {"chunk": 1, "remat": "nested"}, 2),
    "tiers": (treescan.mask_scan, MASKED | {"chunk": 1, "compact": True}, 3),
    # The remainder has no tiers of its own.
    "tiers, remainder": (treescan.mask_scan, MASKED | {"chunk": 2, "compact": True}, 4),
}


@parametrize("case", COPIES)
def test_copies_of_the_body_in_the_program(case):
    """A body that stands there once does so in a program that is mapped too, once and twice."""
    verb, options, copies = case
    call, given = functools.partial(verb, marked, **options), arrays()
    for _ in range(3 if copies == 1 else 1):
        assert count(jax.make_jaxpr(call)(*given)) == copies
        call, given = jax.vmap(call), jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), given)


def test_program_is_linear_in_the_depth_of_nesting():
    """Where each level traced its body twice, this would be 2 ** 4."""
    traces = 0

    def innermost(carry, x):
        nonlocal traces
        traces += 1
        return jax.lax.cbrt(carry + x), x

    def nest(body):
        return lambda carry, x: treescan.scan(body, carry, jnp.stack([x] * 2))

    body = functools.reduce(lambda body, _: nest(body), range(4), innermost)
    jaxpr = jax.make_jaxpr(lambda xs: treescan.scan(body, jnp.float32(0), xs))(array(3))
    assert count(jaxpr) == 1
    assert traces == 1
