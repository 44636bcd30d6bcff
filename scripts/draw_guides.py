"""Pictures of the guides: what a call of the library returned, or what a plan of it says, on a timeline or in boxes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from picture import WIDTH, Picture

import treescan
from treescan._types import RematLike

# Resets on a timeline.

RESETS, STEPS = (3, 6), 8
BEGINS = (0, *RESETS)  # of the episodes: a reset at step 0 would start the first from `reset_to` too
INIT, RESET_TO = 100, 0


@functools.cache
def totals(reverse: bool) -> list[int]:
    """The running total of ones in a row with resets."""
    resets = jnp.isin(jnp.arange(STEPS), jnp.array(RESETS))[:, None]
    _, ys = treescan.mask_scan(
        lambda total, x: (total + x, total + x),
        jnp.full(1, float(INIT)),
        jnp.ones((STEPS, 1)),
        resets=resets,
        reset_to=float(RESET_TO),
        reverse=reverse,
    )
    return [int(y) for y in ys[:, 0]]


def resets() -> Picture:
    """Three episodes in one row, forward and in reverse."""
    left, cell, gap = 54, 38, 20
    ends = (*BEGINS[1:], STEPS)
    picture = Picture(
        "resets",
        326,
        "Resets on a timeline, forward and in reverse",
        f"A row of {STEPS} steps with resets at {' and '.join(map(str, RESETS))}, each step adding 1 to the total. "
        f"Forward, the first episode starts from init={INIT} and the others from reset_to={RESET_TO}: the outputs are "
        f"{', '.join(map(str, totals(False)))}. In reverse, the last episode starts from init, at its last step, and "
        f"the others from reset_to: the outputs are {', '.join(map(str, totals(True)))}.",
    )

    def at(step: int) -> float:
        return left + step * cell + gap * (sum(begin <= step for begin in BEGINS) - 1)

    picture.text(0, 16, "step", "small")
    picture.text(0, 42, "resets", "small code")
    for step in range(STEPS):
        picture.text(at(step) + cell / 2, 16, str(step), "small", "middle")
        picture.box(at(step) + 11, 29, 16, 16, "data" if step in RESETS else "absent", round_=2)
    for top, reverse in ((78, False), (216, True)):
        picture.text(0, top, "reverse=True" if reverse else "forward", "code" if reverse else "bold")
        picture.text(0, top + 75, "total", "small")
        for begin, end in zip(BEGINS, ends, strict=True):
            first, last = (end - 1, begin) if reverse else (begin, end - 1)
            from_init = begin == (BEGINS[-1] if reverse else BEGINS[0])
            start = f"init={INIT}" if from_init else f"reset_to={RESET_TO}"
            edge = at(first) + (cell if reverse else 0)
            picture.text(edge, top + 26, start, "small code", "end" if reverse else "start")
            middle = at(first) + cell / 2
            picture.arrow((middle, top + 32), (middle, top + 53))
            for step in range(begin, end):
                picture.box(at(step) + 1, top + 54, cell - 2, 32, "strong box")
                picture.text(at(step) + cell / 2, top + 75, str(totals(reverse)[step]), "", "middle")
            picture.arrow(
                (at(first) + (cell if reverse else 0), top + 97), (at(last) + (0 if reverse else cell), top + 97)
            )
    return picture


# Sequences in rows.

LENGTHS = (4, 2, 3, 1)


def packed_names() -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    """Each step of each sequence by its name: in the list, in the rows of `pack`, and in what `unpack` returns."""

    def name(code: int) -> str:
        return "abcdefg"[code // 10] + str(code % 10) if code >= 0 else ""

    sequences = [jnp.arange(length) + 10 * number for number, length in enumerate(LENGTHS)]
    batch = treescan.pack(sequences)
    rows = jnp.where(batch.mask, batch.data, -1).T.tolist()
    back = treescan.unpack(batch.data, batch)
    return tuple([[name(int(code)) for code in row] for row in table] for table in (sequences, rows, back))  # type: ignore[return-value]


def packing() -> Picture:
    """Sequences in a list, in rows, and in a list again."""
    sequences, rows, back = packed_names()
    picture = Picture(
        "packing",
        176,
        "pack and unpack",
        f"Sequences of {', '.join(map(str, LENGTHS))} steps, a to d. pack lays them into "
        f"{len(rows)} rows: {'; '.join(' '.join(row) for row in rows)}. The carry restarts at the first step of each "
        "sequence. unpack returns a list in the order of the first.",
    )
    cell, tall, top = 21, 26, 30
    middle = top + 2 * tall

    def grid(left: float, heading: str, table: list[list[str]], *, y: float, of: str = "") -> None:
        picture.text(left + 1, top - 12, heading, "small")
        for number, row in enumerate(table):
            for place, name in enumerate(row):
                kind = "strong box" if name.endswith("0") else "box" if name else "absent"
                picture.box(left + place * cell + 1, y + number * tall + 1, cell - 2, tall - 4, kind, round_=2)
                picture.text(left + (place + 0.5) * cell, y + number * tall + 16.5, of + name, "small", "middle")

    columns = max(map(len, rows))
    center = (WIDTH - columns * cell) / 2
    right = WIDTH - max(LENGTHS) * cell
    grid(0, "sequences", sequences, y=top)
    grid(center, f"{len(rows)} rows", rows, y=middle - len(rows) * tall / 2)
    grid(right, "outputs", back, y=top)
    for x, to, says in ((max(LENGTHS) * cell, center, "pack"), (center + columns * cell, right, "unpack")):
        picture.arrow((x + 7, middle - 2), (to - 6, middle - 2))
        picture.text((x + to) / 2, middle - 12, says, "small code", "middle")
    picture.box(1, 151, 18, 16, "strong box", round_=2)
    picture.text(27, 165, "first step of a sequence: the carry restarts", "small")
    return picture


# Which axis is which.

SIZES = {"T": 5, "B": 3, "D": 2, "H": 4, "K": 7}


@functools.cache
def shapes() -> dict[str, str]:
    """The axes of each array of a call, by the letters of their sizes."""
    found: dict[str, tuple[int, ...]] = {}

    def body(carry, x):
        found.update({"carry": carry.shape, "x": x.shape})
        y = jnp.zeros((SIZES["B"], SIZES["K"]))
        found["y"] = y.shape
        return carry, y

    def call(carry, xs, mask):
        found["xs"] = xs.shape
        return treescan.mask_scan(body, carry, xs, mask=mask, time_axis=1, row_axes={"carry": 1})

    types = ((SIZES["H"], SIZES["B"]), (SIZES["B"], SIZES["T"], SIZES["D"]))
    mask = jax.ShapeDtypeStruct((SIZES["B"], SIZES["T"]), bool)
    _, ys = jax.eval_shape(call, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in types), mask)
    found["ys"] = ys.shape
    letters = {size: letter for letter, size in SIZES.items()}
    return {name: "".join(letters[size] for size in shape) for name, shape in found.items()}


def axes() -> Picture:
    """Which option names which axis."""
    found = shapes()
    picture = Picture(
        "axes",
        290,
        "Which option names which axis",
        "In mask_scan with time_axis=1 and row_axes={'carry': 1}: "
        + "; ".join(f"{name} is [{', '.join(letters)}]" for name, letters in found.items())
        + ". time_axis is the axis of time T in xs and ys, and row_axes that of the rows B in the carry, "
        "in one step's x and in one step's y.",
    )
    cell = 34

    def array(left: float, y: float, name: str, axis: str, option: str) -> None:
        letters = found[name]
        picture.text(left, y - 8, name, "code")
        for number, letter in enumerate(letters):
            kind = "strong box" if letter == axis else "box"
            picture.box(left + number * cell + 1, y + 1, cell - 2, 28, kind)
            picture.text(left + (number + 0.5) * cell, y + 20, letter, "bold" if letter == axis else "", "middle")
        place = letters.index(axis)
        picture.text(left, y + 47, f"{option}={place}", "small code")

    right = WIDTH - 3 * cell - 16
    array(0, 26, "xs", "T", "time_axis")
    array(right, 26, "ys", "T", "time_axis")
    array(0, 126, "x", "B", "row_axes")
    array(right, 126, "y", "B", "row_axes")
    array(0, 226, "carry", "B", "row_axes")
    array(right, 226, "carry", "B", "row_axes")
    picture.arrow((cell, 78), (cell, 104))
    picture.text(cell + 12, 96, "one step", "small")
    picture.arrow((right + cell, 104), (right + cell, 78))
    picture.text(right + cell + 12, 96, "stacked", "small")
    body, wide = 128, 84
    picture.box(body, 116, wide, 150, "box")
    picture.text(body + wide / 2, 196, "body", "bold", "middle")
    for y in (142, 242):
        picture.arrow((2 * cell + 6, y), (body, y))
        picture.arrow((body + wide, y), (right - 6, y))
    return picture


# The way of a NaN.


def of_where() -> dict[str, float]:
    """At a padded step with a selection after it: what flows forward, and which cotangents flow back."""
    h, w, x = math.sqrt(2), 1.0, math.nan
    out, pull = jax.vjp(lambda h, w: jnp.sqrt(h + w * x), h, w)
    selected, choose = jax.vjp(lambda new, h: jnp.where(False, new, h), out, h)
    (into_step, _) = choose(jnp.ones_like(selected))
    (_, into_w) = pull(into_step)
    return {"new": float(out), "selected": float(selected), "into step": float(into_step), "into w": float(into_w)}


def of_mask() -> dict[str, float]:
    """The same in `mask_scan`: the last carry of the row, and the gradient that the padded step adds."""

    def total(w, steps):
        xs = jnp.array([[2.0], [math.nan]])[:steps]
        h, _ = treescan.mask_scan(lambda h, x: (jnp.sqrt(h + w * x), None), jnp.zeros(1), xs, lengths=jnp.array([1]))
        return h.sum()

    value, gradient = jax.value_and_grad(total)(1.0, 2)
    return {"selected": float(value), "into w": float(gradient - jax.grad(total)(1.0, 1))}


def nan() -> Picture:
    """The way of a NaN at a padded step, forward and back."""
    where, mask = of_where(), of_mask()
    picture = Picture(
        "nan",
        304,
        "The way of a NaN at a padded step, forward and back",
        f"With jnp.where after the step: x is NaN, the step returns {where['new']:g}, and where keeps the old carry, "
        f"{where['selected']:.2f}. Backwards, the cotangent of the discarded value is {where['into step']:g}, and 0 "
        f"times NaN is {where['into w']:g} in the gradient of w. In mask_scan: the step is given a valid x instead, "
        f"its result is discarded, and the padded step adds {mask['into w']:g} to the gradient of w.",
    )

    def panel(top: float, title: str, chooses: str, values: tuple[str, str, str, str], gradient: str) -> None:
        enters, returns, selected, back = values
        picture.text(0, top, title, "bold")
        y = top + 22
        picture.box(1, y, 72, 52)
        picture.text(37, y + 31, "x = nan", "small code", "middle")
        picture.box(123, y, 130, 52, "strong box")
        picture.text(188, y + 31, "sqrt(h + w * x)", "small code", "middle")
        picture.box(303, y, 96, 52)
        picture.text(351, y + 22, chooses, "small code", "middle")
        picture.text(351, y + 41, f"h = {selected}", "small", "middle")
        for begin, end, says in ((73, 123, enters), (253, 303, returns)):
            picture.arrow((begin, y + 16), (end, y + 16))
            picture.text((begin + end) / 2 - 3, y + 9, says, "small", "middle")
        picture.arrow((303, y + 38), (253, y + 38))
        picture.text(281, y + 55, back, "small", "middle")
        picture.arrow((140, y + 52), (140, y + 82))
        picture.text(152, y + 76, f"gradient of w: {gradient}", "bold" if gradient.endswith("nan") else "")

    new, back = f"{where['new']:g}", f"{where['into step']:g}"
    of_w = f"{back} * nan = {where['into w']:g}"
    panel(16, "jnp.where after the step", "where", ("nan", new, f"{where['selected']:.2f}", back), of_w)
    of_w = f"0 * finite = {mask['into w']:g}"
    panel(156, "mask_scan", "select", ("valid", "finite", f"{mask['selected']:.2f}", "0"), of_w)
    picture.arrow((1, 291), (30, 291))
    picture.text(38, 296, "values", "small")
    picture.arrow((139, 291), (110, 291))
    picture.text(147, 296, "cotangents", "small")
    return picture


# What plans hold over time.

T, CARRY, STEP = 32, 1, 2  # in carries: a carry, and what a step saves
Kind = Literal["forward", "again", "back"]


def timeline(sizes: tuple[int, ...] | None) -> list[tuple[Kind, int]]:
    """What happens one after the other, and how many carries' bytes the gradient needs then.

    Args:
        sizes: of a plan's nested chunks, the innermost first; None if nothing is recomputed.
    """
    events: list[tuple[Kind, int]] = []
    held = 0

    def note(kind: Kind, more: int, then: int = 0) -> None:
        nonlocal held
        held += more
        events.append((kind, held))
        held += then

    def run(kind: Kind, steps: int, *sizes: int) -> None:
        nonlocal held
        part = sizes[-1] if sizes else 1
        for step in range(steps):
            note(kind, 0 if step % part else CARRY)
        for _ in range(steps // part):  # each saved carry is that of a part, whose gradient needs it
            if part == 1:
                note("again", STEP)
                note("back", 0, -STEP - CARRY)
            else:
                run("again", part, *sizes[:-1])
                held -= CARRY

    if sizes is None:
        for _ in range(T):
            note("forward", STEP)
        for _ in range(T):
            note("back", 0, -STEP)
    else:
        run("forward", T, *sizes)
    return events


@functools.cache
def timelines() -> dict[str, tuple[list[tuple[Kind, int]], int]]:
    """By plan: its timeline, and the most carries that the library says it saves at one time."""
    weights, h = jnp.zeros((64, 64)), jnp.zeros((256, 64))

    def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(h @ weights), None

    found = {}
    plans: dict[str, RematLike | None] = {"None": None, '"step"': "step", '"nested"': "nested"}
    for name, remat in (plans | {"Remat(levels=3)": treescan.Remat(levels=3)}).items():
        plan = treescan.plan_remat(step, h, length=T, remat=remat)
        assert plan.step_bytes == STEP * plan.carry_bytes
        found[name] = timeline(None if remat is None else plan.sizes), plan.saved_bytes // plan.carry_bytes
    return found


def held() -> Picture:
    """What the gradient needs over time, under four plans."""
    found = timelines()
    left, tall, apart = 8, 64, 126
    unit = (WIDTH - 2 * left) / max(len(events) for events, _ in found.values())
    most = max(peak for _, peak in found.values())
    kinds = {"forward": "strong box", "again": "padding", "back": "data"}
    picture = Picture(
        "held",
        len(found) * apart + 24,
        "What the gradient needs over time",
        f"A loop of {T} steps. "
        + " ".join(
            f"remat={name}: at most {peak} carries at one time, in {sum(kind != 'back' for kind, _ in events)} "
            f"evaluations and {T} backward steps."
            for name, (events, peak) in found.items()
        ),
    )
    for number, (name, (events, peak)) in enumerate(found.items()):
        top = number * apart
        floor = top + 34 + tall
        picture.text(0, top + 16, f"remat={name}", "code")
        picture.text(WIDTH, top + 16, f"at most {peak} carries", "", "end")
        picture.line((left, floor), (WIDTH - left, floor), kind="rule")
        points: list[tuple[float, float]] = [(left, floor)]
        for place, (_, now) in enumerate(events):
            y = floor - now * tall / most
            points += [(left + place * unit, y), (left + (place + 1) * unit, y)]
        points.append((left + len(events) * unit, floor))
        picture.area(*points, kind="strong box")
        for begin, end, kind in ((0, T, "forward"), (T, len(events), "again")):
            picture.box(left + begin * unit, floor + 4, (end - begin) * unit, 9, kinds[kind], round_=0)
        for kind, run in itertools.groupby(enumerate(events), lambda event: event[1][0]):
            places = [place for place, _ in run]
            if kind == "back":
                picture.box(left + places[0] * unit, floor + 4, len(places) * unit, 9, kinds[kind], round_=0)
    legend = len(found) * apart + 14
    for x, kind, says in ((0, "forward", "forward"), (96, "again", "recomputed"), (224, "back", "backward")):
        picture.box(x + 1, legend - 13, 18, 16, kinds[kind], round_=2)
        picture.text(x + 26, legend, says, "small")
    return picture


# A progress bar.

MOVES = 4


@dataclasses.dataclass(frozen=True)
class Noted(treescan.meters.AbstractProgressMeter):
    """A meter that writes down what it is told."""

    told: list[tuple[int, float]] = dataclasses.field(default_factory=list, hash=False, compare=False)

    def init(self, label: str, total: int | None) -> None:
        """Nothing is drawn."""

    def step(self, bar: None, done: int, shown: Mapping[str, float]) -> None:
        """Writes down the step and the value of h."""
        self.told.append((done, shown["h"]))

    def close(self, bar: None) -> None:
        """Nothing is drawn."""


def moves() -> list[tuple[int, float]]:
    """How many steps are done whenever the bar of the guide to progress moves, and h."""

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h + x), None

    meter = Noted()
    shown = treescan.meters.Progress("cells", show=lambda h: {"h": h}, updates=MOVES, meter=meter)
    treescan.scan(step, jnp.zeros(()), jnp.linspace(-1.0, 1.0, 1000), progress=shown)
    jax.effects_barrier()
    return meter.told


def bar() -> Picture:
    """One bar, whenever it moves."""
    told = moves()
    total, apart, left, wide = told[-1][0], 30, 102, 156
    picture = Picture(
        "bar",
        len(told) * apart + 6,
        "A progress bar whenever it moves",
        f"The bar of a loop of {total} steps, labelled cells. "
        + " ".join(f"After {done} steps: {done * 100 // total} %, h={h:.3f}." for done, h in told),
    )
    for number, (done, h) in enumerate(told):
        y = 4 + number * apart
        picture.text(left - 8, y + 15, f"cells: {100 * done // total}%", "small code", "end")
        picture.box(left, y, wide, 20, "padding")
        picture.box(left, y, wide * done / total, 20, "data")
        picture.text(left + wide + 8, y + 15, f"{done}, h={h:.3f}", "small code")
    return picture


# A training curve.

SHOWN, KEPT = 100, 10
TRAINING = Path(__file__).parent.parent / "docs" / "guides" / "training.md"


@functools.cache
@jax.numpy_dtype_promotion("standard")  # as readers run the guide
def losses() -> tuple[list[float], list[float], list[float]]:
    """Of the run in the guide to training: the loss of each step, of every tenth, and its moving average."""
    blocks = re.findall(r"^```python.*?\n(.*?)^```$", TRAINING.read_text(), re.DOTALL | re.MULTILINE)[:2]
    guide = ModuleType("guide")
    exec(compile("\n".join(blocks), "guide.py", "exec", dont_inherit=True), vars(guide))

    def observe(run: Any, rows: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        following, loss = guide.observe(run, rows)
        return following, {"each": loss, "kept": loss}

    run, found = treescan.scan(observe, guide.run, guide.batches[:SHOWN], save={"each": "all", "kept": KEPT})
    averages = [guide.run.smooth]
    for loss in found["each"]:
        averages.append(averages[-1].write(loss, None))
    assert jnp.allclose(averages[-1].read(), run.smooth.read())
    return found["each"].tolist(), found["kept"].tolist(), [float(average.read()) for average in averages[1:]]


def curve() -> Picture:
    """A training curve, as three ways to record it show it."""
    each, kept, smooth = losses()
    top, floor, left, most = 8, 188, 26, 20
    picture = Picture(
        "curve",
        floor + 62,
        "A training curve, recorded in three ways",
        f"The loss of {SHOWN} steps falls from {each[0]:.0f} to {each[-1]:.2f}. Each loss goes up and down. "
        f"save={KEPT} keeps {len(kept)} of them. The moving average, ema, is smooth, and follows a few steps behind.",
    )

    def at(step: float, loss: float) -> tuple[float, float]:
        return round(left + step * (WIDTH - left - 4) / SHOWN), round(floor - loss * (floor - top) / most)

    for loss in range(0, most + 1, 5):
        picture.line(at(0, loss), at(SHOWN, loss), kind="rule")
        picture.text(left - 6, at(0, loss)[1] + 4, str(loss), "small", "end")
    for step in range(0, SHOWN, 20):
        picture.text(
            at(step, 0)[0],
            floor + 18,
            f"step {step}" if step == 0 else str(step),
            "small",
            "middle" if step else "start",
        )
    picture.line(*(at(step, loss) for step, loss in enumerate(each)))
    picture.line(*(at(step, loss) for step, loss in enumerate(smooth)), kind="curve")
    for number, loss in enumerate(kept):
        picture.dot(*at((number + 1) * KEPT - 1, loss), 4)
    picture.text(left + 8, top + 10, "loss", "small")
    y = floor + 44
    picture.line((2, y), (24, y))
    picture.text(30, y + 5, "each loss", "small")
    picture.dot(122, y, 4)
    picture.text(132, y + 5, f"save={KEPT}", "small code")
    picture.line((226, y), (248, y), kind="curve")
    picture.text(254, y + 5, "ema(0.0, 0.9)", "small code")
    return picture


# Layers that take turns.

NAMES = ("local", "local", "global")
DEPTH = 7


def turns_of() -> tuple[list[list[int]], list[int]]:
    """The layers that each block ran, and all layers in the order in which they ran."""
    stacks = [jnp.arange(DEPTH)[i :: len(NAMES)] for i in range(len(NAMES))]
    blocks = [lambda layer, ran: (jnp.roll(ran, -1).at[-1].set(layer), layer) for _ in NAMES]
    ran, numbers = treescan.scan_layers(blocks, jnp.full(DEPTH, -1), stacks)
    return [number.tolist() for number in numbers], ran.tolist()


def turns() -> Picture:
    """The stacks of three blocks, and the order of their layers."""
    stacks, order = turns_of()
    assert order == list(range(DEPTH))
    periods = max(map(len, stacks))
    left, cell, tall, top = 118, 94, 48, 34
    picture = Picture(
        "turns",
        top + len(stacks) * tall - 12,
        "Layers that take turns",
        "Blocks "
        + ", ".join(NAMES)
        + ". "
        + " ".join(
            f"The stack of block {number} holds layers {', '.join(map(str, layers))}."
            for number, layers in enumerate(stacks)
        )
        + " One step of the loop runs one period: the next layer of each stack in turn.",
    )
    for period in range(periods):
        x = left + period * cell
        picture.text(x + (cell - 22) / 2, top - 14, f"period {period}", "small", "middle")
        for block, layers in enumerate(stacks):
            y = top + block * tall
            there = period < len(layers)
            picture.box(x + 1, y + 1, cell - 24, 30, "strong box" if there else "absent")
            if there:
                picture.text(x + (cell - 22) / 2, y + 21, f"layer {layers[period]}", "", "middle")
            if there and block + 1 < len(stacks) and period < len(stacks[block + 1]):
                picture.arrow((x + 36, y + 32), (x + 36, y + tall))
        if period + 1 < periods:
            last = top + (len(stacks) - 1) * tall + 16
            over = x + cell - 14
            picture.arrow((x + cell - 23, last), (over, last), (over, top + 16), (x + cell + 1, top + 16))
    for block, name in enumerate(NAMES):
        y = top + block * tall
        picture.text(0, y + 13, f"stacks[{block}]", "small code")
        picture.text(0, y + 29, name, "small")
    return picture
