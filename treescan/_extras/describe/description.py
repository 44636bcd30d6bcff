"""`Description`, what `describe` returns: its facts, as text, as HTML and as a plot."""

from __future__ import annotations

import collections
import importlib
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..._errors import Misuse, verb as keeps_its_frame
from ..._remat.budget import ASSUMED, describe_bytes
from ..._text import WIDTH, Section, page, wrap
from ..._types import RematLike


@dataclass(frozen=True)
class Leaf:
    """One array of a call.

    Attributes:
        path: where it is, in the user's names.
        type: as JAX prints it; of what is scanned over and of outputs, that of one step.
        bytes: of that type.
        sharding: how it is spread over devices, where it is.
        changes: for a leaf of the carry, whether any step changes it.
        rows: in a loop over rows, the axis where their batch shape was found; None: all rows share the leaf.
    """

    path: str
    type: str
    bytes: int
    sharding: str | None = None
    changes: bool = True
    rows: int | None = None


@dataclass(frozen=True)
class Saved:
    """What each step saves for the gradient at one line of the body.

    Attributes:
        place: the line, as in `model.py:31`; "the carry" for the carry itself.
        operations: what computes it.
        types: the types of the arrays.
        bytes: of all of them.
    """

    place: str
    operations: tuple[str, ...]
    types: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What the gradient needs under one `remat`.

    Attributes:
        remat: the option.
        used: whether it is what the call says.
        sizes: the steps of the nested chunks, innermost first.
        bytes: what the gradient needs without its arguments and results, as an estimate; None: it cannot be taken.
        evaluations: how often the gradient evaluates each step, the forward pass included.
        refusal: why the gradient cannot be taken.
    """

    remat: RematLike | None
    used: bool
    sizes: tuple[int, ...]
    bytes: int | None
    evaluations: int
    refusal: str | None = None


@dataclass(frozen=True)
class Finding:
    """What may be a mistake that no error shows.

    Attributes:
        says: what was found, and where.
        cure: what to do about it.
    """

    says: str
    cure: str


_INDENT, _GAP = "  ", "  "


def section_text(section: Section) -> str:
    """A section, its columns aligned."""
    lines = [section.header, *section.rows] if any(section.header) else section.rows
    notes, table = list(map(wrap, section.notes)), [_table(lines)] if section.rows else []
    if not section.title:
        return "\n\n".join([*table, *notes])
    notes = [f"\n{note}" if table else textwrap.indent(note, _INDENT) for note in notes]
    return "\n".join([wrap(section.title), *table, *notes])


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with their columns aligned. What is left of the last column goes on below."""
    count = max(map(len, rows))
    widths = [max(len(row[i]) for row in rows) for i in range(count - 1)]
    taken = len(_INDENT) + sum(widths) + len(_GAP) * (count - 1)
    if taken > WIDTH - 16:
        return "\n".join(map(_stacked, rows))
    lines = list[str]()
    for row in rows:
        start = _INDENT + "".join(cell.ljust(width) + _GAP for cell, width in zip(row, widths, strict=False))
        first, *others = wrap(row[-1], WIDTH - taken).split("\n")
        lines += [(start + first).rstrip(), *(" " * taken + line for line in others)]
    return "\n".join(lines)


def _stacked(row: Sequence[str]) -> str:
    """A row whose cells are too wide for one line: the second begins the line, the others follow where they fit."""
    return textwrap.fill(
        _GAP.join(filter(None, row)),
        WIDTH,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT * 3,
        break_long_words=False,
        break_on_hyphens=False,
    )


_MOST = 12
"""Rows of a table; what comes after them is added up."""


def headline(of: Description) -> str:
    """The call in a line."""
    count = f"{of.steps:,} {of.unit}{'' if of.steps == 1 else 's'}"
    way = " in reverse" if of.reverse else ""
    return f"`{of.verb}` over {of.body}: {'at most ' if of.at_most else ''}{count}{way}"


