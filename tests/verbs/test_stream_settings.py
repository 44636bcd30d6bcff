"""The source of a stream is read under the settings of the thread that runs the stream, whichever thread reads it."""

import contextlib
import contextvars
import io
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bars import Recorder, bars, labels

import treescan
from treescan import scan, stream
from treescan._extras.stream.reader import Reader
from treescan._extras.stream.sources import Read
from treescan._trace.rewriting import is_rewriting

T = 6
WORD: contextvars.ContextVar[str] = contextvars.ContextVar("word", default="none")
USER = jax.make_user_context("none")
OTHER: dict[str, Any] = {
    "jax_default_prng_impl": "rbg",
    "jax_default_matmul_precision": "float32",
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "warn",
    "jax_transfer_guard": "disallow",
    "jax_transfer_guard_device_to_host": "disallow",
    "jax_transfer_guard_host_to_device": "disallow",
    "jax_transfer_guard_device_to_device": "disallow",
    "jax_legacy_prng_key": "error",
    "jax_array_garbage_collection_guard": "log",
}
"""Another value of each setting of JAX that is no bool."""


def values() -> dict[str, Any]:
    """All settings of JAX, as this thread has them."""
    config: Any = jax.config
    return {name: getattr(config, name) for name in config.values if hasattr(config, name)}


def managers() -> dict[str, Callable[[], Any]]:
    """Each setting of JAX that a context changes: the context in which it has another value."""
    made = dict[str, Callable[[], Any]]()
    for name, value in values().items():
        manager = getattr(jax, name.removeprefix("jax_"), None)
        if name == "jax_default_device":
            made[name] = lambda: jax.default_device(jax.devices()[0])
        elif callable(manager):
            other = OTHER.get(name, not value)
            made[name] = lambda manager=manager, other=other: manager(other)
    return made


def auto_mesh() -> Any:
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def set_word() -> Any:
    @contextlib.contextmanager
    def changed() -> Generator[None]:
        token = WORD.set("said")
        yield
        WORD.reset(token)

    return changed()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    **managers(),
    "mesh": lambda: jax.set_mesh(auto_mesh()),
    "contextvar": set_word,
    "rewriting": lambda: treescan.rewriting(False),
    "errstate": lambda: np.errstate(all="raise"),
    "two": lambda: combined(jax.set_mesh(auto_mesh()), jax.threefry_partitionable(False), jax.disable_jit()),
}
BY_THE_CALLER: dict[str, Callable[[], Any]] = {
    "abstract mesh": lambda: jax.sharding.use_abstract_mesh(auto_mesh().abstract_mesh),
    "a user's context": lambda: USER("said"),
    "jax_thread_guard": lambda: jax.thread_guard(True) if hasattr(jax, "thread_guard") else USER("said"),
}
"""Contexts that nothing public enters in another thread, or that are about threads."""


@contextlib.contextmanager
def combined(*contexts: Any) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def seen() -> Any:
    """What a source may depend on."""
    meshes = jax.sharding.get_abstract_mesh(), jax.sharding.get_mesh()
    return values(), meshes, WORD.get(), USER.value, is_rewriting(), np.geterr()


def test_settings_are_many() -> None:
    assert len(managers()) >= 25
    for name, context in {**CONTEXTS, **BY_THE_CALLER}.items():
        here = seen()
        with context():
            found = seen()
        assert (found == here) == (name == "none"), name


@pytest.mark.parametrize("name", [*CONTEXTS, *BY_THE_CALLER])
def test_a_source_sees_what_its_caller_sees(name: str) -> None:
    found = list[Any]()

    def parts() -> Iterator[Read]:
        for number in range(3):
            found.append((seen(), threading.current_thread()))
            yield Read(number, number, 1, number + 1, None)

    with {**CONTEXTS, **BY_THE_CALLER}[name]():
        here, reader = seen(), Reader(parts(), 1)
        for _ in reader:
            reader.part_is_done()
        reader.close()
    assert len(found) == 3
    for each, thread in found:
        assert each == here
        assert (thread is threading.current_thread()) == (name in BY_THE_CALLER)


def step(carry: Any, x: Any) -> Any:
    return carry + x, x


@pytest.mark.parametrize("name", ["jax_default_prng_impl", "jax_threefry_partitionable", "jax_enable_x64", "mesh"])
@pytest.mark.parametrize("as_parts", [False, True])
def test_prefetch_does_not_change_a_result(name: str, as_parts: bool) -> None:
    def source(start: int, n: int) -> Any:
        return jax.random.normal(jax.random.key(start), (n,))

    with CONTEXTS[name]():
        xs = jnp.concatenate([source(start, 2) for start in range(0, T, 2)])
        init = jnp.zeros((), xs.dtype)
        expected = scan(step, init, xs)[0]
        for prefetch in (0, 1, 3):
            if as_parts:
                *_, last = stream(step, init, source, length=T, part=2, prefetch=prefetch, parts=True)
                found = last.carry
            else:
                found = stream(step, init, source, length=T, part=2, prefetch=prefetch)[0]
            assert found == expected and found.dtype == expected.dtype


@pytest.mark.parametrize("prefetch", [0, 1])
def test_strict_promotion_is_that_of_the_caller(prefetch: int) -> None:
    def source(start: int, n: int) -> Any:
        return jnp.arange(n) + jnp.ones(n)

    with jax.numpy_dtype_promotion("standard"):
        stream(step, jnp.float32(0), source, length=T, part=2, prefetch=prefetch)
    with pytest.raises(Exception, match="implicit dtype promotion"):
        stream(step, jnp.float32(0), source, length=T, part=2, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_loops_of_a_source_have_bars_within_progress(prefetch: int) -> None:
    def source(start: int, n: int) -> Any:
        return treescan.fold(lambda c, x: c + x, jnp.zeros(n), jnp.ones((3, n)))

    def run() -> None:
        with treescan.progress(treescan.meters.Progress("loads", meter=Recorder())):
            stream(step, jnp.float32(0), source, length=4, part=2, prefetch=prefetch, progress=False)

    assert [total for total, _ in bars(run)] == [3, 3]
    assert labels() == ["loads", "loads"]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_source_may_trace_nothing_within_no_tracing(prefetch: int) -> None:
    def run() -> Any:
        return stream(step, jnp.float32(0), np.ones(T, np.float32), part=2, prefetch=prefetch, donate=False)[0]

    assert run() == T
    with jax.no_tracing(), contextlib.redirect_stderr(io.StringIO()):
        assert run() == T
