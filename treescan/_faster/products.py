"""Finds, in the trace of a step, the products that need not be computed step by step.

Some products read only what is computed from x: those of many steps are one product. Others read the carry and
something that no step changes, for example weights. These are computed step by step, but their derivatives with respect
to the weights of many steps are one product. Products of x itself with small weights are of this second kind: a step
takes as long for such a product as for its share of the product of many steps, and need not read that share.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from .._avals import Aval, Leaves, PyTree, TreeDef, elements, is_sharded
from .._loop.feed import Feed
from .._loop.loop import Arrays, Step
from .._remat.checkpoint import is_decision
from .._trace.dependence import dependent
from .._trace.equations import (
    PRODUCTS,
    Called,
    aval_of,
    branches_on_devices,
    called,
    equations_within,
    has_primitives,
    has_reverse_rule,
    inlined,
    inputs_of,
    named_axes,
    needed,
    variables_of,
)

if TYPE_CHECKING:
    from jax.core import Atom
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

# fmt: off
ELEMENTWISE = frozenset(
    {
        "abs", "add", "add_any", "and", "broadcast_in_dim", "ceil", "clamp", "concatenate",
        "convert_element_type", "copy", "cos", "cosh", "div", "eq", "exp", "exp2",
        "expm1", "floor", "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "log", "log1p",
        "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "pow",
        "real", "rem", "reshape", "rev", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "slice", "split", "sqrt",
        "square", "squeeze", "sub", "tan", "tanh", "transpose", "xor",
    }
)
# fmt: on
"""Primitives that compute each element from few, or move it. What any other computes, a derivative saves."""

# fmt: off
_OF_EACH_STEP = PRODUCTS | ELEMENTWISE | frozenset(
    {
        "argmax", "argmin", "atan2", "cbrt", "cumsum", "dynamic_slice", "erf", "erf_inv", "erfc", "gather",
        "pvary", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_precision", "reduce_prod",
        "reduce_sum", "sort", "stop_gradient",
    }
)
# fmt: on
"""Primitives that give for many steps what they give for each: they draw no random bits, and ask no other device.

Any other stays in its step, with all that reads it.
"""

_SELECT = frozenset({"max", "min", "reduce_max", "reduce_min", "sort"})
"""Primitives of `_OF_EACH_STEP` whose derivative compares their operands with their result."""

_OTHER_MESH = frozenset({"mesh_cast"})
_INLINED = frozenset({"jit"})
_CALLS = _INLINED | {"custom_jvp_call"}


LARGE = 2**16
"""Elements of weights from which on a product of many steps is faster than the products of each, forward too.

