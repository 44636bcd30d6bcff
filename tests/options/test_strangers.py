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
from treescan.options import Around, Option, Slot

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


class Failing(Option):
    """An option with a fault of its own."""

    def __call__(self, step, consts, state, feed):
        return step(consts, state + self.missing, feed)


class Louder(Option):
    """Feeds each step a factor, and returns the norm of the carry beside y."""

    LOUDNESS = Slot("loudness", rows=False)

    def __call__(self, step, consts, state, feed):
        state, y = step(consts, state, feed._replace(x=feed.x * self.LOUDNESS.of(feed)))
        return state, (y, jnp.linalg.norm(state, axis=-1))

    def feeds(self, length):
        return {self.LOUDNESS: jnp.arange(1.0, length + 1)}


def test_what_an_option_raises_names_its_package_and_what_the_body_raises_does_not():
    with pytest.raises(AttributeError) as caught:
        treescan.scan(lambda h, x: (h, x), H0, XS, options=[Failing()])
    assert caught.value.__notes__[0] == "The option `Failing` of `test_strangers` raised this."
    with pytest.raises(ZeroDivisionError) as caught:
        treescan.scan(lambda h, x: (h, 1 // 0), H0, XS, options=[Clip(1.0)])
    assert not any("option" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"compact": True}, {"chunk": 4, "remat": "step"}], ids=str)
def test_an_option_feeds_steps_and_returns_more(options):
    body, factors = cell(W, clip=False), jnp.arange(1.0, T + 1)[:, None, None]

    def by_hand(h, x):
        h, y = body(h, x)
        return h, (y, jnp.linalg.norm(h, axis=-1))

    expected = mask_scan(by_hand, H0, XS * factors, **options)
    assert_close(mask_scan(body, H0, XS, options=[Louder()], **options), expected)
    for verb, kept in ((treescan.scan, slice(0, 2)), (while_scan, slice(0, 2))):
        plain = {name: value for name, value in options.items() if name in ("reverse", "remat")}
        got = verb(body, H0, XS, options=[Louder()], **plain)
        assert_close(got, verb(by_hand, H0, XS * factors, **plain)[kept])


class Idle(Louder):
    """Feeds what nothing reads."""

    def __call__(self, step, consts, state, feed):
        return step(consts, state, feed)


@pytest.mark.parametrize("verb", [mask_scan, while_scan])
def test_a_body_that_reads_which_rows_are_valid_does_so_beside_a_slot(verb):
    """Rows meet in such a body: were padding not hidden from it, all of them would be NaN."""

    def body(h, x, *, valid):
        most = jnp.max(jnp.where(valid[:, None], 0.0, -1e9) + x, axis=0, keepdims=True)
        return h + most, h * most

    xs = jnp.where((jnp.arange(T)[:, None] < LENGTHS[None])[..., None], XS, jnp.nan) if verb is mask_scan else XS
    assert_close(verb(body, H0, xs, options=[Idle()]), verb(body, H0, xs))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(verb(body, H0, xs)))


def test_the_first_option_is_the_innermost_and_a_program_is_compiled_once():
    traces = []

    def body(h, x):
        traces.append(x)
        return 2.0 * h + x, h

    def run(*options):
        return jax.grad(lambda h: treescan.fold(lambda h, x: body(h, x)[0], h, jnp.ones(3), options=options))(1.0)

    assert (run(), run(Clip(1.5)), run(Clip(8.0), Clip(3.0)), run(Clip(3.0), Clip(8.0))) == (8.0, 1.5, 3.0, 3.0)
    for _ in range(2):
        treescan.scan(body, 1.0, jnp.ones(3), options=[Clip(1.0)])
        before = len(traces)
    treescan.scan(body, 1.0, jnp.ones(3), options=[Clip(1.0)])
    assert len(traces) == before


class Numbered(Option):
    """Adds to each row a number of its own, at each step another."""

    NUMBERS = Slot("numbers", rows=True)

    def __call__(self, step, consts, state, feed):
        state, y = step(consts, state, feed)
        return state, y + self.NUMBERS.of(feed)

    def feeds(self, length):
        return {self.NUMBERS: jnp.arange(1.0 * length * B).reshape(length, B)}


class NumberedOutside(Numbered):
    around = Around.MASK


class NumberedOnce(Numbered):
    around = Around.REMAT


class OfTooFewRows(Numbered):
    def feeds(self, length):
        return {self.NUMBERS: {"one": jnp.ones((length, B)), "other": jnp.ones((length, B - 1))}}


class OfTooFewRowsOutside(OfTooFewRows):
    around = Around.MASK


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("options", [{}, {"compact": True}, {"chunk": 4, "remat": "step"}], ids=str)
def test_what_has_rows_is_fed_around_the_mask_too(options, disabled):
    _, ys = mask_scan(cell(W, clip=False), H0, XS, **options)
    expected = ys + jnp.arange(1.0 * T * B).reshape(T, B)
    with jax.disable_jit(disabled):
        for kind in (Numbered, NumberedOutside, NumberedOnce):
            _, got = mask_scan(cell(W, clip=False), H0, XS, options=[kind()], **options)
            valid = jnp.arange(T)[:, None] < LENGTHS[None]
            assert_close(got[valid], expected[valid])


@pytest.mark.parametrize("kind", [OfTooFewRows, OfTooFewRowsOutside])
@pytest.mark.parametrize("options", [{}, {"compact": True}], ids=str)
def test_rows_of_a_slot_are_those_of_the_batch(kind, options):
    for verb in (mask_scan, while_scan) if kind is OfTooFewRows else (mask_scan,):
        with pytest.raises(treescan.errors.PluginError, match=r"fed\s+float32\[24,3\]"):
            verb(cell(W, clip=False), H0, XS, options=[kind()], **options)
