"""The start and end of the verbs over layers: checks the arguments, and arranges the pattern."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import dataclass, replace
from typing import Any

import jax

from .._axes import LeafAxes, static_axes
from .._body.conventions import Convention
from .._checks.arguments import check_key, check_keywords, check_name, check_reverse, check_unroll, needs_positional
from .._errors import TreescanError, describe_body, speaking_of
from .._loop.body import Body
from .._loop.retrace import note_types
from .._transforms.finite.backward import in_reverse_mode
from .._transforms.finite.case import About
from .._transforms.finite.deliver import deliver
from .._transforms.finite.layers import CheckLayers
from .._transforms.finite.layers_backward import CheckLayerCotangents
from .._transforms.finite.refuse import looks_backward, refuse_prefetch
from .._transforms.finite.site import Slices
from .._transforms.layers.bar import check_shown
from .._transforms.layers.pattern import Pattern
from .._transforms.program import Arguments, Call
from .._tree import Prefix, freeze_static
from .._types import Array, Axes, FiniteCheck, ProgressLike, PyTree, Save
from ..carries._registry import Adopted, adopt
from .layer_arguments import (
    Stacks,
    check_args,
    check_gradient,
    check_saves,
    check_stacks,
    is_pattern,
    refuse_mutable,
)
from .layer_state import LayerStates, check_state
from .prepare import body_of, restored


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
