"""`save`: what it saves, memory and the making of outputs.

`test_what_works.py` and `test_generated.py` have its values and gradients with each other option.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from loops import array
from oracle import assert_close
from works import plain

import treescan
from treescan import Remat
from treescan.carries import ema


def body(carry, x):
    h = jnp.sin(carry["h"] * carry["w"] + x["u"])
    return {"h": h, "w": carry["w"]}, {"a": h * x["u"], "b": (jnp.sum(jnp.cos(h)), x["i"])}


def arguments(steps):
    xs = {"u": array(steps, 2, seed=3), "i": jnp.arange(steps, dtype=jnp.int32)}
    return {"h": array(2, seed=1), "w": 1 + array(2, seed=2)}, xs


def test_no_steps():
    run = functools.partial(treescan.scan, body, save={"a": 2, "b": ("last", None)})
    for each in (run, jax.jit(run)):
        _, ys = each(*arguments(0))
        assert ys["a"].shape == (0, 2) and ys["b"] == (0, None)


def test_no_xs_and_other_dtypes():
    def count(carry, _):
        n, z = carry
        y = {"n": n, "flag": n % 2 == 0, "half": n.astype(jnp.bfloat16), "z": z, "none": None, "number": 3.0}
        return (n + 1, z * 1j), y

    init = jnp.int32(0), jnp.complex64(1 + 2j)
    save = {"n": 3, "flag": "last", "half": np.int64(4), "z": 2, "none": "all", "number": 5}
    with jax.numpy_dtype_promotion("standard"):
        _, got = treescan.scan(count, init, None, 11, save=save)
        _, ys = jax.lax.scan(count, init, None, 11)
    kept = {name: ys[name][keep - 1 :: keep] for name, keep in save.items() if name not in ("flag", "none")}
    assert_close(got, {**kept, "flag": ys["flag"][-1], "none": None})


def test_an_empty_tree_will_do():
    init, xs = arguments(6)
    assert treescan.scan(lambda c, x: (c, None), init, xs, save="last")[1] is None
    assert treescan.scan(lambda c, x: (c, ()), init, xs, save=2)[1] == ()


# The masked scan


# Layers


def block(layer, x):
    h = jnp.sin(x["h"] * layer["w"])
    return x | {"h": h}, {"h": h * x["s"], "w": jnp.sum(layer["w"])}


def other_block(layer, x):
    h = jnp.cos(x["h"] + layer["v"])
    return x | {"h": h}, h * 2


def test_a_pattern_in_reverse_and_in_chunks():
    stacks = [{"w": 1 + array(4, 2)}, {"v": 1 + array(3, 2, seed=1)}]
    given = [block, other_block], {"h": array(2, seed=5), "s": array(2, seed=6)}, stacks
    options = {"save": [{"h": 3, "w": "last"}, 2], "reverse": True}
    assert_close(treescan.scan_layers(*given, remat="nested", **options), plain.scan_layers(*given, **options))


def test_a_block_without_a_layer():
    x, stacks = {"h": array(2), "s": array(2)}, [{"w": array(1, 2)}, {"v": array(0, 2)}]
    _, (ys, none) = treescan.scan_layers([block, other_block], x, stacks, save=["last", None])
    assert ys["h"].shape == (2,) and none is None


# Positions

AT = np.array([0, 3, 4, 9])


@pytest.mark.parametrize("axes", [1, -1, {"last": 0, "all": 1}])
def test_out_axes_are_of_outputs_that_are_stacked(axes):
    def step(c, x):
        return c + x, {"last": c, "all": x * jnp.arange(3.0)}

    save = {"last": "last", "all": "all"}
    _, ys = treescan.scan(step, 0.0, jnp.arange(4.0), save=save, out_axes=axes)
    assert ys["last"] == 3
    assert_close(ys["all"], jnp.outer(jnp.arange(3.0), jnp.arange(4.0)))


@pytest.mark.parametrize("without_jit", [False, True])
def test_python_numbers_keep_their_weak_type(without_jit):
    with jax.disable_jit(without_jit):
        for save in ("all", AT):
            assert treescan.scan(lambda c, x: (c + x, 1.0), 0.0, jnp.arange(11.0), save=save)[1].weak_type


def test_positions_may_be_kept_by_a_number():
    """As every fourth: then the other outputs are not even made."""
    assert makings(range(3, 32, 4)) == makings(4) == 8
    assert makings(np.array([3, 7])) == 32


@pytest.mark.parametrize("at", [(1, 3), (0, 3)])
def test_positions_are_refused_beside_an_offset(at):
    """Also those that could be kept by a number: it would count from the first step of all parts."""
    with pytest.raises(treescan.errors.ArgumentError, match="`save` with positions cannot be combined with `offset`"):
        treescan.scan(lambda c, x: (c + x, x), 0.0, jnp.ones(4), save=np.array(at), offset=4)


def test_the_program_does_not_grow_with_positions():
    def size(save):
        def run(xs):
            return treescan.scan(lambda c, x: (c + x, x), 0.0, xs, save=save)

        return len(list(equations(jax.make_jaxpr(run)(jnp.ones(64)).jaxpr)))

    assert size(np.r_[0, np.arange(2, 50)]) == size(np.array([0, 2]))


# Memory


@functools.cache
def memory_at(at, steps, **options):
    """`memory` of positions, which have no hash."""
    return memory.__wrapped__(np.array(at), steps, **options)


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


def test_without_stacked_outputs_nothing_grows():
    assert np.sum(memory("last", 509) - memory("last", 16)) <= 1


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
    """What only the outputs that are not kept need is not saved for it either, nor are they, with `remat`."""
    everything, nothing = (memory(save, 512, gradient=True)[0] for save in ("all", None))
    assert everything > 3.5 * nothing
    assert memory(32, 512, gradient=True)[0] <= 1.25 * nothing
    assert memory("last", 512, gradient=True)[0] <= 1.2 * nothing  # of eight chunks one, as it is computed
    everything, some = (memory(save, 512, gradient=True, remat="nested")[0] for save in ("all", 32))
    assert everything >= 512
    assert some <= 160


def test_memory_of_positions():
    at = 1, 7, 8, 100, 300, 301, 302, 303, 400, 511
    none, some = memory(None, 512), memory_at(at, 512)
    assert (some - none)[1] <= len(at) + 0.1
    assert (some - none)[0] <= 3
    for remat in ("step", "nested"):  # by which no step saves what an output needs
        gradients = memory(None, 512, gradient=True, remat=remat), memory_at(at, 512, gradient=True, remat=remat)
        assert (gradients[1] - gradients[0])[0] <= 2 * len(at)


# What is not kept is not made


def makings(save, *, steps=32, verb="scan", **options):
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


MADE = {"all": 32, None: 0, 8: 4, "last": 8, 100: 0}
"""What is kept of 32 steps, and how many outputs are made for it."""


@pytest.mark.filterwarnings("ignore:.*keeps no output")
@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"verb": "scan"}, MADE),
        ({"verb": "scan_layers", "reverse": True}, MADE),
        ({"verb": "mask_scan"}, {"all": 32, None: 0, 8: 4}),
        ({"verb": "mask_scan", "chunk": 0}, {8: 4}),
        ({"steps": 31}, {"last": 1, 8: 3, 1: 31}),
        ({"steps": 31, "reverse": True}, {"last": 1, 8: 3, 1: 31}),
    ],
    ids=str,
)
def test_outputs_that_are_not_kept_are_not_made(options, made):
    assert {save: makings(save, **options) for save in made} == made


def test_a_leaf_of_the_last_carry_that_is_a_constant():
    """What no step changes comes out of the last step as a number, not as an array."""

    def last(w):
        init = ema(jnp.zeros(()), decay=0.9)
        return sum(jax.tree.leaves(treescan.accumulate(lambda c, x: c * w + x, init, jnp.ones(5), save="last")))

    def whole(w):
        init = ema(jnp.zeros(()), decay=0.9)
        return sum(jax.tree.leaves(treescan.fold(lambda c, x: c * w + x, init, jnp.ones(5))))

    assert_close(jax.jit(jax.grad(last))(2.0), jax.jit(jax.grad(whole))(2.0))


def dots_of_innermost_loops(function, *given):
    """For each loop without others in it how often a step multiplies."""
    loops = equations(jax.make_jaxpr(function)(*given).jaxpr, "scan")
    bodies = [loop.params["jaxpr"].jaxpr for loop in loops]
    return [len(list(equations(body, "dot_general"))) for body in bodies if not any(equations(body, "scan"))]


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
    dots, plain = (dots_of_innermost_loops(each, *given) for each in gradients)
    assert (max(dots), max(plain)) == (2, 3)  # two of the step; three of its derivative, or one and two for each chunk
    for got, want in zip(*(jax.jit(each)(*given) for each in gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_run_that_is_too_short_to_keep_anything_says_so():
    xs = jnp.ones(10)
    with pytest.warns(UserWarning, match=r"`save=20` keeps no output, because there are only 10"):
        assert treescan.scan(lambda c, x: (c + x, c), 0.0, xs, save=20)[1].shape == (0,)
    for length, options in ((10, {"save": 10}), (10, {"save": 20, "offset": 20}), (0, {"save": 20})):
        treescan.scan(lambda c, x: (c + x, c), 0.0, xs[:length], **options)  # warnings are errors here
