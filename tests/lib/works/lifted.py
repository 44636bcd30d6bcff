"""Examples of `lift`: named collections of variables, and streams of keys."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from treescan.lifting import In, Out

from . import plain
from .example import DECAY, KEY, D, Form, Given, State, T, Verb, X, body_of, carried, cell, drawn, has, start, values
from .loops import COSTS, OUTPUTS, SILENT, laid_out


def _halved(variables: Any, rngs: Any) -> tuple[Any, Any]:
    return {**variables, "params": jax.tree.map(lambda leaf: leaf / 2, variables["params"])}, rngs


def _as_it_is(collection: Any, axis: int, added: bool) -> Any:
    return collection


FORMS = {
    "variable_axes": Form("variable_axes", {"variable_axes": {"params": 0}}, has("own params")),
    "variable_axes=In(1)": Form("variable_axes", {"variable_axes": {"params": In(1)}}, has("own params")),
    "variable_axes=Out(1)": Form("variable_axes", {"variable_axes": {"seen": Out(1)}}, has("out")),
    "variable_carry": Form("variable_carry", {"variable_carry": "sums"}, has("sums")),
    "split_rngs=True": Form("split_rngs", {"split_rngs": {"noise": True}}, has("noise")),
    "split_rngs=False": Form("split_rngs", {"split_rngs": {"noise": False}}, has("noise")),
    "in_axes": Form("in_axes", {"in_axes": X(1, 0)}),
    "in_axes=(-1, None)": Form("in_axes", {"in_axes": X(-1, None)}),
    "no xs": Form("xs", {"length": T}, has("no xs")),
    "reverse": Form("reverse", {"reverse": True}),
    "data_transform": Form("data_transform", {"data_transform": _halved}),
    "metadata_fn": Form("metadata_fn", {"metadata_fn": _as_it_is}, free=True),
    **COSTS,
    "progress": Form("progress", {"progress": SILENT}, free=True),
    "check_finite": Form("check_finite", {"check_finite": True}, free=True),
    **OUTPUTS,
    "static leaf": Form("static leaf", how=has("static")),
    "custom carry": Form("custom carry", how=has("ema")),
    "annotated body": Form("annotated body", how=has("annotated")),
}
ALONE = has(
    "unroll=True", "remat=Remat(levels=3)", "remat=Remat(chunk=2)", 'remat=Remat(offload="pinned_host")',
    "out_axes=-1", "save=None", 'save=(2, "last")', "in_axes=(-1, None)", "split_rngs=False", "variable_axes=In(1)",
    "remat=Remat.fit(bytes)",
)  # fmt: skip


def _function(how: frozenset[str]) -> Any:
    def run(variables: Any, rngs: Any, state: State, x: X | None = None) -> Any:
        term = None if x is None else x.a + x.b if "linear" in how else x.a * x.b
        carry, y = cell(variables["params"]["w"], state, term, how, rngs.get("noise"))
        updates: dict[str, Any] = {}
        if "sums" in how:
            carry = carry._replace(h=carry.h + variables["sums"]["s"])
            updates["sums"] = {"s": carry.h / 2}
        if "out" in how:
            updates["seen"] = {"h": 2 * carry.h}
        return (carry, y), updates

    types = {"c": State, **({} if "no xs" in how else {"d": X})}
    return body_of(run, 2 + len(types), how & {"annotated"}, types)


def _averaged(step: Any) -> Any:
    def fn(variables: Any, rngs: Any, state: State, *x: Any) -> Any:
        (carry, y), updates = step(variables, rngs, state, *x)
        return (carry._replace(h=DECAY * state.h + (1 - DECAY) * carry.h), y), updates

    return fn


def program(lib: Any, options: Mapping[str, Any], how: frozenset[str], given: Given) -> Any:
    step, init = _function(how), start(given, how, jnp.int32(0))
    if lib is plain:
        step = _averaged(step) if "ema" in how else step
    else:
        init = carried(lib, step, init, how)[1]
    xs = laid_out(given, options, how)
    if "own params" in how:
        axis = options["variable_axes"]["params"]
        axis = axis if isinstance(axis, int) else axis.axis
        roles, w = {}, jnp.moveaxis(given["ws"], 0, axis)
    else:
        roles, w = {"variable_broadcast": "params"}, given["w"]
    variables = {"params": {"w": w}, **({"sums": {"s": given["h"]}} if "sums" in how else {})}
    rngs = {"noise": KEY} if "noise" in how else {}
    # A tree of axes is a prefix of the arguments, of which there is one.
    passed = {**options, **({"in_axes": (options["in_axes"],)} if "in_axes" in options else {})}
    return values(
        getattr(lib, "lifting", lib).lift(step, **roles, **passed)(
            variables, rngs, init, *(() if xs is None else (xs,))
        )
    )


GIVEN = {
    "w": drawn(0, D, D), "ws": drawn(4, T, D, D), "h": abs(drawn(1, D)), "a": drawn(2, T, D),
    "b": drawn(3, T, D),
}  # fmt: skip
VERBS = {"lift": Verb(program, FORMS, GIVEN, ALONE)}
