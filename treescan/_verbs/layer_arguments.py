"""Checks of the arguments of the verbs over layers: blocks, stacks, and arguments per layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._avals import describe_argument, describe_leaf, describe_node, is_mutable, shape_of
from .._axes import LeafAxes
from .._checks.arguments import check_length, no_axis, resolve_axes
from .._data.boxes import remove_layer_axis
from .._data.shared import freeze_shared, is_traced_number
from .._data.split import refuse_split
from .._data.stack import count_layers
from .._errors import ArgumentError, Fault, LayerError, Row
from .._remat import Remat
from .._transforms.layers.gather import Gather
from .._transforms.layers.prefetch import EACH_LAYER
from .._transforms.layers.turns import Remats, Saves
from .._transforms.outputs import check_save
from .._transforms.remat import check_remat
from .._tree import freeze_static, is_static, leaves_with_path
from .._types import Axes, PyTree, Save


class Stacks(NamedTuple):
    """Blocks with what their layers are made of; static leaves are frozen.

    Attributes:
        blocks: the blocks.
        layers: a stack for each.
        xs: for each what its layers have of their own, or None.
        counts: how many layers each stack holds.
        axes: for each the axis of every leaf of its (layers, xs) that is scanned over, or None: axis 0 for all.
        sequence: whether the user gave a sequence.
        frozen: whether there are static leaves.
    """

    blocks: tuple[Callable[..., Any], ...]
    layers: tuple[PyTree, ...]
    xs: tuple[PyTree, ...]
    counts: tuple[int, ...]
    axes: tuple[LeafAxes | None, ...]
    sequence: bool
    frozen: bool

    def arguments(self, own: list[bool], states: tuple[PyTree, ...] | None) -> tuple[tuple[PyTree, ...], ...]:
        """What each block is given of its own: layers, where flagged xs, and its state if there are any."""
        last = [()] * len(own) if states is None else [(state,) for state in states]
        each = zip(self.layers, self.xs, own, last, strict=True)
        return tuple((stack, *((x,) if flag else ()), *state) for stack, x, flag, state in each)


def is_pattern(block: Any) -> bool:
    """Whether a block is a sequence of several. A tuple that can be called is one block."""
    return isinstance(block, list | tuple) and not callable(block)


def check_stacks(block: Any, layers: PyTree, xs: PyTree, in_axes: Axes, length: int | None = None) -> Stacks:
    """Checks that blocks, stacks and xs fit together. `length` is for layers that have no parameters of their own.

    Raises:
        Fault: for a `LayerError` that lists all the leaves in question.
    """
    sequence = is_pattern(block)
    blocks, names = ((block,), ("",)) if not sequence else _several(block)
    stacks: tuple[PyTree, ...] = (layers,)
    own: tuple[PyTree, ...] = (xs,)
    own_axes: tuple[Axes, ...] = (in_axes,)
    if sequence:
        stacks = one_each(blocks, layers, "layers")
        own = (None,) * len(blocks) if xs is None else one_each(blocks, xs, "xs")
        is_given = isinstance(in_axes, list | tuple)
        own_axes = one_each(blocks, in_axes, "in_axes") if is_given else (in_axes,) * len(blocks)
    given, (stacks, own) = (*stacks, *own), (tuple(map(freeze_shared, stacks)), tuple(map(freeze_static, own)))
    frozen = any(before is not after for before, after in zip(given, (*stacks, *own), strict=True))
    length = check_length(length)
    counts = tuple(_count(stack, f"layers{name}", length) for stack, name in zip(stacks, names, strict=True))
    for stack, name in zip(stacks, names, strict=True):
        refuse_split(leaves_with_path(f"layers{name}", stack), _axes_of(stack))
    _check_pattern(counts)
    named = zip(stacks, names, strict=True)
    stacks = tuple(remove_layer_axis(stack, f"layers{name}") for stack, name in named)
    parts = zip(stacks, own, own_axes, counts, names, strict=True)
    axes = tuple(_check_own(stack, x, axis, count, name) for stack, x, axis, count, name in parts)
    return Stacks(blocks, stacks, own, counts, axes, sequence, frozen)


def _count(stack: PyTree, root: str, length: int | None) -> int:
    """How many layers a stack holds, or is said to hold."""
    if length is None and stack is None:
        raise Fault(
            LayerError,
            f"{{call}}: the number of layers is unknown. `{root}` is None.",
            "A stack is a pytree of arrays whose first axis is the layers: `treescan.stack` makes one of a list of "
            "layers.",
            "Layers without parameters of their own, which share one set in `args`, need `length=`.",
        )
    if length is None:
        return count_layers(stack, root)
    count = count_layers(stack, root) if jax.tree.leaves(stack) else length
    if count != length:
        raise Fault(
            LayerError,
            f"{{call}}: `length` is {length}, but `{root}` holds {count} layers.",
            "Leave `length` out: it is for layers without parameters of their own, which share one set in `args`.",
        )
    return count


def _several(blocks: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The blocks of a pattern, and how each item of a sequence for them is written."""
    if not blocks:
        raise Fault(LayerError, "{verb}: the sequence of blocks is empty.", "Give at least one block, and its stack.")
    return tuple(blocks), tuple(f"[{i}]" for i in range(len(blocks)))


