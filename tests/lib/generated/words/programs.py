"""A program of a body, a verb and a word: which there are, what becomes of one, and a smaller one that fails alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treescan

from ..programs import Brief, Draw, chance, choice
from ..smaller import smallest
from . import transformations, verbs
from .bodies import CORES, KEYWORDS, LINEAR_CORES, LINEAR_PARTS, MEETING, MIXING, OF_THE_AXIS, OF_THE_MESH, PARTS
from .transformations import INNER, KEEP_LINEAR, MAPS, OF_LIBRARY, OUTER, REVERSE, SPLITS
from .verbs import FLOATS, OPTIONS, has_padding, padding_of, passed, run_of

TOLERANCE = {"float32": 3e-3, "float64": 1e-7}
BODILESS = ("linear_scan",)
WITHOUT_ROWS = ("scan", "while_scan", "fori", "fold", "scan_layers", "fold_layers")


@dataclass(frozen=True, repr=False)
class Program(Brief):
    """A loop under a word.

    Attributes:
        core: what the body computes; for `linear_scan`, what a is.
        parts: what is added to the body.
        verb: the verb.
        options: the names of its options.
        word: transformations, the outermost first.
        nan: whether the padding is NaN.
    """

    core: str
    parts: tuple[str, ...]
    verb: str
    options: tuple[str, ...]
    word: tuple[str, ...]
    nan: bool = False

    @property
    def split(self) -> tuple[str, ...]:
        """Which arguments vary over a mesh, in a `shard_map` that knows it."""
        return next((SPLITS[letter] for letter in self.word if letter in SPLITS), ())

    def in_jit(self) -> Program:
        """The program compiled as a whole, unless what surrounds it looks at each value."""
        first, rest = self.word[0], self.word[int(self.word[0] in OUTER) :]
        return self if first in ("checkify", "debug_nans") else replace(self, word=("jit", *rest))

    @property
    def is_linear(self) -> bool:
        """Whether the loop is linear in h and x together."""
        if self.verb in BODILESS:
            return self.core != "of x"
        no_values = "by value" not in self.options and self.verb != "fori"
        return no_values and self.core in LINEAR_CORES and all(name in LINEAR_PARTS for name in self.parts)


class Wrong(Exception):
    """What the library does otherwise than the loop by hand: a kind, and the rest."""

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(f"{kind}\n{text}")
        self.kind, self.text = kind, text


class Refused(Exception):
    """A TreescanError."""


class Skipped(Exception):
    """The loop by hand fails in JAX, or is not finite."""


# Which programs there are.


def why_not(program: Program) -> str:
    """Why a program is none of these; empty if it is one."""
    word, parts, options, verb = program.word, program.parts, program.options, program.verb
    maps, meshes = [n for n in word if n in MAPS], [n for n in word if n.startswith("shard_map")]
    given = [OPTIONS[verb][name] for name in options]
    keys = [key for option in given for key in option]
    of_axis = (
        {*parts} & {*OF_THE_AXIS} or "by the axis" in options or (verb in BODILESS and program.core == "of the axis")
    )
    mixing = {*parts} & {*MIXING}
    reverse = {*word} & {*REVERSE} or any(name.startswith("grad") for name in word)
    checks: dict[str, Any] = {
        "the word is as long as words are": not 1 <= len(word) <= 5,
        "what is outer comes first": any(name in OUTER for name in word[1:]),
        "one mesh": len(meshes) > 1,
        "two maps": len(maps) + word.count("in map") > 2,
        "an axis": of_axis and not maps,
        "an axis and a mesh, which JAX confuses": of_axis and meshes,
        "what is not linear": "check_finite" in options and {"linear_transpose", "loop as rule"} & {*word},
        "a mesh": {*parts} & {*OF_THE_MESH} and not meshes,
        "a core of another verb": program.core not in (verbs.FACTORS if verb in BODILESS else CORES),
        "no body": verb in BODILESS and parts,
        "one mention of each": len({*keys}) < len(keys) or len({*parts}) < len(parts),
        "what JAX may not transpose": verb != "linear_scan" and {"linear_transpose", "loop as rule"} & {*word},
        "derivatives of a linear loop": {"linear_transpose", "loop as rule"} & {*word} and not keeps_linear(program),
        "no reverse over a while_loop": "in while_loop" in word and reverse,
        "a rule for reverse mode alone": any(name.startswith(FORWARD) for name in word[: outside_of_rules(program)]),
        "a row has no weights of a row": program.core == "elementwise" and "vmap over rows" in parts,
        "only so many derivatives": sum(map(order, word)) > 2,
        "elements meet, and take other steps": mixing
        and ({"traced lengths", "by value", "by the axis"} & {*options} or (verb == "fori" and mixing - {*OF_THE_MESH}) or ("vmap w" in word and verb == "mask_scan")),
        "keywords of rows": {"valid", "first"} & {*parts} and verb not in ("mask_scan", "rows_while_scan"),
        "rows meet, and have stopped": "valid" in parts and verb != "mask_scan",
        "rows meet, and are padded": {*MEETING} & {*parts} and (verb in ("mask_scan", "rows_while_scan") or "lengths" in options),
        "keys per step": "key" in parts and verb == "fori" and "reverse" in options,
        "rows that move": "compact" in options and {"key", "closure of init"} & {*parts},
        "padding that is known": program.nan and not (verb in ("mask_scan", "linear_scan", "fold") and has_padding(program)),
        "padding that stays": program.nan and {"in while_loop"} & {*word},
        "the gradient saves NaN that it was given": program.nan and reverse and {"debug_nans", "in treescan.while_scan"} <= {*word},
        "JAX looks for NaN on one device alone": "debug_nans" in word and meshes,
        "no check of values over devices": "check_finite" in options and meshes,
    }  # fmt: skip
    return next((text for text, holds in checks.items() if holds), "")


def order(letter: str) -> int:
    """How many derivatives a transformation takes."""
    if letter == "hessian":
        return 2
    return int(letter.startswith(("grad", "jvp", "vjp", "linear", "loop as rule")))


def keeps_linear(program: Program) -> bool:
    place = next(n for n, name in enumerate(program.word) if name in ("linear_transpose", "loop as rule"))
    return program.is_linear and all(name in KEEP_LINEAR for name in program.word[place + 1 :])


def outside_of_rules(program: Program) -> int:
    """How many transformations surround a `custom_vjp`: of the body or of the user."""
    inside = len(program.word) if "custom_vjp" in program.parts else 0
    return max([inside, *(n for n, name in enumerate(program.word) if name == "custom_vjp")])


FORWARD = ("jvp", "linearize", "hessian", "custom_jvp")
WEIGHTS = {"jit": 5, "grad": 5, "in while_loop": 1, "vmap none": 3, "vmap w": 3, "hessian": 2}
OF_VERBS = {"mask_scan": 6, "while_scan": 4, "scan": 3, "linear_scan": 3, "rows_while_scan": 3}


def weighted(names: Any, weights: dict[str, int], usual: int = 2) -> list[str]:
    return [name for name in names for _ in range(weights.get(name, usual))]


THEMES = ("plain", "plain", "axis", "mesh", "linear", "slot")
"""What a program is about: what is rare by chance, but was wrong, is drawn together."""


def draw_program(draw: Draw) -> Program:
    """A program that may be: what may not is drawn again."""
    while True:
        program = draw_any(draw, choice(draw, THEMES))
        if not why_not(program):
            return program


def draw_any(draw: Draw, theme: str) -> Program:
    verb = choice(draw, ("mask_scan", *OPTIONS) if theme == "slot" else weighted(OPTIONS, OF_VERBS, 1))
    core = choice(draw, verbs.FACTORS if verb in BODILESS else LINEAR_CORES if theme == "linear" else tuple(CORES))
    pool = LINEAR_PARTS if theme == "linear" else tuple(PARTS)
    parts = [choice(draw, pool) for _ in range(draw.integer(0, 3))]
    names = tuple(OPTIONS[verb])
    options = [choice(draw, names) for _ in range(choice(draw, [0, 1, 1, 2, 2, 3]))]
    word = draw_word(draw, theme)
    if theme == "axis":
        parts.append(choice(draw, OF_THE_AXIS))
    if theme == "mesh":
        parts.append(choice(draw, ("cond on weights", "m of weights", *OF_THE_MESH)))
    if theme == "slot":
        parts += ["valid"] * chance(draw, 50)
        options.append(choice(draw, [name for name in names if name[0].isupper()] or names))
    if verb in BODILESS:
        parts = []
    return Program(core, unique(parts), verb, unique(options), word, chance(draw, 60 if theme == "slot" else 30))


def unique(items: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(items))


def draw_word(draw: Draw, theme: str) -> tuple[str, ...]:
    """Two to five letters; a derivative stands outside of a map over an axis, and within a mesh."""
    outer = [choice(draw, tuple(OUTER))] if chance(draw, 20) else ["jit"] * chance(draw, 50)
    names = weighted((*INNER, *OF_LIBRARY, *MAPS), WEIGHTS)
    word = [choice(draw, names) for _ in range(draw.integer(2, 5) - len(outer))]
    own = {
        "axis": [choice(draw, ("grad", "grad", "jvp", "linearize", "jit")), choice(draw, ("vmap none", *MAPS))],
        "mesh": [choice(draw, (*SPLITS, "shard_map without vma")), choice(draw, ("grad", "grad w", "jvp", "vmap w"))],
        "linear": [choice(draw, ("linear_transpose", "loop as rule"))],
    }.get(theme, [])
    place = draw.integer(0, max(0, len(word) - len(own)))
    return (*outer, *word[:place], *own, *word[place + len(own) :])


# What becomes of one.


def numbers(program: Program) -> dict[str, Any]:
    given = dict(FLOATS)
    if program.nan:
        given["x"] = np.where(padding_of(program), np.nan, given["x"])
    dtype = jnp.result_type(float)
    return {name: jnp.asarray(leaf, dtype) for name, leaf in given.items()}


def results(program: Program, *, by_hand: bool) -> list[np.ndarray]:
    function = transformations.spelled(program.word, run_of(program, by_hand=by_hand), by_hand=by_hand)
    return [np.asarray(leaf) for leaf in jax.block_until_ready(function(numbers(program)))]


def check(program: Program) -> None:
    """Raises Wrong if the library is not what the loop by hand is; Refused and Skipped, if neither can be said.

    The loop by hand is compiled as a whole, for time's sake. Where the library fails, it is run as the word says.
    """
    want = by_scan(program.in_jit())
    try:
        got = results(program, by_hand=False)
    except treescan.TreescanError as error:
        raise Refused(f"{type(error).__name__}: {first_line(error)}") from error
    except Exception as error:
        by_scan(program)
        raise Wrong(f"fails: {type(error).__name__}: {first_line(error)}") from error
    text = difference(got, want)
    if text and want and want[0].dtype == np.float32 and not jax.config.values["jax_enable_x64"]:
        with jax.enable_x64(True):
            text = difference(results(program, by_hand=False), results(program, by_hand=True))
        if not text:
            raise Skipped("wrong in float32 alone")
    if text:
        raise Wrong("wrong numbers", text)


def by_scan(program: Program) -> list[np.ndarray]:
    try:
        found = results(program, by_hand=True)
    except Exception as error:
        raise Skipped(f"{type(error).__name__}: {first_line(error)}") from error
    if not all(np.isfinite(leaf).all() for leaf in found):
        raise Skipped("not finite")
    return found


def difference(got: list[np.ndarray], want: list[np.ndarray]) -> str:
    """Where results differ, in words."""
    if len(got) != len(want):
        return f"{len(got)} results for {len(want)}"
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {n} is {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
        if not np.isfinite(a).all():
            return f"result {n} is not finite"
        most = float(np.max(np.abs(b), initial=0))
        apart = float(np.max(np.abs(np.subtract(a, b, dtype=np.float64)), initial=0))
        if apart > TOLERANCE.get(str(b.dtype), 0) * (most + 1e-2):
            where = np.unravel_index(np.argmax(np.abs(np.subtract(a, b, dtype=np.float64))), a.shape)
            return f"result {n} of {len(want)}: {a[where]} for {b[where]}"
    return ""


def first_line(error: BaseException) -> str:
    return " ".join(str(error).strip().partition("\n")[0].split())[:200]


# Smaller ones.


def shrink(program: Program, wrong: Wrong, seconds: float = 60) -> tuple[Program, Wrong]:
    """The smallest program found in so many seconds that is wrong in the same way."""
    return smallest(program, wrong, seconds, candidates, fails)


def fails(program: Program, wrong: Wrong) -> Wrong | None:
    try:
        check(program)
    except Wrong as found:
        return found if found.kind[:40] == wrong.kind[:40] else None
    except Exception:
        return None
    return None


def candidates(program: Program) -> Iterator[Program]:
    """With a shorter word first."""
    changes = [{"word": rest} for rest in without_one(program.word)]
    changes += [{"parts": rest} for rest in without_one(program.parts)]
    changes += [{"options": rest} for rest in without_one(program.options)]
    changes += [{"nan": False}] * program.nan
    if program.verb not in BODILESS and program.core != "decaying":
        changes += [{"core": "decaying"}, {"core": "matmul"}] if program.core != "matmul" else [{"core": "decaying"}]
    for n, letter in enumerate(program.word):
        simpler = {"hessian": "grad", "vjp of some": "grad", "shard_map w": "shard_map"}.get(letter)
        if simpler:
            changes.append({"word": (*program.word[:n], simpler, *program.word[n + 1 :])})
    for change in changes:
        smaller = replace(program, **change)
        if not why_not(smaller):
            yield smaller


def without_one(items: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (tuple(rest) for rest in itertools.combinations(items, len(items) - 1)) if items else iter(())


__all__ = ["KEYWORDS", "Program", "Refused", "Skipped", "Wrong", "check", "draw_program", "passed", "shrink", "why_not"]
