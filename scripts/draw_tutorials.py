"""The pictures of the tutorials: the utterances that a model reads, a decoder with its cache, and Newton's method."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from picture import WIDTH, Picture

import treescan

VOWELS = Path(__file__).parent.parent / "examples" / "data" / "japanese_vowels.npz"
UTTERANCES = 8


def vowels() -> Picture:
    """Some utterances as a padded batch, read in both directions."""
    with np.load(VOWELS) as data:
        lengths = data["train_lengths"][:UTTERANCES].tolist()
        longest = int(data["train_lengths"].max())
    row, top, left = 26, 60, 34
    cell = (WIDTH - left - 8) / longest
    bottom = top + row * len(lengths)
    picture = Picture(
        "vowels",
        bottom + 64,
        "Utterances of different lengths, read both ways",
        f"{len(lengths)} utterances of {', '.join(map(str, lengths))} frames, padded to {longest}. One scan reads each "
        "from its first frame to its last, the other from its last frame to its first. Neither reads the padding. "
        "The states of both, at each frame, tell who is speaking.",
    )
    picture.text(0, 16, f"{len(lengths)} utterances, padded to {longest} frames", "bold")
    picture.text(0, top - 14, "read forwards, and with reverse=True from the end:", "small")
    for number, length in enumerate(lengths):
        y = top + row * number
        picture.text(left - 8, y + 15, str(length), "small", "end")
        for step in range(longest):
            kind = "strong" if step < length else "absent"
            picture.box(left + step * cell + 0.75, y + 2, cell - 1.5, row - 7, kind, round_=2)
        begin, end = left + 4, left + length * cell - 4
        picture.arrow((begin, y + 8), (end, y + 8))
        picture.arrow((end, y + 15), (begin, y + 15))
    picture.box(left, bottom + 16, 18, 16, "strong", round_=2)
    picture.text(left + 26, bottom + 29, "a frame")
    picture.box(left + 110, bottom + 16, 18, 16, "absent", round_=2)
    picture.text(left + 136, bottom + 29, "padding, which no scan reads")
    picture.text(left, bottom + 54, f"{sum(lengths)} of {len(lengths) * longest} are frames", "small")
    return picture


LAYERS, POSITIONS, WRITTEN = 4, 12, 7


def cache() -> Picture:
    """A decoder that writes: each layer reads the cache of its own and adds the new byte's keys and values."""
    top, height, left, slab = 70, 44, 60, 210
    bottom = top + LAYERS * height
    picture = Picture(
        "cache",
        bottom + 96,
        "A decoder that writes with a cache",
        f"The last byte goes through {LAYERS} layers, run by fold_layers. Each layer has a row of a cache with "
        f"{POSITIONS} positions, of which {WRITTEN} are written. It adds the keys and values of the new byte at the "
        "next position, reads all that are written, and hands x to the next layer. The last x gives the next byte.",
    )
    cell = slab / POSITIONS
    at = left + 90
    picture.text(0, 16, "fold_layers(block, x, layers, state=cache)", "code")
    picture.text(at, top - 12, "cache: keys and values by position", "small")
    picture.text(left - 10, top - 22, "the last byte", "small", "middle")
    picture.arrow((left - 10, top - 16), (left - 10, top + 4))
    for layer in range(LAYERS):
        y = top + layer * height + 4
        picture.box(left - 58, y, 96, 28, "strong box")
        picture.text(left - 10, y + 19, f"layer {layer}", "small", "middle")
        if layer + 1 < LAYERS:
            picture.arrow((left - 10, y + 28), (left - 10, y + height))
        for position in range(POSITIONS):
            kind = "data" if position == WRITTEN else "strong" if position < WRITTEN else "absent"
            picture.box(at + position * cell + 1, y + 5, cell - 2, 18, kind, round_=2)
        picture.arrow((at - 2, y + 9), (left + 40, y + 9))
        picture.arrow((left + 40, y + 19), (at - 2, y + 19))
    picture.arrow((left - 10, bottom - 12), (left - 10, bottom + 18))
    picture.text(left - 10, bottom + 34, "the next byte", "small", "middle")
    for y, kind, says in (
        (bottom + 24, "strong", "written before, and read"),
        (bottom + 48, "data", "written now, in place"),
        (bottom + 72, "absent", "free"),
    ):
        picture.box(at, y, 18, 16, kind, round_=2)
        picture.text(at + 26, y + 13, says)
    return picture


SQUARE = 2.0


def iterates() -> list[float]:
    """What Newton's method for a square root goes through, from a start that shows it well."""

    def off(x: jax.Array) -> jax.Array:
        return jnp.abs(x * x - SQUARE) > 1e-6 * SQUARE

    def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        following = (x + SQUARE / x) / 2
        return following, following

    found = treescan.while_scan(off, step, jnp.float32(4.0), max_length=40)
    return [4.0, *map(float, found.ys[: int(found.steps)])]


def newton() -> Picture:
    """The tangents that Newton's method follows to the root of x^2 - 2."""
    visited = iterates()
    height, zero, right = 310, 262, 4.4
    picture = Picture(
        "newton",
        height,
        "Newton's method for the square root of 2",
        f"The curve x squared minus {SQUARE:g}. From x = {visited[0]:g} each step follows the tangent to where it "
        f"crosses zero: {', '.join(f'{x:.3f}' for x in visited[1:])}. After {len(visited) - 1} steps the condition no "
        "longer holds, and the loop stops.",
    )

    def at(x: float, y: float) -> tuple[float, float]:
        return 16 + x * (WIDTH - 32) / right, zero - y * 14.5

    picture.line(at(0, 0), at(right, 0), kind="line")
    picture.line(*(at(x / 40, (x / 40) ** 2 - SQUARE) for x in range(int(right * 40) - 1)), kind="curve")
    for number, (x, following) in enumerate(itertools.pairwise(visited)):
        picture.line(at(x, 0), at(x, x * x - SQUARE), kind="rule")
        picture.line(at(x, x * x - SQUARE), at(following, 0), kind="line")
        picture.dot(*at(x, x * x - SQUARE), 4)
        if number < 3:  # x2 beside x1 would overlap it
            below = zero + (36 if number == 2 else 18)
            picture.text(at(x, 0)[0], below, f"x{number} = {x:.3g}", "small", "middle")
    picture.text(16, 20, "x * x - 2", "code")
    picture.text(16, 46, f"{len(visited) - 1} steps: {', '.join(f'{x:.3g}' for x in visited[:4])}, ...", "small")
    picture.text(16, 68, "each follows the tangent to zero", "small")
    return picture
