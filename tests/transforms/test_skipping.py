"""Chunks without a valid step are not run, forward and backward, and that is all that `chunk` changes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import masked_by_hand
from hlo import Program
from loops import array

import treescan

STEPS, CHUNK, ROWS = 10, 4, 2  # chunks of 4, 4 and, as the remainder, 2 steps
WIDTH = 3


class Tally:
    """Counts at run time how often the callback of a body is called: once a step, however many elements are mapped."""

    def __init__(self):
        self.steps = 0

    def note(self, *given):
        """Called in a body. `given` keeps it where it is: lax.scan's gradient hoists a callback that reads nothing."""
        jax.debug.callback(self._add, *given)

    def _add(self, *_):
        self.steps += 1

    def during(self, call):
        """The result of a call, and the steps that were run in it."""
        jax.effects_barrier()
        before = self.steps
        result = jax.block_until_ready(call())
        jax.effects_barrier()
        return result, self.steps - before


TALLY = Tally()


def cell(carry, x):
    h = jnp.tanh(1.5 * carry + jnp.log(x))
    return h, h * carry


def noted(carry, x):
    """`cell`, its steps counted."""
    TALLY.note()
    return cell(carry, x)


def noted_once(carry, x):
    TALLY.note(x[0, 0])
    return cell(carry, x)


@jax.custom_vjp
def differentiated(carry, x):
    return cell(carry, x)


def _forward(carry, x):
    return jax.vjp(cell, carry, x)


def _backward(pullback, cotangents):
    TALLY.note()
    return pullback(cotangents)


differentiated.defvjp(_forward, _backward)


def spans(*rows):
    """A mask [STEPS, rows] of the half-open stretches of each row."""
    mask = np.zeros((STEPS, len(rows)), bool)
    for row, stretches in enumerate(rows):
        for start, stop in stretches:
            mask[start:stop, row] = True
    return mask


def data(mask, seed=0):
    """An init, and xs that are good where the mask is set; elsewhere, their logarithm is NaN."""
    xs = np.random.default_rng(seed).uniform(0.5, 2.0, (*mask.shape, WIDTH))
    return array(*mask.shape[1:], WIDTH, seed=seed), jnp.asarray(np.where(mask[..., None], xs, -1.0), jnp.float32)


def by_hand(init, xs, mask, **options):
    return masked_by_hand(cell, init, jnp.where(jnp.asarray(mask)[..., None], xs, 1.0), mask, **options)


def loss(run, init, xs, mask, **options):
    final, ys = run(init, xs, mask, **options)
    return jnp.sum(jnp.sin(final)) + jnp.sum(ys * ys)


def ours(init, xs, mask, *, body=cell, chunk=CHUNK, **options):
    return treescan.mask_scan(body, init, xs, mask=mask, chunk=chunk, **options)


PATTERNS = {  # a mask, and the steps that are run
    "full": (spans([(0, 10)], [(0, 10)]), 10),
    "all but one": (spans([(0, 9)], [(0, 8)]), 10),
    "two chunks": (spans([(0, 5)], [(0, 1)]), 8),
    "to the boundary": (spans([(0, 4)], [(0, 1)]), 4),
    "one row empty": (spans([(0, 3)], []), 4),
    "a hole": (spans([(0, 2)], [(9, 10)]), 6),
    "a hole of a row": (spans([(0, 2), (9, 10)], [(5, 6)]), 10),
    "padded on the left": (spans([(5, 10)], [(7, 10)]), 6),
    "the remainder": (spans([], [(8, 10)]), 2),
    "the middle": (spans([(5, 7)], [(6, 8)]), 4),
    "nothing": (spans([], []), 0),
}


# Steps, counted as they run.


@pytest.mark.parametrize(
    ("pattern", "reverse"),
    [*((name, False) for name in PATTERNS), *((name, True) for name in ("two chunks", "a hole", "the remainder"))],
)
def test_chunks_without_data_are_not_run(pattern, reverse):
    mask, steps = PATTERNS[pattern]
    init, xs = data(mask)
    got, ran = TALLY.during(lambda: ours(init, xs, mask, body=noted, reverse=reverse))
    assert ran == steps
    chex.assert_trees_all_close(got, by_hand(init, xs, mask, reverse=reverse), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("chunk", "steps"), [(0, 10), (1, 5), (5, 5), (9, 9), (99, 10)])
