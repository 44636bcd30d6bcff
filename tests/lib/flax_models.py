"""Models of flax.linen with a loop in them, for tests that run each with one `scan` and with another."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import DenyList, FrozenDict
from flax.typing import In, Out
from loops import array

from treescan.integrations.flax import RNN

Scan = Callable[..., Any]
MODELS: dict[str, "Model"] = {}


class Model(NamedTuple):
    """A module made with a `scan`, and what it is called with.

    Attributes:
        build: makes the module.
        inputs: what it is called with.
        streams: the streams of keys that it reads.
        mutable: what changes in `apply`.
    """

    build: Callable[[Scan], nn.Module]
    inputs: tuple[Any, ...]
    streams: tuple[str, ...] = ("params",)
    mutable: Any = False


def model(*inputs: Any, streams: tuple[str, ...] = ("params",), mutable: Any = False) -> Any:
    """A decorator that puts `build(scan)` into the table, under its name."""

    def add(build: Callable[[Scan], nn.Module]) -> Callable[[Scan], nn.Module]:
        MODELS[build.__name__] = Model(build, inputs, streams, mutable)
        return build

    return add


def from_function(call: Callable[..., Any]) -> nn.Module:
    """A module whose compact `__call__` is this function of itself and the inputs."""

    class Main(nn.Module):
        @nn.compact
        def __call__(self, *inputs: Any) -> Any:
            return call(self, *inputs)

    return Main()


XS = array(5, 2, 3, seed=1)  # steps, batch, features
H = array(2, 3, seed=2)
_SHARED: dict[str, Any] = {"variable_broadcast": "params", "split_rngs": {"params": False}}
_STACKED: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


class Cell(nn.Module):
    """A recurrent step."""

    features: int = 3

    @nn.compact
    def __call__(self, h: Any, x: Any) -> Any:
        h = nn.tanh(nn.Dense(self.features)(x) + nn.Dense(self.features, use_bias=False)(h))
        return h, 2 * h


class Block(nn.Module):
    """A residual layer, with dropout if it is given a rate."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        h = nn.Dense(x.shape[-1])(x)
        if self.rate:
            h = nn.Dropout(self.rate, deterministic=False)(h)
        return x + nn.relu(h), None


def layers(scan: Scan, block: Any = Block, **options: Any) -> nn.Module:
    """A stack of four layers."""
    options = {**_STACKED, "length": 4, **options}
    return from_function(lambda self, x: scan(block, **options)()(x, None)[0])


def recurrent(scan: Scan, cell: Any = Cell, **options: Any) -> nn.Module:
    """A recurrent network with shared parameters."""
    options = {**_SHARED, **options}
    return from_function(lambda self, h, xs: scan(cell, **options)()(h, xs))


# Layers.


@model(H)
def residual_stack(scan):
    return layers(scan)


@model(H, streams=("params", "dropout"))
def dropout_shared(scan):
    return layers(scan, functools.partial(Block, rate=0.5), split_rngs={"params": True, "dropout": False})


