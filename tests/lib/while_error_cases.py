"""Cases of `test_errors.py` about loops that end early: `while_scan`, and `fori` with traced bounds."""

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import XS, case, exported, named
from jax.experimental import io_callback

from treescan import fori, while_scan
from treescan.carries import keys


def step(carry, x):
    return carry + 1, carry


def small(carry):
    return carry < 3


def find_rows(one, body, cond=small, **options):
    return while_scan(cond, body, one * jnp.ones(3), max_length=4, **options)


@case(less=("disable_jit",))
def while_compact_over_a_condition_of_other_rows(one):
    limits = one * jnp.ones(3)
    return find_rows(one, lambda carry, x: (carry + 1, x), lambda carry: limits < 3, compact=True)


@case(less=("disable_jit",))
def while_mutable_array(one):
    ref = jax.new_ref(jnp.zeros(()))

    def body(carry, x):
        ref[...] = ref[...] + 1
        return carry + 1, x

    return while_scan(small, body, one, XS)


@case(less=("disable_jit", "vmap"))
def while_gradient_over_a_callback(one):
    def body(carry, x):
        return carry + io_callback(lambda: np.ones((), np.float32), jax.ShapeDtypeStruct((), jnp.float32)), x

    return jax.grad(lambda one: while_scan(small, body, one, XS).carry)(one)


@case(less=("disable_jit", "vmap"))
def while_gradient_of_a_mapped_custom_vjp(one):
    own = jax.custom_vjp(lambda a: 2 * a)
    own.defvjp(lambda a: (2 * a, None), lambda _, t: (2 * t,))

    def body(carry, x):
        return own(carry), x

    def total(ones):
        return jnp.sum(jax.vmap(lambda one: while_scan(small, body, one, XS).carry)(ones))

    return jax.grad(total)(jnp.stack([one, one]))


@case(less=("disable_jit", "vmap"))
def while_gradient_outside_of_a_named_map(one):
    def body(carry, x):
        return carry + jax.lax.pmax(x, "i"), x

    def mapped(one):
        return jax.vmap(lambda _: while_scan(small, body, one, XS).carry, axis_name="i")(jnp.arange(2))

    return jax.grad(lambda one: jnp.sum(jax.jit(mapped)(one)))(one)


case(less=("disable_jit",))(
    while_max_length_traced=lambda one: jax.jit(lambda most: while_scan(small, step, one, max_length=most))(5),
    fori_max_length_traced=lambda one: jax.jit(
        lambda most: fori(0, most, lambda i, carry: carry + i, one, max_length=most)
    )(5),
    while_condition_with_and=lambda one: while_scan(
        lambda carry: carry[0] < 3 and carry[1] > 0, lambda carry, x: (carry, x), (one, one), XS
    ),
    fori_traced_float=lambda one: jax.jit(lambda n: fori(0, n, lambda i, carry: carry, one, max_length=3))(1.0),
    fori_traced_rows=lambda one: jax.jit(lambda n: fori(n, 3, lambda i, carry: carry, one, max_length=3))(
        jnp.arange(3)
    ),
)

case()(
    while_condition_not_callable=lambda one: while_scan(True, step, one, XS),
    while_remat_auto=lambda one: while_scan(small, step, one, XS, remat="auto"),
    while_rows_of_others=lambda one: find_rows(
        one, lambda carry, x: (carry, x), lambda carry: carry[0] < jnp.arange(4.0)
    ),
    while_rows_not_in_x=lambda one: while_scan(
        small, lambda carry, x: (carry + x, x), one * jnp.ones(3), jnp.zeros((5, 4))
    ),
    while_compact_without_rows=lambda one: while_scan(small, step, one, XS, compact=True),
    while_axes_without_rows=lambda one: while_scan(small, step, one, XS, row_axes={"x": 1}),
    while_without_max_length=lambda one: while_scan(small, step, one),
    while_xs_too_short=lambda one: while_scan(small, step, one, {"a": XS, "b": XS * one}, max_length=5),
    while_max_length_negative=lambda one: while_scan(small, step, one, max_length=-1),
    while_length=lambda one: while_scan(small, step, one, length=3),
    while_fill_held=lambda one: while_scan(small, step, one, XS, fill="hold"),
    while_fill_does_not_fit=lambda one: while_scan(
        small, lambda carry, x: (carry + 1, jnp.int32(1)), one, XS, fill=0.5
    ),
    fori_longer_than_max_length=lambda one: fori(0, 5, lambda i, carry: carry, one, max_length=3),
    while_compact_with_key=lambda one: find_rows(
        one, named("body", lambda carry, x, *, key: (carry, None)), key=jax.random.key(0), compact=True
    ),
    while_valid_without_rows=lambda one: while_scan(small, lambda carry, x, *, valid: (carry + 1, valid), one, XS),
    while_condition_of_nothing=lambda one: while_scan(lambda carry: None, step, one, XS),
    while_condition_without_steps=lambda one: while_scan(lambda carry: carry, step, one, max_length=0),
    while_carry_alone=lambda one: while_scan(
        lambda carry: carry["n"] < 3, lambda carry, x: {"n": carry["n"] + 1}, {"n": one}, XS
    ),
    while_key_not_taken=lambda one: while_scan(small, step, one, XS, key=jax.random.key(0)),
    while_condition_of_keys=lambda one: while_scan(
        lambda carry: carry[0], lambda carry, x: (carry, x), (keys(jax.random.key(0)), one), XS
    ),
    while_carry_of_ints=lambda one: while_scan(small, lambda carry, x: (carry / 2, None), one.astype(int), XS),
    while_carry_changes=lambda one: while_scan(small, lambda carry, x: (carry.astype(jnp.float16), None), one, XS),
    while_unknown_option=lambda one: while_scan(small, step, one, XS, fil=3),
)

case(less=("jit", "disable_jit", "vmap", "grad"))(
    while_symbolic_length=lambda one: exported(lambda xs: while_scan(small, step, 1.0, xs), "n")
)
