"""Rows of unequal lengths: `mask_scan` and `pack` against a mask by hand, flax's RNN and torch's packed LSTM."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import treescan
from benchmarks._by_hand import where_scan
from benchmarks._harness import Comparison, Effort, Memory
from benchmarks._lstm import Params, State, lstm, make_params, normal
from benchmarks._torch_peer import Data, Torch, TorchProgram

OPTIONS: dict[str, dict[str, Any]] = {  # what is measured of treescan: the options of `mask_scan`, by name
    "default": {},
    "compact": {"compact": True},
}


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a batch."""

    steps: int
    rows: int
    features: int
    hidden: int


SMALL = Size(512, 32, 64, 128)
LARGE = Size(512, 64, 64, 256)
TINY = Size(24, 4, 3, 5)
SEQUENCES, FEW_SEQUENCES = 2000, 20  # in the data set that is packed
EFFORT = Effort(seconds=4, min_blocks=9)  # so that all of it takes a quarter of an hour
SLOW_BLOCKS = 5  # of torch's gradient at LARGE, which takes up to twelve seconds

WHERE, FLAX, TORCH = "where by hand", "flax.linen.RNN", "torch, packed"
FORWARD, GRADIENT = "forward", "gradient"
FULL, UNIFORM, HALF, PARETO = "full", "uniform", "at most half", "pareto"

TARGETS = {  # at SMALL
    ("default", WHERE, FULL, FORWARD): 1.03,
    ("default", WHERE, FULL, GRADIENT): 1.03,
    ("default", WHERE, HALF, FORWARD): 1 / 1.9,
    ("default", WHERE, HALF, GRADIENT): 1 / 1.9,
    ("compact", WHERE, PARETO, FORWARD): 1 / 4.2,
    ("compact", WHERE, PARETO, GRADIENT): 1 / 3.7,
    ("compact", TORCH, PARETO, FORWARD): 1 / 1.3,
    ("compact", TORCH, PARETO, GRADIENT): 1 / 1.3,
}
LARGE_TARGET = 1.05  # at LARGE, against the mask by hand, whatever the lengths
MEMORY_TARGET = 1 / 5
PACK_TARGET = 1 / 3

Batch = tuple[Params, State, Array, Array]  # params, init, xs [T, B, F], lengths [B]
Result = tuple[State, Array]  # the last state, ys [T, B, H]


def comparisons() -> Iterator[Comparison | Memory]:
    """The comparisons of this suite."""
    yield from _control(SMALL)
    if not Torch.installed():
        print(f"{TORCH}: left out, torch is not installed")
    with Torch() as torch:
        yield from _masked(SMALL, torch)
        yield from _masked(LARGE, torch)
    yield from _packed(SMALL, SEQUENCES)


def smoke() -> Iterator[Comparison | Memory]:
    """The same at a tiny size, without targets."""
    yield from _control(TINY)
    with Torch() as torch:
        yield from _masked(TINY, torch)
    yield from _packed(TINY, FEW_SEQUENCES)


