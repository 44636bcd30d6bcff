"""Whether programs are for CPUs, on which what a chunk and a product cost was measured first."""

from __future__ import annotations

import jax


def on_cpu() -> bool:
    """Whether programs run on a CPU unless told otherwise."""
    return jax.default_backend() == "cpu"
