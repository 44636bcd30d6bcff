"""Runs a loop that ends early: traced, in a form that has a derivative, or step by step on values."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._avals import Array, PyTree, as_arrays, place_like, vary_over, varying_axes
from .._errors import Fault, Misuse, explain
from .._loop.feed import Feed
from .._loop.loop import Arrays, Loop, Result, is_untraced
from .._loop.run import debugs_nans, run, settle
from .._outputs.outputs import ALL, emitting
from .._rows.fill import fill_leaves
from .._rows.leaves import any_of_all, may_branch
from .._trace.equations import is_for_data_alone
from .._transforms.refuse import once_only
from .condition import Condition
from .derivative import EarlyExit
from .early_exit import (
    ENDS,
    Ends,
    Hook,
    MaskedStep,
    Progress,
    StepOutputs,
    all_fixed,
    going_on,
    plan_chunks,
    whole_state,
)

_NO_GRADIENT = once_only(
    "the gradient computes each step again",
    "Take no gradient of the loop, or leave the callback out of what is differentiated",
)


def _outside_of(axes: frozenset[Hashable]) -> Fault:
    """What is wrong with a derivative that JAX asks for once the map of these named axes is done."""
    named = ", ".join(f"`{axis}`" for axis in sorted(map(str, axes)))
    return Misuse(
        f"{{verb}} over {{body}}: its derivative is asked for outside of the `jax.vmap` that has the named axis "
        f"{named}, over which the body or the condition computes.",
        "Something between the derivative and the map stages it: a `jax.jit`, a `jax.checkpoint`, a loop or a branch. "
        "Put the `jax.jit` outside, `jax.jit(jax.grad(mapped))`, or differentiate within the map, "
        "`jax.vmap(jax.grad(loss), axis_name=...)`.",
    )


def reverse_only() -> Fault:
    """What is wrong with forward mode of a body that has a rule for reverse mode alone."""
    return Misuse(
        "{verb} over {body}: the body calls a function with a `jax.custom_vjp`, which JAX differentiates only in "
        "reverse mode. But this is forward mode, or the gradient of a `jax.vmap`, which needs forward mode here.",
        "Use `jax.vmap` of `jax.grad` instead of `jax.grad` of `jax.vmap`. Or run the loop under "
        "`treescan.rewriting(False)`, where it always runs `max_length` steps.",
    )


class Going(NamedTuple):
    """Runs a loop as `EndEarly` left it, with what other options made of it, as long as a condition holds.

    Attributes:
        condition: whether another step is taken.
        holds: bool[*batch], whether it holds for the first state; [] but where each row stops by itself.
        limit: int32[], the most steps.
        total: int32[], the number of steps, where it is known.
        verb: the name of the verb, for errors that are raised after it has returned.
        hook: is called as steps are taken; or None.
        of_hook: the arrays that it reads.
    """

    condition: Condition
    holds: Array
    limit: Array
    total: Array | None
    verb: str
    hook: Hook | None = None
    of_hook: PyTree = None

    def __call__(self, loop: Loop) -> Result:
        loop = loop.having(consts=ENDS.put(loop.consts, Ends(self.condition.closed, self.limit, self.of_hook)))
        run_loop = _run_step_by_step if is_untraced(loop) else _run_traced
        progress, ys = run_loop(loop, self)
        if self.hook is not None:
            self.hook(loop.consts, progress, last=True)
        return Result(progress.state, ys, progress.taken, ~progress.holds)


def _run_step_by_step(loop: Loop, going: Going) -> tuple[Progress, PyTree]:
    """Runs the steps on values, one by one. Of a loop that takes none, a trace tells the types."""
    hook = going.hook
    holds, every = going.holds, -(-loop.length // hook.most) if hook else 0
    taken = place_like(jnp.zeros(holds.shape, jnp.int32), jax.typeof(holds))
    progress, ran = Progress(holds, taken, as_arrays(loop.state)), list[PyTree]()
    step = MaskedStep(loop.step, going.condition, all_fixed(loop))
    one = loop.plan.apart().having(step=step, length=1)
    while len(ran) < loop.length and any_of_all(going_on(progress, loop.consts)):
        place = loop.length - 1 - len(ran) if loop.reverse else len(ran)
        after, y = run(one, Arrays(loop.consts, progress, _steps_between(loop.xs, place, place + 1)))
        settled, changed = (after.state, False) if ran else settle(progress.state, after.state)
        if changed:
            return _run_settled(loop, settled, going)
        progress = after
        ran.append(y)
        if hook is not None and len(ran) % every == 0:
            hook(loop.consts, progress)
    left = loop.length - len(ran)
    if not ran:
        bare = Arrays(ENDS.put(loop.consts, None), loop.state, _steps_between(loop.xs, 0, 0))
        state, y = run(loop.plan.having(length=0), bare)
        settled, changed = settle(progress.state, state)
        if changed:
            return _run_settled(loop, settled, going)
        progress, ran = progress._replace(state=state), [y]
    values = zip(fill_leaves(loop.masked.outputs.idle.fill, ran[0]), jax.tree.leaves(ran[0]), strict=True)
    filled = [jnp.broadcast_to(value, (left, *leaf.shape[1:])) for value, leaf in values]
    parts = [*ran, jax.tree.unflatten(jax.tree.structure(ran[0]), filled)]
    return progress, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(parts[::-1] if loop.reverse else parts))


def _run_settled(loop: Loop, state: PyTree, going: Going) -> tuple[Progress, PyTree]:
    """Runs the steps from a state whose types have settled, of which the condition is asked then."""
    holds = going.condition(ENDS.read(loop.consts).closed, whole_state(all_fixed(loop), loop.consts, state))
    return _run_step_by_step(loop.having(state=state), going._replace(holds=holds))


def _steps_between(xs: Feed, start: int, stop: int) -> Feed:
    return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(jnp.asarray(leaf), start, stop), xs)


def _run_traced(loop: Loop, going: Going) -> tuple[Progress, list[Any]]:
    """Runs the loop as a function with a derivative of its own; its ys are what is left of the outputs."""
    hook, trace, keeps, length = going.hook, loop.hoisted, loop.keeps or (), loop.length
    varying = varying_axes(jax.typeof(going.holds)) | varying_axes(jax.typeof(going.limit))
    step, xs = emitting(loop.step, keeps), loop.xs._replace(valid=None)
    loop = loop.having(step=step, xs=xs, state=as_arrays(loop.state))
    chunks = plan_chunks(loop)
    avals = [aval for aval, keep in zip(trace.y_avals, keeps, strict=True) if keep is not None]
    kept = [keep for keep in keeps if keep is not None]
    every = tuple(1 if keep == ALL else chunks.stride for keep in kept)
    own_values = loop.masked.own_values
    if not going.holds.ndim:  # an element of a vmap stops as a whole
        own_values = not (trace.effects or is_for_data_alone(trace.jaxpr) or debugs_nans())
    axes = trace.axes | going.condition.axes
    early = EarlyExit(
        plan=loop.plan,
        rows=loop.masked,
        trace=trace,
        fixed=all_fixed(loop),
        fed=bool(jax.tree.leaves(loop.xs)),
        condition=going.condition,
        outputs=StepOutputs(tuple(avals), loop.masked.outputs.idle.fill, varying, every),
        chunks=chunks if hook is None else hook.fit(chunks),
        branches=may_branch(),
        refusal=explain(_NO_GRADIENT, going.verb, loop.body.function) if trace.once_only_in_silence else None,
        unbound=explain(_outside_of(axes), going.verb, loop.body.function) if axes else None,
        reverse_only=explain(reverse_only(), going.verb, loop.body.function) if trace.reverse_rule else None,
        own_values=own_values,
        hook=hook,
    )
    progress, ys = early.differentiable()(loop.arrays, vary_over(going.holds, varying))
    left = [y[early.front // n :][: length // n] for y, n in zip(ys, every, strict=True)]
    pairs = [(y, keep // n) for y, keep, n in zip(left, kept, every, strict=True)]
    return progress, [y if stride == 1 else y[stride - 1 :: stride] for y, stride in pairs]
