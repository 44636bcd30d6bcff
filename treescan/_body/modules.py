"""Modules of flax that a body is given, or closes over: changes of them that would be lost. Loaded where flax is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.tree_util as jtu

from .._avals import Array, PyTree, TreeDef
from .._errors import BodyFault, Row
from .._flax import refusals_of_changes, variable_classes
from .._trace.equations import origins
from .._tree import freeze_static, leaves_with_path, path_str, thaw_static

_P = ParamSpec("_P")
_T = TypeVar("_T")


def call_watched(function: Callable[_P, _T], *arguments: _P.args, **keywords: _P.kwargs) -> _T:
    """Calls a function of the user's where flax is imported.

    Raises:
        Fault: for a `BodyError` if it changes a module of flax that belongs to another trace.
    """
    try:
        with watching_linen():
            return function(*arguments, **keywords)
    except refusals_of_changes() as error:
        raise BodyFault(
            "{body} changed a module of flax that was made outside of the {step}, for example the counter of a "
            f"`Dropout`, or the statistics of a `BatchNorm`: {str(error).split(' (http')[0]}.",
            "Put the module into {init}, and return it in {the_carry}. Or pass it as an argument to "
            "`treescan.integrations.nnx.scan`, which updates modules in place. For flax.linen, it is "
            "`treescan.integrations.flax.scan`, or `treescan.lifting.lift`.",
            "If nothing should change, call the module's `eval()` before the loop.",
            cause=error,
        ) from None


def watching_linen() -> contextlib.AbstractContextManager[object]:
    """Looks at each call of a module of flax.linen, if that is imported.

    A module keeps its variables in a scope. If the scope is older than the loop, a variable that a step writes to it
    is a tracer that leaves the loop: JAX raises an error where it is used, which may be far away.

    Raises:
        Fault: for a `BodyError` that lists such variables.
    """
    linen, tracers = sys.modules.get("flax.linen"), sys.modules.get("flax.core.tracers")
    if linen is None or tracers is None:
        return contextlib.nullcontext()
    current: Callable[[], object] = tracers.current_trace
    inside = current()

    def look(
        function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object], context: Any
    ) -> object:
        scope = context.module.scope
        level = None if scope is None else getattr(scope.root, "trace_level", None)
        if level is None or level in (inside, current()):
            return function(*args, **kwargs)
        before = variables_of(context.module)
        out = function(*args, **kwargs)
        rows = [
            Row(path, "changed" if path in before else "new", "")
            for path, leaf in variables_of(context.module).items()
            if before.get(path) is not leaf
        ]
        if rows:
            raise BodyFault(
                "{body} made or changed variables of a flax.linen module, and the {step} does not return them. They "
                "would leave the loop as tracers, and JAX would raise an error where they are used.",
                "Use `treescan.integrations.flax.scan`, which takes a module as its body, or `treescan.lifting.lift`.",
                "Or make the variables before the loop, `variables = module.init(...)`, and put them into {init} or "
                "close over them: the {step} calls `module.apply(variables, ...)`.",
                header=("variable", "is"),
                rows=rows,
            )
        return out

    def variables_of(module: Any) -> dict[str, object]:
        name = "/".join(module.path) or type(module).__name__
        return {path_str(name, path): leaf for path, leaf in jtu.tree_flatten_with_path(module.variables)[0]}

    return linen.intercept_methods(look)


Call: TypeAlias = Callable[[tuple[PyTree, ...]], object]
"""Calls the body with other values in the places of what is watched."""


class Variable(NamedTuple):
    """A variable: the name of its type, and its arrays."""

    kind: str
    leaves: list[Array]


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
    arrays: list[Array]
    structure: TreeDef
    variables: dict[str, Variable]

    @classmethod
    def of(cls, roots: tuple[str, ...], given: tuple[PyTree, ...]) -> Watched:
        """Notes the variables of nnx in arguments."""
        arrays, structure = jtu.tree_flatten(freeze_static(given, scalars=True))
        return cls(roots, given, arrays, structure, _module_variables(roots, given))

    def refuse_changes(self, out: PyTree, call: Call) -> None:
        """Refuses changes of variables whose new values are not among what the body returned.

        Raises:
            Fault: for a `BodyError` that lists all of them.
        """
        kept = {id(leaf) for leaf in jtu.tree_leaves(out)}
        before = {path: {id(leaf) for leaf in variable.leaves} for path, variable in self.variables.items()}
        lost = {
            path: variable
            for path, variable in _module_variables(self.roots, self.given).items()
            if any(id(leaf) not in kept | before.get(path, set()) for leaf in variable.leaves)
        }
        if lost and not lost.keys().isdisjoint(self.variables):
            passed_on = self._passed_on(call)
            lost = {path: variable for path, variable in lost.items() if path not in passed_on}
        if lost:
            raise BodyFault(
                "{body} changed variables of modules that it was given, and the changes would be lost.",
                "`treescan.integrations.nnx.scan` runs a {step} with modules and updates them in place. If nothing "
                "should change, call the module's `eval()` first. Or let the {step} return the changes.",
                header=("leaf", "variable", "is"),
                rows=[
                    Row(path, variable.kind, "changed" if path in before else "new") for path, variable in lost.items()
                ],
            )

    def _passed_on(self, call: Call) -> set[str]:
        """The paths of variables whose arrays come back as they went in, through whatever functions."""

        def run(arrays: list[Array]) -> dict[str, list[Array]]:
            given = thaw_static(jtu.tree_unflatten(self.structure, arrays))
            call(given)
            now = _module_variables(self.roots, given)
            return {path: now[path].leaves for path in self.variables if path in now}

        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(self.arrays)
        numbers = list(range(len(self.arrays)))
        came = jtu.tree_unflatten(jtu.tree_structure(shapes), origins(jaxpr.jaxpr, numbers))
        went = _module_variables(self.roots, thaw_static(jtu.tree_unflatten(self.structure, numbers)))
        return {path for path in came if came[path] == went[path].leaves}


def _module_variables(roots: tuple[str, ...], given: tuple[PyTree, ...]) -> dict[str, Variable]:
    kinds = variable_classes()
    named = [
        pair
        for root, tree in zip(roots, given, strict=True)
        for pair in leaves_with_path(root, tree, is_leaf=lambda node: isinstance(node, kinds))
    ]
    return {
        path: Variable(type(node).__name__, jtu.tree_leaves(node)) for path, node in named if isinstance(node, kinds)
    }