Smaller ones stay in the cache from step to step, and a processor takes their products beside others.
"""


class Deferred(NamedTuple):
    """A product that is computed step by step, with something that is the same in every step.

    Attributes:
        equation: its number in the rest.
        operand: which of its operands is the same in every step.
        read: the number of that one among the reads.
    """

    equation: int
    operand: int
    read: int

    def of(self, equation: JaxprEqn) -> tuple[Var, Var]:
        """The variables that it multiplies: the one that is the same in every step, and the other."""
        pair = variables_of(equation.invars)  # a product with a literal is not deferred
        return pair[self.operand], pair[1 - self.operand]


class Reads(NamedTuple):
    """What a part of a step reads: its variables, or their values.

    Attributes:
        same: what is the same in every step.
        early: the products that were computed before.
        state: the leaves of the state.
        fed: the leaves of what the step is fed.
    """

    same: Leaves
    early: Leaves
    state: Leaves
    fed: Leaves


class Parts(NamedTuple):
    """A step in two parts, open jaxprs.

    Attributes:
        early: computes products that do not wait for the state, from what is the same and what the step is fed.
        rest: computes all else: from `Reads` to (state, y).
        inputs: the inputs of the rest.
    """

    early: Jaxpr
    rest: Jaxpr
    inputs: Reads


@dataclass(frozen=True, eq=False)
class Split:
    """A step in parts, all of them flat. Reads are what is the same in every step: of `once`, closed over, consts.

    Attributes:
        closed: what the step closes over.
        once: an open jaxpr that computes weights: (closed, consts) to a list.
        forward: the parts in which a step is run.
        derivative: those of which the derivative is taken.
        deferred: the products in the latter's rest whose derivative with respect to the weights can wait.
        state: the structure of the state.
        y: the structure of y.
    """

    closed: Leaves
    once: Jaxpr
    forward: Parts
    derivative: Parts
    deferred: tuple[Deferred, ...]
    state: TreeDef
    y: TreeDef


def products_of_step(step: Step, consts: PyTree, state: PyTree, feed: Feed) -> Split | None:
    """Splits a step, given the types of its arguments; None if all of it is to be computed step by step.

    That is where the step does something beside computing, has functions with a rule for reverse mode alone, or
    multiplies nothing with weights. It is also where its products would have to be moved with what may not be computed
    for many steps at once.
    """
    traced, (_, y) = jax.make_jaxpr(lambda *given: step(*given), return_shape=True)(consts, state, feed)
    return _split_step(traced, Arrays(*map(jax.tree.leaves, (consts, state, feed))), state, y)


def _split_step(traced: ClosedJaxpr, given: Arrays, state: PyTree, y: PyTree) -> Split | None:
    jaxpr = traced.jaxpr
    left_alone = (
        has_reverse_rule(jaxpr) or has_primitives(jaxpr, _OTHER_MESH) or branches_on_devices(jaxpr) or named_axes(jaxpr)
    )
    if traced.effects or not _holds_products(jaxpr) or left_alone:
        return None
    if any(map(_is_inlined, traced.jaxpr.eqns)):
        traced = inlined(traced.jaxpr, traced.consts, jax.tree.leaves(given), _inlined)
    found = _Found.of(traced.jaxpr, inputs_of(traced.jaxpr, given))
    early = found.early()
    deferred = found.deferred(early)
    if not early and not deferred:
        return None
    known = {*traced.jaxpr.constvars, *found.inputs.consts}
    once = list(dict.fromkeys(product.same for product in deferred if product.same not in known))
    reads = [*once, *traced.jaxpr.constvars, *found.inputs.consts]
    derivative, numbers = found.parts(reads, early)
    return Split(
        closed=list(traced.consts),
        once=found.subprogram(reads[len(once) :], once, found.needed(once, set())),
        forward=found.parts(reads, found.early(LARGE))[0],
        derivative=derivative,
        deferred=tuple(Deferred(numbers[id(p.equation)], p.operand, reads.index(p.same)) for p in deferred),
        state=jax.tree.structure(state),
        y=jax.tree.structure(y),
    )


class _Product(NamedTuple):
    """A product, and which operand is the same in every step."""

    equation: JaxprEqn
    operand: int

    @property
    def same(self) -> Var:
        """The variable that is the same in every step."""
        return variables_of(self.equation.invars)[self.operand]

    @property
    def other(self) -> Var:
        """The variable that is not."""
        return variables_of(self.equation.invars)[1 - self.operand]


@dataclass(frozen=True)
class _Found:
    """What is known of the variables of a traced step.

    Attributes:
        jaxpr: the step.
        inputs: its inputs: leaves of the consts, of the state and of what it is fed.
        on_state: the variables that depend on the state.
        movable: those that can be computed for many steps at once.
        same: those that can be computed once for all steps.
    """

    jaxpr: Jaxpr
    inputs: Arrays
    on_state: set[Var]
    movable: set[Var]
    same: set[Var]

    @classmethod
    def of(cls, jaxpr: Jaxpr, inputs: Arrays) -> _Found:
        """Looks through a jaxpr with these inputs."""
        state = set(inputs.state)
        on_state = dependent(jaxpr, [var in state for var in jaxpr.invars])
        movable, same = {*jaxpr.constvars, *jaxpr.invars} - on_state, {*jaxpr.constvars, *inputs.consts}
        for equation in filter(_is_of_each_step, jaxpr.eqns):
            for found in (movable, same):  # an equation is moved as a whole: all that it takes is known there
                if found.issuperset(variables_of(equation.invars)):
                    found.update(equation.outvars)
        return cls(jaxpr, inputs, on_state, movable, same)

    def needed(self, outputs: Iterable[Atom], given: set[Var]) -> list[JaxprEqn]:
        """The equations that compute the outputs from the inputs and what is given."""
        return needed(self.jaxpr.eqns, list(outputs), given)

    def subprogram(self, inputs: Iterable[Var], outputs: Iterable[Atom], equations: list[JaxprEqn]) -> Jaxpr:
        """These equations as an open jaxpr."""
        return self.jaxpr.replace(constvars=[], invars=list(inputs), outvars=list(outputs), eqns=equations)

    def parts(self, reads: Leaves, early: Leaves) -> tuple[Parts, dict[int, int]]:
        """The step in two parts, and the numbers of the equations of the rest, by their identity."""
        rest = self.needed(self.jaxpr.outvars, {*early, *reads})
        inputs = Reads(reads, early, self.inputs.state, self.inputs.xs)
        parts = Parts(
            self.subprogram([*reads, *inputs.fed], early, self.needed(early, set(reads))),
            self.subprogram(jax.tree.leaves(inputs), self.jaxpr.outvars, rest),
            inputs,
        )
        return parts, {id(equation): number for number, equation in enumerate(rest)}

    def products(self) -> list[_Product]:
        """The products with something smooth that is the same in every step."""
        equations = (equation for equation in self.jaxpr.eqns if equation.primitive.name in PRODUCTS)
        pairs = (_Product(equation, operand) for equation in equations for operand in (0, 1))
        variables = (pair for pair in pairs if not any(hasattr(atom, "val") for atom in pair.equation.invars))
        return [
            pair
            for pair in variables
            if pair.same in self.same
            and pair.other not in self.same
            and jnp.issubdtype(aval_of(pair.same).dtype, jnp.inexact)
            and not is_sharded(pair.same.aval)
            and pair.equation.params.get("out_sharding") is None
        ]

    def early(self, least: int = 0) -> Leaves:
        """The products with weights of so many elements that wait for nothing but x, as far as the rest reads them."""
        movable = (p for p in self.products() if p.other in self.movable and not self._is_small_of_x(p))
        products = (p for p in movable if _size(aval_of(p.same)) >= least)
        early = [product.equation.outvars[0] for product in products]
        rest = self.needed(self.jaxpr.outvars, set(early))
        read = {var for equation in rest for var in variables_of(equation.invars)}
        read.update(variables_of(self.jaxpr.outvars))
        return [var for var in early if var in read]

    def deferred(self, early: Leaves) -> list[_Product]:
        """The products with weights that wait for the state, or are computed beside those that do."""
        found = {id(equation) for equation in self.needed(self.jaxpr.outvars, set(early))}
        products = (p for p in self.products() if id(p.equation) in found)
        return [p for p in products if p.other in self.on_state or self._is_small_of_x(p)]

    def _is_small_of_x(self, product: _Product) -> bool:
        return product.other in self.inputs.xs and _size(aval_of(product.same)) < LARGE


def has_large_products(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr multiplies with an array that is `LARGE`."""
    products = (equation for equation in equations_within(jaxpr) if equation.primitive.name in PRODUCTS)
    return any(elements(aval_of(atom)) >= LARGE for equation in products for atom in equation.invars)


