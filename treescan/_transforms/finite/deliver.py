"""Reads the evidence of a checked loop: raises where it is known, and leaves a callback where it is traced."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from ..._errors import Fault, NonFiniteError
from ..._finite import NonFinite, note
from ..._types import PyTree
from .case import Case, Evidence
from .watch import GOOD


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
    def tell(evidence: Evidence) -> None:
        if int(evidence.first) != GOOD:
            raise NonFiniteError(f"{case.about.call}: {_noted(case, evidence)}.")

    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(evidence)):
        jax.lax.cond(evidence.first != GOOD, lambda told: jax.debug.callback(tell, told), lambda told: None, evidence)
    elif int(evidence.first) != GOOD:
        record = _noted(case, evidence)
        raise Fault(NonFiniteError, f"{case.about.call}: {record}.", "`treescan.last_nonfinite()` has the carry and x.")


def _noted(case: Case, evidence: Evidence) -> NonFinite:
    record = case.record(jax.tree.map(np.asarray, evidence))
    note(record)
    return record
