"""Eight simulated devices for the tests that shard, and JAX's strictest promotion rules for all."""

import os
import zlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
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


_VAST = ("test_flags", "test_leaks", "test_primitives", "test_what_works")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the slow tests of these modules a tenth, always the same, runs in CI; `make test-exhaustive` runs all."""
    for item in items:
        vast = item.path.stem in _VAST and item.get_closest_marker("slow") is not None
        if vast and zlib.crc32(item.nodeid.encode()) % 10:
            item.add_marker("exhaustive")
