"""Arguments of a stream that are not those of another process: each process raises, and none waits for another."""

import json

import process_arguments
from process_arguments import AROUND, CASES
from processes import printed_by_each

SAYS = {  # what each of the two processes says, where that is not a row of a table with both arguments
    "refused": (
        "process 1 was refused its arguments, so this one does not begin either.",
        "`part` must be at least 1, got 0",
    ),
    "first part": ("length 12 13",) * 2,
    "checkpoint": ("checkpoint every=1, keep=2 every=2, keep=2",) * 2,
    "init": ("init float32[4,3] int32[4,3]",) * 2,
    "key": ("key key<fry>[]",) * 2,
    "lengths": ("lengths int32[4], digest",) * 2,
    "save": ("save all last",) * 2,
    "check_finite": ("check_finite False True",) * 2,
    "part": ("part 4 3",) * 2,
    "show of progress": ("show of progress True False",) * 2,
    "length": ("length 12 13",) * 2,
}


def test_processes_that_are_given_other_arguments_all_say_so(tmp_path: object) -> None:
    each = printed_by_each(process_arguments.__file__, tmp_path, devices=2, seconds=150)
    found = [[json.loads(line) for line in lines if line.startswith("[") and '"' in line] for lines in each]
    assert [[name for name, _ in told] for told in found] == [[*CASES, *AROUND, "at the end"]] * 2
    for number, told in enumerate(found):
        for name, error in told:
            if name in ("nothing", "again nothing", "at the end"):
                assert error is None, (name, error)
                continue
            kind, text = error
            says = SAYS[name][number] if name in SAYS else "length 12 13"
            assert kind == "ArgumentError" and says in text, (name, number, text)
            assert ("different arguments" in text) == (name != "refused")
    bars = [[line for line in lines if line.startswith("parts: 100%")] for lines in each]
    assert [len(told) for told in bars] == [1, 0] and "mean=" in bars[0][0]
