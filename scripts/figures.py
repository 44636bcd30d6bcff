"""Writes what docs/benchmarks.md shows of benchmarks/results/*.json: `python scripts/figures.py`.

The pages have the generated tables `overview`, `slower`, `memory`, `families`, `gpu` and `before_run`, each between a
line `<!-- figures: NAME -->` and `<!-- /figures -->`; the rest is edited. The charts, which they include, are files in
docs/pictures/charts. All numbers of a suite are in benchmarks/results/<suite>.txt, which the site publishes too
(scripts/docs_extras.py). benchmarks/README.md describes the layout of the JSON. Tests compare all of this with what the
results give.
"""

import argparse
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PAGES = (PAGE, PAGE.with_name("benchmarks-by-loop.md"))
CHARTS_FOLDER = ROOT / "docs" / "pictures" / "charts"
PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
TICKS = [m * 10.0**e for e in range(-3, 4) for m in (1, 2, 5)]
FINE_TICKS = [n / 10 for n in range(1, 31)]
ROW, AXIS = 32, 20  # pixels: a comparison, and the numbers below all of them
LEGEND = 17

# Charts by name: the suite, the comparison, what it is compared with, and what the chart calls it.
Chosen = tuple[str, str, str, str]


def _masked(what: str, against: str, label: str) -> Chosen:
    return ("masked", what, against, label)


