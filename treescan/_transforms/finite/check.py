"""`check_finite`: notes the first step whose carry became NaN or infinite, with what is needed to say why.

One int rides along. Only if it says that a step went wrong, a branch after the loop runs the steps before it once more,
and evaluates that step operation by operation.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from ..._avals import is_key, is_sharded
from ..._axes import LeafAxes
from ..._errors import Fault, NonFiniteError, speaking_of
from ..._finite import note
from ..._loop.body import Memo
from ..._loop.loop import Loop, Step, Transform
from ..._loop.run import as_arrays, is_jit_disabled
from ..._trace.hoist import as_loop, flattened, lift
from ..._trace.raw_keys import with_raw_keys
from ..._types import Array, PyTree
from ..layers.turns import run_turns, trace_turns
from ..nest import KeepUnchanged, in_whole_state
from .again import At, Before, Told, case_of, evidence_at, gather, in_branch
from .case import About, Case, Evidence, OuterSteps, numbered, outer_steps, refuse_devices, refuse_effects
from .site import (
    GOOD,
    Site,
    Slices,
    Watched,
    batch_of,
    earliest,
    of_rows,
    site_of,
    traced_as_it_runs,
    with_heads,
)


class WithEvidence(NamedTuple):
    """The outputs of a checked loop, on their way to `deliver`.

    Attributes:
        ys: the outputs.
        evidence: what is known of the first bad step, for each body that may have run it.
        cases: what is static of these.
    """

    ys: PyTree
    evidence: tuple[Evidence, ...]
    cases: tuple[Case, ...]


def deliver(ys: PyTree) -> PyTree:
    """The outputs of a loop, once its evidence was read.

    Raises:
        NonFiniteError: if a step went wrong, and that is known here: under a trace JAX raises a runtime error.
    """
    if not isinstance(ys, WithEvidence):
        return ys
    for evidence, case in zip(ys.evidence, ys.cases, strict=True):
        try:
            tell(evidence, case, outer_steps())
        except NonFiniteError as error:
            raise Fault(NonFiniteError, str(error), "`treescan.last_nonfinite()` has the carry and x.") from None
    return ys.ys


def tell(evidence: Evidence, case: Case, outer: OuterSteps) -> None:
    """Raises what is known, and where it is traced, has JAX raise it.

    Args:
        evidence: what is known of the first bad step.
        case: what is static of it.
        outer: the steps in which this loop ran; their positions are values of the program that tells it.

    Raises:
        NonFiniteError: if a step went wrong.
    """
    leaves, structure = jax.tree.flatten(evidence)
    kinds = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in leaves]

    def told(first: Any, leaves: Sequence[Any], positions: Sequence[Any]) -> None:
        if int(first) != GOOD:
            within = (loop._replace(step=int(at)) for loop, at in zip(outer.loops, positions, strict=False))
            record = case.record(jax.tree.unflatten(structure, list(map(_known, leaves, kinds))), tuple(within))
            note(record)
            raise NonFiniteError(f"{case.about.call}: {record}.")

    leaves = [jax.random.key_data(leaf) if kind else leaf for leaf, kind in zip(leaves, kinds, strict=True)]
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        tell_all, given = in_every_process(told, case.mesh), (evidence.first, leaves, list(outer.positions))
        jax.lax.cond(evidence.first != GOOD, tell_all, lambda *given: None, *given)
    else:
        traced = any(isinstance(position, Tracer) for position in outer.positions)
        told(evidence.first, leaves, () if traced else outer.positions)


def in_every_process(told: Callable[..., None], mesh: Any) -> Callable[..., None]:
    """Calls back with arrays, whole, in each process that runs the program.

    JAX runs a callback in the process of the first device alone. An error that is raised there alone leaves the others
    waiting for that process. So each device of a mesh calls back, where there are several processes.
    """
    call = functools.partial(jax.debug.callback, told)
    if mesh is None or jax.process_count() == 1:
        return call

    everywhere = PartitionSpec()

    def whole(leaf: Array) -> Array:
        return jax.sharding.reshard(leaf, NamedSharding(mesh, everywhere)) if is_sharded(leaf) else leaf

    def tell(*given: Any) -> None:
        each = jax.shard_map(call, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        each(*jax.tree.map(whole, given))

    return tell


def _known(leaf: Any, kind: Any) -> Any:
    """A leaf of the evidence in NumPy, whole, where processes hold parts of it; a key is one again."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    known = np.asarray(leaf)
    return known if kind is None else jax.random.wrap_key_data(jnp.asarray(known), impl=kind)


