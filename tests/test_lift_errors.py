"""The text of every error of `treescan.lift`."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from helpers import array

import treescan
from treescan import ArgumentError, ArgumentTypeError, BodyError, CarryError, DenyList, In, TreescanError, lift

XS = array(4, 3)
H = array(3, seed=1)
KEY = jax.random.key(0)
VARIABLES = {"params": {"w": array(3, seed=2)}}


class Wrong(NamedTuple):
    """A call that raises."""

    error: type[TreescanError]
    text: str
    run: Callable[[Any], Any]
    fails: str = ""


ERRORS: dict[str, Wrong] = {}


def wrong(error: type[TreescanError], text: str, fails: str = "") -> Any:
    """A decorator for calls of `lift` that raise: they are given a scalar 1."""

    def add(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        ERRORS[run.__name__] = Wrong(error, text, run, fails)
        return run

    return add


def step(variables, rngs, carry, *args):
    return (carry, None), {}


def run(
    function: Any = step, one: Any = 1, *args: Any, variables: Any = VARIABLES, rngs: Any = None, **options: Any
) -> Any:  # fmt: skip
    options = {"variable_broadcast": "params", **options}
    return lift(function, **options)(variables, rngs or {}, H * one, *(args or (XS,)))


# Arguments of lift.


@wrong(
    BodyError,
    """`lift` needs a function as its body, but got 3.

  Pass the step function in its place: `treescan.lift(fn, variable_broadcast="params")`.
""",
)
def not_callable(one):
    return run(3)


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `variable_broadcast` takes names of collections, got list of 2.

  Give a name, a set of names, True for all or False for none, a function of the name, or a
  `treescan.DenyList` of those that are left out.
""",
)
def filter_of_numbers(one):
    return run(variable_broadcast=["params", 3])


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `variable_carry` takes names of collections, got 3.

  Give a name, a set of names, True for all or False for none, a function of the name, or a
  `treescan.DenyList` of those that are left out.
""",
)
def filter_is_a_number(one):
    return run(variable_carry=3)


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `split_rngs` takes names of collections, got 3.

  Give a name, a set of names, True for all or False for none, a function of the name, or a
  `treescan.DenyList` of those that are left out.
""",
)
def filter_of_keys(one):
    return run(split_rngs={3: True})


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `variable_carry` takes names of collections, got 3.

  Give a name, a set of names, True for all or False for none, a function of the name, or a
  `treescan.DenyList` of those that are left out.
""",
)
def filter_denies_a_number(one):
    return run(variable_carry=DenyList(3))


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `variable_axes` maps names of collections to axes, got 'params'.

  Write `variable_axes={"params": 0}`.
""",
)
def axes_are_no_mapping(one):
    return run(variable_axes="params")


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): an axis of `variable_axes` is an int, got None.

  Or `treescan.In(axis)` or `treescan.Out(axis)`, for collections that go one way alone. What has
  no axis belongs in `variable_broadcast` or `variable_carry`.
""",
)
def axis_is_none(one):
    return run(variable_axes={"params": None})


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): an axis of `variable_axes` is an int, got In(axis=1.5).

  Or `treescan.In(axis)` or `treescan.Out(axis)`, for collections that go one way alone. What has
  no axis belongs in `variable_broadcast` or `variable_carry`.
""",
)
def axis_is_a_float(one):
    return run(variable_axes={"params": In(1.5)})


# Arguments of the call.


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `variables` is a dict by name, got list of 1.

  What `lift` returns is called as `run(variables, rngs, carry, *args)`, with `{}` where there are
  none.
""",
)
def variables_are_a_list(one):
    return run(variables=[H])


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `variables` is a dict by name, got dict of 1.

  What `lift` returns is called as `run(variables, rngs, carry, *args)`, with `{}` where there are
  none.
""",
)
def variables_have_numbers_for_names(one):
    return run(variables={0: H})


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `rngs` is a dict by name, got key<fry>[].

  What `lift` returns is called as `run(variables, rngs, carry, *args)`, with `{}` where there are
  none.
""",
    "keys have no truth value: `rngs or {}` raises",
)
def rngs_are_a_key(one):
    return lift(step)({}, KEY, H, XS)


@wrong(
    ArgumentError,
    """`lift` over `step` (here): 'cache', 'state' in `variables` has no role.

  Name it in `variable_axes`, `variable_broadcast` or `variable_carry`, or leave it out of
  `variables`.
