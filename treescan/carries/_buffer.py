"""Stores of values: a buffer that is appended to, and the best values so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from .._avals import Array, ArrayLike, PyTree, describe_argument, describe_leaf, describe_node, exact_int
from .._errors import (
    ArgumentError,
    ArgumentTypeError,
    Misuse,
    TracedArgumentError,
    TypeMisuse,
    expect,
    expect_int,
    expect_one_of,
    named_options,
)
from .._tree import same_structure
from ._base import AbstractCarry, as_seen

Seen = TypeVar("Seen")


def strong(value: ArrayLike) -> Array:
    """A copy that is not weakly typed, so that the loop need not be traced again with its promoted type."""
    array = numbers(value)
    return own(jnp.asarray(array, array.dtype))


def own(value: Any) -> Any:
    """A copy of an array, for a state that is donated: JAX refuses one that holds the same buffer twice.

    A traced value has no buffer, and is not copied.
    """
    if isinstance(value, Tracer) or not isinstance(value, jax.Array):
        return value
    with jax.ensure_compile_time_eval():  # under a trace the copy would be an operation of the program
        return value.copy()


def inexact(value: ArrayLike, name: str = "") -> Array:
    """A value as a floating-point array with a strong type; `name` is the parameter that it was given as."""
    array = numbers(value, name)
    return strong(value if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(float))


def numbers(value: object, name: str = "") -> Array:
    """A value as an array.

    Raises:
        Fault: for an `ArgumentTypeError` if it is none. `name` is the parameter that it was given as, if it is one.
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeMisuse(
            f"{{verb}}: {f'`{name}` is an array or a number' if name else 'it carries arrays and numbers'}, got "
            f"{describe_argument(value)}.",
            "Give an array, a number or, if a pytree is carried, a tree of these.",
        ) from None


def check_structure(given: PyTree, value: PyTree) -> None:
    """Refuses a value whose structure is not that of what is carried.

    Raises:
        TypeError: if it is not.
    """
    if not same_structure(given, value):
        raise TypeError(f"it carries {describe_node(value)}, but was given {describe_node(given)}")


def widest(*dtypes: DTypeLike) -> DTypeLike:
    """The floating-point dtype to compute in, at least float32: whatever JAX is told about promotion."""
    wide: DTypeLike = jnp.float32
    for dtype in dtypes:
        wide = dtype if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits > 32 else wide
    return wide


def wide_enough(value: Array) -> DTypeLike:
    """The dtype in which a statistic of inexact numbers is kept, at least float32.

    A sum or an average in half precision stops to change after some hundred steps: what is added is too small.
    """
    return value.dtype if jnp.iscomplexobj(value) else widest(value.dtype)


def widened(value: Array) -> tuple[Array, DTypeLike | None]:
    """A value in the dtype in which it is kept, and the dtype that the body sees; None: the same."""
    dtype = wide_enough(value)
    return value.astype(dtype), None if dtype == value.dtype else value.dtype


def in_dtype(value: Array, dtype: DTypeLike | None) -> Array:
    """A value as the body sees it; None: in its own dtype."""
    return value if dtype is None else value.astype(dtype)


class Entries(NamedTuple):
    """What was returned in one step for a value that all rows share: `[*rows, ...]`.

    Attributes:
        values: the entries; 0 in those that do not count.
        counts: bool[*rows, ...], broadcast over the trailing axes: which of them count; None if all do.
        number: int32[]: how many rows count; an int if all do.
        axes: the axes of the rows.
    """

    values: Array
    counts: Array | None
    number: Array | int
    axes: tuple[int, ...]

    def mean(self) -> Array:
        """The mean of those that count, over the rows, in at least float32."""
        values = self.values.astype(wide_enough(self.values))
        if not self.axes:
            return values
        return jnp.sum(values, self.axes) / jnp.maximum(self.number, 1).astype(values.dtype)

    def but_none(self, new: Array, old: Array) -> Array:
        """A value after this step: the old one if no row counts."""
        if isinstance(self.number, int):
            return new if self.number else old
        return jnp.where(self.number > 0, new, old)


def is_shared(shared: bool | None, value: Array) -> bool:
    """Whether all rows share a value: if it is said, else if it has no axis that rows could be on."""
    return jnp.ndim(value) == 0 if shared is None else shared


def made(carry: AbstractCarry[Seen, Any]) -> Seen:
    """A carry, typed as what the body sees, once its `shared` is checked."""
    shared: object = getattr(carry, "shared", None)
    cure = "True: all rows of a `mask_scan` share it. False: each has its own."
    expect(shared is None or isinstance(shared, bool), "shared", "True, False or None", shared, cure)
    return as_seen(carry)


