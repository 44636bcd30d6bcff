"""Errors and warnings that treescan raises."""

from typing import TYPE_CHECKING

from ._lazy import on_first_use

if TYPE_CHECKING:
    from ._errors import (
        ArgumentError as ArgumentError,
        ArgumentTypeError as ArgumentTypeError,
        BodyError as BodyError,
        CarryError as CarryError,
        CheckpointError as CheckpointError,
        LayerError as LayerError,
        NonFiniteError as NonFiniteError,
        PluginError as PluginError,
        PluginWarning as PluginWarning,
        SignatureError as SignatureError,
        TracedArgumentError as TracedArgumentError,
        TreescanError as TreescanError,
    )
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "_errors": "ArgumentError ArgumentTypeError BodyError CarryError CheckpointError LayerError NonFiniteError "
            "PluginError PluginWarning SignatureError TracedArgumentError TreescanError",
        },
    )
