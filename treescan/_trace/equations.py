"""Evaluates and compares single equations of a jaxpr."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.sharding import AxisType

from .._avals import varying_axes

_CALLS = frozenset({"jit", "closed_call", "remat2"})
_REVERSE_RULES = frozenset({"custom_vjp_call", "custom_lin"})
_BRANCHES = frozenset({"cond"})
_FOR_DATA_ALONE = frozenset({"ffi_call", "pallas_call", "pure_callback", "while"})
"""Primitives that may fail on what is no data, or never end. Other callbacks are effects."""

NAMED_AXIS = "NamedAxisEffect"
"""That a program runs over a named axis counts as an effect for JAX."""

PRODUCTS = frozenset({"dot_general"})
"""The products that may be computed for many steps at once. A convolution is slower so: measured, 2.1 times."""

_CALLS_WITH_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


def variables_of(atoms: Sequence[Any]) -> list[Any]:
    """The variables among variables and literals."""
    return [atom for atom in atoms if not hasattr(atom, "val")]


def called(equation: Any) -> tuple[Any, list[Any]] | None:
    """The jaxpr that an equation calls, and what that closes over; None if it calls none."""
    name = equation.primitive.name
    if name in _CALLS:
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    elif name in _CALLS_WITH_RULES:
        inner = equation.params.get("call_jaxpr")
    else:
        return None
    if inner is None:
        return None
    return (inner.jaxpr, list(inner.consts)) if hasattr(inner, "jaxpr") else (inner, [])


def loop_of(equation: Any) -> tuple[Any, int, int]:
    """The jaxpr of a scan's step, how many constants it takes, and how many values it carries."""
    jaxpr = equation.params["jaxpr"].jaxpr
    carried = _alike(equation.outvars, jaxpr.outvars)  # ys lead with the steps
    return jaxpr, _alike(equation.invars, jaxpr.invars) - carried, carried


def _alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many of a scan's variables are of one type outside and inside: xs and ys are not."""
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))


Calls = Callable[[Any], tuple[Any, list[Any]] | None]
"""From an equation to the jaxpr in its place and what that closes over, as `called` finds them; None: there is none."""


