"""`scan` with `graph=False` or `graph_updates=False`: only the values of variables come out of the loop.

The variables that go in are held on to. Whatever else a step does to its modules, new variables included, is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx

from ..._errors import ArgumentError, BodyError, CarryError, Fault, Row, TreescanError
from ..._tree import leaves_with_path
from ..._types import PyTree
from ._named import (
    Named,
    is_node,
    leaves_and_nodes,
    named_state,
    replace_nodes,
    spelled,
    state_of,
    variables_in,
    variables_of,
)
from ._roles import check_updatable
from ._step import ModuleStep, Node, Parts, check_carried, fill, merge, nodes_of_carry, split_live

Place = tuple[str, "nnx.Variable[Any]"]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Held:
    """The modules in the carry, beside their values.

    Attributes:
        graph: their structure.
        names: what they are called.
    """

    graph: Any
    names: tuple[str, ...]


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
        new_carry, out = self._apart(self.f(*self._arguments(layout, nodes, fill(carry, given), arrays, groups)))
        new_carry, carried = _take_carry(args__.names[0], (carry, new_carry), given, held)
        new_kept = named_state(live, layout.names)
        check_carried(kept, new_kept, layout.names)
        updates = tuple(_changed(*states, layout.names) for states in zip(before, scanned, strict=True))
        named = leaves_and_nodes("out", out)
        refuse_aliases_of_outputs([pair for pair in named if is_node(pair[1])], inside, tree=self.tree)
        parts = Parts()
        layout_out, states = self._take_out(out, parts)
        outputs = (layout_out, parts.groups(states[2:], self.axes), updates)
        return Named(args__.names, (new_carry, carried, new_kept)), outputs


def _changed(before: PyTree, now: PyTree, nodes: tuple[str, ...]) -> dict[str, nnx.Variable[Any]]:
    """The variables of a state that are not as they were."""
    pairs = zip(variables_of(before, nodes), variables_of(now, nodes), strict=True)
    return {name: new for (name, old), (_, new) in pairs if not _same(old, new)}


def _same(old: nnx.Variable[Any], new: nnx.Variable[Any]) -> bool:
    was: Any = jax.tree.structure(old)
    if was != jax.tree.structure(new):
        return False
    return all(a is b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))


def _take_carry(name: str, carries: tuple[PyTree, PyTree], given: list[Any], held: Held) -> tuple[PyTree, Named]:
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
        raise Fault(
            CarryError,
            "{body} returned a carry with other variables than it was given.",
            "Change the values of the variables that the {step} receives, and return the same variables.",
            header=("leaf", "expected", "came"),
            rows=rows,
        )
    with nnx.split_context() as context:
        graph, state = context.split([now[was.index(Node(i))][1] for i in range(len(given))])
    if graph != held.graph:
        raise Fault(
            CarryError,
            f"{{body}} changed the structure of modules in the carry {name}, or the metadata of their variables.",
            "They must be the same in every step: set them before or after the scan. Only values of variables, which "
            "are arrays, may change.",
        )
    places = iter(was)
    return replace_nodes(carries[1], lambda _: next(places)), named_state(state, held.names)


def refuse_aliases(carried: Parts, parts: Parts, *, tree: bool) -> None:
    """Refuses a variable in two places, of which a loop over values would make two."""
    places = [_places(zip(some.names, some.nodes, strict=True), tree=tree) for some in (carried, parts)]
    both = [place for group in places for place in (group if tree else _once(group))]
    _refuse_twice(both, ArgumentError, "{call} got one variable in two places")


def refuse_aliases_of_outputs(out: Sequence[tuple[str, Any]], given: list[Any], *, tree: bool) -> None:
    """Refuses outputs that hold variables that the step was given, or one variable twice."""
    places = _places(out, tree=tree)
    inputs = [(name, variable) for name, variable in places if any(variable is one for one in given)]
    if inputs:
        raise Fault(
            BodyError,
            f"{{body}} returned a variable that it was given as an output: {inputs[0][0]}.",
            "Return its value, `variable[...]`, or a copy, `nnx.clone(variable)`. With `graph=True, "
            "graph_updates=True`, a variable may be both.",
        )
    if tree:
        _refuse_twice(places, BodyError, "{body} returned one variable in two places")


def _places(nodes: Iterable[tuple[str, Any]], *, tree: bool) -> list[Place]:
    """The variables of nodes with their names: in all places if nodes are trees, and otherwise each once in a node."""
    if not tree:
        return [(spelled(name, path), value) for name, node in nodes for path, value in variables_in(node)]
    leaves = [
        leaf
        for name, node in nodes
        for leaf in leaves_with_path(name, node, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    ]
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, nnx.Variable)]


def _once(places: Iterable[Place]) -> list[Place]:
    return list({id(variable): (name, variable) for name, variable in places}.values())


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
    live: Sequence[PyTree], kept: Named, updates: Sequence[Mapping[str, nnx.Variable[Any]]], nodes: tuple[str, ...]
) -> None:
    """Updates the variables that went in: those given whole to every step, and those that steps changed."""
    whole, *scanned = (variables_of(state, nodes) for state in live)
    values = [value for _, value in variables_of(state_of(kept), nodes)]
    pairs = list(zip(whole, values, strict=True))
    for variables, found in zip(scanned, updates, strict=True):
        pairs += [(place, found[place[0]]) for place in variables if place[0] in found]
    for place, _ in pairs:
        check_updatable(*place)
    for (_, variable), value in pairs:
        variable.update_from_state(value)
