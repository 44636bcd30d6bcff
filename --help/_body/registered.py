"""Objects that hold arrays and are no pytrees: JAX takes each for one leaf, and does not look inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax

from .._avals import PyTree
from .._errors import Fault, Row, TypeMisuse
from .._tree import holds_arrays, leaves_with_path

REGISTER = (
    "JAX takes an object of an unregistered class for one leaf, and does not look inside. Register the class, for "
    "example with `@jax.tree_util.register_dataclass` above `@dataclasses.dataclass`, or use a NamedTuple or a dict."
)


def refuse_unregistered(given: Mapping[str, PyTree], fault: Callable[..., Fault] = TypeMisuse) -> None:
    """Refuses leaves of trees, each by its name, that hold arrays which no verb would carry, slice or stack.

    Raises:
        Fault: for an `ArgumentTypeError`, or another, that lists them.
    """
    if any(holds_arrays(leaf) for tree in given.values() for leaf in jax.tree.leaves(tree)):
        named = [pair for root, tree in given.items() for pair in leaves_with_path(root, tree)]
        rows = [Row(path, "a pytree", type(leaf).__name__) for path, leaf in named if holds_arrays(leaf)]
        raise fault(f"{{call}}: `{rows[0].came}` holds arrays, but is not a pytree.", REGISTER, rows=rows)
