"""`with treescan.progress():`, which loops have a bar, and that neither numbers nor programs outside change."""

import threading

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bars import TRANSFORMS, XS, D, H, Recorder, T, bars, init, labels, step
from flax import nnx
from thin import slow
from traces import Counted

import treescan
from treescan.integrations.flax import scan as flax_scan
from treescan.integrations.nnx import scan as nnx_scan
from treescan.meters import Progress

pytestmark = pytest.mark.quick

METER = Progress(updates=4, meter=Recorder())


def within(run, shown=METER):
    with treescan.progress(shown):
        return run()


def told(run, shown=METER):
    """The steps that each bar was told of."""
    return [[done for done, _ in steps] for _, steps in bars(lambda: within(run, shown))]


def library(h=H, **options):
    return treescan.scan(step, init(h), XS, **options)[0]["h"]


def add(carry, x):
    return carry + x, None


def double(layer, x):
    return x * layer


LOOPS = {
    "scan step": library,
    "fold": lambda: treescan.fold(lambda h, x: h + x, H, XS),
    "accumulate": lambda: treescan.accumulate(lambda h, x: h + x, H, XS),
    "fori": lambda: treescan.fori(0, T, lambda i, h: h + i, H),
    "mask_scan add": lambda: treescan.mask_scan(add, H, XS, lengths=jnp.full(D, T)),
    "while_scan add": lambda: treescan.while_scan(lambda h: h[0] < 1e9, add, H, XS),
    "fold_layers double": lambda: treescan.fold_layers(double, H, XS),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_call_that_does_not_mention_progress_has_a_bar(name):
    found = told(LOOPS[name])
    assert len(found) == 1
    assert found[0][-1] == T
    assert labels() == [name]
    assert bars(LOOPS[name]) == []
    chex.assert_trees_all_close(within(LOOPS[name]), LOOPS[name](), rtol=1e-6)


def test_loops_over_modules_have_a_bar():
    cells = flax_scan(nn.SimpleCell, variable_broadcast="params", split_rngs={"params": False})(D)
    variables = cells.init(jax.random.key(0), H, XS)
    assert [steps[-1] for steps in told(lambda: cells.apply(variables, H, XS))] == [T]
    sums = nnx_scan(lambda h, x: (h + x, h), in_axes=(nnx.Carry, 0))
    assert [steps[-1] for steps in told(lambda: sums(H, XS))] == [T]


def test_a_call_of_its_own_takes_precedence_and_so_does_an_inner_context():
    own = Progress("own", updates=2, meter=Recorder())
    assert told(lambda: library(progress=own)) == [[6, 12]]
    assert labels() == ["own"]
    assert told(lambda: library(progress=False)) == []
    assert told(lambda: within(library, shown=False)) == []
    assert told(lambda: within(library, own)) == [[6, 12]]


def outer(h, x):
    return library(h) + x, None


EVERYDAY = ("vmap", "jit of grad", "grad of jit")


@pytest.mark.parametrize("transform", [*EVERYDAY, *slow(*((name,) for name in TRANSFORMS if name not in EVERYDAY))])
def test_only_the_outermost_loop_has_a_bar_and_numbers_are_those_without(transform):
    through = TRANSFORMS.get(transform, lambda f: jax.grad(jax.jit(f))(H))

    def run():
        return through(lambda h: treescan.scan(outer, h, jnp.ones(3))[0].sum())

    assert told(run) == [[1, 2, 3]]
    chex.assert_trees_all_close(within(run), run(), rtol=1e-5)


@pytest.mark.parametrize("transform", ["jit of grad", *slow(("grad without jit",))])
def test_derivatives_of_loops_that_end_early_show_no_inner_loop(transform):
    def until(h):
        return treescan.while_scan(lambda c: c[0] < 9, lambda c, _: outer(c, 0.1), h, max_length=6).carry.sum()

    run = lambda: TRANSFORMS[transform](until)  # noqa: E731
    assert len(told(run)) == 1
    chex.assert_trees_all_close(within(run), run(), rtol=1e-5)


@pytest.mark.parametrize("method", ["sequential", "chunked", "parallel"])
def test_loops_within_a_linear_scan_are_no_loops_of_the_user(method):
    assert told(lambda: treescan.linear_scan(0.5, XS, method=method)[0]) == []
    assert told(lambda: treescan.linear_scan(0.5, XS, remat=2)[0]) == []


def test_a_loop_with_a_bar_of_its_own_shows_no_other_within_and_jax_loops_show_each():
    own = Progress("own", updates=3, meter=Recorder())
    assert told(lambda: treescan.scan(outer, H, jnp.ones(3), progress=own)) == [[1, 2, 3]]
    assert told(lambda: treescan.scan(outer, H, jnp.ones(3), progress=False)) == []
    assert told(lambda: jax.lax.scan(outer, H, jnp.ones(3))) == [[3, 6, 9, 12]] * 3


def test_a_jitted_function_has_a_program_with_a_bar_and_one_without():
    traced = Counted(lambda h: library(h))
    run = jax.jit(traced.body)
    assert bars(lambda: run(H)) == []
    for _ in range(2):
        assert told(lambda: run(H)) == [[3, 6, 9, 12]]
        assert bars(lambda: run(H)) == []
    assert traced.calls <= 3  # JAX compiled the one without once more when the first context was made


def test_eager_calls_in_turn_compile_once_each():
    counted = Counted(step)
    run = lambda: treescan.scan(counted.body, init(), XS, save="last")  # noqa: E731
    for _ in range(2):
        assert bars(run) == []
        assert told(run) == [[3, 6, 9, 12]]
    assert counted.calls <= 3


def test_a_context_is_that_of_its_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(library()))
    assert told(lambda: (thread.start(), thread.join())) == []
    chex.assert_trees_all_close(found[0], library())


@pytest.mark.parametrize(("own", "told_of"), [({}, [[1, 2]]), ({"progress": False}, [])])
def test_entries_that_are_left_over_have_no_bar_of_their_own(own, told_of):
    assert told(lambda: treescan.chunk_map(jnp.sin, jnp.ones(5), 2, **own)) == told_of


def test_loops_that_refuse_a_bar_run_without():
    (n,) = jax.export.symbolic_shape("n")
    sums = jax.jit(lambda xs: treescan.fold(lambda h, x: h + x, 0.0, xs))
    exported = within(lambda: jax.export.export(sums)(jax.ShapeDtypeStruct((n,), jnp.float32)))
    np.testing.assert_allclose(exported.call(jnp.arange(5.0)), 10)


def test_a_body_that_writes_a_mutable_array_has_a_bar():
    ref = jax.new_ref(jnp.zeros(D))

    def write(h, x):
        ref[...] = ref[...] + x
        return h + ref[...], None

    assert told(lambda: treescan.scan(write, H, XS)) == [[3, 6, 9, 12]]
    np.testing.assert_allclose(ref[...], XS.sum(0), rtol=1e-5)


def test_a_description_within_a_context_is_of_the_call_without():
    plain = str(treescan.describe(treescan.scan, outer, H, jnp.ones(3)))
    assert within(lambda: str(treescan.describe(treescan.scan, outer, H, jnp.ones(3)))) == plain
    assert told(lambda: treescan.plan_remat(outer, H, jnp.ones(3), remat="auto")) == []
