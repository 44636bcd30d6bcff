"""Typed, checked scans for JAX. Everything lowers to `jax.lax.scan`."""

from typing import TYPE_CHECKING

from ._lazy import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import (
        carries as carries,
        errors as errors,
        lifting as lifting,
        meters as meters,
        options as options,
        state_dict as state_dict,
        testing as testing,
        types as types,
    )
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
    from ._errors import TreescanError as TreescanError
    from ._extras.associative.verb import associative_scan as associative_scan
    from ._extras.chunk_map.verb import chunk_map as chunk_map
    from ._extras.describe.verb import describe as describe, measure_remat as measure_remat, plan_remat as plan_remat
    from ._extras.linear.verb import linear_scan as linear_scan
    from ._extras.pipeline.order import from_stages as from_stages, to_stages as to_stages
    from ._extras.pipeline.verb import pipeline as pipeline
    from ._extras.stream.verb import stream as stream
    from ._options.finite.case import last_nonfinite as last_nonfinite
    from ._stacks.stack import (
        init_layers as init_layers,
        layer_at as layer_at,
        set_layer as set_layer,
        stack as stack,
        unstack as unstack,
    )
    from ._trace.rewriting import rewriting as rewriting
    from ._types import Checkpoint as Checkpoint, Remat as Remat
    from ._verbs.fori import fori as fori
    from ._verbs.layers import fold_layers as fold_layers, scan_layers as scan_layers
    from ._verbs.mask_scan import mask_scan as mask_scan
    from ._verbs.progress import progress as progress
    from ._verbs.scan import accumulate as accumulate, fold as fold, scan as scan
    from ._verbs.while_scan import while_scan as while_scan
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            ".": "carries errors lifting meters options state_dict testing types",
            "_batches.batch": "Packed Padded",
            "_batches.batches": "last length_mask pack pad repad unpack unpad",
            "_stacks.stack": "init_layers layer_at set_layer stack unstack",
            "_extras.associative.verb": "associative_scan",
            "_extras.linear.verb": "linear_scan",
            "_extras.pipeline.order": "from_stages to_stages",
            "_extras.pipeline.verb": "pipeline",
            "_errors": "TreescanError",
            "_trace.rewriting": "rewriting",
            "_options.finite.case": "last_nonfinite",
            "_types": "Checkpoint Remat",
            "_extras.chunk_map.verb": "chunk_map",
            "_extras.describe.verb": "describe measure_remat plan_remat",
            "_verbs.fori": "fori",
            "_verbs.layers": "fold_layers scan_layers",
            "_verbs.mask_scan": "mask_scan",
            "_verbs.progress": "progress",
            "_verbs.scan": "accumulate fold scan",
            "_extras.stream.verb": "stream",
            "_verbs.while_scan": "while_scan",
        },
        {  # where other names are
            "`from treescan.integrations.flax import *`": "RNN",
            "`from treescan.integrations.nnx import *`": "ModuleCarry",
            "`import treescan.integrations.flax`, and `import treescan.integrations.nnx`": "integrations",
        },
    )
