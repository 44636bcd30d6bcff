"""Writes docs/what-works.json, .txt, and the tables of docs/what-works.md: `python scripts/what_works.py [VERB ...]`.

Every cell of the table is run (tests/lib/works): a verb with one option under each transform of JAX, and each two
options together. The data has what did not come out equal to its plain meaning: a cell that is not listed is equal.
With `--only NAME` only the cells of an option or transform are run. With `--page` nothing is run, and the page and the
text are made of the data that is there.

What stands in the page between `<!-- works: NAME -->` and `<!-- /works -->` is made here, and the rest by hand. NAME is
`options` or `transforms`. The text has a part for each verb: which of its options go together, and what is refused.
Tests compare both with the data, and the data with what cells come to.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "lib"), str(ROOT)]
if "jax" not in sys.modules:  # the tests choose for themselves
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # for the cells of `shard_map`
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
from works import table  # noqa: E402
from works.table import EQUAL, NOTHING, TRANSFORMS, Cell  # noqa: E402

DATA = ROOT / "docs" / "what-works.json"
PAGE = ROOT / "docs" / "what-works.md"
TEXT = ROOT / "docs" / "what-works.txt"
PART = re.compile(r"(<!-- works: (\w+) -->\n).*?(<!-- /works -->)", re.DOTALL)
NOT_RUN = "Not run yet.\n"
WORKS, REFUSED, FAULT, NONE = "✓", "no", "✗", ""
HEAD = f"""What works with what: the options of each verb, two at a time, in one program with its gradient.

{WORKS} is equal to the reference, and a letter is an error, which is listed below the table. Nothing: the two mean the
same, or cannot be combined. Then the single options that are not equal under a transform. {PAGE.name} says how all of
this is run.
"""

Data = Mapping[str, Any]


def key(cell: Cell) -> str:
    """A cell's name in the data of its verb."""
    return f"{' + '.join(cell.forms) or NOTHING} | {cell.transform}"


# The page.


def page_of(text: str, data: Data) -> str:
    """The page with new generated parts."""

    def made(part: re.Match[str]) -> str:
        tables = {"options": options, "transforms": transforms}
        return f"{part[1]}\n{tables[part[2]](data)}\n{part[3]}"

    return PART.sub(made, text)


def text_of(data: Data) -> str:
    """The text: a part for each verb."""
    parts = [HEAD]
    for verb in table.VERBS:
        of = data["verbs"].get(verb)
        parts.append(f"{verb}\n{'=' * len(verb)}\n\n{section(verb, of) if of else NOT_RUN}")
    return "\n".join(parts)


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with narrow columns, which Markdown has no way to ask for."""
    lines = [f"<tr>{''.join(f'<th>{coded(name)}</th>' for name in head)}</tr>"]
    for first, *rest in rows:
        lines.append(f'<tr><th scope="row">{coded(first)}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>')
    return '<div class="works"><table>\n' + "\n".join(lines) + "\n</table></div>\n"


def coded(text: str) -> str:
    """Markdown's code as HTML."""
    return re.sub("`(.*?)`", r"<code>\1</code>", text)


def symbol(outcomes: Iterable[str]) -> str:
    """What is shown for cells: all are equal, all are refused, or how many are equal, or faults."""
    of = list(outcomes)
    if NOT_RUN in of:
        return "?"
    bad = [outcome for outcome in of if outcome != EQUAL]
    if faults := sum(map(fault, bad)):
        return f"{FAULT} {faults} of {len(of)}"
    return WORKS if not bad else REFUSED if len(bad) == len(of) else f"{WORKS} {len(of) - len(bad)} of {len(of)}"


def fault(outcome: str) -> bool:
    """Whether it is neither equal nor an error of treescan."""
    return outcome.startswith(("FOREIGN", "WRONG"))


def found(verb: str, cells: Iterable[Cell], data: Data) -> list[str]:
    """What the data says of cells."""
    of = data["verbs"].get(verb)
    return [of["not equal"].get(key(cell), EQUAL) if of else NOT_RUN for cell in cells]


def options(data: Data) -> str:
    """Which verb takes which option: alone, under all transforms."""
    names = dict.fromkeys(form.option for verb in table.VERBS.values() for form in verb.forms.values())
    rows = []
    for name in names:
        row = [f"`{name}`" if is_code(name) else name]
        for verb, of in table.VERBS.items():
            forms = [form for form, given in of.forms.items() if given.option == name]
            tried = [Cell(verb, (form,), "jit") for form in forms]
            tried = tried or [cell for cell in table.offered(verb) if cell.forms == (name,)]
            row.append(symbol(found(verb, tried, data)) if tried else NONE)
        rows.append(row)
    return grid(["", *[f"`{verb}`" for verb in table.VERBS]], rows)


def transforms(data: Data) -> str:
    """Which transform works with which verb: with none and with each of its options, less those that it refuses."""
    rows = []
    for transform in TRANSFORMS:
        row = [transform]
        for verb in table.VERBS:
            cells = [cell for cell in table.singles(verb) if cell.transform == transform]
            taken = [cell for cell in cells if not refused(verb, cell.forms, data)]
            row.append(symbol(found(verb, taken, data)))
        rows.append(row)
    return grid(["", *[f"`{verb}`" for verb in table.VERBS]], rows)


def refused(verb: str, forms: tuple[str, ...], data: Data) -> bool:
    """Whether the verb refuses an option under every transform."""
    tried = [cell for cell in table.singles(verb) if cell.forms == forms]
    return all(outcome != EQUAL for outcome in found(verb, tried, data))


