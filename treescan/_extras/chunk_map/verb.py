"""`chunk_map`: a function over chunks of an axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp

from ..._arguments import rows_of_steps, with_axes
from ..._avals import Array, LeafAxes, PyTree, describe_leaf, describe_node, devices_of, shape_of, shards_of
from ..._body.call import needs_keyword
from ..._body.signature import CHUNK_MAP
from ..._errors import CHUNK_WORDS, BodyFault, Misuse, Row, expect, expect_int, explain, verb
from ..._options.progress.meters import Progress
from ..._remat.remat import Recompute, check_remat
from ..._transforms.axes import spread_axes, static_axes
from ..._tree import Prefix, Static, leaves_with_path, same_structure
from ..._types import Axes, ChunkOptions, ProgressLike, RematLike, ValidMap, X, Y
from ..._verbs.options import showing
from ..._verbs.prepare import Prepared, body_of, prepare, refuse_batches
from .in_chunks import InChunks, SumChunks, in_groups


@overload
def chunk_map(f: Callable[[X], Y], xs: X, chunk_size: int, **options: Unpack[ChunkOptions]) -> Y: ...
@overload
def chunk_map(f: ValidMap[X, Y], xs: X, chunk_size: int, **options: Unpack[ChunkOptions]) -> Y: ...
@verb
def chunk_map(
    f: Callable[..., Any],
    xs: PyTree,
    chunk_size: int,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    reduce: Literal["sum"] | None = None,
    remat: RematLike | None = "step",
    unroll: int | bool = 1,
    progress: ProgressLike = None,
) -> PyTree:
    """Calls a function on chunks of `xs`, one after the other, in the memory of one chunk.

    The result is that of `f(xs)`, for a function that treats entries independently. With `reduce="sum"` it is the sum
    of what `f` returns for the chunks, for example of losses and their gradients.

    On one device, the entries of a chunk follow each other. On several devices, a chunk has entries from all over the
    axis, so that each device computes its own share of it; results are in the order of the entries.

    Args:
        f: the function, `f(chunk) -> y`. It receives leaves `[chunk_size, ...]`, and returns leaves `[chunk_size, ...]`
            too, unless they are added up. If n is not a multiple of `chunk_size`, the entries that are left over are a
            smaller chunk, for which `f` is traced and compiled once more. If `f` has a keyword `valid`, that chunk is
            filled up with copies of the last entry instead, and every chunk comes with `valid`, bool[chunk_size]. What
            `f` returns for the copies is dropped. With `reduce="sum"`, `f` itself must leave them out.
        xs: the inputs: any pytree with leaves `[n, ...]`.
        chunk_size: the number of entries of a chunk. If devices share the entries, the number of devices has to divide
            it: on an explicit mesh it is an error otherwise, on others every device computes whole chunks.
        in_axes: the axis of the entries, for each leaf of xs (a prefix tree). The chunk has it in the same place. With
            None, every chunk receives the whole leaf. Axes other than 0 cost a transposed copy.
        out_axes: the axis of the entries, for each leaf of y (a prefix tree).
        reduce: "sum" adds up what `f` returns, in the dtypes that it returns. Nothing is then kept for each entry.
        remat: what the gradient recomputes, as for `treescan.scan`, with chunks for steps. By default each chunk, so
            the gradient saves nothing of it. None saves what `f` computes for all chunks.
        unroll: as for `treescan.scan`.
        progress: as for `treescan.scan`; it counts whole chunks.

    Returns:
        What `f` returns, joined to leaves `[n, ...]`; with `reduce="sum"` the sum, 0 if there are no entries.

    Raises:
        ArgumentError: if an argument is out of range or does not fit xs.
        BodyError: if `f` is not callable, if what it returns does not have the entries of the chunk, or if it cannot
            be added up.
        SignatureError: if a jaxtyping annotation of `f` does not hold.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> xs = jnp.arange(5.0)
        >>> print(treescan.chunk_map(lambda x: x**2, xs, 2))
        [ 0.  1.  4.  9. 16.]
        >>> print(treescan.chunk_map(jnp.sum, xs, 2, reduce="sum"))
        10.0
    """
    try:
        size = expect_int(chunk_size, "chunk_size", _WHOLE, least=1, small=_WHOLE)
        adds = reduce is not None
        expect(not adds or (isinstance(reduce, str) and reduce == "sum"), "reduce", '"sum" or None', reduce, _ADDS)
        if adds and out_axes != 0:
            says = '{call}: `out_axes` has no axis to place, because `reduce="sum"` adds it up.'
            raise Misuse(says, "Leave it out.")
        out = None if adds else static_axes("out_axes", out_axes)
        plan, (body, _) = check_remat(remat), body_of(f, CHUNK_MAP)
        if needs_keyword(body, "key"):
            raise BodyFault(
                "{body} needs the keyword `key`, which {verb} does not pass to it.",
                "Give each entry a key: pass `(xs, jax.random.split(key, n))` as xs.",
            )
        if isinstance(progress, Progress) and progress.show is not None:
            cure = "Leave it out, or call `treescan.fold`, whose carry is shown."
            raise Misuse("{call}: `show` of a `Progress` is given the carry, and {verb} has none.", cure)
        refuse_batches(xs, in_axes, CHUNK_MAP)
        call = prepare(CHUNK_MAP, f, (), xs, measure=_entries, in_axes=in_axes, unroll=unroll, masked=True)
        again = None if plan is None else Recompute(Static(plan))
        return _run(call, min(size, call.call.length or size), out, again, progress)
    except Exception as error:
        explained = explain(error, "chunk_map", f, words=CHUNK_WORDS)
    raise explained


_WHOLE = "It is the number of entries in a chunk: an int of at least 1, known when the program is traced."
_ADDS = '"sum" adds up what the function returns for the chunks. None joins it along the axis.'


def _entries(xs: PyTree, axes: LeafAxes | None) -> int:
    """The number of entries along the axes of xs."""
    named = with_axes(leaves_with_path("xs", xs), axes)
    if not named:
        whole = "every leaf of xs has in_axes None" if jax.tree.leaves(xs) else "xs holds no arrays"
        raise Misuse(f"{{call}}: there is nothing to cut into chunks, because {whole}.", "Call the function itself.")
    scalars = [Row(path, "an axis of entries", describe_leaf(leaf)) for path, leaf, _ in named if not shape_of(leaf)]
    if scalars:
        raise Misuse(
            "{call}: xs has leaves without an axis to cut into chunks.",
            "If all chunks share a leaf, give it None in `in_axes`. If it is a list of numbers, make an array of it.",
            rows=scalars,
        )
    sizes = [leaf.shape[axis] for _, leaf, axis in named]
    if any(not isinstance(size, int) for size in sizes):
        cure = "Export with a known number, or call the function on all of them at once."
        raise Misuse("{call}: the number of entries is symbolic, so they cannot be cut into chunks.", cure)
    if len(set(sizes)) > 1:
        raise Misuse(
            "{call}: the leaves of xs do not have the same number of entries.",
            "All leaves of xs are cut together. `in_axes` names the axis of each; None is for a leaf that all chunks "
            "share.",
            header=("leaf", "entries", "is"),
            rows=rows_of_steps(xs, axes),
        )
    return sizes[0]


def _run(call: Prepared, size: int, out: Prefix | None, remat: Recompute | None, progress: ProgressLike) -> PyTree:
    """The result of all chunks, the smaller one at the end included."""
    entries, masked = call.call.length, call.call.sees_valid
    axes = call.axes or (0,) * len(jax.tree.leaves(call.given.xs))
    groups = math.gcd(entries, size, devices_of(call.given.xs))
    _check_shares(call.given.xs, axes, size)

    def run(start: int, stop: int, size: int, shown: ProgressLike) -> PyTree:
        chunks = dataclasses.replace(call.call, length=-(-(stop - start) // size))
        cut = InChunks(start, size, stop - start, groups, axes, call.call.frozen, masked, out)
        part = dataclasses.replace(call, call=chunks)
        return part.run(cut, remat, SumChunks() if out is None else None, showing(shown, part))[1]

    left = 0 if masked else entries % size
    most = run(0, entries - left, size, progress)
    return _together(most, run(entries - left, entries, left, False), out, groups, size, left) if left else most


def _check_shares(xs: PyTree, axes: LeafAxes, size: int) -> None:
    """Refuses chunks of which devices cannot have equal shares, where types say that they share the entries."""
    shards = [(path, leaf, shards_of(leaf, axis)) for path, leaf, axis in with_axes(leaves_with_path("xs", xs), axes)]
    rows = [Row(path, str(count), describe_leaf(leaf)) for path, leaf, count in shards if size % count]
    if rows:
        least = math.lcm(*(count for _, _, count in shards))
        raise Misuse(
            f"{{call}}: devices cannot have equal shares of chunks of {size} entries.",
            "The entries are split over devices, and each computes its share of each chunk. Choose a `chunk_size` that "
            f"is a multiple of {least}.",
            header=("leaf", "devices", "is"),
            rows=rows,
        )


def _together(most: PyTree, last: PyTree, out: Prefix | None, groups: int, size: int, left: int) -> PyTree:
    """The results of whole chunks, and those of the smaller one."""
    rows, axes = [], () if out is None else spread_axes("out_axes", out.tree, most, "y")
    if not same_structure(most, last):
        rows = [Row("y", describe_node(most), describe_node(last))]
    else:
        pairs = zip(leaves_with_path("y", most), jax.tree.leaves(last), axes or jax.tree.leaves(most), strict=True)
        rows = [
            Row(path, describe_leaf(a), describe_leaf(b))
            for (path, a), b, axis in pairs
            if a.dtype != b.dtype or _others(a, axis, out) != _others(b, axis, out)
        ]
    if rows:
        sums = [] if out else ["Return sums over the entries of the chunk, for example `jnp.sum(losses)`."]
        raise BodyFault(
            f"{{body}} returned other types for the last {left} entries than for chunks of {size}.",
            *sums,
            "Give it a keyword `valid`: the last chunk is then filled up, and `valid` says which of its entries count. "
            "Or choose a `chunk_size` that divides the number of entries.",
            header=("leaf", f"of {size}", f"of {left}"),
            rows=rows,
        )
    if out is None:
        return jax.tree.map(jnp.add, most, last)
    leaves = zip(jax.tree.leaves(most), jax.tree.leaves(last), axes, strict=True)
    joined = [_joined(a, b, (axis or 0) % a.ndim, groups) for a, b, axis in leaves]
    return jax.tree.unflatten(jax.tree.structure(most), joined)


def _joined(most: Array, last: Array, axis: int, groups: int) -> Array:
    """The results for the entries of each group, one group after the other."""
    both = jnp.concatenate([in_groups(part, axis, groups) for part in (most, last)], axis=axis + 1)
    return jax.lax.collapse(both, axis, axis + 2)


def _others(leaf: Array, axis: int, out: Prefix | None) -> tuple[int, ...]:
    """The sizes of a leaf, but for that along which results are joined."""
    shape = list(leaf.shape)
    return tuple(shape if out is None else (shape.pop(axis), shape)[1])
