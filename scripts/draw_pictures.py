"""Draws the pictures of the documentation, docs/pictures/*.svg, those of the README, and the table of transforms.

Run `python scripts/draw_pictures.py`.

What a picture shows of the library it asks the library: which chunks are run, what a plan saves, what a carry reads.
`tests/docs/test_pictures.py` holds the files to what is drawn here and in the files beside: `draw_front.py`,
`draw_guides.py`, `draw_padding.py` and `draw_tutorials.py`, on `picture.py`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from core import lines_of
from draw_front import ASSETS, front_files, ragged
from draw_guides import axes, bar, curve, held, nan, packing, resets, turns
from draw_padding import compact, skipped
from draw_runs import block, devices, parts
from draw_tutorials import cache, newton, vowels
from picture import WIDTH, Picture

import treescan
from treescan import Remat
from treescan._transforms.transform import Stage
from treescan.carries import Ema, carry_of, ema

DIRECTORY = Path(__file__).parent.parent / "docs" / "pictures"


# The house of modules.

FLOORS = (  # from the ground up: what each holds, and its modules and packages
    ("types and trees", ("_lazy, _text, _avals, _cpu/, _tree,", "_flax, _errors, _types")),
    ("custom carries", ("carries/",)),
    ("the loop", ("_loop/",)),
    ("traces of steps, calls of bodies", ("_trace/, _body/",)),
    (
        "the core",
        ("_transforms/ _outputs/", "_remat/ _program/", "_rows/ _until/", "_arguments _stacks/", "_batches/ _verbs/"),
    ),
    (
        "extras, public names",
        ("_extras/ integrations/ testing", "__init__ __main__ errors lifting", "meters state_dict types"),
    ),
)
BESIDE = (("options", ("_options/", "options")), ("faster", ("_faster/",)))
"""What is beside the core, which asks for it where a call needs it."""


def floor_of(module: str) -> int:
    """The number of the floor on which a module stands, from 0."""
    root = module.split(".")[0]
    if any(root in re.findall(r"\w+", " ".join(lines)) for _, lines in BESIDE):
        return len(FLOORS) - 2
    (floor,) = (n for n, (_, lines) in enumerate(FLOORS) if root in re.findall(r"\w+", " ".join(lines)))
    return floor


def house() -> Picture:
    """The layers of the package; imports run down, and from the core to what is beside it."""
    heights = [30 + 17 * len(lines) for _, lines in FLOORS[:-1]]
    roof, left, right, beside = 150, 1, 367, 88
    picture = Picture(
        "house",
        roof + sum(heights) + 4,
        "The layers of the package",
        "From the top down: "
        + "; ".join(f"{name} ({', '.join(lines)})" for name, lines in reversed(FLOORS))
        + ". A module imports from its own layer and from those below it, and in a layer from the names before it. "
        + "Beside the core: "
        + "; ".join(f"{name} ({', '.join(lines)})" for name, lines in BESIDE)
        + ". Functions of the core import these when a call needs them.",
    )
    middle = (left + right) / 2
    name, lines = FLOORS[-1]
    picture.area((left, roof), (middle, 4), (right, roof), kind="strong box")
    for number, (line, kind) in enumerate(((name, "bold"), *((line, "small code") for line in lines))):
        picture.text(middle, roof - 64 + 18 * number, line, kind, "middle")
    y = float(roof)
    for (name, lines), height in zip(reversed(FLOORS[:-1]), reversed(heights), strict=True):
        is_core = name == "the core"
        inner = (left + beside, right - beside) if is_core else (left, right)
        picture.box(inner[0], y, inner[1] - inner[0], height, "strong box" if is_core else "box", round_=0)
        for at, (other, own) in zip((left, right - beside), BESIDE, strict=True) if is_core else ():
            picture.box(at, y, beside, height, "box", round_=0)
            for number, (line, kind) in enumerate(((other, "bold"), *((line, "small code") for line in own))):
                picture.text(at + beside / 2, y + 19 + 18 * number, line, kind, "middle")
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
    picture.text(WIDTH / 2 - 4, 54, "for types of other packages", "small", "middle")
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


# What a scan is.


def steps() -> Picture:
    """A scan over four steps: the carry goes through, xs are sliced, and the outputs are stacked."""
    picture = Picture(
        "steps",
        214,
        "What a scan does",
        "Four calls of the body f in a row. Each takes the carry of the call before it, the first takes init, and one "
        "slice of xs. It returns the next carry and one output. The scan returns the last carry and all outputs.",
    )
    wide, apart, left = 50, 72, 58
    for row, (name, y) in enumerate((("xs", 20), ("f", 88), ("ys", 166))):
        for step in range(4):
            x = left + step * apart
            picture.box(x, y, wide, 32, "box" if row == 1 else "strong box")
            said = "f" if row == 1 else f"{name}[{step}]"
            picture.text(x + wide / 2, y + 21, said, "code", "middle")
            if row:
                picture.arrow((x + wide / 2, y - (36 if row == 1 else 46)), (x + wide / 2, y))
    for step in range(5):
        x = left + step * apart - (apart - wide)
        picture.arrow((x, 104), (x + apart - wide, 104))
    picture.text(left - 24, 108, "init", "small code", "end")
    picture.text(left + 4 * apart + 4, 108, "carry", "small code")
    return picture


# The transforms of a loop.


PACKAGE = Path(treescan.__file__).parent
WHERE = {"scan": "prepare", "fori": "fori", "while_scan": "while_scan", "mask_scan": "prepare"}
"""Where each verb lists its transforms; `prepare` and `fori` list those of a plain loop, and longer lists of others."""
INNERMOST, OUTERMOST = "call the body", "run"


def transforms_of(verb: str) -> list[str]:
    """The classes of a verb's transforms, read off its source, innermost first."""
    tree = ast.parse((PACKAGE / "_verbs" / f"{WHERE[verb]}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
    own = [  # what is listed for some loops alone
        node.value.elts
        for node in assigned
        if isinstance(node.value, ast.Tuple)
        and ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]) == "of_outputs"
    ]
    lists = list[list[ast.expr]]()
    for call in (call for call in calls if ast.unparse(call.func).split(".")[-1] == "run"):
        shared = [argument for argument in call.args if ast.unparse(argument) != "*of_outputs"]
        lists += [[*some, *shared] for some in own] if len(shared) < len(call.args) else [call.args]
    listed = [arguments for arguments in lists if arguments and all(map(_classes_of, arguments))]
    names = [
        name for argument in (max if verb == "mask_scan" else min)(listed, key=len) for name in _classes_of(argument)
    ]
    return sorted(names, key=lambda name: stage_of(name).place)


