"""`register_carry`: values of a type that one does not own are carried, and come back as values of that type."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest
from loops import disable_jit
from oracle import assert_bitwise
from thin import parametrize

import treescan
from treescan.carries import AbstractCarry, _registry, carry_of, cast, register_carry
from treescan.errors import PluginError

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it, whatever happens in it."""
    monkeypatch.setattr(_registry, "_adoptions", dict(_registry._adoptions))
    monkeypatch.setattr(_registry, "_known", weakref.WeakKeyDictionary())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Total(AbstractCarry[jax.Array, jax.Array]):
    """Adds up what the body returns: in each row of a batch, or if it has none, at all."""

    total: jax.Array

    def read(self) -> jax.Array:
        return self.total

    def write(self, returned: jax.Array, valid: jax.Array | None) -> "Total":
        return replace(self, total=self.total + returned)


def fresh(*bases: type) -> Any:
    """A class of a meter, which is no pytree: it shows a number, and says so."""

    class Meter(*bases):
        def __init__(self, total: Any) -> None:
            self.total = total

    return Meter


def to_total(meter: Any) -> Total:
    return Total(jnp.asarray(meter.total))


def register(kind: type) -> None:
    register_carry(kind, to_total, lambda carry: kind(carry.total))


@pytest.fixture
def Meter() -> Any:
    """A registered class, of its own in each test."""
    kind = fresh()
    register(kind)
    return kind


def step(seen: Any, x: Any) -> Any:
    return x, seen


XS = jnp.array([1.0, 2.0, 6.0])


# There and back.


VERBS: dict[str, Callable[[Any], Any]] = {
    "scan": lambda init: treescan.scan(step, init, XS)[0],
    "remat": lambda init: treescan.scan(step, init, XS, remat="nested")[0],
    "fold": lambda init: treescan.fold(lambda seen, x: x, init, XS),
    "fori": lambda init: treescan.fori(0, 3, lambda i, seen: XS[i], init),
    "disable_jit": lambda init: disable_jit(lambda *given: treescan.scan(step, *given), init, XS)[0],
}


@parametrize("run", VERBS)
def test_every_verb_takes_and_returns_a_value(run: Callable[[Any], Any], Meter: Any) -> None:
    final = run(Meter(1.0))
    assert type(final) is Meter
    npt.assert_array_equal(final.total, 10.0)


def test_a_value_that_holds_an_array_may_be_beside_a_leaf_that_is_none(Meter: Any) -> None:
    """Such an object would be refused if its type were not registered."""
    init = {"meter": Meter(jnp.float32(1.0)), "name": "speed"}
    final = treescan.fold(lambda seen, x: {**seen, "meter": x}, init, XS)
    npt.assert_array_equal(final["meter"].total, 10.0)
    final = treescan.fold_layers(lambda w, seen: {**seen, "meter": w}, init, XS)
    npt.assert_array_equal(final["meter"].total, 10.0)


def test_stacks_and_rows_of_values(Meter: Any) -> None:
    totals = treescan.accumulate(lambda seen, x: {"a": x, "b": x}, {"a": Meter(1.0), "b": jnp.zeros(())}, XS)
    assert type(totals["a"]) is Meter
    npt.assert_array_equal(totals["a"].total, [2.0, 4.0, 10.0])
    npt.assert_array_equal(totals["b"], XS)
    xs = jnp.stack([XS, XS, XS], axis=1)
    final, _ = treescan.mask_scan(step, Meter(jnp.zeros(3)), xs, lengths=jnp.array([3, 0, 2]))
    npt.assert_array_equal(final.total, [9.0, 0.0, 3.0])


def test_values_stand_anywhere_in_the_tree_beside_anything(Meter: Any) -> None:
    class Both(NamedTuple):
        first: Any
        second: Any

    init = {"both": Both(Meter(1.0), Total(jnp.zeros(()))), "name": "a string", "none": None, "list": [Meter(0), 0.0]}

    def body(seen: Any, x: Any) -> Any:
        assert seen["name"] == "a string" and seen["none"] is None
        return {**seen, "both": Both(x, x), "list": [jnp.int32(1), seen["list"][1] + x]}, None

    final, _ = treescan.scan(body, init, XS)
    assert type(final["both"].first) is type(final["list"][0]) is Meter
    npt.assert_array_equal(final["both"].first.total, 10.0)
    npt.assert_array_equal(carry_of(final["both"].second, Total).total, 9.0)
    npt.assert_array_equal(final["list"][0].total, 3)
    npt.assert_array_equal(final["list"][1], 9.0)
    assert (final["name"], final["none"]) == ("a string", None)


@pytest.mark.parametrize("library", ["jax", "numpy"])
def test_a_class_of_a_library_of_arrays_is_adopted_each_time(library: str) -> None:
    """Its own arrays are known to be no carries once one was seen."""
    kind = fresh()
    kind.__module__ = f"{library}.meters"
    register(kind)
    for _ in range(2):
        final, _ = treescan.scan(step, kind(1.0), XS)
        npt.assert_array_equal(final.total, 10.0)


