"""Proves of a trace that it treats rows independently: no row of its results depends on another row.

The analysis follows the axis of the rows from equation to equation. It knows what common primitives do with an axis,
and gives up at any other, at a loop of unknown length, and wherever rows meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._avals import LeafAxes
from .equations import CALLS, called, equations_within, loop_of

_Axes = list[int | None]


class _Unproven(Exception):
    """Rows may depend on one another."""


def _require(holds: object) -> None:
    if not holds:
        raise _Unproven


def keeps_rows_apart(jaxpr: Any, given: LeafAxes, returned: LeafAxes, rows: int) -> bool:
    """Whether each row of the outputs of an open jaxpr depends on no other row of its inputs.

    Args:
        jaxpr: the program. What it closes over counts as the same for all rows.
        given: for each input the axis of the rows, or None: it is the same for all of them.
        returned: for each output where the rows are to be. None: it must not depend on any row.
        rows: how many there are.

    Returns:
        True if that is proven. False does not mean that rows meet.
    """
    if rows == 1 and None not in returned:  # nothing else is to be known, but that padding does no harm
        return all(each.primitive.name in _HARMLESS for each in equations_within(jaxpr))
    known = rows_within(jaxpr, given, rows)
    if known is None:
        return False
    found = _axes_of(jaxpr.outvars, known)
    return all(axis in (None, wanted) for axis, wanted in zip(found, returned, strict=True))


def rows_within(jaxpr: Any, given: Sequence[int | None], rows: int) -> dict[Any, int] | None:
    """The axis of the rows in each variable of an open jaxpr that has any, or None if rows may meet in it.

    The other variables are the same for all rows. `given` and `rows` are those of `keeps_rows_apart`.
    """
    try:
        return _follow(jaxpr, given, rows)
    except (
        _Unproven,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ):  # or a release of JAX in which a primitive looks otherwise
        return None


def _axes_of(atoms: Sequence[Any], known: dict[Any, int]) -> _Axes:
    return [None if hasattr(atom, "val") else known.get(atom) for atom in atoms]


def _outputs(jaxpr: Any, given: Sequence[int | None], rows: int) -> _Axes:
    return _axes_of(jaxpr.outvars, _follow(jaxpr, given, rows))


def _follow(jaxpr: Any, given: Sequence[int | None], rows: int) -> dict[Any, int]:
    known: dict[Any, int] = {var: axis for var, axis in zip(jaxpr.invars, given, strict=True) if axis is not None}
    numbers = _RowNumbers(rows)
    for equation in jaxpr.eqns:
        numbers.follow(equation)
        axes = _axes_of(equation.invars, known)
        if all(axis is None for axis in axes):
            continue
        for var, axis in zip(equation.outvars, _of_equation(equation, axes, rows, numbers), strict=True):
            if axis is not None:
                _require(var.aval.shape[axis] == rows)
                known[var] = axis
    return known


class _RowNumbers:
    """Which indices are the row's own number, as in `cache.at[jnp.arange(rows), t].set(x)`.

    Integers that an equation computes from no input are computed here too, with numpy.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._values: dict[Any, Any] = {}
        self._joined: dict[Any, list[tuple[int, Any]]] = {}  # of a concatenation: the width and value of each part

    def follow(self, equation: Any) -> None:
        """Notes what an equation computes, if that is known. A jaxpr's equations are followed in their order."""
        name, params, out = equation.primitive.name, equation.params, equation.outvars[:1]
        if name not in _KNOWN or not _is_small_integer(out[0].aval):
            return
        parts = [atom.val if hasattr(atom, "val") else self._values.get(atom) for atom in equation.invars]
        if all(part is not None for part in parts):
            self._values[out[0]] = _KNOWN[name](params, *map(np.asarray, parts))
        elif name == "concatenate" and params["dimension"] == out[0].aval.ndim - 1:
            self._joined[out[0]] = [(a.aval.shape[-1], part) for a, part in zip(equation.invars, parts, strict=True)]

    def columns(self, indices: Any, axis: int | None) -> dict[int, int]:
        """The columns of indices, along their last axis, that hold the row's number, and the axis of the rows."""
        shape, start, found = indices.aval.shape, 0, dict[int, int]()
        for width, value in self._joined.get(indices, [(shape[-1], self._values.get(indices))]):
            for place in range(len(shape) - 1) if axis is None else [axis]:
                if value is None or shape[place] != self._rows:
                    continue
                own = np.arange(self._rows).reshape([-1 if a == place else 1 for a in range(len(shape) - 1)])
                found.update({start + n: place for n in range(width) if np.all(value[..., n] == own)})
            start += width
        return found


