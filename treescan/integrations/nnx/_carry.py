"""nnx modules, optimizers, metrics and rngs as carries, whose shared parts stay shared.

A module is a pytree, but a pytree cannot express that two of its parts are the same object. Carried as a plain pytree,
tied weights would come apart in the first step. So `nnx.split` and `nnx.merge` split a carried module into its graph
and its state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from ..._errors import Row
from ..._types import Array, PyTree
from ...carries._base import AbstractCarry
from ...carries._registry import register_carry
from ._metadata import differences
from ._named import variables_in


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModuleCarry(AbstractCarry[Any, Any]):
    """An nnx module in the loop. The body sees the module, may change its variables, and returns it.

    All rows of a `mask_scan` share it. It is updated in steps in which any row is valid.

    Attributes:
        state: its variables.
        graph: everything else, which is the same in every step.
    """

    state: PyTree
    graph: Any = field(metadata={"static": True})

    def read(self) -> Any:
        """The module."""
        return nnx.merge(self.graph, self.state)

    def write(self, returned: Any, valid: Array | None) -> ModuleCarry:
        """The variables of the module that was returned."""
        if not isinstance(returned, nnx.Pytree):
            raise TypeError(f"the step returned a {type(returned).__name__} instead of the module that it was given")
        graph, state = nnx.split(returned)
        if graph != self.graph:
            raise TypeError(
                "the module that the step returned has another structure: "
                + "".join(
                    f"{row.leaf} had {row.expected}, now {row.came}. " for row in _differences(self.read(), returned)
                )
                + "Submodules, variables, their metadata and settings must be the same in every step. Create all of "
                "them before the scan"
            )
        return ModuleCarry(state, self.graph)

    def rows(self) -> None:
        """Shared by all rows."""
        return None


def _differences(given: Any, now: Any) -> list[Row]:
    """What became of the variables that both modules have."""
    old, new = (dict(variables_in(module)) for module in (given, now))
    both = [path for path in old if path in new]
    return [row for path in both for row in differences(".".join(map(str, path)), old[path], new[path])]


def _to_carry(module: Any) -> ModuleCarry:
    graph, state = nnx.split(module)
    return ModuleCarry(state, graph)


register_carry(nnx.Pytree, _to_carry, ModuleCarry.read)
