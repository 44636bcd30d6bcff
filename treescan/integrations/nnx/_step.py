"""One step over nnx modules: merges them, calls the body, splits them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
from flax import nnx

from ..._avals import describe_node, is_mutable
from ..._errors import ArgumentError, BodyError, CarryError, Fault, Row
from ..._tree import Prefix, is_static
from ..._types import PyTree, TreeDef
from ._named import Named, differences, is_node, leaves_and_nodes, named_state, replace_nodes, state_of, variables_of
from ._roles import ModuleAxes, Role, check_shared, filters_of, spread_roles

TAG = "treescan"
"""The tag of the `nnx.update_context`, by which modules are told from one side of the loop to the other."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Layout:
    """What the steps are given, or return, beside arrays.

    Attributes:
        graph: the structure of the modules.
        tree: the arguments less the carry, or the outputs less the carry.
        places: for each leaf of the tree the role and the index in what has this role; of a node `"node"` and its
            index among the nodes.
        names: what the nodes are called.
        roles: their roles.
    """

    graph: Any
    tree: TreeDef
    places: tuple[tuple[Role, int], ...]
    names: tuple[str, ...] = ()
    roles: tuple[Role, ...] = ()


@jax.tree_util.register_static
@dataclass(frozen=True)
class Node:
    """Takes the place of a module or a variable in the carry: its index among the nodes."""

    index: int


@dataclass
class Parts:
    """Trees that are taken apart: nodes, and arrays by their roles."""

    nodes: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    arrays: dict[Role, list[tuple[str, Any]]] = field(default_factory=dict)

    def add_node(self, name: str, node: Any, role: Role) -> int:
        """Returns its index."""
        self.nodes.append(node)
        self.names.append(name)
        self.roles.append(role)
        return len(self.nodes) - 1

    def add(self, name: str, leaf: Any, role: Role) -> tuple[Role, int]:
        """Adds a leaf; returns its place."""
        if is_node(leaf):
            return "node", self.add_node(name, leaf, role)
        if isinstance(role, (nnx.StateAxes, ModuleAxes)):
            kind = "an `nnx.StateAxes`" if isinstance(role, nnx.StateAxes) else "axes of a module"
            raise Fault(
                ArgumentError,
                f"{{call}}: {name} has {kind}, but is {describe_node(leaf)}.",
                f"{kind[0].upper()}{kind[1:]} {'is' if kind[:2] == 'an' else 'are'} for modules and variables. Give "
                "an array an axis, or None to pass it whole.",
            )
        leaves = self.arrays.setdefault(role, [])
        leaves.append((name, leaf))
        return role, len(leaves) - 1

    def named(self, role: Role) -> Named:
        """The arrays of one role."""
        leaves = self.arrays.get(role, [])
        return Named(tuple(name for name, _ in leaves), tuple(leaf for _, leaf in leaves))

    def state(self, state: PyTree) -> Named:
        """The arrays of a state of the nodes."""
        return named_state(state, tuple(self.names))

    def groups(self, states: Sequence[Named], axes: Sequence[int]) -> tuple[tuple[Named, Named], ...]:
        """What has each axis: the state of the nodes, and arrays."""
        return tuple((state, self.named(axis)) for state, axis in zip(states, axes, strict=True))


def split(
    parts: Parts, axes: Sequence[int], metadata: Mapping[str, Any], tag: str | None = TAG
) -> tuple[Any, list[Named]]:
    """The structure of all nodes, and their arrays: the carried ones, those given whole, and those of each axis."""
    graph, states = split_live(parts, axes, tag)
    if metadata:
        states[2:] = [nnx.spmd.add_axis(state, axis, metadata) for state, axis in zip(states[2:], axes, strict=True)]
    return graph, list(map(parts.state, states))


