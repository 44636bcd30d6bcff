"""What is found in a cache is the same thing: what is only equal, or was changed since, is traced by itself."""

import dataclasses
import functools
import gc
import weakref
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thin import by_turns, parametrize
from traces import compilations

import treescan
from treescan._tree import Static, are_same
from treescan.meters import AbstractProgressMeter, Progress
from treescan.options import Option

pytestmark = pytest.mark.quick

XS = jnp.ones(3)


@dataclasses.dataclass(frozen=True)
class Held:
    value: Any
    note: str = dataclasses.field(default="", compare=False)


class Pair(NamedTuple):
    value: Any


class ByValue:
    """Equal as its author has it, and with a hash."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


MADE = {
    "int": lambda: 1,
    "float": lambda: 1.0,
    "bool": lambda: True,
    "complex": lambda: 1 + 0j,
    "numpy": lambda: np.float32(1),
    "zero": lambda: 0.0,
    "minus zero": lambda: -0.0,
    "minus zero in a complex": lambda: complex(0.0, -0.0),
    "nan": lambda: float("nan"),
    "decimal": lambda: Decimal("1"),
    "decimal of three digits": lambda: Decimal("1.000"),
    "fraction": lambda: Fraction(1),
    "tuple": lambda: (1, (0.0,)),
    "tuple of a flag": lambda: (True, (0.0,)),
    "tuple of minus zero": lambda: (1, (-0.0,)),
    "tuple of nan": lambda: (float("nan"),),
    "named tuple": lambda: Pair(1),
    "set": lambda: frozenset({1}),
    "set of a float": lambda: frozenset({1.0}),
    "dataclass": lambda: Held(1),
    "dataclass of a flag": lambda: Held(True),
    "dataclass of dataclasses": lambda: Held((Held(0.0), float("nan"))),
    "dataclass of other dataclasses": lambda: Held((Held(-0.0), float("nan"))),
    "object": lambda: ByValue(1),
    "object of a float": lambda: ByValue(1.0),
    "text": lambda: "1",
    "range": lambda: range(0),
    "other range": lambda: range(1, 1),
}
"""Values that a program can tell apart, though many are equal; each is made anew."""

SPELLED = [Static(make()) for make in MADE.values()]


def number(value: Any) -> Any:
    """Which of the values a program was traced for."""
    return jnp.float32(SPELLED.index(Static(value)))


@parametrize("make", MADE)
def test_values_that_programs_can_tell_apart_are_not_the_same(make):
    value = make()
    assert are_same(value, make())
    assert Static(value) == Static(make())
    assert hash(Static(value)) == hash(Static(make()))
    assert [name for name, other in MADE.items() if are_same(value, other())] == [
        name for name, other in MADE.items() if other is make
    ]


@dataclasses.dataclass(frozen=True)
class Tells(Option):
    value: Any

    def __call__(self, step, consts, state, feed):
        state, y = step(consts, state, feed)
        return state, y * 0 + number(self.value)


class TellsMask(Tells):
    around = treescan.options.Around.MASK


@dataclasses.dataclass(frozen=True)
class Body:
    value: Any

    def __call__(self, carry, x):
        return carry + x, number(self.value)


@dataclasses.dataclass(frozen=True)
class Condition:
    value: Any

    def __call__(self, carry):
        return carry[0] < number(self.value)


@dataclasses.dataclass(frozen=True)
class Show:
    value: Any

    def __call__(self, carry):
        del carry
        return {"number": number(self.value)}


SHOWN: list[float] = []


class Remembers(AbstractProgressMeter):
    def init(self, *args, **options):
        del args, options

    def step(self, bar, *args, **options):
        del bar
        SHOWN.extend(each["number"] for each in (*args, *options.values()) if isinstance(each, dict) and each)

    def close(self, *args, **options):
        del args, options


METER = Remembers()


def plain(carry, x):
    return carry + x, x


def with_leaf(carry, x):
    total, leaf = carry
    return (total + x, leaf), number(leaf.value)


def block(layer, x, value):
    return layer * 0 + x * 0 + number(value.value)


def counting(carry, x):
    return (carry[0] + 1, carry[1]), x


def shown(value):
    SHOWN.clear()
    treescan.fold(folded, 0.0, XS, progress=Progress("a", show=Show(value), meter=METER, updates=1))
    jax.effects_barrier()
    return SHOWN[-1]


def folded(carry, x):
    return carry + x


def in_turn(value):
    """As an option of a loop whose step is what caches are asked for."""
    with jax.disable_jit():
        return treescan.scan(plain, 0.0, XS, options=[Tells(value)])[1][-1]


ALIVE: list[Any] = []


def alive(function):
    """A body or a condition that is there when an equal one comes: what was made for it goes with it."""
    ALIVE.append(function)
    return function


PLACES = {
    "option": lambda value: treescan.scan(plain, 0.0, XS, options=[Tells(value)])[1][-1],
    "option around the mask": lambda value: treescan.scan(plain, 0.0, XS, options=[TellsMask(value)])[1][-1],
    "option without jit": in_turn,
    "static leaf": lambda value: treescan.scan(with_leaf, (0.0, Held(value)), XS)[1][-1],
    "static leaf of a program": lambda value: treescan.scan(with_leaf, (0.0, Held(value)), XS, remat="step")[1][-1],
    "argument of layers": lambda value: treescan.fold_layers(block, 0.0, XS, args=(Held(value),)),
    "body": lambda value: treescan.scan(alive(Body(value)), 0.0, XS)[1][-1],
    "body of a program": lambda value: treescan.scan(alive(Body(value)), 0.0, XS, remat="step")[1][-1],
    "condition": lambda value: treescan.while_scan(alive(Condition(value)), counting, (0.0, 0), max_length=99).steps,
    "show": shown,
}


SOME = ("int", "float", "bool", "zero", "minus zero", "nan", "decimal", "decimal of three digits")
SLOWER = ("option around the mask", "condition", "show")


@pytest.mark.parametrize("place", PLACES)
def test_equal_values_do_not_share_a_program(place):
    names = SOME if place in SLOWER else MADE
    told = [float(PLACES[place](MADE[name]())) for name in names]
    assert told == [[*MADE].index(name) for name in names]


KEPT = ("option", "option around the mask", "static leaf", "static leaf of a program", "argument of layers", "show")


@pytest.mark.parametrize("place", KEPT)
def test_the_same_values_share_a_program(place):
    PLACES[place](MADE["nan"]())
    assert compilations(lambda: PLACES[place](MADE["nan"]())) == []
    PLACES[place](Held(1, "a"))
    assert compilations(lambda: PLACES[place](Held(1, "what is not compared"))) == []


@pytest.mark.parametrize("disable", [False, True])
def test_fills_that_are_equal(disable):
    def fill(value):
        ys = treescan.mask_scan(held, jnp.zeros(1), jnp.ones((4, 1)), lengths=jnp.array([2]), fill=value)[1]
        return np.asarray(ys)[3, 0]

    def held(carry, x):
        return carry, x

    values = [0.0, -0.0, 1, 1.0, True, float("nan"), float("nan"), np.float32(-0.0), 0]
    with jax.disable_jit(disable):
        told = [fill(value) for value in values]
    np.testing.assert_array_equal(told, values)
    np.testing.assert_array_equal(np.signbit(told), np.signbit(np.array(values, np.float32)))


def test_a_policy_that_is_equal():
    @dataclasses.dataclass(frozen=True)
    class Policy:
        value: Any

        def __call__(self, prim, *_, **__):
            asked.append(repr(self.value))
            return prim.name == "tanh"

    def body(carry, x):
        return jnp.tanh(carry * x), x

    def loss(carry, value):
        return treescan.scan(body, carry, XS, remat=treescan.Remat(policy=Policy(value)))[0]

    asked: list[str] = []
    for value in (1, 1.0, True):
        asked.clear()
        jax.grad(loss)(jnp.float32(1), value)
        assert set(asked) == {repr(value)}


def test_a_static_leaf_that_is_only_equal_has_changed():
    def body(carry, x):
        return (carry[0] + x, Held(Decimal("1.000"))), None

    with pytest.raises(treescan.errors.CarryError):
        treescan.scan(body, (0.0, Held(Decimal("1"))), XS)
    treescan.scan(body, (0.0, Held(Decimal("1.000"))), XS)


# What was changed since.


class Scale:
    def __init__(self, k):
        self.k, self.inner, self.listed, self.array = k, {"k": [k]}, Held(k), np.full(2, k)

    def __call__(self, x):
        return x * self.k

    def change(self, k):
        self.k, self.listed = k, Held(k)
        self.inner["k"][0] = k
        self.array[:] = k

    def method(self, x):
        return x * self.k

    def deep(self, x):
        return x * self.inner["k"][0]

    def of_array(self, x):
        return x * float(self.array[0])

    def get(self, _, default):
        return default


class Slots:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return x * self.k

    def change(self, k):
        self.k = k


class Cycle(Scale):
    def __init__(self, k):
        super().__init__(k)
        self.itself = [self]


class Around(Scale):
    """Holds the object that is changed."""

    def __init__(self, k):
        super().__init__(k)
        self.scale = Scale(k)

    def __call__(self, x):
        return self.scale.deep(x)

    def change(self, k):
        self.scale.change(k)


def of_dict(items, x):
    return x * items["k"][0]


def with_a_rule(scale):
    function = jax.custom_jvp(scale.method)
    function.defjvps(lambda dx, y, x: dx * scale.k)
    return function


LEAVES = {
    "object": (Scale, lambda scale: scale),
    "object with slots": (Slots, lambda scale: scale),
    "object with itself": (Cycle, lambda scale: scale),
    "object within another": (Around, lambda scale: scale),
    "bound method": (Scale, lambda scale: scale.method),
    "bound method of a list in a dict": (Scale, lambda scale: scale.deep),
    "bound method of an array": (Scale, lambda scale: scale.of_array),
    "partial": (Scale, lambda scale: functools.partial(Scale.method, scale)),
    "one partial": (Scale, functools.lru_cache(lambda scale: functools.partial(Scale.method, scale))),
    "partial of a dict": (Scale, functools.lru_cache(lambda scale: functools.partial(of_dict, scale.inner))),
    "partial of a keyword": (Scale, functools.lru_cache(lambda s: functools.partial(lambda x, s: s.deep(x), s=s))),
    "rule of a method": (Scale, functools.lru_cache(with_a_rule)),
}
"""Ways to hold what an object says."""


def of_leaf(leaf):
    return treescan.scan(lambda_of_leaf, (0.0, leaf), XS)[0][0]


def lambda_of_leaf(carry, x):
    return (carry[0] + carry[1](x), carry[1]), None


def of_leaf_of_a_program(leaf):
    return treescan.scan(lambda_of_leaf, (0.0, leaf), XS, remat="nested")[0][0]


@dataclasses.dataclass(frozen=True)
class Applies(Option):
    function: Any

    def __call__(self, step, consts, state, feed):
        state, y = step(consts, state, feed)
        return state, self.function(y)


def of_option(function):
    return treescan.scan(plain, 0.0, XS, options=[Applies(function)])[1].sum()


HOLDERS = {"leaf": of_leaf, "leaf of a program": of_leaf_of_a_program, "option": of_option}


@by_turns(3, run=HOLDERS, leaf=LEAVES)
def test_what_was_changed_is_traced_again(run, leaf):
    (kind, held), told = leaf, []
    scale = kind(1.0)
    for k in (1.0, 5.0, 1.0, 7.0):
        scale.change(k)
        told.append(float(run(held(scale))))
    assert told == [3.0, 15.0, 3.0, 21.0]


@by_turns(3, run=HOLDERS, leaf={name: leaf for name, leaf in LEAVES.items() if name != "partial"})  # made in each call
def test_what_was_not_changed_is_not(run, leaf):
    kind, held = leaf
    scale = kind(1.0)
    run(held(scale))
    assert compilations(lambda: run(held(scale))) == []


def test_an_option_that_is_changed():
    class Mutable(Option):
        def __init__(self, k):
            self.k = k

        def __call__(self, step, consts, state, feed):
            state, y = step(consts, state, feed)
            return state, y * self.k

    option, told = Mutable(1.0), []
    for option.k in (1.0, 5.0, 1.0):
        told.append(float(treescan.scan(plain, 0.0, XS, options=[option])[1].sum()))
    assert told == [3.0, 15.0, 3.0]


@dataclasses.dataclass(unsafe_hash=True)
class Factor(Option):
    k: float

    def __call__(self, step, consts, state, feed):
        state, y = step(consts, state, feed)
        return state, y * self.k


def test_an_option_that_was_changed_is_not_traced_for_one_that_is_what_it_was():
    """JAX traces a program again for other shapes, and a program reads the option of which it was made."""
    option = Factor(1.0)
    treescan.scan(plain, 0.0, XS, options=[option])
    option.k = 5.0
    assert float(treescan.scan(plain, jnp.zeros(1), XS[:, None], options=[Factor(1.0)])[1].sum()) == 3.0


class Opaque(list):
    """What has more parts than are looked at."""

    __hash__ = object.__hash__

    def __call__(self, x):
        return x * self[-1]


def test_what_is_too_large_to_be_compared_is_traced_again():
    leaf, told = Opaque([[0] for _ in range(10_000)] + [1.0]), []
    for leaf[-1] in (1.0, 5.0):
        told.append(float(of_leaf(leaf)))
    assert told == [3.0, 15.0]


# What each call makes anew.


class Large:
    """Stands for what functions close over."""


class Quiet(AbstractProgressMeter):
    def __init__(self, held=None):
        self.held = held

    def init(self, *args, **options):
        del args, options

    step = close = init


def with_policy(held):
    def policy(prim, *_, **__):
        return held is not None and prim.name == "tanh"

    def loss(carry):
        return treescan.scan(plain, carry, XS, remat=treescan.Remat(policy=policy))[0]

    loss(0.0)
    jax.grad(loss)(0.0)


def with_show(held):
    def show(carry):
        return {"h": carry if held is not None else 0}

    treescan.scan(plain, 0.0, XS, progress=Progress("a", show=show, meter=Quiet()))
    jax.effects_barrier()


def with_meter(held):
    treescan.scan(plain, 0.0, XS, progress=Progress("a", meter=Quiet(held)))
    jax.effects_barrier()


def with_option(held):
    def same(y):
        return y if held is not None else None

    for disable in (False, True):
        with jax.disable_jit(disable):
            treescan.scan(plain, 0.0, XS, options=[Applies(same)])


@parametrize("run", {"policy": with_policy, "show": with_show, "meter": with_meter, "option": with_option})
def test_of_what_each_call_makes_anew_a_few_are_kept(run):
    """Its body lives on. Nothing tells that a function is not to come again, so a few of one origin are kept."""

    def used():
        held = Large()
        run(held)
        return weakref.ref(held)

    references = [used() for _ in range(10)]
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 8


def test_functions_that_come_again_are_kept():
    factors = [functools.partial(jnp.multiply, k) for k in range(4)]
    for _ in range(2):
        told = [float(of_option(factor)) for factor in factors]
    assert told == [0.0, 3.0, 6.0, 9.0]
    assert [compilations(lambda factor=factor: of_option(factor)) for factor in factors] == [[]] * 4
