"""The Loop, the interning of what is made for a body, and `run`: the one call of `jax.lax.scan`."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from ._avals import promoted
from ._errors import Fault, is_from_jax, is_package_frame, walk_traceback
from ._retrace import count_body
from ._types import Array, PyTree

_lax_scan = jax.lax.scan  # as it is now: a program may put treescan's own in its place
_T = TypeVar("_T")
_KEPT = 64


class Feed(NamedTuple):
    """What one step is fed: its slice of xs and, where an option asks for them, further things.

    Attributes:
        x: the slice of xs.
        position: the step's position in xs.
        valid: which rows are data in this step.
        reset: which rows begin anew before this step.
        cut: whether the gradient is cut before this step.
        schedule: of a chunk, not of a step: what of it is to be run.
    """

    x: PyTree
    position: Array | None = None
    valid: Array | None = None
    reset: Array | None = None
    cut: Array | None = None
    schedule: PyTree = None


class Step(Protocol):
    """One step of a loop: static, hashable and equal by value. Arrays come in as `consts`, never by closure."""

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed, /) -> tuple[PyTree, PyTree]:
        """Maps (consts, state, feed) to (state, y)."""
        ...


class Memo:
    """What was made for a body or for one call; the 64 last used things are kept."""

    def __init__(self) -> None:
        self._made: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._joint: weakref.WeakKeyDictionary[Callable[..., Any], Memo] = weakref.WeakKeyDictionary()

    def __call__(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What was made under `key` before, else what `make` returns."""
        with self._lock:
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        value = make()
        with self._lock:
            value = self._made.setdefault(key, value)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return value

    def joint(self, function: Callable[..., Any]) -> Memo:
        """What was made for this memo's body and another together: it goes with whichever of the two goes first."""
        try:
            return self._joint.setdefault(function, Memo())
        except Exception:  # as in `Body.of`
            return Memo()


class Body:
    """A handle on the user's body that does not keep it alive, and all that was made for it.

    `Body.of` gives equal bodies the same handle. Steps hold the handle, the handle holds the steps, and the table of
    handles holds bodies weakly: when the last reference to a body goes, everything made for it goes too. While a verb
    runs, its frame keeps the body alive.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._function: Callable[[], Any] = weakref.ref(function)
        except TypeError:  # this type has no weak references: the handle lives as long as the call
            self._function = lambda: function
        self.memo = Memo()

    @property
    def function(self) -> Callable[..., Any]:
        """The body itself."""
        return self._function()

    @property
    def programs(self) -> Memo:
        """What was compiled for the body.

        JAX keeps a program's trace for as long as the program lives, and a rule for derivatives in that trace refers
        to this handle. So the handle must not refer to the program: the two would keep each other, and all arrays that
        the body closes over, until `jax.clear_caches()`.
        """
        try:
            return _programs.setdefault(self.function, Memo())
        except Exception:  # as in `Body.of`
            return Memo()

    @functools.cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...] | None:
        """The body's parameters; None if they cannot be known."""
        return _parameters(self.function)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its positional parameters, as far as they can be known."""
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in self.parameters or () if p.kind in positional)

    @staticmethod
    def of(function: Callable[..., Any]) -> Body:
        """The handle of a body: shared by equal ones, new in each call for one without a hash or weak references."""
        try:
            known = _bodies.get(function)
            if known is not None:
                return known
            new = Body(function)
            body = _bodies.setdefault(function, new)
        except Exception:  # no hash, no weak references, or an `==` that fails: the user's types decide
            body = new = Body(function)
        if body is new:
            count_body(function)
        return body


def _parameters(function: Callable[..., Any], wrapped: bool = False) -> tuple[inspect.Parameter, ...] | None:
    try:
        return tuple(inspect.signature(outermost(function), follow_wrapped=wrapped).parameters.values())
    except (TypeError, ValueError):
        return None


def wrapped_parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """The parameters of the innermost function that a wrapper says it wraps, as far as they can be known."""
    return _parameters(function, wrapped=True) or ()


def outermost(function: Any) -> Any:
    """The function whose parameters a call meets: JAX's own wrappers pass everything on, of others nothing is known."""
    while hasattr(function, "__wrapped__") and is_from_jax(function):
        function = function.__wrapped__
    return function


Finish = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
"""(last state, ys) to the same in the terms of the loop that a transform was given."""

