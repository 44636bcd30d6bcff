"""Eight simulated devices for the tests that shard, and JAX's strictest promotion rules for all."""

import os

# The tests compile far more than they run: code that is not optimized takes a fifth less time in all.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest
from hypothesis import HealthCheck, settings

collect_ignore = ["site"]  # needs a browser: `make test-site` runs it, without this file

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# A merge is not held up by an example that nobody has seen before: there, the examples are always the same.
settings.register_profile(
    "everyday",
    derandomize=os.environ.get("CI") == "true",
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", parent=settings.get_profile("everyday"), max_examples=300)
settings.load_profile("everyday")


@pytest.fixture(autouse=True, scope="module")
def _small_caches():
    """Drops what a module compiled: the suite would otherwise hold every program it ever ran."""
    yield
    jax.clear_caches()
