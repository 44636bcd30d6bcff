"""What `check_finite` refuses."""

from __future__ import annotations

from typing import Any

import jax

from ..._avals import describe_argument
from ..._errors import ArgumentError, ArgumentTypeError, Fault
from ..._trace.hoist import Hoisted


def looks_backward(value: Any) -> bool | None:
    """Whether to look at cotangents in place of the carry; None: at nothing.

    Raises:
        Fault: for an `ArgumentTypeError` if it is not what `check_finite` takes.
    """
    if isinstance(value, bool):
        return False if value else None
    if isinstance(value, str) and value == "backward":
        return True
    raise Fault(
        ArgumentTypeError,
        f'{{verb}} over {{body}}: `check_finite` is True, False or "backward", got {describe_argument(value)}.',
        'True looks at the carry after each step, and "backward" at its cotangents.',
    )


def refuse_effects(hoisted: Hoisted) -> None:
    """Refuses bodies that cannot be run once more."""
    if hoisted.refs or hoisted.once_only:
        why = "closes over a mutable array (a `Ref`)" if hoisted.refs else "has an effect that JAX refuses to repeat"
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `check_finite` runs steps again to find out what went wrong, but the body {why}.",
            "Leave it out. `jax.debug_nans` stops at the operation.",
        )


def refuse_devices() -> None:
    """Refuses loops within a `jax.shard_map`."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `check_finite` does not work within `jax.shard_map`.",
            "Check a loop outside of it, on one device.",
        )


def refuse_prefetch(gather: Any) -> None:
    """Refuses to look at layers of which the next one is gathered ahead."""
    if gather is not None:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `check_finite` does not look at layers with `prefetch`.",
            "Leave out one of the two: the results are the same without `prefetch`.",
        )
