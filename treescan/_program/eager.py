"""A program that an eager call compiles once for arrays of the same types.

It is `jax.jit` of the program with two differences, in which `jax.lax.scan` differs from `jax.jit` too:

- Arrays that the body closes over are arguments. `jax.jit` would copy them into the program: that takes their memory a
  second time, and for large weights seconds.
- What comes back as it was given is not an output. `jax.jit` would copy it in each call.

So a program is traced first. Both are read off the trace, which `jax.jit` then runs. Where JAX traces a program once
more, in another of its contexts, they are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer, eval_jaxpr

from .._avals import Array, Leaves, TreeDef
from .._loop.loop import Memo, under_a_trace
from .._trace.equations import variables_of
from .._trace.steps import array_of
from .._transforms.call import Arguments
from .._tree import Static, merge, split

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr


def run_compiled(
    key: tuple[Hashable, ...],
    name: str,
    program: Callable[[Arguments], Any],
    given: Arguments,
    programs: Memo,
    *,
    plain: bool,
    frozen: bool,
    donates: bool,
) -> Any:
    """The results of a program, which an eager call compiles if none was compiled before for a call like it.

    Args:
        key: what else tells calls apart.
        name: what JAX calls the program.
        program: maps the arrays of a call to its results. Hashable.
        given: the arrays.
        programs: what was compiled for the bodies before.
        plain: whether there are no options: they make NumPy arrays of their own, which are constants.
        frozen: whether what is given holds static leaves.
        donates: whether the arrays of `init` are given away.
    """
    leaves, structure = jax.tree.flatten(given, is_leaf=_is_static if frozen else None)
    if under_a_trace(leaves):
        return program(given)
    flags = list(map(_is_static, leaves)) if frozen else [False] * len(leaves)
    statics, arrays = split(flags, leaves) if frozen else ([], leaves)

    def of_arrays(arrays: Leaves) -> Any:
        return program(jax.tree.unflatten(structure, merge(flags, statics, arrays) if frozen else arrays))

    def make() -> Eager:
        kinds = (jax.Array, np.ndarray) if plain else (jax.Array,)
        return Eager(name, of_arrays, kinds, len(jax.tree.leaves(given.init)), donates=donates)

    try:
        call = (Eager, donates, program, *key, structure, *statics, *map(jax.typeof, arrays))
        compiled = programs.keep(call, make)
    except Exception:  # something is no array for JAX, or has no hash
        return program(given)
    return compiled(arrays)


def _is_static(node: object) -> bool:
    return isinstance(node, Static)


class _Trace(NamedTuple):
    """A trace of a program: its jaxpr, and the structure of its results."""

    jaxpr: ClosedJaxpr
    structure: TreeDef


class _Facts(NamedTuple):
    """What is read off a trace.

    Attributes:
        structure: of the results.
        returned: for each leaf of the results the place of the array that it is, among those given and closed over;
            None: it is computed.
        reads: for each array that is given whether the program reads it.
        closed: the arrays that are closed over.
    """

    structure: TreeDef
    returned: tuple[int | None, ...]
    reads: tuple[bool, ...]
    closed: tuple[Array, ...]

    def are(self, other: _Facts) -> bool:
        """Whether they are the same."""
        if self[1:3] != other[1:3] or list(map(id, self.closed)) != list(map(id, other.closed)):
            return False
        try:
            return self.structure == other.structure
        except ValueError:  # an array in a structure
            return False


class _Changed(BaseException):
    """Leaves a trace of `jax.jit` in which a program is another than before."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace


class Eager:
    """A program under `jax.jit`, for arrays of the same types.

    Args:
        name: what JAX calls it.
        program: maps arrays to results.
        kinds: of the arrays that become arguments where they are closed over.
        count: how many of the arrays, the first ones, are those of init.
        donates: whether these are given away.
    """

    def __init__(
        self, name: str, program: Callable[[Leaves], Any], kinds: tuple[type, ...], count: int, *, donates: bool
    ) -> None:
        self._name, self._program, self._kinds, self._count, self._donates = name, program, kinds, count, donates
        self._made: tuple[_Facts, Callable[..., Leaves]] | None = None

    def __call__(self, arrays: Leaves) -> Any:
        """The results."""
        if self._made is None:
            first = [_traced(self._program, arrays)]
        else:
            try:
                return self._run(*self._made, arrays)
            except _Changed as changed:
                first = [changed.trace]
        made = self._compiled(first)
        try:
            return self._run(*made, arrays)
        finally:
            if not first:  # other threads, perhaps in other contexts, must not take the trace
                self._made = made
            first.clear()

    def _run(self, facts: _Facts, compiled: Callable[..., Leaves], arrays: Leaves) -> Any:
        read = list(itertools.compress(arrays, facts.reads))
        donated = sum(facts.reads[: self._count]) if self._donates else 0
        computed = compiled(read[:donated], read[donated:], facts.closed)
        if len(computed) < len(facts.returned):
            known, new = (*arrays, *facts.closed), iter(computed)
            computed = [next(new) if place is None else self._back(known[place], place) for place in facts.returned]
        return jax.tree.unflatten(facts.structure, computed)

    def _back(self, leaf: Any, place: int) -> Any:
        """What is handed back: of init as it was given, of all else an array, as `jax.lax.scan` does."""
        return leaf if place < self._count or isinstance(leaf, jax.Array) else jnp.asarray(leaf)

    def _compiled(self, first: list[_Trace]) -> tuple[_Facts, Callable[..., Leaves]]:
        """What is read off a trace, and the program under `jax.jit`, which takes that trace if it is still there."""
        program, kinds, donates, avals = self._program, self._kinds, self._donates, first[0].jaxpr.in_avals
        facts = _facts_of(first[0], kinds, donates=donates)
        unread = split(facts.reads, avals)[1]

        def run(donated: Leaves, given: Leaves, closed_over: tuple[Array, ...]) -> Leaves:
            arrays = merge(facts.reads, [*donated, *given], unread)
            if first:
                trace = first.pop()
            else:
                trace = _traced(program, arrays)
                if not facts.are(_facts_of(trace, kinds, donates=donates)):
                    raise _Changed(trace)
            jaxpr, values = trace.jaxpr, dict(zip(map(id, facts.closed), closed_over, strict=True))
            consts = [values.get(id(const), const) for const in jaxpr.consts]
            results = eval_jaxpr(jaxpr.jaxpr, consts, *arrays, propagate_source_info=True)
            pairs = zip(results, jaxpr.out_avals, facts.returned, strict=True)
            return [array_of(leaf, aval) for leaf, aval, place in pairs if place is None]

        run.__name__ = run.__qualname__ = self._name
        return facts, jax.jit(run, donate_argnums=(0,) if donates else ())


def _traced(program: Callable[[Leaves], Any], arrays: Sequence[Any]) -> _Trace:
    structures = list[TreeDef]()

    def flat(*arrays: Any) -> Leaves:
        results, structure = jax.tree.flatten(program(list(arrays)))
        structures.append(structure)
        return results

    return _Trace(jax.make_jaxpr(flat)(*arrays), *structures)


def _facts_of(trace: _Trace, kinds: tuple[type, ...], *, donates: bool) -> _Facts:
    jaxpr, consts = trace.jaxpr.jaxpr, trace.jaxpr.consts
    passed = {var: const for var, const in zip(jaxpr.constvars, consts, strict=True) if _is_one(const, kinds)}
    places = {} if donates else {var: place for place, var in enumerate((*jaxpr.invars, *passed))}
    returned = tuple([None if hasattr(atom, "val") else places.get(atom) for atom in jaxpr.outvars])
    atoms = [atom for atom, place in zip(jaxpr.outvars, returned, strict=True) if place is None]
    read = set(variables_of(atoms + [atom for equation in jaxpr.eqns for atom in equation.invars]))
    return _Facts(trace.structure, returned, tuple([var in read for var in jaxpr.invars]), tuple(passed.values()))


def _is_one(const: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a constant is of some kinds, and may be an argument: of a mutable array, a program knows which it is."""
    if not isinstance(const, kinds) or isinstance(const, Tracer):
        return False
    aval = jax.typeof(const)
    return isinstance(aval, ShapedArray) and aval.dtype != jax.dtypes.float0
