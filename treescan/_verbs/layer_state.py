"""Checks of `state`, what each layer of a stack reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from .._avals import describe_leaf, is_weak, shape_of
from .._data.split import refuse_split
from .._errors import Fault, LayerError, Row
from .._tree import freeze_static, leaves_with_path, thaw_static
from .._types import PyTree
from ..carries._registry import Adopted, adopt
from .layer_arguments import Stacks, one_each


@dataclass(frozen=True, eq=False)
class LayerStates:
    """Stacks of the layers' states, one for each block.

    Attributes:
        stacks: the stacks; static leaves are frozen.
        adopted: for each the values in it that became custom carries.
        kind: the class of the sequence that the user gave them in; None: a single one.
    """

    stacks: tuple[PyTree, ...]
    adopted: tuple[Adopted, ...]
    kind: type | None

    @property
    def custom(self) -> tuple[type, ...]:
        """The classes of the custom carries in them."""
        return tuple(kind for adopted in self.adopted for kind in adopted.custom)

    @property
    def frozen(self) -> bool:
        """Whether they hold static leaves."""
        return any(stack is not each.init for stack, each in zip(self.stacks, self.adopted, strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of leaves in each."""
        return tuple(len(jax.tree.leaves(stack)) for stack in self.stacks)

    def restored(self, stacks: tuple[PyTree, ...]) -> PyTree:
        """What the user is given back, in the form of what they gave."""
        back = [adopted.restore(thaw_static(stack)) for adopted, stack in zip(self.adopted, stacks, strict=True)]
        return back[0] if self.kind is None else self.kind(back)


def check_state(state: PyTree, stacks: Stacks) -> LayerStates | None:
    """Checks that the states fit the stacks of layers; None if there are no states.

    Raises:
        Fault: for a `LayerError` that lists all the leaves in question.
    """
    if state is None:
        return None
    given = one_each(stacks.blocks, state, "state") if stacks.sequence else (state,)
    names = [f"state[{i}]" for i in range(len(given))] if stacks.sequence else ["state"]
    adopted = tuple(adopt(tree, name) for tree, name in zip(given, names, strict=True))
    frozen = [freeze_static(each.init) for each in adopted]
    for tree, name, count in zip(frozen, names, stacks.counts, strict=True):
        _check_stack(tree, name, count)
    return LayerStates(tuple(map(_strong, frozen)), adopted, type(state) if stacks.sequence else None)


def _check_stack(state: PyTree, name: str, count: int) -> None:
    named = leaves_with_path(name, state)
    sizes = [(shape_of(leaf) or ("none",))[0] for _, leaf in named]
    rows = [
        Row(path, str(size), describe_leaf(leaf), "")
        for (path, leaf), size in zip(named, sizes, strict=True)
        if size != count
    ]
    if rows:
        raise Fault(
            LayerError,
            f"{{call}}: `{name.replace('state', 'layers')}` holds {count} layers, but leaves of `{name}` have a "
            "different number.",
            "Each layer receives its own slice of the state, and returns it. So the first axis of every leaf must "
            "be the layers. Pass a state that all layers share through x.",
            header=("leaf", "layers", "is"),
            rows=rows,
        )
    refuse_split(named)


def _strong(state: PyTree) -> PyTree:
    """The state with types that no layer promotes. A tree whose leaves have such comes back unchanged."""
    if not any(map(is_weak, jax.tree.leaves(state))):
        return state
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype) if is_weak(leaf) else leaf, state)
