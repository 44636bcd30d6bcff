"""`linear_scan`: the verb."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..._arguments import check_reverse
from ..._avals import Array, ArrayLike, PyTree, TreeDef
from ..._batches.batch import rows_of
from ..._errors import STEP_WORDS, Misuse, expect, expect_int, explain, verb
from ..._rows.axes import RowFlags
from ..._rows.checks import check_time_axis
from ..._rows.fill import HOLD, check_fill, fill_leaves
from ..._rows.spans import are_valid, at_rows, ends_of, numbers_of
from ..._tree import Prefix
from .devices import between_devices, last_of_devices, lengths_of_device, refuse_part
from .leaves import Both, leaves_of
from .rows import check_flags, steps_of
from .rule import recurrence, run
from .step import Given, How, but, like_step

METHODS = ("sequential", "chunked", "parallel")
_WORDS = {**STEP_WORDS, "xs": "b"}


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
) -> tuple[Any, Any]:
    """Solves the linear recurrence `h[t] = a[t] * h[t-1] + b[t]`, with masks, resets and packed sequences.

    It returns what `scan` and `mask_scan` of this body return, and its gradient saves a and h, and nothing else:

        def step(h, x):
            a, b = x
            h = a * h + b
            return h, h

    The state is float32 for inputs in bfloat16 and float16. Padding is never read, as in `treescan.mask_scan`, in
    values and in derivatives of any order.

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
            its own, and devices exchange a product and a state log2(D) times. `lengths` and the states that are
            returned are then those of all steps, and `mask` and `resets` those of the device.

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
        kinds = '"sequential", "chunked", "parallel" or None'
        expect(method is None or (isinstance(method, str) and method in METHODS), "method", kinds, method)
        kinds = '"all", "last" or None'
        expect(save is None or (isinstance(save, str) and save in ("all", "last")), "save", kinds, save)
        expect(isinstance(matrix, bool), "matrix", "True or False", matrix)
        expect(axis_name is None or isinstance(axis_name, str), "axis_name", "a string or None", axis_name)
        if remat is not None:
            every = "It is the number of steps between two states that are saved."
            remat = expect_int(remat, "remat", every, kind="an int or None", least=2, small=every)
            if method in METHODS[1:]:
                raise Misuse(
                    f'{{call}}: `remat` and `method="{method}"` cannot be combined.', 'It is for "sequential".'
                )
        reverse, time_axis, fill = check_reverse(reverse), check_time_axis(time_axis), check_fill(fill)
        given, flags = rows_of(Both(a, b), RowFlags(lengths, mask, resets), time_axis, None)
        count, leaves = leaves_of(given, init, time_axis, matrix=matrix)
        if axis_name is not None:
            refuse_part(flags, fill, reverse=reverse)
        if axis_name is not None and flags.lengths is not None:
            flags = flags._replace(lengths=lengths_of_device(flags.lengths, count, axis_name))
        tree: TreeDef = jax.tree.structure(given.b)
        moved = tree.unflatten([leaf.b for leaf in leaves])
        wide = tree.unflatten([jnp.broadcast_to(leaf.h0, leaf.b.shape[1:]) for leaf in leaves])
        flags = check_flags(flags, reset_to, wide, moved, time_axis, count)
        none = [None] * len(leaves)
        plan = Plan(save, time_axis, axis_name)
        found = [
            _run(
                How(method or METHODS[0], matrix, reverse, remat, leaf.h0.dtype, leaf.b.dtype),
                plan._replace(hold=held == HOLD),
                *leaf[1:],
                fill,
                flags._replace(to=to, inits=init),
            )
            for leaf, fill, held, to, init in zip(
                leaves,
                fill_leaves(Prefix.of(fill), moved),
                Prefix.of(fill).spread(moved, "b"),
                flags.to or none,
                flags.inits or none,
                strict=True,
            )
        ]
        last, hs = (tree.unflatten(each) for each in zip(*found, strict=True)) if found else (given.b, given.b)
        return last, None if save is None else hs
    except Exception as error:
        explained = explain(error, "linear_scan", words=_WORDS)
    raise explained


class Plan(NamedTuple):
    """What is kept of one recurrence, as the verb is told. It is static.

    Attributes:
        save: which states are kept.
        time_axis: where the steps are in them, and in flags.
        axis_name: the mesh axis over which the steps are split, or None.
        hold: whether padded steps have the last state.
    """

    save: str | None
    time_axis: int
    axis_name: str | None
    hold: bool = False


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    how: How, plan: Plan, a: Array, b: Array, start: Array, fill: Array, flags: RowFlags
) -> tuple[Array, Array | None]:
    """The last state and the outputs of one recurrence, the steps of which are in front."""
    count, spans, table = b.shape[0], flags.spans, flags.inits
    valid, begins = steps_of(flags, plan.time_axis, how.reverse, count)
    h0 = like_step(start, b, how.state, a, flags.to, valid, begins)
    target = h0 if flags.to is None else like_step(flags.to, b, how.state, a, h0)
    if spans is not None:
        how = how._replace(out=how.state)
    x = Given(a, b, target[None], valid, None if begins is None else ~begins)
    if table is not None and count:
        of_steps = jnp.take(table, jnp.maximum(numbers_of(spans, valid.shape) - 1, 0), axis=0, mode="clip")
        x = x._replace(target=of_steps.astype(how.state))
    x = x._replace(target=None) if begins is None else x
    if not count:
        last, hs = h0, b.astype(how.out)
    else:
        before = h0 if plan.axis_name is None else between_devices(how, plan.axis_name, x, h0)
        last, hs = (recurrence if how.remat is None else run)(how, x, before)
    if plan.axis_name is not None:
        last = last_of_devices(last, plan.axis_name, reverse=how.reverse)
    filled = like_step(fill, b, how.out, hs)
    any_valid = jnp.any(valid, 0) if valid is not None else None
    end = but(any_valid, last.astype(how.out), filled) if count else filled
    if spans is not None:
        some = are_valid(spans, valid)
        start = at_rows(target, spans, 0) if table is None else table.astype(how.state)
        last = ends_of(hs, spans, 0, start, some, reverse=how.reverse)
        end = ends_of(hs, spans, 0, at_rows(filled, spans, 0), some, reverse=how.reverse)
    if plan.save != "all":
        return last, None if plan.save is None else end.astype(fill.dtype)
    if valid is not None and count:
        known = jax.lax.cummax(valid.astype(jnp.int8), reverse=how.reverse) > 0 if plan.hold else valid
        hs = but(known, hs, filled)
    return last, jnp.moveaxis(hs.astype(fill.dtype), 0, plan.time_axis)
