"""docs/benchmarks.md and its files show what the committed results say: scripts/figures.py writes them."""

import json
import re
from typing import Any

import pytest

from scripts import ROOT, script

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


def test_files_are_what_the_script_writes() -> None:
    reports = figures.suites()
    written = figures.charts(reports) | figures.texts(reports)
    for file, content in written.items():
        assert file.read_text() == content, f"run `python scripts/figures.py`: {file.name}"
    assert set(figures.CHARTS_FOLDER.iterdir()) | set(figures.RESULTS.glob("*.txt")) == written.keys()


def test_every_suite_and_every_chart_is_on_the_page() -> None:
    page = figures.PAGE.read_text()
    assert all(f"`{suite}`" in page for suite in figures.suites())
    shown = re.findall(r'^--8<-- "docs/pictures/charts/(\w+)\.svg"$', page, re.MULTILINE)
    assert sorted(shown) == sorted(file.stem for file in figures.charts(figures.suites()))


def test_all_that_is_chosen_was_measured() -> None:
    reports = figures.suites()
    chosen = [*figures.CHARTS.items(), ("slower", figures.SLOWER)]
    assert all(len(figures._chosen(reports, rows)) == len(rows) for _, rows in chosen)
    assert len(figures._chosen(reports, figures.MEMORY, "memory")) == len(figures.MEMORY)
    assert all(slower["ratio"]["median"] > 1 for slower in figures._chosen(reports, figures.SLOWER))


def test_a_file_has_the_numbers_and_where_they_come_from() -> None:
    made = figures.text("some", REPORT)
    assert "Measured on 2026-01-02: A CPU, 4 cores, A GPU, load average 0.2 before it began;\n" in made
    assert "python 3.11.7, jax 0.10.2." in made
    row = r"a < b +by hand +1\.00 +0\.50 to 2\.00 +0\.90, missed +1 s +20 µs"
    assert re.search(row, made)
    assert re.search(r"gradient +by hand +0\.012 +12\.3 MB +1000\.0 MB", made)


def test_measurements_are_grouped_by_peer() -> None:
    """In the order in which peers come; what is against itself comes last."""
    comparisons = [{**COMPARISON, "against": peer} for peer in ("itself", "b", "a", "b")]
    made = figures.text("some", {**REPORT, "comparisons": comparisons})
    assert re.findall(r"^a < b +(\w+)", made, re.MULTILINE) == ["b", "b", "a", "itself"]


def test_the_page_begins_with_five_results() -> None:
    assert (figures.CHARTS_FOLDER / "headlines.svg").read_text().count('class="median"') == 5


def test_the_axis_is_logarithmic() -> None:
    made = figures.chart("some", [COMPARISON])
    assert 'class="tenths" x1="4.0%" x2="96.0%"' in made
    assert '<line class="one" x1="50.0%" x2="50.0%"' in made
    assert 'class="median" cx="50.0%"' in made
    assert "a &lt; b / by hand: 1.00" in made
    assert re.findall(r'class="number" .*>(\S+)</text>', made) == ["0.5", "1", "2"]


def family(name: str, ratio: float, *, fitted: bool) -> dict[str, Any]:
    """What the suite of families writes for one comparison."""
    return {
        **COMPARISON,
        "name": name,
        "target": 1.15,
        "ratio": {**SPREAD, "median": ratio},
        "details": {"fitted": float(fitted)},
        "slack_seconds": 3e-5,
    }


DISTRIBUTION = {"count": 2, "median": 1.0, "p90": 1.2, "worst": 1.25, "worst_name": "<b>", "over": 1, "missed": 0}
FAMILIES = {
    **REPORT,
    "comparisons": [
        family(f"{name}, {kind}", ratio, fitted=ratio < 1)
        for kind in figures.KINDS
        for name, ratio in (("a", 0.8), ("<b>", 1.25))
    ],
    "distribution": [
        {"kind": kind, "of": of, **DISTRIBUTION}
        for kind in (*figures.KINDS, *figures.MEMORY_KINDS)
        for of in ("all", "fitted", "held back")
    ],
}


def test_families_are_dots_around_their_median() -> None:
    made = figures.charts(figures.suites() | {"families": FAMILIES})
    chart = made[figures.CHARTS_FOLDER / "families.svg"]
    assert chart.count('class="fitted" cx="4.0%"') == chart.count('class="family" cx="96.0%"') == len(figures.KINDS)
    assert chart.count("<title>&lt;b&gt;: 1.25</title>") == len(figures.KINDS)
    assert "scan, remat auto, gradient / jax.lax.scan: 1.02" in chart  # the median of all
    assert '<line class="limit" x1="78.8%" x2="78.8%"' in chart


