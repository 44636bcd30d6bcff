"""One call of a verb: its static part, its arrays, and the loop that they make before any transform."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from .._avals import Array, PyTree
from .._body.call import CallBody, Shared
from .._body.signature import Convention
from .._loop.feed import Consts, Feed, Keyword
from .._loop.loop import Body, Callee, Loop, Lowering, Memo, in_turn

if TYPE_CHECKING:
    from .._rows.axes import RowFlags
    from .._until.end_early import Bounds


@dataclass(frozen=True)
class Call:
    """The arguments of a verb without the arrays. It is hashable, so it can be the key of a cache.

    Attributes:
        body: the body.
        convention: how it is called, and what it returns.
        length: the number of steps.
        reverse: whether to run from the last position to the first.
        unroll: as for `jax.lax.scan`.
        frozen: whether init, xs or args hold static leaves.
        custom: the classes of the custom carries that init holds.
        sees_valid: whether the body takes `valid`.
        keyword: another keyword that the body takes, or None.
        lowering: further keyword arguments of `jax.lax.scan`.
        others: the calls of blocks that take turns with this one, in order after it. The xs are then a tuple.
    """

    body: Body
    convention: Convention
    length: int
    reverse: bool = False
    unroll: int | bool = 1
    frozen: bool = False
    custom: tuple[type, ...] = ()
    sees_valid: bool = False
    keyword: Keyword | None = None
    lowering: tuple[tuple[str, Any], ...] = ()
    others: tuple[Call, ...] = ()

    @property
    def each(self) -> tuple[Call, ...]:
        """The calls that take turns."""
        return (self, *self.others)

    @property
    def programs(self) -> Memo:
        """What was compiled for the bodies of all calls together."""
        return self._joint(self.body.programs)

    def _joint(self, memo: Memo) -> Memo:
        return functools.reduce(Memo.joint, (call.body.function for call in self.others), memo)

    @property
    def names(self) -> tuple[str, str]:
        """The body's own names for its carry and its x."""
        return names_of(self.body, self.convention)

    def lay(self, given: Arguments) -> Loop:
        """The loop before any transform: it calls the body, on what the user gave.

        Blocks that take turns fold the key with the number of a layer among those of all blocks. Positions in the feed
        begin with 0 in any case: the step adds the offset.
        """
        if self.others:
            loops = list[Loop]()
            for place, call in enumerate(self.each):
                loop = dataclasses.replace(call, others=()).lay(given._replace(xs=given.xs[place]))
                if given.key is not None:
                    position = place + len(self.each) * jnp.arange(call.length)
                    loop = loop.having(xs=loop.xs._replace(position=position))
                loops.append(loop)
            return in_turn(loops, self._joint(self.body.memo))
        offset = None if given.key is None else given.offset
        shared = Shared(given.key, given.args, offset) if given.key is not None or given.args else None
        step = CallBody(self.body, self.convention, self.sees_valid, self.keyword, self.frozen, self.custom)
        return Loop(
            callee=Callee(self.body, step, self.names),
            step=step,
            consts=None if shared is None else Consts(inner=shared),
            state=given.init,
            xs=Feed(given.xs, position=jnp.arange(self.length) if given.key is not None else None),
            length=self.length,
            lowering=Lowering(self.reverse, self.unroll, self.lowering),
            given=Arguments(None, rows=given.rows, bounds=given.bounds, offset=given.offset),
        )


class Arguments(NamedTuple):
    """The arrays that a verb was given; static leaves of init, xs and args are frozen into their structure.

    Attributes:
        init: the carry that the first step is given.
        xs: what is scanned over.
        key: the loop's PRNG key.
        args: what every step is given beside its own.
        rows: what a masked scan was keyword of its rows.
        bounds: the range of indices of a `fori` with traced bounds.
        offset: int32[], the position of the first step, of a part of a longer loop; None: 0.
    """

    init: PyTree
    xs: PyTree = None
    key: Array | None = None
    args: tuple[PyTree, ...] = ()
    rows: RowFlags | None = None
    bounds: Bounds | None = None
    offset: Array | None = None


def names_of(body: Body, convention: Convention) -> tuple[str, str]:
    """The body's own names for its carry and its x."""
    if len(convention.takes) == 1:  # a function over chunks, without a carry
        return "carry", (body.names or convention.takes)[0]
    names = body.names if len(body.names) > 1 and body.names[0] != body.names[1] else convention.takes
    place = convention.place
    return names[place], names[1 - place]
