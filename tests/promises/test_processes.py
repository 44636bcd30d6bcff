"""Several processes that run one program: each raises the same error in the same step, and one shows a bar."""

import json
from typing import Any

import process_programs
import pytest
from process_programs import ALL, FEW
from processes import printed_by_each

PROGRAM = process_programs.__file__


@pytest.mark.parametrize(("which", "cases"), [("few", FEW), pytest.param("all", ALL, marks=pytest.mark.slow)])
def test_each_process_raises_in_the_same_step_with_the_same_record(which: str, cases: list[Any]) -> None:
    first, second = (
        [json.loads(line) for line in lines if line.startswith("{")]
        for lines in printed_by_each(PROGRAM, which, devices=2, seconds=120 if which == "few" else 500)
    )
    assert [each.pop() for each in (first, second)] == [{"last": "JaxRuntimeError"}] * 2
    bars = [each.pop() for each in (first, second)]
    assert bars == [{"process": 0, "bars": ["closed", "closed"]}, {"process": 1, "bars": []}]
    assert first == second and [tuple(found["case"]) for found in first] == cases
    for found in first:
        assert_raised(*found["case"], found["outcomes"], found["told"])


def assert_raised(kind: str, form: str, way: str, outcomes: Any, told: Any) -> None:
    eager = way in ("eager", "grad")
    error = "NonFiniteError" if eager else "JaxRuntimeError"
    together = 12.0  # what the processes sum up together after each run: none waits for another
    assert outcomes == [[None, together], [error, together], [None, together], [error, together], [None, together]]
    record, shapes, _ = told
    leaf = "x" if form == "layers" else "h"
    place = "layer 6 of 12 (layer 3 of `layers[0]`; row 3)" if form == "layers" else "step 3 of"
    assert record.startswith(f"`{leaf}` became NaN in {place}"), (kind, record)
    assert "row 3" in record and "first in `log` at" in record
    assert shapes == ([[4], [4]] if "vmap" in way else [[4, 3], [4, 3]])  # of the whole batch
