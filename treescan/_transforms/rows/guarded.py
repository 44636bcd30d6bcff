"""Derivatives of a masked step whose padded rows see their own values, which may be NaN.

The results of a padded row are discarded, so that its cotangents begin with zero. But zero times a derivative that is
NaN is NaN. Where rows are independent, it stays in its row. It leaves that in two places: where the cotangents of a
row leave the step, and where those of all rows add up to that of a value which they share, as weights. A selection
stops it there. To show padded rows other values before the body takes longer: measured, up to 1.3 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._avals import Array, LeafAxes
from ..._trace import independence
from ..._trace.dependence import dependent
from ..._trace.equations import equations_within, evaluate_alone, inlined, values_of, variables_of
from ..._trace.hoist import Unproven, is_smooth
from .leaves import RowMask

Arrays = list[Any]

MOST_CUT = 5
"""How many elements may be selected in the derivative for each that would be selected before the body.

Of the families of the benchmarks, one to six are the fastest on one half, and five to twelve on the other.
"""


class Cut(NamedTuple):
    """What of an equation is zero in padded rows.

    Attributes:
        operands: the places of operands, and the axis of the rows in each.
        result: the axis of the rows in the result, if that is cut too.
    """

    operands: tuple[tuple[int, int], ...]
    result: int | None = None

    def elements(self, equation: Any) -> int:
        """How many are selected."""
        result = equation.outvars[0].aval.size
        wide = equation.primitive.name in independence.ELEMENTWISE  # an operand is broadcast first
        sizes = (result if wide else equation.invars[place].aval.size for place, _ in self.operands)
        return sum(sizes) + (result if self.result is not None else 0)


@dataclass(frozen=True, eq=False)
class Guarded:
    """The tangent of a step, from the leaves that it reads and tangents to tangents.

    Attributes:
        jaxpr: the tangent, open.
        consts: what it closes over.
        axes: where the rows are in each leaf that it reads.
        cuts: of the equations in which a tangent that all rows share becomes one of rows, by number.
        divides: whether a divisor is made of a leaf.
    """

    jaxpr: Any
    consts: Arrays
    axes: LeafAxes
    cuts: dict[int, Cut]
    divides: tuple[bool, ...]

    @classmethod
    def of(
        cls, push: Callable[..., Any], read: Sequence[Any], axes: LeafAxes, given: Any, *, rows: int, shown: int
    ) -> Guarded:
        """The tangent of a step.

        Args:
            push: from a list of what it reads, and tangents, to a list of tangents.
            read: the types of what it reads.
            axes: where the rows are in each of these.
            given: the types of the tangents, and where the rows are in each.
            rows: how many there are.
            shown: how many elements padded rows would otherwise be shown, of the state and of x.

        Raises:
            Unproven: if rows may meet in it, or if it is not known how they share what they read; or if it is sooner to
                show padded rows something else than to cut what they share.
        """
        types, their_axes = given
        plain = jax.make_jaxpr(lambda read, *tangents: push(read, *tangents))(list(read), *types)
        closed = inlined(plain.jaxpr, plain.consts, [*read, *types])
        jaxpr, count = closed.jaxpr, len(read)
        names = {equation.primitive.name for equation in equations_within(jaxpr)}
        known = independence.rows_within(jaxpr, (*axes, *their_axes), rows) if names <= _LINEAR else None
        if known is None:
            raise Unproven("rows may meet in the derivative")
        linear = dependent(jaxpr, [False] * count + [True] * len(types))
        computed = [each for each in jaxpr.eqns if linear.isdisjoint(each.outvars)]
        if not all(map(_moves, computed)):
            raise Unproven("the derivative computes something before it is told a tangent")
        cuts = dict[int, Cut]()
        for number, equation in enumerate(jaxpr.eqns):
            cut = _cut(equation, known, linear, rows)
            if cut is not None:
                cuts[number] = cut
        if sum(cut.elements(jaxpr.eqns[number]) for number, cut in cuts.items()) > MOST_CUT * shown:
            raise Unproven("it is sooner to show padded rows a good pair")
        divisors = _divisors(jaxpr, computed)
        return cls(jaxpr, list(closed.consts), axes, cuts, tuple(var in divisors for var in jaxpr.invars[:count]))

    def finite(self, valid: Array, read: Arrays) -> Arrays:
        """What it reads, with zeros, or ones where it divides, in padded rows: then no tangent is NaN there."""
        mask = RowMask(valid)
        return [
            leaf if axis is None or not is_smooth(leaf) else mask.select(leaf, jnp.asarray(one, leaf.dtype), axis)
            for leaf, axis, one in zip(read, self.axes, self.divides, strict=True)
        ]

    def cut(self, valid: Array, read: Arrays) -> Callable[..., Arrays]:
        """The tangent whose transpose is free of what padded rows read, if this is NaN too."""
        mask = RowMask(valid)

        def zeroed(value: Array, axis: int) -> Array:
            return mask.select(value, jnp.zeros((), value.dtype), axis)

        def push(*tangents: Array) -> Arrays:
            variables = [*self.jaxpr.constvars, *self.jaxpr.invars]
            values = dict(zip(variables, [*self.consts, *read, *tangents], strict=True))
            for number, equation in enumerate(self.jaxpr.eqns):
                operands, cut = values_of(equation.invars, values), self.cuts.get(number)
                wide = cut is not None and equation.primitive.name in independence.ELEMENTWISE
                for place, axis in cut.operands if cut else ():
                    value = operands[place]
                    if wide:  # a number that all rows share becomes one of rows
                        value = jnp.broadcast_to(value, equation.outvars[0].aval.shape)
                    operands[place] = zeroed(value, axis)
                if wide:
                    results = [equation.primitive.bind(*operands, **equation.params)]
                else:
                    results = evaluate_alone(self.jaxpr, equation, operands)
                if cut and cut.result is not None:
                    results = [zeroed(result, cut.result) for result in results]
                values.update(zip(equation.outvars, results, strict=True))
            return values_of(self.jaxpr.outvars, values)

        return push


def _moves(equation: Any) -> bool:
    """Whether an equation before the tangents makes of finite numbers, and of ones, finite numbers other than zero."""
    smooth = all(is_smooth(atom.aval) for atom in equation.invars)
    made = any(is_smooth(var.aval) for var in equation.outvars)
    return not made or (smooth and equation.primitive.name in _MOVES)


def _divisors(jaxpr: Any, computed: Sequence[Any]) -> set[Any]:
    """The variables that the divisors of a tangent are made of."""
    divided = [each.invars[1] for each in jaxpr.eqns if each.primitive.name == "div"]
    found = set(variables_of(divided))
    for equation in reversed(computed):
        if not found.isdisjoint(equation.outvars):
            found.update(variables_of(equation.invars))
    return found


def _cut(equation: Any, known: dict[Any, int], linear: set[Any], rows: int) -> Cut | None:
    """Where the tangents of rows that an equation computes from those that they share are cut; None: nowhere."""
    shared, own = list[int](), list[tuple[int, int]]()
    for place, atom in enumerate(equation.invars):
        if not hasattr(atom, "val"):
            if atom in known:
                own.append((place, known[atom]))
            elif atom in linear:
                shared.append(place)
    result = next((known[var] for var in equation.outvars if var in known), None)
    if not shared or result is None:
        return None
    name = equation.primitive.name
    if name in independence.ELEMENTWISE or name == "concatenate":
        return Cut(tuple((place, result) for place in shared))
    elif name in _PRODUCTS:
        return Cut(tuple(own), result)
    elif name == "gather":
        return Cut((), result)
    raise Unproven(f"all rows share a tangent in `{name}`")


_PRODUCTS = frozenset({"conv_general_dilated", "dot_general"})

_MOVES = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "mul", "neg", "reshape", "squeeze", "transpose"}
)
"""Primitives that make of ones something that one may divide by."""

_LINEAR = _PRODUCTS | {
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "cumsum", "div",
    "dynamic_slice", "dynamic_update_slice", "gather", "mul", "neg", "pad", "reduce_sum", "reshape", "rev",
    "select_n", "slice", "split", "squeeze", "sub", "transpose",
}  # fmt: skip
"""Primitives of derivatives. Each is finite where it divides by 1, else reads 0, and its tangents are finite."""
