"""Draws the pictures of the documentation, docs/pictures/*.svg, and the table of transforms beside them.

Run `python scripts/draw_pictures.py`.

What a picture shows of the library it asks the library: which chunks are run, what a plan saves, what a carry reads.
`tests/docs/test_pictures.py` holds the files to what is drawn here. Colours and sizes of text stand in
docs/stylesheets/pictures.css, so that the pictures follow the page's colour scheme; they are included in the pages
inline, which is why no line of a file is blank.
"""

from __future__ import annotations

import ast
import functools
import html
import math
import re
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

import treescan
from treescan import Remat
from treescan._transforms.rows.compact import spread_tiers
from treescan._transforms.rows.schedule import make_schedule
from treescan.carries import Ema, carry_of, ema

DIRECTORY = Path(__file__).parent.parent / "docs" / "pictures"
WIDTH = 400


class Picture:
    """An SVG that is put together piece by piece; positions are in its own units, `WIDTH` of them from left to right.

    Args:
        name: the file's.
        height: in units.
        title: its name to those who do not see it.
        describes: what it shows, to the same.
    """

    def __init__(self, name: str, height: float, title: str, describes: str) -> None:
        self.name = name
        self.lines = [
            f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            f'aria-labelledby="{name}-title" aria-describedby="{name}-desc" data-search-exclude="">',
            f'<title id="{name}-title">{html.escape(title)}</title>',
            f'<desc id="{name}-desc">{html.escape(describes)}</desc>',
        ]

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", *, round_: float = 3) -> None:
        """A rectangle of a kind that the stylesheet knows."""
        corners = f' rx="{round_:g}"' if round_ else ""
        self.lines.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corners}/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text; `y` is its baseline."""
        style = f' class="{kind}"' if kind else ""
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.lines.append(f'<text{style} x="{x:g}" y="{y:g}"{where}>{html.escape(text, quote=False)}</text>')

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        """A line through some points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(f'<polyline class="{kind}" points="{path}"/>')

    def area(self, *points: tuple[float, float], kind: str = "box") -> None:
        """A polygon."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.lines.append(f'<polygon class="{kind}" points="{path}"/>')

    def dot(self, x: float, y: float, radius: float) -> None:
        """A dot of a diagram."""
        self.lines.append(f'<circle class="data" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through some points that ends in a head."""
        (x0, y0), (x1, y1) = points[-2:]
        length = math.hypot(x1 - x0, y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        foot = (x1 - 9 * dx, y1 - 9 * dy)
        self.line(*points[:-1], foot)
        sides = [(foot[0] - side * dy, foot[1] + side * dx) for side in (4.5, -4.5)]
        self.area((x1, y1), *sides, kind="head")

    def __str__(self) -> str:
        """The file."""
        return "\n".join([*self.lines, "</svg>"]) + "\n"


# How padding, chunks and tiers are run.

LENGTHS = (6, 3, 11, 1, 4, 7, 2, 0)
STEPS, CHUNK = 16, 4
TIERS = spread_tiers(len(LENGTHS))
ROW = 18  # the height of one


def tiers_and_orders() -> list[tuple[int, list[int]]]:
    """Of each chunk: how many rows `compact` runs, and all rows in its order."""
    valid = treescan.length_mask(jnp.array(LENGTHS), STEPS)
    schedule = make_schedule(valid, CHUNK, TIERS)
    assert schedule.order is not None
    branches = [int(branch) for branch in schedule.branch]
    orders: list[list[int]] = schedule.order.tolist()
    return [((0, *TIERS)[branch], order) for branch, order in zip(branches, orders, strict=True)]


class Chunk(NamedTuple):
    """What is drawn of a chunk: its heading, the rows that are shown, and how many of these are run."""

    heading: str
    shown: list[int]
    live: int


def padding() -> Picture:
    """Which steps of which rows are run, without and with `compact`."""
    chunks = tiers_and_orders()
    rows, data = len(LENGTHS), sum(LENGTHS)
    every = list(range(rows))
    plain = [
        Chunk(f"steps {n * CHUNK}-{(n + 1) * CHUNK - 1}", every, rows if tier else 0)
        for n, (tier, _) in enumerate(chunks)
    ]
    compact = [Chunk(f"tier of {tier}" if tier else "no tier", order[:tier], tier) for tier, order in chunks]
    runs, runs_compact = (sum(CHUNK * chunk.live for chunk in panel) for panel in (plain, compact))
    first = 54
    second = first + rows * ROW + 42
    legend = second + 38 + rows * ROW + 30
    picture = Picture(
        "padding",
        legend + 8,
        "What mask_scan runs of a padded batch",
        f"{rows} rows of lengths {', '.join(map(str, LENGTHS))}, padded to {STEPS} steps, in chunks of {CHUNK}. "
        "The last chunk has no valid step and is not run. With compact, the rows that have a valid step come first, "
        f"and the chunks run on {', '.join(str(tier) for tier, _ in chunks if tier)} rows. {data} of {STEPS * rows} "
        f"rows' steps are data; {runs} are run without compact, and {runs_compact} with it.",
    )
    picture.text(0, 16, f"chunk={CHUNK}", "code")
    picture.text(WIDTH, 16, f"{runs} of {STEPS * rows} rows' steps are run", "", "end")
    picture.text(0, first - 8, "row", "small")
    _draw_chunks(picture, first, plain)
    picture.text(0, second, f"chunk={CHUNK}, compact=True", "code")
    picture.text(WIDTH, second, f"{runs_compact} are run", "", "end")
    _draw_chunks(picture, second + 38, compact)
    for x, kind, says in (
        (0, "data", f"data: {data}"),
        (110, "padding", "padding that is run"),
        (290, "absent", "not run"),
    ):
        picture.box(x + 1, legend - 13, 18, 16, kind, round_=2)
        picture.text(x + 26, legend, says)
    return picture


def _draw_chunks(picture: Picture, top: float, chunks: list[Chunk]) -> None:
    """One chunk beside the other; the rows are numbered where they are not those of the chunk before."""
    cell, left, gap = 18, 46, 18
    for number, chunk in enumerate(chunks):
        x = left + number * (CHUNK * cell + gap)
        picture.text(x + CHUNK * cell / 2, top - 8, chunk.heading, "small", "middle")
        for place, row in enumerate(chunk.shown):
            y = top + place * ROW
            if not number or chunk.shown != chunks[number - 1].shown:
                picture.text(x - 4, y + 13.5, str(row), "small", "end")
            for step in range(CHUNK):
                is_data = number * CHUNK + step < LENGTHS[row]
                kind = "data" if is_data else "padding" if place < chunk.live else "absent"
                picture.box(x + step * cell + 1, y + 1, cell - 2, ROW - 2, kind, round_=2)


# The house of modules.

FLOORS = (  # from the ground up: what each holds, and its modules and packages
    (
        "types and trees",
        ("_remat, _progress, _types, _avals, _tree,", "_axes, _finite, _layout, _manual, _errors, _flax"),
    ),
    ("custom carries", ("carries/",)),
    ("the loop", ("_loop/",)),
    ("traces of steps, calls of bodies", ("_trace/, _body/",)),
    ("from Loop to Loop", ("_transforms/",)),
    ("checks of arguments", ("_checks/",)),
    ("stacks, and batches of sequences", ("_data/",)),
    ("verbs", ("_verbs/",)),
    ("public names", ("__init__, __main__, testing",)),
    ("other libraries", ("integrations/",)),
)


def floor_of(module: str) -> int:
    """The number of the floor on which a module stands, from 0."""
    root = module.split(".")[0]
    (floor,) = (n for n, (_, lines) in enumerate(FLOORS) if root in re.findall(r"\w+", " ".join(lines)))
    return floor


def house() -> Picture:
    """The layers of the package; imports run down."""
    heights = [30 + 17 * len(lines) for _, lines in FLOORS[:-1]]
    roof, left, right = 84, 1, 367
    picture = Picture(
        "house",
        roof + sum(heights) + 4,
        "The layers of the package",
        "From the top down: "
        + "; ".join(f"{name} ({', '.join(lines)})" for name, lines in reversed(FLOORS))
        + ". A module imports from its own layer and from those below it.",
    )
    middle = (left + right) / 2
    name, (line,) = FLOORS[-1]
    picture.area((left, roof), (middle, 4), (right, roof), kind="strong box")
    picture.text(middle, roof - 28, name, "bold", "middle")
    picture.text(middle, roof - 10, line, "small code", "middle")
    y = float(roof)
    for (name, lines), height in zip(reversed(FLOORS[:-1]), reversed(heights), strict=True):
        kind = "strong box" if name in ("the loop", "from Loop to Loop") else "box"
        picture.box(left, y, right - left, height, kind, round_=0)
        picture.text(middle, y + 19, name, "bold", "middle")
        for number, line in enumerate(lines):
            picture.text(middle, y + 37 + 17 * number, line, "small code", "middle")
        y += height
    picture.arrow((WIDTH - 20, roof), (WIDTH - 20, y))
    turned = f'transform="translate({WIDTH - 12} {(roof + y) / 2:g}) rotate(90)"'
    picture.lines.append(f'<text class="small" text-anchor="middle" {turned}>imports</text>')
    return picture


# What plans save.

PLANS: tuple[tuple[str, Literal["step", "nested"] | Remat | None], ...] = (
    ("None", None),
    ('"step"', "step"),
    ('Remat(policy="everything_saveable", levels=2)', Remat(policy="everything_saveable", levels=2)),
    ('"nested"', "nested"),
    ("Remat(levels=3)", Remat(levels=3)),
    ("Remat(levels=4)", Remat(levels=4)),
)
T = 1024


@functools.cache
def plans() -> dict[str, tuple[float, int]]:
    """By how each plan is written: the MiB that the gradient saves, and how often it evaluates each step."""
    weights, h = jnp.zeros((64, 64)), jnp.zeros((256, 64))

    def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(h @ weights), None

    found = {name: treescan.plan_remat(step, h, length=T, remat=remat) for name, remat in PLANS}
    return {name: (plan.saved_bytes / 2**20, plan.evaluations) for name, plan in found.items()}


def remat() -> Picture:
    """What the gradient saves under some plans, against how often it evaluates the body."""
    found = plans()
    row, top = 46, 58
    bottom = top + row * len(found) - 4
    picture = Picture(
        "remat",
        bottom + 44,
        "What the gradient saves under some plans",
        f"A loop of {T:,} steps with a carry of 64 KiB. "
        + " ".join(
            f"{name} saves {round(mib, 1):g} MiB, with {n} evaluations of each step."
            for name, (mib, n) in found.items()
        ),
    )

    def at(mib: float) -> float:
        return (math.log2(mib) + 0.5) * (WIDTH - 76) / 7.5

    picture.text(0, 16, "plan", "bold")
    picture.text(WIDTH, 16, "evaluations of each step", "bold", "end")
    for tick in (1, 2, 4, 8, 16, 32, 64, 128):
        picture.line((at(tick), 30), (at(tick), bottom), kind="rule")
        picture.text(at(tick), bottom + 17, str(tick), "small", "middle")
    picture.text((at(1) + at(128)) / 2, bottom + 37, "MiB saved at one time (logarithmic)", "small", "middle")
    for number, (name, (mib, evaluations)) in enumerate(found.items()):
        y = top + row * number
        picture.text(0, y - 8, name, "small code on-page")
        picture.text(WIDTH, y - 8, str(evaluations), "", "end")
        picture.line((0, y + 9), (WIDTH, y + 9), kind="rule")
        picture.dot(at(mib), y + 9, 6)
        picture.text(at(mib) + 12, y + 14, f"{round(mib, 1):g} MiB", "small on-page")
    return picture


# A scan over a stack of layers.

LEAVES = ("input_norm", "attention", "post_attn_norm", "gate_proj", "up_proj", "down_proj")
DEPTH, SHOWN = 6, 2


def layers() -> Picture:
    """A stack of parameters, and the block that is run on its slices."""
    picture = Picture(
        "layers",
        384,
        "fold_layers over a stack of parameters",
        f"A DecoderBlock, {', '.join(LEAVES)}, whose leaves all lead with an axis of {DEPTH} layers. The slices of "
        f"layer {SHOWN} of all leaves are one DecoderBlock, which the block is given with x. The x that it returns is "
        "the x of the next layer. The block is traced and compiled once.",
    )
    left, cell, height, top = 122, 46, 24, 56
    picture.text(0, 16, f"layers: DecoderBlock, each leaf [{DEPTH}, ...]", "bold")
    picture.text(left - 10, top - 10, "layer", "small", "end")
    for layer in range(DEPTH):
        x = left + layer * cell
        picture.text(x + cell / 2, top - 10, str(layer), "small", "middle")
        for number in range(len(LEAVES)):
            kind = "data" if layer == SHOWN else "box"
            picture.box(x + 2, top + number * height + 2, cell - 4, height - 4, kind)
    for number, leaf in enumerate(LEAVES):
        picture.text(left - 10, top + number * height + 16.5, leaf, "small code", "end")
    bottom = top + height * len(LEAVES)
    middle = left + (SHOWN + 0.5) * cell
    block = bottom + 66
    picture.arrow((middle, bottom + 2), (middle, block))
    picture.text(middle + 12, bottom + 26, f"layer {SHOWN} of each leaf:", "small")
    picture.text(middle + 12, bottom + 44, "one DecoderBlock", "small")
    picture.box(middle - 93, block, 186, 62, "strong box")
    picture.text(middle, block + 26, "block(layer, x)", "code", "middle")
    picture.text(middle, block + 48, "traced and compiled once", "small", "middle")
    y = block + 31
    picture.text(8, y + 5, "x", "code")
    picture.arrow((26, y), (middle - 93, y))
    picture.arrow((middle + 93, y), (WIDTH - 26, y))
    picture.text(WIDTH - 8, y + 5, "x", "code", "end")
    under = block + 86
    picture.arrow((middle + 112, y), (middle + 112, under), (middle - 112, under), (middle - 112, y + 1))
    picture.text(middle, under + 20, "what one layer returns, the next is given", "small", "middle")
    return picture


# A custom carry's way.


def averages() -> tuple[Ema, float, Ema]:
    """An average before a step, what the body returns, and the average after it."""
    before, returned = ema(0.0, decay=0.5), 4.0
    after = treescan.fold(lambda average, x: x, before, jnp.array([returned]))
    return carry_of(before, Ema), returned, carry_of(after, Ema)


def carry() -> Picture:
    """A custom carry's way through a loop."""
    before, returned, after = averages()
    picture = Picture(
        "carry",
        320,
        "The way of a custom carry through a loop",
        "What stands in init is the first carry; to_carry makes it of a value of an adopted type. In each step read "
        "makes of the carry what the body sees, and write makes the next carry of what the body returns. After the "
        "last step the carry is part of the result; from_carry makes a value of an adopted type again. Here an Ema of "
        f"value {float(before.value)} and decay {before.decay} is shown as {float(before.read())}; the body returns "
        f"{returned}, and the next Ema has value {float(after.value)}.",
    )
    boxes, width, height, body = 118, 156, 62, 244
    left, right = 2, WIDTH - 2 - width
    reads, writes = left + width / 2, right + width / 2
    for x, value in ((left, before), (right, after)):
        picture.box(x, boxes, width, height)
        picture.text(x + width / 2, boxes + 25, "Ema", "bold", "middle")
        picture.text(x + width / 2, boxes + 47, f"value {float(value.value)}, decay {value.decay}", "small", "middle")
    picture.text(left, 18, "init", "code")
    picture.arrow((left + 12, 28), (left + 12, boxes))
    picture.text(WIDTH - left, 18, "result", "code", "end")
    picture.arrow((WIDTH - left - 12, boxes), (WIDTH - left - 12, 28))
    picture.text(left + 22, 54, "to_carry", "small code")
    picture.text(WIDTH - left - 22, 54, "from_carry", "small code", "end")
    picture.text(WIDTH / 2 - 4, 54, "for adopted types", "small", "middle")
    picture.arrow((writes, boxes), (writes, 94), (reads, 94), (reads, boxes))
    picture.text(WIDTH / 2, 86, "the next step", "small", "middle")
    picture.arrow((reads, boxes + height), (reads, body))
    picture.text(reads - 10, 217, "read()", "small code", "end")
    picture.arrow((writes, body), (writes, boxes + height))
    picture.text(writes - 10, 217, "write(returned, valid)", "small code", "end")
    picture.box(left, body, WIDTH - 2 * left, 74, "strong box")
    picture.text(WIDTH / 2, body + 24, "the body", "bold", "middle")
    picture.text(reads, body + 52, f"sees {float(before.read())}", "", "middle")
    picture.text(writes, body + 52, f"returns {returned}", "", "middle")
    picture.arrow((reads + 46, body + 47), (writes - 52, body + 47))
    return picture


# The transforms of a loop.


PACKAGE = Path(treescan.__file__).parent
WHERE = {"scan": "run", "fori": "fori", "while_scan": "while_scan", "mask_scan": "mask_scan"}
"""Where each verb lists its transforms; `run` lists first those of `fold` and `accumulate` with `lengths`."""
INNERMOST, OUTERMOST = "call the body", "run"


def transforms_of(verb: str) -> list[str]:
    """The classes of a verb's transforms, innermost first, read off the tuple in its source."""
    tree = ast.parse((PACKAGE / "_verbs" / f"{WHERE[verb]}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lists = [call.args for call in calls if ast.unparse(call.func).split(".")[-1] == "run"]
    lists += [list(filter(_class_of, call.args)) for call in calls if ast.unparse(call.func) == "Until"]
    listed = [arguments for arguments in lists if arguments and all(map(_class_of, arguments))]
    return [_class_of(argument) for argument in min(listed, key=len)]


def _class_of(argument: ast.expr) -> str:
    """`KeepOutputs` of `KeepOutputs.of(save)` and of `KeepOutputs(save)`; nothing of what is no transform."""
    text = ast.unparse(argument.func if isinstance(argument, ast.Call) else argument).removesuffix(".of")
    calls = {
        "over_axes": "OverAxes",
        "checking": "CheckFinite",
        "checking_either": "CheckFinite",
        "showing": "ShowProgress",
    }
    named = calls.get(text.rpartition(".")[2])
    return named or (text if text[0].isupper() else "")


def file_of(transform: str) -> str:
    """The file of a transform, in `_transforms/`."""
    (file,) = (f for f in (PACKAGE / "_transforms").rglob("*.py") if f"\nclass {transform}:\n" in f.read_text())
    return str(file.relative_to(PACKAGE / "_transforms"))


def loop() -> Picture:
    """The transforms of `mask_scan`, each around the ones before."""
    head, foot, side, core = 25, 6, 6, 82
    around = [OUTERMOST, *reversed(transforms_of("mask_scan"))]
    height = core + len(around) * (head + foot)
    picture = Picture(
        "loop",
        height + 2,
        "The transforms of mask_scan",
        f"Nested boxes, from the outermost to the innermost: {', '.join(around)}, {INNERMOST}. Beside each is "
        "its file.",
    )

    def box(level: int, kind: str) -> None:
        inset, top = 1 + level * side, 1 + level * head
        picture.box(inset, top, WIDTH - 2 * inset, height - level * (head + foot), kind)

    for level, name in enumerate(around):
        box(level, "soft box" if level % 2 else "box")
        shown = name if level else f"{OUTERMOST}: jax.lax.scan"
        picture.text(12 + level * side, 18 + level * head, shown, "" if level else "bold")
        where = file_of(name) if level else "_loop/run.py"
        picture.text(WIDTH - 12 - level * side, 18 + level * head, where, "small code", "end")
    box(len(around), "strong box")
    top = len(around) * head
    picture.text(WIDTH / 2, top + 22, INNERMOST, "bold", "middle")
    does = ("custom carries, keywords,", "static leaves, annotations,", "comparison of the carry")
    for number, line in enumerate(does):
        picture.text(WIDTH / 2, top + 40 + 16 * number, line, "small", "middle")
    return picture


def table() -> str:
    """The transforms of each verb, as the rows of a table."""
    shown = {"scan": "`scan`, `fold`, `accumulate`"}
    rows = [
        f"| {shown.get(verb, f'`{verb}`')} | {', '.join(f'`{name}`' for name in transforms_of(verb))} |"
        for verb in WHERE
    ]
    return "\n".join(("| verb | transforms, innermost first |", "|---|---|", *rows)) + "\n"


# Which loop to write.

QUESTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("A handful of steps,", "or each of another kind?"), ("for",)),
    (("Layers of one model?",), ("fold_layers", "scan_layers")),
    (("Rows of unequal length", "in one batch?"), ("mask_scan",)),
    (("Does it end when", "the carry says so?"), ("while_scan",)),
    (("Is an index all", "that a step reads?"), ("fori",)),
    (("Is the last carry", "all that you keep?"), ("fold",)),
    (("Are the carries", "what you keep?"), ("accumulate",)),
)


def choosing() -> Picture:
    """Questions that lead to a verb: a yes goes to the right, a no goes down."""
    height, apart, wide, answer = 46, 66, 222, 262
    said = "; ".join(f"{' '.join(lines)} {' or '.join(verbs)}" for lines, verbs in QUESTIONS)
    picture = Picture(
        "choosing",
        len(QUESTIONS) * apart + 38,
        "Which loop to write",
        f"Questions, from the top down: {said}; else scan.",
    )

    def box(x: float, y: float, width: float, lines: tuple[str, ...], kind: str, style: str) -> None:
        picture.box(x, y, width, height, kind)
        for number, line in enumerate(lines):
            picture.text(x + width / 2, y + 28 - 9 * (len(lines) - 1) + 18 * number, line, style, "middle")

    for number, (lines, verbs) in enumerate(QUESTIONS):
        y = 1 + number * apart
        box(1, y, wide, lines, "box", "")
        box(answer, y, WIDTH - answer - 1, verbs, "strong box", "code")
        picture.arrow((1 + wide, y + height / 2), (answer, y + height / 2))
        picture.text(wide + 6, y + height / 2 - 6, "yes", "small")
        picture.arrow((1 + wide / 2, y + height), (1 + wide / 2, y + apart))
        picture.text(10 + wide / 2, y + height + 14, "no", "small")
    bottom = 1 + len(QUESTIONS) * apart
    picture.box(1, bottom, wide, 36, "strong box")
    picture.text(1 + wide / 2, bottom + 23, "scan", "code", "middle")
    return picture


PICTURES = (padding, house, remat, layers, carry, loop, choosing)


def main() -> None:
    """Writes all files."""
    DIRECTORY.mkdir(exist_ok=True)
    for draw in PICTURES:
        picture = draw()
        (DIRECTORY / f"{picture.name}.svg").write_text(str(picture))
    (DIRECTORY / "transforms.md").write_text(table())


if __name__ == "__main__":
    main()
