"""flax.linen: recurrent networks over rows of unequal length."""

from __future__ import annotations

from ._rnn import RNN as RNN
