"""What the statistics share: strong initial types, and rows of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from .._avals import describe_argument, describe_leaf, describe_node
from .._errors import ArgumentTypeError, Fault, explain
from .._types import Array, ArrayLike, PyTree, TreeDef

_F = TypeVar("_F", bound=Callable[..., Any])


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


def inexact(value: ArrayLike) -> Array:
    """The same, floating point."""
    array = numbers(value)
    return strong(value if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(float))


def numbers(value: Any, name: str = "") -> Array:
    """A value as an array.

    Raises:
        Fault: for an `ArgumentTypeError` if it is none. `name` is the parameter that it was given as, if it is one.
    """
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: {f'`{name}` is an array or a number' if name else 'it carries arrays and numbers'}, got "
            f"{describe_argument(value)}.",
            "Give an array, a number or, if a pytree is carried, a tree of these.",
        ) from None


def maker(function: _F) -> _F:
    """A public function that makes a carry: of what is wrong with its arguments, the user sees the public error."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Fault as fault:
            explained = explain(fault, function.__name__)
        raise explained

    return cast("_F", make)


def same_structure(given: PyTree, value: PyTree) -> None:
    """Refuses a value whose structure is not that of what is carried.

    Raises:
        TypeError: if it is not.
    """
    structures: list[TreeDef] = [jax.tree.structure(given), jax.tree.structure(value)]
    if structures[0] != structures[1]:
        raise TypeError(f"it carries {describe_node(value)}, but was given {describe_node(given)}")


def widest(*dtypes: DTypeLike) -> DTypeLike:
    """The floating-point dtype to compute in, at least float32: whatever JAX is told about promotion."""
    wide: DTypeLike = jnp.float32
    for dtype in dtypes:
        wide = dtype if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits > 32 else wide
    return wide


class Entries(NamedTuple):
    """What was returned in one step for a value that all rows share: `[*rows, ...]`.

    Attributes:
        values: the entries; 0 in those that do not count.
        counts: bool[*rows, ...], broadcast over the trailing axes: which of them count; None if all do.
        number: int32[]: how many rows count.
        axes: the axes of the rows.
    """

    values: Array
    counts: Array | None
    number: Array
    axes: tuple[int, ...]


def is_shared(shared: bool | None, value: Array) -> bool:
    """Whether all rows share a value: if it is said, else if it has no axis that rows could be on."""
    return jnp.ndim(value) == 0 if shared is None else shared


def entry(returned: ArrayLike, value: Array) -> Array:
    """What was returned for a value, in its dtype.

    Raises:
        TypeError: if the shapes differ.
    """
    new = _array(returned)
    if new.shape != value.shape:
        raise TypeError(f"it carries {describe_leaf(value)}, but was given {describe_leaf(returned)}")
    return fitted(new, value)


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


def entries(returned: ArrayLike, value: Array, valid: Array | None) -> Entries:
    """What was returned for the rows of a batch, for a value that they share.

    Raises:
        TypeError: if the shape does not end in the value's, or does not begin with the mask's.
    """
    new = _array(returned)
    extra = new.ndim - value.ndim
    rows = new.shape[:extra]
    if extra < 0 or new.shape[extra:] != value.shape or (valid is not None and rows not in ((), valid.shape)):
        rows_too = "" if valid is None else f", one for each row of {list(valid.shape)} or one for all"
        raise TypeError(f"it carries {describe_leaf(value)}{rows_too}, but was given {describe_leaf(returned)}")
    new = fitted(new, value)
    axes = tuple(range(extra))
    if valid is None:
        return Entries(new, None, jnp.asarray(_size(rows), jnp.int32), axes)
    counts = jnp.any(valid) if not rows else valid
    number = jnp.sum(counts, dtype=jnp.int32)
    counts = counts.reshape(*counts.shape, *(1 for _ in value.shape))
    return Entries(jnp.where(counts, new, jnp.zeros_like(new)), counts, number, axes)


def pair(returned: Any, names: str) -> tuple[Any, Any]:
    """What was returned, as the pair that it must be.

    Raises:
        TypeError: if it is none.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"the body returns a pair ({names}) in its place")
    return returned[0], returned[1]


def _array(returned: ArrayLike) -> Array:
    if isinstance(returned, list | tuple):  # of which JAX would make an array
        raise TypeError(f"it carries an array, but was given {describe_node(returned)}")
    return jnp.asarray(returned)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
