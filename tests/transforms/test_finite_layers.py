"""`check_finite` over layers: the layer and the block are named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import caught, layer_plantings

import treescan

pytestmark = pytest.mark.quick

N, D = 5, 3
WAYS = ("eager", "jit", "grad", "vmap", "disable_jit")
FORMS = ("scan_layers", "fold_layers", "pattern", "state", "state recomputed", "own", "remat", "save")


def spoil(leaf: Any, w: Any) -> Any:
    return leaf * 0.5 + jnp.log(w)


def block(layer: Any, x: Any, *others: Any) -> Any:
    x = {**x, "h": spoil(x["h"], layer["w"])}
    return x, *others, x["h"].sum()


def other(layer: Any, x: Any) -> Any:
    return {**x, "h": x["h"] + jnp.sqrt(layer["v"])}, x["h"]


def run(form: str, reverse: bool, w: Any, h: Any, **options: Any) -> Any:
    """Layers [N, D] of weights, of which those that are negative go wrong."""
    x = {"h": jnp.ones(D) * h, "same": jnp.ones(2)}
    options = {"reverse": reverse, **options}
    if form == "pattern":  # layers 0, 2 and 4 are the first block's
        stacks = [{"w": w[0::2]}, {"v": w[1::2]}]
        return treescan.scan_layers([block, other], x, stacks, **options)[0]["h"]
    if form.startswith("state"):
        remat = "step" if form == "state recomputed" else None
        return treescan.scan_layers(block, x, {"w": w}, state=jnp.zeros((N, 2)), remat=remat, **options)[0]["h"]
    if form == "own":
        return treescan.scan_layers(
            lambda layer, x, own: block({"w": layer["w"] * own}, x), x, {"w": jnp.ones((N, D))}, w, **options
        )[0]["h"]
    if form == "fold_layers":
        return treescan.fold_layers(lambda layer, x: block(layer, x)[0], x, {"w": w}, **options)["h"]
    options |= {"remat": {"remat": "nested"}, "save": {"save": 2}}.get(form, {})
    return treescan.scan_layers(block, x, {"w": w}, **options)[0]["h"]


def go(way: str, call: Any, w: Any) -> Any:
    if way == "disable_jit":
        with jax.disable_jit():
            return call(w, 1.0)
    if way == "jit":
        return jax.jit(call)(w, 1.0)
    if way == "vmap":
        return jax.vmap(call, (None, 0))(w, jnp.ones(2))
    if way == "grad":
        return jax.grad(lambda h: call(w, h).sum())(1.0)
    return call(w, 1.0)


@pytest.mark.parametrize(
    ("form", "way", "layer", "rows", "reverse"), layer_plantings(40, 4, FORMS, WAYS, (N, D), range(2, 40, 20))
)
def test_a_layer_is_named(form: str, way: str, layer: int, rows: list[int], *, reverse: bool) -> None:
    w = jnp.ones((N, D)).at[layer, jnp.array(rows)].set(-1.0)
    call = functools.partial(run, form, reverse, check_finite=True)
    text = caught(lambda: go(way, call, w))
    named = f"row{'s' * (len(rows) > 1)} {' and '.join(', '.join(map(str, rows)).rsplit(', ', 1))}"
    second = form == "pattern" and layer % 2
    stack = f"layer {layer // 2} of `layers[{layer % 2}]`; " if form == "pattern" else ""
    operation, line = ("sqrt", other) if second else ("log", spoil)
    place = f"test_finite_layers.py:{line.__code__.co_firstlineno + 1}"
    assert f'`x["h"]` became NaN in layer {layer} of {N} ({stack}{named}), first in `{operation}` at' in text
    assert f"{place}; the carry before it was finite." in text
    if form == "pattern":
        assert f"`scan_layers` over `{'other' if second else 'block'}`" in text
    record = treescan.last_nonfinite()
    assert record is not None and record.unit == "layer"
    assert (record.step, record.rows, record.steps) == (layer, tuple(rows), N)
    if form in ("scan_layers", "pattern", "state"):
        again = (other if second else block)(record.x[0], record.carry, *record.x[1:])[0]
        assert np.flatnonzero(~np.isfinite(again["h"])).tolist() == rows


def test_a_parameter_that_is_nan_is_named() -> None:
    w = jnp.ones((N, D)).at[3, 1].set(jnp.nan)
    text = caught(
        lambda: treescan.scan_layers(lambda layer, x: (x + layer["w"], x), jnp.ones(D), {"w": w}, check_finite=True)
    )
    assert '`x` became NaN in layer 3 of 5 (row 1), which got it from `layer["w"]`' in text


@pytest.mark.parametrize(
    "form", [FORMS[2], *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form != FORMS[2])]
)
def test_results_and_gradients_are_those_without_it(form: str) -> None:
    def loss(w: Any, h: Any, *, on: bool) -> Any:
        return (jax.jit(functools.partial(run, form, False, check_finite=on))(w, h) ** 2).sum()

    w = 1 + jnp.arange(N * D, dtype=jnp.float32).reshape(N, D) / 9
    treescan.fold(lambda h, x: h, 1.0, jnp.ones(3), check_finite=True)
    before = treescan.last_nonfinite()
    plain, checked = (jax.value_and_grad(functools.partial(loss, on=on), (0, 1))(w, 0.7) for on in (False, True))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), plain, checked)
    jax.effects_barrier()
    assert treescan.last_nonfinite() is before


def test_off_is_the_same_program() -> None:
    def program(**options: Any) -> str:
        return str(jax.make_jaxpr(functools.partial(run, "pattern", False, **options))(jnp.ones((N, D)), 1.0))

    assert program() == program(check_finite=False)
