"""Eight simulated devices for the tests that shard, and JAX's strictest promotion rules for all."""

import os
import pathlib
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


_SHARES = {  # of the slow tests of these modules one in so many runs in CI
    "test_conformance": 10,
    "test_errors": 4,
    "test_flags": 10,
    "test_leaks": 10,
    "test_primitives": 10,
    "test_save": 3,
    "test_what_works": 10,
}
# Those that take more than a second, measured on two cores; of each function the fastest is for every day.
_SLOW = frozenset((pathlib.Path(__file__).parent / "slow.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks what was measured to be slow, and what CI leaves out, always the same; `make test-exhaustive` runs all."""
    for item in items:
        share = _SHARES.get(item.path.stem, 1)
        if item.nodeid in _SLOW:
            item.add_marker("slow")
        elif item.get_closest_marker("slow") is not None and zlib.crc32(item.nodeid.encode()) % share:
            item.add_marker("exhaustive")
