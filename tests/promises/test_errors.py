"""The text of every error: one golden file each, the same text in every mode of JAX.

A case is a function that makes treescan raise; `golden/<its name>.txt` is what the user reads. `UPDATE_GOLDEN=1`
rewrites the files: look at each as a user would. Cases are given the scalar 1, which the modes trace, batch or
differentiate; they call `scan` by its name in this module, for which `jax.lax.scan` is put in to see what it raises.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import carry_error_cases
import chunk_error_cases
import describe_error_cases
import finite_error_cases
import jax
import jax.numpy as jnp
import layer_error_cases
import lift_error_cases
import mistake_error_cases
import numpy as np
import progress_error_cases
import pytest
import while_error_cases
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

import treescan
from treescan import (
    ArgumentError,
    ArgumentTypeError,
    BodyError,
    CarryError,
    SignatureError,
    TracedArgumentError,
    TreescanError,
    accumulate,
    fold,
    fori,
    mask_scan,
    scan,
)
from treescan._text import WIDTH, wrap

pytestmark = [pytest.mark.quick, pytest.mark.devices]

GOLDEN = Path(__file__).parents[1] / "golden"
PACKAGE = Path(treescan.__file__).parent

MODES: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "eager": lambda run: run(jnp.ones(())),
    "jit": lambda run: jax.jit(run)(jnp.ones(())),
    "disable_jit": lambda run: _without_jit(run),
    "vmap": lambda run: jax.vmap(run)(jnp.ones(2)),
    "grad": lambda run: jax.grad(lambda one: run(one)[0])(jnp.ones(())),
}


def _without_jit(run: Callable[[Any], Any]) -> Any:
    with jax.disable_jit():
        return run(jnp.ones(()))


class Case(NamedTuple):
    """What raises; what it raises; whether `jax.lax.scan` raises too; in which modes and under what it can be run.

    And whether there is a body to name.
    """

    run: Callable[[Any], Any]
    error: type[TreescanError]
    lax: bool
    modes: frozenset[str]
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    body: bool

    def provoke(self, mode: str = "eager") -> None:
        with self.context():
            MODES[mode](self.run)


CASES: dict[str, Case] = {}


def case(
    error: type[TreescanError],
    *,
    lax: bool = False,
    less: tuple[str, ...] = (),
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    body: bool = True,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def register(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CASES[run.__name__] = Case(run, error, lax, frozenset(MODES) - set(less), context, body)
        return run

    return register


def step(carry: Any, x: Any) -> tuple[Any, Any]:
    return carry, x


XS = jnp.arange(3.0)


class Lstm(NamedTuple):
    h: Any
    c: Any


class Gru(NamedTuple):
    h: Any
    c: Any


def encode(x: Any) -> Any:
    return x


def decode(x: Any) -> Any:
    return x


@functools.partial(jax.tree_util.register_dataclass, data_fields=["h"], meta_fields=["depth"])
@dataclasses.dataclass(frozen=True)
class Tower:
    h: Any
    depth: int


# --- the pair ---------------------------------------------------------------------------------------------------------


@case(BodyError, lax=True)
def pair_carry_only(one):
    def step(state, x):
        return {"h": state["h"] + x}

    return scan(step, {"h": one}, XS)


@case(BodyError, lax=True)
def pair_carry_only_of_two(one):
    return scan(lambda carry, x: (carry[0] + x, carry[1]), (one, one), XS)


@case(BodyError, lax=True)
def pair_none(one):
    def step(carry, x):
        print_later = carry + x
        del print_later

    return scan(step, one, XS)


@case(BodyError, lax=True)
def pair_triple(one):
    return scan(lambda carry, x: (carry, x, x), one, XS)


@case(BodyError, lax=True)
def pair_array(one):
    return scan(lambda carry, x: carry["h"] + x, {"h": one}, XS)


@case(CarryError, lax=True)
def pair_swapped(one):
    def step(state, x):
        h = Lstm(state.h + x, state.c)
        return h.h, h

    return scan(step, Lstm(one, one), XS)


@case(CarryError, lax=True)
def pair_none_for_the_carry(one):
    return scan(lambda carry, x: (None, x), one, XS)


@case(CarryError, lax=True)
def pair_drops_the_batch(one):
    def step(h, x):
        h = h + x
        return h[0], h

    return scan(step, one * jnp.ones((2, 4)), ROWS)


@case(BodyError, lax=True)
def not_callable(one):
    return scan({"h": one}, step, XS)


@case(BodyError)
def not_callable_in_fori(one):
    return fori(0, 3, one, lambda i, carry: carry)


@case(BodyError)
def pair_in_fold(one):
    return fold(step, one, XS)


@case(BodyError)
def pair_in_accumulate(one):
    return accumulate(step, one, XS)


@case(BodyError)
def pair_in_fori(one):
    return fori(0, 3, lambda i, carry: (carry, i), one)


@case(BodyError, lax=True)
def y_static(one):
    return scan(lambda carry, x: (carry, {"x": x, "label": "a"}), one, XS)


@case(BodyError)
def y_static_in_accumulate(one):
    return accumulate(lambda carry, x: carry, (one, "a"), XS)


@case(BodyError)
def y_static_function_in_accumulate(one):
    return accumulate(lambda state, x: state, {"f": encode, "h": one}, XS)


@case(ArgumentError)
def packed_within_xs_with_its_mask(one):
    packed = treescan.pack([words(3), words(2)])
    return mask_scan(step, one * jnp.ones(1), {"words": packed}, mask=packed.mask)


@case(ArgumentError)
def packed_within_padded(one):
    packed = treescan.pack([words(3), words(2)])
    return mask_scan(step, one * jnp.ones(2), treescan.Padded({"words": packed}, LENGTHS))


@case(ArgumentError)
def packed_beside_padded(one):
    sequences = [words(3), words(2)]
    return mask_scan(step, one * jnp.ones(2), (treescan.pad(sequences), treescan.pack(sequences, rows=2)))


@case(ArgumentError)
def padded_beside_one_of_other_rows(one):
    batches = {"a": treescan.pad([words(3), words(2)]), "b": treescan.pad([words(3), words(1)])}
    return mask_scan(step, one * jnp.ones(2), batches)


@case(ArgumentError, less=("disable_jit",))
def padded_beside_one_of_traced_rows(one):
    padded = treescan.pad([words(3), words(2)])
    run = jax.jit(lambda first, second: mask_scan(step, one * jnp.ones(2), (first, second)))
    return run(padded, padded)


@case(ArgumentError)
def packed_beside_one_that_has_inits_too(one):
    first, second = (treescan.pack([words(3), words(2)], init=[value, value]) for value in (0.0, 1.0))
    return mask_scan(step, one * jnp.ones(1), (first, second))


@case(ArgumentError)
def packed_with_in_axes_of_its_data(one):
    packed = treescan.pack([np.ones((3, 4)), np.ones((2, 4))])
    return mask_scan(step, one * jnp.ones((1, 4)), (packed, ROWS), in_axes=(1, 0))


# --- the carry: structure ---------------------------------------------------------------------------------------------


@case(CarryError, lax=True)
def carry_keys(one):
    def step(carry, x):
        return {"h": carry["h"], "step": x}, None

    return scan(step, {"h": one, "count": 0, "cache": {"k": one}}, XS)


@case(CarryError, lax=True)
def carry_tuple_for_namedtuple(one):
    def step(state, x):
        h, c = state
        return (h + x, c), h

    return scan(step, Lstm(one, one), XS)


@case(CarryError, lax=True)
def carry_other_namedtuple(one):
    return scan(lambda state, x: (Gru(*state), x), Lstm(one, one), XS)


@case(CarryError, lax=True)
def carry_namedtuple_for_tuple(one):
    return scan(lambda state, x: (Lstm(*state), x), (one, one), XS)


@case(CarryError, lax=True)
def carry_list_for_tuple(one):
    return scan(lambda carry, x: ([carry[0], carry[1]], x), (one, one), XS)


@case(CarryError, lax=True)
def carry_list_length(one):
    return scan(lambda carry, x: ([*carry, x], None), [one], XS)


@case(CarryError, lax=True)
def carry_none_given(one):
    return scan(lambda carry, x: ({"h": x, "best": x}, None), {"h": one, "best": None}, XS)


@case(CarryError, lax=True)
def carry_none_returned(one):
    return scan(lambda carry, x: ({"h": None}, None), {"h": one}, XS)


@case(CarryError)
def carry_static_changed(one):
    return scan(lambda carry, x: ((carry[0], decode, "test"), None), (one, encode, "train"), XS)


@case(CarryError, lax=True)
def carry_metadata_changed(one):
    return scan(lambda tower, x: (Tower(tower.h + x, tower.depth + 1), None), Tower(one, 0), XS)


@case(CarryError, lax=True)
def carry_other_dict(one):
    return scan(lambda carry, x: (collections.OrderedDict(carry), None), {"h": one}, XS)


@case(CarryError, lax=True)
def carry_static_for_array(one):
    return scan(lambda carry, x: ("done", None), one, XS)


# --- the carry: types -------------------------------------------------------------------------------------------------


@case(CarryError, lax=True)
def carry_grows(one):
    def step(tokens, x):
        return jnp.append(tokens, x), None

    return scan(step, one * XS, XS)


@case(CarryError, lax=True)
def carry_rank(one):
    return scan(lambda carry, x: (carry[None], None), one * XS, XS)


@case(CarryError, lax=True)
def carry_shape(one):
    return scan(lambda carry, x: (carry[:, :2], None), one * jnp.ones((2, 5)), XS)


@case(CarryError, lax=True)
def carry_dtype(one):
    class Model(NamedTuple):
        h: Any

    def step(carry, x):
        return Model(carry.h.astype(jnp.bfloat16)), None

    return scan(step, Model(one * XS), XS)


@case(CarryError, lax=True)
def carry_shape_and_dtype(one):
    return scan(lambda carry, x: (carry.astype(jnp.bfloat16)[:2], None), one * XS, XS)


@case(CarryError, lax=True)
def carry_several_leaves(one):
    def step(carry, x):
        h = carry["h"].astype(jnp.bfloat16)
        cache = {"k": jnp.append(carry["cache"]["k"], x), "v": [None, carry["cache"]["v"][1]]}
        return {"h": h, "cache": cache}, None

    return scan(step, {"h": one, "cache": {"k": one * XS, "v": [one, one]}, "count": jnp.int32(0)}, XS)


@case(CarryError, lax=True)
def carry_weak_type(one):
    def step(carry, x):
        return {"h": carry["h"], "count": (carry["count"] < 1).astype(jnp.int8)}, None

    with jax.numpy_dtype_promotion("standard"):
        return scan(step, {"h": one, "count": 0.0}, XS)


@case(CarryError, lax=True)
def carry_key_data(one):
    return scan(lambda carry, x: ((jax.random.key_data(carry[0]), x), None), (jax.random.key(0), one), XS)


@case(CarryError, lax=True)
def carry_key_impl(one):
    other = jax.random.key(0, impl="rbg")
    return scan(lambda carry, x: ((other, x), None), (jax.random.key(0), one), XS)


# --- the carry: where it lives ----------------------------------------------------------------------------------------


def on_mesh() -> contextlib.AbstractContextManager[Any]:
    return jax.set_mesh(jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,)))


@case(CarryError, lax=True, context=on_mesh)
def carry_sharding(one):
    def step(carry, x):
        return {"h": jax.sharding.reshard(carry["h"], PartitionSpec(None))}, None

    return scan(step, {"h": jax.sharding.reshard(jnp.ones(4), PartitionSpec("rows"))}, XS)


def over_devices(function: Callable[..., Any]) -> Any:
    whole = PartitionSpec()
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=(whole,), out_specs=whole)


@case(CarryError, lax=True)
def carry_begins_to_vary(one):
    def step(carry, x):
        return {"h": carry["h"] + jax.lax.axis_index("devices")}, None

    return over_devices(lambda xs: jax.lax.psum(scan(step, {"h": jnp.int32(0)}, xs)[0]["h"], "devices"))(XS)


@case(CarryError, lax=True)
def carry_ceases_to_vary(one):
    def step(carry, x):
        return {"h": jax.lax.psum(carry["h"], "devices")}, None

    return over_devices(lambda xs: scan(step, {"h": jax.lax.axis_index("devices")}, xs)[0]["h"])(XS)


# --- xs and the length ------------------------------------------------------------------------------------------------


@case(ArgumentError, lax=True)
def xs_list_of_scalars(one):
    return scan(step, one, [1.0, 2.0, 3.0])


@case(ArgumentError, lax=True)
def xs_nested_list(one):
    return scan(step, one, {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [one, one]})


@case(ArgumentError, lax=True)
def xs_long_list(one):
    return scan(step, one, list(range(1000)))


@case(ArgumentError, lax=True)
def xs_without_axis(one):
    return scan(step, one, {"x": XS, "scale": one, "bias": 2.0})


@case(ArgumentError, lax=True)
def xs_sizes_differ(one):
    return scan(step, one, {"x": one * jnp.ones((3, 2)), "y": jnp.ones((4, 2)), "z": jnp.ones((3, 1))})


@case(ArgumentError)
def xs_sizes_differ_along_axes(one):
    return scan(step, one, {"x": one * jnp.ones((2, 3)), "y": jnp.ones((4, 2))}, in_axes={"x": 1, "y": 0})


@case(ArgumentError, context=on_mesh)
def xs_sharded(one):
    x = jax.sharding.reshard(jnp.ones((3, 4)), PartitionSpec(None, "rows"))
    return scan(step, one, {"x": x, "y": jnp.ones((3, 4))}, in_axes=1)


@case(ArgumentError, lax=True, context=on_mesh)
def xs_sharded_along_time(one):
    return scan(step, one, jax.sharding.reshard(jnp.ones((4, 3)), PartitionSpec("rows")))


@case(ArgumentError, lax=True)
def length_missing(one):
    return scan(step, one)


@case(ArgumentError)
def length_missing_all_whole(one):
    return scan(step, one, {"table": XS}, in_axes=None)


@case(ArgumentError, lax=jax.__version_info__ >= (0, 9))  # before, lax.scan stumbles over an assertion of its own
def length_conflict(one):
    return scan(step, one, XS, 5)


@case(ArgumentError)
def length_negative(one):
    return scan(step, one, None, -1)


@case(ArgumentTypeError)
def length_float(one):
    return scan(step, one, None, 3.0)


@case(ArgumentTypeError)
def length_bool(one):
    return scan(step, one, None, True)


@case(ArgumentTypeError)
def length_str(one):
    return scan(step, one, None, "3")


@case(TracedArgumentError, lax=True, less=("disable_jit",))
def length_traced(one):
    return jax.jit(lambda n: scan(step, one, None, n))(jnp.int32(3))


# --- options ----------------------------------------------------------------------------------------------------------


@case(ArgumentTypeError)
def reverse_int(one):
    return scan(step, one, XS, reverse=1)


@case(ArgumentTypeError)
def reverse_str(one):
    return scan(step, one, XS, None, "yes")


@case(ArgumentError, lax=True)
def unroll_negative(one):
    return scan(step, one, XS, unroll=-2)


@case(ArgumentTypeError)
def unroll_float(one):
    return scan(step, one, XS, unroll=2.0)


@case(TracedArgumentError, lax=True, less=("disable_jit",))
def unroll_traced(one):
    return jax.jit(lambda n: scan(step, one, XS, unroll=n))(jnp.int32(2))


@case(ArgumentError)
def in_axes_out_of_range(one):
    return scan(step, one, {"x": jnp.ones((3, 3)), "y": XS, "z": one}, in_axes={"x": 1, "y": 1, "z": -1})


@case(ArgumentError)
def in_axes_no_prefix(one):
    return scan(step, one, {"x": XS, "y": XS}, in_axes={"x": 0})


@case(ArgumentTypeError)
def in_axes_float(one):
    return scan(step, one, {"x": XS, "y": XS}, in_axes={"x": 0, "y": 1.0})


@case(ArgumentError)
def out_axes_out_of_range(one):
    return scan(lambda carry, x: (carry, {"a": x, "b": carry[None]}), one, XS, out_axes={"a": 1, "b": -3})


@case(ArgumentError)
def out_axes_no_prefix(one):
    return scan(step, one, XS, out_axes=(0, 0))


@case(ArgumentTypeError)
def out_axes_none(one):
    return scan(step, one, XS, out_axes=None)


@case(ArgumentTypeError)
def key_batch(one):
    return scan(step, one, XS, key=jax.random.split(jax.random.key(0), 3))


@case(ArgumentTypeError)
def key_int(one):
    return scan(step, one, XS, key=0)


@case(BodyError)
def key_not_taken(one):
    return scan(step, one, XS, key=jax.random.key(0))


@case(BodyError)
def key_not_taken_by_fori(one):
    return fori(0, 3, lambda i, carry: carry, one, key=jax.random.key(0))


@case(ArgumentTypeError)
def key_raw_of_wrong_size(one):
    return scan(lambda carry, x, key: (carry, x), one, XS, key=jnp.zeros(3, jnp.uint32))


@case(ArgumentTypeError)
def name_int(one):
    return scan(step, one, XS, name=3)


@case(BodyError)
def key_needed(one):
    def dropout(carry, x, *, key):
        return carry * jax.random.bernoulli(key), x

    return scan(dropout, one, XS)


@case(BodyError)
def valid_needed(one):
    def pooled(carry, x, *, valid):
        return carry, valid

    return scan(pooled, one, XS)


@case(BodyError)
def keyword_needed(one):
    def scaled(carry, x, *, rate):
        return carry * rate, x

    return scan(scaled, one, XS)


@case(ArgumentTypeError, lax=True)
def option_misspelt_in_scan(one):
    return scan(step, one, XS, revers=True)


@case(ArgumentTypeError)
def option_misspelt(one):
    return fold(lambda carry, x: carry, one, XS, reversed=True)


@case(ArgumentTypeError, lax=True)
def option_of_mask_scan(one):
    return scan(step, one, XS, lengths=jnp.int32(2))


@case(BodyError, lax=True)
def body_of_three(one):
    return scan(lambda carry, x, rate: (carry * rate, x), one, XS)


@case(ArgumentTypeError)
def option_unknown(one):
    return mask_scan(step, one, XS, lengths=jnp.int32(2), padding=0)


@case(ArgumentError)
def option_refused_by_fold(one):
    return fold(lambda carry, x: carry, one, XS, out_axes=1)


@case(ArgumentError)
def option_refused_by_fori(one):
    return fori(0, 3, lambda i, carry: carry, one, in_axes=1)


@case(ArgumentError)
def option_length_in_fori(one):
    return fori(0, 3, lambda i, carry: carry, one, length=3)


@case(TracedArgumentError, less=("disable_jit",))
def fori_traced(one):
    return jax.jit(lambda n: fori(0, n, lambda i, carry: carry, one))(jnp.int32(3))


@case(ArgumentTypeError)
def fori_float(one):
    return fori(0, 3.0, lambda i, carry: carry, one)


# --- mask_scan --------------------------------------------------------------------------------------------------------

ROWS = jnp.ones((3, 2, 4))  # [T, B, features]
LENGTHS, TOO_LONG = jnp.array([3, 1]), jnp.array([3, 4])


@case(ArgumentError)
def mask_neither(one):
    return mask_scan(step, one * jnp.ones(2), ROWS)


@case(ArgumentError)
def mask_both(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, mask=jnp.ones((3, 2), bool))


@case(ArgumentError)
def lengths_out_of_range(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=TOO_LONG)


@case(ArgumentError)
def lengths_scalar_out_of_range(one):
    return mask_scan(step, one, XS, lengths=-1)


@case(ArgumentTypeError)
def lengths_float(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=jnp.array([3.0, 1.0]))


@case(ArgumentTypeError)
def mask_not_bool(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, mask=jnp.ones((3, 2)))


@case(ArgumentError)
def mask_wrong_length(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, mask=jnp.ones((2, 3), bool))


@case(ArgumentError)
def mask_longer_than_xs(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, mask=jnp.ones((5, 2), bool))


@case(ArgumentError)
def batch_not_in_carry(one):
    return mask_scan(step, {"h": one * jnp.ones((2, 5)), "count": one}, ROWS, lengths=LENGTHS)


@case(ArgumentError)
def batch_not_in_x(one):
    return mask_scan(step, one * jnp.ones(2), {"x": ROWS, "time": XS}, lengths=LENGTHS)


@case(ArgumentError)
def batch_not_in_y(one):
    return mask_scan(lambda carry, x: (carry, {"mean": x.mean(), "x": x}), one * jnp.ones(2), ROWS, lengths=LENGTHS)


@case(ArgumentError)
def batch_axes_no_prefix(one):
    return mask_scan(step, {"h": one * jnp.ones(2)}, ROWS, lengths=LENGTHS, carry_axes={"c": 0})


@case(ArgumentTypeError)
def batch_axes_str(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, x_axes="batch")


@case(ArgumentError)
def fill_does_not_fit(one):
    def step(carry, x):
        return carry, {"token": x[:, 0].astype(jnp.int32)}

    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, fill=0.5)


@case(ArgumentError)
def fill_nan_in_int(one):
    return mask_scan(lambda carry, x: (carry, jnp.ones(2, int)), one * jnp.ones(2), ROWS, lengths=LENGTHS, fill=jnp.nan)


@case(ArgumentError)
def fill_complex_in_float(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, fill=1j)


@case(ArgumentError)
def fill_no_prefix(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, fill={"token": 0})


@case(ArgumentTypeError)
def fill_array(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, fill=jnp.zeros(4))


@case(ArgumentTypeError)
def fill_traced(one):
    return jax.vmap(lambda fill: mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, fill=fill))(jnp.ones(2))


@case(ArgumentTypeError)
def fill_str(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, fill="none")


@case(CarryError)
def carry_dtype_in_mask_scan(one):
    def step(carry, x):
        return {"h": carry["h"].astype(jnp.bfloat16)}, None

    return mask_scan(step, {"h": one * jnp.ones(2)}, ROWS, lengths=LENGTHS)


RESETS = jnp.zeros((3, 2), bool)


@case(ArgumentTypeError)
def resets_not_bool(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, resets=jnp.zeros((3, 2)))


@case(ArgumentError)
def resets_wrong_length(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, resets=RESETS[:2])


@case(ArgumentError)
def resets_of_other_rows(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, resets=jnp.zeros((3, 4), bool))


@case(ArgumentError)
def resets_of_other_rows_than_mask(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, mask=~RESETS, resets=jnp.zeros((3, 4), bool))


def resetting(one, to, init=None, **options):
    init = {"h": one * jnp.ones(2), "n": jnp.zeros(2, jnp.int32)} if init is None else init
    return mask_scan(state_step, init, ROWS, resets=RESETS, reset_to=to, **options)


def state_step(carry, x):
    return carry, None


@case(ArgumentError)
def reset_to_without_resets(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, reset_to=0.0)


@case(ArgumentError)
def reset_to_no_prefix(one):
    return resetting(one, {"h": 0.0, "count": 0})


@case(ArgumentError)
def reset_to_of_other_types(one):
    return resetting(one, {"h": jnp.zeros((2, 4)), "n": 0.5 * one})


@case(ArgumentError)
def reset_to_a_number_that_does_not_fit(one):
    return resetting(one, 0.5)


@case(ArgumentError)
def reset_to_a_text(one):
    return resetting(one, {"h": "zeros", "n": 0})


@case(ArgumentError)
def reset_to_of_a_function_that_returns_none(one):
    return resetting(one, lambda init: None)


@case(ArgumentError)
def reset_to_of_a_shared_leaf(one):
    return resetting(
        one, {"h": 0.0, "n": 0}, {"h": one * jnp.ones(2), "n": jnp.int32(0)}, carry_axes={"h": 0, "n": None}
    )


@case(ArgumentError)
def reset_to_of_a_static_leaf(one):
    return resetting(one, {"h": 0.0, "f": 1.0}, {"h": one * jnp.ones(2), "f": jnp.tanh})


@case(ArgumentError)
def reset_to_a_number_of_a_custom_carry(one):
    return resetting(one, 0.0, {"h": one * jnp.ones(2), "last": treescan.carries.window(one * jnp.ones((3, 2)))})


@case(ArgumentError)
def reset_to_a_number_of_keys(one):
    return resetting(one, 0, {"h": one * jnp.ones(2), "key": jax.random.split(jax.random.key(0), 2)})


def packed_from(one, init, **options):
    packed = treescan.pack([words(3), words(2), words(2)], rows=2)._replace(init=init)
    start = {"h": one * jnp.ones((2, 4)), "n": jnp.zeros(2, jnp.int32)}
    return mask_scan(state_step, start, packed, **options)


@case(ArgumentError)
def packed_inits_with_reset_to(one):
    return packed_from(one, {"h": jnp.zeros((3, 4)), "n": jnp.zeros(3, jnp.int32)}, reset_to=0)


@case(ArgumentError)
def packed_inits_of_another_structure(one):
    return packed_from(one, (jnp.zeros((3, 4)), jnp.zeros(3, jnp.int32)))


@case(ArgumentError)
def packed_inits_of_other_types(one):
    return packed_from(one, {"h": jnp.zeros((2, 4)), "n": one * jnp.zeros(3)})


@case(ArgumentError)
def time_axis_two(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, time_axis=2)


@case(ArgumentError)
def time_first_mask_of_batch_first_xs(one):
    return mask_scan(step, one * jnp.ones(2), ROWS.swapaxes(0, 1), mask=~RESETS, time_axis=1)


@case(ArgumentError)
def chunk_negative(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, chunk=-1)


@case(ArgumentError)
def compact_without_chunks(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, chunk=0, compact=True)


@case(ArgumentTypeError)
def compact_str(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, compact="rows")


@case(ArgumentTypeError)
def compact_zero_rows(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, compact=(0, 1))


@case(ArgumentError)
def compact_with_key(one):
    def step(carry, x, *, key):
        return carry + jax.random.uniform(key, carry.shape), None

    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, compact=True, key=jax.random.key(0))


@case(ArgumentError)
def compact_single_row(one):
    return mask_scan(step, one, XS, lengths=2, compact=True)


@case(ArgumentError)
def compact_tier_above_batch(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, compact=(1, 4))


@case(BodyError, less=("disable_jit",))
def compact_body_counts_rows(one):
    def step(carry, x):
        return (carry if len(x) == 1 else carry + 1), None

    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, compact=True)


@case(ArgumentError, less=("disable_jit", "vmap"), context=on_mesh)
def compact_rows_on_a_mesh(one):
    h = jax.sharding.reshard(one * jnp.ones(2), PartitionSpec("rows"))
    return mask_scan(step, h, ROWS, lengths=LENGTHS, compact=True)


@case(ArgumentError, less=("disable_jit", "vmap", "grad"))
def compact_in_an_unchecked_shard_map(one):
    def run(rows):
        return mask_scan(step, rows, ROWS, lengths=LENGTHS, compact=True)[0]

    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()
    return jax.shard_map(run, mesh=mesh, in_specs=(whole,), out_specs=whole, check_vma=False)(one * jnp.ones(2))


@case(ArgumentError)
def packed_of_a_single_row(one):
    packed = treescan.pack([np.ones(3), np.ones(2)])
    row = jax.tree.map(lambda leaf: leaf[:, 0], packed[:3])
    return mask_scan(step, one, packed._replace(data=row[0], mask=row[1], resets=row[2]))


@case(ArgumentError, less=("disable_jit", "vmap", "grad"))
def packed_inits_of_rows_over_devices(one):
    packed = treescan.pack([np.ones(3), np.ones(2)], init=[0.0, 1.0])
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()

    def run(rows, packed):
        return mask_scan(step, rows, packed)[0]

    spread = jax.shard_map(run, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False)
    return spread(one * jnp.ones(packed.rows), packed)


@case(ArgumentError)
def padded_with_lengths(one):
    return mask_scan(step, one * jnp.ones(2), treescan.Padded(ROWS, LENGTHS), lengths=LENGTHS)


@case(ArgumentError)
def packed_with_time_axis(one):
    packed = treescan.pack([np.ones((3, 4)), np.ones((2, 4))])
    return mask_scan(step, one * jnp.ones(2), packed, time_axis=1)


@case(ArgumentError)
def remat_unknown(one):
    return scan(step, one, XS, remat="steps")


def exported(run: Callable[[Any], Any]) -> Any:
    """Traces a function of xs of which the number of steps is not known yet."""
    steps = jax.export.symbolic_shape("t")[0]
    return jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct((steps, 2), jnp.float32))


@case(ArgumentError, less=("disable_jit",))
def remat_nested_of_symbolic_steps(one):
    return exported(lambda xs: scan(step, one, xs, remat="nested")[0])


@case(ArgumentError, less=("disable_jit",))
def chunk_of_symbolic_steps(one):
    return exported(lambda xs: mask_scan(step, one * jnp.ones(2), xs, lengths=jnp.zeros(2, int), chunk=8)[0])


@case(ArgumentError, less=("disable_jit",))
def compact_of_symbolic_rows(one):
    rows = jax.export.symbolic_shape("b")[0]
    run = jax.jit(lambda xs, lengths: mask_scan(step, xs[0], xs, lengths=lengths, compact=True))
    shapes = jax.ShapeDtypeStruct((8, rows), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    return jax.export.export(run)(*shapes)


@case(ArgumentTypeError)
def chunk_float(one):
    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, chunk=2.5)


@case(CarryError, less=("disable_jit",))
def compact_over_closed_over_rows(one):
    bias = jnp.ones(2)

    def step(carry, x):
        return carry + bias, None

    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS, compact=True)


@case(ArgumentError)
def init_of_other_rows(one):
    packed = treescan.pack([np.ones((3, 4)), np.ones((2, 4)), np.ones((1, 4))])
    return mask_scan(step, {"h": one * jnp.ones((3, 5))}, packed)


def step_of_a_ref() -> Callable[[Any, Any], tuple[Any, Any]]:
    ref = (jax.new_ref if hasattr(jax, "new_ref") else jax.array_ref)(jnp.ones(()))

    def step(carry, x):
        return carry + ref[...], None

    return step


@case(ArgumentError, less=("disable_jit", "vmap"))
def remat_over_a_ref(one):
    return scan(step_of_a_ref(), one, XS, remat="step")


@case(ArgumentError, less=("disable_jit", "vmap"))
def compact_over_a_ref(one):
    return mask_scan(step_of_a_ref(), one * jnp.ones(2), ROWS, lengths=LENGTHS, compact=True)


@case(ArgumentError, less=("disable_jit", "vmap"))
def compact_over_a_ref_with_rows(one):
    ref = (jax.new_ref if hasattr(jax, "new_ref") else jax.array_ref)(jnp.ones(2))
    return mask_scan(lambda c, x: (c + ref[...], None), one * jnp.ones(2), ROWS, lengths=LENGTHS, compact=True)


@case(ArgumentError, less=("disable_jit", "vmap"))
def ref_written_in_padding(one):
    ref = (jax.new_ref if hasattr(jax, "new_ref") else jax.array_ref)(jnp.ones(()))

    def step(carry, x):
        ref[...] += 1
        return carry, None

    return mask_scan(step, one * jnp.ones(2), ROWS, lengths=LENGTHS)


# --- annotations ------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    h: Float[Array, "batch hidden"]
    n: Int[Array, ""]


@case(SignatureError)
def signature_carry(one):
    def step(carry: Cell, x: Float[Array, " batch"]) -> tuple[Cell, None]:
        return carry, None

    return scan(step, Cell(one * jnp.ones(8), jnp.zeros((), jnp.float32)), jnp.ones((3, 8)))


@case(SignatureError)
def signature_x(one):
    def step(carry: Cell, x: Float[Array, "batch features"]) -> tuple[Cell, None]:
        return carry, None

    return scan(step, Cell(one * jnp.ones((8, 2)), jnp.int32(0)), jnp.ones((3, 16, 4)))


@case(SignatureError)
def signature_carry_out(one):
    def step(carry: Float[Array, " n"], x: Float[Array, ""]) -> tuple[Float[Array, " n+1"], None]:
        return carry + x, None

    return scan(step, one * XS, XS)


@case(SignatureError)
def signature_y(one):
    def step(carry: Float[Array, " n"], x: Float[Array, ""]) -> tuple[Any, dict[str, Float[Array, " n"]]]:
        return carry + x, {"mean": carry.mean(), "half": carry[:2]}

    return scan(step, one * XS, XS)


# --- padding and packing ----------------------------------------------------------------------------------------------


def without_body(error: type[TreescanError], **options: Any) -> Any:
    return case(error, body=False, **options)


def words(steps: int, dtype: Any = np.int32) -> dict[str, Any]:
    """One sequence; of NumPy, as whatever `jnp` makes is traced where a case is."""
    return {"token": np.ones(steps, dtype), "features": np.ones((steps, 4))}


@without_body(ArgumentTypeError)
def pad_array(one):
    return treescan.pad(ROWS)


@without_body(ArgumentTypeError)
def pad_single_pytree(one):
    return treescan.pad(Lstm(XS, XS))


@without_body(ArgumentError)
def pad_nothing(one):
    return treescan.pad([])


@without_body(TracedArgumentError, less=("disable_jit",))
def pad_traced(one):
    return jax.jit(lambda x: treescan.pad([words(3), words(2) | {"features": x}]))(jnp.ones((2, 4)))


@without_body(ArgumentError)
def pad_lists_of_numbers(one):
    return treescan.pad([[1, 2, 3], [4, 5]])


@without_body(ArgumentError)
def pad_without_steps(one):
    return treescan.pad([words(3) | {"label": 1, "speaker": "ann"}] * 6)


@without_body(ArgumentError)
def pad_without_leaves(one):
    return treescan.pad([words(3), None])


@without_body(ArgumentError)
def pad_structures_differ(one):
    return treescan.pad([words(3), {"token": np.ones(3)}, words(1) | {"time": np.ones(1)}, list(words(2).values())])


@without_body(ArgumentError)
def pad_types_differ(one):
    uneven = words(5) | {"features": np.ones((6, 4))}
    return treescan.pad([words(3, np.int8), words(3), words(2) | {"features": np.ones((2, 5))}, uneven])


@without_body(ArgumentError)
def pad_many_types_differ(one):
    return treescan.pad([words(3)] * 20 + [words(3, np.int8)] * 19)


@without_body(ArgumentError)
def pad_too_long(one):
    return treescan.pad([words(3), words(7)], length=5)


@without_body(ArgumentTypeError)
def pad_length_float(one):
    return treescan.pad([words(3)], length=5.0)


@without_body(ArgumentError)
def pad_length_negative(one):
    return treescan.pad([words(3)], length=-1)


@without_body(TracedArgumentError, less=("disable_jit",))
def pad_length_traced(one):
    return jax.jit(lambda n: treescan.pad([words(3)], length=n))(5)


@without_body(ArgumentError)
def pad_value_does_not_fit(one):
    return treescan.pad([words(3)], value=float("nan"))


@without_body(ArgumentError)
def pad_value_array(one):
    return treescan.pad([words(3)], value={"token": 0, "features": np.zeros(4)})


@without_body(ArgumentError)
def pad_value_no_prefix(one):
    return treescan.pad([words(3)], value={"token": -1})


@without_body(ArgumentError)
def unpad_without_lengths(one):
    return treescan.unpad(treescan.pad([words(3)]).data)


@without_body(ArgumentError)
def unpad_lengths_twice(one):
    padded = treescan.pad([words(3)])
    return treescan.unpad(padded, padded.lengths)


@without_body(ArgumentError)
def unpad_batch_first(one):
    return treescan.unpad({"x": ROWS, "y": ROWS.swapaxes(0, 1)}, [3, 1])


@without_body(ArgumentError)
def unpad_too_long(one):
    return treescan.unpad(ROWS, TOO_LONG)


@without_body(ArgumentTypeError)
def unpad_lengths_float(one):
    return treescan.unpad(ROWS, np.array([3.0, 1.0]))


@without_body(ArgumentError)
def unpad_single(one):
    return treescan.unpad(XS, 3)


@without_body(TracedArgumentError, less=("disable_jit",))
def unpad_traced(one):
    return jax.jit(treescan.unpad)(ROWS, LENGTHS)


@without_body(TracedArgumentError, less=("disable_jit",))
def efficiency_traced(one):
    return jax.jit(lambda padded: padded.efficiency)(treescan.pad([words(3)]))


@without_body(TracedArgumentError, less=("disable_jit",))
def efficiency_of_packed_traced(one):
    return jax.jit(lambda packed: packed.efficiency)(treescan.pack([words(3)]))


@without_body(ArgumentError)
def padded_mask_out_of_range(one):
    return treescan.Padded(ROWS, TOO_LONG).mask


@without_body(ArgumentError)
def length_mask_out_of_range(one):
    return treescan.length_mask(TOO_LONG, 3)


@without_body(ArgumentTypeError)
def length_mask_of_lists(one):
    return treescan.length_mask([[3, 1], [2]], 3)


@without_body(ArgumentTypeError)
def length_mask_without_length(one):
    return treescan.length_mask(LENGTHS, None)


@without_body(ArgumentError)
def pack_too_few_rows(one):
    return treescan.pack([words(3), words(4), words(4)], rows=1, length=6)


@without_body(ArgumentError)
def pack_no_rows(one):
    return treescan.pack([words(3)], rows=0)


@without_body(ArgumentError)
def pack_too_long(one):
    return treescan.pack([words(3), words(7)], length=5)


@without_body(ArgumentError)
def pack_inits_of_other_structures(one):
    inits = [{"h": one, "c": one}, {"h": one}, {"h": one, "c": jnp.ones(2)}]
    return treescan.pack([words(3), words(4), words(4)], init=inits)


@without_body(ArgumentError)
def pack_inits_of_other_sequences(one):
    return treescan.pack([words(3), words(4)], init=[one])


@without_body(ArgumentTypeError)
def pack_inits_that_are_stacked(one):
    return treescan.pack([words(3), words(4)], init={"h": jnp.zeros((2, 4))})


@without_body(ArgumentError)
def pack_inits_with_a_function(one):
    return treescan.pack([words(3), words(4)], init=[{"h": one, "f": encode}] * 2)


@without_body(ArgumentTypeError)
def unpack_padded(one):
    padded = treescan.pad([words(3)])
    return treescan.unpack(padded, padded.data)


@without_body(ArgumentError)
def unpack_other_steps(one):
    packed = treescan.pack([words(3), words(2)], length=4)
    return treescan.unpack(packed, {"y": packed.data["token"][1:], "loss": one})


@without_body(TracedArgumentError, less=("disable_jit",))
def unpack_traced(one):
    return jax.jit(lambda packed: treescan.unpack(packed, packed.data))(treescan.pack([words(3)]))


@without_body(ArgumentTypeError)
def repad_of_padded(one):
    padded = treescan.pad([words(3)])
    return treescan.repad(padded, padded.data)


@without_body(ArgumentError)
def repad_other_steps(one):
    packed = treescan.pack([words(3), words(2)], length=4)
    return treescan.repad(packed, {"y": packed.data["token"][1:], "loss": one})


@without_body(ArgumentError)
def repad_too_long(one):
    packed = treescan.pack([words(1), words(3)], length=4)
    return treescan.repad(packed, packed.data, length=2)


@without_body(TracedArgumentError, less=("disable_jit",))
def repad_to_less_than_is_known(one):
    return jax.jit(lambda packed: treescan.repad(packed, packed.data, length=3))(treescan.pack([words(3), words(2)]))


@without_body(ArgumentError)
def repad_value_no_prefix(one):
    packed = treescan.pack([words(3)])
    return treescan.repad(packed, packed.data, value={"token": 0})


@without_body(ArgumentError, less=("disable_jit", "vmap", "grad"))
def repad_of_rows_over_devices(one):
    packed = treescan.pack([np.ones(3), np.ones(2)])
    mesh = jax.make_mesh((1,), ("devices",), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()
    run = jax.shard_map(
        lambda packed: treescan.repad(packed, packed.data),
        mesh=mesh, in_specs=(whole,), out_specs=whole, check_vma=False,
    )  # fmt: skip
    return run(packed)


@without_body(ArgumentTypeError)
def last_swapped(one):
    packed = treescan.pack([words(3)])
    return treescan.last(packed.data, packed, reverse=False)


@without_body(ArgumentTypeError)
def last_without_direction(one):
    packed = treescan.pack([words(3)])
    return treescan.last(packed, packed.data)


@without_body(ArgumentTypeError)
def first_without_direction(one):
    packed = treescan.pack([words(3)])
    return treescan.first(packed, packed.data)


@without_body(ArgumentTypeError)
def first_of_data(one):
    packed = treescan.pack([words(3)])
    return treescan.first(packed.data, packed.data, reverse=False)


@without_body(ArgumentTypeError)
def last_of_direction_as_text(one):
    packed = treescan.pack([words(3)])
    return treescan.last(packed, packed.data, reverse="yes")


@without_body(ArgumentError)
def last_other_rows(one):
    return treescan.last(treescan.pad([XS, XS]), ROWS[:, :1], reverse=False)


# --- how bodies are named ---------------------------------------------------------------------------------------------


class Counter:
    def __call__(self, carry, x):
        return None

    def method(self, carry, x):
        return None


@case(BodyError)
def named_method(one):
    return scan(Counter().method, one, XS)


@case(BodyError)
def named_object(one):
    return scan(Counter(), one, XS)


@case(BodyError)
def named_partial(one):
    return scan(functools.partial(Counter.method, Counter()), one, XS)


@case(BodyError)
def named_wrapped(one):
    return scan(jax.checkpoint(jax.jit(lambda carry, x: None)), one, XS)


@case(BodyError, lax=True)
def named_ufunc(one):
    return scan(jnp.add, one, XS)


@case(CarryError, lax=True)
def named_inner(one):
    def inner(h, x):
        return h[None], None

    def outer(carry, x):
        return scan(inner, carry, XS)

    return scan(outer, one, XS)


# --- custom carries, memory, layers -----------------------------------------------------------------------------------

_OTHERS = (
    carry_error_cases,
    chunk_error_cases,
    describe_error_cases,
    finite_error_cases,
    layer_error_cases,
    lift_error_cases,
    mistake_error_cases,
    progress_error_cases,
    while_error_cases,
)
for given in (each for module in _OTHERS for each in module.CASES):
    case(given.error, **given.options)(given.run)


# --- the tests --------------------------------------------------------------------------------------------------------


PLACE = re.compile(r"[^\s(]*\b(?:test_errors|(?:carry|chunk|finite|layer|lift|mistake|while)_error_cases)\.py:\d+")


@pytest.fixture
def written_in_model_py(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name `model.py:12` where a case was written, so that an edit of the cases moves no line break."""

    def wrapped(text: str, *args: Any, **options: Any) -> str:
        return wrap(PLACE.sub("model.py:12", text), *args, **options)

    for module in (treescan._errors, treescan._text):
        monkeypatch.setattr(module, "wrap", wrapped)


