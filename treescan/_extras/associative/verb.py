"""`associative_scan`: the verb."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp

from ..._arguments import OF_MASK_SCAN, check_reverse
from ..._avals import Array, ArrayLike, PyTree, as_arrays, describe_argument
from ..._batches.batch import Packed, Padded, take_batches_apart
from ..._errors import STEP_WORDS, BodyFault, explain, verb
from ..._options.resets import begins_at
from ..._rows.axes import RowFlags, Spans
from ..._rows.checks import batch_of, check_rows, check_time_axis
from ..._rows.fill import HOLD, check_fill, fill_leaves
from ..._rows.leaves import any_along, expand, first_valid, mask_of_lengths, select
from ..._rows.spans import are_valid, at_rows, ends_of, numbers_of
from ..._tree import Prefix
from ..._types import UnkeyedOptions, X
from .asked import first_two, first_with_init, unless_none
from .checks import Given, check_has_rows, check_init, check_steps
from .parts import Operator, Pair, Part, apply, choose, join

_WORDS = {**STEP_WORDS, "xs": "elements", "step": "operator"}
ELSEWHERE = {
    **dict.fromkeys(
        (*UnkeyedOptions.__annotations__, "key"),
        "`treescan.scan` and `treescan.mask_scan` take it, for a loop with a body.",
    ),
    **dict.fromkeys(OF_MASK_SCAN, "`treescan.mask_scan` takes it, for a loop with a body."),
    **dict.fromkeys(("axis", "in_axes", "out_axes"), "`time_axis` is the axis of the steps: 0 or 1."),
    "length": "The steps are those of the elements.",
    "reset_to": "A segment begins from `init`, or from its own first element.",
}
"""What other verbs take; see `named_options`."""


@overload
def associative_scan(
    operator: Callable[[X, X], X],
    elements: Packed[X],
    init: PyTree = None,
    *,
    reverse: bool = False,
    fill: PyTree = 0,
) -> tuple[X, X]: ...
@overload
def associative_scan(
    operator: Callable[[X, X], X],
    elements: Padded[X],
    init: PyTree = None,
    *,
    resets: ArrayLike | None = None,
    reverse: bool = False,
    fill: PyTree = 0,
) -> tuple[X, X]: ...
@overload
def associative_scan(
    operator: Callable[[X, X], X],
    elements: X,
    init: PyTree = None,
    *,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    reverse: bool = False,
    time_axis: int = 0,
    fill: PyTree = 0,
) -> tuple[X, X]: ...
@verb
def associative_scan(
    operator: Callable[[Any, Any], Any],
    elements: PyTree,
    init: PyTree = None,
    *,
    lengths: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    resets: ArrayLike | None = None,
    reverse: bool = False,
    time_axis: int = 0,
    fill: PyTree = 0,
) -> tuple[PyTree, PyTree]:
    """Joins elements by an associative operator in about 2 log2(T) rounds, with masks, resets and packed sequences.

    Without rows it computes what `jax.lax.associative_scan` computes, and it calls the operator in the same way. The
    result at a step is that of this loop, which is over the valid steps of the segment that it belongs to:

        y = init
        for element in segment:
            y = operator(y, element)

    Padding is never read, and no value crosses the boundary of a segment. There the operator is given a pair that the
    loop gives it too, of which no derivative is taken. If no row has two steps to join, it is not called.
    `treescan.linear_scan` is for linear operators, in less memory.

    Args:
        operator: joins two stacks of elements, `operator(before, here)`, with leaves `[n, *batch, ...]`, and returns
            one of the same type. It must be associative, and treat the entries of the leading axes independently.
        elements: a pytree with leaves `[T, *batch, ...]`. Also a `treescan.Padded` or a `treescan.Packed`.
        init: an element that is before the first one of each row and of each segment: leaves `[*batch, ...]` or
            numbers, a prefix of elements. None: a segment begins with its own first element.
        lengths: int[*batch], as for `treescan.mask_scan`: row b is valid in its first `lengths[b]` steps.
        mask: bool[T, *batch], instead of lengths: which steps are valid. Others leave their row's result unchanged.
        resets: bool[T, *batch]: where a segment begins, as for `treescan.mask_scan`.
        reverse: join from step T-1 to step 0: `before` is then what comes later in time.
        time_axis: the axis of the steps in elements, ys, `mask` and `resets`: 0, or 1 for data with the batch first.
        fill: the value of ys at padded steps: a number; "hold" for the row's last result, and 0 before there is one;
            or a prefix tree of elements with these.

    Returns:
        The result at each row's last valid step, and the results ys at all steps, both with the type of the elements.
        The first is `init` for a row without a valid step; without `init`, the fill. Of a `Packed`, it is the result of
        each sequence, `[N, ...]`.

    Raises:
        ArgumentError: if an argument is out of range, conflicts with another, or does not fit the elements; as
            `treescan.mask_scan` for rows.
        ArgumentTypeError: if an argument is of another type.
        BodyError: if the operator is not callable, or does not return elements of the type that it is given.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> xs = jnp.array([[3.0, 1.0], [2.0, 5.0], [4.0, jnp.nan]])
        >>> last, most = treescan.associative_scan(
        ...     jnp.maximum, xs, lengths=jnp.array([3, 2])
        ... )
        >>> print(last)
        [4. 5.]
        >>> print(most)
        [[3. 1.]
         [3. 5.]
         [4. 0.]]
    """
    try:
        if not callable(operator):
            cure = "Call it as `associative_scan(operator, elements)`."
            raise BodyFault(f"{{verb}} needs a function of two elements, got {describe_argument(operator)}.", cure)
        reverse, time_axis, fill = check_reverse(reverse), check_time_axis(time_axis), check_fill(fill)
        (given,), flags = take_batches_apart(Given(elements), RowFlags(lengths, mask, resets), time_axis, None)
        steps = check_steps(given, time_axis)
        if any(each is not None for each in flags):
            flags = check_rows(flags, time_axis, steps)
            check_has_rows(given, (steps, *batch_of(flags, time_axis)), time_axis)
        moved = _moved(as_arrays(given), time_axis, 0)
        init, fill = check_init(init, moved, flags), Prefix.of(fill)
        return _run(operator, moved, init, flags, fill, time_axis, reverse=reverse)
    except Exception as error:
        explained = explain(error, "associative_scan", operator, words=_WORDS)
    raise explained


def _moved(tree: PyTree, source: int, target: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, source, target), tree) if source != target else tree


def _run(
    operator: Operator, elements: PyTree, init: PyTree, flags: RowFlags, fill: Prefix, time_axis: int, *, reverse: bool
) -> tuple[PyTree, PyTree]:
    """The last results and all, of elements whose steps are in front."""
    mask, resets = (None if each is None else jnp.moveaxis(each, time_axis, 0) for each in flags[1:3])
    count, spans = jax.tree.leaves(elements)[0].shape[0], flags.spans
    valid = mask if flags.lengths is None else mask_of_lengths(flags.lengths, count)
    fills = jax.tree.unflatten(jax.tree.structure(elements), fill_leaves(fill, elements))
    begins, ys = None, elements
    if count:
        if resets is not None:
            every = jnp.ones_like(resets) if valid is None else valid
            begins = begins_at(resets, every, spans, reverse=reverse)
        part, of_each = Part(elements, valid, begins), None if flags.inits is None else spans
        if valid is None and begins is None:
            part = part if init is None else _begun(operator, init, part, reverse=reverse)
            ys = _joined(operator, None, part, reverse=reverse)
        elif jax.tree.leaves(elements)[0].size:
            ys = _joined_by_rows(operator, init, part, of_each, reverse=reverse)
    last = _last(ys, init, valid, fills, flags, reverse=reverse)
    return last, _moved(_filled(ys, valid, fill, fills, reverse=reverse), 0, time_axis)


def _joined(operator: Operator, asked: Pair | None, part: Part, *, reverse: bool) -> PyTree:
    return jax.lax.associative_scan(functools.partial(join, operator, asked), part, reverse=reverse).value


def _begun(operator: Operator, init: PyTree, part: Part, *, reverse: bool) -> Part:
    """Single steps, of which the first one in order is joined with init."""
    rest, first = (slice(-1), slice(-1, None)) if reverse else (slice(1, None), slice(1))
    begun = apply(operator, init, jax.tree.map(lambda leaf: leaf[first], part.value))

    def joined(begun: Array, leaf: Array) -> Array:
        return jnp.concatenate([leaf[rest], begun] if reverse else [begun, leaf[rest]])

    return Part(jax.tree.map(joined, begun, part.value))


def _joined_by_rows(operator: Operator, init: PyTree, part: Part, spans: Spans | None, *, reverse: bool) -> PyTree:
    """The results of single steps whose rows differ; with spans, init has an element for each sequence."""
    flags = part.begins if part.some is None else part.some
    assert flags is not None
    valid = jnp.ones_like(flags) if part.some is None else part.some
    if init is None:
        asked, second = first_two(part, valid, reverse=reverse)
        return unless_none(second, lambda: _joined(operator, asked, part, reverse=reverse), part.value)
    steps = expand(jnp.arange(valid.shape[0]), valid, 0)
    starts = valid & (steps == first_valid(valid, reverse=reverse)[1][None])
    starts = starts if part.begins is None else starts | part.begins
    if spans is not None:
        numbers = jnp.maximum(numbers_of(spans, valid.shape) - 1, 0)
        init = jax.tree.map(lambda leaf: jnp.take(leaf, numbers, axis=0, mode="clip"), init)
    init = jax.tree.map(lambda leaf, own: jnp.broadcast_to(leaf, own.shape), init, part.value)
    asked = first_with_init(part, init, starts)

    def run() -> PyTree:
        begun = join(operator, asked, Part(init, starts), Part(part.value, valid))
        return _joined(operator, asked, part._replace(value=choose(starts, begun.value, part.value)), reverse=reverse)

    return unless_none(starts, run, part.value)


def _last(ys: PyTree, init: PyTree, valid: Array | None, fills: PyTree, flags: RowFlags, *, reverse: bool) -> PyTree:
    """The last result of each row, or of each sequence of a `Packed`."""
    none = fills if init is None else jax.tree.map(lambda leaf: leaf if flags.inits is not None else leaf[0], init)
    if flags.spans is not None and valid is not None:
        spans, some = flags.spans, are_valid(flags.spans, valid)

        def ends(leaf: Array, other: Array) -> Array:
            own = other if flags.inits is not None or not other.ndim else at_rows(other, spans, 0)
            return ends_of(leaf, spans, 0, own, some, reverse=reverse)

        return jax.tree.map(ends, ys, none)
    if not len(jax.tree.leaves(ys)[0]):
        return jax.tree.map(lambda leaf, other: jnp.broadcast_to(other, leaf.shape[1:]), ys, none)
    last = jax.tree.map(lambda leaf: leaf[0 if reverse else -1], ys)
    return last if valid is None else choose(any_along(valid, (0,)), last, none)


def _filled(ys: PyTree, valid: Array | None, fill: Prefix, fills: PyTree, *, reverse: bool) -> PyTree:
    """The results, those at padded steps as `fill` says."""
    if valid is None:
        return ys
    known = jax.lax.cummax(valid.astype(jnp.int8), reverse=reverse) > 0
    leaves, structure = jax.tree.flatten(ys)
    each = zip(leaves, fill.spread(ys, "y"), jax.tree.leaves(fills), strict=True)
    filled = [select(expand(known if own == HOLD else valid, leaf, 0), leaf, value) for leaf, own, value in each]
    return jax.tree.unflatten(structure, filled)
