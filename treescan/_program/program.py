"""The program of a call: its loop, through all transforms, compiled once for an eager call."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._loop.loop import Memo, is_jit_disabled
from .._loop.replaced import replacement
from .._loop.run import checks_key_reuse, debugs_nans
from .._trace.rewriting import is_rewriting
from .._transforms.call import Arguments, Call
from .._transforms.transform import Transform
from .eager import run_compiled
from .nest import run_nested


@dataclass(frozen=True)
class Program:
    """What a verb does to its arrays: a call and its transforms, innermost first. Hashable, and equal by value."""

    call: Call
    transforms: tuple[Transform, ...]

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


def execute(program: Program, given: Arguments, programs: Memo, *, donates: bool = False) -> Any:
    """Runs a program.

    An eager call puts the whole of it under one `jax.jit`, kept with the body, so that the second call neither traces
    nor compiles anything, and takes a fraction of the time that an eager `jax.lax.scan` takes. Under an outer trace,
    that trace is the one that counts.

    Args:
        program: the program.
        given: its arrays.
        programs: what was compiled for the bodies before.
        donates: whether an eager call gives the arrays of `init` away: they are deleted, and the last state takes their
            memory. They may not be among the other arrays too.
    """
    if _taking.get():
        raise Taken(program, given)
    if is_jit_disabled() or replacement() is not None:
        return program(given)
    key, call = (is_rewriting(), debugs_nans(), checks_key_reuse()), program.call
    plain, frozen, verb = not program.transforms, call.frozen, call.convention.verb
    return run_compiled(key, verb, program, given, programs, plain=plain, frozen=frozen, donates=donates)
