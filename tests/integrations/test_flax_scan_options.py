"""What `treescan.integrations.flax.scan` has beside what flax's has: options, carries, and errors about the body."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import broadcast
from flax_models import MODELS, XS, Block, Cell, H, from_function, layers, recurrent
from jaxprs import equations
from thin import parametrize

import treescan
from treescan import ArgumentError, ArgumentTypeError, BodyError, CarryError, TreescanError
from treescan.carries import ema, sum_
from treescan.integrations.flax import scan

KEY = jax.random.key(0)
SHARED = {"variable_broadcast": "params", "split_rngs": {"params": False}}


def close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


@parametrize("remat", {"step": "step", "nested": "nested", "policy": treescan.Remat(policy="dots_saveable")})
@pytest.mark.parametrize(("build", "inputs"), [(recurrent, (H, XS)), (layers, (H,))], ids=["recurrent", "layers"])
def test_remat_changes_no_gradient(build: Any, inputs: Any, remat: Any) -> None:
    variables = build(nn.scan).init(KEY, *inputs)

    def gradient(module: nn.Module) -> Any:
        def loss(variables: Any, inputs: Any) -> jax.Array:
            return sum(map(jnp.sum, jax.tree.leaves(module.apply(variables, *inputs))))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    close(gradient(build(scan, remat=remat))(variables, inputs), gradient(build(nn.scan))(variables, inputs))
    jaxpr = jax.make_jaxpr(gradient(build(scan, remat=remat)))(variables, inputs).jaxpr
    assert any(equations(jaxpr, name) for name in ("checkpoint", "remat", "remat2"))


@pytest.mark.parametrize("save", ["last", 2, None])
def test_what_is_saved(save: Any) -> None:
    h, ys = recurrent(nn.scan).init_with_output(KEY, H, XS)[0]
    (found, kept), variables = recurrent(scan, save=save).init_with_output(KEY, H, XS)
    close(found, h)
    assert variables["params"].keys() == {"ScanCell_0"}
    close(kept, None if save is None else ys[-1] if save == "last" else ys[1::2])


def test_stacked_variables_are_saved_whatever_save_says() -> None:
    module = MODELS["sown_in_time"].build(lambda *args, **options: scan(*args, save=None, **options))
    (_, ys), made = module.apply(module.init(KEY, H, XS), H, XS, mutable=["intermediates"])
    assert ys is None
    assert made["intermediates"]["ScanSowing_0"]["norm"][0].shape == (5,)


def test_name_names_the_loop() -> None:
    module = recurrent(scan, name="cell_loop")
    variables = module.init(KEY, H, XS)
    text = jax.jit(module.apply).lower(variables, H, XS).as_text(debug_info=True)
    assert "cell_loop" in text


def test_custom_carries() -> None:
    def body(cell: Any, carry: Any, x: Any) -> Any:
        h, y = cell(carry["h"], x)
        return {"h": h, "sum": y, "mean": y}, (y, carry["sum"])

    def call(self: Any, h: Any, xs: Any) -> Any:
        carry = {"h": h, "sum": sum_(jnp.zeros((2, 3))), "mean": ema(jnp.zeros((2, 3)), 0.5)}
        return scan(body, **SHARED)(Cell(), carry, xs)

    (carry, (ys, sums)), _ = from_function(call).init_with_output(KEY, H, XS)
    close(carry["sum"].read(), ys.sum(0))
    close(sums, jnp.cumsum(ys, 0) - ys)
    close(carry["mean"].read(), sum(y * 0.5 ** (5 - i) for i, y in enumerate(ys)))


def test_carried_collections_that_are_not_mutable_stay_as_they_are() -> None:
    """Flax's loop fails there: the carry loses what is not mutable."""

    def build(using: Any) -> nn.Module:
        def body(self: Any, h: Any, x: Any) -> Any:
            return h + self.get_variable("state", "n"), x

        return from_function(lambda self, h, xs: using(body, variable_carry="state")(self, h, xs))

    variables = {"state": {"n": jnp.float32(2)}}
    close(build(scan).apply(variables, H, XS)[0], H + 10)
    (h, _), changed = build(scan).apply(variables, H, XS, mutable=["state"])
    close((h, changed), (H + 10, variables))
    with pytest.raises(TypeError, match="same pytree structure"):
        build(nn.scan).apply(variables, H, XS)


