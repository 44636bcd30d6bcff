"""Verbs with their options, and what they mean: one `jax.lax.scan` with selections, written by hand.

`run_of(program, by_hand)` is a function of floats `{"w": [D, D], "h": [B, D], "x": [T, B, D]}` to a list of arrays. The
library and the loop by hand are given the same body, and options that change the cost alone mean nothing by hand.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import treescan
from treescan import Remat
from treescan.options import Around, Option, Slot

from .bodies import LINEAR_CORES, ROWS, STEPS, UNITS, body_of, number

RNG = np.random.default_rng(5)
LENGTHS, OTHERS = np.array([STEPS, 3, 20, 0], np.int32), np.array([7, 30, STEPS, 1], np.int32)
MASK, RESETS = RNG.random((STEPS, ROWS)) < 0.7, RNG.random((STEPS, ROWS)) < 0.1
FEW = np.array([True, False, True, True] * (STEPS // 4))
FLOATS = {"w": RNG.normal(size=(UNITS, UNITS)) / 8, "h": RNG.normal(size=(ROWS, UNITS)) / 2}
FLOATS["x"] = RNG.normal(size=(STEPS, ROWS, UNITS)) / 2
TOKENS = RNG.integers(0, UNITS, (STEPS, ROWS)).astype(np.int32)
KEY = 11

Run = Callable[[Any], list[Any]]


# Options of strangers: each feeds a slot. `Fed` reads it, `Unread` does not, and the others see a list of arrays.


@dataclasses.dataclass(frozen=True)
class Fed(Option):
    SCALE = Slot("words.scale", rows=False)
    reads: bool = True

    def __call__(self, step: Any, consts: Any, state: Any, feed: Any) -> Any:
        if not self.reads:
            return step(consts, state, feed)
        x = feed.x[0] if isinstance(feed.x, tuple) else feed.x  # layers are arguments of a block
        x = x | {"x": x["x"] * number(self.SCALE.of(feed), x["x"])}
        return step(consts, state, feed._replace(x=(x,) if isinstance(feed.x, tuple) else x))

    def feeds(self, length: int) -> Mapping[Slot[Any], Any]:
        return {self.SCALE: scales(length)}


@dataclasses.dataclass(frozen=True)
class OfRows(Fed):
    SCALE = Slot("words.scale_of_rows", rows=True)

    def __call__(self, step: Any, consts: Any, state: Any, feed: Any) -> Any:
        scale = number(self.SCALE.of(feed), feed.x["x"])[:, None]
        return step(consts, state, feed._replace(x=feed.x | {"x": feed.x["x"] * scale}))

    def feeds(self, length: int) -> Mapping[Slot[Any], Any]:
        return {self.SCALE: scales(length)[:, None] * jnp.ones((1, ROWS), jnp.float32)}


@dataclasses.dataclass(frozen=True)
class AroundMask(Fed):
    """It scales what it is given by a number that is 1, and reads the slot."""

    around: ClassVar[Around] = Around.MASK

    def __call__(self, step: Any, consts: Any, state: Any, feed: Any) -> Any:
        one = 1 + 0 * self.SCALE.of(feed)
        return step(consts, jax.tree.map(lambda a: a * number(one, a), state), feed)


@dataclasses.dataclass(frozen=True)
class AroundRemat(AroundMask):
    around: ClassVar[Around] = Around.REMAT


def scales(length: int) -> Any:
    return jnp.linspace(0.5, 1.0, length, dtype=jnp.float32)


# Options by name: what is passed, to the library and by hand.

REVERSE = {"reverse": {"reverse": True}}
REMATS = {
    "remat=auto": {"remat": "auto"},
    "remat=step": {"remat": "step"},
    "remat=nested": {"remat": "nested"},
    "remat=chunk": {"remat": Remat(chunk=8)},
    "remat=policy": {"remat": Remat("everything_saveable", chunk=8)},
    "remat=levels": {"remat": Remat(levels=3)},
}
SAVES = {"save=last": {"save": "last"}, "save=4": {"save": 4}}
COSTS = {"unroll=2": {"unroll": 2}}
CHECKED = {"check_finite": {"check_finite": True}}
OWN = {"Fed": {"options": [Fed()]}, "Unread": {"options": [Fed(False)]}}
PLACED = {"AroundMask": {"options": [AroundMask()]}, "AroundRemat": {"options": [AroundRemat()]}}
WHILE_REMATS = {
    "remat=step": {"remat": "step"},
    "remat=chunk": {"remat": Remat(chunk=4)},
    "remat=policy": {"remat": Remat("dots_saveable")},
}
FILLS = {"fill=7": {"fill": 7.0}}
OF_SCAN = {**REVERSE, **REMATS, **SAVES, **COSTS, **CHECKED, **OWN, **PLACED, "truncate": {"truncate": 16}}
OF_ROWS = {
    "mask": {"mask": MASK},
    "traced lengths": {"lengths": "traced"},
    "only resets": {"lengths": None, "resets": RESETS},
    "resets": {"resets": RESETS},
    "reset_to": {"resets": RESETS, "reset_to": "half of init"},
    "fill=hold": {"fill": "hold"},
    **FILLS,
    **SAVES,
    **REVERSE,
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "scan": OF_SCAN,
    "fold": {name: OF_SCAN[name] for name in OF_SCAN if not name.startswith("save")} | {"lengths": {"lengths": LENGTHS}},
    "mask_scan": {
        **OF_ROWS, **REMATS, **COSTS, **CHECKED, **OWN, **PLACED, "OfRows": {"options": [OfRows()]},
        "chunk=8": {"chunk": 8}, "chunk=0": {"chunk": 0}, "compact": {"compact": True, "chunk": 8},
    },
    "while_scan": {**REVERSE, **WHILE_REMATS, **SAVES, **FILLS, **COSTS, **OWN, "by value": {"cond": "value"},
                   "by the axis": {"cond": "axis"}, "max_length": {"max_length": 40}, **CHECKED},
    "rows_while_scan": {**REVERSE, **WHILE_REMATS, **SAVES, **FILLS, **OWN, "by value": {"cond": "value"},
                        "by the axis": {"cond": "axis"}, "compact": {"compact": True}, **CHECKED},
    "fori": {**REVERSE, **COSTS, **CHECKED, **{name: REMATS[name] for name in ("remat=step", "remat=chunk")}},
    "linear_scan": {
        **{name: OF_ROWS[name] for name in OF_ROWS if name != "save=4"}, "lengths": {"lengths": LENGTHS}, "chunked": {"method": "chunked"}, "parallel": {"method": "parallel"},
        "remat=8": {"remat": 8}, "matrix": {"matrix": True},
    },
    "scan_layers": {name: OF_SCAN[name] for name in OF_SCAN if name not in ("truncate", "remat=auto")},
    "fold_layers": {name: OF_SCAN[name] for name in OF_SCAN if not name.startswith(("save", "truncate", "remat=auto"))},
}  # fmt: skip
FACTORS = ("number", "of x", "of weights", "of the axis")
"""In the place of a body's core, for `linear_scan`: what a is."""


