"""Lists of sequences: checks them, chooses their rows, and copies them into one array per leaf and back."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import ShapedArray, Tracer

from .._arguments import without_axis
from .._avals import (
    Array,
    ArrayLike,
    DType,
    PyTree,
    TreeDef,
    describe_argument,
    describe_leaf,
    describe_node,
    describe_traced,
    dtype_of,
    holds,
    is_key,
    shape_of,
)
from .._body.carry import find_differences
from .._body.registered import refuse_unregistered
from .._errors import Misuse, Row, TracedMisuse, TypeMisuse, expect, expect_int
from .._transforms.axes import spread_prefix
from .._tree import Shown, is_number, is_static, leaves_with_path

Ints: TypeAlias = npt.NDArray[np.int64]

_CANDIDATES = 64  # lengths to choose from where the user leaves the choice
_EXACT = 32  # so many lengths are tried without leaving any out
_CLOSE = 512  # what is gained by less than this part is not searched for


class Fit(NamedTuple):
    """Where each sequence goes, in the order of the lengths that were given.

    `slack` is how much longer the rows would have to be for any sequence to go elsewhere, 0 if none ever would.
    """

    length: int
    rows: int
    row: Ints
    start: Ints
    slack: int


def first_fit(lengths: Ints, length: int, most: int | None = None) -> Fit:
    """Puts the longest sequence that is left into the first row with enough room for it, and so on.

    Sequences of one length are placed together: a few array operations a length, however many sequences have it.
    (D. S. Johnson, Near-optimal bin packing algorithms, 1973: at most 11/9 of the fewest rows, and one more.)

    Args:
        lengths: those of the sequences, from 0 up. One of length 0 occupies nothing, and is at the start of row 0.
        length: that of the rows, from the longest sequence's up.
        most: gives up when there are more rows than so many.
    """
    free: Ints = np.full(len(lengths), length, np.int64)  # of each row; the first `rows` are in use
    row: Ints = np.zeros(len(lengths), np.int64)
    start: Ints = np.zeros(len(lengths), np.int64)
    rows, slack = 0, 0
    for size, group in _by_length(lengths):
        chosen = np.flatnonzero(free[:rows] >= size)
        missing = len(group) - int((free[chosen] // size).sum())
        opened = max(0, -(-missing // (length // size)))
        chosen = np.concatenate([chosen, np.arange(rows, rows + opened)])
        room = free[chosen] // size
        first = np.cumsum(room) - room  # the place in the group of the first sequence in each row
        took = np.clip(len(group) - first, 0, room)
        row[group] = np.repeat(chosen, took)
        nth = np.arange(len(group)) - np.repeat(first, took)
        start[group] = length - free[row[group]] + nth * size
        free[chosen] -= took * size
        rows += opened
        short = size - free[:rows]
        slack = min(filter(None, (slack, int(short.min(initial=size, where=short > 0)))))
        if most is not None and rows > most:
            break
    return Fit(length, rows, row, start, slack)


def _by_length(lengths: Ints) -> list[tuple[int, Ints]]:
    """The sequences of each length from 1 up, by their positions: the longest first, ties in the user's order."""
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    ends = np.flatnonzero(np.diff(lengths[order])) + 1
    return [(int(lengths[group[0]]), group) for group in np.split(order, ends) if len(group)]


