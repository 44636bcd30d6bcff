"""The Loop, the body that it runs with all that was made for it, the input of one step, and what transforms change."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import jax
from jax.core import Tracer

from .._avals import Array, PyTree
from .._errors import is_from_jax
from .._tree import are_same, kin
from .feed import Extra, Feed
from .replaced import replacement

if TYPE_CHECKING:  # a loop's fields; what it holds is made further up
    from .._body.call import CallBody
    from .._rows.axes import Rows, Segments
    from .._trace.trace import Trace
    from .._transforms.call import Arguments
    from .._types import Remat
    from .sizes import Wish

_T = TypeVar("_T")

_OF_ONE_KIN = 8
_UNKNOWN: Any = object()


class Memo:
    """What was made for a body or for one call: the last used things are kept, 64 if nothing else is said.

    Of those whose keys differ only in functions or objects of one origin, eight are: a policy, a `show` or a static
    leaf that each call makes anew never comes again, and all that it closes over would be kept as long as the body.
    """

    def __init__(self, kept: int = 64) -> None:
        self._kept = kept
        self._made: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._joint: dict[_Reference, Memo] = {}

    def __call__(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What was made under `key` before, else what `make` returns.

        While a program has something of its own in the place of `jax.lax.scan`, it has things of its own, too: what was
        traced through it must not run when it is gone.
        """
        other = replacement()
        if other is not None:
            return self.joint(other).keep(key, make)
        return self.keep(key, make)

    def program(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The compiled program that was made under `key` before, else what `make` returns.

        While something is in the place of `jax.lax.scan`, no program is kept: it would hide its loops from that.
        """
        return self.keep(key, make) if replacement() is None else make()

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What was made under `key` before, else what `make` returns, whatever is in the place of `jax.lax.scan`."""
        with self._lock:
            known = self._made.get(key, _UNKNOWN)
            if known is not _UNKNOWN and len(self._made) > 1:  # a key takes long to hash, as steps hold others
                self._made.move_to_end(key)
        if known is not _UNKNOWN:
            return known
        made = make()
        with self._lock:
            made = self._made.setdefault(key, made)
            if len(self._made) > _OF_ONE_KIN:  # few bodies have as many
                own = kin(key)
                alike = [other for other in self._made if kin(other) == own]
                if len(alike) > _OF_ONE_KIN:
                    del self._made[alike[0]]
                elif len(self._made) > self._kept:
                    self._made.popitem(last=False)
        return made

    def clear(self) -> None:
        """Drops all of it."""
        self._made.clear()
        self._joint.clear()

    def joint(self, function: Callable[..., Any]) -> Memo:
        """What was made for this memo's body and another together: it goes with whichever of the two goes first."""
        memo = weakref.ref(self)  # else only the collector would free it

        def forget(reference: _Reference) -> None:
            if (owner := memo()) is not None:
                owner._joint.pop(reference, None)

        try:
            return self._joint.setdefault(_Reference(function, forget), Memo(self._kept))
        except Exception:  # as in `Body.of`
            return Memo()


class _Reference(weakref.ref[Any]):
    """A weak reference that is not shared, and is equal to those of bodies that are the same; see `exact`.

    Python gives all who ask for a plain `weakref.ref` of an object the same one, and it keeps the hash that the object
    had when it was first asked. A body that hashes by value and was changed would be found under its old hash.
    """

    __slots__ = ()
    __hash__ = weakref.ref.__hash__

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, _Reference):
            return self is other
        own, its = self(), other()
        if own is its or own is None or its is None:
            return own is its is not None
        is_equal = type(own) is type(its) and bool(own == its)
        return is_equal and (isinstance(own, types.MethodType) or are_same(own, its))


