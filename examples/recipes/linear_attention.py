"""Layers of linear attention, whose state is a matrix: gated linear attention
(Yang et al., 2024), DeltaNet (Yang et al., 2024) and RWKV-7 (Peng et al.,
2025). And the first of them in chunks.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import treescan

Keys = Float[Array, "steps batch heads keys"]
Values = Float[Array, "steps batch heads values"]
Lengths = Int[Array, " batch"]


# --8<-- [start:gated]
def blank(n: Lengths, *given: Array) -> list[Array]:
    """Zeros in padding, which products outside of a loop would read."""
    valid = treescan.length_mask(n, len(given[0]))[..., None, None]
    return [jnp.where(valid, each, 0.0) for each in given]


def gated(q: Keys, k: Keys, v: Values, log_a: Keys, n: Lengths) -> Values:
    """S = diag(a) S + k v', and o = S' q."""
    q, k, v, log_a = blank(n, q, k, v, log_a)
    decay, added = jnp.exp(log_a)[..., None], k[..., None] * v[..., None, :]
    _, states = treescan.linear_scan(decay, added, lengths=n)
    return jnp.einsum("tbhk,tbhkv->tbhv", q, states)


# --8<-- [end:gated]
# --8<-- [start:rwkv7]
def rwkv7(
    q: Keys, k: Keys, v: Values, a: Keys, out: Keys, rate: Keys, n: Lengths
) -> Values:
    """S = S (diag(a) - out (rate out)') + v k', and o = S q.

    Each row of S is a vector, and all rows have one matrix. DeltaNet is
    `rwkv7(q, k, beta * v, ones, k, betas, n)`, with betas as wide as keys.
    """
    q, k, v, a, out, rate = blank(n, q, k, v, a, out, rate)
    kept = jnp.eye(k.shape[-1]) * a[..., None, :]
    matrix = kept - out[..., :, None] * (rate * out)[..., None, :]
    _, states = treescan.linear_scan(
        matrix.mT[..., None, :, :],
        v[..., :, None] * k[..., None, :],
        lengths=n,
        matrix=True,
    )
    return jnp.einsum("tbhvk,tbhk->tbhv", states, q)


# --8<-- [end:rwkv7]
# --8<-- [start:chunks]
def within(chunks: tuple[Array, Array, Array, Array]) -> Array:
    """What the steps of a chunk read from each other: leaves [N, c, ...]."""
    q, k, v, since = chunks
    apart = since[:, :, None] - since[:, None]
    order = jnp.tril(jnp.ones(apart.shape[1:3], bool))[..., None, None, None]
    decay = jnp.exp(jnp.where(order, apart, -jnp.inf))
    weights = jnp.einsum("nibhk,njbhk,nijbhk->nijbh", q, k, decay)
    return jnp.einsum("nijbh,njbhv->nibhv", weights, v)


def within_by_division(chunks: tuple[Array, Array, Array, Array]) -> Array:
    """The same, if float32 holds 1 divided by the decay of a chunk."""
    q, k, v, since = chunks
    grown = jnp.exp(-since) * k
    weights = jnp.einsum("nibhk,njbhk->nijbh", jnp.exp(since) * q, grown)
    order = jnp.tril(jnp.ones(weights.shape[1:3], bool))[..., None, None]
    weights = jnp.where(order, weights, 0.0)
    return jnp.einsum("nijbh,njbhv->nibhv", weights, v)


def gated_in_chunks(
    q: Keys,
    k: Keys,
    v: Values,
    log_a: Keys,
    n: Lengths,
    chunk: int,
    within: Callable[[tuple[Array, Array, Array, Array]], Array] = within,
) -> Values:
    """`gated`, with a state for each chunk. `chunk` divides the steps."""
    q, k, v, log_a = (
        x.reshape(-1, chunk, *x.shape[1:]) for x in blank(n, q, k, v, log_a)
    )
    since = jnp.cumsum(log_a, axis=1)  # the chunk began
    left = since[:, -1:] - since  # until it ends
    added = jnp.einsum("ncbhk,ncbhv->nbhkv", jnp.exp(left) * k, v)
    decay = jnp.exp(since[:, -1])[..., None]
    _, states = treescan.linear_scan(decay, added)
    before = jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])
    outside = jnp.einsum("ncbhk,nbhkv->ncbhv", jnp.exp(since) * q, before)
    inside = treescan.chunk_map(within, (q, k, v, since), 1)
    return (inside + outside).reshape(-1, *v.shape[2:])


# --8<-- [end:chunks]