def stage_of(transform: str) -> Stage:
    """The stage of a transform."""
    name = file_of(transform).removesuffix(".py").replace("/", ".")
    stage: Stage = getattr(importlib.import_module(f"treescan.{name}"), transform).stage
    return stage


def _classes_of(argument: ast.expr) -> list[str]:
    """`KeepOutputs` of `KeepOutputs.of(save)` and of `KeepOutputs(save)`; nothing of what is no transform."""
    if isinstance(argument, ast.Starred):
        return ["BeginSegments", "ResetRows", "EndsOfSequences"] if "dividing" in ast.unparse(argument) else []
    text = ast.unparse(argument.func if isinstance(argument, ast.Call) else argument).removesuffix(".of")
    calls = {
        "over": "FindRows",
        "over_axes": "OverAxes",
        "checking": "CheckFinite",
        "recording": "RecordOutputs",
        "truncating": "Truncate",
        "recomputing": "Recompute",
        "showing": "ShowProgress",
    }
    named = calls.get(text.rpartition(".")[2])
    return [named or text] if named or text[0].isupper() else []


def file_of(transform: str) -> str:
    """The file of a transform, in the package."""
    files = PACKAGE.rglob("*.py")
    (file,) = (f for f in files if re.search(rf"^class {transform}[:(]", f.read_text(), re.MULTILINE))
    return str(file.relative_to(PACKAGE))


AROUND = (  # what is outside of a stage, from the outermost in
    (Stage.RECOMPUTED, "around chunks of steps"),
    (Stage.MASKED, "around what a gradient recomputes"),
    (Stage.MOVED, "the mask, around all that the body does"),
)


