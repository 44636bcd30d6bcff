"""Type variables, protocols of bodies, and the options that verbs share: `Remat` and `Checkpoint` among them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NotRequired, Protocol, Required, TypeAlias, TypedDict, TypeVar

import jax

from ._avals import Array, ArrayLike, PyTree, describe_argument, exact_int
from ._errors import Misuse, TypeMisuse, named_fields, named_options

if TYPE_CHECKING:
    from ._options.progress.meters import Progress
    from .options import Option


@named_fields
@dataclass(frozen=True, repr=False)
class Remat:
    """A plan of what the gradient of a loop saves and recomputes, for the option `remat` of the verbs.

    A loop of T steps in L levels is cut into nested chunks of about `T**(1/L)` parts each. The gradient saves the
    carry before each part of one level at a time, about `L * T**(1/L)` carries, and evaluates each step once more per
    level. Any length works. Results do not depend on the plan, except for rounding. Forward mode works too.

    `"step"` is short for `Remat()`, `"nested"` for `Remat(levels=2)`. Chunks that save whole steps
    (`policy="everything_saveable"`) compute the gradient of shared weights with one product per chunk.

    Attributes:
        policy: what each step saves besides its carry: a policy of `jax.checkpoint_policies` or its name, for example
            `"dots_saveable"`. None: nothing. With `"everything_saveable"` and several levels, the innermost chunks save
            all of their steps, so each step is evaluated once less.
        levels: the number of levels. None: 1, or 2 if a chunk is given.
        chunk: the number of steps in an innermost chunk. None: chosen for T.
        offload: the memory kind of the device, for example `"pinned_host"`, that keeps the carries of the outermost
            level until the gradient needs them. None: device memory. A CPU warns that it changes nothing.
        budget: the bytes that the gradient may need, if `Remat.fit` chooses the plan.
    """

    policy: str | Callable[..., Any] | None = None
    levels: int | None = None
    chunk: int | None = None
    offload: str | None = None
    budget: int | None = None

    def __repr__(self) -> str:
        given = [(name, value) for name, value in vars(self).items() if value is not None]
        return f"Remat({', '.join(f'{name}={_shown(value)}' for name, value in given)})"

    @classmethod
    @named_options
    def fit(cls, budget: int) -> Remat:
        """Picks the plan with the fewest evaluations of the body that fits a budget of bytes.

        The choice depends on the body and on the number of steps; `treescan.plan_remat` shows it. The budget covers the
        memory of the loop's gradient without its arguments and results: what is saved, the copies that levels make of
        xs and of gradients, and what the gradient of one step needs. It is an estimate of
        `memory_analysis().temp_size_in_bytes` of the compiled gradient, if that is with respect to everything
        floating-point. A plan must fit with 5 % to spare.

        Args:
            budget: the number of bytes, of all devices together.

        Raises:
            ArgumentError: if it is less than 1.
            ArgumentTypeError: if it is no int.
        """
        count = exact_int(budget)
        if count is None or count < 1:
            says = f"`Remat.fit` takes a number of bytes, an int of at least 1, got {describe_argument(budget)}."
            raise (TypeMisuse if count is None else Misuse)(says, "`Remat.fit(2**30)` is 1 GiB.")
        return cls(budget=budget)


def _shown(value: object) -> str:
    """A field as one would write it: a policy of JAX by its name."""
    if callable(value):
        names = [name for name in dir(jax.checkpoint_policies) if getattr(jax.checkpoint_policies, name) is value]
        value = names[-1] if names else getattr(value, "__name__", value)  # `dots_saveable` has an older name too
    return f'"{value}"' if isinstance(value, str) else repr(value)


@named_fields
@dataclass(frozen=True)
class Checkpoint:
    """Where and how often a stream saves its state, for the option `checkpoint` of `treescan.stream`.

    Attributes:
        folder: the folder, which belongs to one run. It is made if it is not there.
        every: how many parts there are from one checkpoint to the next.
        keep: how many checkpoints are kept.
        skip_damaged: whether a run continues from an older checkpoint if newer ones cannot be read. These are renamed,
            and a warning names them. Otherwise they are an error, which names the older ones.

    Examples:
        >>> import treescan
        >>> checkpoint = treescan.Checkpoint("run-1", every=100, keep=3)
    """

    folder: str | os.PathLike[str]
    every: int = 1
    keep: int = 2
    skip_damaged: bool = False


Axes: TypeAlias = Any
"""A prefix tree of axes: an int, None where allowed, or containers of them."""

RematLike: TypeAlias = Literal["auto", "step", "nested"] | Remat
"""What the gradient recomputes: the fastest plan, each step, chunks of steps and each step in these, or a `Remat`."""

Returned: TypeAlias = Literal["return"]
"""A report is returned of what a check of the carry finds; overloads of their own have it."""

ProgressLike: TypeAlias = "bool | str | Progress | None"
"""Whether a loop shows its progress: a flag, the label of its bar, or a `Progress`."""

CheckpointLike: TypeAlias = "str | os.PathLike[str] | Checkpoint | None"
"""Where a stream saves its state: a folder, or a `Checkpoint`."""

Save: TypeAlias = Any
"""A prefix tree of what is kept of an output: "all", "last", every k-th, positions, or None for nothing."""

Carry = TypeVar("Carry")
X_contra = TypeVar("X_contra", contravariant=True)
X = TypeVar("X")
Y = TypeVar("Y")
Y_co = TypeVar("Y_co", covariant=True)
First_contra = TypeVar("First_contra", contravariant=True)
Second_contra = TypeVar("Second_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


Cond: TypeAlias = Callable[[Carry], Any]
"""The condition of `while_scan`."""

ScanBody: TypeAlias = Callable[[Carry, X], tuple[Carry, Y]]
"""A body of `scan`."""

FoldBody: TypeAlias = Callable[[Carry, X], Carry]
"""A body of `fold` or `accumulate`."""


class Keyed(Protocol[First_contra, Second_contra, Out_co]):
    """A body of two arguments that takes a fresh key each step."""

    def __call__(self, first: First_contra, second: Second_contra, /, *, key: Array) -> Out_co: ...


class KeyedWithOwn(Protocol[First_contra, Second_contra, X_contra, Out_co]):
    """A block that takes a fresh key in each layer, for layers that have an input of their own."""

    def __call__(self, layer: First_contra, x: Second_contra, x_layer: X_contra, /, *, key: Array) -> Out_co: ...


KeyedBody: TypeAlias = Keyed[Carry, X, tuple[Carry, Y]]
"""A body of `scan` that takes a fresh key each step."""

KeyedFoldBody: TypeAlias = Keyed[Carry, X, Carry]
"""A body of `fold` or `accumulate` that takes a fresh key each step."""

KeyedIndexBody: TypeAlias = Keyed[Array, Carry, Carry]
"""A body of `fori` that takes a fresh key each step."""


class ValidBody(Protocol[Carry, X_contra, Y_co]):
    """A body of `mask_scan` or `while_scan` that takes the step's mask, in the batch shape."""

    def __call__(self, carry: Carry, x: X_contra, /, *, valid: Array) -> tuple[Carry, Y_co]: ...


