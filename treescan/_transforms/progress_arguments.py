"""Checks of what the user gave as `progress`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from .._avals import describe_argument, dtype_of, exact_int, shape_of
from .._errors import ArgumentError, ArgumentTypeError, Fault
from .._loop.body import Body
from .._progress import AbstractProgressMeter, Progress, Text, Tqdm, has_tqdm


def check_shown(shown: Any) -> list[str]:
    """The names of the values that are printed beside a bar."""
    if not isinstance(shown, Mapping) or not all(isinstance(name, str) for name in shown):
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `show` of a `Progress` returns a dict from names to scalars, got "
            f"{describe_argument(shown)}.",
            'For example `show=lambda carry: {"loss": carry.loss}`.',
        )
    for name, value in shown.items():
        if shape_of(value) != () or not _is_number(dtype_of(value)):
            raise Fault(
                ArgumentError,
                f"{{verb}} over {{body}}: `show` of a `Progress` returns a dict of scalars, but `{name}` is "
                f"{describe_argument(value)}.",
                f'Reduce it to one number: `{{"{name}": jnp.mean(...)}}`.',
            )
    return list(shown)


def _is_number(dtype: Any) -> bool:
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def check_progress(progress: Any, body: Body, verb: str) -> Progress | None:
    """A `Progress` with a label and a meter; None: nothing is shown."""
    if progress is None or progress is False:
        return None
    if progress is True or isinstance(progress, str):
        progress = Progress(None if progress is True else progress)
    if not isinstance(progress, Progress):
        raise Fault(
            ArgumentTypeError,
            "{verb} over {body}: `progress` must be True, a label, a `treescan.Progress` or None, got "
            f"{describe_argument(progress)}.",
            '`progress="train"` shows a bar with that label. `treescan.Progress("train", updates=20)` sets how often '
            "it moves, and what is printed next to it.",
        )
    _check_label_and_show(progress)
    updates = exact_int(progress.updates)
    if progress.updates is not None and (updates is None or updates < 1):
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `updates` of a `Progress` must be an int of at least 1, got "
            f"{describe_argument(progress.updates)}.",
            "The loop is cut into at most this many chunks. Without it, the bar moves five times a second at most. "
            "`progress=None` shows nothing.",
        )
    _check_flags(progress)
    label = _default_label(body, verb) if progress.label is None else progress.label
    return dataclasses.replace(progress, label=label, updates=updates, meter=_check_meter(progress.meter))


def _check_flags(progress: Progress) -> None:
    for name in ("backward", "batched"):
        value = getattr(progress, name)
        if not isinstance(value, bool):
            raise Fault(
                ArgumentTypeError,
                f"{{verb}} over {{body}}: `{name}` of a `Progress` is True or False, got {describe_argument(value)}.",
                "`backward=True` asks for a bar of the gradient too, `batched=True` for one of each element of a vmap.",
            )


def refuse_backward(progress: Progress | None) -> Progress | None:
    """Refuses a bar for the backward pass of a loop whose number of steps is not known; else `progress` itself."""
    if progress is not None and progress.backward:
        raise Fault(
            ArgumentError,
            "{verb} over {body}: `backward=True` of a `Progress` asks for a bar of the gradient, but a loop that ends "
            "early differentiates by a rule of its own, which reports nothing.",
            "Leave it out: the steps that are taken are shown all the same.",
        )
    return progress


def _check_label_and_show(progress: Progress) -> None:
    if progress.label is not None and not isinstance(progress.label, str):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `label` of a `Progress` must be a string, got "
            f"{describe_argument(progress.label)}.",
            "Without a label, the bar has the name of the body.",
        )
    if progress.show is not None and not callable(progress.show):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `show` of a `Progress` must be a function of the carry, got "
            f"{describe_argument(progress.show)}.",
            'For example `show=lambda carry: {"loss": carry.loss}`.',
        )


def _check_meter(meter: Any) -> AbstractProgressMeter:
    if meter is None:
        return Tqdm() if has_tqdm() else Text()
    if not isinstance(meter, AbstractProgressMeter):
        called = isinstance(meter, type) and issubclass(meter, AbstractProgressMeter)
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: `meter` of a `Progress` must be a `treescan.AbstractProgressMeter`, got "
            f"{describe_argument(meter)}.",
            f"Pass an instance: `meter={meter.__name__}()`."
            if called
            else "`treescan.Tqdm()` and `treescan.Text()` are there. A class of your own has the methods `init`, "
            "`step` and `close`.",
        )
    try:
        hash(meter)
    except TypeError:
        raise Fault(
            ArgumentTypeError,
            f"{{verb}} over {{body}}: the meter `{type(meter).__name__}` has no hash, but it is part of the program.",
            "Make its class a dataclass with `frozen=True`, and keep what belongs to a run in what `init` returns.",
        ) from None
    if isinstance(meter, Tqdm) and not has_tqdm():
        raise Fault(
            ArgumentError,
            "{verb} over {body}: the meter is `Tqdm()`, but tqdm is not installed.",
            "`pip install tqdm` installs it. `treescan.Text()` needs nothing.",
        )
    return meter


def _default_label(body: Body, verb: str) -> str:
    name = getattr(body.function, "__name__", "<")
    return verb if name.startswith("<") else name
