"""What `treescan.integrations.flax.scan` has beside what flax's has: options, carries, and errors about the body."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import broadcast
from flax_models import MODELS, XS, H, from_function, recurrent

from treescan.errors import ArgumentError, ArgumentTypeError, BodyError, CarryError
from treescan.integrations.flax import scan

KEY = jax.random.key(0)
SHARED = {"variable_broadcast": "params", "split_rngs": {"params": False}}


def close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def test_stacked_variables_are_saved_whatever_save_says() -> None:
    module = MODELS["sown_in_time"].build(lambda *args, **options: scan(*args, save=None, **options))
    (_, ys), made = module.apply(module.init(KEY, H, XS), H, XS, mutable=["intermediates"])
    assert ys is None
    assert made["intermediates"]["ScanSowing_0"]["norm"][0].shape == (5,)


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


# Errors.


def carry_dtype(self, h, x):
    return h.astype(jnp.int32), x


def made_inside(self, h, x):
    self.variable("state", "n", lambda: jnp.float32(0))
    return h, x


def broadcast_depends_on_x(self, h, x):
    self.param("w", lambda key: jnp.sum(x))
    self.param("v", lambda key: jnp.ones(2))
    self.param("k", nn.initializers.normal(), (3,))
    return h * 2, x


def broadcast_depends_on_a_key_of_its_own(self, h, x):
    self.param("w", nn.initializers.normal(), (3,))
    return h * 2, x


def lengths_differ(self, h, x, more):
    return h, x


GOLDEN = Path(__file__).parent / "golden"
ERRORS = {  # one of each kind: the texts of the others are those of `treescan.lifting.lift`, which runs the same loop
    carry_dtype: (CarryError, {}),
    made_inside: (BodyError, {"variable_carry": "state"}),
    broadcast_depends_on_x: (BodyError, SHARED),
    broadcast_depends_on_a_key_of_its_own: (BodyError, {**SHARED, "split_rngs": {"params": True}}),
    lengths_differ: (ArgumentError, {}),
}


@pytest.mark.parametrize("body", ERRORS)
def test_errors(body: Any) -> None:
    error, options = ERRORS[body]
    module = from_function(lambda self, *inputs: scan(body, **options)(self, *inputs))
    with pytest.raises(error) as caught:
        module.init(KEY, H, XS, *[XS[:3]] * (body is lengths_differ))
    assert type(caught.value) is error
    text = re.sub(r"\(\S*test_flax_scan_options\.py:\d+\)", "(here)", str(caught.value))
    assert (
        text.split() == (GOLDEN / f"{body.__name__}.txt").read_text().split()
    )  # where lines break is tested elsewhere


def test_a_body_that_returns_no_pair() -> None:
    module = from_function(lambda self, h, xs: scan(lambda self, h, x: (h, x, h))(self, h, xs))
    with pytest.raises(BodyError, match=r"must return a pair \(carry, y\), but returned tuple of 3"):
        module.init(KEY, H, XS)


def test_errors_of_classes_name_them() -> None:
    class Narrowing(nn.Module):
        @nn.compact
        def __call__(self, h: Any, x: Any) -> Any:
            return nn.Dense(2)(h), x

    with pytest.raises(CarryError, match=r"^`\S*Narrowing`.* returned a carry"):
        recurrent(scan, Narrowing).init(KEY, H, XS)


def test_lengths_are_taken_by_others() -> None:
    given: Any = {"lengths": jnp.array([3, 2])}
    with pytest.raises(ArgumentTypeError, match=r"`treescan.integrations.flax.RNN\(cell\)\(xs, seq_lengths=...\)`"):
        scan(nn.GRUCell, **given)


def test_an_option_that_is_misspelt_is_refused() -> None:
    misspelt: Any = {"variables_broadcast": "params"}
    with pytest.raises(ArgumentTypeError, match="Did you mean `variable_broadcast`"):
        scan(nn.GRUCell, **misspelt)
