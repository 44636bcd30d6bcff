"""`treescan.integrations.flax.scan` where flax's partial evaluation and its second trace show, against flax itself."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from loops import array
from thin import by_turns

from treescan.integrations.flax import RNN, scan

H, XS = array(2, 3), array(5, 2, 3)
LAYERS: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 4}
STEPS: dict[str, Any] = {"variable_broadcast": "params", "split_rngs": {"params": False}}
Case = Callable[[Any, Any, Any, Any], Any]
CASES: dict[str, Case] = {}


def case(run: Case) -> Case:
    """A model, of (nn.scan, nn.RNN, h, xs), with flax's or ours."""
    CASES[run.__name__] = run
    return run


class Main(nn.Module):
    scan: Any
    rnn: Any
    run: Case

    @nn.compact
    def __call__(self, h: Any, xs: Any) -> Any:
        return self.run(self.scan, self.rnn, h, xs)


class Block(nn.Module):
    features: int = 3

    @nn.compact
    def __call__(self, h: Any, _: Any) -> Any:
        return nn.tanh(nn.Dense(self.features)(h)), None


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, h: Any, deterministic: Any) -> Any:
        if deterministic is True:  # concrete, and not only true
            h = h + 1
        return nn.Dropout(0.5)(nn.Dense(3)(h), deterministic=deterministic), None


class Drawing(nn.Module):
    @nn.compact
    def __call__(self, h: Any, _: Any) -> Any:
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(3)(h)), None


def flag(value: Any) -> Case:
    def run(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
        split = {"params": True, "dropout": True}
        return scan(Dropped, **{**LAYERS, "split_rngs": split}, in_axes=nn.broadcast)()(h, value)

    return run


CASES["flag_true"], CASES["flag_false"] = flag(True), flag(False)


@case
def concrete_array(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    def body(module: Any, h: Any, given: Any) -> Any:
        return (module(h) if bool(given["on"]) else h)[..., np.asarray(given["order"])], None

    given = {"on": np.array(True), "order": np.array([2, 0, 1])}
    return scan(body, **STEPS, length=2, in_axes=nn.broadcast)(nn.Dense(3), h, given)


class Stack(nn.Module):
    """A loop over layers, within one over time."""

    scan: Any
    block: Any = Block
    wrap: Any = None
    split: Any = None

    @nn.compact
    def __call__(self, h: Any, x: Any) -> Any:
        block = self.block if self.wrap is None else self.wrap(self.block)
        h, _ = self.scan(block, **{**LAYERS, "split_rngs": {"params": True, **(self.split or {})}})(name="in")(
            h + x, None
        )
        return h, h


@case
def layers_in_time(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    return scan(Stack, **STEPS)(scan)(h, xs)


@case
def rematerialized_layers_in_time(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    return scan(Stack, **STEPS)(scan, wrap=nn.remat)(h, xs)


@case
def dropout_in_layers_in_time(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    split = {"params": False, "dropout": True}
    return scan(Stack, variable_broadcast="params", split_rngs=split)(scan, Drawing, split={"dropout": True})(h, xs)


class StackCell(nn.RNNCellBase):
    scan: Any

    @property
    def num_feature_axes(self) -> int:
        return 1

    @nn.compact
    def __call__(self, carry: Any, x: Any) -> Any:
        carry, _ = self.scan(Block, **LAYERS)(4)(carry + x.sum(-1, keepdims=True), None)
        return carry, carry

    def initialize_carry(self, rng: Any, input_shape: Any) -> Any:
        return jnp.zeros((*input_shape[:-1], 4))


@case
def layers_in_a_cell(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    return rnn(StackCell(scan))(xs)


class Inner(nn.Module):
    rnn: Any

    @nn.compact
    def __call__(self, h: Any, x: Any) -> Any:
        own = {"variable_axes": {"params": 0}, "variable_broadcast": False, "split_rngs": {"params": True}}
        return h, self.rnn(nn.SimpleCell(4), **own)(jnp.stack([x, x], axis=-2))


@case
def cells_of_their_own_in_time(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    return scan(Inner, **STEPS)(rnn, name="inner")(h, xs)


@case
def key_of_a_parameter_and_of_more(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    def body(module: Any, h: Any, x: Any) -> Any:
        noise = jax.random.normal(module.make_rng("params"), (3,))
        module.param("w", lambda key: noise)
        return h + x, noise

    class Body(nn.Module):
        __call__ = nn.compact(body)

    return scan(Body, **STEPS)()(h, xs)


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, h: Any, x: Any) -> Any:
        return nn.SpectralNorm(nn.Dense(3))(h, update_stats=False), h


@case
def spectral_norm(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    return scan(Spectral, **STEPS, variable_axes={"batch_stats": 0})()(h, xs)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, h: Any, x: Any) -> Any:
        return nn.tanh(nn.Dense(3)(h + x)), h


def scaled(by: float) -> Callable[[Any], Any]:
    return lambda variables: jax.tree.map(lambda leaf: leaf * by, variables)


@case
def transformed_data(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    return scan(Dense, **STEPS, data_transform=lambda variables, rngs: (scaled(2.0)(variables), rngs))()(h, xs)


@case
def mapped_variables(scan: Any, rnn: Any, h: Any, xs: Any) -> Any:
    mapped = nn.map_variables(Dense, "params", scaled(2.0), scaled(0.5), init=True, mutable=True)
    return scan(mapped, **STEPS)(name="mapped")(h, xs)


@by_turns(2, run=CASES)
def test_is_flax_s(run: Case) -> None:
    ours, theirs = Main(scan, RNN, run), Main(nn.scan, nn.RNN, run)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    result, variables = ours.init_with_output(rngs, H, XS)
    expected, of_flax = theirs.init_with_output(rngs, H, XS)
    jax.tree.map(np.testing.assert_array_equal, variables, of_flax)
    jax.tree.map(np.testing.assert_array_equal, result, expected)

    def loss(model: Any, variables: Any) -> Any:
        out = model.apply(variables, H, XS, rngs={"params": jax.random.key(2), "dropout": jax.random.key(3)})
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out))

    grads = jax.jit(jax.value_and_grad(lambda variables: loss(ours, variables)))(variables)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        grads,
        jax.jit(jax.value_and_grad(lambda variables: loss(theirs, variables)))(variables),
    )
