"""Reads jaxprs: their equations, and the constants of their loops."""

from collections.abc import Iterator
from typing import Any


def subjaxprs(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from subjaxprs(item)
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif hasattr(value, "eqns"):
        yield value


def equations(jaxpr: Any, name: str | None = None) -> Iterator[Any]:
    """The equations of a primitive, or all, in a jaxpr and all that it calls."""
    for eqn in jaxpr.eqns:
        if name in (None, eqn.primitive.name):
            yield eqn
        for value in eqn.params.values():
            for sub in subjaxprs(value):
                yield from equations(sub, name)


def num_consts(eqn: Any) -> int:
    """How many operands a scan equation reads in every step and changes in none."""
    if "num_consts" in eqn.params:  # up to jax 0.10
        return eqn.params["num_consts"]
    return len(eqn.params["ft_in"].unpack()[0])


def shapes(eqn: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes of a scan equation's constants, and of all that it carries or scans over."""
    all_shapes = [var.aval.shape for var in eqn.invars]
    return all_shapes[: num_consts(eqn)], all_shapes[num_consts(eqn) :]