LONG_NAMES = {"LSTM, 3 layers, bfloat16": "bfloat16 LSTM"}  # and what they are called where a phone has to show them
CHARTS: Mapping[str, Sequence[Chosen]] = {
    "headlines": (
        ("run_time", "scan, gradient", "jax.lax.scan", "a scan without options, gradient / jax.lax.scan"),
        _masked("B=32, pareto, compact, gradient", "where by hand", "a batch with 90 % padding, gradient / a where"),
        ("layers", "compile 64 layers, gradient", "unrolled loop", "compiling 64 layers / a Python loop"),
        ("early_exit", "gradient, 5% of the steps", "equinox, checkpointed", "a loop that stops, gradient / equinox"),
        ("bodies", "HMM, full, gradient", "where by hand", "a masked hidden Markov model, gradient / a where"),
    ),
    "tracing": (
        ("trace_time", "100 operations, 100 leaves", "jax.lax.scan", "scan, 100 operations and leaves / jax.lax.scan"),
        ("trace_time", "1 operation, 1 leaf", "jax.lax.scan", "scan, one operation and leaf / jax.lax.scan"),
        ("trace_time", "mask_scan, 100 operations, 100 leaves", "where by hand", "mask_scan, 100 of each / a where"),
        ("trace_time", "mask_scan, 1 operation, 1 leaf", "where by hand", "mask_scan, one of each / a where"),
        ("import_time", "three verbs", "import equinox", "importing three verbs / importing equinox"),
        ("import_time", "three verbs", "import flax", "importing three verbs / importing flax"),
    ),
    "eager": (
        ("eager_call", "1 leaf", "jax.lax.scan", "one leaf / jax.lax.scan"),
        ("eager_call", "100 leaves", "jax.lax.scan", "100 leaves / jax.lax.scan"),
        ("eager_call", "gradient, 1 leaf", "jax.lax.scan", "the gradient, one leaf / jax.lax.scan"),
        ("eager_call", "key=", "fold_in by hand", "key= / fold_in by hand"),
        ("eager_call", "in_axes=1", "moveaxis by hand", "in_axes=1 / moveaxis by hand"),
        ("eager_call", "mask_scan, peer eager", "where by hand", "mask_scan / a where, also outside of jit"),
        ("eager_call", "mask_scan, peer jitted", "where by hand in one jit", "mask_scan / a where inside one jit"),
    ),
    "compiled": (
        ("run_time", "scan, forward", "jax.lax.scan", "scan, forward / jax.lax.scan"),
        ("run_time", "scan, gradient", "jax.lax.scan", "scan, gradient / jax.lax.scan"),
        ("run_time", "axes 1, gradient", "moveaxis by hand", "in_axes=1, out_axes=1, gradient / moveaxis"),
        ("run_time", "mask_scan, full, forward", "where by hand", "mask_scan, rows full, forward / a where"),
        ("run_time", "mask_scan, full, gradient", "where by hand", "mask_scan, rows full, gradient / a where"),
        (
            "run_time",
            "mask_scan, at most half, gradient",
            "where by hand",
            "mask_scan, rows half full, gradient / a where",
        ),
    ),
    "padding": (
        _masked("B=32, full, default, forward", "where by hand", "rows full, forward / a where"),
        _masked("B=32, full, default, gradient", "where by hand", "rows full, gradient / a where"),
        _masked("B=32, uniform, compact, gradient", "where by hand", "uniform lengths, compact, gradient / a where"),
        _masked("B=32, at most half, default, gradient", "where by hand", "at most half, gradient / a where"),
        _masked("B=32, at most half, compact, gradient", "where by hand", "at most half, compact, gradient / a where"),
        _masked("B=32, pareto, compact, forward", "where by hand", "90 % padding, compact, forward / a where"),
        _masked("B=32, pareto, compact, gradient", "where by hand", "90 % padding, compact, gradient / a where"),
        _masked("B=32, full, default, gradient", "flax.linen.RNN", "rows full, gradient / flax.linen.RNN"),
        _masked("B=32, pareto, default, gradient", "flax.linen.RNN", "90 % padding, gradient / flax.linen.RNN"),
        _masked("B=32, full, default, gradient", "torch, packed", "rows full, gradient / torch, packed"),
        _masked("B=32, pareto, compact, gradient", "torch, packed", "90 % padding, compact, gradient / torch, packed"),
        _masked("B=64, full, default, gradient", "where by hand", "larger model, rows full, gradient / a where"),
        _masked("B=64, pareto, compact, gradient", "where by hand", "larger model, 90 %, compact, gradient / a where"),
        _masked("B=64, pareto, default, forward", "torch, packed", "larger model, 90 %, forward / torch, packed"),
        _masked("B=32, pack, gradient", "padding, where by hand", "pack, gradient / padded batches, a where"),
    ),
    "layers": (
        ("layers", "compile 4 layers, gradient", "unrolled loop", "compiling the gradient of 4 layers / unrolled loop"),
        ("layers", "compile 16 layers, gradient", "unrolled loop", "compiling that of 16 layers / unrolled loop"),
        ("layers", "compile 64 layers, gradient", "unrolled loop", "compiling that of 64 layers / unrolled loop"),
        ("layers", "run, gradient", "lax.scan by hand", "gradient / lax.scan by hand"),
        ("layers", "run, gradient", "haiku's layer_stack", "gradient / haiku's layer_stack"),
        ("layers", "run, gradient", "flax.linen.scan", "gradient / flax.linen.scan"),
        ("layers", "run, gradient", "equinox", "gradient / equinox"),
        ("layers", "run, remat, gradient", "jax.checkpoint by hand", "gradient with remat / jax.checkpoint by hand"),
        ("layers", "run, forward", "unrolled loop", "forward / unrolled loop"),
        ("layers", "run, gradient", "unrolled loop", "gradient / unrolled loop"),
    ),
    "modules": (
        ("layer_modules", "equinox, value and gradient", "filter_vmap and lax.scan", "modules of equinox / lax.scan"),
        ("layer_modules", "linen, value and gradient", "nn.scan", "modules of flax.linen / nn.scan"),
        ("layer_modules", "nnx, value and gradient", "nnx.scan", "modules of flax.nnx / nnx.scan"),
        ("decode", "one stack, a step", "a carried cache by hand", "decoding, one stack / a carried cache by hand"),
        ("decode", "pattern, a step", "a carried cache by hand", "decoding, a pattern / a carried cache by hand"),
    ),
    "remat": (
        ("memory", "2 levels, gradient", "treescan, everything saved", "two levels / everything saved"),
        ("memory", "3 levels, gradient", "treescan, everything saved", "three levels / everything saved"),
        ("memory", "2 levels, gradient", "equinox, checkpointed", "two levels / equinox, checkpointed"),
        ("memory", "2 levels, gradient", "jax.checkpoint nested by hand", "two levels / jax.checkpoint nested by hand"),
        ("memory", "save=16, gradient", "stacked, then sliced", "save=16, gradient / stacked, then sliced"),
    ),
    "stopping": (
        (
            "early_exit",
            "forward, 5% of the steps",
            "jax.lax.while_loop",
            "5 % of the steps, forward / jax.lax.while_loop",
        ),
        ("early_exit", "forward, 100% of the steps", "jax.lax.while_loop", "all steps, forward / jax.lax.while_loop"),
        (
            "early_exit",
            "gradient, 5% of the steps",
            "equinox, bounded",
            "5 % of the steps, gradient / equinox, bounded",
        ),
        ("early_exit", "gradient, 5% of the steps", "equinox, checkpointed", "5 %, gradient / equinox, checkpointed"),
        ("early_exit", "gradient, 100% of the steps", "equinox, checkpointed", "all, gradient / equinox, checkpointed"),
        (
            "early_exit",
            "forward, 500 of 1,000,000 steps",
            "of 1,000 steps",
            "500 steps of at most 1,000,000 / of 1,000",
        ),
        (
            "early_exit",
            "rows that stop, forward",
            "a scan over the mean",
            "rows that stop, compact / a scan of the mean",
        ),
        ("early_exit", "rows that stop, forward", "mapped while_loop", "rows that stop, compact / a mapped while_loop"),
    ),
    "linear": tuple(
        ("linear", f"{size}, {kind}", "associative_scan", f"{size}, {kind} / associative_scan")
        for size in ("compile", "1 wide", "64 wide", "4,096 wide")
        for kind in ("forward", "gradient")
    ),
    "progress": (
        ("progress", "scan, 100 steps of 1 ms", "the same without progress", "100 steps of 1 ms / without a bar"),
        ("progress", "scan, 1000 steps of 1 ms", "the same without progress", "1,000 steps of 1 ms / without a bar"),
        (
            "progress",
            "scan, 1000 steps of 1 ms, 100 updates",
            "the same without progress",
            "100 updates / without a bar",
        ),
        (
            "progress",
            "scan, 20000 steps of 10 us",
            "the same without progress",
            "20,000 steps of 10 µs / without a bar",
        ),
        ("progress", "scan, 1000 steps of 1 ms", "jax-tqdm", "1,000 steps of 1 ms / jax-tqdm"),
        ("progress", "scan, 20000 steps of 10 us", "jax-tqdm", "20,000 steps of 10 µs / jax-tqdm"),
    ),
    "recipes": (
        (
            "recipes",
            "bidirectional GRU with CTC, padded, gradient",
            "by hand",
            "GRU with CTC, padded, gradient / by hand",
        ),
        (
            "recipes",
            "bidirectional GRU with CTC, packed, gradient",
            "by hand",
            "GRU with CTC, packed, gradient / by hand",
        ),
        ("recipes", "R2D2's replay, gradient", "by hand", "R2D2's replay, gradient / by hand"),
        ("recipes", "GAE, gradient", "by hand", "GAE, gradient / by hand"),
        ("recipes", "recurrent PPO, forward", "by hand", "recurrent PPO / by hand"),
        ("recipes", "Kalman filter and RTS smoother, gradient", "by hand", "Kalman smoother, gradient / by hand"),
        ("recipes", "HMM, forward and backward, gradient", "by hand", "hidden Markov model, gradient / by hand"),
        ("recipes", "greedy decoding, forward", "by hand", "greedy decoding / by hand"),
        ("recipes", "beam search, forward", "by hand", "beam search / by hand"),
        (
            "recipes",
            "a descent that stops, gradient",
            "a scan of cond",
            "a descent that stops, gradient / a scan of cond",
        ),
        ("recipes", "CTC over padded frames, gradient", "optax", "CTC over padded frames, gradient / optax"),
        ("recipes", "a GRU with resets, gradient", "flax.linen.scan", "a GRU with resets, gradient / flax.linen.scan"),
    ),
    "bodies": tuple(
        ("bodies", f"{body}, {what}", against, f"{LONG_NAMES.get(body, body)}, {label}")
        for what, against, label in (
            ("uniform, gradient", "where by hand", "masked, gradient / a where"),
            ("remat auto, gradient", "jax.lax.scan", "remat auto, gradient / jax.lax.scan"),
        )
        for body in (
            *("LSTM", "GRU", "small RNN", "mapped rows", "HMM", "Kalman filter", "delta rule"),
            "LSTM, 3 layers, bfloat16",
        )
    ),
}