def interpret(
    jaxpr: Any,
    consts: Sequence[Any],
    given: Sequence[Any],
    each: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, aval: value,
    into: Calls = called,
) -> list[Any]:
    """Goes through an open jaxpr with values of any kind, the equations of what it calls in place of the calls.

    Args:
        jaxpr: the jaxpr.
        consts: what it closes over.
        given: the values of its inputs.
        each: from an equation and the values that it reads to those of its results.
        constant: the value of a constant, and of what the jaxpr closes over, from it and its type.
        into: what is gone into.
    """
    held = map(constant, consts, (var.aval for var in jaxpr.constvars))
    known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*held, *given], strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [constant(atom.val, atom.aval) if hasattr(atom, "val") else known[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        inner, values = into(equation), read(equation.invars)
        results = each(equation, values) if inner is None else interpret(*inner, values, each, constant, into)
        known.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def origins(jaxpr: Any, given: Sequence[Any], into: Calls = called) -> list[Any]:
    """For each output of an open jaxpr what is given for the input that it is; None for one that is computed."""
    consts = [None] * len(jaxpr.constvars)

    def computed(equation: Any, _: list[Any]) -> list[Any]:
        return [None] * len(equation.outvars)

    return interpret(jaxpr, consts, given, computed, lambda value, aval: None, into)


def called_without_rule(equation: Any) -> tuple[Any, list[Any]] | None:
    """The jaxpr that an equation calls, and what that closes over; None for a function with a rule of its own."""
    return None if equation.primitive.name in _CALLS_WITH_RULES else called(equation)


def equations_within(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr, each followed by those of the loops, branches and functions in it."""
    found, waiting = list[Any](), list(reversed(jaxpr.eqns))
    while waiting:
        equation = waiting.pop()
        found.append(equation)
        for inner in reversed(jaxprs_within(equation)):
            waiting.extend(reversed(inner.eqns))
    return found


def holds(jaxpr: Any, names: frozenset[str]) -> bool:
    """Whether a jaxpr holds one of these primitives, in a loop or a function too."""
    return not names.isdisjoint(map(operator.attrgetter("primitive.name"), equations_within(jaxpr)))


def reshards(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr says how a value is to be spread over devices, where shardings are part of the type.

    What a step computes is then sharded otherwise than what it is given, or is computed on another mesh.
    """
    return any(
        equation.primitive.name in ("mesh_cast", "reshard") or equation.params.get("out_sharding") is not None
        for equation in equations_within(jaxpr)
    )


def has_reverse_rule(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr has a rule for reverse mode alone (`jax.custom_vjp`).

    In a rule of `jax.custom_jvp` it cannot be mapped any more: the gradient of a `jax.vmap` of it would fail.
    """
    return holds(jaxpr, _REVERSE_RULES)


def has_symbolic_zeros(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr has a rule for reverse mode that is told which of its inputs are perturbed."""
    return any(
        equation.primitive.name in _REVERSE_RULES and bool(equation.params.get("symbolic_zeros"))
        for equation in equations_within(jaxpr)
    )


def has_branches(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr is a branch."""
    return holds(jaxpr, _BRANCHES)


def branches_on_devices(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr is a branch, and anything that it is given or returns varies over manual mesh axes.

    JAX then has to differentiate it itself, after it was mapped: the function that it can be told the transpose of
    (`_trace/transposed.py`) makes all that it reads vary, without regard to the types in what was traced.
    """
    variables = (*jaxpr.constvars, *jaxpr.invars, *variables_of(jaxpr.outvars))
    return has_branches(jaxpr) and any(varying_axes(var.aval) for var in variables)


def named_axes(jaxpr: Any) -> frozenset[Hashable]:
    """The named axes of `jax.vmap` over which anything in a jaxpr, open or closed, computes.

    The program is then another one once the map is done: JAX has no such axis where it asks for a derivative later.
    The manual axes of a `shard_map` are not among them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    found = {effect.name for effect in jaxpr.effects if type(effect).__name__ == NAMED_AXIS}
    found |= _free_axes(getattr(jaxpr, "jaxpr", jaxpr))
    return frozenset(name for name in found if name is not None and not hasattr(name, "__index__")) - manual


def _free_axes(jaxpr: Any) -> set[Any]:
    """What the equations of an open jaxpr name as axes, but for the axes of the meshes that are mapped in it."""
    found = set[Any]()
    for equation in jaxpr.eqns:
        within = set[Any]().union(*map(_free_axes, jaxprs_within(equation)))
        found |= within - set(getattr(equation.params.get("mesh"), "axis_names", ()))
        for names in map(equation.params.get, ("axis_name", "axes")):
            found.update(names if isinstance(names, tuple) else (names,))
    return found


def is_for_data_alone(jaxpr: Any) -> bool:
    """Whether anything in a jaxpr must not run on what is no data, effects left aside."""
    return any(map(_is_for_data_alone, equations_within(jaxpr)))


def _is_for_data_alone(equation: Any) -> bool:
    if equation.primitive.name == "conv_general_dilated":  # XLA maps one in float64 by adding other rows times zero
        return bool(equation.outvars[0].aval.dtype == np.float64)
    return equation.primitive.name in _FOR_DATA_ALONE


def jaxprs_within(equation: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    found = list[Any]()
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found


def with_jaxprs(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters of an equation, with the jaxprs among them changed, closed or open."""

    def of(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(of, value))
        return change(value) if hasattr(getattr(value, "jaxpr", value), "eqns") else value

    return {name: of(value) for name, value in params.items()}


def silenced(jaxpr: Any) -> Any:
    """A jaxpr, closed or not, without the callbacks that return nothing, in its loops and branches too."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)  # since JAX 0.12, an open jaxpr has itself there
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=silenced(inner))
    equations = [_silence_inner(eqn) for eqn in jaxpr.eqns if not _only_speaks(eqn)]
    kinds = {type(effect) for eqn in equations for effect in eqn.effects}
    return jaxpr.replace(eqns=equations, effects={effect for effect in jaxpr.effects if type(effect) in kinds})


def _only_speaks(eqn: Any) -> bool:
    """Whether an equation has effects and nothing else; one that writes to a mutable array has more."""
    return bool(eqn.effects) and not eqn.outvars and all(isinstance(var.aval, ShapedArray) for var in eqn.invars)


def _silence_inner(eqn: Any) -> Any:
    """An equation with the loops and branches that it holds silenced; the effects of others are their own."""
    left = list[Any]()

    def silence(jaxpr: Any) -> Any:
        left.append(silenced(jaxpr))
        return left[-1]

    params = with_jaxprs(eqn.params, silence) if eqn.effects else {}
    kinds = {type(effect) for jaxpr in left for effect in jaxpr.effects}
    kept = {effect for effect in eqn.effects if type(effect) in kinds}
    return eqn.replace(params=params, effects=kept) if left else eqn


def needed(equations: Sequence[Any], outputs: Sequence[Any], given: Iterable[Any] = ()) -> list[Any]:
    """Those of the equations that compute the outputs, from the inputs and from variables that are given."""
    known = set(given)
    wanted, found = set(variables_of(outputs)) - known, list[Any]()
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            found.append(equation)
            wanted |= set(variables_of(equation.invars)) - known
    return found[::-1]


def alone(jaxpr: Any, equation: Any, outputs: Sequence[Any] | None = None) -> tuple[list[Any], Any]:
    """One equation of a jaxpr as a jaxpr: the variables that it takes, and it. It returns all outputs, or the given."""
    taken = list(dict.fromkeys(variables_of(equation.invars)))
    returned = list(equation.outvars) if outputs is None else list(outputs)
    return taken, jaxpr.replace(constvars=[], invars=taken, outvars=returned, eqns=[equation], effects=equation.effects)


def evaluate_alone(jaxpr: Any, equation: Any, read: Sequence[Any]) -> list[Any]:
    """The results of one equation of a jaxpr, from the values that it reads."""
    taken, program = alone(jaxpr, equation)
    return eval_jaxpr(program, [], *(read[equation.invars.index(var)] for var in taken), propagate_source_info=True)


def opened(jaxpr: Any) -> Any:
    """An open jaxpr that is given what it closes over, before its inputs."""
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def evaluate_inlined(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], into: Calls) -> list[Any]:
    """Evaluates an open jaxpr, with the equations of what it calls in place of the calls, where `into` gives them."""
    return interpret(jaxpr, consts, given, lambda equation, read: evaluate_alone(jaxpr, equation, read), into=into)


def inlined(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], into: Calls = called) -> Any:
    """An open jaxpr as a closed one, with the equations of what it calls in place of the calls."""
    return jax.make_jaxpr(lambda *given: evaluate_inlined(jaxpr, consts, given, into))(*given)


def values_of(atoms: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    """The values of variables and literals."""
    return [atom.val if hasattr(atom, "val") else values[atom] for atom in atoms]
