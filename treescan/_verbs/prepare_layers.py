"""The start and end of the verbs over layers: checks the arguments, and arranges the pattern."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from .._arguments import (
    check_key,
    check_keywords,
    check_length,
    check_offset,
    check_run,
    needs_positional,
    no_axis,
    refuse_unsliced,
    resolve_axes,
    with_axes,
)
from .._avals import (
    Array,
    ArrayLike,
    LeafAxes,
    PyTree,
    describe_argument,
    describe_leaf,
    describe_node,
    is_mutable,
    is_weak,
    shape_of,
)
from .._body.call import are_alike
from .._body.carry import StateAndY
from .._body.registered import refuse_unregistered
from .._body.signature import WITH_STATE, Convention
from .._errors import Cure, Fault, LayerError, LayerFault, Misuse, Row, speaking_of
from .._loop.loop import Body, Result
from .._outputs.outputs import KeepOutputs, MoveOutputs
from .._stacks.layer_axis import count_layers, freeze_shared, is_traced_number, refuse_split, remove_layer_axis
from .._transforms.call import Arguments, Call
from .._transforms.transform import REPORT, Transform
from .._tree import Static, freeze_static, is_static, leaves_with_path, thaw_static
from .._types import Axes, ProgressLike, Remat, RematLike, Save
from ..carries._registry import Adopted, adopt
from .options import checking, recording, showing
from .prepare import Prepared, body_of

Remats = tuple[Remat | None, ...] | Remat | None

if TYPE_CHECKING:
    from ..options import Option


class Stacks(NamedTuple):
    """What the layers of each block are made of; static leaves are frozen.

    Attributes:
        layers: a stack for each block.
        xs: for each what its layers have of their own, or None.
        counts: how many layers each stack holds.
        axes: for each the axis of every leaf of its (layers, xs) that is scanned over, or None: axis 0 for all.
        sequence: whether the user gave a sequence.
        frozen: whether there are static leaves.
    """

    layers: tuple[PyTree, ...]
    xs: tuple[PyTree, ...]
    counts: tuple[int, ...]
    axes: tuple[LeafAxes | None, ...]
    sequence: bool
    frozen: bool

    def each(self, given: object, name: str) -> tuple[PyTree, ...]:
        """One item for each block, of a sequence if the user gave one of blocks."""
        return one_each(len(self.layers), given, name) if self.sequence else (given,)


def is_pattern(block: object) -> bool:
    """Whether a block is a sequence of several. A tuple that can be called is one block."""
    return isinstance(block, list | tuple) and not callable(block)


def check_stacks(block: Any, layers: PyTree, xs: PyTree, in_axes: Axes, length: int | None = None) -> Stacks:
    """Checks that blocks, stacks and xs fit together. `length` is for layers that have no parameters of their own.

    Raises:
        Fault: for a `LayerError` that lists all the leaves in question.
    """
    sequence, names = False, [""]
    stacks, own, own_axes = tuple[PyTree, ...]([layers]), tuple[PyTree, ...]([xs]), tuple[Axes, ...]([in_axes])
    if is_pattern(block):
        if not block:
            raise LayerFault("{verb}: the sequence of blocks is empty.", "Give at least one block, and its stack.")
        sequence, count = True, len(block)
        names = [f"[{i}]" for i in range(count)]
        stacks = one_each(count, layers, "layers")
        own = (None,) * count if xs is None else one_each(count, xs, "xs")
        own_axes = one_each(count, in_axes, "in_axes") if isinstance(in_axes, list | tuple) else (in_axes,) * count
    given, (stacks, own) = (*stacks, *own), (tuple(map(freeze_shared, stacks)), tuple(map(freeze_static, own)))
    frozen = any(map(operator.is_not, given, (*stacks, *own)))
    if frozen:
        roots = [f"{root}{name}" for root in ("layers", "xs") for name in names]
        refuse_unregistered(dict(zip(roots, given, strict=True)))
        for root, tree in zip(roots, given, strict=True):
            refuse_unsliced(tree, root)
    length = check_length(length)
    counts = tuple(_count(stack, f"layers{name}", length) for stack, name in zip(stacks, names, strict=True))
    _check_pattern(counts)
    axes = tuple(map(_check_own, stacks, own, own_axes, counts, names))
    stacks = tuple(remove_layer_axis(stack, f"layers{name}") for stack, name in zip(stacks, names, strict=True))
    return Stacks(stacks, own, counts, axes, sequence, frozen)


def _count(stack: PyTree, root: str, length: int | None) -> int:
    """How many layers a stack holds, or is said to hold."""
    if length is None and stack is None:
        raise LayerFault(
            f"{{call}}: the number of layers is unknown. `{root}` is None.",
            "A stack is a pytree of arrays whose first axis is the layers: `treescan.stack` makes one of a list of "
            "layers.",
            "Layers without parameters of their own, which share one set in `args`, need `length=`.",
        )
    if length is None:
        return count_layers(stack, root)
    count = count_layers(stack, root) if jax.tree.leaves(stack) else length
    if count != length:
        raise LayerFault(
            f"{{call}}: `length` is {length}, but `{root}` holds {count} layers.",
            *forgotten_stack(stack, root),
            "Leave `length` out: it is for layers without parameters of their own, which share one set in `args`.",
        )
    return count


def forgotten_stack(layers: PyTree, root: str) -> list[str]:
    """The advice to stack layers, if `layers` may be a list of them."""
    if not are_alike(layers):
        return []
    return [
        f"Did you forget `treescan.stack`? `{root}` is a {type(layers).__name__} of {len(layers)} trees of the same "
        f"types, and the number of layers is the size of their first axis. If each item is "
        f"{'a layer' if root.startswith('layers') else 'of one layer'}, pass `treescan.stack({root})`."
    ]


def one_each(count: int, given: object, name: str) -> tuple[PyTree, ...]:
    """A sequence with one item for each block."""
    fault = LayerFault if name in ("layers", "xs", "state") else Misuse
    blocks = "is 1 block" if count == 1 else f"are {count} blocks"
    if not isinstance(given, list | tuple) or hasattr(given, "_fields"):
        raise fault(
            f"{{call}}: there {blocks}, but `{name}` is not a sequence: it is {describe_node(given)}.",
            f"Give one item for each block: `({name}_0, {name}_1, ...)`.",
        )
    if len(given) != count:
        raise fault(
            f"{{call}}: there {blocks}, but `{name}` has {len(given)} item{'s'[: len(given) != 1]}.",
            "Give one item for each block. If a block has several turns in a period, repeat it.",
        )
    return tuple(given)


def _check_pattern(counts: tuple[int, ...]) -> None:
    """Refuses stacks whose blocks cannot take turns."""
    fewest = counts[-1]
    leading = sum(count == fewest + 1 for count in counts)
    if counts != (fewest + 1,) * leading + (fewest,) * (len(counts) - leading):
        raise LayerFault(
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
    root, stack, led = f"xs{name}", f"layers{name}", _layer_axes(layers)
    refuse_split(leaves_with_path(stack, layers), led)
    if xs is None and not (type(in_axes) is int and in_axes == 0) and not name:
        raise Misuse(
            "{call}: `in_axes` is for xs, but there are none.",
            "Layers are scanned along axis 0 of their stack. Pass other inputs of each layer as `xs`.",
        )
    axes = resolve_axes(in_axes, xs, root)
    cure = "Each layer receives its own slice of xs. Pass values that all layers share as `args`."
    _check_count(root, xs, axes, layers, stack, count, cure)
    if axes is None and None not in led:
        return None
    return (*led, *(axes or (0,) * len(jax.tree.leaves(xs))))


def _check_count(
    root: str, own: PyTree, axes: LeafAxes | None, layers: PyTree, stack: str, count: int, cure: str
) -> None:
    """Refuses leaves beside a stack that have another number of layers than it has."""
    named, of_xs = leaves_with_path(root, own), root.startswith("xs")
    rows = [
        Row(path, "none" if size is None else str(size), describe_leaf(leaf), f"axis {axis}" if of_xs else "")
        for path, leaf, axis in with_axes(named, axes)
        if (size := _size(leaf, axis)) != count
    ]
    if rows and of_xs and all(row.expected == "none" for row in rows):
        raise no_axis(own, root, LayerFault)
    says = f"{{call}}: `{stack}` holds {count} layers, but leaves of `{root}` have a different number."
    if rows and (forgotten := forgotten_stack(own, root)):
        raise LayerFault(says, *forgotten)
    if rows:
        raise LayerFault(
            says,
            *forgotten_stack(layers, stack),
            *[_misplaced(root, own, count)] * (not of_xs),
            cure,
            header=("leaf", "layers", "is"),
            rows=rows,
        )
    refuse_split(named, axes)


def _misplaced(root: str, state: PyTree, count: int) -> str:
    """What the user may do about a state that has so many layers along another axis, or along none."""
    shapes = [shape_of(leaf) or () for leaf in jax.tree.leaves(state)]
    for axis in range(1, min(map(len, shapes))):
        if all(shape[axis] == count for shape in shapes):
            moved = f"`jax.tree.map(lambda leaf: jnp.moveaxis(leaf, {axis}, 0), {root})`"
            return f"Axis {axis} of the state has {count}. If that is the layers, move it to the front: {moved}."
    return f"If it is the state of one layer, give each layer one: `treescan.stack([{root}] * {count})`."


def _size(leaf: object, axis: int) -> int | None:
    shape = shape_of(leaf) or ()
    return shape[axis] if axis < len(shape) else None


def _layer_axes(layers: PyTree) -> LeafAxes:
    """Where the layers are in each leaf of a stack; None for a number that they share."""
    return tuple(None if is_traced_number(leaf) else 0 for leaf in jax.tree.leaves(layers))


def check_remats(remat: object, stacks: Stacks) -> Remats:
    """What the gradient recomputes: one plan for all, or one for each block of a pattern."""
    if remat is None:
        return None
    from .._remat.remat import check_remat

    if not isinstance(remat, list | tuple):
        return check_remat(remat)
    if not stacks.sequence:
        raise Misuse(
            "{verb} over {body}: `remat` is a sequence, but there is one block.",
            'With "step", the gradient recomputes each layer. A sequence is for several blocks, one item for each.',
        )
    plans = tuple(map(check_remat, stacks.each(remat, "remat")))
    for given, plan in zip(remat, plans, strict=True):
        if plan is not None and plan != Remat(plan.policy, 1 if plan.levels else None):
            raise Misuse(
                f'{{call}}: in a sequence, `remat` must be "step", `Remat(policy)` or None for each block, got '
                f"{describe_argument(given)}.",
                "A plan that splits the loop over all blocks, or a budget, applies to all of them: pass it alone, "
                "not in a sequence.",
            )
    return plans if any(plans) else None


def refuse_mutable(given: Mapping[str, PyTree]) -> None:
    """Refuses mutable arrays, which no loop can carry, slice or hand on."""
    named = [pair for root, tree in given.items() for pair in leaves_with_path(root, tree)]
    rows = [
        Row(path, "an array", describe_leaf(leaf)) for path, leaf in named if not is_static(leaf) and is_mutable(leaf)
    ]
    if rows:
        raise Misuse(
            "{call}: mutable arrays cannot be leaves of a stack, of `args` or of x.",
            "Let the block close over them, or give their values, `ref[...]`.",
            rows=rows,
        )


def _exchanged(x: PyTree, layers: PyTree, xs: PyTree, state: PyTree) -> list[str]:
    """The advice if x has as many layers as what stands beside the stack, which has another number.

    A stack has weights, so it seldom has fewer axes than x: such sizes are equal by chance.
    """
    axes = [max((len(shape_of(leaf) or ()) for leaf in jax.tree.leaves(tree)), default=0) for tree in (x, layers)]
    if axes[0] < axes[1]:
        return []
    sizes = ({_size(leaf, 0) for leaf in jax.tree.leaves(tree)} for tree in (x, layers, (xs, state)))
    of_x, of_layers, of_others = sizes
    if of_x != of_others or of_x == of_layers or len(of_x) != 1 or None in of_x or are_alike(xs) or are_alike(state):
        return []
    return [
        f"The leaves of x have {of_x.pop()}. Perhaps x and the layers are exchanged: the order is (block, x, layers)."
    ]


def check_args(args: object) -> tuple[PyTree, ...]:
    """What all layers share: arrays are values of the program, anything else is a part of it, numbers too."""
    if not isinstance(args, tuple | list) or hasattr(args, "_fields"):
        raise Misuse(
            f"{{verb}} over {{body}}: `args` must be a tuple of the values that all layers share, got "
            f"{describe_argument(args)}.",
            "For a single argument write `args=(value,)`.",
        )
    return tuple(freeze_static(arg, scalars=True) for arg in args)


def check_state(state: PyTree, stacks: Stacks) -> tuple[tuple[Adopted, ...], tuple[PyTree, ...]]:
    """The state of each block's layers, with custom carries in it, and the stacks of these; neither without a state.

    Raises:
        Fault: for a `LayerError` that lists all the leaves in question.
    """
    if state is None:
        return (), ()
    given = stacks.each(state, "state")
    roots = [f"state[{i}]" for i in range(len(given))] if stacks.sequence else ["state"]
    adopted = tuple(map(adopt, given, roots))
    frozen = tuple(freeze_static(each.init) for each in adopted)
    refuse_unregistered({root: each.init for root, each in zip(roots, adopted, strict=True)})
    cure = (
        "Each layer receives its own slice of the state, and returns it. So the first axis of every leaf must be the "
        "layers. Pass a state that all layers share through x."
    )
    for root, own, layers, count in zip(roots, frozen, stacks.layers, stacks.counts, strict=True):
        _check_count(root, own, None, layers, root.replace("state", "layers"), count, cure)
    return adopted, tuple(map(_strong, frozen))


def _strong(state: PyTree) -> PyTree:
    """The state with types that no layer promotes. A tree whose leaves have such comes back unchanged."""
    if not any(map(is_weak, jax.tree.leaves(state))):
        return state
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype) if is_weak(leaf) else leaf, state)


@dataclass(frozen=True, eq=False)
class PreparedLayers:
    """A call of a verb over layers that can run.

    Attributes:
        prepared: the call.
        transforms: what its options do.
        stacks: what the layers are made of.
        caches: for each block the stack of its layers' states; none without a state.
        states: the values in each that became custom carries.
        form: from a list of states to what the user gave them in.
    """

    prepared: Prepared
    transforms: tuple[Transform | None, ...]
    stacks: Stacks
    caches: tuple[PyTree, ...]
    states: tuple[Adopted, ...]
    form: Callable[[list[PyTree]], PyTree]

    def run(self) -> tuple[PyTree, ...]:
        """Runs the layers: what the last one returned, and what else there is of their states, outputs, a report."""
        result = self.prepared.run(*self.transforms)
        x, ys = result[:2]
        each, new = ys if self.prepared.call.others else (ys,), tuple[Any, ...]()
        if self.caches:
            pairs = zip(self.caches, each, strict=True)
            stacks = [jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(y.state)) for old, y in pairs]
            back = [adopted.restore(thaw_static(one)) for adopted, one in zip(self.states, stacks, strict=True)]
            new, each = (self.form(back),), tuple(y.y for y in each)
        outputs = (each if self.stacks.sequence else each[0],) if self.prepared.call.convention.pair else ()
        report = REPORT.of(result) if isinstance(result, Result) else None
        return x, *new, *outputs, *(() if report is None else (report,))


def prepare_layers(
    convention: Convention,
    block: Any,
    x: PyTree,
    layers: PyTree,
    xs: PyTree,
    args: tuple[PyTree, ...],
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    state: PyTree = None,
    key: Array | None = None,
    offset: ArrayLike | None = None,
    remat: RematLike | Sequence[RematLike | None] | None = None,
    save: Save = "all",
    check_finite: bool = False,
    progress: ProgressLike = None,
    options: Sequence[Option] = (),
) -> PreparedLayers:
    """Checks what the verbs over layers are told, as `treescan.scan_layers` says it.

    Raises:
        Fault: as `treescan.scan_layers`.
    """
    convention = convention if state is None else WITH_STATE[convention]
    handles = [body_of(function, convention) for function in (block if is_pattern(block) else [block])]
    adopted, frozen_args, key = adopt(x, "x"), check_args(args), check_key(key)
    try:
        bodies, stacks = [body for body, _ in handles], check_stacks(block, layers, xs, in_axes, length)
        states, caches = check_state(state, stacks)
    except Fault as fault:
        if fault.error is LayerError:
            fault.cures = (*map(Cure, _exchanged(x, layers, xs, state)), *fault.cures)
        raise
    frozen_x = freeze_static(adopted.init)
    refuse_mutable({"x": frozen_x, "layers": layers, "xs": xs, "state": state, "args": frozen_args})
    own, (axes, *others) = _arguments(bodies, convention, stacks, caches, len(frozen_args), keyed=key is not None)
    refuse_unregistered({"x": adopted.init})
    before = (adopted.init, *args, *(each.init for each in states))
    frozen = stacks.frozen or any(map(operator.is_not, (frozen_x, *frozen_args, *caches), before))
    custom = tuple(kind for each in (adopted, *states) for kind in each.custom)
    position = None if offset is None else check_offset(offset, sum(stacks.counts))
    how = check_run(stacks.counts[-1], reverse, unroll)
    call = Call(bodies[0], convention, frozen=frozen, custom=custom, **how)
    first, *rest = (replace(call, body=body, length=n) for body, n in zip(bodies, stacks.counts, strict=True))
    prepared = Prepared(
        replace(first, others=tuple(rest)),
        Arguments(frozen_x, own if rest else own[0], key, frozen_args, offset=position),
        axes,
        adopted,
        handles,
        options=options,
        other_axes=tuple(others),
    )
    plans = check_remats(remat, stacks)
    transforms = _transforms(prepared, stacks, caches, plans, save, out_axes, check_finite, progress)
    form = type(state) if stacks.sequence else operator.itemgetter(0)
    return PreparedLayers(prepared, transforms, stacks, caches, states, form)


def _transforms(
    prepared: Prepared,
    stacks: Stacks,
    caches: tuple[PyTree, ...],
    plans: Remats,
    save: Save,
    out_axes: Axes,
    check_finite: bool,
    progress: ProgressLike,
) -> tuple[Transform | None, ...]:
    """What the options of a verb over layers do."""
    within: tuple[Transform | None, ...] = (prepared.over_axes,)
    if caches and plans is None:
        from .._stacks.states import CarryStates

        within += (CarryStates.of(caches),)
    if plans is not None:
        from .._remat.remat import Recompute

        within += (Recompute(Static(plans)),)
    saves = stacks.each(save, "save") if stacks.sequence and isinstance(save, list | tuple) else save
    saves, in_place = _of_outputs(saves, "all", stacks, caches), type(out_axes) is int and out_axes == 0
    of_all = stacks.sequence and not caches and type(out_axes) not in (int, list, tuple)  # which is no prefix of ys
    axes = out_axes if of_all else _of_outputs(out_axes, 0, stacks, caches)
    return (
        *within,
        checking(check_finite, prepared, layers=True),
        None if in_place else MoveOutputs.of(axes, saves),
        recording(saves),
        KeepOutputs.of(saves),
        showing(progress, prepared),
    )


def _of_outputs(said: PyTree, of_states: PyTree, stacks: Stacks, caches: tuple[PyTree, ...]) -> PyTree:
    """What the user said of ys, of what a step returns beside x: for each of several blocks, beside its state."""
    count = len(stacks.layers)
    each = list(said) if stacks.sequence and type(said) in (list, tuple) else [said] * count  # a NamedTuple is a y
    each = [StateAndY(of_states, own) if caches else own for own in each]
    return tuple(each) if (count, len(each)) != (1, 1) else each[0]


def _arguments(
    bodies: Sequence[Body],
    convention: Convention,
    stacks: Stacks,
    caches: tuple[PyTree, ...],
    args: int,
    *,
    keyed: bool,
) -> tuple[tuple[tuple[PyTree, ...], ...], tuple[LeafAxes | None, ...]]:
    """What each block is given of its own, (layers, xs, state), and the axes of that, once its parameters are checked.

    A block that needs xs is passed None where only other blocks of a pattern have some. Where no block has any, a
    parameter without a default is one that was forgotten in `args`: passed None, blocks take it for "no mask".
    """
    state, shared = ("state",) if convention.stateful else (), [f"arg_{i}" for i in range(args)]
    passed = {"key": "the option `key`"} if keyed else {}
    given, axes = list[tuple[PyTree, ...]](), list[LeafAxes | None]()
    some = any(own is not None for own in stacks.xs)
    for i, body in enumerate(bodies):
        needed = len(convention.takes) + len(state) + args + 1
        takes_x = stacks.xs[i] is not None or (some and needs_positional(body) == needed)
        with speaking_of(body.function):
            takes = (*convention.takes, *(("x_layer",) if takes_x else ()), *state, *shared)
            check_keywords(body, passed, convention, takes)
        own = caches[i : i + 1]
        led = stacks.axes[i]
        given.append((stacks.layers[i], *((stacks.xs[i],) if takes_x else ()), *own))
        axes.append(None if led is None else (*led, *(0,) * len(jax.tree.leaves(own))))
    return tuple(given), tuple(axes)
