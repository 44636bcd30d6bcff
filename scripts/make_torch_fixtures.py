"""Writes tests/fixtures/torch_rnn.npz: torch's LSTM and GRU on packed sequences.

tests/integrations/test_torch.py holds `mask_scan` to them.

Run by hand where torch is installed, `python scripts/make_torch_fixtures.py`; neither the library nor its tests need
torch. Everything is computed and stored in float64. A name in the file is a path, `lstm_both/grads/params/bias_hh_l0`:

    torch_version             the torch that computed it all
    <case>/lengths            [B], unsorted
    <case>/params/<name>      under torch's own names
    <case>/xs                 [T, B, F], 0 in the padding
    <case>/init/{h,c}         [directions, B, H]; c in the LSTM only, here and below
    <case>/outputs            [T, B, directions * H], 0 in the padding
    <case>/final/{h,c}        [directions, B, H]
    <case>/weights/...        of outputs and final: the loss is the sum of their products with these
    <case>/grads/...          of the loss with respect to params, xs and init
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

FILE = Path(__file__).parent.parent / "tests" / "fixtures" / "torch_rnn.npz"
CASES = {
    "lstm_forward": (torch.nn.LSTM, False),
    "lstm_both": (torch.nn.LSTM, True),
    "gru_forward": (torch.nn.GRU, False),
    "gru_both": (torch.nn.GRU, True),
}
LENGTHS = torch.tensor([7, 13, 1, 10, 4])
STEPS, ROWS, FEATURES, HIDDEN = 13, len(LENGTHS), 3, 4


def run(rnn: torch.nn.RNNBase, xs: torch.Tensor, init: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The outputs, padded with 0, and the final states."""
    packed = pack_padded_sequence(xs, LENGTHS, enforce_sorted=False)
    ys, final = rnn(packed, tuple(init.values()) if "c" in init else init["h"])
    outputs, _ = pad_packed_sequence(ys, padding_value=0.0, total_length=STEPS)
    return {"outputs": outputs, "final": dict(zip(init, final if "c" in init else [final], strict=True))}


def random(*shape: int) -> torch.Tensor:
    """Normal numbers, to be differentiated by."""
    return torch.randn(shape, requires_grad=True)


def make_case(cell: type[torch.nn.RNNBase], bidirectional: bool) -> dict[str, Any]:
    """One case of the file, as a tree."""
    rnn = cell(FEATURES, HIDDEN, bidirectional=bidirectional)
    states = ["h", "c"] if cell is torch.nn.LSTM else ["h"]
    valid = torch.arange(STEPS)[:, None] < LENGTHS
    xs = (torch.randn(STEPS, ROWS, FEATURES) * valid[..., None]).requires_grad_()
    init = {name: random(1 + bidirectional, ROWS, HIDDEN) for name in states}
    inputs = {"params": dict(rnn.named_parameters()), "xs": xs, "init": init}
    outs = run(rnn, xs, init)
    weights = {path: torch.randn_like(out) for path, out in flatten(outs).items()}
    torch.stack([torch.sum(weights[path] * out) for path, out in flatten(outs).items()]).sum().backward()
    grads = {path: leaf.grad for path, leaf in flatten(inputs).items()}
    return {"lengths": LENGTHS, **inputs, **outs, "weights": weights, "grads": grads}


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by their paths."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {p: leaf for key, value in tree.items() for p, leaf in flatten(value, f"{path}/{key}".strip("/")).items()}


def main() -> None:
    """Writes the file, with the same numbers each time."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    cases = flatten({name: make_case(*case) for name, case in CASES.items()})
    FILE.parent.mkdir(exist_ok=True)
    arrays = {path: leaf.detach().numpy() for path, leaf in cases.items()}
    np.savez_compressed(FILE, torch_version=np.array(torch.__version__), **arrays)


if __name__ == "__main__":
    main()