def test_any_chunk_runs_what_its_size_tells(chunk, steps):
    mask = spans([(0, 5)], [(1, 3)])
    init, xs = data(mask)
    got, ran = TALLY.during(lambda: ours(init, xs, mask, body=noted, chunk=chunk))
    assert ran == steps
    chex.assert_trees_all_close(got, by_hand(init, xs, mask), rtol=1e-5, atol=1e-6)
    assert TALLY.during(lambda: ours(init, xs, spans([], []), body=noted, chunk=chunk))[1] == 0


def test_the_default_skips_most_of_the_padding():
    xs, init = jnp.ones((200, ROWS, WIDTH)), jnp.zeros((ROWS, WIDTH))
    _, ran = TALLY.during(lambda: treescan.mask_scan(noted, init, xs, lengths=np.array([50, 3])))
    assert 50 <= ran <= 80


def test_lengths_that_are_traced():
    xs, init = jnp.ones((STEPS, ROWS, WIDTH)), jnp.zeros((ROWS, WIDTH))
    run = jax.jit(lambda lengths: treescan.mask_scan(noted, init, xs, lengths=lengths, chunk=CHUNK))
    for lengths, steps in (([3, 0], 4), ([2, 5], 8), ([10, 1], 10), ([0, 0], 0)):
        assert TALLY.during(functools.partial(run, jnp.array(lengths)))[1] == steps, lengths


def test_mapped_batches_skip_where_all_can():
    masks = np.stack([PATTERNS["a hole"][0], PATTERNS["one row empty"][0], PATTERNS["nothing"][0]])
    inits, xs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(data, masks))
    run = jax.jit(jax.vmap(functools.partial(ours, body=noted)))
    got, ran = TALLY.during(lambda: run(inits, xs, masks))
    assert ran == 6
    chex.assert_trees_all_close(got, jax.vmap(by_hand)(inits, xs, masks), rtol=1e-5, atol=1e-6)


LOSS_BY_HAND = functools.partial(loss, by_hand)
LOSS_NOTED = functools.partial(loss, functools.partial(ours, body=noted_once))
LOSS_NOTED_BACKWARD = functools.partial(loss, functools.partial(ours, body=differentiated))


@functools.cache
def gradient(total, order="grad"):
    derived = jax.grad(total, argnums=(0, 1))
    if order == "vmap of grad":
        derived = jax.vmap(derived)
    if order == "grad of vmap":
        derived = jax.grad(lambda *given: jnp.sum(jax.vmap(total)(*given)), argnums=(0, 1))
    return jax.jit(derived)


