"""Programs of several processes compute what one process computes, values and gradients."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import process_numbers
import pytest
from process_numbers import CASES, Data
from processes import printed_by_each

PROGRAM = process_numbers.__file__


def told(lines: list[str]) -> Iterator[Any]:
    """What a process printed, without the lines of JAX's own."""
    return (json.loads(line) for line in lines if line.startswith("{"))


@pytest.mark.parametrize(
    ("count", "devices", "kinds"),
    [
        (2, 1, ["Auto"]),
        pytest.param(2, 2, ["Auto", "Explicit"], marks=pytest.mark.slow),
        pytest.param(4, 1, ["Auto", "Explicit"], marks=pytest.mark.slow),
    ],
    ids=["two", "two of two devices", "four"],
)
def test_several_processes_compute_what_one_does(count: int, devices: int, kinds: list[str]) -> None:
    alone = {name: one(Data()) for name, (_, one) in CASES.items()}
    for lines in printed_by_each(PROGRAM, ",".join(kinds), count=count, devices=devices, seconds=400):
        found = list(told(lines))
        assert [(each["kind"], each["name"]) for each in found] == list(itertools.product(kinds, CASES))
        for each in found:
            for value, expected in zip(each["found"], alone[each["name"]], strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=each["name"])
