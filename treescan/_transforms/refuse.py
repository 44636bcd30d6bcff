"""Errors that several transforms raise."""

from __future__ import annotations

from typing import NoReturn

from .._errors import Fault, Misuse
from .._trace.trace import Trace


def refuse_symbolic(count: int, option: str, of: str = "steps") -> None:
    """Refuses to split steps or rows if their number is symbolic, as in `jax.export`."""
    if not isinstance(count, int):
        raise Misuse(
            f"{{verb}} over {{body}}: `{option}` needs to know the number of {of}, but it is symbolic.",
            f"Leave it out, or export with a known number of {of}.",
        )


def refuse_with_refs(option: str) -> NoReturn:
    """Refuses what needs a branch or a second computation, for a body that closes over a mutable array."""
    raise Misuse(
        f"{{verb}} over {{body}}: `{option}` does not support a body that closes over a mutable array (a `Ref`).",
        "Carry its value instead, or leave the option out: then all {unit}s run, and none is recomputed.",
    )


def refuse_refs_in_skipped_steps(trace: Trace) -> None:
    """Refuses a body that closes over a mutable array, in a loop that ends early."""
    if trace.refs:
        raise Misuse(
            "{verb} over {body}: the body closes over a mutable array (a `Ref`). This loop may skip steps, and such "
            "steps cannot read or write one.",
            "Carry its value instead.",
        )


def once_only(says: str, cure: str) -> Fault:
    """What is wrong with recomputing a body that has an effect which JAX does not repeat."""
    return Misuse(
        f"{{verb}} over {{body}}: {says}, but the body has an effect that JAX refuses to repeat. That may be a "
        "`jax.experimental.io_callback`.",
        f"{cure}. Or use `jax.debug.callback` or `jax.pure_callback`, which may run more than once.",
    )
