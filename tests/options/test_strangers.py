"""Options of strangers: the same numbers as if the body did it, with every other option; and what they may do wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clip_option import Clip, ClipOnce, ClipRows, clipped
from oracle import assert_close
from thin import everyday

import treescan

T, B, D, MOST = 24, 4, 8, 0.01
RNG = np.random.default_rng(0)
W, XS, H0 = (RNG.normal(size=size).astype("f") for size in ((D, D), (T, B, D), (B, D)))
LENGTHS = jnp.array([24, 16, 3, 0])


def cell(w, *, clip):
    def body(h, x):
        h = clipped(MOST, h) if clip else h
        h = jnp.tanh(h @ w * 0.6 + x)
        return h, h.sum(-1)

    return body


def mask_scan(*args, **options):
    return treescan.mask_scan(*args, lengths=LENGTHS, **options)


def while_scan(body, h, xs, **options):
    return treescan.while_scan(lambda h: h[:, 0] < 0.9, body, h, xs, **options)[:2]


def layers(body, h, xs, **options):
    return treescan.scan_layers(lambda x, h: body(h, x), h, xs, **options)


def pattern(body, h, xs, **options):
    def block(x, h):
        return body(h, x)

    h, ys = treescan.scan_layers([block, lambda x, h: block(x, h)], h, [xs[:12], xs[12:]], **options)
    return h, jnp.concatenate(ys)


EVERYWHERE = [{}, {"reverse": True}, {"remat": "step"}, {"save": "last"}]
OF_SCANS = [{"remat": "nested"}, {"remat": "auto"}, {"truncate": 5}, {"check_finite": True}, {"save": 4}]
OF_ROWS = [{"chunk": 4}, {"compact": True}, {"chunk": 0}]
CASES = [
    *((treescan.scan, options) for options in EVERYWHERE + OF_SCANS),
    *((mask_scan, options) for options in EVERYWHERE + OF_SCANS + OF_ROWS),
    *((while_scan, options) for options in [*EVERYWHERE, {"compact": True}]),
    *((layers, options) for options in EVERYWHERE),
    *((pattern, options) for options in EVERYWHERE[:3]),
]


def gradients(verb, *, clip=False, **options):
    def loss(w, h, xs):
        h, ys = verb(cell(w, clip=clip), h, xs, **options)
        return (h**2).sum() + (ys**2).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(W, H0, XS)


@pytest.mark.parametrize(("verb", "options"), everyday(CASES))
def test_an_option_is_as_if_the_body_did_it(verb, options):
    expected = gradients(verb, clip=True, **options)
    others = (ClipRows, ClipOnce) if verb is treescan.scan and "truncate" not in options else ()
    for kind in (Clip, *others):
        assert_close(gradients(verb, options=[kind(MOST)], **options), expected, rtol=1e-4)
    plain = gradients(verb, **options)
    assert not np.allclose(plain[1][0], expected[1][0], rtol=1e-2)


def by_hand(body, h, xs):
    """All rows take all steps, and a padded one keeps its carry: a clip in the body sees cotangents of padding too."""

    def step(h, x_and_valid):
        x, valid = x_and_valid
        h = clipped(MOST, h)
        new, y = body(h, x)
        return jnp.where(valid[:, None], new, h), jnp.where(valid, y, 0)

    return treescan.scan(step, h, (xs, jnp.arange(T)[:, None] < LENGTHS[None]))


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"remat": "step", "save": 4}], ids=str)
def test_around_the_mask_it_sees_padded_rows(options):
    kept = {name: value for name, value in options.items() if name == "save"}
    expected = gradients(functools.partial(treescan_saved, kept), clip=False)
    for kind in (ClipRows, ClipOnce):
        assert_close(gradients(mask_scan, options=[kind(MOST)], **options), expected, rtol=1e-4)


def treescan_saved(kept, body, h, xs):
    h, ys = by_hand(body, h, xs)
    return h, ys[3::4] if kept else ys
