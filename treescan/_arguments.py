"""Checks of the arguments that most verbs take: length, reverse, unroll, axes, key, and the names of options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from ._avals import (
    Array,
    AxisSpec,
    LeafAxes,
    PyTree,
    clamped,
    describe_leaf,
    describe_node,
    describe_traced,
    dtype_of,
    exact_int,
    is_key,
    shape_of,
    spec_parts,
)
from ._body.call import are_alike
from ._body.signature import Convention
from ._errors import (
    ArgumentError,
    ArgumentTypeError,
    BodyFault,
    Fault,
    Misuse,
    Row,
    TracedArgumentError,
    TracedMisuse,
    TypeMisuse,
    expect,
    expect_int,
)
from ._loop.loop import Body
from ._text import advice, converted
from ._transforms.axes import check_axes, spread_axes
from ._tree import is_static, leaves_with_path, same_structure
from ._types import Axes, MaskOptions, UnkeyedOptions

OF_MASK_SCAN = MaskOptions.__annotations__.keys() - {"length", *UnkeyedOptions.__annotations__}


def check_options(
    options: Mapping[str, object],
    allowed: frozenset[str],
    refused: Mapping[str, str],
    *,
    beside: tuple[str, ...] = (),
    time_axis: object = 0,
) -> None:
    """Refuses options that a verb does not have, with the nearest one that it has.

    Args:
        options: what the user passed.
        allowed: the names that the verb takes.
        refused: options of other verbs that this one cannot honour, each with the reason.
        beside: what the verb takes beside them, which may be meant too.
        time_axis: the axis of the steps in masks, where a verb takes these.
    """
    for name in (name for name in options if name not in allowed):
        if name in refused:
            raise Misuse(f"{{call}} takes no `{name}`: {refused[name]}")
        cure = advice(name, allowed.union(beside), time_axis)
        if name == "time_axis" and "in_axes" in allowed:
            cure = "`in_axes` is the axis of the steps in xs."
        elif name in OF_MASK_SCAN:
            cure = "`treescan.mask_scan` takes it, for rows of unequal length."
        elif not converted(name, allowed) and (says := converted(name, OF_MASK_SCAN)):
            cure = f"`treescan.mask_scan` has an option for it. {says}"
        raise TypeMisuse(f"{{call}} has no option `{name}`.", cure)


def check_reverse(reverse: object) -> bool:
    """A bool, Python's or NumPy's."""
    known = "The direction must be known when tracing: pass a Python bool, for example `bool(...)` of a concrete value."
    if not isinstance(reverse, bool | np.bool_):
        expect(False, "reverse", "True or False", reverse, known)
    return bool(reverse)


class HowRun(TypedDict):
    """How a loop runs, as arguments of a `Call`."""

    length: int
    reverse: bool
    unroll: int


def check_run(length: int, reverse: object, unroll: object) -> HowRun:
    """How a loop of so many steps runs. An `unroll` of 0 or True unrolls the whole loop."""
    is_reversed = check_reverse(reverse)
    if isinstance(unroll, bool | np.bool_):
        unroll = max(length, 1) if unroll else 1  # an int, as True and 1 compare as equal
    elif type(unroll) is not int or unroll < 0:
        unroll = expect_int(
            unroll,
            "unroll",
            "It is the number of {unit}s that are compiled into one iteration of the loop, so it must be known when "
            "the program is traced.",
            kind="an int or a bool",
            least=0,
            small="Give 1 for a plain loop, k for k {unit}s per iteration, and 0 or True to unroll the whole loop.",
            error=TracedArgumentError if isinstance(unroll, Tracer) else ArgumentTypeError,
        )
    return {"length": length, "reverse": is_reversed, "unroll": unroll}


_TRACED_LENGTH = (
    "A loop's length is part of the compiled program. For a length that is known only at run time, scan over the "
    "longest possible length and pass the traced one to `treescan.mask_scan(..., lengths=...)`; or make it a "
    "static argument of the function under `jax.jit`."
)
_LENGTH_OF_ROWS = (
    "`length` is the number of steps of the whole loop. Did you mean `lengths`, the number of valid steps of each row? "
    "`mask_scan`, `fold` and `accumulate` take it."
)
_MOST_OF_ROWS = (
    "It is one number for all rows. If rows should stop after different numbers of steps, count the steps in the "
    "carry, and let the condition of `while_scan` return one bool for each row."
)


def check_length(length: object, name: str = "length", cure: str = _TRACED_LENGTH) -> int | None:
    """An int from 0 up, or None. `cure` is what to do about a traced one."""
    if length is None or (type(length) is int and length >= 0):
        return length
    rows = _LENGTH_OF_ROWS if name == "length" else _MOST_OF_ROWS
    dtype, counts = dtype_of(length), False  # whether it is a list or an array of ints, as `lengths` are
    if isinstance(length, list | tuple):
        counts = bool(length) and all(exact_int(item) is not None for item in length)
    elif shape_of(length) and dtype is not None:
        counts = jnp.issubdtype(dtype, jnp.integer)
    expect(not counts, name, "an int", length, rows)
    if isinstance(length, Tracer):
        raise TracedMisuse(f"{{call}}: `{name}` is {describe_traced(length)}.", cure)
    whole = "Give the number of steps as an int of at least 0. `int(...)` converts a whole number."
    return expect_int(length, name, whole, least=0, small="Give an int of at least 0.")


_OFFSET_CURE = (
    "It is the position of the first {unit} in the whole run: an int of at least 0, or an int array of shape [], "
    "traced or not."
)


def check_offset(offset: Any, steps: int) -> Any:
    """int32[]: the position of the first step. An int becomes an array too, so all parts of a run share one program.

    One that is not known is clamped to what is allowed.

    Raises:
        Fault: for an `ArgumentTypeError` if it is not one int, for an `ArgumentError` if it is known and out of range.
    """
    dtype = None if type(offset) is int else dtype_of(offset)  # one beyond int32 has none
    is_int = dtype is not None and jnp.issubdtype(dtype, jnp.integer) and shape_of(offset) == ()
    expect(is_int or type(offset) is int, "offset", "an int", offset, _OFFSET_CURE)
    most = 2**31 - 1 - (steps if isinstance(steps, int) else 0)
    if isinstance(offset, Tracer) or not getattr(offset, "is_fully_addressable", True):
        return clamped(jnp.asarray(offset), most)
    number = int(offset)
    expect(number >= 0, "offset", "at least 0", number, _OFFSET_CURE, error=ArgumentError)
    expect(number <= most, "offset", f"at most {most}", number, "Positions are of type int32.", error=ArgumentError)
    return np.int32(number)


def resolve_axes(in_axes: Axes, xs: PyTree, root: str = "xs") -> LeafAxes | None:
    """One axis a leaf of xs, or None for the usual case: axis 0 of every leaf."""
    if type(in_axes) is int and in_axes == 0:
        return None
    if xs is None:
        raise Misuse("{call}: `{in_axes}` is for xs, but there are none.", "Leave it out.")
    axes = spread_axes("{in_axes}", in_axes, xs, root, none=True)
    check_axes("{in_axes}", axes, xs, root)
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
    sizes: list[int] = []
    for leaf, axis in zip(leaves, axes or (0,) * len(leaves), strict=True):
        # Of other types than arrays JAX may know how to scan over them: `lax.scan` decides.
        if axis is not None and (hasattr(leaf, "shape") or isinstance(jax.typeof(leaf), ShapedArray)):
            shape = getattr(leaf, "shape", None)
            if not shape:
                raise no_axis(xs)
            sizes.append(shape[axis])
            _check_replicated(xs, leaf, axis, axes)
    if length is None:
        if not sizes:
            why = "{all_whole}" if leaves else "{xs} holds no arrays"
            raise Misuse(
                "{call}: the number of steps is unknown. No `length` is given, and "
                f"{'there are no xs' if xs is None else why}.",
                "Pass `length=` for a loop without inputs, or {arrays_as_xs} whose first axis is the steps.",
            )
        length = sizes[0]
    if [size for size in sizes if size != length]:
        raise _sizes_differ(xs, length, axes)
    assert length is not None
    return length


def no_axis(xs: PyTree, root: str = "xs", fault: Callable[..., Fault] = Misuse) -> Fault:
    """The error for leaves without an axis to scan over, with advice for lists of numbers."""
    without = without_axis(root, xs)
    rows = [Row(path, "an axis to scan over", describe_node(node)) for path, node in without]
    cure = (
        "The first axis of every leaf of xs is the {unit}s. If a leaf is the same for all {unit}s, give it None in "
        "`{in_axes}`."
    )
    if fault is Misuse and [path for path, _ in without] == [root]:
        count = exact_int(xs)
        cure = f"The first axis of {root} is the {{unit}}s. If this is the carry: {{init}} comes before {root}."
        cure += f" If it is the number of {{unit}}s: pass `{{length}}={count}` in its place." if count else ""
    for path, node in without:
        if isinstance(node, list | tuple):
            cure = f"Make it an array, `jnp.asarray({path})`."
            if len({len(item) if isinstance(item, list | tuple) else None for item in node}) > 1:
                cure = (
                    "Its items differ in length. If each is a sequence, make one batch of them, "
                    f"`treescan.pad([jnp.asarray(each) for each in {path}])`, and pass it to `treescan.mask_scan`."
                )
            cure = (
                f"{path}: JAX reads a {type(node).__name__} of numbers as {len(jax.tree.leaves(node))} leaves "
                f"without an axis, not as {len(node)} {{unit}}s. {cure}"
            )
            break
    return fault(f"{{call}}: {root} has leaves without an axis to scan over.", cure, rows=rows)


def without_axis(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of shape [], but a list (of lists) of nothing else as one."""

    def is_unit(node: object) -> bool:
        return isinstance(node, list | tuple) and bool(node) and all(is_unit(x) or shape_of(x) == () for x in node)

    nodes = leaves_with_path(root, tree, is_leaf=is_unit)
    return [(path, node) for path, node in nodes if is_unit(node) or not shape_of(node)]


