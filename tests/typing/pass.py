"""What the static types infer: `assert_type` is checked by pyright and mypy, see test_typing.py. Never run."""

import functools
from typing import Literal, NamedTuple, assert_type

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from treescan import (
    Packed,
    Padded,
    Remat,
    accumulate,
    associative_scan,
    chunk_map,
    fold,
    fori,
    last,
    length_mask,
    mask_scan,
    measure_remat,
    pack,
    pad,
    pipeline,
    plan_remat,
    repad,
    scan,
    stream,
    to_stages,
    unpack,
    unpad,
)
from treescan.types import Measurements, Part, RematPlan

xs, one, key = jnp.arange(3.0), jnp.ones(()), jax.random.key(0)


class State(NamedTuple):
    h: Array
    rng: Array


def keys(key: Array) -> Array:
    """Stands for `treescan.carries.keys`: to a checker, a custom carry in init is what the body sees in its place."""
    return key


# scan


def step(carry: Array, x: Array) -> tuple[Array, dict[str, Array]]:
    return carry + x, {"x": x}


def named_step(state: State, x: Array) -> tuple[State, Array]:
    return state._replace(h=state.h + x), x


def tuple_step(carry: tuple[Array, State], x: tuple[Array, Array]) -> tuple[tuple[Array, State], Array]:
    return carry, x[0]


def idle_step(carry: Array, x: None) -> tuple[Array, Array]:
    return carry, carry


def typed_step(carry: Float[Array, " n"], x: Float[Array, " n"]) -> tuple[Float[Array, " n"], Float[Array, ""]]:
    return carry + x, x.sum()


def scaled_step(scale: float, carry: Array, x: Array) -> tuple[Array, int]:
    return carry * scale, 0


assert_type(scan(step, one, xs), tuple[Array, dict[str, Array]])
assert_type(scan(step, one, xs, in_axes=None, out_axes={"x": -1}, length=3), tuple[Array, dict[str, Array]])
assert_type(scan(named_step, State(one, keys(key)), xs), tuple[State, Array])
assert_type(scan(tuple_step, (one, State(one, keys(key))), (xs, xs)), tuple[tuple[Array, State], Array])
assert_type(scan(idle_step, one, length=3), tuple[Array, Array])
assert_type(scan(typed_step, xs, xs), tuple[Array, Array])
assert_type(scan(functools.partial(scaled_step, 0.5), one, xs), tuple[Array, int])
assert_type(scan(lambda carry, x: (carry + x, State(carry, x)), one, xs), tuple[Array, State])


# bodies that take `key`


def keyed_step(carry: Array, x: Array, *, key: Array) -> tuple[Array, State]:
    return carry + x, State(carry, key)


def keyed_idle_step(carry: Array, x: None, *, key: Array) -> tuple[Array, Array]:
    return carry, carry


assert_type(scan(keyed_step, one, xs, key=key), tuple[Array, State])
assert_type(scan(keyed_idle_step, one, length=3, key=key), tuple[Array, Array])


# fold and accumulate


def fold_step(carry: State, x: Array) -> State:
    return carry


def idle_fold_step(carry: State, x: None) -> State:
    return carry


def keyed_fold_step(carry: State, x: Array, *, key: Array) -> State:
    return carry


assert_type(fold(fold_step, State(one, key), xs), State)
assert_type(fold(idle_fold_step, State(one, key), length=3), State)
assert_type(fold(keyed_fold_step, State(one, key), xs, key=key), State)
assert_type(fold(lambda carry, x: carry + x, one, xs), Array)
assert_type(accumulate(fold_step, State(one, key), xs, out_axes=-1), State)
assert_type(accumulate(keyed_fold_step, State(one, key), xs, key=key, reverse=True), State)
assert_type(accumulate(lambda carry, x: carry + x, one, xs), Array)


# fori


def index_step(i: Array, carry: State) -> State:
    return carry


def keyed_index_step(i: Array, carry: State, *, key: Array) -> State:
    return carry


assert_type(fori(0, 3, index_step, State(one, key)), State)
assert_type(fori(0, 3, keyed_index_step, State(one, key), key=key), State)
assert_type(fori(0, 3, lambda i, carry: carry + i, one), Array)


# associative_scan


def joined(before: State, here: State) -> State:
    return State(before.h + here.h, here.rng)


assert_type(associative_scan(joined, State(xs, key)), tuple[State, State])
assert_type(associative_scan(joined, State(xs, key), 0.0, lengths=one, reverse=True, fill="hold"), tuple[State, State])
assert_type(associative_scan(joined, Padded(State(xs, key), one)), tuple[State, State])
assert_type(associative_scan(jnp.matmul, xs), tuple[Array, Array])

# chunk_map


def chunk_loss(chunk: tuple[Array, State], /, *, valid: Array) -> tuple[Array, State]:
    return chunk


def chunk_state(chunk: State) -> Array:
    return chunk.h


assert_type(chunk_map(chunk_state, State(xs, key), 2), Array)
assert_type(chunk_map(chunk_loss, (xs, State(xs, key)), 2, reduce="sum", remat=None), tuple[Array, State])


# pipeline


def stage(params: Array, x: State, first_layer: Array) -> State:
    return x


def stage_with_args(params: Array, x: State, first_layer: Array, scale: Array) -> State:
    return x


assert_type(pipeline(stage, to_stages(xs, 4), State(xs, key), axis_name="stage", rounds=2), State)
assert_type(pipeline(stage_with_args, xs, State(xs, key), axis_name="stage", args=(one,)), State)


