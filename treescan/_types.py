"""Type variables, aliases of arrays, protocols of bodies, and the options that verbs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

import jax
import jax.typing

from ._progress import Progress
from ._remat import Remat

PyTree: TypeAlias = Any
"""Any tree of containers that JAX knows, with arrays or scalars as leaves."""

TreeDef: TypeAlias = Any
"""A tree's structure, `jax.tree_util.PyTreeDef`: a compiled class without a static type."""

Axes: TypeAlias = Any
"""A prefix tree of axes: an int, None where allowed, or containers of them."""

RematLike: TypeAlias = Literal["auto", "step", "nested"] | Remat
"""What the gradient recomputes: the fastest plan, each step, chunks of steps and each step in these, or a `Remat`."""

Prefetch: TypeAlias = Literal[1] | Callable[[Any], Any] | None
"""How the next layer's weights are gathered early: 1 gathers them on all devices; or a function of one layer."""

FiniteCheck: TypeAlias = bool | Literal["backward"]
"""Whether the carry is checked after each step, or its cotangents in reverse mode."""

ProgressLike: TypeAlias = bool | str | Progress | None
"""Whether a loop shows its progress: a flag, the label of its bar, or a `Progress`."""

Save: TypeAlias = Any
"""A prefix tree of what is kept of an output: "all", "last", every k-th, or None for nothing."""

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike

Carry = TypeVar("Carry")
X_contra = TypeVar("X_contra", contravariant=True)
X = TypeVar("X")
Y = TypeVar("Y")
Y_co = TypeVar("Y_co", covariant=True)


FoldBody: TypeAlias = Callable[[Carry, X], Carry]
"""A body of `fold` or `accumulate`."""


class KeyedBody(Protocol[Carry, X_contra, Y_co]):
    """A body of `scan` that takes a fresh key each step."""

    def __call__(self, carry: Carry, x: X_contra, /, *, key: Array) -> tuple[Carry, Y_co]: ...


class KeyedFoldBody(Protocol[Carry, X_contra]):
    """A body of `fold` or `accumulate` that takes a fresh key each step."""

    def __call__(self, carry: Carry, x: X_contra, /, *, key: Array) -> Carry: ...


class KeyedIndexBody(Protocol[Carry]):
    """A body of `fori` that takes a fresh key each step."""

    def __call__(self, i: Array, carry: Carry, /, *, key: Array) -> Carry: ...


class ValidBody(Protocol[Carry, X_contra, Y_co]):
    """A body of `mask_scan` or `while_scan` that takes the step's mask, in the batch shape."""

    def __call__(self, carry: Carry, x: X_contra, /, *, valid: Array) -> tuple[Carry, Y_co]: ...


class KeyedValidBody(Protocol[Carry, X_contra, Y_co]):
    """A body of `mask_scan` or `while_scan` that takes a key and the step's mask."""

    def __call__(self, carry: Carry, x: X_contra, /, *, key: Array, valid: Array) -> tuple[Carry, Y_co]: ...


class ScanOptions(TypedDict, total=False):
    """The options of `scan` that are given by name, less `key`; what each means is in its documentation."""

    in_axes: Axes
    out_axes: Axes
    remat: RematLike | None
    save: Save
    truncate: int | None
    name: str | None
    progress: ProgressLike
    check_finite: FiniteCheck


class IndexOptions(TypedDict, total=False):
    """The options of `scan` that say nothing about arrays; what each means is in `scan`'s documentation."""

    reverse: bool
    unroll: int | bool
    name: str | None
    check_finite: FiniteCheck


class ForiOptions(IndexOptions, total=False):
    """The options of `fori`, less `key`, which an overload asks for by name."""

    remat: RematLike | None
    progress: ProgressLike


class FoldOptions(ForiOptions, total=False):
    """The options of `fold`, less `key`."""

    in_axes: Axes
    truncate: int | None


class UnkeyedOptions(FoldOptions, total=False):
    """The options of every verb that stacks outputs, less `key`."""

    out_axes: Axes
    save: Save


class RaggedFold(FoldOptions, total=False):
    """The options of `fold`, less `key`, with the lengths of its rows."""

    lengths: ArrayLike | None


class RaggedOptions(UnkeyedOptions, total=False):
    """The options of `accumulate`, less `key`, with the lengths of its rows."""

    lengths: ArrayLike | None


class WhileOptions(ForiOptions, total=False):
    """The options of `while_scan`, less `key` and `max_length`."""

    fill: PyTree
    in_axes: Axes
    out_axes: Axes
    save: Save
    carry_axes: Axes
    x_axes: Axes
    y_axes: Axes
    compact: bool | tuple[int, ...]


class MaskOptions(UnkeyedOptions, total=False):
    """The options of `mask_scan`, less `key`."""

    length: int | None
    lengths: ArrayLike | None
    mask: ArrayLike | None
    resets: ArrayLike | None
    reset_to: PyTree
    time_axis: int
    fill: PyTree
    carry_axes: Axes
    x_axes: Axes
    y_axes: Axes
    chunk: int | None
    compact: bool | tuple[int, ...]


class LayersOptions(IndexOptions, total=False):
    """The options of `fold_layers`, less `key`."""

    length: int | None
    in_axes: Axes
    remat: RematLike | Sequence[RematLike | None] | None
    prefetch: Prefetch
    progress: ProgressLike


class StackedLayersOptions(LayersOptions, total=False):
    """The options of `scan_layers`, less `key`."""

    out_axes: Axes
    save: Save


class Options(UnkeyedOptions, total=False):
    """The options that every verb shares with `scan`."""

    key: Array | None