def passed(program: Any) -> dict[str, Any]:
    """The options of a program together, with what a verb is always given."""
    always = {"mask_scan": {"lengths": LENGTHS}, "while_scan": {"cond": "count"}, "rows_while_scan": {"cond": "count"}}
    options = {**always.get(program.verb, {})}
    for name in program.options:
        options |= OPTIONS[program.verb][name]
    if "mask" in options:
        options.pop("lengths", None)
    return options


def has_padding(program: Any) -> bool:
    """Whether which steps are padding is known before the program runs."""
    options = passed(program)
    return "mask" in options or isinstance(options.get("lengths"), np.ndarray)


def padding_of(program: Any) -> np.ndarray:
    options = passed(program)
    valid = options["mask"] if "mask" in options else np.arange(STEPS)[:, None] < options["lengths"]
    return ~valid[..., None]


def run_of(program: Any, *, by_hand: bool) -> Run:
    """The program's loop, without its word."""

    def run(given: Any) -> list[Any]:
        options = passed(program)
        if options.get("lengths") is not None:
            is_traced = isinstance(options["lengths"], str)
            options["lengths"] = jnp.where(jnp.sum(given["w"]) > 0, LENGTHS, OTHERS) if is_traced else LENGTHS
        if program.verb == "linear_scan":
            return linear(program, given, options, by_hand)
        init, xs = init_of(program, given), {"x": given["x"], "tokens": jnp.asarray(TOKENS)}
        if "reset_to" in options:
            options["reset_to"] = init | {"h": init["h"] / 2}
        if "key" in program.parts:
            options["key"] = jax.random.key(KEY)
        verb = hand if by_hand else library
        return jax.tree.leaves(
            verb(program.verb, body_of(program.core, program.parts, given), init, xs, given, options)
        )

    return run


