"""`treescan.integrations.nnx.scan` beside `nnx.scan`: the same outputs, the same variables, the same gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from jaxprs import equations, num_consts
from oracle import as_numpy
from thin import parametrize
from traces import Counted

import treescan
from treescan.integrations.nnx import scan

N, B, D = 4, 3, 5
XS = jnp.asarray(np.random.default_rng(0).normal(size=(N, B, D)), jnp.float32)
H = jnp.asarray(np.random.default_rng(1).normal(size=(B, D)), jnp.float32)
HAS_MODES = hasattr(nnx, "set_graph_mode")
SHARDING = "out_sharding" if HAS_MODES else "sharding_names"  # what flax calls it


# Modules.


class Block(nnx.Module):
    """A layer with a statistic, dropout and a counter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.dropout(self.norm(nnx.relu(self.linear(x))))


def linear(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(D, D, rngs=rngs)


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.n = nnx.Variable(jnp.zeros(()))

    def __call__(self) -> jax.Array:
        self.n[...] += 1.0
        return self.n[...]


class Cell(nnx.Module):
    """A recurrent cell that holds its state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.cell = nnx.GRUCell(D, D, rngs=rngs)
        self.h = nnx.Cache(jnp.zeros((B, D)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.h[...], y = self.cell(self.h[...], x)
        return y


def stack(axis: int = 0, kind: Callable[[nnx.Rngs], Any] = Block) -> Any:
    """A module of which every variable has an axis of layers."""

    @nnx.split_rngs(splits=N)
    @nnx.vmap(in_axes=0, out_axes=axis)
    def make(rngs: nnx.Rngs) -> Any:
        return kind(rngs)

    return make(nnx.Rngs(0, dropout=1))


def mixed(scanned: Any = nnx.Param) -> nnx.Module:
    """Stacked parameters, beside variables that all layers share."""
    module = Block(nnx.Rngs(0, dropout=1))
    nnx.update(module, nnx.state(stack(), scanned))
    return module


# Cases: `run(scan)` makes its modules and scans; what comes back are outputs, modules, and anything to compare.


def over_layers(scan: Any, axis: int = 0, kind: Any = Block, **options: Any) -> Any:
    layers = stack(axis, kind)

    def forward(h: jax.Array, layer: Any) -> jax.Array:
        return layer(h)

    return scan(forward, in_axes=(nnx.Carry, axis), out_axes=nnx.Carry, **options)(H, layers), layers


def statistics_carried(scan: Any) -> Any:
    layers = mixed()
    axes = nnx.StateAxes({nnx.Param: 0, ...: nnx.Carry})
    forward = scan(lambda h, layer: layer(h), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
    return forward(H, layers), layers


def recurrent(scan: Any, **options: Any) -> Any:
    cell = Cell(nnx.Rngs(0))

    @scan(in_axes=(nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}), 1), out_axes=1, **options)
    def forward(cell: Cell, x: jax.Array) -> jax.Array:
        return cell(x)

    return forward(cell, jnp.moveaxis(XS, 0, 1)), cell


def counters(scan: Any) -> Any:
    carried, whole = Counter(), Counter()
    stacked = nnx.vmap(lambda _: Counter(), in_axes=0, out_axes=0)(jnp.arange(N))
    axes = (nnx.StateAxes({...: nnx.Carry}), None, 0)
    ys = scan(lambda *ms: tuple(m() for m in ms), in_axes=axes, out_axes=0)(carried, whole, stacked)
    return ys, carried, whole, stacked


def without_xs(scan: Any) -> Any:
    counter = Counter()
    return scan(lambda m: m, length=3, in_axes=nnx.Carry, out_axes=nnx.Carry)(counter), counter


def no_carry(scan: Any) -> Any:
    layers = stack()
    ys = scan(lambda layer, x: {"a": layer(x), "b": (x[0], None)}, in_axes=0, out_axes={"a": -1, "b": (1, 0)})
    return ys(layers, XS), layers


def carry_last(scan: Any) -> Any:
    layers = stack()

    def forward(h: jax.Array, layer: Block) -> Any:
        h = layer(h)
        return h, h[0], h

    return scan(forward, in_axes=(nnx.Carry, 0), out_axes=(1, 0, nnx.Carry))(H, layers), layers


def modules_out(scan: Any) -> Any:
    def make(key: jax.Array, count: jax.Array) -> tuple[jax.Array, nnx.Module]:
        return count + 1, nnx.Linear(D, D, rngs=nnx.Rngs(key))

    keys = jax.random.split(jax.random.key(0), N)
    return scan(make, in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 1))(keys, jnp.int32(0))


def same_module_out(scan: Any) -> Any:
    layers = stack()
    out = scan(lambda h, m: (m(h), m), in_axes=(nnx.Carry, 0))(H, layers)
    assert out[1] is layers
    return out


def new_variables(scan: Any) -> Any:
    layers = stack()

    def forward(h: jax.Array, layer: Block) -> jax.Array:
        h = layer(h)
        layer.last = nnx.Intermediate(h)
        return h

    out = scan(forward, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(H, layers)
    assert layers.last.shape == (N, B, D)
    return out, layers


def trees(scan: Any) -> Any:
    modules = {"a": stack(), "b": stack(1, linear)}
    whole = {"scale": jnp.full((B, D), 2.0), "times": 3.0}

    def forward(h: Any, ms: Any, options: Any) -> Any:
        h = ms["a"](h) + ms["b"](h) * options["scale"] * options["times"]
        return h, {"h": h}

    axes = (nnx.Carry, {"a": 0, "b": 1}, None)
    return scan(forward, in_axes=axes)(H, modules, whole), modules


def shared(scan: Any) -> Any:
    """Tied within the carry, and between the carry and another argument."""
    module, other = Counter(), Counter()
    module.again, other.of = module.n, module

    def step(c: tuple[Counter, Counter], m: Counter, x: jax.Array) -> Any:
        c[0].again[...] += 1.0
        m.of.n[...] += x[0, 0]
        return c, (m(), c[1].n[...])

    axes = (nnx.Carry, nnx.StateAxes({...: nnx.Carry}), 0)
    (first, second), ys = scan(step, in_axes=axes)((module, module), other, XS)
    assert first is module and second is module and other.of is module and module.again is module.n
    return ys, module, other


def shared_stacks(scan: Any) -> Any:
    layers = stack()

    def forward(h: jax.Array, a: Block, b: Block) -> jax.Array:
        assert a is b
        return a(h) + b(h)

    return scan(forward, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)(H, layers, layers), layers


def states(scan: Any) -> Any:
    """A state in the carry: its variables are new ones in each step."""
    state = nnx.state(nnx.Linear(D, D, rngs=nnx.Rngs(0)), nnx.Param)
    double = scan(lambda s, x: (jax.tree.map(lambda a: a * 2.0 + x[0, 0], s), x))
    return double(state, XS), state


def variables(scan: Any) -> Any:
    variable, xs = nnx.Variable(jnp.zeros((B, D))), nnx.Param(XS)

    def step(v: nnx.Variable, x: nnx.Param) -> Any:
        v[...] += x[...]
        x[...] = -x[...]
        return v, v[...]

    return scan(step)(variable, xs), variable, xs


def named_by_keyword(scan: Any) -> Any:
    def forward(h: jax.Array, layer: Block, scale: float = 2.0) -> jax.Array:
        return layer(h) * scale

    layers = stack()
    return scan(forward, in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)(H, layer=layers), layers


def method(scan: Any) -> Any:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.block = stack()

        @scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.block(x)

    model = Model()
    return model(H), model


def partitioned(scan: Any) -> Any:
    initial = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("in", "out"), mesh=None)
    names = {nnx.PARTITION_NAME: "layers"}

    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=names)
    def make(key: jax.Array) -> nnx.Linear:
        return nnx.Linear(D, D, kernel_init=initial, use_bias=False, rngs=nnx.Rngs(key))

    seen = []

    def forward(h: jax.Array, layer: nnx.Linear) -> Any:
        seen.append(layer.kernel.get_metadata())
        options: dict[str, Any] = {SHARDING: ("out",)}
        return layer(h), nnx.Param(h[0], **options)

    with nnx.use_eager_sharding(False):
        layers = make(jax.random.split(jax.random.key(0), N))
        out = scan(forward, in_axes=(nnx.Carry, 0), transform_metadata=names)(H, layers)
    shardings = [m[SHARDING] for m in (*seen, layers.kernel.get_metadata(), out[1].get_metadata())]
    assert set(shardings) == {("in", "out"), ("layers", "in", "out"), ("layers", "out")}
    return out, layers


def set_metadata(v: nnx.Variable) -> nnx.Variable:
    v.set_metadata(note=v.get_metadata("note", "") + "x")
    return v


def another_type(v: nnx.Variable) -> nnx.Variable:
    return nnx.Cache(v[...], **v.get_metadata())


def changed_metadata(scan: Any) -> Any:
    """That of what is scanned over may change; of what is given whole, such a change is dropped."""
    layers, counter = stack(kind=linear), Counter()

    def step(h: jax.Array, m: nnx.Linear, c: Counter) -> Any:
        set_metadata(m.kernel)
        return h + set_metadata(c.n)[...], another_type(m.bias)

    h, out = scan(step, in_axes=(nnx.Carry, 0, None))(H, layers, counter)
    assert layers.kernel.get_metadata("note") == "x" and "note" not in counter.n.get_metadata()
    assert type(out) is nnx.Cache
    return h, out, layers, counter


def nested(scan: Any) -> Any:
    counter, layers = Counter(), stack()

    def outer(c: Any, x: jax.Array, layers: Block) -> Any:
        h, ys = scan(lambda h, m, layer: (layer(h) + m(), h), in_axes=(nnx.Carry, None, 0))(x, c[0], layers)
        return (c[0], h), ys

    axes = (nnx.Carry, 0, nnx.StateAxes({...: nnx.Carry}))
    return scan(outer, in_axes=axes)((counter, H), XS, layers), counter, layers


CASES: dict[str, Callable[[Any], Any]] = {
    **{f.__name__: f for f in (over_layers, statistics_carried, recurrent, counters, without_xs, no_carry)},
    **{f.__name__: f for f in (carry_last, modules_out, same_module_out, new_variables, trees, shared)},
    **{f.__name__: f for f in (shared_stacks, states, variables, named_by_keyword, method, partitioned, nested)},
    "changed_metadata": changed_metadata,
    "axis_minus_1": lambda scan: over_layers(scan, -1, linear),
    "reverse": lambda scan: over_layers(scan, kind=linear, reverse=True),
    "unroll": lambda scan: over_layers(scan, kind=linear, unroll=3),
    "split_transpose": lambda scan: recurrent(scan, _split_transpose=True),
}


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    assert jax.tree.structure(nnx.state(actual)) == jax.tree.structure(nnx.state(expected))
    for a, b in zip(jax.tree.leaves(nnx.state(actual)), jax.tree.leaves(nnx.state(expected)), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(as_numpy(a), as_numpy(b), rtol=tolerance, atol=tolerance)


def each(cases: dict[str, Any]) -> Any:
    """One test for each case; those are slow that have layers, or a loop in a loop."""
    daily = ("counters", "without_xs", "modules_out", "shared", "states", "variables")
    params = [
        pytest.param(case, id=name, marks=[] if name in daily else pytest.mark.slow) for name, case in cases.items()
    ]
    return pytest.mark.parametrize("case", params)


@each(CASES)
def test_what_comes_out_is_what_comes_out_of_nnx(case: Callable[[Any], Any]) -> None:
    assert_same(case(scan), case(nnx.scan))


EAGER = ("shared", "nested", "partitioned", "new_variables")


def pure(case: Callable[[Any], Any], scan: Any) -> Callable[[], Any]:
    return lambda: nnx.state(case(scan))


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_the_same_under_jit(name: str, jit: Any) -> None:
    assert_same(jit(pure(CASES[name], scan))(), CASES[name](nnx.scan))


@pytest.mark.parametrize("name", EAGER)
def test_the_same_step_by_step(name: str) -> None:
    with jax.disable_jit():
        assert_same(CASES[name](scan), CASES[name](nnx.scan))


@parametrize("options", {"plain": {}, "nested": {"remat": "nested"}})
def test_gradients(options: dict[str, Any]) -> None:
    def loss(scan: Any, options: dict[str, Any]) -> Any:
        def of(layers: Any, h: jax.Array) -> jax.Array:
            forward = scan(lambda h, layer: (layer(h), h), in_axes=(nnx.Carry, 0), **options)
            h, ys = forward(h, layers)
            return jnp.sum(jnp.sin(h)) + jnp.sum(jnp.cos(ys))

        layers = stack(kind=linear)
        return nnx.jit(nnx.value_and_grad(of, argnums=(0, 1)))(layers, H), layers

    assert_same(loss(scan, options), loss(nnx.scan, {}))


MODES: dict[str, dict[str, Any]] = {"tree": {"graph": False}, "values": {"graph": True, "graph_updates": False}}


@parametrize("options", {"plain": {}, "nested": {"remat": "nested"}, **MODES})
def test_the_body_is_traced_once(options: dict[str, Any]) -> None:
    def forward(h: jax.Array, layer: nnx.Linear) -> jax.Array:
        return layer(h)

    body, layers = Counted(forward), stack(kind=linear)
    run = scan(body.body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **options)
    assert body.traces(lambda _: run(H, layers)) == 1
    assert body.traces(lambda _: run(H + 1, layers)) == 0
    again = scan(body.body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **options)
    assert body.traces(lambda _: again(H, layers)) == 0


def test_parameters_given_whole_are_constants_of_the_loop() -> None:
    cell = nnx.GRUCell(D, D, rngs=nnx.Rngs(0))
    run = scan(lambda cell, h, x: cell(h, x), in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    graph, state = nnx.split(cell)
    jaxpr = jax.make_jaxpr(lambda state, xs: run(nnx.merge(graph, state), H, xs))(state, XS)
    (eqn,) = equations(jaxpr.jaxpr, "scan")
    assert num_consts(eqn) == len(jax.tree.leaves(nnx.state(cell, nnx.Param)))


# Errors.


def identity(h: Any, m: Any) -> Any:
    return h, None


def error_of(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def scanned(f: Any, *args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: scan(f, **options)(*args)


C = nnx.Carry
WRONG_AXES: dict[str, tuple[dict[str, Any], str]] = {
    "in only": ({"out_axes": 0}, "`in_axes` has `nnx.Carry`, but `out_axes` has none"),
    "out only": ({"in_axes": 0}, "`out_axes` has `nnx.Carry`, but `in_axes` has none"),
    "nested": ({"in_axes": ((C, 0), 0)}, "inside an entry, at in_axes[0][0]"),
    "two": ({"in_axes": (C, C)}, "more than once, at in_axes[0] and in_axes[1]"),
    "whole output": ({"out_axes": (C, None)}, "out_axes[1] is None, but an output is stacked"),
    "carried output": ({"out_axes": (C, nnx.StateAxes({...: C}))}, "but an output is stacked"),
    "text": ({"in_axes": (C, "0")}, "in_axes[1] is '0'"),
    "boolean": ({"in_axes": (C, True)}, "in_axes[1] is True"),
    "entries": ({"in_axes": (C, 0, 0)}, "`in_axes` has 3 entries, but there are 2 arguments: h, m"),
    "prefix": ({"in_axes": (C, {"a": 0})}, "`in_axes` does not fit"),
    "filters": ({"in_axes": (C, nnx.StateAxes({nnx.BatchStat: 0}))}, "matches m.bias, a Param"),
    "out of range": ({"in_axes": (C, 2)}, "m.bias   in_axes 2   float32[4,5]   rank 2"),
    "metadata": ({"transform_metadata": {"a": 1}}, "has no `nnx.PARTITION_NAME`"),
}


@pytest.mark.parametrize("name", WRONG_AXES)
def test_wrong_axes(name: str) -> None:
    options, says = WRONG_AXES[name]
    kind = treescan.errors.ArgumentTypeError if name in ("text", "boolean") else treescan.errors.ArgumentError
    text = error_of(scanned(identity, H, stack(kind=linear), **options), kind)
    assert says in text
    assert "`identity`" in text


@pytest.mark.parametrize("graph", [None, True, False])
def test_axes_that_are_modules_or_states(graph: bool | None) -> None:
    module, kind = linear(nnx.Rngs(0)), "Linear"
    axes: Any = jax.tree.map(lambda _: 0, module)
    if graph is not None:
        if not hasattr(nnx, "prefix"):
            pytest.skip("flax has no `nnx.prefix`")
        axes = nnx.prefix(module, {...: 0}, graph=graph)
        kind = "TreeState" if graph else "Linear"
    text = error_of(scanned(identity, H, stack(kind=linear), in_axes=(C, axes)), treescan.errors.ArgumentTypeError)
    assert f"in_axes[1] is a {kind} of axes" in text
    assert "nnx.StateAxes({nnx.Param: 0, ...: None})" in text


def casts(h: Any, x: jax.Array) -> Any:
    return {"a": h["a"].astype(jnp.bfloat16)}, None


def sets_a_value(h: jax.Array, m: Counter, x: jax.Array) -> Any:
    m.n.set_value(x)
    return h, None


def adds_a_variable(m: Counter, x: jax.Array) -> Any:
    m.new = nnx.Variable(x)
    return m, None


def scaled(h: jax.Array, x: jax.Array, *, scale: float) -> Any:
    return h * scale, x


def apart() -> Any:
    layers = stack(kind=linear)
    return scan(lambda h, a, b: (h, None), in_axes=(C, 0, None))(H, layers, {"b": layers})


def of_a_reference() -> Any:
    options: dict[str, Any] = {"ref" if HAS_MODES else "has_ref": True}
    return scan(lambda h, v, x: (h, x), in_axes=(C, None, 0))(H, nnx.Variable(H, **options), XS)


REFUSED: dict[type[Exception], dict[str, tuple[Callable[[], Any], tuple[str, ...]]]] = {
    treescan.errors.ArgumentError: {
        "axes of an array": (
            scanned(identity, H, XS, in_axes=(C, nnx.StateAxes({...: 0}))),
            ("m has an `nnx.StateAxes`, but is float32[4,3,5]",),
        ),
        "a number": (scanned(identity, H, {"a": 1.0}), ('m["a"] is scanned over axis 0',)),
        "lengths that differ": (
            lambda: scan(lambda h, m, x: (h, None), in_axes=(C, 0, 0))(H, stack(kind=linear), XS[:3]),
            (
                "the variables and arguments do not have the same number of steps",
                "m.kernel   4       float32[4,5,5]   axis 0",
                "x          3       float32[3,3,5]   axis 0",
            ),
        ),
        "no length": (lambda: scan(lambda m: m, in_axes=C, out_axes=C)(Counter()), ("Pass `length=`",)),
        "different axes": (apart, ("a.bias        0", 'b["b"].bias   None')),
        "output axes": (scanned(lambda h, x: (h, x), H, XS, out_axes=(C, 3)), ("3",)),
        "a reference": (of_a_reference, ("v holds a mutable array",)),
    },
    treescan.errors.CarryError: {
        "dtype": (scanned(casts, {"a": H}, XS), ('h["a"]   float32[3,5]   bfloat16[3,5]   dtype',)),
        "variable": (
            lambda: scan(sets_a_value, in_axes=(C, nnx.StateAxes({...: C}), 0))(H, Counter(), XS),
            ("m.n    float32[]   float32[3,5]   rank: 0 -> 2",),
        ),
        "new variable": (lambda: scan(adds_a_variable)(Counter(), XS), ("m.new",)),
        "new variable of the whole": (
            lambda: scan(lambda m, x: adds_a_variable(m, x)[1], in_axes=(None, 0), out_axes=0)(Counter(), XS),
            ("added or removed variables of a module that each step receives whole: m.new",),
        ),
        "another module": (
            lambda: scan(lambda c, x: ({"m": Counter()}, x))({"m": Counter()}, XS),
            ('c["m"]   the Counter that was given   another Counter',),
        ),
        "no module": (
            lambda: scan(lambda c, x: ({"m": x}, x))({"m": Counter()}, XS),
            ("c      1 modules or variables   0",),
        ),
    },
    treescan.errors.BodyError: {
        "one output": (scanned(lambda h, x: h, H, XS), ("has 2 entries",)),
        "a text": (scanned(lambda h, x: (h, {"a": "text"}), H, XS), ("out[1][\"a\"] is 'text'",)),
    },
    treescan.errors.ArgumentTypeError: {
        "keyword": (lambda: scan(scaled)(H, XS, scale=2.0), ("scale are passed by keyword",)),
        "method": (lambda: scan(Counter().__call__), ("scan(Counter.__call__, ...)(module, ...)",)),
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in REFUSED.items() for name in cases])
def test_what_is_refused(kind: type[Exception], name: str) -> None:
    call, says = REFUSED[kind][name]
    text = error_of(call, kind)
    assert all(each in text for each in says), text


@pytest.mark.devices
def test_a_carry_that_begins_to_vary() -> None:
    def sums(xs: jax.Array) -> jax.Array:
        run = scan(lambda h, x: ({"a": h["a"] + jax.lax.axis_index("rows")}, None))
        return jax.lax.psum(run({"a": jnp.int32(0)}, xs)[0]["a"], "rows")

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(sums, mesh=mesh, in_specs=(PartitionSpec(),), out_specs=PartitionSpec())
    assert """`jax.lax.pcast(h["a"], ('rows',), to='varying')`""" in error_of(
        lambda: run(XS), treescan.errors.CarryError
    )


def replace_metadata(v: nnx.Variable) -> nnx.Variable:
    v.set_metadata({**v.get_metadata(), "axes": ("a",)})
    return v


def delete_metadata(v: nnx.Variable) -> nnx.Variable:
    v.del_metadata("axes")
    return v


CHANGES: dict[str, tuple[Callable[[nnx.Variable], nnx.Variable], str]] = {
    "new": (set_metadata, "(no note)      note='x'         metadata"),
    "other": (replace_metadata, "axes=('old',)   axes=('a',)   metadata"),
    "deleted": (delete_metadata, "axes=('old',)   (no axes)   metadata"),
    "type": (another_type, "Variable        Cache         type"),
}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", CHANGES)
def test_a_carried_variable_keeps_its_type_and_metadata(name: str) -> None:
    change, says = CHANGES[name]

    def step(c: Any, m: Counter, x: jax.Array) -> Any:
        m.n = change(m.n)
        return c, x

    def step_of_carry(c: Any, x: jax.Array) -> Any:
        if isinstance(c["m"], nnx.Variable):
            return {"m": change(c["m"])}, x
        c["m"].n = change(c["m"].n)
        return c, x

    def counter() -> Counter:
        module = Counter()
        module.n.set_metadata(axes=("old",))
        return module

    axes = (C, nnx.StateAxes({...: C}), 0)
    runs: dict[str, Callable[[Any], Any]] = {
        "m.n": lambda scan: scan(step, in_axes=axes)(None, counter(), XS),
        'c["m"].n': lambda scan: scan(step_of_carry)({"m": counter()}, XS),
        'c["m"]': lambda scan: scan(step_of_carry)({"m": counter().n}, XS),
    }
    for where, run in runs.items():
        with pytest.raises((TypeError, ValueError)):
            run(nnx.scan)
        text = words(error_of(lambda run=run: run(scan), treescan.errors.CarryError))
        assert words(f"leaf given returned {where} {says}") in text
        assert "set them before or after the scan" in text


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_in_the_carry_of_a_plain_scan_keeps_types_and_metadata(name: str) -> None:
    change, says = CHANGES[name]
    given, now = says.split("   ")[0], says.rsplit("   ", 1)[0].split("   ", 1)[1].strip()

    def step(m: Counter, x: jax.Array) -> Any:
        m.n = change(m.n)
        return m, x

    counter = Counter()
    counter.n.set_metadata(axes=("old",))
    text = words(error_of(lambda: treescan.scan(step, counter, XS), treescan.errors.PluginError))
    assert f"n had {given}, now {now}." in text


def test_a_module_of_an_outer_trace() -> None:
    counter = Counter()

    def run(scan: Any) -> Any:
        return jax.jit(lambda xs: scan(lambda m, x: (m(), x), in_axes=(None, 0), out_axes=0)(counter, xs))(XS)

    with pytest.raises(ValueError, match="trace level"):
        run(nnx.scan)
    assert "m.n was created outside the function that is being traced" in error_of(
        lambda: run(scan), treescan.errors.ArgumentError
    )
    assert float(counter.n[...]) == 0.0
