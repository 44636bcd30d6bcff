"""A bidirectional GRU with a CTC loss, on padded and on packed batches.

`by_hand` is the same loss with `jax.lax.scan` and a mask.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

import treescan


class Gru(NamedTuple):
    """Weights of a GRU, gates side by side: reset, update, candidate."""

    x: Float[Array, "features gates"]
    h: Float[Array, "hidden gates"]
    b: Float[Array, " gates"]


class Model(NamedTuple):
    """A GRU for each direction, and what makes logits of both."""

    ahead: Gru
    back: Gru
    out: Float[Array, "both symbols"]


class Labels(NamedTuple):
    """What was said, padded; 0 is the blank."""

    symbols: Int[Array, "batch labels"]
    padding: Float[Array, "batch labels"]


def step(p: Gru, h: Array, x: Array) -> tuple[Array, Array]:
    """One step of a GRU: h [B, H], x [B, F]."""
    of_x, of_h = x @ p.x + p.b, h @ p.h
    xr, xz, xn = jnp.split(of_x, 3, -1)
    hr, hz, hn = jnp.split(of_h, 3, -1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
    return h, h


def ctc(
    logits: Float[Array, "time batch symbols"],
    mask: Bool[Array, "time batch"],
    labels: Labels,
) -> Float[Array, " batch"]:
    """The loss of each sequence."""
    gone = 1.0 - mask.T
    return optax.ctc_loss(logits.swapaxes(0, 1), gone, *labels)


def zeros(p: Gru, rows: int) -> Array:
    """The state that rows begin from."""
    return jnp.zeros((rows, p.h.shape[0]))


# --8<-- [start:treescan]
def logits_of(
    model: Model, batch: treescan.Padded[Array] | treescan.Packed[Array]
) -> Array:
    """Both directions, over whatever batch there is: [T, rows, symbols]."""
    rows = batch.mask.shape[1]
    _, ahead = treescan.mask_scan(
        functools.partial(step, model.ahead),
        zeros(model.ahead, rows),
        batch,
    )
    _, back = treescan.mask_scan(
        functools.partial(step, model.back),
        zeros(model.back, rows),
        batch,
        reverse=True,
    )
    return jnp.concatenate([ahead, back], -1) @ model.out


def padded(
    model: Model, batch: treescan.Padded[Array], labels: Labels
) -> Float[Array, ""]:
    """The mean loss of a padded batch."""
    return ctc(logits_of(model, batch), batch.mask, labels).mean()


def packed(
    model: Model, batch: treescan.Packed[Array], labels: Labels
) -> Float[Array, ""]:
    """That of a packed batch: logits get a row for each sequence."""
    rows = treescan.repad(logits_of(model, batch), batch)
    return ctc(rows.data, rows.mask, labels).mean()


# --8<-- [end:treescan]
# --8<-- [start:by_hand]
def by_hand(
    model: Model, xs: Array, lengths: Array, labels: Labels
) -> Float[Array, ""]:
    """xs [T, B, F], zeros in the padding. Rows are flipped for `back`."""
    times = jnp.arange(xs.shape[0])[:, None]
    mask = times < lengths
    flip = jnp.where(mask, lengths - 1 - times, times)[..., None]

    def run(p: Gru, xs: Array) -> Array:
        def masked(h: Array, inputs: tuple[Array, Array]) -> Any:
            x, valid = inputs
            new, y = step(p, h, x)
            return jnp.where(valid[:, None], new, h), y

        return jax.lax.scan(masked, zeros(p, xs.shape[1]), (xs, mask))[1]

    ahead = run(model.ahead, xs)
    back = run(model.back, jnp.take_along_axis(xs, flip, 0))
    back = jnp.take_along_axis(back, flip, 0)
    logits = jnp.concatenate([ahead, back], -1) @ model.out
    return ctc(logits, mask, labels).mean()


# --8<-- [end:by_hand]
