"""`progress` of a verb over layers: one bar for the layers of all blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._errors import ArgumentError, Fault
from ..._loop.body import Body
from ..._loop.loop import Loop
from ..._loop.reports import Reporter, Tick, probes_of
from ..._loop.sizes import Wish
from ..._progress import FEW
from ..._types import Array, ProgressLike, PyTree
from ..progress import Showing, ShowProgress, TellChunks
from ..refuse import refuse_symbolic


@dataclass(frozen=True)
class ShowX:
    """Values of x, where the state is (x, stacks of the layers' own states, number of the layer)."""

    show: Callable[[Any], Mapping[str, Any]]

    def __call__(self, state: Any) -> Mapping[str, Any]:
        return self.show(state[0])


def of_x(shown: ShowProgress | None, x_of: Callable[[Any], Any]) -> ShowProgress | None:
    """The same for a loop whose state `x_of` makes x of."""
    if shown is None or shown.progress.show is None:
        return shown
    show = shown.progress.show
    progress = dataclasses.replace(shown.progress, show=lambda state: show(x_of(state)))
    return dataclasses.replace(shown, progress=progress)


def beside_states(shown: ShowProgress | None) -> ShowProgress | None:
    """The same for a loop that carries the layers' own states beside x."""
    if shown is None or shown.progress.show is None:
        return shown
    return dataclasses.replace(shown, progress=dataclasses.replace(shown.progress, show=ShowX(shown.progress.show)))


@dataclass(frozen=True, eq=False)
class LayersBar:
    """The bar of several loops that take turns.

    Attributes:
        reporter: reports.
        showing: what is shown of the state of all loops.
        updates: the most reports of the rounds.
        run: the number of the run.
        total: how many layers there are.
        rounds: how many rounds there are.
        blocks: how many layers a round has.
        left: whether layers are left after the rounds.
    """

    reporter: Reporter
    showing: Showing
    updates: int
    run: Array
    total: Array
    rounds: int
    blocks: int
    left: bool

    @classmethod
    def begin(cls, shown: ShowProgress, loops: Sequence[Loop]) -> LayersBar:
        """A new run."""
        first, progress = loops[0], shown.progress
        refuse_symbolic(first.length, "progress", "layers")
        showing = Showing(progress, first, custom=shown.custom)
        reporter = Reporter(showing.site, progress.batched)
        given = [(loop.consts, loop.xs.x) for loop in loops]
        probes = probes_of(*jax.tree.leaves((first.state, given))) if progress.batched else probes_of(first.state)
        total = jnp.int32(sum(loop.length for loop in loops))
        rounds = loops[-1].length
        left = not rounds or (first.length > rounds and not first.reverse)
        run = reporter.begin(total, probes)
        return cls(reporter, showing, progress.updates or FEW, run, total, rounds, len(loops), left)

    def wish(self, restore: Callable[[PyTree], PyTree]) -> Wish:
        """What is wished of the loop of rounds; `restore` makes the state of all loops from its own."""
        live = jnp.full(self.rounds, self.blocks, jnp.int32)
        showing = self.showing.through(restore)
        tell = TellChunks(self.reporter, None, showing, self.run, self.total, live, more=self.left)
        return Wish(-(-self.rounds // self.updates), ticks=tell)

    def end(self, state: PyTree) -> None:
        """The last layer has run. It may have been the last of the rounds, which then said so."""
        if not self.left:
            return
        false = jnp.zeros((), bool)
        tick = Tick(self.run, self.total, self.total, false, ~false)
        self.reporter.step(tick, self.showing(state), probes_of(state))


def check_shown(
    progress: ProgressLike, bodies: Sequence[Body], verb: str, *, custom: bool, ahead: bool
) -> ShowProgress | None:
    """How a verb over layers shows its progress, named as its first block is; None: it does not.

    Raises:
        Fault: for an `ArgumentError` if weights are gathered ahead, or if several blocks are to have a bar backwards.
    """
    shown, blocks = ShowProgress.of(progress, bodies[0], verb, custom=custom), len(bodies)
    if shown is not None and ahead:
        raise Fault(
            ArgumentError,
            "{call}: a loop with `prefetch` shows no `progress`: it is not cut into chunks.",
            "Leave out one of the two.",
        )
    if shown is not None and shown.progress.backward and blocks > 1:
        raise Fault(
            ArgumentError,
            f"{{call}}: `backward=True` of a `Progress` is for one block, and these are {blocks} that take turns.",
            "Leave it out.",
        )
    return shown
