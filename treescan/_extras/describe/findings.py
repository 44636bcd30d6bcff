"""What a description says of a call: facts of its bodies, and mistakes that no error and no type shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import AbstractValue, Atom
from jax.extend.core import Jaxpr, JaxprEqn, Var

from ..._avals import bytes_of, describe_leaf, is_key
from ..._errors import Misuse, describe_body
from ..._program.program import Program, Taken
from ..._trace.cost import count_operations
from ..._trace.dependence import dependent
from ..._trace.equations import called, jaxprs_within, loop_of, place_of
from ..._transforms.call import Arguments
from ..._types import RematLike
from ..._until.end_early import EndEarly
from .description import Description, Finding, Leaf
from .plans import TracedBody, of_types, other_plans, plan_of, saved_by_steps, sharding_of, trace_bodies

_DRAWS = frozenset({"random_bits", "random_gamma"})


def same_draws(body: TracedBody, unit: str) -> Iterator[Finding]:
    """Random numbers that are the same in every step, because their key is."""
    same = set(jax.tree.leaves(body.inputs.consts))
    varying = [var not in same for var in body.jaxpr.invars]
    found = dependent(body.jaxpr, varying)
    places = dict[str, None]()
    for equation in body.jaxpr.eqns:
        if _draws_the_same(equation, [not hasattr(atom, "val") and atom in found for atom in equation.invars]):
            places[place_of(equation) or "the body"] = None
    fixed = (leaf for leaf, is_fixed in zip(body.carry, body.fixed, strict=True) if is_fixed)
    keys = [each.path for each in (*body.constants, *fixed) if _may_be_key(each.value)]
    from_keys = " " + " or ".join(f"`{key}`" for key in keys) if 0 < len(keys) <= 3 else ""
    for place in places:
        yield Finding(
            f"{place}: each {unit} draws the same random numbers, because the key{from_keys} is the same in each.",
            f"If that is not meant: `key=` of the verb gives each {unit} a key of its own, which the body takes as the "
            "keyword `key`. Or carry the key and split it.",
        )


def _draws_the_same(equation: JaxprEqn, varying: list[bool]) -> bool:
    """Whether an equation, or one within it, draws with a key that does not vary from step to step."""
    if equation.primitive.name in _DRAWS:
        return not varying[0]
    for inner in jaxprs_within(equation):
        found = dependent(inner, _varying_inside(equation, inner, varying))
        for each in inner.eqns:
            if _draws_the_same(each, [not hasattr(atom, "val") and atom in found for atom in each.invars]):
                return True
    return False


def _varying_inside(equation: JaxprEqn, inner: Jaxpr, varying: list[bool]) -> list[bool]:
    """Which inputs vary of a jaxpr that an equation runs, from which of its operands do."""
    if equation.primitive.name == "cond":
        return varying[1:]
    if equation.primitive.name != "scan":
        return varying if called(equation) is not None else [any(varying)] * len(inner.invars)
    _, first, carried = loop_of(equation)
    flags = varying
    while True:
        found = dependent(inner, flags)
        after = [not hasattr(atom, "val") and atom in found for atom in inner.outvars[:carried]]
        carry = [a or b for a, b in zip(flags[first : first + carried], after, strict=True)]
        if carry == flags[first : first + carried]:
            return flags
        flags = [*flags[:first], *carry, *flags[first + carried :]]


def _may_be_key(value: Any) -> bool:
    aval = jax.typeof(value) if not hasattr(value, "dtype") else value
    return is_key(aval) or (aval.dtype == "uint32" and aval.shape[-1:] in ((2,), (4,)))


def ignored_x(body: TracedBody, x_name: str, unit: str) -> Iterator[Finding]:
    """A body whose results do not depend on what is scanned over. A name that begins with `_` says that it is meant."""
    given = set(body.x_vars)
    found = dependent(body.jaxpr, [var in given for var in body.jaxpr.invars])
    read = any(not hasattr(atom, "val") and atom in found for atom in body.jaxpr.outvars)
    if given and not read and not body.loop.hoisted.effects and not x_name.startswith("_"):
        yield Finding(
            f"{x_name}: nothing that a {unit} returns depends on it.",
            f"If that is meant, call it `_` in the body. If only the number of {unit}s is needed, give `length`.",
        )


_SCANS = frozenset({"scan", "fold", "accumulate", "mask_scan"})
_SUMS, _SAME = frozenset({"add", "sub", "add_any"}), frozenset({"neg", "convert_element_type", "copy"})


def linear_carry(body: TracedBody) -> Iterator[Finding]:
    """A body that multiplies its carry, also by a matrix, and adds to it, and does nothing else with it."""
    state = body.inputs.state
    does = [_done(body.jaxpr, leaf, state, new) for leaf, new in zip(state, body.jaxpr.outvars, strict=False)]
    known = all(each is not None for each in does) and not body.loop.hoisted.effects
    done = set[str]().union(*filter(None, does))
    if known and {"times", "plus"} <= done:
        how, option = (
            ("where a is a matrix", ", with `matrix=True`,") if "matrix" in done else ("element by element", "")
        )
        yield Finding(
            f"The new carry is a * carry + b, {how}, and a and b do not depend on the carry.",
            f"`treescan.linear_scan`{option} is the verb for this. Its gradient saves a and the states, nothing else.",
        )


def _done(jaxpr: Jaxpr, leaf: Var, state: list[Var], new: Atom) -> set[str] | None:
    """What is done with a leaf of the state: "times" (perhaps a "matrix"), "plus", by what is not; None: more."""
    affine, other = {leaf: set[str]()}, set(state) - {leaf}
    for equation in jaxpr.eqns:
        atoms = [atom for atom in equation.invars if not hasattr(atom, "val")]
        found, name = [atom for atom in atoms if atom in affine], equation.primitive.name
        kind = "plus" if name in _SUMS else "times" if name in ("mul", "div", "dot_general") else ""
        alone = len(found) == 1 and (name != "div" or equation.invars[0] in affine)
        if name == "dot_general":  # a product of the last axis of the leaf and a matrix
            (left, _), _ = equation.params["dimension_numbers"]
            first, rank = equation.invars[0] in affine, len(_shape(leaf.aval))
            alone = alone and (left == (rank - 1,) if first else rank == 1)
        fits = name in _SUMS or name in _SAME or (kind == "times" and alone)
        whole = all(_shape(variable.aval) == _shape(leaf.aval) for variable in equation.outvars)
        if any(atom in other for atom in atoms) or (found and not (fits and whole)):
            other.update(equation.outvars)
        elif found:
            before = set[str]().union(*(affine[atom] for atom in found))
            now = {kind} | ({"matrix"} if name == "dot_general" else set()) if kind and alone else set[str]()
            affine[equation.outvars[0]] = before | now
    return affine.get(new) if isinstance(new, Var) else None


def gather(
    verb: str, unit: str, taken: Taken, remat: RematLike | None, retake: Callable[[RematLike | None], Taken]
) -> Description:
    """What is known of a call. Its bodies are traced; nothing is run.

    Args:
        verb: its name.
        unit: what a step is called there.
        taken: the call.
        remat: what it says of `remat`.
        retake: the same call with another `remat`.
    """
    program = taken.program
    _check_steps(program)

    calls = program.call.each
    call, unit = calls[-1], unit if len(calls) == 1 else "period"

    def look(given: Arguments) -> dict[str, Any]:
        bodies = trace_bodies(program, taken.given, given)
        found = list[Finding]()
        for body, own in zip(bodies, calls, strict=True):
            found += [*same_draws(body, unit), *ignored_x(body, own.names[1], unit)]
            found += linear_carry(body) if verb in _SCANS else ()
        return {**_of_bodies(bodies), "findings": tuple(found)}

    facts = of_types(look, taken.given)
    plan, tiers = plan_of(taken, remat, used=True)
    return Description(
        verb=verb,
        body=describe_body([each.body.function for each in calls]),
        unit=unit,
        steps=call.length,
        at_most=any(isinstance(each, EndEarly) for each in program.transforms),
        reverse=call.reverse,
        tiers=tiers,
        plans=(plan, *other_plans(plan, retake)),
        **facts,
    )


def _check_steps(program: Program) -> None:
    """Refuses what has no step to trace, and sizes that are symbols.

    Raises:
        Fault: for an `ArgumentError`.
    """
    lengths = [call.length for call in program.call.each]
    says = "the loop has no {unit}s", "Describe a call with at least one."
    if any(not isinstance(length, int) for length in lengths):
        says = "the number of {unit}s is symbolic", "Describe a call with a known number of {unit}s."
    elif all(lengths):
        return
    raise Misuse(f"`describe` of {{verb}} over {{body}}: {says[0]}.", says[1])


def _of_bodies(bodies: list[TracedBody]) -> dict[str, Any]:
    fixed = map(all, zip(*(body.fixed for body in bodies), strict=True))
    carry = [
        _leaf(leaf.path, jax.typeof(leaf.value), leaf.value, not each, rows)
        for leaf, each, rows in zip(bodies[0].carry, fixed, bodies[0].axes_of_rows.state, strict=True)
    ]
    x, y, constants = list[Leaf](), list[Leaf](), dict[str, Leaf]()
    for number, body in enumerate(bodies):
        place, axes = f" of [{number}]" if len(bodies) > 1 else "", body.axes_of_rows
        of_x = zip(body.x, body.x_vars, axes.x, strict=False)  # an option may feed more
        x += [_leaf(f"{leaf.path}{place}", variable.aval, leaf.value, rows=rows) for leaf, variable, rows in of_x]
        of_y = zip(body.y_vars, axes.y, strict=True)
        y += [_leaf(f"{path}{place}", variable.aval, rows=rows) for (path, variable), rows in of_y]
        named = zip(body.constants, body.constant_vars, axes.consts.inner, strict=True)
        constants |= {each.path: _leaf(each.path, var.aval, each.value, rows=rows) for each, var, rows in named}
    return {
        "batch": bodies[0].batch if bodies[0].rows is not None else (),
        "carry": tuple(carry),
        "x": tuple(x),
        "y": tuple(y),
        "constants": tuple(constants.values()),
        "saved": saved_by_steps(bodies),
        "operations": sum(count_operations(body.jaxpr) for body in bodies),
        "flops": sum(count_operations(body.jaxpr, transcendental=1) for body in bodies),
    }


def _leaf(path: str, aval: AbstractValue, value: Any = None, changes: bool = True, rows: int | None = None) -> Leaf:
    whole = value is not None and getattr(value, "shape", ()) == _shape(aval)
    types = describe_leaf(value) if whole else str(aval)
    return Leaf(path, types, bytes_of(aval), sharding_of(value), changes, rows)


def _shape(aval: AbstractValue) -> tuple[int, ...]:
    return getattr(aval, "shape", ())