def split_live(
    parts: Parts, axes: Sequence[int], tag: str | None = None, *, keeps: bool = False
) -> tuple[Any, list[PyTree]]:
    """The structure of all nodes, and states with their variables themselves: the carried ones, and those of each axis.

    Args:
        parts: the nodes.
        axes: all axes.
        tag: of the `nnx.update_context`; None: there is none.
        keeps: whether variables that are given whole are among the carried ones.
    """
    check_shared(parts.nodes, parts.roles, parts.names)
    with nnx.split_context(tag) as context:
        graph, *states = context.split(parts.nodes, *filters_of(parts.roles, parts.names, axes, keeps=keeps))
    for named in map(parts.state, states):
        for name, leaf in zip(named.names, named.values, strict=True):
            if is_mutable(leaf):
                raise Fault(
                    ArgumentError,
                    f"{{call}}: {name} holds a mutable array (a `Ref`), which can be neither scanned over nor carried.",
                    "Create the variable without a reference, so that it holds the array itself.",
                )
    return graph, states


def merge(graph: Any, states: Sequence[Named], tag: str | None = None, inner: bool | None = None) -> list[Any]:
    """The nodes: with a tag new ones inside of the step, and outside of the loop those that were there, updated.

    Without a tag, they are new, and have no tie to others.
    """
    if not states:
        return []
    with nnx.merge_context(tag, inner) as context:
        nodes: list[Any] = context.merge(graph, *map(state_of, states))
    return nodes


@dataclass(frozen=True)
class ModuleStep:
    """The body of the loop. It carries `Named((carry, variables))`.

    Attributes:
        f: the user's function.
        out_axes: the prefix tree of its outputs.
        carried: where the carry is among the arguments, or None.
        returned: where it is among the outputs; 0 too where it is the only one.
        axes: all axes, in the order in which their groups are in xs and ys.
        metadata: of `transform_metadata`.
    """

    tag: ClassVar[str | None] = TAG

    f: Callable[..., Any]
    out_axes: Prefix
    carried: int | None
    returned: int | None
    axes: tuple[int, ...]
    metadata: tuple[tuple[str, Any], ...]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.f

    def __call__(self, args__: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        layout, whole, arrays, groups = x
        carry, variables = args__.values
        states = [state for state, _ in groups]
        if self.metadata:
            states = [self._without_axis(state, axis) for state, axis in zip(states, self.axes, strict=True)]
        nodes = merge(layout.graph, [variables, whole, *states], TAG, inner=True)
        args = self._arguments(layout, nodes, fill(carry, nodes), arrays, groups)
        new_carry, out = self._apart(self.f(*args))
        parts = Parts(list(nodes), list(layout.names), list(layout.roles))
        new_carry = take_nodes(args__.names[0], carry, new_carry, parts)
        layout_out, (new_variables, new_whole, *states) = self._take_out(out, parts)
        check_carried(variables, new_variables, layout.names)
        _check_whole(whole, new_whole)
        return Named(args__.names, (new_carry, new_variables)), (layout_out, parts.groups(states, self.axes))

    def _arguments(self, layout: Layout, nodes: list[Any], carry: PyTree, arrays: Named, groups: Any) -> list[Any]:
        """What the user's function is called with."""
        known: dict[Role, Any] = {"node": nodes, None: arrays.values}
        known |= {axis: leaves.values for axis, (_, leaves) in zip(self.axes, groups, strict=True)}
        args = list(jax.tree.unflatten(layout.tree, [known[role][i] for role, i in layout.places]))
        if self.carried is not None:
            args[self.carried] = carry
        return args

    def _without_axis(self, state: Named, axis: int) -> Named:
        removed = nnx.spmd.remove_axis(state_of(state), axis, dict(self.metadata))
        leaves, structure = jax.tree.flatten(removed)
        return Named(state.names, tuple(leaves), structure)

    def _apart(self, out: Any) -> tuple[Any, Any]:
        """The carry, and the outputs with None in its place."""
        if self.returned is None:
            return None, out
        axes = self.out_axes.tree
        if not isinstance(axes, tuple):
            return out, None
        if not isinstance(out, tuple) or len(out) != len(axes):
            raise Fault(
                BodyError,
                f"{{body}} returned {describe_node(out)}, but `out_axes` has {len(axes)} entries.",
                "Return a tuple with one output for each entry. With `out_axes=nnx.Carry`, return only the carry.",
            )
        return out[self.returned], (*out[: self.returned], None, *out[self.returned + 1 :])

    def _take_out(self, out: Any, parts: Parts) -> tuple[Layout, list[Named]]:
        axes = self.out_axes.tree
        if self.returned is not None:
            axes = None if not isinstance(axes, tuple) else tuple(None if a is nnx.Carry else a for a in axes)
        named = leaves_and_nodes("out", out)
        roles = spread_roles("out_axes", axes, out, "out")
        for name, leaf in named:
            if not is_node(leaf) and is_static(leaf):
                raise Fault(
                    BodyError,
                    f"{{body}} returned outputs that are not arrays: {name} is {describe_node(leaf)}.",
                    "Outputs are stacked over the steps, so they must be arrays. Keep other values out of the scan.",
                )
        places = tuple(parts.add(name, leaf, role) for (name, leaf), role in zip(named, roles, strict=True))
        graph, states = split(parts, self.axes, dict(self.metadata), self.tag)
        return Layout(graph, jax.tree.structure(out, is_leaf=is_node), places), states


def fill(tree: PyTree, nodes: Sequence[Any]) -> PyTree:
    """A tree with nodes in their places."""
    return jax.tree.map(lambda leaf: nodes[leaf.index] if _is_place(leaf) else leaf, tree, is_leaf=_is_place)


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, Node)


