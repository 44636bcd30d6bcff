"""`run_scan` runs `scan`, `fold` and `accumulate`, with or without `lengths`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._body.conventions import Convention
from .._checks.rows import check_rows
from .._transforms.finite.backward import refuse_truncate
from .._transforms.outputs import KeepOutputs, MoveOutputs, check_save
from .._transforms.remat import Recompute
from .._transforms.rows.batch_axes import RowFlags
from .._transforms.rows.keep_rows import KeepRows
from .._transforms.rows.mask import Mask
from .._transforms.rows.over_rows import OverRows
from .._transforms.rows.skip import Skip
from .._transforms.truncate import Truncate
from .._tree import Prefix
from .._types import ArrayLike, Axes, FiniteCheck, ProgressLike, PyTree, RematLike, Save
from .prepare import AROUND_ROWS, prepare

_LEADING = _ZERO = Prefix.of(0)


def run_scan(
    convention: Convention,
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree,
    length: int | None,
    *,
    lengths: ArrayLike | None = None,
    out_axes: Axes = 0,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    progress: ProgressLike = None,
    check_finite: FiniteCheck = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Runs a scan.

    Args:
        convention: how the verb calls the body, and what the body returns.
        f: the body.
        init: the carry that the first step is given.
        xs: what is scanned over.
        length: the number of steps.
        lengths: as for `treescan.mask_scan`.
        out_axes: as for `treescan.scan`.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`.
        truncate: as for `treescan.scan`.
        progress: as for `treescan.scan`.
        check_finite: as for `treescan.scan`.
        **options: those of `prepare`.
    """
    refuse_truncate(truncate, check_finite)
    call = prepare(convention, f, init, xs, length, masked=lengths is not None, **options)
    if lengths is not None:
        call = call.with_rows(check_rows(RowFlags(lengths), 0, call.call.length))
        return call.run(
            OverRows(_LEADING, _LEADING, None if convention.stacks else _LEADING, 0, call.axes, compact=False),
            call.checking(check_finite, around=AROUND_ROWS),
            MoveOutputs.of(out_axes, save),
            Mask(_ZERO, "0"),
            Truncate.of(truncate),
            KeepRows(check_save(save), _ZERO),
            Recompute.of(remat),
            Skip(None, compact=False),
            call.showing(progress),
        )
    return call.run(
        call.over_axes,
        call.checking(check_finite),
        MoveOutputs.of(out_axes, save),
        Recompute.of(remat),
        Truncate.of(truncate),
        KeepOutputs.of(save),
        call.showing(progress),
    )
