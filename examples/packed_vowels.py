"""Who is speaking, packed: several utterances end to end in a row.

This leaves hardly any padding to run.

The task is that of `vowels.py`: nine speakers, utterances of 7 to 29 frames.
Here `treescan.pack` lays each batch into rows, and `mask_scan` takes the
result. Where an utterance begins, the state of the LSTM starts again, in both
directions. Outputs are at the positions of their frames. The weights and
their training are those of `vowels.py`.

    python examples/packed_vowels.py
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from vowels import (
    BATCH,
    DATA,
    DROPOUT,
    EPOCHS,
    HIDDEN,
    LSTM,
    Adam,
    Params,
    State,
    adam_step,
    init_params,
)

import treescan

ROWS = 9  # of a packed training batch

Utterance = Float[np.ndarray, "time features"]
Batch = treescan.Packed[Float[Array, "time rows features"]]


class Labelled(NamedTuple):
    """A packed batch with its utterances' speakers."""

    packed: Batch
    speaker: Int[Array, " utterances"]


def load(part: str) -> tuple[list[Utterance], Int[np.ndarray, " utterances"]]:
    """The utterances of one part of the data, features standardized by the
    training frames, and who speaks.
    """
    with np.load(DATA) as data:
        mean, std = (
            data["train_frames"].mean(axis=0),
            data["train_frames"].std(axis=0),
        )
        frames = ((data[f"{part}_frames"] - mean) / std).astype(np.float32)
        return np.split(
            frames, np.cumsum(data[f"{part}_lengths"])[:-1]
        ), data[f"{part}_speaker"]


def batches(
    utterances: list[Utterance], speaker: np.ndarray, seed: int
) -> Labelled:
    """All training batches, packed to one shape and stacked along a new
    leading axis.
    """
    order = (
        np.random.default_rng(seed)
        .permutation(len(utterances))
        .reshape(-1, BATCH)
    )
    chosen = [[utterances[i] for i in batch] for batch in order]
    # One shape: one program for all batches.
    steps = max(treescan.pack(batch, rows=ROWS).steps for batch in chosen)
    packed = [
        treescan.pack(batch, rows=ROWS, length=steps) for batch in chosen
    ]
    return Labelled(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *packed),
        jnp.asarray(speaker[order]),
    )


def lstm(
    weights: LSTM, packed: Batch, *, reverse: bool = False
) -> Float[Array, "time rows hidden"]:
    """The hidden state at each frame of each utterance."""

    def step(
        state: State, x: Float[Array, "rows features"]
    ) -> tuple[State, Float[Array, "rows hidden"]]:
        i, f, g, o = jnp.split(
            x @ weights.x + state.h @ weights.h + weights.bias, 4, axis=-1
        )
        c = jax.nn.sigmoid(f) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return State(h, c), h

    zeros = jnp.zeros((packed.rows, HIDDEN))
    return treescan.mask_scan(
        step, State(zeros, zeros), packed, reverse=reverse
    )[1]


def pool(params: Params, packed: Batch) -> Float[Array, "utterances pooled"]:
    """The mean of both directions' hidden states over each utterance's
    frames.
    """
    both = jnp.concatenate(
        [
            lstm(params.forward, packed),
            lstm(params.backward, packed, reverse=True),
        ],
        axis=-1,
    )

    def add(total: Array, h: Array) -> tuple[Array, None]:
        return total + h, None

    start = jnp.zeros(both.shape[1:])
    sums, _ = treescan.mask_scan(add, start, packed._replace(data=both))
    return sums / packed.index.length[:, None]


def loss(
    params: Params, batch: Labelled, key: PRNGKeyArray
) -> Float[Array, ""]:
    """Cross entropy, with dropout before the linear layer."""
    pooled = pool(params, batch.packed)
    kept = jax.random.bernoulli(key, 1 - DROPOUT, pooled.shape) / (
        1 - DROPOUT
    )
    log_probs = jax.nn.log_softmax(pooled * kept @ params.out)
    return -jnp.take_along_axis(
        log_probs, batch.speaker[:, None], axis=1
    ).mean()


@jax.jit
def accuracy(params: Params, batch: Labelled) -> Float[Array, ""]:
    """The share of utterances whose speaker is recognized."""
    return jnp.mean(
        jnp.argmax(pool(params, batch.packed) @ params.out, axis=-1)
        == batch.speaker
    )


@jax.jit
def train(
    params: Params, data: Labelled, key: PRNGKeyArray
) -> tuple[Params, Float[Array, " epochs"]]:
    """All epochs in one program: a scan over epochs, which scans over
    batches, which scan over time.
    """

    def minibatch(
        adam: Adam, batch: Labelled, *, key: PRNGKeyArray
    ) -> tuple[Adam, Float[Array, ""]]:
        value, grads = jax.value_and_grad(loss)(adam.params, batch, key)
        return adam_step(adam, grads), value

    def epoch(
        adam: Adam, _: None, *, key: PRNGKeyArray
    ) -> tuple[Adam, Float[Array, ""]]:
        adam, losses = treescan.scan(minibatch, adam, data, key=key)
        return adam, losses.mean()

    zeros = jax.tree.map(jnp.zeros_like, params)
    start = Adam(
        params, mean=zeros, square=zeros, steps=jnp.zeros((), jnp.int32)
    )
    end, losses = treescan.scan(epoch, start, length=EPOCHS, key=key)
    return end.params, losses


def main() -> None:
    """Trains the classifier, and prints its accuracy and the steps that
    packing saves.
    """
    utterances, speaker = load("train")
    data = batches(utterances, speaker, seed=0)
    init_key, train_key = jax.random.split(jax.random.key(0))
    began = time.perf_counter()
    params, losses = train(
        init_params(init_key, utterances[0].shape[1]), data, train_key
    )
    losses.block_until_ready()
    print(
        f"{EPOCHS} epochs in "
        f"{time.perf_counter() - began:.1f} s, compilation included"
    )
    print(f"training loss  {losses[0]:.3f} -> {losses[-1]:.3f}")

    utterances, speaker = load("test")
    test = Labelled(treescan.pack(utterances), jnp.asarray(speaker))
    print(
        f"test accuracy  {accuracy(params, test):.1%} "
        f"of {len(utterances)} utterances"
    )

    run, valid = data.packed.mask.size, int(data.packed.mask.sum())
    padded = max(map(len, load("train")[0])) * len(data.speaker.ravel())
    print(
        f"steps          {padded} in padded rows, {run} in packed ones: "
        f"{1 - run / padded:.1%} need not be run"
    )
    print(
        f"efficiency     {valid / run:.1%} of those that are run are frames"
    )


if __name__ == "__main__":
    main()
