"""flax.linen: its `scan` and its `RNN`, with the checks and the options of treescan."""

from ._rnn import RNN as RNN
from ._scan import scan as scan
