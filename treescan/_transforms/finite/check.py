"""`check_finite`: notes the first step whose carry became NaN or infinite, with what is needed to say why.

One int rides along. Only if it says that a step went wrong, a branch after the loop runs the steps before it once more,
and evaluates that step operation by operation.
"""

from __future__ import annotations

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
from ..._errors import Fault, NonFiniteError, speaking_of
from ..._finite import note
from ..._loop.body import Memo
from ..._loop.loop import Loop, Transform
from ..._loop.run import as_arrays, is_jit_disabled
from ..._trace.hoist import as_loop, flattened, lift
from ..._trace.raw_keys import with_raw_keys
from ..._types import Array, PyTree
from ..layers.turns import run_turns, trace_turns
from ..nest import KeepUnchanged, in_whole_state
from .again import At, Before, Told, case_of, evidence_at, gather, in_branch
from .case import About, Case, Evidence, Outer, numbered, outer_steps, refuse_devices, refuse_effects
from .site import GOOD, Site, Slices, Watched, batch_of, earliest, of_rows, site_of, whole_of, with_heads


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
        _deliver(evidence, case)
    return ys.ys


def _deliver(evidence: Evidence, case: Case) -> None:
    loops, positions, _ = outer_steps()
    try:
        tell(evidence, case, loops, positions)
    except NonFiniteError as error:
        raise Fault(NonFiniteError, str(error), "`treescan.last_nonfinite()` has the carry and x.") from None


def tell(evidence: Evidence, case: Case, loops: Sequence[Outer], positions: Sequence[Array]) -> None:
    """Raises what is known, and where it is traced, has JAX raise it.

    Args:
        evidence: what is known of the first bad step.
        case: what is static of it.
        loops: the checked loops in whose steps this loop ran.
        positions: of these steps, as values of the program that tells it.

    Raises:
        NonFiniteError: if a step went wrong.
    """
    kinds = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in jax.tree.leaves(evidence)]
    structure = jax.tree.structure(evidence)

    def told(first: Any, leaves: Sequence[Any], positions: Sequence[Any]) -> None:
        if int(first) != GOOD:
            within = tuple(loop.at(position) for loop, position in zip(loops, positions, strict=False))
            record = case.record(jax.tree.unflatten(structure, list(map(_known, leaves, kinds))), within)
            note(record)
            raise NonFiniteError(f"{case.about.call}: {record}.")

    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(evidence)]
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        tell_all = in_every_process(told, case.mesh)
        jax.lax.cond(evidence.first != GOOD, tell_all, lambda *given: None, evidence.first, leaves, list(positions))
    else:
        told(evidence.first, leaves, () if any(isinstance(position, Tracer) for position in positions) else positions)


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
class CheckFinite:
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

    def __call__(self, loop: Loop, last: Any = None) -> Loop:
        """The checked loop. `last` is the position that a loop in reverse begins with, if not its highest."""
        if not loop.length or 0 in batch_of(loop):  # there is nothing to look at
            return loop
        refuse_devices()
        loop = with_raw_keys(dataclasses.replace(loop, state=as_arrays(loop.state)))
        site = site_of(
            loop, self.slices, self.around, loop.length - 1 if last is None else last, self.about.numbers(loop)
        )
        refuse_effects(site.hoisted)
        plain, watched = self._in_leaves(loop, site)
        numbers = (GOOD, 0)[: 1 + self.about.ends_early]
        heads = [of_rows(jnp.full(batch_of(loop), number, jnp.int32), loop) for number in numbers]
        axes = (None,) * len(watched) if loop.rows is None else loop.rows.axes.state
        last = loop.length - 1 if loop.reverse else None
        keyed = plain.xs.position is not None
        step = Watched(plain.step, keyed, watched, axes, counts=self.about.ends_early, last=last)
        position = plain.xs.position if self.about.ends_early else jnp.arange(loop.length, dtype=jnp.int32)
        checked = dataclasses.replace(
            with_heads(plain, heads), step=step, xs=plain.xs._replace(position=position), memo=Memo()
        )

        def ys_of(state: list[Array], ys: PyTree) -> PyTree:
            evidence, case = gather(earliest(state[0]), site, self.about, state[1] if self.about.ends_early else None)
            return WithEvidence(ys, (evidence,), (case,))

        return checked.finished(lambda state: state[len(heads) :], ys_of)

    def _in_leaves(self, loop: Loop, site: Site) -> tuple[Loop, tuple[bool, ...]]:
        """The loop with a list of leaves as its state, and for each whether it is looked at: a step may change it."""
        changing = tuple(not fixed for fixed in site.fixed)
        if loop.rows is not None:
            return loop, changing if is_jit_disabled() else (True,) * len(loop.state)
        if is_jit_disabled():
            call = self.about.numbers(loop)
            return dataclasses.replace(flattened(loop if call is None else numbered(loop, call)), trace=None), changing
        if self.about.ends_early:
            return in_whole_state(site.hoisted), changing
        return dataclasses.replace(as_loop(site.hoisted), trace=None), (True,) * sum(changing)


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

    def watch(self, loops: Sequence[Loop]) -> tuple[list[Loop], Watch]:
        """The checked loops, whose state is [the number of the first bad layer, *the leaves of x]."""
        sites = self.sites_of(loops)
        return [_checked(site, place, len(loops)) for place, site in enumerate(sites)], Watch(self, tuple(sites))

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
            sites.append(Site(loop, hoisted, slices, [] if slices is None else whole_of(loop), (), last, roots))
        return sites


