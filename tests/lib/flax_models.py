"""Models of flax.linen with a loop in them, for tests that run each with one `scan` and with another."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList, FrozenDict
from flax.typing import In, Out
from loops import array

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


X = array(2, 5, 3)  # batch, steps, features
XS = array(5, 2, 3, seed=1)  # steps, batch, features
H = array(2, 3, seed=2)


class Cell(nn.Module):
    """A recurrent step."""

    features: int = 3

    @nn.compact
    def __call__(self, h: Any, x: Any) -> Any:
        h = nn.tanh(nn.Dense(self.features)(x) + nn.Dense(self.features, use_bias=False)(h))
        return h, 2 * h


class Block(nn.Module):
    """A residual layer, that knows all of what a layer may have."""

    rate: float = 0.0
    norm: bool = False
    sows: bool = False

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        h = nn.Dense(x.shape[-1])(x)
        if self.norm:
            h = nn.BatchNorm(use_running_average=False)(h)
        if self.rate:
            h = nn.Dropout(self.rate, deterministic=False)(h)
        if self.sows:
            self.sow("intermediates", "h", h)
        return x + nn.relu(h), None


def layers(scan: Scan, block: Any = Block, **options: Any) -> nn.Module:
    """A stack of four layers."""
    options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 4, **options}
    return from_function(lambda self, x: scan(block, **options)()(x, None)[0])


def recurrent(scan: Scan, cell: Any = Cell, **options: Any) -> nn.Module:
    """A recurrent network with shared parameters."""
    options = {"variable_broadcast": "params", "split_rngs": {"params": False}, **options}
    return from_function(lambda self, h, xs: scan(cell, **options)()(h, xs))


# The examples of flax's documentation.


@model(X)
def lstm_class(scan):
    class LSTM(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            ScanLSTM = scan(
                nn.LSTMCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
            )
            lstm = ScanLSTM(self.features)
            carry = lstm.initialize_carry(jax.random.key(0), x[:, 0].shape)
            carry, x = lstm(carry, x)
            return x

    return LSTM(features=4)


@model(X)
def lstm_function(scan):
    class LSTM(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x):
            cell = nn.LSTMCell(self.features)

            def body_fn(cell, carry, x):
                carry, y = cell(carry, x)
                return carry, y

            loop = scan(body_fn, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
            carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
            carry, x = loop(cell, carry, x)
            return x

    return LSTM(features=4)


@model(H)
def residual_stack(scan):
    return layers(scan)


# Layers.


@model(H, mutable=["batch_stats"])
def layers_with_batch_norm(scan):
    return layers(scan, functools.partial(Block, norm=True), variable_axes={"params": 0, "batch_stats": 0})


@model(H, streams=("params", "dropout"))
def dropout_split(scan):
    return layers(scan, functools.partial(Block, rate=0.5), split_rngs={"params": True, "dropout": True})


@model(H, streams=("params", "dropout"))
def dropout_shared(scan):
    return layers(scan, functools.partial(Block, rate=0.5), split_rngs={"params": True, "dropout": False})


@model(H)
def remat_inside(scan):
    return layers(scan, nn.remat(Block, prevent_cse=False))


@model(H, mutable=["intermediates"])
def sown(scan):
    return layers(scan, functools.partial(Block, sows=True), variable_axes={"params": 0, "intermediates": Out(0)})


@model(H)
def axis_one(scan):
    return layers(scan, functools.partial(Block), variable_axes={"params": 1})


@model(H, XS)
def recurrent_in_layers(scan):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, xs, h):
            loop = scan(Cell, variable_broadcast="params", split_rngs={"params": False})
            h, xs = loop(name="cell")(h, xs)
            return xs, h

    def call(self, h, xs):
        stack = scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=2)
        return stack()(xs, h)

    return from_function(call)


@model(H)
def partitioned(scan):
    class Sharded(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.tanh(nn.Dense(3, kernel_init=init)(x)), None

    return layers(scan, Sharded, metadata_params={nn.PARTITION_NAME: "layers"})


@model(H)
def logically_partitioned(scan):
    class Sharded(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.tanh(nn.Dense(3, kernel_init=init)(x)), None

    return layers(scan, Sharded, variable_axes={"params": 1}, metadata_params={nn.PARTITION_NAME: "layers"})


@model(H)
def frozen_metadata_params(scan):
    return layers(scan, metadata_params=FrozenDict({nn.PARTITION_NAME: None}), split_rngs=FrozenDict({"params": True}))


@model(H, XS)
def nested_axes(scan):
    def body(self, h, given, both):
        h = nn.Dense(3)(h) + given["x"] + both[0] * both[1][1]
        return h, (h, {"c": given["x"], "w": h + both[0]})

    def call(self, h, xs):
        axes = ({"x": -1}, (0, nn.broadcast))
        loop = scan(
            body, variable_broadcast="params", split_rngs={"params": False}, in_axes=axes,
            out_axes=(1, {"c": 0, "w": -1}),
        )  # fmt: skip
        return loop(self, h, {"x": jnp.moveaxis(xs, 0, -1)}, (xs, (h, h + h)))

    return from_function(call)


# Recurrence.


@model(H, XS)
def recurrent_reverse(scan):
    return recurrent(scan, reverse=True)


@model(H, XS, streams=("params", "dropout"))
def recurrent_dropout_split(scan):
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            h, y = Cell()(h, nn.Dropout(0.5, deterministic=False)(x))
            return h, nn.Dropout(0.5, deterministic=False)(y)

    return recurrent(scan, Dropped, split_rngs={"params": False, "dropout": True})


@model(H, XS)
def keys_of_one_s_own(scan):
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            w = self.param("w", nn.initializers.normal(), (3,))
            noise = jax.random.normal(self.make_rng("params"), h.shape) if self.is_initializing() else h
            return h * w[None], x + noise

    return recurrent(scan, Noisy, split_rngs={"params": False})


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
        loop = scan(
            lambda cell, h, x: cell(h, x), variable_broadcast="params", split_rngs={"params": False},
            check_constancy_invariants=False,
        )  # fmt: skip
        return loop(cell, h, xs)

    return from_function(call)


# Carried variables.


@model(H, XS, mutable=["batch_stats"])
def carried_batch_stats(scan):
    def call(self, h, xs):
        norm = nn.BatchNorm(use_running_average=False, momentum=0.5)
        if self.is_initializing():
            norm(xs[0])

        def body(norm, h, x):
            h = jnp.tanh(h + norm(x))
            return h, h

        loop = scan(body, variable_broadcast="params", variable_carry="batch_stats", split_rngs={"params": False})
        return loop(norm, h, xs)

    return from_function(call)


@model(XS, mutable=["counter"])
def counter(scan):
    def call(self, xs):
        self.variable("counter", "i", jnp.zeros, (), jnp.int32)

        def body(self, c, x):
            i = self.variable("counter", "i", jnp.zeros, (), jnp.int32)
            i.value += 1
            return c, x * i.value.astype(jnp.float32)

        return scan(body, variable_carry="counter")(self, (), xs)

    return from_function(call)


class Attention(nn.Module):
    """One step of decoding, whose cache knows how full it is."""

    size: int = 5

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        k, v = nn.Dense(3)(x), nn.Dense(3)(x)
        made = self.has_variable("cache", "k")
        keys = self.variable("cache", "k", jnp.zeros, (self.size, *k.shape), k.dtype)
        values = self.variable("cache", "v", jnp.zeros, (self.size, *v.shape), v.dtype)
        index = self.variable("cache", "i", jnp.zeros, (), jnp.int32)
        if made:
            keys.value = keys.value.at[index.value].set(k)
            values.value = values.value.at[index.value].set(v)
            index.value += 1
        scores = jnp.einsum("bf,tbf->tb", x, keys.value)
        filled = jnp.arange(self.size)[:, None] < index.value
        weights = jax.nn.softmax(jnp.where(filled, scores, -1e9), axis=0)
        return x + jnp.einsum("tb,tbf->bf", weights, values.value), weights


@model(H, mutable=["cache"])
def cache_in_layers(scan):
    return layers(scan, Attention, variable_axes={"params": 0, "cache": 0})


@model(XS, mutable=["cache"])
def cache_in_time_and_layers(scan):
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, c, x):
            stack = scan(Attention, variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True}, length=2)
            return c, stack(name="layers")(x, None)

    def call(self, xs):
        cell = Decoder()
        if self.is_initializing():
            cell((), xs[0])
        options = {"variable_broadcast": "params", "variable_carry": "cache", "split_rngs": {"params": False}}
        return scan(lambda cell, c, x: cell(c, x), **options)(cell, (), xs)

    return from_function(call)


# Filters, and collections that go one way.


def _all_roles(scan: Scan, **options: Any) -> nn.Module:
    def call(self, h, xs):
        self.variable("seen", "n", jnp.zeros, (), jnp.int32)

        def body(self, h, x):
            n = self.variable("seen", "n", jnp.zeros, (), jnp.int32)
            n.value += 1
            self.variable("trail", "h", lambda: h).value = h
            h = nn.tanh(nn.Dense(3)(h) + x)
            return h, h * n.value.astype(jnp.float32)

        return scan(body, split_rngs={"params": False}, **options)(self, h, xs)

    return from_function(call)


ROLES: dict[str, dict[str, Any]] = {
    "names": {"variable_broadcast": "params", "variable_carry": "seen", "variable_axes": {"trail": 0}},
    "lists": {"variable_broadcast": ["params"], "variable_carry": ("seen",), "variable_axes": {("trail", "x"): 0}},
    "sets": {
        "variable_broadcast": {"params", "constants"},
        "variable_carry": frozenset({"seen"}),
        "variable_axes": {frozenset({"trail"}): 1},
    },
    "true": {"variable_broadcast": "params", "variable_carry": "seen", "variable_axes": {True: 0}},
    "deny": {
        "variable_broadcast": DenyList(("seen", "trail")),
        "variable_carry": DenyList("trail"),
        "variable_axes": {DenyList(()): -1},
    },
    "out": {"variable_broadcast": "params", "variable_carry": "seen", "variable_axes": {"trail": Out(0)}},
}
for _name, _options in ROLES.items():
    MODELS[f"filter_{_name}"] = Model(functools.partial(_all_roles, **_options), (H, XS), mutable=["seen", "trail"])


@model(H, mutable=["out"])
def in_and_out(scan):
    class Main(nn.Module):
        @nn.compact
        def __call__(self, h):
            table = self.variable("table", "t", lambda: XS)
            del table

            def body(self, h, _):
                t = self.get_variable("table", "t")
                self.put_variable("out", "s", h * t)
                return h + t, jnp.sum(t)

            return scan(body, variable_axes={"table": In(0), "out": Out(-1)}, length=5)(self, h, None)

    return Main()


@model(H, XS)
def data_transform(scan):
    def halve(variables, rngs):
        return jax.tree.map(lambda leaf: leaf * 0.5, variables), rngs

    def call(self, h, xs):
        cell = Cell()
        if self.is_initializing():
            cell(h, xs[0])
        options = {"variable_axes": {"other": 0}, "split_rngs": {"params": False}, "data_transform": halve}
        if self.is_initializing():
            options["data_transform"] = None
        return scan(lambda cell, h, x: cell(h, x), variable_broadcast="params", **options)(cell, h, xs)

    return from_function(call)


# Methods, setup, several modules.


class TwoWays(nn.Module):
    """A module with two methods."""

    def setup(self) -> None:
        self.first, self.second = nn.Dense(3), nn.Dense(3)

    def __call__(self, h: Any, x: Any) -> Any:
        return self.down(self.up(h, x)[0], x)

    def up(self, h: Any, x: Any) -> Any:
        h = nn.tanh(self.first(h) + x)
        return h, h

    def down(self, h: Any, x: Any) -> Any:
        h = nn.tanh(self.second(h) - x)
        return h, jnp.sum(h)


def _two_ways(scan: Scan, methods: Any, **options: Any) -> nn.Module:
    class Main(nn.Module):
        def setup(self) -> None:
            self.both = scan(TwoWays, methods=methods, **options)()

        def __call__(self, h: Any, xs: Any) -> Any:
            h, ys = self.both.up(h, xs)
            return self.both.down(h, ys)

    return Main()


_SHARED = {"variable_broadcast": "params", "split_rngs": {"params": False}}


@model(H, XS)
def methods_dict(scan):
    return _two_ways(scan, {"up": _SHARED, "down": {**_SHARED, "reverse": True}})


@model(H, XS)
def in_setup(scan):
    class Main(nn.Module):
        def setup(self):
            self.cell = scan(Cell, **_SHARED)(features=3)
            self.head = nn.Dense(1)

        def __call__(self, h, xs):
            h, ys = self.cell(h, xs)
            return self.head(h), ys

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
def module_in_a_field(scan):
    class Wrapper(nn.Module):
        cell: nn.Module

        def __call__(self, h, x):
            return self.cell(h, x)

    return from_function(lambda self, h, xs: scan(Wrapper, **_SHARED)(Cell())(h, xs))


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


@model(H)
def perturbed(scan):
    class Watched(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return self.perturb("h", nn.Dense(3)(x)), None

    return layers(scan, Watched, variable_axes={"params": 0, "perturbations": 0})


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


@model(H, XS, mutable=["box"])
def replaced_broadcast(scan):
    class Replacing(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            box = self.variable("box", "b", lambda: {"a": jnp.ones(3), "b": jnp.zeros(3)})
            box.value = {"a": box.value["a"] * 2.0, "b": box.value["b"]}
            return h + box.value["a"][None], x

    return recurrent(scan, Replacing, variable_broadcast=["params", "box"])
