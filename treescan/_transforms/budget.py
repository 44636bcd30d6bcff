"""`Remat.fit` picks the cheapest plan that fits a number of bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._errors import ArgumentError, Fault, table
from .._loop.loop import Feed, Step
from .._loop.sizes import count_parts, divide
from .._remat import Remat
from .._trace.hoist import Hoisted, one_step
from .checkpoint import Checkpointed, checkpoint_step, remat_sizes, saves_whole_steps
from .refuse import refuse_symbolic
from .weights.deferred import save_all_but_cheap
from .weights.in_bulk import bytes_of_products, ready_for_chunks


@dataclass(frozen=True)
class RematPlan:
    """What the gradient of a loop saves under a `Remat`, and how often it evaluates the body. Print it.

    Attributes:
        remat: the `Remat`, with nothing left to choose; None: everything is saved; "auto": the same, in chunks whose
            products with weights are computed at once.
        steps: the number of steps T.
        sizes: the steps of the nested chunks, innermost first.
        carry_bytes: of the leaves of the carry that change from step to step.
        step_bytes: of all that one step saves where nothing is recomputed, its carry included.
        saved_bytes: of all that is saved at one time.
        evaluations: how often each step is evaluated by a gradient, the forward pass included.
    """

    remat: Remat | Literal["auto"] | None
    steps: int
    sizes: tuple[int, ...]
    carry_bytes: int
    step_bytes: int
    saved_bytes: int
    evaluations: int

    def with_remat(self, remat: Remat | Literal["auto"] | None) -> RematPlan:
        """The same under another name."""
        return dataclasses.replace(self, remat=remat)

    def __str__(self) -> str:
        parts = [self.steps] if not self.sizes else [-(-self.steps // self.sizes[-1])]
        parts += [large // small for small, large in itertools.pairwise((1, *self.sizes))][::-1]
        rows = [
            ("steps", f"{self.steps:,}", " x ".join(f"{part:,}" for part in parts) if self.sizes else "one loop"),
            ("a carry", describe_bytes(self.carry_bytes), "what changes from step to step"),
            ("a step", describe_bytes(self.step_bytes), "what it saves if it is not recomputed"),
            ("saved", describe_bytes(self.saved_bytes), "at one time, by the gradient"),
            ("evaluations", f"{self.evaluations:,}", "of each step, the forward pass included"),
        ]
        return f"remat={self.remat!r}\n\n{table(('', '', ''), rows).lstrip(chr(10)).rstrip()}"


def describe_bytes(count: int) -> str:
    """A number of bytes in the unit that suits it."""
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
    carry = _carry_bytes(hoisted)
    step = bytes_of_step(hoisted, hoisted.loop.step)
    if remat is None or remat.budget is None:
        chosen = None if remat is None else remat.policy
        if remat is not None and saves_whole_steps(hoisted, remat):
            return _describe(remat, length, carry, step, whole=_bytes_in_chunk(hoisted, step))
        named = callable(chosen) and chosen is not jax.checkpoint_policies.everything_saveable
        saving = checkpoint_step(hoisted.loop.step, remat, looped=True) if named and remat else None
        kept = None if saving is None else bytes_of_step(hoisted, saving)
        return _describe(remat, length, carry, step, kept)
    fitting = least = None
    for plan in _candidates(length, carry, step, _bytes_in_chunk(hoisted, step)):
        least = plan if least is None or plan.saved_bytes < least.saved_bytes else least
        if plan.saved_bytes <= remat.budget and (fitting is None or _better(plan, fitting)):
            fitting = plan
    assert least is not None
    if fitting is None:
        raise Fault(
            ArgumentError,
            f"{{verb}} over {{body}}: no plan fits {describe_bytes(remat.budget)}.",
            f"The least that one saves is {describe_bytes(least.saved_bytes)}, with `remat={least.remat!r}`: there are "
            f"{length:,} {{unit}}s, a carry has {describe_bytes(carry)}, and a {{unit}} saves {describe_bytes(step)}. "
            "Give `Remat.fit` more, or carry less.",
        )
    return fitting


def _better(plan: RematPlan, other: RematPlan) -> bool:
    return (plan.evaluations, plan.saved_bytes) < (other.evaluations, other.saved_bytes)


def _bytes_in_chunk(hoisted: Hoisted, step: int) -> int:
    """What a chunk that saves its steps saves of each, where one that is not in a chunk saves `step`."""
    if not saves_whole_steps(hoisted, Remat(jax.checkpoint_policies.everything_saveable, levels=2)):
        return step
    products = bytes_of_products(ready_for_chunks(dataclasses.replace(hoisted.loop, trace=hoisted)))
    saved = Checkpointed(hoisted.loop.step, looped=True, policy=save_all_but_cheap)
    return bytes_of_step(hoisted, saved) + products if products else step


def _candidates(length: int, carry: int, step: int, whole: int) -> Iterator[RematPlan]:
    """The plans: a step saves so many bytes, one in a chunk that saves whole steps so many."""
    everything = jax.checkpoint_policies.everything_saveable
    yield _describe(None, length, carry, step)
    for levels in range(1, max(2, length.bit_length())):
        yield _describe(Remat(levels=levels), length, carry, step)
        if levels > 1:
            segment = best_segment(length, levels, carry, whole)
            yield _describe(Remat(everything, levels=levels, segment=segment), length, carry, step, whole=whole)


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


def _describe(
    remat: Remat | None, length: int, carry: int, step: int, kept: int | None = None, whole: int | None = None
) -> RematPlan:
    """A plan under which each step of an innermost chunk saves its carry, or `kept` bytes, or `whole` of all of it."""
    sizes = remat_sizes(length, remat)
    everything = remat is None or remat.policy is jax.checkpoint_policies.everything_saveable
    saved = _saved_bytes(length, sizes, carry, (whole or step) if everything else (kept or carry))
    saved += 0 if everything else step
    evaluations = 1 + len(sizes) + (0 if everything else 1)
    return RematPlan(remat, length, sizes, carry, step, saved, evaluations)


def _saved_bytes(length: int, sizes: tuple[int, ...], carry: int, each: int) -> int:
    """What is saved at one time: a carry per chunk, and `each` bytes per step of an innermost chunk."""
    innermost = sizes[0] if sizes else length
    return (count_parts(length, sizes) - innermost) * carry + innermost * each


def _carry_bytes(hoisted: Hoisted) -> int:
    return sum(_bytes_of(jax.typeof(jnp.asarray(leaf))) for leaf in hoisted.loop.state)


def _bytes_of(aval: Any) -> int:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return 16 * math.prod(aval.shape)
    return math.prod(aval.shape) * aval.dtype.itemsize


def bytes_of_step(hoisted: Hoisted, step: Step) -> int:
    """The bytes that the gradient saves of a step: what its linearization keeps, less what lies outside of the loop."""
    loop = hoisted.loop

    def residuals(consts: Any, state: list[Any], feed: Feed) -> list[Any]:
        leaves, structure = jax.tree.flatten((consts, state, feed))
        floats = [jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact) for leaf in leaves]

        def of_floats(*given: Any) -> list[Any]:
            mine = iter(given)
            whole = [next(mine) if is_float else leaf for leaf, is_float in zip(leaves, floats, strict=True)]
            new, y = step(*jax.tree.unflatten(structure, whole))
            return [leaf for leaf in jax.tree.leaves((new, y)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        _, pullback = jax.vjp(of_floats, *(leaf for leaf, is_float in zip(leaves, floats, strict=True) if is_float))
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(residuals)(loop.consts, loop.state, one_step(loop.xs)).jaxpr
    first = len(jax.tree.leaves(loop.consts))
    carries = set(map(id, jaxpr.invars[first : first + len(loop.state)]))
    outside = set(map(id, (*jaxpr.invars, *jaxpr.constvars))) - carries
    saved = {id(var): var for var in jaxpr.outvars if not hasattr(var, "val") and id(var) not in outside}
    own = sum(_bytes_of(var.aval) for key, var in saved.items() if key not in carries)
    return own + _carry_bytes(hoisted)