@pytest.mark.parametrize(
    ("total", "pattern"),
    [
        *((LOSS_NOTED_BACKWARD, name) for name in ("two chunks", "a hole of a row", "the remainder", "nothing")),
        # A body with effects is not computed again in the gradient: a callback would see every step twice.
        *((LOSS_NOTED, name) for name in ("two chunks", "nothing")),
    ],
    ids=["two chunks", "a hole of a row", "the remainder", "nothing", "effects, two chunks", "effects, nothing"],
)
def test_gradients_run_no_step_that_was_skipped(total, pattern):
    mask, steps = PATTERNS[pattern]
    given = *data(mask), mask
    got, ran = TALLY.during(lambda: gradient(total)(*given))
    assert ran == steps
    chex.assert_trees_all_close(got, gradient(LOSS_BY_HAND)(*given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_mapped_gradients_run_no_step_backward_that_was_skipped(order):
    for names, steps in ((("a hole", "one row empty", "nothing"), 6), (("nothing",) * 3, 0)):
        masks = np.stack([PATTERNS[name][0] for name in names])
        given = *jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(data, masks)), masks
        got, ran = TALLY.during(functools.partial(gradient(LOSS_NOTED_BACKWARD, order), *given))
        assert ran == steps, names
        chex.assert_trees_all_close(got, gradient(LOSS_BY_HAND, order)(*given), rtol=1e-4, atol=1e-5)


# Branches in the program: nothing became a select, and the branch that skips computes nothing.


def weighted(init, xs, mask, w, **options):
    def step(carry, x):
        h = jnp.tanh(carry @ w + x)
        return h, h

    return treescan.mask_scan(step, init, xs, mask=mask, **options)


def weighted_grad(init, xs, mask, w, **options):
    def total(init, xs, w):
        return loss(functools.partial(weighted, w=w, **options), init, xs, mask)

    return jax.grad(total, argnums=(0, 1, 2))(init, xs, w)


TRANSFORMED = {  # and the conditionals that compute: of the forward pass, and of the chunk's transpose
    "forward": (weighted, 1),
    "gradient": (weighted_grad, 2),
    "vmap": (jax.vmap(functools.partial(weighted, chunk=CHUNK)), 1),
    "vmap of grad": (jax.vmap(functools.partial(weighted_grad, chunk=CHUNK)), 2),
    "nested vmap": (jax.vmap(jax.vmap(functools.partial(weighted, chunk=CHUNK))), 1),
}


def program_of(name, steps=2 * CHUNK, **options):
    mask = spans([(0, 3)], [])[:steps]
    args = (*data(mask), jnp.asarray(mask), array(WIDTH, WIDTH, seed=2))
    function, conditionals = TRANSFORMED[name]
    for _ in range(name.count("vmap") + name.count("nested")):
        args = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), args)
    if "vmap" not in name:
        function = functools.partial(function, **{"chunk": CHUNK, **options})
    return Program(function, *args), conditionals


@pytest.mark.parametrize("name", [*list(TRANSFORMED)[:-1], pytest.param("nested vmap", marks=pytest.mark.slow)])
def test_a_skipped_branch_stays_a_branch_that_computes_nothing(name):
    program, conditionals = program_of(name)
    branches = program.branches()
    handing_on = len(branches) - conditionals  # what a gradient's chunk is computed from; the newest JAX needs none
    assert 0 <= handing_on < conditionals
    assert sum(" dot(" in run for _, run in branches) == conditionals
    for skipped, run in branches:
        assert (" dot(" in run) == (" while(" in run)  # or it hands on what the other will be computed from
        assert not any(f" {operation}(" in skipped for operation in ("dot", "tanh", "while"))


@pytest.mark.parametrize("name", ["forward", pytest.param("gradient", marks=pytest.mark.slow)])
def test_a_remainder_is_a_branch_of_its_own(name):
    program, conditionals = program_of(name, steps=2 * CHUNK + 1)
    branches = program.branches()
    assert 0 <= len(branches) - 2 * conditionals <= 2 * (conditionals - 1)
    assert sum(" dot(" in run for _, run in branches) == 2 * conditionals


@pytest.mark.parametrize("options", [{"remat": "step"}, {"remat": "nested", "chunk": 2}], ids=str)
def test_other_options_keep_the_branch(options):
    program, conditionals = program_of("gradient", **options)
    branches = program.branches()
    assert len(branches) >= conditionals
    assert sum(" dot(" in run for _, run in branches) >= conditionals
    assert not any(" dot(" in skipped for skipped, _ in branches)


@pytest.mark.parametrize(
    ("chunk", "save", "kept"), [(6, (2, 3), 2), (12, (4, 6), 4), (6, (3, 12), 3), (5, (2, "all"), 5)], ids=str
)
def test_a_chosen_chunk_is_kept_where_outputs_do_not_fit_it_or_each_other(chunk, save, kept):
    def body(h, x):
        TALLY.note()
        h = 0.9 * h + x
        return h, (h, 2 * h)

    run = functools.partial(treescan.mask_scan, body, array(2), array(96, 2), lengths=np.array([chunk - 1, 1]))
    (_, ys), steps = TALLY.during(lambda: run(chunk=chunk, save=save))
    assert steps == chunk
    _, whole = run(chunk=0)
    for y, of_all, keep in zip(ys, whole, save, strict=True):
        chex.assert_trees_all_close(y, of_all if keep == "all" else of_all[keep - 1 :: keep])
