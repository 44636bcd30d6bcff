"""Words of other libraries: the hint in the error is code, and that code is right, against a loop in Python."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import treescan
from treescan._text import _ALSO_CALLED, _MEANINGS, advice

T, B = 7, 3
RNG = np.random.default_rng(0)
OBS = RNG.normal(size=(T, B)).astype("f")
ENDS = RNG.random((T, B)) < 0.35
LATER = RNG.random((T, B)) < 0.2
STARTS = np.concatenate([np.zeros((1, B), bool), ENDS[:-1]])
LENGTHS = np.array([7, 4, 2])
PADDING = np.arange(T)[:, None] >= LENGTHS[None]
IDS = np.where(PADDING, 0, np.cumsum(STARTS, 0) + 1)
MASKS = ("padding_mask", "key_padding_mask", "src_key_padding_mask", "pad_mask", "masked", "padding", "paddings")
MASKS += ("logit_paddings", "label_paddings")

# Of each word: its array, after which steps a segment has ended, and which steps are padding.
NONE = np.zeros((T, B), bool)
WORDS = {
    **dict.fromkeys(("done", "dones", "ends", "is_last", "terminals"), (ENDS, ENDS, NONE)),
    **dict.fromkeys(("terminated", "truncated"), (ENDS, ENDS | LATER, NONE)),
    **dict.fromkeys(("discount", "discounts"), (np.where(ENDS, 0.0, 0.9).astype("f"), ENDS, NONE)),
    **dict.fromkeys(("episode_start", "episode_starts", "is_first", "reset", "starts"), (STARTS, ENDS, NONE)),
    **dict.fromkeys(("segment_ids", "segments"), (IDS, ENDS, PADDING)),
    **dict.fromkeys(MASKS, (PADDING, NONE, PADDING)),
}
LAYOUTS = {"batch_first": True, "time_major": False}
NEWS = {"alpha", "tau", "step_size"}
RATES = {"every", "interval", "print_rate"}


def sums(ended, padding, *, reverse, init=0.0):
    """The running sums of each segment, 0 at padding. The segment of a row that runs first starts from init."""
    ys = np.zeros((T, B), "f")
    for row in range(B):
        total = init
        for t in reversed(range(T)) if reverse else range(T):
            if t < T - 1 and reverse and ended[t, row] and not padding[t + 1, row]:
                total = 0.0
            if not padding[t, row]:
                total += OBS[t, row]
                ys[t, row] = total
            if ended[t, row] and not reverse:
                total = 0.0
    return ys


def returns(rewards, discounts):
    ys, after = np.zeros((T, B), "f"), np.zeros(B, "f")
    for t in reversed(range(T)):
        after = ys[t] = rewards[t] + discounts[t] * after
    return ys


def hint_of(call, **words):
    """The code between the last backticks of the error."""
    with pytest.raises(treescan.errors.ArgumentTypeError) as caught:
        call(**words)
    return re.findall("`([^`]*)`", " ".join(str(caught.value).split()))[-1]


def add_up(total, x):
    return total + x, total + x


def scanned(xs, init=0.0, **options):
    return treescan.mask_scan(add_up, jnp.full(B, init), xs, **options)[1]


def solved(xs, init=0.0, **options):
    return treescan.linear_scan(1.0, xs, jnp.full(B, init), **options)[1]


@pytest.mark.parametrize("time_axis", [0, 1])
@pytest.mark.parametrize("verb", [scanned, solved])
@pytest.mark.parametrize("name", WORDS)
def test_the_code_of_a_hint_is_right(name, verb, time_axis):
    words, ended, padding = WORDS[name]
    of_rows = {"time_axis": time_axis} if time_axis else {}
    obs, words, other = (jnp.asarray(x.T if time_axis else x) for x in (OBS, words, LATER))
    code = hint_of(lambda **options: verb(obs, **of_rows, **options), **{name: words})
    names = {"jnp": jnp, "linear_scan": treescan.linear_scan, "b": obs, "terminated": other, "truncated": other}
    names[name] = words
    if code.startswith("linear_scan"):
        code = code.replace("reverse=True", f"reverse=True, time_axis={time_axis}")
        got, expected = eval(code, names)[1], returns(OBS, np.asarray(WORDS[name][0]))
        np.testing.assert_allclose(got.T if time_axis else got, expected, rtol=1e-5)
        return
    for reverse in (False, True):
        options = eval(f"dict({code})", names)
        stored = {"init": 100.0, "reset_to": 0.0} if "resets" in options else {}
        got = verb(obs, reverse=reverse, **of_rows, **options, **stored)
        expected = sums(ended, padding, reverse=reverse, init=stored.get("init", 0.0))
        np.testing.assert_allclose(got.T if time_axis else got, expected, rtol=1e-4, atol=1e-4)


def test_a_float_padding_is_converted_too():
    code = hint_of(lambda **options: scanned(OBS, **options), paddings=PADDING.astype("f"))
    got = scanned(OBS, **eval(f"dict({code})", {"jnp": jnp, "paddings": PADDING.astype("f")}))
    np.testing.assert_allclose(got, sums(NONE, PADDING, reverse=False), rtol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_converted(name):
    code = hint_of(lambda **options: scanned(OBS.T, lengths=LENGTHS, **options), **{name: LAYOUTS[name]})
    got = scanned(OBS.T, lengths=LENGTHS, **eval(f"dict({code})"))
    np.testing.assert_allclose(got.T, sums(NONE, PADDING, reverse=False), rtol=1e-5)
    code = hint_of(lambda **options: treescan.scan(add_up, jnp.zeros(B), OBS.T, **options), **{name: LAYOUTS[name]})
    _, got = treescan.scan(add_up, jnp.zeros(B), OBS.T, **eval(f"dict({code})"))
    np.testing.assert_allclose(got, sums(NONE, NONE, reverse=False), rtol=1e-5)


@pytest.mark.parametrize("name", sorted(NEWS))
def test_the_weight_of_a_new_value_is_converted(name):
    code = hint_of(lambda **options: treescan.carries.ema(0.0, **options), **{name: 0.1})
    average = treescan.carries.ema(0.0, **eval(f"dict({code})", {name: 0.1}))
    final = treescan.fold(lambda _, x: x, average, jnp.asarray(OBS[:, 0]))
    expected = 0.0
    for x in OBS[:, 0]:
        expected += 0.1 * (x - expected)
    np.testing.assert_allclose(final.read(), expected, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(RATES))
def test_a_rate_is_converted(name):
    code = hint_of(treescan.meters.Progress, **{name: 5})
    assert treescan.meters.Progress(**eval(f"dict({code})", {"length": 20, "k": 5})).updates == 4


def test_every_word_of_another_meaning_is_tested():
    assert _MEANINGS.keys() == WORDS.keys() | LAYOUTS.keys() | RATES | NEWS
    assert not _MEANINGS.keys() & {word for words in _ALSO_CALLED.values() for word in words}


def test_a_verb_without_rows_names_the_one_that_has_them():
    with pytest.raises(treescan.errors.ArgumentTypeError, match=r"`treescan.mask_scan` has an option[\s\S]*jnp.roll"):
        treescan.scan(add_up, jnp.zeros(B), OBS, dones=ENDS)


@pytest.mark.parametrize("name", ["terminated", "truncated", "lengths", "discounts", "cache"])
def test_spelling_does_not_decide_between_words(name):
    assert "Did you mean" not in advice(name, ["truncate", "length", "count", "catch", "max_len"])


@pytest.mark.parametrize(
    ("name", "meant"), [("revers", "reverse"), ("lenghts", "lengths"), ("max_lenght", "max_length")]
)
def test_what_is_misspelt_is_found(name, meant):
    assert advice(name, ["reverse", "lengths", "length", "max_length"]) == f"Did you mean `{meant}`?"
