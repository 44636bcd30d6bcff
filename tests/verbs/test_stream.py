"""`stream` against one `scan` or `mask_scan` of the whole: equal to the last bit."""

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bars import Recorder, bars, labels
from jax.experimental import multihost_utils

import treescan
from treescan import mask_scan, scan, stream
from treescan.carries import ema, keys

T, B, F = 37, 3, 4
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(T, F)).astype(np.float32)
ROWS = RNG.normal(size=(T, B, F)).astype(np.float32)
LENGTHS = np.array([37, 9, 0])
W = jnp.asarray(RNG.normal(size=(F, F)).astype(np.float32))
KEY = jax.random.key(7)


def rnn(h: Any, x: Any) -> Any:
    h = jnp.tanh(h @ W + x)
    return h, {"h": h, "norm": jnp.sum(h * h, axis=-1)}


def integers(state: Any, x: Any) -> Any:
    n = 3 * state["n"] + (x[..., 0] > 0).astype(jnp.int32)
    return {"n": n, "any": state["any"] | (n % 5 == 0)}, n


def halves(h: Any, x: Any) -> Any:
    h = (h * jnp.bfloat16(0.9) + x.astype(jnp.bfloat16)) / jnp.sqrt(1 + jnp.abs(x)).astype(jnp.bfloat16)
    return h, h.astype(jnp.float32)


def noisy(h: Any, x: Any, *, key: Any) -> Any:
    h = 0.9 * h + jax.random.normal(key, h.shape) * x
    return h, h


def inits(*batch: int) -> dict[Callable[..., Any], Any]:
    zeros = jnp.zeros((*batch, F))
    return {
        rnn: zeros,
        integers: {"n": jnp.ones(batch, jnp.int32), "any": jnp.zeros(batch, bool)},
        halves: zeros.astype(jnp.bfloat16),
        noisy: zeros,
    }


BODIES = list(inits())


def joined(parts: list[Any], *, reverse: bool = False) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *(parts[::-1] if reverse else parts))


def streamed(f: Any, init: Any, source: Any, **options: Any) -> tuple[Any, Any]:
    """The final carry, and the ys of all parts."""
    parts = list[Any]()
    carry, last = stream(f, init, source, on_part=lambda part: parts.append(jax.device_get(part.ys)), **options)
    assert last is None
    return carry, joined(parts, reverse=options.get("reverse", False))


def equal(one: Any, other: Any) -> None:
    chex.assert_trees_all_equal(one, other)
    chex.assert_trees_all_equal_dtypes(one, other)


def options_of(f: Any) -> dict[str, Any]:
    return {"key": KEY} if f is noisy else {}


# values


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("f", BODIES)
def test_it_is_one_scan(f: Any, reverse: bool) -> None:
    options = {"reverse": reverse, **options_of(f)}
    equal(streamed(f, inits()[f], XS, part=16, **options), scan(f, inits()[f], XS, **options))


def reducing(h: Any, x: Any) -> Any:
    h = jnp.float32(0.9) * h + jnp.sin(x)
    return h, h.mean()


def test_bits_do_not_depend_on_the_last_part() -> None:
    xs = np.ones((1050, 8), np.float32)  # with a mask, XLA adds in another order
    equal(streamed(reducing, jnp.zeros(8), xs, part=100), scan(reducing, jnp.zeros(8), xs))


