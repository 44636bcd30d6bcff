"""`jax.checkpoint` for steps and chunks: as a `Remat` says, and so that no gradient decides anything again."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._avals import Leaves, PyTree, devices_of, is_key, is_mutable, is_sharded, varying_axes
from .._loop.chunk import RunChunk
from .._loop.feed import Feed
from .._loop.loop import Loop, Plan, Step
from .._trace.equations import aval_of, called, has_primitives, jaxprs_within
from .._trace.rewriting import is_rewriting
from .._trace.smooth import smooth_part
from .._trace.trace import Trace
from .._transforms.refuse import refuse_symbolic
from .._types import Remat

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Primitive

# The tables below name primitives. One that is in none of them neither decides nor chooses: its result is continuous in
# what it is given, so two roundings of it are as good as one. `tests/promises/test_tables.py` holds this of every
# primitive of JAX: a release with a new one fails there until somebody says what it does.

_ORDER = frozenset({"ge", "gt", "le", "le_to", "lt", "lt_to"})
"""Primitives that order two numbers; those with `_to` order all floating-point numbers, NaN too."""

_COMPARE = _ORDER | {"argmax", "argmin", "eq", "eq_to", "is_finite", "ne"}
"""Primitives that make a bool, or the number of a place, of numbers."""

_RANK = frozenset({"approx_top_k", "sort", "top_k"})
"""Primitives that may return numbers and their order."""

_CAST = frozenset({"bitcast_convert_type", "convert_element_type"})
"""Primitives that return what they are given in another type."""

_JUMP = frozenset({"atan2", "ceil", "floor", "rem", "round", "sign"})
"""Primitives that return floating-point numbers, and jump between them."""

# fmt: off
_CHOOSE = frozenset(
    {
        "approx_top_k", "argmax", "argmin", "cummax", "cummin", "max", "min", "pmax", "pmin", "reduce_max",
        "reduce_min", "reduce_window_max", "reduce_window_min", "scatter-max", "scatter-min", "select_and_gather_add",
        "select_and_scatter_add", "sort", "top_k",
    }
)
"""Primitives that return one of the numbers that they are given, or where it is. What holds others may choose, too."""

_MOVES = _COMPARE | _CHOOSE | frozenset(
    {
        "and", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "gather", "iota", "neg", "not", "or", "pad",
        "reshape", "rev", "select_n", "slice", "split", "squeeze", "stop_gradient", "transpose",
    }
)
# fmt: on
"""Primitives that round nothing: what they return, they were given, or it is a bool or a number of a place. Any other
counts as rounding, which is the safe side."""
_DTYPES = ("new_dtype", "dtype", "preferred_element_type")
_COMPLEX_OF_REAL = frozenset({"complex", "eig", "fft", "io_callback", "pure_callback", "schur"})


Policy: TypeAlias = Callable[..., Any]
"""A policy of `jax.checkpoint`: whether the result of a primitive is saved, of (primitive, *types, **parameters)."""


@dataclass(frozen=True)
class SaveDecisions:
    """A policy that saves decisions on floating-point numbers, and beside them what another policy saves.

    It saves no complex number: JAX rounds saved values with `reduce_precision`, which accepts only real numbers
    (`TypeError: reduce_precision does not accept dtype complex64`, in JAX 0.8 to 0.10 at least).

    Attributes:
        policy: the other policy, as for `jax.checkpoint`.
        thresholds: whether to save comparisons with a number, too. They need not be saved if only derivatives of
            continuous functions make them, such as that of `relu`; see `compares`.
    """

    policy: Policy = jax.checkpoint_policies.nothing_saveable
    thresholds: bool = True

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Any:
        is_threshold = prim.name in _ORDER and any(aval.shape == () for aval in avals)
        if is_decision(prim, avals, params) and (self.thresholds or not is_threshold):
            return True
        return False if _may_be_complex(prim, avals, params) else self.policy(prim, *avals, **params)


def is_decision(prim: Primitive, avals: tuple[Any, ...], params: dict[str, Any]) -> bool:
    """Whether a primitive makes something discrete of floating-point numbers: a bool, an int, a sign, whole numbers.

    A sort does that if it sorts something else along, as it does for the order of the numbers and in its derivative.
    """
    if not any(_has_kind(aval.dtype, jnp.inexact) for aval in avals):
        return False
    if prim.name in _CAST:
        return not _has_kind(params["new_dtype"], jnp.inexact)
    jumps = prim.name in _JUMP or (prim.name in _RANK and (prim.name != "sort" or len(avals) > 1))
    return prim.name in _COMPARE or (jumps and not _may_be_complex(prim, avals, params))


def chooses(jaxpr: Jaxpr) -> bool:
    """Whether an open jaxpr chooses among values, for example their maximum.

    Such a result is not less than any of the values. If it is saved and they are computed again, in other roundings,
    it may be: then the root of the difference is not a number.
    """
    return any(map(_chooses, jaxpr.eqns))


def relates(jaxpr: Jaxpr) -> bool:
    """Whether an open jaxpr may compare values with those that it chose among them, for example with their maximum.

    Two loops may round such a relation in two ways for many values at once: XLA may contract a product into the
    difference that is compared with 0 in one of them, and not in the other.
    """
    return chooses(jaxpr) and (compares(jaxpr) or has_primitives(jaxpr, _JUMP | {"eq", "ne"}))


def _chooses(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    if name == "custom_jvp_call" and _is_relu(equation.params["call_jaxpr"].jaxpr):
        return False
    return name in _CHOOSE or any(map(chooses, jaxprs_within(equation)))


def compares(jaxpr: Jaxpr) -> bool:
    """Whether an open jaxpr orders floating-point numbers by itself, or may do so in a rule for its derivative.

    If not, only the derivatives of continuous functions compare, such as those of `relu`, `abs` and `clip`. Wherever
    two roundings of a value lie on two sides of the kink of such a function, both of its slopes are as good.
    """
    return any(map(_compares, jaxpr.eqns))


def _compares(equation: JaxprEqn) -> bool:
    name = equation.primitive.name
    if name == "custom_jvp_call":
        return not _is_relu(equation.params["call_jaxpr"].jaxpr)
    if name == "clamp":  # between two numbers, it is continuous
        return not all(hasattr(equation.invars[i], "val") for i in (0, 2))
    if name in _ORDER:
        return any(_has_kind(aval_of(atom).dtype, jnp.inexact) for atom in equation.invars)
    return name == "custom_vjp_call" or any(map(compares, jaxprs_within(equation)))


def _is_relu(jaxpr: Jaxpr) -> bool:
    """Whether a function with a derivative rule is `jax.nn.relu`, whose rule compares with 0 alone."""
    return len(jaxpr.eqns) == 1 and jaxpr.eqns[0].params.get("name") == "relu"


def decides(jaxpr: Jaxpr) -> bool:
    """Whether an open jaxpr compares or chooses among floating-point numbers that it has rounded itself.

    What it was given, and only moved, has the same bits in each place that reads it.
    """
    return _rounded(jaxpr, [False] * len(jaxpr.invars)) is None


def _rounded(jaxpr: Jaxpr, given: list[bool]) -> list[bool] | None:
    """For each output of an open jaxpr whether it is rounded there, if such inputs are. None: it decides on these."""
    found = {var for var, flag in zip(jaxpr.invars, given, strict=True) if flag}
    for equation in jaxpr.eqns:
        flags = [not hasattr(atom, "val") and atom in found for atom in equation.invars]
        inner = called(equation) if equation.primitive.name == "jit" else None
        rounded = any(flags) or not moves(equation)
        if inner is None and rounded and (_compares(equation) or _chooses(equation)):
            return None
        returned = [rounded] * len(equation.outvars) if inner is None else _rounded(inner[0], flags)
        if returned is None:
            return None
        found.update([var for var, flag in zip(equation.outvars, returned, strict=True) if flag])
    return [not hasattr(atom, "val") and atom in found for atom in jaxpr.outvars]


def moves(equation: JaxprEqn) -> bool:
    """Whether an equation rounds nothing."""
    if equation.primitive.name == "convert_element_type":  # to the same type, which is no longer weak
        return bool(equation.params["new_dtype"] == aval_of(equation.invars[0]).dtype)
    return equation.primitive.name in _MOVES


def _may_be_complex(prim: Primitive, avals: tuple[Any, ...], params: dict[str, Any]) -> bool:
    """Whether a primitive may return complex numbers: from complex inputs, by a parameter, or from real inputs."""
    types = (*(aval.dtype for aval in avals), *(params.get(name) for name in _DTYPES))
    return prim.name in _COMPLEX_OF_REAL or any(_has_kind(dtype, jnp.complexfloating) for dtype in types)


def _has_kind(dtype: Any, kind: Any) -> bool:
    return dtype is not None and bool(jnp.issubdtype(dtype, kind))


_CARRY = "treescan carry"


@dataclass(frozen=True)
class Checkpointed:
    """A step of which the gradient saves only the inputs, and what the policy selects.

    Attributes:
        step: the inner step.
        looped: whether a loop runs it, where nothing can be merged with the first computation. Elsewhere that has to
            be forbidden to the compiler, or it would save everything after all.
        policy: what else is saved, as for `jax.checkpoint`, beside decisions; None: nothing, not even decisions.
        offload: the memory kind where the state that goes in is kept; None: where it is.
    """

    step: Step
    looped: bool
    policy: Policy | None = None
    offload: str | None = None

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        step, policy = self.step, self.policy
        if policy is not None and not isinstance(policy, SaveDecisions):
            policy = SaveDecisions(policy)
        if self.offload is not None and self.looped:
            step, policy = _Named(step), _offloading(policy, self.offload)
        # On several devices, what is recomputed may gather weights. Without the barrier, XLA's CPU backend gathers them
        # in another layout, and copies each gathered weight.
        kept_apart = not self.looped or devices_of((consts, state, feed)) > 1
        return checkpoint(step, prevent_cse=kept_apart, policy=policy)(consts, state, feed)


def is_remat3() -> bool:
    """Whether JAX's flag `jax_remat3` is on: a new `jax.checkpoint`, which will become the default."""
    return bool(getattr(jax.config, "jax_remat3", False))


