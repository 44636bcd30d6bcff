"""When a stage runs which micro-batch, and what goes in and comes out of all ticks together."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..._avals import Array, PyTree


@dataclass(frozen=True)
class Schedule:
    """The ticks of a pipeline. In each, every device runs its stage once, or nothing.

    Micro-batches come in groups: of as many as there are stages, or of one if there is one round. Micro-batch i of
    group g is in round r on stage s at tick `(g * rounds + r) * size + i + s`, where size is that of a group. So what
    arrives from the stage before is what a stage runs next, and nothing waits.

    Attributes:
        stages: the number of stages.
        rounds: how often a micro-batch comes past each of them.
        count: the number of micro-batches.
    """

    stages: int
    rounds: int
    count: int

    @property
    def ticks(self) -> int:
        """How many there are: those in which the first stage runs, and those until the last one is done."""
        return self.count * self.rounds + self.stages - 1

    @property
    def _size(self) -> int:
        return self.stages if self.rounds > 1 else 1

    @property
    def _groups(self) -> int:
        return self.count // self._size

    def at(self, tick: Array, stage: Array) -> tuple[Array, Array]:
        """Whether a stage runs at a tick, and in which round it is."""
        since = tick - stage
        return (since >= 0) & (since < self.count * self.rounds), since // self._size % self.rounds

    def fed(self, xs: PyTree) -> PyTree:
        """What the first stage is given at each tick, `[ticks, ...]`, from micro-batches. It takes it in round 0."""

        def of(leaf: Array) -> Array:
            groups = leaf.reshape(self._groups, 1, self._size, *leaf.shape[1:])
            again = jnp.broadcast_to(groups, (self._groups, self.rounds, *groups.shape[2:]))
            again = again.reshape(self.count * self.rounds, *leaf.shape[1:])
            rest = jax.lax.stop_gradient(jnp.broadcast_to(leaf[:1], (self.stages - 1, *leaf.shape[1:])))
            return jnp.concatenate([again, rest])

        return jax.tree.map(of, xs)

    def last(self, ys: PyTree) -> PyTree:
        """What the last stage returned in the last round, for each micro-batch, from what it returned at each tick."""

        def of(leaf: Array) -> Array:
            groups = leaf[self.stages - 1 :].reshape(self._groups, self.rounds, self._size, *leaf.shape[1:])
            return groups[:, -1].reshape(self.count, *leaf.shape[1:])

        return jax.tree.map(of, ys)
