"""Lists of sequences: checks them, and copies them into one array per leaf and back."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray, Tracer

from .._avals import describe_argument, describe_leaf, describe_node, describe_traced, dtype_of, holds, is_key, shape_of
from .._body.differences import find_differences
from .._errors import ArgumentError, ArgumentTypeError, Fault, Row, TracedArgumentError
from .._tree import PrefixMismatch, broadcast_prefix, leaves_with_path
from .._types import Array, PyTree, TreeDef
from .first_fit import Ints

_MANY = 8  # rows of a table
_OUTSIDE_JIT = "This function runs on the host: call it outside `jax.jit`, and pass in the result."


class Sequences(NamedTuple):
    """Sequences that fit together: their structure, the leaves of each, and their lengths."""

    structure: TreeDef
    leaves: list[list[Any]]
    lengths: Ints


def check_sequences(sequences: Any) -> Sequences:
    """A list of one sequence or more, equal in structure, dtypes and trailing shapes.

    Raises:
        Fault: for an `ArgumentError` that lists what differs, or a `TracedArgumentError` for traced leaves.
    """
    if not isinstance(sequences, Sequence) or isinstance(sequences, str | bytes) or hasattr(sequences, "_fields"):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} takes a list of sequences, got {describe_argument(sequences)}.",
            "Each is a pytree with leaves [steps, ...]: `[sequence]` for a single one, `list(...)` for an iterator.",
        )
    if not sequences:
        raise Fault(
            ArgumentError,
            "{verb} got no sequences.",
            "Give at least one sequence, because an empty list does not have the type of a step. The sequence may "
            "have 0 steps.",
        )
    trees: list[tuple[list[Any], TreeDef]] = [jax.tree.flatten(sequence) for sequence in sequences]
    leaves = [flat for flat, _ in trees]
    for i, flat in enumerate(leaves):
        if any(isinstance(leaf, Tracer) for leaf in flat):
            named = leaves_with_path(f"sequences[{i}]", sequences[i])
            path, leaf = next(pair for pair in named if isinstance(pair[1], Tracer))
            raise Fault(TracedArgumentError, f"{{verb}}: {path} is {describe_traced(leaf)}.", _OUTSIDE_JIT)
    _check_steps(sequences, leaves)
    if any(structure != trees[0][1] for _, structure in trees):
        raise _structures_differ(sequences)
    _check_types(sequences, leaves)
    return Sequences(trees[0][1], leaves, np.asarray([flat[0].shape[0] for flat in leaves], np.int64))


def _check_steps(sequences: Sequence[PyTree], leaves: list[list[Any]]) -> None:
    """Refuses leaves without an axis of steps, and sequences without leaves."""
    named = [
        pair
        for i, flat in enumerate(leaves)
        if not flat or not all(map(shape_of, flat))
        for pair in _without_steps(f"sequences[{i}]", sequences[i])
    ]
    if named:
        cures = [
            f"JAX reads a list of numbers as separate leaves: make it an array, `jnp.asarray({path})`."
            for path, node in named
            if isinstance(node, list | tuple) and node
        ]
        raise Fault(
            ArgumentError,
            "{verb}: the leaves of a sequence must be arrays whose first axis is the steps, but these are not.",
            *cures[:1],
            "Leave values that are the same for all steps out of the sequences.",
            header=("leaf", "expected", "is"),
            rows=some([Row(path, "[steps, ...]", describe_node(node), "") for path, node in named]),
        )


def _without_steps(root: str, sequence: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a sequence that have no steps; a list (of lists) of nothing else as one."""

    def is_unit(node: Any) -> bool:
        return isinstance(node, list | tuple) and bool(node) and all(is_unit(x) or shape_of(x) == () for x in node)

    named = leaves_with_path(root, sequence, is_leaf=is_unit)
    return (
        [(path, node) for path, node in named if is_unit(node) or not shape_of(node)] if named else [(root, sequence)]
    )


class _AnyLeaf:
    """Represents each leaf where structures are compared."""

    def __repr__(self) -> str:
        return "an array"


_ANY = _AnyLeaf()


def _structures_differ(sequences: Sequence[PyTree]) -> Fault:
    first, *others = (jax.tree.map(lambda leaf: _ANY, sequence) for sequence in sequences)
    rows = [
        difference.row
        for i, other in enumerate(others, 1)
        for difference in find_differences(f"sequences[{i}]", (), first, other)
    ]
    return Fault(
        ArgumentError,
        "{verb}: the sequences differ in structure from the first.",
        "Give all of them the same containers with the same parts, because each leaf of the batch becomes one array.",
        header=("leaf", "in sequences[0]", "is"),
        rows=some(rows),
    )