@pytest.mark.parametrize("f", BODIES)
def test_a_last_part_may_be_padded(f: Any) -> None:
    options = options_of(f)
    found = streamed(f, inits()[f], XS, part=16, remainder="mask", **options)
    chex.assert_trees_all_close(found, scan(f, inits()[f], XS, **options), rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("f", BODIES)
def test_rows_are_those_of_one_mask_scan(f: Any, reverse: bool) -> None:
    options = {"reverse": reverse, "lengths": LENGTHS, **options_of(f)}
    equal(streamed(f, inits(B)[f], ROWS, part=16, **options), mask_scan(f, inits(B)[f], ROWS, **options))


@pytest.mark.parametrize(("size", "reverse"), [(18, False), (18, True), (40, False)])
def test_save_counts_over_the_whole_run(size: int, reverse: bool) -> None:
    save = {"h": 3, "norm": "last"}
    for init, xs, rows in ((inits()[rnn], XS, {}), (inits(B)[rnn], ROWS, {"lengths": LENGTHS})):
        whole: Any = mask_scan if rows else scan
        carry, ys = whole(rnn, init, xs, save=save, reverse=reverse, **rows)
        parts = list[Any]()
        found, last = stream(
            rnn, init, xs, part=size, save=save, reverse=reverse, on_part=lambda p, to=parts: to.append(p), **rows
        )
        equal(found, carry)
        equal(last, {"h": None, "norm": ys["norm"]})
        equal(joined([jax.device_get(part.ys["h"]) for part in parts], reverse=reverse), ys["h"])
        equal(parts[-1].ys["norm"], ys["norm"])


def test_the_last_y_of_a_row_may_be_in_an_earlier_part() -> None:
    carry, last = stream(rnn, inits(B)[rnn], ROWS, part=8, lengths=LENGTHS, save="last")
    equal((carry, last), mask_scan(rnn, inits(B)[rnn], ROWS, lengths=LENGTHS, save="last"))


def test_the_body_may_take_valid() -> None:
    def counting(n: Any, x: Any, *, valid: Any) -> Any:
        return n + valid.astype(jnp.int32), valid

    zeros = jnp.zeros(B, jnp.int32)
    equal(streamed(counting, zeros, ROWS, part=8, lengths=LENGTHS), mask_scan(counting, zeros, ROWS, lengths=LENGTHS))
    assert int(stream(counting, jnp.int32(0), XS[:36], part=6)[0]) == 36


def test_custom_carries_and_static_leaves() -> None:
    def step(carry: Any, x: Any) -> Any:
        h = carry["f"](carry["h"] + x * jax.random.normal(carry["keys"]))
        return {**carry, "ema": x, "h": h}, carry["ema"]

    init = {"ema": ema(jnp.zeros(F), 0.9), "keys": keys(KEY), "h": jnp.zeros(F), "f": jnp.tanh}
    found, whole = streamed(step, init, XS, part=5), scan(step, init, XS)
    assert found[0].pop("f") is whole[0].pop("f")
    equal(found, whole)


def test_leaves_of_one_value_may_be_donated() -> None:
    def step(carry: Any, x: Any) -> Any:
        h = carry[0] + x
        return (h, h, carry[2]), None

    one = jnp.zeros(F)
    equal(stream(step, (one, one, W), XS, part=5)[0], scan(step, (one, one, W), XS)[0])


def test_python_numbers_in_init_are_promoted_as_in_one_scan() -> None:
    def step(carry: Any, x: Any) -> Any:
        n, weak = carry
        return (n + x[0].astype(jnp.bfloat16), weak + 1), x.astype(jnp.bfloat16) * weak

    equal(streamed(step, (0.0, 2.0), XS, part=5), scan(step, (0.0, 2.0), XS))


def test_with_x64() -> None:
    with jax.enable_x64(True):
        xs, init = XS.astype(np.float64), jnp.zeros(F, jnp.float64)
        found = streamed(lambda h, x: (jnp.cos(h + x), h), init, xs, part=5)
        assert found[1].dtype == np.float64
        equal(found, scan(lambda h, x: (jnp.cos(h + x), h), init, xs))


@pytest.mark.quick
def test_without_jit() -> None:
    with jax.disable_jit():
        equal(streamed(rnn, inits()[rnn], XS[:7], part=3), scan(rnn, inits()[rnn], XS[:7]))


def test_a_check_counts_over_the_whole_run() -> None:
    def step(h: Any, x: Any) -> Any:
        return jnp.sqrt(h - x), None

    xs = np.zeros(40, np.float32)
    xs[23] = 9
    for length in (40, 38):
        with pytest.raises(treescan.errors.NonFiniteError, match="`h` became NaN in step 23"):
            stream(step, jnp.float32(2), xs[:length], part=10, check_finite=True)


# sources


class Counted:
    """An iterator over parts that can say where it is, as those of grain do, and that fills one array again."""

    def __init__(self, xs: Any = XS, chunk: int = 5) -> None:
        self.xs, self.chunk, self.at, self.buffer = xs, chunk, 0, np.empty((chunk, *xs.shape[1:]), xs.dtype)
        self.read = list[int]()

    def __iter__(self) -> "Counted":
        return self

    def __next__(self) -> Any:
        part = self.xs[self.at : self.at + self.chunk]
        if not len(part):
            raise StopIteration
        self.read.append(self.at)
        self.at += len(part)
        self.buffer[: len(part)] = part
        return self.buffer[: len(part)]

    def get_state(self) -> Any:
        return {"at": self.at}

    def set_state(self, state: Any) -> None:
        self.at = state["at"]


def memmap(folder: Path) -> Any:
    np.save(folder / "xs.npy", XS)
    return np.load(folder / "xs.npy", mmap_mode="r")


SOURCES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "numpy": lambda folder: {"source": XS},
    "memmap": lambda folder: {"source": memmap(folder)},
    "jax": lambda folder: {"source": jnp.asarray(XS)},
    "function": lambda folder: {"source": lambda start, n: XS[start : start + n], "length": T},
    "iterator": lambda folder: {"source": Counted()},
    "iterable": lambda folder: {"source": map(np.asarray, np.split(XS, range(5, T, 5)))},
    "endless": lambda folder: {"source": (each for _ in range(9) for each in Counted()), "length": T},
}


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("name", SOURCES)
def test_sources(name: str, prefetch: int, tmp_path: Path) -> None:
    equal(
        streamed(rnn, inits()[rnn], part=5, prefetch=prefetch, **SOURCES[name](tmp_path)), scan(rnn, inits()[rnn], XS)
    )