class Program:
    """A function compiled ahead of time, for arguments of the shapes of its first ones."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Any = None

    def __call__(self, *args: Any) -> Any:
        return self._for(args)(*args)

    def temporaries(self, *args: Any) -> int:
        """The bytes it allocates beside its arguments and results."""
        return self._for(args).memory_analysis().temp_size_in_bytes

    def prepare(self, *args: Any) -> Callable[[], None]:
        """Traces it. What is returned compiles it, in any thread."""
        lowered = jax.jit(self._function).lower(*args)

        def compile_() -> None:
            self._compiled = lowered.compile()

        return compile_

    def _for(self, args: tuple[Any, ...]) -> Any:
        if self._compiled is None:
            self.prepare(*args)()
        return self._compiled


def memory(
    name: str, against: str, ours: Program, theirs: Program, args: tuple[Any, ...], target: float | None
) -> Memory:
    """What two programs need for the same arguments."""
    needed = (functools.partial(program.temporaries, *args) for program in (ours, theirs))
    return Memory(name, against, *needed, target=target)


def _control(size: Size) -> Iterator[Comparison]:
    batch = (*_data(size), _lengths(size)[UNIFORM])
    for kind, program in _programs(_where_scan).items():
        run = functools.partial(program, *batch)
        yield Comparison(f"control, {kind}", "itself", run, run)


def _masked(size: Size, torch: Torch) -> Iterator[Comparison | Memory]:
    """One size: the memory of the gradients, then the times for each kind of lengths."""
    params, init, xs = _data(size)
    ours = {name: _programs(functools.partial(_mask_scan, **options)) for name, options in OPTIONS.items()}
    by_hand, flax_rnn = _programs(_where_scan), _programs(_flax_rnn)
    for option, programs in ours.items():
        full, target = (params, init, xs, _lengths(size)[FULL]), None if size is TINY else MEMORY_TARGET
        name = f"B={size.rows}, memory, {option}, {GRADIENT}"
        yield memory(name, WHERE, programs[GRADIENT], by_hand[GRADIENT], full, target)
    with_bias = params._replace(bias=_with_forget_bias(params.bias))
    for name, lengths in _lengths(size).items():
        padding = size.rows * size.steps / int(lengths.sum())
        batch = params, init, xs, lengths
        data = Data(*map(np.asarray, (*with_bias, *init, xs, lengths)))
        for kind in (FORWARD, GRADIENT):
            peers: dict[str, Callable[[], object]] = {WHERE: functools.partial(by_hand[kind], *batch)}
            if Torch.installed():
                peers[TORCH] = TorchProgram(torch, kind, data, _from_torch[kind])
            pairs = [(option, peer) for peer in peers for option in ours]
            peers[FLAX] = functools.partial(flax_rnn[kind], *batch)
            for option, peer in (*pairs, ("default", FLAX)):
                yield Comparison(
                    f"B={size.rows}, {name}, {option}, {kind}",
                    peer,
                    functools.partial(ours[option][kind], *batch),
                    peers[peer],
                    _target(size, option, peer, name, kind),
                    {"padded_over_valid": padding},
                    SLOW_BLOCKS if size is LARGE and (peer, kind) == (TORCH, GRADIENT) else None,
                )


def _target(size: Size, option: str, peer: str, lengths: str, kind: str) -> float | None:
    if size is LARGE:
        return LARGE_TARGET if peer == WHERE else None
    return TARGETS.get((option, peer, lengths, kind)) if size is SMALL else None


def _programs(scan: Callable[..., Result]) -> dict[str, Program]:
    """A scan and its gradient with respect to everything but the lengths."""

    def loss(*batch: Any) -> Array:
        state, ys = scan(*batch)
        return jnp.sum(ys**2) + jnp.sum(state.h) + jnp.sum(state.c)

    return {FORWARD: Program(scan), GRADIENT: Program(jax.grad(loss, argnums=(0, 1, 2)))}


def _mask_scan(params: Params, init: State, xs: Array, lengths: Array, **options: Any) -> Result:
    return treescan.mask_scan(functools.partial(lstm, params), init, xs, lengths=lengths, **options)


def _where_scan(params: Params, init: State, xs: Array, lengths: Array) -> Result:
    return where_scan(functools.partial(lstm, params), init, xs, lengths)


def _flax_rnn(params: Params, init: State, xs: Array, lengths: Array) -> Result:
    """`OptimizedLSTMCell` has the products that `lstm` has. RNN does not zero ys at padding, so that is done here."""
    hidden = init.h.shape[-1]
    inputs, recurrent = jnp.split(params.inputs, 4, axis=-1), jnp.split(params.hidden, 4, axis=-1)
    biases = jnp.split(_with_forget_bias(params.bias), 4)
    cell = {f"i{gate}": {"kernel": kernel} for gate, kernel in zip("ifgo", inputs, strict=True)}
    for gate, kernel, bias in zip("ifgo", recurrent, biases, strict=True):
        cell[f"h{gate}"] = {"kernel": kernel, "bias": bias}
    rnn: Any = nn.RNN(nn.OptimizedLSTMCell(hidden), time_major=True, return_carry=True)
    (c, h), ys = rnn.apply({"params": {"cell": cell}}, xs, initial_carry=(init.c, init.h), seq_lengths=lengths)
    valid = jnp.arange(xs.shape[0])[:, None] < lengths
    return State(h, c), jnp.where(valid[..., None], ys, 0)


def _with_forget_bias(bias: Array) -> Array:
    """The bias for a cell that does not add 1 to the forget gate."""
    hidden = bias.shape[0] // 4
    return bias.at[hidden : 2 * hidden].add(1.0)


_from_torch: dict[str, Callable[..., object]] = {
    FORWARD: lambda h, c, ys: (State(h, c), ys),
    GRADIENT: lambda inputs, hidden, bias, h, c, xs: (Params(inputs, hidden, bias), State(h, c), xs),
}


def _packed(size: Size, sequences: int) -> Iterator[Comparison]:
    """A data set in rows without padding, against batches of consecutive sequences, each padded to its longest."""
    params, init, _ = _data(size)
    lengths = _pareto(size, np.random.default_rng(1), sequences)
    data = [np.asarray(normal(seed, (length, size.features))) for seed, length in enumerate(lengths)]
    packed = treescan.pack(data, rows=size.rows)
    batches = [_pad(data[start : start + size.rows]) for start in range(0, sequences, size.rows)]
    details = {
        "valid_steps": float(lengths.sum()),
        "padded_over_valid": sum(xs.shape[0] * xs.shape[1] for xs, _ in batches) / float(lengths.sum()),
        "packed_over_valid": packed.mask.size / float(lengths.sum()),
    }
    peers = {FORWARD: _by_shape(_padded_forward, _join), GRADIENT: _by_shape(jax.grad(_padded_loss), _add)}
    ours = {FORWARD: _packed_forward, GRADIENT: jax.grad(_packed_loss)}
    for kind, peer in peers.items():
        yield Comparison(
            f"B={size.rows}, pack, {kind}",
            "padding, where by hand",
            functools.partial(Program(ours[kind]), params, init, packed),
            functools.partial(peer, params, init, batches),
            None if size is TINY else PACK_TARGET,
            details,
        )


def _packed_forward(params: Params, init: State, packed: treescan.Packed[Array]) -> tuple[Array, Array]:
    """The sum of squares of all ys, and the last y of each sequence."""
    _, ys = treescan.mask_scan(functools.partial(lstm, params), init, packed)
    return jnp.sum(ys**2), treescan.last(ys, packed, reverse=False)


def _packed_loss(params: Params, init: State, packed: treescan.Packed[Array]) -> Array:
    squares, last = _packed_forward(params, init, packed)
    return squares + jnp.sum(last)


def _padded_forward(params: Params, init: State, xs: Array, lengths: Array) -> tuple[Array, Array]:
    state, ys = _where_scan(params, init, xs, lengths)
    return jnp.sum(ys**2), state.h


def _padded_loss(params: Params, init: State, xs: Array, lengths: Array) -> Array:
    squares, last = _padded_forward(params, init, xs, lengths)
    return squares + jnp.sum(last)


def _by_shape(function: Callable[..., Any], collect: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """Runs a function batch by batch, compiled for each shape of xs: all of this happens in the first run."""
    programs: dict[tuple[int, ...], Program] = {}

    def run(params: Params, init: State, batches: list[tuple[Array, Array]]) -> Any:
        results: list[Any] = []
        for xs, lengths in batches:
            program = programs.setdefault(xs.shape, Program(function))
            rows = init if xs.shape[1] == init.h.shape[0] else jax.tree.map(lambda leaf, n=xs.shape[1]: leaf[:n], init)
            results.append(program(params, rows, xs, lengths))
        return collect(results)

    return run


@jax.jit
def _join(results: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    squares, lasts = zip(*results, strict=True)
    return jnp.sum(jnp.stack(squares)), jnp.concatenate(lasts)


@jax.jit
def _add(results: list[Params]) -> Params:
    return jax.tree.map(lambda *leaves: jnp.sum(jnp.stack(leaves), axis=0), *results)


def _pad(sequences: list[np.ndarray]) -> tuple[Array, Array]:
    """The sequences as `[T, B, F]`, T the longest, and their lengths."""
    lengths = [len(sequence) for sequence in sequences]
    data = [np.pad(sequence, ((0, max(lengths) - len(sequence)), (0, 0))) for sequence in sequences]
    return jnp.asarray(np.stack(data, axis=1)), jnp.asarray(lengths, jnp.int32)


def _data(size: Size) -> tuple[Params, State, Array]:
    """Parameters, init, xs; each row starts from the same state, so that sequences may stand in any row."""
    start = [jnp.broadcast_to(0.5 * normal(seed, (size.hidden,)), (size.rows, size.hidden)) for seed in (4, 5)]
    xs = normal(1, (size.steps, size.rows, size.features))
    return make_params(size.features, size.hidden), State(*start), xs


def _lengths(size: Size) -> dict[str, Array]:
    """By name; the last has about nine padded steps for a valid one."""
    draws, tailed = np.random.default_rng(0), np.random.default_rng(35)
    pareto = _pareto(size, tailed, size.rows)
    pareto[0] = size.steps  # one long row, as padding to the longest of a batch has it
    lengths = {
        FULL: np.full(size.rows, size.steps),
        UNIFORM: draws.integers(1, size.steps + 1, size.rows),
        HALF: draws.integers(1, size.steps // 2 + 1, size.rows),
        PARETO: pareto,
    }
    return {name: jnp.asarray(values, jnp.int32) for name, values in lengths.items()}


def _pareto(size: Size, draws: np.random.Generator, count: int) -> np.ndarray:
    """Many short rows and a few long ones, at most `size.steps`; at 512 steps the shortest have 20."""
    shortest = size.steps * 20 / 512
    return np.minimum(size.steps, np.ceil(shortest * (1 + draws.pareto(1.5, count)))).astype(int)
