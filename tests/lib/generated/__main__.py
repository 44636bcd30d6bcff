"""`python -m generated --cases 200 --seed 0`: runs fresh programs, and says what became of them."""

from __future__ import annotations

import argparse
import collections
import gc
import pathlib
import sys
import time
import warnings

import jax

from .compare import Failure, Refused, check
from .options import draw_program
from .programs import Program, Seeded
from .render import source
from .shrink import shrink

COMPILATIONS = [0]
FOUND = pathlib.Path(__file__).parent / "found.py"


def _note(event: str, duration: float, **_: object) -> None:
    COMPILATIONS[0] += event == "/jax/core/compile/backend_compile_duration"


def report(program: Program, failure: Failure, file: pathlib.Path, name: str) -> None:
    """Prints a failure, and adds its program to the file."""
    kind = failure.kind.replace('"', "'").replace("\\", "/")
    print(source(program), failure.text[-2000:], sep="\n", flush=True)
    with file.open("a") as found:
        found.write(f'\nFOUND["{name}: {kind}"] = {program!r}\n')


def main() -> int:
    parser = argparse.ArgumentParser(prog="generated", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument("--only", type=int, help="the one case of this number")
    parser.add_argument("--file", type=pathlib.Path, default=FOUND, help="where programs that fail are added")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--report", action="store_true", help="say what failed, and exit with 0")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    jax.monitoring.register_event_duration_secs_listener(_note)
    jax.config.update("jax_enable_x64", True)
    began, seen, refusals, ops = time.monotonic(), *(collections.Counter() for _ in range(3))
    failures = collections.defaultdict(list)
    print(f"seed {given.seed}", flush=True)
    number = given.only or 0
    while number < (given.only + 1 if given.only is not None else given.cases) or given.minutes:
        if given.minutes and time.monotonic() - began > 60 * given.minutes:
            break
        program = draw_program(Seeded(f"{given.seed} {number}"))
        ops.update(instruction.op for instruction in program.body)
        try:
            compared = check(program)
            seen["sets"] += compared
            seen["compared" if compared else "not finite"] += 1
        except Refused as refusal:
            refusals[str(refusal).split("`: ", 1)[-1][:110]] += 1
        except Failure as failure:
            kind = failure.kind
            failures[kind].append(number)
            print(f"case {number}: {kind}", flush=True)
            if len(failures[kind]) <= (3 if kind.startswith(("wrong", "gradient", "carry", "output")) else 1):
                if not given.no_shrink:
                    program, failure = shrink(program, failure, seconds=40)
                report(program, failure, given.file, f"seed{given.seed}_{number}")
        except Exception as error:  # the generator's own
            failures[f"GENERATOR {type(error).__name__}: {str(error).strip().splitlines()[:1]}"].append(number)
            if given.only is not None:
                raise
        number += 1
        if number % 25 == 0:
            jax.clear_caches()
            gc.collect()
            print(
                f"{number} cases, {time.monotonic() - began:.0f} s, {sum(map(len, failures.values()))} failures",
                flush=True,
            )
    print(f"seed {given.seed}: {dict(seen)}, {time.monotonic() - began:.0f} s, {COMPILATIONS[0]} compilations")
    print("refusals:", *(f"\n  {count} {text}" for text, count in refusals.most_common()))
    most_first = sorted(failures.items(), key=lambda item: -len(item[1]))
    print("failures:", *(f"\n  {len(cases)} {kind} {cases[:8]}" for kind, cases in most_first))
    print("operations:", len(ops), dict(ops.most_common()))
    if failures:
        print("Failures are new programs. Run `make fuzz` with this seed, and keep what it saves as a regression.")
    return 1 if failures and not given.report else 0


if __name__ == "__main__":
    sys.exit(main())
