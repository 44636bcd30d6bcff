"""Cases of `test_errors.py` in which a custom carry stands in `init`, or is about to be registered."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import field, make_dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from error_cases import LENGTHS, ROWS, XS, case, named

from treescan import accumulate, carries, fold, mask_scan, scan
from treescan.carries import (
    AbstractCarry,
    Ema,
    RunningSum,
    _registry,
    best,
    cast,
    ema,
    keys,
    register_carry,
    running_sum,
)
from treescan.testing import check_carry


def step(carry, x):
    return carry, x


HOOKS: dict[str, Any] = {
    "read": lambda self: self.number,
    "write": lambda self, returned, valid: replace(self, number=self.number + returned),
}


def count(number: Any, **hooks: Callable[..., Any]) -> Any:
    """A carry with two fields and no fault but in the hooks that are given, of a class of its own."""
    fields = [("number", Any), ("limit", int, field(default=9, metadata={"static": True}))]
    namespace = {"__module__": __name__, **HOOKS, **hooks}
    kind = make_dataclass("Count", fields, bases=(AbstractCarry,), namespace=namespace, frozen=True)
    return jax.tree_util.register_dataclass(kind)(number)


def unregistered(name: str, **hooks: Callable[..., Any]) -> Any:
    """A carry whose class JAX does not know."""
    return type(name, (AbstractCarry,), {"__module__": __name__, **hooks})()


def find_rows(init: Any, **options: Any) -> Any:
    return mask_scan(step, init, ROWS, lengths=LENGTHS, **options)


@case()
def plugin_write_without_valid(one):
    state = {"seen": count(one, write=lambda self, returned: self)}
    return scan(named("step", lambda state, x: ({"seen": x}, None)), state, XS)


@case()
def plugin_write_fails(one):
    def write(self, returned, valid):
        return replace(self, number=returned["count"])

    def step(state, x):
        return {"h": state["h"], "seen": [{"number": x}]}, None

    return scan(step, {"h": one, "seen": [count(one, write=write)]}, XS)


@case()
def plugin_buffer_given_its_store(one):
    def append(seen, x):
        values, _ = seen
        return (values.at[0].set(x), True), None

    return scan(append, carries.buffer(jnp.ones((2, 3)), 3), one * jnp.ones((4, 2, 3)))


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """What is registered meanwhile is forgotten afterwards."""
    known: Any = weakref.WeakKeyDictionary()
    with (
        mock.patch.object(_registry, "_adoptions", dict(_registry._adoptions)),
        mock.patch.object(_registry, "_known", known),
    ):
        yield


class Meter:
    """A number in a class that is no pytree."""

    def __init__(self, number: Any) -> None:
        self.number = number


def to_count(meter: Meter) -> Any:
    return count(jnp.asarray(meter.number))


def from_count(carry: Any) -> Meter:
    return Meter(carry.number)


def to_count_of_numbers(meter: Meter) -> Any:
    return count(meter.numbers)


def registered(one: Any, to_carry: Any, from_carry: Any, verb: Any = scan, body: Any = step) -> Any:
    register_carry(Meter, to_carry, from_carry)
    return verb(body, {"h": one, "meters": [Meter(one)]}, XS)


case()(
    plugin_without_write=lambda one: unregistered("Latch", read=lambda self: one),
    plugin_without_hooks=lambda one: unregistered("Latch"),
    carry_of_the_value_seen=lambda one: carries.carry_of(fold(lambda average, x: x, ema(one, 0.9), XS).read(), Ema),
    carry_of_another_carry=lambda one: carries.carry_of(fold(lambda average, x: x, ema(one, 0.9), XS), RunningSum),
    carry_shared_text=lambda one: carries.running_sum(one, shared="no"),
    carry_debias_text=lambda one: ema(one, 0.9, debias="no"),
    carry_decay_text=lambda one: ema(one, "0.9"),
    carry_decay_above_1=lambda one: ema({"w": one, "b": one}, {"w": 0.9, "b": 1.5}),
    carry_decay_no_prefix=lambda one: ema({"w": one, "b": one}, {"w": 0.9}),
    carry_decay_none=lambda one: ema(one, None),
    carry_best_mode=lambda one: best(one, mode="maximum"),  # type: ignore[arg-type]
    carry_buffer_without_room=lambda one: carries.buffer(one, 0),
    carry_buffer_of_nothing=lambda one: carries.buffer((), 3),
    carry_window_of_a_number=lambda one: carries.window({"lags": one}),
    carry_clip_without_limit=lambda one: carries.clip_gradient(one),
    carry_clip_negative=lambda one: carries.clip_gradient(one, -1.0),
    carry_clip_complex=lambda one: carries.clip_gradient({"z": jax.lax.complex(one, one)}, 1.0),
    carry_moments_of_ints=lambda one: carries.moments(dtype=int),
    carry_moments_returned_as_read=lambda one: scan(
        named("step", lambda seen, x: (seen, one * x)), carries.moments(), XS
    ),
    carry_moments_not_merged=lambda one: carries.Moments.merge(carries.moments((3,)), carries.moments()),
    check_carry_of_two_steps=lambda one: check_carry(ema(one, 0.9), XS[:2]),
    check_carry_of_an_array=lambda one: check_carry(XS, XS),
    carry_of_no_class=lambda one: carries.carry_of(ema(one, 0.9), ema),
    write_tree_keys=lambda one: carries.write_tree({"h": one, "loss": ema(one, 0.9)}, {"h": one}),
    # Hooks that fail.
    plugin_of_no_pytree=lambda one: scan(
        lambda carry, x: (carry, one), {"seen": unregistered("NoPytree", **HOOKS)}, XS
    ),
    plugin_rows_fails=lambda one: find_rows(count(one * jnp.ones(2), rows=lambda self: self.axes)),
    plugin_read_fails=lambda one: scan(
        step, {"seen": count(one, read=named("read", lambda self: {"number": self.number}["count"]))}, XS
    ),
    plugin_given_other_shape=lambda one: scan(
        named("step", lambda state, x: ({"h": state["h"], "loss": x * jnp.ones(3)}, None)),
        {"h": one, "loss": ema(one * jnp.ones(2), 0.9)},
        XS,
    ),
    plugin_given_other_rows=lambda one: mask_scan(
        named("step", lambda state, x: ({"loss": jnp.ones(3)}, None)), {"loss": ema(one, 0.9)}, ROWS, lengths=LENGTHS
    ),
    plugin_given_a_vector_for_a_number=lambda one: scan(
        named("step", lambda state, x: ({"loss": x * jnp.ones(3)}, None)), {"loss": ema(one, 0.9)}, XS
    ),
    plugin_given_other_structure=lambda one: scan(
        named("step", lambda state, x: ({"h": state["h"]}, None)), cast({"h": one, "c": one}), XS
    ),
    plugin_moments_given_a_dict=lambda one: scan(
        named("step", lambda state, x: ({"seen": {"a": x}}, None)), {"seen": carries.moments()}, one * XS
    ),
    # What is written.
    plugin_best_given_another_structure=lambda one: scan(lambda seen, x: ((x, x), None), best({"w": one}), XS),
    plugin_writes_other_dtype=lambda one: scan(
        step,
        {
            "h": one,
            "seen": count(
                one,
                write=named(
                    "write",
                    lambda self, returned, valid: replace(self, number=(self.number + returned).astype(jnp.bfloat16)),
                ),
            ),
        },
        XS,
    ),
    plugin_writes_other_class=lambda one: scan(
        step,
        {"seen": count(one, write=named("write", lambda self, returned, valid: running_sum(self.number + returned)))},
        XS,
    ),
    carry_moments_of_an_array=lambda one: carries.moments(one * XS),
    carry_moments_of_a_dtype=lambda one: carries.moments(jnp.float32),
    carry_best_with_a_function=lambda one: best(one, lambda value: value.sum()),
    carry_best_with_a_text=lambda one: best(one, "loss"),
    carry_best_of_a_text=lambda one: best({"name": "adam", "w": one}),
    carry_keys_of_a_seed=lambda one: keys(0),
    cast_of_a_function_that_makes_carries=lambda one: cast({"h": one, "rng": keys}),
    carry_class_not_called=lambda one: fold(lambda carry, x: carry, {"h": one, "loss": Ema}, XS),
    # Where the rows stand.
    plugin_rows_no_prefix=lambda one: find_rows(
        {"seen": count({"h": one * jnp.ones(2), "c": one}, rows=lambda self: {"number": {"h": 0, "b": None}})}
    ),
    plugin_rows_of_no_field=lambda one: find_rows(
        {"seen": count(one * jnp.ones(2), rows=lambda self: {"count": 0, "total": None})}
    ),
    plugin_rows_str=lambda one: find_rows({"seen": count(one * jnp.ones(2), rows=lambda self: "number")}),
    plugin_rows_of_a_carry_within=lambda one: find_rows(
        {"seen": count(running_sum(one * jnp.ones(2)), rows=lambda self: {"number": 1})}
    ),
    batch_not_in_custom_carry=lambda one: find_rows(
        {"h": one * jnp.ones((2, 5)), "seen": count(one), "loss": ema(one * jnp.ones(3), 0.9)}
    ),
    carry_axes_of_custom_carry=lambda one: find_rows(
        {"h": one * jnp.ones((5, 2)), "loss": ema(one * jnp.ones(2), 0.9)}, row_axes={"carry": 1}
    ),
    carry_axes_within_custom_carry=lambda one: find_rows(
        {"loss": ema(one * jnp.ones(2), 0.9)}, row_axes={"carry": {"loss": {"value": 0}}}
    ),
    carry_axes_no_prefix_beside_custom_carry=lambda one: find_rows(
        {"h": one * jnp.ones(2), "loss": ema(one * jnp.ones(2), 0.9)}, row_axes={"carry": {"h": {"a": 0}, "loss": 0}}
    ),
    # What the body returns.
    carry_without_custom_carry=lambda one: scan(
        named("step", lambda state, x: ({"h": state["h"] + x, "losses": x}, state["loss"])),
        {"h": one, "loss": ema(one, 0.9)},
        XS,
    ),
)

case(context=forgotten)(
    register_twice=lambda one: [register_carry(Meter, to, from_count) for to in (to_count, to_count_of_numbers)],
    registered_to_carry_fails=lambda one: registered(one, to_count_of_numbers, from_count),
    registered_to_no_carry=lambda one: registered(one, lambda meter: meter.number, from_count),
    registered_from_carry_fails=lambda one: registered(
        one, to_count, named("from_carry", lambda carry: Meter({}["number"]))
    ),
    registered_from_another_type=lambda one: registered(
        one, to_count, lambda carry: carry.number, accumulate, lambda carry, x: carry
    ),
    register_a_value=lambda one: register_carry(Meter(one), to_count, from_count),
    register_without_way_back=lambda one: register_carry(Meter, to_count, None),
    register_dict=lambda one: register_carry(dict, to_count, from_count),
    register_a_carry=lambda one: register_carry(Ema, to_count, from_count),
)
