"""flax.nnx: its modules as carries, and its `scan` over modules by treescan's."""

from ... import _flax

_flax.check_installed(__name__)

from ._scan import scan as scan  # noqa: E402
from ._variables import ModuleCarry as ModuleCarry  # noqa: E402