def checkpoint(function: Callable[..., Any], *, prevent_cse: bool, policy: Policy | None = None) -> Callable[..., Any]:
    """`jax.checkpoint`, past which go the inputs that a function returns unchanged.

    A result of `jax.checkpoint` is a new value to JAX, even if it is an input. `jax.lax.scan` then stacks the slices
    of an array once more that a step hands on, and XLA copies the whole array: measured, 1 GB more for each GB.
    """
    function = _Marking(function)
    inner = jax.checkpoint(
        _WithCotangents(function) if is_remat3() else function, prevent_cse=prevent_cse, policy=policy
    )

    def checkpointed(*args: Any) -> Any:
        given = jax.tree.leaves(args)
        out = inner(*args)
        return jax.tree.map(lambda leaf: given[leaf.place] if _is_input(leaf) else leaf, out, is_leaf=_is_input)

    return checkpointed


def depending_on(kept: PyTree, reads: PyTree) -> PyTree:
    """What a branch is given of a state, as values that depend on the large arrays that it reads.

    Before 0.12, JAX returns from a branch every array that its gradient reads, and zeros of the same shape from all
    other branches: for a stack that a branch computes with again, XLA writes one more stack. If each branch begins with
    this, all of them return the stack itself, in the same place, and XLA copies nothing.

    Args:
        kept: the state. Its leaves do not change.
        reads: the arrays. Those that are not larger than the state are left out.
    """
    if jax.__version_info__ >= (0, 12) or is_remat3():  # under that flag a checkpoint cannot be transposed
        return kept
    part = smooth_part(kept)
    smooth, others = part.split(kept)
    if not smooth or not all(map(_is_plain, smooth)):
        return kept
    state = sum(leaf.size for leaf in smooth)
    large = [leaf for leaf in jax.tree.leaves(reads) if _is_plain(leaf) and leaf.size > state]
    if not large:
        return kept

    def same(smooth: Leaves, large: Leaves) -> Leaves:
        firsts = [jax.lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim).reshape(()) for leaf in large]
        true = functools.reduce(jnp.logical_or, [first == first for first in firsts], jnp.ones((), bool))
        return [jnp.where(true, leaf, jnp.zeros_like(leaf)) for leaf in smooth]

    return part.join(jax.checkpoint(same, prevent_cse=False)(smooth, large), others)


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is an array of so many numbers, all of it on one device as far as its type says."""
    if is_mutable(leaf) or is_key(leaf) or is_sharded(leaf) or varying_axes(jax.typeof(leaf)):
        return False
    return isinstance(leaf.size, int)  # it may be symbolic


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Input:
    """Takes the place of a result that is an input: which of the leaves of the arguments."""

    place: int


def _is_input(node: object) -> bool:
    return type(node) is _Input


@dataclass(frozen=True, repr=False)  # JAX asks for its name: a repr would print all that it holds
class _Marking:
    """A function that returns `_Input` in place of its inputs: JAX keeps the structure of results with their trace."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(args))}
        out = self.function(*args)
        return jax.tree.map(lambda leaf: _Input(places[id(leaf)]) if id(leaf) in places else leaf, out)