class Body:
    """A handle on the user's body that does not keep it alive, and all that was made for it.

    `Body.of` gives equal bodies the same handle. Steps hold the handle, the handle holds the steps, and the table of
    handles holds bodies weakly: when the last reference to a body goes, everything made for it goes too. While a verb
    runs, its frame keeps the body alive.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._function: Callable[[], Any] = _Reference(function)
        except TypeError:  # this type has no weak references: the handle lives as long as the call
            self._function = lambda: function
        self.memo = Memo()

    function = property(operator.methodcaller("_function"), doc="The body itself.")  # JAX asks for it in each call

    @property
    def programs(self) -> Memo:
        """What was compiled for the body.

        JAX keeps a program's trace for as long as the program lives, and a rule for derivatives in that trace refers
        to this handle. So the handle must not refer to the program: the two would keep each other, and all arrays that
        the body closes over, until `jax.clear_caches()`.
        """
        return _programs.joint(self.function)

    @functools.cached_property
    def parameters(self) -> tuple[inspect.Parameter, ...] | None:
        """The body's parameters; None if they cannot be known."""
        return _parameters(self.function)

    @property
    def positional(self) -> list[inspect.Parameter]:
        """Its positional parameters, as far as they can be known."""
        return [p for p in self.parameters or () if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its positional parameters, as far as they can be known."""
        return tuple([parameter.name for parameter in self.positional])

    @staticmethod
    def of(function: Callable[..., Any]) -> Body:
        """The handle of a body: shared by equal ones, new in each call for one without a hash or weak references."""
        try:
            known = _bodies.get(_Reference(function))
            if known is not None:
                return known
            return _bodies.setdefault(_Reference(function, _forget), Body(function))
        except Exception:  # no hash, no weak references, or an `==` that fails: the user's types decide
            return Body(function)


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
    if isinstance(function, types.FunctionType):  # most bodies are one
        return function
    # `inspect` takes the first parameter of a static `__call__` for `self`.
    static = isinstance(inspect.getattr_static(type(function), "__call__", None), staticmethod)
    return function.__call__ if static else function


_bodies: dict[_Reference, Body] = {}


def _forget(reference: _Reference, forget: Callable[..., Any] = _bodies.pop) -> None:
    """The body is gone. So is its handle, with the steps that it keeps: these hold it, and arrays that the body read.

    The default is bound here: a script's own bodies go when Python ends, and by then it has emptied this module.
    """
    body: Body | None = forget(reference, None)
    if body is not None:
        body.memo.clear()


_programs = Memo(kept=1024)  # there is one for each length, and for each list of types


class Step(Protocol):
    """One step of a loop: static, hashable and equal by value. Arrays come in as `consts`, never by closure."""

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed, /) -> tuple[PyTree, PyTree]:
        """Maps (consts, state, feed) to (state, y)."""
        ...


class Result(NamedTuple):
    """What a loop returns.

    Attributes:
        state: the last state.
        ys: the outputs.
        steps: int32[*batch], how many steps were taken, if the loop may end early; None: all of them.
        stopped: bool[*batch], whether the condition no longer held; None: there is none.
        extra: what the slots of options hold; see `Slot`.
    """

    state: PyTree
    ys: PyTree
    steps: Array | None = None
    stopped: Array | None = None
    extra: Extra | None = None

    @property
    def short(self) -> Any:
        """The state and ys alone, if there is nothing more."""
        return self if [more for more in self[2:] if more is not None] else self[:2]


def _same(state: PyTree) -> PyTree:
    return state


def _same_ys(result: Result) -> PyTree:
    return result.ys


def _same_result(result: Result) -> Result:
    return result


class Finish(NamedTuple):
    """A loop's results in the terms of the loop that a transform was given.

    Attributes:
        state: of the state, the last one or that between two chunks.
        ys: of ys, from the result. They may be in its state, which is not undone yet.
        notes: the result with what an option puts in its slot there, from the result.
    """

    state: Callable[[PyTree], PyTree] = _same
    ys: Callable[[Result], PyTree] = _same_ys
    notes: Callable[[Result], Result] = _same_result


@dataclass(frozen=True)
class Lowering:
    """How `jax.lax.scan` runs a loop.

    Attributes:
        reverse: whether from the last position to the first.
        unroll: as for `jax.lax.scan`.
        further: its other keyword arguments, forwarded as they came.
    """

    reverse: bool = False
    unroll: int | bool = 1
    further: tuple[tuple[str, Any], ...] = ()

    @property
    def plain(self) -> Lowering:
        """In its direction, with nothing unrolled: for a loop over chunks."""
        return Lowering(self.reverse)


@dataclass(frozen=True)
class Callee:
    """The user's function that a loop's step calls.

    Attributes:
        body: its handle.
        call: the step that calls it, for what it says of the call.
        names: what it calls its carry and its x, for messages.
        memo: keeps what is made for the step: the body's own memo, which outlives the call, unless the step holds a
            trace, and with it values of an outer one.
    """

    body: Body
    call: CallBody
    names: tuple[str, str] = ("carry", "x")
    memo: Memo | None = None

    def apart(self) -> Callee:
        """The function of a step that holds a trace: what is made for that step goes with the loop."""
        return Callee(self.body, self.call, self.names, Memo())


class Runner(Protocol):
    """Runs a loop in place of its chunks, with what it keeps beside the loop."""

    @property
    def limit(self) -> Array | None:
        """int32[], the most steps of a loop that may end early; None: it takes all of them."""
        ...

    def __call__(self, loop: Loop, /) -> tuple[Any, ...]:
        """The last state, ys, and what else a `Result` has."""
        ...


class Arrays(NamedTuple):
    """What a loop runs on; or the same tree with something else for each array: its type, its tangent, a variable.

    Attributes:
        consts: what every step reads and none changes.
        state: what is carried from step to step.
        xs: what is scanned over; every leaf leads with the number of steps.
    """

    consts: PyTree
    state: PyTree
    xs: Any


@dataclass(frozen=True)
class Plan:
    """What a loop does: hashable, and without any array. So a rule for derivatives may hold it.

    Attributes:
        callee: the user's function.
        step: what runs each step.
        length: the number of steps.
        lowering: how `jax.lax.scan` runs it.
    """

    callee: Callee
    step: Step
    length: int
    lowering: Lowering = Lowering()

    if TYPE_CHECKING:

        @property
        def body(self) -> Body:
            """The handle of the user's function."""
            return self.callee.body

        @property
        def names(self) -> tuple[str, str]:
            """What the user's function calls its carry and its x."""
            return self.callee.names

        @property
        def reverse(self) -> bool:
            """Whether it runs from the last position to the first."""
            return self.lowering.reverse

    else:  # read hundreds of times on the way to a trace: these are no calls of Python
        body = property(operator.attrgetter("callee.body"))
        names = property(operator.attrgetter("callee.names"))
        reverse = property(operator.attrgetter("lowering.reverse"))

    def having(self, **changes: Any) -> Self:
        """`dataclasses.replace`, ten times as fast: each loop is changed twenty times on its way to its trace."""
        assert changes.keys() <= self.__dict__.keys()
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **changes)
        return other

    def apart(self) -> Self:
        """The plan with a memo of its own: for a step that holds a trace."""
        return self.having(callee=self.callee.apart())