def test_trees_of_arrays_keys_and_weak_arrays() -> None:
    def step(h: Any, x: Any) -> Any:
        h = h + x["a"].sum() * x["w"] + jax.random.normal(x["key"], dtype=jnp.bfloat16)
        return h, x["w"]

    xs = {"a": XS.astype(jnp.bfloat16), "key": jax.random.split(KEY, T), "w": jnp.full(T, 0.5)}
    for reverse in (False, True):
        found = streamed(step, jnp.bfloat16(0), xs, part=5, reverse=reverse)
        equal(found, scan(step, jnp.bfloat16(0), xs, reverse=reverse))


def test_no_source_at_all() -> None:
    def step(h: Any, _: None, *, key: Any) -> Any:
        return h + jax.random.normal(key), h

    found = streamed(step, jnp.float32(0), None, part=5, length=T, key=KEY)
    equal(found, scan(step, jnp.float32(0), None, T, key=KEY))


def test_functions_are_asked_for_their_parts_in_order() -> None:
    asked = list[tuple[int, int]]()

    def read(start: int, n: int) -> Any:
        asked.append((start, n))
        return XS[start : start + n]

    stream(rnn, inits()[rnn], read, part=15, length=T)
    stream(rnn, inits()[rnn], read, part=15, length=T, reverse=True)
    assert asked == [(0, 15), (15, 15), (30, 7), (30, 7), (15, 15), (0, 15)]


# the program, and what is in memory


@pytest.mark.parametrize("length", [36, 37])
@pytest.mark.parametrize("options", [{}, {"save": "last"}, {"key": KEY}, {"check_finite": True}, {"donate": True}])
def test_the_body_is_traced_once(length: int, options: dict[str, Any]) -> None:
    traces = list[Any]()

    def step(h: Any, x: Any, *, key: Any = None) -> Any:
        traces.append(h)
        return h + x, h

    stream(step, jnp.zeros(F), XS[:length], part=6, remainder="mask", **options)
    once = len(traces)
    traces.clear()
    whole = dict(options)
    whole.pop("donate", None)
    mask_scan(lambda h, x, *, key=None: step(h, x, key=key), jnp.zeros(F), XS[:6], lengths=jnp.int32(6), **whole)
    assert once <= len(traces)