""",
)
def collections_without_a_role(one):
    return run(variables={**VARIABLES, "cache": {}, "state": {}})


@wrong(
    ArgumentError,
    """`lift` over `step` (here): 'dropout' in `rngs` has no role.

  Name it in `split_rngs`, whether each step has its own key or all the same, or leave it out of
  `rngs`.
""",
)
def streams_without_a_role(one):
    return run(rngs={"dropout": KEY}, split_rngs={"params": True})


@wrong(
    ArgumentError,
    """`lift` over `step` (here): how many steps? No `length` is given, and xs holds no arrays.

  Pass `length=` for a loop that consumes nothing, or arrays as xs, which lead with the steps.
""",
)
def no_length(one):
    return run(step, 1, None)


@wrong(
    ArgumentError,
    """`lift` over `step` (here): the leaves of xs do not have the same number of steps.

  leaf                      steps   is
  variables["cache"]["k"]   3       float32[3,3]   axis 0
  args[0]                   4       float32[4,3]   axis 0
  args[1]                   2       float32[2,3]   axis 0

  All leaves of xs are scanned together, and `length`, where given, is their size. For fewer
  steps, slice xs.
""",
)
def lengths_differ(one):
    return run(step, 1, XS, XS[:2], variables={"cache": {"k": XS[:3]}}, variable_axes={"cache": 0})


@wrong(
    ArgumentError,
    """`lift` over `step` (here): `length` is 3, but xs has 4 steps.

  leaf      steps   is
  args[0]   4       float32[4,3]   axis 0

  All leaves of xs are scanned together, and `length`, where given, is their size. For fewer
  steps, slice xs.
""",
)
def another_length(one):
    return run(length=3)


@wrong(
    ArgumentError,
    """`lift` over `step` (here): `in_axes` names an axis that is not there.

  leaf                      axis        is
  variables["cache"]["k"]   in_axes 2   float32[4,3]   rank 2

  An axis counts from 0, or from the end if it is negative, and None gives a leaf whole to every
  step.
""",
)
def no_such_axis_of_a_collection(one):
    return run(variables={"cache": {"k": XS}}, variable_axes={"cache": 2})


@wrong(
    ArgumentError,
    """`lift` over `step` (here): `in_axes` names an axis that is not there.

  leaf      axis        is
  args[0]   in_axes 2   float32[4,3]   rank 2

  An axis counts from 0, or from the end if it is negative, and None gives a leaf whole to every
  step.
""",
)
def no_such_axis_of_an_argument(one):
    return run(in_axes=(2,))


@wrong(
    ArgumentError,
    """`lift` over `step` (here): `in_axes` is no prefix of xs: there is no args[1].

  Give one int for all leaves, or a tree with the structure of xs down to where one int holds for
  everything below.
""",
)
def axes_for_other_arguments(one):
    return run(in_axes=(0, None))


@wrong(
    ArgumentTypeError,
    """`lift` over `step` (here): `in_axes` takes ints or None, got 'x'.

  Give one for all leaves, or a prefix tree of them.
""",
)
def axes_that_are_none(one):
    return run(in_axes="x")


@wrong(
    ArgumentError,
    """`lift` over `step` (here): `save` chooses among outputs that are stacked, and `out_axes` has None for some that are not.

  Give each output an axis, or leave `save` out.
""",  # noqa: E501
)
def save_of_what_is_returned_once(one):
    return run(save="last", out_axes=None)


@wrong(
    ArgumentError,
    """`lift` over `step` (here): `save` does not know 'first'.

  Give "all", "last", a number k for the positions k-1, 2k-1 and so on, or None to drop an output;
  or a prefix tree of y with these. For other positions, keep all and index ys.
""",
)
def save_of_nothing_known(one):
    return run(save="first")


# What the function returns.


@wrong(
    BodyError,
    """`<lambda>` (here) must return a pair ((carry, y), variables), but returned tuple of 2.

  The second item is a dict of the collections that changed, `{}` if none did: what
  `module.apply(..., mutable=[...])` of flax returns.
""",
)
def no_updates(one):
    return run(lambda variables, rngs, carry, x: (carry, x))


@wrong(
    BodyError,
    """`<lambda>` (here) must return a pair ((carry, y), variables), but returned None.

  The second item is a dict of the collections that changed, `{}` if none did: what
  `module.apply(..., mutable=[...])` of flax returns.
