"""Values that are cast back to their first dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp

from .._types import Array, PyTree
from ._base import AbstractCarry, as_seen, read_tree, write_tree
from ._entries import maker, strong
from ._registry import adopt_within

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cast(AbstractCarry[Any, Any]):
    """Values that are cast back to their first dtypes in each step.

    The body may return them in any dtype, for example after computing in bfloat16 with float32 weights.

    Attributes:
        tree: any pytree of arrays; custom carries may be in it.
    """

    tree: PyTree

    def read(self) -> PyTree:
        """The tree as it is."""
        return read_tree(self.tree)

    def write(self, returned: PyTree, valid: Array | None) -> Cast:
        """What was returned, in the dtypes of before."""
        new = write_tree(self.tree, returned, valid)
        return Cast(jax.tree.map(_cast, self.tree, new))

    def rows(self) -> int | Mapping[str, Any]:
        """They lead; custom carries that it holds say so themselves."""
        return 0


def _cast(old: Any, new: Any) -> Any:
    return new if old is new else jnp.asarray(new).astype(jnp.result_type(old))


@overload
def cast(tree: float) -> Array: ...
@overload
def cast(tree: T) -> T: ...
@maker
def cast(tree: Any) -> Any:
    """Carries values that keep their dtypes, whatever dtypes the body returns.

    Args:
        tree: any pytree of arrays; custom carries may be in it.

    Returns:
        `Cast`, typed as the tree.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import cast
        >>> def step(h, x):
        ...     return jnp.tanh(
        ...         h + x
        ...     ), h  # x is float32, h bfloat16: the sum is float32
        >>> final, _ = treescan.scan(
        ...     step, cast(jnp.zeros((), jnp.bfloat16)), jnp.ones(4)
        ... )
        >>> final.read().dtype
        dtype(bfloat16)
    """
    return as_seen(Cast(jax.tree.map(strong, adopt_within(tree, "cast"))))
