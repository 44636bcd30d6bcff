"""Options that do not exist or have the wrong type: exactly the lines marked `# error` are errors. Never run."""

import jax
import jax.numpy as jnp
from jax import Array

from treescan import (
    Remat,
    accumulate,
    fold,
    fori,
    last,
    length_mask,
    mask_scan,
    pack,
    pad,
    plan_remat,
    scan,
    unpack,
    unpad,
)

xs, one, lengths = jnp.arange(3.0), jnp.ones(()), jnp.array([3, 1])


def step(carry: Array, x: Array) -> tuple[Array, Array]:
    return carry, x


def fold_step(carry: Array, x: Array) -> Array:
    return carry


def keyed_step(carry: Array, x: Array, *, key: Array) -> tuple[Array, Array]:
    return carry, x


scan(step, one, xs, length=3, reverse=True, unroll=2, name="loop")
scan(step, one, xs, length=3.0)  # error
scan(step, one, xs, length="3")  # error
scan(step, one, xs, reverse="yes")  # error
scan(step, one, xs, reverse=1)  # error
scan(step, one, xs, unroll=2.0)  # error
scan(step, one, xs, name=3)  # error
scan(step, one, xs, reversed=True)  # error
scan(step, one, xs, lengths=lengths)  # error
scan(step, one, xs, None, False, 1, 0)  # error
scan(keyed_step, one, xs, key=jax.random.key(0))
scan(keyed_step, one, xs, key=0)  # error

fold(fold_step, one, xs, reverse=True)
fold(fold_step, one, xs, revers=True)  # error
fold(fold_step, one, xs, unroll="all")  # error
fold(fold_step, one, xs, out_axes=1)  # error
accumulate(fold_step, one, xs, out_axes=1)
accumulate(fold_step, one, xs, length="3")  # error

fori(0, 3, fold_step, one, reverse=True)
fori(0, 3.0, fold_step, one)  # error
fori(0, 3, fold_step, one, in_axes=1)  # error
fori(0, 3, fold_step, one, length=3)  # error

mask_scan(step, one, xs, lengths=lengths, reverse=True)
mask_scan(step, one, xs, lengths="3")  # error
mask_scan(step, one, xs, lengths=lengths, padding=0)  # error
mask_scan(step, one, xs, lengths=lengths, unroll=2.0)  # error
mask_scan(step, one, xs, lengths)  # error
mask_scan(step, one, xs, lengths=lengths, chunk=8, compact=(1, 4), resets=None, time_axis=0)
mask_scan(step, one, xs, lengths=lengths, compact="rows")  # error
mask_scan(step, one, xs, lengths=lengths, time_axis=None)  # error
scan(step, one, xs, remat="nested")
scan(step, one, xs, remat="steps")  # error
fold(fold_step, one, xs, remat=True)  # error
scan(step, one, xs, remat=Remat)  # error
fold(fold_step, one, xs, remat=Remat(levels=3), truncate=4)
scan(step, one, xs, remat=Remat.fit(2.0))  # error
scan(step, one, xs, remat=Remat(levels="3"))  # error
scan(step, one, xs, remat=Remat(segments=3))  # error
mask_scan(step, one, xs, lengths=lengths, remat=Remat(policy=3))  # error
plan_remat(step, one, xs)  # error
plan_remat(step, one, xs, remat="steps")  # error
scan(step, one, xs, truncate="4")  # error
scan(step, one, xs, truncate=4.0)  # error
fold(fold_step, one, xs, save="last")  # error
fori(0, 3, fold_step, one, save=2)  # error
mask_scan(step, one, xs, lengths=lengths, save={"y": 2}, truncate=[4])  # error
scan(step, one, xs, saves="last")  # error

unpad(pad([one]))
pad(one)  # error
pad([one], 4)  # error
pad([one], length=4.0)  # error
pack([one], rows="2")  # error
length_mask(lengths, lengths)  # error
unpad(xs)  # error
unpad(pad([one]), lengths, 3)  # error
unpack(pad([one]), xs)  # error
last(xs, pack([one]), reverse=False)  # error
last(pack([one]), xs)  # error
last(pad([one]), xs, reverse="yes")  # error
