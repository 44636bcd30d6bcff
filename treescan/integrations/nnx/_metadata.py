"""Compares the static parts of variables: types and metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..._avals import describe_argument, describe_leaf
from ..._errors import Row


def differences(name: str, given: nnx.Variable[Any], now: nnx.Variable[Any]) -> list[Row]:
    """How two variables differ in type and metadata, under the name of the first."""
    if type(given) is not type(now):
        return [Row(name, type(given).__name__, type(now).__name__, "type")]
    old, new = given.get_metadata(), now.get_metadata()
    changed = [key for key in {**old, **new} if not (key in old and key in new and _same(old[key], new[key]))]
    return [Row(name, _entry(old, key), _entry(new, key), "metadata") for key in changed]


def _same(given: Any, now: Any) -> bool:
    try:
        return bool(given is now or given == now)
    except Exception:  # arrays, for example, whose `==` is no answer
        return False


def _entry(metadata: Mapping[str, Any], key: str) -> str:
    if key not in metadata:
        return f"(no {key})"
    value = metadata[key]
    return f"{key}={describe_leaf(value) if isinstance(value, tuple) else describe_argument(value)}"