@dataclass(frozen=True)
class Check(abc.ABC):
    """`check_finite`.

    Attributes:
        about: the words for messages about the loop.
        slices: what is scanned over, where some leaves are given whole; None: none are.
        around: what is put around a step of rows.
    """

    about: About
    slices: Slices | None = None
    around: tuple[Transform, ...] = ()
    moves = True
    deliver = staticmethod(deliver)

    def __call__(self, loop: Loop, last: Any = None) -> Loop:
        """The checked loop. `last` is the position that a loop in reverse begins with, if not its highest."""
        if not loop.length or 0 in batch_of(loop):  # there is nothing to look at
            return loop
        refuse_devices()
        loop = with_raw_keys(dataclasses.replace(loop, state=as_arrays(loop.state)))
        hoisted = traced_as_it_runs(self._numbered(loop))
        refuse_effects(hoisted)
        last = loop.length - 1 if last is None else last
        return self.watch(loop, site_of(loop, hoisted, self.slices, last, around=self.around))

    @abc.abstractmethod
    def watch(self, loop: Loop, site: Site) -> Loop:
        """The checked loop, of its site."""

    def _numbered(self, loop: Loop) -> Loop:
        """The loop; the loops within its steps are told of the step if its position is known before the loop runs."""
        return loop if self.about.ends_early or loop.rows is not None else numbered(loop, self.about.call)

    def in_leaves(self, loop: Loop, site: Site) -> Loop:
        """The loop with a list of leaves as its state."""
        if loop.rows is not None:
            return loop
        if self.about.ends_early:
            return in_whole_state(site.hoisted)
        return dataclasses.replace(as_loop(site.hoisted), trace=None)

    def around_steps(
        self, kind: Callable[..., Step], loop: Loop, heads: list[Array], where: LeafAxes | None = None, **told: Any
    ) -> Loop:
        """The loop with a step of a kind around its own, and with these leaves before its state."""
        early, last = self.about.ends_early, loop.length - 1 if loop.reverse else None
        step = kind(step=loop.step, keyed=loop.xs.position is not None, counts=early, last=last, **told)
        position = loop.xs.position if early else jnp.arange(loop.length, dtype=jnp.int32)
        xs = loop.xs._replace(position=position)
        return dataclasses.replace(with_heads(loop, heads, where), step=step, xs=xs, memo=Memo())


@dataclass(frozen=True)
class CheckFinite(Check):
    """`check_finite=True`."""

    def watch(self, loop: Loop, site: Site) -> Loop:
        """The checked loop, of its site."""
        early, plain = self.about.ends_early, self.in_leaves(loop, site)
        if is_jit_disabled() and loop.rows is None:
            plain = dataclasses.replace(flattened(self._numbered(loop)), trace=None)
        watched = tuple(not fixed for fixed in site.fixed)
        if len(watched) > len(plain.state):  # those that no step changes have left the state
            watched = (True,) * len(plain.state)
        axes = (None,) * len(watched) if loop.rows is None else loop.rows.axes.state
        heads = [of_rows(jnp.full(batch_of(loop), number, jnp.int32), loop) for number in (GOOD, 0)[: 1 + early]]
        checked = self.around_steps(Watched, plain, heads, watched=watched, axes=axes)

        def ys_of(state: list[Array], ys: PyTree) -> PyTree:
            evidence, case = gather(earliest(state[0]), site, self.about, state[1] if early else None)
            return WithEvidence(ys, (evidence,), (case,))

        return checked.finished(lambda state: state[len(heads) :], ys_of)