def _is_small_integer(aval: Any) -> bool:
    """Whether a value is worth to be known."""
    return (
        getattr(aval.dtype, "kind", "") in ("i", "u", "b")
        and all(isinstance(n, int) for n in aval.shape)
        and math.prod(aval.shape) < 2**16
    )


def _broadcast(params: Any, value: Any) -> Any:
    places = dict(zip(params["broadcast_dimensions"], value.shape, strict=True))
    shape = params["shape"]
    return np.broadcast_to(value.reshape([places.get(axis, 1) for axis in range(len(shape))]), shape)


def _iota(params: Any) -> Any:
    dtype, shape, along = params["dtype"], params["shape"], params["dimension"]
    own = [-1 if axis == along else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[along], dtype=dtype).reshape(own), shape)


_KNOWN: dict[str, Callable[..., Any]] = {
    "add": lambda params, a, b: a + b,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *values: np.concatenate(values, params["dimension"]),
    "convert_element_type": lambda params, value: value.astype(params["new_dtype"]),
    "iota": _iota,
    "lt": lambda params, a, b: a < b,
    "reshape": lambda params, value: value.reshape(params["new_sizes"]),
    "select_n": lambda params, which, *cases: np.choose(which, cases),
}
"""The primitives with which JAX makes indices of what a user wrote, from parameters and values."""


def _of_equation(equation: Any, axes: _Axes, rows: int, numbers: _RowNumbers) -> _Axes:
    """For each output of an equation where its rows are; it has rows among its inputs."""
    name = equation.primitive.name
    inner = called(equation)
    if inner is not None:
        return _outputs(inner[0], axes, rows)
    if name in _WITH_PROGRAMS:
        return _WITH_PROGRAMS[name](equation, axes, rows)
    if name in ELEMENTWISE:
        return [_one(axes)]
    if name in _INDEXED:
        return [_INDEXED[name](equation, axes, numbers)]
    return [_RULES[name](equation, axes)] * len(equation.outvars)


def _one(axes: _Axes) -> int:
    """The axis that all operands with rows have them at."""
    found = {axis for axis in axes if axis is not None}
    _require(len(found) == 1)
    return found.pop()


def _only(axes: _Axes) -> int:
    """The axis of the first operand, the one that may have rows."""
    axis, *others = axes
    if axis is None or any(other is not None for other in others):
        raise _Unproven
    return axis


def _not_along(*names: str) -> Callable[[Any, _Axes], int]:
    """The rule of what works along axes that its parameters name, and leaves all axes in their places."""

    def rule(equation: Any, axes: _Axes) -> int:
        axis = _one(axes)
        for name in names:
            along = equation.params[name]
            _require(axis not in (along if isinstance(along, tuple | list) else (along,)))
        return axis

    return rule


def _removes(name: str) -> Callable[[Any, _Axes], int]:
    """The rule of what removes the axes that a parameter names."""

    def rule(equation: Any, axes: _Axes) -> int:
        axis, removed = _only(axes), equation.params[name]
        _require(axis not in removed)
        return axis - sum(other < axis for other in removed)

    return rule


def _reshape(equation: Any, axes: _Axes) -> int:
    """Rows keep their places if as many elements precede and follow their axis as before."""
    axis, before = _only(axes), equation.invars[0].aval.shape
    after = equation.outvars[0].aval.shape
    _require(equation.params.get("dimensions") is None)
    for place, size in enumerate(after):
        if size == before[axis] and math.prod(after[:place]) == math.prod(before[:axis]):
            return place
    raise _Unproven


def _pad(equation: Any, axes: _Axes) -> int:
    axis = _only(axes)
    _require(tuple(equation.params["padding_config"][axis]) == (0, 0, 0))
    return axis