def nodes_of_carry(name: str, given: PyTree, returned: PyTree) -> tuple[list[Node], list[tuple[str, Any]], list[Row]]:
    """The nodes of a carry that was given, those of the one that was returned, and a row if their numbers differ."""
    was = [leaf for leaf in jax.tree.leaves(given, is_leaf=_is_place) if _is_place(leaf)]
    now = [(path, node) for path, node in leaves_and_nodes(name, returned) if is_node(node)]
    rows = [] if len(was) == len(now) else [Row(name, f"{len(was)} modules or variables", f"{len(now)}")]
    return was, now, rows


def take_nodes(name: str, given: PyTree, returned: PyTree, parts: Parts) -> PyTree:
    """The carry that was returned with `Node` in the places of its nodes, which must be the same as before.

    A variable that is in the carry by itself may be another one: `parts` then has it in the place of the first.
    """
    was, now, wrong = nodes_of_carry(name, given, returned)
    for node, (path, new) in [] if wrong else zip(was, now, strict=True):
        old = parts.nodes[node.index]
        if isinstance(old, nnx.Variable) and isinstance(new, nnx.Variable):
            parts.nodes[node.index] = new
        elif old is not new:
            wrong.append(Row(path, f"the {type(old).__name__} that was given", f"another {type(new).__name__}"))
    if wrong:
        raise Fault(
            CarryError,
            "{body} returned a carry with different modules than it was given.",
            "Change the variables of the module that the {step} receives, and return that module.",
            header=("leaf", "expected", "came"),
            rows=wrong,
        )
    indices = iter(was)
    return replace_nodes(returned, lambda _: next(indices))


def _check_whole(given: Named, now: Named) -> None:
    """What is given whole to each step keeps its variables; what a step changes of their values is dropped."""
    if given.names != now.names:
        other = sorted(set(given.names) ^ set(now.names))
        raise Fault(
            CarryError,
            f"{{body}} added or removed variables of a module that each step receives whole: {', '.join(other)}.",
            "Create all variables before the scan, or scan over the module, or carry it.",
        )


def check_carried(given: Named, now: Named, nodes: tuple[str, ...]) -> None:
    """What is carried keeps its types and metadata. Which variables and arrays there are, the loop itself compares."""
    if given.names != now.names or given.structure == now.structure:
        return
    pairs = zip(*(variables_of(state_of(named), nodes) for named in (given, now)), strict=False)
    rows = [row for (name, old), (_, new) in pairs for row in differences(name, old, new)]
    if rows:
        raise Fault(
            CarryError,
            "{body} changed the type or the metadata of carried variables.",
            "They must be the same in every step: set them before or after the scan. Only the value of a variable, "
            "an array, may change.",
            header=("leaf", "given", "returned"),
            rows=rows,
        )
