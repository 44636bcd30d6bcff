"""Checks of the arguments that most verbs take: length, reverse, unroll, axes, key, and the names of options."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray, Tracer

from .._avals import (
    describe_argument,
    describe_leaf,
    describe_node,
    describe_traced,
    exact_int,
    is_key,
    shape_of,
    spec_parts,
)
from .._axes import LeafAxes, check_axes, spread_axes
from .._body.conventions import Convention
from .._errors import ArgumentError, ArgumentTypeError, BodyError, Fault, Row, TracedArgumentError, TreescanError
from .._loop.body import Body
from .._tree import leaves_with_path
from .._types import Array, Axes, MaskOptions, PyTree, UnkeyedOptions

_TRACED_LENGTH = (
    "A loop's length is part of the compiled program. For a length that is known only at run time, scan over the "
    "longest possible length and pass the traced one to `treescan.mask_scan(..., lengths=...)`; or make it a "
    "static argument of the function under `jax.jit`."
)


OF_MASK_SCAN = MaskOptions.__annotations__.keys() - UnkeyedOptions.__annotations__.keys()


def check_options(
    options: Mapping[str, Any], allowed: Mapping[str, str] | frozenset[str], refused: Mapping[str, str]
) -> None:
    """Refuses options that a verb does not have, with the nearest one that it has.

    Args:
        options: what the user passed.
        allowed: the names that the verb takes.
        refused: options of other verbs that this one cannot honour, each with the reason.
    """
    for name in options:
        if name in allowed:
            continue
        if name in refused:
            raise Fault(ArgumentError, f"{{verb}} over {{body}} takes no `{name}`: {refused[name]}")
        if name in OF_MASK_SCAN:
            raise Fault(
                ArgumentTypeError,
                f"{{verb}} over {{body}} has no option `{name}`.",
                "`treescan.mask_scan` takes it, for rows of unequal length.",
            )
        near = difflib.get_close_matches(name, list(allowed), 1)
        cure = f"Did you mean `{near[0]}`?" if near else f"Its options are {', '.join(sorted(allowed))}."
        raise Fault(ArgumentTypeError, f"{{verb}} over {{body}} has no option `{name}`.", cure)


def check_reverse(reverse: Any) -> bool:
    """A bool, Python's or NumPy's."""
    if isinstance(reverse, bool | np.bool_):
        return bool(reverse)
    raise Fault(
        ArgumentTypeError,
        f"{{call}}: `reverse` must be True or False, got {describe_traced(reverse)}.",
        "The direction must be known when tracing: pass a Python bool, for example `bool(...)` of a concrete value.",
    )


def check_unroll(unroll: Any, length: int) -> int:
    """A bool, or an int from 0 up, where 0 unrolls the whole loop; as an int, as True and 1 compare as equal."""
    if isinstance(unroll, bool | np.bool_):
        return max(length, 1) if unroll else 1
    steps = exact_int(unroll)
    if steps is None:
        raise Fault(
            TracedArgumentError if isinstance(unroll, Tracer) else ArgumentTypeError,
            f"{{verb}} over {{body}}: `unroll` must be an int or a bool, got {describe_traced(unroll)}.",
            "It is the number of {unit}s that are compiled into one iteration of the loop, so it must be known when "
            "the program is traced.",
        )
    if steps < 0:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `unroll` must be at least 0, got {steps}.",
            "Give 1 for a plain loop, k for k {unit}s per iteration, and 0 or True to unroll the whole loop.",
        )
    return steps


def check_length(length: Any, name: str = "length", cure: str = _TRACED_LENGTH) -> int | None:
    """An int from 0 up, or None. `cure` is what to do about a traced one."""
    if length is None or (type(length) is int and length >= 0):
        return length
    steps = exact_int(length)
    if isinstance(length, Tracer):
        raise Fault(TracedArgumentError, f"{{verb}} over {{body}}: `{name}` is {describe_traced(length)}.", cure)
    if steps is None:
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `{name}` must be an int, got {describe_argument(length)}.",
            "Give the number of steps as an int of at least 0. `int(...)` converts a whole number.",
        )
    if steps < 0:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: `{name}` must be at least 0, got {steps}.",
            "Give an int of at least 0.",
        )
    return steps


def check_bound(bound: Any, name: str) -> int:
    """A concrete int: the end of a range of indices."""
    index = exact_int(bound)
    if index is not None:
        return index
    if isinstance(bound, Tracer):
        raise Fault(
            TracedArgumentError,
            f"{{verb}} over {{body}}: `{name}` is {describe_traced(bound)}.",
            "Pass `max_length=`, the largest number of steps that the loop may take. It runs only the steps up to "
            "the bound, and is differentiable. Or make the bound a static argument of the function under `jax.jit`.",
        )
    raise Fault(
        ArgumentTypeError,
        f"{{verb}} over {{body}}: `{name}` must be an int, got {describe_argument(bound)}.",
        "The bounds come first, `treescan.fori(lower, upper, step, init)`, and count whole steps.",
    )


def resolve_axes(in_axes: Axes, xs: PyTree, root: str = "xs") -> LeafAxes | None:
    """One axis a leaf of xs, or None for the usual case: axis 0 of every leaf."""
    if type(in_axes) is int and in_axes == 0:
        return None
    axes = spread_axes("in_axes", in_axes, xs, root, none=True)
    check_axes("in_axes", axes, xs, root)
    if not any(axes) and None not in axes:
        return None
    ranks = [len(shape_of(leaf) or ()) for leaf in jax.tree.leaves(xs)]
    return tuple(axis if axis is None else axis % rank for axis, rank in zip(axes, ranks, strict=True))


def infer_length(xs: PyTree, length: int | None, axes: LeafAxes | None) -> int:
    """The number of steps: what every scanned leaf has along its axis, and `length`, where both are given.

    Raises:
        Fault: for an `ArgumentError` that lists all the leaves in question.
    """
    leaves = jax.tree.leaves(xs)
    sizes: list[Any] = []
    for leaf, axis in zip(leaves, axes or (0,) * len(leaves), strict=True):
        if axis is not None and _is_array(leaf):
            shape = getattr(leaf, "shape", None)
            if not shape:
                raise no_axis(xs)
            sizes.append(shape[axis])
            _check_replicated(xs, leaf, axis, axes)
    if length is None:
        if not sizes:
            why = "{all_whole}" if leaves else "{xs} holds no arrays"
            raise Fault(
                ArgumentError,
                "{verb} over {body}: the number of steps is unknown. No `length` is given, and "
                f"{'there are no xs' if xs is None else why}.",
                "Pass `length=` for a loop without inputs, or {arrays_as_xs} whose first axis is the steps.",
            )
        length = sizes[0]
    if any(size != length for size in sizes):
        raise _sizes_differ(xs, length, axes)
    assert length is not None
    return length


def _is_array(leaf: Any) -> bool:
    """False for values of types other than arrays that JAX may know how to scan over: lax.scan decides."""
    return hasattr(leaf, "shape") or isinstance(jax.typeof(leaf), ShapedArray)


def no_axis(xs: PyTree, root: str = "xs", error: type[TreescanError] = ArgumentError) -> Fault:
    """The error for leaves without an axis to scan over, with advice for lists of numbers."""
    without = _without_axis(xs, root)
    rows = [Row(path, "an axis to scan over", describe_node(node), "") for path, node in without]
    lists = [(row, node) for row, (_, node) in zip(rows, without, strict=True) if isinstance(node, list | tuple)]
    cure = (
        "The first axis of every leaf of xs is the {unit}s. If a leaf is the same for all {unit}s, give it "
        "`in_axes=None`."
    )
    if lists:
        row, node = lists[0]
        cure = (
            f"{row.leaf}: JAX reads a {type(node).__name__} of numbers as {len(jax.tree.leaves(node))} leaves "
            f"without an axis, not as {len(node)} {{unit}}s. Make it an array, `jnp.asarray({row.leaf})`."
        )
    return Fault(
        error,
        f"{{verb}} over {{body}}: {root} has leaves without an axis to scan over.",
        cure,
        header=("leaf", "expected", "is"),
        rows=rows,
    )


def _without_axis(xs: PyTree, root: str) -> list[tuple[str, Any]]:
    """The leaves of shape [], but a list (of lists) of nothing else as one."""

    def is_unit(node: Any) -> bool:
        return isinstance(node, list | tuple) and bool(node) and all(_is_scalar(x) or is_unit(x) for x in node)

    nodes = leaves_with_path(root, xs, is_leaf=is_unit)
    return [(path, node) for path, node in nodes if is_unit(node) or not shape_of(node)]


def _is_scalar(value: Any) -> bool:
    return jtu.all_leaves([value]) and shape_of(value) == ()


def _sizes_differ(xs: PyTree, length: Any, axes: LeafAxes | None) -> Fault:
    named = leaves_with_path("xs", xs)
    rows = [
        Row(path, str(leaf.shape[axis]), describe_leaf(leaf), f"axis {axis}")
        for (path, leaf), axis in zip(named, axes or (0,) * len(named), strict=True)
        if axis is not None
    ]
    says = "{verb} over {body}: the {leaves_of_xs} do not have the same number of steps."
    if len({row.expected for row in rows}) == 1:
        says = f"{{verb}} over {{body}}: `length` is {length}, but {{xs}} has {rows[0].expected} steps."
    return Fault(
        ArgumentError,
        says,
        "All {leaves_of_xs} are scanned together, and `length`, if given, must be their size. For fewer steps, slice "
        "{xs}.",
        header=("leaf", "steps", "is"),
        rows=rows,
    )


def _check_replicated(xs: PyTree, leaf: Any, axis: int, axes: LeafAxes | None) -> None:
    """Refuses a leaf that is sharded along the scanned axis, where shardings are part of the type."""
    if _axis_spec(leaf, axis) is None:
        return
    named = leaves_with_path("xs", xs)
    rows = [
        Row(path, "not sharded", describe_leaf(x), f"axis {a}")
        for (path, x), a in zip(named, axes or (0,) * len(named), strict=True)
        if a is not None and _axis_spec(x, a) is not None
    ]
    free = list(map(repr, spec_parts(jax.typeof(leaf).sharding.spec)))
    free[axis] = "None"
    resharded = f"jax.sharding.reshard({rows[0].leaf}, jax.P({', '.join(free)}))"
    raise Fault(
        ArgumentError,
        "{verb} over {body}: {xs} has leaves that are sharded along the axis that is scanned over.",
        f"Every device needs the slice of the current step: `{resharded}`, or shard another axis.",
        header=("leaf", "expected", "is"),
        rows=rows,
    )


def _axis_spec(leaf: Any, axis: int) -> Any:
    """How an axis is sharded, where shardings are part of the type; None if it is not."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    parts = () if sharding is None else spec_parts(sharding.spec)
    return parts[axis] if axis < len(parts) else None


