"""`treescan.integrations.nnx.scan` in flax's other modes beside `nnx.scan`: only values of variables come out."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.errors import TraceContextError
from test_nnx_scan import CASES, HAS_MODES, MODES, XS, Cell, Counter, H, N, assert_same, each, linear, stack

import treescan
from treescan.integrations.nnx import scan

needs_modes = pytest.mark.skipif(not HAS_MODES, reason="flax has no modes")
by_mode = pytest.mark.parametrize("mode", MODES)


def outcome(run: Callable[[], Any]) -> Any:
    """What comes out, or None if it is refused."""
    try:
        return run()
    except (ValueError, TypeError, TraceContextError, treescan.TreescanError):
        return None


def assert_as_in_nnx(case: Callable[[Any], Any], mode: str) -> Any:
    """Returns what comes out of ours."""
    expected = outcome(lambda: case(functools.partial(nnx.scan, **MODES[mode])))
    actual = outcome(lambda: case(functools.partial(scan, **MODES[mode])))
    assert (actual is None) == (expected is None)
    assert_same((actual,), (expected,))
    return actual


# The cases of the mode of graphs, but for those that ask for what these modes drop: identity, arguments by keyword,
# new variables and metadata.
OTHERS = ("named_by_keyword", "partitioned", "new_variables", "changed_metadata")


@needs_modes
@by_mode
@each({name: case for name, case in CASES.items() if name not in OTHERS})
def test_what_comes_out_is_what_comes_out_of_nnx(case: Callable[[Any], Any], mode: str) -> None:
    assert_as_in_nnx(case, mode)


class Shared(nnx.Module):
    """Two names for one variable."""

    def __init__(self) -> None:
        self.a = self.b = nnx.Variable(jnp.arange(float(N)))


def changes_whole(scan: Any) -> Any:
    counter = Counter()
    return scan(lambda m, x: x * m(), in_axes=(None, 0), out_axes=0)(counter, XS), counter


def structure_is_dropped(scan: Any) -> Any:
    layers = stack(kind=linear)

    def forward(h: jax.Array, layer: Any) -> jax.Array:
        h = layer(h)
        layer.seen = nnx.Intermediate(h)
        layer.bias[...] += 1.0
        layer.bias = nnx.Param(layer.bias[...] * 2)
        layer.kernel.set_metadata(seen=True)
        return h

    h = scan(forward, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(H, layers)
    return h, layers, hasattr(layers, "seen"), layers.kernel.get_metadata()["seen"]


def shared_in_a_module(scan: Any) -> Any:
    module = Shared()

    def double(h: jax.Array, m: Shared) -> Any:
        m.a[...] *= 2
        return h + m.b[...], m.b[...]

    return scan(double, in_axes=(nnx.Carry, 0))(jnp.zeros(()), module), module, module.a is module.b


def shared_by_arguments(scan: Any) -> Any:
    module = Counter()
    run = scan(lambda h, a, b, x: (h + a() + b(), x), in_axes=(nnx.Carry, None, None, 0))
    return run(jnp.zeros(()), module, module, jnp.arange(3.0)), module


def shared_with_the_carry(scan: Any, kind: type[Counter] = Counter) -> Any:
    module = kind()
    return scan(lambda c, m, x: (c, m() + x), in_axes=(nnx.Carry, None, 0))(module, module, jnp.arange(3.0))


def argument_as_output(scan: Any) -> Any:
    return scan(lambda h, m: (h, m), in_axes=(nnx.Carry, 0))(H, stack(kind=linear))


def output_twice(scan: Any) -> Any:
    def twice(h: jax.Array, x: jax.Array) -> Any:
        module = Counter()
        return h, (module, module)

    return scan(twice)(H, XS)


def another_module_of_the_variables(scan: Any) -> Any:
    def step(cell: Cell, x: jax.Array) -> Any:
        y = cell(x)
        other = Cell(nnx.Rngs(1))
        other.cell, other.h = cell.cell, cell.h
        return other, y

    cell = Cell(nnx.Rngs(0))
    carry, ys = scan(step)(cell, XS)
    return carry, ys, cell, carry.h is cell.h


def other_variables(scan: Any) -> Any:
    return scan(lambda m, x: (jax.tree.map(lambda leaf: leaf + 1, m), x))(Counter(), jnp.arange(3.0))


def other_setting(scan: Any) -> Any:
    def step(m: Any, x: jax.Array) -> Any:
        m.setting = 5
        return m, x

    return scan(step)(Counter(), jnp.arange(3.0))


def array_of_a_carried_module(scan: Any) -> Any:
    class Raw(nnx.Module):
        def __init__(self) -> None:
            self.array = nnx.data(jnp.ones(()))
            self.n = nnx.Variable(jnp.zeros(()))

    def step(m: Raw, x: jax.Array) -> Any:
        m.array = m.array * 2
        m.n[...] += m.array
        return m, x

    module, xs = scan(step)(Raw(), jnp.arange(3.0))
    return module.array, module.n, xs


def axes_of_variables(scan: Any) -> Any:
    module: Any = linear(nnx.Rngs(0))
    module.kernel = nnx.Param(jnp.stack([module.kernel[...]] * N, 1))
    module.bias = nnx.BatchStat(module.bias[...])
    axes = nnx.prefix(module, {nnx.Param: 1, ...: None}, graph=scan.keywords["graph"])

    def forward(h: jax.Array, layer: Any) -> Any:
        layer.bias[...] += jnp.mean(h)
        return layer(h), h

    return scan(forward, in_axes=(nnx.Carry, axes), out_axes=(nnx.Carry, -1))(H, module), module


def axes_of_outputs(scan: Any) -> Any:
    axes = nnx.prefix(linear(nnx.Rngs(0)), lambda path, _: 1 if "kernel" in path else 0, graph=scan.keywords["graph"])
    return scan(lambda h, x: (h, linear(nnx.Rngs(0))), out_axes=(nnx.Carry, axes))(H, XS)


def axes_by_type(scan: Any) -> Any:
    return scan(lambda h, m: m(h), in_axes=(nnx.Carry, nnx.StateAxes({...: 0})), out_axes=nnx.Carry)(H, stack())


def read_in_an_outer_trace(scan: Any) -> Any:
    layers = stack(kind=linear)
    return jax.jit(lambda h: scan(lambda h, m: m(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(h, layers))(H)


def changed_in_an_outer_trace(scan: Any) -> Any:
    layers = stack()
    return jax.jit(lambda h: scan(lambda h, m: m(h), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(h, layers))(H)


def gradients(scan: Any) -> Any:
    layers, counter = stack(kind=linear), Counter()

    def loss(layers: Any, counter: Counter, h: jax.Array) -> jax.Array:
        run = scan(lambda h, m, c: (m(h) * c(), h), in_axes=(nnx.Carry, 0, None))
        h, ys = run(h, layers, counter)
        return jnp.sum(jnp.sin(h)) + jnp.sum(jnp.cos(ys))

    return nnx.value_and_grad(loss, argnums=(0, 2))(layers, counter, H), layers, counter


argument, body, carry = treescan.errors.ArgumentError, treescan.errors.BodyError, treescan.errors.CarryError
REFUSED: dict[Callable[[Any], Any], tuple[type[Exception], str]] = {
    shared_with_the_carry: (argument, "c.n and m.n are the same Variable"),
    argument_as_output: (body, "out[1].bias"),
    other_variables: (carry, "returned a carry with other variables"),
    other_setting: (carry, "changed the structure of modules in the carry m"),
    axes_by_type: (argument, "in_axes[1] is an `nnx.StateAxes`"),
    changed_in_an_outer_trace: (argument, "m.calls was created outside"),
}
REFUSED_IN_TREES = {
    shared_in_a_module: (argument, "m.a and m.b are the same Variable"),
    shared_by_arguments: (argument, "are the same Variable"),
    output_twice: (body, "one variable in two places"),
}
OWN = (
    *(changes_whole, structure_is_dropped, another_module_of_the_variables, array_of_a_carried_module),
    *(axes_of_variables, axes_of_outputs, read_in_an_outer_trace, gradients, *REFUSED, *REFUSED_IN_TREES),
)


@needs_modes
@by_mode
@pytest.mark.parametrize("case", OWN, ids=lambda case: case.__name__)
def test_what_the_modes_do_otherwise_is_what_nnx_does(case: Callable[[Any], Any], mode: str) -> None:
    refused = {**REFUSED, **(REFUSED_IN_TREES if mode == "tree" else {})}
    assert (assert_as_in_nnx(case, mode) is None) == (case in refused)
    if case in refused:
        error, says = refused[case]
        with pytest.raises(error) as caught:
            case(functools.partial(scan, **MODES[mode]))
        assert says in " ".join(str(caught.value).split())


@needs_modes
def test_a_variable_of_a_module_that_is_no_pytree_is_in_one_place_too() -> None:
    class Opaque(Counter, pytree=False):
        pass

    with pytest.raises(argument, match=r"c\.n and m\.n are the same"):
        shared_with_the_carry(functools.partial(scan, **MODES["values"]), Opaque)


@needs_modes
@by_mode
@pytest.mark.parametrize("remat", ["step", "nested"])
def test_gradients_recompute(mode: str, remat: Any) -> None:
    actual = gradients(functools.partial(scan, **MODES[mode], remat=remat))
    assert_same(actual, gradients(functools.partial(nnx.scan, **MODES[mode])), 1e-4)


@needs_modes
@pytest.mark.parametrize("setting", ["set_graph_mode", "set_graph_updates"])
def test_the_mode_may_be_set_around(setting: str) -> None:
    with getattr(nnx, setting)(False):
        assert_same(changes_whole(scan), changes_whole(nnx.scan))
        (_, counter) = changes_whole(scan)
        assert float(counter.n[...]) == N
        _, counter = changes_whole(functools.partial(scan, graph=True, graph_updates=True))
        assert float(counter.n[...]) == 0.0


@by_mode
def test_step_by_step(mode: str) -> None:
    expected = changes_whole(functools.partial(scan, **MODES[mode]))
    with jax.disable_jit():
        assert_same(changes_whole(functools.partial(scan, **MODES[mode])), expected)
    assert float(expected[1].n[...]) == N


@pytest.mark.parametrize("mode", ["graph", "graph_updates"])
def test_a_mode_is_a_bool(mode: str) -> None:
    with pytest.raises(treescan.errors.ArgumentTypeError) as caught:
        scan(lambda h, x: (h, x), **{mode: cast(Any, "tree")})(H, XS)
    assert f"`{mode}` must be True, False or None, got 'tree'" in " ".join(str(caught.value).split())


@needs_modes
def test_axes_of_another_module() -> None:
    axes = nnx.prefix(Counter(), {...: 0}, graph=False)
    run = scan(lambda h, m: m(h), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, graph=False)
    with pytest.raises(treescan.errors.ArgumentError, match=r"axes of m have none for m\.\w+"):
        run(H, stack(kind=linear))
    with pytest.raises(treescan.errors.ArgumentError, match="x has axes of a module, but is"):
        scan(lambda h, x: (h, x), in_axes=(nnx.Carry, axes), graph=False)(H, XS)
