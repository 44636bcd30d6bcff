"""`pipeline` on eight devices: values and gradients are those of all layers on one device, for each micro-batch."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from oracle import as_numpy

import treescan
from treescan import from_stages, pipeline, to_stages

pytestmark = [pytest.mark.devices, pytest.mark.quick]

STAGES, COUNT, ROWS, WIDTH, LAYERS = 4, 8, 4, 8, 16
KEY = jax.random.key(0)
XS = jax.random.normal(jax.random.key(1), (COUNT, ROWS, WIDTH))
HOLDS, ROWS_SPLIT = P("stage"), P(None, "data")


def init(key: Any) -> dict[str, Any]:
    up, down = jax.random.normal(key, (2, WIDTH, WIDTH)) / WIDTH**0.5
    return {"up": up, "down": down}


LAYERS_OF_ALL = treescan.init_layers(init, KEY, LAYERS)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def norm(x: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))  # without an eps: a NaN, of zeros, in the gradient


def block(layer: Any, x: Any) -> Any:
    return x + jnp.tanh(norm(x) @ layer["up"]) @ layer["down"]


def dropping(layer: Any, x: Any, *, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.8, (1, WIDTH))
    return x + jnp.tanh(norm(x) @ layer["up"]) @ layer["down"] * kept.astype(x.dtype)


def stage(params: Any, x: Any, first_layer: Any) -> Any:
    return treescan.fold_layers(block, x, params)


def with_keys(params: Any, x: Any, first_layer: Any) -> Any:
    return treescan.fold_layers(dropping, x, params, key=KEY, offset=first_layer)


def mesh_of(kind: Any = AxisType.Auto, other: str = "data") -> Any:
    return jax.make_mesh((2, STAGES), (other, "stage"), axis_types=(kind, kind))


def over(
    stage: Any,
    rounds: int = 1,
    kind: Any = AxisType.Auto,
    mesh: Any = None,
    in_specs: Any = (HOLDS, ROWS_SPLIT),
    out_specs: Any = ROWS_SPLIT,
    **options: Any,
) -> Callable[..., Any]:
    """A pipeline over the layers in their own order."""
    mesh = mesh or mesh_of(kind)
    run = functools.partial(pipeline, stage, axis_name="stage", rounds=rounds)
    on_devices = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    return lambda layers, xs: on_devices(to_stages(layers, mesh.shape["stage"], rounds), xs)


def in_turn(layers: Any, xs: Any, stage: Any = stage) -> Any:
    """All layers on one device."""
    return jax.lax.map(lambda x: stage(layers, x, 0), xs)


def loss(run: Callable[..., Any], *given: Any) -> Any:
    ys = run(*given)
    return jnp.sum(ys * jnp.cos(ys))


def both(run: Callable[..., Any]) -> Callable[..., Any]:
    """The results, and all gradients."""
    places = (0, 1)
    return lambda *given: (run(*given), jax.grad(functools.partial(loss, run), places)(*given))


def assert_same(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for mine, other in zip(got, want, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        mine, other = as_numpy(mine), as_numpy(other)
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance * max(1, np.abs(other).max(initial=0)))


EXPECTED = functools.cache(lambda stage: jax.jit(both(functools.partial(in_turn, stage=stage)))(LAYERS_OF_ALL, XS))


def gradients_in_order(own: Any, kind: Any, rounds: int, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    """As `both`, of layers and micro-batches that are on their devices, with the gradient in the order of the stack."""
    mesh = mesh_of(kind)
    layers = jax.device_put(to_stages(LAYERS_OF_ALL, STAGES, rounds), NamedSharding(mesh, HOLDS))
    xs = jax.device_put(XS, NamedSharding(mesh, ROWS_SPLIT))
    run = functools.partial(pipeline, own, axis_name="stage", rounds=rounds)
    over_devices = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    ys, (of_layers, of_xs) = jax.jit(both(over_devices))(layers, xs)
    return jax.device_get((ys, (from_stages(of_layers, STAGES, rounds), of_xs)))


@pytest.mark.parametrize("rounds", [1, 2, slow(4)])
@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
@pytest.mark.parametrize("own", [slow(stage), with_keys])
def test_it_is_all_layers_on_each_micro_batch(own: Any, kind: Any, rounds: int) -> None:
    got = gradients_in_order(own, kind, rounds, (HOLDS, ROWS_SPLIT), ROWS_SPLIT)
    assert_same(got, EXPECTED(own))


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
@pytest.mark.parametrize("rounds", [slow(1), 2])
def test_other_axes_may_be_left_to_the_compiler(rounds: int, kind: Any) -> None:
    got = gradients_in_order(with_keys, kind, rounds, (HOLDS, P()), P(), axis_names={"stage"})
    assert_same(got, EXPECTED(with_keys))


@pytest.mark.parametrize("rounds", [1, slow(2)])
@pytest.mark.parametrize("checks", [True, slow(False)])
def test_tensor_parallel_within_a_stage(rounds: int, checks: bool) -> None:
    def parallel(layer: Any, x: Any) -> Any:
        return x + jax.lax.psum(jnp.tanh(norm(x) @ layer["up"]) @ layer["down"], "model")

    def own(params: Any, x: Any, first_layer: Any) -> Any:
        return treescan.fold_layers(parallel, x, params)

    specs = {"up": P("stage", None, "model"), "down": P("stage", "model")}
    mesh = mesh_of(other="model")
    run = over(own, rounds, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=checks)
    assert_same(jax.jit(both(run))(LAYERS_OF_ALL, XS), EXPECTED(stage))


@pytest.mark.parametrize("rounds", [slow(1), 2])
def test_weights_that_are_gathered_within_a_stage(rounds: int) -> None:
    def gathering(layer: Any, x: Any) -> Any:
        return block(jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "data", tiled=True), layer), x)

    def own(params: Any, x: Any, first_layer: Any) -> Any:
        return treescan.fold_layers(gathering, x, params, remat="step")

    run = over(own, rounds, in_specs=(P("stage", "data"), ROWS_SPLIT))
    assert_same(jax.jit(both(run))(LAYERS_OF_ALL, XS), EXPECTED(stage))


REMATS = ["step", "nested", treescan.Remat(policy=jax.checkpoint_policies.dots_saveable)]


@pytest.mark.slow
@pytest.mark.parametrize("remat", REMATS)
def test_layers_may_be_recomputed_too(remat: Any) -> None:
    def own(params: Any, x: Any, first_layer: Any) -> Any:
        return treescan.fold_layers(block, x, params, remat=remat)

    assert_same(jax.jit(both(over(own)))(LAYERS_OF_ALL, XS), EXPECTED(stage))


@pytest.mark.slow
def test_chunks_of_rows_within_a_stage() -> None:
    def in_chunks(layer: Any, x: Any) -> Any:
        return treescan.chunk_map(functools.partial(block, layer), x, 1)

    def own(params: Any, x: Any, first_layer: Any) -> Any:
        return treescan.fold_layers(in_chunks, x, params)

    assert_same(jax.jit(both(over(own)))(LAYERS_OF_ALL, XS), EXPECTED(stage))


@pytest.mark.slow
def test_without_types_of_what_varies() -> None:
    assert_same(jax.jit(both(over(with_keys, 2, check_vma=False)))(LAYERS_OF_ALL, XS), EXPECTED(with_keys))


def by_hand(layers: Any, xs: Any) -> Any:
    """What one writes first. The bubble runs layers on zeros."""
    here = jax.lax.axis_index("stage")
    pairs = [(i, (i + 1) % STAGES) for i in range(STAGES)]

    def varying(leaf: Any) -> Any:
        return jax.lax.pcast(leaf, ("data", "stage"), to="varying")

    def tick(arrived: Any, x: Any) -> tuple[Any, Any]:
        y = treescan.fold_layers(block, jnp.where(here == 0, x, arrived), layers)
        return jax.lax.ppermute(y, "stage", pairs), y

    fed = jax.lax.pcast(jnp.concatenate([xs, jnp.zeros_like(xs[: STAGES - 1])]), "stage", to="varying")
    _, ys = treescan.scan(tick, varying(jnp.zeros(xs.shape[1:])), fed)
    return jax.lax.psum(jnp.where(here == STAGES - 1, ys[STAGES - 1 :], 0), "stage")


def test_nothing_of_the_bubble_reaches_a_gradient() -> None:
    """A norm without an eps has a NaN as its derivative at zero: by hand, it is in the gradient of the weights."""
    over_devices = jax.shard_map(by_hand, mesh=mesh_of(), in_specs=(HOLDS, ROWS_SPLIT), out_specs=ROWS_SPLIT)
    value, (of_layers, _) = jax.jit(both(over_devices))(LAYERS_OF_ALL, XS)
    assert_same(value, EXPECTED(stage)[0])
    assert np.isnan(of_layers["up"]).any()
    with jax.debug_nans(True):
        assert_same(jax.jit(both(over(stage)))(LAYERS_OF_ALL, XS), EXPECTED(stage))


@pytest.mark.slow
def test_checkify_finds_nothing_in_the_bubble() -> None:
    """With `check_vma=False`: JAX 0.10 does not type any loop under checkify in a `shard_map` otherwise."""
    run = jax.jit(checkify.checkify(over(stage, check_vma=False), errors=checkify.float_checks))
    error, ys = run(LAYERS_OF_ALL, XS)
    assert error.get() is None
    assert_same(ys, EXPECTED(stage)[0])


@pytest.mark.parametrize("count", [1, slow(3)])
def test_fewer_micro_batches_than_stages(count: int) -> None:
    assert_same(
        jax.jit(both(over(stage)))(LAYERS_OF_ALL, XS[:count]), jax.jit(both(in_turn))(LAYERS_OF_ALL, XS[:count])
    )


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_one_stage(rounds: int) -> None:
    mesh = jax.make_mesh((1,), ("stage",), axis_types=(AxisType.Auto,))
    run = over(stage, rounds, mesh=mesh, in_specs=(HOLDS, P()), out_specs=P())
    assert_same(jax.jit(both(run))(LAYERS_OF_ALL, XS), EXPECTED(stage))


# Transformations of JAX


TANGENTS = jax.tree.map(jnp.cos, (LAYERS_OF_ALL, XS))
SEVERAL = (jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), LAYERS_OF_ALL), jnp.stack([XS, XS + 0.1]))


def derivatives(run: Any) -> Any:
    of_loss = functools.partial(loss, run)
    return lambda *given: jax.jvp(jax.grad(of_loss, (0, 1)), given, TANGENTS)


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda run: lambda *given: jax.jvp(run, given, TANGENTS),
    "jvp of grad": derivatives,
    "grad of jvp": lambda run: (
        lambda *given: jax.grad(lambda *given: jax.jvp(functools.partial(loss, run), given, TANGENTS)[1], (0, 1))(
            *given
        )
    ),
    "vmap of grad": lambda run: lambda *_: jax.vmap(both(run))(*SEVERAL),
    "grad of vmap of jit": lambda run: (
        lambda *_: jax.grad(lambda *given: jnp.sum(jax.vmap(jax.jit(functools.partial(loss, run)))(*given)), (0, 1))(
            *SEVERAL
        )
    ),
    "grad of vmap of jit, of layers": lambda run: (
        lambda _, xs: jax.grad(
            lambda layers: jnp.sum(jax.vmap(jax.jit(functools.partial(loss, run)), (0, None))(layers, xs))
        )(SEVERAL[0])
    ),
}


def skip_before_0_9() -> None:
    if jax.__version_info__ < (0, 9):
        pytest.skip("JAX 0.8 does not map a `psum` of what varies")


@pytest.mark.parametrize("rounds", [1, slow(2)])
@pytest.mark.parametrize("how", ["jvp of grad", *map(slow, TRANSFORMED)])
def test_transformed(how: str, rounds: int) -> None:
    if "vmap" in how:
        skip_before_0_9()
    got, want = (jax.jit(TRANSFORMED[how](run))(LAYERS_OF_ALL, XS) for run in (over(stage, rounds), in_turn))
    assert_same(got, want, 1e-4)


@pytest.mark.slow
def test_mapped_within_the_shard_map() -> None:
    skip_before_0_9()

    def own(layers: Any, xs: Any) -> Any:
        return jax.vmap(lambda xs: pipeline(stage, layers, xs, axis_name="stage"))(xs)

    spec = P(None, None, "data")
    over_devices = jax.shard_map(own, mesh=mesh_of(), in_specs=(HOLDS, spec), out_specs=spec)
    want = jax.jit(both(jax.vmap(in_turn, (None, 0))))(LAYERS_OF_ALL, SEVERAL[1])
    assert_same(jax.jit(both(over_devices))(LAYERS_OF_ALL, SEVERAL[1]), want)


@pytest.mark.slow
def test_a_gradient_that_each_device_takes() -> None:
    def own(layers: Any, xs: Any) -> Any:
        layers = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), layers)
        run = functools.partial(pipeline, stage, axis_name="stage")
        return jax.lax.psum(jax.grad(functools.partial(loss, run))(layers, xs), "data")

    over_devices = jax.shard_map(own, mesh=mesh_of(), in_specs=(HOLDS, ROWS_SPLIT), out_specs=HOLDS)
    assert_same(jax.jit(over_devices)(LAYERS_OF_ALL, XS), EXPECTED(stage)[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, False])
def test_eagerly_and_without_jit(jit: bool) -> None:
    with jax.disable_jit(not jit):
        assert_same(over(with_keys, 2)(LAYERS_OF_ALL, XS[:4]), EXPECTED(with_keys)[0][:4])


# What travels


@pytest.mark.parametrize("rounds", [1, slow(2)])
def test_a_micro_batch_is_any_tree(rounds: int) -> None:
    """Whole numbers, flags, keys and no entries at all come through all stages; a block may change them."""

    def tree_block(layer: Any, x: Any, scale: Any, act: Any, power: int) -> Any:
        x = dict(x)
        x["key"], own = jax.random.split(x["key"])
        kept = jax.random.bernoulli(own, 0.8, (1, WIDTH)).astype(jnp.float32)
        size = jnp.where(x["flag"], 1.0, 0.5) * (x["segments"] % 3).astype(jnp.float32)[:, None] ** power
        x["h"] = x["h"] + act(norm(x["h"]) @ layer["up"]) * kept * size * scale
        return {**x, "segments": x["segments"] + 1}

    def own(params: Any, x: Any, first_layer: Any, *args: Any) -> Any:
        return treescan.fold_layers(tree_block, x, params, args=args)

    others = {
        "segments": jnp.arange(COUNT * ROWS).reshape(COUNT, ROWS) % 3,
        "flag": jnp.arange(COUNT) % 2 == 0,
        "key": jax.random.split(KEY, COUNT),
        "empty": jnp.zeros((COUNT, 0)),
    }

    def each(layers: Any, h: Any, scale: Any) -> Any:
        return jax.lax.map(lambda x: own(layers, x, 0, scale, jnp.tanh, 2), {"h": h, **others})

    def on_device(layers: Any, xs: Any, scale: Any) -> Any:
        return pipeline(own, layers, xs, axis_name="stage", rounds=rounds, args=(scale, jnp.tanh, 2))

    mesh = jax.make_mesh((STAGES,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:STAGES])
    over_devices = jax.shard_map(on_device, mesh=mesh, in_specs=(HOLDS, P(), P()), out_specs=P())

    def run(layers: Any, h: Any, scale: Any) -> Any:
        return over_devices(to_stages(layers, STAGES, rounds), {"h": h, **others}, scale)

    def with_gradients(run: Any) -> Any:
        def of(*given: Any) -> Any:
            ys = run(*given)
            return {**ys, "key": jax.random.key_data(ys["key"])}, jax.grad(
                lambda *given: jnp.sum(jnp.cos(run(*given)["h"])), (0, 1, 2)
            )(*given)

        layers = {**LAYERS_OF_ALL, "empty": jnp.zeros((LAYERS, 0))}
        return jax.jit(of)(layers, XS, jnp.float32(0.05))

    assert_same(with_gradients(run), with_gradients(each))


def test_a_device_that_waits_runs_nothing() -> None:
    """Each group of rows comes once past each stage of each round."""
    ran = list[int]()

    def told(params: Any, x: Any, first_layer: Any) -> Any:
        jax.debug.callback(lambda first: ran.append(int(first)), first_layer)
        return x * params.sum()

    jax.block_until_ready(over(told, 2, check_vma=False)(jnp.ones(LAYERS), XS))
    jax.effects_barrier()
    assert Counter(ran) == dict.fromkeys(range(0, LAYERS, 2), 2 * COUNT)


def test_a_number_may_be_that_of_all_layers() -> None:
    def scaled(params: Any, x: Any, first_layer: Any) -> Any:
        return x * params["w"].sum() * params["scale"]

    in_specs = ({"w": HOLDS, "scale": P()}, ROWS_SPLIT)
    ys = over(scaled, in_specs=in_specs)({"w": jnp.ones(STAGES), "scale": 2.0}, XS)
    assert_same(ys, XS * 2**STAGES)


def test_layers_are_numbered_as_in_the_stack() -> None:
    numbers = {"i": jnp.arange(LAYERS)}

    def own(params: Any, x: Any, first_layer: Any) -> Any:
        right = jnp.all(params["i"] == first_layer + jnp.arange(len(params["i"])))
        return jnp.where(right, 2 * x + params["i"][0].astype(x.dtype), jnp.nan)

    for rounds in (1, 2):
        want = jnp.asarray([1.0, 2.0])
        for first in range(0, LAYERS, LAYERS // (STAGES * rounds)):
            want = 2 * want + first
        run = over(own, rounds, in_specs=(HOLDS, P()), out_specs=P(), check_vma=False)
        assert_same(jax.jit(run)(numbers, jnp.asarray([[1.0, 2.0]] * COUNT)), jnp.stack([want] * COUNT))


@pytest.mark.slow
def test_where_jax_counts_in_64_bits() -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # of numbers of layers, in `fold_layers`
        want = jax.jit(functools.partial(in_turn, stage=with_keys))(LAYERS_OF_ALL, XS)
        assert_same(jax.jit(over(with_keys, 2))(LAYERS_OF_ALL, XS), want)


def test_a_stage_is_traced_once() -> None:
    traces = []

    def own(params: Any, x: Any, first_layer: Any) -> Any:
        traces.append(1)
        return stage(params, x, first_layer)

    jax.jit(both(over(own, 2))).lower(LAYERS_OF_ALL, XS)
    assert len(traces) == 2  # the value and the gradient are two calls


def test_annotations_are_checked() -> None:
    from jaxtyping import Array, Float

    def own(params: Any, x: Float[Array, "rows 3"], first_layer: Any) -> Any:
        return x

    with pytest.raises(treescan.errors.SignatureError, match=r"x +Float\[Array, .rows 3.\]"):
        jax.jit(over(own)).lower(LAYERS_OF_ALL, XS)


@pytest.mark.slow
def test_lengths_that_devices_share_may_mask_a_loop_within_a_stage() -> None:
    """The chunks of such a loop are chosen without asking other devices; those of lengths that vary are refused."""
    lengths = np.arange(ROWS // 2) % 3

    def masked(layer: Any, x: Any) -> Any:
        steps = jnp.stack([x @ layer["up"]] * 3)
        return x + treescan.mask_scan(lambda h, x: (jnp.tanh(h + x), None), x, steps, lengths=lengths)[0]

    def own(params: Any, x: Any, first_layer: Any) -> Any:
        return treescan.fold_layers(masked, x, params)

    def each(layers: Any, xs: Any) -> Any:
        halves = xs.reshape(COUNT, 2, ROWS // 2, WIDTH)
        return jax.vmap(lambda xs: in_turn(layers, xs, own), 1, 1)(halves).reshape(XS.shape)

    assert_same(jax.jit(both(over(own)))(LAYERS_OF_ALL, XS), jax.jit(both(each))(LAYERS_OF_ALL, XS))
