"""Cases of `test_errors.py` about the body, the carry, xs and options of `scan`, `fold`, `accumulate` and `fori`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import XS, case, mesh_of, named, on_mesh, over_devices
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from treescan import accumulate, fold, fori, mask_scan, scan


def step(carry: Any, x: Any) -> tuple[Any, Any]:
    return carry, x


class Lstm(NamedTuple):
    h: Any
    c: Any


KEYS = jax.random.split(jax.random.key(0), 3)  # made here, as whatever `jax.random` makes is traced where a case is


def encode(x: Any) -> Any:
    return x


def decode(x: Any) -> Any:
    return x


@functools.partial(jax.tree_util.register_dataclass, data_fields=["h"], meta_fields=["depth"])
@dataclasses.dataclass(frozen=True)
class Tower:
    h: Any
    depth: int


@case(lax=True)
def carry_dtype(one):
    class Model(NamedTuple):
        h: Any

    def step(carry, x):
        return Model(carry.h.astype(jnp.bfloat16)), None

    return scan(step, Model(one * XS), XS)


@case(lax=True)
def carry_several_leaves(one):
    def step(carry, x):
        h = carry["h"].astype(jnp.bfloat16)
        cache = {"k": jnp.append(carry["cache"]["k"], x), "v": [None, carry["cache"]["v"][1]]}
        return {"h": h, "cache": cache}, None

    return scan(step, {"h": one, "cache": {"k": one * XS, "v": [one, one]}, "count": jnp.int32(0)}, XS)


@case(lax=True)
def carry_weak_type(one):
    def step(carry, x):
        return {"h": carry["h"], "count": (carry["count"] < 1).astype(jnp.int8)}, None

    with jax.numpy_dtype_promotion("standard"):
        return scan(step, {"h": one, "count": 0.0}, XS)


@case(lax=True)
def carry_weak_types_in_turn(one):
    def step(carry, x):
        return {"h": carry["h"], "mean": carry["mean"] * 0.5, "total": carry["total"] + carry["mean"]}, None

    return scan(step, {"h": one, "mean": 0, "total": 0}, XS)


@case(lax=True, devices=True)
def carry_begins_to_vary(one):
    def step(carry, x):
        return {"h": carry["h"] + jax.lax.axis_index("devices")}, None

    run = over_devices(lambda xs: jax.lax.psum(scan(step, {"h": jnp.int32(0)}, xs)[0]["h"], "devices"), mesh_of(2))
    return run(XS)


@case(lax=True, devices=True)
def carry_ceases_to_vary(one):
    def step(carry, x):
        return {"h": jax.lax.psum(carry["h"], "devices")}, None

    return over_devices(lambda xs: scan(step, {"h": jax.lax.axis_index("devices")}, xs)[0]["h"], mesh_of(2))(XS)


@on_mesh()
def xs_sharded(one):
    x = jax.sharding.reshard(jnp.ones((3, 4)), PartitionSpec(None, "rows"))
    return scan(step, one, {"x": x, "y": jnp.ones((3, 4))}, in_axes=1)


class Cell(NamedTuple):
    h: Float[Array, "batch hidden"]
    n: Int[Array, ""]


@case()
def signature_carry(one):
    def step(carry: Cell, x: Float[Array, " batch"]) -> tuple[Cell, None]:
        return carry, None

    return scan(step, Cell(one * jnp.ones(8), jnp.zeros((), jnp.float32)), jnp.ones((3, 8)))


@case()
def signature_x(one):
    def step(carry: Cell, x: Float[Array, "batch features"]) -> tuple[Cell, None]:
        return carry, None

    return scan(step, Cell(one * jnp.ones((8, 2)), jnp.int32(0)), jnp.ones((3, 16, 4)))


@case()
def signature_carry_out(one):
    def step(carry: Float[Array, " n"], x: Float[Array, ""]) -> tuple[Float[Array, " n+1"], None]:
        return carry + x, None

    return scan(step, one * XS, XS)


@case()
def signature_y(one):
    def step(carry: Float[Array, " n"], x: Float[Array, ""]) -> tuple[Any, dict[str, Float[Array, " n"]]]:
        return carry + x, {"mean": carry.mean(), "half": carry[:2]}

    return scan(step, one * XS, XS)


class Counter:
    def __call__(self, carry, x):
        return None

    def method(self, carry, x):
        return None


case(lax=True)(
    # The pair.
    pair_none=lambda one: scan(named("step", lambda carry, x: None), one, XS),
    pair_swapped=lambda one: scan(
        named("step", lambda state, x: (state.h + x, Lstm(state.h + x, state.c))), Lstm(one, one), XS
    ),
    pair_carry_only_of_two=lambda one: scan(lambda carry, x: (carry[0] + x, carry[1]), (one, one), XS),
    pair_array=lambda one: scan(lambda carry, x: carry["h"] + x, {"h": one}, XS),
    body_of_three=lambda one: scan(lambda carry, x, rate: (carry * rate, x), one, XS),
    pair_carry_only=lambda one: scan(named("step", lambda state, x: {"h": state["h"] + x}), {"h": one}, XS),
    # The carry: structure.
    carry_namedtuple_for_tuple=lambda one: scan(lambda state, x: (Lstm(*state), x), (one, one), XS),
    carry_list_for_tuple=lambda one: scan(lambda carry, x: ([carry[0], carry[1]], x), (one, one), XS),
    carry_none_given=lambda one: scan(lambda carry, x: ({"h": x, "best": x}, None), {"h": one, "best": None}, XS),
    carry_none_returned=lambda one: scan(lambda carry, x: ({"h": None}, None), {"h": one}, XS),
    carry_metadata_changed=lambda one: scan(
        lambda tower, x: (Tower(tower.h + x, tower.depth + 1), None), Tower(one, 0), XS
    ),
    carry_static_for_array=lambda one: scan(lambda carry, x: ("done", None), one, XS),
    pair_none_for_the_carry=lambda one: scan(lambda carry, x: (None, x), one, XS),
    carry_keys=lambda one: scan(
        named("step", lambda carry, x: ({"h": carry["h"], "step": x}, None)),
        {"h": one, "count": 0, "cache": {"k": one}},
        XS,
    ),
    # The carry: types.
    carry_shape=lambda one: scan(lambda carry, x: (carry[:, :2], None), one * jnp.ones((2, 5)), XS),
    carry_shape_and_dtype=lambda one: scan(lambda carry, x: (carry.astype(jnp.bfloat16)[:2], None), one * XS, XS),
    carry_key_data=lambda one: scan(
        lambda carry, x: ((jax.random.key_data(carry[0]), x), None), (jax.random.key(0), one), XS
    ),
    carry_key_impl=lambda one: scan(
        lambda carry, x: ((jax.random.key(0, impl="rbg"), x), None), (jax.random.key(0), one), XS
    ),
    carry_grows=lambda one: scan(named("step", lambda tokens, x: (jnp.append(tokens, x), None)), one * XS, XS),
    carry_grows_by_several=lambda one: scan(
        named("step", lambda tokens, x: (jnp.append(tokens, XS), None)), one * XS, XS
    ),
    carry_splits_a_key=lambda one: scan(
        named("step", lambda key, x: (jax.random.split(key), one * x)), jax.random.key(0), XS
    ),
    # Xs and the length.
    xs_list_of_scalars=lambda one: scan(step, one, [1.0, 2.0, 3.0]),
    xs_nested_list=lambda one: scan(step, one, {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [one, one]}),
    xs_list_with_a_number=lambda one: scan(step, one, [XS, 2.0]),
    xs_without_axis=lambda one: scan(step, one, {"x": XS, "scale": one, "bias": 2.0}),
    xs_sizes_differ=lambda one: scan(
        step, one, {"x": one * jnp.ones((3, 2)), "y": jnp.ones((4, 2)), "z": jnp.ones((3, 1))}
    ),
    length_missing=lambda one: scan(step, one),
    unroll_negative=lambda one: scan(step, one, XS, unroll=-2),
    # options
    option_of_mask_scan=lambda one: scan(step, one, XS, lengths=jnp.int32(2)),
    # How bodies are named.
    named_inner=lambda one: scan(lambda h, x: scan(named("inner", lambda h, x: (h[None], None)), h, XS), one, XS),
    named_ufunc=lambda one: scan(jnp.add, one, XS),
    not_callable=lambda one: scan({"h": one}, step, XS),
)

case()(
    # The pair.
    pair_in_fold=lambda one: fold(step, one, XS),
    y_static_in_accumulate=lambda one: accumulate(lambda carry, x: carry, (one, "a"), XS),
    # The carry: structure.
    carry_static_changed=lambda one: scan(
        lambda carry, x: ((carry[0], decode, "test"), None), (one, encode, "train"), XS
    ),
    # Xs and the length.
    xs_sizes_differ_along_axes=lambda one: scan(
        step, one, {"x": one * jnp.ones((2, 3)), "y": jnp.ones((4, 2))}, in_axes={"x": 1, "y": 0}
    ),
    length_missing_all_whole=lambda one: scan(step, one, {"table": XS}, in_axes=None),
    length_negative=lambda one: scan(step, one, None, -1),
    length_float=lambda one: scan(step, one, None, 3.0),
    length_bool=lambda one: scan(step, one, None, True),
    # options
    reverse_int=lambda one: scan(step, one, XS, reverse=1),
    in_axes_float=lambda one: scan(step, one, {"x": XS, "y": XS}, in_axes={"x": 0, "y": 1.0}),
    out_axes_none=lambda one: scan(step, one, XS, out_axes=None),
    key_batch=lambda one: scan(step, one, XS, key=KEYS),
    key_int=lambda one: scan(step, one, XS, key=0),
    key_raw_of_wrong_size=lambda one: scan(lambda carry, x, key: (carry, x), one, XS, key=np.zeros(3, np.uint32)),
    option_former=lambda one: scan(step, one, XS, name="loop"),
    option_misspelt=lambda one: fold(lambda carry, x: carry, one, XS, reversed=True),
    option_unknown=lambda one: mask_scan(step, one, XS, lengths=jnp.int32(2), smoothing=0),
    fori_float=lambda one: fori(0, 3.0, lambda i, carry: carry, one),
    in_axes_out_of_range=lambda one: scan(
        step, one, {"x": jnp.ones((3, 3)), "y": XS, "z": one}, in_axes={"x": 1, "y": 1, "z": -1}
    ),
    in_axes_no_prefix=lambda one: scan(step, one, {"x": XS, "y": XS}, in_axes={"x": 0}),
    out_axes_no_prefix=lambda one: scan(step, one, XS, out_axes=(0, 0)),
    option_refused_by_fold=lambda one: fold(lambda carry, x: carry, one, XS, out_axes=1),
    option_refused_by_fori=lambda one: fori(0, 3, lambda i, carry: carry, one, in_axes=1),
    option_length_in_fori=lambda one: fori(0, 3, lambda i, carry: carry, one, length=3),
    key_not_taken=lambda one: scan(step, one, XS, key=jax.random.key(0)),
    key_not_taken_by_fori=lambda one: fori(0, 3, lambda i, carry: carry, one, key=jax.random.key(0)),
    key_needed=lambda one: scan(
        named("dropout", lambda carry, x, *, key: (carry * jax.random.bernoulli(key), x)), one, XS
    ),
    valid_needed=lambda one: scan(named("pooled", lambda carry, x, *, valid: (carry, valid)), one, XS),
    # How bodies are named.
    named_object=lambda one: scan(Counter(), one, XS),
    named_partial=lambda one: scan(functools.partial(Counter.method, Counter()), one, XS),
    named_wrapped=lambda one: scan(jax.checkpoint(jax.jit(lambda carry, x: None)), one, XS),
    not_callable_in_fori=lambda one: fori(0, 3, one, lambda i, carry: carry),
)

on_mesh(lax=True)(
    carry_sharding=lambda one: scan(
        named("step", lambda carry, x: ({"h": jax.sharding.reshard(carry["h"], PartitionSpec(None))}, None)),
        {"h": jax.sharding.reshard(jnp.ones(4), PartitionSpec("rows"))},
        XS,
    )
)

case(lax=jax.__version_info__ >= (0, 9))(
    # Before, `lax.scan` stumbles over an assertion of its own.
    length_conflict=lambda one: scan(step, one, XS, 5)
)

case(lax=True, less=("disable_jit",))(
    unroll_traced=lambda one: jax.jit(lambda n: scan(step, one, XS, unroll=n))(jnp.int32(2)),
    length_traced=lambda one: jax.jit(lambda n: scan(step, one, None, n))(jnp.int32(3)),
)

case(less=("disable_jit",))(
    fori_traced=lambda one: jax.jit(lambda n: fori(0, n, lambda i, carry: carry, one))(jnp.int32(3))
)