class KeyedValidBody(Protocol[Carry, X_contra, Y_co]):
    """A body of `mask_scan` or `while_scan` that takes a key and the step's mask."""

    def __call__(self, carry: Carry, x: X_contra, /, *, key: Array, valid: Array) -> tuple[Carry, Y_co]: ...


class FirstBody(Protocol[Carry, X_contra, Y_co]):
    """A body of `mask_scan` or `while_scan` that takes whether a step is the first of its segment, for each row."""

    def __call__(self, carry: Carry, x: X_contra, /, *, first: Array) -> tuple[Carry, Y_co]: ...


class ValidFirstBody(Protocol[Carry, X_contra, Y_co]):
    """A body of `mask_scan` or `while_scan` that takes the step's mask, and whether the step is the first."""

    def __call__(self, carry: Carry, x: X_contra, /, *, valid: Array, first: Array) -> tuple[Carry, Y_co]: ...


class ValidMap(Protocol[X_contra, Y_co]):
    """A function of `chunk_map` that takes which entries of a chunk are not padding."""

    def __call__(self, chunk: X_contra, /, *, valid: Array) -> Y_co: ...


class AxesOfRows(TypedDict, total=False):
    """Where the batch shape starts in each leaf of the carry, of one step's x and of one step's y."""

    carry: Axes
    x: Axes
    y: Axes


class AxesOfTime(TypedDict, total=False):
    """Where the steps are in each leaf of xs and of ys, and in a mask and resets."""

    xs: Axes
    ys: Axes
    mask: int


class SaveOption(TypedDict, total=False):
    """Which outputs are kept."""

    save: Save


class OutputOptions(SaveOption, total=False):
    """What becomes of the outputs of all steps."""

    out_axes: Axes


class RowOptions(TypedDict, total=False):
    """Where the rows of a batch are, and what becomes of those that take no step."""

    fill: PyTree
    row_axes: int | AxesOfRows
    compact: bool | tuple[int, ...]


class PartOption(TypedDict, total=False):
    """Where the first step is in a longer run, of which the loop is a part."""

    offset: ArrayLike | None


class KeyOption(TypedDict):
    """The key of a body that takes one."""

    key: Array


