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


# nnx.


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


def test_carry_is_one_object_and_a_leaf() -> None:
    assert isinstance(nnx.Carry, type)
    assert jax.tree.leaves((nnx.Carry, 0)) == [nnx.Carry, 0]


# Signatures.

MODES = [] if hasattr(nnx, "set_graph_mode") else ["graph", "graph_updates"]


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
