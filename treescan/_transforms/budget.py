"""Chooses the cheapest plan whose gradient fits a number of bytes, for `Remat.fit`, and describes plans."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax

from .._errors import ArgumentError, Fault
from .._html import Section, page
from .._layout import table
from .._loop.sizes import count_parts, divide
from .._remat import Remat
from .._trace.hoist import Hoisted
from .checkpoint import Checkpointed, checkpoint_step, remat_sizes, saves_whole_steps
from .footprint import Footprint, bytes_of_step, footprint_of
from .refuse import refuse_symbolic
from .weights.deferred import save_all_but_cheap
from .weights.in_bulk import bytes_of_products, ready_for_chunks

_EVERYTHING = jax.checkpoint_policies.everything_saveable

MARGIN = 1.05
"""A plan fits if the bytes that it needs, times this margin, fit. XLA's own plan differs by a few per cent."""

_OF_A_REST = 1.1
"""A plan with a remainder compiles the step once more, so it must need this much less than another plan."""


@dataclass(frozen=True, repr=False)
class RematPlan:
    """A report of what the gradient of a loop saves under a `Remat`, and how often it evaluates the body. Print it.

    Attributes:
        remat: the `Remat` that was picked; None: everything is saved; "auto": the same, in chunks whose
            products with weights are computed at once.
        steps: the number of steps T; of a pattern, the periods.
        sizes: the steps of the nested chunks, innermost first.
        carry_bytes: of the leaves of the carry that change from step to step.
        step_bytes: of everything that one step saves if nothing is recomputed, including its carry.
        saved_bytes: of everything that is saved at the same time.
        copied_bytes: of the copies that levels make: the slices of xs for a chunk, the gradients of these and of its
            outputs, and a sum of the gradients of shared values. If steps are left over that fill no chunk, all of xs
            is copied too.
        needed_bytes: of everything that the gradient needs besides its arguments and results: saved values, copies, and
            the memory of one step's gradient. `Remat.fit` compares this with its budget.
        evaluations: how often each step is evaluated by a gradient, the forward pass included.
    """

    remat: Remat | Literal["auto"] | None
    steps: int
    sizes: tuple[int, ...]
    carry_bytes: int
    step_bytes: int
    saved_bytes: int
    copied_bytes: int
    needed_bytes: int
    evaluations: int

    def with_remat(self, remat: Remat | Literal["auto"] | None) -> RematPlan:
        """The same plan under another name."""
        return dataclasses.replace(self, remat=remat)

    @property
    def has_rest(self) -> bool:
        """Whether there is a remainder: steps that do not fill a chunk."""
        return bool(self.sizes and self.steps % self.sizes[-1])

    def __repr__(self) -> str:
        needed = describe_bytes(self.needed_bytes)
        return f"<RematPlan of {self.remat!r}: {needed} needed, {self.evaluations} evaluations of each step>"

    def __str__(self) -> str:
        return f"remat={self.remat!r}\n\n{table(('', '', ''), self._rows()).lstrip(chr(10)).rstrip()}"

    def _repr_html_(self) -> str:
        return page(f"remat={self.remat!r}", [Section("", (), self._rows())])

    def _rows(self) -> list[tuple[str, str, str]]:
        parts = [self.steps] if not self.sizes else [-(-self.steps // self.sizes[-1])]
        parts += [large // small for small, large in itertools.pairwise((1, *self.sizes))][::-1]
        return [
            ("steps", f"{self.steps:,}", " x ".join(f"{part:,}" for part in parts) if self.sizes else "one loop"),
            ("a carry", describe_bytes(self.carry_bytes), "what changes from step to step"),
            ("a step", describe_bytes(self.step_bytes), "what it saves if it is not recomputed"),
            ("saved", describe_bytes(self.saved_bytes), "at one time, by the gradient"),
            ("copied", describe_bytes(self.copied_bytes), "of xs and of gradients, by the levels"),
            ("needed", describe_bytes(self.needed_bytes), "in all, beside arguments and results"),
            ("evaluations", f"{self.evaluations:,}", "of each step, the forward pass included"),
        ]


def describe_bytes(count: int) -> str:
    """A number of bytes, in a suitable unit."""
    power = min(int(math.log2(count) // 10), 4) if count else 0
    return (
        f"{count:,} B" if not power else f"{count / 2 ** (10 * power):,.1f} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    )


def fit_budget(hoisted: Hoisted, remat: Remat) -> Remat | None:
    """The plan of a `Remat` for a loop that `hoist` made. One with a budget is given a plan that fits.

    Raises:
        Fault: for an `ArgumentError` if no plan fits.
    """
    if remat.budget is None:
        return remat
    chosen = plan_of(hoisted, remat).remat
    return chosen if isinstance(chosen, Remat) else None


def plan_of(hoisted: Hoisted, remat: Remat | None) -> RematPlan:
    """What a loop's gradient saves under a `Remat`."""
    length = hoisted.loop.length
    refuse_symbolic(length, "remat")
    step = footprint_of(hoisted)
    if remat is not None and remat.budget is not None:
        return cheapest_within(remat.budget, length, step, *_in_chunk(hoisted, step))
    if remat is not None and saves_whole_steps(hoisted, remat):
        in_chunk, whole = _in_chunk(hoisted, step)
        return describe(remat, length, in_chunk, whole)
    return describe(remat, length, step, kept_by_policy(hoisted, remat))


def kept_by_policy(hoisted: Hoisted, remat: Remat | None) -> int | None:
    """What each step saves under the policy of a `Remat`; None: its carry alone, or all where all is saved."""
    if remat is None or not callable(remat.policy) or remat.policy is _EVERYTHING:
        return None
    return bytes_of_step(hoisted, checkpoint_step(hoisted.loop.step, remat, looped=True))


def cheapest_within(
    budget: int, length: int, step: Footprint, in_chunk: Footprint, whole: int, unit: str = "{unit}"
) -> RematPlan:
    """The plan with the fewest evaluations that fits a budget; of several such plans, the one that needs least.

    Args:
        budget: the bytes.
        length: the number of steps.
        step: the bytes of one.
        in_chunk: the same in a chunk that saves its steps.
        whole: what such a chunk saves of each step.
        unit: what a step is called in the message.

    Raises:
        Fault: for an `ArgumentError` if no plan fits.
    """
    plans = list(_candidates(length, step, in_chunk, whole))
    fitting = [plan for plan in plans if MARGIN * plan.needed_bytes <= budget]
    if fitting:
        return min(
            fitting, key=lambda plan: (plan.evaluations, plan.needed_bytes * (_OF_A_REST if plan.has_rest else 1))
        )
    least = min(plans, key=lambda plan: plan.needed_bytes)
    raise Fault(
        ArgumentError,
        f"{{verb}} over {{body}}: no plan fits {describe_bytes(budget)}.",
        f"The smallest plan is `remat={least.remat!r}`. It needs "
        f"{describe_bytes(round(MARGIN * least.needed_bytes))}, including a margin of 5 %. There are {length:,} "
        f"{unit}s, the carry takes {describe_bytes(step.carry)}, a {unit} saves {describe_bytes(step.whole)}, and "
        f"its slices of xs take {describe_bytes(step.xs)}. Give `Remat.fit` a larger budget, or make the carry "
        "smaller.",
    )


def _in_chunk(hoisted: Hoisted, step: Footprint) -> tuple[Footprint, int]:
    """The bytes of a step in a chunk that saves its steps, and what it saves of each.

    Where it computes the products of its steps at once, no step has gradients of weights of its own, and those of x
    take the place of what they were computed from.
    """
    if not saves_whole_steps(hoisted, Remat(_EVERYTHING, levels=2)):
        return step, step.whole
    products = bytes_of_products(ready_for_chunks(dataclasses.replace(hoisted.loop, trace=hoisted)))
    if not products:
        return step, step.whole
    saved = Checkpointed(hoisted.loop.step, looped=True, policy=save_all_but_cheap)
    in_chunk = dataclasses.replace(step, once=step.once - step.weights)
    return in_chunk, bytes_of_step(hoisted, saved) + products - step.d_xs


def _candidates(length: int, step: Footprint, in_chunk: Footprint, whole: int) -> Iterator[RematPlan]:
    """The plans, for chunks that save `whole` of each step."""
    yield describe(None, length, step)
    yield describe(Remat(levels=1), length, step)
    for levels in range(2, max(2, length.bit_length())):
        yield describe(Remat(levels=levels), length, step)
        for segment in _segments(length, levels):
            yield describe(Remat(levels=levels, segment=segment), length, step)
            yield describe(Remat(_EVERYTHING, levels=levels, segment=segment), length, in_chunk, whole)


def _segments(length: int, levels: int) -> list[int]:
    """Candidate sizes of an innermost chunk: equal parts, fewer steps, and some more steps."""
    most = min(length - 1, round(4 * length ** (1 / levels)) + 1)
    within = range(2, max(3, most + 1))
    return sorted({*within[:: max(1, len(within) // 64)], *(size for size in within if length % size == 0)})


def best_segment(length: int, levels: int, carry: int, step: int) -> int:
    """The steps of an innermost chunk that saves all of each step, while the levels around it save carries."""
    plain = length ** (1 / levels)
    root = max(2, round(plain * (carry / step) ** ((levels - 1) / levels))) if step else max(2, round(plain))
    within = range(max(2, root // 2), 2 * root + 1)

    def saved(segment: int) -> float:
        sizes = divide(length, levels, segment)
        rest = length % sizes[-1] if sizes else 0
        return _saved_bytes(length, sizes, carry, step) * (1.1 if rest else 1)

    return min(within[:: max(1, len(within) // 64)], key=saved)


def describe(remat: Remat | None, length: int, step: Footprint, kept: int | None = None) -> RematPlan:
    """A plan of which each step of an innermost chunk saves `kept` bytes; None: as much as the policy says."""
    sizes = remat_sizes(length, remat)
    everything = remat is None or remat.policy is _EVERYTHING
    kept = (step.whole if everything else step.kept) if kept is None else kept
    saved = _saved_bytes(length, sizes, step.carry, kept) + (0 if everything else step.working)
    copied = _copied_bytes(length, sizes, step)
    of_one = max(step.working, 2 * step.carry + step.leaf) if everything else 0
    needed = saved + copied + step.d_xs + step.weights + of_one
    evaluations = 1 + len(sizes) + (0 if everything else 1)
    return RematPlan(remat, length, sizes, step.carry, step.whole, saved, copied, needed, evaluations)


def _saved_bytes(length: int, sizes: tuple[int, ...], carry: int, each: int) -> int:
    """What is saved at one time: a carry per chunk, and `each` bytes per step of an innermost chunk."""
    innermost = sizes[0] if sizes else length
    return (count_parts(length, sizes) - innermost) * carry + innermost * each


def _copied_bytes(length: int, sizes: tuple[int, ...], step: Footprint) -> int:
    """What the levels copy and add up. XLA holds a chunk's slices of xs, and writes its gradients before it adds them.

    Where the last chunk is not full, the whole chunks are cut off xs.
    """
    cut = length * step.xs if sizes and length % sizes[-1] else 0
    return sum(sizes) * step.at_one_level + len(sizes) * step.weights + cut + step.once
