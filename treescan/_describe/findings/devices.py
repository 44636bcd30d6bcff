"""Findings about arrays that are sharded over devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..._transforms.layers.pattern import Pattern
from ..bodies import Named, TracedBody, spec_of
from ..facts import Finding
from .case import Case, constants_of, is_weight


def gathered_weights(case: Case) -> Iterator[Finding]:
    """TS010: weights that are sharded over the same mesh axis as their operands, so each device needs all of them."""
    for body in case.bodies:
        used = _axes_of(body.carry) if isinstance(case.program, Pattern) else _axes_of([*body.carry, *body.x])
        paths = [leaf.path for leaf in _weights(case, body) if used & _axes_of([leaf])]
        if paths and used and not getattr(case.program, "prefetch", None):
            layers = isinstance(case.program, Pattern)
            yield Finding(
                "TS010",
                f"{', '.join(paths[:3])}{' and others' if len(paths) > 3 else ''}: sharded over {_shown(used)}, "
                "like the carry, so every device gathers the whole arrays {'in each layer, and computes nothing "
                "meanwhile' if layers else 'for the loop'}.",
                "Pass `prefetch=1`: it gathers the weights of the next layer while the current layer is computed."
                if layers
                else "Replicate them on all devices, if they fit, or shard them over another mesh axis.",
            )


def _weights(case: Case, body: TracedBody) -> Iterable[Named]:
    if isinstance(case.program, Pattern):
        return body.x
    return [constant for constant, _, reading in constants_of(body) if is_weight(reading)]


def _axes_of(leaves: Iterable[Named]) -> set[str]:
    """The mesh axes over which any of these is spread."""
    found = set[str]()
    for leaf in leaves:
        for part in spec_of(leaf.value):
            found.update(_names(part))
    return found


def _names(part: Any) -> Iterable[str]:
    if part is None:
        return ()
    return part if isinstance(part, tuple) else (part,)


def _shown(axes: set[str]) -> str:
    return ", ".join(f"`{axis}`" for axis in sorted(axes))
