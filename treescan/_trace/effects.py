"""What a trace does beside computing: effects, and mutable arrays that it closes over."""

from __future__ import annotations

from typing import Any

from jax.core import ShapedArray


def has_effects(jaxpr: Any) -> bool:
    """Whether a jaxpr does what must not be done twice. That it runs over a named axis counts as an effect for JAX."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in jaxpr.effects)


def is_once_only(jaxpr: Any) -> bool:
    """Whether a jaxpr has effects that JAX refuses under `jax.checkpoint`; it repeats those of `jax.debug`."""
    return not _REPEATED.issuperset(type(effect).__name__ for effect in jaxpr.effects)


_REPEATED = frozenset({"NamedAxisEffect", "DebugEffect", "OrderedDebugEffect", "ErrorEffect"})  # the last: checkify


def has_refs(jaxpr: Any) -> bool:
    """Whether a jaxpr closes over mutable arrays, which JAX cannot differentiate through within a branch."""
    return any(map(is_ref, jaxpr.jaxpr.constvars))


def is_ref(var: Any) -> bool:
    """Whether a variable is a mutable array."""
    return not isinstance(var.aval, ShapedArray)