# Where treescan takes longer: what, and with what it is compared.
SLOWER: Sequence[Chosen] = (
    ("trace_time", "mask_scan, 1 operation, 1 leaf", "where by hand", "tracing a `mask_scan` of one leaf"),
    ("trace_time", "mask_scan, 100 operations, 100 leaves", "where by hand", "tracing a `mask_scan` of 100 leaves"),
    ("trace_time", "1 operation, 1 leaf", "jax.lax.scan", "tracing a `scan` of one operation"),
    ("trace_time", "100 operations, 100 leaves", "jax.lax.scan", "tracing a `scan` of 100 operations"),
    ("eager_call", "mask_scan, peer jitted", "where by hand in one jit", "a `mask_scan` outside of `jit`"),
    ("bodies", "HMM, full, gradient", "where by hand", "the gradient of a masked hidden Markov model"),
    ("bodies", "mapped rows, full, gradient", "where by hand", "the gradient of masked, mapped rows"),
    ("families", "stack machine, one row, full, gradient", "where by hand", "the gradient of a tiny step, one row"),
    ("layers", "run, gradient", "unrolled loop", "the gradient of eight layers"),
    ("layers", "compile 4 layers, gradient", "unrolled loop", "compiling the gradient of four layers"),
    ("masked", "B=64, pareto, default, forward", "torch, packed", "a larger LSTM, 90 % padding, no `compact`"),
)

