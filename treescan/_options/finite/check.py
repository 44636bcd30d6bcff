"""`check_finite`: notes the first step whose carry became NaN or infinite, and raises it or returns a `FiniteReport`.

One int rides along. Only if it says that a step went wrong, a branch after the loop runs the steps before it once more,
and evaluates that step operation by operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from ..._avals import Array, LeafAxes, as_arrays, is_sharded
from ..._body.call import names_of
from ..._body.signature import FORI
from ..._errors import Fault, NonFiniteError, TracedMisuse, describe_body, named_options, speaking_of
from ..._loop.feed import Slot
from ..._loop.loop import Loop, Result, is_jit_disabled
from ..._program.nest import in_whole_state
from ..._rows.leaves import any_of_all, on_each_device
from ..._trace.hoist import flattened, restoring
from ..._trace.raw_keys import as_numbers, impls_of, keys_of, with_raw_keys
from ..._transforms.call import Arguments, Call
from ..._transforms.transform import REPORT, Stage, Transform
from ..._tree import short_repr
from .case import (
    About,
    Case,
    Evidence,
    Slices,
    check_value,
    note,
    numbered,
    outer_steps,
    refuse_devices,
    refuse_effects,
)
from .site import (
    GOOD,
    Site,
    Watched,
    batch_of,
    case_of,
    earliest,
    evidence_of_step,
    of_rows,
    positions_of,
    traced_as_it_runs,
    with_heads,
)

EVIDENCE: Slot[tuple[tuple[Evidence, Case], ...]] = Slot("evidence")
"""Of a result: what is known of the first bad step, and what is static of it, for each body that may have run it."""


def deliver(found: Sequence[tuple[Evidence, Case]]) -> None:
    """Tells what is known of the first bad step.

    Raises:
        NonFiniteError: if a step went wrong, and that is known here: under a trace JAX raises a runtime error.
    """
    for evidence, case in found:
        try:
            _tell(evidence, case)
        except NonFiniteError as error:
            cure = "`treescan.last_nonfinite()` has the carry and x."
            raise Fault(NonFiniteError, str(error), cure, record=error.record) from None


def _tell(evidence: Evidence, case: Case) -> None:
    """Raises what is known, and where it is traced, has JAX raise it."""
    impls, numbers, outer = impls_of(evidence), as_numbers(evidence), outer_steps()

    def told(first: Any, numbers: Any, positions: Sequence[Any]) -> None:
        if int(first) != GOOD:
            within = (loop.after(*at) for loop, at in zip(outer.loops, positions, strict=False))
            record = case.record(keys_of(jax.tree.map(_known, numbers), impls), tuple(within))
            note(record)
            error = NonFiniteError(f"{case.about.call}: {record}.")
            error.record = record
            raise error

    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(numbers)):
        tell_all, given = in_every_process(told, case.mesh), (evidence.first, numbers, list(outer.positions))
        jax.lax.cond(any_of_all(evidence.first != GOOD), tell_all, lambda *given: None, *given)
    else:
        traced = any(isinstance(position, Tracer) for position in jax.tree.leaves(outer.positions))
        told(evidence.first, numbers, () if traced else outer.positions)


def in_every_process(told: Callable[..., None], mesh: Any) -> Callable[..., None]:
    """Calls back with arrays, whole, in each process that runs the program.

    JAX runs a callback in the process of the first device alone. An error that is raised there alone leaves the others
    waiting for that process. So each device of a mesh calls back, where there are several processes.
    """

    def call(*given: Any) -> None:
        jax.debug.callback(told, *jax.tree.map(on_each_device, given))

    if mesh is None or jax.process_count() == 1:
        return call

    everywhere = PartitionSpec()

    def whole(leaf: Array) -> Array:
        return jax.sharding.reshard(leaf, NamedSharding(mesh, everywhere)) if is_sharded(leaf) else leaf

    def tell(*given: Any) -> None:
        each = jax.shard_map(call, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        each(*jax.tree.map(whole, given))

    return tell


def _known(leaf: Any) -> Any:
    """A leaf of the evidence in NumPy, whole, where processes hold parts of it."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)


