"""`save` against stacking everything and slicing afterwards; and what it saves: memory, and the making of outputs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import array, loss_of
from oracle import assert_close
from thin import all_pairs, everyday, slow
from works import plain

import treescan
from treescan import Remat
from treescan._trace.equations import jaxprs_within
from treescan.carries import ema

SAVES = {
    "all": "all",
    "last": "last",
    "none": None,
    "each": 1,
    "third": 3,
    "beyond": 100,
    "tree": {"a": 2, "b": ("last", None)},
    "two sizes": {"a": 2, "b": (3, "all")},
    "with all": {"a": "all", "b": ("last", 5)},
}


def body(carry, x):
    h = jnp.sin(carry["h"] * carry["w"] + x["u"])
    return {"h": h, "w": carry["w"]}, {"a": h * x["u"], "b": (jnp.sum(jnp.cos(h)), x["i"])}


def arguments(steps):
    xs = {"u": array(steps, 2, seed=3), "i": jnp.arange(steps, dtype=jnp.int32)}
    return {"h": array(2, seed=1), "w": 1 + array(2, seed=2)}, xs


def kept(ys, save, *, reverse=False):
    """What `save` stands for, from the outputs of all steps; nothing is moved by other axes."""

    def of(keep, leaf):
        if keep == "last":
            return leaf[0 if reverse else -1] if len(leaf) else jnp.zeros(leaf.shape[1:], leaf.dtype)
        return leaf if keep == "all" else leaf[keep - 1 :: keep]

    def subtree(keep, part):
        return None if keep is None else jax.tree.map(functools.partial(of, keep), part)

    return jax.tree.map(subtree, save, ys, is_leaf=lambda keep: keep is None)


def derived(run, init, xs):
    loss, floats = loss_of(run, init, xs)
    return run(init, xs), jax.grad(loss)(floats)


compiled = functools.partial(jax.jit, static_argnums=0)(derived)


def assert_same(ours, theirs, *given):
    """Theirs eagerly: nothing of it is compiled twice."""
    assert_close(compiled(ours, *given), derived(theirs, *given))


def scanned(init, xs, **options):
    return treescan.scan(body, init, xs, **options)


def stacked(init, xs, *, save, reverse=False):
    final, ys = jax.lax.scan(body, init, xs, reverse=reverse)
    return final, kept(ys, save, reverse=reverse)


REMATS = {
    "none": None,
    "step": "step",
    "nested": "nested",
    "levels": Remat(levels=3),
    "policy": Remat("everything_saveable", levels=2),
}
GRID = list(itertools.product(SAVES, [0, 1, 7, 12], [False, True], REMATS))


@pytest.mark.parametrize(("save", "steps", "reverse", "remat"), everyday(all_pairs(GRID)))
def test_scan(save, steps, reverse, remat):
    save = SAVES[save]
    ours = functools.partial(scanned, save=save, reverse=reverse, remat=REMATS[remat])
    assert_same(ours, functools.partial(stacked, save=save, reverse=reverse), *arguments(steps))


def test_no_xs_and_other_dtypes():
    def count(carry, _):
        n, z = carry
        y = {"n": n, "flag": n % 2 == 0, "half": n.astype(jnp.bfloat16), "z": z, "none": None, "number": 3.0}
        return (n + 1, z * 1j), y

    init = jnp.int32(0), jnp.complex64(1 + 2j)
    save = {"n": 3, "flag": "last", "half": 4, "z": 2, "none": "all", "number": 5}
    with jax.numpy_dtype_promotion("standard"):
        got = treescan.scan(count, init, None, 11, save=save)
        final, ys = jax.lax.scan(count, init, None, 11)
    assert_close(got, (final, kept(ys, save)))


def test_eager_and_traced_agree_and_an_empty_tree_will_do():
    init, xs = arguments(6)
    assert treescan.scan(lambda c, x: (c, None), init, xs, save="last")[1] is None
    assert treescan.scan(lambda c, x: (c, ()), init, xs, save=2)[1] == ()
    assert_close(scanned(init, xs, save=4), jax.jit(functools.partial(scanned, save=4))(init, xs))


def test_numbers_of_numpy():
    init, xs = arguments(6)
    assert_close(scanned(init, xs, save=np.int64(2)), scanned(init, xs, save=2))


# The masked scan

ROWS = 3


def rows_body(carry, x):
    h = jnp.sin(carry["h"] + x["u"])
    return {"h": h}, {"a": h * x["u"], "b": jnp.cos(h[:, 0]), "c": jnp.moveaxis(h, 0, -1), "t": x["i"]}


Y_AXES = {"a": 0, "b": 0, "c": 1, "t": None}


def masked_arguments(steps):
    xs = {"u": array(steps, ROWS, 2, seed=3), "i": jnp.arange(1, steps + 1, dtype=jnp.int32)}
    return {"h": array(ROWS, 2, seed=1)}, xs


def masked(init, xs, **options):
    axes = {"x_axes": {"u": 0, "i": None}, "y_axes": Y_AXES}
    return treescan.mask_scan(rows_body, init, xs, **axes, **options)


def masked_stacked(init, xs, *, valid, save, fill, reverse):
    """Everything from `mask_scan` as it is without `save`; each row's last output from the oracle's own indices."""
    final, ys = masked(init, xs, mask=valid, fill=fill, reverse=reverse, chunk=0)
    if save is None:
        return final, None
    save = save if isinstance(save, dict) else dict.fromkeys(ys, save)
    fills = fill if isinstance(fill, dict) else dict.fromkeys(ys, fill)
    out = {}
    for name, leaf in ys.items():
        keep = save[name]
        if keep != "last":
            out[name] = kept(leaf, keep)
            continue
        start = jnp.full(leaf.shape[1:], 0 if fills[name] == "hold" else fills[name], leaf.dtype)
        if Y_AXES[name] is None:
            steps = np.flatnonzero(valid.any(1))
            out[name] = leaf[steps[0 if reverse else -1]] if len(steps) else start
            continue
        first = jnp.moveaxis(leaf, 1 + Y_AXES[name], 1)  # [T, rows, ...]
        none = jnp.moveaxis(start, Y_AXES[name], 0)
        each = []
        for b in range(ROWS):
            steps = np.flatnonzero(valid[:, b])
            each.append(first[steps[0 if reverse else -1], b] if len(steps) else none[b])
        out[name] = jnp.moveaxis(jnp.stack(each), 0, Y_AXES[name])
    return final, out


def prefixes(steps):
    return np.arange(steps)[:, None] < np.array([steps, 0, min(steps, 4)])


def gaps(steps):
    return np.random.default_rng(steps).random((steps, ROWS)) < 0.4


def nothing(steps):
    return np.zeros((steps, ROWS), bool)


MASKS = {"prefixes": prefixes, "gaps": gaps, "nothing": nothing}
MASKED_SAVES = {
    "last": "last",
    "third": 3,
    "none": None,
    "mixed": {"a": "last", "b": 2, "c": "all", "t": "last"},
    "chunks": {"a": 5, "b": 10, "c": "last", "t": None},
    "odd": {"a": 4, "b": 6, "c": 3, "t": 7},
}
FILLS = {"zero": 0, "number": -1, "hold": "hold", "tree": {"a": "hold", "b": 2.5, "c": 0, "t": "hold"}}
WAYS = {
    "default": {},
    "unskipped": {"chunk": 0},
    "chunk": {"chunk": 5},
    "nested": {"chunk": 2, "remat": "nested"},
    "levels": {"remat": Remat(levels=3)},
}
MASKED_GRID = list(itertools.product(MASKS, MASKED_SAVES, FILLS, WAYS, [False, True], [0, 7, 13]))


@pytest.mark.parametrize(("mask", "save", "fill", "way", "reverse", "steps"), everyday(all_pairs(MASKED_GRID)))
def test_mask_scan(mask, save, fill, way, reverse, steps):
    valid, save, fill = MASKS[mask](steps), MASKED_SAVES[save], FILLS[fill]
    ours = functools.partial(masked, mask=valid, save=save, fill=fill, reverse=reverse, **WAYS[way])
    theirs = functools.partial(masked_stacked, valid=valid, save=save, fill=fill, reverse=reverse)
    assert_same(ours, theirs, *masked_arguments(steps))


MIXED = {"a": "last", "b": 2, "c": None}
COMPACT = [(MIXED, 0, True), *slow(("last", "hold", True), (4, 0, False))]


@pytest.mark.parametrize(("save", "fill", "reverse"), COMPACT)
def test_compact(save, fill, reverse):
    valid, axes = prefixes(13), {"y_axes": {name: Y_AXES[name] for name in "abc"}}

    def step(carry, x):
        carry, y = rows_body(carry, {"u": x, "i": jnp.int32(0)})
        return carry, {name: y[name] for name in "abc"}

    def ours(init, xs):
        rows = {"compact": True, "chunk": 4}
        return treescan.mask_scan(
            step, init, xs["u"], mask=valid, save=save, fill=fill, reverse=reverse, **rows, **axes
        )

    def theirs(init, xs):
        whole = save if isinstance(save, dict) else dict.fromkeys("abc", save)
        final, ys = masked_stacked(init, xs, valid=valid, save=whole | {"t": None}, fill=fill, reverse=reverse)
        return final, {name: ys[name] for name in "abc"}

    assert_same(ours, theirs, *masked_arguments(13))


# Layers


def block(layer, x):
    h = jnp.sin(x["h"] * layer["w"])
    return x | {"h": h}, {"h": h * x["s"], "w": jnp.sum(layer["w"])}


def other_block(layer, x):
    h = jnp.cos(x["h"] + layer["v"])
    return x | {"h": h}, h * 2


def layers_arguments(counts):
    names = ("w", "v")
    stacks = tuple({names[i]: 1 + array(count, 2, seed=i)} for i, count in enumerate(counts))
    return {"h": array(2, seed=5), "s": array(2, seed=6)}, stacks


PATTERN_SAVES = {
    "differ": [{"h": 3, "w": "last"}, 2],
    "none": [None, "all"],
    "mixed": ["all", "last"],
    "beyond": [4, 9],
}


PATTERN_GRID = list(itertools.product(PATTERN_SAVES, [(4, 3), (1, 1), (1, 0)], [False, True], [None, "nested"]))


@pytest.mark.parametrize(("saves", "counts", "reverse", "remat"), everyday(all_pairs(PATTERN_GRID)))
def test_patterns(saves, counts, reverse, remat):
    saves = PATTERN_SAVES[saves]
    if 0 in counts:  # a block without a layer has no oracle here: it returns its zeros
        saves = [saves[0], None]

    def ours(x, stacks):
        return treescan.scan_layers([block, other_block], x, stacks, save=saves, reverse=reverse, remat=remat)

    def theirs(x, stacks):
        filled = [stack for stack in stacks if len(jax.tree.leaves(stack)[0])]
        of = saves[: len(filled)]
        x, ys = plain.scan_layers([block, other_block][: len(filled)], x, filled, save=of, reverse=reverse)
        kept = (None if keep is None else y for keep, y in zip(of, ys, strict=True))
        return x, (*kept, *(None,) * (len(stacks) - len(filled)))

    assert_same(ours, theirs, *layers_arguments(counts))


# Memory


@functools.cache
def memory(save, steps, *, gradient=False, verb=treescan.scan, **options):
    """(temp, output) bytes, for outputs of 16 KiB a step."""
    width = 4096
    x = jnp.arange(float(steps))

    def step(carry, x):
        h = jnp.sin(carry + x)
        return h, jnp.tanh(h)

    def run(c):
        return verb(step, c, x, save=save, **options)

    def loss(c):
        return sum(jnp.sum(leaf * leaf) for leaf in jax.tree.leaves(run(c)))

    compiled = jax.jit(jax.grad(loss) if gradient else run).lower(jnp.ones(width)).compile()
    found = compiled.memory_analysis()
    return np.array([found.temp_size_in_bytes, found.output_size_in_bytes]) / (4 * width)


@pytest.mark.parametrize(("steps", "every", "reverse"), [(512, 32, False), (509, 8, True)])
def test_memory_falls_with_what_is_kept(steps, every, reverse):
    """In outputs: those that are kept, and hardly a copy of one."""
    none, some = (memory(save, steps, reverse=reverse) for save in (None, every))
    assert (some - none)[1] <= steps // every + 0.1
    assert np.sum(some - none) <= 1.1 * steps / every
    assert memory("all", steps)[1] >= steps  # the measure sees them


@pytest.mark.parametrize(("save", "steps"), [("last", 509), (None, 512)])
def test_without_stacked_outputs_nothing_grows(save, steps):
    assert np.sum(memory(save, steps) - memory(save, 16)) <= 1


@pytest.mark.parametrize("save", ["last", None, 32])
def test_memory_of_a_masked_scan(save):
    def verb(step, c, x, **options):
        def rows(carry, x):
            h, y = step(carry, x[:, None])
            return h, y

        lengths = jnp.array([len(x) - 3])
        return treescan.mask_scan(rows, c[None], x[:, None], lengths=lengths, **options)

    kept_steps = 512 // save if isinstance(save, int) else 0
    some, few = memory(save, 512, verb=verb), memory(None, 16, verb=verb)
    assert (some - few)[1] <= kept_steps + 1.1
    assert (some - few)[0] <= kept_steps + 3  # a copy of what is kept, as of everything where all is kept


def test_memory_of_the_gradient():
    """What only the outputs that are not kept need is not saved for the gradient either."""
    everything, nothing = (memory(save, 512, gradient=True)[0] for save in ("all", None))
    assert everything > 3.5 * nothing
    assert memory(32, 512, gradient=True)[0] <= 1.25 * nothing
    assert memory("last", 512, gradient=True)[0] <= 1.2 * nothing  # of eight chunks one, as it is computed


def test_memory_of_the_gradient_with_remat():
    """The outputs that are not kept are not saved for the gradient either."""
    everything, some = (memory(save, 512, gradient=True, remat="nested")[0] for save in ("all", 32))
    assert everything >= 512
    assert some <= 160


# What is not kept is not made


def makings(save, steps, *, verb="scan", **options):
    """How often a program makes an output that it does not need otherwise."""
    calls = []

    def host(h):
        calls.append(1)
        return np.cos(h)

    def out(h):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(h.shape, h.dtype), h, vmap_method="sequential")

    def step(carry, x):
        h = jnp.sin(carry + x)
        return h, (out(h), h)

    def layer(weights, x):
        return step(x, weights)

    def run(c):
        xs = jnp.linspace(0.0, 1.0, steps)
        if verb == "scan_layers":
            return treescan.scan_layers(layer, c, xs, save=(save, "all"), **options)
        if verb == "mask_scan":
            lengths = jnp.array([steps])
            return treescan.mask_scan(step, c[None], xs[:, None], lengths=lengths, save=(save, "all"), **options)
        return treescan.scan(step, c, xs, save=(save, "all"), **options)

    given = jnp.float32(0.3)
    jax.block_until_ready(jax.jit(run)(given))
    return len(calls)


@pytest.mark.parametrize(("verb", "reverse"), [("scan", False), ("scan_layers", True)])
def test_outputs_that_are_not_kept_are_not_made(verb, reverse):
    count = functools.partial(makings, verb=verb, reverse=reverse)
    assert count("all", 32) == 32
    assert count(None, 32) == 0
    assert count(8, 32) == 4
    assert count(8, 37) == 4
    assert count("last", 32) == 8
    assert count(100, 32) == 0


@pytest.mark.parametrize("reverse", [False, True])
def test_outputs_of_a_loop_of_prime_length(reverse):
    assert makings("last", 31, reverse=reverse) == 1
    assert makings(8, 31, reverse=reverse) == 3
    assert makings(1, 31, reverse=reverse) == 31


def test_outputs_of_a_masked_scan():
    assert makings("all", 32, verb="mask_scan") == 32
    assert makings(None, 32, verb="mask_scan") == 0
    assert makings(8, 32, verb="mask_scan") == 4
    assert makings(8, 32, verb="mask_scan", chunk=0) == 4


def test_a_leaf_of_the_last_carry_that_is_a_constant():
    """What no step changes comes out of the last step as a number, not as an array."""

    def last(w):
        init = ema(jnp.zeros(()), decay=0.9)
        return sum(jax.tree.leaves(treescan.accumulate(lambda c, x: c * w + x, init, jnp.ones(5), save="last")))

    def whole(w):
        init = ema(jnp.zeros(()), decay=0.9)
        return sum(jax.tree.leaves(treescan.fold(lambda c, x: c * w + x, init, jnp.ones(5))))

    assert_close(jax.jit(jax.grad(last))(2.0), jax.jit(jax.grad(whole))(2.0))


def dots_of_innermost_loops(jaxpr):
    """For each loop without others in it how often a step multiplies."""

    def count(jaxpr, name):
        own = sum(equation.primitive.name == name for equation in jaxpr.eqns)
        return own + sum(count(inner, name) for equation in jaxpr.eqns for inner in jaxprs_within(equation))

    for equation in jaxpr.eqns:
        for inner in jaxprs_within(equation):
            if equation.primitive.name == "scan" and not count(inner, "scan"):
                yield count(inner, "dot_general")
            else:
                yield from dots_of_innermost_loops(inner)


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param("auto", marks=pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="tanh saves less")),
        Remat("everything_saveable", levels=2),
    ],
)
def test_the_products_of_a_chunk_are_computed_at_once(remat):
    """Also where a chunk ends with the one step whose outputs are kept."""
    given = jnp.ones((16, 32)) / 9, jnp.ones((32, 32)) / 99, jnp.linspace(0, 1, 240 * 4 * 16).reshape(240, 4, 16)

    def loss(remat, of_x, of_h, xs):
        def step(h, x):
            h = jnp.tanh(x @ of_x + h @ of_h)
            return h, h

        return jnp.sum(treescan.scan(step, jnp.zeros((4, 32)), xs, save=60, remat=remat)[1] ** 2)

    gradients = [jax.grad(functools.partial(loss, each), argnums=(0, 1)) for each in (remat, None)]
    dots, plain = (list(dots_of_innermost_loops(jax.make_jaxpr(each)(*given).jaxpr)) for each in gradients)
    assert (max(dots), max(plain)) == (2, 3)  # two of the step; three of its derivative, or one and two for each chunk
    for got, want in zip(*(each(*given) for each in gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