@pytest.mark.parametrize("on_part", [None, lambda part: None])
def test_init_can_be_used_again(on_part: Any) -> None:
    init = jnp.zeros(F)
    first = stream(rnn, init, XS, part=5, on_part=on_part)
    equal(stream(rnn, init, XS, part=5, on_part=on_part), first)
    assert not init.is_deleted()


def test_carries_of_parts_are_those_of_the_steps() -> None:
    every = treescan.accumulate(lambda h, x: rnn(h, x)[0], inits()[rnn], XS)
    parts = list(stream(rnn, inits()[rnn], XS, part=5, parts=True))
    assert [(part.start, part.length) for part in parts] == [(i, min(5, T - i)) for i in range(0, T, 5)]
    for part in parts:
        equal(part.carry, every[part.start + part.length - 1])
    assert repr(parts[-1]).startswith("Part(start=35, length=2, ys={'h': [[ 0.9")
    assert "carry" in parts[-1]._repr_html_()


def test_a_carry_that_was_donated_says_so() -> None:
    *parts, final = stream(rnn, inits()[rnn], XS, part=5, donate=True, parts=True)
    equal(final.carry, scan(rnn, inits()[rnn], XS)[0])
    assert len(parts) == 7
    for part in parts:
        with pytest.raises(treescan.errors.ArgumentError, match="was donated to the next part"):
            part.carry  # noqa: B018
        assert "carry" not in repr(part)


def test_the_next_part_is_on_its_way_when_a_part_is_given() -> None:
    events = list[str]()

    def read(start: int, n: int) -> Any:
        events.append(f"read {start}")
        return XS[start : start + n]

    stream(rnn, inits()[rnn], read, part=10, length=T, prefetch=0, on_part=lambda p: events.append(f"part {p.start}"))
    assert events == ["read 0", "read 10", "part 0", "read 20", "part 10", "read 30", "part 20", "part 30"]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_two_parts_are_in_memory(prefetch: int) -> None:
    def live() -> int:
        gc.collect()
        return sum(each.shape[:1] == (1000,) for each in jax.live_arrays())

    held, most = live(), list[int]()

    def on_part(part: Any) -> None:
        most.append(live() - held)

    xs = np.ones((20_000, 7), np.float32)
    stream(lambda h, x: (h + x, h), jnp.zeros(7), xs, part=1000, prefetch=prefetch, on_part=on_part)
    assert len(most) == 20
    assert max(most) <= 2 + 2, "xs and ys of two parts"


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "treescan.stream"]