# What gradients allocate.
MEMORY: Sequence[Chosen] = (
    ("masked", "B=32, memory, default, gradient", "where by hand", "`mask_scan`, an LSTM"),
    ("memory", "memory, 2 levels, gradient", "treescan, everything saved", "two levels of `remat`"),
    ("memory", "memory, 3 levels, gradient", "treescan, everything saved", "three levels of `remat`"),
    ("memory", "memory, 2 levels, gradient", "equinox, checkpointed", "two levels of `remat`"),
    ("bodies", "LSTM, remat auto, memory", "jax.lax.scan", '`remat="auto"`, an LSTM'),
    ("layers", "memory, gradient", "lax.scan by hand", "`fold_layers`, eight layers"),
    ("layers", "memory, gradient", "unrolled loop", "`fold_layers`, eight layers"),
    ("early_exit", "memory, gradient", "equinox, bounded", "`while_scan`"),
    ("early_exit", "memory, gradient", "equinox, checkpointed", "`while_scan`"),
    ("linear", "64 wide, memory, gradient", "associative_scan", "a linear recurrence"),
)

# The chart of the families: what is compared, and what the chart and the table call it.
FAMILIES = "families"
KINDS: Mapping[str, str] = {
    "full, forward": "mask_scan, rows full, forward / a where",
    "uniform, forward": "mask_scan, uniform lengths, forward / a where",
    "full, gradient": "mask_scan, rows full, gradient / a where",
    "uniform, gradient": "mask_scan, uniform lengths, gradient / a where",
    "full against safe, gradient": "mask_scan, rows full, gradient / a safe where",
    "remat auto, gradient": "scan, remat auto, gradient / jax.lax.scan",
}
MEMORY_KINDS: Mapping[str, str] = {
    "full, memory": "memory of the gradient, mask_scan / a where",
    "remat auto, memory": "memory of the gradient, remat auto / jax.lax.scan",
}
BEFORE: Mapping[str, str] = {
    f"{what}, {kind}": f"{called}, {kind}"
    for what, called in (
        ("calls", "Python calls of tracing and lowering"),
        ("instructions", "instructions of the compiled program"),
        ("compile", "time to trace, lower and compile"),
    )
    for kind in ("forward", "gradient")
}
LANE, APART = 6, 1.0  # pixels from dot to dot upwards; and percent across
TALLEST = 96  # pixels of all lanes: where there are many, dots are closer

# The chart of the tiers: a curve for each kind of lengths.
TIERS, COMPILE = "tiers", "compile"
CURVES = ("uniform", "lognormal", "pareto")
CURVE, CURVE_GAP = 26, 34  # percent across: a curve, and from one to the next
CURVE_TOP, CURVE_HEIGHT = 24, 170  # pixels

Report = Mapping[str, Any]


def suites() -> dict[str, Report | None]:
    """The committed results of each suite, or None where a suite has none."""
    reports: dict[str, Report | None] = {
        file.stem: None for file in BENCHMARKS.glob("*.py") if not file.stem.startswith("_")
    }
    for file in RESULTS.glob("*.json"):
        reports[file.stem] = json.loads(file.read_text())
    return dict(sorted(reports.items()))


def page_of(text: str, reports: Mapping[str, Report | None]) -> str:
    """The page with its generated tables made anew.

    Args:
        text: the page as it is.
        reports: see `suites`.

    Returns:
        The whole page.

    Raises:
        KeyError: the page has a part that is no table.
    """
    tables = {
        "overview": overview,
        "slower": slower,
        "memory": memory,
        "families": families,
        "gpu": gpu,
        "before_run": before_run,
    }
    return PART.sub(lambda part: f"{part[1]}\n{tables[part[2]](reports)}\n{part[3]}", text)


def charts(reports: Mapping[str, Report | None]) -> dict[Path, str]:
    """The files of all charts; there is one of the families, and of the tiers, where these were measured."""
    made = {name: chart(name, _chosen(reports, rows)) for name, rows in CHARTS.items()}
    report = reports.get(FAMILIES)
    if report is not None:
        made[FAMILIES] = dots(FAMILIES, report)
    report = reports.get(TIERS)
    if report is not None:
        made[TIERS] = curves(TIERS, report)
    return {CHARTS_FOLDER / f"{name}.svg": content for name, content in made.items()}


def texts(reports: Mapping[str, Report | None]) -> dict[Path, str]:
    """The files with all numbers of a suite."""
    return {RESULTS / f"{name}.txt": text(name, report) for name, report in reports.items() if report is not None}


def _chosen(
    reports: Mapping[str, Report | None], rows: Sequence[Chosen], kind: str = "comparisons"
) -> list[dict[str, Any]]:
    """The measurements that are named, with their labels."""
    found = []
    for suite, name, against, label in rows:
        of = (reports[suite] or {}).get(kind, [])
        found += [{**each, "label": label} for each in of if (each["name"], each["against"]) == (name, against)]
    return found


