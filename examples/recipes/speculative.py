"""Speculative decoding (Leviathan et al., 2023) of the greedy text.

A small decoder writes some tokens ahead, and the large one reads all of them
at once. It keeps those that it would have written itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

import treescan

from .decoding import END, Cache, Decoder, attend


def read_ahead(
    p: Decoder, tokens: Array, at: Array, cache: Cache
) -> tuple[Array, Cache]:
    """Logits after each of some tokens [B, n], of which the first is `at`."""
    x = p.embed[tokens]
    q, k, v = jnp.split(x @ p.qkv, 3, -1)
    rows = jnp.arange(len(at))[:, None]
    places = at[:, None] + jnp.arange(tokens.shape[1])
    cache = Cache(
        cache.keys.at[rows, places].set(k, mode="drop"),
        cache.values.at[rows, places].set(v, mode="drop"),
    )
    seen = jnp.arange(cache.keys.shape[1]) <= places[..., None]
    scores = jnp.einsum("bnd,btd->bnt", q, cache.keys) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    x = x + jnp.einsum("bnt,btd->bnd", weights, cache.values)
    x = x + jax.nn.relu(x @ p.up) @ p.down
    return x @ p.embed.T, cache


# --8<-- [start:speculative]
class Speculating(NamedTuple):
    """Where each row is, and the caches of both decoders."""

    token: Int[Array, " batch"]
    at: Int[Array, " batch"]
    cache: Cache
    small: Cache


# The axes of rows; of the caches none, as a step writes into them in place.
AXES = Speculating._make((0, 0, None, None))


def speculate(
    large: Decoder,
    small: Decoder,
    start: Speculating,
    ahead: int,
    rounds: int,
) -> treescan.types.WhileResult[Speculating, Array]:
    """The text of `greedy`: ys int[rounds, B, ahead + 1], -1 elsewhere."""
    room = start.cache.keys.shape[1]

    def goes_on(state: Speculating) -> Bool[Array, " batch"]:
        return (state.token != END) & (state.at < room)

    def guess(
        carry: tuple[Array, Array, Cache], _: None
    ) -> tuple[tuple[Array, Array, Cache], Array]:
        token, at, cache = carry
        logits, cache = attend(small, token, at, cache)
        following = jnp.argmax(logits, -1).astype(token.dtype)
        return (following, at + 1, cache), following

    def step(
        state: Speculating, _: None, *, valid: Array
    ) -> tuple[Speculating, Array]:
        token, at, cache, drafts = state
        place = jnp.where(valid, at, room)  # others write nothing
        after, guessed = treescan.scan(
            guess, (token, place, drafts), length=ahead + 1
        )
        guessed = guessed[:-1].T  # the last was run for its cache alone
        given = jnp.concatenate([token[:, None], guessed], 1)
        logits, cache = read_ahead(large, given, place, cache)
        written = jnp.argmax(logits, -1).astype(token.dtype)
        # A token counts while all before it were guessed and not the end.
        goes = (guessed == written[:, :-1]) & (guessed != END)
        kept = jnp.cumprod(goes, 1).astype(bool)
        kept = jnp.concatenate([jnp.ones_like(kept[:, :1]), kept], 1)
        kept = kept & (at[:, None] + jnp.arange(ahead + 1) < room)
        count = kept.sum(1)
        token = written[jnp.arange(len(at)), count - 1]
        ys = jnp.where(kept, written, -1)
        return Speculating(token, at + count, cache, after[2]), ys

    return treescan.while_scan(
        goes_on,
        step,
        start,
        max_length=rounds,
        fill=-1,
        row_axes={"carry": AXES},
    )


# --8<-- [end:speculative]