_bodies: weakref.WeakKeyDictionary[Callable[..., Any], Body] = weakref.WeakKeyDictionary()
_programs: weakref.WeakKeyDictionary[Callable[..., Any], Memo] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Loop:
    """A scan that has not run yet. Transforms map a Loop to a Loop; `run` runs it.

    Attributes:
        body: the user's function, by its handle.
        step: what runs each step.
        consts: arrays that every step reads and none changes.
        state: what is carried from step to step.
        xs: what is scanned over; every leaf leads with `length`.
        length: the number of steps.
        reverse: whether to run from the last position to the first.
        unroll: as for `jax.lax.scan`.
        lowering: further keyword arguments of `jax.lax.scan`, forwarded as they came.
        names: what the body calls its carry and its x, for messages.
        memo: keeps what is made for the step: the body's own memo, which outlives the call, unless the step holds a
            trace, and with it values of an outer one.
        trace: what was read off a trace of the step, if it was traced ahead of the loop; see `hoist.traced`.
        recomputed: whether the gradient recomputes each step, as the user asked.
        wishes: the chunks that transforms ask for, and what they put around them; see `nest.run_nested`.
        keeps: for each leaf of one step's y how often it is kept; None: ys are stacked whole.
        rows: what a masked scan was told of its rows, and from `over_rows.OverRows` on where they are.
        runner: what runs the loop in place of the plain loop or its nested chunks.
        finish: what each transform does to the loop's results, in the order of the transforms.
    """

    body: Body
    step: Step
    consts: PyTree
    state: PyTree
    xs: Feed
    length: int
    reverse: bool = False
    unroll: int | bool = 1
    lowering: tuple[tuple[str, Any], ...] = ()
    names: tuple[str, str] = ("carry", "x")
    memo: Memo | None = None
    trace: Any = None
    recomputed: bool = False
    wishes: tuple[Any, ...] = ()
    keeps: tuple[int | None, ...] | None = None
    rows: Any = None
    runner: Callable[[Loop], tuple[PyTree, PyTree]] | None = None
    finish: tuple[Finish, ...] = ()

    def finished(self, finish: Finish) -> Loop:
        """The loop, with one more thing to do to its results."""
        return dataclasses.replace(self, finish=(*self.finish, finish))


class Transform(Protocol):
    """One option of a verb: static, hashable and equal by value. It maps a loop to another."""

    @property
    def moves(self) -> bool:
        """Whether there is work around the loop, which an eager call compiles together with it."""
        ...

    def __call__(self, loop: Loop, /) -> Loop:
        """The transformed loop; what undoes the transform in its results goes to `Loop.finish`."""
        ...


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A step in the form that `jax.lax.scan` calls. Looks like the body to JAX, whose messages then name the body."""

    body: Body
    step: Step
    packed: bool
    __signature__: inspect.Signature

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.body.function

    def __call__(self, carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        if not self.packed:
            return self.step(None, carry, Feed(x))
        consts, state = carry
        state, y = self.step(consts, state, x)
        return (consts, state), y


def is_jit_disabled() -> bool:
    """Whether the user asked, with `jax.disable_jit`, to see every step run."""
    return bool(getattr(jax.config, "jax_disable_jit"))  # noqa: B009, an attribute that checkers do not see


def debugs_nans() -> bool:
    """Whether the user asked, with `jax.debug_nans`, to be told of every NaN. JAX traces nothing again for it."""
    return bool(getattr(jax.config, "jax_debug_nans", False))


def run(loop: Loop) -> tuple[PyTree, PyTree]:
    """Runs a loop: its last state, and its outputs stacked along axis 0.

    Consts travel in lax.scan's carry. A carry leaf that a step hands on unchanged is turned into a constant of the
    loop by lax.scan itself, so that this costs nothing, and a step needs no closure.
    """
    packed = loop.consts is not None or bool(jax.tree.leaves(loop.xs[1:]))
    function = (loop.memo or loop.body.memo)((_Lowered, loop.step, packed), lambda: _lower(loop, packed))
    carry, xs = ((loop.consts, loop.state), loop.xs) if packed else (loop.state, loop.xs.x)
    if is_jit_disabled() and loop.length:
        result = _run_step_by_step(function, carry, xs, loop.length, loop.reverse)
    else:
        result = _run_compiled(function, carry, xs, loop)
    if not packed:
        return result
    (_, state), ys = result
    return state, ys


def _lower(loop: Loop, packed: bool) -> _Lowered:
    return _Lowered(loop.body, loop.step, packed, named_signature(*loop.names))


def named_signature(*names: str) -> inspect.Signature:
    """The signature of what stands for a body in a trace, in the body's own names: JAX's messages speak of these."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _run_compiled(function: _Lowered, carry: PyTree, xs: PyTree, loop: Loop) -> tuple[PyTree, PyTree]:
    # The output types of a loop without steps are known from a trace alone, which lax.scan refuses under disable_jit.
    length = None if jax.tree.leaves(xs) else loop.length  # lax.scan asks for an int, and a size may be symbolic
    traced = jax.disable_jit(False) if is_jit_disabled() else contextlib.nullcontext()
    try:
        with traced:
            return _lax_scan(function, carry, xs, length, loop.reverse, loop.unroll, **dict(loop.lowering))
    except TypeError as error:
        if not any(
            is_package_frame(tb.tb_frame) and _is_step(tb.tb_frame) for tb in walk_traceback(error.__traceback__)
        ):
            _blame_step(function, carry, xs)  # raised by lax.scan of the carry's types, not by the body
        raise


