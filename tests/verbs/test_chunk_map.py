"""`chunk_map` against the function on all entries at once, against a Python loop, and against `jax.lax.map`."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bars import Recorder, steps_of
from by_hand import derived
from hlo import Program
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from loops import array
from oracle import assert_close
from thin import all_pairs, everyday
from traces import Counted, compilations

import treescan
from treescan import Remat, chunk_map

AXES = {"in_axes": ({"a": 0, "b": 1}, None), "out_axes": (0, -1)}


def outputs(xs):
    """Of entries along the second axis of `b`."""
    x, w = xs
    h = jnp.tanh(x["a"] @ w)
    return h, x["b"] * jnp.sum(h, axis=1)[None]


def masked_outputs(xs, *, valid):
    x, _ = xs
    assert valid.shape == x["a"].shape[:1]
    return outputs(xs)


def total(xs, valid=None):
    x, w = xs
    h = jnp.tanh(x["a"] @ w) * x["b"].T
    return {"sum": jnp.sum(h if valid is None else jnp.where(valid[:, None], h, 0)), "w": jnp.cos(w)}


def total_of_all(xs):
    return total(xs)


def by_hand(xs, size):
    """The sum over chunks, one after the other."""
    x, w = xs
    n = len(x["a"])
    parts = [total(({"a": x["a"][i : i + size], "b": x["b"][:, i : i + size]}, w)) for i in range(0, n, size)]
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


def inputs(n):
    return {"a": array(n, 3, seed=1), "b": array(4, n, seed=2)}, array(3, 4, seed=3)


def mapped(function, *args):
    return jax.vmap(function)(*jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), args))


MODES = {
    "eager": lambda f, *args: f(*args),
    "vmap of grad": lambda f, *args: mapped(functools.partial(derived, f), *args),
    "jvp": lambda f, *args: jax.jvp(f, args, args),
    "grad": derived,
    "vmap": mapped,
    "grad of grad": lambda f, *args: derived(lambda *args: derived(f, *args)[1], *args),
}
CASES = everyday(all_pairs(list(itertools.product(MODES, (False, True), (7, 6, 2)))))


@pytest.mark.parametrize(("mode", "masked", "n"), CASES)
def test_is_the_function_on_all_entries(mode, masked, n):
    f = masked_outputs if masked else outputs
    got, expected = (
        jax.jit(functools.partial(MODES[mode], run)) for run in (lambda xs: chunk_map(f, xs, 3, **AXES), outputs)
    )
    assert_close(got(inputs(n)), expected(inputs(n)))


@pytest.mark.parametrize(("mode", "masked", "n"), CASES)
def test_sums(mode, masked, n):
    f, options = total if masked else total_of_all, {"in_axes": AXES["in_axes"], "reduce": "sum"}
    runs = (lambda xs: chunk_map(f, xs, 3, **options), lambda xs: by_hand(xs, 3))
    got, expected = (jax.jit(functools.partial(MODES[mode], run)) for run in runs)
    assert_close(got(inputs(n)), expected(inputs(n)))


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 9), st.integers(1, 11), st.booleans())
def test_any_number_and_size(n, size, masked):
    xs = np.arange(2 * n, dtype=np.int32).reshape(n, 2)

    def square(x, valid=None):
        assert (valid is None) is not masked and 0 < len(x) <= size
        return x * x, x[:, :1]

    def add(x, valid=None):
        return jnp.sum(x if valid is None else jnp.where(valid[:, None], x, 0))

    def called(f):
        return (lambda x, valid: f(x, valid)) if masked else (lambda x: f(x))

    with jax.disable_jit():
        got = chunk_map(called(square), xs, size), chunk_map(called(add), xs, size, reduce="sum")
    assert_close(jax.tree.map(np.asarray, got), ((xs * xs, xs[:, :1]), np.sum(xs, dtype=xs.dtype)))


def test_copies_of_an_entry_are_the_padding():
    """Not zeros: their logarithm would spoil the gradient of what all chunks share."""

    def log(x, w, valid):
        return jnp.sum(jnp.where(valid, jnp.log(x) * w, 0))

    def run(x, w):
        return chunk_map(lambda x, valid: log(x, w, valid), x, 3, reduce="sum")

    x = 1 + jnp.arange(4.0)
    got, expected = jax.grad(run, (0, 1))(x, 2.0), jax.grad(lambda x, w: jnp.sum(jnp.log(x) * w), (0, 1))(x, 2.0)
    assert_close(got, expected)


PLANS = [None, "step", "nested", Remat(levels=3), Remat("everything_saveable", levels=2), Remat.fit(100_000)]


@pytest.mark.parametrize(("remat", "reduce"), everyday([(plan, reduce) for plan in PLANS for reduce in ("sum", None)]))
def test_plans_of_memory_change_nothing(remat, reduce):
    def plain(xs):
        x, w = xs
        h = jnp.tanh(x @ w)
        return h if reduce is None else jnp.sum(h.reshape(-1, 2, 4), axis=0)

    def run(xs):
        x, w = xs
        return chunk_map(lambda x: jnp.tanh(x @ w), x, 2, remat=remat, reduce=reduce)

    xs = array(40, 3, seed=1), array(3, 4, seed=3)
    assert_close(*(jax.jit(functools.partial(derived, f))(xs) for f in (run, plain)))


def test_other_leaves():
    """Keys, functions and numbers in xs, and keys among the results."""

    def draw(xs):
        h = jax.vmap(jax.random.normal)(xs["keys"]) * xs["scale"]
        return {"h": xs["f"](h), "next": xs["keys"], "n": jnp.ones(xs["keys"].shape, jnp.int8)}

    xs = {"keys": jax.random.split(jax.random.key(0), 5), "scale": 2.0, "f": jnp.sin}
    assert_close(chunk_map(draw, xs, 2, in_axes={"keys": 0, "scale": None, "f": None}), draw(xs))


def test_entries_of_no_numbers():
    assert chunk_map(jnp.sin, jnp.zeros((5, 0, 2)), 2).shape == (5, 0, 2)


def test_numbers_and_nothing():
    assert_close(chunk_map(lambda x: (2.0, 1), jnp.ones(5), 2, reduce="sum"), (jnp.array(6.0), jnp.array(3)))
    assert chunk_map(lambda x: None, jnp.ones(5), 2) is None


@pytest.mark.parametrize(
    ("n", "size", "masked", "traces"), [(6, 3, False, 1), (7, 3, False, 2), (7, 3, True, 1), (2, 3, False, 1)]
)
@pytest.mark.parametrize("reduce", [None, "sum"])
def test_traces(n, size, masked, traces, reduce):
    def body(x, valid=None):
        return jnp.sum(x) if reduce else jnp.sin(x)

    counted = Counted(body if masked else lambda x: body(x))
    run = jax.jit(jax.grad(lambda x: jnp.sum(chunk_map(counted.body, x, size, reduce=reduce))))
    xs = jnp.ones(n)
    assert counted.traces(lambda _: run(xs)) == traces
    chunk_map(counted.body, xs, size, reduce=reduce)
    assert compilations(lambda: chunk_map(counted.body, xs, size, reduce=reduce)) == []


def test_progress_counts_chunks():
    progress = treescan.meters.Progress("map", updates=3, meter=Recorder())
    assert steps_of(lambda: chunk_map(jnp.sin, jnp.ones(7), 2, progress=progress)) == (3, [1, 2, 3])


# A loss over a vocabulary

TOKENS, FEATURES, VOCABULARY = 4000, 64, 1000
LOGITS, WEIGHTS, HIDDEN = 4 * TOKENS * VOCABULARY, 4 * FEATURES * VOCABULARY, 4 * TOKENS * FEATURES


def cross_entropy(h, targets, w):
    logits = h @ w
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0])


def in_chunks(h, targets, w, size=500, **options):
    return chunk_map(lambda x: cross_entropy(*x, w), (h, targets), size, reduce="sum", **options)


def by_lax_map(h, targets, w, size=500):
    cut = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (h, targets))
    return jnp.sum(jax.lax.map(jax.checkpoint(lambda x: cross_entropy(*x, w), prevent_cse=False), cut))


def fused(h, targets, w):
    """The loss and the weights' gradient in one pass: no gradient of the loop is taken."""
    return chunk_map(lambda x: jax.value_and_grad(cross_entropy, 2)(*x, w), (h, targets), 500, reduce="sum")