def _update(equation: Any, axes: _Axes) -> int:
    """`dynamic_update_slice`: the update has all rows; if it is the same for all rows, so may it be the other way."""
    operand, update = (var.aval for var in equation.invars[:2])
    axis = _one(axes[:2])
    _require(all(other is None for other in axes[2:]) and operand.shape[axis] == update.shape[axis])
    return axis


def _last_axes(count: int) -> Callable[[Any, _Axes], int]:
    """The rule of what works along the last axes, and maps over those before."""

    def rule(equation: Any, axes: _Axes) -> int:
        axis = _one(axes)
        pairs = zip(equation.invars, axes, strict=True)
        _require(all(axis < var.aval.ndim - count for var, own in pairs if own is not None))
        return axis

    return rule


def _dot_general(equation: Any, axes: _Axes) -> int:
    contracted, batch = equation.params["dimension_numbers"]

    def place_of(side: int, axis: int) -> int:
        """Where an axis of an operand is in the result."""
        _require(axis not in contracted[side])
        if axis in batch[side]:
            return tuple(batch[side]).index(axis)
        free = [
            [a for a in range(var.aval.ndim) if a not in {*summed, *joint}]
            for var, summed, joint in zip(equation.invars, contracted, batch, strict=True)
        ]
        return len(batch[0]) + (len(free[0]) if side else 0) + free[side].index(axis)

    places = {place_of(side, axis) for side, axis in enumerate(axes) if axis is not None}
    _require(len(axes) == 2 and len(places) == 1)  # two free axes with rows: an outer product of rows
    place = places.pop()
    _require(place < len(batch[0]) or None in axes)
    return place


def _convolution(equation: Any, axes: _Axes) -> int:
    """Rows are the images' batch. In the filters, they are mixed with the features of the result."""
    dims = equation.params["dimension_numbers"]
    _require(_only(axes) == dims.lhs_spec[0] and equation.params["batch_group_count"] == 1)
    return int(dims.out_spec[0])


def _own_axes(batching: Any, columns: dict[int, int], index_map: Any, of_indices: int | None) -> dict[int, int]:
    """The axes of an operand along which each row is led to itself, and the axis of the rows in the indices."""
    mapped = {axis: other for axis, other in batching if of_indices in (None, other)}
    return mapped | {index_map[column]: axis for column, axis in columns.items()}


def _gather(equation: Any, axes: _Axes, numbers: _RowNumbers) -> int:
    """Indices of all rows, `x[:, i]`; an index per row, `table[ids]`; or each row's into itself.

    The last is `take_along_axis`, an index under `jax.vmap`, or one with the row's number, `x[jnp.arange(rows), i]`.
    """
    dims, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    (of_operand, of_indices), (operand, indices) = axes, equation.invars
    removed = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    if of_operand is not None and of_indices is None and of_operand not in removed:
        _require(sizes[of_operand] == operand.aval.shape[of_operand])
        sliced = [axis for axis in range(operand.aval.ndim) if axis not in removed]
        return int(dims.offset_dims[sliced.index(of_operand)])
    kept = [axis for axis in range(equation.outvars[0].aval.ndim) if axis not in dims.offset_dims]
    if of_operand is None:
        return kept[_one([axis if axis != indices.aval.ndim - 1 else None for axis in axes])]
    batching = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    own = _own_axes(batching, numbers.columns(indices, of_indices), dims.start_index_map, of_indices)
    _require(sizes[of_operand] == 1)
    return kept[own[of_operand]]


def _scatter(equation: Any, axes: _Axes, numbers: _RowNumbers) -> int:
    """All rows are written at one index, `x.at[:, i].set(u)`, or each row into itself, as `_gather` reads."""
    dims = equation.params["dimension_numbers"]
    (of_operand, of_indices, of_updates), (operand, indices, updates) = axes, equation.invars
    removed, windows = {*dims.inserted_window_dims, *dims.operand_batching_dims}, dims.update_window_dims
    window = [axis for axis in range(operand.aval.ndim) if axis not in removed]
    if of_operand is None and of_updates is not None and of_updates in windows:  # into what is the same for all rows
        of_operand = window[windows.index(of_updates)]
    if of_indices is None and of_operand in window:
        along = windows[window.index(of_operand)]
        _require(of_updates in (None, along) and updates.aval.shape[along] == operand.aval.shape[of_operand])
        return of_operand
    kept = [axis for axis in range(updates.aval.ndim) if axis not in windows]
    batching = zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True)
    own = _own_axes(batching, numbers.columns(indices, of_indices), dims.scatter_dims_to_operand_dims, of_indices)
    fits = [a for a, i in own.items() if a in removed and of_operand in (None, a) and of_updates in (None, kept[i])]
    _require(fits)
    return fits[0]


