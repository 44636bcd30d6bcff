"""Trace time: what treescan adds to the time that JAX needs to trace a scan.

Each repetition traces new body functions (JAX caches traces by the function's identity) inside
`jax.make_jaxpr`, so lowering and compiling are not in the measurement. `make_jaxpr` itself takes a
quarter as long as one large scan in it, so each traces several scans, one after the other.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import treescan
from benchmarks._by_hand import where_scan
from benchmarks._harness import Comparison, Thunk

Carry = dict[str, dict[str, Array]]
Body = Callable[[Carry, Array], tuple[Carry, None]]
Operation = Callable[[Array, Array], Array]

STEPS, ROWS, FEATURES = 16, 8, 4
SCANS = 5  # in each trace
TARGET = 1.10

OPERATORS: list[Operation] = [operator.add, operator.mul, operator.sub, jnp.maximum]
PRIMITIVES: list[Operation] = [lax.add, lax.mul, lax.sub, lax.max]


def comparisons() -> Iterator[Comparison]:
    """The comparisons of this suite."""
    large, small = _carry(groups=10, size=10), _carry(groups=1, size=1)
    lax_large = _trace(lax.scan, OPERATORS, large)
    yield Comparison("control, 100 operations", "itself", lax_large, lax_large)
    yield Comparison(
        "100 operations, 100 leaves",
        "jax.lax.scan",
        _trace(treescan.scan, OPERATORS, large),
        lax_large,
        TARGET,
    )
    yield Comparison(
        "100 lax primitives, 100 leaves",
        "jax.lax.scan",
        _trace(treescan.scan, PRIMITIVES, large),
        _trace(lax.scan, PRIMITIVES, large),
    )
    yield Comparison(
        "1 operation, 1 leaf",
        "jax.lax.scan",
        _trace(treescan.scan, OPERATORS, small),
        _trace(lax.scan, OPERATORS, small),
    )
    for name, carry in (("100 operations, 100 leaves", large), ("1 operation, 1 leaf", small)):
        yield Comparison(
            f"mask_scan, {name}",
            "where by hand",
            _trace(_mask_scan, OPERATORS, carry),
            _trace(_where_scan, OPERATORS, carry),
        )


def _carry(groups: int, size: int) -> Carry:
    """A nested dict of `groups` times `size` leaves `[ROWS, FEATURES]`."""
    leaf = jnp.ones((ROWS, FEATURES))
    return {f"group{i}": {f"leaf{j}": leaf for j in range(size)} for i in range(groups)}


def _body(operations: list[Operation]) -> Body:
    """A new function each time: one operation a leaf, the operations by turns."""

    def body(carry: Carry, x: Array) -> tuple[Carry, None]:
        leaves, treedef = jax.tree.flatten(carry)
        leaves = [operations[i % len(operations)](leaf, x) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(treedef, leaves), None

    return body


def _trace(scan: Callable[..., Any], operations: list[Operation], carry: Carry) -> Thunk:
    """Traces `SCANS` scans, each of a new body, inside a new function."""
    xs = jnp.ones((STEPS, ROWS, FEATURES))

    def trace() -> None:
        def scans(carry: Carry, xs: Array) -> Carry:
            for _ in range(SCANS):
                carry, _ys = scan(_body(operations), carry, xs)
            return carry

        jax.make_jaxpr(scans)(carry, xs)

    return trace


def _lengths() -> Array:
    return jnp.arange(1, ROWS + 1)


def _mask_scan(body: Body, init: Carry, xs: Array) -> Any:
    return treescan.mask_scan(body, init, xs, lengths=_lengths())


def _where_scan(body: Body, init: Carry, xs: Array) -> Any:
    return where_scan(body, init, xs, _lengths())