def refuse_unsliced(xs: PyTree, root: str = "xs") -> None:
    """Refuses iterators, and arrays that JAX does not know (of texts, of torch): no step would have a slice of them."""

    def is_unsliced(leaf: object) -> bool:
        shape = getattr(leaf, "shape", None)
        return is_static(leaf) and ((isinstance(shape, tuple) and shape != ()) or isinstance(leaf, Iterator | range))

    unsliced = [(path, leaf) for path, leaf in leaves_with_path(root, xs) if is_unsliced(leaf)]
    if unsliced:
        path, first = unsliced[0]
        numbers = f"list({path})" if isinstance(first, Iterator) else path
        numbers = f"{path}.astype(float)" if getattr(first, "dtype", None) == np.object_ else numbers
        raise TypeMisuse(
            f"{{call}}: {root} has leaves that JAX cannot slice.",
            f"Each {{unit}} would receive the whole leaf. Make an array of its numbers, `jnp.asarray({numbers})`. What "
            "is not numbers stays out: the {step} can close over it.",
            rows=[
                Row(path, "an array of numbers", f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}".rstrip())
                for path, leaf in unsliced
            ],
        )


def _sizes_differ(xs: PyTree, length: int | None, axes: LeafAxes | None) -> Fault:
    rows = rows_of_steps(xs, axes)
    says = "{call}: the {leaves_of_xs} do not have the same number of steps."
    if len({row.expected for row in rows}) == 1:
        says = f"{{call}}: `length` is {length}, but {{xs}} has {rows[0].expected} steps."
    return Misuse(
        says,
        *_listed_steps(xs, axes),
        "All {leaves_of_xs} are scanned together, and `length`, if given, must be their size. For fewer steps, slice "
        "{xs}.",
        header=("leaf", "steps", "is"),
        rows=rows,
    )