def one_each(blocks: tuple[Any, ...], given: Any, name: str) -> tuple[Any, ...]:
    """A sequence with one item for each block."""
    error = LayerError if name in ("layers", "xs", "state") else ArgumentError
    if not isinstance(given, list | tuple) or hasattr(given, "_fields"):
        raise Fault(
            error,
            f"{{call}}: there are {len(blocks)} blocks, but `{name}` is not a sequence: it is {describe_node(given)}.",
            f"Give one item for each block: `({name}_0, {name}_1, ...)`.",
        )
    if len(given) != len(blocks):
        raise Fault(
            error,
            f"{{call}}: there are {len(blocks)} blocks, but `{name}` has {len(given)} item{'s'[: len(given) != 1]}.",
            "Give one item for each block. If a block has several turns in a period, repeat it.",
        )
    return tuple(given)


def _check_pattern(counts: tuple[int, ...]) -> None:
    """Refuses stacks whose blocks cannot take turns."""
    fewest = counts[-1]
    leading = sum(count == fewest + 1 for count in counts)
    if not any(counts):
        raise Fault(LayerError, "{call}: there are no layers: every stack is empty.", "Give at least one layer.")
    if counts != (fewest + 1,) * leading + (fewest,) * (len(counts) - leading):
        raise Fault(
            LayerError,
            "{call}: the stacks do not make a pattern.",
            "Blocks take turns: the first layer of each, the second of each, and so on. So all stacks need the same "
            "number of layers. Only if the last period is not full, the first stacks have one layer more.",
            header=("stack", "layers"),
            rows=[Row(f"layers[{i}]", str(count), "", "") for i, count in enumerate(counts)],
        )


def _check_own(layers: PyTree, xs: PyTree, in_axes: Axes, count: int, name: str) -> LeafAxes | None:
    """The axes of the leaves of one block's (layers, xs), once they are found to fit.

    Raises:
        Fault: for a `LayerError` if the leaves of xs do not have as many layers.
    """
    root = f"xs{name}"
    if xs is None and not (type(in_axes) is int and in_axes == 0) and not name:
        raise Fault(
            ArgumentError,
            "{call}: `in_axes` is for xs, but there are none.",
            "Layers are scanned along axis 0 of their stack. Pass other inputs of each layer as `xs`.",
        )
    axes = resolve_axes(in_axes, xs, root)
    named = leaves_with_path(root, xs)
    rows = [
        Row(path, "none" if size is None else str(size), describe_leaf(leaf), "" if axis is None else f"axis {axis}")
        for (path, leaf), axis in zip(named, axes or (0,) * len(named), strict=True)
        if axis is not None and (size := _size(leaf, axis)) != count
    ]
    if rows and all(row.expected == "none" for row in rows):
        raise no_axis(xs, root, LayerError)
    if rows:
        raise Fault(
            LayerError,
            f"{{call}}: `layers{name}` holds {count} layers, but leaves of `{root}` have a different number.",
            "Each layer receives its own slice of xs. Pass values that all layers share as `args`.",
            header=("leaf", "layers", "is"),
            rows=rows,
        )
    refuse_split(named, axes)
    led = _axes_of(layers)
    if axes is None and None not in led:
        return None
    return (*led, *(axes or (0,) * len(named)))


