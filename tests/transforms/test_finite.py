"""`check_finite` in every kind of loop: what is planted is named, and nothing else is.

A loop of the table runs one body, `advance`, over the flags and numbers of T steps and B rows. Where a flag is not 1, a
value of that row goes wrong. In steps that a row does not take, flags are wrong and numbers are NaN.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import go, named

import treescan
from treescan.lifting import In

pytestmark = pytest.mark.quick

T, B = 7, 3


# --- what goes wrong --------------------------------------------------------------------------------------------------


def spoil(leaf: Any, flag: Any) -> Any:
    return jnp.log(flag) + leaf * 0.5


def burst(leaf: Any, flag: Any) -> Any:
    return jnp.divide(1.0, flag) + leaf * 0.5


class Flaw(NamedTuple):
    """What is planted.

    Attributes:
        rule: changes a leaf by a flag, well where the flag is 1.
        flag: what makes it go wrong.
        kind: what the leaf becomes.
        operation: where.
    """

    rule: Callable[[Any, Any], Any]
    flag: float
    kind: str
    operation: str


FLAWS = (Flaw(spoil, -1.0, "NaN", "log"), Flaw(burst, 0.0, "inf", "div"))


def advance(rule: Any, h: Any, x: Any) -> Any:
    wide = h["cell"].ndim > 1
    flag, number, weight = (leaf[None] if wide else leaf for leaf in (*x, h["weight"]))
    cell = rule(h["cell"], flag) + number * weight
    return {**h, "cell": cell, "count": h["count"] + 1}, cell


class Data(NamedTuple):
    """The flags and numbers of steps, [T, B], and which steps a row takes: a number of them, and each of them."""

    flags: Any
    numbers: Any
    lengths: Any
    valid: Any


def start(scale: Any) -> dict[str, Any]:
    return {"cell": jnp.ones(B) * scale, "weight": jnp.ones(B) * scale, "count": jnp.zeros(B, jnp.int32)}


# --- the loops --------------------------------------------------------------------------------------------------------


def steps(rule: Any, data: Data, scale: Any, verb: str = "scan", **options: Any) -> Any:
    xs, h, body = data[:2], start(scale), functools.partial(advance, rule)
    if verb == "scan":
        return treescan.scan(body, h, xs, **options)
    return treescan.accumulate(lambda h, x: body(h, x)[0], h, xs, **options)


def sharing(rule: Any, h: Any, x: Any, valid: Any) -> Any:
    """A leaf that all rows share changes with those that take the step."""
    own, y = advance(rule, {name: leaf for name, leaf in h.items() if name != "shared"}, x)
    shared = h["shared"] * 0.9 + jnp.where(valid, x[1], 0.0).mean()
    return {**own, "cell": own["cell"] + 0.1 * h["shared"], "shared": shared}, y


RESETS = jnp.asarray(np.random.default_rng(5).random((T, B)) < 0.2)


def rows(rule: Any, data: Data, scale: Any, form: str = "", **options: Any) -> Any:
    xs, h, body = data[:2], start(scale), functools.partial(advance, rule)
    axes = dict.fromkeys(h, 0)
    options |= {"mask": data.valid} if form == "holes" else {"lengths": data.lengths}
    if form == "shared":
        h, axes, body = {**h, "shared": scale}, {**axes, "shared": None}, functools.partial(sharing, rule)
    if form == "resets":
        options |= {"resets": RESETS, "reset_to": {"cell": 0.5, "count": None, "weight": None}}
    if form == "infinite":  # a running maximum begins with an infinity, in each segment too
        h, axes, options = {**h, "best": jnp.full(B, -jnp.inf)}, {**axes, "best": 0}, {**options, "resets": RESETS}
        body = functools.partial(_watching, rule)
    if form == "wide":
        h, axes, xs = {**h, "cell": h["cell"][None] * jnp.ones((2, 1))}, {**axes, "cell": 1}, data[:2]
        return treescan.mask_scan(body, h, xs, row_axes={"carry": axes, "y": 1}, **options)
    return treescan.mask_scan(body, h, xs, row_axes={"carry": axes}, **options)


def _watching(rule: Any, h: Any, x: Any) -> Any:
    new, y = advance(rule, h, x)
    return {**new, "best": jnp.maximum(h["best"], x[1])}, y


def until(rule: Any, data: Data, scale: Any, form: str = "xs", **options: Any) -> Any:
    xs, h, body = data[:2], start(scale), functools.partial(advance, rule)
    taken = data.lengths[0]
    if form == "fori":  # with traced bounds
        low = taken * 0 + 2
        each = lambda i, h: body(h, (data.flags[i - 2], data.numbers[i - 2]))[0]  # noqa: E731
        return treescan.fori(low, low + taken, each, h, max_length=T, **options)
    if "rows" in form:
        h, axes = {**h, "until": data.lengths}, None
        if form == "shared rows":
            h, axes = {**h, "shared": scale}, {**dict.fromkeys((*h, "shared"), 0), "shared": None}
            body = functools.partial(sharing, rule)
        options |= {} if axes is None else {"row_axes": {"carry": axes}}
        return treescan.while_scan(lambda h: h["count"] < h["until"], body, h, xs, **options)[:2]
    going = lambda h: h["count"][0] < taken  # noqa: E731
    return treescan.while_scan(going, body, h, xs, **options)[:2]


def layers(rule: Any, data: Data, scale: Any, form: str = "", **options: Any) -> Any:
    def block(layer: Any, x: Any, *others: Any) -> Any:
        x, y = advance(rule, x, (layer["flag"], layer["number"]))
        return x, *others, y

    def other(layer: Any, x: Any) -> Any:
        return advance(rule, x, layer)

    x, stack = {**start(scale), "same": jnp.ones(2)}, {"flag": data.flags, "number": data.numbers}
    if form == "pattern":  # layers 0, 2, 4 and 6 are the first block's
        stacks = [jax.tree.map(lambda leaf: leaf[0::2], stack), tuple(leaf[1::2] for leaf in data[:2])]
        return treescan.scan_layers([block, other], x, stacks, **options)
    if form == "state":
        return treescan.scan_layers(block, x, stack, state=jnp.zeros((T, 2)), **options)
    return treescan.scan_layers(block, x, stack, **options)


def lifted(rule: Any, data: Data, scale: Any, place: str = "carry", **options: Any) -> Any:
    def fn(variables: Any, rngs: Any, carry: Any, x: Any, whole: Any) -> Any:
        h, sums = {**carry, "weight": variables["params"]["w"]}, variables["sums"]["s"]
        noise = 0 * jax.random.uniform(rngs["noise"], (B,))
        new, y = advance(
            rule, h if place == "carry" else {**h, "cell": sums}, (variables["flags"]["f"], x * whole + noise)
        )
        cell, sums = (new["cell"], sums * 0.5) if place == "carry" else (h["cell"] * 0.5, new["cell"])
        return ({"cell": cell, "count": new["count"]}, y), {"sums": {"s": sums}}

    run = treescan.lifting.lift(
        fn, variable_axes={"flags": In(0)}, variable_broadcast="params", variable_carry="sums",
        split_rngs={"noise": True}, in_axes=(0, None), **options,
    )  # fmt: skip
    h = start(scale)
    variables = {"params": {"w": h.pop("weight")}, "sums": {"s": h["cell"]}, "flags": {"f": data.flags}}
    return run(variables, {"noise": jax.random.key(0)}, h, data.numbers, 1.0)


WAYS = ("eager", "jit", "vmap", "grad of vmap", "disable_jit")
"""How a call is run."""


class Loop(NamedTuple):
    """A kind of loop, with options, and the ways in which it can be run."""

    run: Any
    given: dict[str, Any]
    options: Mapping[str, Any] = MappingProxyType({})
    ways: tuple[str, ...] = WAYS


BAR = treescan.meters.Progress(updates=2, meter=treescan.meters.Text())
ENDING = tuple(way for way in WAYS if way != "grad of vmap")  # which is refused
LOOPS: dict[str, Loop] = {
    "scan": Loop(steps, {}),
    "scan reverse": Loop(steps, {}, {"reverse": True}),
    "scan remat": Loop(steps, {}, {"remat": "nested"}),
    "accumulate": Loop(steps, {"verb": "accumulate"}),
    "rows": Loop(rows, {}),
    "rows reverse": Loop(rows, {}, {"reverse": True}),
    "rows chunk": Loop(rows, {}, {"chunk": 3}),
    "rows compact": Loop(rows, {}, {"compact": True}),
    "rows last": Loop(rows, {}, {"save": "last"}),
    "rows truncate": Loop(rows, {}, {"truncate": 2}, ways=("jit", "vmap", "disable_jit")),
    "rows progress": Loop(rows, {}, {"progress": BAR}, ways=("eager", "jit")),
    "rows wide": Loop(rows, {"form": "wide"}),
    "rows holes": Loop(rows, {"form": "holes"}),
    "rows resets": Loop(rows, {"form": "resets"}, {"save": 2}),
    "rows infinite": Loop(rows, {"form": "infinite"}),
    "rows shared": Loop(rows, {"form": "shared"}, {"chunk": 3}),
    "rows shared reverse": Loop(rows, {"form": "shared"}, {"reverse": True, "remat": "step"}),
    "until": Loop(until, {}, ways=ENDING),
    "until rows": Loop(until, {"form": "rows"}, ways=ENDING),
    "until rows reverse": Loop(until, {"form": "rows"}, {"reverse": True}, ways=ENDING),
    "until shared rows": Loop(until, {"form": "shared rows"}, ways=ENDING),
    "until fori": Loop(until, {"form": "fori"}, ways=("jit", "vmap")),
    "until fori reverse": Loop(until, {"form": "fori"}, {"reverse": True}, ways=("jit",)),
    "layers": Loop(layers, {}),
    "layers reverse": Loop(layers, {}, {"reverse": True}),
    "layers remat": Loop(layers, {}, {"remat": "nested"}),
    "layers pattern": Loop(layers, {"form": "pattern"}),
    "layers pattern remat": Loop(layers, {"form": "pattern"}, {"remat": ("step", None), "reverse": True}),
    "layers state": Loop(layers, {"form": "state"}),
    "lift": Loop(lifted, {}),
    "lift reverse": Loop(lifted, {}, {"reverse": True, "unroll": 2}),
    "lift remat": Loop(lifted, {"place": "collection"}, {"remat": "nested"}),
}


# --- the tests --------------------------------------------------------------------------------------------------------


def total(loop: Loop, rule: Any, data: Data, scale: Any) -> Any:
    """The sum of squares of all that comes out, but for infinities."""
    found = jax.tree.leaves(loop.run(rule, data, scale, check_finite=True, **loop.given, **loop.options))
    numbers = [leaf for leaf in found if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum((jnp.where(jnp.isinf(leaf), 0.0, leaf) ** 2).sum() for leaf in numbers)


def draw(loop: Loop, flaw: Flaw, seed: int, *, planted: bool) -> tuple[Data, int, list[int], Any]:
    """Data of a loop; the step that is to be named, its rows, and which steps came before it.

    Two steps go wrong, of which the first in the order of the loop is to be named.
    """
    random = np.random.default_rng(seed)
    lengths = np.full(B, T)
    if loop.run is until:
        lengths = random.integers(3, T + 1, B if "rows" in loop.given.get("form", "") else 1) * np.ones(B, int)
    if loop.run is rows:
        lengths = np.roll([T, random.integers(2, T), random.integers(2, T)], random.integers(B))
    order = np.arange(T)
    if loop.options.get("reverse") and loop.run is not rows:
        order = (int(lengths[0]) if loop.given.get("form") == "fori" else T) - 1 - order
    valid = (order[:, None] < lengths) & (order[:, None] >= 0)
    if loop.options.get("reverse") and loop.run is rows:
        order = T - 1 - order
    if loop.given.get("form") == "holes":
        valid = random.random((T, B)) < 0.6
        valid[3] = True
    flags = np.where(valid, 1.0, flaw.flag)
    ran = sorted(np.flatnonzero(valid.any(1)), key=lambda step: order[step])
    first, second = sorted(random.choice(len(ran), 2, replace=False))
    at, later = ran[first], ran[second]
    hit = sorted(
        random.choice(np.flatnonzero(valid[at]), random.integers(1, valid[at].sum() + 1), replace=False).tolist()
    )
    if planted:
        flags[at, hit] = flaw.flag
        flags[later, np.flatnonzero(valid[later])[0]] = flaw.flag
    numbers = np.where(valid, random.normal(size=(T, B)) * 0.1, np.nan)
    if loop.run is not rows:  # a loop that ends early is not shown what it does not reach
        numbers = np.nan_to_num(numbers)
    data = Data(
        *(jnp.asarray(leaf, jnp.float32) for leaf in (flags, numbers)), jnp.asarray(lengths), jnp.asarray(valid)
    )
    return data, int(at), hit, valid & (order < order[at])[:, None]


def cases() -> list[Any]:
    """Each loop in one of its ways."""
    found = []
    for i, (name, loop) in enumerate(LOOPS.items()):
        way, flaw = loop.ways[i % len(loop.ways)], FLAWS[i // 2 % 2]
        marks = () if name in ("scan", "rows") else pytest.mark.slow
        found.append(pytest.param(name, way, flaw, id=f"{name}-{way}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "way", "flaw"), cases())
def test_what_is_planted_is_named(name: str, way: str, flaw: Flaw) -> None:
    loop = LOOPS[name]
    data, at, hit, before = draw(loop, flaw, len(name), planted=True)
    call = functools.partial(total, loop, flaw.rule)
    text, record = named(lambda: go(way, call, data))

    path = {layers: 'x["cell"]', lifted: 'carry["cell"]'}.get(loop.run, 'h["cell"]')
    path = 'variables["sums"]["s"]' if loop.given.get("place") == "collection" else path
    unit, most = "layer" if loop.run is layers else "step", "at most " if loop.run is until else ""
    stack = f"layer {at // 2} of `layers[{at % 2}]`; " if loop.given.get("form") == "pattern" else ""
    of_rows = f"row{'s' * (len(hit) > 1)} {' and '.join(', '.join(map(str, hit)).rsplit(', ', 1))}"
    assert f"`{path}` became {flaw.kind} in {unit} {at} of {most}{T} ({stack}{of_rows})" in text
    assert f", first in `{flaw.operation}` at" in text
    assert f"test_finite.py:{flaw.rule.__code__.co_firstlineno + 1}" in text
    assert "; the carry before it was finite." in text or loop.given.get("form") == "infinite"
    if stack:
        assert f"`scan_layers` over `{'other' if at % 2 else 'block'}`" in text

    assert (record.unit, record.ends_early) == (unit, bool(most))
    assert (record.path, record.kind, record.step, record.steps) == (path, flaw.kind, at, T)
    assert record.rows == tuple(hit)
    carry = record.carry.carry if loop.run is lifted else record.carry
    if loop.given.get("form") not in ("resets", "infinite"):  # which begin to count anew
        np.testing.assert_array_equal(carry["count"][np.array(hit)], before.sum(0)[hit])
    if loop.given.get("form") == "fori" and loop.run is until:
        assert record.x == at + 2
    if name not in WITHOUT_X:  # the body can be called on what the record holds
        h, x = given_to(loop, record)
        np.testing.assert_array_equal(x[0][np.array(hit)], np.float32(flaw.flag))
        again = np.asarray(advance(flaw.rule, h, x)[0]["cell"]).reshape(-1, B)[0]
        assert np.flatnonzero(np.asarray(data.valid)[at] & ~np.isfinite(again)).tolist() == hit


WITHOUT_X = {name for name in LOOPS if "shared" in name or "fori" in name}


def given_to(loop: Loop, record: Any) -> tuple[Any, Any]:
    """The carry and the x that `advance` is given in the step of a record."""
    if loop.run is layers:
        return record.carry, jax.tree.leaves(record.x[0])
    if loop.run is lifted:
        own = {"cell": record.carry.variables["sums"]["s"]} if loop.given else {}
        h = {**record.carry.carry, "weight": jnp.ones(B), **own}
        return h, (record.x.variables["flags"]["f"], record.x.args[0])
    return record.carry, record.x
