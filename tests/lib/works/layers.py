"""Examples of `scan_layers` and `fold_layers`: a stack of layers, or two that take turns."""

import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .example import KEY, D, Form, Given, State, Verb, Y, body_of, carried, cell, drawn, has, start, values
from .loops import COSTS, OUTPUTS, PART, SILENT
from .own import OWN

LAYERS = 5


class Layer(NamedTuple):
    w: Float[Array, "d d"]


class Own(NamedTuple):
    a: Any


FORMS = {
    "reverse": Form("reverse", {"reverse": True}),
    **COSTS,
    "key": Form("key", {"key": KEY}, has("key")),
    "xs": Form("xs", how=has("xs")),
    "in_axes": Form("in_axes", {"in_axes": Own(1)}, has("xs")),
    "state": Form("state", how=has("state")),
    "args": Form("args", how=has("args")),
    "check_finite": Form("check_finite", {"check_finite": True}, free=True),
    'check_finite="return"': Form("check_finite", {"check_finite": "return"}),
    **PART,
    "pattern": Form("pattern", how=has("pattern")),
    "static leaf": Form("static leaf", how=has("static")),
    "progress": Form("progress", {"progress": SILENT}, free=True),
    "custom carry": Form("custom carry", how=has("ema")),
    "annotated body": Form("annotated body", how=has("annotated")),
    **OWN,
}


def _block(given: Given, how: frozenset[str], *, pair: bool) -> Any:
    def block(layer: Layer, state: State, *shares: Any, **keywords: Any) -> Any:
        terms = [share.a if isinstance(share, Own) else share for share in shares]
        carry, y = cell(layer.w, state, functools.reduce(operator.add, terms) if terms else None, how, **keywords)
        if "state" in how:
            own = Own(shares["xs" in how].a / 2 + carry.h)
            return (carry, own, y) if pair else (carry, own)
        return (carry, y) if pair else carry

    returned = (State, *((Own,) if "state" in how else ()), *((Y,) if pair else ()))
    types = {"a": Layer, "b": State, "return": tuple[returned] if len(returned) > 1 else State}
    return body_of(block, 2 + len({"xs", "state", "args"} & how), how, types, "block")


def _program(name: str, pair: bool) -> Any:
    def program(lib: Any, options: Mapping[str, Any], how: frozenset[str], given: Given) -> Any:
        pattern, own = "pattern" in how, "xs" in how
        block, x = carried(lib, _block(given, how, pair=pair), start(given, how, jnp.int32(0)), how)
        layers, xs = Layer(given["w"]), None
        if own:
            xs = Own(jnp.moveaxis(given["a"], 0, options["in_axes"].a) if "in_axes" in options else given["a"])
        if pattern:
            layers = [Layer(given["w"][:3]), Layer(given["w"][3:])]
            if own:
                first, second = (xs.a[:3], xs.a[3:]) if "in_axes" not in options else (xs.a[:, :3], xs.a[:, 3:])
                xs, block = [Own(first), Own(second)], block
            block = [block, block] if not isinstance(block, list) else block
        others = {"args": (given["b"],)} if "args" in how else {}
        if "state" in how:
            others["state"] = [Own(given["a"][:3]), Own(given["a"][3:])] if pattern else Own(given["a"])
        return values(getattr(lib, name)(block, x, layers, xs, **others, **options))

    return program


GIVEN = {
    "w": drawn(0, LAYERS, D, D), "h": abs(drawn(1, D)), "a": drawn(2, LAYERS, D), "b": drawn(3, D),
}  # fmt: skip
ALONE = has(
    "unroll=True", "remat=Remat(levels=3)", "remat=Remat(chunk=2)", 'remat=Remat(offload="pinned_host")',
    "out_axes=-1", "save=None",
)  # fmt: skip
_OUTPUTS = {name: form for name, form in OUTPUTS.items() if '"last")' not in name}
_OUTPUTS["save=positions"] = Form("save", {"save": range(2)})  # the second stack of the pattern has no more
_OUTPUTS["out_axes"] = Form("out_axes", {"out_axes": Y(1, 0)})
VERBS = {
    "scan_layers": Verb(_program("scan_layers", True), {**FORMS, **_OUTPUTS}, GIVEN, ALONE),
    "fold_layers": Verb(_program("fold_layers", False), FORMS, GIVEN, ALONE, brief=True),
}