def temporaries(function):
    types = jax.ShapeDtypeStruct((TOKENS, FEATURES), "f4"), jax.ShapeDtypeStruct((TOKENS,), "i4")
    return Program(function, *types, jax.ShapeDtypeStruct((FEATURES, VOCABULARY), "f4")).temp_bytes


def of_gradient(function, **options):
    return temporaries(jax.value_and_grad(functools.partial(function, **options), (0, 2)))


def test_memory_of_a_vocabulary():
    """Without chunks two arrays of logits; with eight chunks, two of a chunk's."""
    whole, hand, ours = map(of_gradient, (cross_entropy, by_lax_map, in_chunks))
    assert whole > 1.9 * LOGITS
    assert ours <= 1.01 * hand
    assert ours < 2.1 * LOGITS / 8 + WEIGHTS
    assert of_gradient(in_chunks, remat=None) > LOGITS  # which the default does not save
    assert temporaries(fused) < 2.1 * LOGITS / 8 + WEIGHTS


def test_memory_of_a_remainder():
    """Its logits are alive at most beside those of one chunk. To cut the hidden states in two copies them."""
    assert of_gradient(in_chunks, size=600) < 2.1 * LOGITS * (600 + 400) / 4000 + WEIGHTS + 2.4 * HIDDEN