def sections(of: Description) -> list[Section]:
    """The sections that are not empty."""
    saved = f"Saved by each {of.unit} for the gradient, if nothing is recomputed: {describe_bytes(_sum(of.saved))}"
    cost = (
        f"A {of.unit} takes {of.flops:,} FLOPs, or {of.operations:,} operations if a function such as `tanh` counts "
        "as a hundred."
    )
    return [
        Section("", ("", "", "", ""), list(_leaves(of))),
        *([Section(saved, ("", "", ""), list(_saved(of)))] if of.saved else []),
        Section("", (), [], [cost]),
        _gradient(of),
        *([_findings(of)] if of.findings else []),
    ]


def _leaves(of: Description) -> Iterator[Sequence[str]]:
    for name in ("carry", "x", "y", "constants"):
        leaves = getattr(of, name)
        for number, leaf in enumerate(leaves[:_MOST]):
            rows = "all rows share it" if leaf.rows is None else f"rows at axis {leaf.rows}"
            notes = [describe_bytes(leaf.bytes), leaf.sharding, "" if leaf.changes else f"no {of.unit} changes it"]
            notes += [rows] if of.batch and (name != "constants" or leaf.rows is not None) else []
            yield name if not number else "", leaf.path, leaf.type, ", ".join(filter(None, notes))
        if leaves[_MOST:]:
            yield "", f"and {len(leaves) - _MOST} more", "", describe_bytes(_sum(leaves[_MOST:]))


def _sum(parts: Iterable[Leaf | Saved]) -> int:
    return sum(part.bytes for part in parts)


def _saved(of: Description) -> Iterator[Sequence[str]]:
    for each in of.saved[:_MOST]:
        (first, count), *others = collections.Counter(each.types).most_common()
        types = f"{count} x {first}" if count > 1 else first
        more = f" and {sum(number for _, number in others)} more" if others else ""
        operations = f", from {', '.join(each.operations)}" if each.operations else ""
        yield each.place, describe_bytes(each.bytes), f"{types}{more}{operations}"
    if of.saved[_MOST:]:
        yield f"{len(of.saved) - _MOST} more lines", describe_bytes(_sum(of.saved[_MOST:])), ""


def _gradient(of: Description) -> Section:
    sizes = " of ".join(f"{size:,}" for size in reversed(of.plan.sizes))
    chunks = f"chunks of {sizes} {of.unit}s" if sizes else "one loop"
    tiers = f"; rows in tiers of {', '.join(map(str, of.tiers))}" if of.tiers else ""
    note = (
        f"Needs: an estimate of the memory, without arguments and results. {ASSUMED} `measure_remat` compiles and "
        "measures. Evaluations: how often each step runs, including the forward pass."
    )
    note = note if of.plan.refusal is None else f"There is none: {of.plan.refusal}"
    rows = [
        (
            f"{spelled(plan.remat)}{' (this call)' if plan.used else ''}",
            ", ".join(map(str, plan.sizes)) or "-",
            describe_bytes(plan.bytes),
            str(plan.evaluations),
        )
        for plan in of.plans
        if plan.bytes is not None
    ]
    return Section(f"The gradient: {chunks}{tiers}", ("remat", "chunks", "needs", "evaluations"), rows, [note])


def spelled(remat: RematLike | None) -> str:
    """A `remat` as the user would write it."""
    return f'"{remat}"' if isinstance(remat, str) else repr(remat)


def _findings(of: Description) -> Section:
    return Section("Findings", ("",), [(f"{each.says} {each.cure}",) for each in of.findings])


def axes_of(ax: Any, height: float) -> Any:
    """The axes of matplotlib to draw in: those that were given, or new ones of this height, in inches.

    Raises:
        Fault: for an `ArgumentError` if matplotlib is not installed.
    """
    if ax is not None:
        return ax
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise Misuse(
            "{verb} needs matplotlib, which is not installed.",
            "Install it: `pip install matplotlib`. Or print what you would draw: the text has the same numbers.",
        ) from None
    return pyplot.subplots(figsize=(7, height), layout="constrained")[1]


