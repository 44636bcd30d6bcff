"""Loops of every verb that hand a large array on: as the slices of a stack, or as a leaf of the carry."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import treescan
from treescan import fold_layers, fori, mask_scan, scan, scan_layers, while_scan
from treescan.integrations import nnx as of_nnx
from treescan.lifting import lift

T, N = 8, 64
BYTES = 4 * T * N * N
H = jnp.ones((2, N))


class Program(NamedTuple):
    """A loop over large arrays of these shapes: (arrays, remat, handed on or not) to (h, arrays or None)."""

    run: Callable[[Any, Any, bool], tuple[Any, Any]]
    shapes: Any = (T, N, N)

    def given(self) -> Any:
        """The arrays."""
        return jax.tree.map(lambda shape: jnp.full(shape, 0.01), self.shapes, is_leaf=lambda s: type(s) is tuple)


def _step(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(h @ w)


def _only(on: bool, w: Any) -> Any:
    return w if on else None


def _over_xs(w: Any, remat: Any, on: bool, **options: Any) -> Any:
    return scan(lambda h, w: (_step(h, w), _only(on, w)), H, w, remat=remat, **options)


def _over_axis_1(w: Any, remat: Any, on: bool) -> Any:
    return _over_xs(w, remat, on, in_axes=1, **({"out_axes": 1} if on else {}))


Loop = Callable[[Callable[[Any, Any], Any], Any, Any], Any]
"""A verb: (body of carry and number, init, remat) to the last carry."""


def _in_carry(loop: Loop) -> Callable[[Any, Any, bool], tuple[Any, Any]]:
    """A loop that hands the array on in its carry, or closes over it."""

    def run(w: Any, remat: Any, on: bool) -> tuple[Any, Any]:
        if not on:
            return loop(lambda h, i: _step(h, w[i]), H, remat), None
        return loop(lambda carry, i: (_step(carry[0], carry[1][i]), carry[1]), (H, w), remat)

    return run


def _by_scan(body: Any, init: Any, remat: Any) -> Any:
    return scan(lambda carry, i: (body(carry, i), None), init, jnp.arange(T), remat=remat)[0]


def _by_fori(body: Any, init: Any, remat: Any, upper: Any = T, **options: Any) -> Any:
    return fori(0, upper, lambda i, carry: body(carry, i), init, remat=remat, **options)


def _by_mask_scan(body: Any, init: Any, remat: Any, **flags: Any) -> Any:
    flags = flags or {"lengths": jnp.array([3, 8])}
    axes = (0, None) if isinstance(init, tuple) else 0
    xs = jnp.stack([jnp.arange(T)] * 2, 1)
    return mask_scan(
        lambda carry, x: (body(carry, x[0]), None), init, xs, row_axes={"carry": axes}, remat=remat, **flags
    )[0]


def _by_resets(body: Any, init: Any, remat: Any) -> Any:
    return _by_mask_scan(body, init, remat, resets=jnp.arange(T)[:, None] % 4 == jnp.zeros((1, 2), int))


def _by_while_scan(body: Any, init: Any, remat: Any) -> Any:
    goes_on = lambda carry: jax.tree.leaves(carry)[0].sum() < 1e9  # noqa: E731
    return while_scan(goes_on, lambda carry, i: (body(carry, i), None), init, jnp.arange(T), remat=remat)[0]


def _by_rows(body: Any, init: Any, remat: Any) -> Any:
    go_on = lambda carry: jax.tree.leaves(carry)[0].sum(1) < 1e9  # noqa: E731
    axes = (0, None) if isinstance(init, tuple) else 0
    xs = jnp.stack([jnp.arange(T)] * 2, 1)
    return while_scan(go_on, lambda c, x: (body(c, x[0]), None), init, xs, row_axes={"carry": axes}, remat=remat)[0]


def _over_layers(w: Any, remat: Any, on: bool) -> Any:
    return scan_layers(lambda w, h: (_step(h, w), _only(on, w)), H, w, remat=remat)


def _layers_with_state(w: Any, remat: Any, on: bool) -> Any:
    gains = jnp.ones(T)
    if not on:
        return scan_layers(lambda layer, h: (_step(h, layer[1]) * layer[0], None), H, (gains, w), remat=remat)
    h, w, _ = scan_layers(lambda g, h, w: (_step(h, w) * g, w, None), H, gains, state=w, remat=remat)
    return h, w


_BLOCKS: Any = (lambda w, h: _step(h, w), lambda w, h: _step(h, w) + h)


def _in_turn(w: Any, remat: Any, on: bool) -> Any:
    blocks = [lambda w, h, of=of: (of(w, h), _only(on, w)) for of in _BLOCKS]
    h, ys = scan_layers(blocks, H, w, remat=remat)
    return h, _only(on, ys)


def _in_turn_with_state(w: Any, remat: Any, on: bool) -> Any:
    gains = [jnp.ones(len(stack)) for stack in w]
    if not on:
        blocks = [lambda layer, h, of=of: (of(layer[1], h) * layer[0], None) for of in _BLOCKS]
        return scan_layers(blocks, H, list(zip(gains, w, strict=True)), remat=remat)[0], None
    blocks = [lambda g, h, w, of=of: (of(w, h) * g, w, None) for of in _BLOCKS]
    h, w, _ = scan_layers(blocks, H, gains, state=w, remat=remat)
    return h, w


def _lifted(w: Any, remat: Any, on: bool) -> Any:
    def body(variables: Any, rngs: Any, h: Any, _: Any) -> Any:
        w = variables["params"]
        return (_step(h, w), None), ({"params": w} if on else {})

    axes = {"params": 0} if on else {"params": treescan.lifting.In(0)}
    (h, _), found = lift(body, variable_axes=axes, length=T, remat=remat)({"params": w}, {}, H, None)
    return h, found.get("params")


class _Layer(nnx.Module):
    def __init__(self, w: Any) -> None:
        self.w = nnx.Param(w)


def _modules(w: Any, remat: Any, on: bool) -> Any:
    if not on:
        return _over_xs(w, remat, on)
    layer = _Layer(w)

    @functools.partial(of_nnx.scan, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, remat=remat)
    def run(h: Any, layer: Any) -> Any:
        return _step(h, layer.w[...])

    return run(H, layer), layer.w[...]


_REST = [(T // 2 + 1, N, N), (T // 2, N, N)]

PROGRAMS = {
    "scan": Program(_over_xs),
    "scan, axis 1": Program(_over_axis_1, (N, T, N)),
    "scan, truncate": Program(functools.partial(_over_xs, truncate=4)),
    "scan, carry": Program(_in_carry(_by_scan)),
    "fori": Program(_in_carry(_by_fori)),
    "mask_scan": Program(_in_carry(_by_mask_scan)),
    "mask_scan, resets": Program(_in_carry(_by_resets)),
    "while_scan": Program(_in_carry(_by_while_scan)),
    "scan_layers": Program(_over_layers),
    "scan_layers, state": Program(_layers_with_state),
    "pattern, rest": Program(_in_turn, _REST),
    "pattern, state, rest": Program(_in_turn_with_state, _REST),
    "lift": Program(_lifted),
    "nnx": Program(_modules),
}
"""Without `accumulate`, which stacks whatever its carry holds."""

_LENGTHS = {"lengths": jnp.array([3, 8])}
LOOPS: dict[str, Loop] = {
    "scan": _by_scan,
    "fori": _by_fori,
    "fori, traced": functools.partial(_by_fori, upper=jnp.asarray(T), max_length=T),
    "mask_scan": _by_mask_scan,
    "mask_scan, chunk": functools.partial(_by_mask_scan, chunk=4, **_LENGTHS),
    "mask_scan, compact": functools.partial(_by_mask_scan, chunk=4, compact=True, **_LENGTHS),
    "mask_scan, resets": _by_resets,
    "while_scan": _by_while_scan,
    "while_scan, rows": _by_rows,
    "fold_layers": lambda body, init, remat: fold_layers(lambda i, h: body(h, i), init, jnp.arange(T), remat=remat),
}
"""Loops that may read an array in each step without a change."""


def read_in_steps(loop: Loop, h: Any, w: Any, remat: Any, carried: bool) -> Any:
    """The last h of a loop that reads the array, in its carry or closed over."""
    if carried:
        return loop(lambda carry, i: (_step(carry[0], carry[1][i]), carry[1]), (h, w), remat)[0]
    return loop(lambda h, i: _step(h, w[i]), h, remat)


def read_by_hand(h: Any, w: Any) -> Any:
    """The same with `jax.lax.scan`, each step under `jax.checkpoint`."""
    step = jax.checkpoint(lambda h, i: (_step(h, w[i]), None), prevent_cse=False)
    return jax.lax.scan(step, h, jnp.arange(T))[0]
