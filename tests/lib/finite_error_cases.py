"""Cases of `test_errors.py` about `check_finite`."""

import jax
import jax.numpy as jnp
from error_cases import case, mesh_of, named, over_devices

from treescan import ArgumentError, ArgumentTypeError, NonFiniteError, scan, scan_layers, while_scan

XS = jnp.arange(4.0)


def step(carry, x):
    return carry + x, x


def root(carry, x):
    return jnp.sqrt(carry - x), x


@case(ArgumentError)
def check_finite_with_a_ref(one):
    count = jax.new_ref(jnp.zeros(()))

    def counted(carry, x):
        count[...] += 1.0
        return carry + x, x

    return scan(counted, one, XS, check_finite=True)


case(NonFiniteError, less=("jit", "grad", "vmap"))(
    check_finite_finds_a_step=lambda one: scan(root, one, XS, check_finite=True)
)

case(ArgumentTypeError)(check_finite_forward=lambda one: scan(step, one, XS, check_finite="forward"))

case(ArgumentError)(
    check_finite_backward_with_truncate=lambda one: scan(step, one, XS, truncate=2, check_finite="backward"),
    check_finite_with_prefetch=lambda one: scan_layers(
        lambda layer, x: (x + layer, x), one, XS, prefetch=lambda layer: layer, check_finite=True
    ),
    check_finite_within_shard_map=lambda one: over_devices(
        lambda xs: scan(step, xs[0], xs, check_finite=True)[1], mesh_of(1)
    )(one * XS),
)

case(ArgumentError, less=("grad", "vmap", "jit", "disable_jit"))(
    check_finite_backward_in_forward_mode=lambda one: jax.jvp(
        lambda one: scan(step, one, XS, check_finite="backward"), (one,), (one,)
    ),
    check_finite_backward_of_while_scan_in_forward_mode=lambda one: jax.jvp(
        named("run", lambda one: while_scan(lambda h: h < 3, step, one, XS, check_finite="backward").carry),
        (one,),
        (one,),
    ),
)
