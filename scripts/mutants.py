"""Changes the package in many places, one at a time, and reports which changes no test notices.

Run `python scripts/mutants.py --list` to see the changes, and `make mutants` to try them. Each is made in a copy of the
package, in a temporary folder; the checkout is only read. The tests are those of the checkout.

First every test runs once on a copy that records which statements it runs. A change is then shown only to tests that
run its statement: to a few quick ones first, and to more where none of these fails. A test that fails, crashes or does
not end has noticed the change. Some changes cannot be noticed, because the program computes the same either way:
`scripts/equivalent_mutants.json` names them with the reason, and they do not count.

What was found out goes into a folder, `--folder`: the statements of each test, the results, and what JAX compiled. A
second run goes on where the first one stopped. Remove the folder after a change of the package or of its tests.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import shutil
import time
from pathlib import Path
from typing import Any

from mutation_sites import Site, pick, sites_of
from mutation_tests import ROOT, Coverage, Server, say

EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.json"

MODULES = sorted(
    str(file.relative_to(ROOT))
    for file in (ROOT / "treescan").rglob("*.py")
    if file.stem not in ("__init__", "__main__")
)
TESTS = sorted(
    str(file.relative_to(ROOT))
    for file in (ROOT / "tests").glob("*/test_*.py")
    if (file.parent.name not in ("architecture", "docs", "site") or file.stem == "test_semantics")
    and not file.stem.startswith("test_process")
)
"""All but those of texts, pages and pictures, and of several processes; the plain meaning of the verbs is on a page."""

FIRST, SECOND = 10.0, 25.0
"""Seconds of tests, as they took unchanged, that a change is shown to: at first, and where none of these fails."""
PATIENCE = 4.0
"""How many times as long tests may take, beside a minute for their start."""

NOTICED = ("killed", "timed out", "crashed")


def main() -> None:
    """Tries changes, and reports."""
    options = _options()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    modules = [module for module in MODULES if not options.only or Path(module).stem in options.only]
    chosen = pick({module: sites_of(ROOT, module, options.seed) for module in modules}, options.count, options.seed)
    if options.list:
        return say("\n".join(map(_line, chosen)))
    tests = options.tests or [test for test in TESTS if (ROOT / test).exists()]
    covered = Coverage({}) if options.on else Coverage.measured(folder, MODULES, tests)
    if options.measure:
        return None
    results, known = Results(options.resume or folder / "results.jsonl"), _equivalents()
    left = [site for site in chosen if results.status(site) in ("not tried", options.again)]
    left = [site for site in left if not _is_equivalent(site, known)]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        jobs = [left[job :: options.jobs] for job in range(options.jobs)]
        list(pool.map(lambda job: _try_all(job, covered, results, options), jobs))
    return report(chosen, results, known)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="how many changes")
    parser.add_argument("--seed", type=int, default=49, help="which ones")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument(
        "--only", action="append", metavar="MODULE", help="changes of this module, for example products"
    )
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="in place of the usual test files")
    parser.add_argument("--on", nargs="+", metavar="TEST", help="tries the changes on these tests, whatever they run")
    parser.add_argument("--list", action="store_true", help="prints the changes and tries none")
    parser.add_argument("--measure", action="store_true", help="runs the tests unchanged, and tries no change")
    parser.add_argument("--again", metavar="STATUS", help="tries those once more that ended so, for example survived")
    parser.add_argument("--first", type=float, default=FIRST, help="seconds of tests at first")
    parser.add_argument("--second", type=float, default=SECOND, help="seconds of tests where none of these fails")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="for what was found out")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="the results to go on from, JSON lines")
    return parser.parse_args()


class Results:
    """What became of each change, in a file of JSON lines; the last line on a change counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self._by_key: dict[str, dict[str, Any]] = {each["key"]: each for each in map(json.loads, lines)}

    def status(self, site: Site) -> str:
        """`killed`, `timed out`, `crashed`, `survived`, `failed to start` or `not tried`."""
        return self._by_key.get(site.key, {"status": "not tried"})["status"]

    def add(self, site: Site, status: str, by: str, seconds: float, tests: int) -> None:
        """Notes one."""
        found = {"key": site.key, "status": status, "by": by, "seconds": round(seconds, 1), "tests": tests}
        self._by_key[site.key] = found
        with self._file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        say(f"{status:9} {_line(site)}   {by or f'{tests} tests'}, {seconds:.0f} s")


def _try_all(sites: list[Site], covered: Coverage, results: Results, options: argparse.Namespace) -> None:
    """Tries all on a few tests, then on more those that none of these noticed."""
    server, again = Server(options.folder), list[tuple[Site, list[str], int]]()
    if options.on and (found := server.run(options.on, 3600))["code"]:
        raise SystemExit(f"{found['failed']} fails unchanged.")
    for site in sites:
        tests = options.on or covered.of(site)
        quick = options.on or covered.within(tests, options.second if options.again else options.first)
        status, by, seconds = _try(server, site, quick, covered)
        if status == "survived" and len(quick) < len(tests) and options.second and not options.again:
            again.append((site, [test for test in tests if test not in quick], len(quick)))
            say(f"later     {_line(site)}")
        else:
            results.add(site, status, by, seconds, len(quick))
    for site, tests, before in again:
        more = covered.within(tests, options.second)
        status, by, seconds = _try(server, site, more, covered)
        results.add(site, status, by, seconds, before + len(more))
    server.close()


def _try(server: Server, site: Site, tests: list[str], covered: Coverage) -> tuple[str, str, float]:
    if not tests:
        return "survived", "no test runs it", 0.0
    file, original = server.package / site.module, ROOT / site.module
    file.write_bytes(site.applied(original.read_bytes()))
    began = time.time()
    found = server.run(["-x", *tests], 60 + PATIENCE * covered.seconds(tests))
    shutil.copy2(original, file)  # with its time of change, so that Python finds it compiled
    code, failed = found["code"], found["failed"]
    known = {0: "survived", -1: "timed out", -2: "crashed"}
    status = "killed" if failed else known.get(code, "failed to start")
    return status, failed or "", time.time() - began


def _equivalents() -> list[dict[str, str]]:
    return json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else []


def _is_equivalent(site: Site, known: list[dict[str, str]]) -> bool:
    named = ("module", "source", "before", "after")
    return any(all(each[name] == getattr(site, name) for name in named) for each in known)


def _line(site: Site) -> str:
    place = f"{site.module.removeprefix('treescan/')}:{site.line} {site.function or site.table}"
    before, after = (text if len(text) < 100 else f"{text[:48]} ... {text[-48:]}" for text in (site.before, site.after))
    return f"{place}: [{site.kind}] {before}  ->  {after}"


def report(chosen: list[Site], results: Results, known: list[dict[str, str]]) -> None:
    """Prints the share, and those that no test noticed."""
    counted = [site for site in chosen if not _is_equivalent(site, known)]
    survived = [site for site in counted if results.status(site) == "survived"]
    noticed = [site for site in counted if results.status(site) in NOTICED]
    tried = len(noticed) + len(survived)
    say(f"\n{len(chosen)} changes: {len(chosen) - len(counted)} are equivalent, {len(counted) - tried} were not tried.")
    say(f"Noticed: {len(noticed)} of {tried}, {100 * len(noticed) / max(1, tried):.0f} %.")
    for site in survived:
        say(f"Survived: {_line(site)}")


if __name__ == "__main__":
    main()
