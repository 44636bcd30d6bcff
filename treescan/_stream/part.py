"""`Part`: what a stream gives of each of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from .._errors import Misuse, explain
from .._reprs import short_html, short_repr
from .._types import Carry, Y


@dataclass(frozen=True, repr=False)
class Part(Generic[Carry, Y]):
    """A part of a stream that has run.

    Attributes:
        start: the position of its first step in the whole run. With `reverse=True`, parts come from the last one on.
        length: the number of its steps.
        ys: the outputs of its steps, `[length, ...]`; with `save="last"`, the last output so far.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(total, x):
        ...     return total + x, total
        >>> parts = treescan.stream_parts(
        ...     step, jnp.float32(0), jnp.arange(5.0), chunk=2
        ... )
        >>> for part in parts:
        ...     print(part.start, part.ys, part.carry)
        0 [0. 0.] 1.0
        2 [1. 3.] 6.0
        4 [6.] 10.0
    """

    start: int
    length: int
    ys: Y
    _carry: Carry | None = None
    _is_donated: bool = False

    @property
    def carry(self) -> Carry:
        """The carry after the last of its steps.

        Raises:
            ArgumentError: with `donate=True`, as its memory is that of the next carry.
        """
        if self._is_donated:
            says = f"{{verb}}: the carry of the part at step {self.start} was donated to the next part."
            raise explain(
                Misuse(says, "Leave `donate=True` out to read carries. A second one is then in memory."), "carry"
            )
        carry: Any = self._carry
        return carry

    def _shown(self) -> dict[str, Any]:
        carry = {} if self._is_donated else {"carry": self._carry}
        return {"start": np.asarray(self.start), "length": np.asarray(self.length), "ys": self.ys, **carry}

    def __repr__(self) -> str:
        return short_repr("Part", **self._shown())

    def _repr_html_(self) -> str:
        return short_html("Part", **self._shown())
