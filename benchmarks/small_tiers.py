"""How many tiers of rows `compact` should have for steps that are small to compile: compile time against run time.

The steps are every seventh of `families`, forward, as they are: most have fewer than 100 equations. All is against
seven tiers, each twice the one before. As in `tiers`, which is about large steps, times are processor time, and three
kinds of lengths have the same longest row.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from benchmarks._harness import Comparison, Distribution, Measurement, MemoryMeasurement, off_disk, ratio_of
from benchmarks.families import FITTED, FORWARD, HELD_BACK, Family, families_by_half
from benchmarks.tiers import BLOCKS, ROWS, SEVEN, STEPS, TIERS, Compiled, Running, lengths_by_name, on_rows

EACH = 7  # of the families, one in so many
SETS = {
    "3 tiers": TIERS["3 tiers"],
    "4 tiers": TIERS["4 tiers"],
    "4 tiers, each four times the last": (ROWS // 64, ROWS // 16, ROWS // 4),
}
COMPILE = "compile"


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    yield from _of(itertools.islice(families_by_half(), 1, None, EACH), STEPS)


def smoke() -> Iterator[Comparison]:
    """One step."""
    yield from _of(itertools.islice(families_by_half(), 1), 4)


def _of(chosen: Iterable[tuple[Family, bool]], steps: int) -> Iterator[Comparison]:
    off_disk()
    for family, fitted in chosen:
        yield from _compare(on_rows(family, 1, steps), FITTED if fitted else HELD_BACK)


def _compare(family: Family, half: str) -> Iterator[Comparison]:
    Compiled(family, FORWARD, None)()  # so that what JAX keeps of its small functions is warm for all
    seven, lengths = Compiled(family, FORWARD, TIERS["7 tiers"]), lengths_by_name(family.steps)
    for name, tiers in SETS.items():
        mine = Compiled(family, FORWARD, tiers)
        yield Comparison(f"{family.name}; {half}; {name}; {COMPILE}", SEVEN, mine, seven, blocks=1)
        for of_rows, values in lengths.items():
            pair = Running(mine, values), Running(seven, values)
            yield Comparison(f"{family.name}; {half}; {name}; {of_rows}", SEVEN, *pair, blocks=BLOCKS)


def distribution(measured: Sequence[Measurement | MemoryMeasurement]) -> list[Distribution]:
    """The ratios of all steps together, for each set and kind, by halves."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for each in measured:
        name, half, tiers, kind = each.name.split("; ")
        found.setdefault((f"{tiers}, {kind}", half), {})[name] = ratio_of(each)
    return [Distribution.of_ratios(kind, half, of) for (kind, half), of in sorted(found.items())]
