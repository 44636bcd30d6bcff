"""Cases of `test_errors.py` about what looks at loops: `check_finite`, `progress`, `describe` and `measure_remat`."""

import contextlib
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
from error_cases import case, exported, mesh_of, over_devices

from treescan import describe, fold, fori, mask_scan, measure_remat, plan_remat, progress, scan, while_scan
from treescan.lifting import lift
from treescan.meters import AbstractProgressMeter, Progress, Text, Tqdm

XS = jnp.arange(4.0)


def step(carry, x):
    return carry + x, x


ending = functools.partial(while_scan, lambda carry: carry < 3)


def root(carry, x):
    return jnp.sqrt(carry - x), x


@case()
def check_finite_with_a_ref(one):
    count = jax.new_ref(jnp.zeros(()))

    def counted(carry, x):
        count[...] += 1.0
        return carry + x, x

    return scan(counted, one, XS, check_finite=True)


case(less=("jit", "grad", "vmap"))(check_finite_finds_a_step=lambda one: scan(root, one, XS, check_finite=True))

case()(
    check_finite_forward=lambda one: scan(step, one, XS, check_finite="forward"),
    check_finite_backward=lambda one: scan(step, one, XS, check_finite="backward"),
    check_finite_within_shard_map=lambda one: over_devices(
        lambda xs: scan(step, xs[0], xs, check_finite=True)[1], mesh_of(1)
    )(one * XS),
)


def progressing(one, verb=scan, **details):
    return verb(step, one, XS, progress=Progress(meter=Text(), **details))


class Unhashable(AbstractProgressMeter):
    __hash__ = None

    def init(self, label, total):
        return None

    def step(self, bar, done, shown):
        pass

    def close(self, bar):
        pass


@contextlib.contextmanager
def without_tqdm() -> Iterator[None]:
    found = importlib.util.find_spec
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] != "tqdm"}
    with (
        mock.patch.object(importlib.util, "find_spec", lambda name: None if name == "tqdm" else found(name)),
        mock.patch.dict(sys.modules, hidden, clear=True),
    ):
        yield


@case(less=("jit", "vmap", "grad"))
def check_finite_report_of_a_batch(one):
    run = lambda h: fold(lambda c, x: c / (c - x), h, jnp.ones(2), check_finite="return")[1]  # noqa: E731
    jax.vmap(run)(jnp.array([3.0, 1.0, 5.0]) * one).check()


case(less=("disable_jit",))(
    check_finite_report_that_is_traced=lambda one: jax.jit(
        lambda h: fold(lambda c, x: c + x, h, XS, check_finite="return")[1].check()
    )(one),
)

case()(
    check_finite_report_of_lift=lambda one: lift(step, check_finite="return")({}, {}, one, XS),
    progress_number=lambda one: scan(step, one, XS, progress=100),
    progress_label_of_a_number=lambda one: scan(step, one, XS, progress=Progress(3)),
    progress_show_of_a_text=lambda one: scan(step, one, XS, progress=Progress(show="loss")),
    progress_meter_by_name=lambda one: scan(step, one, XS, progress=Progress(meter="tqdm")),
    progress_meter_class=lambda one: scan(step, one, XS, progress=Progress(meter=Text)),
    progress_meter_without_hash=lambda one: scan(step, one, XS, progress=Progress(meter=Unhashable())),
    progress_show_of_a_number=lambda one: progressing(one, show=lambda carry: carry),
    progress_show_of_an_array=lambda one: scan(
        lambda carry, x: (carry + x, x),
        jnp.ones(3) * one,
        XS,
        progress=Progress(show=lambda carry: {"h": carry, "sum": carry.sum()}, meter=Text()),
    ),
    progress_show_of_a_name=lambda one: progressing(one, ending, show=lambda carry: {"phase": "warm up"}),
    progress_updates_zero=lambda one: scan(step, one, XS, progress=Progress(updates=0)),
    progress_context_with_show=lambda one: progress(Progress(show=lambda carry: {"h": carry})),
    progress_context_of_a_number=lambda one: progress(100),
)

case(context=without_tqdm)(
    progress_tqdm_that_is_not_there=lambda one: scan(step, one, XS, progress=Progress(meter=Tqdm()))
)


def measured():
    return measure_remat(scan, step, 1.0, XS, plans=[None], progress=False)


@case()
def measure_within_where_memory_is_unknown(one):
    plans = tuple(dataclasses.replace(plan, bytes=None) for plan in measured().plans)
    return dataclasses.replace(measured(), plans=plans).within(100)


@case()
def measure_plot_without_matplotlib(one):
    with mock.patch.dict(sys.modules, {"matplotlib.pyplot": None}):
        return measured().plot()


@case()
def describe_of_symbolic_steps(one):
    (steps,) = jax.export.symbolic_shape("t")
    return describe(scan, step, one, jax.ShapeDtypeStruct((steps,), jnp.float32))


@case()
def describe_plot_without_matplotlib(one):
    with mock.patch.dict(sys.modules, {"matplotlib.pyplot": None}):
        return describe(scan, step, one, jnp.ones(20)).plot()


case()(
    describe_of_no_verb=lambda one: describe(plan_remat, step, one, XS),
    describe_plot_without_a_gradient=lambda one: describe(fori, 0, 20, lambda i, total: total + i, 0).plot(),
    describe_of_no_steps=lambda one: describe(scan, step, one, XS[:0]),
    describe_of_a_call_that_is_refused=lambda one: describe(mask_scan, step, one, XS),
    describe_of_a_body_whose_carry_changes=lambda one: describe(
        fold, lambda carry, x: jnp.stack([carry, x]), jnp.float32(1) * one, XS
    ),
    measure_best_of_none=lambda one: measure_remat(scan, step, 0, jnp.arange(4), progress=False).best,
    measure_of_no_verb=lambda one: measure_remat(plan_remat, step, 1.0, XS),
    measure_of_types=lambda one: measure_remat(
        scan, step, 1.0, jax.ShapeDtypeStruct((4,), jnp.float32), progress=False
    ),
    measure_of_traced_constants=lambda one: jax.eval_shape(
        lambda w: measure_remat(scan, lambda c, x: (c * w, x), 1.0, XS, progress=False), 2.0
    ),
    measure_with_details=lambda one: measure_remat(scan, step, 1.0, XS, progress=Progress(updates=3)),
    measure_with_remat=lambda one: measure_remat(scan, step, 1.0, XS, remat="step"),
    measure_within_too_little=lambda one: measured().within(-1),
    measure_plans_of_one=lambda one: measure_remat(scan, step, 1.0, XS, plans="step"),
    measure_for_no_time=lambda one: measure_remat(scan, step, 1.0, XS, seconds=0),
    measure_within_a_text=lambda one: measured().within("1 GB"),
)

case(less=("disable_jit", "vmap", "grad"))(
    progress_of_symbolic_steps=lambda one: exported(
        lambda xs: scan(step, 0.0, xs, progress=Progress(meter=Text())), "n"
    )
)
