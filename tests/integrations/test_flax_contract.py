"""What the integrations use and flax hardly documents: each fails here first when a release changes it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import core, linen as nn, nnx
from flax.core.lift import pack
from flax.typing import In, Out

from treescan.integrations.flax import scan
from treescan.integrations.nnx import scan as nnx_scan

pytestmark = pytest.mark.quick

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


def packed(run: Any, *, out: tuple[Any, ...] = ("params", "state")) -> Any:
    """A function of a scope that hands `run` its groups."""
    return pack(run, ("params", "state", "table"), out, ("params", True), name="scan")


def apply(function: Any, *args: Any, mutable: Any = ("params", "state")) -> Any:
    variables = {"params": {"w": jnp.ones(2)}, "state": {"n": jnp.zeros(())}, "table": {"t": jnp.arange(3)}}
    return core.apply(function, mutable=list(mutable))(variables, *args, rngs=KEYS)


def test_pack_hands_on_groups_by_filter_and_scope() -> None:
    seen: dict[str, Any] = {}

    def run(scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any, *args: Any) -> Any:
        seen.update(variables=variable_groups, rngs=rng_groups, args=args)
        scope = scope_fn(variable_groups, rng_groups)
        seen["scope"] = (scope.get_variable("params", "w"), scope.get_variable("table", "t"), scope.debug_path)
        scope.put_variable("state", "n", jnp.ones(()))
        groups = repack_fn(scope)
        seen["groups"] = groups
        return "y", groups

    y, changed = apply(packed(run), 1, 2)
    assert (y, seen["args"]) == ("y", (1, 2))
    assert len(seen["variables"]) == 3, "a group for each filter of variables"
    assert all(len(group) == 1 for group in seen["variables"]), "a dict for each scope in each group"
    assert [sorted(group[0]) for group in seen["variables"]] == [["params"], ["state"], ["table"]]
    assert [sorted(group[0]) for group in seen["rngs"]] == [["params"], ["dropout"]], "a group for each filter of keys"
    np.testing.assert_array_equal(seen["scope"][0], jnp.ones(2))
    assert [sorted(group[0]) for group in seen["groups"]] == [["params"], ["state"]], "a group for each filter out"
    assert changed["state"]["n"] == 1, "what is returned is published in the outer scope"


class Cell(nn.Module):
    def __call__(self, h: Any, x: Any) -> Any:
        return h + x, h


def test_modules_are_named_by_flax_s_transform() -> None:
    assert scan(Cell).__name__ == nn.scan(Cell).__name__ == "ScanCell"


def test_broadcast_is_one_object_and_a_leaf() -> None:
    assert core.broadcast is nn.broadcast
    assert jax.tree.leaves({"a": core.broadcast}) == [core.broadcast]


def test_in_and_out_hold_an_axis() -> None:
    assert (In(1).axis, Out(-1).axis) == (1, -1)
    assert (type(In(1)), type(Out(1))) == (In, Out)
    assert (In.__name__, Out.__name__) == ("In", "Out")  # `treescan.lift` knows them by their names


def test_deny_lists_hold_what_they_deny() -> None:
    assert core.DenyList("a").deny == "a"


# nnx. What it says of nodes, variables, settings and levels.

TAG = "contract"
HAS_MODES = hasattr(nnx, "set_graph_mode")
GRAPH: dict[str, Any] = {"graph": True} if "graph" in inspect.signature(nnx.iter_graph).parameters else {}


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
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert type(nnx.prefix(module, {...: 0}, graph=True)) is nnx.extract.TreeState
    assert type(nnx.prefix(module, {...: 0}, graph=False)) is nnx.Linear


def test_carry_is_one_object_and_a_leaf() -> None:
    assert isinstance(nnx.Carry, type)
    assert jax.tree.leaves((nnx.Carry, 0)) == [nnx.Carry, 0]


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


# Signatures.

MODES = [] if HAS_MODES else ["graph", "graph_updates"]


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        (scan, nn.scan, ["remat", "save", "name", "progress", "check_finite"]),
        (nnx_scan, nnx.scan, [*MODES, "remat", "name", "progress", "check_finite"]),
    ],
    ids=["linen", "nnx"],
)
def test_the_signature_is_flax_s_and_a_few_more(ours: Any, theirs: Any, more: list[str]) -> None:
    own, flax_s = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    assert [name for name in own if name not in more] == list(flax_s)
    assert all(own[name].kind is inspect.Parameter.KEYWORD_ONLY for name in more)
    for name, parameter in flax_s.items():
        if name != "f":
            assert own[name].kind == parameter.kind, name
            default = own[name].default
            assert default == parameter.default or (not default and not parameter.default), name
