"""`mask_scan` under JAX's transforms is each row scanned on its own, unpadded: values and derivatives of any kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close
from unpadded import Batch, Setup, assert_no_gradient_of_padding, derive, draw_rows, expected, make_batch

SEGMENTS = ("mask", "resets")


def setup(case="singular", carried=False, given=SEGMENTS, **options):
    return Setup(case, carried, given, tuple(options.items()))


def fill_of(setup):
    return {"reverse": setup.option.get("reverse", False), "fill": setup.option.get("fill", 0)}


def wanted(setup, batch, valid, resets):
    return expected(setup.case, "grad", batch, valid, resets, **fill_of(setup))


# vmap: of three elements the second has nothing valid, and bad data throughout.

ELEMENTS = 3
MAPPED = {
    "all": ("params", "rows", "xs", "valid"),
    "the mask": ("valid",),
    "params": ("params",),
    "data": ("rows", "xs", "valid"),
    "init": ("rows",),
}


def elements(given, mapped, padding):
    """For each element its (Batch, valid, resets); what is not mapped is the same in all."""
    drawn = [draw_rows(given.given, (4, 2), 0.6, seed) for seed in range(ELEMENTS)]
    if "valid" in mapped:
        drawn[1] = (np.zeros_like(drawn[1][0]), drawn[1][1])
    else:
        drawn = [drawn[0]] * ELEMENTS
    anywhere = np.any([valid for valid, _ in drawn], axis=0)
    batches = [make_batch(given.case, v if "xs" in mapped else anywhere, padding, i) for i, (v, _) in enumerate(drawn)]
    parts = ("params", "rows", "xs")

    def own(attribute):
        first = getattr(batches[0], attribute)
        return [
            tuple(
                part if name in mapped else same
                for name, part, same in zip(parts, getattr(b, attribute), first, strict=True)
            )
            for b in batches
        ]

    given_, direction = own("given"), own("direction")
    return [(Batch(given_[i], batches[i].weights, direction[i]), *drawn[i]) for i in range(ELEMENTS)]


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


COMPACT, KEYS = setup(chunk=2, compact=(1,)), setup("noisy", reverse=True, chunk=3)
EVERYDAY = [("all", COMPACT), ("the mask", setup(chunk=2, fill="hold")), ("params", KEYS)]


@pytest.mark.parametrize(
    ("mapped", "given"),
    [
        *(pytest.param(name, given, id=f"{name}, {given.case}") for name, given in EVERYDAY),
        *(pytest.param(name, KEYS, id=f"{name}, slow", marks=pytest.mark.slow) for name in ("all", "data", "init")),
    ],
)
def test_vmap(given, mapped):
    mapped = MAPPED[mapped]
    every = elements(given, mapped, np.nan)
    wants = [wanted(given, *one) for one in every]
    axes = [0 if name in mapped else None for name in ("params", "rows", "xs", "valid")]
    valid, resets = (stack(one) if axes[3] == 0 else one[0] for one in list(zip(*every, strict=True))[1:])
    together = Batch(
        tuple(
            stack(part) if axis == 0 else part[0]
            for part, axis in zip(zip(*[batch.given for batch, *_ in every], strict=True), axes, strict=False)
        ),
        stack([batch.weights for batch, *_ in every]),
        None,
    )

    def run(*args):
        return jax.vmap(lambda v, r, *given_: given.runner(v, r)(*given_), (axes[3], axes[3], *axes[:3]))(
            valid, resets, *args
        )

    def one(given_, weights, v, r):
        return derive("grad", given.runner(v, r), Batch(given_, weights, None))

    grad_of_vmap = jax.jit(functools.partial(derive, "grad", run))(together)
    vmap_of_grad = jax.jit(jax.vmap(one, (tuple(axes[:3]), 0, axes[3], axes[3])))(
        together.given, together.weights, valid, resets
    )
    assert_close(vmap_of_grad, stack(wants))
    added = [
        jax.tree.map(lambda leaf, axis=axis: leaf if axis == 0 else leaf.sum(0), part)
        for part, axis in zip(stack([want[1] for want in wants]), axes, strict=False)
    ]
    assert_close(grad_of_vmap, (stack([want[0] for want in wants]), tuple(added)))


@functools.cache
def nested_program(given):
    def run(valid, resets, params, rows, xs):
        one = lambda rows, xs, v, r: given.runner(v, r)(params, rows, xs)  # noqa: E731
        return jax.vmap(jax.vmap(one, (0, 1, 1, 1), (0, 1)), (0, 1, 1, 1), (0, 1))(rows, xs, valid, resets)

    return jax.jit(
        lambda batch, valid, resets: derive("grad", functools.partial(run, valid, resets), batch),
    )


@pytest.mark.parametrize("nothing", ["elements", "a whole axis", "all"])
def test_nested_vmap(nothing):
    given = setup(chunk=2, fill="hold")
    valid, resets = draw_rows(given.given, (4, 2, 3), 0.6, 4)
    valid[{"elements": np.s_[:, 0, 1], "a whole axis": np.s_[:, 1], "all": np.s_[:]}[nothing]] = False
    batch = make_batch(given.case, valid, np.nan)

    got = nested_program(given)(batch, valid, resets)
    assert_close(got, wanted(given, batch, valid, resets))
    assert_no_gradient_of_padding(got[1][2], valid)
