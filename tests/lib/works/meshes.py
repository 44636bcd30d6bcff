"""Meshes of devices, as columns of the table: how their axes are typed, whether one is set, and what is split.

Rows are split over three devices and features over two, so the examples have three rows and two features.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .example import Given
from .transforms import Run, gradient

ROWS, FEATURES = 3, 2
SPLITS = {"rows": ("r", None), "features": (None, "f"), "rows and features": ("r", "f")}
Transform = tuple[Callable[[Run, Given], Any], Callable[[Run, Given], Any]]


@functools.cache
def mesh_of(kind: str) -> Mesh:
    return jax.make_mesh((ROWS, FEATURES), ("r", "f"), axis_types=(getattr(AxisType, kind),) * 2)


def spread(given: Given, mesh: Mesh, split: str, plain: tuple[str, ...] = ()) -> Given:
    """The numbers on their devices, less those that name no mesh. Rows are the axis before the last, as in `h`."""
    rows, features = SPLITS[split]

    def place(name: str, leaf: jax.Array) -> jax.Array:
        row = rows if given["h"].ndim > 1 and name not in ("w", "ws") else None
        return jax.device_put(
            leaf, NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 2), *(row, features)[-leaf.ndim :]))
        )

    return {name: leaf if name in plain else place(name, leaf) for name, leaf in given.items()}


def on_mesh(kind: str, split: str, *, is_set: bool, plain: tuple[str, ...] = ()) -> Transform:
    """A compiled program that returns values and their gradient, of numbers on a mesh."""

    def run_there(run: Run, given: Given) -> Any:
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            return jax.jit(lambda numbers: gradient(run, numbers))(spread(given, mesh, split, plain))

    return run_there, gradient


MESHES: dict[str, Transform] = {
    f"{kind} mesh{', set' * is_set}, {split}": on_mesh(kind, split, is_set=is_set)
    for kind, is_set, split in itertools.product(("Explicit", "Auto"), (False, True), SPLITS)
}
# The init of a loop without layers.
MESHES |= {f"Explicit mesh, plain init, {s}": on_mesh("Explicit", s, is_set=False, plain=("h",)) for s in SPLITS}
