"""Cases of `test_errors.py` about `mask_scan`, and about sequences that are padded or packed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import LENGTHS, ROWS, XS, case, exported, mesh_of, named, on_mesh, over_devices, with_ref
from jax.sharding import PartitionSpec

import treescan
from treescan import fold, mask_scan, scan
from treescan.carries import keys


def step(carry, x):
    return carry, x


def words(steps: int, dtype: Any = np.int32) -> dict[str, Any]:
    """One sequence; of NumPy, as whatever `jnp` makes is traced where a case is."""
    return {"token": np.ones(steps, dtype), "features": np.ones((steps, 4))}


LONG = treescan.pack([words(3), words(2)], length=4)
PADDED, PACKED = treescan.pad([words(3)]), treescan.pack([words(3)])
SEQUENCES = [words(3), words(2)]
TWO, ROWS_OF_TWO = treescan.pack(SEQUENCES), treescan.pad(SEQUENCES)
FEATURES = treescan.pack([np.ones((3, 4)), np.ones((2, 4))])
TOO_LONG = jnp.array([3, 4])
TURNED, TURNED_LENGTHS = ROWS.swapaxes(0, 1), jnp.array([3, 1])
RESETS = jnp.zeros((3, 2), bool)
IDS = np.array([[1, 1, 2], [1, 0, 0]])


def encode(x):
    return x


def of_ids(segment_ids=IDS, data=None, time_axis=1, **options):
    data = {"tokens": segment_ids} if data is None else data
    return treescan.Packed.from_segment_ids(data, segment_ids, time_axis=time_axis, **options)


def pair(one):
    """The state of two rows."""
    return one * jnp.ones(2)


def masked(one, body=step, **options):
    """Two rows, of which the second is shorter."""
    return mask_scan(body, pair(one), ROWS, lengths=LENGTHS, **options)


def counting():
    """A body that writes into an array of its own."""
    ref = jax.new_ref(jnp.ones(()))

    def step(carry, x):
        ref[...] += 1
        return carry, None

    return step


def resetting(one, to, init=None, **options):
    init = {"h": pair(one), "n": jnp.zeros(2, jnp.int32)} if init is None else init
    return mask_scan(state_step, init, ROWS, resets=RESETS, reset_to=to, **options)


def state_step(carry, x):
    return carry, None


def counted(carry, x):
    return {"h": carry["h"] + 1, "n": carry["n"] + jnp.int8(1)}, None


def packed_from(one, init, **options):
    packed = treescan.pack([words(3), words(2), words(2)], rows=2)._replace(init=init)
    start = {"h": one * jnp.ones((2, 4)), "n": jnp.zeros(2, jnp.int32)}
    return mask_scan(state_step, start, packed, **options)


@on_mesh(less=("disable_jit", "vmap"))
def compact_rows_on_a_mesh(one):
    h = jax.sharding.reshard(pair(one), PartitionSpec("rows"))
    return mask_scan(step, h, ROWS, lengths=LENGTHS, compact=True)


@case()
def packed_of_a_single_row(one):
    packed = treescan.pack([np.ones(3), np.ones(2)])
    row = jax.tree.map(lambda leaf: leaf[:, 0], packed[:3])
    return mask_scan(step, one, packed._replace(data=row[0], mask=row[1], resets=row[2]))


@case(less=("disable_jit", "vmap", "grad"))
def packed_inits_of_rows_over_devices(one):
    packed = treescan.pack([np.ones(3), np.ones(2)], init=[0.0, 1.0])
    run = over_devices(lambda rows, packed: mask_scan(step, rows, packed)[0], mesh_of(1), check_vma=False)
    return run(one * jnp.ones(packed.rows), packed)


@case(less=("disable_jit",))
def compact_over_closed_over_rows(one):
    bias = jnp.ones(2)

    def step(carry, x):
        return carry + bias, None

    return masked(one, step, compact=True)


@case(less=("disable_jit", "vmap"))
def remat_fit_over_a_ref_with_rows(one):
    ref = jax.new_ref(jnp.ones(()))

    def step(carry, x, *, valid):
        ref[...] += jnp.where(valid.any(), 1.0, 0.0)
        return carry, None

    return masked(one, step, remat=treescan.Remat.fit(10**8))


@case()
def repad_too_long(one):
    packed = treescan.pack([words(1), words(3)], length=4)
    return treescan.repad(packed.data, packed, length=2)


case(less=("disable_jit",))(
    compact_body_counts_rows=lambda one: masked(
        one, named("step", lambda carry, x: ((carry if len(x) == 1 else carry + 1), None)), compact=True
    ),
    compact_with_shared_keys=lambda one: mask_scan(
        lambda carry, x: ({**carry, "h": carry["h"] + jax.random.normal(carry["key"], carry["h"].shape)}, None),
        {"h": pair(one), "key": keys(jax.random.key(0))},
        ROWS,
        lengths=LENGTHS,
        compact=True,
    ),
    compact_with_keys_of_rbg=lambda one: mask_scan(
        lambda h, row_keys: (h + jax.vmap(jax.random.normal)(row_keys), None),
        pair(one),
        jax.random.split(jax.random.key(0, impl="rbg"), (3, 2)),
        lengths=LENGTHS,
        compact=True,
    ),
    compact_of_symbolic_rows=lambda one: exported(
        lambda xs: mask_scan(step, xs[0], xs, lengths=jnp.zeros(xs.shape[1], int), compact=True), "8, b"
    ),
    padded_beside_one_of_traced_rows=lambda one: jax.jit(
        lambda first, second: mask_scan(step, pair(one), (first, second))
    )(ROWS_OF_TWO, ROWS_OF_TWO),
    remat_nested_of_symbolic_steps=lambda one: exported(lambda xs: scan(step, one, xs, remat="nested")[0], "t, 2"),
    chunk_of_symbolic_steps=lambda one: exported(
        lambda xs: mask_scan(step, pair(one), xs, lengths=jnp.zeros(2, int), chunk=8)[0], "t, 2"
    ),
    pad_traced=lambda one: jax.jit(lambda x: treescan.pad([words(3), words(2) | {"features": x}]))(jnp.ones((2, 4))),
    pad_length_traced=lambda one: jax.jit(lambda n: treescan.pad([words(3)], length=n))(5),
    unpad_traced=lambda one: jax.jit(treescan.unpad)(ROWS, LENGTHS),
    efficiency_traced=lambda one: jax.jit(lambda padded: padded.efficiency)(PADDED),
    efficiency_of_packed_traced=lambda one: jax.jit(lambda packed: packed.efficiency)(PACKED),
    unpack_traced=lambda one: jax.jit(lambda packed: treescan.unpack(packed.data, packed))(PACKED),
    pack_of_ids_traced=lambda one: jax.jit(of_ids)(IDS),
    pack_of_ids_traced_with_time_first=lambda one: jax.jit(lambda ids: of_ids(ids, time_axis=0))(IDS),
    repad_to_less_than_is_known=lambda one: jax.jit(lambda packed: treescan.repad(packed.data, packed, length=3))(TWO),
)

case(less=("disable_jit", "vmap", "grad"))(
    compact_in_an_unchecked_shard_map=lambda one: over_devices(
        lambda rows: mask_scan(step, rows, ROWS, lengths=LENGTHS, compact=True)[0], mesh_of(1), check_vma=False
    )(pair(one)),
    repad_of_rows_over_devices=lambda one: over_devices(
        lambda packed: treescan.repad(packed.data, packed), mesh_of(1), check_vma=False
    )(TWO),
)

case(less=("disable_jit", "vmap"))(
    ref_written_in_padding=lambda one: masked(one, counting()),
    ref_written_in_padding_beside_options=lambda one: masked(
        one, counting(), chunk=2, remat="nested", check_finite=True
    ),
    compact_over_a_ref_with_rows=lambda one: with_ref(
        lambda ref: masked(one, lambda carry, x: (carry + ref[...], None), compact=True), 2
    ),
)

case()(
    # mask_scan
    packed_within_xs_with_its_mask=lambda one: mask_scan(step, one * jnp.ones(1), {"words": TWO}, mask=TWO.mask),
    packed_beside_padded=lambda one: mask_scan(step, pair(one), (ROWS_OF_TWO, treescan.pack(SEQUENCES, rows=2))),
    packed_beside_one_that_has_inits_too=lambda one: mask_scan(
        step, one * jnp.ones(1), tuple(treescan.pack(SEQUENCES, init=[value, value]) for value in (0.0, 1.0))
    ),
    packed_within_padded=lambda one: mask_scan(step, pair(one), treescan.Padded({"words": TWO}, LENGTHS)),
    padded_beside_one_of_other_rows=lambda one: mask_scan(
        step, pair(one), {"a": treescan.pad([words(3), words(2)]), "b": treescan.pad([words(3), words(1)])}
    ),
    packed_with_in_axes_of_its_data=lambda one: mask_scan(
        step, one * jnp.ones((1, 4)), (FEATURES, ROWS), time_axis={"xs": (1, 0)}
    ),
    fill_does_not_fit=lambda one: masked(
        one, named("step", lambda carry, x: (carry, {"token": x[:, 0].astype(jnp.int32)})), fill=0.5
    ),
    compact_with_key=lambda one: masked(
        one, named("step", lambda carry, x, *, key: (carry, None)), compact=True, key=jax.random.key(0)
    ),
    mask_neither=lambda one: mask_scan(step, pair(one), ROWS),
    mask_both=lambda one: masked(one, mask=jnp.ones((3, 2), bool)),
    lengths_out_of_range=lambda one: mask_scan(step, pair(one), ROWS, lengths=TOO_LONG),
    lengths_with_an_offset_negative=lambda one: mask_scan(step, one, XS, lengths=-1, offset=3),
    truncate_of_a_mask_with_an_offset=lambda one: mask_scan(step, pair(one), ROWS, mask=RESETS, truncate=2, offset=3),
    fill_held_with_an_offset=lambda one: masked(one, fill="hold", offset=3),
    resets_with_an_offset=lambda one: masked(one, resets=RESETS, offset=3),
    resets_with_an_offset_in_reverse=lambda one: masked(one, resets=RESETS, reset_to=0, offset=3, reverse=True),
    mask_with_an_offset_and_first=lambda one: mask_scan(
        named("step", lambda carry, x, first: (carry, x)), pair(one), ROWS, mask=~RESETS, offset=3
    ),
    packed_with_an_offset=lambda one: mask_scan(step, one * jnp.ones((FEATURES.rows, 4)), FEATURES, offset=3),
    lengths_scalar_out_of_range=lambda one: mask_scan(step, one, XS, lengths=-1),
    mask_wrong_length=lambda one: mask_scan(step, pair(one), ROWS, mask=jnp.ones((2, 3), bool)),
    mask_longer_than_xs=lambda one: mask_scan(step, pair(one), ROWS, mask=jnp.ones((5, 2), bool)),
    # Data that lead with the batch, flags with a last axis of 1.
    layout_of_mask=lambda one: mask_scan(step, pair(one), TURNED, mask=~RESETS.T),
    layout_of_resets=lambda one: mask_scan(step, pair(one), TURNED, resets=RESETS.T, reset_to=0.0),
    layout_of_lengths=lambda one: mask_scan(step, pair(one), TURNED, lengths=TURNED_LENGTHS),
    layout_of_lengths_in_fold=lambda one: fold(lambda carry, x: carry, pair(one), TURNED, lengths=LENGTHS % 3),
    layout_of_data_that_lead_with_time=lambda one: mask_scan(step, pair(one), ROWS, mask=~RESETS, time_axis=1),
    layout_with_a_last_axis=lambda one: mask_scan(
        step, pair(one), TURNED, mask=~RESETS.T[..., None], resets=RESETS.T[..., None], time_axis=1
    ),
    layout_with_a_last_axis_too=lambda one: mask_scan(step, pair(one), TURNED, mask=~RESETS.T[..., None]),
    layout_with_a_last_axis_of_other_steps=lambda one: mask_scan(step, pair(one), ROWS, mask=~RESETS.T[..., None]),
    layout_in_unpad=lambda one: treescan.unpad(jnp.ones((2, 3)), LENGTHS),
    batch_not_in_carry=lambda one: mask_scan(step, {"h": one * jnp.ones((2, 5)), "count": one}, ROWS, lengths=LENGTHS),
    batch_not_in_x=lambda one: mask_scan(step, pair(one), {"x": ROWS, "time": XS}, lengths=LENGTHS),
    batch_not_in_y=lambda one: masked(one, lambda carry, x: (carry, {"mean": x.mean(), "x": x})),
    batch_axes_no_prefix=lambda one: mask_scan(
        step, {"h": pair(one)}, ROWS, lengths=LENGTHS, row_axes={"carry": {"c": 0}}
    ),
    fill_nan_in_int=lambda one: masked(one, lambda carry, x: (carry, jnp.ones(2, int)), fill=jnp.nan),
    fill_complex_in_float=lambda one: masked(one, fill=1j),
    fill_no_prefix=lambda one: masked(one, fill={"token": 0}),
    resets_wrong_length=lambda one: masked(one, resets=RESETS[:2]),
    resets_of_other_rows=lambda one: masked(one, resets=jnp.zeros((3, 4), bool)),
    resets_of_other_rows_than_mask=lambda one: mask_scan(
        step, pair(one), ROWS, mask=~RESETS, resets=jnp.zeros((3, 4), bool)
    ),
    reset_to_without_resets=lambda one: masked(one, reset_to=0.0),
    reset_to_no_prefix=lambda one: resetting(one, {"h": 0.0, "count": 0}),
    reset_to_of_other_types=lambda one: resetting(one, {"h": jnp.zeros((2, 4)), "n": 0.5 * one}),
    reset_to_a_number_that_does_not_fit=lambda one: resetting(one, 0.5),
    reset_to_of_a_weak_init=lambda one: mask_scan(
        counted, {"h": jnp.full(2, 0), "n": jnp.full(2, 0)}, ROWS, resets=RESETS, reset_to={"h": 0.5, "n": 300}
    ),
    reset_to_a_text=lambda one: resetting(one, {"h": "zeros", "n": 0}),
    reset_to_of_a_function_that_returns_none=lambda one: resetting(one, lambda init: None),
    reset_to_of_a_shared_leaf=lambda one: resetting(
        one, {"h": 0.0, "n": 0}, {"h": pair(one), "n": jnp.int32(0)}, row_axes={"carry": {"h": 0, "n": None}}
    ),
    reset_to_of_a_static_leaf=lambda one: resetting(one, {"h": 0.0, "f": 1.0}, {"h": pair(one), "f": jnp.tanh}),
    reset_to_a_number_of_a_custom_carry=lambda one: resetting(
        one, {"h": 0.0, "last": 0.0}, {"h": pair(one), "last": treescan.carries.window(one * jnp.ones((3, 2)))}
    ),
    reset_to_a_number_of_keys=lambda one: resetting(
        one, 0, {"h": pair(one), "key": jax.random.split(jax.random.key(0), 2)}
    ),
    packed_inits_with_reset_to=lambda one: packed_from(
        one, {"h": jnp.zeros((3, 4)), "n": jnp.zeros(3, jnp.int32)}, reset_to=0
    ),
    packed_inits_of_another_structure=lambda one: packed_from(one, (jnp.zeros((3, 4)), jnp.zeros(3, jnp.int32))),
    packed_inits_of_other_types=lambda one: packed_from(one, {"h": jnp.zeros((2, 4)), "n": one * jnp.zeros(3)}),
    time_axis_two=lambda one: masked(one, time_axis=2),
    time_first_mask_of_batch_first_xs=lambda one: mask_scan(
        step, pair(one), ROWS.swapaxes(0, 1), mask=~RESETS, time_axis=1
    ),
    compact_without_chunks=lambda one: masked(one, chunk=0, compact=True),
    compact_single_row=lambda one: mask_scan(step, one, XS, lengths=2, compact=True),
    compact_tier_above_batch=lambda one: masked(one, compact=(1, 4)),
    packed_with_time_axis=lambda one: mask_scan(step, pair(one), FEATURES, time_axis=1),
    remat_unknown=lambda one: scan(step, one, XS, remat="steps"),
    lengths_float=lambda one: mask_scan(step, pair(one), ROWS, lengths=np.array([3.0, 1.0], np.float32)),
    mask_not_bool=lambda one: mask_scan(step, pair(one), ROWS, mask=np.ones((3, 2), np.float32)),
    row_axes_of_the_carry_alone=lambda one: masked(one, row_axes={"h": 0}),
    row_axes_tuple=lambda one: masked(one, row_axes=(0, None)),
    time_axis_of_ys_not_there=lambda one: masked(one, time_axis={"ys": 4}),
    batch_axes_str=lambda one: masked(one, row_axes={"x": "batch"}),
    fill_array=lambda one: masked(one, fill=jnp.zeros(4)),
    fill_traced=lambda one: jax.vmap(lambda fill: masked(one, fill=fill))(jnp.ones(2)),
    fill_str=lambda one: masked(one, fill="none"),
    resets_not_bool=lambda one: masked(one, resets=np.zeros((3, 2), np.float32)),
    compact_str=lambda one: masked(one, compact="rows"),
    compact_zero_rows=lambda one: masked(one, compact=(0, 1)),
    chunk_float=lambda one: masked(one, chunk=2.5),
    # Padding and packing.
    pad_array=lambda one: treescan.pad(ROWS),
    pad_length_float=lambda one: treescan.pad([words(3)], length=5.0),
    unpad_lengths_float=lambda one: treescan.unpad(ROWS, np.array([3.0, 1.0])),
    length_mask_of_lists=lambda one: treescan.length_mask([[3, 1], [2]], 3),
    length_mask_without_length=lambda one: treescan.length_mask(LENGTHS, None),
    pack_inits_that_are_stacked=lambda one: treescan.pack([words(3), words(4)], init={"h": jnp.zeros((2, 4))}),
    pack_of_ids_that_are_floats=lambda one: of_ids(IDS.astype(np.float32)),
    pack_of_ids_without_time_axis=lambda one: treescan.Packed.from_segment_ids(IDS, IDS),
    pack_of_ids_time_axis_two=lambda one: of_ids(time_axis=2),
    pack_of_ids_of_a_single_row=lambda one: of_ids(IDS[0]),
    pack_of_ids_of_other_data=lambda one: of_ids(data={"tokens": IDS, "x": np.ones((3, 2, 4)), "row": np.ones(2)}),
    pack_of_ids_negative=lambda one: of_ids(IDS - 1),
    pack_of_ids_that_return=lambda one: of_ids(np.array([[1, 1, 2], [1, 0, 1]])),
    pack_of_ids_that_return_with_time_first=lambda one: of_ids(np.array([[1, 1], [2, 1], [1, 0]]), time_axis=0),
    pack_of_ids_num_segments_too_few=lambda one: of_ids(num_segments=2),
    unpack_padded=lambda one: treescan.unpack(PADDED.data, PADDED),
    repad_of_padded=lambda one: treescan.repad(PADDED.data, PADDED),
    pad_nothing=lambda one: treescan.pad([]),
    pad_lists_of_numbers=lambda one: treescan.pad([[1, 2, 3], [4, 5]]),
    pad_without_steps=lambda one: treescan.pad([words(3) | {"label": 1, "speaker": "ann"}] * 6),
    pad_without_leaves=lambda one: treescan.pad([words(3), None]),
    pad_structures_differ=lambda one: treescan.pad(
        [words(3), {"token": np.ones(3)}, words(1) | {"time": np.ones(1)}, list(words(2).values())]
    ),
    pad_types_differ=lambda one: treescan.pad(
        [
            words(3, np.int8),
            words(3),
            words(2) | {"features": np.ones((2, 5))},
            words(5) | {"features": np.ones((6, 4))},
        ]
    ),
    pad_too_long=lambda one: treescan.pad([words(3), words(7)], length=5),
    pad_length_negative=lambda one: treescan.pad([words(3)], length=-1),
    pad_fill_does_not_fit=lambda one: treescan.pad([words(3)], fill=float("nan")),
    pad_fill_array=lambda one: treescan.pad([words(3)], fill={"token": 0, "features": np.zeros(4)}),
    pad_fill_no_prefix=lambda one: treescan.pad([words(3)], fill={"token": -1}),
    unpad_without_lengths=lambda one: treescan.unpad(PADDED.data),
    unpad_batch_first=lambda one: treescan.unpad({"x": ROWS, "y": ROWS.swapaxes(0, 1)}, [3, 1]),
    unpad_too_long=lambda one: treescan.unpad(ROWS, TOO_LONG),
    unpad_single=lambda one: treescan.unpad(XS, 3),
    padded_mask_out_of_range=lambda one: treescan.Padded(ROWS, TOO_LONG).mask,
    length_mask_out_of_range=lambda one: treescan.length_mask(TOO_LONG, 3),
    pack_too_few_rows=lambda one: treescan.pack([words(3), words(4), words(4)], rows=1, length=6),
    pack_no_rows=lambda one: treescan.pack([words(3)], rows=0),
    pack_too_long=lambda one: treescan.pack([words(3), words(7)], length=5),
    pack_inits_of_other_structures=lambda one: treescan.pack(
        [words(3), words(4), words(4)], init=[{"h": one, "c": one}, {"h": one}, {"h": one, "c": jnp.ones(2)}]
    ),
    pack_inits_of_other_sequences=lambda one: treescan.pack([words(3), words(4)], init=[one]),
    pack_inits_with_a_function=lambda one: treescan.pack([words(3), words(4)], init=[{"h": one, "f": encode}] * 2),
    last_other_rows=lambda one: treescan.last(ROWS[:, :1], treescan.pad([XS, XS]), reverse=False),
    unpad_lengths_twice=lambda one: treescan.unpad(PADDED, PADDED.lengths),
    unpack_other_steps=lambda one: treescan.unpack({"y": LONG.data["token"][1:], "loss": one}, LONG),
    repad_other_steps=lambda one: treescan.repad({"y": LONG.data["token"][1:], "loss": one}, LONG),
    repad_fill_no_prefix=lambda one: treescan.repad(PACKED.data, PACKED, fill={"token": 0}),
    last_swapped=lambda one: treescan.last(PACKED, PACKED.data, reverse=False),
    last_without_direction=lambda one: treescan.last(PACKED.data, PACKED),
    last_of_direction_as_text=lambda one: treescan.last(PACKED.data, PACKED, reverse="yes"),
)
