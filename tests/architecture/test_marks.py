"""The marks choose the program that a test runs; without one it is that of users."""

import jax
import pytest


def is_quick():
    return jax.config.values["jax_disable_most_optimizations"]


def test_without_a_mark_there_is_one_device_and_xla_as_it_comes():
    assert jax.device_count() == 1
    assert not is_quick()


@pytest.mark.quick
def test_quick_leaves_out_optimizations():
    assert jax.device_count() == 1
    assert is_quick()


@pytest.mark.devices
def test_devices_are_eight_and_xla_is_as_it_comes():
    assert jax.device_count() == 8
    assert not is_quick()