class ScanOptions(OutputOptions, PartOption, total=False):
    """The options of `scan` that are given by name, less `key`; what each means is in its documentation."""

    in_axes: Axes
    remat: RematLike | None
    truncate: int | None
    progress: ProgressLike
    check_finite: bool
    options: Sequence[Option]


class ChunkOptions(TypedDict, total=False):
    """The options of `chunk_map`."""

    in_axes: Axes
    out_axes: Axes
    reduce: Literal["sum"] | None
    remat: RematLike | None
    unroll: int | bool
    progress: ProgressLike


class KeyedScan(ScanOptions, KeyOption):
    """The options of `scan` that are given by name, for a body that takes a key."""


class IndexOptions(TypedDict, total=False):
    """The options of `scan` that say nothing about arrays; what each means is in `scan`'s documentation."""

    reverse: bool
    unroll: int | bool
    check_finite: bool


class ForiOptions(IndexOptions, total=False):
    """The options of `fori`, less `key` and `max_length`."""

    remat: RematLike | None
    progress: ProgressLike
    options: Sequence[Option]


class RangeOptions(ForiOptions, total=False):
    """The options of `fori` with the most steps that it may take, less `key`."""

    max_length: int | None


class KeyedRange(RangeOptions, KeyOption):
    """The options of `fori` for a body that takes a key."""


class StepOptions(ForiOptions, PartOption, total=False):
    """The options of every verb over steps, less `key`."""

    truncate: int | None


class FoldOptions(StepOptions, total=False):
    """The options of `fold`, less `key`."""

    in_axes: Axes


class UnkeyedOptions(FoldOptions, OutputOptions, total=False):
    """The options of every verb that stacks outputs, less `key`."""


class RaggedFold(FoldOptions, total=False):
    """The options of `fold`, less `key`, with the lengths of its rows."""

    lengths: ArrayLike | None


class KeyedFold(RaggedFold, KeyOption):
    """The options of `fold` for a body that takes a key."""


class RaggedOptions(RaggedFold, OutputOptions, total=False):
    """The options of `accumulate`, less `key`, with the lengths of its rows."""


class KeyedRows(RaggedOptions, KeyOption):
    """The options of `accumulate` for a body that takes a key."""


class WhileOptions(ForiOptions, RowOptions, OutputOptions, PartOption, total=False):
    """The options of `while_scan`, less `key` and `max_length`."""

    in_axes: Axes


class WhileXs(WhileOptions, total=False):
    """The options of `while_scan` with xs, less `key`."""

    max_length: int | None


class WhileNone(WhileOptions):
    """The options of `while_scan` without xs, less `key`."""

    max_length: int


class KeyedXs(WhileXs, KeyOption):
    """The options of `while_scan` with xs, for a body that takes a key."""


class KeyedNone(WhileNone, KeyOption):
    """The options of `while_scan` without xs, for a body that takes a key."""


class MaskOptions(StepOptions, SaveOption, RowOptions, total=False):
    """The options of `mask_scan`, less `key`."""

    length: int | None
    lengths: ArrayLike | None
    mask: ArrayLike | None
    resets: ArrayLike | None
    reset_to: PyTree
    time_axis: int | AxesOfTime
    chunk: int | None


class LayersOptions(IndexOptions, PartOption, total=False):
    """The options of `fold_layers`, less `key`."""

    length: int | None
    in_axes: Axes
    remat: RematLike | Sequence[RematLike | None] | None
    progress: ProgressLike
    options: Sequence[Option]


class KeyedLayers(LayersOptions, KeyOption):
    """The options of `fold_layers` for a block that takes a key."""


class SharedLayers(LayersOptions):
    """The options of `fold_layers` for a block that takes what all layers share."""

    args: tuple[Any, ...]
    key: NotRequired[Array | None]


class Turns(LayersOptions, total=False):
    """The options of `fold_layers` for several blocks."""

    args: tuple[Any, ...]
    key: Array | None


class StackOptions(LayersOptions, OutputOptions, total=False):
    """The options of `scan_layers`, less `key`."""


class KeyedStack(StackOptions, KeyedLayers):
    """The options of `scan_layers` for a block that takes a key."""


class SharedStack(StackOptions, SharedLayers):
    """The options of `scan_layers` for a block that takes what all layers share."""


class StackTurns(StackOptions, Turns):
    """The options of `scan_layers` for several blocks."""


class StreamOptions(IndexOptions, total=False):
    """The options of `stream`, less `key`, `save`, and what becomes of its parts."""

    part: Required[int]
    length: int | None
    lengths: ArrayLike | None
    remainder: Literal["run", "mask"]
    checkpoint: CheckpointLike
    prefetch: int
    progress: ProgressLike
    donate: bool


class Options(UnkeyedOptions, total=False):
    """The options that every verb shares with `scan`."""

    key: Array | None
