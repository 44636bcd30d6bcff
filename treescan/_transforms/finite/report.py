"""`FiniteReport`: what `check_finite="return"` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._avals import Array
from ..._errors import Fault, NonFiniteError, TracedArgumentError, named_options
from ..._reprs import short_repr
from .case import Case, Evidence
from .check import deliver
from .site import GOOD


class FiniteReport(NamedTuple):
    """What a loop with `check_finite="return"` found: a pytree of arrays, as other results are.

    It contains the carry before and after the first bad step, and the x of that step; zeros if there is none. Under
    `jax.vmap`, each leaf has an entry for each element.

    Attributes:
        ok: bool[], whether no step went wrong.
        step: int32[], the position of the first step that did; -1 if there is none.
        found: what `check` reads.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> @jax.jit
        ... def run(xs):
        ...     return treescan.fold(
        ...         lambda h, x: jnp.log(h + x), 1.0, xs, check_finite="return"
        ...     )
        >>> h, report = run(jnp.array([1.0, 2.0, -9.0]))
        >>> print(report.ok, report.step)
        False 2
        >>> try:
        ...     report.check()
        ... except treescan.NonFiniteError:
        ...     print(treescan.last_nonfinite().operation)
        log
    """

    ok: Array
    step: Array
    found: tuple[tuple[Evidence, Case], ...]

    def __repr__(self) -> str:
        return short_repr("FiniteReport", ok=self.ok, step=self.step)

    @classmethod
    def of(cls, found: Sequence[tuple[Evidence, Case]]) -> FiniteReport:
        """The report of what is known of the first bad step, of each body that may have run it."""
        step = jnp.int32(-1)
        for evidence, _ in found:
            step = jnp.where(evidence.first == GOOD, step, evidence.position)
        return cls(step < 0, step, tuple(found))

    @named_options
    def check(self) -> None:
        """Raises the error of the first bad step, as `check_finite=True` does, and notes it for `last_nonfinite`.

        Of a batch of reports, the first element that is not ok raises.

        Raises:
            ArgumentError: if the values are traced: call it outside of `jax.jit`.
            NonFiniteError: if a step went wrong.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(self)):
            raise Fault(
                TracedArgumentError,
                "{verb} needs values, but those of the report are traced.",
                "Return the report from the function that JAX traces, and check it outside. Within, `report.ok` is an "
                "array.",
            )
        bad = np.argwhere(~np.asarray(self.ok))
        if not len(bad):
            return
        place = tuple(bad[0].tolist())
        try:
            deliver(jax.tree.map(lambda leaf: leaf[place], self.found))
        except Fault as fault:
            if place:
                raise Fault(
                    NonFiniteError,
                    fault.says,
                    f"This is element {list(place)} of a batch of reports, of which {len(bad)} of {self.ok.size} are "
                    "not ok.",
                    *fault.cures,
                ) from None
            raise