def _size(aval: Aval) -> int:
    """How many elements an array has; 0 where that is a symbol."""
    return math.prod(aval.shape) if all(isinstance(axis, int) for axis in aval.shape) else 0


def _holds_products(jaxpr: Jaxpr) -> bool:
    return any(e.primitive.name in PRODUCTS or _is_inlined(e) for e in jaxpr.eqns)


def _is_inlined(equation: JaxprEqn) -> bool:
    if equation.primitive.name not in _INLINED or not _holds_products(equation.params["jaxpr"].jaxpr):
        return False
    shardings = (*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ()))
    return not any(isinstance(each, jax.sharding.Sharding) for each in shardings)  # they would be lost


def _inlined(equation: JaxprEqn) -> Called | None:
    """What stands in place of the call of a function that holds products."""
    return called(equation) if _is_inlined(equation) else None


def _is_of_each_step(equation: JaxprEqn, *, has_rule: bool = False) -> bool:
    """Whether an equation can be moved; `has_rule` if it is in a function with a derivative of its own.

    One that is told how its result is sharded is not: that is the sharding of one step's result.
    """
    if equation.params.get("out_sharding") is not None:
        return False
    if equation.primitive.name not in _CALLS:
        return equation.primitive.name in _OF_EACH_STEP and (has_rule or not _decides(equation))
    inner, has_rule = called(equation), has_rule or equation.primitive.name == "custom_jvp_call"
    return inner is not None and all(_is_of_each_step(each, has_rule=has_rule) for each in inner[0].eqns)


