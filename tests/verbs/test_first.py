"""`first`, a keyword of the body: in each form of a batch, and where padding could show in a gradient.

The table of `test_what_works.py` has it with each other option and transform.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treescan
from treescan import accumulate, mask_scan, while_scan

T, B = 7, 4
RANDOM = np.random.default_rng(0)
MASK, RESETS = RANDOM.random((T, B)) < 0.6, RANDOM.random((T, B)) < 0.4
MASK[:, 3] = False
LENGTHS = np.array([7, 3, 1, 0])
SEQUENCES = [np.ones(n, np.float32) for n in (3, 0, 2, 4, 1)]
PACKED = treescan.pack(SEQUENCES, rows=2)
GAPS = PACKED._replace(mask=PACKED.mask.at[PACKED.index.start[0], PACKED.index.row[0]].set(False))


def tells(carry: Any, x: Any, *, first: Any) -> Any:
    return carry, first


def by_hand(valid: Any, begins: Any, *, reverse: bool = False) -> Any:
    """A Python loop over rows: the first valid step of each segment, in the order of the run."""
    found = np.zeros(valid.shape, bool)
    for row in range(valid.shape[1]):
        segments, number = [], 0
        for t in range(valid.shape[0]):
            number += begins[t, row]
            segments.append(number)
        seen = set()
        for t in range(valid.shape[0])[:: -1 if reverse else 1]:
            if valid[t, row] and segments[t] not in seen:
                seen.add(segments[t])
                found[t, row] = True
    return found


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("compact", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("disable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_is_that_of_a_loop_over_rows(reverse: bool, compact: bool, disable: bool) -> None:
    options: Any = {"reverse": reverse, "fill": False, "compact": compact, "chunk": 2}
    of_lengths, nothing = np.arange(T)[:, None] < LENGTHS, np.zeros((T, B), bool)
    index, (steps, rows) = GAPS.index, GAPS.mask.shape
    of_pack, number = np.zeros((steps, rows), bool), 0
    for row, start, length in zip(index.row, index.start, index.length, strict=True):
        of_pack[start, row], number = length > 0, number + 1
    with jax.disable_jit(disable):
        for flags, xs, valid, begins in (
            ({"lengths": LENGTHS}, jnp.zeros((T, B)), of_lengths, nothing),
            ({"lengths": LENGTHS, "resets": RESETS}, jnp.zeros((T, B)), of_lengths, RESETS & of_lengths),
            ({"mask": MASK, "resets": RESETS}, jnp.zeros((T, B)), MASK, RESETS & MASK),
            ({"resets": RESETS}, jnp.zeros((T, B)), np.ones((T, B), bool), RESETS),
            ({}, GAPS, np.asarray(GAPS.mask), of_pack),
        ):
            width = valid.shape[1]
            got = mask_scan(tells, jnp.zeros(width), xs, **flags, **options)[1]
            np.testing.assert_array_equal(got, by_hand(valid, begins, reverse=reverse), err_msg=str(flags.keys()))


@pytest.mark.parametrize("options", [{}, {"row_axes": {"carry": None}}, {"chunk": 0}], ids=str)
def test_padding_is_shown_the_flag_of_the_step_that_it_is_shown(options: Any) -> None:
    """Beside another flag, the step would multiply by the 0 of init, and the logarithm of that has no gradient."""

    def step(h: Any, x: Any, *, first: Any) -> Any:
        h = jnp.where(first, x, h * x)
        y = jnp.log(h)
        return (jnp.max(h) if options.get("row_axes") else h), y

    xs, lengths = jnp.full((T, 2), 2.0), jnp.array([4, 7])
    init = jnp.zeros(()) if options.get("row_axes") else jnp.zeros(2)
    grad = jax.grad(lambda xs: jnp.sum(mask_scan(step, init, xs, lengths=lengths, **options)[1]))(xs)
    assert jnp.isfinite(grad).all() and not grad[4:, 0].any()


def test_parts_of_a_run_tell_what_the_whole_tells() -> None:
    xs = jnp.zeros((T, B))
    options: Any = {"lengths": LENGTHS, "resets": RESETS, "reset_to": 0.0, "fill": False}
    _, whole = mask_scan(tells, jnp.zeros(B), xs, **options)

    def part(start: Any) -> Any:
        given: Any = {**options, "resets": RESETS[:3]}
        return mask_scan(tells, jnp.zeros(B), xs[:3], offset=start, **given)[1]

    first = jax.jit(lambda start: mask_scan(tells, jnp.zeros(B), xs[:3], offset=start, lengths=LENGTHS, fill=False)[1])
    np.testing.assert_array_equal(first(0), by_hand(np.arange(3)[:, None] < LENGTHS, np.zeros((3, B), bool)))
    assert not first(3).any()
    np.testing.assert_array_equal(part(np.int32(0)), whole[:3])
    with pytest.raises(treescan.errors.ArgumentError, match="another part"):
        mask_scan(tells, jnp.zeros(B), xs, mask=MASK, offset=3)


@pytest.mark.parametrize("compact", [False, True])
def test_rows_that_stop_and_folds(compact: bool) -> None:
    def step(n: Any, _: Any, *, first: Any) -> Any:
        return n + 1, first

    start = jnp.array([0, 2, 5, 9])
    for reverse in (False, True):
        ys = while_scan(lambda n: n < 5, step, start, max_length=T, fill=False, reverse=reverse, compact=compact).ys
        want = np.zeros((T, B), bool)
        want[-1 if reverse else 0] = start < 5
        np.testing.assert_array_equal(ys, want)
    with pytest.raises(treescan.errors.BodyError, match="needs the keyword `first`"):
        while_scan(lambda n: n < 5, step, 0, max_length=T)
    unmasked: Any = treescan.scan
    with pytest.raises(treescan.errors.BodyError, match="needs the keyword `first`"):
        unmasked(tells, 0.0, jnp.ones(3))
    fold_rows: Any = accumulate
    sums = fold_rows(
        lambda n, x, *, first: jnp.where(first, x, n + x), jnp.full(B, 9.0), jnp.ones((T, B)), lengths=LENGTHS
    )
    np.testing.assert_array_equal(sums, np.where(np.arange(T)[:, None] < LENGTHS, np.arange(1, T + 1)[:, None], 0))


def test_the_record_of_a_bad_step_has_the_x_of_the_user() -> None:
    def step(h: Any, x: Any, *, first: Any) -> Any:
        return jnp.where(first, x["a"], h) + jnp.log(x["w"]), None

    xs = {"a": jnp.ones((T, 2)), "w": jnp.array([1.0, -1.0])}
    options: Any = {"lengths": jnp.array([4, 7]), "time_axis": {"xs": {"a": 0, "w": None}}}
    options["row_axes"] = {"x": {"a": 0, "w": 0}}
    with pytest.raises(treescan.errors.NonFiniteError, match=r"in step 0 of 7 \(row 1\), (.|\n)*log"):
        mask_scan(step, jnp.zeros(2), xs, check_finite=True, **options)
    record: Any = treescan.last_nonfinite()
    assert {name: leaf.shape for name, leaf in record.x.items()} == {"a": (2,), "w": (2,)}
