"""What a gradient saves under each plan, and the cheapest plan that fits a number of bytes (`Remat.fit`)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax

from .. import _faster
from .._avals import Aval, Leaves, PyTree, bytes_of
from .._errors import ArgumentError, Fault, Misuse
from .._loop.feed import Feed, one_step
from .._loop.loop import Loop, Step
from .._text import Section, page, table, wrap
from .._trace.dependence import dependent
from .._trace.equations import aval_of, called, evaluate_inlined, has_symbolic_zeros, inlined, inputs_of, variables_of
from .._trace.hoist import lifted
from .._trace.smooth import is_smooth
from .._transforms.refuse import refuse_symbolic
from .._tree import replaced, split
from .._types import Remat
from .checkpoint import checkpoint_step, count_parts, relates, remat_sizes, saves_whole_steps

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Var

AHEAD = 0.6
"""The part of the other blocks' saved values that is in memory during the gradient of one block: XLA computes a
block again as early as possible, not as late as possible."""


class Uncounted(Fault):
    """The bytes that the gradient of a step needs cannot be counted.

    Attributes:
        why: the reason alone.
    """

    def __init__(self, why: str, *says: str) -> None:
        super().__init__(ArgumentError, *says)
        self.why = why


class NoGradient(Uncounted):
    """They are none: JAX has no derivative of the step in reverse mode."""


@dataclass(frozen=True)
class Footprint:
    """The bytes of one step. The step of a pattern is one period of it.

    Attributes:
        state: of the leaves of the carry that change from step to step.
        carry: of those among them that a chunk is computed again from.
        kept: what is saved of a step that is recomputed: what the carry before each block of it is computed again
            from, and its decisions.
        decided: its decisions, if chunks of steps save them too; see `relates`.
        whole: what is saved of a step where nothing is recomputed.
        working: what the gradient computes once more, and holds at one time.
        xs: of the slice of xs.
        d_xs: of its gradient.
        leaf: of the largest array of that slice.
        d_ys: of the gradient of its output.
        weights: of the gradients of what all steps share.
        once: what is copied for the whole loop, however it is cut.
    """

    state: int
    carry: int
    kept: int
    decided: int
    whole: int
    working: int
    xs: int
    d_xs: int
    leaf: int
    d_ys: int
    weights: int
    once: int = 0


def footprint_of(loops: Sequence[Loop]) -> Footprint:
    """The bytes of one round of several loops over one state, which run one step each in turn."""
    saved = [saved_of_step(loop, loop.step) for loop in loops]
    steps = [each.bytes for each in saved]
    slices = [jax.tree.leaves(one_step(loop.xs)) for loop in loops]
    shared = {id(leaf): leaf for leaf in jax.tree.leaves([loop.consts for loop in loops])}
    kept = [saved_of_step(each, _checkpointed(each, Remat(levels=1))) for each in loops]
    related = any(relates(each.hoisted.jaxpr) for each in loops)
    return Footprint(
        state=max(_sum(loop.state) for loop in loops),
        carry=_carry_of_chunk(loops, saved),
        kept=sum(each.bytes for each in kept),
        decided=sum(_sum(residual.aval for residual in each.residuals) for each in kept) if related else 0,
        whole=sum(steps),
        working=round(max(steps) + AHEAD * (sum(steps) - max(steps))),
        xs=_sum(itertools.chain(*slices)),
        d_xs=_sum(filter(is_smooth, itertools.chain(*slices))),
        leaf=max(map(_bytes_of, itertools.chain(*slices)), default=0),
        d_ys=_sum(aval for loop in loops for aval in loop.hoisted.y_avals if is_smooth(aval)),
        weights=_sum(leaf for leaf in shared.values() if hasattr(leaf, "dtype") and is_smooth(leaf)),
    )


def _carry_of_chunk(loops: Sequence[Loop], saved: Sequence[Saved]) -> int:
    """The bytes of the leaves that a chunk is computed again from: what derivatives read depends on them.

    A sum, an average or a buffer of outputs does not count, as far as a step only adds to it.
    """
    places = [[place for place, is_fixed in enumerate(each.hoisted.fixed) if not is_fixed] for each in loops]
    sizes = {
        p: _bytes_of(leaf)
        for one, own in zip(loops, places, strict=True)
        for p, leaf in zip(own, one.state, strict=True)
    }
    needed = set[int]()
    while True:
        wider = set(needed)
        for own, each in zip(places, saved, strict=True):
            wanted = [place in needed for place in own]
            wider |= {place for number, place in enumerate(own) if place not in needed and each.needs(number, wanted)}
        if wider == needed:
            return sum(sizes[place] for place in needed)
        needed = wider


def _sum(values: Iterable[object]) -> int:
    return sum(map(_bytes_of, values))


def _bytes_of(value: Any) -> int:
    aval = value if hasattr(value, "shape") and not isinstance(value, jax.Array) else jax.typeof(value)
    symbol = next((size for size in aval.shape if not isinstance(size, int)), None)
    if symbol is not None:
        raise Uncounted(
            f"the size `{symbol}` of an array is symbolic",
            f"{{call}}: there is no plan, because it counts bytes, and the size `{symbol}` of an array is symbolic.",
            'Choose a plan yourself, for example `remat="nested"`, or export with known sizes.',
        )
    return bytes_of(aval)


class Residual(NamedTuple):
    """A value that the gradient saves of each step: its type, and the equation that computes it."""

    aval: Aval
    equation: JaxprEqn


@dataclass(frozen=True, eq=False)
class Saved:
    """What the gradient saves of a step: what its derivative reads, and the step is given in its state or computes.

    What depends on nothing that changes from step to step is not saved in each, nor is what JAX's linearization keeps
    without reading it. Nor are leaves of the state that a step only adds to, for example a sum.

    Attributes:
        residuals: what the step computes.
        read: the leaves of the state, by number.
        jaxpr: from what the step is given to the residuals and to the leaves of the next state.
        state: its inputs that are the leaves of the state.
    """

    residuals: list[Residual]
    read: dict[int, Aval]
    jaxpr: Jaxpr
    state: list[Var]

    @property
    def bytes(self) -> int:
        """Of all of it."""
        return _sum([*(residual.aval for residual in self.residuals), *self.read.values()])

    def needs(self, number: int, wanted: Sequence[bool]) -> bool:
        """Whether a leaf of the state has to be known for the residuals, or for a wanted leaf of the next state."""
        if number in self.read:
            return True
        given = dependent(self.jaxpr, [var is self.state[number] for var in self.jaxpr.invars])
        first = len(self.jaxpr.outvars) - len(wanted)
        outputs = [*self.jaxpr.outvars[:first], *itertools.compress(self.jaxpr.outvars[first:], wanted)]
        return not given.isdisjoint(variables_of(outputs))


def saved_of_step(loop: Loop, step: Step) -> Saved:
    """What the gradient saves of a step.

    Raises:
        NoGradient: if JAX cannot differentiate the step in reverse mode.
        Uncounted: if what its gradient saves cannot be known.
    """
    try:
        return _saved_of_step(loop, step, of_xs=True)
    except NoGradient as refused:
        try:  # a callback may read xs that are not differentiated
            return _saved_of_step(loop, step, of_xs=False)
        except NoGradient:
            raise refused from None


def _saved_of_step(loop: Loop, step: Step, *, of_xs: bool) -> Saved:
    """What the gradient saves of a step, with respect to xs too or not."""
    given = loop.consts, loop.state, one_step(loop.xs)
    differentiated = len(jax.tree.leaves(given if of_xs else given[:2]))
    step = _without_symbolic_zeros(loop, step) if has_symbolic_zeros(loop.hoisted.jaxpr) else step
    try:
        return _saved_by_vjp(step, given, differentiated)
    except Exception as error:  # whatever JAX or a rule of the user says: the gradient would say it too
        says = " ".join(str(error).partition("\n\n")[0].split())
    raise NoGradient(
        f"JAX says, {says}",
        "{call}: there is no plan, because JAX cannot differentiate a {unit} in reverse mode.",
        f"`remat` changes gradients in reverse mode alone. A loop without one needs no plan. JAX says: {says}",
    )


def _saved_by_vjp(step: Step, given: tuple[Any, Leaves, Feed], differentiated: int) -> Saved:
    """What the gradient saves, with respect to the floating-point leaves among so many of the first ones."""
    read = list[bool]()

    def residuals(*given: Any) -> tuple[Leaves, Leaves]:
        leaves, structure = jax.tree.flatten(given)
        floats = [place < differentiated and is_smooth(leaf) for place, leaf in enumerate(leaves)]

        def of_floats(*given: Any) -> tuple[Leaves, Leaves]:
            new, y = step(*jax.tree.unflatten(structure, replaced(floats, leaves, given)))
            return list(filter(is_smooth, jax.tree.leaves((new, y)))), jax.tree.leaves(new)

        returned, pullback, new = jax.vjp(of_floats, *split(floats, leaves)[0], has_aux=True)
        kept, derivative = jax.tree.flatten(pullback)
        flags = _read(lambda kept, given: jax.tree.unflatten(derivative, kept)(given), kept, returned)
        read.extend(flags)
        return split(flags, kept)[0], new

    jaxpr = jax.make_jaxpr(residuals)(*given).jaxpr
    consts, carried, _ = inputs_of(jaxpr, given)
    same = set(jax.tree.leaves(consts))
    changing = dependent(jaxpr, [var not in same for var in jaxpr.invars])
    kept = dict.fromkeys(var for var in variables_of(jaxpr.outvars[: sum(read)]) if var in changing)
    computed = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    state = {number: aval_of(var) for number, var in enumerate(carried) if var in kept}
    found = [Residual(aval_of(var), computed[var]) for var in kept if var in computed]
    return Saved(found, state, jaxpr, carried)


def _without_symbolic_zeros(loop: Loop, step: Step) -> Step:
    """The step, with functions in place of their derivative rules.

    JAX runs a rule with symbolic zeros (`jax.custom_vjp`) once per trace, for the inputs that are perturbed then. It
    fails in a gradient that perturbs others (jax 0.8 to 0.10), so the count must not be the first to run it.
    """

    def without(consts: PyTree, state: Leaves, feed: Feed) -> tuple[PyTree, PyTree]:
        given = consts, state, feed
        closed, types = jax.make_jaxpr(lambda *given: step(*given), return_shape=True)(*given)
        results = evaluate_inlined(closed.jaxpr, closed.consts, jax.tree.leaves(given), called)
        return jax.tree.unflatten(jax.tree.structure(types), results)

    jaxpr = jax.make_jaxpr(without)(loop.consts, loop.state, one_step(loop.xs)).jaxpr
    if has_symbolic_zeros(jaxpr):
        raise Uncounted(
            "a `jax.custom_vjp` in it has symbolic zeros, and JAX runs such a rule only once",
            "{call}: there is no plan, because a loop or a branch in the body has a `jax.custom_vjp` with "
            "symbolic zeros. JAX runs such a rule once, so treescan cannot ask it what it saves.",
            'Choose a plan yourself, for example `remat="nested"`.',
        )
    return without


def _read(function: Callable[..., object], leaves: Leaves, *others: Any) -> list[bool]:
    """The input leaves that a function reads or returns, also inside calls."""
    outer = jax.make_jaxpr(function)(leaves, *others)
    jaxpr = inlined(outer.jaxpr, outer.consts, jax.tree.leaves((leaves, others))).jaxpr
    used = set(variables_of([*jaxpr.outvars, *(atom for each in jaxpr.eqns for atom in each.invars)]))
    return [var in used for var in jaxpr.invars[: len(leaves)]]


_EVERYTHING = jax.checkpoint_policies.everything_saveable

MARGIN = 1.05
"""A plan fits if the bytes that it needs, times this margin, fit. XLA's own plan differs by a few per cent."""

