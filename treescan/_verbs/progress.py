"""`progress()`: a context within which all loops show a bar."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from .._errors import Misuse, verb
from .._transforms.call import Call
from .._types import ProgressLike

if TYPE_CHECKING:
    from .._options.progress.meters import Progress

_context: Any = None
"""A context of JAX, which is a part of what JAX finds its programs by.

It is made when it is first needed, because JAX then compiles each program once more.
"""


def around() -> Progress | None:
    """What the context shows; None: there is none."""
    return None if _context is None else _context.value


def within(shown: Progress | None) -> contextlib.AbstractContextManager[object]:
    """The context that shows this, which `around` returned, perhaps in another thread."""
    return contextlib.nullcontext() if shown is around() else _context(shown)


def silent() -> contextlib.AbstractContextManager[object]:
    """Within it, loops have no bar unless their calls ask for one: a loop's own steps run within."""
    return within(None)


def shown_around(call: Call) -> Progress | None:
    """What is shown of a call that does not mention `progress`. Steps whose number is symbolic are not shown."""
    shown = None if _context is None else _context.value
    if shown is None or not isinstance(call.length, int):
        return None
    from .._options.progress.show import label_of

    verb = call.convention.verb
    name = label_of(call.body, verb)
    return dataclasses.replace(shown, label=shown.label or (name if name == verb else f"{verb} {name}"))


@verb
def progress(progress: ProgressLike = True, /) -> contextlib.AbstractContextManager[None]:
    """Shows a bar for each loop of treescan within the context, also for those in the code of other libraries.

    A loop that runs in a step of another loop of treescan has no bar, or it would have one in each step. A call's own
    `progress` takes precedence: `progress=False` shows nothing. Loops that cannot have a bar run without.

    A function under `jax.jit` is traced and compiled once more within the context, and keeps its old program outside.
    When a process opens its first context, JAX also drops what it has compiled before. Open that one while no other
    thread runs JAX. A context belongs to the thread that opens it.

    Args:
        progress: True; a label for all bars; or a `treescan.meters.Progress` with label, `updates` and `meter`. Without
            a label, a bar has the names of the verb and of the body. False and None: no bars within, not even if the
            context is within another.

    Returns:
        A context manager.

    Raises:
        ArgumentError: for a `Progress` that cannot be had, or with `show`.
        ArgumentTypeError: if it is of another type.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def library_code(xs):
        ...     return treescan.fold(lambda h, x: h + x, 0.0, xs)
        >>> with treescan.progress():
        ...     total = library_code(jnp.ones(100))
    """
    global _context
    from .._options.progress.show import check_settings

    checked = check_settings(progress)
    if checked is not None and checked.show:
        raise Misuse(
            "{call}: `show` of a `Progress` is for a single loop, and the context may contain others.",
            "Give it to the call of that loop, as its `progress`.",
        )
    _context = _context or jax.make_user_context(None)
    return _context(checked)