def init_of(program: Any, given: Any) -> dict[str, Any]:
    """The carry. The loop by hand needs one that varies over a mesh as what the step returns does."""
    h = given["h"]
    firsts = {name: lax.stop_gradient(given[name][(0,) * given[name].ndim]) for name in program.split}
    ties = {name: 0 * jnp.where(jnp.isfinite(first), first, 0) for name, first in firsts.items()}  # x may be padding
    m = jnp.full((ROWS, UNITS), 0.0 if program.core in LINEAR_CORES else 0.5, h.dtype)
    for name, tie in ties.items():
        h = h + tie
        m = m if name != "w" and "m of weights" in program.parts else m + tie
    init = {"h": h, "m": m, "n": jnp.zeros(ROWS, jnp.int32)}
    if "handed on" in program.parts:
        init["kept"] = 0.5 * h
    if program.verb in ("while_scan", "rows_while_scan"):
        init["end"] = jnp.asarray(np.minimum(LENGTHS + 1, 30) if program.verb == "rows_while_scan" else np.full(ROWS, 30), jnp.int32)  # fmt: skip
    return init


# By the library.


def condition(kind: str, rows: bool) -> Callable[[Any], Any]:
    def cond(c: Any) -> Any:
        if kind == "value":
            going = jnp.max(jnp.abs(c["m"]), -1) + jnp.max(jnp.abs(c["h"]), -1) * 0.1 < 0.9
        else:
            end = c["end"] if kind == "count" else c["end"] - 3 * lax.axis_index("i")
            going = c["n"] < end
        return going if rows else jnp.all(going)

    return cond


def library(verb: str, body: Any, init: Any, xs: Any, given: Any, options: dict[str, Any]) -> Any:
    if verb in ("while_scan", "rows_while_scan"):
        cond = condition(options.pop("cond"), verb == "rows_while_scan")
        return tuple(treescan.while_scan(cond, body, init, xs, **options)[:3])
    if verb == "fori":
        upper = jnp.where(jnp.sum(given["w"]) > 0, 30, 40)
        at = functools.wraps(body)(lambda i, c, **keys: body(c, jax.tree.map(lambda a: a[i], xs), **keys)[0])
        at.__signature__ = flipped(body, "i")
        return treescan.fori(0, upper, at, init, max_length=STEPS, **options)
    if verb == "fold":
        return treescan.fold(functools.wraps(body)(lambda c, x, **keys: body(c, x, **keys)[0]), init, xs, **options)
    if verb in ("scan_layers", "fold_layers"):
        pair = verb == "scan_layers"
        block = functools.wraps(body)(lambda x, c, **keys: body(c, x, **keys) if pair else body(c, x, **keys)[0])
        block.__signature__ = flipped(body, "x")
        return getattr(treescan, verb)(block, init, xs, **options)
    return getattr(treescan, verb)(body, init, xs, **options)


