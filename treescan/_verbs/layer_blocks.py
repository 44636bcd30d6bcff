"""The types of blocks that take a key."""

from __future__ import annotations

from typing import Protocol, TypeVar

from .._types import Array, Carry, X_contra, Y_co

Layer_contra = TypeVar("Layer_contra", contravariant=True)


class KeyedBlock(Protocol[Layer_contra, Carry, Y_co]):
    """A block of `scan_layers` that takes a fresh key in each layer."""

    def __call__(self, layer: Layer_contra, x: Carry, /, *, key: Array) -> tuple[Carry, Y_co]: ...


class KeyedBlockWithOwn(Protocol[Layer_contra, X_contra, Carry, Y_co]):
    """The same for layers that have something of their own."""

    def __call__(self, layer: Layer_contra, x: Carry, x_layer: X_contra, /, *, key: Array) -> tuple[Carry, Y_co]: ...


class KeyedFoldBlock(Protocol[Layer_contra, Carry]):
    """A block of `fold_layers` that takes a fresh key in each layer."""

    def __call__(self, layer: Layer_contra, x: Carry, /, *, key: Array) -> Carry: ...


class KeyedFoldBlockWithOwn(Protocol[Layer_contra, X_contra, Carry]):
    """The same for layers that have something of their own."""

    def __call__(self, layer: Layer_contra, x: Carry, x_layer: X_contra, /, *, key: Array) -> Carry: ...
