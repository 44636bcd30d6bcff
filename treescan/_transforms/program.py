"""One call of a verb: its static part, its arrays, its loop, and its compiled program."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._avals import Array, PyTree
from .._body.call import CallBody, Shared
from .._body.signature import Convention
from .._loop.loop import Body, Feed, Loop, Memo, Transform, in_turn, is_jit_disabled, under_a_trace
from .._loop.run import checks_key_reuse, debugs_nans
from .._trace.hoist import is_rewriting
from .nest import run_nested


@dataclass(frozen=True)
class Call:
    """The arguments of a verb without the arrays. It is hashable, so it can be the key of a cache.

    Attributes:
        body: the body.
        convention: how it is called, and what it returns.
        length: the number of steps.
        reverse: whether to run from the last position to the first.
        unroll: as for `jax.lax.scan`.
        frozen: whether init, xs or args hold static leaves.
        custom: the classes of the custom carries that init holds.
        sees_valid: whether the body takes `valid`.
        name: the profiler's name for the loop.
        lowering: further keyword arguments of `jax.lax.scan`.
        others: the calls of blocks that take turns with this one, in order after it. The xs are then a tuple.
    """

    body: Body
    convention: Convention
    length: int
    reverse: bool = False
    unroll: int | bool = 1
    frozen: bool = False
    custom: tuple[type, ...] = ()
    sees_valid: bool = False
    name: str | None = None
    lowering: tuple[tuple[str, Any], ...] = ()
    others: tuple[Call, ...] = ()

    @property
    def each(self) -> tuple[Call, ...]:
        """The calls that take turns."""
        return (self, *self.others)

    @property
    def programs(self) -> Memo:
        """What was compiled for the bodies of all calls together."""
        return self._joint(self.body.programs)

    def _joint(self, memo: Memo) -> Memo:
        return functools.reduce(Memo.joint, (call.body.function for call in self.others), memo)

    @property
    def names(self) -> tuple[str, str]:
        """The body's own names for its carry and its x."""
        return names_of(self.body, self.convention)

    def lay(self, given: Arguments) -> Loop:
        """The loop before any transform: it calls the body, on what the user gave.

        Blocks that take turns fold the key with the number of a layer among those of all blocks. Positions in the feed
        begin with 0 in any case: the step adds the offset.
        """
        if self.others:
            loops = list[Loop]()
            for place, call in enumerate(self.each):
                loop = dataclasses.replace(call, others=()).lay(given._replace(xs=given.xs[place]))
                if given.key is not None:
                    position = place + len(self.each) * jnp.arange(call.length)
                    loop = dataclasses.replace(loop, xs=loop.xs._replace(position=position))
                loops.append(loop)
            return in_turn(loops, self._joint(self.body.memo))
        offset = None if given.key is None else given.offset
        shared = Shared(given.key, given.args, offset) if given.key is not None or given.args else None
        return Loop(
            body=self.body,
            step=CallBody(self.body, self.convention, self.sees_valid, self.frozen, self.custom),
            consts=shared,
            state=given.init,
            xs=Feed(given.xs, position=jnp.arange(self.length) if given.key is not None else None),
            length=self.length,
            reverse=self.reverse,
            unroll=self.unroll,
            lowering=self.lowering,
            names=self.names,
            rows=given.rows,
            going=given.bounds,
            offset=given.offset,
        )

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, the profiler sees the loop's name."""
        return jax.named_scope(self.name) if self.name else contextlib.nullcontext()


class Arguments(NamedTuple):
    """The arrays that a verb was given; static leaves of init, xs and args are frozen into their structure.

    Attributes:
        init: the carry that the first step is given.
        xs: what is scanned over.
        key: the loop's PRNG key.
        args: what every step is given beside its own.
        rows: what a masked scan was told of its rows.
        bounds: the range of indices of a `fori` with traced bounds.
        offset: int32[], the position of the first step, of a part of a longer loop; None: 0.
    """

    init: PyTree
    xs: PyTree = None
    key: Array | None = None
    args: tuple[PyTree, ...] = ()
    rows: Any = None
    bounds: Any = None
    offset: Any = None


@dataclass(frozen=True)
class Program:
    """What a verb does to its arrays: a call and its transforms, innermost first. Hashable, and equal by value."""

    call: Call
    transforms: tuple[Transform, ...]

    @property
    def moves(self) -> bool:
        """Whether there is work around the loop, which an eager call compiles together with it."""
        return bool(self.call.others) or any(transform.moves for transform in self.transforms)

    def __call__(self, given: Arguments) -> Any:
        """The results, static leaves and adopted values still as they are in the loop."""
        loop = self.call.lay(given)
        with self.call.scope():
            for transform in self.transforms:
                loop = transform(loop)
            return run_nested(loop if loop.offset is None else loop.having(offset=None))  # rules keep loops


class Taken(BaseException):
    """Carries a program and its arrays out of a verb that should not run them. No verb treats it as an error.

    Attributes:
        program: what the verb would run.
        given: on what.
    """

    def __init__(self, program: Program, given: Arguments) -> None:
        super().__init__()
        self.program = program
        self.given = given


_taking: contextvars.ContextVar[bool] = contextvars.ContextVar("taking", default=False)


def take(verb: Callable[..., Any], *args: Any, **options: Any) -> Taken:
    """What a verb would run after it has checked its arguments. Nothing is run or traced.

    The result also keeps alive, by its traceback, the functions that the program refers to weakly.
    """
    token = _taking.set(True)
    try:
        verb(*args, **options)
    except Taken as taken:
        return taken
    finally:
        _taking.reset(token)
    raise AssertionError(f"{verb} runs nothing")


def execute(program: Program, given: Arguments, programs: Memo, *, moves: bool = True, donates: bool = False) -> Any:
    """Runs a program.

    A scan without options is only its lax.scan, eager or not. With options, there is work outside the loop. An
    eager call puts the whole of it under one `jax.jit`, kept with the body, so that the second call neither traces nor
    compiles anything. Under an outer trace, that trace is the one that counts.

    Args:
        program: the program.
        given: its arrays.
        programs: what was compiled for the bodies before.
        moves: whether there is work outside the loop.
        donates: whether an eager call gives the arrays of `init` away: they are deleted, and the last state takes their
            memory. They may not be among the other arrays too.
    """
    if _taking.get():
        raise Taken(program, given)
    if (moves or donates) and not is_jit_disabled() and not under_a_trace():
        key: Hashable = ("jit", donates, program, is_rewriting(), debugs_nans(), checks_key_reuse())
        donated = (0,) if donates else ()
        compiled: Callable[[PyTree, Arguments], Any] = programs(
            key, lambda: jax.jit(functools.partial(_run, program), donate_argnums=donated)
        )
        return compiled(given.init, given._replace(init=None))
    return program(given)


def _run(program: Program, init: PyTree, given: Arguments) -> Any:
    return program(given._replace(init=init))


def names_of(body: Body, convention: Convention) -> tuple[str, str]:
    """The body's own names for its carry and its x."""
    if len(convention.takes) == 1:  # a function over chunks, without a carry
        return "carry", (body.names or convention.takes)[0]
    names = body.names if len(body.names) > 1 and body.names[0] != body.names[1] else convention.takes
    place = convention.place
    return names[place], names[1 - place]
