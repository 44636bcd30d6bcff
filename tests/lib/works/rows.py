"""Examples of `mask_scan`: rows of unequal length."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treescan

from . import plain
from .example import D, Form, Given, State, T, Verb, X, Y, body_of, carried, cell, drawn, flag, has, start, values
from .loops import ALONE, CHECKED, OUTPUTS, PART

B = 3
LENGTHS = np.array([4, 2, 0])
VALID = np.arange(T)[:, None] < LENGTHS
MASK = np.array([[0, 1, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]], bool)
RESETS = np.array([[1, 0, 0], [0, 1, 1], [1, 0, 0], [0, 1, 0], [1, 0, 0]], bool)
PARTS = {"in_axes": 'time_axis["xs"]', "out_axes": 'time_axis["ys"]'}
SHARED = {
    name.replace(form.option, PARTS[form.option]) if (of_time := form.option in PARTS) else name: (
        form._replace(option="time_axis") if of_time else form
    )
    for name, form in {**CHECKED, **PART, **OUTPUTS}.items()
}
FORMS = {
    **SHARED,
    'save=(2, "last")': Form("save", {"save": Y(2, "last")}),
    "mask": Form("lengths", {"mask": MASK}),
    "traced lengths": Form("lengths", how=has("traced")),
    "Padded": Form("lengths", how=has("padded")),
    "resets": Form("resets", {"resets": RESETS}),
    "reset_to": Form("reset_to", {"resets": RESETS, "reset_to": "another state"}),
    "time_axis": Form("time_axis", {"time_axis": 1}),
    'row_axes["carry"]': Form("row_axes", {"carry_axes": State(1, 0)}),
    'row_axes["carry"]=(0, None)': Form("row_axes", {"carry_axes": State(0, None)}, has("shared count")),
    'row_axes["x"]': Form("row_axes", {"x_axes": X(1, 0)}),
    'row_axes["x"]=(0, None)': Form("row_axes", {"x_axes": X(0, None)}),
    'row_axes["y"]': Form("row_axes", {"y_axes": Y(1, 0)}),
    'row_axes["y"]=(0, None)': Form("row_axes", {"y_axes": Y(0, None)}),
    "fill": Form("fill", {"fill": Y(7, -1)}),
    'fill="hold"': Form("fill", {"fill": "hold"}),
    "chunk=2": Form("chunk", {"chunk": 2}, free=True),
    "chunk=0": Form("chunk", {"chunk": 0}, free=True),
    "compact": Form("compact", {"compact": True, "chunk": 2}, free=True),
    "compact=(1, 3)": Form("compact", {"compact": (1, 3), "chunk": 2}, free=True),
    "valid": Form("valid", how=has("valid")),
    "first": Form("first", how=has("first")),
    "one row": Form("batch", how=has("one row")),
}


def _axes(options: Mapping[str, Any], name: str, cls: Any) -> Any:
    said = options.get(name, 0)
    return said if isinstance(said, cls) else cls(said, said)


def _step(given: Given, options: Mapping[str, Any], how: frozenset[str]) -> Any:
    """The body for a batch of rows, and for a single one: axes that lead elsewhere are brought to the front."""
    axes = {"carry_axes": State, "x_axes": X, "y_axes": Y}
    carry_axes, x_axes, y_axes = (_axes(options, *each) for each in axes.items())

    def front(value: Any, axis: int | None) -> Any:
        return jnp.moveaxis(value, axis, 0) if axis and value.ndim > 1 else value

    def back(value: Any, axis: int | None) -> Any:
        return jnp.moveaxis(value, 0, axis) if axis and value.ndim > 1 else value

    def step(state: State, x: X | None, **keywords: Any) -> Any:
        h = front(state.h, carry_axes.h)
        term = None
        if x is not None:
            a, b = front(x.a, x_axes.a), x.b
            a, b = jnp.broadcast_to(a, h.shape), jnp.broadcast_to(b, h.shape)
            term = a + b if "linear" in how else a * b
        carry, y = cell(given["w"], state._replace(h=h), term, how, **keywords)
        count = jnp.broadcast_to(y.n, h.shape[:-1])
        if y_axes.n is None:
            count = jnp.int32(4)
        return carry._replace(h=back(carry.h, carry_axes.h)), Y(back(y.h, y_axes.h), count)

    # The annotations have rows in front.
    a, b, y = (Any if name in options else kind for name, kind in axes.items())
    return body_of(step, 2, how, {"a": a, **({} if "no xs" in how else {"b": b}), "return": tuple[a, y]})


def _laid_out(given: Given, options: Mapping[str, Any], how: frozenset[str]) -> X | None:
    """xs `[T, B, D]` with their steps and rows where the options say, and NaN where no step is valid."""
    if "no xs" in how:
        return None
    steps, rows = _axes(options, "in_axes", X), _axes(options, "x_axes", X)
    if "in_axes" not in options:
        steps = X(*[options.get("time_axis", 0)] * 2)
    tree = isinstance(options.get("x_axes"), X)
    parts = []
    for name, time, row in zip(X._fields, steps, rows, strict=True):
        leaf = given[name]  # [T, B, D], or [T, D] for one row
        whole = time is None
        if "one row" not in how:
            shared = row is None or (whole and not tree)
            if shared:
                leaf = _first_row(leaf)
            else:
                leaf = leaf if whole else jnp.where(_good(options, how, given), leaf, jnp.nan)
                leaf = jnp.moveaxis(leaf, 1, 1 + row)
        parts.append(leaf[0] if whole else jnp.moveaxis(leaf, 0, time))
    return X(*parts)


def _first_row(leaf: Any) -> Any:
    """The first row of `[..., B, D]`, in which rows may be split over devices."""
    return jnp.sum(leaf * np.broadcast_to(np.eye(B, 1, dtype=np.float32), leaf.shape), -2)


def _good(options: Mapping[str, Any], how: frozenset[str], given: Given) -> Any:
    """Where xs are read, bool[T, B, 1]."""
    if "traced" in how:
        return (jnp.arange(T)[:, None] < lengths_by_weights(given)[None])[..., None]
    if "mask" in options:
        return options["mask"][..., None]
    return np.ones_like(VALID)[..., None] if "no lengths" in how else VALID[..., None]


def lengths_by_weights(given: Given) -> Any:
    return jnp.where(flag(given), jnp.asarray(LENGTHS), jnp.asarray([1, 5, 3]))


def program(lib: Any, options: Mapping[str, Any], how: frozenset[str], given: Given) -> Any:
    one, passed = "one row" in how, dict(options)
    for name in ("mask", "resets"):
        if name in passed:
            passed[name] = passed[name][:, 0] if one else np.moveaxis(passed[name], 0, passed.get("time_axis", 0))
    if "mask" not in passed and "no lengths" not in how:
        lengths = (lengths_by_weights(given) if "traced" in how else LENGTHS) + passed.get("offset", 0)
        passed["lengths"] = lengths[0] if one else lengths
    given = {name: leaf if not one or name == "w" else _first_row(leaf) for name, leaf in given.items()}
    carry_axes = _axes(options, "carry_axes", State)
    count = jnp.zeros(() if one or carry_axes.n is None else B, jnp.int32)
    body, init = _step(given, options, how), start(given, how, count)
    if carry_axes.h and not one:
        init = init._replace(h=jnp.moveaxis(init.h, 0, carry_axes.h))
    if lib is plain and "valid" in how:
        body = functools.partial(body, valid=jnp.asarray(True))
    if "reset_to" in passed:
        act = init.act if lib is plain else None  # None stands for what `init` has
        passed["reset_to"] = carried(lib, body, State(2 * init.h, init.n + 3, act), how)[1]
    body, init = carried(lib, body, init, how)
    with jax.debug_nans(False):  # what the user has in the padding
        xs = _laid_out(given, options, how)
    if "padded" in how and lib is not plain:
        xs = treescan.Padded(xs, jnp.asarray(passed.pop("lengths")))
    if lib is plain and "first" in how:
        passed["tells_first"] = True
    return values(lib.mask_scan(body, init, xs, **(passed if lib is plain else _as_taken(passed))))


def _as_taken(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the plain meaning as `mask_scan` takes them: one says where rows are, and one where time is."""
    taken = dict(options)
    rows = {part: taken.pop(f"{part}_axes") for part in ("carry", "x", "y") if f"{part}_axes" in taken}
    time = {part: taken.pop(name) for part, name in (("xs", "in_axes"), ("ys", "out_axes")) if name in taken}
    if time:
        taken["time_axis"] = dict.fromkeys(("xs", "ys", "mask"), taken.get("time_axis", 0)) | time
    return taken | ({"row_axes": rows} if rows else {})


GIVEN = {"w": drawn(0, D, D), "h": abs(drawn(1, B, D)), "a": drawn(2, T, B, D), "b": drawn(3, T, B, D)}
VERBS = {
    "mask_scan": Verb(
        program,
        FORMS,
        GIVEN,
        ALONE.union(
            {
                'time_axis["xs"]=(-1, None)',
                'time_axis["ys"]=-1',
                'row_axes["carry"]=(0, None)',
                'row_axes["x"]=(0, None)',
            },
            {'row_axes["y"]=(0, None)', "compact=(1, 3)", "chunk=0"},
        ),
    )
}
