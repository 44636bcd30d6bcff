"""Proves of a trace that it treats rows independently: no row of its results depends on another row.

The analysis follows the axis of the rows from equation to equation. It knows what common primitives do with an axis,
and gives up at any other, at a loop of unknown length, and wherever rows meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._axes import LeafAxes
from .equations import called, loop_of

_Axes = list[int | None]


class _Unproven(Exception):
    """Rows may depend on one another."""


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
    try:
        found = _outputs(jaxpr, given, rows)
    except (
        _Unproven,
        AttributeError,
        KeyError,
        ValueError,
    ):  # or a release of JAX in which a primitive looks otherwise
        return False
    return all(axis in (None, wanted) for axis, wanted in zip(found, returned, strict=True))


def _outputs(jaxpr: Any, given: Sequence[int | None], rows: int) -> _Axes:
    known: dict[Any, int] = {var: axis for var, axis in zip(jaxpr.invars, given, strict=True) if axis is not None}

    def axes_of(atoms: Sequence[Any]) -> _Axes:
        return [None if hasattr(atom, "val") else known.get(atom) for atom in atoms]

    for equation in jaxpr.eqns:
        axes = axes_of(equation.invars)
        if all(axis is None for axis in axes):
            continue
        for var, axis in zip(equation.outvars, _of_equation(equation, axes, rows), strict=True):
            if axis is not None and var.aval.shape[axis] != rows:
                raise _Unproven
            if axis is not None:
                known[var] = axis
    return axes_of(jaxpr.outvars)


def _of_equation(equation: Any, axes: _Axes, rows: int) -> _Axes:
    """For each output of an equation where its rows are; it has rows among its inputs."""
    name = equation.primitive.name
    inner = called(equation)
    if inner is not None:
        return _outputs(inner[0], axes, rows)
    if name in _WITH_PROGRAMS:
        return _WITH_PROGRAMS[name](equation, axes, rows)
    if name in ELEMENTWISE:
        return [_one(axes)]
    return [_RULES[name](equation, axes)] * len(equation.outvars)


def _one(axes: _Axes) -> int:
    """The axis that all operands with rows have them at."""
    found = {axis for axis in axes if axis is not None}
    if len(found) != 1:
        raise _Unproven
    return found.pop()


def _only(axes: _Axes, operand: int = 0) -> int:
    """The axis of the one operand that may have rows."""
    axis = axes[operand]
    if axis is None or any(other is not None for i, other in enumerate(axes) if i != operand):
        raise _Unproven
    return axis


def _not_along(*names: str) -> Callable[[Any, _Axes], int]:
    """The rule of what works along axes that its parameters name, and leaves all axes in their places."""

    def rule(equation: Any, axes: _Axes) -> int:
        axis = _one(axes)
        for name in names:
            along = equation.params[name]
            if axis in (along if isinstance(along, tuple | list) else (along,)):
                raise _Unproven
        return axis

    return rule


def _removes(name: str) -> Callable[[Any, _Axes], int]:
    """The rule of what removes the axes that a parameter names."""

    def rule(equation: Any, axes: _Axes) -> int:
        axis, removed = _only(axes), equation.params[name]
        if axis in removed:
            raise _Unproven
        return axis - sum(other < axis for other in removed)

    return rule


def _broadcast(equation: Any, axes: _Axes) -> int:
    return int(equation.params["broadcast_dimensions"][_only(axes)])


def _transpose(equation: Any, axes: _Axes) -> int:
    return tuple(equation.params["permutation"]).index(_only(axes))


def _reshape(equation: Any, axes: _Axes) -> int:
    """Rows keep their places if as many elements precede and follow their axis as before."""
    axis, before = _only(axes), equation.invars[0].aval.shape
    after = equation.outvars[0].aval.shape
    if equation.params.get("dimensions") is not None:
        raise _Unproven
    ahead = _product(before[:axis])
    for place, size in enumerate(after):
        if size == before[axis] and _product(after[:place]) == ahead:
            return place
    raise _Unproven


def _product(sizes: Sequence[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def _stack(equation: Any, axes: _Axes) -> int:
    axis = _one(axes)
    return axis + (equation.params["axis"] <= axis)


def _pad(equation: Any, axes: _Axes) -> int:
    axis = _only(axes)
    if tuple(equation.params["padding_config"][axis]) != (0, 0, 0):
        raise _Unproven
    return axis


def _slice(equation: Any, axes: _Axes) -> int:
    """A slice that has as many rows as its operand has all of them, in their order: no stride is negative."""
    del equation
    return _only(axes)


def _update(equation: Any, axes: _Axes) -> int:
    """`dynamic_update_slice`: the update has all rows; if it is the same for all rows, so may it be the other way."""
    operand, update, *starts = equation.invars
    axis = _one(axes[:2])
    if any(other is not None for other in axes[2:]) or operand.aval.shape[axis] != update.aval.shape[axis]:
        raise _Unproven
    del starts
    return axis


def _last_axes(count: int) -> Callable[[Any, _Axes], int]:
    """The rule of what works along the last axes, and maps over those before."""

    def rule(equation: Any, axes: _Axes) -> int:
        axis = _one(axes)
        if any(axis >= var.aval.ndim - count for var, a in zip(equation.invars, axes, strict=True) if a is not None):
            raise _Unproven
        return axis

    return rule


def _dot_general(equation: Any, axes: _Axes) -> int:
    contracted, batch = equation.params["dimension_numbers"]
    places = {_place_in_product(equation, side, axis) for side, axis in enumerate(axes) if axis is not None}
    if len(axes) != 2 or len(places) != 1:  # two free axes with rows: an outer product of rows
        raise _Unproven
    both = all(axis is not None for axis in axes)
    place: int = places.pop()
    if both and place >= len(batch[0]):
        raise _Unproven
    del contracted
    return place


def _place_in_product(equation: Any, side: int, axis: int) -> int:
    """Where an axis of an operand is in the result."""
    contracted, batch = equation.params["dimension_numbers"]
    if axis in contracted[side]:
        raise _Unproven
    if axis in batch[side]:
        return tuple(batch[side]).index(axis)

    def free(operand: int) -> list[int]:
        taken = {*contracted[operand], *batch[operand]}
        return [a for a in range(equation.invars[operand].aval.ndim) if a not in taken]

    return len(batch[0]) + (len(free(0)) if side else 0) + free(side).index(axis)


def _gather(equation: Any, axes: _Axes) -> int:
    """Indices of all rows, `x[:, i]`; an index per row, `table[ids]`; or each row's into itself, `take_along_axis`."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    of_operand, of_indices = axes
    operand, indices = (var.aval for var in equation.invars)
    if of_operand is not None and of_indices is None:  # `x[:, i]`: all rows of it
        removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        if of_operand in removed or sizes[of_operand] != operand.shape[of_operand]:
            raise _Unproven
        sliced = [axis for axis in range(operand.ndim) if axis not in removed]
        return int(numbers.offset_dims[sliced.index(of_operand)])
    kept = [axis for axis in range(equation.outvars[0].aval.ndim) if axis not in numbers.offset_dims]
    if of_indices is None or of_indices == indices.ndim - 1:
        raise _Unproven
    if of_operand is not None:
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        if (of_operand, of_indices) not in pairs:
            raise _Unproven
    return kept[of_indices]