def overview(reports: Mapping[str, Report | None]) -> str:
    """A table with a row for each suite: how many targets it met, and where and when."""
    rows: list[Sequence[str]] = [("suite", "targets met", "measured", "on", "jax")]
    for name, report in reports.items():
        if report is None:
            rows.append((f"`{name}`", "no results", "", "", ""))
            continue
        targets = [m["passed"] for m in _measurements(report) if m["target"] is not None]
        met = f"{sum(targets)} of {len(targets)}" if targets else "has none"
        link = f"[`{name}`](results/{name}.txt)"
        rows.append((link, met, report["date"][:10], _hardware(report), report["versions"]["jax"]))
    return _table(rows)


def slower(reports: Mapping[str, Report | None]) -> str:
    """A table of what takes longer than the other program."""
    rows: list[Sequence[str]] = [("what", "against", "ratio", "p10 to p90")]
    for c in _chosen(reports, SLOWER):
        rows.append((c["label"], c["against"], _number(c["ratio"]["median"]), _spread(c)))
    return _table(rows, numbers=2)


def memory(reports: Mapping[str, Report | None]) -> str:
    """A table of what gradients allocate."""
    rows: list[Sequence[str]] = [("gradient", "against", "ratio", "treescan", "the other")]
    for m in _chosen(reports, MEMORY, "memory"):
        rows.append((m["label"], m["against"], _number(m["ratio"]), *_sizes(m)))
    return _table(rows, numbers=2)


def families(reports: Mapping[str, Report | None]) -> str:
    """The chart of all families, and a table of how their ratios are distributed."""
    report = reports.get(FAMILIES)
    if report is None:
        return "This suite has not been measured yet.\n"
    rows: list[Sequence[str]] = [("what", "families", "median", "p90", "worst", "over 1.15", "missed")]
    called = {**KINDS, **MEMORY_KINDS}
    for d in report["distribution"]:
        if d["of"] != "all":
            numbers = (_number(d[quantile]) for quantile in ("median", "p90"))
            worst = f"{_number(d['worst'])} ({d['worst_name']})"
            rows.append(
                (called[d["kind"]], f"{d['count']} {d['of']}", *numbers, worst, str(d["over"]), str(d["missed"]))
            )
    return f'--8<-- "docs/pictures/charts/{FAMILIES}.svg"\n\n{_table(rows, numbers=2)}'


def before_run(reports: Mapping[str, Report | None]) -> str:
    """A table of what happens before a program runs."""
    report = reports.get("before_run")
    if report is None:
        return "This suite has not been measured yet.\n"
    rows: list[Sequence[str]] = [("what, against a `where`", "steps", "median", "p90", "worst")]
    for d in report["distribution"]:
        worst = f"{_number(d['worst'])} ({d['worst_name']})"
        rows.append((BEFORE[d["kind"]], str(d["count"]), _number(d["median"]), _number(d["p90"]), worst))
    return _table(rows, numbers=1)


def gpu(reports: Mapping[str, Report | None]) -> str:
    """A table of how the ratios of some families are distributed on a GPU."""
    report = reports.get("gpu")
    if report is None:
        return "This suite has not been measured yet.\n"
    rows: list[Sequence[str]] = [("what", "families", "median", "p90", "worst", "over 1.15")]
    called = {**KINDS, **MEMORY_KINDS}
    for d in report["distribution"]:
        numbers = (_number(d[quantile]) for quantile in ("median", "p90"))
        worst = f"{_number(d['worst'])} ({d['worst_name']})"
        rows.append((called[d["kind"]], str(d["count"]), *numbers, worst, str(d["over"])))
    for kind in ("forward", "gradient"):
        of = {
            c["name"]: c["ratio"]["median"] for c in report["comparisons"] if c["name"].endswith(f", a tenth, {kind}")
        }
        ratios, last = sorted(of.values()), max(of, key=of.__getitem__)
        p90 = statistics.quantiles(ratios, n=10, method="inclusive")[-1]
        worst = f"{_number(of[last])} ({last.split(', a tenth')[0]})"
        label = f"mask_scan, nine tenths padding, {kind} / a where"
        over = str(sum(ratio > 1.15 for ratio in ratios))
        rows.append((label, str(len(ratios)), _number(statistics.median(ratios)), _number(p90), worst, over))
    return _table(rows, numbers=2)


def text(name: str, report: Report) -> str:
    """All numbers of a suite: where and with what they were measured, and a table for each peer."""
    parts = [f"benchmarks/{name}.py", _circumstances(report)]
    for _, comparisons in _by_peer(report["comparisons"]):
        parts.append(times(comparisons))
    if report.get("memory"):
        rows: list[Sequence[str]] = [("memory", "against", "ratio", "target", "treescan", "the other")]
        for m in report["memory"]:
            label = m["name"].removeprefix("memory, ")
            rows.append((label, m["against"], _number(m["ratio"]), _target(m), *_sizes(m)))
        parts.append(_aligned(rows))
    if report.get("distribution"):
        parts.append(_aligned(list(_distributions(report))))
    return "\n\n".join(parts) + "\n"