def check_name(name: Any) -> str | None:
    """A string, or None."""
    if name is None or isinstance(name, str):
        return name
    raise Fault(
        ArgumentTypeError,
        f"{{verb}} over {{body}}: `name` must be a string, got {describe_argument(name)}.",
        'Profilers show the loop under this name, for example `name="encoder"`.',
    )


_OWN_KEYS = "each {unit} gets its own key, folded from it and the {unit}'s position."


def check_key(key: Any, why: str = _OWN_KEYS) -> Array | None:
    """One PRNG key, typed or raw; `why` says what becomes of it."""
    if key is None:
        return None
    if isinstance(key, jax.Array | np.ndarray):
        single = (
            key.ndim == 0 if is_key(key) else key.dtype == jnp.uint32 and key.shape == _raw_key_shape(_default_keys())
        )
        if single:
            return jnp.asarray(key)
    raise Fault(
        ArgumentTypeError,
        f"{{verb}} over {{body}}: `key` must be one PRNG key, got {describe_argument(key)}.",
        f"Pass `jax.random.key(seed)`: {why}",
    )


def _default_keys() -> str:
    """The implementation of PRNG keys that JAX is set to."""
    return str(getattr(jax.config, "jax_default_prng_impl"))  # noqa: B009, an attribute that checkers do not see