def entry(returned: ArrayLike, value: Array) -> Array:
    """What was returned for a value, in its dtype.

    Raises:
        TypeError: if the shapes differ.
    """
    return entries(returned, value, None, shared=False).values


def fitted(new: Array, value: Array) -> Array:
    """A number in the dtype of what is carried.

    Raises:
        TypeError: if that would lose more than precision: the fraction, the imaginary part, all but whether it is 0.
    """
    order = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    kinds = [next((i for i, kind in enumerate(order) if jnp.issubdtype(x.dtype, kind)), 0) for x in (new, value)]
    if kinds[0] > kinds[1]:
        raise TypeError(f"it carries {describe_leaf(value)}, which cannot hold {describe_leaf(new)}")
    return new.astype(value.dtype)


def entries(returned: ArrayLike, value: Array, valid: Array | None, *, shared: bool | None = True) -> Entries:
    """What was returned for a value: for all rows of a batch if they share it, else one entry, of its own shape.

    Args:
        returned: what was returned.
        value: what is carried.
        valid: the rows that are data; None: there are no rows, or nothing says so.
        shared: whether the user said that rows share the value; None: it is only taken to be so if it has no axes.

    Raises:
        TypeError: if the shape does not end in the value's, or does not begin with the mask's; or if nothing says that
            its other axes are rows.
    """
    if not jax.tree_util.all_leaves([returned]):  # of a list, JAX would make an array
        raise TypeError(f"it carries an array, but was given {describe_node(returned)}")
    new = jnp.asarray(returned)
    if not is_shared(shared, value):
        if new.shape != value.shape:
            raise TypeError(f"it carries {describe_leaf(value)}, but was given {describe_leaf(returned)}")
        valid = None
    extra = new.ndim - value.ndim
    rows = new.shape[:extra]
    if extra > 0 and valid is None and shared is None:
        raise TypeError(
            f"it carries {describe_leaf(value)}, but was given {describe_leaf(returned)}. For a number per "
            f"entry, make it of shape {new.shape}. To combine all entries into one number, say `shared=True`"
        )
    if extra < 0 or new.shape[extra:] != value.shape or (valid is not None and rows not in ((), valid.shape)):
        rows_too = "" if valid is None else f", one for each row of {list(valid.shape)} or one for all"
        own = new.shape if valid is None or rows[: valid.ndim] != valid.shape else new.shape[valid.ndim :]
        cure = f". For a number per entry, make it of shape {own}" if own != new.shape else ""
        raise TypeError(f"it carries {describe_leaf(value)}{rows_too}, but was given {describe_leaf(returned)}{cure}")
    new = fitted(new, value)
    axes = tuple(range(extra))
    if valid is None:
        return Entries(new, None, math.prod(rows), axes)
    counts = jnp.any(valid) if not rows else valid
    number = jnp.sum(counts, dtype=jnp.int32)
    counts = counts.reshape(*counts.shape, *(1 for _ in value.shape))
    return Entries(jnp.where(counts, new, jnp.zeros_like(new)), counts, number, axes)


