"""Plugins from outside: installed distributions, each in a process of its own.

`examples/plugin` is built and unpacked as an installer would; the others are made here, each broken in its own way.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from treescan.__main__ import main
from treescan.carries import _registry

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plugin"


# Distributions.


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, as it would be in a repository of its own."""
    copy = tmp_path_factory.mktemp("plugin") / "histograms"
    return shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info"))


@pytest.fixture(scope="session")
def installed(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the example in it, installed from a wheel."""
    built, site = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("site")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(built), cwd=plugin)
    (wheel,) = built.iterdir()
    zipfile.ZipFile(wheel).extractall(site)
    return site


def module(site: Path, name: str, text: str) -> None:
    (site / f"{name}.py").write_text(textwrap.dedent(text))


def distribution(site: Path, name: str, entry_point: str, package: str = "") -> None:
    """Installs a distribution: what declares one, for there is nothing else in it but perhaps a package."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[treescan.carries]\n{entry_point}\n")
    (info / "top_level.txt").write_text(f"{package}\n")


# Processes.


def python(
    *arguments: str, site: Path | None = None, cwd: Path | None = None, status: int = 0, **variables: str
) -> str:
    """What a process prints that finds what is installed in a folder, and the treescan that is tested."""
    path = os.pathsep.join(str(folder) for folder in (site, ROOT) if folder)
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | variables
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def script(text: str, site: Path | None = None, **variables: str) -> None:
    """Runs a script of assertions; a warning that it does not expect is an error."""
    python("-W", "error", "-c", PRELUDE + textwrap.dedent(text), site=site, **variables)


PRELUDE = """
import sys
import warnings
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import numpy as np

import treescan

loads = []  # what is loaded, whenever it is
load = EntryPoint.load
EntryPoint.load = lambda entry: loads.append(entry.value) or load(entry)


def loaded(prefix):
    return [value for value in loads if value.startswith(prefix)]


def plain(carry, x):  # for a carry that is nothing but a pytree of arrays
    return jax.tree.map(lambda leaf: leaf + x, carry), None


def total(seen, x):  # for the carries below: the body sees a number, and returns the next
    return seen + x, None
"""


def listed(site: Path | None = None, status: int = 0, **variables: str) -> tuple[dict[str, tuple[str, ...]], str]:
    """What `python -m treescan plugins` lists: package, entry point and state by distribution; and all of its text."""
    text = python("-m", "treescan", "plugins", site=site, status=status, **variables)
    rows = re.findall(r"^  (\S+) {3,}(\S.*?) {3,}(\S+) {3,}(loads|failed)$", text, re.MULTILINE)
    return {name: (package, value, state) for package, name, value, state in rows}, text


# The example.


def test_a_plugin_is_loaded_with_the_first_value_that_it_is_for_and_once(installed: Path) -> None:
    script(
        """
        from dataclasses import dataclass

        from histograms import Histogram, histogram

        xs = jnp.array([0.5, 1.5, 1.7])
        treescan.scan(plain, {"a": jnp.zeros(2), "b": (0.0, None)}, xs)
        treescan.scan(lambda carry, h: (carry, None), None, jax.tree.map(lambda leaf: leaf[None], histogram([0, 1])))
        assert "histograms.for_treescan" not in sys.modules and not loaded("histograms")

        final, counts = treescan.scan(lambda seen, x: (x, seen.counts), {"h": histogram([0, 1, 2])}["h"], xs)
        assert type(final) is Histogram
        assert final.counts.tolist() == [1, 2] and counts.tolist() == [[0, 0], [1, 0], [1, 1]]
        assert "histograms.for_treescan" in sys.modules

        @jax.tree_util.register_dataclass
        @dataclass(frozen=True)
        class Mine(Histogram):  # carried as what it derives from is
            pass

        (mine,) = treescan.fold(lambda seen, x: [x], [Mine(final.edges, final.counts)], xs)
        assert type(mine) is Mine and mine.counts.tolist() == [2, 4]
        assert jax.jit(lambda: treescan.fold(lambda seen, x: x, final, xs))().counts.tolist() == [2, 4]
        assert loaded("histograms") == ["histograms.for_treescan"]
        """,
        installed,
    )


@pytest.mark.slow
def test_the_tests_of_the_example_pass(plugin: Path, installed: Path) -> None:
    assert re.search(r"\d+ passed", python("-m", "pytest", "-p", "no:cacheprovider", site=installed, cwd=plugin))


