"""`scan_layers` and `fold_layers` run blocks of a model over the layers of a stack."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, Unpack, overload

from .._axes import static_axes
from .._body.conventions import FOLD_LAYERS, SCAN_LAYERS, Convention
from .._checks.arguments import (
    OF_MASK_SCAN,
    check_key,
    check_keywords,
    check_name,
    check_options,
    check_reverse,
    check_unroll,
)
from .._errors import LAYER_WORDS, explain, speaking_of, verb
from .._loop.body import Body
from .._transforms.layers.pattern import Pattern
from .._transforms.program import Arguments, Call
from .._tree import Prefix, freeze_static
from .._types import Array, Axes, Carry, LayersOptions, PyTree, Save, StackedLayersOptions, X, X_contra, Y, Y_co
from ..carries._registry import adopt
from .layer_arguments import Stacks, check_args, check_remats, check_saves, check_stacks, is_pattern, refuse_mutable
from .prepare import body_of, restored

Layer = TypeVar("Layer")
Layer_contra = TypeVar("Layer_contra", contravariant=True)

_ACCEPTED = frozenset((*StackedLayersOptions.__annotations__, "key"))
_SCAN_REFUSES = {
    **dict.fromkeys(OF_MASK_SCAN, "it is for rows of unequal length. What all layers share goes into `args`."),
    "length": "it runs as many layers as the stack holds.",
}
_NO_OUTPUTS = "it stacks no outputs. `treescan.scan_layers` does."
_FOLD_REFUSES = {**_SCAN_REFUSES, "out_axes": _NO_OUTPUTS, "save": _NO_OUTPUTS}


class KeyedBlock(Protocol[Layer_contra, Carry, Y_co]):
    """A block of `scan_layers` that takes a fresh key in each layer."""

    def __call__(self, layer: Layer_contra, x: Carry, /, *, key: Array) -> tuple[Carry, Y_co]: ...


class KeyedBlockWithOwn(Protocol[Layer_contra, X_contra, Carry, Y_co]):
    """The same for layers that have something of their own."""

    def __call__(self, layer: Layer_contra, x: Carry, x_layer: X_contra, /, *, key: Array) -> tuple[Carry, Y_co]: ...


class KeyedFoldBlock(Protocol[Layer_contra, Carry]):
    """A block of `fold_layers` that takes a fresh key in each layer."""

    def __call__(self, layer: Layer_contra, x: Carry, /, *, key: Array) -> Carry: ...


class KeyedFoldBlockWithOwn(Protocol[Layer_contra, X_contra, Carry]):
    """The same for layers that have something of their own."""

    def __call__(self, layer: Layer_contra, x: Carry, x_layer: X_contra, /, *, key: Array) -> Carry: ...


@overload
def scan_layers(
    block: Callable[[Layer, Carry], tuple[Carry, Y]],
    x: Carry,
    layers: Layer,
    xs: None = None,
    **options: Unpack[StackedLayersOptions],
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: Callable[[Layer, Carry, X], tuple[Carry, Y]],
    x: Carry,
    layers: Layer,
    xs: X,
    **options: Unpack[StackedLayersOptions],
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: KeyedBlock[Layer, Carry, Y],
    x: Carry,
    layers: Layer,
    xs: None = None,
    *,
    key: Array,
    **options: Unpack[StackedLayersOptions],
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: KeyedBlockWithOwn[Layer, X, Carry, Y],
    x: Carry,
    layers: Layer,
    xs: X,
    *,
    key: Array,
    **options: Unpack[StackedLayersOptions],
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: Callable[..., tuple[Carry, Y]],
    x: Carry,
    layers: Any,
    xs: Any = None,
    *,
    args: tuple[Any, ...],
    key: Array | None = None,
    **options: Unpack[StackedLayersOptions],
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: Sequence[Callable[..., tuple[Carry, Any]]],
    x: Carry,
    layers: Sequence[Any],
    xs: Sequence[Any] | None = None,
    *,
    args: tuple[Any, ...] = ...,
    key: Array | None = None,
    **options: Unpack[StackedLayersOptions],
) -> tuple[Carry, tuple[Any, ...]]: ...
@verb
def scan_layers(
    block: Any, x: PyTree, layers: PyTree, xs: PyTree = None, *, args: tuple[Any, ...] = (), **options: Any
) -> tuple[Any, Any]:
    """Runs a block with each layer of a stack in turn, each on what the one before returned, and stacks outputs.

    The program is one loop, whatever the number of layers: neither its size nor the time to compile it grows with the
    depth of a model. It does what this does, and checks, as `treescan.scan` does, that x keeps its type:

        for layer, x_layer in zip(unstack(layers), xs):
            x, y = block(layer, x, x_layer, *args)

    Args:
        block: `block(layer, x, *args) -> (x, y)`, or with xs `block(layer, x, x_layer, *args) -> (x, y)`. Or a sequence
            of blocks, which take turns (`[local, local, global_]`): the first layer of each, the second of each, and so
            on. Then `layers`, and `xs` where given, are sequences too, with one item for each block, and so is ys.
        x: what the first layer is given: any pytree, custom carries included. Each layer returns the next.
        layers: the stack: any pytree whose arrays lead with the layers, `[n, ...]`; `treescan.stack` and
            `treescan.init_layers` make one. In a pattern the last period need not be full: stacks that lead may hold
            one layer more than the others, at the price of one copy of these stacks.
        xs: what each layer has of its own beside its parameters (a cache): any pytree whose leaves are `[n, ...]`.
        args: what all layers share, passed to each call. Arrays are values of the program, and are differentiated; all
            else, Python's numbers and bools included, is a part of it: the block sees it as it is, and another number
            is another program, so what changes from call to call (a position) is given as an array.
        **options: `reverse` (the last layer first; its y is at its own place), `unroll` (how many layers, or
            periods of a pattern, are compiled into one round of the loop), `key` (each layer is given
            `key=jax.random.fold_in(key, number of the layer among all)`), `in_axes` (of xs), `out_axes`, `name`, as for
            `treescan.scan`; `save` (of ys; in a pattern, a sequence has one for each block, which counts its own
            layers); and `remat`: "step" has the gradient recompute each layer from what it was given, "nested" about
            sqrt(n) layers and in these each, and a `treescan.Remat` is for all that one says there, less `fit` in a
            pattern. There a sequence has "step", a `Remat(policy)` or None for each block.

    Returns:
        What the last layer returned, and the outputs of all layers, `[n, ...]`; for a sequence of blocks a tuple of
        these.

    Raises:
        ArgumentError: as `treescan.scan`.
        BodyError: as `treescan.scan`, of the block.
        CarryError: if a block returns another structure, shape, dtype or sharding for x than it was given.
        LayerError: if the stacks do not fit one another, the blocks or xs, or are split over devices by layers.
        SignatureError: if a jaxtyping annotation of a block does not hold.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def block(layer, x):
        ...     x = x + jnp.tanh(x @ layer["w"])
        ...     return x, x.mean()
        >>> layers = {"w": jnp.zeros((4, 3, 3))}
        >>> x, means = treescan.scan_layers(block, jnp.ones((2, 3)), layers)
        >>> print(means)
        [1. 1. 1. 1.]
    """
    try:
        check_options(options, _ACCEPTED, _SCAN_REFUSES)
        return _run(SCAN_LAYERS, block, x, layers, xs, args, **options)
    except Exception as error:
        explained = explain(error, "scan_layers", block, x, LAYER_WORDS)
    raise explained


@overload
def fold_layers(
    block: Callable[[Layer, Carry], Carry],
    x: Carry,
    layers: Layer,
    xs: None = None,
    **options: Unpack[LayersOptions],
) -> Carry: ...
@overload
def fold_layers(
    block: Callable[[Layer, Carry, X], Carry],
    x: Carry,
    layers: Layer,
    xs: X,
    **options: Unpack[LayersOptions],
) -> Carry: ...
@overload
def fold_layers(
    block: KeyedFoldBlock[Layer, Carry],
    x: Carry,
    layers: Layer,
    xs: None = None,
    *,
    key: Array,
    **options: Unpack[LayersOptions],
) -> Carry: ...
@overload
def fold_layers(
    block: KeyedFoldBlockWithOwn[Layer, X, Carry],
    x: Carry,
    layers: Layer,
    xs: X,
    *,
    key: Array,
    **options: Unpack[LayersOptions],
) -> Carry: ...
@overload
def fold_layers(
    block: Callable[..., Carry],
    x: Carry,
    layers: Any,
    xs: Any = None,
    *,
    args: tuple[Any, ...],
    key: Array | None = None,
    **options: Unpack[LayersOptions],
) -> Carry: ...
@overload
def fold_layers(
    block: Sequence[Callable[..., Carry]],
    x: Carry,
    layers: Sequence[Any],
    xs: Sequence[Any] | None = None,
    *,
    args: tuple[Any, ...] = ...,
    key: Array | None = None,
    **options: Unpack[LayersOptions],
) -> Carry: ...
@verb
def fold_layers(
    block: Any, x: PyTree, layers: PyTree, xs: PyTree = None, *, args: tuple[Any, ...] = (), **options: Any
) -> Any:
    """Runs a block with each layer of a stack in turn: `scan_layers` for blocks that return x alone.

    Args:
        block: `block(layer, x, *args) -> x`, or with xs `block(layer, x, x_layer, *args) -> x`; or a sequence of
            blocks, as for `treescan.scan_layers`.
        x: what the first layer is given: any pytree. Each layer returns the next.
        layers: the stack: any pytree whose arrays lead with the layers, `[n, ...]`; for a sequence of blocks one each.
        xs: what each layer has of its own beside its parameters: any pytree whose leaves are `[n, ...]`.
        args: what all layers share, as for `treescan.scan_layers`.
        **options: `reverse`, `unroll`, `key`, `in_axes`, `remat`, `name`, as for `treescan.scan_layers`.

    Returns:
        What the last layer returned.

    Raises:
        ArgumentError: as `treescan.scan`; also for `out_axes`, as there are no outputs.
        BodyError: as `treescan.fold`, of the block.
        CarryError: as `treescan.scan_layers`.
        LayerError: as `treescan.scan_layers`.
        SignatureError: as `treescan.scan_layers`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> layers = {"w": jnp.stack([jnp.eye(3), 2 * jnp.eye(3)])}
        >>> print(treescan.fold_layers(lambda layer, x: x @ layer["w"], jnp.ones(3), layers))
        [2. 2. 2.]
    """
    try:
        check_options(options, _ACCEPTED - _FOLD_REFUSES.keys(), _FOLD_REFUSES)
        return _run(FOLD_LAYERS, block, x, layers, xs, args, **options)[0]
    except Exception as error:
        explained = explain(error, "fold_layers", block, x, LAYER_WORDS)
    raise explained


def _run(
    convention: Convention,
    block: Any,
    x: PyTree,
    layers: PyTree,
    xs: PyTree,
    args: Any,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array | None = None,
    remat: Any = None,
    save: Save = "all",
    name: str | None = None,
) -> tuple[Any, Any]:
    handles = [body_of(function, convention) for function in (block if is_pattern(block) else [block])]
    bodies = tuple(body for body, _ in handles)
    stacks = check_stacks(block, layers, xs, in_axes)
    adopted, frozen_args, key = adopt(x, "x"), check_args(args), check_key(key)
    frozen_x = freeze_static(adopted.init)
    refuse_mutable({"x": frozen_x, "layers": layers, "xs": xs, "args": frozen_args})
    _check_blocks(bodies, convention, stacks, len(frozen_args), keyed=key is not None)
    frozen = stacks.frozen or frozen_x is not adopted.init or any(map(operator.is_not, frozen_args, args))
    told: dict[str, Any] = {"reverse": check_reverse(reverse), "unroll": check_unroll(unroll, stacks.counts[-1])}
    told |= {"frozen": frozen, "custom": adopted.custom}
    counted = zip(bodies, stacks.counts, strict=True)
    pattern = Pattern(
        blocks=tuple(Call(body, convention, count, **told) for body, count in counted),
        axes=tuple(stacks.axes),
        sequence=stacks.sequence,
        out_axes=_check_out_axes(out_axes, stacks),
        remat=check_remats(remat, stacks),
        saves=check_saves(save, stacks),
        name=check_name(name),
    )
    result = pattern.run(Arguments(frozen_x, stacks.arguments, key, frozen_args))
    del handles
    return restored(result, pattern.blocks[0], adopted)


def _check_out_axes(out_axes: Axes, stacks: Stacks) -> Prefix | None:
    """Where the layers are in ys, which is a tuple for a sequence of blocks; None: first."""
    if type(out_axes) is int and out_axes == 0:
        return None
    return static_axes("out_axes", tuple(out_axes) if stacks.sequence and type(out_axes) is list else out_axes)


def _check_blocks(bodies: tuple[Body, ...], convention: Convention, stacks: Stacks, args: int, *, keyed: bool) -> None:
    """Holds the parameters of each block against what it will be passed."""
    shared = [f"arg_{i}" for i in range(args)]
    passed = {"key": "the option `key`"} if keyed else {}
    for body, own in zip(bodies, stacks.xs, strict=True):
        takes = (*convention.takes, *(("x_layer",) if own is not None else ()), *shared)
        with speaking_of(body.function):
            check_keywords(body, passed, convention, takes)