def _decides(equation: JaxprEqn) -> bool:
    """Whether a primitive or its derivative compares computed values with each other.

    A chunk computes what is moved out of its loop together with its derivative. XLA may then round the two sides of
    the comparison differently; see `decisions`.
    """
    if equation.primitive.name in _SELECT:
        return True
    avals = tuple(atom.aval for atom in equation.invars)
    compared = not any(hasattr(atom, "val") for atom in equation.invars)
    return compared and is_decision(equation.primitive, avals, equation.params)


_ADDITIONS = frozenset({"add", "add_any"})


class TangentSlot(NamedTuple):
    """Where a tangent enters a step that was computed for all steps at once.

    Attributes:
        equation: the number of the equation to whose result it is added.
        deferred: the deferred products of which it is the tangent.
        early: the early values of which it is.
    """

    equation: int
    deferred: tuple[int, ...]
    early: tuple[int, ...] = ()


def slots_of(rest: Jaxpr, early: Sequence[Var], deferred: Sequence[Deferred]) -> tuple[TangentSlot, ...]:
    """One slot for each sum of such values, or for a product that is in none.

    Args:
        rest: the step, an open jaxpr.
        early: those of its inputs that were computed before.
        deferred: its products whose tangents wait.
    """
    sums = _Sums(rest)
    members: dict[Any, tuple[list[int], list[int]]] = {}
    for i, product in enumerate(deferred):
        total = sums.total(rest.eqns[product.equation].outvars[0])
        members.setdefault(total, ([], []))[0].append(i)
    for i, var in enumerate(early):
        total = sums.total(var)
        if total in members:
            members[total][1].append(i)
    return tuple(
        TangentSlot(sums.made_by[total], tuple(products), tuple(values))
        for total, (products, values) in members.items()
    )


class _Sums:
    """Which sum a value goes into.

    Attributes:
        made_by: the number of the equation that computes each variable.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.made_by = {var: number for number, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
        self._readers: dict[Any, Leaves] = collections.defaultdict(list)
        for equation in jaxpr.eqns:
            for var in variables_of(equation.invars):
                self._readers[var].append(equation)
        for var in variables_of(jaxpr.outvars):
            self._readers[var].append(None)

    def total(self, var: Any) -> Any:
        """The sum of all that is added to a variable that nothing else reads, and that has its type.

        An addition of another type ends the sum: one of a number and an array broadcasts, and the tangent of the number
        is no tangent of the array.
        """
        while len(self._readers[var]) == 1:
            (reader,) = self._readers[var]
            if reader is None or not _adds_alike(reader, var.aval):
                break
            (var,) = reader.outvars
        return var


def _adds_alike(equation: JaxprEqn, aval: Aval) -> bool:
    """Whether an equation adds up values of one type, which its result has too."""
    if equation.primitive.name not in _ADDITIONS:
        return False
    return all(atom.aval == aval for atom in (*equation.invars, *equation.outvars))
