"""Statistics that a carry collects: averages, moments, windows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from .._avals import Array, ArrayLike, PyTree, describe_argument, describe_leaf, exact_int
from .._errors import Misuse, TypeMisuse, expect, named_options
from .._tree import PrefixMismatch, broadcast_prefix, describe_tree, leaves_with_path
from ._base import AbstractCarry, as_seen
from ._buffer import Entries, entries, fitted, in_dtype, inexact, is_shared, made, strong, wide_enough, widened, widest

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ema(AbstractCarry[Any, Any]):
    """The exponential moving average of what the body returns: value = decay * value + (1 - decay) * returned.

    With a weight, the body sees value / weight, weight = decay * weight + (1 - decay) from 0 on: the average
    that is not biased towards its start (the bias correction of Adam: Kingma and Ba, 2015, section 3). The first step
    drops the start from the value.

    A value that all rows of a `mask_scan` share is updated once per step, with the mean of the valid entries.

    Attributes:
        value: any pytree of floating-point arrays, in at least float32.
        decay: a number, or an array that broadcasts against each leaf and has no rows; may be traced. A prefix tree of
            the value has other decays for other leaves.
        weight: the same tree, or None.
        shared: whether all rows share it; None: leaves without axes are shared.
        dtypes: for each leaf that of the average that the body sees, None for that of the value; (): all None.
    """

    value: PyTree
    decay: PyTree
    weight: PyTree = None
    shared: bool | None = field(default=None, metadata={"static": True})
    dtypes: tuple[DTypeLike | None, ...] = field(default=(), metadata={"static": True})

    def read(self) -> PyTree:
        """The average."""
        value = self.value
        if self.weight is not None:
            value = jax.tree.map(lambda v, w: v / jnp.where(w == 0, jnp.ones_like(w), w), value, self.weight)
        leaves, structure = jax.tree.flatten(value)
        dtypes = self.dtypes or [None] * len(leaves)
        return jax.tree.unflatten(structure, map(in_dtype, leaves, dtypes))

    def write(self, returned: PyTree, valid: Array | None) -> Ema:
        """One step of each average; those of which no entry counts do not change."""
        decays = jax.tree.unflatten(
            jax.tree.structure(self.value), broadcast_prefix(self.decay, self.value, "carry.value")
        )
        rows = jax.tree.map(lambda old, came: entries(came, old, valid, shared=self.shared), self.value, returned)

        def step(old: Array, rows: Entries, decay: ArrayLike) -> Array:
            return rows.but_none(_average(old, rows.mean(), decay), old)

        if self.weight is None:
            return replace(self, value=jax.tree.map(step, self.value, rows, decays))

        def heavier(old: Array, rows: Entries, decay: ArrayLike) -> Array:
            return rows.but_none(_average(old, jnp.ones_like(old), decay), old)

        def without_start(old: Array, before: Array, now: Array) -> Array:
            return jnp.where((before == 0) & (now != 0), jnp.zeros_like(old), old)

        weight = jax.tree.map(heavier, self.weight, rows, decays)
        value = jax.tree.map(without_start, self.value, self.weight, weight)
        return replace(self, value=jax.tree.map(step, value, rows, decays), weight=weight)

    def rows(self) -> Mapping[str, Any]:
        """Each leaf as `shared` has it; none in the decay."""
        axes = jax.tree.map(lambda leaf: None if is_shared(self.shared, leaf) else 0, self.value)
        return {"value": axes, "decay": None, "weight": None if self.weight is None else axes}


def _average(old: Array, came: Array, decay: ArrayLike) -> Array:
    decay = jnp.asarray(decay)  # computed in its precision: 0.999 is 1 in bfloat16
    dtype = old.dtype if jnp.iscomplexobj(old) else widest(decay.dtype, old.dtype)
    if not decay.weak_type:
        decay = decay.astype(dtype)
    if decay.ndim not in (0, old.ndim):
        decay = jnp.broadcast_to(decay, old.shape)
    return (decay * old.astype(dtype) + (1 - decay) * came.astype(dtype)).astype(old.dtype)


@overload
def ema(start: float, decay: PyTree, *, debias: bool = False, shared: bool | None = None) -> Array: ...
@overload
def ema(start: T, decay: PyTree, *, debias: bool = False, shared: bool | None = None) -> T: ...
@named_options
def ema(start: Any, decay: PyTree, *, debias: bool = False, shared: bool | None = None) -> Any:
    """Carries the exponential moving average of what the body returns.

    Args:
        start: the average before the first step: any pytree of numbers or arrays. The body sees the average in their
            dtypes. It is kept in at least float32, because small steps would be lost in half precision.
        decay: the weight of the past, between 0 and 1; a number or an array, traced or not, or a prefix tree of `start`
            with these. Traced decays are not checked: beyond 0 and 1 the same formula holds.
        debias: whether the body sees the average of what it returned alone, without the share of `start`. Before the
            first step, it sees `start`.
        shared: whether all rows of a `mask_scan` share the average: then the body returns entries [*batch, ...], and
            their mean over the valid rows counts; elsewhere their mean over all. None: leaves without axes are shared,
            others have rows; elsewhere than in rows the body returns a number for the former.

    Returns:
        `Ema`, typed as the average that the body sees.

    Raises:
        ArgumentError: if a decay is not between 0 and 1, or the decays are no prefix tree of `start`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import ema
        >>> final = treescan.fold(
        ...     lambda average, x: x, ema(0.0, decay=0.5), jnp.array([1.0, 1.0, 1.0])
        ... )
        >>> print(final.read())
        0.875
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(inexact, start))
    kept = list(map(widened, leaves))
    value, dtypes = jax.tree.unflatten(structure, [leaf for leaf, _ in kept]), tuple(dtype for _, dtype in kept)
    expect(isinstance(debias, bool), "debias", "True or False", debias, "True corrects the bias towards the start.")
    weight, is_same = jax.tree.map(jnp.zeros_like, value) if debias else None, all(each is None for each in dtypes)
    return made(Ema(value, _decays(decay, value), weight, shared, () if is_same else dtypes))


