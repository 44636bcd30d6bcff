"""`run_scan`: the transforms of `scan`, `fold` and `accumulate`, in their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._prepare import prepare
from ._transforms.conventions import Convention
from ._transforms.outputs import KeepOutputs, MoveOutputs
from ._transforms.remat import Recompute
from ._transforms.truncate import Truncate
from ._types import Axes, PyTree, RematLike, Save


def run_scan(
    convention: Convention,
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree,
    length: int | None,
    *,
    out_axes: Axes = 0,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Runs a scan.

    Args:
        convention: how the verb calls the body, and what the body returns.
        f: the body.
        init: the carry that the first step is given.
        xs: what is scanned over.
        length: the number of steps.
        out_axes: as for `treescan.scan`.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`.
        truncate: as for `treescan.scan`.
        **options: those of `prepare`.
    """
    call = prepare(convention, f, init, xs, length, **options)
    return call.run(
        call.over_axes,
        MoveOutputs.of(out_axes, save),
        Truncate.of(truncate),
        Recompute.of(remat),
        KeepOutputs.of(save),
    )
