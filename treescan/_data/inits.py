"""The carries that packed sequences start from, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from .._avals import describe_argument, describe_leaf, is_key
from .._body.differences import find_differences
from .._errors import ArgumentError, ArgumentTypeError, Fault, Row
from .._tree import is_static, leaves_with_path
from .._types import Array, PyTree
from .sequences import key_bits, keys_of, put, some


def stack_inits(inits: Any, count: int) -> PyTree:
    """The inits of all sequences as one tree, leaves [N, ...].

    Raises:
        Fault: for an `ArgumentTypeError` if they are no list, or an `ArgumentError` if there is not one for each
            sequence, or they do not fit together.
    """
    if not isinstance(inits, Sequence) or isinstance(inits, str | bytes) or hasattr(inits, "_fields"):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `init` must be a list with the carry of each sequence, got {describe_argument(inits)}.",
            "Give `[carry] * len(sequences)` if all start from the same carry. If the carries are stacked already, "
            "put them into the batch: `pack(sequences)._replace(init=carries)`.",
        )
    if len(inits) != count:
        raise Fault(
            ArgumentError,
            f"{{verb}}: `init` has {_counted(len(inits), 'carr', 'y', 'ies')} for "
            f"{_counted(count, 'sequence', '', 's')}.",
            "Give the carry that each sequence starts from, in the order of the sequences.",
        )
    _check_leaves(inits)
    rows = [
        difference.row
        for i, init in enumerate(inits[1:], 1)
        for difference in find_differences(f"init[{i}]", (), inits[0], init)
    ]
    if rows:
        raise Fault(
            ArgumentError,
            "{verb}: the carries of `init` differ from the first.",
            "Give all sequences the same containers with the same parts, and in each part the same shape and dtype. "
            "If one sequence has a part, all need it, for example as zeros. Use None for the parts that all "
            "sequences take from the `init` of the scan.",
            header=("leaf", "in init[0]", "is"),
            rows=some(rows),
        )
    return jax.tree.map(lambda *leaves: _stack(leaves), *inits)


def _counted(number: int, stem: str, one: str, more: str) -> str:
    return f"{number} {stem}{one if number == 1 else more}"


def _check_leaves(inits: Sequence[PyTree]) -> None:
    """Refuses leaves that are not arrays."""
    rows = [
        Row(path, "an array", describe_leaf(leaf), "")
        for i, init in enumerate(inits)
        for path, leaf in leaves_with_path(f"init[{i}]", init)
        if is_static(leaf)
    ]
    if rows:
        raise Fault(
            ArgumentError,
            "{verb}: the carries of `init` hold leaves that are not arrays.",
            "Put values that all sequences share into the `init` of the scan, and give None here.",
            header=("leaf", "expected", "is"),
            rows=some(rows),
        )


def _stack(leaves: tuple[Any, ...]) -> Array:
    """One array [N, ...]; concrete leaves are stacked on the host, which compiles nothing."""
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return jnp.stack(leaves)
    if is_key(leaves[0]):
        return keys_of(put(np.stack([key_bits(leaf) for leaf in leaves])), leaves[0])
    aval = jax.typeof(leaves[0])
    assert isinstance(aval, ShapedArray)
    return put(np.stack([np.asarray(leaf) for leaf in jax.device_get(list(leaves))]).astype(aval.dtype))
