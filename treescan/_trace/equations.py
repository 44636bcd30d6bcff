"""Evaluates and compares single equations of a jaxpr."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.sharding import AxisType

from .._avals import Aval, Leaves, varying_axes
from .._errors import is_library_file, shorten

if TYPE_CHECKING:
    from jax.core import Atom
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

Value = TypeVar("Value")

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


def variables_of(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among variables and literals."""
    found: list[Any] = [atom for atom in atoms if not hasattr(atom, "val")]
    return found


def aval_of(atom: Atom) -> Aval:
    """The type of a variable or a literal that is no mutable array."""
    return cast(Aval, atom.aval)


def inputs_of(jaxpr: Jaxpr, given: Value) -> Value:
    """The inputs of an open jaxpr by name: its variables in the tree of what it is given."""
    return cast(Value, jax.tree.unflatten(jax.tree.structure(given), jaxpr.invars))


def called(equation: JaxprEqn) -> Called | None:
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


def loop_of(equation: JaxprEqn) -> tuple[Jaxpr, int, int]:
    """The jaxpr of a scan's step, how many constants it takes, and how many values it carries."""
    jaxpr: Jaxpr = equation.params["jaxpr"].jaxpr
    carried = _alike(equation.outvars, jaxpr.outvars)  # ys lead with the steps
    return jaxpr, _alike(equation.invars, jaxpr.invars) - carried, carried


def _alike(outside: Sequence[Atom], inside: Sequence[Atom]) -> int:
    """How many of a scan's variables are of one type outside and inside: xs and ys are not."""
    return sum(len(aval_of(a).shape) == len(aval_of(b).shape) for a, b in zip(outside, inside, strict=True))


Called: TypeAlias = "tuple[Jaxpr, Leaves]"
"""An open jaxpr that is called, and what it closes over."""

Calls: TypeAlias = "Callable[[JaxprEqn], Called | None]"
"""From an equation to the jaxpr in its place and what that closes over, as `called` finds them; None: there is none."""


