"""Evaluates a jaxpr and notes which of its operations gives a result that is NaN or infinite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from .._errors import is_library_file, shorten
from .._types import Array
from .equations import alone, called

NAN, INF = 1, 2
"""The bits of what is noted of a value."""


class Operation(NamedTuple):
    """An equation, or an input.

    Attributes:
        name: of the primitive; None: an input.
        place: the line that it comes from, or None.
        reads: the numbers of the operations whose results it reads.
    """

    name: str | None
    place: str | None
    reads: tuple[int, ...]


def bits_of(value: Any) -> Array:
    """int32[]: whether any element is NaN, and whether any is infinite."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.int32(0)
    nan, inf = (jnp.any(which(value)).astype(jnp.int32) for which in (jnp.isnan, jnp.isinf))
    return nan * jnp.int32(NAN) + inf * jnp.int32(INF)


class Blame:
    """The operations of a jaxpr, in order, and the bits of their results.

    Attributes:
        operations: what each is.
        bits: int32[], of each.
        results: for each output of the jaxpr the number of the operation that made it; None: a constant.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.bits: list[Array] = []
        self.results: list[int | None] = []

    def evaluate(self, jaxpr: Any, given: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr without constants, and notes all of it: the inputs come first, each by its place."""
        inputs = [(value, self._note(Operation(None, None, ()), [value])) for value in given]
        results = self._run(jaxpr, [], inputs)
        self.results = [number for _, number in results]
        return [value for value, _ in results]

    def _note(self, operation: Operation, values: Sequence[Any]) -> int:
        bits = jnp.int32(0)
        for value in values:
            bits = bits | bits_of(jnp.asarray(value))
        self.operations.append(operation)
        self.bits.append(bits)
        return len(self.bits) - 1

    def _run(self, jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[tuple[Any, int | None]]:
        held = [(value, None) for value in consts]
        known: dict[Any, tuple[Any, int | None]] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*held, *given], strict=True)
        )
        for equation in jaxpr.eqns:
            inner = called(equation)
            read = _looked_up(equation.invars, known)
            if inner is not None:
                results = self._run(*inner, read)
            else:
                taken, program = alone(jaxpr, equation)
                values = eval_jaxpr(program, [], *(known[var][0] for var in taken))
                reads = tuple(number for _, number in read if number is not None)
                number = self._note(Operation(equation.primitive.name, place_of(equation), reads), values)
                results = [(value, number) for value in values]
            known.update(zip(equation.outvars, results, strict=True))
        return _looked_up(jaxpr.outvars, known)


def _looked_up(atoms: Sequence[Any], known: dict[Any, tuple[Any, int | None]]) -> list[tuple[Any, int | None]]:
    return [(atom.val, None) if hasattr(atom, "val") else known[atom] for atom in atoms]


def origin(operations: Sequence[Operation], bits: Sequence[int], number: int, bit: int) -> int:
    """The operation from which a result has this bit: none of what it reads has it."""
    while True:
        before = next((read for read in operations[number].reads if bits[read] & bit), None)
        if before is None:
            return number
        number = before


def place_of(equation: Any) -> str | None:
    """The line of the user's that an equation comes from, as in `model.py:31`."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in [] if traceback is None else traceback.frames:
        if not is_library_file(frame.file_name):
            return f"{shorten(frame.file_name)}:{frame.line_num}"
    return None


def becomes_bad(old: Any, new: Any) -> Array:
    """bool: which elements are NaN, or became infinite: an infinity that was there before is no news."""
    return jnp.isnan(new) | (jnp.isinf(new) & ~jnp.isinf(old))


def is_checked(leaf: Any) -> bool:
    """Whether a leaf may hold NaN."""
    return bool(jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact))
