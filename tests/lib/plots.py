"""What pictures ask of matplotlib, which need not be there."""

from collections.abc import Callable
from typing import Any


class Axes:
    """Axes that note what they are called with, by name."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[Any, ...]]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: self.calls.setdefault(name, []).append(args)
