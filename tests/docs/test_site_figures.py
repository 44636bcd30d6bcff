"""docs/benchmarks.md and its files show what the committed results say: scripts/figures.py writes them."""

import json
import re
from typing import Any

import pytest

from scripts import ROOT, printed, script

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


def test_the_page_shows_the_committed_results() -> None:
    for page in (file.read_text() for file in figures.PAGES):
        assert figures.page_of(page, figures.suites()) == page, "run `python scripts/figures.py`"


def test_files_are_what_the_script_writes() -> None:
    reports = figures.suites()
    written = figures.charts(reports) | figures.texts(reports)
    for file, content in written.items():
        assert file.read_text() == content, f"run `python scripts/figures.py`: {file.name}"
    assert set(figures.CHARTS_FOLDER.iterdir()) | set(figures.RESULTS.glob("*.txt")) == written.keys()


def test_every_suite_and_every_chart_is_on_the_page() -> None:
    page = "".join(file.read_text() for file in figures.PAGES)
    assert all(f"`{suite}`" in page for suite in figures.suites())
    shown = re.findall(r'^--8<-- "docs/pictures/charts/(\w+)\.svg"$', page, re.MULTILINE)
    assert sorted(shown) == sorted(file.stem for file in figures.charts(figures.suites()))


def test_all_that_is_chosen_was_measured() -> None:
    reports = figures.suites()
    chosen = [*figures.CHARTS.items(), ("slower", figures.SLOWER)]
    assert all(len(figures._chosen(reports, rows)) == len(rows) for _, rows in chosen)
    assert len(figures._chosen(reports, figures.MEMORY, "memory")) == len(figures.MEMORY)
    assert all(slower["ratio"]["median"] > 1 for slower in figures._chosen(reports, figures.SLOWER))


def test_the_page_begins_with_five_results() -> None:
    assert (figures.CHARTS_FOLDER / "headlines.svg").read_text().count('class="median"') == 5


def test_the_axis_is_logarithmic() -> None:
    made = figures.chart("some", [COMPARISON])
    assert 'class="tenths" x1="4.0%" x2="96.0%"' in made
    assert '<line class="one" x1="50.0%" x2="50.0%"' in made
    assert 'class="median" cx="50.0%"' in made
    assert "a &lt; b / by hand: 1.00" in made
    assert re.findall(r'class="number" .*>(\S+)</text>', made) == ["0.5", "1", "2"]


def results(suite: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{suite}.json").read_text())


def table_of(page: str, head: str) -> list[str]:
    """The rows of the table of a page that begins with these words."""
    text = (ROOT / "docs" / page).read_text()
    return text[text.index(head) :].split("\n\n")[0].splitlines()[2:]


# The rows of the tables of docs/choosing.md, by the names of the suite's comparisons; they are kept by hand.
CHOOSING = {
    "`scan`, against itself": "control, {}",
    "Python `for`, 64 steps": "{}, Python for, 64 steps",
    "Python `for`, 256 steps": "{}, Python for, 256 steps",
    "Python `for`, 1,024 steps": "{}, Python for, 1,024 steps",
    "Python `for`": "{}, Python for",
    "`scan`, `unroll=8`": "{}, scan, unroll=8",
    "`fori`, index updates": "{}, fori, index updates",
    "`while_scan`": "{}, while_scan",
    "`mask_scan`, rows full": "{}, mask_scan, full",
}


@pytest.mark.parametrize("table", ["compile", "run"])
def test_how_to_choose_quotes_the_committed_results(table: str) -> None:
    ratios = {comparison["name"]: comparison["ratio"] for comparison in results("choosing")["comparisons"]}
    lines = table_of("choosing.md", f"| {table} | forwards | gradient |")
    stems = {
        label: name.format(table) for label, name in CHOOSING.items() if f"{name.format(table)}, forward" in ratios
    }
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == list(stems)
    for line, stem in zip(lines, stems.values(), strict=True):
        quoted = re.findall(r": ([\d.]+ \([\d.]+ to [\d.]+\))", line)
        names = (f"{stem}, {kind}" for kind in ("forward", "gradient"))
        assert quoted == [_with_spread(ratios[name]) for name in names if name in ratios]


def test_how_to_choose_quotes_associative_scan() -> None:
    report = results("linear")
    ratios = {each["name"]: each["ratio"] for each in [*report["comparisons"], *report["memory"]]}
    for line, name in zip(
        table_of("choosing.md", "| 4,096 steps |"), ("compile", "1 wide", "64 wide", "4,096 wide"), strict=True
    ):
        quoted = [cell.strip() for cell in line.strip("|").split("|")][1:]
        memory = "" if name == "compile" else _three_digits(ratios[f"{name}, memory, gradient"])
        assert quoted == [*(_with_spread(ratios[f"{name}, {kind}"]) for kind in ("forward", "gradient")), memory]


def _with_spread(ratio: dict[str, float]) -> str:
    median, low, high = (_three_digits(ratio[part]) for part in ("median", "p10", "p90"))
    return f"{median} ({low} to {high})"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.3g}"


