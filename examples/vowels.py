"""Who is speaking? A recurrent classifier, trained with `treescan`.

Nine men said two Japanese vowels in a row, 30 times each for training. An
utterance is 7 to 29 frames of 12 cepstral coefficients, so a batch has
padding. A bidirectional LSTM reads it with `mask_scan`. The padding is NaN
here on purpose, and reaches neither the outputs nor the gradients.

    python examples/vowels.py
"""

import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

import treescan

DATA = Path(__file__).parent / "data" / "japanese_vowels.npz"
SPEAKERS, HIDDEN, EPOCHS, BATCH = 9, 64, 60, 27
LEARNING_RATE, DROPOUT = 3e-3, 0.3


class Utterances(NamedTuple):
    """A padded batch, time first.

    Frame `t` of utterance `b` is real where `t < lengths[b]`.
    """

    frames: Float[Array, "time batch features"]
    lengths: Int[Array, " batch"]
    speaker: Int[Array, " batch"]


def load(path: Path) -> tuple[Utterances, Utterances]:
    """The training and the test utterances, features standardized by the
    training frames.
    """
    with np.load(path) as data:
        mean, std = (
            data["train_frames"].mean(axis=0),
            data["train_frames"].std(axis=0),
        )
        train, test = (
            _pad(
                (data[f"{part}_frames"] - mean) / std,
                data[f"{part}_lengths"],
                data[f"{part}_speaker"],
            )
            for part in ("train", "test")
        )
    return train, test


def _pad(
    frames: np.ndarray, lengths: np.ndarray, speaker: np.ndarray
) -> Utterances:
    """Pads the utterances, which are end to end in `frames`: `[T, B, F]`."""
    padded = treescan.pad(
        np.split(frames, np.cumsum(lengths)[:-1]), fill=np.nan
    )
    return Utterances(padded.data, padded.lengths, jnp.asarray(speaker))


class LSTM(NamedTuple):
    """The weights of one direction, with the four gates side by side."""

    x: Float[Array, "features gates"]
    h: Float[Array, "hidden gates"]
    bias: Float[Array, " gates"]


class State(NamedTuple):
    """The carry of an LSTM."""

    h: Float[Array, "batch hidden"]
    c: Float[Array, "batch hidden"]


def lstm(
    weights: LSTM, batch: Utterances, *, reverse: bool = False
) -> Float[Array, "time batch hidden"]:
    """The hidden state at each frame, 0 on padding.

    In reverse, each row starts from its own last frame.
    """

    def step(
        state: State, x: Float[Array, "batch features"]
    ) -> tuple[State, Float[Array, "batch hidden"]]:
        gates = x @ weights.x + state.h @ weights.h + weights.bias
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return State(h, c), h

    zeros = jnp.zeros((batch.frames.shape[1], weights.h.shape[0]))
    _, hs = treescan.mask_scan(
        step,
        State(zeros, zeros),
        batch.frames,
        lengths=batch.lengths,
        reverse=reverse,
    )
    return hs


class Params(NamedTuple):
    """The classifier: an LSTM in each direction, the mean over the frames,
    and one linear layer.
    """

    forward: LSTM
    backward: LSTM
    out: Float[Array, "pooled speakers"]


def init_params(key: PRNGKeyArray, features: int) -> Params:
    """Uniform in +-1/sqrt(hidden), forget gates open."""
    bias = jnp.zeros(4 * HIDDEN).at[HIDDEN : 2 * HIDDEN].set(1.0)

    def uniform(key: PRNGKeyArray, *shape: int) -> Array:
        return (
            jax.random.uniform(key, shape, minval=-1, maxval=1) / HIDDEN**0.5
        )

    fx, fh, bx, bh, out = jax.random.split(key, 5)
    return Params(
        forward=LSTM(
            uniform(fx, features, 4 * HIDDEN),
            uniform(fh, HIDDEN, 4 * HIDDEN),
            bias,
        ),
        backward=LSTM(
            uniform(bx, features, 4 * HIDDEN),
            uniform(bh, HIDDEN, 4 * HIDDEN),
            bias,
        ),
        out=uniform(out, 2 * HIDDEN, SPEAKERS),
    )


