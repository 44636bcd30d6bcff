"""What findings are found in: a call, its program and the traces of its bodies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from ..._trace.cost import count_operations
from ..._trace.equations import PRODUCTS
from ..._trace.readers import readers
from ..._transforms.program import Call, Transformed
from ..._transforms.rows.over_rows import OverRows
from ..._transforms.until.program import Until
from ..._transforms.until.stop_rows import StopRows
from ..bodies import Named, TracedBody

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Case:
    """A call of a verb.

    Attributes:
        verb: its name.
        unit: what a step is called there.
        program: what the verb would run.
        bodies: its bodies.
    """

    verb: str
    unit: str
    program: Any
    bodies: list[TracedBody]

    @property
    def calls(self) -> tuple[Call, ...]:
        """For each body how it is called."""
        return calls_of(self.program)

    @property
    def compact(self) -> bool:
        """Whether rows are brought together, so that a body is given fewer than there are."""
        rows = self.transform(OverRows) or self.transform(StopRows)
        return rows is not None and bool(rows.compact)

    @property
    def ends_early(self) -> bool:
        """Whether the number of steps is known at run time alone."""
        return isinstance(self.program, Until)

    def transform(self, kind: type[_T]) -> _T | None:
        """The transform of a kind, if the call has one."""
        transforms = getattr(self.program, "transforms", ())
        return next((each for each in transforms if isinstance(each, kind)), None)

    @functools.cached_property
    def operations(self) -> int:
        """Those of one step of each body."""
        return sum(count_operations(body.jaxpr) for body in self.bodies)


def calls_of(program: Any) -> tuple[Call, ...]:
    """For each body of a program how it is called."""
    return (program.call,) if isinstance(program, Transformed | Until) else program.blocks


def constants_of(body: TracedBody) -> Iterator[tuple[Named, Any, set[str]]]:
    """The values that all steps of a body share: each with its variable, and the operations that read it."""
    for constant, variable in zip(body.constants, body.closed_vars, strict=True):
        yield constant, variable, readers(body.jaxpr, variable)


def is_weight(reading: set[str]) -> bool:
    """Whether what reads a constant is a product."""
    return not reading.isdisjoint(PRODUCTS)
