"""Cases of `test_errors.py` about `progress`."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from error_cases import case

from treescan import (
    AbstractProgressMeter,
    ArgumentError,
    ArgumentTypeError,
    Progress,
    Text,
    Tqdm,
    scan,
    scan_layers,
    while_scan,
)

XS = jnp.arange(4.0)


def step(carry, x):
    return carry + x, x


class Unhashable(AbstractProgressMeter):
    __hash__ = None

    def init(self, label, total):
        return None

    def step(self, bar, done, shown):
        pass

    def close(self, bar):
        pass


@case(ArgumentError)
def progress_show_of_an_array(one):
    progress = Progress(show=lambda carry: {"h": carry, "sum": carry.sum()}, meter=Text())
    return scan(lambda carry, x: (carry + x, x), jnp.ones(3) * one, XS, progress=progress)


@contextlib.contextmanager
def without_tqdm() -> Iterator[None]:
    found = importlib.util.find_spec
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "tqdm"}
    with (
        mock.patch.object(importlib.util, "find_spec", lambda name: None if name == "tqdm" else found(name)),
        mock.patch.dict(sys.modules, hidden, clear=True),
    ):
        yield


@case(ArgumentError, less=("disable_jit", "vmap", "grad"))
def progress_of_symbolic_steps(one):
    (n,) = jax.export.symbolic_shape("n")
    run = jax.jit(lambda xs: scan(step, 0.0, xs, progress=Progress(meter=Text())))
    return jax.export.export(run)(jax.ShapeDtypeStruct((n,), jnp.float32))


@case(ArgumentError)
def progress_backward_of_a_pattern(one):
    blocks, layers = [lambda layer, x: (x + layer, x)] * 2, [jnp.ones(3) * one] * 2
    return scan_layers(blocks, one, layers, progress=Progress(meter=Text(), backward=True))


case(ArgumentTypeError)(
    progress_number=lambda one: scan(step, one, XS, progress=100),
    progress_label_of_a_number=lambda one: scan(step, one, XS, progress=Progress(3)),
    progress_show_of_a_text=lambda one: scan(step, one, XS, progress=Progress(show="loss")),
    progress_backward_of_a_text=lambda one: scan(step, one, XS, progress=Progress(backward="yes")),
    progress_meter_by_name=lambda one: scan(step, one, XS, progress=Progress(meter="tqdm")),
    progress_meter_class=lambda one: scan(step, one, XS, progress=Progress(meter=Text)),
    progress_meter_without_hash=lambda one: scan(step, one, XS, progress=Progress(meter=Unhashable())),
)

case(ArgumentError)(
    progress_show_of_a_number=lambda one: scan(
        step, one, XS, progress=Progress(show=lambda carry: carry, meter=Text())
    ),
    progress_show_of_a_name=lambda one: while_scan(
        lambda carry: carry < 3, step, one, XS, progress=Progress(show=lambda carry: {"phase": "warm up"}, meter=Text())
    ),
    progress_updates_zero=lambda one: scan(step, one, XS, progress=Progress(updates=0)),
    progress_backward_of_while_scan=lambda one: while_scan(
        lambda carry: carry < 3, step, one, XS, progress=Progress(meter=Text(), backward=True)
    ),
    progress_of_layers_with_prefetch=lambda one: scan_layers(
        lambda layer, x: (x + layer, x), one, (jnp.ones(3) * one), prefetch=lambda layer: layer, progress="layers"
    ),
)

case(ArgumentError, less=("disable_jit", "jit", "vmap", "grad"))(
    progress_backward_in_forward_mode=lambda one: jax.jvp(
        lambda carry: scan(step, carry, XS, progress=Progress(meter=Text(), backward=True))[0], (1.0,), (1.0,)
    )
)

case(ArgumentError, context=without_tqdm)(
    progress_tqdm_that_is_not_there=lambda one: scan(step, one, XS, progress=Progress(meter=Tqdm()))
)
