"""Cases of `test_errors.py` about loops that end early: `while_scan`, and `fori` with traced bounds."""

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import Given, collector
from jax.experimental import io_callback

from treescan import (
    ArgumentError,
    ArgumentTypeError,
    BodyError,
    CarryError,
    TracedArgumentError,
    fori,
    while_scan,
)
from treescan.carries import keys

CASES: list[Given] = []
case = collector(CASES)
XS = jnp.arange(3.0)


def step(carry, x):
    return carry + 1, carry


def small(carry):
    return carry < 3


@case(TracedArgumentError, less=("disable_jit",))
def while_max_length_traced(one):
    return jax.jit(lambda most: while_scan(small, step, one, max_length=most))(5)


@case(TracedArgumentError, less=("disable_jit",))
def fori_max_length_traced(one):
    return jax.jit(lambda most: fori(0, most, lambda i, carry: carry + i, one, max_length=most))(5)


@case(BodyError, body=False)
def while_condition_not_callable(one):
    return while_scan(True, step, one, XS)


@case(ArgumentError)
def while_remat_auto(one):
    return while_scan(small, step, one, XS, remat="auto")


@case(BodyError)
def while_condition_of_a_number(one):
    return while_scan(lambda carry: carry, step, one, XS)


@case(BodyError)
def while_condition_of_rows(one):
    return while_scan(lambda carry: carry < 3, lambda carry, x: (carry, x), one * jnp.ones(3), XS)


@case(BodyError)
def while_condition_of_nothing(one):
    return while_scan(lambda carry: None, step, one, XS)


@case(BodyError)
def while_condition_of_a_pair(one):
    return while_scan(lambda carry: (carry < 3, carry), step, one, XS)


@case(BodyError)
def while_condition_of_a_text(one):
    return while_scan(lambda carry: "yes", step, one, XS)


@case(BodyError)
def while_condition_without_steps(one):
    return while_scan(lambda carry: carry, step, one, max_length=0)


@case(BodyError)
def while_carry_alone(one):
    return while_scan(lambda carry: carry["n"] < 3, lambda carry, x: {"n": carry["n"] + 1}, {"n": one}, XS)


@case(CarryError)
def while_carry_changes(one):
    return while_scan(small, lambda carry, x: (carry.astype(jnp.float16), None), one, XS)


@case(ArgumentError)
def while_without_max_length(one):
    return while_scan(small, step, one)


@case(ArgumentError)
def while_xs_all_whole(one):
    return while_scan(small, step, one, XS, in_axes=None)


@case(ArgumentError)
def while_xs_too_short(one):
    return while_scan(small, step, one, {"a": XS, "b": XS * one}, max_length=5)


@case(ArgumentError)
def while_max_length_negative(one):
    return while_scan(small, step, one, max_length=-1)


@case(ArgumentError)
def while_length(one):
    return while_scan(small, step, one, length=3)


@case(ArgumentTypeError)
def while_unknown_option(one):
    return while_scan(small, step, one, XS, fil=3)


@case(ArgumentError)
def while_fill_held(one):
    return while_scan(small, step, one, XS, fill="hold")


@case(ArgumentError)
def while_fill_does_not_fit(one):
    return while_scan(small, lambda carry, x: (carry + 1, jnp.int32(1)), one, XS, fill=0.5)


def while_symbolic_length(one):
    (size,) = jax.export.symbolic_shape("n")
    run = jax.jit(lambda xs: while_scan(small, step, 1.0, xs))
    return jax.export.export(run)(jax.ShapeDtypeStruct((size,), jnp.float32))


case(ArgumentError, less=("jit", "disable_jit", "vmap", "grad"))(while_symbolic_length)


@case(ArgumentError, less=("disable_jit",))
def while_mutable_array(one):
    ref = jax.new_ref(jnp.zeros(()))

    def body(carry, x):
        ref[...] = ref[...] + 1
        return carry + 1, x

    return while_scan(small, body, one, XS)


@case(ArgumentError, less=("disable_jit", "vmap"))
def while_gradient_over_a_callback(one):
    def body(carry, x):
        return carry + io_callback(lambda: np.ones((), np.float32), jax.ShapeDtypeStruct((), jnp.float32)), x

    return jax.grad(lambda one: while_scan(small, body, one, XS).carry)(one)


@case(ArgumentError, less=("disable_jit", "vmap"))
def while_gradient_of_a_mapped_custom_vjp(one):
    own = jax.custom_vjp(lambda a: 2 * a)
    own.defvjp(lambda a: (2 * a, None), lambda _, t: (2 * t,))

    def body(carry, x):
        return own(carry), x

    def total(ones):
        return jnp.sum(jax.vmap(lambda one: while_scan(small, body, one, XS).carry)(ones))

    return jax.grad(total)(jnp.stack([one, one]))


@case(BodyError)
def while_key_not_taken(one):
    return while_scan(small, step, one, XS, key=jax.random.key(0))


@case(BodyError)
def while_condition_of_keys(one):
    return while_scan(lambda carry: carry[0], lambda carry, x: (carry, x), (keys(jax.random.key(0)), one), XS)


@case(ArgumentError)
def fori_longer_than_max_length(one):
    return fori(0, 5, lambda i, carry: carry, one, max_length=3)


@case(ArgumentTypeError, less=("disable_jit",))
def fori_traced_float(one):
    return jax.jit(lambda n: fori(0, n, lambda i, carry: carry, one, max_length=3))(1.0)


@case(ArgumentTypeError, less=("disable_jit",))
def fori_traced_rows(one):
    return jax.jit(lambda n: fori(n, 3, lambda i, carry: carry, one, max_length=3))(jnp.arange(3))
