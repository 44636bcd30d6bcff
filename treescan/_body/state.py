"""A layer's state: splits the results of a block, and compares the new state with the given one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .._avals import describe_node
from .._errors import BodyError, CarryError, Cure, Fault
from .._loop.body import Body
from .._tree import Root, named_roots
from .._types import PyTree
from .carries import read_carries, without_carries, write_carries
from .conventions import Convention
from .differences import agree, find_differences, one_of_a_kind


class StateAndY(NamedTuple):
    """What a step returns beside its carry where layers have a state."""

    state: PyTree
    y: PyTree


named_roots(StateAndY, state=Root("state"), y=Root("y"))

_OF_STATE = {
    "an {init}": "an initial state",
    "{init}": "state",
    "{the_carry}": "the state",
    "{a_carry}": "a state",
}


def split_with_state(convention: Convention, out: Any) -> tuple[PyTree, PyTree, PyTree]:
    """The next carry, the layer's new state, and y.

    Raises:
        Fault: for a `BodyError` if the block returned something else.
    """
    parts = ("x", "state", "y") if convention.pair else ("x", "state")
    if isinstance(out, tuple | list) and not hasattr(out, "_fields") and len(out) == len(parts):
        carry, state, *y = out
        return carry, state, y[0] if y else None
    of_other = "(x, state)" if convention.pair else "(x, state, y)"
    raise Fault(
        BodyError,
        f"{{body}} must return ({', '.join(parts)}), but returned {describe_node(out)}.",
        f"With `state=`, each layer returns its new state after x: `return {', '.join(parts)}`. Return the parts "
        "that do not change, too.",
        f"A block of `treescan.{convention.other}` returns {of_other}.",
    )


class OwnState(NamedTuple):
    """The state of one layer, as its block is given it.

    Attributes:
        name: the block's own name for it.
        given: the state; its static leaves are thawed.
        seen: what the block sees: in the place of a custom carry what it shows.
        custom: whether there may be custom carries.
    """

    name: str
    given: PyTree
    seen: PyTree
    custom: bool

    @classmethod
    def read(cls, body: Body, given: PyTree, place: int, custom: bool) -> OwnState:
        """The state that is to be a body's argument in this place."""
        name = body.names[place] if len(body.names) > place else "state"
        copied = jax.tree.unflatten(
            jax.tree.structure(given), jax.tree.leaves(given)
        )  # the block may change containers
        return cls(name, given, read_carries(copied, name) if custom else copied, custom)

    def written(self, returned: PyTree) -> PyTree:
        """The new state, once it was compared with the one that the block was given, leaf by leaf.

        Raises:
            Fault: for a `CarryError` that lists all the leaves that differ.
        """
        kept, new = without_carries(self.given, returned) if self.custom else (self.given, returned)
        differences = [] if agree(kept, new) else list(find_differences(self.name, (), kept, new))
        if not differences:  # or structures that compare as different without a visible difference
            return write_carries(self.given, returned, None, self.name) if self.custom else returned
        raise Fault(
            CarryError,
            "{body} returned a state that differs from the one it was given.",
            *(Cure(_of_state(text), kind, leaf) for text, kind, leaf in one_of_a_kind(differences)),
            header=("leaf", "given", "returned"),
            rows=[difference.row for difference in differences],
        )


def _of_state(text: str) -> str:
    for words, of_state in _OF_STATE.items():
        text = text.replace(words, of_state)
    return text
