"""Typed, checked scans for JAX. Everything lowers to `jax.lax.scan`."""

from typing import TYPE_CHECKING

from ._lazy import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import carries as carries
    from ._batches.batch import Packed as Packed, Padded as Padded
    from ._batches.batches import (
        last as last,
        length_mask as length_mask,
        pack as pack,
        pad as pad,
        repad as repad,
        unpack as unpack,
        unpad as unpad,
    )
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
    from ._extras.chunk_map.verb import chunk_map as chunk_map
    from ._extras.describe.description import Description as Description
    from ._extras.describe.measured import Measurements as Measurements
    from ._extras.describe.verb import describe as describe, measure_remat as measure_remat, plan_remat as plan_remat
    from ._extras.lift.groups import In as In, Out as Out
    from ._extras.lift.lift import lift as lift
    from ._extras.linear.verb import linear_scan as linear_scan
    from ._extras.state_dict import (
        layers_from_state_dict as layers_from_state_dict,
        layers_to_state_dict as layers_to_state_dict,
    )
    from ._extras.stream.run import Part as Part
    from ._extras.stream.verb import stream as stream, stream_parts as stream_parts
    from ._options.finite.case import NonFinite as NonFinite, last_nonfinite as last_nonfinite
    from ._options.finite.check import FiniteReport as FiniteReport
    from ._options.progress.meters import (
        AbstractProgressMeter as AbstractProgressMeter,
        Progress as Progress,
        Text as Text,
        Tqdm as Tqdm,
    )
    from ._remat.budget import RematPlan as RematPlan
    from ._stacks.stack import (
        init_layers as init_layers,
        layer_at as layer_at,
        set_layer as set_layer,
        stack as stack,
        unstack as unstack,
    )
    from ._trace.hoist import rewriting as rewriting
    from ._types import Checkpoint as Checkpoint, Remat as Remat
    from ._verbs.fori import fori as fori
    from ._verbs.layers import fold_layers as fold_layers, scan_layers as scan_layers
    from ._verbs.mask_scan import mask_scan as mask_scan
    from ._verbs.progress import progress as progress
    from ._verbs.scan import accumulate as accumulate, fold as fold, scan as scan
    from ._verbs.while_scan import WhileResult as WhileResult, while_scan as while_scan
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            ".": "carries",
            "_batches.batch": "Packed Padded",
            "_batches.batches": "last length_mask pack pad repad unpack unpad",
            "_stacks.stack": "init_layers layer_at set_layer stack unstack",
            "_extras.linear.verb": "linear_scan",
            "_extras.state_dict": "layers_from_state_dict layers_to_state_dict",
            "_extras.describe.description": "Description",
            "_extras.describe.measured": "Measurements",
            "_errors": "ArgumentError ArgumentTypeError BodyError CarryError CheckpointError LayerError NonFiniteError "
            "PluginError PluginWarning SignatureError TracedArgumentError TreescanError",
            "_options.progress.meters": "AbstractProgressMeter Progress Text Tqdm",
            "_extras.stream.run": "Part",
            "_trace.hoist": "rewriting",
            "_remat.budget": "RematPlan",
            "_options.finite.case": "NonFinite last_nonfinite",
            "_options.finite.check": "FiniteReport",
            "_types": "Checkpoint Remat",
            "_extras.chunk_map.verb": "chunk_map",
            "_extras.describe.verb": "describe measure_remat plan_remat",
            "_verbs.fori": "fori",
            "_extras.lift.groups": "In Out",
            "_verbs.layers": "fold_layers scan_layers",
            "_extras.lift.lift": "lift",
            "_verbs.mask_scan": "mask_scan",
            "_verbs.progress": "progress",
            "_verbs.scan": "accumulate fold scan",
            "_extras.stream.verb": "stream stream_parts",
            "_verbs.while_scan": "WhileResult while_scan",
        },
    )
