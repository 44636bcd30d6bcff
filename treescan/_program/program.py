"""The program of a call: its loop, through all transforms, compiled once for an eager call."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax

from .._avals import PyTree
from .._loop.loop import Memo, is_jit_disabled, under_a_trace
from .._loop.run import checks_key_reuse, debugs_nans
from .._trace.rewriting import is_rewriting
from .._transforms.call import Arguments, Call
from .._transforms.transform import Transform
from .nest import run_nested


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
        for transform in self.transforms:
            loop = transform(loop)
        return run_nested(loop)


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
        compiled: Callable[[PyTree, Arguments], Any] = programs.program(
            key, lambda: jax.jit(functools.partial(_with_init, program), donate_argnums=donated)
        )
        return compiled(given.init, given._replace(init=None))
    return program(given)


def _with_init(program: Program, init: PyTree, given: Arguments) -> Any:
    return program(given._replace(init=init))
