"""What the integration of flax uses and flax does not document: each fails here first when a release changes it."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import core, linen as nn
from flax.core.lift import pack
from flax.linen import transforms
from flax.typing import In, Out

from treescan.integrations.flax import scan

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


def test_scopes_count_on_from_the_keys_of_the_scope_before() -> None:
    """Why the body is traced again where flax would: its second trace reads other keys."""
    seen: list[Any] = []

    def run(scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any) -> Any:
        for _ in range(2):
            scope = scope_fn(variable_groups, rng_groups)
            seen.append(jax.random.key_data(scope.make_rng("dropout")))
            groups = repack_fn(scope)
        return None, groups

    apply(packed(run))
    assert not np.array_equal(*seen)


class Cell(nn.Module):
    def __call__(self, h: Any, x: Any) -> Any:
        return h + x, h

    def other(self, h: Any, x: Any) -> Any:
        return h, x


@pytest.mark.parametrize("methods", [None, ["__call__", "other"], {"__call__": {"option": 1}, "other": {"option": 2}}])
def test_lift_transform_names_classes_by_the_transform_and_passes_options(methods: Any) -> None:
    calls: list[Any] = []

    def renamed(function: Any, **options: Any) -> Any:
        calls.append(options)
        return lambda scopes, *args: function(scopes, *args)

    transformed = transforms.lift_transform(renamed, Cell, methods=methods, option=1)
    assert transformed.__name__ == "RenamedCell"
    assert transformed().apply({}, 1, 2) == (3, 1)
    assert transformed().apply({}, 1, 2, method="other") == (1, 2)
    assert calls == [{"option": 1}, *([{"option": 2}] if isinstance(methods, dict) else calls[1:])]
    assert len(calls) == (1 if methods is None else 2)


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


def test_the_signature_is_flax_s_and_a_few_more() -> None:
    ours, theirs = inspect.signature(scan).parameters, inspect.signature(nn.scan).parameters
    more = [name for name, parameter in ours.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    assert more == ["remat", "save", "name", "progress", "check_finite"]
    assert [name for name in ours if name not in more] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind
        default = ours[name].default
        assert default == parameter.default or (not default and not parameter.default), name