# mask_scan


def valid_step(carry: State, x: Array, *, valid: Array) -> tuple[State, dict[str, Array]]:
    return carry, {"x": x}


def keyed_valid_step(carry: State, x: Array, *, key: Array, valid: Array) -> tuple[State, dict[str, Array]]:
    return carry, {"x": x}


def first_step(carry: State, x: Array, *, first: Array) -> tuple[State, dict[str, Array]]:
    return carry, {"x": x}


def valid_first_step(carry: State, x: Array, *, valid: Array, first: Array) -> tuple[State, dict[str, Array]]:
    return carry, {"x": x}


lengths, mask = jnp.array([3, 1]), jnp.ones((3, 2), bool)
assert_type(mask_scan(named_step, State(one, key), xs, lengths=lengths), tuple[State, Array])
assert_type(
    mask_scan(named_step, State(one, key), xs, lengths=3, fill=0.0, row_axes={"carry": None}), tuple[State, Array]
)
assert_type(mask_scan(valid_step, State(one, key), xs, mask=mask), tuple[State, dict[str, Array]])
assert_type(mask_scan(first_step, State(one, key), xs, mask=mask), tuple[State, dict[str, Array]])
assert_type(mask_scan(valid_first_step, State(one, key), xs, mask=mask), tuple[State, dict[str, Array]])
assert_type(
    mask_scan(first_step, State(one, key), xs, mask=mask, time_axis={"xs": 1}, row_axes={"x": 1, "y": None}),
    tuple[State, dict[str, Array]],
)
assert_type(mask_scan(keyed_step, one, xs, lengths=lengths, key=key), tuple[Array, State])
assert_type(mask_scan(keyed_valid_step, State(one, key), xs, mask=mask, key=key), tuple[State, dict[str, Array]])
assert_type(mask_scan(lambda carry, x: (carry + x, x), one, xs, lengths=lengths), tuple[Array, Array])


# padding and packing


sequences = [State(xs, xs), State(xs, xs)]
padded, packed = pad(sequences, length=4, fill=-1), pack(sequences, rows=2)
assert_type(padded, Padded[State])
assert_type(padded.data, State)


def step_of_states(carry: Array, x: State) -> tuple[Array, dict[str, Array]]:
    return carry + x.h, {"h": x.h}


assert_type(mask_scan(step_of_states, one, padded, chunk=8, remat="nested"), tuple[Array, dict[str, Array]])
assert_type(mask_scan(named_step, State(one, key), xs, resets=mask, compact=True, time_axis=1), tuple[State, Array])
assert_type(mask_scan(named_step, State(one, key), xs, resets=mask, reset_to=lambda init: init), tuple[State, Array])
assert_type(scan(named_step, State(one, key), xs, remat=Remat(levels=3), truncate=8), tuple[State, Array])
assert_type(scan(named_step, State(one, key), xs, remat=Remat.fit(2**30), save="last"), tuple[State, Array])
assert_type(mask_scan(step_of_states, one, padded, save={"h": 8}, truncate=2), tuple[Array, dict[str, Array]])
assert_type(plan_remat(named_step, State(one, key), xs, remat=Remat(chunk=8, offload="pinned_host")), RematPlan)
assert_type(measure_remat(scan, named_step, State(one, key), xs, plans=[None, Remat()], seconds=9), Measurements)
assert_type(plan_remat(named_step, State(one, key), xs, remat="auto").remat, Remat | Literal["auto"] | None)
assert_type(padded.mask, Array)
assert_type(padded.efficiency, float)
assert_type(unpad(padded), list[State])
assert_type(unpad({"y": one}, padded.lengths), list[dict[str, Array]])
assert_type(length_mask(lengths, 3), Array)
assert_type(packed, Packed[State])
assert_type(packed.data, State)
assert_type(packed.index.row, Array)
assert_type((packed.steps, packed.rows), tuple[int, int])
assert_type((packed.segment_ids, packed.positions), tuple[Array, Array])
assert_type(Packed.from_segment_ids(State(one, key), lengths, time_axis=1, num_segments=4), Packed[State])
assert_type(unpack({"y": one}, packed), list[dict[str, Array]])
assert_type(last(packed.data, packed, reverse=False), State)
assert_type(last(one, padded, reverse=True), Array)


def beside(state: State, x: tuple[State, Array]) -> tuple[State, Array]:
    return state, x[1]


assert_type(mask_scan(beside, State(one, key), (packed, one)), tuple[State, Array])
assert_type(repad(packed.data, packed), Padded[State])


# stream


def on_part(part: Part[Array, dict[str, Array]]) -> None:
    assert_type(part.carry, Array)
    assert_type(part.ys, dict[str, Array])


def noisy(carry: Array, x: Array, /, *, key: Array) -> tuple[Array, Float[Array, ""]]:
    return carry + x, x


assert_type(stream(step, one, xs, part=2, save="last"), tuple[Array, dict[str, Array]])
assert_type(stream(step, one, xs, part=2, on_part=on_part)[0], Array)
assert_type(stream(step, one, lambda start, n: xs[start : start + n], part=2, length=3, lengths=3)[0], Array)
assert_type(stream(noisy, one, xs, part=2, key=key, save="last"), tuple[Array, Array])
for part in stream(step, one, xs, part=2, checkpoint="folder", donate=True, parts=True):
    assert_type(part.carry, Array)
    assert_type(part.ys, dict[str, Array])
    assert_type(part.start, int)
