"""`python -m generated.words --cases 200 --seed 0`: runs fresh programs, and says what became of them."""

from __future__ import annotations

import argparse
import collections
import gc
import pathlib
import sys
import time
import traceback
import warnings

import jax

from ..programs import Seeded
from .programs import Refused, Skipped, Wrong, check, draw_program, shrink

FOUND = pathlib.Path(__file__).parent / "found.py"


def main() -> int:
    parser = argparse.ArgumentParser(prog="generated.words", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument("--only", type=int, help="the one case of this number")
    parser.add_argument("--file", type=pathlib.Path, default=FOUND, help="where programs that fail are added")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--report", action="store_true", help="say what failed, and exit with 0")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    jax.config.update("jax_disable_most_optimizations", True)  # what is looked for is wrong in any compilation
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    began, seen, skips, refusals = time.monotonic(), *(collections.Counter() for _ in range(3))
    failures = collections.defaultdict(list)
    print(f"seed {given.seed}", flush=True)
    number = given.only or 0
    while number < (given.only + 1 if given.only is not None else given.cases) or given.minutes:
        if given.minutes and time.monotonic() - began > 60 * given.minutes:
            break
        program = draw_program(Seeded(f"words {given.seed} {number}"))
        if given.only is not None:
            print(program, flush=True)
        try:
            check(program)
            seen["equal"] += 1
        except Skipped as skip:
            seen["skipped"] += 1
            skips[str(skip)[:110]] += 1
            if given.only is not None and skip.__cause__ is not None:
                traceback.print_exception(skip.__cause__)
        except Refused as refusal:
            seen["refused"] += 1
            refusals[str(refusal).split("`: ", 1)[-1][:110]] += 1
        except Wrong as wrong:
            seen["wrong"] += 1
            failures[wrong.kind].append(number)
            print(f"case {number}: {wrong.kind}: {wrong.text}", flush=True)
            if given.only is not None and wrong.__cause__ is not None:
                traceback.print_exception(wrong.__cause__)
            print(f"  {program!r}", flush=True)
            if not given.no_shrink and len(failures[wrong.kind]) <= (5 if wrong.kind == "wrong numbers" else 1):
                program, wrong = shrink(program, wrong)
                print(f"  smaller: {program!r}\n  {wrong.text}", flush=True)
                kind = wrong.kind.replace('"', "'").replace("\\", "/")
                with given.file.open("a") as found:
                    found.write(f'\nFOUND["seed {given.seed}, {number}: {kind}"] = {program!r}\n')
        number += 1
        if number % 10 == 0:
            jax.clear_caches()
            gc.collect()
            print(f"{number} programs, {time.monotonic() - began:.0f} s, {dict(seen)}", flush=True)
    print(f"seed {given.seed}: {dict(seen)}, {time.monotonic() - began:.0f} s")
    print("refusals:", *(f"\n  {count} {text}" for text, count in refusals.most_common()))
    print("skipped:", *(f"\n  {count} {text}" for text, count in skips.most_common()))
    most_first = sorted(failures.items(), key=lambda item: -len(item[1]))
    print("failures:", *(f"\n  {len(cases)} {kind} {cases[:8]}" for kind, cases in most_first))
    return 1 if failures and not given.report else 0


if __name__ == "__main__":
    sys.exit(main())