def rows_of_steps(xs: PyTree, axes: LeafAxes | None) -> list[Row]:
    """A row for each leaf that is scanned over: how many steps it has."""
    named = with_axes(leaves_with_path("xs", xs), axes)
    return [Row(path, str(leaf.shape[axis]), describe_leaf(leaf), f"axis {axis}") for path, leaf, axis in named]


def _listed_steps(xs: PyTree, axes: LeafAxes | None) -> list[str]:
    """Advice for a list: its items may be steps, or sequences of different lengths."""
    if axes is None and are_alike(xs):
        return [
            f"Did you forget `treescan.stack`? xs is a {type(xs).__name__} of {len(xs)} trees of the same types. If "
            "each item is a {unit}, pass `treescan.stack(xs)`."
        ]
    if axes is None and type(xs) is list and len(xs) > 1 and all(same_structure(item, xs[0]) for item in xs):
        return [
            "If each item of the list is a sequence, make one batch of them, `treescan.pad(xs)`, and pass it to "
            "`treescan.mask_scan`."
        ]
    return []


def with_axes(leaves: list[tuple[str, Any]], axes: LeafAxes | None) -> list[tuple[str, Any, int]]:
    """Those of some leaves with their paths that have an axis, each with it; without axes, all have the first."""
    given = axes or (0,) * len(leaves)
    return [(*named, axis) for named, axis in zip(leaves, given, strict=True) if axis is not None]