def flipped(body: Any, first: str) -> Any:
    """The signature of a body whose carry comes second."""
    carry, x, *keywords = body.__signature__.parameters.values()
    return body.__signature__.replace(parameters=[x.replace(name=first), carry, *keywords])


# By hand.


def hand(verb: str, body: Any, init: Any, xs: Any, given: Any, options: dict[str, Any]) -> Any:
    """What the verb means."""
    rows, going, valid = verb != "while_scan", None, None
    steps = jnp.arange(STEPS, dtype=jnp.int32)
    if verb in ("while_scan", "rows_while_scan"):
        going = condition(options["cond"], rows)
        count = options.get("max_length", STEPS)
        xs, steps = jax.tree.map(lambda a: a[:count], xs), steps[:count]
    elif verb == "fori":
        valid = steps < jnp.where(jnp.sum(given["w"]) > 0, 30, 40)
    elif options.get("mask") is not None:
        valid = jnp.asarray(options["mask"])
    elif options.get("lengths") is not None:
        valid = steps[:, None] < options["lengths"][None]
    for option in options.get("options", ()):
        if type(option) in (Fed, OfRows) and option.reads:
            scale = number(scales(len(steps)), xs["x"])[:, None, None]
            xs = xs | {"x": xs["x"] * scale}
    last, ys, alive = masked(body, init, xs, valid, going, options)
    if verb in ("fold", "fori", "fold_layers"):
        return last
    ys = outputs(ys, alive, options)
    if going is None:
        return last, ys
    return last, ys, jnp.sum(alive, 0, dtype=jnp.int32)


def masked(body: Any, init: Any, xs: Any, valid: Any, going: Any, options: dict[str, Any]) -> Any:
    """A `lax.scan` over all steps: what a row is not to take is computed on values that are good, and not chosen."""
    count, reverse = len(xs["x"]), options.get("reverse", False)
    steps, key, truncate = jnp.arange(count), options.get("key"), options.get("truncate")
    resets = None if options.get("resets") is None else jnp.asarray(options["resets"])
    if resets is not None:
        taken = jnp.ones_like(resets) if valid is None else valid
        resets = begun_in_reverse(resets & taken, taken) if reverse else resets & taken
    takes = set(body.__signature__.parameters)
    if valid is not None:
        xs = {name: choose(valid, leaf, jnp.zeros_like(leaf)) for name, leaf in xs.items()}
    to = options.get("reset_to", init)

    def step(state: Any, each: Any) -> Any:
        carry, alive, begun = state
        t, x, own, reset = each
        if going is not None:
            alive = alive & going(carry)
        now = alive if own is None else own if alive is None else alive & own
        if reset is not None:
            carry = jax.tree.map(lambda a, b: choose(reset, a, b), to, carry)
        if truncate is not None:
            cut = (t % truncate == (truncate - 1 if reverse else 0)) & (t != (count - 1 if reverse else 0))
            carry = jax.tree.map(lambda a: choose(cut, lax.stop_gradient(a), a), carry)
        of_rows = jnp.broadcast_to(True if now is None else now, (ROWS,))
        told = {"valid": of_rows, "first": of_rows & ~begun if reset is None else of_rows & (~begun | reset)}
        told |= {} if key is None else {"key": jax.random.fold_in(key, t)}
        new, y = body(carry, x, **{name: value for name, value in told.items() if name in takes})
        if now is not None:
            new = jax.tree.map(lambda a, b: choose(now, a, b), new, carry)
        return (new, alive, begun | of_rows), (y, now)

    alive = None if going is None else jnp.ones_like(going(init))
    begun = jnp.zeros(ROWS, bool)
    state, (ys, now) = lax.scan(step, (init, alive, begun), (steps, xs, valid, resets), reverse=reverse)
    return state[0], ys, now


