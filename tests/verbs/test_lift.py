"""`treescan.lifting.lift` against a loop in Python: filters, hooks, and what is computed before the loop.

Its roles, keys and axes are in `works`, each two of them together, and in `test_flax_scan.py`, against flax.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.core
import flax.typing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jaxprs import equations
from loops import TRANSFORMS, array
from oracle import assert_close
from thin import parametrize
from traces import Counted, compilations
from works import plain

import treescan
from treescan.lifting import lift

T = 4
XS = array(T, 3)
H = array(3, seed=1)
W = array(3, seed=2)
KEY = jax.random.key(0)


class Case(NamedTuple):
    """A step and the options of `lift`, and what it is called with."""

    fn: Callable[..., Any]
    options: dict[str, Any]
    variables: Any
    args: tuple[Any, ...] = (XS,)
    rngs: Any = MappingProxyType({})

    def run(self, variables: Any, carry: Any, args: Any, fn: Any = None, **more: Any) -> Any:
        return lift(fn or self.fn, **{**self.options, **more})(variables, self.rngs, carry, *args)

    def expected(self, variables: Any, carry: Any, args: Any) -> Any:
        return plain.lift(self.fn, **self.options)(variables, self.rngs, carry, *args)

    def holds(self, transform: str) -> None:
        def compare(run: Callable[..., Any]) -> Any:
            return TRANSFORMS[transform](
                lambda given, args: run(given[0], given[1], args), (self.variables, H), self.args
            )

        expected = jax.jit(compare, static_argnums=0) if transform != "disable_jit" else compare
        assert_close(compare(self.run), expected(self.expected))


def weighted(variables, rngs, carry, *args):
    x = args[0] if args else 0.5
    carry = jnp.sin(carry * variables["params"]["w"] + x)
    return (carry, 2 * carry), {}


def layered(variables, rngs, carry, *args):
    carry = jnp.tanh(carry * variables["layers"]["w"] + variables["params"]["w"])
    return (carry, jnp.sum(carry)), {"layers": {"w": carry + 1}}


def sharing(variables, rngs, carry, x):
    made = {"w": jax.random.normal(rngs["shared"], (3,)), "c": jnp.arange(3.0), "p": variables["params"]["w"] ** 2}
    return (jnp.sin(carry * made["w"] + x), carry), {"made": made}


_MADE = {"variable_broadcast": ("params", "made"), "split_rngs": {"shared": False}}


def _w(**more: Any) -> Any:
    return {"params": {"w": W}, **more}


_BC = {"variable_broadcast": "params"}
CASES = {
    "broadcast": Case(weighted, _BC, _w()),
    "scanned": Case(layered, {**_BC, "variable_axes": {"layers": 1}}, _w(layers={"w": array(3, T, seed=4)}), ()),
    "made": Case(sharing, {**_MADE}, _w(), rngs={"shared": KEY}),
}


def test_a_collection_is_made_step_by_step_too() -> None:
    CASES["made"].holds("disable_jit")


# Filters.


FILTERS = {
    "name": "params",
    "iterator": "generator",
    "true": True,
    "predicate": lambda name: name != "state",
    "flax_deny": flax.core.DenyList(("state",)),
}


@parametrize("names", FILTERS)
def test_filters(names: Any) -> None:
    names = iter(["params"]) if names == "generator" else names
    run, args = lift(weighted, variable_broadcast=names), (_w(), {}, H, XS)
    assert_close(run(*args), CASES["broadcast"].expected(_w(), H, (XS,)))
    assert_close(run(*args)[0][0], run(*args)[0][0])  # a filter is asked again and again


@pytest.mark.parametrize("deny", [False, flax.core.DenyList(True), (), lambda name: False])
def test_filters_for_none(deny: Any) -> None:
    with pytest.raises(treescan.errors.ArgumentError, match="`variables` has names without a role: 'params'"):
        lift(weighted, variable_broadcast=deny)(_w(), {}, H, XS)


# Metadata and transforms of data.


def test_data_transform_is_called_in_every_step() -> None:
    def transform(variables, rngs):
        assert variables["layers"]["w"].shape == (3,)
        assert rngs["a"].shape == ()
        return {**variables, "params": {"w": variables["params"]["w"] * 2}}, rngs

    case = CASES["scanned"]
    run = lift(layered, **case.options, data_transform=transform, split_rngs={"a": True})
    doubled = {**case.variables, "params": {"w": 2 * W}}
    assert_close(run(case.variables, {"a": KEY}, H), case.expected(doubled, H, ()))


def test_metadata() -> None:
    calls = []

    def note(collection, axis, added):
        calls.append((jax.tree.map(jnp.shape, collection), axis, added))
        return collection

    case = CASES["scanned"]
    assert_close(case.run(case.variables, H, (), metadata_fn=note), case.expected(case.variables, H, ()))
    assert calls == [({"w": (3, T)}, 1, False), ({"w": (3, T)}, 1, True)]


# Length 0, and what is made before the loop.


def test_no_steps() -> None:
    case = CASES["made"]
    (carry, ys), updates = case.run(case.variables, H, (XS[:0],))
    assert_close(carry, H)
    assert ys.shape == (0, 3)
    assert_close(updates["made"], case.expected(case.variables, H, (XS,))[1]["made"])


def with_made(make: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A step that makes a collection and reads it."""

    def step(variables, rngs, carry, x):
        made = make(rngs["shared"], variables["params"]["w"])
        return (jnp.sin(carry * made + x), carry), {"made": {"w": made}}

    return step


