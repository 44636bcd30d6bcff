"""The program that users run: one device, and XLA as it comes, for each test whose marks do not ask for another.

`devices` asks for eight devices, which are a process of their own: JAX_NUM_CPU_DEVICES=8. `quick` asks for a
compilation without most of XLA's optimizations, in any process. JAX's promotion rules are the strictest for all tests.
"""

import gc
import os
import pathlib
import time
import zlib

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest
from hypothesis import HealthCheck, settings

import treescan
import treescan._text

collect_ignore = ["site"]  # needs a browser: `make test-site` runs it, without this file

DEVICES = 8
MANY = os.environ.get("JAX_NUM_CPU_DEVICES") == str(DEVICES)
QUICK = "jax_disable_most_optimizations"

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
    """Drops what a module compiled: the suite would otherwise hold every program it ever ran.

    The garbage collector does not look at what other modules left: JAX's check for leaks, and ours, ask it for all
    objects, and take minutes where there are millions.
    """
    gc.freeze()
    yield
    gc.unfreeze()
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _unbroken_messages(request):
    """Messages do not break into lines, so that tests can look for words in them.

    Where they break is tested with the whole texts, in `test_errors.py`, and in the documentation.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem != "test_errors" and request.path.parent.name != "docs":
            patch.setattr(treescan._text, "WIDTH", 10_000)
        yield


_SHARES = {  # of the slow tests of these modules one in so many runs in CI, where that is more than `_SHARE`
    "test_bodies": 4,
    "test_decisions": 5,
    "test_flags": 10,
    "test_flax_scan": 4,
    "test_handed_on": 6,
    "test_leaks": 10,
    "test_meshes": 12,
    "test_nnx_scan": 4,
    "test_primitives": 10,
    "test_products": 5,
    "test_save": 4,
    "test_what_works": 20,
}
# Tests that were measured to take more than 0.6 s, on two cores, where a faster case of the same function is left for
# every day; and some that take seconds whatever the case.
_SLOW = frozenset((pathlib.Path(__file__).parent / "slow.txt").read_text().splitlines())
_SHARE = 3  # one in so many of the others runs in CI, and the first case of each function that has none for every day
_SHARE_OF_SLOW = 6  # one in so many of those that were measured
_RELEASE_SHARE = int(os.environ.get("TREESCAN_RELEASE_SHARE", "1"))
# On a machine that is slower than ours, CI skips the slow tests that would begin later than this, and says so.
_MINUTES = float(os.environ.get("TREESCAN_SLOW_MINUTES", "inf"))
_BEGAN = time.monotonic()


def pytest_ignore_collect(collection_path, config):
    """Where there are many devices, only files with tests of them are imported, and those that are named."""
    if MANY and collection_path.suffix == ".py" and not any(collection_path.name in each for each in config.args):
        return "mark.devices" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks what was measured to be slow, and what CI leaves out, always the same; `make test-exhaustive` runs all.

    Of pages nothing is left out.

    On a release of JAX beside the main one (TREESCAN_RELEASE_SHARE=n) each test function runs, in its first case and
    one in n of the others: all cases run on the main release.
    """
    if MANY:
        _keep(config, items, [item for item in items if item.get_closest_marker("devices")])
    for item in items:
        if item.nodeid in _SLOW:
            item.add_marker("slow")
    daily = {_function(item) for item in items if not _is_slow(item)}
    for item in filter(_is_slow, items):
        share = max(_SHARES.get(item.path.stem, 1), _SHARE_OF_SLOW if item.nodeid in _SLOW else _SHARE)
        if _function(item) in daily and not _has_turn(item, share) and item.path.parent.name != "docs":
            item.add_marker("exhaustive")
        daily.add(_function(item))
    if _RELEASE_SHARE > 1:
        firsts = {_function(item): item for item in reversed(items) if not _is_slow(item)}
        _keep(config, items, [i for i in items if i is firsts.get(_function(i)) or _has_turn(i, _RELEASE_SHARE)])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Runs before the fixtures, which compile too."""
    if time.monotonic() - _BEGAN > 60 * _MINUTES:
        pytest.skip(f"the {_MINUTES:.0f} minutes of CI for these tests are over; `make test-slow` runs all")
    devices = DEVICES if item.get_closest_marker("devices") else 1
    if jax.device_count() != devices:
        pytest.skip(f"runs with JAX_NUM_CPU_DEVICES={devices}; `make test` runs both")
    quick = item.get_closest_marker("quick") is not None or os.environ.get(QUICK.upper()) == "1"
    if quick != jax.config.values[QUICK]:
        jax.config.update(QUICK, quick)
        jax.clear_caches()  # which do not ask how their programs were compiled


def _keep(config, items, kept):
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _function(item):
    return item.nodeid.partition("[")[0]


def _is_slow(item):
    return item.get_closest_marker("slow") is not None


def _has_turn(item, share):
    return zlib.crc32(item.nodeid.encode()) % share == 0