def test_none_is_broadcast() -> None:
    def build(using: Any, whole: Any) -> nn.Module:
        def body(self: Any, h: Any, x: Any, w: Any) -> Any:
            return nn.Dense(3)(h) + x * w, (h, jnp.ones(2))

        return from_function(
            lambda self, h, xs: using(body, in_axes=(0, whole), out_axes=(0, whole), **SHARED)(self, h, xs, h)
        )

    close(build(scan, None).init_with_output(KEY, H, XS), build(nn.scan, broadcast).init_with_output(KEY, H, XS))


def test_arguments_that_are_no_arrays_are_given_whole() -> None:
    def body(self: Any, h: Any, x: Any, function: Any) -> Any:
        return function(h + x), None

    module = from_function(lambda self, h, xs: scan(body, in_axes=(0, nn.broadcast))(self, h, xs, jnp.sin))
    h = H
    for x in XS:
        h = jnp.sin(h + x)
    close(module.apply({}, H, XS)[0], h)


def test_treescan_imports_no_flax() -> None:
    code = "import sys, treescan; treescan.lift(lambda v, r, c, x: ((c, x), {})); assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(treescan.__file__).parents[1])


# Errors.


class Wrong(NamedTuple):
    """A loop that raises: `build(scan)` is a module, called with inputs."""

    error: type[TreescanError]
    text: str
    build: Callable[[Any], nn.Module]
    inputs: tuple[Any, ...]


ERRORS: dict[str, Wrong] = {}


def wrong(error: type[TreescanError], text: str, *inputs: Any, **options: Any) -> Any:
    """A decorator for a body of a loop that raises an error with this text."""

    def add(body: Any) -> Any:
        def build(using: Any) -> nn.Module:
            def call(self: Any, *inputs: Any) -> Any:
                if "variable_carry" in options and "made" not in body.__name__:
                    self.variable("state", "n", lambda: jnp.float32(0))
                return using(body, **options)(self, *inputs)

            return from_function(call)

        ERRORS[body.__name__] = Wrong(error, text, build, inputs or (H, XS))
        return body

    return add


@wrong(
    CarryError,
    """`carry_dtype` (here) returned a carry that differs from the one it was given.

  leaf    given          returned
  carry   float32[2,3]   int32[2,3]   dtype

  carry: the step returned int32. Cast it back, `carry.astype(jnp.float32)`, or start from int32.
""",
)
def carry_dtype(self, h, x):
    return h.astype(jnp.int32), x


@wrong(
    CarryError,
    """`carry_shape` (here) returned a carry that differs from the one it was given.

  leaf    given          returned
  carry   float32[2,3]   float32[2,2,3]   rank: 2 -> 3

  carry: a carry keeps its shape. Start from an init of shape [2,2,3], or return [2,3].
""",
)
def carry_shape(self, h, x):
    return jnp.stack([h, h]), x


@wrong(
    CarryError,
    """`carry_structure` (here) returned a carry that differs from the one it was given.

  leaf         given          returned
  carry["a"]   float32[2,3]   (missing)
  carry["b"]   (not there)    float32[2,3]

  carry["a"]: return every part of the carry, changed or not.

  carry["b"]: the carry keeps its structure. Start from an init that has it, or return it in y.
""",
    {"a": H},
    XS,
)
def carry_structure(self, h, x):
    return {"b": h["a"]}, x


@wrong(
    CarryError,
    """`carried_collection_changes` (here) returned a carry that differs from the one it was given.

  leaf                      given       returned
  variables["state"]["n"]   float32[]   float32[2]   rank: 0 -> 1

  variables["state"]["n"]: a carry keeps its shape. Start from an init of shape [2], or return [].
""",
    variable_carry="state",
)
def carried_collection_changes(self, h, x):
    self.put_variable("state", "n", jnp.zeros(2))
    return h, x