@jax.custom_jvp
def cubed(w):
    return w**3


cubed.defjvp(lambda primals, tangents: (cubed(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def doubled(w):
    return 2 * w


doubled.defvjp(lambda w: (doubled(w), None), lambda _, g: (2 * g,))

MAKERS = {
    "constants": lambda key, w: jnp.linspace(0.0, 1.0, 3),
    "jitted": lambda key, w: jax.jit(lambda key: jax.random.normal(key, (3,)) * 2)(key),
    "broadcast": lambda key, w: w * 2,
    "checkpoint": lambda key, w: jax.checkpoint(lambda key: jax.nn.relu(jax.random.normal(key, (3,))))(key),
    "custom_jvp": lambda key, w: jax.nn.relu(cubed(w)),
    "custom_vjp": lambda key, w: doubled(w),
    "cond": lambda key, w: jax.lax.cond(jnp.sum(w) > 0, jnp.sin, jnp.cos, w),
    "scan": lambda key, w: jax.lax.scan(lambda c, _: (jnp.sin(c), None), w, length=2)[0],
    "given": lambda key, w: w,
}


@parametrize("make", MAKERS)
def test_values_made_before_the_loop(make: Any) -> None:
    Case(with_made(make), _MADE, _w(), rngs={"shared": KEY}).holds("grad")


@parametrize("wrap", {"jit": jax.jit, "checkpoint": jax.checkpoint})
def test_values_made_within_a_call_that_the_loop_needs(wrap: Any) -> None:
    """The call computes what is the same in every step beside what is not."""

    def step(variables, rngs, carry, x):
        @wrap
        def inner(carry, x, key):
            w = jax.random.normal(key, (3,))
            return jnp.sin(carry * w + x), w

        carry, w = inner(carry, x, rngs["shared"])
        return (carry, carry), {"made": {"w": w}}

    case = Case(step, _MADE, {}, rngs={"shared": KEY})
    assert_close(case.run({}, H, (XS,)), case.expected({}, H, (XS,)))


def test_what_a_callback_returns_is_not_the_same_in_every_step() -> None:
    def step(variables, rngs, carry, x):
        w = io_callback(lambda: np.ones(3, np.float32), jax.ShapeDtypeStruct((3,), np.float32))
        return (carry * w, carry), {"made": {"w": w}}

    with pytest.raises(treescan.errors.BodyError, match="must be the same in every step"):
        lift(step, **_MADE)({}, {"shared": KEY}, H, XS)


def test_what_is_made_is_not_computed_again_in_the_loop() -> None:
    def step(variables, rngs, carry, x):
        w = jax.random.normal(rngs["shared"], (3, 3))
        made = w @ w
        return (jnp.sin(carry @ made), x), {"made": {"w": w, "m": made}}

    run = lift(step, **_MADE)
    jaxpr = jax.make_jaxpr(lambda: run({}, {"shared": KEY}, H, XS))().jaxpr
    (scan,) = equations(jaxpr, "scan")
    inner = scan.params["jaxpr"].jaxpr
    assert [len(list(equations(j, "dot_general"))) for j in (inner, jaxpr)] == [1, 2]
    assert [len(list(equations(j, "random_bits"))) for j in (inner, jaxpr)] == [0, 1]


# Traces.


def test_one_trace() -> None:
    for name, case in CASES.items():
        traces = Counted(case.fn).traces(
            lambda fn, case=case: jax.jit(lambda: case.run(case.variables, H, case.args, fn))()
        )
        assert traces == 1, name


def test_a_second_call_neither_traces_nor_compiles() -> None:
    case = CASES["made"]
    counted = Counted(case.fn)
    run = lift(counted.body, **case.options)
    jax.block_until_ready(run(case.variables, case.rngs, H, XS))
    assert counted.calls == 1
    assert compilations(lambda: run(case.variables, case.rngs, H, XS)) == []
    assert counted.calls == 1
