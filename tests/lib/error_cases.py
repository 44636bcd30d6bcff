"""What `test_errors.case` is given by the files of cases beside it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from treescan import TreescanError

Run = Callable[[Any], Any]


class Given(NamedTuple):
    """A call that raises, the error, and the options of `test_errors.case`."""

    run: Run
    error: type[TreescanError]
    options: dict[str, Any]


def collector(cases: list[Given]) -> Callable[..., Callable[[Run], Run]]:
    """A decorator `case(error, **options)` that adds what it decorates to a list."""

    def case(error: type[TreescanError], **options: Any) -> Callable[[Run], Run]:
        def add(run: Run) -> Run:
            cases.append(Given(run, error, options))
            return run

        return add

    return case
