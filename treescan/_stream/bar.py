"""The bar of a stream: one for the whole run, which the host moves after each part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._avals import Array, PyTree
from .._body.carry import read_carries
from .._errors import Misuse
from .._loop.loop import Body
from .._progress import RUNS, Progress, Report, Site
from .._transforms.progress import check_progress, check_shown
from ..carries._registry import adopt


class Bar:
    """Shows how far a stream is.

    Args:
        progress: what the user said, with a label and a meter.
    """

    def __init__(self, progress: Progress) -> None:
        assert progress.label is not None and progress.meter is not None
        for name, why in {
            "backward": "no gradient flows through a stream.",
            "batched": "a stream cannot be mapped.",
            "updates": "a stream moves its bar after each part.",
        }.items():
            if getattr(progress, name):
                raise Misuse(f"{{call}}: `{name}` of a `Progress` has no meaning here: {why}", "Leave it out.")
        self._show = progress.show
        self._site = Site(progress.label, progress.meter)

    def values(self, carry: PyTree) -> dict[str, Array]:
        """The values to show of a carry."""
        if self._show is None:
            return {}
        shown: Any = self._show(read_carries(adopt(carry).init, "carry"))
        return {name: jnp.copy(shown[name]) for name in check_shown(shown)}  # the carry itself may be donated

    @contextlib.contextmanager
    def shown(self, done: int, total: int | None) -> Generator[Callable[[int, Mapping[str, Array]], None]]:
        """Shows the bar; gives what moves it."""
        number = RUNS.begin(self._site, total)

        def move(done: int, shown: Mapping[str, Array]) -> None:
            values = {name: np.asarray(value).item() for name, value in shown.items()}
            RUNS.step(self._site, number, Report(total, done, first=False, last=False), values)

        try:
            if done:
                move(done, {})
            yield move
        finally:
            RUNS.end(number)


def bar_of(progress: Any, step: Any) -> Bar | None:
    """The bar that the user asked for, on the first process; None: nothing is shown.

    Raises:
        Fault: for an `ArgumentError` if it cannot be had.
    """
    checked = check_progress(progress, Body.of(step), "stream")
    bar = None if checked is None else Bar(checked)
    return None if jax.process_index() else bar
