"""Cases of `test_errors.py` about `progress`."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from error_cases import Given, collector

from treescan import (
    AbstractProgressMeter,
    ArgumentError,
    ArgumentTypeError,
    Progress,
    Text,
    Tqdm,
    fold,
    mask_scan,
    scan,
    scan_layers,
    while_scan,
)

CASES: list[Given] = []
case = collector(CASES)

XS = jnp.arange(4.0)


def step(carry, x):
    return carry + x, x


def add(carry, x):
    return carry + x


class Unhashable(AbstractProgressMeter):
    __hash__ = None

    def init(self, label, total):
        return None

    def step(self, bar, done, shown):
        pass

    def close(self, bar):
        pass


@case(ArgumentTypeError)
def progress_number(one: Any) -> Any:
    return scan(step, one, XS, progress=100)


@case(ArgumentTypeError)
def progress_class(one: Any) -> Any:
    return fold(add, one, XS, progress=Progress)


@case(ArgumentTypeError)
def progress_label_of_a_number(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(3))


@case(ArgumentTypeError)
def progress_show_of_a_text(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(show="loss"))


@case(ArgumentError)
def progress_show_of_a_number(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(show=lambda carry: carry, meter=Text()))


@case(ArgumentError)
def progress_show_of_an_array(one: Any) -> Any:
    progress = Progress(show=lambda carry: {"h": carry, "sum": carry.sum()}, meter=Text())
    return scan(lambda carry, x: (carry + x, x), jnp.ones(3) * one, XS, progress=progress)


@case(ArgumentError)
def progress_show_of_a_name(one: Any) -> Any:
    progress = Progress(show=lambda carry: {"phase": "warm up"}, meter=Text())
    return while_scan(lambda carry: carry < 3, step, one, XS, progress=progress)


@case(ArgumentError)
def progress_updates_zero(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(updates=0))


@case(ArgumentError)
def progress_updates_float(one: Any) -> Any:
    rows = XS[:, None]
    return mask_scan(step, one[None], rows, lengths=jnp.array([3]), progress=Progress(updates=0.1))


@case(ArgumentTypeError)
def progress_backward_of_a_text(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(backward="yes"))


@case(ArgumentTypeError)
def progress_batched_of_a_number(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(batched=1))


@case(ArgumentError)
def progress_backward_of_while_scan(one: Any) -> Any:
    return while_scan(lambda carry: carry < 3, step, one, XS, progress=Progress(meter=Text(), backward=True))


@case(ArgumentError, less=("disable_jit", "jit", "vmap", "grad"))
def progress_backward_in_forward_mode(one: Any) -> Any:
    progress = Progress(meter=Text(), backward=True)
    return jax.jvp(lambda carry: scan(step, carry, XS, progress=progress)[0], (1.0,), (1.0,))


@case(ArgumentTypeError)
def progress_meter_by_name(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(meter="tqdm"))


@case(ArgumentTypeError)
def progress_meter_class(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(meter=Text))


@case(ArgumentTypeError)
def progress_meter_without_hash(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(meter=Unhashable()))


@contextlib.contextmanager
def without_tqdm() -> Iterator[None]:
    found = importlib.util.find_spec
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "tqdm"}
    with (
        mock.patch.object(importlib.util, "find_spec", lambda name: None if name == "tqdm" else found(name)),
        mock.patch.dict(sys.modules, hidden, clear=True),
    ):
        yield


@case(ArgumentError, context=without_tqdm)
def progress_tqdm_that_is_not_there(one: Any) -> Any:
    return scan(step, one, XS, progress=Progress(meter=Tqdm()))


@case(ArgumentError, less=("disable_jit", "vmap", "grad"))
def progress_of_symbolic_steps(one: Any) -> Any:
    (n,) = jax.export.symbolic_shape("n")
    run = jax.jit(lambda xs: scan(step, 0.0, xs, progress=Progress(meter=Text())))
    return jax.export.export(run)(jax.ShapeDtypeStruct((n,), jnp.float32))


@case(ArgumentError)
def progress_of_layers_with_prefetch(one: Any) -> Any:
    layers = jnp.ones(3) * one
    return scan_layers(lambda layer, x: (x + layer, x), one, layers, prefetch=lambda layer: layer, progress="layers")


@case(ArgumentError)
def progress_backward_of_a_pattern(one: Any) -> Any:
    blocks, layers = [lambda layer, x: (x + layer, x)] * 2, [jnp.ones(3) * one] * 2
    return scan_layers(blocks, one, layers, progress=Progress(meter=Text(), backward=True))