def pair(returned: PyTree, names: str) -> tuple[PyTree, PyTree]:
    """What was returned, as the pair that it must be.

    Raises:
        TypeError: if it is none.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"the body returns a pair ({names}) in its place")
    return returned[0], returned[1]


T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Buffer(AbstractCarry[tuple[Any, Array], tuple[Any, ArrayLike]]):
    """A store for a number of values. The body returns pairs (value, append), and values with `append` are kept.

    Values beyond its capacity are dropped, but counted: `count` may be larger than the capacity.

    Attributes:
        values: any pytree of arrays, leaves [capacity, ...]; [capacity, *batch, ...] if each row has its own.
        count: int32, [] or [*batch]: how many values were appended so far, including dropped ones.
        shared: whether all rows share it; None: if the count has no axes.
    """

    values: PyTree
    count: Array
    shared: bool | None = field(default=None, metadata={"static": True})

    def read(self) -> tuple[PyTree, Array]:
        """The values, of which the first `count` are filled, and the count."""
        return self.values, self.count

    def write(self, returned: tuple[PyTree, ArrayLike], valid: Array | None) -> Buffer:
        """Appends a value, or those of valid rows, in the order of the rows."""
        value, append = pair(returned, "value, append")
        check_structure(value, self.values)
        append = jnp.asarray(append).astype(bool).astype(jnp.int32)
        capacity = jax.tree.leaves(self.values)[0].shape[0]
        if is_shared(self.shared, self.count):
            told = entries(append, self.count, valid).values.astype(bool)
            before = jnp.cumsum(told.reshape(-1), dtype=jnp.int32).reshape(told.shape) - told.astype(jnp.int32)
            place = jnp.where(told, self.count + before, capacity)
            count = self.count + jnp.sum(told, dtype=jnp.int32)
        else:
            told = entry(append, self.count) != 0
            place = jnp.where(told, self.count, capacity)
            count = self.count + told.astype(jnp.int32)
        values = jax.tree.map(lambda new, old: self._set(old, new, place), value, self.values)
        return replace(self, values=values, count=count)

    def _set(self, values: Array, value: ArrayLike, place: Array) -> Array:
        """Writes to the given places; one at or past the capacity writes nothing."""
        new = fitted(jnp.asarray(value), values)
        expected = values.shape[1:] if self.count.ndim else (*place.shape, *values.shape[1:])
        if new.shape != expected:
            one = describe_leaf(jax.ShapeDtypeStruct(expected, values.dtype))
            says = f"it appends one value of type {one} per step, but was given {describe_leaf(value)}"
            if new.shape == values.shape:
                says += f", which has the shape of the whole buffer of {len(values)} values: return only the new value"
            raise TypeError(says)

        def put(values: Array, new: Array, place: Array) -> Array:
            return values.at[place].set(new, mode="drop")

        for _ in range(self.count.ndim):  # the rows of each have places of their own
            put = jax.vmap(put, in_axes=(1, 0, 0), out_axes=1)
        return put(values, new, place)

    def rows(self) -> Mapping[str, Any] | None:
        """Where rows are: behind the capacity in the values; None if all rows share the buffer."""
        return None if is_shared(self.shared, self.count) else {"values": 1, "count": 0}


def checked_batch(batch: object) -> tuple[int, ...]:
    """A batch shape."""
    sizes = [exact_int(size) for size in batch] if isinstance(batch, tuple | list) else [None]
    one, known = exact_int(batch), [size for size in sizes if size is not None and size >= 0]
    cure = "Give the batch shape, `batch=(rows,)`." if one is None else f"Did you mean `batch=({one},)`?"
    expect(len(known) == len(sizes), "batch", "a tuple of ints", batch, cure)
    return tuple(known)


@named_options
def buffer(value: T, capacity: int, *, batch: tuple[int, ...] = (), shared: bool | None = None) -> tuple[T, Array]:
    """Carries a store for values, which the body appends to.

    Args:
        value: a value, for its types: any pytree of arrays; without the batch shape, even if each row has its own.
        capacity: the number of values that fit. Further values are dropped, but counted.
        batch: the batch shape of a `mask_scan` in which each row has its own.
        shared: whether all rows of a `mask_scan` share it: then the body returns values [*batch, ...] and flags
            [*batch], of which those of valid rows are appended. None: if `batch` is ().

    Returns:
        `Buffer`, typed as the pair (values, count) that the body sees, with leaves [capacity, *batch, ...]. The body
        returns a pair (value, append), a new value and a bool: whether to append it.

    Raises:
        ArgumentError: if the capacity is less than 1, or `value` has no leaves.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import buffer
        >>> def keep_even(seen, x):
        ...     return (x, x % 2 == 0), None
        >>> final, _ = treescan.scan(keep_even, buffer(0, capacity=4), jnp.arange(6))
        >>> print(final.values, final.count)
        [0 2 4 0] 3
    """
    if not jax.tree.leaves(value):
        raise Misuse(
            f"{{verb}}: `value` says the types of the values, but has no leaves, got {describe_node(value)}.",
            "Give an example of a value, for example `0.0` for numbers.",
        )
    batch = checked_batch(batch)
    capacity = expect_int(
        capacity,
        "capacity",
        "It is a part of the shape of the buffer, so it must be known when the program is traced.",
        least=1,
        small="It is the number of values that fit.",
        error=TracedArgumentError if isinstance(capacity, Tracer) else ArgumentTypeError,
    )

    def room(leaf: ArrayLike) -> Array:
        return jnp.zeros((capacity, *batch, *jnp.shape(leaf)), numbers(leaf).dtype)

    return made(Buffer(jax.tree.map(room, value), jnp.zeros(batch, jnp.int32), shared))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Best(AbstractCarry[tuple[Array, Any], tuple[ArrayLike, Any]]):
    """The candidate with the best score so far, of the pairs (score, value) that the body returns.

    Of several candidates with the same score, the first stays. A score that is NaN is never better.

    Attributes:
        score: of the best, floating point.
        value: the best: any pytree of arrays that start with the axes of the score.
        mode: "max" or "min", which scores are better.
        shared: whether all rows share it; None: if the score has no axes.
    """

    score: Array
    value: PyTree
    mode: Literal["max", "min"] = field(default="max", metadata={"static": True})
    shared: bool | None = field(default=None, metadata={"static": True})

    def read(self) -> tuple[Array, PyTree]:
        """The best score and its value."""
        return self.score, self.value

    def write(self, returned: tuple[ArrayLike, PyTree], valid: Array | None) -> Best:
        """The better one of two, or of all valid rows."""
        score, value = pair(returned, "score, value")
        check_structure(value, self.value)
        if is_shared(self.shared, self.score):
            if 0 in jnp.shape(score):
                return self
            score, value = self._best_row(score, value, valid)
        score = entry(score, self.score)
        better = score > self.score if self.mode == "max" else score < self.score

        def choose(new: ArrayLike, old: Array) -> Array:
            new = entry(new, old)
            return jnp.where(better.reshape(*better.shape, *(1 for _ in range(old.ndim - better.ndim))), new, old)

        return replace(self, score=jnp.where(better, score, self.score), value=jax.tree.map(choose, value, self.value))

    def _best_row(self, score: ArrayLike, value: PyTree, valid: Array | None) -> tuple[Array, PyTree]:
        rows, worst = entries(score, self.score, valid), _worst(self.mode)
        if not rows.axes:
            counts = True if rows.counts is None else rows.counts
            return jnp.where(counts, rows.values, worst), value
        counts = ~jnp.isnan(rows.values) if rows.counts is None else rows.counts & ~jnp.isnan(rows.values)
        flat = jnp.where(counts, rows.values, worst).reshape(-1)
        place = jnp.argmax(flat) if self.mode == "max" else jnp.argmin(flat)

        def take(leaf: ArrayLike) -> Array:
            leaf = jnp.asarray(leaf)
            shape = rows.values.shape
            if leaf.shape[: len(shape)] != shape:
                raise TypeError(f"the scores are {describe_leaf(score)}, but a value is {describe_leaf(leaf)}")
            return leaf.reshape(flat.size, *leaf.shape[len(shape) :])[place]

        return flat[place], jax.tree.map(take, value)

    def rows(self) -> int | None:
        """They lead; None if all rows share it."""
        return None if is_shared(self.shared, self.score) else 0


def _worst(mode: str) -> float:
    return -jnp.inf if mode == "max" else jnp.inf


@named_options
def best(
    value: T, score: ArrayLike | None = None, *, mode: Literal["max", "min"] = "max", shared: bool | None = None
) -> tuple[Array, T]:
    """Carries the best candidate so far.

    Args:
        value: the first best value: any pytree of arrays. They are copied, so a state that also holds them can be
            donated.
        score: its score, a number, or one per row [*batch]. None: worse than any, -inf or inf, of shape [].
        mode: whether high ("max") or low scores ("min") are better.
        shared: whether all rows of a `mask_scan` share it: then the body returns scores [*batch] and values
            [*batch, ...], of which the best valid row counts. None: if the score has no axes.

    Returns:
        `Best`, typed as the pair (score, value) that the body sees. The body returns a pair (score, candidate).

    Raises:
        ArgumentTypeError: if the score is not a number (but, for example, a function that computes it), or the value
            contains no arrays.
        ArgumentError: if the mode is another.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import best
        >>> def descend(carry, _):
        ...     x = carry["x"] - 0.9 * 2 * carry["x"]
        ...     return {"x": x, "best": (x**2, x)}, None
        >>> final, _ = treescan.scan(
        ...     descend, {"x": 1.0, "best": best(1.0, mode="min")}, length=5
        ... )
        >>> print(final["best"].value.round(3))
        -0.328
    """
    high = '"max" keeps the highest score, "min" the lowest.'
    expect_one_of(mode, "mode", ("max", "min"), high, error=ArgumentError)
    first = (
        "It is the score of the first value. None is worse than any score. The body computes the scores of later "
        "values, and returns `(score, candidate)` in the place of the carry."
    )
    expect(not callable(score), "score", "a number, or one for each row", score, first)
    start = _worst(mode) if score is None else numbers(score, "score")
    return made(Best(inexact(start), jax.tree.map(strong, value), mode, shared))