def text_of(error: BaseException) -> str:
    """The error as a user reads it, under the traceback."""
    return f"treescan.{type(error).__name__}: {error}".rstrip() + "\n"


def as_spelled(text: str) -> str:
    """A text in the spelling of the newest JAX: older releases print types and specs, and vary values, otherwise."""
    if hasattr(jax.typeof(1.0), "manual_axis_type"):
        return text
    text = re.sub(r"(\[\])\{(\w+)\}", r"\1{V:\2}", text).replace("PartitionSpec(", "P(")
    return " ".join(text.split())  # columns are as wide as what stands in them, and lines break elsewhere


def modes_by_turns() -> list[Any]:
    """Each case eagerly and in one of its other modes, on every day; in the rest of them it is slow."""
    params = []
    for number, (name, case) in enumerate(CASES.items()):
        first, *others = [mode for mode in MODES if mode in case.modes]
        today = {first, others[number % len(others)]} if others else {first}
        params += [
            pytest.param(name, mode, marks=() if mode in today else pytest.mark.slow) for mode in (first, *others)
        ]
    return params


@pytest.mark.usefixtures("written_in_model_py")
@pytest.mark.parametrize(("name", "mode"), modes_by_turns())
def test_text(name: str, mode: str) -> None:
    golden = GOLDEN / f"{name}.txt"
    with pytest.raises(CASES[name].error) as caught:
        CASES[name].provoke(mode)
    assert caught.type is CASES[name].error
    text = text_of(caught.value)
    assert not re.search(r"0x[0-9a-f]{4}|\{(?:body|verb|step|init)\}|site-packages|Tracer\(", text), text
    if os.environ.get("UPDATE_GOLDEN") == "1" and mode == "eager":
        golden.write_text(text)
    assert as_spelled(text) == as_spelled(golden.read_text())
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []


