"""`linear_scan`: the verb."""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from ..._arguments import OF_MASK_SCAN, check_reverse
from ..._avals import Array, ArrayLike, PyTree, TreeDef, vary_over, varying_axes
from ..._batches.batch import take_batches_apart
from ..._errors import STEP_WORDS, Misuse, expect, expect_int, expect_one_of, explain, verb
from ..._options.resets import begins_at
from ..._rows.axes import RowFlags
from ..._rows.checks import check_time_axis
from ..._rows.fill import HOLD, check_fill, fill_leaves
from ..._rows.leaves import mask_of_lengths
from ..._rows.spans import are_valid, at_rows, ends_of, numbers_of
from ..._tree import Prefix
from ..._types import UnkeyedOptions
from .checks import Both, check_flags, leaves_of, refuse_part
from .methods import between_devices
from .rule import recurrence, run
from .step import Given, How, but, like_step

METHODS = ("sequential", "chunked", "parallel")
_WORDS = {**STEP_WORDS, "xs": "b"}
ELSEWHERE = {
    **dict.fromkeys(
        (*UnkeyedOptions.__annotations__, "key"),
        "`treescan.scan` and `treescan.mask_scan` take it, for a loop with a body.",
    ),
    **dict.fromkeys(OF_MASK_SCAN, "`treescan.mask_scan` takes it, for a loop with a body."),
    **dict.fromkeys(("in_axes", "out_axes"), "`time_axis` is the axis of the steps, in a, in b and in the outputs."),
    "length": "The steps are those of b.",
}
"""What other verbs take; see `named_options`."""


