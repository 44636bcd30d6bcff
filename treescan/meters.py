"""Meters: what shows how far a loop is, for the option `progress` and for `treescan.progress`."""

from typing import TYPE_CHECKING

from ._lazy import on_first_use

if TYPE_CHECKING:
    from ._options.progress.meters import (
        AbstractProgressMeter as AbstractProgressMeter,
        Progress as Progress,
        Text as Text,
        Tqdm as Tqdm,
    )
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "_options.progress.meters": "AbstractProgressMeter Progress Text Tqdm",
        },
    )