def sharded(boxed, scan, **options):
    """Layers whose parameters have names for their axes."""

    class Sharded(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            init = boxed(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.tanh(nn.Dense(3, kernel_init=init)(x)), None

    return layers(scan, Sharded, metadata_params={nn.PARTITION_NAME: "layers"}, **options)


@model(H)
def partitioned(scan):
    return sharded(nn.with_partitioning, scan)


@model(H)
def logically_partitioned(scan):
    return sharded(nn.with_logical_partitioning, scan, variable_axes={"params": 1})


@model(H)
def frozen_metadata_params(scan):
    return layers(scan, metadata_params=FrozenDict({nn.PARTITION_NAME: None}), split_rngs=FrozenDict({"params": True}))


# Recurrence.


@model(H, XS)
def outputs_given_once(scan):
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            w = self.param("w", nn.initializers.normal(), (3, 3))
            h = nn.tanh(h @ w + x)
            return h, (h, jnp.sum(w * w), {"t": w.T})

    return recurrent(scan, Tied, out_axes=(0, nn.broadcast, {"t": nn.broadcast}))


@model(H, XS)
def unchecked(scan):
    def call(self, h, xs):
        cell = Cell()
        if self.is_initializing():
            cell(h, xs[0])
        return scan(lambda cell, h, x: cell(h, x), **_SHARED, check_constancy_invariants=False)(cell, h, xs)

    return from_function(call)


# Carried variables.


class Caching(nn.Module):
    """One step of decoding, with a cache that knows how full it is."""

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        k = nn.Dense(3)(x)
        made = self.has_variable("cache", "k")
        keys = self.variable("cache", "k", jnp.zeros, (5, *k.shape), k.dtype)
        index = self.variable("cache", "i", jnp.zeros, (), jnp.int32)
        if made:
            keys.value = keys.value.at[index.value].set(k)
            index.value += 1
        return jnp.tanh(x + jnp.sum(keys.value, 0)), index.value


@model(XS, mutable=["cache"])
def cache_in_time_and_layers(scan):
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, c, x):
            stack = scan(Caching, variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True}, length=2)
            return c, stack(name="layers")(x, None)

    def call(self, xs):
        cell = Decoder()
        if self.is_initializing():
            cell((), xs[0])
        return scan(lambda cell, c, x: cell(c, x), **_SHARED, variable_carry="cache")(cell, (), xs)

    return from_function(call)


# Filters, and collections that go one way.


@model(H, XS, mutable=["seen", "trail"])
def filters_that_deny(scan):
    broadcast, axes = DenyList(("seen", "trail")), {DenyList(()): -1}

    def body(self, h, x):
        n = self.variable("seen", "n", jnp.zeros, (), jnp.int32)
        n.value += 1
        self.variable("trail", "h", lambda: h).value = h
        h = nn.tanh(nn.Dense(3)(h) + x)
        return h, h * n.value.astype(jnp.float32)

    def call(self, h, xs):
        self.variable("seen", "n", jnp.zeros, (), jnp.int32)
        roles = {"variable_broadcast": broadcast, "variable_carry": DenyList("trail"), "variable_axes": axes}
        return scan(body, **roles, split_rngs={"params": False})(self, h, xs)

    return from_function(call)


@model(H, mutable=["out"])
def in_and_out(scan):
    def body(self, h, _):
        t = self.get_variable("table", "t")
        self.put_variable("out", "s", h * t)
        return h + t, jnp.sum(t)

    def call(self, h):
        self.variable("table", "t", lambda: XS)
        return scan(body, variable_axes={"table": In(0), "out": Out(-1)}, length=5)(self, h, None)

    return from_function(call)


# Methods, setup, several modules.


class TwoWays(nn.Module):
    """A module with two methods."""

    def setup(self) -> None:
        self.first, self.second = nn.Dense(3), nn.Dense(3)

    def up(self, h: Any, x: Any) -> Any:
        h = nn.tanh(self.first(h) + x)
        return h, h

    def down(self, h: Any, x: Any) -> Any:
        h = nn.tanh(self.second(h) - x)
        return h, jnp.sum(h)


@model(H, XS)
def methods_dict(scan):
    class Main(nn.Module):
        def setup(self) -> None:
            self.both = scan(TwoWays, methods={"up": _SHARED, "down": {**_SHARED, "reverse": True}})()

        def __call__(self, h: Any, xs: Any) -> Any:
            h, ys = self.both.up(h, xs)
            return self.both.down(h, ys)

    return Main()


@model(H, XS)
def several_modules(scan):
    def call(self, h, xs):
        second = Cell(name="second")

        def body(first, h, x, second):
            h, y = first(h, x)
            return second(h, y)

        return scan(body, in_axes=(0, nn.broadcast), **_SHARED)(Cell(), h, xs, second)

    return from_function(call)


@model(H, XS)
def decorated_method(scan):
    class Main(nn.Module):
        @functools.partial(scan, **_SHARED)
        @nn.compact
        def __call__(self, h, x):
            return Cell()(h, x)

    return Main()


@model(H, XS, mutable=["intermediates"])
def sown_in_time(scan):
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            h, y = Cell()(h, x)
            self.sow("intermediates", "norm", jnp.sum(h * h))
            self.sow("intermediates", "norm", jnp.sum(h))
            return h, y

    return recurrent(scan, Sowing, variable_axes={"intermediates": 0})


