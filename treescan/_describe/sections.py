"""What a description shows, section by section, for text and for HTML alike."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .._html import Section
from .._transforms.budget import describe_bytes
from .facts import Facts, Finding, Leaf, Plan

_MOST = 12
"""Rows of a table; what comes after them is added up."""


def headline(of: Facts) -> str:
    """The call in a line."""
    count = f"{of.steps:,} {of.unit}{'' if of.steps == 1 else 's'}"
    way = " in reverse" if of.reverse else ""
    return f"`{of.verb}` over {of.body}: {'at most ' if of.at_most else ''}{count}{way}"


def sections(of: Facts) -> list[Section]:
    """The sections that are not empty."""
    return [
        Section("", ("", "", "", ""), list(_leaves(of))),
        *([Section(_title_of_saved(of), ("", "", ""), list(_saved(of)))] if of.saved else []),
        *_cost(of),
        Section(_title_of_plan(of), ("remat", "chunks", "needs", "evaluations"), list(_plans(of)), _notes(of)),
        _findings(of),
    ]


def _leaves(of: Facts) -> Iterator[Sequence[str]]:
    groups = (("carry", of.carry), ("x", of.x), ("y", of.y), ("constants", of.constants))
    for name, leaves in groups:
        for number, leaf in enumerate(leaves[:_MOST]):
            yield name if not number else "", leaf.path, leaf.type, f"{describe_bytes(leaf.bytes)}{_note(leaf, of)}"
        if leaves[_MOST:]:
            yield "", f"and {len(leaves) - _MOST} more", "", describe_bytes(_sum(leaves[_MOST:]))


def _note(leaf: Leaf, of: Facts) -> str:
    notes = [*([leaf.sharding] if leaf.sharding else []), *([] if leaf.changes else [f"no {of.unit} changes it"])]
    return f", {', '.join(notes)}" if notes else ""


def _sum(parts: Iterable[Any]) -> int:
    return sum(part.bytes for part in parts)


def _title_of_saved(of: Facts) -> str:
    return f"Saved by each {of.unit} for the gradient, if nothing is recomputed: {describe_bytes(_sum(of.saved))}"


def _saved(of: Facts) -> Iterator[Sequence[str]]:
    for each in of.saved[:_MOST]:
        (first, count), *others = collections.Counter(each.types).most_common()
        types = [f"{count} x {first}" if count > 1 else first]
        types += [f"{sum(number for _, number in others)} more"] if others else []
        operations = f", from {', '.join(each.operations)}" if each.operations else ""
        yield each.place, describe_bytes(each.bytes), f"{' and '.join(types)}{operations}"
    if of.saved[_MOST:]:
        yield f"{len(of.saved) - _MOST} more lines", describe_bytes(_sum(of.saved[_MOST:])), ""


def _cost(of: Facts) -> Iterator[Section]:
    text = (
        f"A {of.unit} takes {of.flops:,} FLOPs, or {of.operations:,} operations if a function such as `tanh` counts "
        "as a hundred."
    )
    if of.forward_bytes is not None and of.result_bytes is not None:
        text += (
            f" The forward pass needs {describe_bytes(of.forward_bytes)}, not counting its arguments and "
            f"{describe_bytes(of.result_bytes)} of results."
        )
    yield Section("", (), [], [text])


def _title_of_plan(of: Facts) -> str:
    sizes = " of ".join(f"{size:,}" for size in reversed(of.plan.sizes))
    chunks = f"chunks of {sizes} {of.unit}s" if sizes else "one loop"
    tiers = f"; rows in tiers of {', '.join(map(str, of.tiers))}" if of.tiers else ""
    return f"The gradient: {chunks}{tiers}"


def _plans(of: Facts) -> Iterator[Sequence[str]]:
    for plan in of.plans:
        if plan.bytes is not None:
            sizes = ", ".join(map(str, plan.sizes)) or "-"
            mark = " (this call)" if plan.used else ""
            yield f"{spelled(plan.remat)}{mark}", sizes, describe_bytes(plan.bytes), str(plan.evaluations)


def spelled(remat: Any) -> str:
    """A `remat` as the user would write it."""
    return f'"{remat}"' if isinstance(remat, str) else repr(remat)


def _notes(of: Facts) -> list[str]:
    plan: Plan = of.plan
    if plan.refusal is not None:
        return [f"There is none: {plan.refusal}"]
    return [
        "Needs: the memory, without arguments and results. Evaluations: how often each step runs, including the "
        "forward pass."
    ]


def _findings(of: Facts) -> Section:
    if not of.findings:
        return Section("No findings", (), [])
    notes = [f"More about them: python -m treescan explain {of.findings[0].code}"]
    return Section("Findings", ("", ""), [(each.code, _told(each)) for each in of.findings], notes)


def _told(finding: Finding) -> str:
    return f"{finding.says} {finding.cure}"