def shortest_fit(lengths: Ints, rows: int) -> Fit:
    """The shortest rows of which first-fit decreasing needs no more than `rows`.

    Longer rows may need more of them, so that a bisection can miss the shortest. From the least length that could do
    we go to the next that changes anything; past 32 of them in strides of 1/512, to be done with it.
    """
    fit, tried = first_fit(lengths, _least_length(lengths, rows), most=rows), 1
    while fit.rows > rows:
        longer = fit.length + max(fit.slack, 1 if tried < _EXACT else fit.length // _CLOSE)
        fit, tried = first_fit(lengths, longer, most=rows), tried + 1
    return fit


def _least_length(lengths: Ints, rows: int) -> int:
    """A bound from below on the length of so many rows that hold all.

    Of the longest k rows + 1 sequences, k + 1 share a row, whichever: at least the shortest k + 1 of them.
    """
    longest_first = np.sort(lengths)[::-1]
    total = np.concatenate([[0], np.cumsum(longest_first)])
    k = np.arange((len(lengths) - 1) // rows + 1)
    crowded = total[k * rows + 1] - total[k * rows - k]
    return max(int(crowded.max()), -(-int(total[-1]) // rows))


def least_fit(lengths: Ints) -> Fit:
    """Rows of the length that takes the fewest steps in all, from the longest sequence's to twice that.

    Of up to 64 lengths those are tried that could do better than the best so far, by 1/512 at least where that is a
    step or more; of equals the shortest is taken.
    """
    longest = int(lengths.max())
    if not longest:
        return first_fit(lengths, 0)
    candidates = np.unique(np.linspace(longest, 2 * longest, _CANDIDATES).astype(np.int64)).tolist()
    (_, length), *bounds = sorted((length * _fewest_rows(lengths, length), length) for length in candidates)
    best = first_fit(lengths, length)
    for bound, length in bounds:
        if (bound + bound // _CLOSE, length) < _cost(best):
            best = min(best, first_fit(lengths, length, most=_cost(best)[0] // length), key=_cost)
    return best


def _cost(fit: Fit) -> tuple[int, int]:
    return fit.rows * fit.length, fit.length


def _fewest_rows(lengths: Ints, length: int) -> int:
    """A bound from below on the number of rows of a length: no two of more than half of it share one."""
    return max(-(-int(lengths.sum()) // length), int(np.count_nonzero(2 * lengths > length)))


def arrange(lengths: Ints, rows: int | None, length: int | None) -> Fit:
    """A place for each sequence, in one row at least: in as many rows as are wanted, of the length that is wanted."""
    if length is not None:
        check_fits(lengths, length)
        fit = first_fit(lengths, length)
    else:
        fit = least_fit(lengths) if rows is None else shortest_fit(lengths, rows)
    if rows is not None and fit.rows > rows:
        raise Misuse(
            f"{{verb}}: {_rows(rows, length)} cannot hold {len(lengths)} sequences, of {lengths.sum()} steps in all.",
            f"First-fit decreasing takes {_rows(fit.rows, length)}, or "
            f"{_rows(rows, shortest_fit(lengths, rows).length)}.",
        )
    return fit._replace(rows=max(fit.rows, 1) if rows is None else rows)


def _rows(rows: int, length: int | None) -> str:
    return f"{rows} row{'' if rows == 1 else 's'} of {length} steps"


_MANY = 8  # rows of a table
_OUTSIDE_JIT = "This function runs on the host: call it outside `jax.jit`, and pass in the result."


class Sequences(NamedTuple):
    """Sequences that fit together: their structure, the leaves of each, and their lengths."""

    structure: TreeDef
    leaves: list[list[Any]]
    lengths: Ints

    def lay_out(self, spans: Spans, steps: int, rows: int, fill: PyTree) -> PyTree:
        """One array [steps, rows, ...] for each leaf, with each sequence in its span, and `fill` everywhere else."""
        numbers = spread_fill(fill, jax.tree.unflatten(self.structure, self.leaves[0]))
        columns = zip(zip(*self.leaves, strict=True), numbers, strict=True)
        batched = [_lay_leaf(list(column), spans.each(), steps, rows, number) for column, number in columns]
        return jax.tree.unflatten(self.structure, batched)


def is_list(given: object) -> bool:
    """Whether something is a sequence, and neither a text nor a named tuple."""
    return isinstance(given, Sequence) and not isinstance(given, str | bytes) and not hasattr(given, "_fields")


def check_sequences(sequences: Any) -> Sequences:
    """A list of one sequence or more, equal in structure, dtypes and trailing shapes.

    Raises:
        Fault: for an `ArgumentError` that lists what differs, or a `TracedArgumentError` for traced leaves.
    """
    if not is_list(sequences):
        raise TypeMisuse(
            f"{{verb}} takes a list of sequences, got {describe_argument(sequences)}.",
            "Each is a pytree with leaves [steps, ...]: `[sequence]` for a single one, `list(...)` for an iterator.",
        )
    if not sequences:
        raise Misuse(
            "{verb} got no sequences.",
            "Give at least one sequence, because an empty list does not have the type of a step. The sequence may "
            "have 0 steps.",
        )
    trees: list[tuple[list[Any], TreeDef]] = [jax.tree.flatten(sequence) for sequence in sequences]
    leaves = [flat for flat, _ in trees]
    if any(isinstance(leaf, Tracer) for flat in leaves for leaf in flat):
        for path, leaf in leaves_with_path("sequences", list(sequences)):
            refuse_traced(leaf, path)
    _check_steps(sequences, leaves)
    if any(structure != trees[0][1] for _, structure in trees):
        _refuse_differences(
            [jax.tree.map(lambda leaf: Shown("an array"), sequence) for sequence in sequences],
            "sequences",
            "{verb}: the sequences differ in structure from the first.",
            "Give all of them the same containers with the same parts, because each leaf of the batch becomes one "
            "array.",
        )
    _check_types(sequences, leaves)
    return Sequences(trees[0][1], leaves, np.asarray([flat[0].shape[0] for flat in leaves], np.int64))


def refuse_traced(value: object, name: str, cure: str = _OUTSIDE_JIT) -> None:
    """Refuses a traced value."""
    if isinstance(value, Tracer):
        raise TracedMisuse(f"{{verb}}: {name} is {describe_traced(value)}.", cure)


def _check_steps(sequences: Sequence[PyTree], leaves: list[list[Any]]) -> None:
    """Refuses leaves without an axis of steps, and sequences without leaves."""
    refuse_unregistered({f"sequences[{i}]": sequence for i, sequence in enumerate(sequences)})
    named: list[tuple[str, Any]] = []
    for i, flat in enumerate(leaves):
        if not flat or not all(map(shape_of, flat)):
            named += without_axis(f"sequences[{i}]", sequences[i]) or [(f"sequences[{i}]", sequences[i])]
    if named:
        lists = [path for path, node in named if isinstance(node, list | tuple) and node]
        numbers = all(is_number(sequence) for sequence in sequences)
        raise Misuse(
            "{verb}: the leaves of a sequence must be arrays whose first axis is the steps, but these are not.",
            *(["For one sequence of numbers: `[jnp.asarray(sequences)]`."] if numbers else []),
            *(
                f"JAX reads a list of numbers as separate leaves: make it an array, `jnp.asarray({path})`."
                for path in lists[:1]
            ),
            "Leave values that are the same for all steps out of the sequences.",
            rows=some([Row(path, "[steps, ...]", describe_node(node)) for path, node in named]),
        )


def _refuse_differences(trees: Sequence[PyTree], name: str, says: str, cure: str) -> None:
    """Refuses trees that differ from the first."""
    differences = [find_differences(f"{name}[{i}]", (), trees[0], tree) for i, tree in enumerate(trees)]
    rows = [difference.row for found in differences for difference in found]
    if rows:
        raise Misuse(says, cure, header=("leaf", f"in {name}[0]", "is"), rows=some(rows))


def _check_types(sequences: Sequence[PyTree], leaves: list[list[Any]]) -> None:
    """Refuses leaves whose dtype or trailing shape is not that of most, and leaves of another number of steps."""
    usual = [Counter(map(_step_type, column)).most_common(1)[0][0] for column in zip(*leaves, strict=True)]
    rows: list[Row] = []
    for i, flat in enumerate(leaves):
        steps = flat[0].shape[0]
        if [_step_type(leaf) for leaf in flat] == usual and all(leaf.shape[0] == steps for leaf in flat):
            continue
        for (path, leaf), (shape, dtype) in zip(leaves_with_path(f"sequences[{i}]", sequences[i]), usual, strict=True):
            if _step_type(leaf) != (shape, dtype) or leaf.shape[0] != steps:
                expected = str(ShapedArray((steps, *shape), dtype))
                rows.append(Row(path, expected, describe_leaf(leaf), "dtype" if dtype_of(leaf) != dtype else ""))
    if rows:
        raise Misuse(
            "{verb}: the sequences do not fit together.",
            "All leaves of one sequence must have the same number of steps. Between sequences, a leaf must keep its "
            "dtype, and its shape apart from the steps. Cast or reshape the sequences first, for example "
            "`x.astype(dtype)`.",
            rows=some(rows),
        )


def _step_type(leaf: object) -> tuple[tuple[int, ...], DType]:
    """The shape and the dtype of one step, the dtype as JAX will have it."""
    aval = jax.typeof(leaf)
    return aval.shape[1:], aval.dtype


def some(rows: list[Row]) -> list[Row]:
    """The rows of a table, up to a readable number."""
    rest = len(rows) - _MANY
    return rows if rest <= 1 else [*rows[:_MANY], Row(f"and {rest} more", "", "")]


def check_count(value: object, name: str, least: int = 0) -> int | None:
    """A concrete int from `least` up, or None."""
    if value is None:
        return None
    static = (
        "It is the size of an axis, so it must be known when the program is traced: take it from a shape, or make it a "
        "static argument of the function under `jax.jit`."
    )
    refuse_traced(value, f"`{name}`", static)
    count = expect_int(value, name, f"Give an int of at least {least}: `int(...)` converts a whole number.")
    if count < least:
        raise Misuse(f"{{verb}}: `{name}` is {count}.", f"Give an int of at least {least}.")
    return count


def check_fits(lengths: Ints, length: int) -> None:
    """Refuses a length that is shorter than the longest sequence."""
    longest = int(lengths.argmax())
    if lengths[longest] > length:
        raise Misuse(
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

    def cut_out(self, tree: PyTree) -> list[PyTree]:
        """What is in each span of a tree with leaves [steps, rows, ...]."""
        leaves, structure = jax.tree.flatten(tree)
        columns = [_cut_leaf(leaf, self.each()) for leaf in leaves]
        return [jax.tree.unflatten(structure, [column[i] for column in columns]) for i in range(len(self.row))]


def _lay_leaf(
    column: Sequence[ArrayLike], where: list[tuple[int, slice]], steps: int, rows: int, number: ArrayLike
) -> Array:
    leaves = _on_host(column)
    shape, dtype = _step_type(leaves[0])
    batch = np.full((steps, rows, *shape), number, dtype)
    for leaf, (row, span) in zip(leaves, where, strict=True):
        batch[span, row] = leaf
    return put(batch, column[0])


def spread_fill(
    fill: PyTree, example: PyTree, root: str = "sequences[0]", whole: str = "a sequence"
) -> list[ArrayLike]:
    """The value of the padding for each leaf of a tree, whose root and name are those of messages."""
    cure = f"Give one number for all leaves, or a tree of numbers that is a prefix of {whole}."
    numbers = spread_prefix("`fill`", fill, example, root, cure, whole=whole)
    named = leaves_with_path(root, example)
    return [
        0 if is_key(leaf) else _cast(number, path, leaf) for number, (path, leaf) in zip(numbers, named, strict=True)
    ]


def _cast(number: object, path: str, leaf: object) -> np.ndarray:
    """A number in the dtype of a leaf; floating-point dtypes round it."""
    dtype = jax.typeof(leaf).dtype
    if isinstance(number, _NUMBERS) and not isinstance(number, Tracer) and np.ndim(number) == 0:
        plain = number.item() if isinstance(number, np.generic | np.ndarray | jax.Array) else number
        if holds(dtype, plain):
            with np.errstate(over="ignore"):
                return np.asarray(plain, dtype)
    raise Misuse(
        f"{{verb}}: {path} is {describe_leaf(leaf)}, which cannot hold the `fill` {describe_traced(number)}.",
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
        Row(path, expected, describe_leaf(leaf))
        for path, leaf in named
        if (shape := shape_of(leaf)) is None or shape[: len(lead)] != lead
    ]
    if bad:
        leads = all((shape_of(leaf) or ())[:1] == rows for _, leaf in named)
        raise Misuse(
            f"{{verb}}: {root} does not have the steps and the rows of the batch.",
            *["Perhaps the batch leads, [B,T,...]: {batch_first}."] * leads,
            "The first axis of every leaf must be the steps, and the second the rows, as in the ys of "
            "`treescan.mask_scan`.",
            rows=some(bad),
        )
    return steps


def check_concrete(value: object, name: str) -> np.ndarray:
    """A value whose elements can be read, as a NumPy array."""
    refuse_traced(value, name)
    return np.asarray(value)


def _cut_leaf(leaf: Array, where: list[tuple[int, slice]]) -> list[Array]:
    if isinstance(leaf, Tracer):
        return [leaf[span, row] for row, span in where]
    (batch,) = _on_host([leaf])
    return put([batch[span, row].copy() for row, span in where], leaf)


def _on_host(leaves: Sequence[ArrayLike]) -> list[np.ndarray]:
    """Concrete leaves as NumPy arrays, of typed keys their data."""
    with jax.ensure_compile_time_eval():
        leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves]
    return list(map(np.asarray, jax.device_get(leaves)))


def put(tree: PyTree, like: ArrayLike | None = None) -> PyTree:
    """NumPy arrays as arrays of JAX, concrete under a trace too. `jnp.asarray` compiles a copy for each new shape.

    If `like` is an array of typed keys, they are the data of such keys.
    """
    with jax.ensure_compile_time_eval():
        arrays = jax.device_put(tree)
        if like is None or not is_key(like):
            return arrays
        return jax.tree.map(functools.partial(jax.random.wrap_key_data, impl=jax.random.key_impl(like)), arrays)


def stack_inits(inits: Any, count: int) -> PyTree:
    """The inits of all sequences as one tree, leaves [N, ...].

    Raises:
        Fault: for an `ArgumentTypeError` if they are no list, or an `ArgumentError` if there is not one for each
            sequence, or they do not fit together.
    """
    expect(
        is_list(inits),
        "init",
        "a list with the carry of each sequence",
        inits,
        "Give `[carry] * len(sequences)` if all start from the same carry. If the carries are stacked already, "
        "put them into the batch: `pack(sequences)._replace(init=carries)`.",
    )
    if len(inits) != count:
        raise Misuse(
            f"{{verb}}: `init` has {len(inits)} carr{'y' if len(inits) == 1 else 'ies'} for {count} sequence"
            f"{'s'[: count != 1]}.",
            "Give the carry that each sequence starts from, in the order of the sequences.",
        )
    named = leaves_with_path("init", list(inits))
    static = [Row(path, "an array", describe_leaf(leaf)) for path, leaf in named if is_static(leaf)]
    if static:
        raise Misuse(
            "{verb}: the carries of `init` hold leaves that are not arrays.",
            "Put values that all sequences share into the `init` of the scan, and give None here.",
            rows=some(static),
        )
    _refuse_differences(
        inits,
        "init",
        "{verb}: the carries of `init` differ from the first.",
        "Give all sequences the same containers with the same parts, and in each part the same shape and dtype. "
        "If one sequence has a part, all need it, for example as zeros. Use None for the parts that all "
        "sequences take from the `init` of the scan.",
    )
    return jax.tree.map(lambda *leaves: _stack(list(leaves)), *inits)


def _stack(leaves: Sequence[ArrayLike]) -> Array:
    """One array [N, ...]; concrete leaves are stacked on the host, which compiles nothing."""
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return jnp.stack(leaves)
    return put(np.stack(_on_host(leaves)), leaves[0])
