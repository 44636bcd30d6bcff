"""`resets` and packed sequences: where segments begin and end, from what they begin, and the carry that each ends with.

A row starts again where a segment begins, from its init or from `reset_to`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray

from ..._avals import (
    Array,
    LeafAxes,
    PyTree,
    describe_argument,
    describe_leaf,
    describe_node,
    dtype_of,
    holds,
    is_key,
    is_weak,
    on_automatic_axes,
    parts_of,
    shape_of,
    vary_over,
    varying_axes,
)
from ..._body.carry import agree
from ..._errors import Fault, Misuse, Row, noted
from ..._loop.feed import Feed, Slot
from ..._loop.loop import Loop, Step
from ..._tree import Prefix, is_static, path_str
from ...carries._base import is_carry
from ...carries._registry import Adopted, adopt, kind_of
from ..axes import spread_prefix
from ..call import Arguments, Call
from ..transform import Stage, Transform
from .axes import Begins, RowFlags, spread_carry_axes, with_axes
from .checks import batch_of
from .leaves import expand, first_valid, may_branch, pick_steps, select

RESET: Slot[Array] = Slot("reset", rows=True)
"""Which rows begin a segment before this step."""

END: Slot[Array] = Slot("end", rows=True)
"""Which packed sequence of each row ends with this step, counted from 1; 0: none."""

Spans = tuple[Array, Array, Array]
"""The row, the first step and the number of steps of each sequence, int32[N]."""


def refuse_split_rows(spans: Spans, valid: Array) -> None:
    """Refuses the rows of a single device in a `jax.shard_map`, because the index counts the rows of all devices."""
    if valid.ndim != 2:
        raise Misuse(
            f"{{call}}: the mask of the `Packed` must have two axes, steps and rows, but is {describe_leaf(valid)}.",
            "To map over several batches, stack all of their leaves: `jax.vmap(run)(batches)`. Or scan a single "
            "row, `mask_scan(step, init, data, mask=mask, resets=resets)`.",
        )
    split = varying_axes(jax.typeof(valid)) - varying_axes(jax.typeof(spans[0]))
    if not split and may_branch():
        return
    raise Misuse(
        "{call}: the rows of a `Packed` are sharded over devices, but its index counts the rows of all devices.",
        "In a `jax.shard_map`, leave `check_vma` on and give each device its own `Packed`, with its own index. Or call "
        "it outside of `jax.shard_map`, where JAX itself shards the rows. Or scan the rows themselves, which gives the "
        "carry of each row instead of each sequence: `mask_scan(step, init, packed.data, mask=packed.mask, "
        "resets=packed.resets)`.",
    )


def at_rows(leaf: Array, spans: Spans, axis: int | None) -> Array:
    """A leaf with an entry for each sequence instead of each row: the entry of the row of the sequence."""
    if axis is None:
        return leaf
    taken = functools.partial(jnp.take, axis=axis, mode="clip")
    return on_automatic_axes(taken, _without(parts_of(leaf), axis), leaf, spans[0])


def _without(parts: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    """How the axes of an array are sharded that has sequences in the place of rows: these are not."""
    return (*parts[:axis], None, *parts[axis + 1 :])


def ends_of(ys: Array, spans: Spans, axis: int, value: Array, some: Array, *, reverse: bool) -> Array:
    """The last output of each sequence, from the held outputs of all steps; `value` where `some` is not set."""
    ends = functools.partial(_ends_of, axis=axis, reverse=reverse)
    return on_automatic_axes(ends, _without(parts_of(ys)[1:], axis), ys, *spans, value, some)


def _ends_of(
    ys: Array, row: Array, start: Array, length: Array, value: Array, some: Array, *, axis: int, reverse: bool
) -> Array:
    step = jnp.where(length > 0, start if reverse else start + length - 1, ys.shape[0])
    picked = jnp.moveaxis(ys, axis + 1, 1).at[step, row].get(mode="clip") if ys.size else None
    wide = jnp.broadcast_to(value, (row.shape[0], *ys.shape[1 : axis + 1], *ys.shape[axis + 2 :]))
    some = some.reshape(-1, *(1 for _ in wide.shape[1:]))
    return jnp.moveaxis(wide if picked is None else jnp.where(some, picked, wide), 0, axis)


def are_valid(spans: Spans, valid: Array) -> Array:
    """bool[N]: whether any step of each sequence is."""

    def any_of_each(numbers: Array, valid: Array) -> Array:
        counts = jnp.zeros(spans[0].shape[0] + 1, jnp.int32)
        return counts.at[jnp.where(valid, numbers, 0)].add(1)[1:] > 0

    return on_automatic_axes(any_of_each, (), numbers_of(spans, valid.shape), valid)


def numbers_of(spans: Spans, shape: tuple[int, ...]) -> Array:
    """int32[T, R]: which sequence a step belongs to, counted from 1; 0: none."""
    row, start, length = spans
    begun = jnp.zeros(shape, jnp.int32)
    if 0 in shape:
        return begun
    counted = jnp.arange(1, row.shape[0] + 1, dtype=jnp.int32)
    begun = begun.at[jnp.where(length > 0, start, shape[0]), row].set(counted, mode="drop")
    steps = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    last = jax.lax.cummax(jnp.where(begun > 0, steps, -1))
    number = jnp.where(last < 0, 0, jnp.take_along_axis(begun, jnp.maximum(last, 0), 0))
    ends = jnp.concatenate([jnp.zeros_like(start[:1]), start + length])
    return jnp.where(steps < ends[number], number, 0)


def turns(numbers: Array, valid: Array, *, later: bool) -> Array:
    """bool[T, R]: valid steps of a sequence whose neighbour is of another, or of none.

    The neighbour is the row's next valid step where `later` is set, else the one before.
    """
    if 0 in valid.shape:
        return valid
    return on_automatic_axes(functools.partial(_turns, later=later), parts_of(valid), numbers, valid)


def _turns(numbers: Array, valid: Array, *, later: bool) -> Array:
    count = valid.shape[0]
    steps = jax.lax.broadcasted_iota(jnp.int32, valid.shape, 0)
    if later:
        found = jax.lax.cummin(jnp.where(valid, steps, count), reverse=True)
        near = jnp.concatenate([found[1:], jnp.full_like(found[:1], count)])
    else:
        found = jax.lax.cummax(jnp.where(valid, steps, -1))
        near = jnp.concatenate([jnp.full_like(found[:1], -1), found[:-1]])
    other = jnp.take_along_axis(numbers, jnp.clip(near, 0, count - 1), 0)
    is_other = (near < 0) | (near >= count) | (numbers != other)
    return valid & is_other & (numbers > 0)


@dataclass(frozen=True)
class KeepEnds:
    """The step that stores the final values of the sequences that end in it.

    Its state is (ends, the inner state); where outputs are held, (held outputs, (ends, the inner state)). The ends are
    of the leaves that have rows, with an entry for each sequence in the place of one for each row. The feed says which
    sequences end, counted from 1.

    Attributes:
        step: the inner step.
        axes: for each leaf of the inner step's state the axis of the rows; None: no ends of it are kept.
        held: whether outputs are held.
        count: the number of sequences.
    """

    step: Step
    axes: LeafAxes
    held: bool
    count: int

    def __call__(self, consts: PyTree, state: Any, feed: Feed) -> tuple[PyTree, PyTree]:
        ends, inner = _split(state, held=self.held)
        ending, feed = END.take(feed)
        inner, y = self.step(consts, inner, feed)
        rows = jnp.arange(ending.shape[0], dtype=jnp.int32)
        places = select(ending > 0, ending - 1, self.count + rows)  # no two are the same
        pairs = [(leaf, axis) for leaf, axis in zip(jax.tree.leaves(inner), self.axes, strict=True) if axis is not None]
        ends = [_put(end, leaf, places, axis) for end, (leaf, axis) in zip(ends, pairs, strict=True)]
        return _join(ends, inner, held=self.held), y


def _put(end: Array, leaf: Array, places: Array, axis: int) -> Array:

    def put(end: Array, leaf: Array, places: Array) -> Array:
        at = (*(slice(None) for _ in range(axis)), places)
        return end.at[at].set(leaf, mode="drop", unique_indices=True)

    return on_automatic_axes(put, parts_of(end), end, leaf, places)


def _split(state: Any, *, held: bool) -> tuple[list[Array], PyTree]:
    """The ends, and the state of before."""
    if not held:
        return state
    outputs, (ends, inner) = state
    return ends, (outputs, inner)


def _join(ends: list[Array], inner: Any, *, held: bool) -> PyTree:
    if not held:
        return ends, inner
    outputs, inner = inner
    return outputs, (ends, inner)


@dataclass(frozen=True)
class EndsOfSequences(Transform):
    """A `Packed`: the final carry is that of each sequence, and so is what `save="last"` keeps."""

    stage: ClassVar[Stage] = Stage.ENDED

    def __call__(self, loop: Loop) -> Loop:
        spans, valid, axes = loop.masked.given.spans, loop.xs.valid, loop.masked.axes.state
        if spans is None:
            return loop
        refuse_split_rows(spans, valid)
        held = any(loop.masked.outputs.held)
        leaves, structure = jax.tree.flatten(loop.state)
        lasts = loop.masked.outputs.lasts  # the ends of an output that is held, and is not kept, are of no use
        kept = (*(axis if last else None for last, axis in zip(lasts, axes, strict=False)), *axes[len(lasts) :])
        starts = [_start(loop, i, leaf, kept[i], spans) for i, leaf in enumerate(leaves) if kept[i] is not None]
        numbers = numbers_of(spans, valid.shape)
        ending = select(turns(numbers, valid, later=not loop.reverse), numbers, jnp.zeros_like(numbers))
        step = KeepEnds(loop.step, kept, held, spans[0].shape[0])
        loop = dataclasses.replace(
            loop,
            step=step,
            state=_join(starts, loop.state, held=held),
            xs=END.put(loop.xs, ending),
        )
        outputs = sum(loop.masked.outputs.held)
        loop = with_axes(loop, state=(*axes[:outputs], *(None,) * len(starts), *axes[outputs:]))

        def finish(state: PyTree) -> PyTree:
            ends, inner = _split(state, held=held)
            found = iter(ends)
            pairs = zip(jax.tree.leaves(inner), kept, strict=True)
            return jax.tree.unflatten(structure, [leaf if axis is None else next(found) for leaf, axis in pairs])

        return loop.finished(finish)


def _start(loop: Loop, number: int, leaf: Array, axis: int | None, spans: Spans) -> Array:
    """The initial ends of a leaf: the values that the sequences begin from. Sequences of 0 steps end with these."""
    assert axis is not None
    begins, of_state = loop.masked.begins, number - len(loop.masked.outputs.lasts)
    target = None if begins is None or of_state < 0 else begins.targets[of_state]
    target = leaf if target is None else target
    if begins is not None and of_state >= 0 and begins.tables[of_state]:
        start = jnp.moveaxis(target, 0, axis)
    else:
        start = at_rows(jnp.broadcast_to(target, leaf.shape), spans, axis)
    start = start if start.dtype == leaf.dtype else start.astype(leaf.dtype)
    return vary_over(start, varying_axes(jax.typeof(leaf)))


@dataclass(frozen=True)
class Reset:
    """The step that begins segments first. Its consts are (targets, inner consts), its state a list of leaves.

    A target is what a leaf begins from, in the leaf's shape or a scalar; or a table of that, with an entry for each
    sequence. The feed's flags then are the numbers of the sequences that begin, counted from 1.

    Attributes:
        step: the inner step.
        carry_axes: for each leaf of the state, the axis where the batch shape starts; None: shared by all rows, and
            never reset.
        tables: for each leaf of the state whether its target is a table.
    """

    step: Step
    carry_axes: LeafAxes
    tables: tuple[bool, ...]

    def __call__(self, consts: Any, state: list[Array], feed: Feed) -> tuple[PyTree, PyTree]:
        targets, inner = consts
        flags, feed = RESET.take(feed)
        return self.step(inner, begin(flags, state, targets, self.carry_axes, self.tables), feed)


def begin(
    flags: Array, state: list[Array], targets: list[Array | None], axes: LeafAxes, tables: tuple[bool, ...]
) -> list[Array]:
    """The state, with the rows that are flagged at what they begin from; flags are bool[*batch] or numbers, int[R]."""
    begins = flags if flags.dtype == jnp.bool_ else flags > 0

    def of_leaf(leaf: Array, target: Array | None, axis: int | None, is_table: bool) -> Array:
        if axis is None or target is None:
            return leaf
        new = _rows_of(target, flags, axis, leaf) if is_table else target
        return select(expand(begins, leaf, axis), new if new.dtype == leaf.dtype else new.astype(leaf.dtype), leaf)

    return [of_leaf(*each) for each in zip(state, targets, axes, tables, strict=True)]


def _rows_of(table: Array, numbers: Array, axis: int, leaf: Array) -> Array:
    """For each row of a leaf the entry of its number, counted from 1; of a row that has none any entry."""

    def entries(table: Array, numbers: Array) -> Array:
        return jnp.moveaxis(jnp.take(table, jnp.maximum(numbers - 1, 0), 0, mode="clip"), 0, axis)

    return on_automatic_axes(entries, parts_of(leaf), table, numbers)


@dataclass(frozen=True)
class BeginSegments(Transform):
    """`reset_to`, and packed sequences with an init each: what segments begin from, and so each row's first valid step.

    A row whose first valid step is flagged is never shown its init. So its loop starts from what it begins from, which
    is what its padding is shown.
    """

    stage: ClassVar[Stage] = Stage.BEGUN

    def __call__(self, loop: Loop) -> Loop:
        begins, valid, axes = self._begins(loop), loop.xs.valid, loop.masked.axes.state
        state = loop.state
        if not (loop.masked.all_valid or 0 in valid.shape):
            have, first = first_valid(valid, reverse=loop.reverse)
            flags = pick_steps(begins.flags, first, 0)
            flags = flags & have if flags.dtype == jnp.bool_ else select(have, flags, jnp.zeros_like(flags))
            state = begin(flags, state, begins.targets, axes, begins.tables)
        return dataclasses.replace(loop, state=state, rows=loop.masked._replace(begins=begins))

    def _begins(self, loop: Loop) -> Begins:
        rows, valid = loop.masked, loop.xs.valid
        varying = varying_axes(jax.typeof(valid))
        given = rows.given.to if rows.given.inits is None else rows.given.inits
        own = [value for value, is_fixed in zip(given, rows.was_fixed, strict=True) if not is_fixed]
        tables = tuple(rows.given.inits is not None and value is not None for value in own)
        targets = [
            None if axis is None else leaf if value is None else vary_over(value, varying)
            for leaf, value, axis in zip(loop.state, own, rows.axes.state, strict=True)
        ]
        flags = flags_of(loop, reverse=loop.reverse)
        if rows.given.inits is not None:
            assert rows.given.spans is not None
            numbers = numbers_of(rows.given.spans, valid.shape)
            flags = select(flags, numbers, jnp.zeros_like(numbers))
        return Begins(flags, targets, tables)


@dataclass(frozen=True)
class ResetRows(Transform):
    """`resets`: before each step that begins a segment, restores the state that the segment begins from."""

    stage: ClassVar[Stage] = Stage.RESET

    def refuse_part(self, call: Call, given: Arguments) -> None:
        assert given.rows is not None
        if given.rows.spans is not None:
            raise Misuse(
                "{call}: xs is a `Packed`, whose sequences begin and end in it, so it is no part of a longer run.",
                "Leave `offset` out. Or scan over its `data`, with its `mask` and `resets`, and give `reset_to`.",
            )
        if given.rows.to is None:
            raise Misuse(
                "{call}: with `offset`, `init` is the carry of the part before, and `resets` would restore that.",
                "Say by `reset_to` what they restore.",
            )
        if call.reverse:
            raise Misuse(
                "{call}: `resets` and `offset` cannot be combined in reverse: where the last segment of a part ends is "
                "known to the part after it.",
                "Run the whole loop at once, or run it forward.",
            )

    def __call__(self, loop: Loop) -> Loop:
        if loop.masked.resets is None:
            return loop
        axes, begins = loop.masked.axes, begins_of(loop, loop.state)
        pairs = zip(begins.targets, begins.tables, axes.state, strict=True)
        own = [None if is_table or not target.ndim else axis for target, is_table, axis in pairs if target is not None]
        loop = dataclasses.replace(
            loop,
            step=Reset(loop.step, axes.state, begins.tables),
            consts=(begins.targets, loop.consts),
            xs=RESET.put(loop.xs, begins.flags),
        )
        return with_axes(loop, consts=(*own, *axes.consts))


def begins_of(loop: Loop, state: list[Array]) -> Begins:
    """What segments begin from, in the leaves of a state: what was said, or that state."""
    if loop.masked.begins is not None:
        return loop.masked.begins
    inits = [leaf if axis is not None else None for leaf, axis in zip(state, loop.masked.axes.state, strict=True)]
    return Begins(flags_of(loop, reverse=loop.reverse), inits, (False,) * len(inits))


def flags_of(loop: Loop, *, reverse: bool) -> Array:
    """bool[T, *batch]: before which steps a segment begins, in a direction.

    For a `Packed`, also sequences whose first step is not valid begin there.
    """
    rows, valid = loop.masked, loop.xs.valid
    assert rows.resets is not None
    if rows.all_valid:
        # In reverse, a segment begins one step before each flag, in time.
        return jnp.concatenate([rows.resets[1:], jnp.zeros_like(rows.resets[:1])]) if reverse else rows.resets
    flags = beginnings(rows.resets, valid, reverse=reverse)
    if rows.given.spans is None:
        return flags
    refuse_split_rows(rows.given.spans, valid)
    return flags | turns(numbers_of(rows.given.spans, valid.shape), valid, later=reverse)


def beginnings(resets: Array, valid: Array, *, reverse: bool) -> Array:
    """bool[T, *batch]: where a segment begins. In reverse, that is its last valid step.

    Flags at invalid steps are ignored.
    """
    resets = resets & valid
    if not reverse or not valid.shape[0]:
        return resets
    steps = jnp.arange(valid.shape[0]).reshape(-1, *(1 for _ in valid.shape[1:]))
    valid_from = jax.lax.cummin(jnp.where(valid, steps, valid.shape[0]), reverse=True)  # the first valid step >= t
    flag_from = jax.lax.cummin(jnp.where(resets, steps, valid.shape[0]), reverse=True)
    end = jnp.full_like(valid_from[:1], valid.shape[0])
    next_valid = jnp.concatenate([valid_from[1:], end])
    next_flag = jnp.concatenate([flag_from[1:], end])
    return valid & (next_valid == next_flag) & (next_valid < valid.shape[0])


def check_targets(
    flags: RowFlags,
    reset_to: PyTree,
    init: PyTree,
    carry_axes: Prefix,
    time_axis: int,
    adopted: Adopted,
    arrays: PyTree,
    root: str,
) -> RowFlags:
    """The flags, with what a reset puts back for each leaf of init.

    Args:
        flags: checked ones. Their `inits` are those of a `Packed`, as it holds them.
        reset_to: what the user said.
        init: the carry as the user gave it.
        carry_axes: a prefix of it.
        time_axis: the axis of the steps in the mask and the resets.
        adopted: the init, values of registered types as custom carries.
        arrays: the same without its static leaves.
        root: the body's own name for its carry.

    Raises:
        Fault: for an `ArgumentError` if nothing is reset, or what is put back does not fit the init.
    """
    if reset_to is not None and flags.inits is not None:
        raise Misuse(
            "{call}: xs is a `Packed` with an `init` for each sequence, which already determines `reset_to`.",
            "Leave `reset_to` out, or leave `init` out of `pack`.",
        )
    if reset_to is not None and flags.resets is None:
        raise Misuse(
            "{call}: `reset_to` says what a reset restores, but no `resets` are given.",
            "Mark the first step of each segment, for example `resets=episode_step == 0`. Without resets, each row "
            "only starts from `init`.",
        )
    batch = batch_of(flags, time_axis)
    try:
        axes = spread_carry_axes(carry_axes, arrays, root, batch)
    except Fault:
        return flags  # `OverRows` is the first transform, and refuses such a carry with more advice
    check = functools.partial(_checked, adopted.init, axes, root)
    if flags.inits is not None:
        assert flags.spans is not None
        fits = functools.partial(_fits_table, np.shape(flags.spans[0])[0], batch)
        name = "the `init` of the `Packed`"
        return flags._replace(inits=check(name, flags.inits, (_SEQUENCES, _SEQUENCES), fits))
    with noted("`reset_to`, called with `init`,"):
        tree = reset_to(init) if _is_function(reset_to) else reset_to
    if _is_function(reset_to) and (tree is None or _is_function(tree)):
        raise Misuse(
            f"{{call}}: `reset_to` is a function, which returned {describe_argument(tree)}.",
            "It receives `init` and returns what a reset restores: `lambda init: jax.tree.map(jnp.zeros_like, init)`.",
        )
    return flags._replace(to=check("`reset_to`", tree, (_PREFIX, _FITS), _fits))


class _Place(NamedTuple):
    """A leaf of init that is an array, and what a prefix tree has for it.

    Attributes:
        path: the leaf's.
        leaf: the leaf.
        axis: where its rows start, or None.
        value: what the prefix has; None: nothing.
        own: whether the prefix has it for this leaf alone.
        carry: the custom carry that the leaf is a part of, where the prefix has none; None otherwise.
        shared: whether the leaf has no rows, nor has any other leaf of the carry that it is a part of.
    """

    path: str
    leaf: Any
    axis: int | None
    value: Any
    own: bool
    carry: Any
    shared: bool


def _checked(
    init: PyTree,
    axes: LeafAxes,
    root: str,
    name: str,
    given: PyTree,
    cures: tuple[str, str],
    fits: Callable[[_Place], Row | None],
) -> list[Any]:
    """What a reset restores in each leaf of init that is an array, of its dtype; None: its init.

    Args:
        init: the carry that a scan starts from, values of registered types as custom carries.
        axes: for each leaf that is an array the axis where the batch shape starts; None: shared by all rows.
        root: the body's own name for its carry.
        name: what messages call what is given.
        given: a prefix tree of init.
        cures: what the user may do where it is no prefix, and where a value does not fit.
        fits: the row of a message for a value whose shape or dtype does not fit its leaf.
    """
    no_prefix, misfit = (cure.replace("{root}", root) for cure in cures)
    flat, structure = jtu.tree_flatten_with_path(adopt(given).init, is_leaf=lambda node: node is None)
    numbers = jax.tree.unflatten(structure, range(len(flat)))
    chosen = iter(spread_prefix(name, numbers, init, root, no_prefix))
    named, of_arrays, places = iter(jtu.tree_flatten_with_path(init)[0]), iter(axes), list[_Place]()
    for above, node in jtu.tree_flatten_with_path(init, is_leaf=is_carry)[0]:
        leaves = jax.tree.leaves(node)
        of_node = [None if is_static(leaf) else next(of_arrays) for leaf in leaves]
        for leaf, axis in zip(leaves, of_node, strict=True):
            (where, value), (path, _) = flat[next(chosen)], next(named)
            if value is leaf or (is_static(leaf) and (where != path or (is_static(value) and agree(leaf, value)))):
                value = None
            carry = node if is_carry(node) and len(where) <= len(above) else None
            shared = all(axis is None for axis in of_node)
            places.append(_Place(path_str(root, path), leaf, axis, value, where == path, carry, shared))
    found = [_misfit(place) or (fits(place), "") for place in places]
    bad = {row: cure for row, cure in found if row}
    if bad:
        raise Misuse(
            f"{{call}}: {name} does not fit {root}.",
            *([] if all(bad.values()) else [misfit]),
            *dict.fromkeys(filter(None, bad.values())),
            rows=list(bad),
        )
    pairs = [(place.leaf, None if place.axis is None else place.value) for place in places if not is_static(place.leaf)]
    return [
        value if value is None or is_key(leaf) else jnp.asarray(value, _type_of(leaf).dtype) for leaf, value in pairs
    ]


_PREFIX = (
    "Give a number for all leaves, a prefix tree of {root} with numbers, or a function of `init` that returns one "
    "of these. None keeps the value of `init`."
)


_FITS = (
    "For each leaf give a number, an array of the leaf's shape and dtype with an entry for each row, or None for the "
    "value of `init`. `jnp.broadcast_to(state, leaf.shape)` spreads the state of one row, and "
    "`state.astype(leaf.dtype)` casts it."
)


_SEQUENCES = (
    "Give `pack` one {root} for each sequence, with the shapes of one row. Use None for the parts that all "
    "sequences take from `init`."
)


def _is_function(reset_to: Any) -> TypeGuard[Callable[..., Any]]:
    """Whether it is to be called: what can be called and is a container, as a module is, is a value."""
    if not callable(reset_to) or kind_of(reset_to):
        return False
    return isinstance(reset_to, jtu.Partial) or jtu.all_leaves([reset_to])


def _misfit(place: _Place) -> tuple[Row, str] | None:
    """The row and the cure for the value of a prefix at a leaf that no shape or dtype would make fit."""
    path, leaf, value = place.path, place.leaf, place.value
    if value is None:
        return None
    came = describe_argument(value)
    if is_static(leaf):
        cure = f"{path}: a leaf that is not an array must be the same in every step. Give None there."
        return Row(path, describe_leaf(leaf), came, "static"), cure
    if is_static(value):
        return Row(path, f"{_type_of(leaf)}", describe_leaf(value)), ""
    if place.carry is not None:
        kind = type(place.carry).__name__
        cure = (
            f"{path} is a part of a custom carry (`{kind}`), which defines its own start: give a carry of that "
            "class there, or None for the value of `init`."
        )
        return Row(path, f"a part of a {kind}", came), cure
    if place.shared and place.own:
        cure = (
            f"{path}: all rows share this leaf, and a shared leaf is never reset. Give None there, or give the leaf "
            "one entry per row and an axis in `carry_axes`."
        )
        return Row(path, "None", came, "shared"), cure
    return None


def _fits(place: _Place) -> Row | None:
    """The row for a value that a leaf cannot hold, neither alone nor with an entry for each row."""
    value, leaf = place.value, place.leaf
    if value is None or place.axis is None:
        return None
    if isinstance(value, _NUMBERS) and not is_key(leaf):
        fits = holds(_type_of(leaf).dtype, value.item() if isinstance(value, np.generic) else value)
    else:
        shapes = [shape_of(leaf)] if is_key(leaf) else [(), shape_of(leaf)]
        fits = shape_of(value) in shapes and _same_dtype(value, leaf)
    came = describe_argument(value) + ("" if place.own else " for several leaves")
    return None if fits else Row(place.path, f"{_type_of(leaf)}", came)


def _fits_table(count: int, batch: tuple[int, ...], place: _Place) -> Row | None:
    """The row for a value that does not have so many entries, each of what a row of the leaf holds."""
    value, leaf, axis = place.value, place.leaf, place.axis
    if value is None or axis is None:
        return None
    shape = shape_of(leaf) or ()
    wanted = (count, *shape[:axis], *shape[axis + len(batch) :])
    if place.own and shape_of(value) == wanted and _same_dtype(value, leaf):
        return None
    return Row(place.path, f"{ShapedArray(wanted, _type_of(leaf).dtype)}", describe_node(value))


_NUMBERS = (bool, int, float, complex, np.generic)


def _type_of(leaf: Any) -> ShapedArray:
    """A leaf's shape and dtype, weak or not."""
    return ShapedArray(jax.typeof(leaf).shape, jax.typeof(leaf).dtype)


def _same_dtype(value: Any, leaf: Any) -> bool:
    dtype = dtype_of(leaf)
    return dtype_of(value) == dtype or (
        is_weak(value) and not is_key(leaf) and bool(jnp.result_type(value, jnp.zeros((), dtype)) == dtype)
    )