_INDEXED: dict[str, Callable[[Any, _Axes, _RowNumbers], int]] = {
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"), _scatter),
}


def _of_branches(equation: Any, axes: _Axes, rows: int) -> _Axes:
    which, *rest = axes
    _require(which is None)
    branches = (_outputs(branch.jaxpr, rest, rows) for branch in equation.params["branches"])
    return list(map(_joined, zip(*branches, strict=True)))


def _joined(axes: Sequence[int | None]) -> int | None:
    """Where the rows are of what comes from one of several places."""
    return None if all(axis is None for axis in axes) else _one(list(axes))


def _of_scan(equation: Any, axes: _Axes, rows: int) -> _Axes:
    """A loop of known length: from step to step more of the carry may have rows."""
    jaxpr, consts, carried = loop_of(equation)
    carry, xs = axes[consts : consts + carried], axes[consts + carried :]
    _require(0 not in xs)
    sliced = [None if axis is None else axis - 1 for axis in xs]
    while True:
        found = _outputs(jaxpr, [*axes[:consts], *carry, *sliced], rows)
        wider = [_joined(pair) for pair in zip(carry, found[:carried], strict=True)]
        if wider == carry:
            return [*carry, *(None if axis is None else axis + 1 for axis in found[carried:])]
        carry = wider


def _of_solve(equation: Any, axes: _Axes, rows: int) -> _Axes:
    """`jnp.linalg.solve`: what solves it runs, and the rest is for derivatives."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    consts, given = axes[start : start + lengths.solve], axes[sum(lengths) :]
    return _outputs(jaxprs.solve.jaxpr, [*consts, *given], rows)


_WITH_PROGRAMS: dict[str, Callable[[Any, _Axes, int], _Axes]] = {
    "cond": _of_branches,
    "custom_linear_solve": _of_solve,
    "scan": _of_scan,
}

_REDUCTIONS = ("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")

_RULES: dict[str, Callable[[Any, _Axes], int]] = {
    **dict.fromkeys(_REDUCTIONS, _removes("axes")),
    **dict.fromkeys(_CUMULATIVE, _not_along("axis")),
    "broadcast_in_dim": lambda equation, axes: int(equation.params["broadcast_dimensions"][_only(axes)]),
    "cholesky": _last_axes(2),
    "concatenate": _not_along("dimension"),
    "conv_general_dilated": _convolution,
    "dot_general": _dot_general,
    # A slice that has as many rows as its operand has all of them, in their order: no stride is negative.
    "dynamic_slice": lambda _, axes: _only(axes),
    "dynamic_update_slice": _update,
    "eigh": _last_axes(2),
    "fft": lambda equation, axes: _last_axes(len(equation.params["fft_lengths"]))(equation, axes),
    "lu": _last_axes(2),
    "lu_pivots_to_permutation": _last_axes(1),
    "pad": _pad,
    "reshape": _reshape,
    "rev": _not_along("dimensions"),
    "slice": lambda _, axes: _only(axes),
    "sort": _not_along("dimension"),
    "split": _not_along("axis"),
    "svd": _last_axes(2),
    "squeeze": _removes("dimensions"),
    "stack": lambda equation, axes: _one(axes) + (equation.params["axis"] <= _one(axes)),
    "top_k": _not_along("axis"),
    "transpose": lambda equation, axes: tuple(equation.params["permutation"]).index(_only(axes)),
    "triangular_solve": _last_axes(2),
}

# fmt: off
ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
        "clamp", "complex", "conj", "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf",
        "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le",
        "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not",
        "one_minus_square", "or",
        "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt",
        "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    }
)
# fmt: on
"""Primitives that compute each element of their one result from the elements in its place."""

_HARMLESS = CALLS | ELEMENTWISE | _KNOWN.keys() | _INDEXED.keys() | _WITH_PROGRAMS.keys() | _RULES.keys()
"""Primitives that end on any numbers, and call nothing outside of the program."""
