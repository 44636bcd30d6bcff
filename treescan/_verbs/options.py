"""The options that verbs list: of each its transform, or None if the call does not ask for it.

This is the one file of the core that names options. Each is loaded by the first call that asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._avals import PyTree
from .._body.call import takes_keyword
from .._loop.feed import Keyword
from .._loop.loop import Body
from .._outputs.outputs import is_positions
from .._rows.axes import RowFlags
from .._transforms.transform import Transform
from .._tree import Prefix
from .._types import ProgressLike, RematLike, Returned, Save
from ..carries._registry import Adopted
from .progress import shown_around

if TYPE_CHECKING:
    from ..options import Option
    from .prepare import Prepared


def showing(progress: ProgressLike, prepared: Prepared) -> Transform | None:
    """`progress`. None: what the context says."""
    call = prepared.call
    progress = shown_around(call) if progress is None else progress
    if progress is None or progress is False:
        return None
    from .._options.progress.show import ShowProgress

    return ShowProgress.of(progress, call.body, call.convention.verb, custom=bool(call.custom))


def checking(
    value: bool | Returned, prepared: Prepared, *, ends_early: bool = False, layers: bool = False
) -> Transform | None:
    """`check_finite`.

    Args:
        value: what it says.
        prepared: the call.
        ends_early: whether the loop may skip steps.
        layers: whether it is a loop over layers.
    """
    if value is False:
        return None
    from .._options.finite.check import CheckFinite

    axes = (prepared.axes, *prepared.other_axes)
    return CheckFinite.of(value, prepared.call, prepared.given, axes, ends_early=ends_early, layers=layers)


def recomputing(remat: RematLike | None) -> Transform | None:
    """`remat`, which is not of the core where nothing is recomputed."""
    if remat is None:
        return None
    from .._remat.remat import Recompute

    return Recompute.of(remat)


def _has_positions(save: Save) -> bool:
    return any(map(is_positions, Prefix.of(save).leaves))


_PLAIN = (str, int, type(None))
"""What most calls say of outputs: it holds no positions."""


def recording(save: Save) -> Transform | None:
    """Positions in `save`."""
    if isinstance(save, _PLAIN) or not _has_positions(save):
        return None
    from .._options.positions import RecordOutputs

    return RecordOutputs.of(save)


def strided(save: Save, prepared: Prepared) -> Save:
    """What `save` says, with a number in place of positions that are those of every k-th output."""
    if prepared.given.offset is not None or isinstance(save, _PLAIN) or not _has_positions(save):
        return save
    from .._options.positions import with_strides

    return with_strides(save, prepared.call.length)


def keyword_of(body: Body, positional: int) -> Keyword | None:
    """`first`, a keyword of the body, which takes so many positional arguments."""
    if not takes_keyword(body, "first", positional):
        return None
    from .._options.first import FIRST

    return FIRST


def truncating(truncate: int | None) -> Transform | None:
    """`truncate`."""
    if truncate is None:
        return None
    from .._options.truncate import Truncate

    return Truncate.of(truncate)


def dividing(flags: RowFlags) -> list[Transform]:
    """What divides rows into segments: `resets`, `reset_to` and packed sequences."""
    if flags.resets is None:
        return []
    from .._options.resets import BeginSegments, EndsOfSequences, ResetRows

    segments: list[Transform] = [ResetRows()]
    if flags.to is not None or flags.inits is not None:
        segments.append(BeginSegments())
    if flags.spans is not None:
        segments.append(EndsOfSequences())
    return segments


def restored_by(
    flags: RowFlags,
    reset_to: PyTree,
    init: PyTree,
    axes: Prefix,
    time_axis: int,
    adopted: Adopted,
    arrays: PyTree,
    root: str,
) -> RowFlags:
    """The flags with what a reset restores, by `reset_to` or by the inits of a `Packed`; see `check_targets`."""
    from .._options.reset_to import check_targets

    return check_targets(flags, reset_to, init, axes, time_axis, adopted, arrays, root)


def of_strangers(options: Sequence[Option] | None) -> list[Transform]:
    """`options`, of which each is somebody else's."""
    if options is None or (isinstance(options, list | tuple) and not options):
        return []
    from .._options.foreign import around_steps

    return around_steps(options)
