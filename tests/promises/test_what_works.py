"""What works with what: cells of the table are run again, and the page shows what the data says.

`python scripts/what_works.py` makes both anew.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from works import plain, table
from works.example import Form, Given, Verb
from works.table import EQUAL, Cell

import treescan
from scripts import script

what_works = script("what_works")
DATA = json.loads(what_works.DATA.read_text())
SHARE = 200  # one cell in so many is for every day
ALWAYS = (  # options whose code meets are for every day too
    Cell("scan", ("truncate", "offset"), table.PAIRED),
    Cell("mask_scan", ("truncate", "offset"), table.PAIRED),
    Cell("scan", ("offset", "save=2"), table.PAIRED),
    Cell("mask_scan", ('save="last"',), "grad"),
    Cell("mask_scan", ('save="last"',), "vmap of grad"),
)


def listed(cell: Cell) -> str:
    if cell.verb not in DATA["verbs"]:
        pytest.skip(f"run `python scripts/what_works.py {cell.verb}`: there is no data yet, which another test says")
    return DATA["verbs"][cell.verb]["not equal"].get(what_works.key(cell), EQUAL)


def hold(cells: list[Cell]) -> None:
    """Runs cells, and says which came to something else than the data has."""
    changed = []
    for cell in cells:
        was = listed(cell)
        if what_works.fault(was) and jax.__version__ != DATA["jax"]:
            continue  # in JAX's words, which are others in another version
        if (now := table.outcome(cell)) != was:
            changed.append(f"{cell}\n  was: {was}\n  now: {now}")
    assert not changed, "run `python scripts/what_works.py` if these are meant:\n" + "\n".join(changed)


def here(cell: Cell) -> bool:
    """Whether a process of as many devices as this one has is that of the cell."""
    return (cell.transform in ("shard_map", "Explicit mesh")) == (jax.device_count() > 1)


PROCESS = pytest.mark.parametrize(
    "process", [pytest.param("one device"), pytest.param("many devices", marks=pytest.mark.devices)]
)


def everyday(verb: str) -> list[Cell]:
    """A share of the cells, and each way in which the verb refuses: that is quick, as nothing is compiled."""
    first = {listed(cell): cell for cell in reversed(table.cells(verb)) if not what_works.fault(listed(cell))}
    refused = [cell for outcome, cell in first.items() if outcome != EQUAL]
    also = {*refused, *ALWAYS}
    return [cell for cell in table.cells(verb) if cell in also or table.share(cell, SHARE)]


@PROCESS
@pytest.mark.parametrize("verb", table.VERBS)
def test_a_share_of_the_cells(verb: str, process: str) -> None:
    hold([cell for cell in everyday(verb) if here(cell)])


@PROCESS
@pytest.mark.parametrize("verb", table.VERBS)
@pytest.mark.quick
def test_each_verb_under_each_transform(verb: str, process: str) -> None:
    hold([cell for cell in table.singles(verb) if not cell.forms and here(cell)])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@PROCESS
@pytest.mark.parametrize("verb", table.VERBS)
def test_all_cells(verb: str, part: int, process: str) -> None:
    hold([cell for cell in table.cells(verb)[part::4] if here(cell)])


@pytest.mark.parametrize("verb", table.VERBS)
def test_the_data_is_of_these_cells(verb: str) -> None:
    assert verb in DATA["verbs"], f"run `python scripts/what_works.py {verb}`"
    of, cells = DATA["verbs"][verb], table.cells(verb)
    assert of["cells"] == len(cells)
    assert of["not equal"].keys() <= {what_works.key(cell) for cell in cells}
    assert EQUAL not in of["not equal"].values()


def test_no_cell_is_wrong() -> None:
    wrong = [
        f"{verb}: {name}: {outcome}"
        for verb, of in DATA["verbs"].items()
        for name, outcome in of["not equal"].items()
        if outcome.startswith("WRONG")
    ]
    assert not wrong


def test_the_page_shows_the_data() -> None:
    page = what_works.PAGE.read_text()
    assert what_works.page_of(page, DATA) == page, "run `python scripts/what_works.py --page`"
    assert {part[2] for part in what_works.PART.finditer(page)} == {"options", "transforms"}
    assert what_works.TEXT.read_text() == what_works.text_of(DATA), "run `python scripts/what_works.py --page`"


OF_OPTIONS = {
    "scan": treescan._types.Options,
    "mask_scan": treescan._types.MaskOptions,
    "accumulate": treescan._types.UnkeyedOptions,
    "fold": treescan._types.FoldOptions,
    "fori": treescan._types.IndexOptions,
    "scan_layers": treescan._types.StackOptions,
    "fold_layers": treescan._types.LayersOptions,
}


ELSEWHERE = {"length", "options"}  # `test_layers.py` has that of layers, and `tests/options` the options


@pytest.mark.parametrize("verb", OF_OPTIONS)
def test_every_option_is_in_the_table(verb: str) -> None:
    shown = {form.option for form in table.VERBS[verb].forms.values()}
    passed = {name for form in table.VERBS[verb].forms.values() for name in form.options}
    assert OF_OPTIONS[verb].__annotations__.keys() <= shown | passed | ELSEWHERE


# The table notices what it is there for.


def _example(wrong: Any) -> Verb:
    """A verb of one option, `reverse`, which treescan has as `wrong` does and the plain meaning as a loop."""

    def program(lib: Any, options: Mapping[str, Any], how: frozenset[str], given: Given) -> Any:
        run = plain.fold if lib is plain else wrong
        return run(lambda carry, x: carry * jnp.sin(x) + x, given["h"], given["a"], **options)

    given = {"h": jnp.float32(0.5), "w": jnp.float32(1.0), "a": jnp.arange(3.0)}
    return Verb(program, {"reverse": Form("reverse", {"reverse": True})}, given)


def _raises(*given: Any, reverse: bool = False) -> Any:
    raise KeyError("no words of ours")


def _forgets_the_gradient(f: Any, init: Any, xs: Any, **options: Any) -> Any:
    return jax.lax.stop_gradient(treescan.fold(f, init, xs, **options))


@pytest.mark.parametrize(
    ("wrong", "transform", "comes"),
    [
        (treescan.fold, "grad", EQUAL),
        (lambda f, init, xs, reverse: treescan.fold(f, init, xs), "jit", "WRONG leaf 0"),
        (_forgets_the_gradient, "jit", EQUAL),
        (_forgets_the_gradient, "grad", "WRONG leaf 1"),
        (_forgets_the_gradient, "vmap of grad", "WRONG leaf 0"),
        (_raises, "eager", "FOREIGN KeyError: 'no words of ours'"),
        (
            lambda f, init, xs, reverse: treescan.fold(f, init, xs, reverse=1),
            "eager",
            "ArgumentTypeError: `fold` over ",
        ),
    ],
)
def test_a_cell_says_what_came(wrong: Any, transform: str, comes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.VERBS, "example", _example(wrong))
    table._plainly.cache_clear()
    assert table.outcome(Cell("example", ("reverse",), transform)).startswith(comes)
    table._plainly.cache_clear()
