"""Gathers what a description says, from a call that was taken from its verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._avals import describe_leaf
from .._errors import ArgumentError, Fault, TreescanError, describe_body
from .._trace.cost import bytes_of, count_operations
from .._transforms.program import Taken
from .description import Description, Leaf, Plan, Saved
from .findings import Case, calls_of, find
from .plans import TracedBody, forward_bytes, other_plans, plan_of, saved_by_steps, sharding_of, trace_bodies


def gather(verb: str, unit: str, taken: Taken, remat: Any, retake: Callable[[Any], Taken]) -> Description:
    """What is known of a call. Its bodies are traced; nothing is run.

    Args:
        verb: its name.
        unit: what a step is called there.
        taken: the call.
        remat: what it says of `remat`.
        retake: the same call with another `remat`.
    """
    _check_steps(taken)
    found = list[tuple[dict[str, Any], Case]]()

    def look(given: Any) -> None:
        bodies = trace_bodies(taken.program, taken.given, given)
        case = Case(verb, unit if len(bodies) == 1 else "period", taken.program, bodies)
        found.append(({**_of_bodies(bodies), "findings": find(case)}, case))

    jax.eval_shape(look, taken.given)
    facts, case = found[0]
    call = case.calls[-1]
    plan, tiers = _plan_of(taken, remat, case, facts["findings"])
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


def _check_steps(taken: Taken) -> None:
    """Refuses what has no step to trace, and sizes that are symbols.

    Raises:
        Fault: for an `ArgumentError`.
    """
    calls = calls_of(taken.program)
    lengths = [call.length for call in calls]
    if any(not isinstance(length, int) for length in lengths):
        raise Fault(
            ArgumentError,
            "`describe` of {verb} over {body}: the number of {unit}s is symbolic.",
            "Describe a call with a known number of {unit}s.",
        )
    if not all(lengths):
        raise Fault(
            ArgumentError,
            "`describe` of {verb} over {body}: the loop has no {unit}s.",
            "Describe a call with at least one.",
        )


_UNKNOWN = "the body cannot be called with fewer rows"


def _plan_of(taken: Taken, remat: Any, case: Case, findings: Any) -> tuple[Plan, tuple[int, ...]]:
    """The plan of the call. Where a finding says why it cannot run, that is its plan."""
    try:
        return plan_of(taken, remat, used=True)
    except (Fault, TreescanError):
        if not any(finding.code == "TS007" for finding in findings):
            raise
    return Plan(remat, True, (), None, 0, _UNKNOWN), ()


def _of_bodies(bodies: list[TracedBody]) -> dict[str, Any]:
    first, several = bodies[0], len(bodies) > 1
    fixed = [all(flags) for flags in zip(*(body.fixed for body in bodies), strict=True)]
    carry = zip(first.carry, fixed, strict=True)
    constants = {leaf.path: leaf for body in bodies for leaf in _constants(body)}
    return {
        "carry": tuple(_leaf(leaf.path, jax.typeof(leaf.value), leaf.value, not is_fixed) for leaf, is_fixed in carry),
        "x": tuple(leaf for i, body in enumerate(bodies) for leaf in _scanned(body, f"[{i}]" if several else "")),
        "y": tuple(
            _leaf(f"{path}{'' if not several else f' of [{i}]'}", variable.aval)
            for i, body in enumerate(bodies)
            for path, variable in body.y_vars
        ),
        "constants": tuple(constants.values()),
        "saved": _joined(saved_by_steps(bodies)),
        "operations": sum(count_operations(body.jaxpr) for body in bodies),
        "flops": sum(count_operations(body.jaxpr, transcendental=1) for body in bodies),
    }


def _leaf(path: str, aval: Any, value: Any = None, changes: bool = True) -> Leaf:
    whole = value is not None and getattr(value, "shape", ()) == aval.shape
    return Leaf(path, describe_leaf(value) if whole else str(aval), bytes_of(aval), sharding_of(value), changes)


def _constants(body: TracedBody) -> list[Leaf]:
    pairs = zip(body.constants, body.closed_vars, strict=True)
    return [_leaf(constant.path, variable.aval, constant.value) for constant, variable in pairs]


def _scanned(body: TracedBody, place: str) -> list[Leaf]:
    pairs = zip(body.x, body.x_vars, strict=True)
    return [_leaf(f"{leaf.path}{place and f' of {place}'}", variable.aval, leaf.value) for leaf, variable in pairs]


def _joined(saved: tuple[Saved, ...]) -> tuple[Saved, ...]:
    """What several bodies save at one line, as one."""
    joined = dict[str, Saved]()
    for each in saved:
        other = joined.get(each.place)
        operations = each.operations if other is None else tuple(dict.fromkeys((*other.operations, *each.operations)))
        types = each.types if other is None else (*other.types, *each.types)
        joined[each.place] = Saved(each.place, operations, types, each.bytes + (other.bytes if other else 0))
    return tuple(sorted(joined.values(), key=lambda each: -each.bytes))
