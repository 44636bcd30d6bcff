"""flax.linen: its `scan` with the checks and the options of treescan."""

from ._scan import scan as scan