@dataclass(frozen=True, kw_only=True)
class Loop(Plan):
    """A scan that has not run yet. Transforms map a Loop to a Loop; `run` runs it.

    Attributes:
        consts: arrays that every step reads and none changes.
        state: what is carried from step to step.
        xs: what is scanned over; every leaf leads with `length`.
        given: what the verb was told beside init and xs; None where rules for derivatives keep the loop.
        trace: what was read off a trace of the step, if it was traced ahead of the loop; see `hoist.traced`.
        remat: what the gradient recomputes of each step, as the user asked; of turns a tuple. None: the user did not.
        wishes: the chunks that transforms ask for, and what they put around them; see `plan.plan`.
        keeps: for each leaf of one step's y how often it is kept; None: ys are stacked whole.
        rows: where the rows of a masked scan are.
        segments: where its segments begin; None: it has none.
        runner: what runs the loop in place of `nest.run_levels`.
        turns: loops over this state, in order, of which each iteration runs a step: layers of several blocks. Until
            `nest.in_rounds` joins them, the step, the consts and the xs are theirs. The first may have one step more
            than there are iterations. None: the loop runs its own step.
        finish: what each transform does to the loop's results, in the order of the transforms.
    """

    consts: PyTree
    state: PyTree
    xs: Feed
    given: Arguments | None = None
    trace: Trace | None = None
    remat: Remat | tuple[Remat | None, ...] | None = None
    wishes: tuple[Wish, ...] = ()
    keeps: tuple[int | None, ...] | None = None
    rows: Rows | None = None
    segments: Segments | None = None
    runner: Runner | None = None
    turns: tuple[Loop, ...] = ()
    finish: tuple[Finish, ...] = ()

    if TYPE_CHECKING:

        @property
        def hoisted(self) -> Trace:
            """What was read off its trace; it was traced."""
            assert self.trace is not None
            return self.trace

        @property
        def masked(self) -> Rows:
            """Where its rows are; it has rows."""
            assert self.rows is not None
            return self.rows

    else:  # as in `Plan`
        hoisted = property(operator.attrgetter("trace"))
        masked = property(operator.attrgetter("rows"))

    @property
    def offset(self) -> Array | None:
        """int32[], the position of the first step, of a part of a longer loop; None: 0."""
        return None if self.given is None else self.given.offset

    @property
    def limit(self) -> Array | None:
        """int32[], the most steps of a loop that may end early; None: it takes all of them."""
        return None if self.runner is None else self.runner.limit

    @property
    def each(self) -> tuple[Loop, ...]:
        """The loops that take turns, with the state of this one. A loop without turns is its own."""
        return tuple(turn.having(state=self.state) for turn in self.turns) or (self,)

    @property
    def steps(self) -> int:
        """How many steps all of its loops have together."""
        return sum(turn.length for turn in self.turns) if self.turns else self.length

    @property
    def plan(self) -> Plan:
        """What it does."""
        return Plan(self.callee, self.step, self.length, self.lowering)

    @property
    def arrays(self) -> Arrays:
        """What it runs on."""
        return Arrays(self.consts, self.state, self.xs)

    def with_turns(self, turns: Sequence[Loop]) -> Loop:
        """The loop with others in the places of those in `each`. They have the same state."""
        return self.having(turns=tuple(turns), state=turns[0].state) if self.turns else turns[0]

    def finished(
        self,
        state: Callable[[PyTree], PyTree] = _same,
        ys: Callable[[Result], PyTree] = _same_ys,
        notes: Callable[[Result], Result] = _same_result,
    ) -> Loop:
        """The loop, with one more thing to do to its results; see `Finish`."""
        return self.having(finish=(*self.finish, Finish(state, ys, notes)))

    def carry_of(self, state: PyTree) -> PyTree:
        """A state of this loop in the terms of the loop before any transform."""
        for undo in reversed(self.finish):
            state = undo.state(state)
        return state