def loop() -> Picture:
    """The transforms of `mask_scan`, from the outermost to the innermost, in the boxes that they are around."""
    transforms = list(reversed(transforms_of("mask_scan")))
    groups = [(f"{OUTERMOST}: jax.lax.scan", "_loop/run.py", list[str]())]
    outer = max(stage.place for stage in Stage) + 1
    for stage, says in (*AROUND, (None, "inside the mask")):
        inner = stage.place if stage else -1
        groups.append((says, "", [t for t in transforms if inner < stage_of(t).place <= outer]))
        outer = inner
    line, head, side, foot, core = 19, 28, 7, 7, 82
    tall = core + sum(head + foot + line * len(names) for _, _, names in groups)
    picture = Picture(
        "loop",
        tall + 2,
        "The transforms of mask_scan",
        "Nested boxes, from the outermost to the innermost. "
        + " ".join(f"{says[0].upper()}{says[1:]}: {', '.join(names)}." for says, _, names in groups[1:])
        + f" Then: {INNERMOST}. Beside each is its file.",
    )
    y = 1.0
    for level, (says, where, names) in enumerate(groups):
        inset = 1 + level * side
        picture.box(inset, y, WIDTH - 2 * inset, tall + 1 - y - level * foot, "soft box" if level % 2 else "box")
        picture.text(11 + inset, y + 19, says, "bold")
        picture.text(WIDTH - 11 - inset, y + 19, where, "small code", "end")
        y += head
        for name in names:
            picture.text(11 + inset, y + 13, name, "small code")
            picture.text(WIDTH - 11 - inset, y + 13, file_of(name), "small code", "end")
            y += line
    inset = 1 + len(groups) * side
    picture.box(inset, y, WIDTH - 2 * inset, core, "strong box")
    picture.text(WIDTH / 2, y + 22, INNERMOST, "bold", "middle")
    does = ("custom carries, keywords,", "static leaves, annotations,", "comparison of the carry")
    for number, text in enumerate(does):
        picture.text(WIDTH / 2, y + 40 + 16 * number, text, "small", "middle")
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

QUESTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (  # and the page of the answer
    (("Few steps, or steps", "that differ?"), ("for",), "#what-they-take"),
    (("Layers of one model?",), ("fold_layers", "scan_layers"), "guides/layers.html"),
    (("A linear recurrence,", "h = a * h + b?"), ("linear_scan",), "guides/linear-recurrences.html"),
    (("Rows of unequal length", "in one batch?"), ("mask_scan",), "guides/variable-length.html"),
    (("Stop on a condition?",), ("while_scan",), "guides/early-exit.html"),
    (("Only a counter,", "no inputs?"), ("fori",), "reference/scan.html#treescan.fori"),
    (("Only the last carry,", "no outputs?"), ("fold",), "reference/scan.html#treescan.fold"),
    (("Are the outputs", "the carries?"), ("accumulate",), "reference/scan.html#treescan.accumulate"),
)


def folders() -> str:
    """The parts of the house, each with its folders from the top down, and with their sizes."""
    core = tuple(line for _, lines in FLOORS[:-1] for line in lines)
    rows, counts = ["| folder, and what it is | files | lines of code |", "|---|--:|--:|"], list[int]()
    for part, lines in (("the core", core), *BESIDE, FLOORS[-1]):
        roots = re.findall(r"\w+", " ".join(lines))[::-1]
        inside = [root for root in roots if (PACKAGE / root).is_dir()]
        single = [PACKAGE / f"{root}.py" for root in roots if root not in inside]
        own = _sizes_of(*(PACKAGE / root for root in inside), *single)
        rows.append(f"| **{part}** | {len(own)} | **{sum(own):,}** |")
        for root in inside:
            found = _sizes_of(PACKAGE / root)
            rows.append(
                f"| `{root}/`<br>{_first_sentence(PACKAGE / root / '__init__.py')} | {len(found)} | {sum(found):,} |"
            )
        if single:
            names, found = ", ".join(f"`{file.name}`" for file in single), _sizes_of(*single)
            rows.append(f"| {names} | {len(found)} | {sum(found):,} |")
        counts += own
    return "\n".join([*rows, f"| **all** | {len(counts)} | **{sum(counts):,}** |"]) + "\n"