def pool(params: Params, batch: Utterances) -> Float[Array, "batch pooled"]:
    """The mean of both directions' hidden states over each utterance's real
    frames.
    """
    both = (
        lstm(params.forward, batch),
        lstm(params.backward, batch, reverse=True),
    )
    return jnp.concatenate(both, axis=-1).sum(axis=0) / batch.lengths[:, None]


def loss(
    params: Params, batch: Utterances, key: PRNGKeyArray
) -> Float[Array, ""]:
    """Cross entropy, with dropout before the linear layer."""
    pooled = pool(params, batch)
    kept = jax.random.bernoulli(key, 1 - DROPOUT, pooled.shape) / (
        1 - DROPOUT
    )
    log_probs = jax.nn.log_softmax(pooled * kept @ params.out)
    return -jnp.take_along_axis(
        log_probs, batch.speaker[:, None], axis=1
    ).mean()


@jax.jit
def accuracy(params: Params, batch: Utterances) -> Float[Array, ""]:
    """The share of utterances whose speaker is recognized."""
    return jnp.mean(
        jnp.argmax(pool(params, batch) @ params.out, axis=-1) == batch.speaker
    )


class Adam(NamedTuple):
    """Parameters with their running moments (Kingma and Ba, 2015)."""

    params: Params
    mean: Params
    square: Params
    steps: Int[Array, ""]


def adam_step(adam: Adam, grads: Params) -> Adam:
    """One step down the gradient."""
    steps = adam.steps + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam.mean, grads)
    square = jax.tree.map(
        lambda s, g: 0.999 * s + 0.001 * g**2, adam.square, grads
    )
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8),
        adam.params,
        mean,
        square,
    )
    return Adam(params, mean, square, steps)


@jax.jit
def train(
    params: Params, data: Utterances, key: PRNGKeyArray
) -> tuple[Params, Float[Array, " epochs"]]:
    """All epochs in one program: a scan over epochs, which scans over
    batches, which scan over time.
    """

    def minibatch(
        adam: Adam, rows: Int[Array, " batch"], *, key: PRNGKeyArray
    ) -> tuple[Adam, Float[Array, ""]]:
        batch = Utterances(
            data.frames[:, rows], data.lengths[rows], data.speaker[rows]
        )
        value, grads = jax.value_and_grad(loss)(adam.params, batch, key)
        return adam_step(adam, grads), value

    def epoch(
        adam: Adam, _: None, *, key: PRNGKeyArray
    ) -> tuple[Adam, Float[Array, ""]]:
        order, dropout = jax.random.split(key)
        rows = jax.random.permutation(order, len(data.lengths)).reshape(
            -1, BATCH
        )
        adam, losses = treescan.scan(minibatch, adam, rows, key=dropout)
        return adam, losses.mean()

    zeros = jax.tree.map(jnp.zeros_like, params)
    start = Adam(
        params, mean=zeros, square=zeros, steps=jnp.zeros((), jnp.int32)
    )
    end, losses = treescan.scan(
        epoch, start, length=EPOCHS, key=key, progress="epochs"
    )
    return end.params, losses


def main() -> None:
    """Trains the classifier, and prints its accuracy."""
    train_data, test_data = load(DATA)
    init_key, train_key = jax.random.split(jax.random.key(0))
    began = time.perf_counter()
    params, losses = train(
        init_params(init_key, train_data.frames.shape[2]),
        train_data,
        train_key,
    )
    losses.block_until_ready()
    print(
        f"{EPOCHS} epochs in "
        f"{time.perf_counter() - began:.1f} s, compilation included"
    )
    print(f"training loss  {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(
        f"test accuracy  {accuracy(params, test_data):.1%} "
        f"of {len(test_data.lengths)} utterances"
    )


if __name__ == "__main__":
    main()