@dataclass(frozen=True)
class _WithCotangents:
    """A function under `jax_remat3`, where JAX fails on a result without a cotangent within a loop."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        out = self.function(*args)
        part = smooth_part(out)
        smooth, others = part.split(out)
        return part.join(jax.lax.optimization_barrier(smooth), others)


@dataclass(frozen=True)
class _Named:
    """A step that names its incoming state, so that policies can refer to it."""

    step: Step

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        named = [leaf if is_key(leaf) else checkpoint_name(leaf, _CARRY) for leaf in jax.tree.leaves(state)]
        return self.step(consts, jax.tree.unflatten(jax.tree.structure(state), named), feed)


def _offloading(policy: Policy | None, kind: str) -> Policy:
    """A policy, and the incoming state moved to another memory."""
    moves = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_CARRY], offload_src="device", offload_dst=kind
    )

    def both(prim: Primitive, *args: Any, **params: Any) -> Any:
        return (
            moves(prim, *args, **params)
            if policy is None or params.get("name") == _CARRY
            else policy(prim, *args, **params)
        )

    return both


@dataclass(frozen=True)
class RematChunk:
    """What is put around a chunk that the gradient recomputes.

    Attributes:
        offload: the memory kind where the state that goes in is kept; None: where it is.
        inside: what is put around the chunk before that; None: nothing.
        related: whether its steps may compare values with those that they chose among them; see `relates`.
    """

    offload: str | None = None
    inside: Callable[[Step], Step] | None = None
    related: bool = False
    recomputes = True

    def __call__(self, step: Step, looped: bool) -> Step:
        step = rolled(step)
        step = step if self.inside is None else self.inside(step)
        return Checkpointed(step, looped, policy_of_chunk(step, related=self.related), self.offload)


def rolled(step: Step) -> Step:
    """A chunk that the gradient recomputes, as a loop if possible.

    XLA rounds unrolled steps and their derivatives together, so that even `jax.lax.scan(unroll=True)` may lose what a
    step decides.
    """
    return step.rolled() if isinstance(step, RunChunk) else step


def policy_of_chunk(step: Step, *, related: bool) -> Policy | None:
    """What is saved of a chunk of steps that the gradient computes again, beside its inputs.

    Nothing, if the chunk is a loop: the gradient runs it again, and that loop saves what its steps decide before the
    loop of their derivatives begins. Where steps may compare values with those that they chose among them (`related`),
    that loop may decide otherwise than the first one did, so decisions are saved. So they are for any other chunk,
    which is one computation with its derivative.
    """
    return None if getattr(step, "is_loop", False) and not related else SaveDecisions()


def checkpoint_steps(loop: Loop, *plans: Remat | None) -> Loop:
    """Saves the carry of each step and what the policy selects. The gradient computes the rest again.

    Args:
        loop: the loop.
        plans: a plan for each of the loops that take turns; None: its steps are not recomputed.
    """
    looped, turns = stays_a_loop(loop), list(loop.each)
    for i, (turn, plan) in enumerate(zip(turns, plans, strict=True)):
        if plan is not None:
            step = checkpoint_step(turn.step, plan, looped=looped, trace=turn.trace)
            turns[i] = turn.having(step=step)
    return loop.with_turns(turns)


def checkpoint_step(step: Step, remat: Remat, *, looped: bool, trace: Trace | None) -> Step:
    """A step, recomputed as a `Remat` says. `trace` is that of its loop, if it is known."""
    if remat.policy is jax.checkpoint_policies.everything_saveable and not (remat.offload and levels_in(remat) == 1):
        return step
    chosen = remat.policy if callable(remat.policy) else jax.checkpoint_policies.nothing_saveable
    policy = SaveDecisions(chosen, thresholds=trace is None or not trace.programs or compares(trace.jaxpr))
    return Checkpointed(step, looped, policy, remat.offload if levels_in(remat) == 1 else None)


def stays_a_loop(loop: Plan) -> bool:
    """Whether XLA runs the steps as a loop. It removes a loop of one step, and would then save everything."""
    single = isinstance(loop.length, int) and loop.length == 1
    return loop.lowering.unroll is not True and loop.lowering.unroll == 1 and not single


def levels_in(remat: Remat) -> int:
    return remat.levels or (2 if remat.chunk else 1)


def remat_sizes(length: int, remat: Remat | None) -> tuple[int, ...]:
    """The ascending sizes of the chunks that the gradient recomputes."""
    if remat is None or levels_in(remat) == 1:
        return ()
    refuse_symbolic(length, "remat")
    return divide(length, levels_in(remat), remat.chunk)


@functools.lru_cache(maxsize=4096)
def divide(length: int, levels: int, first: int | None = None) -> tuple[int, ...]:
    """Sizes of nested chunks that cut a loop into so many levels, with few parts in each.

    Args:
        length: the steps of the loop.
        levels: how many levels there are to be; fewer come out where the loop is too short.
        first: the size of the innermost chunks; None: to be chosen.

    Returns:
        At most `levels - 1` ascending sizes, each dividing the next. Sizes that leave no remainder come first, and
        then those that leave a small one: what is cut in two is copied.
    """
    if levels < 2 or (length < 4 and first is None):
        return ()
    root = length ** (1 / levels)
    sizes = [first] if first else _near(root, length)
    candidates = [(size, *(size * next_size for next_size in divide(length // size, levels - 1))) for size in sizes]
    fitting = [candidate for candidate in candidates if candidate[0] > 1 and candidate[-1] < length]
    return min(fitting, key=lambda chain: _parts_with_remainder(length, chain), default=())


_NEAREST = 24


def _near(root: float, length: int) -> list[int]:
    """Sizes within a factor of two of a root: those that divide the length, and the nearest of the others."""
    within = range(max(2, math.ceil(root / 2)), max(3, math.floor(root * 2) + 1))
    nearest = sorted(within, key=lambda size: abs(math.log(size / root)))
    dividing = [size for size in nearest if length % size == 0]
    return [*dividing[:_NEAREST], *(size for size in nearest[:_NEAREST] if length % size)]


def count_parts(length: int, sizes: tuple[int, ...]) -> int:
    """How many carries are saved at once: the parts of each level, from the outermost down to single steps."""
    if not sizes:
        return length
    parts = -(-length // sizes[-1])
    return parts + sum(large // small for small, large in itertools.pairwise((1, *sizes)))


def _parts_with_remainder(length: int, sizes: tuple[int, ...]) -> float:
    rest = length % sizes[-1]
    return count_parts(length, sizes) * (1.25 if rest else 1) + rest


def saves_whole_steps(trace: Trace, remat: Remat) -> bool:
    """Whether the chunks of a plan save whole steps. Then the products of these steps are computed at once."""
    whole = remat.policy is jax.checkpoint_policies.everything_saveable and levels_in(remat) > 1
    return whole and is_rewriting() and not (trace.effects or trace.refs or trace.reverse_rule)
