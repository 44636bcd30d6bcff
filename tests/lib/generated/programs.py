"""A random body: typed instructions over a pool of values, drawn one choice at a time.

Values have a shape beside the batch shape, a kind of dtype, and rows or none. Each instruction is a line of Python, so
that a program is printed by joining its lines. Values with rows keep the batch axes in front and are combined within
their row only.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Brief:
    """A dataclass whose repr has what is not the default, so that a program can be read and copied."""

    def __repr__(self) -> str:
        shown = []
        for field_ in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field_.name)
            if field_.default is dataclasses.MISSING:
                shown.append(repr(value))
            elif value != field_.default:
                shown.append(f"{field_.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


class Draw(Protocol):
    """Where choices come from, for example a seed."""

    def integer(self, low: int, high: int) -> int:
        """Between both, inclusive."""
        ...


@dataclass
class Seeded:
    """Choices of a seed."""

    seed: Any

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def choice(draw: Draw, items: Sequence[Any]) -> Any:
    return items[draw.integer(0, len(items) - 1)]


def chance(draw: Draw, percent: int) -> bool:
    """False is the simple case."""
    return draw.integer(0, 99) >= 100 - percent


@dataclass(frozen=True, repr=False)
class Type(Brief):
    """Of a value.

    Attributes:
        rows: whether the batch shape leads.
        shape: what follows it.
        kind: "f", "c", "i", "b", "k": float, complex, int, bool, PRNG key.
        positive: whether it is at least 0.5 where it is data.
    """

    rows: bool
    shape: tuple[int, ...]
    kind: str = "f"
    positive: bool = False


@dataclass(frozen=True, repr=False)
class Value(Brief):
    name: str
    type: Type


@dataclass(frozen=True, repr=False)
class Instruction(Brief):
    """`name = text`, in which `{0}` is the first of the names that it reads."""

    value: Value
    text: str
    reads: tuple[str, ...]
    op: str = ""

    def line(self) -> str:
        return f"{self.value.name} = {self.text.format(*self.reads)}"


@dataclass(frozen=True, repr=False)
class Leaf(Brief):
    """An input of a program.

    Attributes:
        value: its name and type in the body.
        axis: where the batch shape starts; None without rows.
        custom: the custom carry that holds it, "" for none.
        whole: of xs: given whole to every step.
        fixed: of a carry: handed on unchanged.
        time: of xs and ys: where the axis of the steps stands.
        mapped: under an outer vmap: whether it is mapped.
    """

    value: Value
    axis: int | None = 0
    custom: str = ""
    whole: bool = False
    fixed: bool = False
    time: int = 0
    mapped: bool = True

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def type(self) -> Type:
        return self.value.type


@dataclass(frozen=True, repr=False)
class Program(Brief):
    """Everything random about one case but the values of its arrays.

    Attributes:
        nxt: the names that become the carry, one for each leaf of `carry`.
        ys: the outputs; the value is that in the body.
        flags: what says which steps are valid: arguments of the verb, joined with "+", or the condition of a
            `while_scan`, "while", and "while rows" if each row has its own.
        reset_to: whether segments begin from half of `init`.
        period: how many blocks take turns in the verbs over layers.
    """

    batch: tuple[int, ...]
    dtype: str
    steps: int
    carry: tuple[Leaf, ...]
    xs: tuple[Leaf, ...]
    weights: tuple[Leaf, ...]
    body: tuple[Instruction, ...]
    nxt: tuple[str, ...]
    ys: tuple[Leaf, ...]
    verb: str = "mask_scan"
    flags: str = "lengths"
    options: tuple[tuple[str, str], ...] = ()
    fill: tuple[Any, ...] = ()
    save: tuple[Any, ...] = ()
    mode: tuple[str, ...] = ("vjp", "jvp")
    outer: int = 0
    context: str = "jit"
    padding: str = "nan"
    keyed: bool = False
    valid: bool = False
    seed: int = 0
    reset_to: bool = False
    period: int = 1

    @property
    def by_rows(self) -> bool:
        """Whether each row has steps of its own."""
        return self.verb == "mask_scan" or self.flags == "while rows"

    def option(self, name: str, default: Any = None) -> Any:
        return {"chunk": None, **dict(self.options)}.get(name, default)

    def replace(self, **changes: Any) -> Program:
        return dataclasses.replace(self, **changes)


class NotPossible(Exception):
    """An operation finds nothing to work on."""


@dataclass
class Builder:
    """A body in the making."""

    draw: Draw
    batch: tuple[int, ...]
    sizes: tuple[int, ...]
    forward: bool = False  # operations without a reverse rule may be used
    values: list[Value] = field(default_factory=list)
    body: list[Instruction] = field(default_factory=list)

    def choice(self, items: Sequence[Any]) -> Any:
        return choice(self.draw, items)

    def chance(self, percent: int) -> bool:
        return chance(self.draw, percent)

    def size(self) -> int:
        return self.choice(self.sizes)

    def pick(self, test: Callable[[Type], Any] = lambda t: True, kinds: str = "f") -> Value:
        """A value, one of the last more often."""
        fit = [v for v in self.values if v.type.kind in kinds and test(v.type)]
        if not fit:
            raise NotPossible
        return self.choice(fit[-4:]) if self.chance(50) else self.choice(fit)

    def values_of(self, names: Sequence[str]) -> Value:
        """One of the values with these names."""
        fit = [v for v in self.values if v.name in names]
        if not fit:
            raise NotPossible
        return self.choice(fit)

    def emit(self, text: str, reads: Sequence[Value], rows: bool | None, shape: Any, kind: str = "f", op: str = ""):
        """A new value; with rows where anything that it reads has some, if it is not said."""
        rows = any(v.type.rows for v in reads) if rows is None else rows
        value = Value(f"v{len(self.body)}", Type(rows, tuple(shape), kind))
        self.body.append(Instruction(value, text, tuple(v.name for v in reads), op))
        self.values.append(value)
        return value

    def lifted(self, slot: int, kind: Type, rank: int) -> str:
        """The text of an operand that broadcasts against values of this rank."""
        missing = rank - len(kind.shape)
        explicit = kind.rows and (self.batch or (not kind.shape and self.chance(12)))
        if missing <= 0 or not explicit:
            return f"{{{slot}}}"
        axes = ", ".join(["..."] + ["None"] * missing + [":"] * len(kind.shape))
        return f"{{{slot}}}[{axes}]"

    def operands(self, *values: Value) -> list[str]:
        """The texts of values that are broadcast together."""
        rank = max(len(value.type.shape) for value in values)
        return [self.lifted(slot, value.type, rank) for slot, value in enumerate(values)]


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """As NumPy has it."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        others = set(sizes) - {1}
        if len(others) > 1:
            raise NotPossible
        result.append(others.pop() if others else 1)
    return tuple(result)
