"""What a `Progress` shows of the carry beside the bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._avals import Array, PyTree, as_arrays, describe_argument, dtype_of, shape_of
from ..._body.carry import read_carries
from ..._errors import ArgumentError, ArgumentTypeError, Fault, Misuse, TreescanError, noted
from ..._loop.loop import Loop
from ..._tree import thaw_static
from .meters import (
    Progress,
    Site,
)


def expect_field(
    holds: object, field: str, kind: str, given: Any, cure: str, error: type[TreescanError] = ArgumentTypeError
) -> None:
    """Refuses a field of a `Progress` that is not of its kind."""
    if not holds:
        what = f"`{field}` of a `Progress` {kind}, got {describe_argument(given)}."
        raise Fault(error, f"{{call}}: {what}", cure)


SHOW = 'For example `show=lambda carry: {"loss": carry.loss}`.'


def check_shown(shown: Any) -> list[str]:
    """The names of the values that are printed beside a bar."""
    named = isinstance(shown, Mapping) and all(isinstance(name, str) for name in shown)
    expect_field(named, "show", "returns a dict from names to scalars", shown, SHOW, ArgumentError)
    for name, value in shown.items():
        dtype, kinds = dtype_of(value), (jnp.floating, jnp.integer, jnp.bool_)
        if shape_of(value) != () or dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
            raise Misuse(
                f"{{verb}} over {{body}}: `show` of a `Progress` returns a dict of scalars, but `{name}` is "
                f"{describe_argument(value)}.",
                f'Reduce it to one number: `{{"{name}": jnp.mean(...)}}`.',
            )
    return list(shown)


class Showing:
    """What is shown of a state beside the bar.

    Args:
        progress: what the user said.
        loop: whose state it is.
        custom: whether it holds custom carries.
    """

    def __init__(self, progress: Progress, loop: Loop, *, custom: bool) -> None:
        assert progress.label is not None and progress.meter is not None
        self._show, self._custom, self._carry_name = progress.show, custom, loop.names[0]
        self._carry_of = loop.carry_of
        names: list[str] = []
        if progress.show is not None:
            jax.eval_shape(lambda: names.extend(check_shown(self._shown(self._carry_of(as_arrays(loop.state))))))
        self.site = Site(progress.label, progress.meter, tuple(names))

    def __call__(self, state: PyTree) -> list[Array]:
        """The values."""
        return [] if self._show is None else self.of_carry(self._carry_of(as_arrays(state)))

    def of_carry(self, carry: PyTree) -> list[Array]:
        """The values that are shown of the user's carry."""
        if self._show is None:
            return []
        shown = self._shown(carry)
        return [jax.lax.stop_gradient(jnp.asarray(shown[name])) for name in self.site.shown]

    def _shown(self, carry: PyTree) -> Any:
        assert self._show is not None
        carry = thaw_static(carry)
        seen = read_carries(carry, self._carry_name) if self._custom else carry
        with noted("`show` of the `Progress`, called with the carry,"):
            return self._show(seen)