def begun_in_reverse(begins: Any, valid: Any) -> Any:
    """Where a row restarts in reverse: at the valid step that comes before one that begins a segment."""
    count = len(begins)
    place = jnp.where(valid, jnp.arange(count)[:, None], count)
    after = lax.cummin(jnp.concatenate([place[1:], jnp.full((1, place.shape[1]), count)]), reverse=True)
    begins = jnp.concatenate([begins, jnp.zeros((1, begins.shape[1]), bool)])
    return valid & jnp.take_along_axis(begins, after, 0)


def choose(flag: Any, new: Any, old: Any) -> Any:
    """By rows, or for all of a leaf."""
    return jnp.where(flag.reshape(flag.shape + (1,) * (new.ndim - flag.ndim)), new, old)


def outputs(ys: Any, valid: Any, options: dict[str, Any]) -> Any:
    """Filled, and as `save` says: what a row's last step returned is looked for afterwards."""
    fill, save, reverse = options.get("fill", 0), options.get("save", "all"), options.get("reverse", False)

    def of(y: Any) -> Any:
        count = len(y)
        empty = jnp.full_like(y[0], 0 if fill == "hold" else fill)
        if valid is None:
            return y[0 if reverse else -1] if save == "last" else y[3::4] if save == 4 else y
        steps = jnp.arange(count).reshape(-1, *[1] * (valid.ndim - 1))
        place = (lax.cummin if reverse else lax.cummax)(
            jnp.where(valid, steps, count if reverse else -1), reverse=reverse
        )
        known = (place >= 0) & (place < count)
        place = jnp.clip(place, 0, count - 1)
        held = jnp.take_along_axis(y, place.reshape(place.shape + (1,) * (y.ndim - place.ndim)), 0)
        held = choose(known, held, empty[None])
        filled = held if fill == "hold" else choose(valid, y, empty[None])
        return held[0 if reverse else -1] if save == "last" else filled[3::4] if save == 4 else filled

    return jax.tree.map(of, ys)


# Linear recurrences.


def linear(program: Any, given: Any, options: dict[str, Any], by_hand: bool) -> list[Any]:
    """The recurrence whose factors are `program.core`, and whose state is h."""
    w, b, h = given["w"], given["x"], init_of(program, given)["h"]
    matrix, valid = "matrix" in options, None
    if options.get("mask") is not None:
        valid = jnp.asarray(options["mask"])
    elif options.get("lengths") is not None:
        valid = jnp.arange(STEPS, dtype=jnp.int32)[:, None] < options["lengths"][None]
    good = b if valid is None else choose(valid, b, jnp.zeros_like(b))
    a = {"number": 0.5, "of x": jnp.tanh(good), "of weights": jnp.tanh(w[:1, None]), "of the axis": 0.5}[program.core]
    if program.core == "of the axis":
        a = 0.5 + 0.1 * number(lax.axis_index("i"), b)
    if matrix:
        a = 0.7 * w[None, None] + 0.1 * (a[..., None] if jnp.ndim(a) else a)
    if program.nan and program.core == "of x":
        a = choose(valid, a, jnp.full_like(a, jnp.nan))
    if "reset_to" in options:
        options["reset_to"] = h / 2
    if not by_hand:
        return jax.tree.leaves(treescan.linear_scan(a, b, h, **options))
    a = jnp.broadcast_to(a, (*b.shape, UNITS) if matrix else b.shape)

    def step(h: Any, x: Any) -> Any:
        h = jnp.einsum("bij,bj->bi", x["a"], h) + x["x"] if matrix else x["a"] * h + x["x"]
        return h, h

    step.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
    last, hs, alive = masked(step, h, {"a": a, "x": b}, valid, None, options)
    return jax.tree.leaves((last, outputs(hs, alive, options)))