def _axes_of(layers: PyTree) -> LeafAxes:
    """Where the layers are in each leaf of a stack; None for a number that they share."""
    return tuple(None if is_traced_number(leaf) else 0 for leaf in jax.tree.leaves(layers))


def _size(leaf: Any, axis: int) -> int | None:
    shape = shape_of(leaf) or ()
    return shape[axis] if axis < len(shape) else None


def check_remats(remat: Any, stacks: Stacks) -> Remats:
    """What the gradient recomputes: one plan for all, or one for each block of a pattern."""
    if not isinstance(remat, list | tuple):
        return check_remat(remat)
    if not stacks.sequence:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `remat` is a sequence, but there is one block.",
            'With "step", the gradient recomputes each layer. A sequence is for several blocks, one item for each.',
        )
    each = [(given, check_remat(given)) for given in one_each(stacks.blocks, remat, "remat")]
    for given, plan in each:
        if plan is not None and plan != Remat(plan.policy, 1 if plan.levels else None):
            raise Fault(
                ArgumentError,
                f'{{call}}: in a sequence, `remat` must be "step", `Remat(policy)` or None for each block, got '
                f"{describe_argument(given)}.",
                "A plan that splits the loop over all blocks, or a budget, applies to all of them: pass it alone, "
                "not in a sequence.",
            )
    return tuple(plan for _, plan in each) if any(plan for _, plan in each) else None


def check_gradient(remat: Any, prefetch: Any, stacks: Stacks) -> tuple[Remats, Gather | None]:
    """What the gradient recomputes, and what gathers the next layer: for one block, which is then recomputed anyway."""
    plans, gather = check_remats(remat, stacks), Gather.of(prefetch)
    if gather is None:
        return plans, None
    if len(stacks.blocks) > 1:
        raise Fault(
            ArgumentError,
            f"{{call}}: `prefetch` is for one block, but there are {len(stacks.blocks)} that take turns.",
            "Leave it out. All blocks of a period are in one iteration of the loop, and their weights do not depend "
            "on x, so the compiler can gather the weights of the next block early.",
        )
    if not jax.tree.leaves(stacks.layers):
        raise Fault(ArgumentError, "{call}: `prefetch` gathers weights, but the layers have none.", "Leave it out.")
    if (plans[0] if isinstance(plans, tuple) else plans) not in (None, EACH_LAYER):
        raise Fault(
            ArgumentError,
            '{call}: with `prefetch`, `remat` is "step" or None.',
            "The gradient also gathers early, and it recomputes each layer with or without `remat`.",
        )
    return None, gather


def check_saves(save: Save, stacks: Stacks) -> Saves:
    """What is kept of the outputs of each block: a sequence for several blocks has one for each."""
    if stacks.sequence and isinstance(save, list | tuple):
        return tuple(check_save(each) for each in one_each(stacks.blocks, save, "save"))
    return (check_save(save),) * len(stacks.blocks)


def refuse_mutable(given: Mapping[str, PyTree]) -> None:
    """Refuses mutable arrays, which no loop can carry, slice or hand on."""
    named = [pair for root, tree in given.items() for pair in leaves_with_path(root, tree)]
    rows = [
        Row(path, "an array", describe_leaf(leaf), "")
        for path, leaf in named
        if not is_static(leaf) and is_mutable(leaf)
    ]
    if rows:
        raise Fault(
            ArgumentError,
            "{call}: mutable arrays cannot be leaves of a stack, of `args` or of x.",
            "Let the block close over them, or give their values, `ref[...]`.",
            header=("leaf", "expected", "is"),
            rows=rows,
        )


def check_args(args: Any) -> tuple[PyTree, ...]:
    """What all layers share: arrays are values of the program, anything else is a part of it, numbers too."""
    if not isinstance(args, tuple | list) or hasattr(args, "_fields"):
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `args` must be a tuple of the values that all layers share, got "
            f"{describe_argument(args)}.",
            "For a single argument write `args=(value,)`.",
        )
    return tuple(freeze_static(arg, scalars=True) for arg in args)
