"""An option of a stranger, as `options=[...]` takes it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from treescan.carries import Ema
from treescan.options import Option, Slot

from .example import Form


@dataclasses.dataclass(frozen=True)
class Faded(Option):
    """An option of a stranger: the state that each step receives is scaled by a number of its own."""

    SCALE: ClassVar[Slot[Any]] = Slot("works.scale", rows=False)

    def scales(self, length: int) -> Any:
        return jnp.cos(jnp.arange(length, dtype=jnp.float32) / 4)

    def __call__(self, step: Any, consts: Any, state: Any, feed: Any) -> Any:
        h, scale = state.h, self.SCALE.of(feed)
        h = dataclasses.replace(h, value=h.value * scale) if isinstance(h, Ema) else h * scale
        return step(consts, state._replace(h=h), feed)

    def feeds(self, length: int) -> Mapping[Slot[Any], Any]:
        return {self.SCALE: self.scales(length)}

    def plainly(self, state: Any, position: int) -> Any:
        """The state that the body is given at a position, by hand."""
        return state._replace(h=state.h * self.scales(position + 1)[position])


OWN = {"options": Form("options", {"options": [Faded()]})}
