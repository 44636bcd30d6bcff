"""A small Llama that learns to write like Shakespeare.

Its layers are one stack, which `treescan.fold_layers` runs.

The decoder is Llama's: RMSNorm, rotary embedding, grouped-query attention,
SwiGLU. It reads "Romeo and Juliet" byte by byte. Each weight of its layers is
one array with a leading layer axis. So the program contains one layer, for
any number of layers. Training is a scan over batches. Writing is a scan over
new bytes, which carries a cache of keys and values. All of it takes about a
minute on two cores.

    python examples/llama.py

With more devices the parameters are sharded over them (FSDP): each device
holds a slice of every matrix, and gathers one layer at a time. Eight devices,
simulated on the CPU, compute the same numbers as one:

    python examples/llama.py --devices 8 --steps 20
"""

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

import treescan

TEXT = Path(__file__).parent / "data" / "romeo_and_juliet.txt"
LAYERS, WIDTH, KV_HEADS, GROUPS, HEAD, HIDDEN = 6, 128, 2, 2, 32, 344
VOCABULARY = 128  # the text is ASCII
CONTEXT, BATCH, STEPS, STRETCH = 128, 8, 400, 20
WARMUP, LEARNING_RATE = 20, 4e-3
PROMPT, WRITTEN, TEMPERATURE = b"ROMEO:\n", 300, 0.6


# `*layers` means no axis in the single layer that a block receives, and the
# layer axis in the stack.
class Attention(NamedTuple):
    """Each head of keys and values is shared by a group of query heads
    (Ainslie et al., 2023).
    """

    q_proj: Float[Array, "*layers width kv_heads groups head"]
    k_proj: Float[Array, "*layers width kv_heads head"]
    v_proj: Float[Array, "*layers width kv_heads head"]
    out_proj: Float[Array, "*layers kv_heads groups head width"]


class DecoderBlock(NamedTuple):
    """A layer: attention, then SwiGLU (Shazeer, 2020). Both read the normed
    stream and add to it.
    """

    input_norm: Float[Array, "*layers width"]
    attention: Attention
    post_attn_norm: Float[Array, "*layers width"]
    gate_proj: Float[Array, "*layers width hidden"]
    up_proj: Float[Array, "*layers width hidden"]
    down_proj: Float[Array, "*layers hidden width"]


class Params(NamedTuple):
    """The whole model."""

    embedding: Float[Array, "vocabulary width"]
    layers: DecoderBlock
    norm: Float[Array, " width"]
    head: Float[Array, "width vocabulary"]


def normal(key: PRNGKeyArray, shape: tuple[int, ...], fan_in: int) -> Array:
    """Normal weights, scaled for sums over `fan_in` inputs."""
    return jax.random.normal(key, shape) / fan_in**0.5


def init_block(key: PRNGKeyArray) -> DecoderBlock:
    """One layer.

    The last matrices start small: the sum over all layers then does not
    depend on their number.
    """
    q, k, v, out, gate, up, down = jax.random.split(key, 7)
    attention = Attention(
        q_proj=normal(q, (WIDTH, KV_HEADS, GROUPS, HEAD), fan_in=WIDTH),
        k_proj=normal(k, (WIDTH, KV_HEADS, HEAD), fan_in=WIDTH),
        v_proj=normal(v, (WIDTH, KV_HEADS, HEAD), fan_in=WIDTH),
        out_proj=normal(
            out,
            (KV_HEADS, GROUPS, HEAD, WIDTH),
            fan_in=KV_HEADS * GROUPS * HEAD * 2 * LAYERS,
        ),
    )
    return DecoderBlock(
        input_norm=jnp.ones(WIDTH),
        attention=attention,
        post_attn_norm=jnp.ones(WIDTH),
        gate_proj=normal(gate, (WIDTH, HIDDEN), fan_in=WIDTH),
        up_proj=normal(up, (WIDTH, HIDDEN), fan_in=WIDTH),
        down_proj=normal(down, (HIDDEN, WIDTH), fan_in=HIDDEN * 2 * LAYERS),
    )


