"""Further columns of the table, which its page does not show: what surrounds a program, and what is left of it.

Each is a pair of functions, as JAX's transforms are: one for treescan, and one for plain steps.
"""

import contextlib
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import treescan

from .example import Given
from .transforms import OF_JAX, Run, both, gradient, tangent

FLAGS = {  # that look for mistakes or that JAX is about to turn on, and the verb that is tried with it every day
    "jax_remat3": "while_scan",
    "jax_custom_vjp3": "mask_scan",
    "jax_enable_checks": "scan_layers",
    "jax_check_tracer_leaks": "mask_scan",
    "jax_debug_nans": "mask_scan",
    "jax_enable_x64": "lift",
}


@contextlib.contextmanager
def flag_set(name: str) -> Iterator[None]:
    """Within it a flag of JAX is on."""
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def within(
    surrounding: Callable[[], Any], transform: str, of_plain: Callable[[], Any] | None = None
) -> tuple[Any, Any]:
    """One of JAX's transforms within something; plain steps within something else, if that is given."""

    def surrounded(function: Callable[[Run, Given], Any], by: Callable[[], Any]) -> Callable[[Run, Given], Any]:
        def run_within(run: Run, given: Given) -> Any:
            with by():
                return function(run, given)

        return run_within

    ours, plainly = OF_JAX[transform]
    return surrounded(ours, surrounding), surrounded(plainly, of_plain or surrounding)


# What is left.

CONTEXTS: Mapping[str, Callable[[Run, Given], Any]] = {
    **{name: OF_JAX[name][0] for name in ("eager", "jit")},
    "grad": gradient,
    "vmap": lambda run, given: jax.vmap(run)(both(given)),
    "jvp": tangent,
}


def bodies() -> int:
    """How many bodies of examples are alive: functions of the tests, by their names."""
    gc.collect()
    functions = (it for it in gc.get_objects() if type(it) is types.FunctionType)
    return sum(it.__name__ in ("step", "block") and "tests" in it.__code__.co_filename for it in functions)


def left_over(run: Run, given: Given) -> None:
    """Raises if after a transform a body is alive, or an array that a body closes over.

    What is refused is not looked at: other columns tell it, and a trace that failed may keep its body for a while.
    """
    for name, transform in CONTEXTS.items():
        before, held = bodies(), []
        try:
            for _ in range(2):
                own = jax.tree.map(jnp.copy, given)
                held += map(weakref.ref, own.values())
                jax.block_until_ready(transform(lambda numbers, own=own: run({**own, "h": numbers["h"]}), given))
                del own
        except treescan.TreescanError:
            continue
        if bodies() > before or any(reference() is not None for reference in held):
            raise AssertionError(f"after {name}, a body is alive")


def nothing(run: Run, given: Given) -> None:
    """What is left of plain steps."""


STEPWISE = {f"disable_jit, {transform}": within(jax.disable_jit, transform) for transform in ("grad", "vmap")}
FLAGGED = {
    f"{flag}, {transform}": within(
        functools.partial(flag_set, flag),
        transform,
        functools.partial(jax.debug_nans, False) if flag == "jax_debug_nans" else None,  # they read the padding
    )
    for flag, transform in itertools.product(FLAGS, ("eager", "grad", "jvp", "vmap of grad"))
}
COLUMNS = {**STEPWISE, **FLAGGED, "left over": (left_over, nothing)}
