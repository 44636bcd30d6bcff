"""How often a run reports for which the user gave no number of updates: a few times a second."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

INTERVAL = 0.2
"""The seconds from one report to the next."""

SHARE = 0.02
"""The part of the time that reports may take. If a meter is slow, it is told less often."""

GROWTH = 10
"""By which factor the steps that are done may grow between two reports: later steps may be slower than these."""

NEVER = 2**31 - 1
"""The steps after which the next report is due of a run that makes none."""


@dataclass
class Pace:
    """How fast a run is, from its last report to this one.

    Attributes:
        began: when the run began.
        since: when the last report had been shown; before the first, when the run began.
        done: the steps that were done then.
    """

    began: float = field(default_factory=time.monotonic)
    since: float = field(init=False)
    done: int = 0

    def __post_init__(self) -> None:
        self.since = self.began

    def due_of_the_next_run(self, done: int) -> int:
        """The steps after which the first report is due of the next run of the same loop, now that this one has ended.

        Args:
            done: the steps of this run.
        """
        return min(max(1, int(INTERVAL * done / max(time.monotonic() - self.began, 1e-9))), NEVER)

    def next_due(self, done: int, heard: float) -> int:
        """The steps after which the next report is due, now that this one was shown.

        Args:
            done: the steps that are done.
            heard: when this report came.
        """
        now = time.monotonic()
        interval = max(INTERVAL, (now - heard) / SHARE)
        further = int(interval * (done - self.done) / max(heard - self.since, 1e-9))
        self.since, self.done = now, done
        return min(done + max(1, further), max(1, GROWTH * done), NEVER)
