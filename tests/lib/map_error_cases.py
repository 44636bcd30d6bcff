"""Cases of `test_errors.py` of `chunk_map`. Its chunks are of ones, and have no carry."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import case, exported, on_mesh
from jax.sharding import PartitionSpec

from treescan import chunk_map
from treescan.meters import Progress

XS = jnp.arange(6.0)


def square(chunk):
    return chunk * chunk


def mean(chunk):
    return {"loss": jnp.mean(chunk), "each": chunk}


def run(one: Any, size: Any = 4, xs: Any = XS, f: Any = square, **options: Any) -> Any:
    xs = jax.tree.map(lambda x: x * one.astype(x.dtype) if x.ndim else x, xs)
    return (chunk_map(f, xs, size, **options),)


@on_mesh()
def chunk_map_size_of_no_shares(one):
    xs = jax.sharding.reshard(jnp.ones((8, 4)) * one, PartitionSpec("rows"))
    return chunk_map(square, {"x": xs, "y": jnp.ones(8)}, 3)


def flags(chunk):
    return {"any": jnp.any(chunk > 0), "sum": jnp.sum(chunk)}


def by_size(chunk):
    return chunk if len(chunk) == 4 else (chunk,)


def all_of_it(chunk):
    return jnp.outer(chunk, chunk)


def with_key(chunk, *, key):
    return chunk


PAIR = {"h": jnp.ones((6, 2)), "t": jnp.ones(5)}

case()(
    chunk_map_size_zero=lambda one: run(one, 0),
    chunk_map_size_float=lambda one: run(one, 4.0),
    chunk_map_size_bool=lambda one: run(one, True),
    chunk_map_reduce_unknown=lambda one: run(one, reduce="mean"),
    chunk_map_without_entries=lambda one: run(one, f=mean),
    chunk_map_without_entries_along_axis=lambda one: run(one, xs=jnp.ones((6, 4)), out_axes=1),
    chunk_map_sum_of_bools=lambda one: run(one, f=flags, reduce="sum"),
    chunk_map_other_remainder=lambda one: run(one, f=all_of_it),
    chunk_map_other_structure=lambda one: run(one, f=by_size),
    chunk_map_other_sum=lambda one: run(one, reduce="sum"),
    chunk_map_sizes_differ=lambda one: run(one, xs=PAIR),
    chunk_map_scalars=lambda one: run(one, xs={"h": XS, "scale": jnp.ones(())}),
    chunk_map_no_arrays=lambda one: run(one, xs=()),
    chunk_map_all_whole=lambda one: run(one, in_axes=None),
    chunk_map_in_axes_out_of_range=lambda one: run(one, in_axes=1),
    chunk_map_out_axes_no_prefix=lambda one: run(one, out_axes={"a": 0}),
    chunk_map_remat_auto=lambda one: run(one, remat="auto"),
    chunk_map_progress_show=lambda one: run(one, progress=Progress(show=lambda carry: {"loss": carry})),
    chunk_map_needs_key=lambda one: run(one, f=with_key),
    chunk_map_not_callable=lambda one: run(one, f=np.ones(3)),
    chunk_map_option_misspelt=lambda one: run(one, batch_size=4),
    chunk_map_two_arguments=lambda one: run(one, f=lambda x, y: x),
    chunk_map_size_array=lambda one: run(one, np.array([4])),
    chunk_map_of_symbolic_entries=lambda one: exported(lambda xs: run(one, xs=xs)[0], "n"),
)
