"""`offset`: a loop that is run in parts computes the bits of the whole loop."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loops import array
from oracle import as_numpy
from thin import by_turns
from traces import Counted

import treescan
from treescan._body.signature import MASK_SCAN, SCAN
from treescan._rows.axes import RowFlags
from treescan._verbs.prepare import RowPlan, run_scan

T, B, H = 12, 3, 4
KEY = jax.random.key(7)
W, XS, INIT = array(H, H, seed=1), array(T, B, H, seed=2), array(B, H, seed=3)
LENGTHS = jnp.array([0, 5, T])
LAYERS = {"w": array(T, H, H, seed=4)}


def keyed(h, x, *, key):
    h = jnp.tanh(h @ W + x + jax.random.key_data(key)[1].astype(h.dtype) / 2.0**32)
    return h, 2 * h


def plain(h, x):
    h = jnp.tanh(h @ W + x)
    return h, 2 * h


def first(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda h, x, **key: body(h, x, **key)[0]


def block(layer, h, *, key):
    return keyed(h @ layer["w"], 0.0, key=key)


def going(h):
    return jnp.abs(h).sum() < 1e3  # always


Run = Callable[..., Any]
VERBS: dict[str, Run] = {
    "scan": lambda h, part, **o: treescan.scan(keyed, h, XS[part], key=KEY, **o),
    "fold": lambda h, part, **o: (treescan.fold(first(keyed), h, XS[part], key=KEY, lengths=LENGTHS, **o), None),
    "mask_scan": lambda h, part, **o: treescan.mask_scan(
        keyed, h, XS[part], key=KEY, lengths=LENGTHS if "offset" in o else jnp.minimum(LENGTHS, part.stop), **o
    ),
    "small lengths": lambda h, part, **o: treescan.mask_scan(plain, h, XS[part], lengths=np.uint8([0, 5, T]), **o),
    "padded": lambda h, part, **o: treescan.mask_scan(plain, h, treescan.Padded(XS[part], LENGTHS), **o),
    "mask": lambda h, part, **o: treescan.mask_scan(keyed, h, XS[part], key=KEY, mask=XS[part, :, 0] > 0, **o),
    "resets": lambda h, part, **o: treescan.mask_scan(
        keyed, h, XS[part], key=KEY, resets=XS[part, :, 0] > 0, reset_to=1.0, **o
    ),
    "while_scan": lambda h, part, **o: treescan.while_scan(going, keyed, h, XS[part], key=KEY, **o)[:2],
    "rows": lambda h, part, **o: treescan.while_scan(lambda h: h[:, 0] < 9, keyed, h, XS[part], key=KEY, **o)[:2],
    "scan_layers": lambda h, part, **o: treescan.scan_layers(block, h, {"w": LAYERS["w"][part]}, key=KEY, **o),
    "remat": lambda h, part, **o: treescan.scan(keyed, h, XS[part], key=KEY, remat="nested", check_finite=True, **o),
}


def spans(number: int) -> list[slice]:
    """Parts of T steps, cut at random places."""
    cuts = np.random.default_rng(number).choice(np.arange(1, T), 2, replace=False)
    return [slice(int(a), int(b)) for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), T], strict=True)]


THIRDS = [slice(0, 4), slice(4, 8), slice(8, T)]  # of one length: they share one program
UNEVEN = ("scan", "mask_scan", "rows", "remat")


def in_parts(run: Run, parts: Sequence[slice], init: Any = INIT, *, reverse: bool = False, **options: Any) -> Any:
    """Runs the parts, in reverse the last one first; their outputs are joined in the order of xs."""
    h, ys = init, []
    for part in parts[::-1] if reverse else parts:
        h, y = run(h, part, offset=part.start, reverse=reverse, **options)
        ys.append(y)
    return h, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(ys[::-1] if reverse else ys))


def assert_same(got: Any, wanted: Any) -> None:
    """Equal, bit for bit."""
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(as_numpy(a), as_numpy(b)), got, wanted)


CASES = [(verb, reverse) for verb in VERBS for reverse in (False, True) if (verb, reverse) != ("resets", True)]


@pytest.mark.parametrize(("verb", "reverse"), CASES)
def test_parts_compute_the_bits_of_the_whole(verb: str, reverse: bool) -> None:
    run = VERBS[verb]
    whole = run(INIT, slice(0, T), reverse=reverse)
    parts = spans(sorted(VERBS).index(verb)) if verb in UNEVEN and not reverse else THIRDS
    assert_same(in_parts(run, parts, reverse=reverse), whole)
    assert float(jnp.abs(whole[0]).sum()) > 0


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_blocks_that_take_turns(reverse: bool) -> None:
    """Their keys count the layers of all blocks."""
    stacks = [{"w": array(T, H, H, seed=seed)} for seed in (5, 6)]

    def run(h, part, *, offset=None, **options):
        layers = [{"w": stack["w"][part]} for stack in stacks]
        offset = None if offset is None else 2 * offset
        return treescan.scan_layers([block, block], h, layers, key=KEY, offset=offset, **options)

    for save in ("all", [2, "all"]):
        whole = run(INIT, slice(0, T), reverse=reverse, save=save)
        assert_same(in_parts(run, THIRDS, reverse=reverse, save=save), whole)


@pytest.mark.quick
@pytest.mark.parametrize("verb", ["scan", "mask_scan"])
def test_every_second_output_at_an_offset_that_is_traced(verb: str) -> None:
    def run(h: Any, part: slice, *, offset: int, **options: Any) -> Any:
        return jax.jit(lambda h, offset: VERBS[verb](h, part, offset=offset, **options))(h, offset)

    assert_same(in_parts(run, THIRDS, save=2), VERBS[verb](INIT, slice(0, T), save=2))


@pytest.mark.parametrize("dtype", [np.int8, np.int32])
def test_a_traced_offset_below_0_counts_as_0(dtype: Any) -> None:
    part = slice(0, 4)
    for run in (VERBS["scan"], VERBS["mask_scan"]):
        below = jax.jit(lambda offset, run=run: run(INIT, part, offset=offset))(np.iinfo(dtype).min)
        assert_same(below, jax.jit(lambda run=run: run(INIT, part, offset=0))())


@pytest.mark.parametrize("verb", ["scan", "mask_scan", "scan_layers", "while_scan"])
def test_one_program_for_all_parts(verb: str) -> None:
    """Under `jax.jit` the offset is traced. Eagerly an int, of NumPy too, does not compile again either."""
    body = Counted(block if verb == "scan_layers" else keyed)

    def run(f: Callable[..., Any], h: Any, part: Any, offset: Any) -> Any:
        match verb:
            case "scan":
                return treescan.scan(f, h, part, key=KEY, offset=offset, save="last", truncate=5)
            case "mask_scan":
                return treescan.mask_scan(f, h, part, key=KEY, lengths=LENGTHS, offset=offset, check_finite=True)
            case "while_scan":
                return treescan.while_scan(going, f, h, part, key=KEY, offset=offset)[:2]
            case _:
                return treescan.scan_layers(f, h, part, key=KEY, offset=offset)

    of_steps = {"w": LAYERS["w"]} if verb == "scan_layers" else XS
    parts = [jax.tree.map(lambda leaf, at=at: leaf[at : at + 4], of_steps) for at in (0, 4, 8)]
    whole = run(body.body, INIT, of_steps, None)
    eager, jitted = functools.partial(run, body.body), jax.jit(functools.partial(run, body.body))
    for call, offsets in ((eager, [0, np.int64(4), jnp.int32(8)]), (jitted, [0, 4, 8])):
        h, counts = INIT, []
        for part, offset in zip(parts, offsets, strict=True):
            results: list[Any] = []
            counts.append(body.traces(lambda _: results.append(call(h, part, offset)) or results))  # noqa: B023
            h = results[0][0]
        assert counts[0] > 0 or verb == "scan_layers"  # a layer has the types of one of the whole stack
        assert counts[1:] == [0, 0]
        assert_same(h, whole[0])


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["scan", "rows"])
def test_an_eager_part_may_take_the_memory_of_its_init(lengths: Any) -> None:
    """As a stream does: parts share one program, and the carry is given from one to the next."""
    body, h, ys = Counted(keyed), INIT + 0, []
    options = {} if lengths is None else {"rows": RowPlan(RowFlags(lengths))}
    convention = SCAN if lengths is None else MASK_SCAN
    for at in (0, 4, 8):
        given, results = h, list[Any]()
        part = functools.partial(run_scan, convention, init=h, xs=XS[at : at + 4], length=None, offset=np.int32(at))
        run = functools.partial(part, key=KEY, donates=True, **options)
        assert (body.traces(lambda f, run=run, into=results: into.append(run(f=f))) > 0) == (at == 0)
        ((h, y),) = results
        assert given.is_deleted()
        ys.append(y)
    whole = VERBS["scan" if lengths is None else "mask_scan"](INIT, slice(0, T))
    assert_same((h, jnp.concatenate(ys)), whole)


def test_the_mapped_offset_of_each_element() -> None:
    """Parts that run side by side, as stages do."""
    halves = XS.reshape(2, 6, B, H)
    run = lambda xs, offset: treescan.scan(keyed, INIT, xs, key=KEY, offset=offset)  # noqa: E731
    mapped = jax.vmap(run)(halves, jnp.array([0, 6]))
    for i in range(2):
        np.testing.assert_allclose(mapped[1][i], run(halves[i], 6 * i)[1], rtol=1e-6, atol=1e-6)


def test_a_row_that_ended_before_has_no_last_output() -> None:
    _, last = treescan.mask_scan(plain, INIT, XS[8:], lengths=LENGTHS, offset=8, save="last", fill=7.0)
    assert_same(last[:2], jnp.full((2, H), 7.0))


def divide(h, x):
    return h / x, None


WRONG = jnp.ones(5).at[3].set(0.0)


@pytest.mark.quick
@by_turns(2, verb=["scan", "mask_scan", "while_scan"], reverse=[False, True], jitted=[False, True])
def test_check_finite_counts_over_the_whole_run(verb: str, reverse: bool, jitted: bool) -> None:
    def run(offset: Any) -> Any:
        options: dict[str, Any] = {"offset": offset, "reverse": reverse, "check_finite": True}
        match verb:
            case "mask_scan":
                return treescan.mask_scan(divide, jnp.ones(()), WRONG, lengths=jnp.int32(400), **options)
            case "while_scan":
                return treescan.while_scan(lambda h: h > 0, divide, jnp.ones(()), WRONG, **options).carry
            case _:
                return treescan.scan(divide, jnp.ones(()), WRONG, **options)

    with pytest.raises(Exception, match=r"in step 20\d of (at most )?205"):
        jax.block_until_ready((jax.jit(run) if jitted else run)(200))
    record = treescan.last_nonfinite()
    assert record is not None
    assert (record.step, record.steps) == (203, 205)


@pytest.mark.quick
def test_outer_steps_count_over_the_whole_run_too() -> None:
    def outer(h, xs):
        return treescan.fold(lambda h, x: h / x, h, xs, check_finite=True, offset=1000), None

    rows = jnp.ones((3, 5)).at[1, 2].set(0.0)
    with pytest.raises(Exception, match=r"step 1,002 of 1,005, within step 71 of 73 of `scan`"):
        jax.block_until_ready(treescan.scan(outer, jnp.ones(()), rows, offset=70, check_finite=True))


@pytest.mark.quick
def test_a_layer_has_its_place_in_the_stacks_of_this_part() -> None:
    stack = jnp.ones(3).at[1].set(0.0)
    divides = lambda layer, h: h / layer  # noqa: E731
    with pytest.raises(treescan.errors.NonFiniteError, match=r"layer 13 of 16 \(layer 1 of `layers\[1\]`\)"):
        treescan.fold_layers([divides, divides], jnp.ones(()), [jnp.ones(3), stack], offset=10, check_finite=True)


def test_descriptions_accept_it() -> None:
    plan = treescan.plan_remat(keyed, INIT, XS, key=KEY, remat="nested", offset=5)
    assert plan.evaluations > 1
    assert treescan.describe(treescan.scan, keyed, INIT, XS, key=KEY, offset=5).plan.evaluations == 1
    layers = treescan.plan_remat(block, INIT, key=KEY, layers=LAYERS, remat="step", offset=5)
    assert layers.evaluations > 1