NAMELESS = {"not_callable", "not_callable_in_fori", "named_ufunc"} | {name for name in CASES if not CASES[name].body}


@pytest.mark.parametrize("name", sorted(CASES.keys() - NAMELESS))
def test_names_the_line_of_the_body(name: str) -> None:
    with pytest.raises(TreescanError) as caught:
        CASES[name].provoke()
    match = re.search(r"`(?P<name>[^`]+)` \((?P<file>\S+\.py):(?P<line>\d+)\)", str(caught.value))
    assert match, caught.value
    file = inspect.getfile(CASES[name].run)
    assert Path(match["file"]).samefile(file)
    source = linecache.getline(file, int(match["line"]))
    expected = "lambda" if match["name"] == "<lambda>" else f"def {match['name'].rsplit('.')[-1]}("
    assert expected in source or (match["name"] == "Counter" and "__call__" in source)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.lax])
def test_is_what_lax_scan_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "scan", jax.lax.scan)
    with pytest.raises((TypeError, ValueError)) as caught:
        CASES[name].provoke()
    assert issubclass(CASES[name].error, tuple(c for c in (TypeError, ValueError) if issubclass(caught.type, c)))


def test_every_golden_file_has_its_case() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == CASES.keys()


class Site(NamedTuple):
    """A place in the package where a fault is made: a file, the first and the last line."""

    file: str
    first: int
    last: int


def fault_sites() -> Iterator[Site]:
    """Where the package finds faults. The integrations, of optional libraries, have error tests of their own."""
    for file in (file for file in PACKAGE.rglob("*.py") if "integrations" not in file.parts):
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            makers = ("Fault", "Misuse", "BodyFault", "LayerFault", "fault", "expect")
            if isinstance(called, ast.Name) and called.id in makers:
                yield Site(file.name, node.lineno, node.end_lineno or node.lineno)


def test_every_fault_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[tuple[str, int]] = set()
    fault = treescan._errors.Fault
    initialise = fault.__init__

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        frames = (sys._getframe(1), sys._getframe(2))  # the second is that of a check which calls `expect`
        made.update((Path(frame.f_code.co_filename).name, frame.f_lineno) for frame in frames)
        initialise(self, *args, **kwargs)

    monkeypatch.setattr(fault, "__init__", record)
    for name in CASES:
        with contextlib.suppress(Exception):
            CASES[name].provoke()
    sites = set(fault_sites())
    assert sites
    assert {s for s in sites if not any((s.file, line) in made for line in range(s.first, s.last + 1))} == set()
