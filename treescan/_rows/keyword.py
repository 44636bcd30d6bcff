"""Keywords of the body that an option passes: what is fed for them is a leaf of x, with rows.

So padding is shown the keyword of the step whose carry and x it is shown, and `compact` selects its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .._avals import Array, PyTree
from .._loop.feed import Feed, Keyword
from .._loop.loop import Loop, Step
from .axes import RowAxes


class WithKeyword(NamedTuple):
    """The x of a step, and what it is fed for a keyword."""

    x: Any
    value: Array


@dataclass(frozen=True)
class PassKeyword:
    """The step that moves what is fed for a keyword from its x to the slot of the keyword."""

    step: Step
    keyword: Keyword

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        x, value = feed.x
        return self.step(consts, state, self.keyword.slot.put(feed._replace(x=x), value))


def pass_keyword(loop: Loop, axes: RowAxes, keyword: Keyword, resets: Array | None) -> tuple[Loop, RowAxes]:
    """The loop, fed what the keyword needs, and where its rows are."""
    x = WithKeyword(loop.xs.x, keyword.values(loop, resets))
    loop = loop.having(step=PassKeyword(loop.step, keyword), xs=loop.xs._replace(x=x))
    return loop, axes._replace(x=(*axes.x, 0))