# Broadcast variables that a step changes: flax's second trace shows.


@model(H, XS, mutable=["calls"])
def changed_broadcast(scan):
    class Counting(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            n = self.variable("calls", "n", lambda: jnp.float32(0))
            n.value += 1.0
            return h + n.value, x * n.value

    return recurrent(scan, Counting, variable_broadcast=["params", "calls"])


# Where flax's partial evaluation, and its second trace, show.


def _flag(scan, value):
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, h, deterministic):
            if deterministic is True:  # concrete, and not only true
                h = h + 1
            return nn.Dropout(0.5)(nn.Dense(3)(h), deterministic=deterministic), None

    loop = functools.partial(scan, Dropped, variable_axes={"params": 0}, length=4, in_axes=nn.broadcast)
    return from_function(lambda self, h: loop(split_rngs={"params": True, "dropout": True})()(h, value))


@model(H)
def flag_true(scan):
    return _flag(scan, True)


@model(H, streams=("params", "dropout"))
def flag_false(scan):
    return _flag(scan, False)


@model(H)
def concrete_arrays_and_functions(scan):
    def body(module, h, given):
        return given["function"](module(h) if bool(given["on"]) else h)[..., np.asarray(given["order"])], None

    given = {"on": np.array(True), "order": np.array([2, 0, 1]), "function": jnp.sin}
    return from_function(lambda self, h: scan(body, **_SHARED, length=2, in_axes=nn.broadcast)(nn.Dense(3), h, given))


def layers_in_time(scan, block, split, **options):
    """A loop over layers, within one over time."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            layers = scan(block, variable_axes={"params": 0}, split_rngs={"params": True, **split}, length=4)
            h, _ = layers(name="in")(h + x, None)
            return h, h

    return recurrent(scan, Stack, **options)


@model(H, XS)
def rematerialized_layers_in_time(scan):
    return layers_in_time(scan, nn.remat(Block), {})


@model(H, XS, streams=("params", "dropout"))
def dropout_in_layers_in_time(scan):
    block, split = functools.partial(Block, rate=0.5), {"dropout": True}
    return layers_in_time(scan, block, split, split_rngs={"params": False, **split})


def _rnn(scan: Scan) -> Any:
    """The RNN beside this scan."""
    return nn.RNN if scan is nn.scan else RNN


@model(XS)
def layers_in_a_cell(scan):
    class StackCell(nn.RNNCellBase):
        num_feature_axes = 1

        @nn.compact
        def __call__(self, carry, x):
            carry, _ = scan(Block, **_STACKED, length=4)()(carry + x.sum(-1, keepdims=True), None)
            return carry, carry

        def initialize_carry(self, rng, input_shape):
            return jnp.zeros((*input_shape[:-1], 4))

    return from_function(lambda self, xs: _rnn(scan)(StackCell())(xs))


@model(H, XS)
def cells_of_their_own_in_time(scan):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            cells = _rnn(scan)(nn.SimpleCell(4), **_STACKED, variable_broadcast=False)
            return h, cells(jnp.stack([x, x], axis=-2))

    return recurrent(scan, Inner)


@model(H, XS)
def key_of_a_parameter_and_of_more(scan):
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            noise = jax.random.normal(self.make_rng("params"), (3,)) if self.is_initializing() else x[0]
            self.param("w", lambda key: noise)
            return h + x, noise

    return recurrent(scan, Noisy)


def scaled(by: float) -> Callable[[Any], Any]:
    return lambda variables: jax.tree.map(lambda leaf: leaf * by, variables)


@model(H, XS)
def transformed_data(scan):
    return recurrent(scan, data_transform=lambda variables, rngs: (scaled(2.0)(variables), rngs))


@model(H, XS)
def mapped_variables(scan):
    mapped = nn.map_variables(Cell, "params", scaled(2.0), scaled(0.5), init=True, mutable=True)
    return from_function(lambda self, h, xs: scan(mapped, **_SHARED)(name="mapped")(h, xs))
