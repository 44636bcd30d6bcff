"""What the integration of nnx uses and nnx hardly documents: each fails here first when a release changes it."""

import inspect
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from flax import nnx

from treescan.integrations.nnx import scan

TAG = "contract"
HAS_MODES = hasattr(nnx, "set_graph_mode")
SHARDING = "out_sharding" if HAS_MODES else "sharding_names"
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


def variables(*kinds: type[Any]) -> Any:
    return lambda path, value: isinstance(value, kinds)


def is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def leaves(state: Any) -> list[Any]:
    return jax.tree.leaves(state)


# The contexts.


def test_nodes_travel_into_a_transform_and_out_again_by_four_splits_and_merges() -> None:
    """Out of the caller, into the body, out of the body, back into the caller: which has the same objects, updated."""
    main, other = Main(), nnx.Param(jnp.zeros(()))

    @jax.jit
    def inside(graph: Any, *states: Any) -> Any:
        with nnx.merge_context(TAG, True) as context:
            nodes = context.merge(graph, *states)
        assert [type(node) for node in nodes] == [Main, nnx.Param, Sub]
        assert nodes[0] is not main, "new objects inside"
        assert nodes[0].sub is nodes[2], "shared nodes are shared inside"
        assert nodes[0].tied is nodes[0].sub.w
        nodes[0].sub.n[...] += 1.0
        nodes[0].new = nnx.Cache(jnp.ones(4))
        nodes.append(nnx.Param(jnp.full(5, 7.0)))
        with nnx.split_context(TAG) as context:
            out, params, rest = context.split(nodes, variables(nnx.Param), ...)
        return params, rest, Static(out)

    with nnx.update_context(TAG):
        with nnx.split_context(TAG) as context:
            graph, *states = context.split([main, other, main.sub], variables(nnx.Param), variables(nnx.Variable))
        params, rest, out = inside(graph, *states)
        with nnx.merge_context(TAG, False) as context:
            nodes = context.merge(out.value, params, rest)
    assert nodes[0] is main, "the same objects outside"
    assert nodes[1] is other
    assert nodes[2] is main.sub
    assert main.tied is main.sub.w
    assert float(main.sub.n[...]) == 1.0, "what a step changed is written back"
    np.testing.assert_array_equal(main.new[...], jnp.ones(4))  # what is new is seen outside
    np.testing.assert_array_equal(nodes[3][...], jnp.full(5, 7.0))  # nodes that were made inside come out


