"""`Remat`: how much the gradient recomputes instead of saving it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, repr=False)
class Remat:
    """What the gradient of a loop saves, and what it recomputes: an option of the verbs, `remat=Remat(levels=3)`.

    A loop of T steps in L levels is cut into nested chunks of about `T**(1/L)` parts each. The gradient saves the
    carry before each part of one level at a time, about `L * T**(1/L)` carries, and evaluates each step once more for
    each level. Any length will do; results do not depend on the plan beyond rounding, and forward mode stays possible.

    `"step"` is short for `Remat()`, `"nested"` for `Remat(levels=2)`. Chunks that save whole steps
    (`policy="everything_saveable"`) compute the products of their steps with shared weights at once.

    Attributes:
        policy: what of each step is saved beside its carry: a policy of `jax.checkpoint_policies` or its name, such as
            `"dots_saveable"`. None: nothing. `"everything_saveable"` leaves the steps alone: with several levels the
            innermost chunks then save all of their steps, and no step is evaluated a last time.
        levels: into how many levels the loop is cut. None: 1, or 2 where a segment is given.
        segment: the number of steps of an innermost chunk. None: chosen for T.
        offload: where the carries of the outermost level are kept until the gradient needs them: a memory kind of the
            device, such as `"pinned_host"`. None: where they are. A CPU warns that it changes nothing.
        budget: the bytes that the gradient may need, where `Remat.fit` is to choose the plan.
    """

    policy: str | Callable[..., Any] | None = None
    levels: int | None = None
    segment: int | None = None
    offload: str | None = None
    budget: int | None = None

    def __repr__(self) -> str:
        given = [(name, value) for name, value in vars(self).items() if value is not None]
        return f"Remat({', '.join(f'{name}={_shown(value)}' for name, value in given)})"

    @classmethod
    def fit(cls, budget: int) -> Remat:
        """The plan with the fewest evaluations of the body whose gradient needs no more bytes than a budget.

        Which one that is depends on the body and on the number of steps: `treescan.plan_remat` shows it. Counted is
        all that the loop's gradient needs beside its arguments and results: what is saved, what levels copy of xs and
        of gradients, and what one step needs while its own gradient is computed. That is what
        `memory_analysis().temp_size_in_bytes` of the compiled gradient says, within 15 %; so a plan is taken only where
        5 % are to spare.

        Args:
            budget: how many bytes, of all devices together.
        """
        return cls(budget=budget)


def _shown(value: Any) -> str:
    """A field as one would write it: a policy of JAX by its name."""
    if callable(value):
        names = [name for name in dir(jax.checkpoint_policies) if getattr(jax.checkpoint_policies, name) is value]
        value = names[-1] if names else getattr(value, "__name__", value)  # `dots_saveable` has an older name too
    return f'"{value}"' if isinstance(value, str) else repr(value)