def _distributions(report: Report) -> Iterator[Sequence[str]]:
    """What many comparisons say together."""
    yield ("distribution", "of", "count", "median", "p90", "worst", "over", "missed", "the worst")
    for d in report["distribution"]:
        ratios = (_number(d[part]) for part in ("median", "p90", "worst"))
        yield (d["kind"], d["of"], str(d["count"]), *ratios, str(d["over"]), str(d["missed"]), d["worst_name"])


def times(comparisons: Sequence[Report]) -> str:
    """The table of what was timed."""
    rows: list[Sequence[str]] = [
        ("comparison", "against", "ratio", "p10 to p90", "target", "treescan, per call", "the other, per call")
    ]
    for c in comparisons:
        seconds = (_seconds(c[who]["median"]) for who in ("candidate_seconds", "peer_seconds"))
        rows.append((c["name"], c["against"], _number(c["ratio"]["median"]), _spread(c), _target(c), *seconds))
    return _aligned(rows)


def _by_peer(comparisons: Sequence[Report]) -> list[tuple[str, list[Report]]]:
    """The comparisons by what they are compared with; controls, which are against themselves, come last."""
    found: dict[str, list[Report]] = {}
    for comparison in comparisons:
        found.setdefault(comparison["against"], []).append(comparison)
    return sorted(found.items(), key=lambda group: group[0] == "itself")


def _spread(comparison: Report) -> str:
    return f"{_number(comparison['ratio']['p10'])} to {_number(comparison['ratio']['p90'])}"


def _sizes(measurement: Report) -> Iterator[str]:
    counts = (measurement[who] for who in ("candidate_bytes", "peer_bytes"))
    is_memory = measurement.get("unit", "MB") == "MB"
    return (f"{count / 1e6:.1f} MB" if is_memory else f"{count:,}" for count in counts)


def chart(name: str, comparisons: Sequence[Report]) -> str:
    """An SVG of the ratios on a logarithmic axis.

    Places across are percentages, and sizes of text are not: so the chart is as wide as the page, also on a phone. It
    takes its colours from the page, in docs/stylesheets/site.css.
    """
    ratios = [c["ratio"] for c in comparisons]
    known = [1.0, *(r[q] for r in ratios for q in ("p10", "p90")), *(c["target"] for c in comparisons if c["target"])]
    low, high = min(known), max(known)
    height = ROW * len(comparisons) + AXIS
    legend = ["dot: median; thick: middle half; thin: middle 80 %"]
    if any(c["target"] for c in comparisons):
        legend.append("short upright line: target")
    whole = height + LEGEND * len(legend)
    lines = [
        f'<figure class="ratios"><svg role="img" aria-labelledby="ratios-{name}" width="100%" height="{whole}">',
        f'<title id="ratios-{name}">Ratios and their spread.</title>',
    ]
    for tick in _ticks(low, high):
        lines += _tick(tick, _x(tick, low, high), height - AXIS)
    for row, comparison in enumerate(comparisons):
        lines += _row(comparison, row * ROW, low, high)
    lines += [f'<text x="0" y="{height + LEGEND * (n + 1) - 4}">{says}</text>' for n, says in enumerate(legend)]
    return "\n".join([*lines, "</svg></figure>"]) + "\n"


def _tick(tick: float, x: str, bottom: int, top: int = 0) -> Iterator[str]:
    """A line across the chart, and its number."""
    yield f'<line class="{"one" if tick == 1 else "tick"}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
    yield f'<text class="number" x="{x}" y="{bottom + AXIS - 5}">{tick:g}</text>'


def _row(comparison: Report, top: int, low: float, high: float) -> Iterator[str]:
    """A comparison's name, its spread, its median and its target."""
    x = {quantile: _x(value, low, high) for quantile, value in comparison["ratio"].items()}
    y = top + 23
    label = comparison.get("label", f"{comparison['name']} / {comparison['against']}")
    yield f'<text x="0" y="{top + 13}">{escape(label)}: {_number(comparison["ratio"]["median"])}</text>'
    yield f'<line class="tenths" x1="{x["p10"]}" x2="{x["p90"]}" y1="{y}" y2="{y}"/>'
    yield f'<line class="half" x1="{x["p25"]}" x2="{x["p75"]}" y1="{y}" y2="{y}"/>'
    if comparison["target"] is not None:
        target = _x(comparison["target"], low, high)
        yield f'<line class="target" x1="{target}" x2="{target}" y1="{y - 6}" y2="{y + 6}"/>'
    yield f'<circle class="median" cx="{x["median"]}" cy="{y}" r="3.5"/>'