def _decays(decay: PyTree, start: PyTree) -> PyTree:
    """The decays as arrays, a prefix tree of the start; each is between 0 and 1 if it is known."""
    cure = "Give one decay for all leaves, or a prefix tree of `start`, in which one may cover a whole subtree."
    try:
        spread = broadcast_prefix(decay, start, "start")
    except PrefixMismatch as off:
        raise Misuse(f"{{verb}}: `decay` is not a prefix of `start`: {off}.", cure) from None
    expect(all(each is not None for each in spread), "decay", "a number or an array for each leaf", decay, cure)
    kept = jax.tree.map(lambda each: inexact(each, "decay"), decay)
    for path, each in leaves_with_path("decay", decay):  # what is given: under a trace, all that is kept is traced
        if jnp.iscomplexobj(each) or not (isinstance(each, Tracer) or np.all(np.abs(np.asarray(each) - 0.5) <= 0.5)):
            raise Misuse(
                f"{{verb}}: {path} must be between 0 and 1, got {describe_tree(np.asarray(each))}.",
                "It is the weight of the past: 0.99 averages about the last 100 values.",
            )
    return kept


class Spread:
    """The variances, of the body's view and of the carry alike."""

    count: Array
    mean: Array
    squares: Array

    @property
    def variance(self) -> Array:
        """The variance, `squares / count`; 0 before the first entry."""
        return self._by(self.count)

    @property
    def sample_variance(self) -> Array:
        """The variance of which these entries are a sample, `squares / (count - 1)`; 0 before the second entry."""
        return self._by(self.count - 1)

    def _by(self, number: Array) -> Array:
        wide = self.squares.astype(wide_enough(self.squares))  # counts too: float16 ends at 65504
        return (wide / jnp.maximum(number, 1).astype(wide.dtype)).astype(self.mean.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Statistics(Spread):
    """What the body sees of `Moments`: also `variance` and `sample_variance`.

    Attributes:
        count: int32: the number of entries so far.
        mean: their mean.
        squares: the sum of their squared deviations from it, in at least float32.
    """

    count: Array
    mean: Array
    squares: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moments(Spread, AbstractCarry[Statistics, ArrayLike]):
    """The mean and variance of what the body returns, by Welford's recurrence (Technometrics 4, 1962).

    Entries of several rows at once, and two `Moments`, are merged by the formula of Chan, Golub and LeVeque (1979):
    with d = mean_b - mean_a and n = n_a + n_b the mean is mean_a + d n_b / n, the sum of squared deviations
    squares_a + squares_b + d^2 n_a n_b / n. Both are exact except for rounding, and neither subtracts large numbers.
    It has `variance` and `sample_variance`, as what the body sees.

    Attributes:
        count: int32, of the mean's shape, [] if shared: the number of entries.
        mean: their mean, in at least float32.
        squares: the sum of their squared deviations from it.
        shared: whether all rows share them; None: if the mean has no axes.
        dtype: that of the mean that the body sees; None: that of the mean.
    """

    count: Array
    mean: Array
    squares: Array
    shared: bool | None = field(default=None, metadata={"static": True})
    dtype: DTypeLike | None = field(default=None, metadata={"static": True})

    @named_options
    def merge(self, other: Moments) -> Moments:
        """The moments of all entries of both.

        Raises:
            ArgumentError: if their entries have different shapes.
        """
        if other.mean.shape != self.mean.shape:
            ours, others = (describe_leaf(moments.mean) for moments in (self, other))
            raise Misuse(
                f"{{verb}}: moments of {ours} and of {others} cannot be merged: their entries differ in shape.",
                "Merge moments of entries of one shape.",
            )
        return self._merged(other.count, other.mean, other.squares)

    def _merged(self, number: Array, mean: Array, squares: Array) -> Moments:
        """The moments of these entries and of others, of which there are `number`."""
        wide = wide_enough(self.mean)  # of counts and their ratios too: float16 ends at 65504
        count = self.count + number
        mine, theirs, all_ = (n.astype(wide) for n in (self.count, number, jnp.maximum(count, 1)))
        delta = mean.astype(wide) - self.mean.astype(wide)
        between = delta * (delta * (mine * (theirs / all_)))  # a square may be infinite, times 0
        return self._moved(count, delta * (theirs / all_), squares.astype(wide) + between)

    def _moved(self, count: Array, mean: Array, squares: Array) -> Moments:
        """These with another count, and with what is added to the mean and to the squares."""
        mean, squares = (
            (old.astype(more.dtype) + more).astype(old.dtype)
            for old, more in ((self.mean, mean), (self.squares, squares))
        )
        return replace(self, count=count, mean=mean, squares=squares)

    def read(self) -> Statistics:
        """Count, mean and variance."""
        return Statistics(self.count, in_dtype(self.mean, self.dtype), self.squares)

    def write(self, returned: ArrayLike, valid: Array | None) -> Moments:
        """One entry more, or one a valid row."""
        rows = entries(returned, self.mean, valid, shared=self.shared)
        mean = rows.mean()
        values = rows.values.astype(mean.dtype)
        if not rows.axes and rows.counts is None:
            count = self.count + 1
            delta = values - self.mean.astype(values.dtype)
            step = delta / count.astype(delta.dtype)
            return self._moved(count, step, delta * (delta - step))
        deviations = values - jnp.broadcast_to(mean, values.shape)
        if rows.counts is not None:
            deviations = jnp.where(rows.counts, deviations, jnp.zeros_like(deviations))
        return self._merged(jnp.asarray(rows.number, jnp.int32), mean, jnp.sum(deviations**2, rows.axes))

    def rows(self) -> int | None:
        """They lead; None if all rows share it."""
        return None if is_shared(self.shared, self.mean) else 0


@named_options
def moments(shape: tuple[int, ...] = (), dtype: DTypeLike = float, *, shared: bool | None = None) -> Statistics:
    """Carries the running mean and variance of what the body returns.

    Args:
        shape: the shape of an entry; [*batch, ...] if each row of a `mask_scan` has its own.
        dtype: of the mean, floating point.
        shared: whether all rows of a `mask_scan` share them: then the body returns entries [*batch, *shape], of which
            those of valid rows count; elsewhere all count. None: the same if the shape is (), but elsewhere than in
            rows the body returns a number.

    Returns:
        `Moments`, typed as the statistics that the body sees. The body returns an entry in their place.

    Raises:
        ArgumentTypeError: if the shape is not a tuple of ints, for example an array, or the dtype not floating point.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import moments
        >>> def normalise(seen, x):
        ...     return x, (x - seen.mean) / jnp.sqrt(seen.variance + 1e-6)
        >>> final, _ = treescan.scan(normalise, moments(), jnp.array([1.0, 2.0, 6.0]))
        >>> print(final.mean, final.sample_variance)
        3.0 7.0
    """
    sizes, floating = _checked(shape), False
    with contextlib.suppress(TypeError):  # no dtype at all
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    cure = "A mean of ints is a floating-point number too. The body may return ints."
    expect(floating, "dtype", "a floating-point dtype", dtype, cure)
    mean, seen = widened(jnp.zeros(sizes, dtype))
    count = jnp.zeros(() if is_shared(shared, mean) else shape, jnp.int32)
    return made(Moments(count, mean, jnp.zeros_like(mean), shared, seen))


def _checked(shape: object) -> tuple[int, ...]:
    """The shape of an entry; one number is the shape of a vector."""
    parts = shape if isinstance(shape, tuple | list) else (shape,)
    sizes = [size for part in parts if (size := exact_int(part)) is not None and size >= 0]
    if len(sizes) == len(parts):
        return tuple(sizes)
    cure = "Give a tuple of ints: `moments((features,))`, or `moments()` for the moments of a number."
    if isinstance(shape, jax.Array | np.ndarray):
        cure = f"For entries like this array, give its shape, `moments({tuple(shape.shape)})`. The moments start empty."
    raise TypeMisuse(f"{{verb}}: `shape` must be the shape of an entry, got {describe_argument(shape)}.", cure)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window(AbstractCarry[Any, Any]):
    """The last k values that the body returned, oldest first: `window[-1]` is the last one, `window[-i]` lag i.

    A step costs one copy of the window. In `mask_scan`, the batch shape comes after axis k.

    Attributes:
        values: any pytree of arrays, leaves [k, ...].
    """

    values: PyTree

    def read(self) -> PyTree:
        """The values, leaves [k, ...]."""
        return self.values

    def write(self, returned: PyTree, valid: Array | None) -> Window:
        """The oldest value goes, a new one comes."""
        return Window(jax.tree.map(_shift, self.values, returned))

    def rows(self) -> int:
        """Behind the k values."""
        return 1


def _shift(values: Array, returned: ArrayLike) -> Array:
    if jnp.shape(returned) != values.shape[1:]:
        raise TypeError(
            f"it carries {describe_leaf(values)}, values of shape {list(values.shape[1:])}, but was given "
            f"{describe_leaf(returned)}"
        )
    return jnp.concatenate([values[1:], fitted(jnp.asarray(returned), values)[None]])


@named_options
def window(history: T) -> T:
    """Carries the last k values, for example for an autoregressive model of order k.

    Args:
        history: the values before the first step, oldest first: any pytree of arrays, leaves [k, ...], k at least 1.

    Returns:
        `Window`, typed as the history. The body sees the last k values and returns a new one, leaves [...].

    Raises:
        ArgumentError: if a leaf has no axis of values.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import window
        >>> def fibonacci(last, _):
        ...     return last[-1] + last[-2], last[-1]
        >>> _, numbers = treescan.scan(fibonacci, window(jnp.array([0, 1])), length=8)
        >>> print(numbers)
        [ 1  1  2  3  5  8 13 21]
    """
    for path, leaf in leaves_with_path("history", history):
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] == 0:
            raise Misuse(
                f"{{verb}}: the first axis of {path} must be the last k values, got {describe_leaf(leaf)}.",
                "Give at least one value, for example `jnp.zeros((k, *shape))`.",
            )
    return as_seen(Window(jax.tree.map(strong, history)))
