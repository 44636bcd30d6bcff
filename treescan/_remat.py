"""`Remat`: how much the gradient recomputes instead of saving it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ._text import named_fields


@named_fields
@dataclass(frozen=True, repr=False)
class Remat:
    """A plan of what the gradient of a loop saves and recomputes, for the option `remat` of the verbs.

    A loop of T steps in L levels is cut into nested chunks of about `T**(1/L)` parts each. The gradient saves the
    carry before each part of one level at a time, about `L * T**(1/L)` carries, and evaluates each step once more per
    level. Any length works. Results do not depend on the plan, except for rounding. Forward mode works too.

    `"step"` is short for `Remat()`, `"nested"` for `Remat(levels=2)`. Chunks that save whole steps
    (`policy="everything_saveable"`) compute the gradient of shared weights with one product per chunk.

    Attributes:
        policy: what each step saves besides its carry: a policy of `jax.checkpoint_policies` or its name, for example
            `"dots_saveable"`. None: nothing. With `"everything_saveable"` and several levels, the innermost chunks save
            all of their steps, so each step is evaluated once less.
        levels: the number of levels. None: 1, or 2 if a segment is given.
        segment: the number of steps in an innermost chunk. None: chosen for T.
        offload: the memory kind of the device, for example `"pinned_host"`, that keeps the carries of the outermost
            level until the gradient needs them. None: device memory. A CPU warns that it changes nothing.
        budget: the bytes that the gradient may need, if `Remat.fit` chooses the plan.
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
        """Picks the plan with the fewest evaluations of the body that fits a budget of bytes.

        The choice depends on the body and on the number of steps; `treescan.plan_remat` shows it. The budget covers the
        memory of the loop's gradient without its arguments and results: what is saved, the copies that levels make of
        xs and of gradients, and what the gradient of one step needs. This
        estimates `memory_analysis().temp_size_in_bytes` of the compiled gradient. A plan must fit with 5 % to spare.

        Args:
            budget: the number of bytes, of all devices together.
        """
        return cls(budget=budget)


def _shown(value: Any) -> str:
    """A field as one would write it: a policy of JAX by its name."""
    if callable(value):
        names = [name for name in dir(jax.checkpoint_policies) if getattr(jax.checkpoint_policies, name) is value]
        value = names[-1] if names else getattr(value, "__name__", value)  # `dots_saveable` has an older name too
    return f'"{value}"' if isinstance(value, str) else repr(value)