def _check_replicated(xs: PyTree, leaf: object, axis: int, axes: LeafAxes | None) -> None:
    """Refuses a leaf that is sharded along the scanned axis, where shardings are part of the type."""
    if axis_spec(leaf, axis) is None:
        return
    rows = [
        Row(path, "not sharded", describe_leaf(x), f"axis {a}")
        for path, x, a in with_axes(leaves_with_path("xs", xs), axes)
        if axis_spec(x, a) is not None
    ]
    free = list(map(repr, spec_parts(jax.typeof(leaf).sharding.spec)))
    free[axis] = "None"
    resharded = f"jax.sharding.reshard({rows[0].leaf}, jax.P({', '.join(free)}))"
    raise Misuse(
        "{call}: {xs} has leaves that are sharded along the axis that is scanned over.",
        f"Every device needs the slice of the current step: `{resharded}`, or shard another axis. If steps are parts "
        "of a batch, use `treescan.chunk_map` instead: each device then computes its share of each part.",
        rows=rows,
    )


def axis_spec(leaf: object, axis: int) -> AxisSpec:
    """How an axis is sharded, where shardings are part of the type; None if it is not."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    parts = () if sharding is None else spec_parts(sharding.spec)
    return parts[axis] if axis < len(parts) else None


_OWN_KEYS = "each {unit} gets its own key, folded from it and the {unit}'s position."


_SEVERAL_KEYS = (
    "If each row has a key of its own, carry them, `treescan.carries.keys(...)` in {init}. If each {unit} has one, "
    "pass them in {xs}."
)


def check_key(key: object, why: str = _OWN_KEYS) -> Array | None:
    """One PRNG key, typed or raw; `why` says what becomes of it."""
    if key is None:
        return None
    default = str(getattr(jax.config, "jax_default_prng_impl"))  # noqa: B009, an attribute that checkers do not see
    single = isinstance(key, jax.Array | np.ndarray) and (
        key.ndim == 0 if is_key(key) else key.dtype == jnp.uint32 and key.shape == _raw_key_shape(default)
    )
    cures = [f"Pass `jax.random.key(seed)`: {why}"]
    if is_key(key) or (dtype_of(key) == jnp.uint32 and (shape_of(key) or ())[-1:] == _raw_key_shape(default)):
        cures.append(_SEVERAL_KEYS)
    expect(single, "key", "one PRNG key", key, *cures)
    return jnp.asarray(key)


@functools.lru_cache
def _raw_key_shape(implementation: str) -> tuple[int, ...]:
    """The shape of an untyped key."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=implementation))).shape


