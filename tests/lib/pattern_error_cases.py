"""Cases of `test_errors.py` about blocks that run by turns, and about the state of layers."""

from typing import Any

import jax
import jax.numpy as jnp
from error_cases import XS as X, case, named, on_mesh
from layer_error_cases import Dense, block, denses, folded, local, on_rows, scanned, two, with_cache

from treescan import fold_layers, scan_layers


def decode(layer, x, cache):
    return x @ layer["w"], {"k": cache["k"] + x, "v": cache["v"]}


def caches(one: Any, n: int = 4) -> Any:
    return {"k": one * jnp.zeros((n, 3)), "v": jnp.zeros((n, 3))}


@case()
def pattern_in_axes_not_there(one):
    caches = [{"k": one * jnp.zeros((4, 3))}, {"k": one * jnp.zeros(4)}]
    return scan_layers([with_cache, with_cache], X, two(one), caches, in_axes=[0, {"k": 1}])


def half(layer, h):
    return h.astype(jnp.bfloat16), None


@case()
def state_of_another_type_is_returned(one):
    def block(layer, x, cache):
        return x, {"k": cache["k"].astype(jnp.bfloat16), "v": jnp.concatenate([cache["v"], x[:1]])}

    return folded(one, block, state=caches(one))


@case()
def layers_with_mutable_arrays(one):
    ref = jax.new_ref(jnp.ones(4))
    return scanned(one, with_cache, xs=ref, args=(ref,))


on_mesh()(state_split=lambda one: folded(one, decode, state=caches(one) | {"k": on_rows(4, 3)}))

case()(
    state_is_not_returned=lambda one: folded(
        one, named("block", lambda layer, x, cache: decode(layer, x, cache)[0]), state=caches(one)
    ),
    state_is_not_returned_beside_y=lambda one: scanned(
        one, named("block", lambda layer, x, cache: decode(layer, x, cache)), state=caches(one)
    ),
    state_returned_with_a_y_in_fold_layers=lambda one: folded(
        one, named("block", lambda layer, x, cache: (*decode(layer, x, cache), x)), state=caches(one)
    ),
    pattern_out_axes_not_there=lambda one: scan_layers(
        [local, named("second", lambda layer, x: (x, x.mean()))], X, two(one), out_axes=1
    ),
    pattern_second_block_without_key=lambda one: scan_layers(
        [lambda layer, x, *, key: (x, None), named("second", lambda layer, x: (x, None))],
        X,
        two(one),
        key=jax.random.key(0),
    ),
    pattern_of_no_blocks=lambda one: scan_layers([], X, []),
    pattern_with_one_stack=lambda one: scanned(one, [local, block]),
    pattern_with_a_named_tuple_of_stacks=lambda one: scan_layers([local, block], X, Dense(denses(one), denses(one))),
    state_of_another_depth_in_a_pattern=lambda one: fold_layers(
        [decode, decode], X, two(one), state=[caches(one), caches(one, 5)]
    ),
    state_that_is_no_sequence_in_a_pattern=lambda one: fold_layers([decode, decode], X, two(one), state=caches(one)),
    state_with_too_few_stacks=lambda one: fold_layers([decode, decode], X, two(one), state=[caches(one)]),
    pattern_with_too_few_stacks=lambda one: scan_layers([local, local, block], X, two(one)),
    pattern_with_one_xs=lambda one: scan_layers([with_cache, with_cache], X, two(one), {"k": one * jnp.ones((4, 3))}),
    pattern_of_uneven_stacks=lambda one: scan_layers(
        [local, local, block], X, [denses(one, 4), denses(one, 2), denses(one, 3)]
    ),
    pattern_with_too_many_in_axes=lambda one: scan_layers(
        [local, block], X, two(one), [None, None], in_axes=(0, 0, None)
    ),
    pattern_with_remat_of_another_length=lambda one: scan_layers([local, block], X, two(one), remat=["step"]),
    pattern_with_nested_in_a_sequence=lambda one: scan_layers([local, block], X, two(one), remat=["step", "nested"]),
    state_beside_a_save_that_is_no_prefix=lambda one: scanned(
        one,
        named("block", lambda layer, x, cache: (*decode(layer, x, cache), {"mean": x.mean()})),
        state=caches(one),
        remat="step",
        save={"sum": "last"},
    ),
    pattern_second_block_computes_in_half=lambda one: scan_layers([local, half, local], one * X, [denses(one)] * 3),
    pattern_second_block_computes_in_half_once_each=lambda one: scan_layers(
        [local, half], one * X, [denses(one, 1), denses(one, 0)]
    ),
    state_of_another_structure_is_returned=lambda one: folded(
        one,
        named("block", lambda layer, x, cache: (x, {"k": cache["k"], "position": one})),
        state=caches(one),
        remat="step",
    ),
    state_and_x_are_swapped=lambda one: folded(
        one, named("block", lambda layer, x, cache: (cache, x)), state=caches(one)
    ),
)