def _checked(site: Site, place: int, blocks: int) -> Loop:
    """One of the loops, its layers numbered among those of all."""
    loop = in_leaves(site)
    last = site.last if loop.reverse else None
    changing = tuple(not fixed for fixed in site.fixed)
    step = Watched(loop.step, site.keyed, changing, (None,) * len(changing), last=last)
    xs = loop.xs._replace(position=positions_of(loop, place, blocks))
    state = [jnp.int32(GOOD), *site.hoisted.settled]
    return dataclasses.replace(loop, step=step, state=state, xs=xs, memo=Memo(), trace=None, finish=())


def in_leaves(site: Site) -> Loop:
    """The loop of one block with all leaves of x as its state."""
    return flattened(site.given) if is_jit_disabled() else in_whole_state(site.hoisted)


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
        first, site = state[0], self.sites[0]
        loops = [site.once_more() for site in self.sites]
        position = site.last - first if site.given.reverse else first
        before = before_layer(self.sites, loops, first, jax.lax.stop_gradient(site.hoisted.settled))
        pairs = [self._of_block(place, loop, first, position, before) for place, loop in enumerate(loops)]
        return WithEvidence(ys, tuple(evidence for evidence, _ in pairs), tuple(case for _, case in pairs))

    def _of_block(
        self, place: int, loop: Loop, first: Array, position: Array, before: list[Array]
    ) -> tuple[Evidence, Case]:
        """What is known of a layer, if it is this block's."""
        site, blocks = self.sites[place], len(self.sites)

        def explain(told: Told, first: Array, position: Array, before: list[Array]) -> Evidence:
            there, changing = at_layer(site, loop, before)
            return evidence_at(told, At(first, position // blocks, position), changing, site, there)

        here = (first != GOOD) & (position % blocks == place)
        if not loop.length:
            here = here & False
        evidence, told = in_branch(here, explain, first, position, before)
        return evidence, case_of(site, self.check.abouts[place], told)


def at_layer(site: Site, loop: Loop, leaves: list[Array]) -> tuple[Loop, list[Array]]:
    """The loop of one block where x is known, and the leaves of x that it changes."""
    changing = [leaf for leaf, fixed in zip(leaves, site.fixed, strict=True) if not fixed]
    unchanged = [leaf for leaf, fixed in zip(leaves, site.fixed, strict=True) if fixed]
    return dataclasses.replace(loop, consts=(unchanged, loop.consts[1])), changing


def before_layer(sites: Sequence[Site], loops: Sequence[Loop], first: Array, leaves: list[Array]) -> list[Array]:
    """The leaves of x before a layer: all layers before it run again, in a branch that is taken if there is one.

    Args:
        sites: the blocks.
        loops: their loops as they run once more.
        first: int32[], how many layers run before it; -1: there is none.
        leaves: those of x before the first layer.
    """

    def again(first: Array, leaves: list[Array]) -> list[Array]:
        pairs = enumerate(zip(sites, loops, strict=True))
        before = [_before(site, loop, (place, len(sites)), first, leaves) for place, (site, loop) in pairs]
        state, _ = run_turns(before, None, (None,) * len(before), Memo())
        return state

    return jax.lax.cond(first != GOOD, again, lambda _, leaves: leaves, first, leaves)


def _before(site: Site, loop: Loop, place: tuple[int, int], first: Array, leaves: list[Array]) -> Loop:
    positions = positions_of(loop, *place)
    numbers = site.last - positions if loop.reverse else positions
    step = Before(KeepUnchanged(loop.step, site.fixed), site.keyed)
    xs = loop.xs._replace(x=(numbers, loop.xs.x))
    return dataclasses.replace(loop, step=step, consts=(first, loop.consts[1]), state=leaves, xs=xs)