@dataclass(frozen=True)
class CheckFinite(Transform):
    """`check_finite`.

    Attributes:
        each: the words for messages about each of the loops that take turns.
        returned: whether what was found is returned to the user, who decides what becomes of it.
    """

    each: tuple[About, ...]
    returned: bool = False
    stage: ClassVar[Stage] = Stage.WATCHED

    @classmethod
    def of(
        cls,
        value: Any,
        call: Call,
        given: Arguments,
        axes: tuple[LeafAxes | None, ...],
        *,
        ends_early: bool = False,
        layers: bool = False,
    ) -> CheckFinite:
        """What the user said: True or "return".

        Args:
            value: what the user said.
            call: the call, with those that take turns.
            given: its arrays.
            axes: for each of those calls the axes of xs.
            ends_early: whether the loop may skip steps.
            layers: whether it is a loop over layers.

        Raises:
            Fault: for an `ArgumentError` if it is anything else.
        """
        check_value(value)
        told, steps = list[About](), sum(each.length for each in call.each) if layers else None
        calls = zip(call.each, axes, given.xs if call.others else (given.xs,), strict=True)
        for place, (each, own, xs) in enumerate(calls):
            about = About(
                f"`{each.convention.verb}` over {describe_body(each.body.function)}",
                each.convention is FORI,
                bool(each.custom),
                ends_early,
                place if layers else None,
                steps,
                len(call.each),
                each.convention.records,
                Slices(own, jax.tree.structure(xs)) if own is not None and None in own else None,
                names_of(each.body, len(xs) + 1, each.convention.place) if layers else None,
            )
            told.append(about)
        return cls(tuple(told), value == "return")

    @property
    def about(self) -> About:
        """The words for messages about the first loop."""
        return self.each[0]

    def __call__(self, loop: Loop) -> Loop:
        if not loop.steps or 0 in batch_of(loop):  # there is nothing to look at
            return loop
        refuse_devices()
        loop = with_raw_keys(loop.having(state=as_arrays(loop.state)))
        traced, sites = traced_as_it_runs(self._numbered(loop)), list[Site]()
        last = (loop.steps if loop.limit is None else loop.limit) - 1
        for turn, own, about in zip(loop.each, traced.turns or (traced,), self.each, strict=True):
            with speaking_of(turn.body.function) if loop.turns else contextlib.nullcontext():
                refuse_effects(own.hoisted)
            given = turn.having(finish=loop.finish)
            sites.append(Site(about, given, own, last))
        return self._watched(loop, traced, sites)

    def _numbered(self, loop: Loop) -> Loop:
        """The loop; the loops within its steps are told of the step if its position is known before the loop runs."""
        known = not self.about.ends_early and loop.rows is None and self.about.layers is None
        return numbered(loop, self.about.call) if known else loop

    def _watched(self, loop: Loop, traced: Loop, sites: list[Site]) -> Loop:
        """The checked loop, of its trace and of the sites of the loops that take turns."""
        early, plain = self.about.ends_early, self._in_leaves(loop, traced)
        heads = [of_rows(jnp.full(batch_of(loop), number, jnp.int32), loop) for number in (GOOD, 0)[: 1 + early]]
        turns, count = list(plain.each), len(plain.state)
        last = plain.steps - 1 if plain.reverse else None
        for place, (turn, site) in enumerate(zip(turns, sites, strict=True)):
            watched = tuple(not fixed for fixed in site.fixed)
            if len(watched) > count:  # those that no step changes have left the state
                watched = (True,) * count
            axes = (None,) * count if loop.rows is None else loop.masked.axes.state
            keyed = turn.xs.position is not None
            step = Watched(step=turn.step, keyed=keyed, counts=early, last=last, watched=watched, axes=axes)
            xs = turn.xs if early else turn.xs._replace(position=positions_of(turn, place, len(turns)))
            turns[place] = with_heads(turn, heads).having(step=step, xs=xs, callee=turn.callee.apart())

        def notes(result: Result) -> Result:
            found = evidence_of_step(earliest(result.state[0]), sites, result.steps)
            pairs = ((evidence, case_of(sites[place], told)) for place, evidence, told in found)
            return EVIDENCE.put(result, tuple((each._replace(offset=loop.offset), case) for each, case in pairs))

        checked = plain.with_turns(turns).having(callee=plain.callee.apart())
        return checked.finished(lambda state: state[len(heads) :], notes=notes)

    def delivered(self, result: Any) -> Any:
        """The result with a report, or without, and what was found is told."""
        found: Result = result if isinstance(result, Result) else Result(*result)
        evidence, bare = EVIDENCE.of(found), EVIDENCE.put(found, None)
        if self.returned:
            return REPORT.put(bare, FiniteReport.of(evidence or ()))
        if evidence is None:
            return result
        deliver(evidence)
        return bare.short

    def _in_leaves(self, loop: Loop, traced: Loop) -> Loop:
        """The loop with a list of leaves as its state."""
        if loop.rows is not None:
            return loop
        if is_jit_disabled():
            return flattened(self._numbered(loop)).having(trace=None)
        if loop.turns:
            return in_whole_state(traced)
        return traced.having(trace=None).finished(restoring(traced))


