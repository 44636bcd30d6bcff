"""Replaces the (state, x) of an element of a `vmap` that has stopped by one on which the body is known to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ..._loop.loop import Feed, Loop, Step
from ..._tree import Prefix
from ..._types import Array
from ..rows.good_pairs import GoodPair
from ..rows.lend import choose_own, lend, lend_to_elements
from ..rows.mask import Masked


@dataclass(frozen=True)
class _Unflagged:
    """The step that does not tell another which steps are taken."""

    step: Step

    def __call__(self, consts: Any, state: list[Any], feed: Feed) -> tuple[list[Any], Any]:
        return self.step(consts, state, feed._replace(valid=None))


def masked_step(loop: Loop, fill: Prefix) -> Step:
    """The step of a loop that knows which steps are taken, and shows the body good values in all others."""
    state, x = (len(jax.tree.leaves(tree)) for tree in (loop.state, loop.xs.x))
    unchanged, _ = loop.consts
    return Masked(_Unflagged(loop.step), (0,) * state, (None,) * len(unchanged), (0,) * x, Prefix.of(0), fill)


def good_pair(loop: Loop, have: Array, *, lifted: bool = True) -> tuple[GoodPair, Any, list[Array]]:
    """What elements that have stopped are shown: their first state and x; those that never start borrow them.

    Args:
        loop: the loop.
        have: bool[], whether any step is taken.
        lifted: whether its consts hold what the body closes over.

    Returns:
        The pair; the consts, borrowed as well; and for each of their leaves whether it is the element's own.
    """
    unchanged, _ = loop.consts
    first = -1 if loop.reverse else 0
    xs = [jax.lax.index_in_dim(leaf, first % loop.length, keepdims=False) for leaf in jax.tree.leaves(loop.xs.x)]
    pair = GoodPair(loop.state, [None] * len(unchanged), xs)
    unchanged, inner = loop.consts
    closed, inner = inner if lifted else ([], inner)
    (pair, *lent), own = lend(have, jax.lax.stop_gradient((pair, unchanged, inner)))
    own = own[len(jax.tree.leaves(pair)) :]
    lent_closed, own_closed = lend_to_elements(have, jax.lax.stop_gradient(closed))  # see `lend_closed`
    own = [*own[: len(unchanged)], *own_closed, *own[len(unchanged) :]]
    theirs = lent[0], (lent_closed, lent[1]) if lifted else lent[1]
    return jax.lax.stop_gradient(pair), choose_own(loop.consts, theirs, own), own