def _sizes_of(*places: Path) -> list[int]:
    """The lines of code of each file that has some, in folders and of single files."""
    found = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
    modules = (".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for file in found)
    return [lines for module in modules if (lines := lines_of(module))]


def _first_sentence(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].replace("\n", " ")


def files() -> str:
    """Every file of the package with its thought, the first line of its docstring: a list for each folder, folded."""
    folders = dict[str, list[Path]]()
    for file in sorted(PACKAGE.rglob("*.py"), key=_place_of):
        folders.setdefault(file.relative_to(PACKAGE).parts[0] if file.parent != PACKAGE else "", []).append(file)
    parts = list[str]()
    for folder, those in folders.items():
        name = f"<code>{folder}/</code>" if folder else "files of the package itself"
        lines = [f"- `{file.relative_to(PACKAGE)}`: {_first_sentence(file)}" for file in those]
        summary = f"<summary>{name}: {len(those)} files</summary>"
        parts.append("\n".join(['<details class="more" markdown>', summary, "", *lines, "", "</details>", ""]))
    return "\n".join(parts)


def _place_of(file: Path) -> tuple[int, str]:
    """From the bottom of the house up; a folder's files together."""
    parts = file.relative_to(PACKAGE).parts
    return floor_of(parts[0].removesuffix(".py")), str(file)


def walk() -> str:
    """The files that calls of the verbs enter, from a process in which nothing was traced before."""
    script = Path(__file__).with_name("walk.py")
    return subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout


def choosing() -> Picture:
    """Questions that lead to a verb: a yes goes to the right, a no goes down."""
    height, apart, wide, answer = 46, 66, 222, 262
    said = "; ".join(f"{' '.join(lines)} {' or '.join(verbs)}" for lines, verbs, _ in QUESTIONS)
    picture = Picture(
        "choosing",
        len(QUESTIONS) * apart + 38,
        "Which loop to write",
        f"Questions, from the top down: {said}; else scan.",
        links=True,
    )

    def box(x: float, y: float, width: float, lines: tuple[str, ...], kind: str, style: str) -> None:
        picture.box(x, y, width, height, kind)
        for number, line in enumerate(lines):
            picture.text(x + width / 2, y + 28 - 9 * (len(lines) - 1) + 18 * number, line, style, "middle")

    for number, (lines, verbs, page) in enumerate(QUESTIONS):
        y = 1 + number * apart
        box(1, y, wide, lines, "box", "")
        with picture.link(page, " or ".join(verbs)):
            box(answer, y, WIDTH - answer - 1, verbs, "strong box", "code")
        picture.arrow((1 + wide, y + height / 2), (answer, y + height / 2))
        picture.text(wide + 6, y + height / 2 - 6, "yes", "small")
        picture.arrow((1 + wide / 2, y + height), (1 + wide / 2, y + apart))
        picture.text(10 + wide / 2, y + height + 14, "no", "small")
    bottom = 1 + len(QUESTIONS) * apart
    with picture.link("reference/scan.html", "scan"):
        picture.box(1, bottom, wide, 36, "strong box")
        picture.text(1 + wide / 2, bottom + 23, "scan", "code", "middle")
    return picture


PICTURES = (
    *(ragged, steps, compact, skipped, house, remat, layers, carry, loop, choosing, vowels, cache, newton),
    *(resets, packing, axes, nan, held, turns, bar, curve, block, devices, parts),
)


def main() -> None:
    """Writes all files."""
    DIRECTORY.mkdir(exist_ok=True)
    for draw in PICTURES:
        picture = draw()
        (DIRECTORY / f"{picture.name}.svg").write_text(str(picture))
    (DIRECTORY / "transforms.md").write_text(table())
    (DIRECTORY / "files.md").write_text(files())
    (DIRECTORY / "folders.md").write_text(folders())
    (DIRECTORY / "walk.md").write_text(walk())
    for name, text in front_files().items():
        (ASSETS / name).write_text(text)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
