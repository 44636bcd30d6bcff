"""Bodies and options that do not fit: exactly the lines marked `# error` are errors to pyright and mypy. Never run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from treescan import (
    Packed,
    Remat,
    accumulate,
    associative_scan,
    chunk_map,
    fold,
    fori,
    last,
    length_mask,
    mask_scan,
    pack,
    pad,
    pipeline,
    plan_remat,
    scan,
    stream,
    unpack,
    unpad,
)

xs, one, key, lengths = jnp.arange(3.0), jnp.ones(()), jax.random.key(0), jnp.array([3, 1])


class State(NamedTuple):
    h: Array


class Other(NamedTuple):
    h: Array


def step(carry: State, x: Array) -> tuple[State, Array]:
    return carry, x


def pair_step(carry: State, x: tuple[Array, Array]) -> tuple[State, Array]:
    return carry, x[0]


def idle_step(carry: State, x: None) -> tuple[State, None]:
    return carry, None


def changing_step(carry: State, x: Array) -> tuple[Other, Array]:
    return Other(carry.h), x


def fold_step(carry: State, x: Array) -> State:
    return carry


def index_step(i: Array, carry: State) -> State:
    return carry


def triple_step(carry: State, x: Array) -> tuple[State, Array, Array]:
    return carry, x, x


def keyed_step(carry: State, x: Array, *, key: Array) -> tuple[State, Array]:
    return carry, x


def valid_step(carry: State, x: Array, *, valid: Array) -> tuple[State, Array]:
    return carry, x


init = State(one)
scan(step, init, xs)
scan(pair_step, init, xs)  # error
scan(step, init, (xs, xs))  # error
scan(step, init, length=3)  # error
scan(idle_step, init, xs)  # error
scan(step, Other(one), xs)  # error
scan(changing_step, init, xs)  # error
scan(fold_step, init, xs)  # error
scan(triple_step, init, xs)  # error
scan(init, step, xs)  # error
scan(keyed_step, init, xs, key=key)
scan(keyed_step, init, xs)  # error
scan(step, init, xs, key=key)  # error
scan(valid_step, init, xs)  # error

fold(fold_step, init, xs)
fold(fold_step, Other(one), xs)  # error
fold(fold_step, init, length=3)  # error
accumulate(fold_step, init, xs, key=key)  # error
fori(0, 3, fold_step, init)  # error

mask_scan(valid_step, init, xs, lengths=lengths)
mask_scan(fold_step, init, xs, lengths=lengths)  # error
mask_scan(step, Other(one), xs, lengths=lengths)  # error
mask_scan(step, init, (xs, xs), lengths=lengths)  # error
mask_scan(step, init, pad([one, one]))
mask_scan(step, init, pad([(one, one)]))  # error
mask_scan(keyed_step, init, xs, lengths=lengths)  # error
mask_scan(valid_step, init, xs, lengths=lengths, key=key)  # error


# Options.

scan(step, init, xs, length=3, reverse=True, unroll=2)
scan(step, init, xs, length=3.0)  # error
scan(step, init, xs, reverse=1)  # error
scan(step, init, xs, unroll=2.0)  # error
scan(step, init, xs, name="loop")  # error
scan(step, init, xs, reversed=True)  # error
scan(step, init, xs, lengths=lengths)  # error
scan(step, init, xs, None, False, 1, 0)  # error
scan(keyed_step, init, xs, key=0)  # error

fold(fold_step, init, xs, reverse=True)
fold(fold_step, init, xs, unroll="all")  # error
fold(fold_step, init, xs, out_axes=1)  # error
accumulate(fold_step, init, xs, out_axes=1)
accumulate(fold_step, init, xs, length="3")  # error

fori(0, 3, index_step, init, reverse=True)
fori(0, 3.0, index_step, init)  # error
fori(0, 3, index_step, init, in_axes=1)  # error
fori(0, 3, index_step, init, length=3)  # error

mask_scan(step, init, xs, lengths=lengths, reverse=True)
mask_scan(step, init, xs, lengths="3")  # error
mask_scan(step, init, xs, lengths)  # error
mask_scan(step, init, xs, lengths=lengths, chunk=8, compact=(1, 4), resets=None, time_axis=0)
mask_scan(step, init, xs, lengths=lengths, compact="rows")  # error
mask_scan(step, init, xs, lengths=lengths, time_axis=None)  # error
mask_scan(step, init, xs, lengths=lengths, row_axes={"carry": (0, None)}, time_axis={"xs": (0, None), "mask": 1})
mask_scan(step, init, xs, lengths=lengths, row_axes={"h": 0})  # error
mask_scan(step, init, xs, lengths=lengths, in_axes=1)  # error
fold(fold_step, init, xs, remat=True)  # error
scan(step, init, xs, remat=Remat)  # error
fold(fold_step, init, xs, remat=Remat(levels=3), truncate=4)
scan(step, init, xs, remat=Remat.fit(2.0))  # error
scan(step, init, xs, remat=Remat(levels="3"))  # error
scan(step, init, xs, remat=Remat(segments=3))  # error
mask_scan(step, init, xs, lengths=lengths, remat=Remat(policy=3))  # error
plan_remat(step, init, xs)  # error
plan_remat(step, init, xs, remat="steps")  # error
scan(step, init, xs, truncate=4.0)  # error
fold(fold_step, init, xs, save="last")  # error
fori(0, 3, index_step, init, save=2)  # error
mask_scan(step, init, xs, lengths=lengths, save={"y": 2}, truncate=[4])  # error

unpad(pad([one]))
pad(one)  # error
pad([one], 4)  # error
pad([one], length=4.0)  # error
pack([one], rows="2")  # error
length_mask(lengths, lengths)  # error
unpad(pad([one]), lengths, 3)  # error
unpack(xs, pad([one]))  # error
last(pack([one]), xs, reverse=False)  # error
last(xs, pack([one]))  # error
last(xs, pad([one]), reverse="yes")  # error
Packed.from_segment_ids(xs, lengths)  # error


# stream

stream(step, State(one), xs)  # error
stream(step, State(one), xs, part=2, truncate=2)  # error
stream(step, State(one), xs, part=2, on_part=lambda part: part.carry.cell)  # error

# associative_scan


def joined(before: State, here: State) -> State:
    return here


def of_three(before: State, here: State, other: State) -> State:
    return here


associative_scan(joined, init, lengths=lengths)
associative_scan(joined, Other(one))  # error
associative_scan(of_three, init)  # error
associative_scan(joined, init, axis=0)  # error

# chunk_map


def chunk_state(chunk: State) -> Array:
    return chunk.h


chunk_map(chunk_state, xs, 2)  # error
chunk_map(chunk_state, init)  # error
chunk_map(chunk_state, init, 2, reduce="mean")  # error

# pipeline


def stage(params: Array, x: State, first_layer: Array) -> State:
    return x


pipeline(stage, xs, init)  # error
pipeline(stage, xs, xs, axis_name="stage")  # error
pipeline(stage, xs, init, axis_name="stage", remat="step")  # error