class FiniteReport(NamedTuple):
    """What a loop with `check_finite="return"` found: a pytree of arrays, as other results are.

    It contains the carry before and after the first bad step, and the x of that step; zeros if there is none. Under
    `jax.vmap`, each leaf has an entry for each element.

    Attributes:
        ok: bool[], whether no step went wrong.
        step: int32[], the position of the first step that did; -1 if there is none.
        found: what `check` reads.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> @jax.jit
        ... def run(xs):
        ...     return treescan.fold(
        ...         lambda h, x: jnp.log(h + x), 1.0, xs, check_finite="return"
        ...     )
        >>> h, report = run(jnp.array([1.0, 2.0, -9.0]))
        >>> print(report.ok, report.step)
        False 2
        >>> try:
        ...     report.check()
        ... except treescan.errors.NonFiniteError:
        ...     print(treescan.last_nonfinite().operation)
        log
    """

    ok: Array
    step: Array
    found: tuple[tuple[Evidence, Case], ...]

    def __repr__(self) -> str:
        return short_repr("FiniteReport", ok=self.ok, step=self.step)

    @classmethod
    def of(cls, found: Sequence[tuple[Evidence, Case]]) -> FiniteReport:
        """The report of what is known of the first bad step, of each body that may have run it."""
        step = jnp.int32(-1)
        for evidence, _ in found:
            step = jnp.where(evidence.first == GOOD, step, evidence.position)
        return cls(step < 0, step, tuple(found))

    @named_options
    def check(self) -> None:
        """Raises the error of the first bad step, as `check_finite=True` does, and notes it for `last_nonfinite`.

        Of a batch of reports, the first element that is not ok raises.

        Raises:
            ArgumentError: if the values are traced: call it outside of `jax.jit`.
            NonFiniteError: if a step went wrong.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(self)):
            raise TracedMisuse(
                "{verb} needs values, but those of the report are traced.",
                "Return the report from the function that JAX traces, and check it outside. Within, `report.ok` is an "
                "array.",
            )
        bad = np.argwhere(~np.asarray(self.ok))
        if not len(bad):
            return
        place = tuple(bad[0].tolist())
        try:
            deliver(jax.tree.map(lambda leaf: leaf[place], self.found))
        except Fault as fault:
            if place:
                raise Fault(
                    NonFiniteError,
                    fault.says,
                    f"This is element {list(place)} of a batch of reports, of which {len(bad)} of {self.ok.size} are "
                    "not ok.",
                    *fault.cures,
                    record=fault.record,
                ) from None
            raise