@functools.lru_cache
def _raw_key_shape(implementation: str) -> tuple[int, ...]:
    """The shape of an untyped key."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation))).shape


def check_keywords(
    body: Body, given: Mapping[str, str], convention: Convention, takes: tuple[str, ...] | None = None
) -> None:
    """Refuses a body that cannot take the keywords which the options make, or that needs more than those.

    Args:
        body: the body.
        given: the keywords that the step passes, each with what brings it (the option `key`).
        convention: how the verb calls the body.
        takes: the body's positional parameters in this call, where they are not always the same.
    """
    takes = takes or convention.takes
    _check_positional(body, convention, takes)
    accepts, needs = body.memo((check_keywords, len(takes)), lambda: _keywords(body.parameters, len(takes)))
    for name, why in given.items():
        if accepts is not None and name not in accepts:
            raise Fault(
                BodyError,
                f"{{body}} takes no keyword `{name}`, which {why} passes to it.",
                f"Add it to the body's parameters: `def {{step}}({', '.join(takes)}, *, {name}): ...`.",
            )
    for name in needs:
        if name not in given:
            raise Fault(
                BodyError, f"{{body}} needs the keyword `{name}`, which {{verb}} does not pass to it.", _needs(name)
            )


def needs_positional(body: Body) -> int:
    """How many positional arguments a body cannot do without, as far as that is known."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len(_needed([p for p in body.parameters or () if p.kind in kinds]))


