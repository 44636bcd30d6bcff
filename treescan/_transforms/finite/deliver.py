"""Reads the evidence of a checked loop: raises where it is known, and leaves a callback where it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ..._avals import is_key
from ..._errors import Fault, NonFiniteError
from ..._finite import note
from ..._types import Array, PyTree
from .case import Case, Evidence
from .watch import GOOD
from .within import Outer, outer_steps


class WithEvidence(NamedTuple):
    """The outputs of a checked loop, on their way to `deliver`.

    Attributes:
        ys: the outputs.
        evidence: what is known of the first bad step, for each body that may have run it.
        cases: what is static of these.
    """

    ys: PyTree
    evidence: tuple[Evidence, ...]
    cases: tuple[Case, ...]


def deliver(ys: PyTree) -> PyTree:
    """The outputs of a loop, once its evidence was read.

    Raises:
        NonFiniteError: if a step went wrong, and that is known here: under a trace JAX raises a runtime error.
    """
    if not isinstance(ys, WithEvidence):
        return ys
    for evidence, case in zip(ys.evidence, ys.cases, strict=True):
        _deliver(evidence, case)
    return ys.ys


def _deliver(evidence: Evidence, case: Case) -> None:
    loops, positions, _ = outer_steps()
    try:
        tell(evidence, case, loops, positions)
    except NonFiniteError as error:
        raise Fault(NonFiniteError, str(error), "`treescan.last_nonfinite()` has the carry and x.") from None


def tell(evidence: Evidence, case: Case, loops: Sequence[Outer], positions: Sequence[Array]) -> None:
    """Raises what is known, and where it is traced, has JAX raise it.

    Args:
        evidence: what is known of the first bad step.
        case: what is static of it.
        loops: the checked loops in whose steps this loop ran.
        positions: of these steps, as values of the program that tells it.

    Raises:
        NonFiniteError: if a step went wrong.
    """
    # A callback is given keys as plain numbers.
    kinds = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in jax.tree.leaves(evidence)]

    def told(evidence: Evidence, positions: Sequence[Any]) -> None:
        if int(evidence.first) != GOOD:
            within = tuple(loop.at(position) for loop, position in zip(loops, positions, strict=False))
            leaves, structure = jax.tree.flatten(evidence)
            known = jax.tree.unflatten(structure, list(map(_value, leaves, kinds)))
            record = case.record(known, within)
            note(record)
            raise NonFiniteError(f"{case.about.call}: {record}.")

    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(evidence)):
        jax.lax.cond(
            evidence.first != GOOD,
            lambda *given: jax.debug.callback(told, *given),
            lambda *given: None,
            evidence,
            list(positions),
        )
    else:
        told(evidence, () if any(isinstance(position, Tracer) for position in positions) else positions)


def _value(leaf: Any, kind: Any) -> Any:
    """A leaf of the evidence in NumPy; a key stays one."""
    if kind is None:
        return np.asarray(leaf)
    return leaf if is_key(leaf) else jax.random.wrap_key_data(leaf, impl=kind)