def _check_types(sequences: Sequence[PyTree], leaves: list[list[Any]]) -> None:
    """Refuses leaves whose dtype or trailing shape is not that of most, and leaves of another number of steps."""
    usual = [Counter(map(_step_type, column)).most_common(1)[0][0] for column in zip(*leaves, strict=True)]
    bad = [
        i
        for i, flat in enumerate(leaves)
        if [_step_type(leaf) for leaf in flat] != usual or len({leaf.shape[0] for leaf in flat}) > 1
    ]
    rows = [
        Row(path, str(ShapedArray((leaves[i][0].shape[0], *shape), dtype)), describe_leaf(leaf), _note(leaf, dtype))
        for i in bad
        for (path, leaf), (shape, dtype) in zip(leaves_with_path(f"sequences[{i}]", sequences[i]), usual, strict=True)
        if _step_type(leaf) != (shape, dtype) or leaf.shape[0] != leaves[i][0].shape[0]
    ]
    if rows:
        raise Fault(
            ArgumentError,
            "{verb}: the sequences do not fit together.",
            "All leaves of one sequence must have the same number of steps. Between sequences, a leaf must keep its "
            "dtype, and its shape apart from the steps. Cast or reshape the sequences first, for example "
            "`x.astype(dtype)`.",
            header=("leaf", "expected", "is"),
            rows=some(rows),
        )


