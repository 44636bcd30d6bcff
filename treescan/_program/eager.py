"""A program that an eager call compiles once, which is given the arrays that its body closes over.

`jax.jit` alone would copy them into the program: that takes their memory a second time, and for large weights seconds.
So a program is traced first. If it closes over arrays, the trace of `jax.jit` is given up, and begun again with them
among the arguments.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.core import ShapedArray, Tracer, eval_jaxpr

from .._avals import Array, PyTree
from .._trace.steps import array_of
from .._transforms.call import Arguments

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    Trace = tuple[ClosedJaxpr, PyTree]
    """A program, and the types of its results."""
    Found = list[tuple[Array, ...]]
    """The arrays that a program closes over. Several threads may append to it: the first one counts."""


class _Closes(BaseException):
    """Leaves the first trace of `jax.jit`, with that of a program that closes over arrays."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace


_left: contextvars.ContextVar[tuple[Found | None, Trace | None]] = contextvars.ContextVar("left", default=(None, None))
"""The trace that was left so, with whose it is. The next trace of the same takes it: a program is traced once."""


class Eager:
    """A program under `jax.jit`.

    What the body closes over in its first trace becomes arguments. If a trace for other types closes over further
    arrays, these are copied.

    Args:
        name: what JAX calls it.
        program: maps the arrays of a call to its results.
        donates: whether `init` is given away.
    """

    def __init__(self, name: str, program: Callable[[Arguments], Any], *, donates: bool) -> None:
        found: Found = []

        def run(init: PyTree, given: Arguments, closed_over: tuple[Array, ...]) -> Any:
            given = given._replace(init=init)
            owner, trace = _left.get()
            _left.set((None, None))
            if trace is None or owner is not found:
                trace = jax.make_jaxpr(program, return_shape=True)(given)
            jaxpr, types = trace
            if not closed_over and any(map(_is_array, jaxpr.consts)):
                raise _Closes(trace)
            passed = dict(zip(map(id, found[0]), closed_over, strict=True)) if closed_over else {}
            consts = [passed.get(id(const), const) for const in jaxpr.consts]
            out = eval_jaxpr(jaxpr.jaxpr, consts, *jax.tree.leaves(given), propagate_source_info=True)
            return jax.tree.unflatten(jax.tree.structure(types), map(array_of, out, jaxpr.out_avals))

        run.__name__ = run.__qualname__ = name
        self._found = found
        self._run = jax.jit(run, donate_argnums=(0,) if donates else ())

    def __call__(self, given: Arguments) -> Any:
        """The results."""
        init, others = given.init, given._replace(init=None)
        try:
            return self._run(init, others, self._found[0] if self._found else ())
        except _Closes as closes:
            token = _left.set((self._found, closes.trace))
            self._found.append(tuple(filter(_is_array, closes.trace[0].consts)))
        try:
            return self._run(init, others, self._found[0])
        finally:
            _left.reset(token)


def _is_array(const: object) -> bool:
    """Whether a constant is an array of JAX: not one of NumPy, which a body may make anew, nor a mutable one."""
    return isinstance(const, jax.Array) and not isinstance(const, Tracer) and isinstance(jax.typeof(const), ShapedArray)
