"""Examples of `scan`, `fold`, `accumulate`, `fori` and `while_scan`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from treescan import Remat
from treescan.meters import AbstractProgressMeter, Progress

from .example import KEY, D, Form, Given, State, T, Verb, X, Y, body_of, carried, cell, drawn, flag, has, start, values
from .own import OWN


@dataclasses.dataclass(frozen=True)
class Silent(AbstractProgressMeter):
    """A meter that shows nothing."""

    def init(self, label: str, total: int | None) -> None:
        return None

    def step(self, bar: Any, done: int, shown: Mapping[str, float]) -> None:
        pass

    def close(self, bar: Any) -> None:
        pass


SILENT = Progress(show=lambda carry: {"n": jnp.max(carry.n)}, updates=2, meter=Silent())
COSTS = {
    "unroll=2": Form("unroll", {"unroll": 2}, free=True),
    "unroll=True": Form("unroll", {"unroll": True}, free=True),
    'remat="step"': Form("remat", {"remat": "step"}, free=True),
    'remat="nested"': Form("remat", {"remat": "nested"}, free=True),
    "remat=Remat(levels=3)": Form("remat", {"remat": Remat("dots_saveable", levels=3)}, free=True),
    "remat=Remat(chunk=2)": Form("remat", {"remat": Remat(levels=2, chunk=2)}, free=True),
    "remat=Remat.fit(bytes)": Form("remat", {"remat": Remat.fit(10_000)}, free=True),
    'remat=Remat(offload="pinned_host")': Form("remat", {"remat": Remat(offload="pinned_host")}, free=True),
}
SHARED = {
    "reverse": Form("reverse", {"reverse": True}),
    **COSTS,
    "in_axes": Form("in_axes", {"in_axes": X(1, 0)}),
    "in_axes=(-1, None)": Form("in_axes", {"in_axes": X(-1, None)}),
    "key": Form("key", {"key": KEY}, has("key")),
    "truncate": Form("truncate", {"truncate": 2}),
    "progress": Form("progress", {"progress": SILENT}, free=True),
    "no xs": Form("xs", {"length": T}, has("no xs")),
    "static leaf": Form("static leaf", how=has("static")),
    "custom carry": Form("custom carry", how=has("ema")),
    "annotated body": Form("annotated body", how=has("annotated")),
    **OWN,
}
CHECKED = {
    **SHARED,
    "check_finite": Form("check_finite", {"check_finite": True}, free=True),
    'check_finite="return"': Form("check_finite", {"check_finite": "return"}),
}
PART = {"offset": Form("offset", {"offset": 4})}
OUTPUTS = {
    "out_axes": Form("out_axes", {"out_axes": Y(1, 0)}),
    "out_axes=-1": Form("out_axes", {"out_axes": -1}),
    'save="last"': Form("save", {"save": "last"}),
    "save=2": Form("save", {"save": 2}),
    "save=positions": Form("save", {"save": np.array([0, 3])}),
    "save=None": Form("save", {"save": None}),
    'save=(2, "last")': Form("save", {"save": Y(2, "last")}),
    'save=(positions, "last")': Form("save", {"save": Y(range(0, 4, 2), "last")}),
}
ALONE = has(
    "unroll=True", "remat=Remat(levels=3)", "remat=Remat(chunk=2)", 'remat=Remat(offload="pinned_host")',
    "out_axes=-1", "save=None", 'save=(2, "last")', 'save=(positions, "last")', "in_axes=(-1, None)",
)  # fmt: skip


def step_of(given: Given, how: frozenset[str], *, pair: bool = True) -> Any:
    """The body over `X`; with `pair` it returns an output too."""

    def step(state: State, x: X | None, **keywords: Any) -> Any:
        linear = "linear" in how
        term = None if x is None else x.a + x.b if linear else x.a * x.b
        carry, y = cell(given["w"], state, term, how, **keywords)
        return (carry, y) if pair else carry

    x = {} if "no xs" in how else {"b": X}
    return body_of(step, 2, how, {"a": State, **x, "return": tuple[State, Y] if pair else State})


def laid_out(given: Given, options: Mapping[str, Any], how: frozenset[str]) -> X | None:
    """xs with their steps where the options say."""
    if "no xs" in how:
        return None
    axes = options.get("in_axes", 0)
    axes = axes if isinstance(axes, X) else X(axes, axes)
    parts = [
        given[name][0] if axis is None else jnp.moveaxis(given[name], 0, axis) for name, axis in axes._asdict().items()
    ]
    return X(*parts)


def _program(name: str, pair: bool) -> Any:
    def program(lib: Any, options: Mapping[str, Any], how: frozenset[str], given: Given) -> Any:
        body, init = carried(lib, step_of(given, how, pair=pair), start(given, how, jnp.int32(0)), how)
        xs = laid_out(given, options, how)
        if name == "while_scan":
            init = init._replace(n=jnp.where(flag(given), jnp.int32(0), jnp.int32(1)))
            return values(lib.while_scan(lambda state: state.n < 3, body, init, xs, **options))
        return values(getattr(lib, name)(body, init, xs, **options))

    return program


def _fori(lib: Any, options: Mapping[str, Any], how: frozenset[str], given: Given) -> Any:
    def step(i: Any, state: State, **keywords: Any) -> Any:
        here = 0.0 if "linear" in how else jnp.asarray(i, jnp.float32) / 10
        return cell(given["w"], state, jnp.broadcast_to(here, (D,)), how, **keywords)[0]

    body = body_of(step, 2, how, {"a": Y.__annotations__["n"], "b": State, "return": State})
    body, init = carried(lib, body, start(given, how, jnp.int32(0)), how)
    if "traced" in how:
        lower, upper = jnp.where(flag(given), jnp.int32(1), jnp.int32(2)), jnp.int32(4)
        return values(lib.fori(lower, upper, body, init, **options))
    return values(lib.fori(1, 5, body, init, **options))


GIVEN = {"w": drawn(0, D, D), "h": abs(drawn(1, D)), "a": drawn(2, T, D), "b": drawn(3, T, D)}
FORI = {name: form for name, form in CHECKED.items() if form.option in (
    "reverse", "unroll", "progress", "check_finite", "key", "static leaf", "custom carry",
    "annotated body", "options")}  # fmt: skip
WHILE = {
    **CHECKED,
    **PART,
    **OUTPUTS,
    "max_length": Form("max_length", {"max_length": 4}),
    "fill": Form("fill", {"fill": Y(7, -1)}),
    "no xs": Form("xs", {"max_length": T}, has("no xs")),
}
VERBS = {
    "scan": Verb(_program("scan", True), {**CHECKED, **PART, **OUTPUTS}, GIVEN, ALONE),
    "fold": Verb(_program("fold", False), {**CHECKED, **PART}, GIVEN, ALONE, brief=True),
    "accumulate": Verb(
        _program("accumulate", False),
        {**CHECKED, **PART, **OUTPUTS, "out_axes": Form("out_axes", {"out_axes": State(1, 0, 0)}),
         'save=(2, "last")': Form("save", {"save": State(2, "last")}),
         'save=(positions, "last")': Form("save", {"save": State(range(0, 4, 2), "last")})},
        GIVEN, ALONE, brief=True,
    ),
    "fori": Verb(
        _fori,
        {**FORI, "max_length": Form("max_length", {"max_length": 4}, free=True),
         "traced bounds": Form("traced bounds", {"max_length": 4}, has("traced"))},
        {"w": GIVEN["w"], "h": GIVEN["h"]},
    ),
    "while_scan": Verb(_program("while_scan", True), WHILE, GIVEN, ALONE),
}  # fmt: skip
