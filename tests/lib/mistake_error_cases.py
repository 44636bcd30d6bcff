"""Cases of `test_errors.py` about what new users write first, and what the library can guess that they mean."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import XS, case, named
from jax.experimental import io_callback

import treescan
from treescan import accumulate, fold, fold_layers, fori, mask_scan, scan, while_scan
from treescan.carries import buffer, ema

ROWS = jnp.ones((5, 3))
LENGTHS = np.array([5, 2, 1])
KEY = jax.random.key(0)


def step(carry, x):
    return carry + x, None


def add(carry, x):
    return carry + x


def layers_of(one: Any) -> list[Any]:
    return [{"w": one * jnp.eye(4), "b": jnp.zeros(4)} for _ in range(3)]


def layers_of_one() -> Any:
    return jnp.ones((3, 4, 4))


def block(layer, x):
    return x @ layer["w"] + layer["b"]


def sequences() -> list[Any]:
    return [np.ones(3), np.ones(2)]


class Pair(NamedTuple):
    w: Any
    b: Any


class Cell:
    def __call__(self, carry, x):
        return carry + x, None


def per_row(one):
    return one * jnp.arange(1.0, 9.0)


@case(less=("disable_jit",))
def while_compact_over_closed_over_rates(one):
    a = per_row(one)
    return while_scan(lambda x: x > 0, lambda x, _: (x - 0 * a, None), jnp.ones(8), max_length=40, compact=(4,))


@case(less=("disable_jit",))
def while_compact_over_rows_in_the_condition(one):
    a = per_row(one)
    return while_scan(lambda x: x < a, lambda x, _: (x + 1, None), jnp.ones(8), max_length=40, compact=(4,))


def tell(carry: Any) -> Any:
    io_callback(lambda value: None, None, carry)
    return carry + 1


def with_dropout(run: Callable[[Any], Any]) -> Any:
    from flax import nnx  # only these cases need it, and it is slow to import

    return run(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


@case(less=("disable_jit",))
def linen_module_in_a_body(one):
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, xs):
            return fold(lambda h, x: linen.Dense(3)(h) + x, jnp.ones(3), xs)

    return Model().init(jax.random.key(0), one * jnp.ones((4, 3)))


@case()
def model_as_y(one):
    import equinox as eqx

    model = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))
    return scan(lambda carry, x: (carry + x, model), one, XS)


case()(
    # A list in place of a stack.
    forgotten_stack_in_fold_layers=lambda one: fold_layers(block, jnp.ones(4), layers_of(one)),
    forgotten_stack_with_xs=lambda one: fold_layers(
        lambda layer, x, bias: block(layer, x) + bias, jnp.ones(4), layers_of(one), XS
    ),
    forgotten_stack_of_steps=lambda one: fold(
        lambda carry, x: carry + x["a"], one * jnp.ones(2), [{"a": jnp.ones(4)}] * 3
    ),
    forgotten_stack_of_steps_with_length=lambda one: scan(step, one * jnp.ones(4), [jnp.ones(4)] * 3, length=3),
    sequences_in_a_list=lambda one: mask_scan(step, one * jnp.ones(2), [jnp.ones(3), jnp.ones(2)], lengths=[3, 2]),
    # A batch in a verb that does not know its lengths.
    padded_in_fold=lambda one: fold(add, one * jnp.ones(2), treescan.pad(sequences())),
    padded_in_scan_beside_other_xs=lambda one: scan(step, one * jnp.ones(2), (treescan.pad(sequences()), XS)),
    padded_in_while_scan=lambda one: while_scan(
        lambda carry: jnp.all(carry < 3), step, one * jnp.ones(2), {"a": treescan.pad(sequences())}
    ),
    padded_in_chunk_map=lambda one: treescan.chunk_map(lambda batch: batch.data, treescan.pad(sequences()), 2),
    packed_in_accumulate=lambda one: accumulate(add, one * jnp.ones(1), treescan.pack(sequences())),
    # options
    length_of_rows=lambda one: mask_scan(step, one * jnp.ones(3), ROWS, length=LENGTHS),
    length_of_a_list_of_rows=lambda one: mask_scan(step, one * jnp.ones(3), ROWS, length=[5, 2, 1]),
    max_length_of_rows=lambda one: while_scan(
        lambda carry: carry < 3, step, one * jnp.ones(3), ROWS, max_length=LENGTHS
    ),
    lengths_by_position=lambda one: mask_scan(step, one * jnp.ones(3), ROWS, LENGTHS),
    max_length_by_position=lambda one: while_scan(lambda carry: carry < 3, step, one, XS, 3),
    pad_value=lambda one: treescan.pad(sequences(), value=-1),
    stack_axis=lambda one: treescan.stack(layers_of(one), axis=1),
    stack_by_position=lambda one: treescan.stack(*layers_of(one)),
    chunk_map_by_position=lambda one: treescan.chunk_map(add, one * XS, XS, 2),
    last_by_position=lambda one: treescan.last(ROWS, treescan.pad(sequences()), False),
    unpack_without_batch=lambda one: treescan.unpack(treescan.pack(sequences())),
    set_layer_twice=lambda one: treescan.set_layer({"b": one * XS}, 0, {"b": one}, i=1),
    init_layers_with_an_option_of_init=lambda one: treescan.init_layers(lambda key, width: one, KEY, 3, width=8),
    # What comes in place of xs, or of the body.
    sequences_in_a_long_list=lambda one: scan(step, one, [jnp.ones(i % 3) for i in range(50)]),
    xs_is_a_length=lambda one: fold(add, one, 10),
    xs_is_a_length_of_while_scan=lambda one: while_scan(lambda carry: carry < 3, step, one, 10),
    xs_is_the_carry=lambda one: fold(add, XS, one),
    init_and_xs_exchanged=lambda one: fold(lambda h, x: {"a": h["a"] + x}, XS, {"a": one * jnp.ones(5)}),
    carry_of_another_dtype_than_xs=lambda one: scan(
        lambda h, x: (jnp.tanh(h.astype(x.dtype) + x), h), jnp.zeros((2, 3), jnp.bfloat16), one * jnp.ones((5, 2, 3))
    ),
    layers_with_a_cache=lambda one: fold_layers(block, one * jnp.ones(4), treescan.stack(layers_of(one)), cache=one),
    axis_of_time_of_scan=lambda one: scan(step, one, XS, time_axis=1),
    done_flags=lambda one: treescan.mask_scan(step, one * jnp.ones(2), ROWS, done=True),
    x_and_layers_exchanged=lambda one: fold_layers(block, treescan.stack(layers_of(one)), jnp.ones(4)),
    carry_that_is_layers=lambda one: fold_layers(lambda w, x: x @ w, one * jnp.ones((3, 4, 4)), jnp.ones((2, 4))),
    xs_of_texts=lambda one: scan(step, one, {"x": XS, "words": np.array(["a", "b", "c"])}),
    layers_of_texts=lambda one: fold_layers(block, one * jnp.ones(4), {"w": np.array(["a", "b"])}),
    xs_of_a_range=lambda one: scan(step, one, range(2), length=2),
    stack_one_named_tuple=lambda one: treescan.stack(Pair(one, one)),
    lengths_of_other_rows_in_fold=lambda one: fold(add, one * jnp.ones(3), ROWS, lengths=[5, 2]),
    remat_of_bytes=lambda one: scan(step, one, XS, remat=1_000_000),
    remat_of_a_plan_as_policy=lambda one: scan(step, one, XS, remat=treescan.Remat("nested")),
    ema_alpha=lambda one: ema(one, alpha=0.1),
    unpad_with_a_packed=lambda one: treescan.unpad(one * ROWS, treescan.pack(sequences())),
    body_with_is_first=lambda one: mask_scan(
        named("step", lambda carry, x, *, is_first: (carry + x, None)), one * jnp.ones(3), ROWS, lengths=LENGTHS
    ),
    while_condition_with_a_last_axis=lambda one: while_scan(
        lambda carry: carry[:, None] < 3, step, one * jnp.ones(3), ROWS
    ),
    state_with_layers_behind=lambda one: fold_layers(
        lambda layer, x, state: (x, state), one * jnp.ones(4), layers_of_one(), state=jnp.ones((2, 3, 8))
    ),
    state_of_one_layer=lambda one: fold_layers(
        lambda layer, x, state: (x, state), one * jnp.ones((2, 4)), layers_of_one(), state=jnp.ones((2, 8))
    ),
    linear_exchanged=lambda one: treescan.linear_scan(one * ROWS, jnp.full((5, 1), 0.5)),
    offset_beyond_int32=lambda one: scan(step, one, XS, offset=2**40),
    remat_of_the_name_of_a_policy=lambda one: scan(step, one, XS, remat="dots_saveable"),
    plan_remat_of_a_pair_as_text=lambda one: treescan.plan_remat(step, one, XS, remat="step", pair="no"),
    carry_none_returned_by_a_method=lambda one: scan(lambda c, x: (c["seen"].append(x), None), {"seen": [one]}, XS),
    body_is_a_class=lambda one: scan(Cell, one, XS),
    buffer_batch_int=lambda one: buffer(one, 8, batch=3),
    buffer_batch_str=lambda one: buffer(one, 8, batch="rows"),
    # The condition, rows, and what is returned.
    while_condition_of_two=lambda one: while_scan(lambda carry, x: carry < 3, step, one, XS),
    while_condition_of_a_keyword=lambda one: while_scan(lambda carry, *, x: carry < 3, step, one, XS),
    pair_swapped_with_the_given_carry=lambda one: scan(
        lambda h, x: (x.sum(-1), h), one * jnp.ones((2, 3)), jnp.ones((5, 2, 3))
    ),
)

case(less=("disable_jit",))(
    dropout_closed_over=lambda one: with_dropout(lambda dropout: scan(lambda h, x: (dropout(h) + x, None), one, XS)),
    dropout_closed_over_by_the_condition=lambda one: with_dropout(
        lambda dropout: while_scan(lambda h: dropout(h) < 3, step, one, XS)
    ),
    buffer_capacity_traced=lambda one: jax.jit(lambda capacity: buffer(one, capacity))(8),
    fori_callback_under_vmap=lambda one: jax.vmap(
        lambda n: fori(0, n, lambda i, carry: tell(carry), one, max_length=8)
    )(jnp.arange(3)),
    while_callback_under_vmap=lambda one: jax.vmap(
        lambda x: while_scan(lambda c: c < 5, lambda c, _: (tell(c), None), x, max_length=8).carry
    )(one * jnp.arange(3.0)),
)