def test_dots_that_would_overlap_stand_above_one_another() -> None:
    ratios = [1.0, 1.0, 1.0, 1.5]
    kind = next(iter(figures.KINDS))
    rows = [family(f"{n}, {kind}", ratio, fitted=False) for n, ratio in enumerate(ratios)]
    made, _ = figures._dots_row("label", rows, 0, 1.0, 2.0)
    places = re.findall(r'class="family" cx="(\S+)" cy="(\d+)"', "\n".join(made))
    assert len(set(places)) == len(ratios)
    assert sorted({y for _, y in places}) == ["24", "30", "36"]


def of_tiers(tiers: str, what: str, ratio: float, target: float | None = None) -> dict[str, Any]:
    """What the suite of tiers writes for one comparison."""
    against = "where by hand" if what == "compile" else "seven tiers"
    return {
        **COMPARISON,
        "name": f"a, b, forward, {tiers}, {what}",
        "against": against,
        "target": target,
        "ratio": {**SPREAD, "median": ratio},
    }


def test_tiers_are_a_curve_for_each_kind_of_lengths() -> None:
    """Compile times reach from 1 to 10 and run times from 1 to 4: the middle of an axis is the root of its end."""
    compiled = [of_tiers(tiers, "compile", ratio, 10**0.5) for tiers, ratio in (("1 tier", 1.0), ("7 tiers", 10.0))]
    compiled.append(of_tiers("3 tiers with a quarter", "compile", 10**0.5))
    run = [
        of_tiers(tiers, what, ratio, target)
        for what in figures.CURVES
        for tiers, ratio, target in (("1 tier", 4.0, 2.0), ("3 tiers with a quarter", 2.0, None))
    ]
    control = {**of_tiers("1 tier", "uniform", 9.0), "name": "control, uniform", "against": "itself"}
    made = figures.curves("tiers", {**REPORT, "comparisons": [control, *compiled, *run]})
    tops = range(5, 101, figures.CURVE_GAP)
    middle = figures.CURVE_TOP + figures.CURVE_HEIGHT / 2
    for left in tops:
        ends = f'x1="{left}.0%" x2="{left + figures.CURVE}.0%"'
        assert (
            f'class="curve" {ends} y1="{figures.CURVE_TOP}.0" y2="{figures.CURVE_TOP + figures.CURVE_HEIGHT}.0"' in made
        )
        assert f'class="fitted" cx="{left + figures.CURVE / 2:.1f}%" cy="{middle:.1f}"' in made
        assert f'class="limit" {ends} y1="{middle:.1f}"' in made
    assert made.count("<title>3 tiers with a quarter: 3.16, 2.00</title>") == len(tops) == len(figures.CURVES)


def test_families_without_results_have_no_chart() -> None:
    assert "not been measured" in figures.families({})
    assert figures.CHARTS_FOLDER / "families.svg" not in figures.charts(figures.suites() | {"families": None})


def test_the_table_of_families_has_both_halves() -> None:
    made = figures.families({"families": FAMILIES})
    assert made.startswith('--8<-- "docs/pictures/charts/families.svg"\n\n| what |')
    assert made.count(" | 2 fitted | 1.00 | 1.20 | 1.25 (<b>) | 1 | 0 |") == 8
    assert made.count(" | 2 held back | ") == 8


def test_a_file_has_the_slack_and_the_distribution() -> None:
    made = figures.text("families", FAMILIES)
    assert "1.15 or 30 µs, missed" in made
    assert re.search(r"full, forward +held back +2 +1\.00 +1\.20 +1\.25 +1 +0 +<b>\n", made)


def test_the_overview_has_each_suite() -> None:
    made = figures.overview({"new": REPORT, "idle": None})
    assert "| [`new`](results/new.txt) | 0 of 1 | 2026-01-02 | A CPU, 4 cores, A GPU | 0.10.2 |" in made
    assert "| `idle` | no results |" in made


def test_a_part_that_is_no_table_is_refused() -> None:
    with pytest.raises(KeyError, match="nothing"):
        figures.page_of("<!-- figures: nothing -->\n<!-- /figures -->", {})


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


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    """Memory and time of the gradient of a masked LSTM, and the time to compile 64 layers."""

    def found(suite: str, kind: str, name: str, against: str) -> dict[str, Any]:
        return next(each for each in results(suite)[kind] if (each["name"], each["against"]) == (name, against))

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