def under_a_trace(given: Iterable[object] = ()) -> bool:
    """Whether operations are being recorded by an outer trace (as under `jax.jit`) instead of executed.

    The operation that asks takes 7 microseconds, and leaves an equation in a trace. Where some of what is given is
    traced, one asks that leaves none, and takes 40.
    """
    if any(map(isinstance, given, itertools.repeat(Tracer))):
        return isinstance(jax.lax.full((), 0.0), Tracer)
    return isinstance(jax.lax.stop_gradient(0.0), Tracer)  # of a number without a trace, it is that number


is_jit_disabled: Callable[[], bool] = functools.partial(getattr, jax.config, "jax_disable_jit")
"""Whether the user asked, with `jax.disable_jit`, to see every step run."""


def is_untraced(loop: Loop) -> bool:
    """Whether a loop's steps run on values, or not at all: then nothing is traced ahead of it."""
    return is_jit_disabled() or not (loop.steps if loop.turns else loop.length)


def in_turn(loops: Sequence[Loop], memo: Memo | None = None) -> Loop:
    """One loop of several over one state, an iteration of which runs a step of each. The last has no more steps."""
    if len(loops) == 1:
        return loops[0]
    callee = dataclasses.replace(loops[0].callee, memo=memo or Memo())
    bare = loops[0].having(callee=callee, consts=None, xs=Feed(None), length=loops[-1].length)
    return bare.having(turns=tuple(loops))