def dots(name: str, report: Report) -> str:
    """An SVG of the median ratios of many programs: a dot each, for each kind of comparison, on one logarithmic axis.

    Dots that would overlap stand above one another. The fitted ones are rings.
    """
    kinds = {kind: _of_kind(report, kind) for kind in KINDS}
    ratios = [c["ratio"]["median"] for rows in kinds.values() for c in rows]
    target = max(c["target"] for rows in kinds.values() for c in rows)
    low, high = min([1.0, *ratios]), max([target, *ratios])
    lines: list[str] = []
    top = 0
    for kind, rows in kinds.items():
        made, top = _dots_row(KINDS[kind], rows, top, low, high)
        lines += made
    head = [
        f'<figure class="ratios"><svg role="img" aria-labelledby="ratios-{name}" width="100%" height="{top + AXIS}">',
        f'<title id="ratios-{name}">Ratios of all {name}.</title>',
    ]
    for tick in _ticks(low, high):
        head += _tick(tick, _x(tick, low, high), top)
    limit = _x(target, low, high)
    head.append(f'<line class="limit" x1="{limit}" x2="{limit}" y1="0" y2="{top}"/>')
    return "\n".join([*head, *lines, "</svg></figure>"]) + "\n"


def _dots_row(label: str, rows: Sequence[Report], top: int, low: float, high: float) -> tuple[list[str], int]:
    """One kind of comparison: its name, its dots and their median; and where the next one begins."""
    lanes: list[float] = []  # where across the last dot of each lane is
    placed: list[tuple[str, int, Report]] = []
    for comparison in sorted(rows, key=lambda c: c["ratio"]["median"]):
        x = _x(comparison["ratio"]["median"], low, high)
        across = float(x.rstrip("%"))
        lane = next((n for n, last in enumerate(lanes) if across - last >= APART), len(lanes))
        lanes[lane : lane + 1] = [across]
        placed.append((x, lane, comparison))
    lane_height = min(LANE, TALLEST / len(lanes))
    bottom = top + 26 + round(lane_height * len(lanes))
    median = statistics.median(c["ratio"]["median"] for c in rows)
    x = _x(median, low, high)
    made = [
        f'<text x="0" y="{top + 13}">{escape(label)}: {_number(median)}</text>',
        f'<line class="target" x1="{x}" x2="{x}" y1="{top + 18}" y2="{bottom - 3}"/>',
    ]
    for x_dot, lane, comparison in placed:
        kind = "fitted" if comparison["details"]["fitted"] else "family"
        ratio = _number(comparison["ratio"]["median"])
        title = escape(f"{comparison['name'].rsplit(', ', 2)[0]}: {ratio}")
        y = bottom - 8 - lane_height * lane
        made.append(f'<circle class="{kind}" cx="{x_dot}" cy="{y:.4g}" r="2.5"><title>{title}</title></circle>')
    return made, bottom


class Sides(NamedTuple):
    """Where the axes of a curve begin and end: compile times across, run times up, and where it begins across."""

    left: float
    low: float
    high: float
    least: float
    most: float

    def x(self, value: float) -> str:
        """Where a compile time is."""
        return f"{self.left + CURVE * math.log(value / self.low) / math.log(self.high / self.low):.1f}%"

    def y(self, value: float) -> str:
        """Where a run time is."""
        part = math.log(value / self.least) / math.log(self.most / self.least)
        return f"{CURVE_TOP + CURVE_HEIGHT * (1 - part):.1f}"


def curves(name: str, report: Report) -> str:
    """An SVG of compile time against run time, on logarithmic axes: for each kind of lengths, a point per set of tiers.

    A point is the median over programs, and its bars reach from the smallest to the largest. A set whose name says more
    than a number of tiers is a ring beside the curve. Dotted lines are the targets.
    """
    ratios, targets = _ratios_of_sets(report)
    across, up = (
        [v for key, values in ratios.items() if (key[0] == COMPILE) == c for v in values] for c in (True, False)
    )
    height = CURVE_TOP + CURVE_HEIGHT + 2 * AXIS
    lines = [
        f'<figure class="ratios"><svg role="img" aria-labelledby="ratios-{name}" width="100%" height="{height}">',
        f'<title id="ratios-{name}">Compile time and run time by the number of tiers.</title>',
    ]
    for n, of_rows in enumerate(CURVES):
        sides = Sides(n * CURVE_GAP + 5, min([1.0, *across]), max(across), min([1.0, *up]), max(up))
        lines += [f'<text x="{sides.left}%" y="13">{of_rows}</text>', *_axes(sides, *targets)]
        lines += _curve(of_rows, ratios, sides)
    lines.append(f'<text x="0" y="{height - 5}">x axis: compile time / a where; y axis: run time / seven tiers</text>')
    return "\n".join([*lines, "</svg></figure>"]) + "\n"