""",
)
def returns_nothing(one):
    return run(lambda variables, rngs, carry, x: None)


@wrong(
    BodyError,
    """`<lambda>` (here) must return a pair ((carry, y), variables), but returned tuple of 2.

  The second item is a dict of the collections that changed, `{}` if none did: what
  `module.apply(..., mutable=[...])` of flax returns.
""",
)
def updates_are_no_mapping(one):
    return run(lambda variables, rngs, carry, x: ((carry, x), [1]))


@wrong(
    BodyError,
    """`<lambda>` (here) returned collections that have no role: 'cache', 'state'.

  Name each in `variable_axes`, `variable_broadcast` or `variable_carry`, or do not return it.
""",
)
def updates_without_a_role(one):
    return run(lambda variables, rngs, carry, x: ((carry, x), {"cache": x, "state": x}))


@wrong(
    BodyError,
    """`<lambda>` (here) returned collections that have no role: 'cache'.

  Name each in `variable_axes`, `variable_broadcast` or `variable_carry`, or do not return it.
""",
)
def updates_that_are_only_read(one):
    options = {"variables": {"cache": XS}, "variable_axes": {"cache": In(0)}}
    return run(lambda variables, rngs, carry, x: ((carry, x), {"cache": x}), **options)


@wrong(
    CarryError,
    """`<lambda>` (here) returned a carry that differs from the one it was given.

  leaf    given        returned
  carry   float32[3]   float16[3]   dtype

  carry: the step computed in float16. Cast it back, `carry.astype(jnp.float32)`, or start from
  float16.
""",
)
def carry_dtype(one):
    return run(lambda variables, rngs, carry, x: ((carry.astype(jnp.float16), x), {}), one)


@wrong(
    CarryError,
    """`grow` (here) returned a carry that differs from the one it was given.

  leaf                      given         returned
  variables["state"]["n"]   float32[]     float32[2]   rank: 0 -> 1
  variables["state"]["m"]   (not there)   float32[3]

  variables["state"]["n"]: a carry keeps its shape. Start from an init of shape [2], or return [].

  variables["state"]["m"]: the carry keeps its structure. Start from an init that has it, or
  return it in y.
""",
)
def carried_collection_changes(one):
    def grow(variables, rngs, carry, x):
        return (carry, x), {"state": {"n": jnp.ones(2), "m": x}}

    return run(grow, one, variables={"state": {"n": jnp.ones(())}}, variable_carry="state")


@wrong(
    CarryError,
    """`<lambda>` (here) returned a carry that differs from the one it was given.

  leaf                 given         returned
  variables["state"]   (not there)   dict of 1

  variables["state"]: the carry keeps its structure. Start from an init that has it, or return it
  in y.
""",
)
def carried_collection_is_made(one):
    return run(lambda variables, rngs, carry, x: ((carry, x), {"state": {"n": x}}), one, variable_carry="state")


@wrong(
    BodyError,
    """`make` (here) returned values that must be the same in every step, but depend on the carry or on x.

  leaf                          expected                 is
  variables["params"]["both"]   the same in every step   float32[3]
  variables["params"]["c"]      the same in every step   float32[3]
  variables["params"]["own"]    the same in every step   float32[2]
  variables["params"]["x"]      the same in every step   float32[3]

  What is broadcast is computed once, for all steps: it may be made from keys that are not split
  and from constants. Carry what changes, or give it an axis to be stacked along.
""",
)
def broadcast_depends_on_the_loop(one):
    def make(variables, rngs, carry, x):
        made = {"x": x, "c": carry + 1, "both": carry * x, "w": variables["params"]["w"], "one": jnp.ones(1)}
        made["key"], made["own"] = (jax.random.normal(rngs[name], (2,)) for name in ("shared", "split"))
        return (carry * 2, x), {"params": made}

    return run(make, one, rngs={"shared": KEY, "split": KEY}, split_rngs={"shared": False, "split": True})


@wrong(
    BodyError,
    """`<lambda>` (here) returned values that must be the same in every step, but depend on the carry or on x.

  leaf                       expected                 is
  variables["params"]["x"]   the same in every step   float32[3]

  What is broadcast is computed once, for all steps: it may be made from keys that are not split
  and from constants. Carry what changes, or give it an axis to be stacked along.