def check_keywords(
    body: Body,
    given: Mapping[str, str],
    convention: Convention,
    takes: tuple[str, ...] | None = None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuses a body that cannot take the keywords which the options make, or that needs more than those.

    Args:
        body: the body.
        given: the keywords that the step passes, each with what brings it (the option `key`).
        convention: how the verb calls the body.
        takes: the body's positional parameters in this call, where they are not always the same.
        elsewhere: where a body has keywords from that this verb does not pass.
    """
    takes = takes or convention.takes
    accepts, needs, is_fit = body.memo.keep((check_keywords, len(takes)), lambda: _keywords(body, len(takes)))
    if not is_fit:
        raise _unfit(body, convention, takes)
    for name, why in given.items():
        if accepts is not None and name not in accepts:
            raise BodyFault(
                f"{{body}} takes no keyword `{name}`, which {why} passes to it.",
                f"Add it to the body's parameters: `def {{step}}({', '.join(takes)}, *, {name}): ...`.",
            )
    for name in needs:
        if name not in given:
            cures = {**_CURES_OF_KEYWORDS, **elsewhere}
            cure = cures.get(name, "Bind it first, `functools.partial({step}, ...)`, or give it a default.")
            if name not in cures and (meant := _KEYWORDS_ALSO_CALLED.get(name)):
                cure = f"Did you mean `{meant}`? {cures[meant]}"
            raise BodyFault(f"{{body}} needs the keyword `{name}`, which {{verb}} does not pass to it.", cure)


_PASSED = ("key", "valid", "first")
_CURES_OF_KEYWORDS = {
    "key": "Pass `key=jax.random.key(seed)`: each {unit} gets its own key.",
    "valid": "`valid` is the step's mask: `treescan.mask_scan` passes it.",
    "first": "`first` says which rows take the first valid step of their segment: `treescan.mask_scan` passes it.",
}


_KEYWORDS_ALSO_CALLED = {"is_first": "first", "is_valid": "valid", "mask": "valid", "rng": "key", "prng_key": "key"}


def needs_positional(body: Body) -> int:
    """How many positional arguments a body cannot do without, as far as that is known."""
    return len([p for p in body.positional if p.default is p.empty and p.name not in _PASSED])


def _unfit(body: Body, convention: Convention, takes: tuple[str, ...]) -> Fault:
    """The error for a body that cannot be called with as many positional arguments."""
    first = ", ".join(takes)
    others = f". {convention.further}"
    if "mask" in body.names[len(takes) :] and not convention.spread:
        others = ". `mask_scan` passes each step's mask as the keyword `valid`"
    return BodyFault(
        f"{{body}} takes ({', '.join(body.names)}), but {{verb}} calls it with ({first}).",
        f"Write it as `def {{step}}({first}): ...`{others if needs_positional(body) > len(takes) else ''}.",
    )


def _keywords(body: Body, positional: int) -> tuple[frozenset[str] | None, tuple[str, ...], bool]:
    """What a body accepts beside so many positional arguments.

    Returns:
        The keywords that it accepts (None: any), those it must be given, and whether it takes the positional arguments.
    """
    accepts, needs, anything, any_number = list[str](), list[str](), False, False
    for i, p in enumerate(body.parameters or ()):
        anything |= p.kind is p.VAR_KEYWORD
        any_number |= p.kind is p.VAR_POSITIONAL
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
            accepts.append(p.name)
        # All others behind the positional ones are refused by their number.
        by_keyword = p.kind is p.POSITIONAL_OR_KEYWORD and i >= positional and p.name in _PASSED
        if p.default is p.empty and (p.kind is p.KEYWORD_ONLY or by_keyword):
            needs.append(p.name)
    is_fit = any_number or len(body.names) >= positional >= needs_positional(body)
    unknown = body.parameters is None
    return None if anything or unknown else frozenset(accepts), tuple(needs), is_fit or unknown
