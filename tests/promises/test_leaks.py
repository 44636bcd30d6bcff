"""What a body closes over dies with it: after every verb, eager or not, differentiated or not.

A user who makes a body in each call, with arrays in it, must not run out of memory.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from thin import parametrize

import treescan
from treescan.integrations.flax import RNN, scan as flax_scan
from treescan.integrations.nnx import scan as nnx_scan

pytestmark = pytest.mark.quick

LENGTH, ROWS, WIDTH = 4, 3, 2
LENGTHS = np.array([2, 0, 4])
RESETS = np.arange(LENGTH)[:, None] == np.array([1, 1, 3])
H, XS, W = jnp.ones((ROWS, WIDTH)), jnp.full((LENGTH, ROWS, WIDTH), 0.5), jnp.eye(WIDTH)


class Closure:
    """A fresh body, and the array that it alone holds."""

    def __init__(self) -> None:
        weights = W * 0.5
        offset = weights[0]

        def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = jnp.tanh(carry @ weights + x + offset[None])
            return carry, jnp.sin(carry)

        self.body, self.held = body, [weakref.ref(body), weakref.ref(weights), weakref.ref(offset)]


def fresh(method: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """A fresh function for a verb that asks for another kind of body."""
    kinds: dict[str, Callable[..., Any]] = {
        "fold": lambda carry, x: body(carry, x)[0],
        "fori": lambda i, carry: body(carry, XS[0])[0],
        "layer": lambda layer, x: body(x, layer),
        "layer_fold": lambda layer, x: body(x, layer)[0],
        "lift": lambda variables, rngs, carry, x: (body(carry, x), {}),
    }
    return kinds[method]


def goes_on(carry: jax.Array) -> jax.Array:
    return jnp.sum(carry) < 100


def masked(**options: Any) -> Callable[..., Any]:
    return lambda body, h, xs: treescan.mask_scan(body, h, xs, lengths=LENGTHS, **options)


def until(body: Any, h: Any, xs: Any) -> Any:
    return treescan.while_scan(goes_on, body, h, xs)[:2]


def until_fresh_condition(body: Any, h: Any, xs: Any) -> Any:
    bound = W[0, 0] * 100
    return treescan.while_scan(lambda carry: jnp.sum(carry) < bound, body, h, xs)[:2]


def lifted(body: Any, h: Any, xs: Any) -> Any:
    return treescan.lift(fresh("lift", body))({}, {}, h, xs)[0]


def of_flax(body: Any, h: Any, xs: Any) -> Any:
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry: Any, x: Any) -> Any:
            return body(carry, x)

    return flax_scan(Cell, variable_broadcast="params", split_rngs={"params": False})().apply({}, h, xs)


def of_flax_rnn(body: Any, h: Any, xs: Any) -> Any:
    class Cell(nn.RNNCellBase):
        @nn.compact
        def __call__(self, carry: Any, x: Any) -> Any:
            return body(carry, x)

        def initialize_carry(self, rng: Any, input_shape: Any) -> Any:
            return h

        @property
        def num_feature_axes(self) -> int:
            return 1

    run = RNN(Cell(), time_major=True, return_carry=True)
    return run.apply({}, xs, initial_carry=h, seq_lengths=jnp.asarray(LENGTHS))


def of_nnx(body: Any, h: Any, xs: Any) -> Any:
    return nnx_scan(lambda carry, x: body(carry, x), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(h, xs)


VERBS = {
    "scan": lambda b, h, x: treescan.scan(b, h, x),
    "scan out_axes": lambda b, h, x: treescan.scan(b, h, x, out_axes=1),
    "scan nested": lambda b, h, x: treescan.scan(b, h, x, remat="nested"),
    "scan save": lambda b, h, x: treescan.scan(b, h, x, save="last"),
    "fold": lambda b, h, x: treescan.fold(fresh("fold", b), h, x, remat="step"),
    "accumulate": lambda b, h, x: treescan.accumulate(fresh("fold", b), h, x, remat="nested"),
    "fori": lambda b, h, x: treescan.fori(0, LENGTH, fresh("fori", b), h),
    "fori traced": lambda b, h, x: treescan.fori(jnp.int32(0), jnp.int32(2), fresh("fori", b), h, max_length=LENGTH),
    "while_scan": until,
    "while_scan condition": until_fresh_condition,
    "mask_scan": masked(),
    "mask_scan chunk": masked(chunk=2, remat="step"),
    "mask_scan plain": masked(chunk=0),
    "mask_scan hold": masked(fill="hold", reverse=True),
    "mask_scan compact": masked(chunk=2, compact=True),
    "mask_scan resets": masked(resets=RESETS, save="last"),
    "mask_scan nested": masked(remat="nested", chunk=2),
    "scan_layers": lambda b, h, x: treescan.scan_layers(fresh("layer", b), h, x, remat="step"),
    "fold_layers": lambda b, h, x: treescan.fold_layers(fresh("layer_fold", b), h, x, remat="nested"),
    "pattern": lambda b, h, x: treescan.fold_layers([fresh("layer_fold", b)] * 2, h, (x[:2], x[2:])),
    "lift": lifted,
    "flax scan": of_flax,
    "flax RNN": of_flax_rnn,
    "nnx scan": of_nnx,
}


def eager(call: Callable[..., Any]) -> Any:
    return call(H, XS)


def jitted(call: Callable[..., Any]) -> Any:
    return jax.jit(call)(H, XS)


def total(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda h, xs: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(call(h, xs)))


def grad(call: Callable[..., Any]) -> Any:
    return jax.grad(total(call), (0, 1))(H, XS)


def vmap(call: Callable[..., Any]) -> Any:
    return jax.vmap(call, in_axes=(0, None))(jnp.stack([H, H]), XS)


def jvp(call: Callable[..., Any]) -> Any:
    return jax.jvp(call, (H, XS), (H, XS))


CONTEXTS = {f.__name__: f for f in (eager, jitted, grad, vmap, jvp)}


def run_once(verb: Callable[..., Any], context: Callable[..., Any]) -> list[weakref.ref[Any]]:
    """Runs a verb on a fresh closure; references to what it held."""
    closure = Closure()
    jax.block_until_ready(context(lambda h, xs: verb(closure.body, h, xs)))
    return closure.held


def alive(references: Iterator[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


DAILY = ("scan", "mask_scan")


@pytest.mark.parametrize("verb", [v if v in DAILY else pytest.param(v, marks=pytest.mark.slow) for v in VERBS])
def test_what_a_body_closes_over_dies_with_it(verb):
    for name, context in CONTEXTS.items():
        held = [reference for _ in range(2) for reference in run_once(VERBS[verb], context)]
        assert alive(iter(held)) == 0, name


def objects() -> int:
    """How many objects of the package, and arrays, are alive."""
    gc.collect()
    ours = sum(1 for thing in gc.get_objects() if str(type(thing).__module__).startswith("treescan"))
    return ours + len(jax.live_arrays())


@parametrize("verb", {name: VERBS[name] for name in ("fold", "fori traced", "while_scan", "mask_scan", "scan_layers")})
def test_the_number_of_live_objects_is_flat(verb):
    run_once(verb, grad)
    before = objects()
    for _ in range(3):
        run_once(verb, grad)
    assert objects() == before