def _needed(positional: list[inspect.Parameter]) -> list[str]:
    return [p.name for p in positional if p.default is p.empty and p.name not in ("key", "valid")]


def _check_positional(body: Body, convention: Convention, takes: tuple[str, ...]) -> None:
    """Refuses a body that cannot be called with as many positional arguments."""
    parameters = body.parameters
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = _needed(positional)
    if len(positional) < len(takes) or len(needed) > len(takes):
        first = ", ".join(takes)
        others = ". Bind other arguments first, `functools.partial({step}, ...)`"
        if convention.spread:
            others = ". Pass what all layers share as `args=(...)`, and what differs between layers as `xs`"
        raise Fault(
            BodyError,
            f"{{body}} takes ({', '.join(p.name for p in positional)}), but {{verb}} calls it with ({first}).",
            f"Write it as `def {{step}}({first}): ...`{others if len(needed) > len(takes) else ''}.",
        )


def _needs(name: str) -> str:
    if name == "key":
        return "Pass `key=jax.random.key(seed)`: each {unit} gets its own key."
    if name == "valid":
        return "`valid` is the step's mask: `treescan.mask_scan` passes it."
    return "Bind it first, `functools.partial({step}, ...)`, or give it a default."


def _keywords(
    parameters: tuple[inspect.Parameter, ...] | None, positional: int
) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """The keywords that a body accepts (None: any) beside its positional arguments, and those it must be given."""
    if parameters is None:
        return None, ()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        accepts = None
    else:
        accepts = frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
    later = (p for i, p in enumerate(parameters) if i >= positional and p.kind is p.POSITIONAL_OR_KEYWORD)
    named = [p for p in later if p.name in ("key", "valid")]  # all others are refused by their number
    keywords = [*named, *(p for p in parameters if p.kind is p.KEYWORD_ONLY)]
    return accepts, tuple(p.name for p in keywords if p.default is p.empty)