_OF_A_REST = 1.1
"""A plan with a remainder compiles the step once more, so it must need this much less than another plan."""


ASSUMED = (
    "The gradient is assumed to be with respect to everything floating-point: the carry, xs, and what the body closes "
    "over. Outputs and their cotangents count as results and arguments."
)
"""What is assumed of a gradient whose bytes are estimated."""


@dataclass(frozen=True, repr=False)
class RematPlan:
    """A report of what the gradient of a loop saves under a `Remat`, and how often it evaluates the body. Print it.

    Attributes:
        remat: the `Remat` that was picked; None: everything is saved; "auto": the same, in chunks whose
            products with weights are computed at once.
        steps: the number of steps T; of a pattern, the periods.
        sizes: the steps of the nested chunks, innermost first.
        carry_bytes: of the leaves of the carry that a chunk is computed again from. A leaf that a step only adds to,
            for example a sum, is not among them.
        step_bytes: of everything that one step saves if nothing is recomputed, what is read of its carry included.
        saved_bytes: of everything that is saved at the same time.
        copied_bytes: of the copies that levels make: the slices of xs for a chunk, the gradients of these and of its
            outputs, and a sum of the gradients of shared values. If steps are left over that fill no chunk, all of xs
            is copied too.
        needed_bytes: of everything that the gradient needs besides its arguments and results: saved values, copies, and
            the memory of one step's gradient. It is an estimate, for a gradient with respect to everything
            floating-point: the carry, xs, and what the body closes over. `Remat.fit` compares it with its budget.
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

    @property
    def has_rest(self) -> bool:
        """Whether there is a remainder: steps that do not fill a chunk."""
        return bool(self.sizes and self.steps % self.sizes[-1])

    @property
    def parts(self) -> list[int]:
        """How many parts each loop runs, outermost first: their product is the number of steps."""
        outer = self.steps if not self.sizes else -(-self.steps // self.sizes[-1])
        return [outer, *[large // small for small, large in itertools.pairwise((1, *self.sizes))][::-1]]

    @property
    def least_evaluations(self) -> float:
        """How often each step would be evaluated at least, on average, by a plan that saves as many carries.

        This is the optimum of binomial checkpointing (Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26(1),
        2000), and the one evaluation of each step that its derivative takes. A chunk that saves all of its steps counts
        as one step.
        """
        if self.evaluations == 1 or not self.steps:
            return 1.0
        saves_whole_chunks = self.evaluations == len(self.sizes) + 1
        slots = sum(self.parts[:-1] if saves_whole_chunks else self.parts)
        steps = -(-self.steps // self.sizes[0]) if saves_whole_chunks else self.steps
        repeats = next(r for r in itertools.count() if math.comb(slots + r, r) >= steps)
        advanced = repeats * steps - math.comb(slots + repeats, repeats - 1) if repeats else 0
        return 1 + advanced / steps

    def __repr__(self) -> str:
        needed = describe_bytes(self.needed_bytes)
        return f"<RematPlan of {self.remat!r}: {needed} needed, {self.evaluations} evaluations of each step>"

    def __str__(self) -> str:
        rows = table(("", "", ""), self._rows()).lstrip("\n").rstrip()
        return f"remat={self.remat!r}\n\n{rows}\n\n{wrap(ASSUMED)}"

    def _repr_html_(self) -> str:
        return page(f"remat={self.remat!r}", [Section("", (), self._rows(), [ASSUMED])])

    def _rows(self) -> list[tuple[str, str, str]]:
        least = self.least_evaluations
        return [
            ("steps", f"{self.steps:,}", " x ".join(f"{part:,}" for part in self.parts) if self.sizes else "one loop"),
            ("a carry", describe_bytes(self.carry_bytes), "what a chunk is computed again from"),
            ("a step", describe_bytes(self.step_bytes), "what it saves if it is not recomputed"),
            ("saved", describe_bytes(self.saved_bytes), "at one time, by the gradient"),
            ("copied", describe_bytes(self.copied_bytes), "of xs and of gradients, by the levels"),
            ("needed", describe_bytes(self.needed_bytes), "an estimate, without arguments and results"),
            ("evaluations", f"{self.evaluations:,}", "of each step, the forward pass included"),
            *([("at least", f"{least:.2f}", "by any plan that saves as many carries")] if self.evaluations > 2 else []),
        ]


def describe_bytes(count: int) -> str:
    """A number of bytes, in a suitable unit."""
    power = min(int(math.log2(count) // 10), 4) if count else 0
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{count / 2 ** (10 * power):,.1f} {unit}" if power else f"{count:,} {unit}"


def fit_budget(loop: Loop, remat: Remat) -> Remat | None:
    """The plan of a `Remat` for a loop that `hoist` made. One with a budget is given a plan that fits.

    Raises:
        Fault: for an `ArgumentError` if no plan fits.
    """
    return remat if remat.budget is None else chosen(lambda: plan_of(loop, remat))


def chosen(plan: Callable[[], RematPlan]) -> Remat | None:
    """What a plan says. A loop without a derivative in reverse mode saves nothing, so it has none."""
    try:
        remat = plan().remat
    except NoGradient:
        return None
    return remat if isinstance(remat, Remat) else None


class Cut(NamedTuple):
    """How a gradient runs a loop.

    Attributes:
        sizes: the steps of the nested chunks that it recomputes, innermost first.
        again: whether it recomputes each step too.
    """

    sizes: tuple[int, ...]
    again: bool

    @classmethod
    def of(cls, length: int, remat: Remat | None) -> Cut:
        """What a `Remat` asks for."""
        return cls(remat_sizes(length, remat), remat is not None and remat.policy is not _EVERYTHING)

    @property
    def evaluations(self) -> int:
        """How often the gradient evaluates each step, the forward pass included."""
        return 1 + len(self.sizes) + self.again


def plan_of(loop: Loop, remat: Remat | tuple[Remat | None, ...] | None, cut: Cut | None = None) -> RematPlan:
    """What a loop's gradient saves under a `Remat`, as an estimate from the trace of the gradient of its step.

    Args:
        loop: the traced loop.
        remat: the plan; of loops that take turns it may be a tuple of their own.
        cut: how the loop is run, where its verb has chunks of its own; None: as the plan says.
    """
    refuse_symbolic(loop.length, "remat")
    # What a body closes over counts as differentiated, as what it is given does.
    each = [lifted(one) for one in loop.turns or (loop,) if one.length]
    length = min(one.length for one in each)
    # The stacks that lead are copied: their last layers are cut off them.
    leading = (one for one in each if one.length > length)
    once = length * sum(_sum(jax.tree.leaves(one_step(one.xs))) for one in leading)
    step = dataclasses.replace(footprint_of(each), once=once)
    if isinstance(remat, tuple):  # of which None saves all of its steps
        return describe(None, length, step, sum(map(_kept_of_step, each, remat)), cut)
    if remat is not None and remat.budget is not None:
        unit = "period" if len(each) > 1 else "{unit}"
        return cheapest_within(remat.budget, length, step, *_in_chunk(each, step), unit)
    if remat is not None and saves_whole_steps(each[0].hoisted, remat):
        in_chunk, whole = _in_chunk(each, step)
        return describe(remat, length, in_chunk, whole, cut)
    has_policy = remat is not None and callable(remat.policy) and remat.policy is not _EVERYTHING
    return describe(remat, length, step, sum(_kept_of_step(one, remat) for one in each) if has_policy else None, cut)


def _kept_of_step(loop: Loop, remat: Remat | None) -> int:
    """What is saved of each step under a `Remat`."""
    return saved_of_step(loop, loop.step if remat is None else _checkpointed(loop, remat)).bytes


def _checkpointed(loop: Loop, remat: Remat) -> Step:
    return checkpoint_step(loop.step, remat, looped=True, trace=loop.trace)


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
    raise Misuse(
        f"{{verb}} over {{body}}: no plan fits {describe_bytes(budget)}.",
        f"The smallest plan is `remat={least.remat!r}`. It needs "
        f"{describe_bytes(round(MARGIN * least.needed_bytes))}, including a margin of 5 %. There are {length:,} "
        f"{unit}s, the carry takes {describe_bytes(step.carry)}, a {unit} saves {describe_bytes(step.whole)}, and "
        f"its slices of xs take {describe_bytes(step.xs)}. Give `Remat.fit` a larger budget, or make the carry "
        "smaller.",
    )


def _in_chunk(loops: Sequence[Loop], step: Footprint) -> tuple[Footprint, int]:
    """The bytes of a step in a chunk that saves its steps, and what it saves of each.

    Where it computes the products of its steps at once, no step has gradients of weights of its own, and those of x
    take the place of what they were computed from.
    """
    loop, *others = loops
    if others or not saves_whole_steps(loop.hoisted, Remat(_EVERYTHING, levels=2)):
        return step, step.whole
    products = _faster.bytes_of_products(lifted(loop))
    if not products:
        return step, step.whole
    saved = _faster.saving_step(loop)
    in_chunk = dataclasses.replace(step, once=step.once - step.weights)
    return in_chunk, saved_of_step(loop, saved).bytes + products - step.d_xs


def _candidates(length: int, step: Footprint, in_chunk: Footprint, whole: int) -> Iterator[RematPlan]:
    """The plans, for chunks that save `whole` of each step."""
    yield describe(None, length, step)
    yield describe(Remat(levels=1), length, step)
    for levels in range(2, max(2, length.bit_length())):
        yield describe(Remat(levels=levels), length, step)
        for chunk in _chunks(length, levels):
            yield describe(Remat(levels=levels, chunk=chunk), length, step)
            yield describe(Remat(_EVERYTHING, levels=levels, chunk=chunk), length, in_chunk, whole)


def _chunks(length: int, levels: int) -> list[int]:
    """Candidate sizes of an innermost chunk: equal parts, fewer steps, and some more steps."""
    most = min(length - 1, round(4 * length ** (1 / levels)) + 1)
    within = range(2, max(3, most + 1))
    return sorted({*within[:: max(1, len(within) // 64)], *(size for size in within if length % size == 0)})


def describe(
    remat: Remat | None, length: int, step: Footprint, kept: int | None = None, cut: Cut | None = None
) -> RematPlan:
    """A plan of which each step of an innermost chunk saves `kept` bytes; None: as much as the policy says."""
    sizes, again = cut or Cut.of(length, remat)
    kept = (step.kept if again else step.whole) if kept is None else kept
    saved = _saved_bytes(length, sizes, step.carry, kept) + (step.working if again else 0)
    saved += length * step.decided if sizes else 0
    copied = _copied_bytes(length, sizes, step)
    of_one = 0 if again else max(step.working, 2 * step.carry + step.leaf)
    passing = 2 * (step.state - step.carry)  # the last value, and its cotangent
    needed = saved + copied + step.d_xs + step.weights + of_one + passing
    evaluations = Cut(sizes, again).evaluations
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
    at_one_level = step.xs + step.d_xs + step.d_ys  # of each step that a level slices out, and whose gradients it adds
    return sum(sizes) * at_one_level + len(sizes) * step.weights + cut + step.once
