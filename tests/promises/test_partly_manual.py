"""Every verb on a mesh whose axes are of different kinds, mostly in a `jax.shard_map` over one of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import compiled_and_derived, masked_by_hand
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treescan
from treescan._avals import types_of

pytestmark = pytest.mark.devices

STEPS, ROWS, WIDTH = 6, 4, 8
LENGTHS = np.array([3, 0, 6, 1])
MASK = np.arange(STEPS)[:, None] < LENGTHS
RESETS = np.arange(STEPS)[:, None] % np.array([2, 3, 4, 5]) == 1
ROWS_FIRST, STEPS_FIRST = P("stage"), P(None, "stage")


class Given(NamedTuple):
    """What every case reads. A device has its rows of it, or its steps, or its layers."""

    w: Any
    h: Any
    xs: Any
    lengths: Any
    mask: Any
    resets: Any


OF_ROWS = Given(P(), ROWS_FIRST, STEPS_FIRST, ROWS_FIRST, STEPS_FIRST, STEPS_FIRST)


OF_MODEL = Given(P(), P("model"), P(None, "model"), P("model"), P(None, "model"), P(None, "model"))


def given() -> Given:
    keys = jax.random.split(jax.random.key(0), 3)
    w, h, xs = (
        jax.random.normal(key, shape) / 2
        for key, shape in zip(keys, ((WIDTH, WIDTH), (ROWS, WIDTH), (STEPS, ROWS, WIDTH)), strict=True)
    )
    return Given(w, h, xs, LENGTHS, MASK, RESETS)


def mesh_of(other: Any = AxisType.Auto) -> Any:
    return jax.make_mesh((2, 4), ("stage", "model"), axis_types=(AxisType.Auto, other))


def cell(w: Any) -> Callable[[Any, Any], Any]:
    def body(h: Any, x: Any) -> Any:
        h = jnp.tanh(h @ w + x)
        return h, jnp.sin(h)

    return body


def linear(g: Given, **options: Any) -> Any:
    return treescan.linear_scan(jnp.tanh(g.xs @ g.w), g.xs, g.h, **options)


def until(g: Given, **options: Any) -> Any:
    """A condition over the rows of all devices."""
    body = cell(g.w)

    def step(c: Any, x: Any) -> Any:
        h, y = body(c[0], x)
        return (h, c[1] + 1), y

    taken = jnp.zeros_like(g.lengths, shape=())
    result = treescan.while_scan(lambda c: c[1] < STEPS - 1, step, (g.h, taken), g.xs, **options)
    return result[0][0], result.ys


def until_of_rows(g: Given, **options: Any) -> Any:
    body = cell(g.w)

    def step(c: Any, x: Any) -> Any:
        h, y = body(c[0], x)
        return (h, c[1] - 1), y

    result = treescan.while_scan(lambda c: c[1] > 0, step, (g.h, g.lengths), g.xs, **options)
    return result[0][0], result.ys


def counted(g: Given) -> Any:
    body = cell(g.w)
    steps = jnp.int32(STEPS - 1)
    return treescan.fori(0, steps, lambda i, h: body(h, g.xs[i])[0], g.h, max_length=STEPS), None


def block(w: Any, x: Any, h: Any) -> Any:
    return cell(w)(h, x)


def in_layers(g: Given, **options: Any) -> Any:
    return treescan.fold_layers(lambda x, h: block(g.w, x, h)[0], g.h, g.xs, **options), None


def of_all(g: Given) -> Any:
    return jax.lax.scan(cell(g.w), g.h, g.xs)


def of_all_but_one(g: Given) -> Any:
    h, ys = jax.lax.scan(cell(g.w), g.h, g.xs[:-1])
    return h, jnp.concatenate([ys, jnp.zeros_like(ys[:1])])


def of_valid(g: Given) -> Any:
    return masked_by_hand(cell(g.w), g.h, g.xs, g.mask)


def with_resets(g: Given) -> Any:
    def step(h: Any, fed: Any) -> Any:
        x, valid, reset = fed
        return masked_by_hand(cell(g.w), jnp.where((valid & reset)[:, None], g.h, h), x[None], valid[None])

    h, ys = jax.lax.scan(step, g.h, (g.xs, g.mask, g.resets))
    return h, ys[:, 0]


def of_recurrence(g: Given) -> Any:
    def step(h: Any, ab: Any) -> Any:
        h = ab[0] * h + ab[1]
        return h, h

    return jax.lax.scan(step, g.h, (jnp.tanh(g.xs @ g.w), g.xs))


def gated(h: Any, x: Any) -> Any:
    h = jnp.tanh(h + x)
    return h, h * x


def by_gates(g: Given) -> Any:
    return masked_by_hand(gated, g.h, g.xs, g.mask)


def mapped(g: Given) -> Any:
    return None, jnp.tanh(g.xs @ g.w)


def last_alone(pair: Any) -> Any:
    return pair[0], None


def slow(*values: Any, id: str) -> Any:
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def masked(g: Given, **options: Any) -> Any:
    return treescan.mask_scan(cell(g.w), g.h, g.xs, **options)


CASES = [
    slow(lambda g: treescan.scan(cell(g.w), g.h, g.xs, remat="step"), of_all, id="scan, remat of a step"),
    pytest.param(lambda g: treescan.scan(cell(g.w), g.h, g.xs, remat="nested"), of_all, id="scan, nested"),
    slow(lambda g: treescan.scan(cell(g.w), g.h, g.xs, remat="auto"), of_all, id="scan, auto"),
    slow(
        lambda g: last_alone(treescan.scan(cell(g.w), g.h, g.xs, save="last")),
        lambda g: last_alone(of_all(g)),
        id="last",
    ),
    slow(counted, lambda g: last_alone(of_all_but_one(g)), id="fori"),
    pytest.param(lambda g: masked(g, lengths=g.lengths), of_valid, id="mask_scan"),
    slow(lambda g: masked(g, mask=g.mask, chunk=2), of_valid, id="mask_scan, chunk"),
    pytest.param(lambda g: masked(g, lengths=g.lengths, compact=True), of_valid, id="mask_scan, compact"),
    slow(lambda g: masked(g, lengths=g.lengths, remat="nested"), of_valid, id="mask_scan, nested"),
    slow(lambda g: masked(g, lengths=g.lengths, resets=g.resets), with_resets, id="mask_scan, resets"),
    pytest.param(until, of_all_but_one, id="while_scan"),
    slow(until_of_rows, of_valid, id="while_scan, rows"),
    slow(lambda g: until_of_rows(g, compact=True), of_valid, id="while_scan, compact"),
    slow(lambda g: linear(g, method="sequential"), of_recurrence, id="linear_scan, sequential"),
    pytest.param(lambda g: linear(g, method="chunked"), of_recurrence, id="linear_scan, chunked"),
    slow(lambda g: linear(g, method="parallel"), of_recurrence, id="linear_scan, parallel"),
    pytest.param(lambda g: in_layers(g, remat="step"), lambda g: last_alone(of_all(g)), id="fold_layers"),
    slow(lambda g: in_layers(g, remat="nested"), lambda g: last_alone(of_all(g)), id="fold_layers, nested"),
    pytest.param(lambda g: (None, treescan.chunk_map(lambda x: jnp.tanh(x @ g.w), g.xs, 4)), mapped, id="chunk_map"),
]


def compare(
    run: Callable[[Given], Any],
    by_hand: Callable[[Given], Any],
    specs: tuple[Given, Any],
    other: Any = AxisType.Auto,
    *,
    check_vma: bool = True,
) -> None:
    mesh, arrays = mesh_of(other), given()
    in_specs, out_specs = specs
    local = jax.shard_map(
        lambda *each: run(Given(*each)),
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=out_specs,
        axis_names={"stage"},
        check_vma=check_vma,
    )
    split = arrays
    if other == AxisType.Auto:  # the compiler sums over the devices of `model` in each step
        split = arrays._replace(w=jax.device_put(arrays.w, NamedSharding(mesh, P("model"))))
    got = compiled_and_derived(local, *split)
    want = compiled_and_derived(lambda *each: by_hand(Given(*each)), *arrays)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("run", "by_hand"), CASES)
def test_the_other_axis_is_left_to_the_compiler(run: Any, by_hand: Any) -> None:
    compare(run, by_hand, (OF_ROWS, (ROWS_FIRST, STEPS_FIRST)))


@pytest.mark.slow
@pytest.mark.parametrize(("other", "check_vma"), [(AxisType.Explicit, True), (AxisType.Auto, False)])
@pytest.mark.parametrize(("run", "by_hand"), [case for case in CASES if "compact" not in str(case.id)])
def test_types_say_how_it_is_split_or_nothing(run: Any, by_hand: Any, other: Any, check_vma: bool) -> None:
    compare(run, by_hand, (OF_ROWS, (ROWS_FIRST, STEPS_FIRST)), other, check_vma=check_vma)


@pytest.mark.parametrize(
    "method", ["chunked", *(pytest.param(m, marks=pytest.mark.slow) for m in ("sequential", "parallel"))]
)
def test_steps_of_a_recurrence_over_devices(method: str) -> None:
    whole = Given(P(), P(), P("stage"), P(), P(), P())
    compare(
        lambda g: (None, linear(g, method=method, axis_name="stage")[1]),
        lambda g: (None, of_recurrence(g)[1]),
        (whole, (None, P("stage"))),
    )


@pytest.mark.parametrize("remat", ["step", pytest.param("nested", marks=pytest.mark.slow)])
def test_layers_of_a_stage_are_computed_again(remat: Any) -> None:
    """The micro-batches are the steps of xs, and the layers are the rows of h."""

    def layer(weights: Any, x: Any) -> Any:
        return x + jnp.tanh(x * weights[None])

    def stage(layers: Any, x: Any, first_layer: Any) -> Any:
        return treescan.fold_layers(layer, x, layers, remat=remat)

    def by_hand(g: Given) -> Any:
        return None, jax.vmap(lambda x: jax.lax.scan(lambda x, weights: (layer(weights, x), None), x, g.h)[0])(g.xs)

    specs = Given(P(), P("stage"), P(), P(), P(), P())
    compare(lambda g: (None, treescan.pipeline(stage, g.h, g.xs, axis_name="stage")), by_hand, (specs, (None, P())))


@pytest.mark.parametrize(
    ("run", "by_hand"),
    [
        pytest.param(lambda g: treescan.mask_scan(gated, g.h, g.xs, lengths=g.lengths), by_gates, id="mask_scan"),
        pytest.param(
            lambda g: treescan.chunk_map(lambda x: jnp.sum(jnp.tanh(x), axis=0), g.xs, 2, reduce="sum"),
            lambda g: jnp.sum(jnp.tanh(g.xs), axis=0),
            id="sum",
        ),
    ],
)
def test_types_say_how_rows_are_split_on_a_mesh_with_an_automatic_axis(run: Any, by_hand: Any) -> None:
    """Without a `shard_map`."""
    mesh, arrays = mesh_of(AxisType.Explicit), given()
    split = [jax.device_put(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(arrays, OF_MODEL, strict=True)]
    got = compiled_and_derived(lambda *each: run(Given(*each)), *split)
    want = compiled_and_derived(lambda *each: by_hand(Given(*each)), *arrays)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-4, atol=1e-3)


@pytest.mark.quick
@pytest.mark.parametrize("kinds", [("Auto", "Auto"), ("Auto", "Explicit"), ("Explicit", "Explicit")], ids="-".join)
@pytest.mark.parametrize("axes", [{"stage"}, {"stage", "model", "data"}], ids=["one", "all"])
def test_types_are_those_of_the_arrays(axes: set[str], kinds: tuple[str, str]) -> None:
    """`jax.eval_shape` leaves out the mesh, and how values are split, if some axis is automatic."""

    def local(x: Any) -> Any:
        def function(x: Any) -> Any:
            key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("stage"))
            return {"array": x[0] * 2, "same": jnp.ones(3), "key": key, "weak": jnp.sum(x) * 0 + 1.0}

        types = types_of(function, x)
        assert jax.tree.map(jax.typeof, types) == jax.tree.map(jax.typeof, function(x))
        assert types_of(lambda types: types, types) == types
        return x

    mesh = jax.make_mesh(
        (2, 2, 2), ("stage", "model", "data"), axis_types=tuple(getattr(AxisType, kind) for kind in ("Auto", *kinds))
    )
    spread = P(None, "data") if kinds[1] == "Explicit" and len(axes) == 1 else P()
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, spread))
    with jax.set_mesh(mesh):
        jax.eval_shape(jax.shard_map(local, in_specs=P("stage"), out_specs=P("stage"), axis_names=axes), x)


@pytest.mark.quick
def test_a_layer_that_does_not_fit_is_an_error() -> None:
    def local(stack: Any) -> Any:
        return treescan.set_layer(stack, 0, jnp.ones(3))

    run = jax.shard_map(local, mesh=mesh_of(), in_specs=P("stage"), out_specs=P("stage"), axis_names={"stage"})
    with pytest.raises(treescan.errors.LayerError, match=r"float32\[4\]\{V:stage\}   float32\[3\]"):
        jax.eval_shape(run, jnp.ones((8, 4)))