# A batch that devices share


def shared(kind, shape, spec):
    """Hidden states, targets and weights of a batch [B, T] on a mesh."""
    mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(getattr(AxisType, kind),) * len(shape))
    of_batch, whole = NamedSharding(mesh, P(spec)), NamedSharding(mesh, P())
    targets = jnp.arange(40 * 13).reshape(40, 13) % 24
    given = array(40, 13, 48, seed=1), targets, array(48, 24, seed=2)
    return tuple(jax.device_put(x, place) for x, place in zip(given, (of_batch, of_batch, whole), strict=True))


def of_tokens(h, targets, w, masked=False):
    """The loss, and an output of each entry, over [B * T]; 8 of 520 entries are left over."""
    xs = h.reshape(-1, 48), targets.reshape(-1)

    def padded(x, valid):
        return jnp.sum(jnp.where(valid[:, None], jnp.tanh(x[0] @ w), 0))

    if masked:
        return chunk_map(padded, xs, 64, reduce="sum")
    tops = chunk_map(lambda x: jnp.sin(x[0] @ w), xs, 64)
    return in_chunks(*xs, w, size=64) + jnp.sum(tops * jnp.arange(520.0)[:, None])


@pytest.mark.devices
@pytest.mark.parametrize(
    ("shape", "spec", "masked"), [((8,), "a", True), ((4, 2), ("a", "b"), False), ((4, 2), "a", False)]
)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_devices_share_each_chunk(kind, shape, spec, masked):
    """Each multiplies its own share of the rows, and exchanges nothing but sums."""
    gradient = jax.value_and_grad(functools.partial(of_tokens, masked=masked), (0, 2))
    given = shared(kind, shape, spec)
    expected = jax.jit(gradient)(*jax.tree.map(np.asarray, given))
    assert_close(jax.tree.map(np.asarray, jax.jit(gradient)(*given)), expected)
    program = Program(gradient, *given)
    rows = {int(n) for line in program for n in re.findall(r"= f32\[(\d+),(?:24|48)\]\S* dot\(", line)}
    shards = 4 if spec == "a" and len(shape) == 2 else 8
    assert rows - {24, 48} <= {64 // shards, 8 // shards}  # those are rows of the gradient of the weights
    assert not re.search(r"\b(all-gather|all-to-all|collective-permute)", "\n".join(program))


@pytest.mark.devices
def test_which_entries_are_valid_is_shared_as_the_entries_are():
    """As those of the leaf that is split over devices, wherever it is among the others."""
    seen = []

    def total(xs, valid):
        seen.append(jax.typeof(valid))
        return jnp.sum(jnp.where(valid, xs["split"], 0))

    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    parts = {"not split": P(), "split": P("a"), "whole": P()}
    xs = {name: jax.device_put(jnp.arange(72.0), NamedSharding(mesh, spec)) for name, spec in parts.items()}
    assert jax.jit(lambda xs: chunk_map(total, xs, 64, reduce="sum"))(xs) == sum(range(72))
    assert {aval.sharding.spec for aval in seen} == {P("a")}


@pytest.mark.devices
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_memory_of_a_batch_that_devices_share(kind):
    """Not more than a strided loop by hand takes; all rows of a chunk on each device take four times as much."""

    def micro(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    def by_hand(w, x):
        parts = jnp.moveaxis(x.reshape(64, 8, 64), 1, 0)
        return jax.lax.scan(lambda total, x: (total + micro(w, x), None), jnp.zeros_like(w), parts)[0]

    def ours(w, x):
        return chunk_map(functools.partial(micro, w), x, 64, reduce="sum")

    mesh = jax.make_mesh((8,), ("a",), axis_types=(getattr(AxisType, kind),))
    types = (
        jax.ShapeDtypeStruct(s, "f4", sharding=NamedSharding(mesh, P(a)))
        for s, a in [((64, 64), None), ((512, 64), "a")]
    )
    types = tuple(types)
    assert Program(ours, *types).temp_bytes <= Program(by_hand, *types).temp_bytes


@pytest.mark.devices
def test_devices_that_no_type_names():
    """What `in_shardings` alone splits has a type without a mesh."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    w, split = jnp.ones((48, 24)), NamedSharding(mesh, P("a"))
    run = jax.jit(lambda x: chunk_map(lambda x: jnp.tanh(x @ w), x, 64), in_shardings=split)
    assert Program(run, jnp.ones((512, 48))).collectives() == 0


@pytest.mark.devices
def test_entries_follow_each_other_within_shard_map():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(lambda x: chunk_map(jnp.cumsum, x, 16), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    assert_close(run(jnp.ones(256)), jnp.tile(jnp.arange(1.0, 17), 16))
