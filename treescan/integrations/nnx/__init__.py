"""flax.nnx: its modules as carries, and its `scan` over modules by treescan's."""

from ._scan import scan as scan
from ._variables import ModuleCarry as ModuleCarry