""",
    "literals of a jaxpr are looked up in a set: they cannot be hashed",
)
def a_constant_beside_what_depends_on_the_loop(one):
    return run(lambda variables, rngs, carry, x: ((carry, x), {"params": {"x": x, "one": jnp.float32(1)}}))


@wrong(
    BodyError,
    """`make` (here) returned values that must be the same in every step, but depend on the carry or on x.

  leaf                       expected                 is
  variables["params"]["a"]   the same in every step   float32[]
  variables["params"]["b"]   the same in every step   float32[3]

  What is broadcast is computed once, for all steps: it may be made from keys that are not split
  and from constants. Carry what changes, or give it an axis to be stacked along.
""",
)
def broadcast_depends_on_what_is_carried_or_scanned(one):
    def make(variables, rngs, carry):
        n = variables["state"]["n"] + 1
        made = {"a": n, "b": variables["cache"]["k"], "c": jnp.ones(2)}
        return (carry, n), {"params": made, "state": {"n": n}}

    return lift(make, variable_broadcast="params", variable_carry="state", variable_axes={"cache": In(0)})(
        {"state": {"n": jnp.ones(()) * one}, "cache": {"k": XS}}, {}, H
    )


@wrong(
    BodyError,
    """`make` (here) returned values that must be the same in every step, but depend on the carry or on x.

  leaf                       expected                 is
  variables["params"]["a"]   the same in every step   float32[3]

  What is broadcast is computed once, for all steps: it may be made from keys that are not split
  and from constants. Carry what changes, or give it an axis to be stacked along.
""",
)
def broadcast_depends_within_a_call(one):
    @jax.jit
    def inner(carry, x):
        return jnp.sin(carry), x * 2, jnp.ones(3)

    def make(variables, rngs, carry, x):
        carry, a, b = inner(carry, x)
        return (carry, x), {"params": {"a": a, "b": b}}

    return run(make, one)


@wrong(
    BodyError,
    """`<lambda>` (here) returned values that must be the same in every step, but depend on the carry or on x.

  leaf        expected                 is
  y["b"][1]   the same in every step   float32[3]

  What is broadcast is computed once, for all steps: it may be made from keys that are not split
  and from constants. Carry what changes, or give it an axis to be stacked along.
""",
)
def output_depends_on_the_loop(one):
    return run(
        lambda variables, rngs, carry, x: ((carry, {"a": x, "b": (variables["params"]["w"], x)}), {}), one,
        out_axes={"a": 0, "b": None},
    )  # fmt: skip


MODES = {
    "eager": lambda call: call(1.0),
    "jit": lambda call: jax.jit(call)(1.0),
    "vmap": lambda call: jax.vmap(call)(jnp.ones(2)),
    "grad": lambda call: jax.grad(lambda one: jnp.sum(call(one)[0][0]))(1.0),
}


def text_of(name: str, mode: str = "eager") -> str:
    with pytest.raises(ERRORS[name].error) as caught:
        MODES[mode](ERRORS[name].run)
    assert type(caught.value) is ERRORS[name].error
    return re.sub(r"\(\S*test_lift_errors\.py:\d+\)", "(here)", str(caught.value))


def cases() -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=case.fails)] if case.fails else ())
        for name, case in ERRORS.items()
    ]


@pytest.mark.parametrize("name", cases())
def test_the_text(name: str) -> None:
    assert text_of(name).split("\n") == ERRORS[name].text.split("\n")


@pytest.mark.parametrize("mode", ["jit", "vmap", "grad"])
@pytest.mark.parametrize("name", ["carry_dtype", "broadcast_depends_on_the_loop", "carried_collection_changes"])
def test_the_text_is_the_same_in_every_mode(name: str, mode: str) -> None:
    assert text_of(name, mode).split("\n") == ERRORS[name].text.split("\n")


@pytest.mark.parametrize("name", ["broadcast_depends_on_the_loop", "carry_dtype"])
def test_with_jit_disabled(name: str) -> None:
    with jax.disable_jit():
        assert text_of(name).split("\n") == ERRORS[name].text.split("\n")


def test_what_the_function_raises_is_raised_as_it_is() -> None:
    def fail(variables, rngs, carry, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        run(fail)
    assert caught.value.__cause__ is None
    assert treescan.TreescanError not in type(caught.value).__mro__
