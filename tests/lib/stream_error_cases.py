"""Cases of `test_errors.py` about streams: sources, parts, and checkpoints."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from error_cases import case

import treescan
from treescan import Checkpoint, stream
from treescan.meters import Progress

XS = np.arange(12, dtype=np.float32)
HOST = ("jit", "vmap", "grad")


def step(total: Any, x: Any) -> Any:
    return total + x, total


def run(source: Any = XS, **options: Any) -> Any:
    return stream(step, jnp.float32(0), source, **{"part": 5, **options})


def ignore(source: Any) -> Any:
    return stream(lambda total, x: (total, None), jnp.float32(0), source, part=5)


def parts(*sizes: int, kind: Any = np.float32) -> Iterator[Any]:
    return (np.zeros(size, kind) for size in sizes)


def in_parts() -> Iterator[Any]:
    yield XS


@contextlib.contextmanager
def in_a_new_folder() -> Iterator[None]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


class Strange:
    def __iter__(self) -> "Strange":
        return self

    def __next__(self) -> Any:
        return np.zeros(5, np.float32)

    def get_state(self) -> Any:
        return {"rng": object}


case(less=HOST)(
    stream_without_steps=lambda one: run(XS[:0]),
    stream_of_an_exhausted_iterator=lambda one: run(parts()),
    stream_length_of_other_arrays=lambda one: run(length=13),
    stream_function_without_length=lambda one: run(lambda start, n: XS[start : start + n]),
    stream_without_source_and_length=lambda one: run(None),
    stream_function_of_other_steps=lambda one: run(lambda start, n: XS[start:], length=12),
    stream_ends_early=lambda one: run(parts(5, 5), length=12),
    stream_part_too_long=lambda one: run(parts(8, 8)),
    stream_part_empty=lambda one: run(parts(5, 0)),
    stream_first_part_too_short=lambda one: run(parts(4, 4)),
    stream_part_too_short=lambda one: run(parts(5, 4, 5)),
    stream_part_of_another_dtype=lambda one: run(np.zeros(5, kind) for kind in (np.float32, np.float16)),
    stream_part_of_another_structure=lambda one: ignore({name: np.zeros(5)} for name in "ab"),
    stream_part_in_another_container=lambda one: ignore(kind([np.zeros(5)]) for kind in (list, tuple)),
    stream_iterator_in_reverse=lambda one: run(parts(5, 5), reverse=True),
    stream_list_of_parts=lambda one: run([np.zeros(5), np.zeros(3)]),
    stream_of_texts=lambda one: run({"x": "texts"}),
    stream_of_a_path=lambda one: run("xs.npy"),
    stream_iterator_of_steps=lambda one: run(iter(np.zeros(5, np.float32))),
    stream_of_nothing=lambda one: run({}),
    stream_of_numbers=lambda one: run({"x": 1.0}),
    stream_of_padded=lambda one: run(treescan.pad([XS, XS[:3]])),
    stream_of_packed=lambda one: run(treescan.pack([XS, XS[:3]], rows=2)),
    stream_lengths_beyond_the_source=lambda one: run(parts(5, 2), lengths=9),
    stream_of_a_function_that_makes_an_iterator=lambda one: run(in_parts),
    stream_list_of_numbers=lambda one: run([1.0, 2.0, 3.0]),
    stream_xs=lambda one: stream(step, jnp.float32(0), xs=XS, part=5),
    stream_without_part=lambda one: stream(step, jnp.float32(0), XS, chunk=5),
    stream_part_zero=lambda one: run(part=0),
    stream_prefetch_negative=lambda one: run(prefetch=-1),
    stream_remainder_of_a_number=lambda one: run(remainder=5),
    stream_donate_number=lambda one: run(donate=1),
    stream_on_part_of_a_list=lambda one: run(on_part=[]),
    stream_save_that_does_not_divide=lambda one: run(save=2),
    stream_save_of_positions=lambda one: run(save=np.array([1, 2])),
    stream_truncate=lambda one: run(truncate=2),
    stream_in_axes=lambda one: run(in_axes=1),
    stream_parts_on_part=lambda one: run(parts=True, on_part=print),
    stream_parts_of_a_number=lambda one: run(parts=5),
    stream_check_finite_return=lambda one: run(check_finite="return"),
    stream_progress_updates=lambda one: run(progress=Progress(updates=3)),
    stream_checkpoint_number=lambda one: run(checkpoint=3),
    stream_checkpoint_every_zero=lambda one: run(checkpoint=Checkpoint("runs", every=0)),
    stream_checkpoint_skip_number=lambda one: run(checkpoint=Checkpoint("runs", skip_damaged=3)),
    stream_function_that_ends=lambda one: run(lambda start, n: next(iter([]) if start else iter([XS[:5]])), length=12),
    stream_checkpoint_keep_zero=lambda one: run(checkpoint=Checkpoint("runs", keep=0)),
)


@case(less=("disable_jit", *HOST))
def stream_list_of_equal_parts(one):
    return run([np.zeros(5), np.ones(5)])


@case(less=HOST)
def stream_carry_that_was_donated(one):
    return next(run(parts=True, donate=True)).carry


@case(less=HOST)
def stream_of_a_traced_init(one):
    return jax.vmap(lambda one: stream(step, {"total": one}, XS, part=5))(one[None])


@case(less=HOST)
def stream_that_closes_over_a_traced_value(one):
    return jax.grad(lambda one: stream(lambda total, x: (total + x * one, None), jnp.float32(0), XS, part=5)[0])(one)


@case(less=("disable_jit", *HOST))
def stream_under_jit(one):
    return jax.jit(run)()


def in_folder(**options: Any) -> Any:
    return run(checkpoint="runs/1", **options)


@case(less=HOST, context=in_a_new_folder)
def checkpoints_of_another_run(one):
    stream(step, jnp.float32(0), XS, part=5, checkpoint="runs/1")
    return stream(step, jnp.zeros(3), XS, part=6, checkpoint="runs/1", lengths=np.array([1, 2, 3]))


@case(less=HOST, context=in_a_new_folder)
def checkpoints_before_a_longer_source(one):
    once = Checkpoint("runs/1", keep=1)
    stream(step, jnp.float32(0), XS[:7], part=5, checkpoint=once)
    return stream(step, jnp.float32(0), XS, part=5, checkpoint=once)


@case(less=HOST, context=in_a_new_folder)
def checkpoints_of_a_run_shorter_than_a_part(one):
    stream(step, jnp.float32(0), XS[:3], part=5, checkpoint="runs/1")
    return stream(step, jnp.float32(0), XS[:4], part=5, checkpoint="runs/1")


@case(less=HOST, context=in_a_new_folder)
def checkpoints_of_two_runs(one):
    first = in_folder(parts=True)
    next(first)
    return in_folder()


@case(less=HOST, context=in_a_new_folder)
def checkpoints_in_a_file(one):
    open("runs", "w").close()
    return in_folder()


@case(less=HOST, context=in_a_new_folder)
def checkpoints_on_a_full_disk(one):
    from orbax.checkpoint import CheckpointManager

    save = CheckpointManager.save

    def saved(self: Any, number: int, *args: Any, **options: Any) -> Any:
        if number > 1:
            raise OSError(28, "No space left on device")
        return save(self, number, *args, **options)

    with mock.patch.object(CheckpointManager, "save", saved):
        return in_folder()


def damaged(*numbers: int, **options: Any) -> Any:
    """Goes on with a run whose checkpoints hold something else."""

    def stop(part):
        if part.start == 5:
            raise ValueError

    with contextlib.suppress(ValueError):
        run(np.zeros(20, np.float32), on_part=stop, part=1, checkpoint=Checkpoint("runs/1", keep=3))
    for number in numbers:
        Path(f"runs/1/{number}/about/metadata").write_text("{}")
    return run(np.zeros(20, np.float32), part=1, checkpoint=Checkpoint("runs/1", keep=3, **options))


case(less=HOST, context=in_a_new_folder)(
    checkpoints_damaged=lambda one: damaged(4, 5),
    checkpoints_all_damaged=lambda one: damaged(3, 4, 5, skip_damaged=True),
)


@case(less=HOST, context=in_a_new_folder)
def checkpoints_to_skip_of_several_processes(one):
    with two_processes(lambda data: data):
        return run(checkpoint=Checkpoint("runs/1", skip_damaged=True))


@contextlib.contextmanager
def two_processes(told: Any) -> Iterator[None]:
    """This is the first of two processes, the second of which says this where they exchange what they are given."""
    with (
        mock.patch("jax.process_count", lambda: 2),
        mock.patch("treescan._extras.stream.program._of_all", lambda data: [data, told(data)]),
    ):
        yield


@case(less=HOST, context=in_a_new_folder)
def stream_of_processes_that_were_given_other_arguments(one):
    def told(data):
        is_text = data.startswith(b"{")
        return data.replace(b'"length": "12"', b'"length": "13"') if is_text else bytes(len(data))

    with two_processes(told):
        return run(checkpoint="runs/1")


@case(less=HOST, context=in_a_new_folder)
def stream_of_a_process_beside_one_that_was_refused(one):
    with two_processes(lambda data: b"null".ljust(len(data)) if data.startswith(b"{") else bytes(len(data))):
        return run(checkpoint="runs/1")


@case(less=HOST, context=in_a_new_folder)
def checkpoints_of_a_shorter_source(one):
    def stop(part):
        if part.start == 5:
            raise ValueError

    with contextlib.suppress(ValueError):
        in_folder(source=parts(5, 5), on_part=stop)
    return in_folder(source=parts(5))


@case(less=HOST, context=in_a_new_folder)
def checkpoints_of_a_strange_iterator(one):
    return in_folder(source=Strange())


@case(less=HOST, context=in_a_new_folder)
def checkpoints_without_orbax(one):
    with mock.patch("importlib.util.find_spec", lambda name: None):
        return in_folder()


@case(less=HOST, context=in_a_new_folder)
def checkpoints_that_the_first_process_cannot_open(one):
    with (
        mock.patch("jax.process_index", lambda: 1),
        two_processes(lambda data: data),
        mock.patch("jax.experimental.multihost_utils.broadcast_one_to_all", lambda refused: True),
    ):
        return in_folder()
