"""Checks of what only a stream takes, and of what it cannot take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils

from .._avals import PyTree
from .._body.call import takes_keyword
from .._checks.rows import check_lengths
from .._errors import Fault, Misuse, TracedArgumentError
from .._loop.loop import Body
from .._transforms.outputs import check_save, is_positions
from .._tree import Prefix, leaves_with_path
from .._types import Save
from .sources import Source

NO_LIMIT = 2**31 - 1
"""The length of a masked loop without rows, before the end of its source."""


def lengths_of(lengths: Any, source: Source, body: Body, *, masks: bool) -> Any:
    """int32[*batch], of the rows; NO_LIMIT for a loop without rows that is masked. None: nothing is.

    Args:
        lengths: as the user gave them.
        source: what is read.
        body: the body, which may take `valid`.
        masks: whether a last part of fewer steps is masked.
    """
    if isinstance(lengths, jax.Array) and not (lengths.is_fully_addressable or lengths.is_fully_replicated):
        lengths = multihost_utils.process_allgather(lengths, tiled=True)  # each process needs those of all rows
    if lengths is not None:
        return np.asarray(check_lengths(lengths, source.length)).astype(np.int32)
    is_even = source.length is not None and source.length % source.chunk == 0
    if takes_keyword(body, "valid") or (masks and not is_even):
        return np.asarray(NO_LIMIT, np.int32)
    return None


def check_save_of(save: Save, source: Source) -> Prefix | None:
    """What is kept of y. The positions k-1, 2k-1 and so on are the same in each part and in the whole."""
    if any(map(is_positions, Prefix.of(save).leaves)):
        raise Misuse(
            "{call}: `save` has positions, which {verb} does not take.",
            "Keep all outputs, and pick those of each part: `part.ys` begins at the position `part.start`.",
        )
    keeps = check_save(save)
    for keep in [] if keeps is None or source.length == source.chunk else keeps.leaves:
        if keep and source.chunk % keep:
            raise Misuse(
                f"{{call}}: `save={keep}` needs a `chunk` that is a multiple of {keep}, got {source.chunk}.",
                f"Pass `chunk={max(1, source.chunk // keep) * keep}`, for example.",
            )
    return keeps


def refuse_tracers(init: PyTree, source: Any) -> None:
    """Refuses values of a transformation of JAX in what a stream is given, and a stream that is called under one."""
    for name, tree in {"init": init, "source": None if isinstance(source, Iterator) else source}.items():
        for path, leaf in leaves_with_path(name, tree):
            refuse_traced(f"{path} is traced", [leaf])
    refuse_traced("this is called under a transformation", [jax.lax.stop_gradient(0.0)])


def refuse_traced(what: str, leaves: list[Any]) -> None:
    """Refuses values of a transformation of JAX."""
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise Fault(
            TracedArgumentError,
            f"{{call}}: {what}, but the loop over the parts runs on the host.",
            "Under a transformation of JAX, use `treescan.scan` or `treescan.mask_scan`. The body of a stream may use "
            "all of them.",
        )