def test_of_what_is_not_installed_nothing_is_left() -> None:
    script(
        """
        from dataclasses import dataclass

        @jax.tree_util.register_dataclass
        @dataclass(frozen=True)
        class Histogram:
            edges: jax.Array
            counts: jax.Array

        Histogram.__module__ = "histograms._histogram"
        final, _ = treescan.scan(plain, Histogram(jnp.zeros(3), jnp.ones(2)), jnp.ones(4))
        assert type(final) is Histogram and final.counts.tolist() == [5, 5]
        assert "histograms" not in sys.modules and not loaded("histograms")
        """
    )
    assert "histograms" not in listed()[1]


def test_discovery_can_be_turned_off_and_is_listed(installed: Path) -> None:
    script(
        """
        from histograms import Histogram, histogram

        final = treescan.fold(lambda carry, x: carry.add(x), histogram([0, 1, 2]), jnp.array([0.5, 1.5]))
        assert type(final) is Histogram and final.counts.tolist() == [1, 1]
        assert "histograms.for_treescan" not in sys.modules and not loads

        import histograms.for_treescan  # what one imports oneself counts

        final = treescan.fold(lambda seen, x: x, histogram([0, 1, 2]), jnp.array([0.5, 1.5]))
        assert final.counts.tolist() == [1, 1] and not loads
        """,
        installed,
        TREESCAN_PLUGINS="0",
    )
    says = "Scans do not load them: the environment has TREESCAN_PLUGINS=0."
    assert says in listed(installed, TREESCAN_PLUGINS="0")[1]
    found, text = listed(installed)
    assert found["histograms 0.1.0"] == ("histograms", "histograms.for_treescan", "loads")
    assert re.match(r"  package +distribution +entry point +state\n", text)
    assert "Scans do not load them" not in text


def test_the_command_says_that_nothing_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_registry, "_plugins", [])
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out == (
        "No installed distribution declares custom carries (entry points in the group `treescan.carries`).\n"
    )


# Several distributions for one package, of which most are broken.

SHAPES = """
from typing import NamedTuple


class Square(NamedTuple):
    side: object


class Left:
    def __init__(self, value):
        self.value = value


class Right(Left):
    pass
"""

DECLARES = """
from treescan.carries import cast, register_carry

called = []


def to_{name}(value):
    return cast(value.value)


def declare():
    import shapes

    called.append(True)
    register_carry(shapes.{kind}, to_{name}, lambda carry: shapes.{kind}(carry.tree))
"""

