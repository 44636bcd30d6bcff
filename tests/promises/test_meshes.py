"""Arrays that are spread over the devices of a mesh, Explicit or Auto, whether the mesh is set or not.

Each verb with each option equals the same on one device, in values and gradients: the cells of `works` that are on
meshes. What these examples do not have follows by hand.
"""

import functools
import re
import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Program
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from works import table
from works.meshes import FEATURES, MESHES, ROWS
from works.table import Cell

import treescan

pytestmark = pytest.mark.devices

SHARE = 128  # one cell in so many is for every day


def cells(verb: str) -> list[Cell]:
    """Verbs without rows have one split: of features alone."""
    forms = [(), *((form,) for form in table.VERBS[verb].forms)]
    names = [name for name in MESHES if verb == "mask_scan" or name.endswith(", features")]
    if jax.__version_info__ < (
        0,
        9,
    ):  # it refuses such an init, in its own words, and makes no Explicit mesh by default
        names = [name for name in names if "plain init" not in name]
    return [Cell(verb, form, name) for form in forms for name in names]


def wrong(cells: list[Cell]) -> dict[str, str]:
    """What differs from one device, and is not refused there too; `compact` is refused on an Explicit mesh."""
    found = table.wrong(cells)
    for cell in map(str, cells):
        if "compact" in cell and "Explicit" in cell:
            assert found.pop(cell).startswith("ArgumentError: `mask_scan` over `step`: `compact` sorts the rows")
        if re.fullmatch("accumulate: save=None: Explicit mesh(, plain init)?, features", cell):
            # No result depends on an array, and JAX does not compile zeros of an array's type.
            assert found.pop(cell, WITHOUT_RESULTS).startswith(WITHOUT_RESULTS)
    return found


WITHOUT_RESULTS = "FOREIGN ValueError: Length of device assignment 1"


@pytest.mark.parametrize("verb", table.VERBS)
def test_a_share_of_the_cells(verb: str) -> None:
    assert not wrong([cell for cell in cells(verb) if table.share(cell, SHARE)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "name"), dict.fromkeys((cell.verb, cell.transform) for v in table.VERBS for cell in cells(v))
)
def test_all_cells(verb: str, name: str) -> None:
    assert not wrong([cell for cell in cells(verb) if cell.transform == name])


# What the cells do not have.

STEPS = 5
LENGTHS = np.array([4, 2, 0])
RNG = np.random.default_rng(0)
GIVEN = {
    "h": jnp.asarray(RNG.uniform(0.5, 1, (ROWS, FEATURES)), jnp.float32),
    "a": jnp.asarray(RNG.uniform(0.5, 1, (STEPS, ROWS, FEATURES)), jnp.float32),
    "w": jnp.asarray(RNG.uniform(0.5, 1, (1, FEATURES)), jnp.float32),
}


def of_rows(numbers: Any, given: dict[str, jax.Array]) -> jax.Array:
    """Numbers of rows, [B] or [T, B], that are sharded as the rows of what is given."""
    like = jnp.zeros_like(given["h"] if np.ndim(numbers) == 1 else given["a"])
    return jnp.asarray(numbers, jnp.int32) + jnp.sum(like, -1).astype(jnp.int32)


