"""Findings about outputs."""

from __future__ import annotations

from collections.abc import Iterator

from ..._trace.blame import place_of
from ..._trace.dependence import dependent
from ..._trace.readers import unread_outputs
from ..facts import Finding
from .case import Case


def unread(case: Case) -> Iterator[Finding]:
    """TS002: outputs of loops in the body that the body does not read."""
    for body in case.bodies:
        for equation, variable in unread_outputs(body.jaxpr):
            where = place_of(equation) or "in the body"
            yield Finding(
                "TS002",
                f"{where}: a loop in the body stacks {variable.aval}, and nothing reads it.",
                "Let its body return None there, or use `treescan.fold`.",
            )


def constant_outputs(case: Case) -> Iterator[Finding]:
    """TS003: outputs that are the same in every step."""
    for body in case.bodies:
        consts = body.counts[0]
        flags = [place >= consts for place in range(len(body.jaxpr.invars))]
        varying = dependent(body.jaxpr, flags)
        for path, variable in body.y_vars:
            if hasattr(variable, "val") or variable not in varying:
                yield Finding(
                    "TS003",
                    f"{path}: {variable.aval} is the same in every {case.unit}, but it is stacked.",
                    "Return None instead, and use the value outside the loop.",
                )
