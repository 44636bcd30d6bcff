"""Gathers what a description says, from a call that was taken from its verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._avals import bytes_of, describe_leaf
from .._errors import ArgumentError, Fault, TreescanError, describe_body
from .._trace.cost import count_operations
from .._transforms.program import Program, Taken
from .description import Description, Leaf, Plan
from .findings import Case, find
from .plans import TracedBody, forward_bytes, of_types, other_plans, plan_of, saved_by_steps, sharding_of, trace_bodies


def gather(verb: str, unit: str, taken: Taken, remat: Any, retake: Callable[[Any], Taken]) -> Description:
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

    def look(given: Any) -> tuple[dict[str, Any], Case]:
        bodies = trace_bodies(program, taken.given, given)
        case = Case(verb, unit if len(bodies) == 1 else "period", program, bodies)
        return {**_of_bodies(bodies), "findings": find(case)}, case

    facts, case = of_types(look, taken.given)
    call = case.calls[-1]
    plan, tiers = _plan_of(taken, remat, facts["findings"])
    known = plan.refusal != _UNKNOWN
    needed, results = forward_bytes(taken.program, taken.given) if known else (None, None)
    return Description(
        verb=verb,
        body=describe_body([each.body.function for each in case.bodies]),
        unit=case.unit,
        steps=call.length,
        at_most=case.ends_early,
        reverse=call.reverse,
        tiers=tiers,
        plans=(plan, *(other_plans(plan, retake) if known else ())),
        forward_bytes=needed,
        result_bytes=results,
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
    raise Fault(ArgumentError, f"`describe` of {{verb}} over {{body}}: {says[0]}.", says[1])


_UNKNOWN = "the body cannot be called with fewer rows"


def _plan_of(taken: Taken, remat: Any, findings: Any) -> tuple[Plan, tuple[int, ...]]:
    """The plan of the call. Where a finding says why it cannot run, that is its plan."""
    try:
        return plan_of(taken, remat, used=True)
    except (Fault, TreescanError):
        if not any(finding.code == "TS007" for finding in findings):
            raise
    return Plan(remat, True, (), None, 0, _UNKNOWN), ()


def _of_bodies(bodies: list[TracedBody]) -> dict[str, Any]:
    fixed = map(all, zip(*(body.fixed for body in bodies), strict=True))
    carry = [
        _leaf(leaf.path, jax.typeof(leaf.value), leaf.value, not each)
        for leaf, each in zip(bodies[0].carry, fixed, strict=True)
    ]
    x, y, constants = list[Leaf](), list[Leaf](), dict[str, Leaf]()
    for number, body in enumerate(bodies):
        place = f" of [{number}]" if len(bodies) > 1 else ""
        of_x = zip(body.x, body.x_vars, strict=True)
        x += [_leaf(f"{leaf.path}{place}", variable.aval, leaf.value) for leaf, variable in of_x]
        y += [_leaf(f"{path}{place}", variable.aval) for path, variable in body.y_vars]
        named = zip(body.constants, body.closed_vars, strict=True)
        constants |= {each.path: _leaf(each.path, variable.aval, each.value) for each, variable in named}
    return {
        "carry": tuple(carry),
        "x": tuple(x),
        "y": tuple(y),
        "constants": tuple(constants.values()),
        "saved": saved_by_steps(bodies),
        "operations": sum(count_operations(body.jaxpr) for body in bodies),
        "flops": sum(count_operations(body.jaxpr, transcendental=1) for body in bodies),
    }


def _leaf(path: str, aval: Any, value: Any = None, changes: bool = True) -> Leaf:
    whole = value is not None and getattr(value, "shape", ()) == aval.shape
    return Leaf(path, describe_leaf(value) if whole else str(aval), bytes_of(aval), sharding_of(value), changes)
