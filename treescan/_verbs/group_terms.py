"""What is said of the state and of xs of a loop over groups, said of the carry, the variables and the arguments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator

from .._errors import Cure, Fault, Row

_TERMS = (
    (r"\bstate\.carry\b", "carry"),
    (r"\b(?:state|y|xs)\.(?:variables|broadcast)(?:\[\d+\])*", "variables"),
    (r"\by\.y\b", "y"),
    (r"\bxs\.(?=args|rngs)", ""),
    (r"\bleaves of xs\b", "variables and arguments"),
    (r"\bxs (has|holds)\b", r"what is scanned over \1"),
    (r"\bthere are no xs\b", "nothing is scanned over"),
    (r"\bslice xs\b", "slice them"),
    (r"\b(prefix|structure) of xs\b", r"\1 of the arguments"),
    (r"\barrays as xs, which lead\b", "arrays to scan over, which lead"),
    (r"\by is stacked .* the same in all of them\b", "Variables and outputs are arrays. Return anything else"),
)
"""What stands in paths, and what the user calls it: trees of variables are numbered here, and by name there."""


def _in_terms(text: str) -> str:
    for pattern, term in _TERMS:
        text = re.sub(pattern, term, text)
    return text


def _row_in_terms(row: Row) -> Row:
    leaf = _in_terms(row.leaf)
    if not leaf.startswith("variables"):
        return row._replace(leaf=leaf)
    return row._replace(leaf=leaf, expected=re.sub("^(in|out)_axes ", "variable_axes ", row.expected))


@contextlib.contextmanager
def in_users_terms() -> Generator[None]:
    """What is said of the state and of xs, said of the carry, the variables and the arguments."""
    try:
        yield
    except Fault as fault:
        fault.says = _in_terms(fault.says)
        fault.rows = [_row_in_terms(row) for row in fault.rows]
        if any(row.expected.startswith("variable_axes") for row in fault.rows):
            fault.says = re.sub("`(in|out)_axes`", "`variable_axes`", fault.says)
            fault.cures = tuple(cure._replace(text=re.sub(", and None .*", ".", cure.text)) for cure in fault.cures)
        fault.cures = tuple(Cure(_in_terms(cure.text), cure.kind, _in_terms(cure.leaf)) for cure in fault.cures)
        fault.carry_root = fault.carry_root and "carry"
        raise