@dataclass(frozen=True)
class CheckLayers:
    """`check_finite` of a verb over layers.

    Attributes:
        abouts: the words for messages about each block.
        slices: what the layers of each are scanned over, where some leaves are given whole; None: none are.
        roots: what the arguments of each are called that are a layer's own.
    """

    abouts: tuple[About, ...]
    slices: tuple[Slices | None, ...]
    roots: tuple[tuple[str, ...], ...]
    no_forward_mode = None

    def watch(self, loops: Sequence[Loop]) -> tuple[list[Loop], Watch]:
        """The checked loops, whose state is [the number of the first bad layer, *the leaves of x]."""
        sites = self.sites_of(loops)
        parts = [tuple(not fixed for fixed in site.fixed) for site in sites]
        others = [{"watched": changing, "axes": (None,) * len(changing)} for changing in parts]
        state = [jnp.int32(GOOD), *sites[0].hoisted.settled]
        return numbered_layers(sites, Watched, state, others), Watch(self, tuple(sites))

    def sites_of(self, loops: Sequence[Loop]) -> list[Site]:
        """The sites of the blocks.

        Raises:
            Fault: for an `ArgumentError` if a block cannot be run once more, or devices run parts of it.
        """
        refuse_devices()
        with jax.disable_jit(False):
            traced = [lift(hoisted) for hoisted in trace_turns(loops)]
        last, sites = sum(loop.length for loop in loops) - 1, list[Site]()
        for loop, hoisted, slices, roots in zip(loops, traced, self.slices, self.roots, strict=True):
            with speaking_of(loop.body.function):
                refuse_effects(hoisted)
            sites.append(site_of(loop, hoisted, slices, last, roots=roots))
        return sites


def numbered_layers(
    sites: Sequence[Site], step: Callable[..., Step], state: list[Array], others: Sequence[dict[str, Any]]
) -> list[Loop]:
    """The loops of blocks, their layers numbered among those of all, with a step around that of each."""
    loops = list[Loop]()
    for place, (site, more) in enumerate(zip(sites, others, strict=True)):
        loop = flattened(site.given) if is_jit_disabled() else in_whole_state(site.hoisted)
        around = step(step=loop.step, keyed=site.keyed, last=site.last if loop.reverse else None, **more)
        xs = loop.xs._replace(position=positions_of(loop, place, len(sites)))
        loops.append(dataclasses.replace(loop, step=around, state=state, xs=xs, memo=Memo(), trace=None, finish=()))
    return loops


def positions_of(loop: Loop, place: int, blocks: int) -> Array:
    """int32[n]: the numbers of a block's layers among those of all."""
    return place + blocks * jnp.arange(loop.length, dtype=jnp.int32)


@dataclass(frozen=True, eq=False)
class Watch:
    """Checked layers that have run, for their evidence."""

    check: CheckLayers
    sites: tuple[Site, ...]

    def x_of(self, state: list[Array]) -> PyTree:
        """What the last layer returned, of a state."""
        return jax.tree.unflatten(self.sites[0].hoisted.structure, state[1:])

    def evidence(self, state: list[Array], ys: PyTree) -> WithEvidence:
        """The outputs, with what is known of the first bad layer."""
        first, site, blocks = state[0], self.sites[0], len(self.sites)
        loops = [site.once_more() for site in self.sites]
        position = site.last - first if site.given.reverse else first
        before = before_layer(self.sites, loops, first, jax.lax.stop_gradient(site.hoisted.settled))
        evidence, cases = list[Evidence](), list[Case]()
        for place, (site, loop, about) in enumerate(zip(self.sites, loops, self.check.abouts, strict=True)):

            def explain(
                told: Told, first: Array, position: Array, before: list[Array], site: Site = site, loop: Loop = loop
            ) -> Evidence:
                there, changing = site.in_layer(loop, before)
                return evidence_at(told, At(first, position // blocks, position), changing, site, there)

            here = (first != GOOD) & (position % blocks == place)
            found, told = in_branch(here if loop.length else here & False, explain, first, position, before)
            evidence.append(found)
            cases.append(case_of(site, about, told))
        return WithEvidence(ys, tuple(evidence), tuple(cases))


def before_layer(sites: Sequence[Site], loops: Sequence[Loop], first: Array, leaves: list[Array]) -> list[Array]:
    """The leaves of x before a layer: all layers before it run again, in a branch that is taken if there is one.

    Args:
        sites: the blocks.
        loops: their loops as they run once more.
        first: int32[], how many layers run before it; -1: there is none.
        leaves: those of x before the first layer.
    """

    def again(first: Array, leaves: list[Array]) -> list[Array]:
        before = list[Loop]()
        for place, (site, loop) in enumerate(zip(sites, loops, strict=True)):
            positions = positions_of(loop, place, len(sites))
            numbers = site.last - positions if loop.reverse else positions
            step = Before(KeepUnchanged(loop.step, site.fixed), site.keyed)
            xs = loop.xs._replace(x=(numbers, loop.xs.x))
            before.append(dataclasses.replace(loop, step=step, consts=(first, loop.consts[1]), state=leaves, xs=xs))
        state, _ = run_turns(before, None, (None,) * len(before), Memo())
        return state

    return jax.lax.cond(first != GOOD, again, lambda _, leaves: leaves, first, leaves)
