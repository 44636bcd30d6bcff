"""Greedy and beam decoding of a batch, with a cache of keys and values.

Prompts have different lengths. Each row stops by itself: at its end token,
or where its cache is full.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import treescan

END = 0


class Decoder(NamedTuple):
    """One layer of attention and one of neurons."""

    embed: Float[Array, "symbols width"]
    qkv: Float[Array, "width three"]
    up: Float[Array, "width wide"]
    down: Float[Array, "wide width"]


class Cache(NamedTuple):
    """Keys and values of what each row, or each of its beams, has read."""

    keys: Float[Array, "*batch room width"]
    values: Float[Array, "*batch room width"]


class Writing(NamedTuple):
    """Where each row is: its last token, its place, and its cache."""

    token: Int[Array, " batch"]
    at: Int[Array, " batch"]
    cache: Cache


def attend(
    p: Decoder, token: Array, at: Array, cache: Cache
) -> tuple[Array, Cache]:
    """Logits of the next tokens, and the cache with the present ones.

    A row whose place is beyond its cache writes nothing.
    """
    x = p.embed[token]
    q, k, v = jnp.split(x @ p.qkv, 3, -1)
    rows = jnp.arange(len(at))
    cache = Cache(
        cache.keys.at[rows, at].set(k, mode="drop"),
        cache.values.at[rows, at].set(v, mode="drop"),
    )
    seen = jnp.arange(cache.keys.shape[1]) <= at[:, None]
    scores = jnp.einsum("bd,btd->bt", q, cache.keys) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    x = x + jnp.einsum("bt,btd->bd", weights, cache.values)
    x = x + jax.nn.relu(x @ p.up) @ p.down
    return x @ p.embed.T, cache


def room(p: Decoder, rows: int, steps: int) -> Cache:
    """An empty cache."""
    empty = jnp.zeros((rows, steps, p.embed.shape[1]))
    return Cache(empty, empty)


# --8<-- [start:greedy]
# The cache is one array for all rows: a step writes a row of it for each, and
# nothing chooses between the old cache and the new one.
AXES = Writing._make((0, 0, None))


def read(p: Decoder, prompts: treescan.Padded[Array], steps: int) -> Writing:
    """Reads prompts int32[T, B] of different lengths into a cache."""

    def step(
        writing: Writing, token: Array, *, valid: Array
    ) -> tuple[Writing, None]:
        _, at, cache = writing
        _, cache = attend(p, token, jnp.where(valid, at, steps), cache)
        return Writing(token, at + 1, cache), None

    rows = prompts.lengths.shape[0]
    zeros = jnp.zeros(rows, jnp.int32)
    start = Writing(zeros, zeros, room(p, rows, steps))
    writing, _ = treescan.mask_scan(
        step, start, prompts, row_axes={"carry": AXES}
    )
    return writing._replace(at=writing.at - 1)


def greedy(
    p: Decoder, writing: Writing, steps: int
) -> treescan.types.WhileResult[Writing, Array]:
    """Writes until the end token: ys int32[steps, B], -1 after it."""

    def goes_on(writing: Writing) -> Bool[Array, " batch"]:
        has_room = writing.at < writing.cache.keys.shape[1]
        return (writing.token != END) & has_room

    def step(
        writing: Writing, _: None, *, valid: Array
    ) -> tuple[Writing, Array]:
        token, at, cache = writing
        place = jnp.where(valid, at, cache.keys.shape[1])
        logits, cache = attend(p, token, place, cache)
        token = jnp.argmax(logits, -1)
        return Writing(token, at + 1, cache), token

    return treescan.while_scan(
        goes_on,
        step,
        writing,
        max_length=steps,
        fill=-1,
        row_axes={"carry": AXES},
    )


# --8<-- [end:greedy]
def greedy_by_hand(
    p: Decoder, writing: Writing, steps: int
) -> tuple[Int[Array, "steps batch"], Int[Array, " batch"]]:
    """The same by `jax.lax.while_loop`: tokens, and their numbers."""
    places = writing.cache.keys.shape[1]

    def goes_on(writing: Writing) -> Array:
        return (writing.token != END) & (writing.at < places)

    def cond(carry: tuple[Array, Writing, Array, Array]) -> Array:
        step, writing, _, _ = carry
        return (step < steps) & goes_on(writing).any()

    def body(carry: tuple[Array, Writing, Array, Array]) -> Any:
        step, writing, written, taken = carry
        live = goes_on(writing)
        logits, cache = attend(p, *writing)
        token = jnp.argmax(logits, -1)
        written = written.at[step].set(jnp.where(live, token, -1))
        after = Writing(
            jnp.where(live, token, writing.token),
            writing.at + live,
            cache,  # a row that has stopped writes where nobody reads
        )
        return step + 1, after, written, taken + live

    rows = writing.token.shape[0]
    blank = jnp.full((steps, rows), -1, writing.token.dtype)
    carry = (jnp.int32(0), writing, blank, jnp.zeros(rows, jnp.int32))
    _, _, written, taken = jax.lax.while_loop(cond, body, carry)
    return written, taken


class Beams(NamedTuple):
    """The best beginnings of each row: leaves [B, beams, ...]."""

    token: Int[Array, "batch beams"]
    at: Int[Array, " batch"]
    score: Float[Array, "batch beams"]
    ended: Bool[Array, "batch beams"]
    texts: Int[Array, "batch beams steps"]
    cache: Cache


def begin(writing: Writing, beams: int, steps: int) -> Beams:
    """All beams of a row begin alike; only the first counts at first."""

    def repeat(leaf: Array) -> Array:
        return jnp.repeat(leaf[:, None], beams, axis=1)

    rows = writing.token.shape[0]
    first = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
    return Beams(
        repeat(writing.token),
        writing.at,
        jnp.broadcast_to(first, (rows, beams)),
        jnp.zeros((rows, beams), bool),
        jnp.full((rows, beams, steps), -1, writing.token.dtype),
        jax.tree.map(repeat, writing.cache),
    )


def widen(p: Decoder, start: Array, state: Beams) -> Beams:
    """One step of all beams: the best continuations of each row stay."""
    rows, beams = state.token.shape
    at = jnp.repeat(state.at, beams)
    cache = jax.tree.map(
        lambda leaf: leaf.reshape(rows * beams, *leaf.shape[2:]), state.cache
    )
    logits, cache = attend(p, state.token.reshape(-1), at, cache)
    chances = jax.nn.log_softmax(logits).reshape(rows, beams, -1)
    # A beam that has ended has one continuation: nothing.
    symbols = chances.shape[-1]
    stays = jnp.where(jnp.arange(symbols) == END, 0.0, -jnp.inf)
    chances = jnp.where(state.ended[..., None], stays, chances)
    scores = (state.score[..., None] + chances).reshape(rows, -1)
    score, best = jax.lax.top_k(scores, beams)
    source, token = best // symbols, best % symbols

    def follow(leaf: Array) -> Array:
        index = source.reshape(source.shape + (1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf, index, axis=1)

    ended, texts = follow(state.ended), follow(state.texts)
    place = (state.at - start)[:, None, None]
    written = jnp.where(ended, -1, token).astype(texts.dtype)[..., None]
    texts = jnp.where(jnp.arange(texts.shape[-1]) == place, written, texts)
    cache = jax.tree.map(
        lambda leaf: follow(leaf.reshape(rows, beams, *leaf.shape[1:])), cache
    )
    token = token.astype(state.token.dtype)
    ended = ended | (token == END)
    return Beams(token, state.at + 1, score, ended, texts, cache)


def unfinished(state: Beams) -> Bool[Array, " batch"]:
    """Rows with room in which a beam has not ended."""
    has_room = state.at < state.cache.keys.shape[2]
    return ~state.ended.all(-1) & has_room


# --8<-- [start:beam]
def beam(p: Decoder, writing: Writing, beams: int, steps: int) -> Beams:
    """The best beams of each row; a row stops when all of its have ended."""

    def step(
        carry: tuple[Array, Beams], _: None
    ) -> tuple[tuple[Array, Beams], None]:
        start, state = carry
        return (start, widen(p, start, state)), None

    ended = treescan.while_scan(
        lambda carry: unfinished(carry[1]),
        step,
        (writing.at, begin(writing, beams, steps)),
        max_length=steps,
    )
    return ended.carry[1]


# --8<-- [end:beam]
def beam_by_hand(
    p: Decoder, writing: Writing, beams: int, steps: int
) -> Beams:
    """The same by `jax.lax.while_loop`."""

    def cond(carry: tuple[Array, Beams]) -> Array:
        step, state = carry
        return (step < steps) & unfinished(state).any()

    def body(carry: tuple[Array, Beams]) -> tuple[Array, Beams]:
        step, state = carry
        live = unfinished(state)
        new = widen(p, writing.at, state)

        def choose(new: Array, old: Array) -> Array:
            rows = live.reshape(live.shape + (1,) * (new.ndim - 1))
            return jnp.where(rows, new, old)

        return step + 1, jax.tree.map(choose, new, state)

    start = (jnp.int32(0), begin(writing, beams, steps))
    return jax.lax.while_loop(cond, body, start)[1]
