"""Short reprs: the types of arrays in place of their elements. What is traced or deleted has a type too."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ._avals import describe_leaf, describe_node
from ._text import escaped, table_of
from ._tree import leaves_with_path


class Shown(str):
    """What is shown in place of a leaf."""

    __slots__ = ()
    __repr__ = str.__str__


def short_repr(name: str, **fields: Any) -> str:
    """`Padded(data=float32[5,3,2], lengths=int32[3])`."""
    return f"{name}({', '.join(f'{field}={describe_tree(value)}' for field, value in fields.items())})"


def describe_tree(tree: Any) -> str:
    """A tree with the types of its arrays in their places; single numbers by their values, where these are known."""
    value = _number(tree)
    if value is not None:
        return value
    try:
        return repr(jax.tree.map(lambda leaf: Shown(describe_leaf(leaf)), tree))
    except Exception:  # a class of the user's that its own repr or constructor fails for
        return describe_node(tree)


def _number(leaf: Any) -> str | None:
    """The value of an array of shape [], if it is there."""
    known = isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, Tracer) and leaf.shape == ()
    try:
        return str(np.asarray(leaf)) if known else None
    except Exception:  # deleted, spread over hosts, or a PRNG key
        return None


def short_html(name: str, **fields: Any) -> str:
    """A short repr for notebooks: a table with a row for each leaf."""
    rows = [
        (path, _number(leaf) or describe_leaf(leaf))
        for field, value in fields.items()
        for path, leaf in leaves_with_path(field, value) or [(field, value)]
    ]
    return f"<div><b>{escaped(name)}</b>{table_of(rows)}</div>"
