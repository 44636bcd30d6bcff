"""`scan` over flax.nnx modules, with the roles of `nnx.scan`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack, overload

from flax import nnx

from ..._avals import PyTree
from ..._body.call import check_callable
from ..._errors import GROUP_WORDS, BodyFault, Misuse, TypeMisuse, expect, explain, verb
from ..._options.progress.meters import shown_as
from ..._tree import Prefix
from ..._types import Axes, ProgressLike, RematLike
from ..._verbs.prepare import refuse_report
from ._step import ModuleStep, ValueStep
from ._variables import axes_of, by_name, check_axes

F = TypeVar("F", bound=Callable[..., Any])
ELSEWHERE = dict.fromkeys(
    ("lengths", "seq_lengths", "mask"),
    "`treescan.mask_scan` takes `lengths` and `mask`, for rows of unequal length.",
)
"""What others take; see `named_options`."""
NNX_WORDS = {
    **GROUP_WORDS,
    "axis_none": "None gives it whole to every step. `nnx.Carry` is for what is carried, and `nnx.StateAxes` gives "
    "each variable of a module one of these",
}


class Settings(TypedDict, total=False):
    """What `scan` takes by name."""

    length: int | None
    reverse: bool
    unroll: int | bool
    _split_transpose: bool
    in_axes: Axes
    out_axes: Axes
    transform_metadata: Mapping[str, Any] | None
    graph: bool | None
    graph_updates: bool | None
    remat: RematLike | None
    progress: ProgressLike
    check_finite: bool


@overload
def scan(**settings: Unpack[Settings]) -> Callable[[F], F]: ...
@overload
def scan(f: F, **settings: Unpack[Settings]) -> F: ...
@verb
def scan(
    f: Callable[..., Any] | None = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    in_axes: Axes = (nnx.Carry, 0),
    out_axes: Axes = (nnx.Carry, 0),
    transform_metadata: Mapping[str, Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    remat: RematLike | None = None,
    progress: ProgressLike = None,
    check_finite: bool = False,
) -> Callable[..., Any]:
    """Scans a function whose arguments and outputs are arrays, flax.nnx modules, or trees of both.

    It takes the arguments of `nnx.scan`, and returns the same: outputs, and modules that are updated in place. The loop
    is a `treescan.scan`, with its checks and its options `remat`, `progress` and `check_finite`. Without `f`,
    `scan(...)` is a decorator.

    Each variable has one role. *Scanned* over: each step receives its slice, and the slices after the steps are
    stacked again. *Whole*: each step receives all of it, and changes to its value are dropped, as in `nnx.scan`. To
    keep changes, scan over the variable or carry it. *Carried*: each step receives the value of the last step.

    With `graph=False` or `graph_updates=False`, as in `nnx.scan`, only values of variables come out: of those that each
    step receives whole too, so changes to them are kept, and go from step to step. New variables are dropped,
    `transform_metadata` has no effect, an output is not a variable that the step received, and axes of variables are
    given by `nnx.prefix` instead of `nnx.StateAxes`. With `graph=False`, no variable is in two places.

    One thing that `nnx.scan` supports raises an error here: variables of mutable arrays.

    Args:
        f: the body. It may be a function, or a method of a class, but not of an instance.
        length: the number of steps T; needed if nothing is scanned over.
        reverse: run from step T-1 to step 0. Each output is at the position of its inputs.
        unroll: how many steps are compiled into one iteration of the loop. 0 or True unrolls the whole loop.
        in_axes: one entry for each argument, or one for all: the axis of size T to scan over; None if every step
            receives the whole argument; or `nnx.Carry` for the argument that is carried. An entry may be a tree prefix
            of the argument. `nnx.StateAxes` gives each variable of a module one of these, by its type or path.
        out_axes: the same for the outputs: the axis of the steps, or `nnx.Carry`. If it is not a tuple, it is for a
            single output.
        transform_metadata: with `nnx.PARTITION_NAME`, the name of the scanned axis in the shardings of variables.
        graph: True: modules are graphs, which may share references. False: they are trees. None: the mode that
            `nnx.set_graph_mode` set, which is True by default.
        graph_updates: True: changes to the structure of scanned modules are visible outside. False: only new values
            are. None: the mode that `nnx.set_graph_updates` set, which is True by default.
        _split_transpose: as for `treescan.scan`.
        remat: as for `treescan.scan`.
        progress: as for `treescan.scan`. `show` receives a dict from names to the arrays of the carry.
        check_finite: as for `treescan.scan`, of the carry and the carried variables. In the record, `carry` and `x` are
            dicts from names to arrays.

    Returns:
        The function that scans, or a decorator. The function returns what `f` returns. The modules of the last carry
        are those that were passed in. Outputs are stacked, `[T, ...]` if their axis is 0.

    Raises:
        ArgumentError: if an argument is out of range, conflicts with another, or does not fit the data.
        BodyError: if `f` is not callable, or its outputs do not match `out_axes`.
        CarryError: if the returned carry differs from the given one in structure, shape, dtype or modules.
        NonFiniteError: if `check_finite` finds something.

    Examples:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from treescan.integrations.nnx import scan
        >>> class Sum(nnx.Module):
        ...     def __init__(self):
        ...         self.total = nnx.Variable(jnp.zeros(()))
        >>> @scan
        ... def step(module, x):
        ...     module.total[...] += x
        ...     return module, module.total[...]
        >>> module, totals = step(Sum(), jnp.array([1.0, 2.0, 3.0]))
        >>> print(module.total[...], totals)
        6.0 [1. 3. 6.]
    """
    options: dict[str, Any] = {"length": length, "reverse": reverse, "unroll": unroll, "remat": remat}
    options |= {"progress": shown_as(progress, by_name), "check_finite": check_finite}
    options["lowering"] = (("_split_transpose", True),) if _split_transpose else ()
    settings = in_axes, out_axes, transform_metadata or {}, graph, graph_updates, options
    return functools.partial(verb(_decorated), settings) if f is None else _decorated(settings, f)


def _decorated(settings: tuple[Any, ...], f: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return _scanning(f, *settings)
    except Exception as error:
        explained = explain(error, "scan", f)
    raise explained


def _scanning(
    f: Callable[..., Any],
    in_axes: Axes,
    out_axes: Axes,
    metadata: Mapping[str, Any],
    graph: bool | None,
    graph_updates: bool | None,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """The function that scans."""
    check_callable(f, "integrations.nnx.scan(step)")
    refuse_report(options["check_finite"])
    _refuse_method(f)
    graph = _check_mode("graph", graph, "set_graph_mode")
    updates = _check_mode("graph_updates", graph_updates, "set_graph_updates") and graph
    if metadata and nnx.PARTITION_NAME not in metadata:
        raise Misuse(
            f"{{call}}: `transform_metadata` has no `nnx.PARTITION_NAME`, but {', '.join(map(repr, metadata))}.",
            "It names the scanned axis in the shardings of variables: `{nnx.PARTITION_NAME: 'layers'}`.",
        )
    carried, returned = check_axes(in_axes, out_axes, updates=updates)
    common = (f, Prefix.of(out_axes), carried, returned, axes_of(in_axes, out_axes))
    step = ModuleStep(*common, tuple(metadata.items())) if updates else ValueStep(*common, (), tree=not graph)

    @functools.wraps(f)
    @verb
    def scanning(*args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            return step.run(in_axes, *_positional(f, args, kwargs), options)
        except Exception as error:
            explained = explain(error, "scan", f, words=NNX_WORDS)
        raise explained

    return scanning


def _positional(
    f: Callable[..., object], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> tuple[list[str], tuple[PyTree, ...]]:
    """The arguments by their places, defaults included, each with its name."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return [f"args[{i}]" for i in range(len(args))], args
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BodyFault(f"{{body}} cannot be called with these arguments: {error}.") from None
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeMisuse(
            f"{{call}}: {', '.join(bound.kwargs)} are passed by keyword, but `in_axes` applies to positional "
            "arguments.",
            "Make it a positional parameter, or bind it first, in a function of the other arguments.",
        )
    variadic = inspect.Parameter.VAR_POSITIONAL
    single = [name for name in bound.arguments if signature.parameters[name].kind is not variadic]
    names = single[: len(bound.args)]
    return [*names, *(f"args[{i}]" for i in range(len(names), len(bound.args)))], bound.args


def _refuse_method(f: Callable[..., object]) -> None:
    while isinstance(f, functools.partial):
        f = f.func
    if inspect.ismethod(f) and isinstance(f.__self__, nnx.Pytree):
        raise TypeMisuse(
            "{call} got a bound method, so it would not see the variables of the instance.",
            "Use it as a decorator in the class, or pass the function of the class and the instance as an argument: "
            f"`scan({type(f.__self__).__name__}.{f.__name__}, ...)(module, ...)`.",
        )


def _check_mode(name: str, mode: Any, setting: str) -> bool:
    """Whether a mode is on; for None what flax's setting says."""
    ambient = getattr(nnx, setting, None)  # the oldest flax has none
    if mode is None:
        mode = True if ambient is None else ambient.current_value()
    cure = "None takes what `nnx.set_graph_mode` and `nnx.set_graph_updates` say, which is True by default."
    expect(isinstance(mode, bool), name, "True, False or None", mode, cure)
    return mode