@verb
def linear_scan(
    a: PyTree,
    b: PyTree,
    init: PyTree = None,
    *,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    reset_to: PyTree = None,
    reverse: bool = False,
    matrix: bool = False,
    time_axis: int = 0,
    fill: PyTree = 0,
    save: Literal["all", "last"] | None = "all",
    remat: int | None = None,
    method: Literal["sequential", "chunked", "parallel"] | None = None,
    axis_name: str | None = None,
) -> tuple[PyTree, PyTree]:
    """Solves the linear recurrence `h[t] = a[t] * h[t-1] + b[t]`, with masks, resets and packed sequences.

    It returns what `scan` and `mask_scan` of this body return. Its gradient saves a and h, and nothing else:

        def step(h, x):
            a, b = x
            h = a * h + b
            return h, h

    The state is float32 for inputs in bfloat16 and float16, and its gradient saves it as such. Padding of a and b is
    never read, as in `treescan.mask_scan`, in values and in derivatives of any order. A product that makes them, before
    the call, reads it.

    Args:
        a: the factors: a pytree of arrays, real or complex, that is a prefix of b. Each broadcasts to its leaves of b,
            and has as many axes: size 1 along the steps for factors that hold for all steps. A scalar is allowed too.
        b: what is added, leaves `[T, *batch, ...]`, each of which is a recurrence of its own. Also a `treescan.Padded`
            or a `treescan.Packed`; a may be another one with the same rows.
        init: the state before the first step: leaves `[*batch, ...]` or numbers, a prefix of b. None: zeros.
        lengths: int[*batch], as for `treescan.mask_scan`: row b is valid in its first `lengths[b]` steps.
        mask: bool[T, *batch], instead of lengths: which steps are valid. Other steps leave their row's state unchanged.
        resets: bool[T, *batch]: where a segment begins, as for `treescan.mask_scan`. The state before it, also an
            infinite one, reaches neither the segment nor its gradient.
        reset_to: what a reset restores instead of `init`, as for `treescan.mask_scan`.
        reverse: run from step T-1 to step 0.
        matrix: whether a holds matrices, leaves `[T, *batch, ..., n, n]`, and b vectors, `[T, *batch, ..., n]`.
        time_axis: the axis of the steps in a, b, hs, `mask` and `resets`: 0, or 1 for data with the batch first.
        fill: the value of hs at padded steps: a number; "hold" for the row's last state, and 0 before there is one; or
            a prefix tree of b with these.
        save: which hs to keep: "all"; "last", each row's last valid one; or None.
        remat: k: the gradient saves every k-th state, and computes the others again. Only in "sequential". None: it
            saves all.
        method: "sequential" is a scan. "chunked" runs about sqrt(T) parts side by side, then the states between them,
            then the parts again. "parallel" composes steps in pairs, in log2(T) rounds. None is "sequential", on every
            backend, because no other was faster where it was measured. In the other two, a product of factors that
            overflows within a segment makes its later states infinite or NaN.
        axis_name: inside of `jax.shard_map`, the mesh axis over which the steps are split: each device has the steps of
            its own. Devices exchange a product and a state log2(D) times, and the last state once with all. `lengths`
            and the states that are returned are then those of all steps, and `mask` and `resets` those of the device.

    Returns:
        The state after each row's last valid step, in the dtype of the state, and all states `[T, *batch, ...]` in the
        dtype of b. Of a `Packed`, the first is the last state of each sequence, `[N, ...]`.

    Raises:
        ArgumentError: if an argument is out of range, conflicts with another, or does not fit b; as
            `treescan.mask_scan` for rows.
        ArgumentTypeError: if an argument is of another type, for example a or b of integers, or a complex a with a
            real b.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> b = jnp.array([[1.0, 1.0], [1.0, 1.0], [1.0, jnp.nan]])
        >>> last, hs = treescan.linear_scan(0.5, b, lengths=jnp.array([3, 2]))
        >>> print(last)
        [1.75 1.5 ]
        >>> print(hs)
        [[1.   1.  ]
         [1.5  1.5 ]
         [1.75 0.  ]]
    """
    try:
        expect_one_of(method, "method", (*METHODS, None))
        expect_one_of(save, "save", ("all", "last", None))
        expect_one_of(matrix, "matrix", (True, False))
        expect(isinstance(axis_name, str | None), "axis_name", "a string or None", axis_name)
        if remat is not None:
            every = "It is the number of steps between two states that are saved."
            remat = expect_int(remat, "remat", every, kind="an int or None", least=2, small=every)
            if method in METHODS[1:]:
                both = f'{{call}}: `remat` and `method="{method}"` cannot be combined.'
                raise Misuse(both, 'It is for `method="sequential"`.')
        reverse, time_axis, fill = check_reverse(reverse), check_time_axis(time_axis), check_fill(fill)
        given, flags = take_batches_apart(Both(a, b), RowFlags(lengths, mask, resets), time_axis, None)
        leaves = leaves_of(given, init, time_axis, matrix=matrix)
        tree: TreeDef = jax.tree.structure(given.b)
        moved, inits = (tree.unflatten([leaf[i] for leaf in leaves]) for i in (1, 2))
        if axis_name is not None:
            refuse_part(flags, fill, reverse=reverse)
        flags = check_flags(flags, reset_to, inits, moved, time_axis, axis_name)
        fills, held = fill_leaves(Prefix.of(fill), moved), Prefix.of(fill).spread(moved, "b")
        found = list[tuple[Array, Array | None]]()
        for i, (own_a, own_b, h0) in enumerate(leaves):
            to, table = (None if each is None else each[i] for each in (flags.to, flags.inits))
            hold, dtypes = held[i] == HOLD, (h0.dtype, own_b.dtype)
            how = How(method or METHODS[0], matrix, reverse, remat, save, time_axis, axis_name, hold, *dtypes)
            found.append(_run(how, own_a, own_b, h0, fills[i], flags._replace(to=to, inits=table)))
        last, hs = (tree.unflatten([each[i] for each in found]) for i in (0, 1))
        return last, None if save is None else hs
    except Exception as error:
        explained = explain(error, "linear_scan", words=_WORDS)
    raise explained


