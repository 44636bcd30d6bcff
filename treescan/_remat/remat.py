"""`remat`: the gradient recomputes steps or chunks instead of saving them; what `"auto"` chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

import jax

from .. import _faster
from .._avals import describe_argument, exact_int
from .._cpu import backend
from .._errors import Misuse, TypeMisuse, describe_body, is_from_jax, speaking_of, warn_user
from .._loop.loop import Arrays, Loop, Plan, Step, is_untraced
from .._loop.sizes import Wish, chunk_size
from .._trace.cost import count_operations, count_saved_bytes
from .._trace.equations import equations_within
from .._trace.hoist import hoist, lifted, traced
from .._trace.rewriting import is_rewriting
from .._trace.trace import Trace
from .._transforms.refuse import once_only, refuse_with_refs
from .._transforms.transform import Stage, Transform
from .._tree import Static
from .._types import Remat
from .budget import fit_budget
from .checkpoint import (
    RematChunk,
    checkpoint_steps,
    relates,
    remat_sizes,
    saves_whole_steps,
)

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

_WHOLE = jax.checkpoint_policies.everything_saveable

Auto: TypeAlias = Literal["auto"]
AUTO: Final = "auto"

LARGE = 2**24
"""A loop whose steps save so many bytes takes as long if its chunks are recomputed, where their products are computed
at once. Then a fraction of the memory does. A smaller loop, most of which a cache holds, takes up to 1.3 times as long.
"""

CHEAP, HUGE = 4, 2**26
"""Where steps save so many bytes, one of so few operations for each of them is computed again sooner than read."""

LEAST_STEPS = 32
"""Shorter loops are not changed."""

LEAST_CHUNKS, CHUNK = 16, 32
"""A loop has at least so many chunks if they have fewer than so many steps: each chunk takes time and memory."""


def is_large(trace: Trace, length: int, least: int = LARGE) -> bool:
    """Whether the steps of a loop save so much that chunks are better recomputed. A trace of the step tells."""
    return not isinstance(length, int) or length * count_saved_bytes(trace.jaxpr, trace.varying) >= least


def is_cheap(trace: Trace, length: int) -> bool:
    """Whether a step is computed sooner than what it saves is written and read: that is in no cache.

    On a GPU the kernels of a step take longer to start than to write what they save.
    """
    saved = count_saved_bytes(trace.jaxpr, trace.varying)
    many = backend.on_cpu() and is_large(trace, length, HUGE)
    return many and count_operations(trace.jaxpr, transcendental=20) <= CHEAP * saved


def saves_steps(trace: Trace, plan: Plan, given: Arrays) -> bool:
    """Whether the gradient of a traced loop had better save each step: no product pays, and nothing to recompute."""
    return not (_faster.products_pay(trace, plan, given) or is_cheap(trace, plan.length))


def _least_chunk(length: int) -> int:
    """The steps of the chunks that are recomputed. If possible they divide the loop: a remainder is compiled apart."""
    least = min(CHUNK, length // LEAST_CHUNKS)
    return next((chunk for chunk in range(least, 2 * least) if length % chunk == 0), least)


_PLANS = {"step": Remat(levels=1), "nested": Remat(levels=2)}


@dataclass(frozen=True)
class Recompute(Transform):
    """Has the gradient recompute each step, and the chunks that a `Remat` names or a budget asks for.

    Attributes:
        given: the plan, whose policy is the user's; or for each of the loops that take turns its own, or None.
    """

    given: Static
    stage: ClassVar[Stage] = Stage.RECOMPUTED

    @classmethod
    def of(cls, remat: object) -> Recompute | None:
        """What the user said: "auto", "step", "nested", a `Remat` or None.

        Raises:
            Fault: for an `ArgumentError` if it is none of these, or a `Remat` that contradicts itself.
        """
        plan = check_remat_or_auto(remat)
        return None if plan is None else cls(Static(plan))

    @property
    def remat(self) -> Remat | Auto | tuple[Remat | None, ...]:
        """The plan."""
        return self.given.value

    def __call__(self, loop: Loop) -> Loop:
        if loop.limit is not None:
            return self._of_early_end(loop)
        masked, remat = loop.rows is not None and not loop.masked.all_valid, self.remat
        if remat == AUTO:
            return loop if masked or is_untraced(loop) else choose_fastest(loop)
        of_all = None if isinstance(remat, tuple) else remat
        if masked:
            refuse_to_repeat(loop.hoisted)
            refuse_budget(of_all, "a masked scan")
            refuse_offload(of_all)
        if is_untraced(loop):
            if of_all is not None and of_all.budget and loop.steps:  # whether it fits is the same question
                with jax.disable_jit(False):
                    fit_budget(hoist(loop), of_all)
            return loop
        loop = traced(loop)
        for turn in loop.each:
            with speaking_of(turn.body.function):
                refuse_to_repeat(turn.hoisted)
        plans = remat if isinstance(remat, tuple) else (remat,) * len(loop.each)
        warn_of_unknown_names(plans, loop.each)
        if isinstance(remat, tuple):
            return checkpoint_steps(loop, *plans).having(remat=remat)
        plan = fit_budget(loop, remat)
        return loop if plan is None else _recompute(loop, plan)

    def _of_early_end(self, loop: Loop) -> Loop:
        """A loop that ends early. Its gradient recomputes chunks in any case: what runs it reads the plan of these."""
        assert isinstance(self.remat, Remat)
        refuse_budget(self.remat, "a loop whose number of steps is not known")
        refuse_offload(self.remat)
        if not is_untraced(loop):
            warn_of_unknown_names([self.remat], [loop])
        return loop.having(remat=self.remat)


def fastest(loop: Loop) -> Remat | Auto | None:
    """What "auto" does to a traced loop. None: nothing is changed.

    "auto": chunks save their steps, and compute the products of these at once.
    """
    trace, length = loop.hoisted, loop.length
    left_alone = trace.effects or trace.refs or trace.reverse_rule or not is_rewriting()
    if left_alone or not isinstance(length, int) or length < LEAST_STEPS:
        return None
    ready = lifted(loop)
    pays = _faster.products_pay(ready.hoisted, ready.plan, ready.arrays)
    if (pays and is_large(trace, length)) or is_cheap(trace, length):
        return Remat(_WHOLE, levels=2, chunk=_least_chunk(length))
    return AUTO if pays else None


def choose_fastest(loop: Loop) -> Loop:
    """The loop under the plan that is expected to be the fastest."""
    if not isinstance(loop.length, int):
        return loop
    loop = traced(loop)
    remat = fastest(loop)
    if isinstance(remat, Remat):
        return _recompute(loop, remat)
    if remat is None:
        return loop
    wish = Wish.around(chunk_size(loop.length), _faster.at_once)
    return lifted(loop).having(wishes=(*loop.wishes, wish))


def recompute_chunks(loop: Loop, size: int) -> Loop:
    """The loop with chunks of so many steps that the gradient recomputes, unless the body may not be computed twice."""
    if loop.hoisted.effects or loop.hoisted.refs:
        return loop
    return _recompute(loop, Remat(_WHOLE, levels=2, chunk=size))


def _recompute(loop: Loop, remat: Remat) -> Loop:
    """The traced loop, its steps and chunks recomputed as a plan says."""
    masked = loop.rows is not None and not loop.masked.all_valid
    at_once = not (masked or loop.turns) and saves_whole_steps(loop.hoisted, remat)
    loop = checkpoint_steps(lifted(loop), *(remat,) * len(loop.each))
    related = any(relates(turn.hoisted.jaxpr) for turn in loop.each)
    wishes = remat_wishes(loop.length, remat, _faster.products_at_once if at_once else None, related=related)
    return loop.having(remat=remat, wishes=(*loop.wishes, *wishes))


def remat_wishes(
    length: int, remat: Remat | None, inside: Callable[[Step], Step] | None = None, *, related: bool
) -> list[Wish]:
    """The chunks that the gradient recomputes: none of their sizes has to be met exactly.

    Args:
        length: the steps of the loop.
        remat: the plan.
        inside: what is put around the chunks before the checkpoint.
        related: as for `RematChunk`.
    """
    sizes, offload = remat_sizes(length, remat), None if remat is None else remat.offload
    return [Wish.around(size, RematChunk(offload if size == sizes[-1] else None, inside, related)) for size in sizes]


def check_remat_or_auto(remat: object) -> Remat | Auto | None:
    """The plan of a verb that accepts "auto", checked."""
    return AUTO if isinstance(remat, str) and remat == AUTO else check_remat(remat, '"auto", "step", "nested"')


def check_remat(remat: object, named: str = '"step", "nested"') -> Remat | None:
    """A `Remat` whose policy is a function; "step" and "nested" are short for some."""
    if remat is None:
        return None
    if isinstance(remat, str) and remat == AUTO:
        raise Misuse(
            '{verb} over {body}: {verb} does not support `remat="auto"`, which chooses a plan.',
            'Choose one yourself: "step", "nested" or a `treescan.Remat`. `scan`, `fold`, `accumulate`, and `fori` '
            'with known bounds take "auto".',
        )
    plan = _PLANS.get(remat) if isinstance(remat, str) else remat
    if not isinstance(plan, Remat):
        is_policy = callable(plan) or hasattr(jax.checkpoint_policies, str(remat))
        part = " A policy is one part of it: `treescan.Remat(policy=...)`." if is_policy else ""
        if (budget := exact_int(remat)) is not None:
            part = f" For a budget of bytes: `treescan.Remat.fit({budget})`."
        raise Misuse(
            f"{{verb}} over {{body}}: `remat` must be {named}, a `treescan.Remat` or None, got "
            f"{describe_argument(remat)}.",
            'With "step", the gradient recomputes each {unit} from its inputs. "nested" saves less. '
            "`treescan.Remat(levels=3)` saves fewer carries, but may need more memory, for copies of xs."
            f"{part}",
        )
    for name, least in (("levels", 1), ("chunk", 2), ("budget", 1)):
        _check_count(name, getattr(plan, name), least)
    if plan.chunk is not None and plan.levels == 1:
        raise Misuse(
            f"{{verb}} over {{body}}: `Remat(chunk={plan.chunk}, levels=1)` sets the number of {{unit}}s in a "
            "chunk, but one level has no chunks.",
            "Leave `levels` out, or give 2 or more.",
        )
    _check_budget(plan)
    return dataclasses.replace(plan, policy=_check_policy(plan.policy), offload=_check_offload(plan.offload))


def _check_count(name: str, value: object, least: int) -> None:
    count = exact_int(value)
    if value is not None and (count is None or count < least):
        raise (TypeMisuse if count is None else Misuse)(
            f"{{verb}} over {{body}}: `{name}` of a `Remat` must be an int of at least {least}, got "
            f"{describe_argument(value)}.",
            _COUNTS[name],
        )


_COUNTS = {
    "budget": "Give an int: `Remat.fit(2**30)`.",
    "levels": "1 recomputes each {unit}, 2 adds chunks of about sqrt(T) {unit}s around that, and 3 adds one more "
    "level.",
    "chunk": "It is the number of steps in an innermost chunk. None lets treescan choose it.",
}


def _check_budget(plan: Remat) -> None:
    others = [name for name in ("policy", "levels", "chunk", "offload") if getattr(plan, name) is not None]
    if plan.budget is not None and others:
        raise Misuse(
            f"{{verb}} over {{body}}: `Remat` was given a `budget` and `{others[0]}`, but a budget chooses the plan.",
            "Give only `Remat.fit(budget)`, or a plan without a budget.",
        )


def _check_policy(policy: Any) -> Callable[..., Any] | None:
    """A policy of `jax.checkpoint`, from its name or from the function itself."""
    if policy is None:
        return None
    named = getattr(jax.checkpoint_policies, policy, None) if isinstance(policy, str) else policy
    if isinstance(policy, str) and (named is None or _makes_policies(policy)):
        known = [name for name in dir(jax.checkpoint_policies) if not name.startswith("_")]
        plain = ", ".join(f'"{name}"' for name in known if not _makes_policies(name))
        raise Misuse(
            f"{{verb}} over {{body}}: `policy` of a `Remat` is not the name of a policy: {policy!r}.",
            *[f'"{policy}" is a plan by itself: `remat="{policy}"`.'] * (policy in (AUTO, *_PLANS)),
            f"The policies of `jax.checkpoint_policies` are {plain}. If a policy takes arguments, for example "
            "`save_only_these_names`, call it first: "
            '`Remat(policy=jax.checkpoint_policies.save_only_these_names("h"))`.',
        )
    if callable(named):
        return named
    raise TypeMisuse(
        f"{{verb}} over {{body}}: `policy` of a `Remat` must be a policy of `jax.checkpoint` or its name, got "
        f"{describe_argument(policy)}.",
        '`Remat(policy="dots_saveable")` saves the matrix products of each {unit} besides its carry.',
    )


def _makes_policies(name: str) -> bool:
    """Whether a member of `jax.checkpoint_policies` is not a policy, but returns one."""
    return name.startswith(("save_", "offload_"))


def _check_offload(kind: object) -> str | None:
    """The kind of a memory that the device has."""
    if kind is None:
        return None
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    if isinstance(kind, str) and kind in kinds:
        _warn_of_no_change(kind)
        return kind
    raise Misuse(
        f"{{verb}} over {{body}}: `offload` of a `Remat` must be a memory kind, got {describe_argument(kind)}.",
        f"This device has {', '.join(map(repr, kinds))}.",
    )


def _warn_of_no_change(kind: str) -> None:
    """Warns if moving carries frees no memory of the device. The carries are moved anyway."""
    device = jax.devices()[0]
    if device.platform == "cpu" or device.default_memory().kind == kind:
        warn_user(
            f'`Remat(offload="{kind}")` has no effect on this device ({device.platform}), because its arrays are '
            "already in that memory. To save less, use `levels`.",
            UserWarning,
        )


def warn_of_unknown_names(plans: Sequence[Remat | None], loops: Sequence[Loop]) -> None:
    """Warns if a policy of JAX has a name that no body with this plan gives to a value.

    A rule of `jax.custom_vjp` may name values too, and is not in the trace: then nothing is known.

    Args:
        plans: a plan for each body.
        loops: the traced loops that run the bodies.
    """
    for i, plan in enumerate(plans):
        if plan is not None and plan not in plans[:i]:
            _check([loop for other, loop in zip(plans, loops, strict=True) if other == plan], plan.policy)


def _check(loops: list[Loop], policy: Any) -> None:
    asked, traces = list(dict.fromkeys(_names_of(policy))), [loop.hoisted for loop in loops]
    if not asked or any(not trace.programs or trace.reverse_rule for trace in traces):
        return
    given = list(dict.fromkeys(name for trace in traces for name in _names_in(trace.jaxpr)))
    unknown = [name for name in asked if name not in given]
    if unknown:
        body = describe_body([loop.body.function for loop in loops])
        known = f"It has the names {_quoted(given)}." if given else "It has no names."
        warn_user(
            f"The policy of `remat` refers to the name {_quoted(unknown)}, which no value in {body} has. {known} "
            f'`jax.ad_checkpoint.checkpoint_name(value, "{unknown[0]}")` gives a value this name.',
            UserWarning,
        )


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _names_of(policy: Any) -> Iterator[str]:
    """The names in a policy that JAX made: in its attributes, or in what it closes over."""
    if not is_from_jax(policy):
        return
    held = list(vars(policy).values()) if hasattr(policy, "__dict__") else []
    for value in (*held, *(cell.cell_contents for cell in getattr(policy, "__closure__", None) or ())):
        if isinstance(value, set | frozenset | list | tuple):
            yield from sorted(name for name in value if isinstance(name, str))
        elif callable(value):
            yield from _names_of(value)


def _names_in(jaxpr: Jaxpr) -> Iterator[str]:
    """The names that a jaxpr gives to values, in loops and functions too."""
    return (equation.params["name"] for equation in equations_within(jaxpr) if equation.primitive.name == "name")


def refuse_to_repeat(trace: Trace) -> None:
    """Refuses to recompute a body that closes over a mutable array, or that has an effect which JAX does not repeat."""
    if trace.refs:
        refuse_with_refs("remat")
    if trace.once_only:
        raise once_only("`remat` recomputes each {unit} in the gradient", "Leave `remat` out")


def refuse_offload(remat: Remat | None) -> None:
    """Refuses to move carries if the outermost chunks are not those of the plan."""
    if remat is not None and remat.offload is not None:
        raise Misuse(
            "{verb} over {body}: {verb} does not support the `offload` of a `Remat`, because it already recomputes "
            "chunks.",
            "Leave it out, or save less with `levels`.",
        )


def refuse_budget(remat: Remat | None, where: str) -> None:
    """Refuses to choose a plan if the bytes of plans are unknown."""
    if remat is not None and remat.budget is not None:
        raise Misuse(
            f"{{verb}} over {{body}}: `Remat.fit` cannot choose a plan for {where}.",
            "Choose one yourself: `Remat(levels=...)`. More levels save less.",
        )
