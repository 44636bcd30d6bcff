"""Stacks of layers from and to flat dicts of arrays with a name for each layer, as checkpoints have them."""

from typing import TYPE_CHECKING

from ._lazy import on_first_use

if TYPE_CHECKING:
    from ._extras.state_dict import (
        layers_from_state_dict as layers_from_state_dict,
        layers_to_state_dict as layers_to_state_dict,
    )
else:
    __all__, __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "_extras.state_dict": "layers_from_state_dict layers_to_state_dict",
        },
    )
