"""flax.linen: its `scan` and its `RNN`, with the checks and the options of treescan."""

from ... import _flax

_flax.check_installed(__name__)

from ._rnn import RNN as RNN  # noqa: E402
from ._scan import scan as scan  # noqa: E402