@jax.tree_util.register_static
class Static:
    """Carries a graph through a transform."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.value == other.value


def test_graphs_are_static_values_that_hash_and_compare() -> None:
    graphs = []
    for _ in range(2):
        with nnx.update_context(TAG), nnx.split_context(TAG) as context:
            graphs.append(context.split([Main()], ...)[0])
    assert graphs[0] == graphs[1]
    assert hash(graphs[0]) == hash(graphs[1])
    graph = nnx.split(Main())[0]
    assert graph == nnx.split(Main())[0]
    changed = Main()
    changed.sub.size = 3
    assert graph != nnx.split(changed)[0]


def test_split_takes_functions_of_path_and_variable_and_gives_a_state_each() -> None:
    seen: list[tuple[Any, Any]] = []

    def params(path: tuple[Any, ...], value: Any) -> bool:
        seen.append((path, value))
        return isinstance(value, nnx.Param)

    main = Main()
    with nnx.update_context(TAG), nnx.split_context(TAG) as context:
        _, first, second, none = context.split([Sub(), main], params, variables(nnx.Variable), variables(nnx.Cache))
    paths = {path for path, _ in seen}
    assert paths == {(0, "w"), (0, "n"), (1, "sub", "w"), (1, "sub", "n"), (1, "parts", 0)}, (
        "paths begin with the index"
    )
    assert all(is_variable(value) for _, value in seen)
    assert (len(leaves(first)), len(leaves(second)), len(leaves(none))) == (2, 3, 0), "tied variables stand once"


def test_key_paths_of_a_state_lead_from_the_index_to_the_value() -> None:
    with nnx.update_context(TAG), nnx.split_context(TAG) as context:
        _, state = context.split([nnx.Param(jnp.ones(())), Main()], ...)
    found = {jtu.keystr(path): path for path, _ in jtu.tree_flatten_with_path(state)[0]}
    kinds = {text: [type(key) for key in path] for text, path in found.items()}
    dict_key, attribute = jtu.DictKey, jtu.GetAttrKey
    assert set(found) == {
        "[0].value",
        "[1]['parts'][0].value['a']",
        "[1]['sub']['n'].value",
        "[1]['sub']['w'].value" if "[1]['sub']['w'].value" in found else "[1]['tied'].value",
    }
    assert kinds["[0].value"] == [dict_key, attribute]
    assert kinds["[1]['sub']['n'].value"] == [dict_key, dict_key, dict_key, attribute]
    assert found["[1]['sub']['n'].value"][0].key == 1
    assert all(is_variable(leaf) for leaf in jax.tree.leaves(state, is_leaf=is_variable)), "variables hold the arrays"
    at_variables = jtu.tree_flatten_with_path(state, is_leaf=is_variable)[0]
    assert {jtu.keystr(path) for path, _ in at_variables} == {text.split(".value")[0] for text in found}


def test_states_are_trees_of_which_the_metadata_is_structure() -> None:
    first, second, third = (nnx.split(Sub())[1] for _ in range(3))
    second["n"].set_metadata(note="other")
    assert jax.tree.structure(first) == jax.tree.structure(third) != jax.tree.structure(second)
    leaves, structure = jax.tree.flatten(first)
    assert jax.tree.unflatten(structure, leaves)["n"].get_metadata("note") == "mine"


def test_contexts_nest_under_one_tag() -> None:
    outer, inner = Sub(), Sub()
    with nnx.update_context(TAG):
        with nnx.split_context(TAG) as context:
            graph, state = context.split([outer], ...)
        with nnx.merge_context(TAG, True) as context:
            (body,) = context.merge(graph, state)
        with nnx.update_context(TAG):
            with nnx.split_context(TAG) as context:
                parts = context.split([inner, body], ...)
            with nnx.merge_context(TAG, True) as context:
                nodes = context.merge(*parts)
            nodes[0].n[...] += 1.0
            nodes[1].n[...] += 2.0
            with nnx.split_context(TAG) as context:
                parts = context.split(nodes, ...)
            with nnx.merge_context(TAG, False) as context:
                back = context.merge(*parts)
        assert back[0] is inner
        assert back[1] is body
        with nnx.split_context(TAG) as context:
            parts = context.split([body], ...)
        with nnx.merge_context(TAG, False) as context:
            assert context.merge(*parts)[0] is outer
    assert (float(inner.n[...]), float(outer.n[...])) == (1.0, 2.0)


def test_merge_makes_the_module_of_what_split_took_apart() -> None:
    """Of the very variables of the state: those of a state that went through a transform are new ones."""
    main = Main()
    graph, state = nnx.split(main)
    copy = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
    assert copy is not main
    assert copy.tied is copy.sub.w
    copy.sub.n[...] += 1.0
    assert float(main.sub.n[...]) == 0.0
    assert nnx.split(copy)[0] == graph


# Nodes and variables.


def test_modules_variables_and_what_else_holds_them_are_nodes() -> None:
    assert isinstance(Main(), nnx.Pytree)
    assert isinstance(nnx.Rngs(0), nnx.Pytree)
    assert isinstance(nnx.List([]), nnx.Pytree)
    assert not isinstance(nnx.Param(jnp.ones(())), nnx.Pytree)
    assert issubclass(nnx.Param, nnx.Variable)
    assert not isinstance(nnx.state(Main()), nnx.Pytree | nnx.Variable), "a state is a plain tree"


def test_iter_graph_gives_variables_with_their_paths() -> None:
    main = Main()
    found = {path: value for path, value in nnx.iter_graph(main, **GRAPH) if is_variable(value)}
    shared = ("sub", "w") if ("sub", "w") in found else ("tied",)
    assert set(found) == {("sub", "n"), shared, ("parts", 0)}, "a shared variable is found once"
    assert found[shared] is main.tied
    variable = nnx.Param(jnp.ones(()))
    assert [(path, value) for path, value in nnx.iter_graph(variable, **GRAPH) if is_variable(value)] == [
        ((), variable)
    ]


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


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axes_of_metadata(axis: int) -> None:
    """Names of axes are added and removed in a state; its arrays and its structure but for this stay as they are."""
    names: dict[str, Any] = {nnx.PARTITION_NAME: "layers"}
    options: dict[str, Any] = {SHARDING: ("a", "b")}
    with nnx.use_eager_sharding(False):
        param = nnx.Param(jnp.ones((2, 3)), **options)
        state = nnx.state(module_of(param))
        added = nnx.spmd.add_axis(state, axis, names)
        expected = ["a", "b"]
        expected.insert(axis, "layers")
        assert added["w"].get_metadata(SHARDING) == tuple(expected)
        assert added["b"].get_metadata().get(SHARDING) is None
        assert [leaf.shape for leaf in jax.tree.leaves(added)] == [(2,), (2, 3)]
        if axis >= 0:
            removed = nnx.spmd.remove_axis(added, axis, names)
            assert removed["w"].get_metadata(SHARDING) == ("a", "b")
            assert len(jax.tree.leaves(removed)) == 2


def module_of(param: Any) -> nnx.Module:
    module = nnx.Module()
    module.w = param
    module.b = nnx.Param(jnp.ones(2))
    return module


# What flax says of settings and levels.


def test_metadata_are_given_as_a_dict_and_set_as_a_whole() -> None:
    variable = nnx.Variable(jnp.ones(()), note="mine")
    metadata = variable.get_metadata()
    assert metadata["note"] == "mine"
    metadata["note"] = "changed"
    assert variable.get_metadata("note") == "mine", "a copy"
    variable.set_metadata(variable.get_metadata())
    assert variable.get_metadata("note") == "mine"
    del metadata["note"]
    variable.set_metadata(metadata)
    assert "note" not in variable.get_metadata(), "the whole of it is replaced"


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_variables_of_another_level_refuse_even_the_metadata_that_they_have(transform: Any) -> None:
    variable = nnx.Variable(jnp.ones(()))

    def f(x: jax.Array) -> jax.Array:
        with pytest.raises(flax.errors.TraceContextError):
            variable.set_metadata(variable.get_metadata())
        own = nnx.Variable(x)
        own.set_metadata(own.get_metadata())
        return x

    transform(f)(jnp.ones(1) if transform is jax.vmap else jnp.ones(()))


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
