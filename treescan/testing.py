"""`check_carry` checks that a custom carry keeps the laws of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._avals import Array, ArrayLike, PyTree, describe_leaf, is_key
from ._body.carry import agree, find_differences, holds
from ._errors import ArgumentError, Misuse, Row, expect, is_jax_frame, named_options, shorten, walk_traceback
from ._rows.axes import row_axes
from ._rows.leaves import expand
from ._text import table, wrap
from ._trace.dependence import dependent
from ._trace.smooth import smooth_part
from ._tree import leaves_with_path
from ._verbs.mask_scan import mask_scan
from ._verbs.scan import scan
from .carries._base import AbstractCarry, describe_error
from .carries._buffer import checked_batch

__all__ = ["check_carry"]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name[0] == "_")]


class _Trial(NamedTuple):
    """What is tried.

    Attributes:
        carry: the carry.
        returned: leaves [T, *batch, ...].
        batch: the batch shape.
        axes: for each leaf of the carry where the batch shape starts, or None.
    """

    carry: AbstractCarry[Any, Any]
    returned: PyTree
    batch: tuple[int, ...]
    axes: tuple[int | None, ...]

    @property
    def steps(self) -> int:
        return jax.tree.leaves(self.returned)[0].shape[0]

    def at(self, steps: int | slice) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[steps], self.returned)


@named_options
def check_carry(carry: AbstractCarry[Any, Any], returned: PyTree, *, batch: tuple[int, ...] = ()) -> None:
    """Checks the laws that a custom carry must satisfy to work with every verb and every option.

    Args:
        carry: a carry to begin with.
        returned: what a body returns in its place in each step: any pytree with leaves [T, *batch, ...], T >= 3.
        batch: the batch shape of what is returned; leaves of the carry that have rows (`rows`) have it too. With at
            least 3 rows, it also tests masks row by row, and shared leaves with rows that are not valid. With (), a
            carry that has rows is also tried on 3 of them, which begin from copies of it.

    In a masked scan, each row must store and read what it does on its own, without padding. So a carry whose `read`
    combines leaves that have rows with one that all rows share, and that changes, is refused: give it rows too.

    The hooks are called as the verbs call them: `write` receives `valid=None`, as outside of `mask_scan`, and masks.

    Raises:
        AssertionError: if a law does not hold; it lists the leaves for each law. If a hook failed, it names the hook,
            its `valid` and the line, and the hook's exception is the cause.
        ArgumentError: if `returned` has less than 3 steps.
        ArgumentTypeError: if `carry` is no custom carry, or `batch` not a tuple of ints.

    Examples:
        >>> import jax.numpy as jnp
        >>> from treescan.carries import Ema
        >>> from treescan.testing import check_carry
        >>> check_carry(Ema(jnp.zeros(3), decay=0.9), jnp.ones((7, 3)), batch=(3,))
    """
    first = "The carry comes first, and what the body returns in all steps second: `check_carry(carry, returned)`."
    expect(isinstance(carry, AbstractCarry), "carry", "a custom carry", carry, first)
    batch, returned = checked_batch(batch), jax.tree.map(jnp.asarray, returned)
    leaves = jax.tree.leaves(returned)
    if any(leaf.ndim == 0 or leaf.shape[0] < 3 for leaf in leaves) or not leaves:
        raise Misuse(
            "{verb}: `returned` must be what a body returns in at least 3 steps, leaves [T, ...].",
            "Stack the values of several steps, for example `jnp.stack([value] * 3)`.",
        )
    failed: dict[str, list[Row]] = {}
    causes: list[Exception] = []
    arrays = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), carry)
    trial = _Trial(arrays, returned, batch, ())
    without = _try(_begins_with_rows, trial, causes) if batch else {}
    failed |= without
    for law in () if failed else (_hooks_run, _types_stay):
        failed |= _try(law, trial, causes)
    if not failed:
        trial = trial._replace(axes=row_axes(carry, "carry"))
        trials = [trial]
        if not batch and any(axis is not None for axis in trial.axes):
            trials.append(_in_rows(trial))
        for trial in trials:
            failed |= _try(_fits_rows, trial, causes)
            for law in () if failed else _LAWS:
                failed |= _try(law, trial, causes)
    if failed:
        cause = causes[0] if causes else None
        cure = f"\n\n{wrap(_WITHOUT_BATCH)}" if without else ""
        raise AssertionError(_report(type(carry), failed, cause) + cure) from cause


_WITHOUT_BATCH = (
    "`batch` is the shape of rows that this carry has already. Begin from a carry that has them, or leave `batch` out: "
    "a carry of one row is then tried alone, and on rows that are made of it."
)


def _try(law: Callable[[_Trial], Iterator[Row]], trial: _Trial, causes: list[Exception]) -> dict[str, list[Row]]:
    """The rows that a law yields, by what it says; what a hook raised is added to the causes."""
    says = (law.__doc__ or "").removesuffix(".")
    try:
        rows = list(law(trial))
    except Exception as error:
        cause = error  # what a hook raised, of an error that tells of it
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        call, place = _failed_hook(type(trial.carry), cause)
        causes.append(cause)
        rows = [Row(call, "no error", f"{describe_error(cause)}{f', at {place}' if place else ''}", "")]
    return {says: rows} if rows else {}


def _report(kind: type, failed: dict[str, list[Row]], cause: Exception | None) -> str:
    count = len(_LAWS) + 3
    parts = [f"`{kind.__name__}` breaks {len(failed)} of the {count} laws of custom carries."]
    for says, rows in failed.items():
        parts += [wrap(f"{says}."), table(("leaf", "expected", "came"), rows)]
    if cause is not None and _failed_hook(kind, cause)[0] == "write(valid=None)":
        says = "Outside `mask_scan`, every verb calls `write` with `valid=None`. Then all returned values are valid."
        parts.append(wrap(says))
    return "\n\n".join(parts)


_HOOKS = ("read", "write", "rows")


def _failed_hook(kind: type, error: Exception) -> tuple[str, str]:
    """The innermost call of a hook of this class that failed, and the line, outside of JAX, at which it did."""
    call, place = "carry", ""
    for entry in walk_traceback(error.__traceback__):
        frame = entry.tb_frame
        if frame.f_code.co_name in _HOOKS and isinstance(frame.f_locals.get("self"), kind):
            call = f"{frame.f_code.co_name}()"
            if "valid" in frame.f_locals:
                valid = frame.f_locals["valid"]
                call = f"write(valid={'None' if valid is None else describe_leaf(valid)})"
        if call != "carry" and not is_jax_frame(frame):
            place = f"{shorten(frame.f_code.co_filename)}:{entry.tb_lineno}"
    return call, place


_SLACK = 64
"""By how many units in the last place of the largest number two ways to the same result may differ."""


def differ(root: str, expected: PyTree, came: PyTree, *, exact: bool = False) -> Iterator[Row]:
    """A row for each leaf in which two trees differ."""
    if not holds("assert_trees_all_equal_structs", expected, came):
        yield Row(root, str(jax.tree.structure(expected)), str(jax.tree.structure(came)), "")
        return
    for (path, a), b in zip(leaves_with_path(root, expected), jax.tree.leaves(came), strict=True):
        first, second = values_of(a), values_of(b)
        if first.shape != second.shape or not equal(first, second, exact=exact):
            yield Row(path, show(first), show(second), "")


def values_of(leaf: ArrayLike) -> np.ndarray:
    """The numbers of a leaf; of a typed key its data."""
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def equal(a: np.ndarray, b: np.ndarray, *, exact: bool) -> bool:
    """Whether two arrays of one shape are equal, to the bit or up to rounding."""
    if exact or not jnp.issubdtype(a.dtype, jnp.inexact):
        return holds("assert_trees_all_equal", a, b)
    wide_a, wide_b = (x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (a, b))
    slack = _SLACK * float(jnp.finfo(a.dtype).eps) * max(1.0, np.max(np.abs(wide_a[np.isfinite(wide_a)]), initial=0))
    return holds("assert_trees_all_close", wide_a, wide_b, rtol=0, atol=slack)


def show(values: np.ndarray) -> str:
    """An array in few characters."""
    if values.size > 4:
        return f"{describe_leaf(values)} {np.array2string(values.reshape(-1)[:3], precision=7)[:-1]} ..."
    return np.array2string(values, precision=7).replace("\n", "")


def finite(root: str, tree: PyTree) -> Iterator[Row]:
    """A row for each leaf that is not finite."""
    for path, leaf in leaves_with_path(root, tree):
        if not holds("assert_tree_all_finite", leaf):
            yield Row(path, "finite", show(values_of(leaf)), "")


# The laws. Each yields a row for each leaf in which it does not hold; its docstring is what the report says of it.


def _hooks_run(trial: _Trial) -> Iterator[Row]:
    """`read`, `write` and `rows` run, and are pure: they return the same result twice, and do not change the carry."""
    carry = trial.carry
    before = jax.tree.map(lambda leaf: values_of(leaf).copy(), carry)
    first, again = carry.read(), carry.read()
    yield from differ("read()", first, again, exact=True)
    step = trial.at(0)
    yield from differ("write()", carry.write(step, None), carry.write(step, None), exact=True)
    yield from differ("carry", before, jax.tree.map(values_of, carry), exact=True)
    if carry.rows() != carry.rows():
        yield Row("rows()", str(carry.rows()), str(carry.rows()))


def _begins_with_rows(trial: _Trial) -> Iterator[Row]:
    try:
        axes = row_axes(trial.carry, "carry")
    except Exception:  # another law tells
        return
    yield from _fits_rows(trial._replace(axes=axes))


def _types_stay(trial: _Trial) -> Iterator[Row]:
    """`write` returns a carry with the same class, structure, shapes, dtypes and static fields."""
    carry = trial.carry
    for step in (0, -1):
        new: Any = carry.write(trial.at(step), None)
        if type(carry) is not type(new) or not agree(carry, new):
            yield from (difference.row for difference in find_differences("carry", (), carry, new))
            return
        carry = new


def _python_loop(trial: _Trial) -> Iterator[Row]:
    """A scan, whether jitted, eager or under `jax.disable_jit`, equals a Python loop over the hooks."""
    carry, shown = trial.carry, list[Any]()
    for step in range(trial.steps):
        shown.append(carry.read())
        carry = carry.write(trial.at(step), None)
    expected = carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *shown)
    yield from _both("", expected, _scan(trial.carry, trial.returned))
    yield from _both("jit: ", expected, jax.jit(lambda *args: _scan(*args))(trial.carry, trial.returned))
    with jax.disable_jit():
        yield from _both("disable_jit: ", expected, _scan(trial.carry, trial.returned))


def _vmapped(trial: _Trial) -> Iterator[Row]:
    """Under `jax.vmap`, each element has the same result as on its own."""
    flipped = jax.tree.map(lambda leaf: leaf[::-1], trial.returned)
    both = jax.tree.map(lambda a, b: jnp.stack([a, b]), trial.returned, flipped)
    carries = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), trial.carry)
    result = jax.vmap(lambda *args: _scan(*args))(carries, both)
    for i, alone in enumerate((trial.returned, flipped)):
        element = jax.tree.map(lambda leaf, i=i: leaf[i], result)
        yield from _both("", _scan(trial.carry, alone), element)


def _continued(trial: _Trial) -> Iterator[Row]:
    """A scan that continues from a returned carry equals one long scan, bit by bit."""
    half = trial.steps // 2
    middle, _ = _scan(trial.carry, trial.at(slice(half)))
    final, _ = _scan(middle, trial.at(slice(half, None)))
    yield from differ("carry", _scan(trial.carry, trial.returned)[0], final, exact=True)


def _fits_rows(trial: _Trial) -> Iterator[Row]:
    """Each leaf has the batch shape where `rows` says, or all rows share it and `rows` has None for it."""
    for (path, leaf), axis in zip(leaves_with_path("carry", trial.carry), trial.axes, strict=True):
        if axis is not None and leaf.shape[axis : axis + len(trial.batch)] != trial.batch:
            yield Row(path, f"{list(trial.batch)} at axis {axis}", describe_leaf(leaf), "")


_begins_with_rows.__doc__ = _fits_rows.__doc__


def _chunked(trial: _Trial) -> Iterator[Row]:
    """Chunks do not change the result, neither those of a masked scan nor recomputed ones."""
    whole = _scan(trial.carry, trial.returned)
    yield from _both('remat="nested": ', whole, _scan(trial.carry, trial.returned, remat="nested"))
    valid = jnp.ones((trial.steps, *trial.batch), bool)
    yield from _both("chunk=2: ", whole, _masked(trial.carry, trial.returned, valid))


def _unpadded(trial: _Trial) -> Iterator[Row]:
    """In a masked scan, what a row stores and reads has the same value as for the row on its own, without padding."""
    if all(axis is None for axis in trial.axes):
        return
    valid = _some_valid(trial)
    final, _ = _masked(trial.carry, _with_bad_padding(trial.returned, valid), valid)
    stored = _notes(trial, lambda carry: carry.write(trial.at(0), valid[0]))
    shown, seen = _notes(trial, lambda carry: carry.read()), final.read()
    of_row = [None if axis is None else note for note, axis in zip(stored, trial.axes, strict=True)]
    for row in np.ndindex(*trial.batch):
        steps = np.flatnonzero(np.asarray(valid)[(slice(None), *row)])
        own = _part(trial.carry, trial.axes, row)
        alone = (slice(None), *(slice(i, i + 1) for i in row))
        mine = jax.tree.map(lambda leaf, steps=steps, alone=alone: leaf[steps][alone], trial.returned)
        expected = _scan(own, mine)[0] if steps.size else own
        label = f"row {list(row)}: " if row else ""
        yield from _noted(f"{label}carry", expected, _part(final, trial.axes, row), of_row)
        read = expected.read()
        mine = jax.tree.map(lambda whole, one, row=row: _of_row(whole, one, row, trial.batch), seen, read)
        yield from _noted(f"{label}read()", read, mine, shown)


def _notes(trial: _Trial, function: Callable[[AbstractCarry[Any, Any]], PyTree]) -> list[str | None]:
    """For each result of a function of the carry: the shared leaves that it reads and that change, in words.

    None for what reads no leaf with rows.
    """
    leaves, structure = jax.tree.flatten(trial.carry)
    jaxpr = jax.make_jaxpr(lambda leaves: jax.tree.leaves(function(jax.tree.unflatten(structure, leaves))))(leaves)

    def depend(flags: list[bool]) -> list[bool]:
        found = dependent(jaxpr.jaxpr, flags)
        return [not hasattr(atom, "val") and atom in found for atom in jaxpr.jaxpr.outvars]

    new = jax.tree.leaves(trial.carry.write(trial.at(0), jnp.ones(trial.batch, bool)))
    notes = [None if not has_rows else "" for has_rows in depend([axis is not None for axis in trial.axes])]
    for i, (path, leaf) in enumerate(leaves_with_path("carry", trial.carry)):
        if trial.axes[i] is None and leaf is not new[i]:
            reads = depend([i == j for j in range(len(leaves))])
            add = f"reads {path}, which all rows share"
            notes = [add if note == "" and flag else note for note, flag in zip(notes, reads, strict=True)]
    return notes


def _noted(root: str, expected: PyTree, came: PyTree, notes: list[str | None]) -> Iterator[Row]:
    """A row for each leaf in which two trees differ, but for those whose note is None."""
    named = zip(leaves_with_path(root, expected), jax.tree.leaves(came), notes, strict=True)
    for (path, a), b, note in named:
        yield from (row._replace(note=note) for row in differ(path, a, b) if note is not None)


def _of_row(whole: Array, one: Array, row: tuple[int, ...], batch: tuple[int, ...]) -> Array:
    """What was read for a row: along the axes in which the reading of all rows and that of one row differ in size.

    If these are not those of the batch, it is returned whole.
    """
    axes = [axis for axis, (n, m) in enumerate(zip(jnp.shape(whole), jnp.shape(one), strict=False)) if n != m]
    places = [slice(i, i + 1) for i, size in zip(row, batch, strict=True) if size > 1]
    if len(axes) != len(places) or jnp.ndim(whole) != jnp.ndim(one):
        return whole
    where = dict(zip(axes, places, strict=True))
    return whole[tuple(where.get(axis, slice(None)) for axis in range(whole.ndim))]


def _compacted(trial: _Trial) -> Iterator[Row]:
    """`compact=True` does not change the result."""
    if not trial.batch:
        return
    valid = _some_valid(trial)
    plain = _masked(trial.carry, trial.returned, valid)
    try:
        compact = _masked(trial.carry, trial.returned, valid, compact=True)
    except ArgumentError:  # for example a key that all rows share, which it refuses
        return
    yield from differ("carry", plain[0], compact[0])


def _blind(trial: _Trial) -> Iterator[Row]:
    """Leaves that all rows share do not depend on values that were returned for invalid rows, or on their number."""
    if not trial.batch or all(axis is not None for axis in trial.axes):
        return
    axis = int(np.argmax(trial.batch))
    some = (*[slice(None)] * axis, np.arange(0, trial.batch[axis], 2))  # along the longest axis, every second row
    valid = jnp.zeros(trial.batch, bool).at[some].set(True)
    first, notes = trial.at(0), ["" if axis is None else None for axis in trial.axes]
    few = jax.tree.map(lambda leaf: leaf[some], first)
    expected = _part(trial.carry, trial.axes, some).write(few, valid[some])
    other = jax.tree.map(lambda leaf: jnp.where(expand(valid, leaf, 0), leaf, _other(leaf)), first)
    for given in (first, other):
        if rows := list(_noted("carry", expected, trial.carry.write(given, valid), notes)):
            yield from rows
            return


def _zero_cotangents(trial: _Trial) -> Iterator[Row]:
    """The gradient of zero is zero, not NaN."""
    zeros = _pull(_scan, trial.carry, trial.returned, jnp.zeros_like)
    yield from differ("gradient", jax.tree.map(jnp.zeros_like, zeros), zeros, exact=True)


def _finite_gradients(trial: _Trial) -> Iterator[Row]:
    """Gradients are finite, even in a step in which no row is valid."""
    yield from finite("gradient", _pull(_scan, trial.carry, trial.returned))
    invalid = jnp.zeros(trial.batch, bool)
    of_step = _pull(lambda carry, returned: carry.write(returned, invalid), trial.carry, trial.at(0))
    yield from finite("gradient of a step without valid rows", of_step)


_LAWS = (
    _python_loop,
    _vmapped,
    _continued,
    _chunked,
    _unpadded,
    _compacted,
    _blind,
    _zero_cotangents,
    _finite_gradients,
)


# What the laws are made of.


def _body(seen: PyTree, returned: PyTree) -> tuple[PyTree, PyTree]:
    return returned, seen


def _blind_body(_: PyTree, returned: PyTree) -> tuple[PyTree, None]:
    return returned, None


def _scan(carry: PyTree, returned: PyTree, **options: Any) -> tuple[PyTree, PyTree]:
    return scan(_body, carry, returned, **options)


def _masked(carry: PyTree, returned: PyTree, valid: Array, **options: Any) -> tuple[PyTree, PyTree]:
    """A masked scan in short chunks. What was shown may have rows or not: None for it."""
    return mask_scan(_blind_body, carry, returned, mask=valid, chunk=2, **options)


def _both(label: str, expected: tuple[PyTree, PyTree], came: tuple[PyTree, PyTree]) -> Iterator[Row]:
    yield from differ(f"{label}carry", expected[0], came[0])
    if came[1] is not None:
        yield from differ(f"{label}read()", expected[1], came[1])


def _some_valid(trial: _Trial) -> Array:
    """bool[T, *batch] with gaps, padding at both ends, and, of three rows or more, one without anything valid."""
    rows = jnp.arange(np.prod(trial.batch, dtype=int)).reshape(1, *trial.batch)
    steps = jnp.arange(trial.steps).reshape(-1, *(1 for _ in trial.batch))
    return ((steps + rows) % 3 != 2) & ((rows != 1) | (rows.size < 3))


def _with_bad_padding(returned: PyTree, valid: Array) -> PyTree:
    def spoil(leaf: Array) -> Array:
        is_number = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.where(expand(valid, leaf, 0), leaf, jnp.nan) if is_number else leaf

    return jax.tree.map(spoil, returned)


def _other(leaf: Array) -> Array:
    """Something else of the same type, unless it is a key."""
    if is_key(leaf):
        return leaf
    return ~leaf if leaf.dtype == jnp.bool_ else leaf + jnp.asarray(3, leaf.dtype)


def _in_rows(trial: _Trial) -> _Trial:
    """Three rows that begin from the carry; the second receives the steps in the opposite order."""
    leaves, structure = jax.tree.flatten(trial.carry)
    passed_on = jax.tree.leaves(trial.carry.write(trial.at(0), None))
    # A number that `write` passes on is one for all rows: whoever creates the carry gives no batch of them.
    rows = [
        leaf if axis is None or (leaf is new and not leaf.ndim) else jnp.stack([leaf] * 3, axis)
        for leaf, new, axis in zip(leaves, passed_on, trial.axes, strict=True)
    ]
    returned = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1], leaf], 1), trial.returned)
    return _Trial(jax.tree.unflatten(structure, rows), returned, (3,), trial.axes)


def _part(carry: PyTree, axes: tuple[int | None, ...], rows: tuple[Any, ...]) -> PyTree:
    """The carry of some rows, indices along the axes of the batch. Of one row, these have size 1."""
    leaves, structure = jax.tree.flatten(carry)
    where = tuple(slice(i, i + 1) if isinstance(i, int) else i for i in rows)
    taken = [
        leaf if axis is None else leaf[(slice(None),) * axis + where] for leaf, axis in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(structure, taken)


def _pull(
    function: Callable[..., PyTree],
    carry: AbstractCarry[Any, Any],
    returned: PyTree,
    choose: Callable[[Array], Array] = jnp.ones_like,
) -> PyTree:
    """The gradient of a function by what is floating-point in its arguments.

    `choose` makes the cotangents of its floating-point results, of these results.
    """
    part = smooth_part((carry, returned))
    numbers, rest = part.split((carry, returned))

    def run(numbers: list[Array]) -> list[Array]:
        out = function(*part.join(numbers, rest))
        return smooth_part(out).split(out)[0]

    out, back = jax.vjp(run, numbers)
    return back(jax.tree.map(choose, out))[0]
