"""One step over nnx modules: merges them, calls the body, splits them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeGuard

import jax
from flax import nnx

from ..._avals import PyTree, TreeDef, describe_node, is_mutable, shape_of
from ..._body.signature import SCAN
from ..._errors import ArgumentError, BodyError, BodyFault, CarryFault, Fault, Misuse, Row, TreescanError
from ..._tree import Prefix, is_static, leaves_with_path, same_structure
from ..._types import Axes
from ..._verbs.prepare import run_scan
from ._variables import (
    Graph,
    ModuleAxes,
    Named,
    NodeLike,
    Role,
    State,
    Variable,
    by_name,
    check_level,
    check_shared,
    check_updatable,
    differences,
    filters_of,
    is_axis,
    is_node,
    is_variable,
    leaves_and_nodes,
    replace_nodes,
    spelled,
    spread_roles,
    variables_in,
    variables_of,
)

CONVENTION = dataclasses.replace(SCAN, records=lambda carry, x: (by_name(carry), by_name(x)))
TAG = "treescan"
"""The tag of the `nnx.update_context`, by which modules are told from one side of the loop to the other."""

Groups: TypeAlias = tuple[tuple[Named, Named], ...]
"""For each axis the state of the nodes that has it, and arrays."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Layout:
    """What the steps are given, or return, beside arrays.

    Attributes:
        graph: the structure of the modules.
        tree: the arguments less the carry, or the outputs less the carry; None for modules alone.
        places: for each leaf of the tree the role and the index in what has this role; of a node `"node"` and its
            index among the nodes.
        names: what the nodes are called.
        roles: their roles.
    """

    graph: Graph
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

    nodes: list[NodeLike] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    roles: list[Role] = field(default_factory=list)
    arrays: dict[Role, list[tuple[str, Any]]] = field(default_factory=dict)

    def add_node(self, name: str, node: NodeLike, role: Role) -> int:
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
            raise Misuse(
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
        return Named.of(state, tuple(self.names))

    def groups(self, states: Sequence[Named], axes: Sequence[int]) -> Groups:
        """What has each axis: the state of the nodes, and arrays."""
        return tuple((state, self.named(axis)) for state, axis in zip(states, axes, strict=True))


def split(
    parts: Parts, axes: Sequence[int], metadata: Mapping[str, Any], tag: str | None = TAG
) -> tuple[Graph, list[Named]]:
    """The structure of all nodes, and their arrays: the carried ones, those given whole, and those of each axis."""
    graph, states = split_live(parts, axes, tag)
    if metadata:
        states[2:] = [nnx.spmd.add_axis(state, axis, metadata) for state, axis in zip(states[2:], axes, strict=True)]
    return graph, list(map(parts.state, states))


def split_live(
    parts: Parts, axes: Sequence[int], tag: str | None = None, *, keeps: bool = False
) -> tuple[Graph, list[State]]:
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
                raise Misuse(
                    f"{{call}}: {name} holds a mutable array (a `Ref`), which can be neither scanned over nor carried.",
                    "Create the variable without a reference, so that it holds the array itself.",
                )
    return graph, states


def merge(graph: Graph, states: Sequence[Named], tag: str | None = None, inner: bool | None = None) -> list[NodeLike]:
    """The nodes: with a tag new ones inside of the step, and outside of the loop those that were there, updated.

    Without a tag, they are new, and have no tie to others.
    """
    if not states:
        return []
    with nnx.merge_context(tag, inner) as context:
        nodes: list[NodeLike] = context.merge(graph, *(state.state() for state in states))
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
        args = self._joined(layout, nodes, groups, arrays.values)
        new_carry, out = self._apart(self.f(*_replaced(args, self.carried, fill(carry, nodes))))
        parts = Parts(list(nodes), list(layout.names), list(layout.roles))
        new_carry = take_nodes(args__.names[0], carry, new_carry, parts)
        layout_out, (new_variables, new_whole, *states) = self._take_out(out, parts)
        check_carried(variables, new_variables, layout.names)
        if whole.names != new_whole.names:  # what changes of their values is dropped
            other = sorted(set(whole.names) ^ set(new_whole.names))
            raise CarryFault(
                f"{{body}} added or removed variables of a module that each step receives whole: {', '.join(other)}.",
                "Create all variables before the scan, or scan over the module, or carry it.",
            )
        return Named(args__.names, (new_carry, new_variables)), (layout_out, parts.groups(states, self.axes))

    def run(self, in_axes: Axes, names: list[str], args: tuple[PyTree, ...], options: Mapping[str, Any]) -> PyTree:
        """Runs the step over arguments, which have these names."""
        parts = Parts()
        with nnx.update_context(TAG):
            carry, tree, places = self._take_in(in_axes, names, args, parts, parts)
            check_level(parts.nodes, parts.names)
            graph, (variables, whole, *states) = split(parts, self.axes, {})
            layout = Layout(graph, tree, places, tuple(parts.names), tuple(parts.roles))
            name = names[self.carried] if self.carried is not None else ""
            init = Named((name, ""), (carry, variables))
            xs = (layout, whole, parts.named(None), parts.groups(states, self.axes))
            axes: dict[str, Any] = {"in_axes": (None, None, None, self.axes), "out_axes": (0, self.axes)}
            final, (layout, groups) = run_scan(CONVENTION, self, init, xs, **axes, **options)
            carry, variables = final.values
            nodes = merge(layout.graph, [variables, whole, *(state for state, _ in groups)], TAG, inner=False)
        return self._put_out(layout, fill(carry, nodes), nodes, groups)

    def _joined(self, layout: Layout, nodes: list[NodeLike], groups: Groups, whole: tuple[PyTree, ...] = ()) -> PyTree:
        """The arguments, or the outputs, less the carry."""
        known: dict[Role, Sequence[PyTree]] = {"node": nodes, None: whole}
        known |= {axis: leaves.values for axis, (_, leaves) in zip(self.axes, groups, strict=True)}
        return jax.tree.unflatten(layout.tree, [known[role][i] for role, i in layout.places])

    def _take_in(
        self, in_axes: Axes, names: list[str], args: tuple[PyTree, ...], parts: Parts, carried: Parts
    ) -> tuple[PyTree, TreeDef, tuple[tuple[Role, int], ...]]:
        """Takes the arguments apart, the nodes of the carry to `carried`, and the rest to `parts`.

        Returns the carry with `Node` in the places of nodes, the structure of the rest, and where its leaves are.
        """
        prefix = in_axes if in_axes is not nnx.Carry else (nnx.Carry,)
        if isinstance(prefix, tuple) and len(prefix) != len(args):
            raise Misuse(
                f"{{call}}: `in_axes` has {len(prefix)} entries, but there are {len(args)} arguments: "
                f"{', '.join(names)}.",
                "Give one entry for each argument, including those with a default.",
            )
        carry, rest = None, args
        if self.carried is not None:
            carry = args[self.carried]
            named = [(name, leaf) for name, leaf in leaves_and_nodes(names[self.carried], carry) if is_node(leaf)]
            indices = iter([Node(carried.add_node(name, node, nnx.Carry)) for name, node in named])
            carry = replace_nodes(carry, lambda _: next(indices))
            rest, prefix = _replaced(args, self.carried, None), _replaced(prefix, self.carried, None)
        roles = spread_roles("in_axes", prefix, rest, "args")
        leaves = [leaf for name, arg in zip(names, rest, strict=True) for leaf in leaves_and_nodes(name, arg)]
        for (path, leaf), role in zip(leaves, roles, strict=True):
            if is_axis(role) and not is_node(leaf) and not shape_of(leaf):
                raise Misuse(
                    f"{{call}}: {path} is scanned over axis {role}, but is {describe_node(leaf)}.",
                    "Give None in `in_axes` for a value that every {step} receives whole.",
                )
        places = tuple(parts.add(path, leaf, role) for (path, leaf), role in zip(leaves, roles, strict=True))
        return carry, jax.tree.structure(rest, is_leaf=is_node), places

    def _put_out(self, layout: Layout, carry: PyTree, nodes: list[NodeLike], groups: Groups) -> PyTree:
        out = self._joined(layout, nodes, groups)
        alone = self.returned is not None and not isinstance(self.out_axes.tree, tuple)
        return carry if alone else _replaced(out, self.returned, carry)

    def _without_axis(self, state: Named, axis: int) -> Named:
        removed = nnx.spmd.remove_axis(state.state(), axis, dict(self.metadata))
        leaves, structure = jax.tree.flatten(removed)
        return Named(state.names, tuple(leaves), structure)

    def _apart(self, out: PyTree) -> tuple[PyTree, PyTree]:
        """The carry, and the outputs with None in its place."""
        if self.returned is None:
            return None, out
        axes = self.out_axes.tree
        if not isinstance(axes, tuple):
            return out, None
        if not isinstance(out, tuple) or len(out) != len(axes):
            raise BodyFault(
                f"{{body}} returned {describe_node(out)}, but `out_axes` has {len(axes)} entries.",
                "Return a tuple with one output for each entry. With `out_axes=nnx.Carry`, return only the carry.",
            )
        return out[self.returned], _replaced(out, self.returned, None)

    def _take_out(self, out: PyTree, parts: Parts) -> tuple[Layout, list[Named]]:
        axes = self.out_axes.tree
        if self.returned is not None:
            axes = None if not isinstance(axes, tuple) else tuple(None if a is nnx.Carry else a for a in axes)
        named = leaves_and_nodes("out", out)
        roles = spread_roles("out_axes", axes, out, "out")
        for name, leaf in named:
            if not is_node(leaf) and is_static(leaf):
                raise BodyFault(
                    f"{{body}} returned outputs that are not arrays: {name} is {describe_node(leaf)}.",
                    "Outputs are stacked over the steps, so they must be arrays. Keep other values out of the scan.",
                )
        places = tuple(parts.add(name, leaf, role) for (name, leaf), role in zip(named, roles, strict=True))
        graph, states = split(parts, self.axes, dict(self.metadata), self.tag)
        return Layout(graph, jax.tree.structure(out, is_leaf=is_node), places), states


def _replaced(items: tuple[PyTree, ...], index: int | None, item: PyTree) -> tuple[PyTree, ...]:
    """The items with another one at an index; without an index the same."""
    return items if index is None else (*items[:index], item, *items[index + 1 :])


def fill(tree: PyTree, nodes: Sequence[NodeLike]) -> PyTree:
    """A tree with nodes in their places."""
    return jax.tree.map(lambda leaf: nodes[leaf.index] if _is_place(leaf) else leaf, tree, is_leaf=_is_place)


def _is_place(leaf: object) -> TypeGuard[Node]:
    return isinstance(leaf, Node)


def nodes_of_carry(
    name: str, given: PyTree, returned: PyTree
) -> tuple[list[Node], list[tuple[str, NodeLike]], list[Row]]:
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
        if is_variable(old) and is_variable(new):
            parts.nodes[node.index] = new
        elif old is not new:
            wrong.append(Row(path, f"the {type(old).__name__} that was given", f"another {type(new).__name__}"))
    if wrong:
        raise CarryFault(
            "{body} returned a carry with different modules than it was given.",
            "Change the variables of the module that the {step} receives, and return that module.",
            header=("leaf", "expected", "came"),
            rows=wrong,
        )
    indices = iter(was)
    return replace_nodes(returned, lambda _: next(indices))


def check_carried(given: Named, now: Named, nodes: tuple[str, ...]) -> None:
    """What is carried keeps its types and metadata. Which variables and arrays there are, the loop itself compares."""
    if given.names != now.names or given.structure == now.structure:
        return
    pairs = zip(*(variables_of(named.state(), nodes) for named in (given, now)), strict=False)
    rows = [row for (name, old), (_, new) in pairs for row in differences(name, old, new)]
    if rows:
        raise CarryFault(
            "{body} changed the type or the metadata of carried variables.",
            "They must be the same in every step: set them before or after the scan. Only the value of a variable, "
            "an array, may change.",
            header=("leaf", "given", "returned"),
            rows=rows,
        )


# With `graph=False` or `graph_updates=False`, only the values of variables come out of the loop. The variables that go
# in are held on to. Whatever else a step does to its modules, new variables included, is lost.


Place = tuple[str, Variable]


@dataclass(frozen=True)
class ValueStep(ModuleStep):
    """The body of such a loop. It carries `Named((carry, its modules, variables that each step receives whole))`.

    Attributes:
        tree: whether modules are trees, in which no variable is in two places.
    """

    tag: ClassVar[str | None] = None

    tree: bool = False

    def __call__(self, args__: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        (layout, held), whole, arrays, groups = x
        carry, carried, kept = args__.values
        given = merge(held.graph, [carried])
        nodes = merge(layout.graph, [kept, whole, *(state for state, _ in groups)])
        _, (live, _, *scanned) = split_live(Parts(nodes, list(layout.names), list(layout.roles)), self.axes, keeps=True)
        before = [jax.tree.map(lambda leaf: leaf, state) for state in scanned]
        inside = [variable for node in (*given, *nodes) for _, variable in variables_in(node)]
        args = self._joined(layout, nodes, groups, arrays.values)
        new_carry, out = self._apart(self.f(*_replaced(args, self.carried, fill(carry, given))))
        new_carry, carried = _take_carry(args__.names[0], (carry, new_carry), given, held)
        new_kept = Named.of(live, layout.names)
        check_carried(kept, new_kept, layout.names)
        updates = tuple(_changed(*states, layout.names) for states in zip(before, scanned, strict=True))
        named = leaves_and_nodes("out", out)
        refuse_aliases_of_outputs([pair for pair in named if is_node(pair[1])], inside, tree=self.tree)
        parts = Parts()
        layout_out, states = self._take_out(out, parts)
        outputs = (layout_out, parts.groups(states[2:], self.axes), updates)
        return Named(args__.names, (new_carry, carried, new_kept)), outputs

    def run(self, in_axes: Axes, names: list[str], args: tuple[PyTree, ...], options: Mapping[str, Any]) -> PyTree:
        """Runs the step over arguments, which have these names."""
        parts, carried = Parts(), Parts()
        carry, tree, places = self._take_in(in_axes, names, args, parts, carried)
        refuse_aliases(carried, parts, tree=self.tree)
        check_level(carried.nodes, carried.names)
        held, (inside, *_) = split_live(carried, ())
        graph, live = split_live(parts, self.axes, keeps=True)
        kept, whole, *states = map(parts.state, live)
        layout = Layout(graph, tree, places, tuple(parts.names), tuple(parts.roles))
        name = names[self.carried] if self.carried is not None else ""
        init = Named((name, "", ""), (carry, carried.state(inside), kept))
        of_carry = Layout(held, None, (), tuple(carried.names))
        xs = ((layout, of_carry), whole, parts.named(None), parts.groups(states, self.axes))
        axes: dict[str, Any] = {"in_axes": (None, None, None, self.axes), "out_axes": (0, self.axes, self.axes)}
        final, (layout, groups, updates) = run_scan(CONVENTION, self, init, xs, **axes, **options)
        carry, inside, kept = final.values
        put_back([live[0], *live[2:]], kept, updates, tuple(parts.names))
        nnx.update(carried.nodes, inside.state())
        nodes = merge(layout.graph, [state for state, _ in groups])
        return self._put_out(layout, fill(carry, carried.nodes), nodes, groups)


def _changed(before: State, now: State, nodes: tuple[str, ...]) -> dict[str, Variable]:
    """The variables of a state that are not as they were."""
    pairs = zip(variables_of(before, nodes), variables_of(now, nodes), strict=True)
    return {name: new for (name, old), (_, new) in pairs if not _same(old, new)}


def _same(old: Variable, new: Variable) -> bool:
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=False)
    return same_structure(old, new) and all(a is b for a, b in pairs)


def _take_carry(name: str, carries: tuple[PyTree, PyTree], given: list[NodeLike], held: Layout) -> tuple[PyTree, Named]:
    """The carry that was returned with `Node` in the places of its nodes, and their values.

    A module may be another one if its variables are those that were given.
    """
    was, now, rows = nodes_of_carry(name, *carries)
    for place, (_, new) in zip(was, now, strict=False):
        old = dict(variables_in(given[place.index]))
        rows += [
            Row(spelled(held.names[place.index], path), "the Variable that was given", "another")
            for path, variable in variables_in(new)
            if old.get(path) is not variable
        ]
    if rows:
        raise CarryFault(
            "{body} returned a carry with other variables than it was given.",
            "Change the values of the variables that the {step} receives, and return the same variables.",
            header=("leaf", "expected", "came"),
            rows=rows,
        )
    with nnx.split_context() as context:
        graph, state = context.split([now[was.index(Node(i))][1] for i in range(len(given))])
    if graph != held.graph:
        raise CarryFault(
            f"{{body}} changed the structure of modules in the carry {name}, or the metadata of their variables.",
            "They must be the same in every step: set them before or after the scan. Only values of variables, which "
            "are arrays, may change.",
        )
    places = iter(was)
    return replace_nodes(carries[1], lambda _: next(places)), Named.of(state, held.names)


def refuse_aliases(carried: Parts, parts: Parts, *, tree: bool) -> None:
    """Refuses a variable in two places, of which a loop over values would make two."""
    both = list[Place]()
    for some in (carried, parts):
        places = _places(zip(some.names, some.nodes, strict=True), tree=tree)
        both += places if tree else {id(variable): (name, variable) for name, variable in places}.values()
    _refuse_twice(both, ArgumentError, "{call} got one variable in two places")


def refuse_aliases_of_outputs(out: Sequence[tuple[str, NodeLike]], given: list[Variable], *, tree: bool) -> None:
    """Refuses outputs that hold variables that the step was given, or one variable twice."""
    places = _places(out, tree=tree)
    inputs = [(name, variable) for name, variable in places if any(variable is one for one in given)]
    if inputs:
        raise BodyFault(
            f"{{body}} returned a variable that it was given as an output: {inputs[0][0]}.",
            "Return its value, `variable[...]`, or a copy, `nnx.clone(variable)`. With `graph=True, "
            "graph_updates=True`, a variable may be both.",
        )
    if tree:
        _refuse_twice(places, BodyError, "{body} returned one variable in two places")


def _places(nodes: Iterable[tuple[str, NodeLike]], *, tree: bool) -> list[Place]:
    """The variables of nodes with their names: in all places if nodes are trees, and otherwise each once in a node."""
    if not tree:
        return [(spelled(name, path), value) for name, node in nodes for path, value in variables_in(node)]
    leaves = [leaf for name, node in nodes for leaf in leaves_with_path(name, node, is_leaf=is_variable)]
    return [(name, leaf) for name, leaf in leaves if is_variable(leaf)]


def _refuse_twice(places: Iterable[Place], kind: type[TreescanError], what: str) -> None:
    seen: dict[int, str] = {}
    for name, variable in places:
        if id(variable) in seen:
            raise Fault(
                kind,
                f"{what}: {seen[id(variable)]} and {name} are the same {type(variable).__name__}.",
                "Without updates of graphs, each variable is in one place. Pass `graph=True, graph_updates=True`, or "
                "make a copy with `nnx.clone`.",
            )
        seen[id(variable)] = name


def put_back(
    live: Sequence[State], kept: Named, updates: Sequence[Mapping[str, Variable]], nodes: tuple[str, ...]
) -> None:
    """Updates the variables that went in: those given whole to every step, and those that steps changed."""
    whole, *scanned = (variables_of(state, nodes) for state in live)
    values = [value for _, value in variables_of(kept.state(), nodes)]
    pairs = list(zip(whole, values, strict=True))
    for variables, found in zip(scanned, updates, strict=True):
        pairs += [(place, found[place[0]]) for place in variables if place[0] in found]
    for place, _ in pairs:
        check_updatable(*place)
    for (_, variable), value in pairs:
        variable.update_from_state(value)
