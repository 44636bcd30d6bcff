"""The variables of nnx modules: their names in messages, modules in a carry, and the role of each in a scan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.tree_util as jtu
from flax import nnx
from flax.errors import TraceContextError
from flax.typing import PathParts

from ..._avals import Array, PyTree, TreeDef, describe_argument, describe_leaf
from ..._errors import Misuse, Row, TypeMisuse
from ..._tree import KeyPath, PrefixMismatch, Root, broadcast_prefix, leaves_with_path, path_str
from ..._types import Axes
from ...carries._base import AbstractCarry
from ...carries._registry import register_carry

Variable: TypeAlias = nnx.Variable[Any]
State: TypeAlias = nnx.State[Any, Any]
Graph: TypeAlias = nnx.GraphDef[Any]

NodeLike: TypeAlias = nnx.Pytree | Variable
"""That of which nnx keeps the identity: a module or whatever else holds variables, or a variable."""


def differences(name: str, given: Variable, now: Variable) -> list[Row]:
    """How two variables differ in type and metadata, under the name of the first."""
    if type(given) is not type(now):
        return [Row(name, type(given).__name__, type(now).__name__, "type")]
    old, new = given.get_metadata(), now.get_metadata()
    changed = [key for key in {**old, **new} if not (key in old and key in new and _same_metadata(old[key], new[key]))]
    return [Row(name, _entry(old, key), _entry(new, key), "metadata") for key in changed]


def _same_metadata(given: object, now: object) -> bool:
    try:
        return bool(given is now or given == now)
    except Exception:  # arrays, for example, whose `==` is no answer
        return False


def _entry(metadata: Mapping[str, object], key: str) -> str:
    if key not in metadata:
        return f"(no {key})"
    value = metadata[key]
    return f"{key}={describe_leaf(value) if isinstance(value, tuple) else describe_argument(value)}"


_GRAPH: dict[str, bool] = {"graph": True} if "graph" in inspect.signature(nnx.iter_graph).parameters else {}


@jtu.register_pytree_with_keys_class
class Named:
    """Values by their names. `structure` is what else there is to know, and static."""

    def __init__(self, names: tuple[str, ...], values: tuple[PyTree, ...], structure: TreeDef = None) -> None:
        self.names = names
        self.values = values
        self.structure = structure

    @classmethod
    def of(cls, state: PyTree, nodes: tuple[str, ...]) -> Named:
        """The arrays of the state of a list of nodes, which have these names."""
        leaves, structure = jtu.tree_flatten_with_path(state)
        return cls(tuple(_name(path, nodes) for path, _ in leaves), tuple(leaf for _, leaf in leaves), structure)

    def state(self) -> PyTree:
        """The state whose arrays these are."""
        return jtu.tree_unflatten(self.structure, self.values)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Root, PyTree]], tuple[tuple[str, ...], TreeDef]]:
        children = [(Root(name), value) for name, value in zip(self.names, self.values, strict=True)]
        return children, (self.names, self.structure)

    @classmethod
    def tree_unflatten(cls, known: tuple[tuple[str, ...], TreeDef], values: tuple[PyTree, ...]) -> Named:
        return cls(known[0], tuple(values), known[1])


def by_name(tree: PyTree) -> dict[str, Array]:
    """The arrays of a tree by their names in messages."""
    return dict(leaves_with_path("", tree))


def variables_of(state: PyTree, nodes: tuple[str, ...]) -> list[tuple[str, Variable]]:
    """The variables in a state of named nodes, each with its path from the node's name."""
    found = jtu.tree_leaves_with_path(state, is_leaf=is_variable)
    return [(_name(path, nodes), leaf) for path, leaf in found if is_variable(leaf)]


def _name(path: KeyPath, nodes: tuple[str, ...]) -> str:
    """What is at a path in a state of a list of nodes, which have these names."""
    return nodes[path[0].key] + "".join(map(_attribute, path[1:]))


def _attribute(key: object) -> str:
    match key:
        case jtu.GetAttrKey(name="value"):  # of a variable: its array is meant
            return ""
        case jtu.DictKey(key=str() as name) if name.isidentifier():
            return f".{name}"
        case _:
            return path_str("", (key,))


def is_variable(leaf: object) -> TypeGuard[Variable]:
    """Whether it is a variable."""
    return isinstance(leaf, nnx.Variable)


