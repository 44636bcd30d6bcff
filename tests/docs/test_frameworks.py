"""What the page for frameworks says is what the project, its results and its core are."""

import re
import tomllib
from pathlib import Path

import pytest
from modules import CALLS

from scripts import ROOT, printed, script

PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "frameworks.md").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USE = f"""
import sys
import jax
import jax.numpy as jnp
{CALLS.replace("from treescan", "from mylib.loops")}
if "options" in sys.argv:
    jax.eval_shape(jax.grad(lambda h: scan(step, h, xs, remat="nested", save="last")[0].sum()), h)
assert "treescan" not in sys.modules
"""
UNTIL = """
from mylib.loops import while_scan
for stops in (lambda h: h.sum() < 9, lambda h: h[:, 0] < 0.9):
    squares = jax.value_and_grad(lambda h: (while_scan(stops, step, h, xs).carry ** 2).sum())
    assert squares(h + 0.5)[0] == jax.jit(squares)(h + 0.5)[0] > 0
    assert (squares(h + 0.5)[1] > 0).all()
"""
EVERYTHING = {"ends_early": True, "options": True}


def test_its_facts_are_those_of_the_project() -> None:
    assert f"| {PROJECT['license']} |" in PAGE
    assert f"version {PROJECT['version']};" in PAGE
    floors = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", each).groups() for each in PROJECT["dependencies"])
    assert floors.pop("jaxlib") == floors["jax"]
    assert all(f"{'jax and jaxlib' if name == 'jax' else name} {floor}" in PAGE for name, floor in floors.items())
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", line)]
    assert f"| {pythons[0]} to {pythons[-1]} |" in PAGE


def test_its_figures_are_those_of_the_results() -> None:
    results = ROOT / "benchmarks" / "results"
    rows = re.findall(r"^three verbs +import (\w+) +([\d.]+)", (results / "import_time.txt").read_text(), re.MULTILINE)
    ratios = dict(rows)
    assert f"takes {ratios['equinox']} of the processor time of importing equinox, and {ratios['flax']} of" in PAGE
    line = re.compile(r"^Measured on .*?: (.*?), (\d+) cores(.*?);.*?\bjax ([\d.]+\d)", re.MULTILINE | re.DOTALL)
    measured = [line.search(page.read_text()) for page in results.glob("*.txt")]
    on_cpu = [found for found in measured if found and "NVIDIA" not in found[3]]
    assert {found[1].removesuffix(" Processor") for found in on_cpu} == {"AMD EPYC", "Intel Xeon"}
    assert {found[2] for found in on_cpu} == {"2"}
    assert len(measured) == len(on_cpu) + 1  # the suite on a GPU
    newest = max((found[4] for found in measured if found), key=lambda release: [int(n) for n in release.split(".")])
    assert f"JAX in the published results is {newest}." in PAGE


def test_the_core_is_as_large_as_the_page_says() -> None:
    core = script("core")
    rows = re.findall(r"\| ([\d,]+) files, of which (\d+) hold code \| ([\d,]+) \|", PAGE)
    for (files, with_code, lines), flags in zip(rows, ({}, {"ends_early": True}, EVERYTHING), strict=True):
        copied = core.copied(**flags)
        counts = [count for module in copied if (count := core.lines_of(module))]
        assert (int(files), int(with_code)) == (len(copied), len(counts))
        assert abs(int(lines.replace(",", "")) - sum(counts)) <= 100


@pytest.mark.parametrize(
    ("flags", "rewrites"), [({}, "0"), ({"ends_early": True}, "0"), (EVERYTHING, "1")], ids=["core", "while", "all"]
)
def test_the_core_can_be_copied_under_another_name(flags: dict[str, bool], rewrites: str, tmp_path: Path) -> None:
    script("core").copy(tmp_path / "mylib" / "loops", **flags)
    linen = [] if "options" in flags else ["import flax.linen"]  # the core alone looks after modules of flax
    program = "\n".join([*linen, USE, *([UNTIL] if "ends_early" in flags else ())])
    printed("-c", program, *flags, cwd=tmp_path, PYTHONPATH=str(tmp_path), TREESCAN_REWRITE=rewrites)