def cell(given: dict[str, jax.Array], h: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(h * jnp.broadcast_to(given["w"], h.shape)) + jnp.log(x)


def padded(given: dict[str, jax.Array]) -> jax.Array:
    valid = (np.arange(STEPS)[:, None] < LENGTHS)[..., None]
    return jnp.where(np.broadcast_to(valid, given["a"].shape), given["a"], jnp.nan)


def bodies(given: dict[str, jax.Array]) -> Any:
    return lambda h, x: (cell(given, h, x), h * h)


def two_axes_of_rows(given: Any) -> Any:
    init, xs = given["h"], padded(given)
    lengths = np.stack([LENGTHS, LENGTHS[::-1]], 1)
    return treescan.mask_scan(lambda h, x: (jnp.sin(h) + x, h), init, jnp.nan_to_num(xs), lengths=jnp.asarray(lengths))


def rows_that_stop(given: Any, **options: Any) -> Any:
    steps = of_rows(LENGTHS, given)

    def body(carry: Any, x: jax.Array) -> Any:
        h, n = carry
        return (cell(given, h, x), n + 1), h * h

    init = given["h"], jnp.zeros_like(steps)
    ended = treescan.while_scan(lambda carry: carry[1] < steps, body, init, given["a"], **options)
    return ended.carry, ended.ys


SEQUENCES = [jnp.full((n, FEATURES), 0.5 + n / 8, jnp.float32) for n in (3, 2, 2, 1, 4)]


def packed_rows(given: Any, *, split: str = "data", **options: Any) -> Any:
    """A packed batch, each sequence with its own init, of which the data alone is spread, or its mask and flags too."""
    own = [jnp.full(FEATURES, 0.1 * n, jnp.float32) for n in range(len(SEQUENCES))] if split == "data" else None
    packed = treescan.pack(SEQUENCES, rows=ROWS, init=own)
    like = {**given, "a": given["a"][: packed.data.shape[0]]}
    packed = packed._replace(data=packed.data * like["a"])
    if split == "all":
        mask, resets = (of_rows(np.asarray(flags, np.int32), like) > 0 for flags in (packed.mask, packed.resets))
        packed = packed._replace(mask=mask, resets=resets)
    return treescan.mask_scan(bodies(given), given["h"], packed, **options)


RUNS = {
    "two axes of rows": two_axes_of_rows,
    "rows that stop": rows_that_stop,
    "rows that stop, reverse, save": functools.partial(rows_that_stop, reverse=True, save="last"),
    "packed": packed_rows,
    "packed, all of it, reverse": functools.partial(packed_rows, split="all", reverse=True),
    "packed, all of it, save, check": functools.partial(packed_rows, split="all", save="last", check_finite=True),
}


def runs() -> list[Any]:
    """Each on each kind of mesh, set or not, in one split each. Every third is for every day, on one mesh."""
    names, params = list(MESHES), []
    for place, run in enumerate(RUNS):
        for kind in range(4):
            name = names[kind * 3 + (place + kind) % 3]
            marks = () if kind == place // 3 and place % 3 == 0 else pytest.mark.slow
            params.append(pytest.param(RUNS[run], name, id=f"{run}-{name}", marks=marks))
    return params


@pytest.mark.parametrize(("run", "name"), runs())
def test_by_hand(run: Any, name: str) -> None:
    if "packed_rows" in repr(run) and name.startswith("Explicit mesh, set") and jax.__version_info__ < (0, 10):
        pytest.skip("before 0.10, JAX does not differentiate what is inside of `jax.sharding.auto_axes` there")
    on_mesh, on_one = MESHES[name]
    leaves = lambda given: jax.tree.leaves(run(given))  # noqa: E731
    want = jax.jit(functools.partial(on_one, leaves))(GIVEN)
    chex.assert_tree_all_finite(want)
    chex.assert_trees_all_close(jax.device_get(on_mesh(leaves, GIVEN)), jax.device_get(want), rtol=2e-5, atol=1e-6)


# What devices exchange, and what they hold.

DEVICES, LONG, BATCH, WIDTH = 8, 16, 64, 32


def step(h: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(h * 0.5 + x)


def pair(h: jax.Array, x: jax.Array) -> Any:
    return step(h, x), h


def counted(carry: Any, x: jax.Array) -> Any:
    return (step(carry[0], x), carry[1] + 1), None


WAYS: dict[str, Any] = {
    "lengths": lambda h, xs, n: treescan.fold(step, h, xs, lengths=n),
    "reverse": lambda h, xs, n: treescan.fold(step, h, xs, lengths=n, reverse=True),
    "outputs": lambda h, xs, n: treescan.mask_scan(pair, h, xs, lengths=n),
    "mask": lambda h, xs, n: treescan.mask_scan(pair, h, xs, mask=jnp.arange(LONG)[:, None] < n[None]),
    "resets": lambda h, xs, n: treescan.mask_scan(
        pair, h, xs, lengths=n, resets=jnp.arange(LONG)[:, None] == n[None] - 2
    ),
    "chunk=0": lambda h, xs, n: treescan.mask_scan(pair, h, xs, lengths=n, chunk=0),
    "shared leaf": lambda h, xs, n: treescan.mask_scan(counted, (h, 0), xs, lengths=n, row_axes={"carry": (0, None)})[
        0
    ][0],
    "rows that stop": lambda h, xs, n: treescan.while_scan(
        lambda carry: carry[1] < n, counted, (h, jnp.zeros_like(n)), xs
    ).carry[0],
}


def types_on(kind: str, *, batch: int, width: int, dtype: Any = jnp.float32) -> list[Any]:
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(getattr(AxisType, kind),))
    shapes = (
        ((batch, width), jnp.float32, P("d")),
        ((LONG, batch, width), dtype, P(None, "d")),
        ((batch,), jnp.int32, P("d")),
    )
    return [jax.ShapeDtypeStruct(shape, of, sharding=NamedSharding(mesh, spec)) for shape, of, spec in shapes]


def total(function: Any) -> Any:
    return jax.grad(lambda *args: sum(map(jnp.sum, jax.tree.leaves(function(*args)))), argnums=(0, 1))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("way", WAYS)
def test_devices_exchange_one_row_and_no_step_of_the_batch(way: str, kind: str) -> None:
    forward, gradient = (
        Program(function, *types_on(kind, batch=BATCH, width=WIDTH)).collective_sizes()
        for function in (WAYS[way], total(WAYS[way]))
    )
    assert WIDTH in gradient  # a row without any step is shown another's
    assert max(*forward, *gradient) == WIDTH < BATCH


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_devices_hold_no_more_than_by_hand(kind: str) -> None:
    """Of a batch in bfloat16, as in training; XLA's CPU backend computes in float32."""
    types = types_on(kind, batch=512, width=512, dtype=jnp.bfloat16)

    def by_hand(h: jax.Array, xs: jax.Array, lengths: jax.Array) -> jax.Array:
        def masked(h: jax.Array, x: Any) -> Any:
            return jnp.where((x[0] < lengths)[:, None], step(h, x[1]), h), None

        return jax.lax.scan(masked, h, (jnp.arange(xs.shape[0]), xs.astype(jnp.float32)))[0]

    def mine(h: jax.Array, xs: jax.Array, lengths: jax.Array) -> jax.Array:
        return treescan.fold(lambda h, x: step(h, x.astype(jnp.float32)), h, xs, lengths=lengths)

    for derived in (lambda function: function, total):
        assert Program(derived(mine), *types).temp_bytes <= 1.1 * Program(derived(by_hand), *types).temp_bytes


def counted_rows(h: jax.Array, xs: jax.Array, n: jax.Array, **options: Any) -> Any:
    """Rows that stop after their own steps."""
    body = lambda c, x: ((step(c[0], x), c[1] + 1, c[2]), c[0])  # noqa: E731
    ended = treescan.while_scan(lambda carry: carry[1] < carry[2], body, (h, 0 * n, n), xs, **options)
    return ended.carry[0], ended.ys


VERBS: dict[str, Any] = {
    "scan": lambda h, xs, n, **o: treescan.scan(pair, h, xs, **o),
    "lengths": lambda h, xs, n, **o: treescan.mask_scan(pair, h, xs, lengths=n, **o),
    "mask": lambda h, xs, n, **o: treescan.mask_scan(pair, h, xs, mask=jnp.arange(STEPS)[:, None] < n[None], **o),
    "layers": lambda h, xs, n, **o: treescan.fold_layers(lambda layer, h: step(h, layer), h, xs, **o),
    "rows that stop": counted_rows,
}
CHECKS: list[dict[str, Any]] = [{}, {"check_finite": True}]
MAPPED: list[tuple[str, dict[str, Any]]] = [(verb, options) for options in CHECKS for verb in VERBS]
MAPPED.append(("scan", {"progress": treescan.meters.Progress(meter=treescan.meters.Text())}))


@pytest.mark.parametrize("kind", ["Explicit", pytest.param("Auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("verb", "options"), [pytest.param(*each, marks=[pytest.mark.slow] * bool(each[1])) for each in MAPPED]
)
def test_any_verb_may_be_mapped_over_a_sharded_axis(verb: str, options: dict[str, Any], kind: str) -> None:
    """What the library adds to the state names the mesh, for JAX cannot map what names none."""

    def both(*given: Any) -> Any:
        def loss(h: jax.Array, xs: jax.Array, n: jax.Array) -> tuple[jax.Array, Any]:
            results = VERBS[verb](h, xs, n, **options)
            return sum((jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(results)), start=jnp.float32(0)), results

        return jax.vmap(jax.grad(loss, argnums=(0, 1), has_aux=True))(*given)

    # Four elements, one for each device. One has no valid step, and borrows from another.
    xs = RNG.uniform(0.5, 1, (4, STEPS, ROWS, FEATURES)).astype(np.float32)
    given = xs[:, 0] / 2, xs, np.array([[5, 1, 0], [0, 0, 0], [2, 2, 2], [3, 0, 1]], np.int32)
    split = NamedSharding(jax.make_mesh((4,), ("d",), axis_types=(getattr(AxisType, kind),)), P("d"))
    want, got = (jax.device_get(jax.jit(both)(*each)) for each in (given, jax.device_put(given, split)))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-6)


GOES_WRONG = """
import jax, jax.numpy as jnp, numpy as np, treescan
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
h, xs = np.zeros((4, 3), np.float32), np.ones((4, 5, 3), np.float32)
xs[2, 3, 1] = np.nan
fold = jax.vmap(lambda h, xs: treescan.fold(lambda h, x: jnp.tanh(h + x), h, xs, check_finite=True))
jax.block_until_ready(jax.jit(fold)(*(jax.device_put(leaf, NamedSharding(mesh, P("d"))) for leaf in (h, xs))))
"""


@pytest.mark.slow
def test_an_element_that_goes_wrong_is_reported_from_its_device() -> None:
    """In a process of its own: JAX raises the error of a program on several devices wherever it is waited for again."""
    ran = subprocess.run([sys.executable, "-c", GOES_WRONG], capture_output=True, text=True, check=False)
    assert "`h` became NaN in step 3 of 5 (row 1), which got it from `x`" in ran.stderr


@pytest.mark.parametrize("names", [("d",), ("d", "e")])
@pytest.mark.parametrize("use", [lambda w, h: h @ w, lambda w, h: h + w[jnp.arange(8) % 3].sum(0, keepdims=True)])
def test_a_checked_step_may_read_weights_that_name_no_mesh(use: Any, names: tuple[str, ...]) -> None:
    """JAX gives no type to the cotangents that tell where a NaN comes from, of such weights and of gathers."""

    @jax.jit
    def run(w: Any, h: Any, xs: Any) -> Any:
        return treescan.fold(lambda h, x: jnp.log(use(w, h) + x), h, xs, check_finite="return")[1]

    def says(*given: Any) -> str:
        with pytest.raises(treescan.errors.NonFiniteError) as caught:
            run(*given).check()
        return str(caught.value)

    given = np.eye(8, dtype=np.float32), np.ones((8, 8), np.float32), np.ones((5, 8, 8), np.float32)
    given[2][3, 2, 1] = -9
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)
    spread = (
        jax.device_put(x, NamedSharding(mesh, P(*lead, *names)))
        for x, lead in zip(given[1:], [(), (None,)], strict=True)
    )
    assert says(given[0], *spread) == says(*given)


# --- a body that says itself how what it computes is spread -----------------------------------------------------------


def spread_rows(w: Any, h: Any, x: Any) -> Any:
    replicated = P(None, None)
    return jnp.tanh(jax.sharding.reshard(jax.sharding.reshard(h, P("d", None)) @ w, replicated) + x)


def spread_weights(w: Any, h: Any, x: Any) -> Any:
    replicated = P(None, None)
    return jnp.tanh(jax.sharding.reshard(h * jax.sharding.reshard(w[:1], P(None, "d")), replicated) + x)


def left_to_xla(w: Any, h: Any, x: Any) -> Any:
    product = jax.sharding.auto_axes(lambda h, w: h @ w, out_sharding=P(None, None))
    return jnp.tanh(product(h, w) + x)


SPREADING: dict[str, Any] = {
    "auto": lambda step, h, xs: treescan.scan(step, h, xs, remat="auto"),
    "segments": lambda step, h, xs: treescan.scan(step, h, xs, remat=treescan.Remat("everything_saveable", chunk=6)),
    "mask": lambda step, h, xs: treescan.mask_scan(step, h, xs, lengths=np.full(8, 36)),
    "while": lambda step, h, xs: treescan.while_scan(lambda h: h[:, 0] < 9, step, h, xs),
    "finite": lambda step, h, xs: treescan.scan(step, h, xs, check_finite=True),
}


@pytest.mark.parametrize("body", [spread_rows, spread_weights, left_to_xla])
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=() if name in ("auto", "mask") else pytest.mark.slow) for name, run in SPREADING.items()],
)
def test_a_body_may_spread_what_it_computes(run: Any, body: Any) -> None:
    """Its arguments are replicated, and so is what it returns: the types of a step's arguments do not tell."""
    if body is left_to_xla and run in (SPREADING["mask"], SPREADING["while"]) and jax.__version_info__ < (0, 10):
        pytest.skip("this release of JAX fails on the gradient of a branch with auto_axes")
    rng = np.random.default_rng(0)
    w, h, xs = (jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32) for shape in ((16, 16), (8, 16), (36, 8, 16)))

    def gradients(run: Any) -> Any:
        def loss(w: Any, h: Any, xs: Any) -> Any:
            return jnp.sum(run(lambda h, x: (body(w, h, x), None), h, xs)[0] ** 2)

        return jax.grad(loss, (0, 1, 2))(w, h, xs)

    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w, h, xs = (jax.device_put(leaf, NamedSharding(mesh, P())) for leaf in (w, h, xs))
        chex.assert_trees_all_close(gradients(run), gradients(jax.lax.scan), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("verb", ["mask", "while"])
def test_a_body_may_map_over_a_mesh_itself(verb: str) -> None:
    """The names of that mesh mean something within alone: they are no axes over which the loop is mapped."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    rows = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    all_rows = rows(lambda w, h: jnp.tanh(h @ w) + jax.lax.pmean(h, "d") * jax.lax.axis_index("d").astype(h.dtype))
    rng = np.random.default_rng(0)
    w, h, xs = (jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32) for shape in ((4, 4), (8, 4), (48, 8, 4)))

    def gradient(run: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(run(lambda h, x: (0.5 * all_rows(w, h) + x, None), h, xs)[0] ** 2)

        return jax.jit(jax.grad(loss))(w)

    runs = {**SPREADING, "mask": functools.partial(treescan.mask_scan, lengths=np.full(8, 48))}
    chex.assert_trees_all_close(gradient(runs[verb]), gradient(jax.lax.scan), rtol=1e-4, atol=1e-6)


def test_a_product_that_gathers_rows_is_left_in_its_step():
    """`out_sharding` is the sharding of one step's result: the product of many steps would be left spread."""

    def body(p: Any, h: Any, x: Any) -> Any:
        rows = jnp.dot(jnp.tanh(x), p["early"], out_sharding=P(None, None))
        h = jnp.tanh(jnp.tanh(rows) @ p["later"] + h @ p["state"])
        return h, h

    def gradient(scan: Any) -> Any:
        return jax.jit(jax.grad(lambda p: jnp.sum(scan(functools.partial(body, p), h, xs)[1] ** 2)))(weights)

    rng = np.random.default_rng(0)
    numbers = lambda *shape: jnp.asarray(0.1 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        weights = {name: jax.device_put(numbers(64, 64), P()) for name in ("early", "later", "state")}
        h, xs = jax.device_put(numbers(32, 64), P()), jax.device_put(numbers(64, 32, 64), P(None, "d", None))
        ours = gradient(functools.partial(treescan.scan, remat="auto"))
        chex.assert_trees_all_close(ours, gradient(jax.lax.scan), rtol=1e-4, atol=1e-6)


def _totals(x: jax.Array, **options: Any) -> jax.Array:
    return treescan.scan(lambda h, x: (h + x, None), jnp.zeros((16, 3)), x, **options)[0]


@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("options", [{}, {"unroll": 2}, {"remat": "step"}, {"save": "last"}], ids=str)
def test_an_init_that_names_no_mesh_takes_the_sharding_that_the_step_returns(options: Any, is_jitted: bool) -> None:
    if jax.__version_info__ < (0, 9) and {"remat", "save"} & options.keys():
        pytest.skip("JAX 0.8 refuses such an init once more, in its own words; it makes no Explicit mesh by default")
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    xs = jax.device_put(jnp.arange(240.0).reshape(5, 16, 3), NamedSharding(mesh, P(None, "d")))

    def by_hand(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, x: (h + x, None), jnp.zeros((16, 3)), x)[0]

    mine, its = functools.partial(_totals, **options), by_hand
    mine, its = (jax.jit(mine), jax.jit(its)) if is_jitted else (mine, its)
    assert jax.typeof(mine(xs)) == jax.typeof(its(xs))
    chex.assert_trees_all_equal(jax.device_get(mine(xs)), jax.device_get(its(xs)))
    with jax.set_mesh(mesh), pytest.raises(treescan.errors.CarryError, match="a carry keeps its sharding"):
        jax.jit(lambda x: treescan.fold(lambda h, x: h + x, jnp.zeros((16, 3)), x))(xs)


def test_a_carry_may_come_back_on_another_mesh_that_no_type_names() -> None:
    """Where axes are Auto, types tell the meshes apart, but nothing depends on them."""
    one, other = (jax.make_mesh((8,), (name,), axis_types=(AxisType.Auto,)) for name in "ab")
    h = jax.device_put(jnp.zeros(8), NamedSharding(one, P("a")))
    xs = jax.device_put(jnp.arange(24.0).reshape(3, 8), NamedSharding(other, P(None, "b")))

    def last_of(scan: Any) -> Any:
        return jax.jit(lambda h, xs: scan(lambda h, x: (x, h), h, xs))(h, xs)

    mine, its = last_of(treescan.scan), last_of(jax.lax.scan)
    chex.assert_trees_all_equal(jax.device_get(mine), jax.device_get(its))


def _step_of_rows(h: Any, x: Any, **_: Any) -> Any:
    return jnp.tanh(h + x), h


def _first_of_rows(h: Any, x: Any, *, first: Any) -> Any:
    return jnp.tanh(h + jnp.where(first[:, None], 0.5, x)), h


WHILE_FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": (_step_of_rows, {}),
    "rows": (_step_of_rows, {}),
    "last": (_step_of_rows, {"save": "last"}),
    "reverse": (_step_of_rows, {"reverse": True, "fill": 2.0}),
    "finite": (_step_of_rows, {"check_finite": True}),
    "remat": (_step_of_rows, {"remat": treescan.Remat(chunk=2), "save": 4}),
    "first": (_first_of_rows, {}),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX 0.8 refuses such an init in its own words")
@pytest.mark.parametrize("rewrites", [True, False])
@pytest.mark.parametrize("form", WHILE_FORMS)
def test_what_rows_stop_by_follows_the_sharding_that_the_step_returns(form: str, rewrites: bool) -> None:
    """The init names no mesh, and none is set."""
    body, options = WHILE_FORMS[form]

    def goes_on(h: Any) -> Any:
        return jnp.any(h.sum(-1) < 2.0) if form == "one" else h.sum(-1) < 2.0

    def results(h: Any, xs: Any) -> Any:
        result = treescan.while_scan(goes_on, body, h, xs, **options)
        loss = jnp.sum(jnp.sin(result.carry)) + jnp.sum(jnp.cos(result.ys))
        return loss, result

    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    h, xs = jnp.zeros((16, 3)), jnp.linspace(0.0, 1.0, 12 * 16 * 3).reshape(12, 16, 3)
    spread = jax.device_put(xs, NamedSharding(mesh, P(None, "d")))
    with treescan.rewriting(rewrites):
        program = jax.jit(jax.value_and_grad(results, (0, 1), has_aux=True))
        got, want = program(h, spread), program(h, xs)
    assert got[0][1].steps.sharding.spec == (P() if form == "one" else P("d"))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), rtol=1e-5, atol=1e-6)
