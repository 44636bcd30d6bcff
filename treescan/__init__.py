"""Typed, checked scans for JAX. Everything lowers to `jax.lax.scan`."""

from ._data.batches import (
    Packed as Packed,
    PackIndex as PackIndex,
    Padded as Padded,
    first as first,
    last as last,
    length_mask as length_mask,
    pack as pack,
    pad as pad,
    repad as repad,
    unpack as unpack,
    unpad as unpad,
)
from ._data.init_layers import init_layers as init_layers
from ._data.stack import layer_at as layer_at, set_layer as set_layer, stack as stack, unstack as unstack
from ._data.state_dict import (
    layers_from_state_dict as layers_from_state_dict,
    layers_to_state_dict as layers_to_state_dict,
)
from ._describe.description import Description as Description
from ._errors import (
    ArgumentError as ArgumentError,
    ArgumentTypeError as ArgumentTypeError,
    BodyError as BodyError,
    CarryError as CarryError,
    LayerError as LayerError,
    NonFiniteError as NonFiniteError,
    PluginError as PluginError,
    PluginWarning as PluginWarning,
    RetraceWarning as RetraceWarning,
    SignatureError as SignatureError,
    TracedArgumentError as TracedArgumentError,
    TreescanError as TreescanError,
)
from ._finite import NonFinite as NonFinite, last_nonfinite as last_nonfinite
from ._loop.rewrite import rewriting as rewriting
from ._progress import (
    AbstractProgressMeter as AbstractProgressMeter,
    Progress as Progress,
    Text as Text,
    Tqdm as Tqdm,
)
from ._remat import Remat as Remat
from ._transforms.budget import RematPlan as RematPlan
from ._verbs.describe import describe as describe, plan_remat as plan_remat
from ._verbs.groups import DenyList as DenyList, In as In, Out as Out
from ._verbs.layers import fold_layers as fold_layers, scan_layers as scan_layers
from ._verbs.lift import lift as lift
from ._verbs.scan import accumulate as accumulate, fold as fold, fori as fori, mask_scan as mask_scan, scan as scan
from ._verbs.while_scan import WhileResult as WhileResult, while_scan as while_scan

__version__ = "0.1.0"