def _of_branches(equation: Any, axes: _Axes, rows: int) -> _Axes:
    which, *rest = axes
    if which is not None:
        raise _Unproven
    return [
        _joined(found)
        for found in zip(*(_outputs(b.jaxpr, rest, rows) for b in equation.params["branches"]), strict=True)
    ]


def _joined(axes: Sequence[int | None]) -> int | None:
    """Where the rows are of what comes from one of several places."""
    return None if all(axis is None for axis in axes) else _one(list(axes))


def _of_scan(equation: Any, axes: _Axes, rows: int) -> _Axes:
    """A loop of known length: from step to step more of the carry may have rows."""
    jaxpr, consts, carried = loop_of(equation)
    carry, sliced = axes[consts : consts + carried], [_of_slice(axis) for axis in axes[consts + carried :]]
    while True:
        found = _outputs(jaxpr, [*axes[:consts], *carry, *sliced], rows)
        wider = [_joined(pair) for pair in zip(carry, found[:carried], strict=True)]
        if wider == carry:
            return [*carry, *(None if axis is None else axis + 1 for axis in found[carried:])]
        carry = wider


def _of_slice(axis: int | None) -> int | None:
    if axis == 0:
        raise _Unproven
    return None if axis is None else axis - 1


_WITH_PROGRAMS: dict[str, Callable[[Any, _Axes, int], _Axes]] = {"cond": _of_branches, "scan": _of_scan}

_REDUCTIONS = ("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
_CUMULATIVE = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")

_RULES: dict[str, Callable[[Any, _Axes], int]] = {
    **dict.fromkeys(_REDUCTIONS, _removes("axes")),
    **dict.fromkeys(_CUMULATIVE, _not_along("axis")),
    "broadcast_in_dim": _broadcast,
    "cholesky": _last_axes(2),
    "concatenate": _not_along("dimension"),
    "dot_general": _dot_general,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _update,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _not_along("dimensions"),
    "slice": _slice,
    "sort": _not_along("dimension"),
    "split": _not_along("axis"),
    "squeeze": _removes("dimensions"),
    "stack": _stack,
    "transpose": _transpose,
    "triangular_solve": _last_axes(2),
}

# fmt: off
ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
        "clamp", "complex", "conj", "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf",
        "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le",
        "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or",
        "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt",
        "square", "stop_gradient", "sub", "tan", "tanh", "xor",
    }
)
# fmt: on
"""Primitives that compute each element of their one result from the elements in its place."""
