"""`check_finite="backward"` over layers: the layer, the block and the leaf of x are named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nonfinite import caught, gradient, halve, layer_plantings

import treescan

pytestmark = pytest.mark.quick

N, D = 5, 3
WAYS = ("grad", "jit", "vmap of grad", "grad of vmap", "disable_jit", "weight")
FORMS = ("scan_layers", "fold_layers", "pattern", "state", "state recomputed", "own", "remat", "save", "pattern remat")


def block(layer: Any, x: Any, *others: Any) -> Any:
    x = {**x, "h": halve(x["h"], layer["w"]) + x["same"].sum()}
    return x, *others, x["h"].sum()


def other(layer: Any, x: Any) -> Any:
    return {**x, "k": halve(x["k"], layer["v"]) + x["h"]}, x["h"]


def run(form: str, reverse: bool, check: Any, w: Any, s: Any) -> Any:
    """Layers [N, D] of weights, of which those that are NaN spoil the derivative of their layer."""
    x = {"h": jnp.ones(D) * s, "k": jnp.ones(D) * s, "same": jnp.ones(2)}
    options: dict[str, Any] = {"reverse": reverse, "check_finite": check}
    if "pattern" in form:  # layers 0, 2 and 4 are the first block's
        stacks = [{"w": w[0::2]}, {"v": w[1::2]}]
        options |= {"remat": ("step", None)} if "remat" in form else {}
        x, ys = treescan.scan_layers([block, other], x, stacks, **options)
        return (x["h"] ** 2).sum() + x["k"].sum() + ys[1].sum()
    if form.startswith("state"):
        remat = "step" if form == "state recomputed" else None
        x, _, ys = treescan.scan_layers(block, x, {"w": w}, state=jnp.zeros((N, 2)), remat=remat, **options)
    elif form == "own":
        x, ys = treescan.scan_layers(
            lambda layer, x, own: block({"w": layer["w"] * own}, x), x, {"w": jnp.ones((N, D))}, w, **options
        )
    elif form == "fold_layers":
        x, ys = treescan.fold_layers(lambda layer, x: block(layer, x)[0], x, {"w": w}, **options), s
    else:
        options |= {"remat": {"remat": "nested"}, "save": {"save": 2}}.get(form, {})
        x, ys = treescan.scan_layers(block, x, {"w": w}, **options)
    return (x["h"] ** 2).sum() + ys.sum()


def go(way: str, call: Any, w: Any) -> Any:
    return jax.grad(call)(w, jnp.float32(1)) if way == "weight" else gradient(way, call, w)


@pytest.mark.parametrize(
    ("form", "way", "layer", "rows", "reverse"), layer_plantings(54, 14, FORMS, WAYS, (N, D), (11,))
)
def test_a_layer_is_named(form: str, way: str, layer: int, rows: list[int], *, reverse: bool) -> None:
    w = jnp.ones((N, D)).at[layer, jnp.array(rows)].set(jnp.nan)
    text = caught(lambda: go(way, functools.partial(run, form, reverse, "backward"), w))
    named = f"row{'s' * (len(rows) > 1)} {' and '.join(', '.join(map(str, rows)).rsplit(', ', 1))}"
    second = "pattern" in form and layer % 2
    stack = f"layer {layer // 2} of `layers[{layer % 2}]`; " if "pattern" in form else ""
    leaf, name = ("k", "v") if second else ("h", "w")
    assert f'the cotangent of `x["{leaf}"]` became NaN in layer {layer} of {N} ({stack}{named}), which got it' in text
    if form == "pattern":
        assert f"`scan_layers` over `{'other' if second else 'block'}`" in text
    record = treescan.last_nonfinite()
    assert record is not None and record.unit == "layer" and record.backward
    assert (record.step, record.rows, record.steps) == (layer, tuple(rows), N)
    if form in ("scan_layers", "pattern", "state"):
        np.testing.assert_array_equal(record.x[0][name], w[layer])


@pytest.mark.parametrize(
    "form", [FORMS[2], *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form != FORMS[2])]
)
def test_gradients_are_those_without_it(form: str) -> None:
    w = 1 + jnp.arange(N * D, dtype=jnp.float32).reshape(N, D) / 9
    treescan.fold(lambda h, x: h, 1.0, jnp.ones(3), check_finite=True)
    before = treescan.last_nonfinite()
    plain, checked = (
        jax.jit(jax.grad(functools.partial(run, form, False, check), (0, 1)))(w, jnp.float32(0.7))
        for check in (False, "backward")
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), plain, checked)
    jax.effects_barrier()
    assert treescan.last_nonfinite() is before


def test_what_comes_from_the_result_is_no_layer() -> None:
    def loss(s: Any) -> Any:
        return jnp.sqrt(run("pattern", False, "backward", jnp.ones((N, D)), s) * 0)

    text = caught(lambda: jax.grad(loss)(jnp.float32(1)))
    assert "became NaN in layer 4 of 5 (layer 2 of `layers[0]`; rows 0, 1 and 2); it was so before that layer" in text


def test_forward_mode_is_refused() -> None:
    call = functools.partial(run, "scan_layers", False, "backward", jnp.ones((N, D)))
    with pytest.raises(treescan.ArgumentError, match="forward mode was asked for"):
        jax.jvp(call, (jnp.float32(1),), (jnp.float32(1),))
