"""Cases of `test_errors.py` about `check_finite`."""

from typing import Any

import jax
import jax.numpy as jnp
from error_cases import Given, collector

from treescan import (
    ArgumentError,
    ArgumentTypeError,
    NonFiniteError,
    scan,
    scan_layers,
    while_scan,
)

CASES: list[Given] = []
case = collector(CASES)

XS = jnp.arange(4.0)


def step(carry, x):
    return carry + x, x


def add(carry, x):
    return carry + x


def root(carry, x):
    return jnp.sqrt(carry - x), x


@case(NonFiniteError, less=("jit", "grad", "vmap"))
def check_finite_finds_a_step(one: Any) -> Any:
    return scan(root, one, XS, check_finite=True)


@case(ArgumentTypeError)
def check_finite_forward(one: Any) -> Any:
    return scan(step, one, XS, check_finite="forward")


@case(ArgumentError)
def check_finite_backward_with_truncate(one: Any) -> Any:
    return scan(step, one, XS, truncate=2, check_finite="backward")


@case(ArgumentError, less=("grad", "vmap", "jit", "disable_jit"))
def check_finite_backward_in_forward_mode(one: Any) -> Any:
    return jax.jvp(lambda one: scan(step, one, XS, check_finite="backward"), (one,), (one,))


@case(ArgumentError, less=("grad", "vmap", "jit", "disable_jit"))
def check_finite_backward_of_while_scan_in_forward_mode(one: Any) -> Any:
    def run(one: Any) -> Any:
        return while_scan(lambda h: h < 3, step, one, XS, check_finite="backward").carry

    return jax.jvp(run, (one,), (one,))


@case(ArgumentError)
def check_finite_with_prefetch(one: Any) -> Any:
    return scan_layers(lambda layer, x: (x + layer, x), one, XS, prefetch=lambda layer: layer, check_finite=True)


@case(ArgumentError)
def check_finite_with_a_ref(one: Any) -> Any:
    count = jax.new_ref(jnp.zeros(()))

    def counted(carry, x):
        count[...] += 1.0
        return carry + x, x

    return scan(counted, one, XS, check_finite=True)


@case(ArgumentError)
def check_finite_within_shard_map(one: Any) -> Any:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.PartitionSpec("d")

    def run(xs: Any) -> Any:
        return scan(step, xs[0], xs, check_finite=True)[1]

    return jax.shard_map(run, mesh=mesh, in_specs=spread, out_specs=spread)(one * XS)
