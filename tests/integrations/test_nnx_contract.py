"""What the integration of nnx uses and nnx hardly documents: each fails here first when a release changes it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from treescan.integrations.nnx import scan

pytestmark = pytest.mark.quick

TAG = "contract"
HAS_MODES = hasattr(nnx, "set_graph_mode")
GRAPH: dict[str, Any] = {"graph": True} if "graph" in inspect.signature(nnx.iter_graph).parameters else {}


class Sub(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(2))
        self.n = nnx.BatchStat(jnp.zeros(()), note="mine")
        self.size = 2


class Main(nnx.Module):
    def __init__(self) -> None:
        self.sub = Sub()
        self.tied = self.sub.w
        self.parts = nnx.List([nnx.Variable({"a": jnp.ones(3)})])


def leaves(state: Any) -> list[Any]:
    return jax.tree.leaves(state)


# Nodes and variables.


def test_state_axes_hold_axes_and_map_paths_to_them() -> None:
    axes = nnx.StateAxes({nnx.Param: 0, nnx.PathContains("norm"): nnx.Carry, nnx.BatchStat: None})
    assert axes.axes == (0, nnx.Carry, None)
    param, stat = nnx.Param(jnp.ones(())), nnx.BatchStat(jnp.ones(()))
    assert axes.map_prefix(("norm", "w"), param) == 0, "the first filter that takes it"
    assert axes.map_prefix(("norm", "n"), stat) is nnx.Carry
    assert axes.map_prefix((), stat) is None
    with pytest.raises(ValueError, match="No axis found"):
        axes.map_prefix((), nnx.Cache(jnp.ones(())))
    assert jax.tree.leaves({"a": axes}) == [axes], "they are leaves"
    assert axes == nnx.StateAxes(dict(axes.items()))
    assert hash(axes) == hash(nnx.StateAxes(dict(axes.items())))


@pytest.mark.skipif(not hasattr(nnx, "prefix"), reason="flax has no `nnx.prefix`")
def test_prefixes_of_modules_have_a_type_of_their_own_or_the_module_s() -> None:
    assert type(nnx.prefix(Main(), {...: 0}, graph=True)) is nnx.extract.TreeState
    assert type(nnx.prefix(Main(), {...: 0}, graph=False)) is Main


def test_carry_is_one_object_and_a_leaf() -> None:
    assert isinstance(nnx.Carry, type)
    assert jax.tree.leaves((nnx.Carry, 0)) == [nnx.Carry, 0]


# What flax says of settings and levels.


@pytest.mark.skipif(not HAS_MODES, reason="flax has no modes")
@pytest.mark.parametrize("name", ["set_graph_mode", "set_graph_updates"])
def test_modes_are_on_and_are_set_for_a_while(name: str) -> None:
    setting = getattr(nnx, name)
    assert setting.current_value() is True
    with setting(False):
        assert setting.current_value() is False
    assert setting.current_value() is True


def test_flax_has_both_modes_or_none() -> None:
    assert HAS_MODES == hasattr(nnx, "set_graph_updates") == bool(GRAPH)


def test_mutable_arrays_of_variables_are_leaves_of_the_state() -> None:
    options: dict[str, Any] = {"ref" if HAS_MODES else "has_ref": True}
    with nnx.update_context(TAG), nnx.split_context(TAG) as context:
        _, state = context.split([nnx.Variable(jnp.ones(2), **options)], ...)
    (leaf,) = jax.tree.leaves(state)
    assert "Ref" in str(jax.typeof(leaf))


def test_the_signature_is_flax_s_and_a_few_more() -> None:
    ours, theirs = inspect.signature(scan).parameters, inspect.signature(nnx.scan).parameters
    modes = [] if HAS_MODES else ["graph", "graph_updates"]
    more = [*modes, "remat", "name", "progress", "check_finite"]
    assert [name for name in ours if name not in more] == list(theirs)
    for name, parameter in theirs.items():
        if name != "f":
            assert ours[name].kind == parameter.kind, name
            default = ours[name].default
            assert default == parameter.default or (not default and not parameter.default), name