@dataclass(frozen=True, repr=False)
class Description:
    """What a call of a verb does, without running it: what `treescan.describe` returns. Print it.

    In a notebook it is a table. Bytes are those of the types that the body sees: under `jax.vmap` of one element, and
    of all devices together.

    Attributes:
        verb: the name of the verb.
        body: the body, with its file and line; of several blocks each.
        unit: what a step is called: "step", "layer" or "period".
        steps: the number of steps; of a pattern, the periods.
        at_most: whether the loop may end earlier.
        reverse: whether the last step runs first.
        batch: the batch shape of a loop over rows, as the lengths, the mask or the condition say it; () for others.
        carry: the leaves of the carry. A leaf has `path`, `type`, `bytes`, `sharding`, whether it `changes`, and the
            axis of its `rows`, None if all rows share it.
        x: what one step is given of what is scanned over.
        y: what one step returns beside the carry.
        constants: the values that all steps share, and what the body closes over.
        saved: what each step saves for the gradient if nothing is recomputed: for each line of the body its `place`,
            the `operations`, the `types` and the `bytes`.
        tiers: the numbers of rows for which the body is made, with `compact`.
        plans: what the gradient needs: of this call first, then under other values of `remat` that the verb takes. A
            plan has `remat`, the `sizes` of its chunks, `bytes`, `evaluations` of each step, and, where there is no
            gradient, a `refusal`.
        plan: the first of them.
        operations: of one step, where a function such as `tanh` counts as a hundred.
        flops: of one step, where it counts as one.
        findings: what may be a mistake that no error shows: what each `says`, and its `cure`.
    """

    verb: str
    body: str
    unit: str
    steps: int
    at_most: bool
    reverse: bool
    batch: tuple[int, ...]
    carry: tuple[Leaf, ...]
    x: tuple[Leaf, ...]
    y: tuple[Leaf, ...]
    constants: tuple[Leaf, ...]
    saved: tuple[Saved, ...]
    tiers: tuple[int, ...]
    plans: tuple[Plan, ...]
    operations: int
    flops: int
    findings: tuple[Finding, ...]

    @property
    def plan(self) -> Plan:
        """What the gradient of this very call needs."""
        return self.plans[0]

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [wrap(headline(self)), *map(section_text, sections(self))]))

    def __repr__(self) -> str:
        return f"<Description of {headline(self)}; findings: {len(self.findings)}>"

    def __rich__(self) -> Any:
        """Its first line in bold."""
        text = str(self)
        styled = importlib.import_module("rich.text").Text(text)
        styled.stylize("bold", 0, len(text.partition("\n")[0]))
        return styled

    def _repr_html_(self) -> str:
        return page(headline(self), sections(self))

    def show(self) -> None:
        """Prints it, in colours if `rich` is installed and a terminal shows them."""
        try:
            console = importlib.import_module("rich.console").Console()
        except ImportError:
            print(self)  # noqa: T201, what it is for
            return
        console.print(self.__rich__(), soft_wrap=True)

    @keeps_its_frame
    def plot(self, ax: Any = None) -> Any:
        """Draws what the gradient needs under each plan, with matplotlib.

        Args:
            ax: matplotlib's axes to draw in; None: new ones.

        Returns:
            The axes.

        Raises:
            ArgumentError: if matplotlib is not installed, or no plan has a gradient.
        """
        plans = [plan for plan in self.plans if plan.bytes is not None]
        if not plans:
            says = "{verb} draws the memory that the gradient needs, but this call has no gradient."
            raise Misuse(says)
        ax = axes_of(ax, 0.6 + 0.5 * len(plans))
        names = [f"{spelled(plan.remat)}\n{plan.evaluations} evaluations" for plan in plans]
        colours = ["tab:blue" if plan.used else "lightgray" for plan in plans]
        bars = ax.barh(names, [plan.bytes for plan in plans], color=colours)
        ax.bar_label(bars, [describe_bytes(plan.bytes or 0) for plan in plans], padding=3)
        ax.margins(x=0.2)
        ax.invert_yaxis()
        ax.set_xlabel("bytes that the gradient needs")
        ax.set_xticks([])
        ax.set_title(headline(self).replace("`", ""))
        return ax