LOADS = {"first": "Left", "second": "Right"}  # by the distribution: the type for which it registers a carry
BROKEN = {  # by the distribution: its entry point, and why it does not load
    "raises-at-import": ("shapes_importing", "RuntimeError: no licence"),
    "raises-when-called": ("shapes_calling:declare", "ValueError: not today"),
    "names-no-module": ("shapes_missing", "ModuleNotFoundError: No module named 'shapes_missing'"),
    "names-no-function": ("shapes_calling:forgotten", "AttributeError: module 'shapes_calling' has no attribute"),
    "third": ("shapes_third:declare", "`shapes.Left`, which is registered already"),
}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which distributions declare carries for the package `shapes`."""
    site = tmp_path_factory.mktemp("several")
    module(site, "shapes", SHAPES)
    module(site, "shapes_importing", 'raise RuntimeError("no licence")')
    module(site, "shapes_calling", 'def declare():\n    raise ValueError("not today")')
    for name, kind in {**LOADS, "third": "Left"}.items():
        module(site, f"shapes_{name}", DECLARES.format(name=name, kind=kind))
    for name in LOADS:
        distribution(site, name, f"shapes = shapes_{name}:declare", f"shapes_{name}")
    for name, (value, _) in BROKEN.items():
        distribution(site, name, f"shapes = {value}", "shapes_third" if name == "third" else "")
    return site


def test_all_that_is_declared_is_loaded_once_and_what_is_broken_warns(several: Path) -> None:
    script(
        f"""
        import collections
        from shapes import Left, Right, Square

        Circle = collections.namedtuple("Circle", ["radius"], module="circles")
        final, _ = treescan.scan(plain, Circle(0.0), jnp.ones(3))  # of another package
        assert type(final) is Circle and not loaded("shapes")

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for kind in (Left, Right, Left, Right):
                final, _ = treescan.scan(total, kind(jnp.zeros(())), jnp.ones(3))
                assert type(final) is kind and final.value == 3
            final, _ = treescan.scan(plain, Square(0.0), jnp.ones(3))
            assert type(final) is Square and final.side == 3

        import shapes_first, shapes_second, shapes_third

        broken = {BROKEN}
        works = [f"shapes_{{name}}:declare" for name in {list(LOADS)}]
        assert [len(module.called) for module in (shapes_first, shapes_second, shapes_third)] == [1, 1, 1]
        assert sorted(loaded("shapes")) == sorted([*works, *(value for value, _ in broken.values())])

        assert len(caught) == len(broken)
        assert {{warning.category for warning in caught}} == {{treescan.errors.PluginWarning}}
        texts = [" ".join(str(warning.message).split()) for warning in caught]
        for name, (value, reason) in broken.items():
            (text,) = [text for text in texts if f"distribution {{name}} 1.0" in text]
            assert "`shapes`" in text and f"({{value}})" in text and reason in text, text
        try:
            shapes_third.declare()
        except treescan.errors.PluginError as error:
            text = " ".join(str(error).split())
            assert "First by `to_first` of `shapes_first`, from the installed distribution first 1.0." in text, text
            assert "Now by `to_third` of `shapes_third`, from the installed distribution third 1.0." in text, text
        else:
            raise AssertionError("a type was registered twice")
        """,
        several,
    )


def test_the_command_lists_why_a_plugin_fails(several: Path) -> None:
    found, text = listed(several, status=1)
    for name in LOADS:
        assert found[f"{name} 1.0"] == ("shapes", f"shapes_{name}:declare", "loads")
    for name, (value, reason) in BROKEN.items():
        assert found[f"{name} 1.0"] == ("shapes", value, "failed")
        (why,) = re.findall(rf"\n  {name} 1.0, {value}:\n((?:    .*\n?)+)", text)
        assert reason in " ".join(why.split())
    assert "First by `to_first` of `shapes_first`" in text and "Now by `to_third` of `shapes_third`" in text


def registering(name: str) -> str:
    """The text of a module that registers a class of `gauges` where it is imported."""
    return textwrap.dedent(
        f"""
        import gauges
        from treescan.carries import cast, register_carry

        register_carry(gauges.{name}, lambda value: cast(value.value), lambda carry: gauges.{name}(carry.tree))
        """
    )


GAUGES = """
class Lags:
    def __init__(self, value):
        self.value = value


class Other(Lags):
    pass


class Own(Lags):
    pass
"""

HALF = """
import threading

import gauges_lags

threading.reached.set()  # what the script below has put there
threading.goes_on.wait()
raise ImportError("no module bar")
"""


def test_a_plugin_that_fails_takes_with_it_only_what_it_has_registered(tmp_path: Path) -> None:
    """Not what a module registered that it imported, and that stays, nor what another thread did meanwhile."""
    module(tmp_path, "gauges", GAUGES)
    for name in ("Lags", "Other"):
        module(tmp_path, f"gauges_{name.lower()}", registering(name))
    module(tmp_path, "gauges_half", registering("Own") + HALF)
    distribution(tmp_path, "half", "gauges = gauges_half")
    script(
        """
        import threading

        import gauges
        from treescan.carries import _registry

        def first():
            final, _ = treescan.scan(total, gauges.Own(jnp.zeros(())), jnp.ones(3))
            finals.append(final)

        finals, threading.reached, threading.goes_on = [], threading.Event(), threading.Event()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            thread = threading.Thread(target=first)
            thread.start()
            threading.reached.wait()
            import gauges_other  # registers, in this thread

            threading.goes_on.set()
            thread.join()
        assert [warning.category for warning in caught] == [treescan.errors.PluginWarning]
        assert "gauges_half" not in sys.modules and "gauges_lags" in sys.modules
        assert set(_registry._adoptions) == {gauges.Lags, gauges.Other}
        for kind in (gauges.Lags, gauges.Other):
            final, _ = treescan.scan(total, kind(jnp.zeros(())), jnp.ones(3))
            assert type(final) is kind and final.value == 3
        assert type(finals[0]) is gauges.Lags  # it was carried as what it derives from
        """,
        tmp_path,
    )