@wrong(
    BodyError,
    """`made_inside` (here) created variables in a collection that is carried. A carry must exist before the first step.

  leaf                      before        after
  variables["state"]["n"]   (not there)   float32[]

  Create them before the loop: initialize the module of one step on its own. Or give the
  collection an axis, or broadcast it.
""",
    variable_carry="state",
)
def made_inside(self, h, x):
    self.variable("state", "n", lambda: jnp.float32(0))
    return h, x


@wrong(
    BodyError,
    """`broadcast_depends_on_x` (here) returned values that must be the same in every step, but they depend on values that may differ between steps: the carry, x, or keys that are split.

  leaf                       expected                 is
  variables["params"]["w"]   the same in every step   float32[]

  A broadcast value is computed once for all steps, from constants and from keys that are not split. Carry a value that changes, or give it an axis to stack along.
""",  # noqa: E501
    **SHARED,
)
def broadcast_depends_on_x(self, h, x):
    self.param("w", lambda key: jnp.sum(x))
    self.param("v", lambda key: jnp.ones(2))
    self.param("k", nn.initializers.normal(), (3,))
    return h * 2, x


@wrong(
    BodyError,
    """`broadcast_depends_on_the_carry` (here) returned values that must be the same in every step, but they depend on values that may differ between steps: the carry, x, or keys that are split.

  leaf                            expected                 is
  variables["params"]["w"]["a"]   the same in every step   float32[2,3]

  A broadcast value is computed once for all steps, from constants and from keys that are not split. Carry a value that changes, or give it an axis to stack along.
""",  # noqa: E501
    **SHARED,
)
def broadcast_depends_on_the_carry(self, h, x):
    self.param("w", lambda key: {"a": h + 1, "b": jnp.ones(2)})
    return h * 2, x


@wrong(
    BodyError,
    """`broadcast_depends_on_a_key_of_its_own` (here) returned values that must be the same in every step, but they depend on values that may differ between steps: the carry, x, or keys that are split.

  leaf                       expected                 is
  variables["params"]["w"]   the same in every step   float32[3]

  A broadcast value is computed once for all steps, from constants and from keys that are not split. Carry a value that changes, or give it an axis to stack along.
""",  # noqa: E501
    variable_broadcast="params",
    split_rngs={"params": True},
)
def broadcast_depends_on_a_key_of_its_own(self, h, x):
    self.param("w", nn.initializers.normal(), (3,))
    return h * 2, x


@wrong(
    BodyError,
    """`output_depends_on_x` (here) returned values that must be the same in every step, but they depend on values that may differ between steps: the carry, x, or keys that are split.

  leaf     expected                 is
  y["a"]   the same in every step   float32[2,3]

  A broadcast value is computed once for all steps, from constants and from keys that are not split. Carry a value that changes, or give it an axis to stack along.
""",  # noqa: E501
    out_axes={"a": nn.broadcast, "b": 0},
)
def output_depends_on_x(self, h, x):
    return h, {"a": x, "b": h}


@wrong(
    ArgumentError,
    """`flax.scan` over `lengths_differ` (here): the variables and arguments do not have the same number of steps.

  leaf      steps   is
  args[0]   5       float32[5,2,3]   axis 0
  args[1]   3       float32[3,2,3]   axis 0

  All variables and arguments are scanned together, and `length`, if given, must be their size. For
  fewer steps, slice what is scanned over.
""",
    H,
    XS,
    XS[:3],
)
def lengths_differ(self, h, x, more):
    return h, x


@wrong(
    ArgumentError,
    """`flax.scan` over `another_length` (here): `length` is 3, but what is scanned over has 5 steps.

  leaf      steps   is
  args[0]   5       float32[5,2,3]   axis 0

  All variables and arguments are scanned together, and `length`, if given, must be their size. For
  fewer steps, slice what is scanned over.
""",
    length=3,
)
def another_length(self, h, x):
    return h, x


