"""A meter that notes what it is told, and what each bar was told."""

import dataclasses
import itertools

import jax

import treescan
from treescan import Progress

LOG = []
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Recorder(treescan.AbstractProgressMeter):
    """Notes what it is told, with the number of the bar."""

    def init(self, label, total):
        bar = next(_numbers)
        LOG.append((bar, "init", label, total))
        return bar

    def step(self, bar, done, shown):
        LOG.append((bar, "step", done, dict(shown)))

    def close(self, bar):
        LOG.append((bar, "close"))


def bars(run):
    """What each bar was told, in the order in which they began: its total, (steps done, shown), whether it closed."""
    LOG.clear()
    jax.block_until_ready(run())
    jax.effects_barrier()
    found = {}
    for bar, kind, *rest in LOG:
        if kind == "init":
            found[bar] = (rest[1], [], [])
        elif kind == "step":
            assert not found[bar][2], "told after it was closed"
            found[bar][1].append(tuple(rest))
        else:
            found[bar][2].append("close")
    assert all(closed == ["close"] for _, _, closed in found.values())
    return [(total, steps) for total, steps, _ in found.values()]


def steps_of(run):
    """The steps that the only bar was told of, and its total."""
    ((total, steps),) = bars(run)
    return total, [done for done, _ in steps]


def progress(updates=4, **options):
    return Progress("loop", updates=updates, meter=Recorder(), **options)


def labels():
    """Those of the bars, in the order in which they began."""
    return [entry[2] for entry in LOG if entry[1] == "init"]
