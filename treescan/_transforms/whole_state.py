"""Steps that were traced already, on the whole state once more: the leaves that they do not change are in it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

from .._loop.body import Memo
from .._loop.loop import Feed, Loop, Step
from .._trace.hoist import Hoisted, merge
from .._types import PyTree


@dataclass(frozen=True)
class KeepUnchanged:
    """A step that was traced already, on the leaves of the whole state: those that it does not change go past it."""

    step: Step
    fixed: tuple[bool, ...]

    def __call__(self, consts: PyTree, state: list[Any], feed: Feed) -> tuple[list[Any], PyTree]:
        unchanged = [leaf for leaf, fixed in zip(state, self.fixed, strict=True) if fixed]
        changed = [leaf for leaf, fixed in zip(state, self.fixed, strict=True) if not fixed]
        changed, y = self.step((unchanged, consts), changed, feed)
        return merge(self.fixed, unchanged, changed), y


def in_whole_state(hoisted: Hoisted) -> Loop:
    """The loop that `hoist` made, with all leaves in its state."""
    _, inner = hoisted.loop.consts
    step = KeepUnchanged(hoisted.loop.step, hoisted.fixed)
    loop = dataclasses.replace(hoisted.loop, step=step, consts=inner, state=hoisted.settled, memo=Memo())
    return loop.finished(lambda leaves: jax.tree.unflatten(hoisted.structure, leaves))
