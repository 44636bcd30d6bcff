"""`scan_layers` and `fold_layers` run blocks of a model over the layers of a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, Unpack, overload

from .._arguments import OF_MASK_SCAN, check_options
from .._avals import PyTree
from .._body.signature import FOLD_LAYERS, SCAN_LAYERS
from .._errors import LAYER_WORDS, explain, verb
from .._types import (
    Carry,
    Keyed,
    KeyedLayers,
    KeyedStack,
    KeyedWithOwn,
    LayersOptions,
    Returned,
    SharedLayers,
    SharedStack,
    StackOptions,
    StackTurns,
    Turns,
    X,
    Y,
)
from .prepare_layers import prepare_layers

Layer = TypeVar("Layer")
State = TypeVar("State")

Each: TypeAlias = Sequence[Any]
AnyPair: TypeAlias = Callable[..., tuple[Carry, Any]]
AnyStateful: TypeAlias = Callable[..., tuple[Carry, Any, Y]]

_ACCEPTED = frozenset((*StackOptions.__annotations__, "key"))
_SCAN_REFUSES = dict.fromkeys(
    OF_MASK_SCAN, "it is for rows of unequal length. Pass values that all layers share as `args`."
)
_NO_OUTPUTS = "it stacks no outputs. `treescan.scan_layers` does."
_FOLD_REFUSES = {**_SCAN_REFUSES, "out_axes": _NO_OUTPUTS, "save": _NO_OUTPUTS}


@overload
def scan_layers(
    block: Callable[[Layer, Carry], tuple[Carry, Y]],
    x: Carry,
    layers: Layer,
    xs: None = None,
    **options: Unpack[StackOptions],
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: Callable[[Layer, Carry, X], tuple[Carry, Y]], x: Carry, layers: Layer, xs: X, **options: Unpack[StackOptions]
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: Keyed[Layer, Carry, tuple[Carry, Y]], x: Carry, layers: Layer, xs: None = None, **options: Unpack[KeyedStack]
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: KeyedWithOwn[Layer, Carry, X, tuple[Carry, Y]], x: Carry, layers: Layer, xs: X, **options: Unpack[KeyedStack]
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: Callable[..., tuple[Carry, Y]], x: Carry, layers: Any, xs: Any = None, **options: Unpack[SharedStack]
) -> tuple[Carry, Y]: ...
@overload
def scan_layers(
    block: Sequence[AnyPair[Carry]], x: Carry, layers: Each, xs: Each | None = None, **options: Unpack[StackTurns]
) -> tuple[Carry, tuple[Any, ...]]: ...
@overload
def scan_layers(
    block: Callable[[Layer, Carry, State], tuple[Carry, State, Y]],
    x: Carry,
    layers: Layer,
    xs: None = None,
    *,
    state: State,
    **options: Unpack[StackOptions],
) -> tuple[Carry, State, Y]: ...
@overload
def scan_layers(
    block: Callable[[Layer, Carry, X, State], tuple[Carry, State, Y]],
    x: Carry,
    layers: Layer,
    xs: X,
    *,
    state: State,
    **options: Unpack[StackOptions],
) -> tuple[Carry, State, Y]: ...
@overload
def scan_layers(
    block: AnyStateful[Carry, Y], x: Carry, layers: Any, xs: Any = None, *, state: State, **options: Unpack[KeyedStack]
) -> tuple[Carry, State, Y]: ...
@overload
def scan_layers(
    block: AnyStateful[Carry, Y], x: Carry, layers: Any, xs: Any = None, *, state: State, **options: Unpack[SharedStack]
) -> tuple[Carry, State, Y]: ...
@overload
def scan_layers(
    block: Sequence[AnyStateful[Carry, Any]],
    x: Carry,
    layers: Each,
    xs: Each | None = None,
    *,
    state: State,
    **options: Unpack[StackTurns],
) -> tuple[Carry, State, tuple[Any, ...]]: ...
@overload
def scan_layers(block: Any, x: Any, layers: Any, xs: Any = None, *, check_finite: Returned, **options: Any) -> Any: ...
@verb
def scan_layers(
    block: Any,
    x: PyTree,
    layers: PyTree,
    xs: PyTree = None,
    *,
    state: PyTree = None,
    args: tuple[Any, ...] = (),
    **options: Any,
) -> tuple[Any, ...]:
    """Runs a block once per layer of a stack, each on the result of the layer before, and stacks the outputs.

    The program is one loop. Neither its size nor its compile time grows with the number of layers. It computes the
    following, and checks that x keeps its type, as `treescan.scan` does for the carry:

        for layer, x_layer in zip(unstack(layers), xs):
            x, y = block(layer, x, x_layer, *args)

    Args:
        block: `block(layer, x, *args) -> (x, y)`, or with xs `block(layer, x, x_layer, *args) -> (x, y)`. Or a sequence
            of blocks that take turns (`[local, local, global_]`): the first layer of each, the second of each, and so
            on. `layers`, `xs` and ys are then sequences too, with one item per block.
        x: the input of the first layer: any pytree, which may contain custom carries. Each layer returns the next x.
        layers: the stack: any pytree of arrays whose first axis is the layers, `[n, ...]`. `treescan.stack` and
            `treescan.init_layers` make one. Leaves that are not arrays, including Python numbers and flags, are shared
            by all layers. In a pattern, the last period need not be full: the first stacks may have one layer more
            than the others, which costs one copy of these stacks. None, with `length`, if layers have no parameters of
            their own (as in ALBERT, whose layers share one set, in `args`): each block then receives None.
        xs: inputs of each layer besides its parameters: any pytree with leaves `[n, ...]`. In a pattern, a block
            whose item is None receives None. For a block that runs with xs and without, give the parameter a default.
        state: a state that each layer reads and writes, for example a cache: any pytree with leaves `[n, ...]`. For a
            sequence of blocks, one each, or None. A block receives its layer's state after x (after x_layer if there
            are xs), and returns the new one after x: `block(layer, x, state, *args) -> (x, state, y)`. The loop
            carries the states of all layers and writes them in place, so a donated state is not copied. With `remat`,
            it scans over the states and stacks the new ones instead, which copies them; otherwise the gradient would
            save all states for each layer.
        args: values that all layers share, passed to each call. Arrays are values of the program, and can be
            differentiated. Everything else, including Python numbers and bools, is compiled into the program, so a new
            number compiles again. So pass values that change from call to call, for example a position, as arrays.
        **options: `reverse` (the last layer first; each y stays at the place of its layer), `unroll` (how many layers,
            or periods of a pattern, are compiled into one iteration), `key` (each layer receives
            `key=jax.random.fold_in(key, number of the layer among all)`), `offset` (that number of the first layer, as
            for `treescan.scan`: for a stage of a pipeline), `length` (the number of layers, if `layers` is None),
            `in_axes` (of xs), `out_axes`, `check_finite`, `options`, as for `treescan.scan`; `save` (of ys; in a
            pattern, a sequence with one item per block, which counts its own layers); `progress` (as for
            `treescan.scan`, of layers; the carry is x); and `remat`: with "step" the gradient recomputes each layer
            from its input, with "nested" chunks of about sqrt(n) layers and each layer within them, and a
            `treescan.Remat` has more options.
            In a pattern, a sequence has "step", a `Remat(policy)` or None for each block.

    Returns:
        The x that the last layer returned, and the outputs of all layers, `[n, ...]`; for a sequence of blocks, a tuple
        of these. With `state` three items, `(x, state, ys)`, with the new states of all layers.

    Raises:
        ArgumentError: as `treescan.scan`.
        BodyError: as `treescan.scan`, of the block; also if it returns no state.
        CarryError: if a block returns another structure, shape, dtype or sharding for x than it was given, or for the
            state.
        LayerError: if the stacks do not fit one another, the blocks, xs or the state, or if the layer axis is sharded.
        NonFiniteError: if `check_finite` finds something.
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
        check_options(options, _ACCEPTED, _SCAN_REFUSES, beside=("xs", "state", "args"))
        return prepare_layers(SCAN_LAYERS, block, x, layers, xs, args, state=state, **options).run()
    except Exception as error:
        explained = explain(error, "scan_layers", block, x, LAYER_WORDS)
    raise explained


