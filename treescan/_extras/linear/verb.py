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
from ..._rows.spans import numbers_of
from ..._tree import Prefix
from .leaves import Given, leaves_of
from .parts import between_devices, in_parts, last_of_devices, steps_of_device
from .products import How, but, like_step
from .rows import check_flags, ends, entering, rows_at, steps_of

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
        remat: k: the gradient saves every k-th state, and computes the others again. None: it saves all.
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
            remat = expect_int(remat, "remat", every, kind="an int or None", least=1, small=every)
        reverse, time_axis, fill = check_reverse(reverse), check_time_axis(time_axis), check_fill(fill)
        given, flags = rows_of(Given(a, b), RowFlags(lengths, mask, resets), time_axis, None)
        count, leaves = leaves_of(given, init, time_axis, matrix=matrix)
        if axis_name is not None:
            _refuse_part(flags, reset_to, fill, reverse)
            flags = flags._replace(lengths=steps_of_device(flags.lengths, count, axis_name))
        tree: TreeDef = jax.tree.structure(given.b)
        moved, inits = ([getattr(leaf, name) for leaf in leaves] for name in ("b", "h0"))
        wide = [jnp.broadcast_to(h0, b.shape[1:]) for h0, b in zip(inits, moved, strict=True)]
        flags = check_flags(flags, reset_to, tree.unflatten(wide), tree.unflatten(moved), time_axis, count)
        fills = fill_leaves(Prefix.of(fill), tree.unflatten(moved))
        held = [value == HOLD for value in Prefix.of(fill).spread(tree.unflatten(moved), "b")]
        plan = Plan(method or METHODS[0], matrix, reverse, time_axis, save, remat, axis_name)
        found = [
            _run(plan._replace(hold=hold), leaf[1:], value, flags._replace(to=None, inits=None), to, table)
            for leaf, value, hold, to, table in zip(
                leaves, fills, held, flags.to or [None] * len(leaves), flags.inits or [None] * len(leaves), strict=True
            )
        ]
        last, hs = ([each[place] for each in found] for place in (0, 1))
        return tree.unflatten(last), None if save is None else tree.unflatten(hs)
    except Exception as error:
        explained = explain(error, "linear_scan", words=_WORDS)
    raise explained


def _refuse_part(flags: RowFlags, reset_to: PyTree, fill: PyTree, reverse: bool) -> None:
    """Refuses what a device cannot know of its own steps alone."""
    if flags.spans is not None:
        raise Misuse(
            "{call}: the steps of a `Packed` cannot be split over devices: its index counts the steps of all.",
            "Split its rows, without `axis_name`. Or pass its `data`, `mask` and `resets`.",
        )
    if flags.resets is not None and reverse:
        raise Misuse(
            "{call}: `resets` and `axis_name` cannot be combined in reverse: where the last segment of a device ends "
            "is known to the next device.",
            "Run forward, or keep all steps on each device.",
        )
    if HOLD in Prefix.of(fill).leaves:
        cure = "Give a number."
        raise Misuse('{call}: `fill="hold"` cannot be combined with `axis_name`.', cure)
    if flags.resets is not None and reset_to is None:
        raise Misuse("{call}: with `axis_name`, `resets` needs `reset_to`.", "Say by `reset_to` what they restore.")


class Plan(NamedTuple):
    """How one leaf is computed; static.

    Attributes:
        method: one of `METHODS`.
        matrix: as the verb is told; and so on.
        reverse: the same.
        time_axis: the same.
        save: the same.
        remat: the same.
        axis_name: the same.
        hold: whether padded steps have the last state.
    """

    method: str
    matrix: bool
    reverse: bool
    time_axis: int
    save: str | None
    remat: int | None
    axis_name: str | None
    hold: bool = False


@functools.partial(jax.jit, static_argnums=0)
def _run(
    plan: Plan, leaf: tuple[Array, Array, Array], fill: Array, flags: RowFlags, to: Array | None, table: Array | None
) -> tuple[Array, Array | None]:
    """The last state and the outputs of one recurrence, the steps of which are in front."""
    a, b, start = leaf
    count, dtype = b.shape[0], start.dtype
    spans: Any = flags.spans
    steps = steps_of(flags, plan.time_axis, plan.reverse, count)
    out, valid = b.dtype if spans is None else dtype, steps.valid
    how = How(plan.method, plan.matrix, plan.reverse, dtype, out)
    h0 = like_step(start, b, dtype, a, to, *steps)
    target = None if steps.cut is None else h0 if to is None else like_step(to, b, dtype, a, h0, *steps)
    if spans is not None and table is not None and count:
        assert valid is not None
        numbers = numbers_of(spans, valid.shape)
        b, target = entering(how, steps, a, b, table, numbers), None
    if plan.axis_name is not None:
        h0 = between_devices(how, plan.remat, plan.axis_name, steps, a, b, h0, target)
    last, hs = in_parts(how, plan.remat, steps, a, b, h0, target) if count else (h0, b.astype(out))
    if plan.axis_name is not None:
        last = last_of_devices(last, plan.axis_name, reverse=plan.reverse)
    fill = fill.astype(out)
    tails = like_step(fill, b, out, hs)
    any_valid = None if valid is None else jnp.any(valid, 0)
    end = but(any_valid, last.astype(out), tails) if count else tails
    if spans is not None:
        begins = table if table is not None else rows_at(h0 if target is None else target, spans)
        last = ends(hs, spans, valid, begins.astype(dtype), reverse=plan.reverse) if count else begins
        if plan.save == "last":
            end = ends(hs, spans, valid, rows_at(tails, spans), reverse=plan.reverse) if count else tails
    if plan.save != "all":
        return last, None if plan.save is None else end.astype(fill.dtype)
    if valid is not None and count:
        known = valid
        if plan.hold:
            known = jax.lax.cummax(known.astype(jnp.int8), reverse=plan.reverse) > 0
        hs = but(known, hs, tails)
    return last, jnp.moveaxis(hs.astype(fill.dtype), 0, plan.time_axis)