def is_node(leaf: object) -> TypeGuard[NodeLike]:
    """Whether nnx keeps the identity of an object."""
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def variables_in(node: object) -> Iterator[tuple[PathParts, Variable]]:
    """The variables of a node, each once, with their paths in it."""
    for path, value in nnx.iter_graph(node, **_GRAPH):
        if is_variable(value):
            yield path, value


def leaves_and_nodes(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, where modules and variables are leaves."""
    return leaves_with_path(root, tree, is_leaf=is_node)


def replace_nodes(tree: PyTree, replace: Callable[[NodeLike], object]) -> PyTree:
    """A tree with `replace(node)` in the places of its nodes."""
    return jax.tree.map(lambda leaf: replace(leaf) if is_node(leaf) else leaf, tree, is_leaf=is_node)


def spelled(name: str, path: PathParts) -> str:
    """The name of what is at a path of nnx in the node of this name."""
    return name + "".join(f".{key}" for key in path)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModuleCarry(AbstractCarry[nnx.Pytree, nnx.Pytree]):
    """An nnx module in the loop. The body sees the module, may change its variables, and returns it.

    All rows of a `mask_scan` share it. It is updated in steps in which any row is valid.

    Attributes:
        state: its variables.
        graph: everything else, which is the same in every step.
    """

    state: State
    graph: nnx.GraphDef[nnx.Pytree] = field(metadata={"static": True})

    def read(self) -> nnx.Pytree:
        """The module."""
        return nnx.merge(self.graph, self.state)

    def write(self, returned: nnx.Pytree, valid: Array | None) -> ModuleCarry:
        """The variables of the module that was returned."""
        if not isinstance(returned, nnx.Pytree):
            raise TypeError(f"the step returned a {type(returned).__name__} instead of the module that it was given")
        graph, state = nnx.split(returned)
        if graph != self.graph:
            rows = _differences(self.read(), returned)
            changes = [f"{row.leaf} had {row.expected}, now {row.came}. " for row in rows]
            raise TypeError(
                f"the module that the step returned has another structure: {''.join(changes)}"
                "Submodules, variables, their metadata and settings must be the same in every step. Create all of "
                "them before the scan"
            )
        return ModuleCarry(state, self.graph)

    def rows(self) -> None:
        """Shared by all rows."""
        return None


def _differences(given: nnx.Pytree, now: nnx.Pytree) -> list[Row]:
    """What became of the variables that both modules have."""
    old, new = (dict(variables_in(module)) for module in (given, now))
    both = [path for path in old if path in new]
    return [row for path in both for row in differences(".".join(map(str, path)), old[path], new[path])]


def _to_carry(module: nnx.Pytree) -> ModuleCarry:
    graph, state = nnx.split(module)
    return ModuleCarry(state, graph)


register_carry(nnx.Pytree, _to_carry, ModuleCarry.read)


Role: TypeAlias = Any
"""An axis, None, `nnx.Carry`, or an `nnx.StateAxes` that gives one of these to each variable."""

KINDS = "an axis, None, `nnx.Carry`, or an `nnx.StateAxes` of these"
_TREE_STATE: Any = getattr(nnx.extract, "TreeState", nnx.State)  # what `nnx.prefix` makes
_OF_MODULES: tuple[type, ...] = (nnx.Pytree, nnx.Variable, nnx.State, _TREE_STATE)


@dataclass(frozen=True, eq=False)
class ModuleAxes:
    """The role of a module whose variables have the axes that are in their places in a prefix of it.

    Attributes:
        axes: a module, or a `TreeState` of flax, as `nnx.prefix` makes them.
    """

    axes: Any

    def at(self, path: PathParts, name: str) -> Role:
        """The role of the variable that is there in the module of this name."""
        axes = getattr(self.axes, "state", self.axes) if isinstance(self.axes, _TREE_STATE) else self.axes
        for key in path:
            if axes is None or is_axis(axes):
                break
            try:
                axes = getattr(axes, key) if isinstance(key, str) and hasattr(axes, key) else axes[key]
            except (AttributeError, KeyError, IndexError, TypeError):
                raise Misuse(
                    f"{{call}}: the axes of {name} have none for {spelled(name, path)}.",
                    "Make them of the same module: `nnx.prefix(module, {nnx.Param: 0, ...: None})`.",
                ) from None
        return axes


def is_axis(role: Role) -> bool:
    """Whether a role is an axis."""
    return isinstance(role, int) and not isinstance(role, bool)


def check_axes(in_axes: Axes, out_axes: Axes, *, updates: bool) -> tuple[int | None, int | None]:
    """Checks the axes of a scan; returns where the carry is among the arguments and among the outputs.

    The carry is at 0 where it is the only argument, or the only output.

    Args:
        in_axes: of the arguments.
        out_axes: of the outputs.
        updates: whether modules are graphs whose structure may change. Otherwise axes may be modules, and no
            `nnx.StateAxes`.
    """
    for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        (_refuse_prefixes_of_modules if updates else _refuse_state_axes)(name, axes)
    taken = _find_carry("in_axes", in_axes)
    given = _find_carry("out_axes", out_axes)
    if (taken is None) != (given is None):
        has, lacks = ("in_axes", "out_axes") if given is None else ("out_axes", "in_axes")
        raise Misuse(
            f"{{call}}: `{has}` has `nnx.Carry`, but `{lacks}` has none.",
            "A carried value is both an argument and an output of the {step}: mark it in both.",
        )
    for path, role in _roles(in_axes):
        _check_role("in_axes" + path, role)
    for path, role in _roles(out_axes):
        _refuse_whole_output("out_axes" + path, role)
        _check_role("out_axes" + path, role)
    return taken, given


def axes_of(*prefixes: Axes) -> tuple[int, ...]:
    """All the axes that are in prefix trees, in order."""
    roles = [one for prefix in prefixes for _, role in _roles(prefix) for one in _within(role)]
    return tuple(sorted({role for role in roles if is_axis(role)}))


def _find_carry(name: str, axes: Axes) -> int | None:
    found = [path for path, role in _roles(axes) if role is nnx.Carry]
    entries = {f"[{i}]": i for i in range(len(axes))} if isinstance(axes, tuple) else {"": 0}
    nested = [path for path in found if path not in entries]
    if nested:
        raise Misuse(
            f"{{call}}: `{name}` has `nnx.Carry` inside an entry, at {name}{nested[0]}.",
            "An argument is carried as a whole. To carry a part of a module, use an `nnx.StateAxes`: "
            "`nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: 0})`.",
        )
    if len(found) > 1:
        raise Misuse(
            f"{{call}}: `{name}` has `nnx.Carry` more than once, at {' and '.join(name + path for path in found)}.",
            "Put all carried values into one argument, for example a tuple.",
        )
    return entries[found[0]] if found else None


def _roles(axes: Axes) -> list[tuple[str, Role]]:
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda role: role is None)
    return [(path_str("", path), role) for path, role in leaves]


def _within(role: Role) -> tuple[Role, ...]:
    """The roles that a role gives to variables; other than an `nnx.StateAxes`, it is one itself."""
    return role.axes if isinstance(role, nnx.StateAxes) else (role,)


def _refuse_prefixes_of_modules(name: str, axes: Axes) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda prefix: isinstance(prefix, _OF_MODULES))
    for path, prefix in leaves:
        if isinstance(prefix, _OF_MODULES):
            raise TypeMisuse(
                f"{{call}}: {name}{path_str('', path)} is a {type(prefix).__name__} of axes.",
                "The axes of a module's variables are given by an `nnx.StateAxes`, by their types or paths: "
                "`nnx.StateAxes({nnx.Param: 0, ...: None})`.",
            )


def _refuse_state_axes(name: str, axes: Axes) -> None:
    for path, role in _roles(axes):
        if isinstance(role, nnx.StateAxes):
            raise Misuse(
                f"{{call}}: {name}{path} is an `nnx.StateAxes`, which needs `graph=True` and `graph_updates=True`.",
                "Give the axes in the form of the module: `nnx.prefix(module, {nnx.Param: 0, ...: None})`.",
            )


def _check_role(where: str, role: Role) -> None:
    if not all(is_axis(one) or one is None or one is nnx.Carry for one in _within(role)):
        raise TypeMisuse(f"{{call}}: {where} is {role!r}.", f"Give {KINDS}, or a tree of these.")


def _refuse_whole_output(where: str, role: Role) -> None:
    if None in _within(role) or (isinstance(role, nnx.StateAxes) and nnx.Carry in role.axes):
        raise Misuse(
            f"{{call}}: {where} is {role!r}, but an output is stacked.",
            "Give it the axis of the steps. If a value is the same in all steps, do not make it an output. If it is "
            "carried, put it into the argument with `nnx.Carry`.",
        )


def spread_roles(name: str, axes: Axes, tree: PyTree, root: str) -> list[Role]:
    """One role for each leaf of a tree, where modules and variables are leaves."""
    axes = jax.tree.map(
        lambda prefix: ModuleAxes(prefix) if isinstance(prefix, _OF_MODULES) else prefix,
        axes,
        is_leaf=lambda prefix: prefix is None or isinstance(prefix, _OF_MODULES),
    )
    try:
        return broadcast_prefix(axes, replace_nodes(tree, lambda _: 0), root)
    except PrefixMismatch as off:
        raise Misuse(
            f"{{call}}: `{name}` does not fit: {off}.",
            f"`{name}` is a tree prefix: one entry for each {'argument' if name == 'in_axes' else 'output'}, or one "
            "for all of them.",
        ) from None


def role_of(role: Role, path: PathParts, value: Any, name: str) -> Role:
    """The role of one variable of a node.

    Args:
        role: that of the node.
        path: where in the node the variable is.
        value: the variable.
        name: the node's name.
    """
    if isinstance(role, ModuleAxes):
        return role.at(path, name)
    if not isinstance(role, nnx.StateAxes):
        return role
    try:
        return role.map_prefix(path, value)
    except ValueError:
        raise Misuse(
            f"{{call}}: no filter of {role!r} matches {spelled(name, path)}, a {type(value).__name__}.",
            "Let the last filter match the rest: `...: None`, `...: 0` or `...: nnx.Carry`.",
        ) from None


def filters_of(
    roles: Sequence[Role], names: Sequence[str], axes: Sequence[int], *, keeps: bool = False
) -> list[Callable[[PathParts, object], bool]]:
    """What splits the variables of a list of nodes into the carried, those given whole, and those of each axis.

    If it `keeps` changes, variables that are given whole are among the carried ones.
    """
    known: dict[PathParts, Role] = {}  # by paths, which begin with the index of the node

    def has(wanted: Role) -> Callable[[PathParts, object], bool]:
        def takes(path: PathParts, value: object) -> bool:
            if path not in known:
                node = path[0]
                assert isinstance(node, int)
                role = role_of(roles[node], path[1:], value, names[node])
                known[path] = nnx.Carry if keeps and role is None and isinstance(value, nnx.Variable) else role
            return known[path] is wanted if wanted is None or wanted is nnx.Carry else known[path] == wanted

        return takes

    return [has(nnx.Carry), has(None), *map(has, axes)]


def check_shared(nodes: Sequence[NodeLike], roles: Sequence[Role], names: Sequence[str]) -> None:
    """Refuses a variable that is in several places with different roles."""
    seen: dict[int, tuple[Variable, list[tuple[str, Role]]]] = {}
    for node, role, name in zip(nodes, roles, names, strict=True):
        for path, value in variables_in(node):
            place = spelled(name, path), role_of(role, path, value, name)
            seen.setdefault(id(value), (value, []))[1].append(place)
    for value, places in seen.values():
        if any(role is not places[0][1] and role != places[0][1] for _, role in places):
            raise Misuse(
                f"{{call}}: one {type(value).__name__} is in several places, which give it different axes.",
                "Give a shared variable the same axis in all places.",
                header=("place", "role", ""),
                rows=[Row(where, "nnx.Carry" if role is nnx.Carry else repr(role), "") for where, role in places],
            )


def check_level(nodes: Sequence[NodeLike], names: Sequence[str]) -> None:
    """Refuses variables of nodes that cannot be updated here, before the first of them is."""
    for node, name in zip(nodes, names, strict=True):
        for path, value in variables_in(node):
            check_updatable(spelled(name, path), value)


def check_updatable(name: str, variable: Variable) -> None:
    """Refuses a variable that cannot be updated here."""
    try:
        variable.set_metadata(variable.get_metadata())  # what it has already: flax says whether it may be set
    except TraceContextError as error:
        raise Misuse(
            f"{{call}}: {name} was created outside the function that is being traced, and cannot be updated inside it.",
            "If that function is the body of another loop, for example of `treescan.while_scan`, put the module into "
            "its `init`, and return it in the carry. This is also necessary if the module is an argument of a "
            "`nnx.jit` around that loop.",
            "Otherwise pass the module to that function as an argument, for example with `nnx.jit` or `nnx.grad`.",
            cause=error,
        ) from None
