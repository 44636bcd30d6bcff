"""What the page for frameworks says is what the project, its results and its core are."""

import re
import tomllib
from pathlib import Path

from modules import CALLS

from scripts import ROOT, printed, script

PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "frameworks.md").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USE = f"""
import sys
import jax
import jax.numpy as jnp
{CALLS.replace("from treescan", "from mylib.loops")}
if sys.argv[1:]:
    jax.eval_shape(jax.grad(lambda h: scan(step, h, xs, remat="nested", save="last")[0].sum()), h)
assert "treescan" not in sys.modules
"""


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
    assert {found[1].removesuffix(" Processor") for found in on_cpu} == {"AMD EPYC"}
    assert {found[2] for found in on_cpu} == {"2"}
    assert len(measured) == len(on_cpu) + 1  # the suite on a GPU
    newest = max((found[4] for found in measured if found), key=lambda release: [int(n) for n in release.split(".")])
    assert f"JAX in the published results is {newest}." in PAGE


def test_the_core_is_as_large_as_the_page_says() -> None:
    core = script("core")
    files = [module for module in core.core() if core.lines_of(module)]
    written = re.search(r"has\s+(\d+) files with about ([\d,]+) lines", PAGE)
    assert written
    assert int(written[1]) == len(files)
    assert abs(int(written[2].replace(",", "")) - sum(map(core.lines_of, files))) < 100
    copied = core.closure((*core.VERBS, *core.SURROUNDINGS), core.imported_at_the_head)
    assert f"the command below writes {len(copied)}" in PAGE


def test_the_core_can_be_copied_under_another_name(tmp_path: Path) -> None:
    core = script("core")
    for folder, options in (("core", []), ("whole", ["--options"])):
        place = tmp_path / folder / "mylib" / "loops"
        core.copy(place, options=bool(options))
        flags = {} if options else {"TREESCAN_REWRITE": "0"}
        use = USE if options else f"import flax.linen\n{USE}"  # the core alone looks after modules of flax
        printed("-c", use, *options, cwd=place.parents[1], PYTHONPATH=str(place.parents[1]), **flags)
