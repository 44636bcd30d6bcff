"""Removes callbacks from steps that the gradient computes again, so each callback runs once."""

from __future__ import annotations

from typing import Any

from jax.core import ShapedArray


def silenced(jaxpr: Any) -> Any:
    """A closed jaxpr without the callbacks that return nothing, those within its loops and branches included."""
    return jaxpr.replace(jaxpr=_silenced(jaxpr.jaxpr))


def _silenced(jaxpr: Any) -> Any:
    equations = [_silence_inner(eqn) for eqn in jaxpr.eqns if not _only_speaks(eqn)]
    kinds = {type(effect) for eqn in equations for effect in eqn.effects}
    kept = {effect for effect in jaxpr.effects if type(effect) in kinds}
    return jaxpr.replace(eqns=equations, effects=kept)


def _only_speaks(eqn: Any) -> bool:
    """Whether an equation has effects and nothing else; one that writes to a mutable array has more."""
    return bool(eqn.effects) and not eqn.outvars and all(isinstance(var.aval, ShapedArray) for var in eqn.invars)


def _silence_inner(eqn: Any) -> Any:
    """An equation with the loops and branches that it holds silenced; the effects of others are their own."""
    inner = [part for value in eqn.params.values() for part in _parts(value) if _is_jaxpr(part)]
    if not eqn.effects or not inner:
        return eqn
    params = {name: _silence_value(value) for name, value in eqn.params.items()}
    left = {type(effect) for value in params.values() for part in _parts(value) for effect in _effects_of(part)}
    return eqn.replace(params=params, effects={effect for effect in eqn.effects if type(effect) in left})


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if type(value) in (tuple, list) else (value,)


def _silence_value(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_silence_value, value))
    if not _is_jaxpr(value):
        return value
    return silenced(value) if hasattr(value, "jaxpr") else _silenced(value)


def _is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, closed or not."""
    return hasattr(value, "effects") and (hasattr(value, "jaxpr") or hasattr(value, "eqns"))


def _effects_of(value: Any) -> Any:
    return value.effects if _is_jaxpr(value) else ()