def _is_step(frame: Any) -> bool:
    return frame.f_code is _Lowered.__call__.__code__


_last_trace: contextvars.ContextVar[bool] = contextvars.ContextVar("last_trace", default=False)


def is_last_trace() -> bool:
    """Whether weak types have settled: from here on a weakly typed leaf that changes its type is an error too."""
    return _last_trace.get()


@contextlib.contextmanager
def weak_types_settled() -> Generator[None]:
    """Within it, steps refuse every change of a type."""
    token = _last_trace.set(True)
    try:
        yield
    finally:
        _last_trace.reset(token)


def _blame_step(function: _Lowered, carry: PyTree, xs: PyTree) -> None:
    """Traces the step the way that lax.scan did, so that the check in the step finds what lax.scan found.

    A step lets a weakly typed leaf pass whose type changed, as lax.scan then promotes the init and traces once more.
    Where it does not settle in that second trace, the first error is lax.scan's: only then is this needed.
    """
    try:
        x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), xs)
        out, _ = jax.eval_shape(lambda c, x: function(c, x), carry, x)
        with weak_types_settled():
            jax.eval_shape(lambda c, x: function(c, x), settle(carry, out)[0], x)
    except Fault:
        raise
    except Exception:  # something else was wrong: what lax.scan said stands
        return


def settle(carry: PyTree, out: PyTree) -> tuple[PyTree, bool]:
    """What lax.scan makes of an init whose weakly typed leaves came back as another type, and whether it changed."""
    leaves, treedef = jax.tree.flatten(carry)
    pairs = [promoted(given, returned) for given, returned in zip(leaves, jax.tree.leaves(out), strict=True)]
    return jax.tree.unflatten(treedef, [leaf for leaf, _ in pairs]), any(changed for _, changed in pairs)


class _NamedPair(NamedTuple):
    carry: Any
    y: Any


@functools.cache
def keeps_named_pairs() -> bool:
    """Whether this release of lax.scan takes a NamedTuple as a pair, and gives its result in one (0.12 does not)."""
    try:
        jax.eval_shape(lambda: _lax_scan(lambda carry, x: _NamedPair(carry, x), None, None, length=1))
    except TypeError:
        return False
    return True


def as_arrays(tree: PyTree) -> PyTree:
    """Scalars and NumPy arrays as JAX arrays, whose methods the body calls under `jax.jit` too."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), tree)


def _run_step_by_step(
    function: _Lowered, carry: PyTree, xs: PyTree, length: int, reverse: bool
) -> tuple[PyTree, PyTree]:
    """What `jax.disable_jit` is for: the body runs on concrete values, one step after the other, with every check."""
    carry = as_arrays(carry)
    positions = range(length)[::-1] if reverse else range(length)

    def take(i: int) -> PyTree:
        return jax.tree.map(lambda leaf: jax.lax.index_in_dim(jnp.asarray(leaf), i, keepdims=False), xs)

    pair = function(carry, take(positions[0]))
    carry, changed = settle(carry, _halves(pair)[0])
    with weak_types_settled():
        if changed:  # as lax.scan does, once more from the promoted init
            pair = function(carry, take(positions[0]))
        first, y = _halves(pair)
        carry, ys = as_arrays(first), [y]
        for i in positions[1:]:
            carry, y = _halves(function(carry, take(i)))
            carry = as_arrays(carry)
            ys.append(y)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(ys[::-1] if reverse else ys))
    return jax.tree.unflatten(jax.tree.structure(pair, is_leaf=lambda node: node is not pair), (carry, stacked))


def _halves(pair: PyTree) -> list[PyTree]:
    """The carry and y of a step, in whatever container the body returned them."""
    return jax.tree.leaves(pair, is_leaf=lambda node: node is not pair)