def test_the_thread_ends_with_the_run() -> None:
    for part in stream(rnn, inits()[rnn], XS, part=5, parts=True):
        assert part.start or readers()
    assert not readers()
    parts = stream(rnn, inits()[rnn], XS, part=5, parts=True)
    next(parts)
    assert readers()
    parts.close()
    assert not readers()
    parts = stream(rnn, inits()[rnn], XS, part=5, parts=True)
    next(parts)
    del parts
    gc.collect()
    assert not readers()
    with pytest.raises(ZeroDivisionError):
        stream(rnn, inits()[rnn], XS, part=5, on_part=lambda part: 1 // part.start)
    assert not readers()


@pytest.mark.parametrize("ends", ["an error", "a loop that is left"])
def test_a_thread_that_still_takes_from_an_iterator_is_told_of(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treescan._extras.stream.reader.PATIENCE", 0.05)
    waits, goes_on = threading.Event(), threading.Event()

    def parts() -> Iterator[Any]:
        yield from (XS[:5], XS[5:10])
        waits.set()
        goes_on.wait(60)
        yield XS[10:15]

    def stop(part: Any) -> None:
        waits.wait(60)
        raise KeyError

    with pytest.warns(UserWarning, match="still waits for the next part of the iterator") as told:
        if ends == "an error":
            with pytest.raises(KeyError):
                stream(rnn, inits()[rnn], parts(), part=5, on_part=stop)
        else:
            for _ in (run := stream(rnn, inits()[rnn], parts(), part=5, parts=True)):
                waits.wait(60)
                break
            run.close()
    assert [each.filename for each in told] == [__file__]
    (thread,) = (each for each in threading.enumerate() if each.name == "treescan.stream")
    goes_on.set()
    thread.join(60)
    assert not thread.is_alive()


def test_nothing_is_said_of_a_source_whose_parts_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treescan._extras.stream.reader.PATIENCE", 0.05)
    goes_on = threading.Event()

    def read(start: int, n: int) -> Any:
        if start == 10:
            goes_on.wait(60)
        return XS[start : start + n]

    with pytest.raises(ZeroDivisionError):  # a warning is an error here
        stream(rnn, inits()[rnn], read, length=T, part=5, on_part=lambda part: 1 // part.start)
    goes_on.set()


def test_a_generator_returns_what_stream_returns() -> None:
    def all_of() -> Iterator[Any]:
        result = yield from stream(rnn, inits()[rnn], XS, part=5, save="last", parts=True)
        equal(result, scan(rnn, inits()[rnn], XS, save="last"))

    assert len(list(all_of())) == 8


def test_one_bar_for_the_whole_run() -> None:
    def count(n: Any, x: Any) -> Any:
        return n + 1, None

    for donate in (False, True):
        bar = treescan.meters.Progress(show=lambda n: {"n": n}, meter=Recorder())
        run = functools.partial(stream, count, jnp.int32(0), part=15, progress=bar, donate=donate)
        for given, total, ends in (
            ({"source": XS}, 37, [15, 30, 37]),
            ({"source": iter([XS[:15], XS[15:20]])}, None, [15, 20]),
            ({"source": XS, "reverse": True}, 37, [7, 22, 37]),
        ):
            assert bars(functools.partial(run, **given)) == [(total, [(n, {"n": n}) for n in ends])]
            assert labels() == ["count"]


def test_the_bar_of_a_context_is_that_of_the_whole_run() -> None:
    with treescan.progress(treescan.meters.Progress(meter=Recorder(), updates=2)):
        told = bars(lambda: [stream(rnn, inits()[rnn], XS, part=15, **o) for o in ({}, {"progress": False})])
    assert (told, labels()) == ([(37, [(15, {}), (30, {}), (37, {})])], ["stream rnn"])


# what is raised by others


@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_a_source_raises_says_of_which_part(prefetch: int) -> None:
    def read(start: int, n: int) -> Any:
        if start == 20:
            raise OSError("the disk is gone")
        return XS[start : start + n]

    seen = list[int]()
    with pytest.raises(OSError, match="the disk is gone") as caught:
        stream(rnn, inits()[rnn], read, part=10, length=T, prefetch=prefetch, on_part=lambda p: seen.append(p.start))
    assert caught.value.__notes__ == ["The source of `treescan.stream` raised this for the part at step 20."]
    assert seen == [0]  # part 10 runs, but its outputs are not given


@pytest.mark.parametrize("with_others", [True, False])
def test_a_process_tells_those_that_run_the_same_what_it_was_refused(
    with_others: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in a run with checkpoints; of a run that is its own they do not know."""
    told = list[Any]()

    def gather(data: Any) -> Any:
        told.append(data)
        return np.stack([data, data])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    with pytest.raises(treescan.errors.ArgumentError, match="`part`"):
        stream(rnn, inits()[rnn], XS, part=0, checkpoint=tmp_path if with_others else None)
    assert len(told) == with_others


def test_what_on_part_raises_says_of_which_part() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        stream(rnn, inits()[rnn], XS, part=10, on_part=lambda part: 1 // (part.start - 20))
    assert caught.value.__notes__ == ["`on_part` of `treescan.stream` raised this for the part at step 20."]
