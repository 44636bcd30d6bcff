"""Writes the tables and charts of docs/benchmarks.md from benchmarks/results/*.json: `python scripts/figures.py`.

The script writes the text between `<!-- figures: NAME -->` and `<!-- /figures -->`; the rest of the page is edited.
NAME is a suite; `headlines`, five results; `overview`, the table of all suites; or `others`, a section for each suite
that the page does not name.
benchmarks/README.md describes the layout of the JSON. A test compares the page with what this makes of the results.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
TICKS = [m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5)]
FINE_TICKS = [n / 10 for n in range(1, 31)]
ROW, AXIS = 32, 20  # pixels: a comparison, and the numbers below all of them
NONE = "There are no results of this suite in the repository: run `python -m benchmarks {}`.\n"

# What the page begins with: suite, comparison, what it is compared with, and what the chart calls it.
HEADLINES = (
    ("run_time", "scan, gradient", "jax.lax.scan", "a scan without options, gradient / jax.lax.scan"),
    ("masked", "B=32, pareto, compact, gradient", "where by hand", "a batch with 90 % padding, gradient / a where"),
    ("layers", "compile 64 layers, gradient", "unrolled loop", "compiling 64 layers / a Python loop"),
    ("early_exit", "gradient, 5% of the steps", "equinox, checkpointed", "a loop that stops, gradient / equinox"),
    ("bodies", "HMM, full, gradient", "where by hand", "a masked hidden Markov model, gradient / a where"),
)

Report = Mapping[str, Any]


def suites() -> dict[str, Report | None]:
    """The committed results of each suite, or None where a suite has none."""
    reports: dict[str, Report | None] = {
        file.stem: None for file in BENCHMARKS.glob("*.py") if not file.stem.startswith("_")
    }
    for file in (BENCHMARKS / "results").glob("*.json"):
        reports[file.stem] = json.loads(file.read_text())
    return dict(sorted(reports.items()))


def page_of(text: str, reports: Mapping[str, Report | None]) -> str:
    """The page with its generated parts made anew.

    Args:
        text: the page as it is.
        reports: see `suites`.

    Returns:
        The whole page.

    Raises:
        KeyError: the page has a part that is no suite.
    """
    named = {part[2] for part in PART.finditer(text)}
    others = {name: report for name, report in reports.items() if name not in named}

    def made(part: re.Match[str]) -> str:
        if part[2] == "overview":
            body = overview(reports)
        elif part[2] == "headlines":
            body = headlines(reports)
        elif part[2] == "others":
            body = "\n".join(f"## {name}\n\n{section(name, report)}" for name, report in others.items())
        else:
            body = section(part[2], reports[part[2]])
        return f"{part[1]}\n{body}\n{part[3]}" if body else f"{part[1]}{part[3]}"

    return PART.sub(made, text)


def overview(reports: Mapping[str, Report | None]) -> str:
    """A table with a row for each suite: how many targets it met, and where and when."""
    rows: list[Sequence[str]] = [("suite", "targets met", "measured", "on", "jax")]
    for name, report in reports.items():
        if report is None:
            rows.append((f"`{name}`", "no results", "", "", ""))
            continue
        targets = [m["passed"] for m in _measurements(report) if m["target"] is not None]
        met = f"{sum(targets)} of {len(targets)}" if targets else "has none"
        rows.append((f"`{name}`", met, report["date"][:10], _hardware(report), report["versions"]["jax"]))
    return _table(rows)


def headlines(reports: Mapping[str, Report | None]) -> str:
    """A chart of five results, each from the suite that it names."""
    found = []
    for suite, name, against, label in HEADLINES:
        report = reports[suite]
        comparisons = report["comparisons"] if report else []
        found += [{**c, "label": label} for c in comparisons if (c["name"], c["against"]) == (name, against)]
    return chart("headlines", found)


def section(name: str, report: Report | None) -> str:
    """What was measured in a suite, folded: where and with what, then a chart and a table for each peer."""
    if report is None:
        return NONE.format(name)
    count = len(_measurements(report))
    summary = f"{count} measurement{'s'[: count != 1]} of <code>{name}</code>"
    parts = [
        f'<details markdown="1" data-search-exclude><summary>{summary}</summary>\n',
        _circumstances(report),
    ]
    for number, (peer, comparisons) in enumerate(_by_peer(report["comparisons"])):
        parts += [f"**Against {peer}**\n", chart(f"{name}-{number}", comparisons), times(comparisons)]
    if report.get("memory"):
        parts.append(memory(report["memory"]))
    return "\n".join([*parts, "</details>\n"])


def _by_peer(comparisons: Sequence[Report]) -> list[tuple[str, list[Report]]]:
    """The comparisons by what they are compared with; controls, which are against themselves, come last."""
    found: dict[str, list[Report]] = {}
    for comparison in comparisons:
        found.setdefault(comparison["against"], []).append(comparison)
    return sorted(found.items(), key=lambda group: group[0] == "itself")


def times(comparisons: Sequence[Report]) -> str:
    """The table of what was timed."""
    rows: list[Sequence[str]] = [
        ("comparison", "against", "ratio", "p10 to p90", "target", "treescan, per call", "the other, per call")
    ]
    for c in comparisons:
        spread = f"{_number(c['ratio']['p10'])} to {_number(c['ratio']['p90'])}"
        seconds = (_seconds(c[who]["median"]) for who in ("candidate_seconds", "peer_seconds"))
        rows.append((c["name"], c["against"], _number(c["ratio"]["median"]), spread, _target(c), *seconds))
    return _table(rows, numbers=2)


def memory(measurements: Sequence[Report]) -> str:
    """The table of what was read of the compiled programs' memory."""
    rows: list[Sequence[str]] = [("memory", "against", "ratio", "target", "treescan", "the other")]
    for m in measurements:
        name = m["name"].removeprefix("memory, ")
        sizes = (f"{m[who] / 1e6:.1f} MB" for who in ("candidate_bytes", "peer_bytes"))
        rows.append((name, m["against"], _number(m["ratio"]), _target(m), *sizes))
    return _table(rows, numbers=2)


