"""Draws what the gradient needs under each plan."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from .._errors import ArgumentError, Fault
from .._transforms.budget import describe_bytes
from .facts import Plan
from .sections import spelled

_USED, _OTHER = "tab:blue", "lightgray"


def plot_plans(title: str, plans: Sequence[Plan], ax: Any) -> Any:
    """Bars of the bytes of each plan, in matplotlib's axes.

    Raises:
        Fault: for an `ArgumentError` if matplotlib is not installed, or no plan has a gradient.
    """
    plans = [plan for plan in plans if plan.bytes is not None]
    if not plans:
        raise Fault(ArgumentError, "{verb} draws the memory that the gradient needs, but this call has no gradient.")
    if ax is None:
        ax = _pyplot().subplots(figsize=(7, 0.6 + 0.5 * len(plans)), layout="constrained")[1]
    names = [f"{spelled(plan.remat)}\n{plan.evaluations} evaluations" for plan in plans]
    bars = ax.barh(names, [plan.bytes for plan in plans], color=[_USED if plan.used else _OTHER for plan in plans])
    ax.bar_label(bars, [describe_bytes(plan.bytes or 0) for plan in plans], padding=3)
    ax.margins(x=0.2)
    ax.invert_yaxis()
    ax.set_xlabel("bytes that the gradient needs")
    ax.set_xticks([])
    ax.set_title(title.replace("`", ""))
    return ax


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise Fault(
            ArgumentError,
            "{verb} needs matplotlib, which is not installed.",
            "Install it: `pip install matplotlib`. Or print the description, which shows the same numbers.",
        ) from None