def _step_type(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and the dtype of one step, the dtype as JAX will have it."""
    aval = jax.typeof(leaf)
    return aval.shape[1:], aval.dtype


def _note(leaf: Any, dtype: Any) -> str:
    return "dtype" if dtype_of(leaf) != dtype else ""


def some(rows: list[Row]) -> list[Row]:
    """The rows of a table, up to a readable number."""
    rest = len(rows) - _MANY
    return rows if rest <= 1 else [*rows[:_MANY], Row(f"and {rest} more", "", "", "")]


def check_count(value: Any, name: str, least: int = 0) -> int | None:
    """A concrete int from `least` up, or None."""
    if value is None:
        return None
    if isinstance(value, Tracer):
        raise Fault(TracedArgumentError, f"{{verb}}: `{name}` is {describe_traced(value)}.", _STATIC)
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool | np.bool_):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `{name}` must be an int, got {describe_argument(value)}.",
            f"Give an int of at least {least}: `int(...)` converts a whole number.",
        )
    if count < least:
        raise Fault(ArgumentError, f"{{verb}}: `{name}` is {count}.", f"Give an int of at least {least}.")
    return count


_STATIC = (
    "It is the size of an axis, so it must be known when the program is traced: take it from a shape, or make it a "
    "static argument of the function under `jax.jit`."
)


def check_fits(lengths: Ints, length: int) -> None:
    """Refuses a length that is shorter than the longest sequence."""
    longest = int(lengths.argmax())
    if lengths[longest] > length:
        raise Fault(
            ArgumentError,
            f"{{verb}}: `length` is {length}, but sequences[{longest}] has {lengths[longest]} steps.",
            f"Give `length` {lengths[longest]} or more, or cut the sequences: {{verb}} drops nothing.",
        )


class Spans(NamedTuple):
    """For each sequence the row of the batch where it is, its first step there, and its length."""

    row: Ints
    start: Ints
    length: Ints

    def each(self) -> list[tuple[int, slice]]:
        """The row and the steps of each."""
        spans = zip(self.row.tolist(), self.start.tolist(), self.length.tolist(), strict=True)
        return [(row, slice(start, start + length)) for row, start, length in spans]


def lay_out(sequences: Sequences, spans: Spans, steps: int, rows: int, value: PyTree) -> PyTree:
    """One array [steps, rows, ...] for each leaf, with each sequence in its span, and `value` everywhere else."""
    example = jax.tree.unflatten(sequences.structure, sequences.leaves[0])
    where = spans.each()
    batched: list[Array] = []
    for i, number in enumerate(spread_value(value, example)):
        column = [flat[i] for flat in sequences.leaves]
        if is_key(column[0]):
            bits = _lay_leaf([key_bits(leaf) for leaf in column], where, steps, rows, 0)
            batched.append(keys_of(bits, column[0]))
        else:
            batched.append(_lay_leaf(jax.device_get(column), where, steps, rows, number))
    return jax.tree.unflatten(sequences.structure, batched)


def _lay_leaf(column: list[Any], where: list[tuple[int, slice]], steps: int, rows: int, number: Any) -> Array:
    shape, dtype = _step_type(column[0])
    batch = np.full((steps, rows, *shape), number, dtype)
    for leaf, (row, span) in zip(column, where, strict=True):
        batch[span, row] = leaf
    return put(batch)


def spread_value(value: PyTree, example: PyTree, root: str = "sequences[0]", whole: str = "a sequence") -> list[Any]:
    """The value of the padding for each leaf of a tree, whose root and name are those of messages."""
    try:
        numbers = broadcast_prefix(value, example, root)
    except PrefixMismatch as error:
        raise Fault(
            ArgumentError,
            f"{{verb}}: `value` is not a prefix of {whole}: {error}.",
            f"Give one number for all leaves, or a tree of numbers that is a prefix of {whole}.",
        ) from None
    named = leaves_with_path(root, example)
    return [
        0 if is_key(leaf) else _cast(number, path, leaf) for number, (path, leaf) in zip(numbers, named, strict=True)
    ]


def _cast(number: Any, path: str, leaf: Any) -> Any:
    """A number in the dtype of a leaf; floating-point dtypes round it."""
    dtype = jax.typeof(leaf).dtype
    if isinstance(number, _NUMBERS) and not isinstance(number, Tracer) and np.ndim(number) == 0:
        plain = number.item() if isinstance(number, np.generic | np.ndarray | jax.Array) else number
        if holds(dtype, plain):
            with np.errstate(over="ignore"):
                return np.asarray(plain, dtype)
    raise Fault(
        ArgumentError,
        f"{{verb}}: {path} is {describe_leaf(leaf)}, which cannot hold the `value` {describe_traced(number)}.",
        "Give a number that fits, or one for each leaf, in a tree.",
    )


_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray, jax.Array)


def check_lead(root: str, tree: PyTree, rows: tuple[int, ...], steps: int | None = None) -> int:
    """Refuses leaves that do not lead with [steps, *rows]; without `steps`, with those of the first. Returns them."""
    named = leaves_with_path(root, tree)
    if steps is None:
        steps = next(((shape_of(leaf) or (0,))[0] for _, leaf in named), 0)
    lead = (steps, *rows)
    expected = f"[{', '.join(map(str, lead))}, ...]"
    bad = [
        Row(path, expected, describe_leaf(leaf), "")
        for path, leaf in named
        if (shape := shape_of(leaf)) is None or shape[: len(lead)] != lead
    ]
    if bad:
        raise Fault(
            ArgumentError,
            f"{{verb}}: {root} does not have the steps and the rows of the batch.",
            "The first axis of every leaf must be the steps, and the second the rows, as in the ys of "
            "`treescan.mask_scan`.",
            header=("leaf", "expected", "is"),
            rows=some(bad),
        )
    return steps


def check_concrete(value: Any, name: str) -> Any:
    """A value whose elements can be read, as a NumPy array."""
    if isinstance(value, Tracer):
        raise Fault(TracedArgumentError, f"{{verb}}: {name} is {describe_traced(value)}.", _OUTSIDE_JIT)
    return np.asarray(value)


def cut_out(tree: PyTree, spans: Spans) -> list[Any]:
    """What is in each span of a tree with leaves [steps, rows, ...]."""
    leaves, structure = jax.tree.flatten(tree)
    where = spans.each()
    columns = [_cut_leaf(leaf, where) for leaf in leaves]
    return [jax.tree.unflatten(structure, [column[i] for column in columns]) for i in range(len(where))]


def _cut_leaf(leaf: Any, where: list[tuple[int, slice]]) -> list[Array]:
    if isinstance(leaf, Tracer):
        return [leaf[span, row] for row, span in where]
    if is_key(leaf):
        return [keys_of(bits, leaf) for bits in _cut_leaf(key_bits(leaf), where)]
    batch = np.asarray(leaf)
    return put([batch[span, row].copy() for row, span in where])


def put(tree: Any) -> Any:
    """NumPy arrays as arrays of JAX, concrete under a trace too. `jnp.asarray` compiles a copy for each new shape."""
    with jax.ensure_compile_time_eval():
        return jax.device_put(tree)


def key_bits(keys: Any) -> Any:
    """The data of typed keys, as a NumPy array."""
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.random.key_data(keys))


def keys_of(bits: Array, like: Any) -> Array:
    """Typed keys of the same kind as `like`."""
    with jax.ensure_compile_time_eval():
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(like))