def is_code(name: str) -> bool:
    """Whether a name is that of an argument."""
    return (name.isidentifier() and name not in ("valid", "first", "batch", "pattern")) or "=" in name


def section(verb: str, data: Data) -> str:
    """A verb: which of its options go together, and what is refused."""
    of, bad = table.VERBS[verb], data["not equal"]
    forms = [name for name in of.forms if name not in of.alone]
    letters = {line: chr(ord("a") + n) for n, line in enumerate(dict.fromkeys(pair_lines(verb, bad)))}
    width = max(len(name) for name in forms) + 5
    lines = [" " * width + "".join(f"{n + 1:>3}" for n in range(len(forms) - 1)).rstrip()]
    for i, a in enumerate(forms):
        row = f"{i + 1:>2}  {a}".ljust(width)
        for b in forms[:i]:
            outcome = bad.get(key(Cell(verb, (b, a), table.PAIRED)), EQUAL)
            apart = table.conflicts(of.forms[a], of.forms[b])
            row += f"{NONE if apart else WORKS if outcome == EQUAL else letters[outcome]:>3}"
        lines.append(row.rstrip())
    matrix = "\n".join(lines)
    counted = f"{data['cells']} cells, {data['cells'] - len(bad)} of them equal to the reference."
    text = f"{counted}\n\n{matrix}\n"
    if letters:
        text += "\n" + "".join(f"{letter}  {quoted(line)}\n" for line, letter in letters.items())
    return text + exceptions(verb, bad)


def pair_lines(verb: str, bad: Mapping[str, str]) -> list[str]:
    """What came of pairs that are not equal."""
    return [bad[key(cell)] for cell in table.pairs(verb) if key(cell) in bad]


def exceptions(verb: str, bad: Mapping[str, str]) -> str:
    """The single options under transforms that are not equal to the reference, by outcome."""
    tried: dict[tuple[str, ...], list[str]] = defaultdict(list)
    under: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for cell in table.singles(verb):
        tried[cell.forms].append(cell.transform)
        if key(cell) in bad:
            under[bad[key(cell)]][cell.forms].append(cell.transform)
    lines = []
    for line, forms in under.items():
        together: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for of, names in forms.items():
            together["every transform" if names == tried[of] else ", ".join(names)].append(of)
        where = "; ".join(f"{_listed(of, list(tried))} under {names}" for names, of in together.items())
        lines.append(f"- {where}: {quoted(line)}\n")
    return "\nSingle options that are not equal:\n\n" + "".join(lines) if lines else ""


def _listed(forms: Sequence[tuple[str, ...]], all_forms: Sequence[tuple[str, ...]]) -> str:
    """Options in words: those that it is not, where they are the fewer."""
    others = [form for form in all_forms if form not in forms]
    few, lead = (others, "all but ") if 2 * len(others) < len(forms) else (forms, "")
    return lead + ", ".join(form[0] if form else NOTHING for form in few)


def quoted(line: str) -> str:
    """An outcome in the text: the line as it was printed, and whose error it is."""
    kind, _, text = line.partition(": ")
    mark = "an error of JAX, " if kind.startswith("FOREIGN") else "wrong, " if kind.startswith("WRONG") else ""
    name = kind.removeprefix("FOREIGN ")
    return f"{mark}{name}: {text}" if text else f"{mark}{name}, without a text"


# Running.


def run(verb: str, only: str | None = None) -> dict[str, Any]:
    """All cells of a verb, or those with one option or under one transform: of the others the data stays."""
    began, cells = time.perf_counter(), table.cells(verb)
    old = json.loads(DATA.read_text())["verbs"][verb]["not equal"] if only else {}
    cells = [cell for cell in cells if only is None or only in (*cell.forms, cell.transform)]
    outcomes = {}
    for n, cell in enumerate(cells):
        if n % 100 == 0:
            jax.clear_caches()
            sys.stderr.write(f"{verb}: {n} of {len(cells)}, {time.perf_counter() - began:.0f} s\n")
        outcomes[key(cell)] = table.outcome(cell)
    bad = {name: outcome for name, outcome in outcomes.items() if outcome != EQUAL}
    faults = sum(map(fault, bad.values()))
    took = f"{time.perf_counter() - began:.0f} s"
    sys.stdout.write(f"{verb}: {len(cells)} cells, {len(bad)} not equal, {faults} faults, {took}\n")
    every = [key(cell) for cell in table.cells(verb)]
    outcomes = old | dict.fromkeys(outcomes, EQUAL) | bad
    return {"cells": len(every), "not equal": {n: outcomes[n] for n in every if outcomes.get(n, EQUAL) != EQUAL}}


def main() -> None:
    """Runs the cells of all verbs, or of those that are named, and writes the data and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verbs", nargs="*", choices=[[], *table.VERBS])
    parser.add_argument("--page", action="store_true", help="make the page of the data that is there")
    parser.add_argument("--only", metavar="NAME", help="run the cells of one option or transform, and keep the others")
    given = parser.parse_args()
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    for verb in [] if given.page else given.verbs or table.VERBS:
        write(verb, run(verb, given.only))
    data = json.loads(DATA.read_text())
    PAGE.write_text(page_of(PAGE.read_text(), data))
    TEXT.write_text(text_of(data))


def write(verb: str, came: Mapping[str, Any]) -> None:
    """Puts a verb's cells into the data."""
    verbs = {**(json.loads(DATA.read_text())["verbs"] if DATA.exists() else {}), verb: came}
    data = {"jax": jax.__version__, "verbs": {name: verbs[name] for name in table.VERBS if name in verbs}}
    DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
