"""The cases of `test_errors.py`: calls that make treescan raise. They are given the scalar 1, which modes of JAX trace.

Each file `*_error_cases.py` adds those of one subject, by rows or as functions:

    case()(
        length_negative=lambda one: scan(step, one, None, -1),
    )

    @case(lax=True)
    def carry_rank(one): ...

What a case raises, and whether that names a body, is in its golden file.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from treescan import TreescanError, errors

GOLDEN = Path(__file__).parents[1] / "golden"

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
        name: that of its golden file.
        run: the call.
        lax: whether `jax.lax.scan` raises too.
        less: the modes in which it cannot be run.
        context: under what it is run.
        devices: whether it needs more than one device.
    """

    name: str
    run: Run
    lax: bool
    less: tuple[str, ...]
    context: Context
    devices: bool

    @property
    def modes(self) -> list[str]:
        return [mode for mode in MODES if mode not in self.less]

    @property
    def golden(self) -> str:
        """What a user reads; nothing where that is about to be written."""
        file = GOLDEN / f"{self.name}.txt"
        return file.read_text() if file.exists() and os.environ.get("UPDATE_GOLDEN") != "1" else ""

    @property
    def error(self) -> type[TreescanError]:
        """The class with which the golden file begins."""
        if self.golden:
            return getattr(errors, self.golden.partition(":")[0].removeprefix("treescan.errors."))
        with pytest.raises(TreescanError) as caught:
            self.provoke()
        return caught.type

    @property
    def body(self) -> bool:
        """Whether the golden file names a body and its line."""
        return "(model.py:12)" in self.golden

    def provoke(self, mode: str = "eager") -> None:
        with self.context():
            MODES[mode](self.run)


CASES: dict[str, Case] = {}


def case(
    *, lax: bool = False, less: tuple[str, ...] = (), context: Context = contextlib.nullcontext, devices: bool = False
) -> Callable[..., None]:
    """Adds cases: a function under its own name, and rows under theirs."""

    def add(*functions: Run, **rows: Run) -> None:
        for name, run in [*((function.__name__, function) for function in functions), *rows.items()]:
            assert name not in CASES, name
            CASES[name] = Case(name, run, lax, less, context, devices)

    return add


def named(name: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The body under a name, which is what messages call it by."""
    body.__name__ = body.__qualname__ = name
    return body


def on_mesh(**options: Any) -> Callable[..., None]:
    """Cases on a mesh whose axis is a part of types."""
    return case(context=_set_mesh, devices=True, **options)


def _set_mesh() -> contextlib.AbstractContextManager[Any]:
    return jax.set_mesh(jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Explicit,)))


def mesh_of(count: int, axis: str = "devices") -> Any:
    """A mesh whose axis is no part of types."""
    return jax.make_mesh((count,), (axis,), axis_types=(AxisType.Auto,))


def over_devices(function: Callable[..., Any], mesh: Any, **options: Any) -> Any:
    """A function that each device calls with the whole of its arguments."""
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), **options)


def exported(run: Run, shape: str) -> Any:
    """Traces a function of an array of which a size is not known yet."""
    return jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32))


def with_ref(run: Run, *shape: int) -> Any:
    """A call that closes over a mutable array."""
    return run(jax.new_ref(jnp.ones(shape)))


XS = jnp.arange(3.0)
ROWS, LENGTHS = jnp.ones((3, 2, 4)), jnp.array([3, 1])  # [T, B, features]
