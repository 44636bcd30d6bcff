"""Raises an error if a body changes a module of flax.nnx outside its carry, and does not return the change.

A step receives a module of its own, which is gone after the step. So a changed variable is an error, unless the body
returns the new value. Transforms of nnx within the body, for example `nnx.remat`, write all variables again. A second
trace then distinguishes variables that were computed from those that were only passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.tree_util as jtu

from .._errors import BodyError, Fault, Row
from .._flax import holds, variable_classes
from .._trace.equations import origins
from .._tree import freeze_static, leaves_with_path, thaw_static
from .._types import PyTree, TreeDef

Call: TypeAlias = Callable[[tuple[PyTree, ...]], Any]
"""Calls the body with other values in the places of what is watched."""


class Variable(NamedTuple):
    """A variable: the name of its type, and its arrays."""

    kind: str
    leaves: list[Any]


class Watched(NamedTuple):
    """What a body is given beside its carry, and the variables in it before the call.

    Attributes:
        roots: what each of the arguments is called.
        given: the arguments.
        arrays: their arrays.
        structure: all else of them.
        variables: the variables by their paths.
    """

    roots: tuple[str, ...]
    given: tuple[PyTree, ...]
    arrays: list[Any]
    structure: TreeDef
    variables: dict[str, Variable]

    def refuse_changes(self, out: Any, call: Call) -> None:
        """Refuses changes of variables whose new values are not among what the body returned.

        Raises:
            Fault: for a `BodyError` that lists all of them.
        """
        returned = {id(leaf) for leaf in jtu.tree_leaves(out)}
        lost = {
            path: variable
            for path, variable in _variables(self.roots, self.given).items()
            if any(id(leaf) not in returned for leaf in self._new_leaves(path, variable))
        }
        if lost and not lost.keys().isdisjoint(self.variables):
            passed_on = self._passed_on(call)
            lost = {path: variable for path, variable in lost.items() if path not in passed_on}
        if lost:
            raise Fault(
                BodyError,
                "{body} changed variables of modules that it was given, and the changes would be lost.",
                "`treescan.integrations.nnx.scan` runs a {step} with modules and updates them in place. If nothing "
                "should change, call the module's `eval()` first. Or let the {step} return the changes.",
                header=("leaf", "variable", "is"),
                rows=[
                    Row(path, variable.kind, "changed" if path in self.variables else "new", "")
                    for path, variable in lost.items()
                ],
            )

    def _new_leaves(self, path: str, variable: Variable) -> list[Any]:
        known = {id(leaf) for leaf in self.variables[path].leaves} if path in self.variables else set[int]()
        return [leaf for leaf in variable.leaves if id(leaf) not in known]

    def _passed_on(self, call: Call) -> set[str]:
        """The paths of variables whose arrays come back as they went in, through whatever functions."""

        def run(arrays: list[Any]) -> dict[str, list[Any]]:
            given = thaw_static(jtu.tree_unflatten(self.structure, arrays))
            call(given)
            now = _variables(self.roots, given)
            return {path: now[path].leaves for path in self.variables if path in now}

        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(self.arrays)
        numbers = list(range(len(self.arrays)))
        came = jtu.tree_unflatten(jtu.tree_structure(shapes), origins(jaxpr.jaxpr, numbers))
        went = _variables(self.roots, thaw_static(jtu.tree_unflatten(self.structure, numbers)))
        return {path for path in came if came[path] == went[path].leaves}


def watch(roots: tuple[str, ...], given: tuple[PyTree, ...]) -> Watched | None:
    """Notes the variables in arguments; None if there are none."""
    if not holds(given, variable_classes()):
        return None
    variables = _variables(roots, given)
    arrays, structure = jtu.tree_flatten(freeze_static(given, scalars=True))
    return Watched(roots, given, arrays, structure, variables)


def _variables(roots: tuple[str, ...], given: tuple[PyTree, ...]) -> dict[str, Variable]:
    kinds = variable_classes()
    named = [
        pair
        for root, tree in zip(roots, given, strict=True)
        for pair in leaves_with_path(root, tree, is_leaf=lambda node: isinstance(node, kinds))
    ]
    return {
        path: Variable(type(node).__name__, jtu.tree_leaves(node)) for path, node in named if isinstance(node, kinds)
    }
