"""torch's LSTM on packed sequences, as the peer of a suite: in a process of its own, on the CPU.

Two thread pools in one process would fight over the cores. This module is both ends of the pipe between the processes:
the suite starts a `Torch`, and `python -m benchmarks._torch_peer` serves it. Requests and replies are pickles:

    ("load", data)        -> None               the batch that all later requests are about
    ("result", kind)      -> tuple of arrays    of "forward" or "gradient"
    ("run", kind, calls)  -> seconds            for all the calls together

Each program runs on one thread or on one a core, whichever a trial found faster: torch's threads wait for each other
some thousand times a call, which costs them more than they gain where a core has other work as well.

torch is an optional dependency, imported in that process alone.
"""

import dataclasses
import importlib
import importlib.util
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from benchmarks._harness import Elsewhere


class Data(NamedTuple):
    """One batch and its weights, in NumPy; the gates in the order input, forget, cell, output."""

    inputs: np.ndarray  # [F, 4H]
    hidden: np.ndarray  # [H, 4H]
    bias: np.ndarray  # [4H]
    h: np.ndarray  # [B, H]
    c: np.ndarray  # [B, H]
    xs: np.ndarray  # [T, B, F]
    lengths: np.ndarray  # [B]


class Torch:
    """The process, from the side of the suite. It starts at the first request and ends with the context."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: Data | None = None

    def __enter__(self) -> "Torch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.communicate()  # closes its input, which ends it

    @staticmethod
    def installed() -> bool:
        """Whether torch can be imported."""
        return importlib.util.find_spec("torch") is not None

    def ask(self, data: Data, *request: Any) -> Any:
        """Sends a request about `data`, which travels only when it is another than before; waits for the reply."""
        if data is not self._loaded:
            self._send("load", data)
            self._loaded = data
        return self._send(*request)

    def _send(self, *request: Any) -> Any:
        if self._process is None:
            command = (sys.executable, "-m", __name__)
            root = Path(__file__).parent.parent
            self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


@dataclasses.dataclass(frozen=True)
class TorchProgram(Elsewhere):
    """One of torch's programs on one batch.

    Attributes:
        torch: the process.
        kind: "forward" or "gradient".
        data: the batch.
        result: brings what torch returns into the form of the candidate's result.
    """

    torch: Torch
    kind: str
    data: Data
    result: Callable[..., object]

    def __call__(self) -> object:
        """See `Elsewhere`."""
        return self.result(*self.torch.ask(self.data, "result", self.kind))

    def seconds(self, calls: int) -> float:
        """See `Elsewhere`."""
        return self.torch.ask(self.data, "run", self.kind, calls)


def _serve() -> None:
    """Answers requests until the input ends."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what anything prints is no reply
    torch = importlib.import_module("torch")
    programs: dict[str, Callable[[], tuple[Any, ...]]] = {}
    threads: dict[str, int] = {}
    while True:
        try:
            name, *args = pickle.load(requests)
        except EOFError:
            return
        reply: Any = None
        if name == "load":
            programs, threads = _programs(*args), {}
        elif name == "result":
            kind = args[0]
            reply = tuple(tensor.detach().numpy() for tensor in programs[kind]())
            threads[kind] = _faster(torch.set_num_threads, programs[kind])
        elif name == "run":
            kind, calls = args
            torch.set_num_threads(threads[kind])
            reply = _seconds(programs[kind], calls)
        pickle.dump(reply, replies)
        replies.flush()


def _faster(set_threads: Callable[[int], None], program: Callable[[], object]) -> int:
    """The number of threads that the program is faster with."""
    seconds: dict[int, float] = {}
    for threads in (1, os.cpu_count() or 1):
        set_threads(threads)
        seconds[threads] = statistics.median(_seconds(program, 1) for _ in range(3))
    return min(seconds, key=lambda threads: seconds[threads])


def _seconds(program: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        program()
    return time.perf_counter() - start


def _programs(data: Data) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Forward: h, c, ys. Gradient: with respect to inputs, hidden, bias, h, c, xs, each in the shape of `Data`."""
    torch = importlib.import_module("torch")
    rnn = importlib.import_module("torch.nn.utils.rnn")
    steps, _, features = data.xs.shape
    module = torch.nn.LSTM(features, data.h.shape[1])
    weights = module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0
    with torch.no_grad():
        module.bias_hh_l0.zero_()
        for weight, values in zip(weights, (data.inputs.T, data.hidden.T, data.bias), strict=True):
            weight.copy_(torch.tensor(np.ascontiguousarray(values)))
    h, c, xs = (torch.tensor(leaf[None] if leaf.ndim == 2 else leaf) for leaf in (data.h, data.c, data.xs))
    lengths = torch.tensor(data.lengths, dtype=torch.int64)

    def run() -> tuple[Any, ...]:
        packed = rnn.pack_padded_sequence(xs, lengths, enforce_sorted=False)
        outputs, (last_h, last_c) = module(packed, (h, c))
        ys, _ = rnn.pad_packed_sequence(outputs, total_length=steps)
        return last_h[0], last_c[0], ys

    def forward() -> tuple[Any, ...]:
        with torch.no_grad():
            return run()

    def gradient() -> tuple[Any, ...]:
        for leaf in (h, c, xs):
            leaf.requires_grad_()
        last_h, last_c, ys = run()
        loss = (ys**2).sum() + last_h.sum() + last_c.sum()
        of_inputs, of_hidden, of_bias, of_h, of_c, of_xs = torch.autograd.grad(loss, (*weights, h, c, xs))
        return of_inputs.T, of_hidden.T, of_bias, of_h[0], of_c[0], of_xs

    return {"forward": forward, "gradient": gradient}


if __name__ == "__main__":
    _serve()