def test_the_guide_of_layers_quotes_the_committed_results() -> None:
    report = results("layer_modules")
    found = {each["name"]: each for each in report["comparisons"]}
    memory = {each["name"]: each["ratio"] for each in report["memory"]}
    lines = table_of("guides/layers.md", "| modules of | against |")
    for line, name in zip(lines, ("equinox", "linen", "nnx"), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert found[f"{name}, value and gradient"]["details"] == {"differs by": 0.0}
        kinds = ("tracing", "compiling", "value and gradient")
        times = [_with_spread(found[f"{name}, {kind}"]["ratio"]) for kind in kinds]
        assert [cells[0], *cells[2:]] == [name, "equal", _three_digits(memory[f"{name}, memory"]), *times]


README_ROWS = (  # of its table: the suite, the comparison, and what it is compared with
    ("masked", "B=32, pareto, compact, gradient", "where by hand"),
    ("masked", "B=32, full, default, gradient", "flax.linen.RNN"),
    ("families", "mask_scan, rows full, gradient / a where", "39 held back"),
    ("early_exit", "gradient, 5% of the steps", "equinox, checkpointed"),
    ("layers", "compile 64 layers, gradient", "unrolled loop"),
    ("masked", "B=64, pareto, default, forward", "torch, packed"),
    ("trace_time", "mask_scan, 1 operation, 1 leaf", "where by hand"),
)


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    """One ratio of one suite a row; those of families are medians, which other tests hold to the results."""

    def found(suite: str, kind: str, name: str, against: str) -> dict[str, Any]:
        return next(each for each in results(suite)[kind] if (each["name"], each["against"]) == (name, against))

    def ratio(suite: str, name: str, against: str) -> float:
        if suite != "families":
            return found(suite, "comparisons", name, against)["ratio"]["median"]
        page = figures.PAGE.read_text()
        return float(re.findall(rf"^\| {name} \| {against} \| ([\d.]+) ", page, re.MULTILINE)[0])

    readme = (ROOT / "README.md").read_text()
    table = readme.split("<!-- figures -->")[1].split("<!-- /figures -->")[0]
    for row, line in zip(README_ROWS, table.strip().splitlines()[2:], strict=True):
        assert line.endswith(f"| {ratio(*row):.2f} | `{row[0]}` |")
    memory = found("masked", "memory", "B=32, memory, default, gradient", "where by hand")
    sizes = [f"{memory[part] / 1e6:.1f} MB" for part in ("candidate_bytes", "peer_bytes")]
    assert f"allocates {sizes[0]} with `mask_scan`, and {sizes[1]} with a `where` in each step" in " ".join(
        readme.split()
    )


def test_a_suite_that_cannot_be_measured_here_leaves_its_results_alone(tmp_path):
    """`make bench` on a CPU would otherwise replace what was measured on a GPU by nothing."""
    output = printed("-m", "benchmarks", "gpu", "--results", str(tmp_path), cwd=ROOT)
    assert "gpu" in output
    assert not list(tmp_path.iterdir())
