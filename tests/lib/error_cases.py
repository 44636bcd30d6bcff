"""The cases of `test_errors.py`: calls that make treescan raise. They are given the scalar 1, which modes of JAX trace.

Each file `*_error_cases.py` adds those of one subject, by rows or as functions:

    case(ArgumentError)(
        length_negative=lambda one: scan(step, one, None, -1),
    )

    @case(CarryError, lax=True)
    def carry_rank(one): ...
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from treescan import TreescanError

Run = Callable[[Any], Any]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


def _without_jit(run: Run) -> Any:
    with jax.disable_jit():
        return run(jnp.ones(()))


MODES: dict[str, Callable[[Run], Any]] = {
    "eager": lambda run: run(jnp.ones(())),
    "jit": lambda run: jax.jit(run)(jnp.ones(())),
    "disable_jit": _without_jit,
    "vmap": lambda run: jax.vmap(run)(jnp.ones(2)),
    "grad": lambda run: jax.grad(lambda one: run(one)[0])(jnp.ones(())),
}


class Case(NamedTuple):
    """A call that raises.

    Attributes:
        run: the call.
        error: what it raises.
        lax: whether `jax.lax.scan` raises too.
        less: the modes in which it cannot be run.
        context: under what it is run.
        body: whether the error names a body and its line.
        devices: whether it needs more than one device.
    """

    run: Run
    error: type[TreescanError]
    lax: bool
    less: tuple[str, ...]
    context: Context
    body: bool
    devices: bool

    @property
    def modes(self) -> list[str]:
        return [mode for mode in MODES if mode not in self.less]

    def provoke(self, mode: str = "eager") -> None:
        with self.context():
            MODES[mode](self.run)


CASES: dict[str, Case] = {}


def case(
    error: type[TreescanError],
    *,
    lax: bool = False,
    less: tuple[str, ...] = (),
    context: Context = contextlib.nullcontext,
    body: bool = True,
    devices: bool = False,
) -> Callable[..., None]:
    """Adds cases: a function under its own name, and rows under theirs."""

    def add(*functions: Run, **rows: Run) -> None:
        for name, run in [*((function.__name__, function) for function in functions), *rows.items()]:
            assert name not in CASES, name
            CASES[name] = Case(run, error, lax, less, context, body, devices)

    return add


def named(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The body under a name, which is what messages call it by."""
    body.__name__ = body.__qualname__ = name
    return body


def without_body(error: type[TreescanError], **options: Any) -> Callable[..., None]:
    return case(error, body=False, **options)


def on_mesh(error: type[TreescanError], **options: Any) -> Callable[..., None]:
    """Cases on a mesh whose axis is a part of types."""
    return case(error, context=_set_mesh, devices=True, **options)


def _set_mesh() -> contextlib.AbstractContextManager[Any]:
    return jax.set_mesh(jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,)))


def mesh_of(count: int, axis: str = "devices") -> Any:
    """A mesh whose axis is no part of types."""
    return jax.make_mesh((count,), (axis,), axis_types=(AxisType.Auto,))


def over_devices(function: Callable[..., Any], mesh: Any, **options: Any) -> Any:
    """A function that each device calls with the whole of its arguments."""
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), **options)


XS = jnp.arange(3.0)
ROWS, LENGTHS = jnp.ones((3, 2, 4)), jnp.array([3, 1])  # [T, B, features]
