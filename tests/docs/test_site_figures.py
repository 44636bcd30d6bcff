"""docs/benchmarks.md shows what the committed results say, and nothing else: scripts/figures.py makes its figures."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figures = script("figures")

SPREAD = {"p10": 0.5, "p25": 0.75, "median": 1.0, "p75": 1.5, "p90": 2.0}
COMPARISON = {
    "name": "a < b",
    "against": "by hand",
    "target": 0.9,
    "passed": False,
    "ratio": SPREAD,
    "candidate_seconds": SPREAD,
    "peer_seconds": {"median": 2e-5},
}
REPORT = {
    "date": "2026-01-02T03:04:05+00:00",
    "hardware": {"cpu": "A(R) CPU", "cores": 4, "load_average": 0.25, "device": "gpu: A GPU"},
    "versions": {"python": "3.11.7", "jax": "0.10.2"},
    "comparisons": [COMPARISON],
    "memory": [
        {
            "name": "memory, gradient",
            "against": "by hand",
            "target": None,
            "passed": None,
            "ratio": 0.0123,
            "candidate_bytes": 12_300_000,
            "peer_bytes": 1_000_000_000,
        }
    ],
}


def test_the_page_shows_the_committed_results() -> None:
    page = figures.PAGE.read_text()
    assert figures.page_of(page, figures.suites()) == page, "run `python scripts/figures.py`"


def test_every_suite_is_on_the_page() -> None:
    page = figures.PAGE.read_text()
    assert all(re.search(rf"<!-- figures: {suite} -->|^## {suite}$", page, re.MULTILINE) for suite in figures.suites())


def test_a_section_has_the_numbers_and_where_they_come_from() -> None:
    made = figures.section("some", REPORT)
    assert "Measured on 2026-01-02: A CPU, 4 cores, A GPU, load average 0.2 before it began; " in made
    assert "python 3.11.7, jax 0.10.2." in made
    assert made.startswith(
        '<details markdown="1" data-search-exclude><summary>2 measurements of <code>some</code></summary>\n'
    )
    assert made.index("**Against by hand**") < made.index("| a < b | by hand | 1.00 |")
    assert "| a < b | by hand | 1.00 | 0.50 to 2.00 | 0.90, **missed** | 1 s | 20 µs |" in made
    assert "| gradient | by hand | 0.012 |  | 12.3 MB | 1000.0 MB |" in made


def test_measurements_are_grouped_by_peer() -> None:
    """In the order in which peers come; what is against itself comes last."""
    comparisons = [{**COMPARISON, "against": peer} for peer in ("itself", "b", "a", "b")]
    made = figures.section("some", {**REPORT, "comparisons": comparisons})
    assert re.findall(r"\*\*Against (\w+)\*\*", made) == ["b", "a", "itself"]
    assert len(set(re.findall(r' id="(.*?)"', made))) == 3


def test_the_page_begins_with_five_results() -> None:
    made = figures.headlines(figures.suites())
    assert made.count('class="median"') == 5
    assert all(label.partition(" / ")[0] in made for *_, label in figures.HEADLINES)


def test_the_axis_is_logarithmic() -> None:
    made = figures.chart("some", [COMPARISON])
    assert 'class="tenths" x1="4.0%" x2="96.0%"' in made
    assert '<line class="one" x1="50.0%" x2="50.0%"' in made
    assert 'class="median" cx="50.0%"' in made
    assert "a &lt; b / by hand" in made
    assert re.findall(r'class="number" .*>(\S+)</text>', made) == ["0.5", "1", "2"]


def test_a_suite_without_a_part_of_its_own_is_among_the_others() -> None:
    text = "<!-- figures: overview -->\n<!-- /figures -->\n<!-- figures: others -->\n<!-- /figures -->\n"
    made = figures.page_of(text, {"new": REPORT, "idle": None})
    assert "| `new` | 0 of 1 | 2026-01-02 | A CPU, 4 cores, A GPU | 0.10.2 |" in made
    assert "| `idle` | no results |" in made
    assert "## new\n\n<details" in made
    assert "## idle\n\nThere are no results" in made
    assert figures.page_of(made, {"new": REPORT, "idle": None}) == made


def test_a_part_that_is_no_suite_is_refused() -> None:
    with pytest.raises(KeyError, match="nothing"):
        figures.page_of("<!-- figures: nothing -->\n<!-- /figures -->", {})


# The tables of docs/choosing.md, forwards and gradient, by the names of the suite's comparisons; they are kept by hand.
CHOOSING = {
    "compile": {
        "`scan`, against itself": ("control, compile, forward", "control, compile, gradient"),
        "Python `for`, 64 steps": ("compile, Python for, 64 steps, forward", "compile, Python for, 64 steps, gradient"),
        "Python `for`, 256 steps": ("compile, Python for, 256 steps, forward",),
        "Python `for`, 1,024 steps": ("compile, Python for, 1,024 steps, forward",),
        "`scan`, `unroll=8`": ("compile, scan, unroll=8, forward", "compile, scan, unroll=8, gradient"),
        "`fori`, index updates": ("compile, fori, index updates, forward", "compile, fori, index updates, gradient"),
        "`while_scan`": ("compile, while_scan, forward", "compile, while_scan, gradient"),
        "`mask_scan`, rows full": ("compile, mask_scan, full, forward", "compile, mask_scan, full, gradient"),
    },
    "run": {
        "`scan`, against itself": ("control, run, forward", "control, run, gradient"),
        "Python `for`": ("run, Python for, forward",),
        "`scan`, `unroll=8`": ("run, scan, unroll=8, forward", "run, scan, unroll=8, gradient"),
        "`fori`, index updates": ("run, fori, index updates, forward", "run, fori, index updates, gradient"),
        "`while_scan`": ("run, while_scan, forward", "run, while_scan, gradient"),
        "`mask_scan`, rows full": ("run, mask_scan, full, forward", "run, mask_scan, full, gradient"),
    },
}


@pytest.mark.parametrize("table", CHOOSING)
def test_how_to_choose_quotes_the_committed_results(table: str) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "choosing.json").read_text())
    ratios = {comparison["name"]: comparison["ratio"] for comparison in results["comparisons"]}
    page = (ROOT / "docs" / "choosing.md").read_text()
    lines = page[page.index(f"| {table} | forwards | gradient |") :].split("\n\n")[0].splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(CHOOSING[table])
    for line, names in zip(lines, CHOOSING[table].values(), strict=True):
        quoted = re.findall(r": ([\d.]+ \([\d.]+ to [\d.]+\))", line)
        assert quoted == [_with_spread(ratios[name]) for name in names]


def test_how_to_choose_quotes_associative_scan() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "linear.json").read_text())
    ratios = {each["name"]: each["ratio"] for each in [*report["comparisons"], *report["memory"]]}
    page = (ROOT / "docs" / "choosing.md").read_text()
    lines = page[page.index("| 4,096 steps |") :].split("\n\n")[0].splitlines()[2:]
    for line, name in zip(lines, ("compile", "1 wide", "64 wide", "4,096 wide"), strict=True):
        quoted = [cell.strip() for cell in line.strip("|").split("|")][1:]
        memory = "" if name == "compile" else _three_digits(ratios[f"{name}, memory, gradient"])
        assert quoted == [*(_with_spread(ratios[f"{name}, {kind}"]) for kind in ("forward", "gradient")), memory]


def _with_spread(ratio: dict[str, float]) -> str:
    median, low, high = (_three_digits(ratio[part]) for part in ("median", "p10", "p90"))
    return f"{median} ({low} to {high})"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.3g}"


def test_the_guide_of_layers_quotes_the_committed_results() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "layer_modules.json").read_text())
    found = {each["name"]: each for each in report["comparisons"]}
    memory = {each["name"]: each["ratio"] for each in report["memory"]}
    page = (ROOT / "docs" / "guides" / "layers.md").read_text()
    lines = page[page.index("| modules of | against |") :].split("\n\n")[0].splitlines()[2:]
    for line, name in zip(lines, ("equinox", "linen", "nnx"), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert found[f"{name}, value and gradient"]["details"] == {"differs by": 0.0}
        kinds = ("tracing", "compiling", "value and gradient")
        times = [_with_spread(found[f"{name}, {kind}"]["ratio"]) for kind in kinds]
        assert [cells[0], *cells[2:]] == [name, "equal", _three_digits(memory[f"{name}, memory"]), *times]


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    """Memory and time of the gradient of a masked LSTM, and the time to compile 64 layers."""

    def found(suite: str, kind: str, name: str, against: str) -> dict[str, Any]:
        report = json.loads((ROOT / "benchmarks" / "results" / f"{suite}.json").read_text())
        return next(each for each in report[kind] if (each["name"], each["against"]) == (name, against))

    memory = found("masked", "memory", "B=32, memory, default, gradient", "where by hand")
    time = found("masked", "comparisons", "B=32, pareto, compact, gradient", "where by hand")
    compile = found("layers", "comparisons", "compile 64 layers, gradient", "unrolled loop")
    cells = [
        f"| {memory['candidate_bytes'] / 1e6:.1f} MB | {memory['peer_bytes'] / 1e6:.1f} MB |",
        f"| {time['ratio']['median']:.2f} | 1 |",
        f"| {compile['candidate_seconds']['median']:.1f} | {compile['peer_seconds']['median']:.1f} |",
    ]
    table = (ROOT / "README.md").read_text().split("<!-- figures -->")[1].split("<!-- /figures -->")[0]
    for cell, line in zip(cells, table.strip().splitlines()[2:], strict=True):
        assert line.endswith(cell)
