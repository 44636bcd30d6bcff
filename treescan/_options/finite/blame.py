"""Evaluates a jaxpr, and finds which of its operations made the NaN or the infinities among its results.

The evaluation keeps each value. From the elements that are bad it goes back, operation by operation, to the elements
from which these were computed, as long as they are bad in the same way. So what other elements hold does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr

from ..._avals import Array, Aval, Leaves, in_mesh, mesh_of, place_like
from ..._trace.equations import alone, equations_within, interpret, jaxprs_within, opened, place_of
from ..._trace.smooth import is_smooth
from ..._tree import replaced

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

MADE, UNSURE = 1, 2
"""The bits of an operation: it made what is blamed; what it was given may have made it, or other things given to it."""

_SELECTING = frozenset({"clamp", "max", "min", "reduce_max", "reduce_min"})
"""Primitives whose result is one of the elements that they are given."""


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

# fmt: off
_LINEAR = frozenset(
    {
        "broadcast_in_dim", "concatenate", "conv_general_dilated", "cumsum", "dot_general", "dynamic_slice",
        "dynamic_update_slice", "gather", "pad", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum", "reshape",
        "rev", "scatter", "scatter-add", "slice", "split", "squeeze", "stack", "transpose",
    }
)
# fmt: on
"""Primitives whose derivative, where all that they are given is 1, says which elements a result is computed from."""


class Operation(NamedTuple):
    """An equation, an input, or what is constant.

    Attributes:
        name: of the primitive; None: an input, or what is constant.
        place: the line that it comes from, or None.
    """

    name: str | None
    place: str | None


@dataclass(eq=False)
class _Value:
    """A value of the evaluation.

    Attributes:
        array: the value.
        number: of the operation that made it; None: it is a number that is finite.
        blamed: bool of its shape, its elements that are to be explained; None: none are.
    """

    array: Array
    number: int | None
    blamed: Array | None = None

    def blame(self, elements: Array) -> None:
        """Adds elements that are to be explained."""
        elements = place_like(elements, jax.typeof(self.array))
        self.blamed = elements if self.blamed is None else self.blamed | elements


_Causes = list[tuple[_Value, Array]]
"""Values, and the elements of each from which something is computed."""


class _Step(NamedTuple):
    """An equation that was evaluated.

    Attributes:
        number: of the operation.
        equation: the equation.
        program: a jaxpr of it alone, which takes each variable once.
        taken: what the program is given.
        read: what the equation reads, in order.
        made: its results.
    """

    number: int
    equation: JaxprEqn
    program: Jaxpr
    taken: list[_Value]
    read: list[_Value]
    made: list[_Value]

    @property
    def suspects(self) -> list[_Value]:
        """What of that may be blamed."""
        return list(filter(_may_be_blamed, self.taken))

    def run(self, arrays: Sequence[Array]) -> Leaves:
        """Its results, of other values in place of these."""
        flags = list(map(_may_be_blamed, self.taken))
        return eval_jaxpr(self.program, [], *replaced(flags, [value.array for value in self.taken], arrays))


class Blame:
    """The operations of a jaxpr, in order: first its inputs, then all constants together, then its equations.

    Attributes:
        operations: what each is.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._given: list[_Value] = []
        self._constants = 0
        self._steps: list[_Step] = []
        self._results: list[_Value] = []

    def evaluate(self, jaxpr: Jaxpr, given: Sequence[object]) -> Leaves:
        """Evaluates an open jaxpr, given what it closes over first, and keeps all of it."""
        jaxpr = opened(jaxpr)
        self._given = [_Value(jnp.asarray(value), self._add(Operation(None, None))) for value in given]
        self._constants = self._add(Operation(None, None))

        def run(equation: JaxprEqn, read: list[_Value]) -> list[_Value]:
            variables, program = alone(jaxpr, equation)
            taken = [read[equation.invars.index(var)] for var in variables]
            number = self._add(Operation(equation.primitive.name, place_of(equation)))
            made = [_Value(array, number) for array in eval_jaxpr(program, [], *(value.array for value in taken))]
            self._steps.append(_Step(number, equation, program, taken, read, made))
            return made

        self._results = interpret(jaxpr, [], list(self._given), run, self._constant)
        return [result.array for result in self._results]

    def _add(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def _constant(self, value: Any, aval: Aval) -> _Value:
        """A constant; one that is not a finite number may be blamed."""
        array = jnp.asarray(value, None if isinstance(value, jax.Array) else aval.dtype)
        is_finite = not array.ndim and not isinstance(value, Tracer) and bool(np.isfinite(value))
        made = _Value(array, None if is_finite else self._constants)
        self._given += [] if is_finite else [made]
        return made

    def bits(self, blamed: Sequence[Array | None], is_nan: Array) -> Array:
        """int32[...], of each operation whether it made elements that are blamed; see `MADE`.

        Args:
            blamed: for each output which of its elements are to be explained; None: none are.
            is_nan: bool[], whether these are NaN; otherwise they are infinite.
        """
        for result, elements in zip(self._results, blamed, strict=True):
            if elements is not None:
                result.blame(elements)
        bits = [jnp.int32(0)] * len(self.operations)
        for step in reversed(self._steps):
            bits[step.number] = _explain(step, is_nan)
        for value in self._given:
            if value.number is not None and value.blamed is not None:
                bits[value.number] = bits[value.number] | _bit(jnp.any(value.blamed), MADE)
        if mesh := mesh_of((bits, is_nan)):  # JAX stacks arrays of one type there, all of them mapped or none
            none = (is_nan & False).astype(jnp.int32)
            bits = [none | bit for bit in in_mesh(bits, mesh)]
        return jnp.stack(bits)


def _bit(flag: Array, bit: int) -> Array:
    return flag.astype(jnp.int32) * jnp.int32(bit)


def _explain(step: _Step, is_nan: Array) -> Array:
    """Blames what an equation was given for what it is blamed for, where that is bad; its own bits."""
    blamed = [value.blamed for value in step.made if value.blamed is not None]
    if not blamed:
        return jnp.int32(0)
    reached, causes = _any(blamed), _causes_of(step, is_nan)
    if causes is not None:
        return _bit(reached & ~_blame(causes, is_nan), MADE)
    own, causes = _as_a_whole(step, is_nan)
    passed = _blame([(value, elements & ~own) for value, elements in causes], is_nan)
    made = reached & (own | ~passed) if _may_run_again(step.equation) else reached
    return _bit(made, MADE) + _bit(reached & passed, UNSURE)


def _blame(causes: _Causes, is_nan: Array) -> Array:
    """bool[]: whether any of these elements are bad, which then are to be explained."""
    passed = jnp.zeros((), bool)
    for value, elements in causes:
        bad = elements & _bad(value.array, is_nan)
        value.blame(bad)
        passed = passed | jnp.any(bad)
    return passed


def _any(flags: Sequence[Array]) -> Array:
    found = jnp.zeros((), bool)
    for flag in flags:
        found = found | jnp.any(flag)
    return found


def _bad(array: Array, is_nan: Array) -> Array:
    return (jnp.isnan(array) & is_nan) | (jnp.isinf(array) & ~is_nan)


def _may_be_blamed(value: _Value) -> bool:
    return value.number is not None and is_smooth(value.array) and not _is_on_another_mesh(value.array)


def _is_on_another_mesh(array: Array) -> bool:
    """Whether an array is one of `jax.sharding.auto_axes`, within a program whose mesh has explicit axes."""
    mesh, here = jax.typeof(array).sharding.mesh, jax.sharding.get_abstract_mesh()
    return not mesh.empty and not here.empty and mesh.axis_types != here.axis_types


def _causes_of(step: _Step, is_nan: Array) -> _Causes | None:
    """The elements from which those that are blamed are computed; None: it is not known which these are."""
    name = step.equation.primitive.name
    try:
        if name in ELEMENTWISE:
            return _in_place(step, is_nan)
        return _by_derivative(step, is_nan) if name in _LINEAR else None
    except Exception:  # a release of JAX in which it looks otherwise, or a cotangent whose sharding JAX does not know
        return None


def _in_place(step: _Step, is_nan: Array) -> _Causes:
    """The elements in the place of those that are blamed; of a selection those that were chosen."""
    (result,), name = step.made, step.equation.primitive.name
    assert result.blamed is not None
    causes: _Causes = []
    for i, value in enumerate(step.read):
        if not _may_be_blamed(value):
            continue
        elements = result.blamed
        if name == "select_n":
            elements = elements & (step.read[0].array.astype(jnp.int32) == i - 1)
        elif name in _SELECTING:
            elements = elements & (is_nan | (value.array == result.array))
        causes.append((value, _spread_of(elements, value.array)))
    return causes


def _spread_of(elements: Array, array: Array) -> Array:
    """The elements of an operand that is spread over those of a result: a number, or along axes of size 1."""
    if not jnp.ndim(array):
        return jnp.any(elements)
    axes = tuple(i for i, (a, b) in enumerate(zip(array.shape, elements.shape, strict=True)) if a == 1 != b)
    return jnp.any(elements, axes, keepdims=True) if axes else elements


def _by_derivative(step: _Step, is_nan: Array) -> _Causes:
    """The elements from which those that are blamed are computed."""
    values = step.suspects
    if not values:
        return []
    ones, mesh = [jnp.ones_like(value.array) for value in values], mesh_of([value.array for value in step.read])
    # JAX cannot give a type to a cotangent that is summed over a sharded axis, if what it is of names no mesh.
    _, back = jax.vjp(step.run, ones if mesh is None else in_mesh(ones, mesh))
    (found,) = back(
        [
            jnp.zeros_like(value.array) if value.blamed is None else value.blamed.astype(value.array.dtype)
            for value in step.made
        ]
    )
    causes = [(value, elements != 0) for value, elements in zip(values, found, strict=True)]
    if step.equation.primitive.name in _SELECTING:
        chosen = jnp.expand_dims(step.made[0].array, step.equation.params["axes"])
        causes = [(value, elements & (is_nan | (value.array == chosen))) for value, elements in causes]
    return causes


def _as_a_whole(step: _Step, is_nan: Array) -> tuple[Array, _Causes]:
    """Whether an equation makes it of good values too, and all elements that it was given."""
    values = step.suspects
    causes = [(value, jnp.ones_like(value.array, bool)) for value in values]
    if not _may_run_again(step.equation):
        return jnp.zeros((), bool), causes
    good = [jnp.where(_bad(value.array, is_nan), jnp.ones_like(value.array), value.array) for value in values]
    pairs = zip(step.made, step.run(good), strict=True)
    return _any([made.blamed & _bad(array, is_nan) for made, array in pairs if made.blamed is not None]), causes


def _may_run_again(equation: JaxprEqn) -> bool:
    """Whether an equation may be evaluated with other values: it has no effect, calls nothing back, and ends.

    A NaN may have ended a loop that runs until something holds.
    """
    within = (each for jaxpr in jaxprs_within(equation) for each in equations_within(jaxpr))
    names = [each.primitive.name for each in (equation, *within)]
    return not equation.effects and not any(name == "while" or "callback" in name for name in names)


def becomes_bad(old: Array, new: Array) -> Array:
    """bool: which elements are NaN, or became infinite: an infinity that was there before is no news."""
    return jnp.isnan(new) | (jnp.isinf(new) & ~jnp.isinf(old))
