"""What pictures ask of matplotlib, which need not be there; and what pictures of padding show."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import treescan


class Axes:
    """Axes that note what they are called with, by name."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: self.calls.setdefault(name, []).append(args)


def rows_of_steps(lengths: Sequence[int], steps: int, chunk: int, compact: bool) -> list[int]:
    """How many rows each step that runs is called with."""
    sizes: list[int] = []

    def body(total: Any, x: Any) -> Any:
        jax.debug.callback(lambda x: sizes.append(len(x)), x)
        return total + x, None

    xs = jnp.ones((steps, len(lengths)))
    treescan.mask_scan(body, jnp.zeros(len(lengths)), xs, lengths=jnp.array(lengths), chunk=chunk, compact=compact)
    jax.effects_barrier()
    return sizes
