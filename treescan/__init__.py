"""Typed, checked scans for JAX. Everything lowers to `jax.lax.scan`."""

from typing import TYPE_CHECKING

from ._lazy import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import carries as carries
    from ._data.batch import Packed as Packed, Padded as Padded
    from ._data.batches import (
        last as last,
        length_mask as length_mask,
        pack as pack,
        pad as pad,
        repad as repad,
        unpack as unpack,
        unpad as unpad,
    )
    from ._data.stack import (
        init_layers as init_layers,
        layer_at as layer_at,
        set_layer as set_layer,
        stack as stack,
        unstack as unstack,
    )
    from ._data.state_dict import (
        layers_from_state_dict as layers_from_state_dict,
        layers_to_state_dict as layers_to_state_dict,
    )
    from ._describe.description import Description as Description
    from ._describe.measured import Measurements as Measurements
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
    from ._extras.linear.verb import linear_scan as linear_scan
    from ._progress import (
        AbstractProgressMeter as AbstractProgressMeter,
        Progress as Progress,
        Text as Text,
        Tqdm as Tqdm,
    )
    from ._stream.run import Part as Part
    from ._trace.hoist import rewriting as rewriting
    from ._transforms.budget import RematPlan as RematPlan
    from ._transforms.finite.case import NonFinite as NonFinite, last_nonfinite as last_nonfinite
    from ._transforms.finite.check import FiniteReport as FiniteReport
    from ._types import Checkpoint as Checkpoint, Remat as Remat
    from ._verbs.chunk_map import chunk_map as chunk_map
    from ._verbs.describe import describe as describe, measure_remat as measure_remat, plan_remat as plan_remat
    from ._verbs.fori import fori as fori
    from ._verbs.groups import In as In, Out as Out
    from ._verbs.layers import fold_layers as fold_layers, scan_layers as scan_layers
    from ._verbs.lift import lift as lift
    from ._verbs.mask_scan import mask_scan as mask_scan
    from ._verbs.prepare import progress as progress
    from ._verbs.scan import accumulate as accumulate, fold as fold, scan as scan
    from ._verbs.stream import stream as stream, stream_parts as stream_parts
    from ._verbs.while_scan import WhileResult as WhileResult, while_scan as while_scan
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            ".": "carries",
            "_data.batch": "Packed Padded",
            "_data.batches": "last length_mask pack pad repad unpack unpad",
            "_data.stack": "init_layers layer_at set_layer stack unstack",
            "_data.state_dict": "layers_from_state_dict layers_to_state_dict",
            "_describe.description": "Description",
            "_describe.measured": "Measurements",
            "_errors": "ArgumentError ArgumentTypeError BodyError CarryError CheckpointError LayerError NonFiniteError "
            "PluginError PluginWarning SignatureError TracedArgumentError TreescanError",
            "_extras.linear.verb": "linear_scan",
            "_progress": "AbstractProgressMeter Progress Text Tqdm",
            "_stream.run": "Part",
            "_trace.hoist": "rewriting",
            "_transforms.budget": "RematPlan",
            "_transforms.finite.case": "NonFinite last_nonfinite",
            "_transforms.finite.check": "FiniteReport",
            "_types": "Checkpoint Remat",
            "_verbs.chunk_map": "chunk_map",
            "_verbs.describe": "describe measure_remat plan_remat",
            "_verbs.fori": "fori",
            "_verbs.groups": "In Out",
            "_verbs.layers": "fold_layers scan_layers",
            "_verbs.lift": "lift",
            "_verbs.mask_scan": "mask_scan",
            "_verbs.prepare": "progress",
            "_verbs.scan": "accumulate fold scan",
            "_verbs.stream": "stream stream_parts",
            "_verbs.while_scan": "WhileResult while_scan",
        },
    )