@functools.partial(jax.jit, static_argnums=0, inline=True)  # of a call, XLA does not see that a cotangent is constant
def _run(how: How, a: Array, b: Array, h0: Array, fill: Array, flags: RowFlags) -> tuple[Array, Array | None]:
    """The last state and the outputs of one recurrence, the steps of which are in front."""
    count, spans, table = b.shape[0], flags.spans, flags.inits
    if len(a) == 1:  # of all steps: its cotangent is a sum, for which half precision has too few digits
        a = a.astype(how.state)
    valid, linked = _steps(how, flags, count)
    h0 = like_step(h0, b, how.state, a, flags.to, valid, linked)
    target = h0 if flags.to is None else like_step(flags.to, b, how.state, h0)
    filled, in_loop = like_step(fill, b, b.dtype, h0), False
    if not count:
        last, hs, valid = h0, b, None
    else:
        x = Given(a, b, h0[None], None if linked is None else target[None], valid, linked)
        if table is not None and spans is not None and valid is not None:
            numbers = jnp.maximum(numbers_of(spans, valid.shape) - 1, 0)
            x = x._replace(target=jnp.take(table, numbers, axis=0, mode="clip").astype(how.state))
        if how.axis_name is not None:
            x = x._replace(start=between_devices(how, how.axis_name, x))
        own = how if spans is None else how._replace(out=how.state)
        in_loop = valid is not None and spans is None and how.save == "all" and not how.hold
        x = x._replace(fill=filled[None] if in_loop else None)
        axes = frozenset[str]().union(*(varying_axes(jax.typeof(leaf)) for leaf in jax.tree.leaves(x)))
        x = jax.tree.map(lambda leaf: vary_over(leaf, axes), x)  # a solution varies as all that it is computed from
        last, hs = (recurrence if how.remat is None else run)(own, x)
    if how.axis_name is not None:
        is_last = jax.lax.axis_index(how.axis_name) == (0 if how.reverse else jax.lax.axis_size(how.axis_name) - 1)
        last = jax.lax.psum(jnp.where(is_last, last, 0), how.axis_name)
        filled = vary_over(jnp.broadcast_to(fill, last.shape), varying_axes(jax.typeof(last)))  # no device's own
    end = but(_have_data(how, valid), last.astype(b.dtype), filled) if count else filled
    if spans is not None:
        start = at_rows(target, spans, 0) if table is None else table.astype(how.state)
        ends = functools.partial(ends_of, hs, spans, 0, some=are_valid(spans, flags.mask), reverse=how.reverse)
        last, end = ends(start), ends(at_rows(filled.astype(how.state), spans, 0))
    if how.save != "all":
        return last, None if how.save is None else end.astype(b.dtype)
    if valid is not None and not in_loop:
        known = jax.lax.cummax(valid.astype(jnp.int8), reverse=how.reverse) > 0 if how.hold else valid
        hs = but(known, hs.astype(b.dtype), filled)
    return last, jnp.moveaxis(hs.astype(b.dtype), 0, how.time_axis)


def _have_data(how: How, valid: Array | None) -> Array | None:
    """Which rows have a valid step, on any device, bool[*batch]; None: all."""
    if valid is None or how.axis_name is None:
        return None if valid is None else jnp.any(valid, 0)
    return jax.lax.pmax(jnp.any(valid, 0).astype(jnp.int32), how.axis_name) > 0


def _steps(how: How, flags: RowFlags, count: int) -> tuple[Array | None, Array | None]:
    """Which steps are valid, and which read the state before them, bool[T, *batch]; None: all."""
    mask, resets = (None if each is None else jnp.moveaxis(each, how.time_axis, 0) for each in flags[1:3])
    valid = mask if flags.lengths is None else mask_of_lengths(flags.lengths, count)
    if resets is None or not count:
        return valid, None
    every = jnp.ones_like(resets) if valid is None else valid
    return valid, ~begins_at(resets, every, flags.spans, reverse=how.reverse)
