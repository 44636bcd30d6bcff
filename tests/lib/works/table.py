"""The cells of the table, and what comes of running one.

A cell is a verb with one option under a transform, or with two options in a compiled program that returns values and
their gradient. What comes is `EQUAL`, or the class and the first line of the error. Anything else is a defect.
"""

import functools
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import treescan
from treescan.types import FiniteReport

from . import layers, lifted, linear, loops, plain, rows
from .columns import COLUMNS
from .example import KEY, Form, Given, Verb, has
from .meshes import MESHES
from .transforms import OF_JAX, Run

EQUAL = "equal"
PAIRED = "grad"  # the transform under which options are paired
LINEAR = "linear_transpose"
FEW = ("eager", "jit", "grad", "jvp", "vmap of grad")
NOTHING = "no option"
VERBS: dict[str, Verb] = {**loops.VERBS, **rows.VERBS, **linear.VERBS, **layers.VERBS, **lifted.VERBS}
TOLERANCE = 2e-5
TRANSFORMS = {**OF_JAX, "Explicit mesh": MESHES["Explicit mesh, rows and features"]}
_ALL = {**TRANSFORMS, **MESHES, **COLUMNS}
_OF_FEATURES = [name for name in _ALL if name == "Explicit mesh" or name.endswith("features")]
_BODIES = {LINEAR: has("linear"), **dict.fromkeys(_OF_FEATURES, has("apart"))}
"""What the body is like. A product over features that are split would need a sharding in the body itself."""


# What a verb is offered that is an option of other verbs only. `lift` is called in two steps, and Python refuses these.
OFFERED = {
    "in_axes": 0, "out_axes": 0, "key": KEY, "offset": 4, "remat": "step", "save": "last", "truncate": 2, "length": 5,
    "lengths": 5, "mask": np.ones(5, bool), "resets": np.ones(5, bool), "reset_to": 0, "time_axis": 1, "fill": 1,
    "row_axes": 0, "chunk": 2, "compact": True, "max_length": 5, "args": (), "state": 0,
}  # fmt: skip


class Cell(NamedTuple):
    verb: str
    forms: tuple[str, ...]
    transform: str

    def __str__(self) -> str:
        return f"{self.verb}: {' + '.join(self.forms) or NOTHING}: {self.transform}"


def singles(verb: str) -> Iterator[Cell]:
    """Each option alone and none, under each transform; other forms of an option and brief verbs, under few."""
    of = VERBS[verb]
    for form in (None, *of.forms):
        for transform in FEW if form in of.alone or (form and of.brief) else TRANSFORMS:
            yield Cell(verb, () if form is None else (form,), transform)


def pairs(verb: str) -> Iterator[Cell]:
    """Each two options that can be given together."""
    of = VERBS[verb]
    names = [name for name in of.forms if name not in of.alone]
    for a, b in itertools.combinations(names, 2):
        if not conflicts(of.forms[a], of.forms[b]):
            yield Cell(verb, (a, b), PAIRED)


def conflicts(a: Form, b: Form) -> bool:
    """Whether both say the same thing."""
    return (a.option == b.option and a.option not in ("row_axes", "time_axis")) or bool(set(a.options) & set(b.options))


def offered(verb: str) -> Iterator[Cell]:
    """The options of other verbs."""
    taken = {name for form in VERBS[verb].forms.values() for name in (form.option, *form.options)}
    for name in OFFERED:
        if name not in taken and verb != "lift":
            yield Cell(verb, (name,), "eager")


def cells(verb: str) -> list[Cell]:
    return [*singles(verb), *pairs(verb), *offered(verb)]


def form_of(verb: str, name: str) -> Form:
    """A form by its name, or that of an option which the verb does not take."""
    return VERBS[verb].forms.get(name) or Form(name, {name: OFFERED[name]})


def share(cell: Cell, of: int) -> bool:
    """Whether a cell is in a share of one in so many, which is always the same."""
    return zlib.crc32(str(cell).encode()) % of == 0


# Running.


def outcome(cell: Cell) -> str:
    """What comes of a cell."""
    verb = VERBS[cell.verb]
    transform = _ALL[cell.transform][0]
    try:
        got = transform(_run(cell, treescan), verb.given)
    except treescan.TreescanError as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    except Exception as error:
        return f"FOREIGN {type(error).__name__}: {_first_line(error)}"
    return EQUAL if (where := difference(got, _meant(cell))) is None else f"WRONG {where}"


def wrong(cells: Iterable[Cell]) -> dict[str, str]:
    """What comes of cells other than what they mean, or than a refusal which a compiled program meets too."""

    def is_wrong(cell: Cell, said: str) -> bool:
        refuses = said != EQUAL and not said.startswith(("FOREIGN", "WRONG"))
        return said != EQUAL and not (refuses and said == outcome(cell._replace(transform=PAIRED)))

    came = {cell: outcome(cell) for cell in cells}
    return {str(cell): said for cell, said in came.items() if is_wrong(cell, said)}


def meaning(cell: Cell) -> Cell:
    """The cell whose plain meaning is this one's: what changes the cost alone is left out."""
    return cell._replace(forms=tuple(name for name in cell.forms if not form_of(cell.verb, name).free))


def _meant(cell: Cell) -> Any:
    return _plainly(meaning(cell))


@functools.lru_cache(maxsize=1024)
def _plainly(cell: Cell) -> Any:
    return jax.tree.map(np.asarray, _ALL[cell.transform][1](_run(cell, plain), VERBS[cell.verb].given))


def _run(cell: Cell, lib: Any) -> Run:
    verb = VERBS[cell.verb]
    forms = [form_of(cell.verb, name) for name in cell.forms]
    options = {name: value for form in forms for name, value in form.options.items()}
    how = frozenset().union(*[form.how for form in forms], _BODIES.get(cell.transform, ()))

    def run(given: Given) -> list[jax.Array]:
        result = verb.program(lib, options, how, given)
        if options.get("check_finite") == "return" and lib is plain:
            result = result, (jnp.asarray(True), jnp.int32(-1))
        leaves = jax.tree.leaves(jax.tree.map(_told, result, is_leaf=lambda node: isinstance(node, FiniteReport)))
        return [leaf for leaf in leaves if plain.is_array(leaf)]

    return run


def _told(node: Any) -> Any:
    """What is compared of a report: not its evidence."""
    return (node.ok, node.step) if isinstance(node, FiniteReport) else node


def difference(got: Any, want: Any) -> str | None:
    """Where two trees of arrays differ first, in words."""
    found, meant = jax.tree.leaves(got), jax.tree.leaves(want)
    if len(found) != len(meant):
        return f"{len(found)} leaves, not {len(meant)}"
    for n, (a, b) in enumerate(zip(found, meant, strict=True)):
        a, b = np.asarray(a), np.asarray(b)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"leaf {n} is {a.dtype}{list(a.shape)}, not {b.dtype}{list(b.shape)}"
        scale = max(1.0, float(np.max(np.abs(b[np.isfinite(b)]), initial=0)))
        if not np.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=False):
            return f"leaf {n}"
    return None


def _first_line(error: BaseException) -> str:
    line = " ".join(str(error).partition("\n\n")[0].split())  # the headline, which may break
    return re.sub(r" \([\w./<>-]+:\d+\)", "", line)[:300]