def chart(name: str, comparisons: Sequence[Report]) -> str:
    """An SVG of the ratios on a logarithmic axis.

    Places across are percentages, and sizes of text are not: so the chart is as wide as the page, also on a phone. It
    takes its colours from the page, in docs/stylesheets/site.css.
    """
    ratios = [c["ratio"] for c in comparisons]
    known = [1.0, *(r[q] for r in ratios for q in ("p10", "p90")), *(c["target"] for c in comparisons if c["target"])]
    low, high = min(known), max(known)
    height = ROW * len(comparisons) + AXIS
    lines = [
        f'<figure class="ratios"><svg role="img" aria-labelledby="ratios-{name}" width="100%" height="{height}">',
        f'<title id="ratios-{name}">Ratios and their spread: the numbers are in the tables.</title>',
    ]
    for tick in _ticks(low, high):
        x = _x(tick, low, high)
        lines.append(f'<line class="{"one" if tick == 1 else "tick"}" x1="{x}" x2="{x}" y1="0" y2="{height - AXIS}"/>')
        lines.append(f'<text class="number" x="{x}" y="{height - 5}">{tick:g}</text>')
    for row, comparison in enumerate(comparisons):
        lines += _row(comparison, row * ROW, low, high)
    return "\n".join([*lines, "</svg></figure>"]) + "\n"


def _row(comparison: Report, top: int, low: float, high: float) -> Iterator[str]:
    """A comparison's name, its spread, its median and its target."""
    x = {quantile: _x(value, low, high) for quantile, value in comparison["ratio"].items()}
    y = top + 23
    label = comparison.get("label", f"{comparison['name']} / {comparison['against']}")
    yield f'<text x="0" y="{top + 13}">{escape(label)}</text>'
    yield f'<line class="tenths" x1="{x["p10"]}" x2="{x["p90"]}" y1="{y}" y2="{y}"/>'
    yield f'<line class="half" x1="{x["p25"]}" x2="{x["p75"]}" y1="{y}" y2="{y}"/>'
    if comparison["target"] is not None:
        target = _x(comparison["target"], low, high)
        yield f'<line class="target" x1="{target}" x2="{target}" y1="{y - 6}" y2="{y + 6}"/>'
    yield f'<circle class="median" cx="{x["median"]}" cy="{y}" r="3.5"/>'


def _x(value: float, low: float, high: float) -> str:
    """Where a ratio is across the chart, with room left for half a number at both ends."""
    return f"{4 + 92 * math.log(value / low) / math.log(high / low):.1f}%"


def _ticks(low: float, high: float) -> list[float]:
    """The numbers below a chart: few of them, and 1 is always one."""
    return [tick for tick in (FINE_TICKS if high / low < 2 else TICKS) if low <= tick <= high]


def _circumstances(report: Report) -> str:
    """Where, when and with what."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    load = f"load average {report['hardware']['load_average']:.1f} before it began"
    return f"Measured on {report['date'][:10]}: {_hardware(report)}, {load}; {versions}.\n"


def _hardware(report: Report) -> str:
    hardware = report["hardware"]
    backend, _, kind = hardware["device"].partition(": ")
    device = "" if backend == kind else f", {kind}"
    return f"{hardware['cpu'].replace('(R)', '')}, {hardware['cores']} cores{device}"


def _measurements(report: Report) -> list[Report]:
    return [*report["comparisons"], *report.get("memory", [])]


def _target(measurement: Report) -> str:
    if measurement["target"] is None:
        return ""
    return f"{_number(measurement['target'])}, {'met' if measurement['passed'] else '**missed**'}"


def _number(ratio: float) -> str:
    """Two digits behind the point, or, of small ratios, the first two that count."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _seconds(seconds: float) -> str:
    """Three digits, in the unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            count = seconds / size
            return f"{count:.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
    raise AssertionError


def _table(rows: Sequence[Sequence[str]], numbers: int | None = None) -> str:
    """A Markdown table; from column `numbers` on, columns stand to the right."""
    columns = range(len(rows[0]))
    rule = ["---:" if numbers is not None and column >= numbers else "---" for column in columns]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rule, *rows[1:]))


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page_of(PAGE.read_text(), suites()))


if __name__ == "__main__":
    main()