@overload
def fold_layers(
    block: Callable[[Layer, Carry], Carry], x: Carry, layers: Layer, xs: None = None, **options: Unpack[LayersOptions]
) -> Carry: ...
@overload
def fold_layers(
    block: Callable[[Layer, Carry, X], Carry], x: Carry, layers: Layer, xs: X, **options: Unpack[LayersOptions]
) -> Carry: ...
@overload
def fold_layers(
    block: Keyed[Layer, Carry, Carry], x: Carry, layers: Layer, xs: None = None, **options: Unpack[KeyedLayers]
) -> Carry: ...
@overload
def fold_layers(
    block: KeyedWithOwn[Layer, Carry, X, Carry], x: Carry, layers: Layer, xs: X, **options: Unpack[KeyedLayers]
) -> Carry: ...
@overload
def fold_layers(
    block: Callable[..., Carry], x: Carry, layers: Any, xs: Any = None, **options: Unpack[SharedLayers]
) -> Carry: ...
@overload
def fold_layers(
    block: Sequence[Callable[..., Carry]], x: Carry, layers: Each, xs: Each | None = None, **options: Unpack[Turns]
) -> Carry: ...
@overload
def fold_layers(
    block: Callable[[Layer, Carry, State], tuple[Carry, State]],
    x: Carry,
    layers: Layer,
    xs: None = None,
    *,
    state: State,
    **options: Unpack[LayersOptions],
) -> tuple[Carry, State]: ...
@overload
def fold_layers(
    block: Callable[[Layer, Carry, X, State], tuple[Carry, State]],
    x: Carry,
    layers: Layer,
    xs: X,
    *,
    state: State,
    **options: Unpack[LayersOptions],
) -> tuple[Carry, State]: ...
@overload
def fold_layers(
    block: AnyPair[Carry], x: Carry, layers: Any, xs: Any = None, *, state: State, **options: Unpack[KeyedLayers]
) -> tuple[Carry, State]: ...
@overload
def fold_layers(
    block: AnyPair[Carry], x: Carry, layers: Any, xs: Any = None, *, state: State, **options: Unpack[SharedLayers]
) -> tuple[Carry, State]: ...
@overload
def fold_layers(
    block: Sequence[AnyPair[Carry]],
    x: Carry,
    layers: Each,
    xs: Each | None = None,
    *,
    state: State,
    **options: Unpack[Turns],
) -> tuple[Carry, State]: ...
@overload
def fold_layers(block: Any, x: Any, layers: Any, xs: Any = None, *, check_finite: Returned, **options: Any) -> Any: ...
@verb
def fold_layers(
    block: Any,
    x: PyTree,
    layers: PyTree,
    xs: PyTree = None,
    *,
    state: PyTree = None,
    args: tuple[Any, ...] = (),
    **options: Any,
) -> Any:
    """Runs a block once per layer of a stack: `scan_layers` for blocks that return only x.

    Args:
        block: `block(layer, x, *args) -> x`, or with xs `block(layer, x, x_layer, *args) -> x`; or a sequence of
            blocks, as for `treescan.scan_layers`.
        x: the input of the first layer: any pytree. Each layer returns the next x.
        layers: the stack: any pytree of arrays whose first axis is the layers, `[n, ...]`; for a sequence of blocks,
            one each.
        xs: inputs of each layer besides its parameters: any pytree with leaves `[n, ...]`.
        state: a state that each layer reads and writes, as for `treescan.scan_layers`: `block(layer, x, state, *args)
            -> (x, state)`.
        args: values that all layers share, as for `treescan.scan_layers`.
        **options: `reverse`, `unroll`, `key`, `offset`, `length`, `in_axes`, `remat`, `progress`,
            `check_finite`, `options`, as for `treescan.scan_layers`.

    Returns:
        The x that the last layer returned; with `state` a pair `(x, state)` with the new states of all layers.

    Raises:
        ArgumentError: as `treescan.scan`; also for `out_axes`, as there are no outputs.
        BodyError: as `treescan.fold`, of the block.
        CarryError: as `treescan.scan_layers`.
        LayerError: as `treescan.scan_layers`.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: as `treescan.scan_layers`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> layers = {"w": jnp.stack([jnp.eye(3), 2 * jnp.eye(3)])}
        >>> print(
        ...     treescan.fold_layers(
        ...         lambda layer, x: x @ layer["w"], jnp.ones(3), layers
        ...     )
        ... )
        [2. 2. 2.]
    """
    try:
        check_options(options, _ACCEPTED - _FOLD_REFUSES.keys(), _FOLD_REFUSES, beside=("xs", "state", "args"))
        parts = prepare_layers(FOLD_LAYERS, block, x, layers, xs, args, state=state, **options).run()
        return parts[0] if len(parts) == 1 else parts
    except Exception as error:
        explained = explain(error, "fold_layers", block, x, LAYER_WORDS)
    raise explained