def init_params(key: PRNGKeyArray, mesh: Mesh) -> Params:
    """All parameters, each made on its devices: weights are split along their
    longest axis, and norms are on every device.
    """
    embedding, layers, head = jax.random.split(key, 3)

    def sharding(weight: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = [
            "data" if axis == np.argmax(weight.shape) else None
            for axis in range(weight.ndim)
        ]
        return NamedSharding(
            mesh, PartitionSpec(*axes) if weight.ndim > 1 else PartitionSpec()
        )

    # For one layer: `init_layers` leaves the layer axis whole, and makes each
    # device's part on that device.
    shardings = jax.tree.map(sharding, jax.eval_shape(init_block, layers))
    matrix = jax.jit(
        normal,
        static_argnums=(1, 2),
        out_shardings=NamedSharding(mesh, PartitionSpec("data")),
    )
    return Params(
        embedding=matrix(embedding, (VOCABULARY, WIDTH), 1),
        layers=treescan.init_layers(
            init_block, layers, LAYERS, shardings=shardings
        ),
        norm=jnp.ones(WIDTH, device=NamedSharding(mesh, PartitionSpec())),
        head=matrix(head, (WIDTH, VOCABULARY), WIDTH),
    )


class Cache(NamedTuple):
    """The keys and values of the positions so far. Later ones are zeros,
    which no query reads yet.
    """

    keys: Float[Array, "*layers batch positions kv_heads head"]
    values: Float[Array, "*layers batch positions kv_heads head"]


def gathered(weights: Any) -> Any:
    """The weights whole on each device: the all-gather of FSDP.

    The gradient sums over the devices, and gives each its slice.
    """
    return jax.lax.with_sharding_constraint(weights, PartitionSpec())


def norm(
    x: Float[Array, "batch time width"], scale: Float[Array, " width"]
) -> Float[Array, "batch time width"]:
    """RMSNorm (Zhang and Sennrich, 2019)."""
    return (
        x
        * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
        * scale[None, None]
    )


def rotate(
    x: Float[Array, "batch time *heads head"], positions: Int[Array, " time"]
) -> Array:
    """Turns pairs of features by angles that grow with the position, each
    pair at its own rate (Su et al., 2021).
    """
    rates = 10_000.0 ** -jnp.linspace(0, 1, HEAD // 2, endpoint=False)
    angles = jnp.outer(positions.astype(jnp.float32), rates)
    # The same for all rows and heads.
    angles = jnp.expand_dims(angles, (0, *range(2, x.ndim - 1)))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attend(
    weights: Attention,
    x: Float[Array, "batch time width"],
    cache: Cache | None,
    positions: Int[Array, " time"],
) -> tuple[Float[Array, "batch time width"], Cache]:
    """Attention over the positions in the cache and in x; without a cache,
    only over those in x.
    """
    queries = rotate(
        jnp.einsum("btd,dkgh->btkgh", x, weights.q_proj), positions
    )
    new = Cache(
        keys=rotate(
            jnp.einsum("btd,dkh->btkh", x, weights.k_proj), positions
        ),
        values=jnp.einsum("btd,dkh->btkh", x, weights.v_proj),
    )
    if cache is not None:
        put = partial(
            jax.lax.dynamic_update_slice_in_dim,
            start_index=positions[0],
            axis=1,
        )
        new = jax.tree.map(put, cache, new)
    scores = jnp.einsum("btkgh,bskh->bkgts", queries, new.keys) / HEAD**0.5
    # A query reads its own position and those before it, at most as far back
    # as in training.
    distance = positions[:, None] - jnp.arange(new.keys.shape[1])[None]
    seen = (distance >= 0) & (distance < CONTEXT)
    scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
    mixed = jnp.einsum(
        "bkgts,bskh->btkgh", jax.nn.softmax(scores), new.values
    )
    return jnp.einsum("btkgh,kghd->btd", mixed, weights.out_proj), new


def cached_block(
    layer: DecoderBlock,
    x: Float[Array, "batch time width"],
    cache: Cache | None,
    positions: Int[Array, " time"],
) -> tuple[Float[Array, "batch time width"], Cache]:
    """One layer, and its keys and values for the cache."""
    layer = gathered(layer)
    mixed, cache = attend(
        layer.attention, norm(x, layer.input_norm), cache, positions
    )
    x = x + mixed
    y = norm(x, layer.post_attn_norm)
    return x + (
        jax.nn.silu(y @ layer.gate_proj) * (y @ layer.up_proj)
    ) @ layer.down_proj, cache


def block(
    layer: DecoderBlock,
    x: Float[Array, "batch time width"],
    positions: Int[Array, " time"],
) -> Float[Array, "batch time width"]:
    """One layer, without a cache."""
    return cached_block(layer, x, None, positions)[0]


def logits(
    params: Params, tokens: Int[Array, "batch time"]
) -> Float[Array, "batch time vocabulary"]:
    """The logits of the next byte at each position, for training.

    With `remat="step"` the gradient saves only the input of each layer, and
    recomputes the rest. It also gathers the layer's weights again. Otherwise
    it would save the gathered weights of all layers, and sharding them would
    be useless.
    """
    x = gathered(params.embedding)[tokens]
    x = treescan.fold_layers(
        block,
        x,
        params.layers,
        args=(jnp.arange(tokens.shape[1]),),
        remat="step",
    )
    return norm(x, params.norm) @ gathered(params.head)


def cached_logits(
    params: Params,
    tokens: Int[Array, "batch time"],
    cache: Cache,
    start: Int[Array, ""] | int,
) -> tuple[Float[Array, "batch time vocabulary"], Cache]:
    """The logits of the next byte, for tokens from position `start` on.

    Each layer takes its slice of the cache and returns it. The loop writes
    it in place: no step copies the cache.
    """
    x = gathered(params.embedding)[tokens]
    positions = start + jnp.arange(tokens.shape[1])
    x, cache = treescan.fold_layers(
        cached_block, x, params.layers, state=cache, args=(positions,)
    )
    return norm(x, params.norm) @ gathered(params.head), cache


class Adam(NamedTuple):
    """Parameters with their running moments (Kingma and Ba, 2015), which are
    sharded in the same way.
    """

    params: Params
    mean: Params
    square: Params
    step: Float[Array, ""]


def adam_step(adam: Adam, grads: Params, rate: Float[Array, ""]) -> Adam:
    """One step down the gradient, whose norm is clipped to 1."""
    size = jnp.sqrt(
        sum(
            (jnp.sum(g**2) for g in jax.tree.leaves(grads)),
            start=jnp.zeros(()),
        )
    )
    grads = jax.tree.map(lambda g: g / jnp.maximum(size, 1.0), grads)
    step = adam.step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam.mean, grads)
    square = jax.tree.map(
        lambda s, g: 0.99 * s + 0.01 * g**2, adam.square, grads
    )
    rate = rate * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    params = jax.tree.map(
        lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8),
        adam.params,
        mean,
        square,
    )
    return Adam(params, mean, square, step)