def test_a_registered_pytree_is_no_longer_a_tree_to_look_into() -> None:
    class Pair(NamedTuple):
        a: Any
        b: Any

    def add(carry: Any, x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + x, carry), None

    assert_bitwise(treescan.scan(add, Pair(0.0, 1.0), XS)[0], Pair(jnp.float32(9.0), jnp.float32(10.0)))
    register_carry(Pair, lambda pair: Total(jnp.asarray(pair.a)), lambda carry: Pair(carry.total, "back"))
    final, _ = treescan.scan(step, Pair(1.0, 2.0), XS)  # the same type, which was known as a tree before
    npt.assert_array_equal(final.a, 10.0)
    assert final.b == "back"


def test_jit_gradients_and_vmap_go_through(Meter: Any) -> None:
    def run(start: Any, xs: Any) -> Any:
        return treescan.fold(lambda seen, x: x * seen, Meter(start), xs).total  # doubles, triples, ...

    npt.assert_array_equal(jax.jit(run)(1.0, XS), 42.0)
    npt.assert_array_equal(jax.grad(run)(1.0, XS), 2.0 * 3.0 * 7.0)
    npt.assert_array_equal(jax.vmap(run, (0, None))(jnp.array([1.0, 2.0]), XS), [42.0, 84.0])


def test_both_functions_are_called_once_a_scan() -> None:
    calls: list[str] = []

    class Noted:
        pass

    def there(value: Any) -> Total:
        calls.append("to_carry")
        return Total(jnp.zeros(()))

    def back(carry: Any) -> Any:
        calls.append("from_carry")
        return Noted()

    register_carry(Noted, there, back)
    for _ in range(2):
        treescan.scan(step, Noted(), XS, remat="nested")
    assert calls == ["to_carry", "from_carry"] * 2


# Subclasses.


def test_a_subclass_is_carried_as_its_base_until_it_is_registered(Meter: Any) -> None:
    Sub = fresh(Meter)
    assert type(treescan.scan(step, Sub(0.0), XS)[0]) is Meter
    register(Sub)
    assert type(treescan.scan(step, Sub(0.0), XS)[0]) is Sub
    assert type(treescan.scan(step, fresh(Sub)(0.0), XS)[0]) is Sub
    assert type(treescan.scan(step, Meter(0.0), XS)[0]) is Meter


def test_of_several_bases_the_first_counts(Meter: Any) -> None:
    other = fresh()
    register(other)
    assert type(treescan.scan(step, fresh(other, Meter)(0.0), XS)[0]) is other
    assert type(treescan.scan(step, fresh(Meter, other)(0.0), XS)[0]) is Meter


# Errors of plugins.


def no_carry(value: Any) -> Any:
    return jnp.zeros(3)


def failing(value: Any) -> Any:
    raise ZeroDivisionError("nothing to divide by")


def test_what_to_carry_raises_is_the_cause() -> None:
    kind = fresh()
    register_carry(kind, failing, lambda carry: carry)
    with pytest.raises(PluginError, match=r'called\s+for\s+init\["a"\]\[1\]') as error:
        treescan.scan(step, {"a": (0.0, kind(0.0))}, XS)
    assert type(error.value.__cause__) is ZeroDivisionError


def test_an_error_names_the_distribution_that_brings_the_plugin() -> None:
    kind = fresh()
    register_carry(kind, np.zeros_like, lambda carry: carry)  # stands for a plugin's function
    kind.__module__ = "jax.of_somebody"
    with pytest.raises(PluginError) as error:
        treescan.scan(step, kind(0.0), XS)
    text = " ".join(str(error.value).split())
    assert f"It is `zeros_like` of `numpy`, from the installed distribution numpy {np.__version__}." in text
    assert f"`jax.of_somebody`, from the installed distribution jax {jax.__version__}." in text


# Registered twice, and within others.


def test_the_first_registration_stays_unless_its_module_is_imported_again(Meter: Any) -> None:
    with pytest.raises(PluginError, match="registered already"):
        register_carry(Meter, lambda meter: to_total(meter), lambda carry: Meter(carry.total))
    npt.assert_array_equal(treescan.scan(step, Meter(1.0), XS)[0].total, 10.0)
    another = Meter(-1.0)
    register_carry(Meter, to_total, lambda carry: another)
    assert treescan.scan(step, Meter(1.0), XS)[0] is another


def test_a_value_within_another_carry_becomes_a_carry_too(Meter: Any) -> None:
    final, seen = treescan.scan(step, cast(Meter(1.0)), XS)
    assert type(final.tree) is Total
    npt.assert_array_equal(final.read(), 10.0)
    npt.assert_array_equal(seen, [1.0, 2.0, 4.0])
    Other = fresh(Meter)
    register_carry(Other, no_carry, lambda carry: carry)
    words = r"`cast`: `to_carry` of the registered type `.*Meter`, called for tree\.m,"
    with pytest.raises(PluginError, match=words) as error:
        cast(NamedTuple("Init", [("m", Any)])(Other(1.0)))
    assert "body" not in str(error.value)
