"""What `test_process_numbers.py` runs in each of several processes: prints numbers as JSON, a line for each case.

What they are compared with is computed in one process, by plain loops of JAX over rows without padding.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from process_programs import Counter
from processes import join

import treescan

T, B, D, LAYERS = 40, 8, 4, 4
WRONG = float("nan")  # what padding holds


class Data:
    """The whole batch, which each process makes, and of which it holds its own rows."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.w = draw.normal(size=(D, D)).astype(np.float32) / 2
        self.x = draw.normal(size=(T, B, D)).astype(np.float32)
        self.h = draw.normal(size=(B, D)).astype(np.float32)
        self.stack = draw.normal(size=(LAYERS, D, D)).astype(np.float32) / 2
        self.lengths = np.array([3, 1, 5, 2, 40, 17, 0, 33], np.int32)  # the first processes have the short rows
        self.stops = np.array([1, 2, 1, 3, 30, 20, 25, 9], np.float32)
        valid = np.arange(T)[:, None] < self.lengths
        self.padded = np.where(valid[..., None], self.x, WRONG)


class Place:
    """Puts arrays on all devices.

    Args:
        kind: the kind of the axes of the mesh, "Auto" or "Explicit".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(getattr(AxisType, kind),))

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def put(self, whole: np.ndarray[Any, Any], *spec: Any) -> Any:
        """A global array, to which this process gives only what it holds."""
        axis, sharding = spec.index("d"), self.sharding(*spec)
        share = whole.shape[axis] // jax.process_count()
        mine = range(jax.process_index() * share, (jax.process_index() + 1) * share)
        return jax.make_array_from_process_local_data(sharding, whole.take(mine, axis))


def cell(w: Any, h: Any, x: Any) -> Any:
    return jnp.tanh(h @ w + x)


def descend(value_and_gradient: Callable[[Any], Any], w: Any) -> list[Any]:
    """Three steps of training: the losses, the last gradient and the weights."""
    losses = []
    for _ in range(3):
        loss, gradient = value_and_gradient(w)
        losses.append(loss)
        w = w - 0.1 * gradient
    return [*losses, gradient, w]


def train(at: Place, data: Data) -> Any:
    """Rows of unequal length, of which some processes have only short ones."""
    h, xs, lengths = at.put(data.h, "d"), at.put(data.padded, None, "d"), at.put(data.lengths, "d")

    @jax.jit
    def value_and_gradient(w: Any, h: Any, xs: Any, lengths: Any) -> Any:
        def loss(w: Any) -> Any:
            last, ys = treescan.mask_scan(lambda h, x: (cell(w, h, x),) * 2, h, xs, lengths=lengths)
            return (last**2).mean() + (ys**2).sum() / lengths.sum().astype(ys.dtype)

        return jax.value_and_grad(loss)(w)

    return descend(lambda w: value_and_gradient(w, h, xs, lengths), jnp.asarray(data.w))


def states_of(w: Any, data: Data, noise: Any = 0.0) -> Any:
    """The states of all rows, `[T+1, B, D]`, as if none had padding: a row reads those until its length."""
    xs = data.x + jnp.broadcast_to(noise, data.x.shape)
    _, hs = jax.lax.scan(lambda h, x: (cell(w, h, x),) * 2, data.h, xs)
    return jnp.concatenate([data.h[None], hs])


def train_alone(data: Data) -> Any:
    def loss(w: Any) -> Any:
        hs = states_of(w, data)
        valid = np.arange(T)[:, None, None] < data.lengths[:, None]
        return (hs[data.lengths, np.arange(B)] ** 2).mean() + (hs[1:] ** 2).sum(where=valid) / float(data.lengths.sum())

    return descend(jax.jit(jax.value_and_grad(loss)), jnp.asarray(data.w))


def layers(at: Place, data: Data) -> Any:
    """A stack of which each process holds some columns of every layer."""
    h, stack = at.put(data.h, "d"), at.put(data.stack, None, None, "d")

    def block(w: Any, h: Any) -> Any:
        reshard = jax.sharding.reshard if at.kind == "Explicit" else jax.lax.with_sharding_constraint
        return cell(reshard(w, at.sharding()), h, 0.5)

    def loss(stack: Any, h: Any) -> Any:
        last, ys = treescan.scan_layers(lambda w, h: (block(w, h),) * 2, h, stack, remat="step")
        return (last**2).mean() + (ys**3).mean() + treescan.fold_layers(block, h, stack).mean()

    with jax.set_mesh(at.mesh):
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(stack, h)
    assert gradients[0].sharding.shard_shape(gradients[0].shape)[2] == D // jax.device_count() or at.kind == "Auto"
    return [value, *gradients]


def layers_alone(data: Data) -> Any:
    def loss(stack: Any, h: Any) -> Any:
        last, ys = jax.lax.scan(lambda h, w: (cell(w, h, 0.5),) * 2, h, stack)
        return (last**2).mean() + (ys**3).mean() + last.mean()

    value, gradients = jax.value_and_grad(loss, (0, 1))(jnp.asarray(data.stack), jnp.asarray(data.h))
    return [value, *gradients]


def until(at: Place, data: Data, **options: Any) -> Any:
    """Rows that stop apart: those of the first process at once, those of the last one late."""
    h, xs, stops = at.put(data.h, "d"), at.put(data.x, None, "d"), at.put(data.stops, "d")

    @jax.jit
    def value_and_gradient(w: Any, h: Any, xs: Any, stops: Any) -> Any:
        def loss(w: Any) -> Any:
            def step(carry: Any, x: Any) -> Any:
                count, h = carry
                return (count + 1, cell(w, h, x)), None

            result = treescan.while_scan(lambda c: c[0] < stops, step, (jnp.zeros_like(stops), h), xs, **options)
            return (result.carry[1] ** 2).mean(), result.steps

        return jax.value_and_grad(loss, has_aux=True)(w)

    (value, steps), gradient = value_and_gradient(jnp.asarray(data.w), h, xs, stops)
    return [value, steps, gradient]


def until_alone(data: Data) -> Any:
    stops = data.stops.astype(np.int32)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda w: (states_of(w, data)[stops, np.arange(B)] ** 2).mean()),
    )(jnp.asarray(data.w))
    return [value, stops, gradient]


def stream(at: Place, data: Data) -> Any:
    """A source of which each process reads its own rows, to the bits of one scan; with keys, and a last part padded."""
    h, starts = at.put(data.h, "d"), list[int]()

    def step(h: Any, x: Any, key: Any) -> Any:
        h = cell(data.w, h, x + 0.1 * jax.random.normal(key))
        return h, {"all": h.sum(-1), "last": h.sum(-1)}

    def source(start: int, n: int) -> Any:
        return at.put(data.padded[start : start + n], None, "d")

    def on_part(part: Any) -> None:
        starts.append(part.start)
        for mine, same in zip(part.ys["all"].addressable_shards, ys["all"].addressable_shards, strict=True):
            assert mine.data.shape[1] == B // jax.device_count()
            np.testing.assert_array_equal(mine.data, same.data[part.start : part.start + part.length])

    keeps: Any = {"all": "all", "last": "last"}
    options: Any = {"lengths": at.put(data.lengths, "d"), "key": jax.random.key(0), "save": keeps}
    once, ys = treescan.mask_scan(step, h, source(0, T), **options)
    Counter.bars.clear()
    options["progress"] = treescan.meters.Progress("rows", meter=Counter())
    carry, last = treescan.stream(step, h, source, part=16, length=T, on_part=on_part, **options)
    assert Counter.bars == ([] if jax.process_index() else ["closed"])
    assert starts == [0, 16, 32] and whole(carry) == whole(once) and whole(last["last"]) == whole(ys["last"])
    return [carry, last["last"]]


def stream_alone(data: Data) -> Any:
    keys = [jax.random.fold_in(jax.random.key(0), t) for t in range(T)]
    noise = jnp.stack([jax.random.normal(key) for key in keys])
    carry = states_of(data.w, data, 0.1 * noise[:, None, None])[data.lengths, np.arange(B)]
    return [carry, np.where(data.lengths > 0, carry.sum(-1), 0)]


CASES: dict[str, tuple[Callable[[Place, Data], Any], Callable[[Data], Any]]] = {
    "train": (train, train_alone),
    "layers": (layers, layers_alone),
    "until": (until, until_alone),
    "stream": (stream, stream_alone),
}
"""What the processes run together, and what one runs alone."""


def whole(value: Any) -> Any:
    """An array as each process has it."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value).tolist()


def main() -> None:
    _, _, (kinds,) = join()
    for kind, (name, (together, _)) in itertools.product(kinds.split(","), CASES.items()):
        found = [whole(value) for value in together(Place(kind), Data())]
        print(json.dumps({"kind": kind, "name": name, "found": found}), flush=True)
    if jax.process_count() > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
