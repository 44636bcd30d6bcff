"""`python -m benchmarks [suite ...]`: runs the suites and writes their results."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import benchmarks
from benchmarks._harness import QUICK, Comparison, Effort, Memory, run_suite

RESULTS = Path(__file__).parent / "results"


def suites() -> list[str]:
    """The names of the suites: every module of this package without a leading underscore."""
    names = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return [name for name in names if not name.startswith("_")]


def comparisons(suite: str, only: str, *, quick: bool) -> Iterator[Comparison | Memory]:
    """Those of a suite that have the text `only` in their name or their peer's; if quick, its `smoke` if it has one."""
    module = importlib.import_module(f"benchmarks.{suite}")
    draw = getattr(module, "smoke", module.comparisons) if quick else module.comparisons
    for comparison in draw():
        if only in f"{comparison.name} {comparison.against}":
            yield comparison


def main() -> int:
    """Runs the suites named on the command line, or all.

    Returns:
        The exit status: 1 if a target was missed.
    """
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("suite", nargs="*", help=f"of {', '.join(suites())}; default: all")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a few runs each, and no target counts")
    parser.add_argument(
        "--results",
        type=Path,
        help="folder to write to (default: benchmarks/results, and none if --quick)",
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="only comparisons with TEXT in name or peer; without --results writes nothing"
    )
    arguments = parser.parse_args()
    for unknown in set(arguments.suite) - set(suites()):
        parser.error(f"there is no suite {unknown!r}; there are {', '.join(suites())}")
    results = arguments.results or (None if arguments.quick or arguments.only else RESULTS)
    met: list[bool] = []
    for name in arguments.suite or suites():
        module = importlib.import_module(f"benchmarks.{name}")
        effort = QUICK if arguments.quick else getattr(module, "EFFORT", Effort())
        distribution = getattr(module, "distribution", lambda measured: ())
        drawn = comparisons(name, arguments.only or "", quick=arguments.quick)
        met.append(run_suite(name, drawn, effort, results, distribution))
    return 0 if arguments.quick or all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