def loss(
    params: Params, tokens: Int[Array, "batch bytes"]
) -> Float[Array, ""]:
    """Cross entropy of each byte after the first, in nats."""
    log_probs = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
    return -jnp.take_along_axis(
        log_probs, tokens[:, 1:, None], axis=-1
    ).mean()


@jax.jit
def mean_loss(
    params: Params, batches: Int[Array, "batches batch bytes"]
) -> Float[Array, ""]:
    """The loss over many batches, one after the other."""
    return treescan.fold(
        lambda total, batch: total + loss(params, batch),
        jnp.zeros(()),
        batches,
    ) / len(batches)


# Tokens, and the learning rate.
Batch = tuple[Int[Array, "*steps batch bytes"], Float[Array, "*steps"]]


@partial(jax.jit, donate_argnames="adam")
def train(adam: Adam, stretch: Batch) -> tuple[Adam, Float[Array, " steps"]]:
    """A stretch of steps in one program: a scan over batches, which scans
    over layers.
    """

    def step(adam: Adam, batch: Batch) -> tuple[Adam, Float[Array, ""]]:
        tokens, rate = batch
        value, grads = jax.value_and_grad(loss)(adam.params, tokens)
        return adam_step(adam, grads, rate), value

    return treescan.scan(step, adam, stretch)


def place(
    tokens: Int[np.ndarray, "steps batch bytes"], mesh: Mesh
) -> Int[Array, "steps batch bytes"]:
    """Batches on the devices, with their rows split over the devices."""
    return jax.device_put(
        tokens, NamedSharding(mesh, PartitionSpec(None, "data"))
    )


def stretches(
    text: Int[np.ndarray, " bytes"], steps: int, mesh: Mesh
) -> Iterator[Batch]:
    """Random passages of the text, with a learning rate that warms up and
    then falls to zero.
    """
    rng = np.random.default_rng(0)
    rates = LEARNING_RATE * np.minimum(
        np.arange(1, steps + 1) / WARMUP, 1 - np.arange(steps) / steps
    )
    for rate in np.split(
        rates.astype(np.float32), range(STRETCH, steps, STRETCH)
    ):
        starts = rng.integers(len(text) - CONTEXT, size=(len(rate), BATCH, 1))
        yield (
            place(text[starts + np.arange(CONTEXT + 1)], mesh),
            jnp.asarray(rate),
        )


