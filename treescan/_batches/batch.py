"""What batches of sequences of different lengths are, `Padded` and `Packed`, and what verbs make of them as xs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._avals import Array, ArrayLike, PyTree, shape_of
from .._body.signature import Convention
from .._errors import Misuse, verb
from .._rows.axes import RowFlags
from .._tree import PrefixMismatch, broadcast_prefix, leaves_with_path, short_html, short_repr
from .._types import Axes, X, Y


class PackIndex(NamedTuple):
    """Where each sequence is in a `Packed` batch, in the order in which they were given.

    Attributes:
        row: int32[N], its row.
        start: int32[N], its first step there.
        length: int32[N], the number of its steps.
    """

    row: Array
    start: Array
    length: Array


class Packed(NamedTuple, Generic[X]):
    """A batch of rows with several sequences in each, end to end: the result of `treescan.pack`. It is a pytree.

    `Packed.from_segment_ids` makes one of rows that a data pipeline has packed.

    Attributes:
        data: the sequences, leaves `[T, R, ...]`.
        mask: bool[T, R], which steps belong to a sequence.
        resets: bool[T, R], True at the first step of each sequence.
        index: where each sequence is: its `row`, its first step there (`start`) and its `length`, int32[N] each.
        init: the carry that each sequence starts from, leaves `[N, ...]`; None: the init of the row.
    """

    data: X
    mask: Array
    resets: Array
    index: PackIndex  # type: ignore[assignment]  # in place of the method of tuples, which nobody looks for here
    init: PyTree = None

    def __repr__(self) -> str:
        return short_repr("Packed", **self._asdict())

    def _repr_html_(self) -> str:
        return short_html("Packed", **self._asdict())

    @property
    def steps(self) -> int:
        """The number of steps T of the rows."""
        return self.mask.shape[0]

    @property
    def rows(self) -> int:
        """The number of rows R."""
        return self.mask.shape[1]

    @property
    def segment_ids(self) -> Array:
        """The number of each step's sequence in its row, from 1 up, and 0 in padding: int32[T, R]. Under a trace too.

        Attention over packed rows compares them: a step may attend to the steps with its own id.
        """
        numbers = jnp.cumsum(self.resets, axis=-2, dtype=jnp.int32)
        return jnp.where(self.mask, numbers, jnp.zeros_like(numbers))

    @property
    def positions(self) -> Array:
        """The place of each step in its sequence, from 0 up, and 0 in padding: int32[T, R]. Under a trace too.

        Embeddings of positions and rotary embeddings take them.
        """
        steps = jnp.cumsum(jnp.ones_like(self.mask, jnp.int32), axis=-2, dtype=jnp.int32)
        zero = jnp.zeros_like(steps)
        began = jax.lax.cummax(jnp.where(self.resets, steps, zero), axis=steps.ndim - 2)
        return jnp.where(self.mask, steps - began, zero)

    @staticmethod
    @verb
    def from_segment_ids(
        data: Y, segment_ids: ArrayLike, *, time_axis: int, num_segments: int | None = None
    ) -> Packed[Y]:
        """Makes a batch of rows that are packed already, from the segment ids of a data pipeline.

        A sequence is a run of steps of one row with the same id. Sequences are in the order of their rows, and in each
        row in the order of time.

        Args:
            data: any pytree with leaves `[B, T, ...]`, or `[T, B, ...]`: the axes of `segment_ids`.
            segment_ids: int[B, T] or int[T, B]. 0 is padding, which may be anywhere. The sequences of a row have
                different ids, in any order; `Packed.segment_ids` numbers them anew. Traced ids are not checked: a run
                whose id was there before is another sequence, and a negative id is not padding.
            time_axis: the axis of the steps: 1 for `[B, T]`, the form of most pipelines, and 0 for `[T, B]`. Required,
                because shapes do not show it. The batch is `[T, R, ...]`.
            num_segments: the number of sequences N. If there are fewer, the rest have 0 steps. Required if
                `segment_ids` are traced; if there are more, those after the first `num_segments` are padding then.
                None: as many as there are, at least 1.

        Returns:
            The batch, leaves `[T, R, ...]`. R is B.

        Raises:
            ArgumentError: if an id is negative, or is that of two runs of a row; if there are more than
                `num_segments`; if `segment_ids` do not have two axes, or a leaf does not begin with these.
            ArgumentTypeError: if `segment_ids` are not ints, or `time_axis` is missing.
            TracedArgumentError: if `segment_ids` are traced and `num_segments` is None.

        Examples:
            >>> import jax.numpy as jnp
            >>> import treescan
            >>> tokens = jnp.array([[5, 6, 7, 8], [9, 3, 0, 0]])  # [B, T]
            >>> ids = jnp.array([[1, 1, 1, 2], [1, 1, 0, 0]])
            >>> batch = treescan.Packed.from_segment_ids(tokens, ids, time_axis=1)
            >>> for sequence in treescan.unpack(batch.data, batch):
            ...     print(sequence)
            [5 6 7]
            [8]
            [9 3]
            >>> print(batch.positions.T)
            [[0 1 2 0]
             [0 1 0 0]]
        """
        from .segments import read_ids

        laid_out, mask, resets, spans = read_ids(data, segment_ids, time_axis, num_segments)
        return Packed(laid_out, mask, resets, PackIndex(*spans))

    @property
    @verb
    def efficiency(self) -> float:
        """The part of all steps that is valid, from 0 to 1; of a batch without any step, 1. Not under a trace."""
        from .sequences import check_concrete

        mask = check_concrete(self.mask, "mask")
        return float(mask.mean()) if mask.size else 1.0


class Padded(NamedTuple, Generic[X]):
    """A batch of rows that are padded to one length: the result of `treescan.pad`. It is a pytree.

    Attributes:
        data: the sequences, leaves `[T, B, ...]`: sequence b is the first `lengths[b]` steps of row b.
        lengths: int32[B], the number of steps of each sequence.
    """

    data: X
    lengths: Array

    def __repr__(self) -> str:
        return short_repr("Padded", **self._asdict())

    def _repr_html_(self) -> str:
        return short_html("Padded", **self._asdict())

    @property
    @verb
    def mask(self) -> Array:
        """Which steps are valid, bool[T, B]; under a trace too."""
        from .._rows.checks import check_lengths
        from .._rows.leaves import mask_of_lengths
        from .sequences import check_lead

        steps = check_lead("data", self.data, np.shape(self.lengths))
        return mask_of_lengths(check_lengths(self.lengths, steps), steps)

    @property
    @verb
    def efficiency(self) -> float:
        """The part of all steps that is valid, from 0 to 1; of a batch without any step, 1. Not under a trace."""
        from .sequences import check_concrete, check_lead

        lengths = check_concrete(self.lengths, "lengths")
        total = check_lead("data", self.data, lengths.shape) * lengths.size
        return float(lengths.sum(dtype=np.int64) / total) if total else 1.0


_Batch: TypeAlias = Padded[Any] | Packed[Any]


def take_batches_apart(xs: PyTree, flags: RowFlags, time_axis: int, in_axes: Axes) -> tuple[PyTree, RowFlags]:
    """The data of xs, and the rows of the batches in it; those of anything else as they were given.

    Raises:
        Fault: for an `ArgumentError` if something else says what the batches say, or if they differ in that.
    """
    batches = _batches("xs", xs)
    if not batches:
        return xs, flags
    path, first = batches[0]
    said = {"lengths": flags.lengths, "mask": flags.mask, "time_axis": time_axis or None}
    said |= {"resets": flags.resets} if isinstance(first, Packed) else {}
    said |= {"{in_axes}": in_axes} if _is_batch(xs) else {}
    check_padded(said, type(first).__name__, path)
    for other_path, other in batches:
        for inner, node in _batches(f"{other_path}.data", other.data):
            raise Misuse(
                f"{{call}}: {inner} is a `{type(node).__name__}` within a `{type(other).__name__}`.",
                f"A batch may only contain data: use `{inner}.data` there, or pass both batches side by side.",
            )
        _refuse_other_rows(batches[0], (other_path, other))
    data = jax.tree.map(lambda node: node.data if _is_batch(node) else node, xs, is_leaf=_is_batch)
    if in_axes is not None:
        _check_in_axes(in_axes, xs, data)
    if isinstance(first, Padded):
        return data, RowFlags(lengths=first.lengths, resets=flags.resets)
    inits = [(path, batch.init) for path, batch in batches if isinstance(batch, Packed) and batch.init is not None]
    if any(init is not inits[0][1] for _, init in inits):
        raise Misuse(
            f"{{call}}: {inits[0][0]} and {inits[1][0]} both have an `init` for each sequence.",
            f"Leave one of them out: `{inits[1][0]}._replace(init=None)`.",
        )
    spans = first.index.row, first.index.start, first.index.length
    return data, RowFlags(mask=first.mask, resets=first.resets, spans=spans, inits=inits[0][1] if inits else None)


def refuse_batches(xs: PyTree, in_axes: Axes, convention: Convention) -> None:
    """Refuses a `Padded` or a `Packed` as xs of a loop that does not know of them: its lengths have no steps.

    A stack of several batches, one for each step, is allowed, and so is what `in_axes` describes.
    """
    if not (type(in_axes) is int and in_axes == 0):
        return
    for path, node in _batches("xs", xs):
        counts = node.lengths if isinstance(node, Padded) else node.index.length
        sizes = {(shape_of(leaf) or (None,))[0] for leaf in jax.tree.leaves(node)}
        if len(shape_of(counts) or ()) > 1 and len(sizes) == 1:  # a stack of batches
            continue
        kind = type(node).__name__
        cures = [
            f"`treescan.mask_scan` takes a `{kind}` as xs. Its body returns a pair (carry, y).",
            f"To run all steps, also the padded ones, pass `{path}.data`.",
        ]
        if kind == "Padded" and convention.verb in ("fold", "accumulate"):
            cures.insert(0, f"Pass `{path}.data` in its place, and `lengths={path}.lengths`.")
        if convention.verb == "chunk_map":
            rows = "`in_axes=treescan.Padded(1, 0)`" if kind == "Padded" else f"`{path}.data`, with `in_axes=1`,"
            cures = [f"The first axis of its data is the steps. {rows} cuts rows into chunks."]
        raise Misuse(
            f"{{call}}: {path} is a `{kind}`, but {{verb}} does not know its lengths, and would scan over them too.",
            *cures,
        )


def _is_batch(node: object) -> bool:
    return isinstance(node, Padded | Packed)


def _batches(root: str, tree: PyTree) -> list[tuple[str, _Batch]]:
    if not any(map(_is_batch, jax.tree.leaves(tree, is_leaf=_is_batch))):
        return []
    return [(path, node) for path, node in leaves_with_path(root, tree, is_leaf=_is_batch) if _is_batch(node)]


def _refuse_other_rows(first: tuple[str, _Batch], other: tuple[str, _Batch]) -> None:
    """Refuses two batches that do not say the same of their rows, or may not."""
    (path, batch), (other_path, other_batch) = first, other
    both = f"{path} is a `{type(batch).__name__}` and {other_path} a `{type(other_batch).__name__}`"
    says, cure = f"{{call}}: {both}, which have different rows.", ""
    pairs = [] if type(batch) is not type(other_batch) else list(zip(_said(batch), _said(other_batch), strict=True))
    if not pairs:
        cure = (
            "Make both with `pad`, or both with `pack`. "
            f"`repad(ys, {path if isinstance(batch, Packed) else other_path})` gives each packed sequence a row."
        )
    elif any(a is not b and (isinstance(a, Tracer) or isinstance(b, Tracer)) for a, b in pairs):
        says = f"{{call}}: {both}, whose rows are traced, so they may differ."
        cure = f"Combine the data of both into one batch: `{path}._replace(data=({path}.data, {other_path}.data))`."
    elif not all(a is b or np.array_equal(a, b) for a, b in pairs):
        cure = "Make one batch from sequences that contain both, `pad([(a, b), ...])` or `pack([(a, b), ...])`."
    if cure:
        raise Misuse(says, cure)


def _said(batch: _Batch) -> list[Array]:
    """What a batch says of its rows."""
    return [batch.lengths] if isinstance(batch, Padded) else [batch.mask, batch.resets, *batch.index]


def _check_in_axes(in_axes: Axes, xs: PyTree, data: PyTree) -> None:
    """Refuses `in_axes` that say of the data of a batch anything but 0; what is no prefix is found out later."""
    own = jax.tree.map(
        lambda node: jax.tree.map(lambda _: True, node.data) if _is_batch(node) else False, xs, is_leaf=_is_batch
    )
    try:
        axes = broadcast_prefix(in_axes, data, "xs")
    except PrefixMismatch:
        return
    named = leaves_with_path("xs", data)
    for axis, is_own, (path, _) in zip(axes, jax.tree.leaves(own), named, strict=True):
        if is_own and not (type(axis) is int and axis == 0):
            raise Misuse(
                f"{{call}}: `{{in_axes}}` is {axis!r} for {path}, a part of a batch. The first axis of a "
                "batch is always the steps.",
                "Give 0 for the parts of a `Padded` or a `Packed`, and other axes, or None, for the other leaves.",
            )


def check_padded(given: Mapping[str, object], kind: str, path: str = "xs") -> None:
    """Refuses options that a `Padded` or a `Packed` already determines."""
    said = [name for name, value in given.items() if value is not None]
    if said:
        raise Misuse(
            f"{{call}}: {path} is a `{kind}`, which already determines `{said[0]}`.",
            f"Leave `{said[0]}` out, or pass `{path}.data` in place of {path}.",
        )
