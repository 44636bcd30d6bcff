"""The start and end of the verbs over layers: checks the arguments, and arranges the pattern."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from .._avals import describe_argument, describe_leaf, describe_node, is_mutable, is_weak, shape_of
from .._axes import LeafAxes, static_axes
from .._body.failures import are_alike
from .._body.signature import Convention
from .._checks.arguments import (
    check_key,
    check_keywords,
    check_name,
    check_reverse,
    check_unroll,
    needs_positional,
    no_axis,
    resolve_axes,
)
from .._checks.rows import check_length
from .._data.boxes import remove_layer_axis
from .._data.stack import count_layers, freeze_shared, is_traced_number, refuse_split
from .._errors import ArgumentError, Fault, LayerError, Row, TreescanError, describe_body, speaking_of
from .._loop.body import Body, note_types
from .._remat import Remat
from .._transforms.finite.backward import CheckLayerCotangents, in_reverse_mode
from .._transforms.finite.case import About, looks_backward, refuse_prefetch
from .._transforms.finite.check import CheckLayers, deliver
from .._transforms.finite.site import Slices
from .._transforms.layers.pattern import Pattern
from .._transforms.layers.prefetch import EACH_LAYER, Gather
from .._transforms.layers.turns import Remats, Saves, check_shown
from .._transforms.outputs import check_save
from .._transforms.program import Arguments, Call
from .._transforms.remat import check_remat
from .._tree import Prefix, freeze_static, is_static, leaves_with_path, thaw_static
from .._types import Array, Axes, FiniteCheck, ProgressLike, PyTree, Save
from ..carries._registry import Adopted, adopt
from .prepare import body_of, restored


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
            *forgotten_stack(stack, root),
            "Leave `length` out: it is for layers without parameters of their own, which share one set in `args`.",
        )
    return count


def forgotten_stack(layers: PyTree, root: str) -> list[str]:
    """The advice to stack layers, if `layers` may be a list of them."""
    if type(layers) not in (list, tuple) or len(layers) < 2 or not are_alike(layers):
        return []
    return [
        f"Did you forget `treescan.stack`? `{root}` is a {type(layers).__name__} of {len(layers)} trees of the same "
        f"types, and the number of layers is the size of their first axis. If each item is a layer, pass "
        f"`treescan.stack({root})`."
    ]


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
            *forgotten_stack(layers, f"layers{name}"),
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
    for tree, name, layers, count in zip(frozen, names, stacks.layers, stacks.counts, strict=True):
        _check_stack(tree, name, layers, count)
    return LayerStates(tuple(map(_strong, frozen)), adopted, type(state) if stacks.sequence else None)


def _check_stack(state: PyTree, name: str, layers: PyTree, count: int) -> None:
    named = leaves_with_path(name, state)
    sizes = [(shape_of(leaf) or ("none",))[0] for _, leaf in named]
    rows = [
        Row(path, str(size), describe_leaf(leaf), "")
        for (path, leaf), size in zip(named, sizes, strict=True)
        if size != count
    ]
    if rows:
        stack = name.replace("state", "layers")
        raise Fault(
            LayerError,
            f"{{call}}: `{stack}` holds {count} layers, but leaves of `{name}` have a different number.",
            *forgotten_stack(layers, stack),
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


@dataclass(frozen=True, eq=False)
class PreparedLayers:
    """A call of a verb over layers that can run.

    Attributes:
        pattern: what the verb was told, less its arrays.
        given: the arrays.
        adopted: the values in x that became custom carries.
        alive: the blocks, which may be other objects than the user's that are equal to them.
        states: what each layer reads and writes.
    """

    pattern: Pattern
    given: Arguments
    adopted: Adopted
    alive: list[Any]
    states: LayerStates | None = None

    def run(self) -> tuple[Any, ...]:
        """Runs the layers: what the last one returned, the stack of their states if they have any, and the outputs."""
        backward = isinstance(self.pattern.check, CheckLayerCotangents)
        with in_reverse_mode() if backward else contextlib.nullcontext():
            x, ys = self.pattern.run(self.given)
        ys = deliver(ys)
        caches: tuple[Any, ...] = ()
        if self.states is not None:
            x, stacks = x
            caches = (self.states.restored(stacks),)
        x, ys = restored((x, ys), self.pattern.blocks[0], self.adopted)
        return x, *caches, ys


def prepare_layers(
    convention: Convention,
    block: Any,
    x: PyTree,
    layers: PyTree,
    xs: PyTree,
    args: Any,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    state: PyTree = None,
    key: Array | None = None,
    remat: Any = None,
    save: Save = "all",
    prefetch: Any = None,
    check_finite: FiniteCheck = False,
    progress: ProgressLike = None,
    name: str | None = None,
) -> PreparedLayers:
    """Checks what the verbs over layers are told, as `treescan.scan_layers` says it.

    Raises:
        Fault: as `treescan.scan_layers`.
    """
    (handles, bodies), stacks = _handles(block, convention), check_stacks(block, layers, xs, in_axes, length)
    adopted, frozen_args, key, states = adopt(x, "x"), check_args(args), check_key(key), check_state(state, stacks)
    frozen_x = freeze_static(adopted.init)
    refuse_mutable({"x": frozen_x, "layers": layers, "xs": xs, "state": state, "args": frozen_args})
    own = _check_blocks(bodies, convention, stacks, len(frozen_args), keyed=key is not None)
    frozen = stacks.frozen or any(map(operator.is_not, (frozen_x, *frozen_args), (adopted.init, *args)))
    told = _told(adopted, states, frozen, check_reverse(reverse), check_unroll(unroll, stacks.counts[-1]))
    plans, gather = check_gradient(remat, prefetch, stacks)
    given = Arguments(frozen_x, stacks.arguments(own, None if states is None else states.stacks), key, frozen_args)
    pattern = Pattern(
        blocks=tuple(Call(body, convention, n, **told) for body, n in zip(bodies, stacks.counts, strict=True)),
        axes=stacks.axes if states is None else _axes_with(states, stacks),
        sequence=stacks.sequence,
        out_axes=_check_out_axes(out_axes, stacks),
        remat=plans,
        saves=check_saves(save, stacks),
        name=check_name(name),
        states=None if states is None else states.counts,
        prefetch=gather,
        shown=check_shown(progress, bodies, convention.verb, custom=bool(told["custom"]), ahead=gather is not None),
    )
    _note(handles[0], convention, x=x, layers=layers, xs=xs, args=args, state=state)
    return PreparedLayers(_checked(pattern, check_finite, stacks, given.xs), given, adopted, handles, states)


def _checked(pattern: Pattern, check_finite: Any, stacks: Stacks, xs: tuple[PyTree, ...]) -> Pattern:
    """The pattern, with what looks at x after each layer if the user asked for it."""
    backward = looks_backward(check_finite)
    if backward is None:
        return pattern
    refuse_prefetch(pattern.prefetch)
    check = _check(pattern, stacks, xs, backward=backward)
    return replace(pattern, check=CheckLayerCotangents(check) if backward else check)


def _check(pattern: Pattern, stacks: Stacks, xs: tuple[PyTree, ...], *, backward: bool) -> CheckLayers:
    count = len(pattern.blocks)
    abouts = tuple(
        About(
            f"`{call.convention.verb}` over {describe_body(call.body.function)}",
            custom=bool(call.custom),
            layers=place if stacks.sequence else -1,
            length=sum(stacks.counts),
            blocks=count,
            backward=backward,
        )
        for place, call in enumerate(pattern.blocks)
    )
    slices = tuple(
        Slices(axes, jax.tree.structure(own)) if axes is not None and None in axes else None
        for axes, own in zip(pattern.axes, xs, strict=True)
    )
    return CheckLayers(
        abouts, slices, tuple(_names_of_own(call, own) for call, own in zip(pattern.blocks, xs, strict=True))
    )


def _names_of_own(call: Call, own: PyTree) -> tuple[str, ...]:
    """What a block calls what it is given beside x, but for what all layers share."""
    names = [name for i, name in enumerate(call.body.names) if i != call.convention.place]
    return tuple(names[i] if i < len(names) else f"args[{i}]" for i in range(len(own)))


def _handles(block: Any, convention: Convention) -> tuple[list[tuple[Body, Any]], tuple[Body, ...]]:
    handles = [body_of(function, convention) for function in (block if is_pattern(block) else [block])]
    return handles, tuple(body for body, _ in handles)


def _note(handle: tuple[Body, Any], convention: Convention, **given: PyTree) -> None:
    body, alive = handle
    note_types(alive, body.memo, convention.verb, given)


def _told(
    adopted: Adopted, states: LayerStates | None, frozen: bool, reverse: bool, unroll: int | bool
) -> dict[str, Any]:
    """What is the same in the calls of all blocks."""
    custom = (*adopted.custom, *_custom(states))
    return {"frozen": frozen or _is_frozen(states), "custom": custom, "reverse": reverse, "unroll": unroll}


def _is_frozen(states: LayerStates | None) -> bool:
    return states is not None and states.frozen


def _custom(states: LayerStates | None) -> tuple[type, ...]:
    return () if states is None else states.custom


def _axes_with(states: LayerStates, stacks: Stacks) -> tuple[LeafAxes | None, ...]:
    """For each block the axes of what it scans over, its states, which lead with the layers, last."""
    pairs = zip(stacks.axes, states.counts, strict=True)
    return tuple(None if axes is None else (*axes, *(0,) * count) for axes, count in pairs)


def _check_out_axes(out_axes: Axes, stacks: Stacks) -> Prefix | None:
    """Where the layers are in ys, which is a tuple for a sequence of blocks; None: first."""
    if type(out_axes) is int and out_axes == 0:
        return None
    return static_axes("out_axes", tuple(out_axes) if stacks.sequence and type(out_axes) is list else out_axes)


def _check_blocks(
    bodies: tuple[Body, ...], convention: Convention, stacks: Stacks, args: int, *, keyed: bool
) -> list[bool]:
    """Checks the parameters of each block against its arguments; returns which blocks receive something from xs.

    A block that needs it is passed None where there are no xs, so that it may be run with a cache and without.
    """
    shared = [f"arg_{i}" for i in range(args)]
    passed = {"key": "the option `key`"} if keyed else {}
    flags = list[bool]()
    for body, own in zip(bodies, stacks.xs, strict=True):
        state = ("state",) if convention.stateful else ()
        flags.append(own is not None or needs_positional(body) == len(convention.takes) + len(state) + args + 1)
        takes = (*convention.takes, *(("x_layer",) if flags[-1] else ()), *state, *shared)
        with speaking_of(body.function):
            check_keywords(body, passed, convention, takes)
    return flags


_OF_TRACED_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def explain_traced(error: Exception) -> Exception:
    """The error, with a note where a block used a traced value as Python's, as when it branches on a window."""
    if isinstance(error, _OF_TRACED_VALUES) and not isinstance(error, TreescanError):
        error.add_note(
            "A block is traced once for all layers of its stack, so values in `layers` or `xs` are traced. If a "
            "value must be known when the program is traced, and differs between layers, for example a window size, "
            "use a pattern: `local = functools.partial(block, window=512)` and so on, `[local, local, global_]` "
            "with a stack for each. Pass a value that all layers share as `args`."
        )
    return error