@wrong(
    ArgumentError,
    """`flax.scan` over `ever` (here): the number of steps is unknown. No `length` is given, and what is scanned over holds no arrays.

  Pass `length=` for a loop without inputs, or arrays to scan over whose first axis is the steps.
""",  # noqa: E501
    H,
    None,
)
def ever(self, h, x):
    return h, x


@wrong(
    ArgumentError,
    """`flax.scan` over `no_such_axis` (here): `in_axes` names an axis that is not there.

  leaf      axis        is
  args[0]   in_axes 3   float32[5,2,3]   rank 3

  Axes count from 0, and negative axes count from the end. With None, every step receives the whole leaf.
""",
    in_axes=3,
)
def no_such_axis(self, h, x):
    return h, x


@wrong(
    ArgumentError,
    """`flax.scan` over `axes_of_another_structure` (here): `in_axes` is not a prefix of args: args[0] is float32[5,2,3], but it has dict of 1 there.

  Give one int for all leaves, or a prefix tree of args, in which one int may cover a whole
  subtree.
""",  # noqa: E501
    in_axes=({"a": 0},),
)
def axes_of_another_structure(self, h, x):
    return h, x


@wrong(
    ArgumentTypeError,
    """`flax.scan` over `axes_that_are_none` (here): `in_axes` must be ints or None, got 'x'.

  Give one for all leaves, or a prefix tree of them.
""",
    in_axes="x",
)
def axes_that_are_none(self, h, x):
    return h, x


@wrong(
    ArgumentError,
    """`flax.scan` over `no_such_axis_of_y` (here): `out_axes` names an axis that is not there.

  leaf   axis         is
  y      out_axes 4   float32[5,2,3]   rank 3

  Axes count from 0, and negative axes count from the end.
""",
    out_axes=4,
)
def no_such_axis_of_y(self, h, x):
    return h, x


@wrong(
    ArgumentTypeError,
    """`flax.scan` over `length_is_no_int` (here): `length` must be an int, got 3.0.

  Give the number of steps as an int of at least 0. `int(...)` converts a whole number.
""",
    length=3.0,
)
def length_is_no_int(self, h, x):
    return h, x


def text_of(name: str) -> str:
    with pytest.raises(ERRORS[name].error) as caught:
        ERRORS[name].build(scan).init(KEY, *ERRORS[name].inputs)
    assert type(caught.value) is ERRORS[name].error
    return re.sub(r"\(\S*test_flax_scan_options\.py:\d+\)", "(here)", str(caught.value))


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    assert text_of(name).split() == ERRORS[name].text.split()  # where lines break is tested elsewhere


@pytest.mark.parametrize("name", ["no_such_axis", "lengths_differ", "carry_dtype", "broadcast_depends_on_x"])
def test_flax_raises_there_too(name: str) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        ERRORS[name].build(nn.scan).init(KEY, *ERRORS[name].inputs)


@parametrize("returned", {"none": None, "three": (1.0, 2.0, 3.0), "scalar": 1.0})
def test_a_body_that_returns_no_pair(returned: Any) -> None:
    module = from_function(lambda self, h, xs: scan(lambda self, h, x: returned)(self, h, xs))
    with pytest.raises(BodyError):
        module.init(KEY, H, XS)


def test_what_the_body_raises_is_raised() -> None:
    def body(self: Any, h: Any, x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        from_function(lambda self, h, xs: scan(body)(self, h, xs)).init(KEY, H, XS)


def test_errors_of_classes_name_them() -> None:
    class Narrowing(nn.Module):
        @nn.compact
        def __call__(self, h: Any, x: Any) -> Any:
            return nn.Dense(2)(h), x

    with pytest.raises(CarryError, match=r"^`\S*Narrowing`.* returned a carry"):
        recurrent(scan, Narrowing).init(KEY, H, XS)


def test_save_with_outputs_that_are_returned_once() -> None:
    with pytest.raises(ArgumentError, match="`save` selects from stacked outputs"):
        recurrent(scan, Block, save="last", out_axes=nn.broadcast).init(KEY, H, XS)
