"""A default that prose writes as a number is the default of the code, wherever it is written."""

import inspect
import re
import tomllib
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import pytest

import treescan
from scripts import ROOT, script
from treescan._options.progress.meters import MOST
from treescan._remat.budget import MARGIN
from treescan._remat.remat import LARGE, LEAST_STEPS
from treescan._rows.compact import LARGE_PARTS, MOST_EQUATIONS, PARTS as PARTS_OF_ROWS

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "treescan").rglob("*.py"))]
TEXTS = {str(file.relative_to(ROOT)): re.sub(r"\s+", " ", file.read_text()) for file in FILES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight")
PARTS = {1: "all rows", 2: "a half", 4: "a quarter", 16: "a sixteenth"}
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
(JAX,) = (each.partition(">=")[2] for each in PROJECT["dependencies"] if each.startswith("jax>="))


def evaluations() -> int:
    return treescan.plan_remat(lambda h, _: (jnp.sin(h), None), 1.0, length=1024, remat="nested").evaluations


def same_parameters() -> int:
    ours, theirs = (list(inspect.signature(scan).parameters) for scan in (treescan.scan, jax.lax.scan))
    return next(n for n, names in enumerate(zip(ours, [*theirs, ""], strict=False)) if len(set(names)) > 1)


# How prose writes a number, what it must be, and in how many places it is.
NUMBERS = {
    "tiers": (r"per tier, at most (\w+)", {WORDS[len(PARTS_OF_ROWS)]}, 1),
    "their parts": (r"four tiers: ([\w, ]+? sixteenth)", {"all rows, a half, a quarter and a sixteenth"}, 1),
    "equations of a large step": (r"more than (\d+) equations", {str(MOST_EQUATIONS)}, 3),
    "tiers of a large step": (r"three tiers: ([\w, ]+? sixteenth)", {f"{PARTS[1]}, {PARTS[2]} and {PARTS[16]}"}, 2),
    "the same, in letters": (r"or B/(\d+, B/\d+) and B\b", {"16, B/2"}, 1),
    "their parts, in letters": (r"Tiers are (B/\d+, B/\d+, B/\d+) and B rows", {"B/16, B/4, B/2"}, 1),
    "bytes that make a loop large": (r"about (\d+) MB", {str(LARGE // 2**20)}, 1),
    "what a plan has to spare": (r"(\d+) % to spare|margin of (\d+) %", {f"{MARGIN - 1:.0%}"[:-1]}, 3),
    "steps of the shortest loop for auto": (r"Loops of fewer than (\d+) steps", {str(LEAST_STEPS)}, 1),
    "updates of a bar": (r"given \| at most (\d+) chunks|None: at most (\d+),", {str(MOST)}, 2),
    "parameters of lax.scan": (r"first (\w+) parameters", {WORDS[same_parameters()]}, 2),
    "evaluations of nested": (r'"nested"` saves few carries, and evaluates each step (\w+) times',
                             {WORDS[evaluations()]}, 1),
    "the oldest JAX": (r"JAX ([\d.]+\d) or newer|jaxlib \| ([\d.]+) \|", {JAX}, 2),
    "Pythons": (r"Python \|? ?(3[\d., |orto]+3\.\d+)", {f"{PYTHONS[0]} {mid} {PYTHONS[-1]}" for mid in ("to", "|")}
                | {", ".join(PYTHONS[:-1]) + f" or {PYTHONS[-1]}"}, 4),
}  # fmt: skip


def test_the_parts_of_a_large_step_have_names() -> None:
    assert LARGE_PARTS == (1, 2, 16)
    assert PARTS_OF_ROWS == (1, 2, 4, 16)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_that_of_the_code(name: str) -> None:
    pattern, right, least = NUMBERS[name]
    found = {
        (file, next(filter(None, match.groups())))
        for file, text in TEXTS.items()
        for match in re.finditer(pattern, text)
    }
    assert len(found) >= least, "a sentence has other words now: adapt the pattern"
    assert not [each for each in found if each[1] not in right], right


def test_the_verbs_are_the_same_in_each_list() -> None:
    table = script("what_works").table.VERBS

    def first(rows: Iterable[str]) -> set[str]:
        return {re.findall(r"`(?:lifting\.)?(\w+)", row)[0] for row in rows if re.match(r"\| \[?`", row)}

    home = (ROOT / "docs" / "index.md").read_text().split("## The verbs")[1].split("\n## ")[0]
    assert first(home.splitlines()) == set(table)
    verb = (ROOT / "docs" / "faq.md").read_text().split("### Verb\n")[1].split("###")[0]
    assert set(re.findall(r"`(\w+)`", verb.partition(".")[0])) == set(table)


def test_the_releases_of_jax_are_named() -> None:
    """Fails under a release that the page does not name: its tests pass, so name it."""
    row = re.search(r"\| releases of JAX tested \| (.+?) \|", TEXTS["docs/frameworks.md"])
    assert row
    release = ".".join(jax.__version__.split(".")[:2])
    assert release in re.findall(r"\d+\.\d+", row[1])
