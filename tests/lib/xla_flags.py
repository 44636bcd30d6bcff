"""How XLA compiles the tests: for eight devices, and without what costs time alone.

What XLA spends on the code of tiny arrays is half of the time of the suite. TREESCAN_QUICK_COMPILES=1 leaves it out.
All that XLA does to a program, its fusions and its plan of memory for example, remains.
"""

import os
import subprocess
import sys

_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_QUICKER = f"{_QUICK} --xla_cpu_use_fusion_emitters=false"  # not every release has this one


def chosen() -> str:
    """The flags, beside those of the environment."""
    given = os.environ.get("XLA_FLAGS", "")
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker has them from the process that started it
        return given
    quick = os.environ.get("TREESCAN_QUICK_COMPILES") == "1"
    fastest = next(filter(_known, (_QUICKER, _QUICK)), "") if quick else ""
    return f"{given} --xla_force_host_platform_device_count=8 {fastest}".strip()


def _known(flags: str) -> bool:
    """Whether this release of XLA knows the flags: it ends the process for one that it does not know."""
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