def interpret(
    jaxpr: Jaxpr,
    consts: Sequence[object],
    given: Sequence[Value],
    each: Callable[[JaxprEqn, list[Value]], Sequence[Value]],
    constant: Callable[[Any, Aval], Value],
    into: Calls = called,
) -> list[Value]:
    """Goes through an open jaxpr with values of any kind, the equations of what it calls in place of the calls.

    Args:
        jaxpr: the jaxpr.
        consts: what it closes over.
        given: the values of its inputs.
        each: from an equation and the values that it reads to those of its results.
        constant: the value of a constant, and of what the jaxpr closes over, from it and its type.
        into: what is gone into.
    """
    held = map(constant, consts, map(aval_of, jaxpr.constvars))
    known: dict[Var, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*held, *given], strict=True))

    def read(atoms: Sequence[Any]) -> list[Value]:
        return [constant(atom.val, atom.aval) if hasattr(atom, "val") else known[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        inner, values = into(equation), read(equation.invars)
        results = each(equation, values) if inner is None else interpret(*inner, values, each, constant, into)
        known.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


def origins(jaxpr: Jaxpr, given: Sequence[Value], into: Calls = called) -> list[Value | None]:
    """For each output of an open jaxpr what is given for the input that it is; None for one that is computed."""
    consts = [None] * len(jaxpr.constvars)

    def computed(equation: JaxprEqn, _: list[Value | None]) -> list[Value | None]:
        return [None] * len(equation.outvars)

    return interpret(jaxpr, consts, given, computed, lambda value, aval: None, into)


def called_without_rule(equation: JaxprEqn) -> Called | None:
    """The jaxpr that an equation calls, and what that closes over; None for a function with a rule of its own."""
    return None if equation.primitive.name in _CALLS_WITH_RULES else called(equation)


def equations_within(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations of a jaxpr, each followed by those of the loops, branches and functions in it."""
    found, waiting = list["JaxprEqn"](), list(reversed(jaxpr.eqns))
    while waiting:
        equation = waiting.pop()
        found.append(equation)
        for inner in reversed(jaxprs_within(equation)):
            waiting.extend(reversed(inner.eqns))
    return found


def has_primitives(jaxpr: Jaxpr, names: frozenset[str]) -> bool:
    """Whether a jaxpr holds one of these primitives, in a loop or a function too."""
    return not names.isdisjoint(map(operator.attrgetter("primitive.name"), equations_within(jaxpr)))


def reshards(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr says how a value is to be spread over devices, where shardings are part of the type.

    What a step computes is then sharded otherwise than what it is given, or is computed on another mesh.
    """
    return any(
        equation.primitive.name in ("mesh_cast", "reshard") or equation.params.get("out_sharding") is not None
        for equation in equations_within(jaxpr)
    )


def has_reverse_rule(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr has a rule for reverse mode alone (`jax.custom_vjp`).

    In a rule of `jax.custom_jvp` it cannot be mapped any more: the gradient of a `jax.vmap` of it would fail.
    """
    return has_primitives(jaxpr, _REVERSE_RULES)


def has_symbolic_zeros(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr has a rule for reverse mode that is told which of its inputs are perturbed."""
    return any(
        equation.primitive.name in _REVERSE_RULES and bool(equation.params.get("symbolic_zeros"))
        for equation in equations_within(jaxpr)
    )


def has_branches(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr is a branch."""
    return has_primitives(jaxpr, _BRANCHES)


def branches_on_devices(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr is a branch, and anything that it is given or returns varies over manual mesh axes.

    JAX then has to differentiate it itself, after it was mapped: the function that it can be told the transpose of
    (`_trace/transposed.py`) makes all that it reads vary, without regard to the types in what was traced.
    """
    variables = (*jaxpr.constvars, *jaxpr.invars, *variables_of(jaxpr.outvars))
    return has_branches(jaxpr) and any(varying_axes(aval_of(var)) for var in variables)


def named_axes(jaxpr: Jaxpr | ClosedJaxpr) -> frozenset[Hashable]:
    """The named axes of `jax.vmap` over which anything in a jaxpr, open or closed, computes.

    The program is then another one once the map is done: JAX has no such axis where it asks for a derivative later.
    The manual axes of a `shard_map` are not among them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
    found = {getattr(effect, "name", None) for effect in jaxpr.effects if type(effect).__name__ == NAMED_AXIS}
    found |= _free_axes(cast("Jaxpr", getattr(jaxpr, "jaxpr", jaxpr)))
    return frozenset(name for name in found if name is not None and not hasattr(name, "__index__")) - manual


def _free_axes(jaxpr: Jaxpr) -> set[Any]:
    """What the equations of an open jaxpr name as axes, but for the axes of the meshes that are mapped in it."""
    found = set[Any]()
    for equation in jaxpr.eqns:
        within = set[Any]().union(*map(_free_axes, jaxprs_within(equation)))
        found |= within - set(getattr(equation.params.get("mesh"), "axis_names", ()))
        for names in map(equation.params.get, ("axis_name", "axes")):
            found.update(names if isinstance(names, tuple) else (names,))
    return found


def is_for_data_alone(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr must not run on what is no data, effects left aside."""
    return any(map(_is_for_data_alone, equations_within(jaxpr)))


def _is_for_data_alone(equation: JaxprEqn) -> bool:
    if equation.primitive.name == "conv_general_dilated":  # XLA maps one in float64 by adding other rows times zero
        return bool(aval_of(equation.outvars[0]).dtype == np.float64)
    return equation.primitive.name in _FOR_DATA_ALONE


def jaxprs_within(equation: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among the parameters of an equation."""
    found = list["Jaxpr"]()
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            jaxpr: Any = getattr(item, "jaxpr", item)
            if hasattr(jaxpr, "eqns"):
                found.append(jaxpr)
    return found


def with_jaxprs(params: dict[str, Any], change: Callable[[Any], object]) -> dict[str, Any]:
    """The parameters of an equation, with the jaxprs among them changed, closed or open."""

    def of(value: Any) -> object:
        if type(value) in (tuple, list):
            return type(value)(map(of, value))
        return change(value) if hasattr(getattr(value, "jaxpr", value), "eqns") else value

    return {name: of(value) for name, value in params.items()}


def silenced(jaxpr: Any) -> Any:
    """A jaxpr, closed or not, without the callbacks that return nothing, in its loops and branches too."""
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)  # since JAX 0.12, an open jaxpr has itself there
    if inner is not jaxpr:
        return jaxpr.replace(jaxpr=silenced(inner))
    equations = [_silence_inner(eqn) for eqn in inner.eqns if not _only_speaks(eqn)]
    kinds = {type(effect) for eqn in equations for effect in eqn.effects}
    return inner.replace(eqns=equations, effects={effect for effect in inner.effects if type(effect) in kinds})


def _only_speaks(eqn: JaxprEqn) -> bool:
    """Whether an equation has effects and nothing else; one that writes to a mutable array has more."""
    return bool(eqn.effects) and not eqn.outvars and all(isinstance(var.aval, ShapedArray) for var in eqn.invars)


def _silence_inner(eqn: JaxprEqn) -> JaxprEqn:
    """An equation with the loops and branches that it holds silenced; the effects of others are their own."""
    left = list["Jaxpr | ClosedJaxpr"]()

    def silence(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
        left.append(silenced(jaxpr))
        return left[-1]

    params = with_jaxprs(eqn.params, silence) if eqn.effects else {}
    kinds = {type(effect) for jaxpr in left for effect in jaxpr.effects}
    kept = {effect for effect in eqn.effects if type(effect) in kinds}
    return eqn.replace(params=params, effects=kept) if left else eqn


def needed(equations: Sequence[JaxprEqn], outputs: Sequence[Atom], given: Iterable[Var] = ()) -> list[JaxprEqn]:
    """Those of the equations that compute the outputs, from the inputs and from variables that are given."""
    known = set(given)
    wanted, found = set(variables_of(outputs)) - known, list["JaxprEqn"]()
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            found.append(equation)
            wanted |= set(variables_of(equation.invars)) - known
    return found[::-1]


def alone(jaxpr: Jaxpr, equation: JaxprEqn, outputs: Sequence[Atom] | None = None) -> tuple[list[Var], Jaxpr]:
    """One equation of a jaxpr as a jaxpr: the variables that it takes, and it. It returns all outputs, or the given."""
    taken = list(dict.fromkeys(variables_of(equation.invars)))
    returned = list(equation.outvars) if outputs is None else list(outputs)
    return taken, jaxpr.replace(constvars=[], invars=taken, outvars=returned, eqns=[equation], effects=equation.effects)


def evaluate_alone(jaxpr: Jaxpr, equation: JaxprEqn, read: Sequence[object]) -> Leaves:
    """The results of one equation of a jaxpr, from the values that it reads."""
    taken, program = alone(jaxpr, equation)
    return eval_jaxpr(program, [], *(read[equation.invars.index(var)] for var in taken), propagate_source_info=True)


def opened(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr that is given what it closes over, before its inputs."""
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def evaluate_inlined(jaxpr: Jaxpr, consts: Sequence[object], given: Sequence[object], into: Calls) -> Leaves:
    """Evaluates an open jaxpr, with the equations of what it calls in place of the calls, where `into` gives them."""
    each: Callable[[JaxprEqn, Leaves], Leaves] = functools.partial(evaluate_alone, jaxpr)
    return interpret(jaxpr, consts, given, each, lambda value, aval: value, into)


def inlined(jaxpr: Jaxpr, consts: Sequence[object], given: Sequence[object], into: Calls = called) -> ClosedJaxpr:
    """An open jaxpr as a closed one, with the equations of what it calls in place of the calls."""
    return jax.make_jaxpr(lambda *given: evaluate_inlined(jaxpr, consts, given, into))(*given)


def values_of(atoms: Sequence[Any], values: Mapping[Var, Value]) -> list[Value]:
    """The values of variables and literals."""
    return [atom.val if hasattr(atom, "val") else values[atom] for atom in atoms]


def place_of(equation: JaxprEqn) -> str | None:
    """The line of the user's that an equation comes from, as in `model.py:31`."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in [] if traceback is None else traceback.frames:
        if not is_library_file(frame.file_name):
            return f"{shorten(frame.file_name)}:{frame.line_num}"
    return None