def fit(
    params: Params, text: Int[np.ndarray, " bytes"], steps: int, mesh: Mesh
) -> Params:
    """Trains, and prints the loss."""
    mean, square = (
        jax.tree.map(jnp.zeros_like, params),
        jax.tree.map(jnp.zeros_like, params),
    )
    adam = Adam(params, mean, square, step=jnp.zeros(()))
    began = time.perf_counter()
    for stretch in stretches(text, steps, mesh):
        adam, losses = train(adam, stretch)
        print(
            f"step {int(adam.step):4}  loss {losses.mean():.4f}  "
            f"{time.perf_counter() - began:6.1f} s",
            flush=True,
        )
    return adam.params


class Writer(NamedTuple):
    """The carry while writing: the cache, the last byte, which is not in the
    cache yet, and its position.
    """

    cache: Cache
    token: Int[Array, "batch 1"]
    position: Int[Array, ""]


@partial(jax.jit, static_argnames="length")
def write(
    params: Params,
    prompt: Int[Array, "batch time"],
    length: int,
    key: PRNGKeyArray,
) -> tuple[Int[Array, "batch new"], Float[Array, ""]]:
    """Reads the prompt in one pass, then writes byte by byte.

    Also returns how far the logits are from those without a cache.
    """

    def step(
        writer: Writer, _: None, *, key: PRNGKeyArray
    ) -> tuple[Writer, tuple[Array, Array]]:
        scores, cache = cached_logits(
            params, writer.token, writer.cache, writer.position
        )
        token = jax.random.categorical(key, scores[:, 0] / TEMPERATURE)
        return Writer(cache, token[:, None], writer.position + 1), (
            token,
            scores[:, 0],
        )

    batch, last = prompt.shape[0], prompt.shape[1] - 1
    zeros = jnp.zeros((LAYERS, batch, last + length, KV_HEADS, HEAD))
    _, cache = cached_logits(params, prompt[:, :last], Cache(zeros, zeros), 0)
    writer = Writer(cache, prompt[:, last:], jnp.asarray(last))
    _, (new, cached) = treescan.scan(
        step, writer, length=length, key=key, out_axes=1
    )
    full = logits(params, jnp.concatenate([prompt, new], axis=1))[:, last:-1]
    return new, jnp.abs(cached - full).max()


def run(steps: int, mesh: Mesh) -> None:
    """Trains, and prints the loss on held-out text, and what it writes."""
    text, held_out = np.split(
        np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int32),
        [-TEXT.stat().st_size // 10],
    )
    rest = len(held_out) % (BATCH * (CONTEXT + 1))
    tests = place(held_out[rest:].reshape(-1, BATCH, CONTEXT + 1), mesh)
    params = init_params(jax.random.key(0), mesh)
    leaves = jax.tree.leaves(params)
    whole, part = (
        sum(leaf.nbytes for leaf in leaves),
        sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
    )
    print(
        f"parameters     {whole} bytes, {part} on each of {mesh.size} devices"
    )
    before = mean_loss(params, tests)
    params = fit(params, text, steps, mesh)
    print(
        f"held-out loss  {before:.4f} -> "
        f"{mean_loss(params, tests):.4f} nats a byte"
    )

    # The model is small: gather it once, not for each byte.
    params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    began = time.perf_counter()
    written, error = write(
        params, jnp.asarray([list(PROMPT)]), WRITTEN, jax.random.key(1)
    )
    print(
        f"cache          logits within {error:.1e} of those of a pass without"
    )
    print(
        f"writing        {WRITTEN} bytes in "
        f"{time.perf_counter() - began:.1f} s, compilation included\n"
    )
    print((PROMPT + bytes(written[0].tolist())).decode())


def main() -> None:
    """Reads the command line, simulates devices if asked to, and runs."""
    parser = argparse.ArgumentParser(
        description="Train a small Llama on Romeo and Juliet."
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        help="how many devices to simulate on the CPU",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help="how many batches to train on",
    )
    options = parser.parse_args()
    if options.devices > 1:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    # Auto: the compiler propagates the shardings by itself.
    mesh = jax.make_mesh(
        (options.devices,), ("data",), axis_types=(AxisType.Auto,)
    )
    with jax.set_mesh(mesh):
        run(options.steps, mesh)


if __name__ == "__main__":
    main()
