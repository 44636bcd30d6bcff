"""What one writes by hand without treescan: the peers of its options."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")
Tree = TypeVar("Tree")


def where_step(
    body: Callable[[Carry, X], tuple[Carry, Y]],
) -> Callable[[Carry, tuple[X, Array]], tuple[Carry, Y]]:
    """The usual mask around a body: padded rows hold the carry, and their y is 0.

    Args:
        body: a step whose carry, x and y leaves are all of shape `[B, ...]`.

    Returns:
        A step that takes `(x, valid)`, with `valid` bool `[B]`, in the place of x.
    """

    def step(carry: Carry, inputs: tuple[X, Array]) -> tuple[Carry, Y]:
        x, valid = inputs
        stepped, y = body(carry, x)
        return _selected(valid, stepped, carry), _selected(valid, y)

    return step


def where_scan(body: Callable[[Carry, X], tuple[Carry, Y]], init: Carry, xs: X, lengths: Array) -> tuple[Carry, Y]:
    """`mask_scan` as written by hand.

    Its gradient is NaN where the padding is bad (`where` multiplies 0 by the body's Jacobian
    there), and it runs every padded step; only the time of the two is compared.

    Args:
        body: see `where_step`.
        init: the carry, leaves `[B, ...]`.
        xs: leaves `[T, B, ...]`.
        lengths: int `[B]`.

    Returns:
        The carry after each row's last step, and the ys.
    """
    steps = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(where_step(body), init, (xs, jnp.arange(steps)[:, None] < lengths))


def safe_where_scan(body: Callable[[Carry, X], tuple[Carry, Y]], init: Carry, xs: X, lengths: Array) -> tuple[Carry, Y]:
    """`where_scan` whose gradient is right too: padded rows are shown `init` and the first x, as constants.

    This is the cure that JAX's documentation gives, a second `where` before the body. It costs a selection of
    the whole carry and x per step.

    Args:
        body: see `where_step`.
        init: the carry, leaves `[B, ...]`.
        xs: leaves `[T, B, ...]`.
        lengths: int `[B]`.

    Returns:
        The carry after each row's last step, and the ys.
    """
    shown = jax.lax.stop_gradient((init, jax.tree.map(lambda leaf: leaf[0], xs)))

    def step(carry: Carry, inputs: tuple[X, Array]) -> tuple[Carry, Y]:
        x, valid = inputs
        stepped, y = body(*_selected(valid, (carry, x), shown))
        return _selected(valid, stepped, carry), _selected(valid, y)

    steps = jax.tree.leaves(xs)[0].shape[0]
    return jax.lax.scan(step, init, (xs, jnp.arange(steps)[:, None] < lengths))


def _selected(valid: Array, new: Tree, held: Tree | None = None) -> Tree:
    """A tree where rows are valid, and another one, or 0, where they are not; leaves `[B, ...]`."""

    def select(leaf: Array, other: Array | int = 0) -> Array:
        return jnp.where(valid.reshape(valid.shape + (1,) * (leaf.ndim - 1)), leaf, other)

    return jax.tree.map(select, new) if held is None else jax.tree.map(select, new, held)