def _ratios_of_sets(report: Report) -> tuple[dict[tuple[str, str], list[float]], list[float]]:
    """The ratios of all programs, by what was measured and the set of tiers, and the two targets."""
    ratios: dict[tuple[str, str], list[float]] = {}
    targets = [1.0, 1.0]
    for c in report["comparisons"]:
        if c["against"] != "itself":
            _, tiers, what = c["name"].rsplit(", ", 2)
            ratios.setdefault((what, tiers), []).append(c["ratio"]["median"])
            if c["target"]:
                targets[what != COMPILE] = c["target"]
    most = max((tiers for _, tiers in ratios), key=lambda tiers: int(tiers.split()[0]))
    return ratios | {(of_rows, most): [1.0] for of_rows in CURVES}, targets


def _axes(sides: Sides, compiling: float, running: float) -> Iterator[str]:
    """The lines of a curve's axes with their numbers, and the targets."""
    bottom = CURVE_TOP + CURVE_HEIGHT
    ends = sides.x(sides.low), sides.x(sides.high)
    for tick in _ticks(sides.low, sides.high):
        yield from _tick(tick, sides.x(tick), bottom, CURVE_TOP)
    for tick in _ticks(sides.least, sides.most):
        yield f'<line class="tick" x1="{ends[0]}" x2="{ends[1]}" y1="{sides.y(tick)}" y2="{sides.y(tick)}"/>'
        yield f'<text class="number" x="{sides.left - 2}%" y="{sides.y(tick)}" dy="3">{tick:g}</text>'
    yield f'<line class="limit" x1="{sides.x(compiling)}" x2="{sides.x(compiling)}" y1="{CURVE_TOP}" y2="{bottom}"/>'
    yield f'<line class="limit" x1="{ends[0]}" x2="{ends[1]}" y1="{sides.y(running)}" y2="{sides.y(running)}"/>'


def _curve(of_rows: str, ratios: Mapping[tuple[str, str], Sequence[float]], sides: Sides) -> Iterator[str]:
    """The points of one kind of lengths, their bars, and the line between them."""
    sets = {tiers: (ratios[COMPILE, tiers], ratios[of_rows, tiers]) for what, tiers in ratios if what == COMPILE}
    medians = {tiers: tuple(map(statistics.median, both)) for tiers, both in sets.items()}
    at = {tiers: (sides.x(compiling), sides.y(running)) for tiers, (compiling, running) in medians.items()}
    for tiers, (compiling, running) in sets.items():
        x, y = at[tiers]
        yield f'<line x1="{sides.x(min(compiling))}" x2="{sides.x(max(compiling))}" y1="{y}" y2="{y}"/>'
        yield f'<line x1="{x}" x2="{x}" y1="{sides.y(min(running))}" y2="{sides.y(max(running))}"/>'
    for (x1, y1), (x2, y2) in itertools.pairwise(at[tiers] for tiers in sets if len(tiers.split()) == 2):
        yield f'<line class="curve" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}"/>'
    for tiers, (x, y) in sorted(at.items(), key=lambda each: len(each[0].split()), reverse=True):  # rings lie below
        title = f"<title>{tiers}: {', '.join(map(_number, medians[tiers]))}</title>"
        simple = len(tiers.split()) == 2
        kind, radius = ("median", 3.5) if simple else ("fitted", 6)
        yield f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}">{title}</circle>'
        if simple:
            count = int(tiers.split()[0])  # the label of 4 is below, because 3 is near
            yield f'<text class="number" x="{x}" y="{y}" dx="8" dy="{14 if count == 4 else -6}">{count}</text>'


def _of_kind(report: Report, kind: str) -> list[Report]:
    """The comparisons of families whose names end in a kind."""
    return [c for c in report["comparisons"] if c["name"].endswith(f", {kind}") and c["target"] is not None]


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
    return f"Measured on {report['date'][:10]}: {_hardware(report)}, {load};\n{versions}."


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
    slack = measurement.get("slack_seconds")
    target = _number(measurement["target"]) + ("" if slack is None else f" or {_seconds(slack)}")
    return f"{target}, {'met' if measurement['passed'] else 'missed'}"


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
    """A Markdown table; from column `numbers` on, columns are aligned to the right."""
    columns = range(len(rows[0]))
    rule = ["---:" if numbers is not None and column >= numbers else "---" for column in columns]
    return "".join(f"| {' | '.join(row)} |\n" for row in (rows[0], rule, *rows[1:]))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal; its third column and those that follow are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if n < 2 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """Writes the page, its charts, and the files of all numbers."""
    reports = suites()
    for page in PAGES:
        page.write_text(page_of(page.read_text(), reports))
    CHARTS_FOLDER.mkdir(exist_ok=True)
    for file, content in (charts(reports) | texts(reports)).items():
        file.write_text(content)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
