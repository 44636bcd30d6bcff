"""Which of many cases run every day: the one way in which the tests thin a product."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def parametrize(argument: str, values: dict[str, Any]) -> Any:
    """One test for each value, named by its key."""
    return pytest.mark.parametrize(argument, values.values(), ids=values)


def all_pairs(grid: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few rows of a grid in which any two values that meet in one of its rows meet."""
    pairs = {combination: set(itertools.combinations(enumerate(map(repr, combination)), 2)) for combination in grid}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(grid, key=lambda combination: len(pairs[combination] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def everyday(rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The rows as parameters: slow are those of which every value was in a row before."""
    seen: set[tuple[int, str]] = set()
    params = []
    for row in rows:
        values = set(enumerate(map(repr, row)))
        params.append(pytest.param(*row, marks=pytest.mark.slow if values <= seen else ()))
        seen |= values
    return params


def by_turns(turns: int, **dimensions: Mapping[str, Any] | Sequence[Any]) -> Any:
    """One test for each combination; one in so many of them, of each value, is for every day, the others are slow."""
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(getattr(v, "__name__", str(v)), v) for v in values]
        for values in dimensions.values()
    ]
    params = []
    for places in itertools.product(*(range(len(values)) for values in named)):
        row = [values[place] for values, place in zip(named, places, strict=True)]
        marks = pytest.mark.slow if sum(places) % turns else ()
        params.append(pytest.param(*(value for _, value in row), marks=marks, id="-".join(name for name, _ in row)))
    return pytest.mark.parametrize(tuple(dimensions), params)


def shares(names: Iterable[Any], count: int = 4) -> list[Any]:
    """Lists of names, each a share of all: the first is for every day, the others are slow."""
    parts = [sorted(names)[start::count] for start in range(count)]
    return [pytest.param(part, marks=pytest.mark.slow if i else (), id=f"share {i}") for i, part in enumerate(parts)]


def slow(*rows: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]
