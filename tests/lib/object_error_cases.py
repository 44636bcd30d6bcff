"""Cases of `test_errors.py` about leaves that JAX does not know: objects that hold arrays, generators, records."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import XS, case

import treescan
from treescan import chunk_map, fold, fold_layers, fori, init_layers, mask_scan, pad, scan, stack, stream, while_scan


@dataclasses.dataclass
class State:
    h: Any


class Count:
    value = 0.0

    def __repr__(self) -> str:
        return "Count"


def step(carry, x):
    return carry + x, None


def generator(carry, x):
    yield carry + x, None


async def coroutine(carry, x):
    return carry + x, None


def counts(count, x):
    count.value = count.value + x
    return count, count.value


def twice(key):
    return State(key)


case()(
    object_in_init=lambda one: scan(lambda s, x: (State(s.h + x), None), State(one), XS),
    object_in_xs=lambda one: scan(step, one, {"pair": State(one)}, length=2),
    object_in_layers=lambda one: fold_layers(lambda w, x: x, one, [State(one), State(one)]),
    object_in_state=lambda one: fold_layers(lambda w, x: x, one, XS, state=State(one)),
    object_stacked=lambda one: stack([State(one), State(one)]),
    object_padded=lambda one: pad([State(np.ones(3))]),
    object_changed_in_place=lambda one: scan(counts, Count(), XS),
    object_made_by_init_layers=lambda one: init_layers(twice, jax.random.key(0), 2),
    body_with_yield=lambda one: scan(generator, one, XS),
    fold_with_yield=lambda one: fold(generator, one, XS),
    xs_ragged=lambda one: scan(step, one, [[1.0, 2.0], [3.0]]),
    xs_of_objects=lambda one: scan(step, one, np.array([1.0, 2.0], object)),
    xs_of_records=lambda one: scan(step, one, np.zeros(3, [("a", np.float32)])),
    in_axes_without_xs=lambda one: scan(step, one, length=3, in_axes=1),
    reduce_with_out_axes=lambda one: chunk_map(jnp.sum, XS, 2, reduce="sum", out_axes=1),
    out_axes_beyond_what_is_stacked=lambda one: scan(
        lambda c, x: (c, {"last": c, "all": x}), one, XS, save={"last": "last", "all": "all"}, out_axes=7
    ),
    fill_misspelt_of_while=lambda one: while_scan(lambda c: c < 3, step, one, XS, fill="holdd"),
    fori_misspelt=lambda one: fori(0, 3, lambda i, c: c, one, max_len=3),
    mask_as_a_parameter=lambda one: mask_scan(lambda c, x, mask: (c, x), one, XS, lengths=1),
    carry_becomes_complex=lambda one: scan(lambda c, x: (jax.lax.complex(c, x), None), one, XS),
    carry_bool_becomes_int=lambda one: scan(lambda c, x: (c.astype(jnp.int32), None), one > 0, XS),
    unpad_packed=lambda one: treescan.unpad(treescan.pack([np.ones(2)])),
    pad_of_numbers=lambda one: pad([1.0, 2.0]),
    describe_of_lax_scan=lambda one: treescan.describe(jax.lax.scan, step, one, XS),
)
case(less=("disable_jit",))(  # where the message shows the values that the object holds
    object_as_y=lambda one: scan(lambda c, x: (c, State(x)), one, XS),
    object_as_carry=lambda one: fold(lambda c, x: State(c), one, XS),
)
case(less=("jit", "vmap", "grad"))(
    stream_of_a_range=lambda one: stream(step, 0.0, range(10), part=4),
    stream_source_returns_nothing=lambda one: stream(step, 0.0, lambda start, n: None, part=4, length=8),
)
