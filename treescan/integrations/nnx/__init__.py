"""flax.nnx: its modules as carries, and its `scan` over modules by treescan's."""

from ._named import ModuleCarry as ModuleCarry
from ._scan import scan as scan
