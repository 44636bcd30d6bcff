"""Runs a chunk of steps with its products with weights computed at once, in its derivative and forward.

What it is for: a gradient step by step saves, for each of T steps, all that a product with weights needs, and adds one
`[in, out]` product per step to the cotangent of the weights. Here a chunk adds one product of `[C * rows, in]` with
`[C * rows, out]`. Measured, LSTM-like steps take 0.12 to 0.58 of the memory. Nothing else in the package does that.

How it works, for weights W that are the same in every step (`products.py` finds them):

1. The derivative of a product `a W` is `da W + a dW`. The first part stays in the loop, as `da` waits for the step
   before. The second needs only what `a` was in each step, and that is known once the chunk has run.
2. So the chunk runs once, keeps each `a`, and has zeros added to each product (`Recorded`). Its tangent is taken with
   respect to these zeros, too: for all steps, `a dW` is one product, and enters there (`_jvp_at_once`).
3. JAX transposes this. The loop in reverse returns the cotangents of the zeros, `[C, ...]`, and the cotangent of W is
   one product of them with every `a`. No step waits for it.

Products that read only x (`early`) wait for nothing: in the derivative all of them are computed before the loop, and
forward those with large weights are (`Forward`). What relies on something that turns out otherwise raises `Unproven`,
and the chunk runs step by step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from .._avals import (
    Array,
    Aval,
    Leaves,
    PyTree,
    bytes_of,
    elements,
    parts_of,
    place_like,
    stacked_type,
    vary_over,
    varying_axes,
)
from .._cpu import backend
from .._cpu.rows import as_one_matrix, written
from .._loop.chunk import RunChunk
from .._loop.feed import Feed, one_step
from .._loop.loop import Arrays, Loop, Memo, Plan, Step
from .._loop.run import run
from .._outputs.outputs import QuietSteps
from .._remat.checkpoint import Checkpointed, Policy, SaveDecisions, chooses
from .._trace.cost import TRANSCENDENTAL, count_operations
from .._trace.equations import PRODUCTS, alone, aval_of, has_branches, inputs_of, values_of
from .._trace.rewriting import Unproven, add_alike, typed_like
from .._trace.rules import with_rule
from .._trace.smooth import fill_in, nonzero_part, smooth_part
from .._trace.steps import array_of
from .._trace.trace import Trace
from .._trace.transposed import mapped_later, push_plainly
from .products import ELEMENTWISE, Deferred, Parts, Reads, Split, TangentSlot, products_of_step, slots_of

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn, Primitive

# Products of all steps.


def compute_early(program: Jaxpr, reads: Leaves, fed: Leaves) -> list[Array]:
    """What an open jaxpr computes of each step, for all of them: `[C, ...]`.

    Args:
        program: (reads, feed) to a list of values in which steps differ.
        reads: what is the same in every step.
        fed: what each step is fed, `[C, ...]`.

    Raises:
        Unproven: if a result is not a stack of what a step computes.
    """
    values = dict(zip(program.invars, [*reads, *fed], strict=True))
    _, stacked = map(set, inputs_of(program, (reads, fed)))
    for equation in program.eqns:
        taken, one = alone(program, equation)
        differ = [not hasattr(atom, "val") and atom in stacked for atom in equation.invars]
        if not any(differ):
            out = eval_jaxpr(one, [], *(values[var] for var in taken))
        elif equation.primitive.name in PRODUCTS and not all(differ):
            operand = differ.index(False)
            operands = values_of(equation.invars, values)
            out = [product_of_steps(equation, operands[1 - operand], operands[operand], operand)]
        else:
            out = _of_each_step(one, [values[var] for var in taken], [0 if var in stacked else None for var in taken])
        if any(differ):
            stacked.update(equation.outvars)
        values.update(zip(equation.outvars, out, strict=True))
    computed = values_of(program.outvars, values)
    for value, var in zip(computed, program.outvars, strict=True):
        # No program is known that fails this. It is a net below the rules by which JAX maps primitives.
        of_one = value.shape[1:], value.dtype, parts_of(value)[1:]
        aval = aval_of(var)
        if of_one != (aval.shape, aval.dtype, parts_of(aval)):
            raise Unproven(f"{jax.typeof(value)} is computed for steps of {aval}")
    return computed


def _of_each_step(one: Jaxpr, values: Leaves, axes: list[int | None]) -> list[Array]:
    """What an equation gives for each step: mapped by JAX, whose rule for it may fail.

    That of `clamp` does in JAX 0.10 where a bound of rank 0 is mapped, and its operand is not.
    """
    evaluate: Callable[..., Leaves] = functools.partial(eval_jaxpr, one, [])
    try:
        return jax.vmap(evaluate, axes)(*values)
    except Exception as error:
        raise Unproven(f"{one.eqns[0].primitive.name} cannot be mapped") from error


def product_of_steps(equation: JaxprEqn, stacked: Array, same: Array, operand: int) -> Array:
    """The products of all steps, `[C, ...]`.

    Args:
        equation: of one of them. It has no `out_sharding`: `products.py` leaves those that do in their step.
        stacked: the operand in which steps differ, `[C, ...]`.
        same: the other.
        operand: the place of that other.
    """
    if equation.params["dimension_numbers"][1][0]:

        def multiply(one: Array) -> Array:
            pair = (same, one) if operand == 0 else (one, same)
            return equation.primitive.bind(*pair, **equation.params)

        return jax.vmap(multiply)(stacked)
    contracted, _ = equation.params["dimension_numbers"]
    mine, its = contracted[1 - operand], contracted[operand]
    free = [axis for axis in range(stacked.ndim - 1) if axis not in mine]
    ordered = stacked.transpose(0, *(axis + 1 for axis in (*free, *mine)))
    outer, inner = ordered.shape[: 1 + len(free)], ordered.shape[1 + len(free) :]
    ordered = as_one_matrix(ordered, len(outer))
    product = jax.lax.dot_general(
        ordered,
        same,
        ((tuple(range(ordered.ndim - len(inner), ordered.ndim)), its), ((), ())),
        precision=equation.params["precision"],
        preferred_element_type=equation.params["preferred_element_type"],
    )
    product = product.reshape(*outer, *product.shape[ordered.ndim - len(inner) :])
    if operand == 1:
        return product
    return product.transpose(0, *range(len(outer), product.ndim), *range(1, len(outer)))


def _read(early: Array) -> Array:
    """A step's entry of an early product, in an array of its own.

    XLA's CPU backend would read it out of the stack in each fusion: a step of a GRU then takes 1.1 to 1.2 of the time.
    """
    return written(early)


def entry_of(stack: Array, place: Array) -> Array:
    """One step's entry of a stack, `[C, ...]`."""
    return jax.lax.dynamic_index_in_dim(stack, place, keepdims=False)


# A step without the products that were computed before.


@dataclass(frozen=True)
class Forward:
    """A step without the products that were computed before.

    Its consts are (reads, these products `[C, ...]`), its x (place, fed): the loop that writes in place tells its steps
    their place, and feeds them nothing more.
    """

    split: Split

    def __call__(self, consts: PyTree, state: Leaves, feed: Feed) -> tuple[Leaves, Leaves]:
        (reads, early), (place, fed) = consts, feed.x
        now = [_read(entry_of(stack, place)) for stack in early]
        rest = self.split.forward.rest
        out = eval_jaxpr(rest, [], *reads, *now, *state, *fed, propagate_source_info=True)
        return _parted(self.split, rest, out)


@dataclass(frozen=True, repr=False)  # JAX asks for its name: a repr would print all that it holds
class Recorded:
    """A step as a function of its products too.

    Its consts are (reads, weights), its x (early, fed, added), its y (y, what the weights are multiplied with). The
    latter is None for a product of what the step is fed.

    Attributes:
        split: the step.
        deferred: the products with these weights.
        slots: to what is added what is zero but for its tangent.
    """

    split: Split
    deferred: tuple[Deferred, ...]
    slots: tuple[TangentSlot, ...]

    def __call__(self, consts: PyTree, state: Leaves, feed: Feed) -> tuple[Leaves, Any]:
        (reads, weights), (early, fed, added) = consts, feed.x
        rest, inputs = self.split.derivative.rest, self.split.derivative.inputs
        read = Reads(reads, list(map(_read, early)), state, fed)
        values = dict(zip(jax.tree.leaves(inputs), jax.tree.leaves(read), strict=True))
        is_fed = set(inputs.fed)
        numbers = {product.equation: i for i, product in enumerate(self.deferred)}
        tangents = {slot.equation: zero for slot, zero in zip(self.slots, added, strict=True)}
        kept: Leaves = [None] * len(self.deferred)
        for number, equation in enumerate(rest.eqns):
            taken, one = alone(rest, equation)
            given = [values[var] for var in taken]
            i = numbers.get(number)
            if i is not None:
                same, other = self.deferred[i].of(equation)
                kept[i] = None if other in is_fed else values[other]
                given = [weights[i] if var is same else value for var, value in zip(taken, given, strict=True)]
            out = eval_jaxpr(one, [], *given, propagate_source_info=True)
            if number in tangents:
                out = [_with_tangent(*out, tangents[number])]
            values.update(zip(equation.outvars, out, strict=True))
        state, y = _parted(self.split, rest, values_of(rest.outvars, values))
        return state, (y, kept)


def _parted(split: Split, rest: Jaxpr, out: Sequence[object]) -> tuple[Leaves, Leaves]:
    leaves = [array_of(value, aval_of(var)) for value, var in zip(out, rest.outvars, strict=True)]
    count = split.state.num_leaves
    return leaves[:count], leaves[count:]


@jax.custom_jvp
def _with_tangent(value: Array, zero: Array) -> Array:
    """The sum with something that is zero, but for its tangent."""
    del zero
    return value


@_with_tangent.defjvp
def _with_tangent_rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _with_tangent(*primals), add_alike(*tangents)


# A chunk of steps, and its derivative.


def run_split(plan: Plan, split: Split, given: Arrays) -> tuple[Leaves, Leaves]:
    """Runs a chunk of steps: the leaves of the last state, and of ys. Its consts, state and xs are lists of leaves."""
    # JAX keeps the rule with the trace of the loop over chunks, and that for as long as the memo keeps the loop's step:
    # a rule that referred to the memo would keep itself, and all that the body closes over.
    apart = plan.apart()

    def rule(primals: tuple[Arrays], tangents: tuple[Arrays]) -> tuple[Any, Any]:
        try:
            return _jvp_at_once(apart, split, primals[0], tangents[0])
        except Unproven:
            whole = functools.partial(_forward, apart, split)
            return push_plainly(whole, *primals, *tangents, branches=has_branches(split.derivative.rest))

    return with_rule(functools.partial(_forward, plan, split), rule, call=True)(given)


def _forward(plan: Plan, split: Split, given: Arrays) -> tuple[Leaves, Leaves]:
    reads, state, fed = given
    early = compute_early(split.forward.early, reads, fed)
    return run(plan.having(step=Forward(split)), Arrays((reads, early), state, Feed((jnp.arange(plan.length), fed))))


def _jvp_at_once(plan: Plan, split: Split, given: Arrays, d_given: Arrays) -> tuple[Any, Any]:
    """The results and their tangents.

    The early values are computed before the loop, their tangents too. One that is added to deferred products is a
    constant of the loop: its tangent enters with theirs, in a slot, and the loop in reverse returns one cotangent of
    the sum in place of two. All tangents here are of the first order. A derivative of this derivative is JAX's own, of
    all that is computed here.
    """
    part, d_on = nonzero_part(given, d_given)
    on, off = part.split(given)
    early, rest, inputs = split.derivative
    deferred = tuple(each for each in split.deferred if not isinstance(d_given.consts[each.read], SymbolicZero))
    slots = slots_of(rest, inputs.early, deferred)
    in_slots = {i for slot in slots for i in slot.early}

    def before_loop(on: Leaves) -> list[Array]:
        whole: Arrays = part.join(on, off)
        return compute_early(early, whole.consts, whole.xs)

    values, push_early = jax.linearize(before_loop, on)
    d_values = push_early(d_on)
    others = [i for i in range(len(values)) if i not in in_slots]
    weights = [given.consts[each.read] for each in deferred]  # constants of the loop: their tangents are the products
    # The loop saves what the derivatives of its steps read. The cheap part of that is computed again instead.
    step = jax.checkpoint(
        Recorded(split, deferred, slots), prevent_cse=False, policy=SaveDecisions(policy_within(rest))
    )

    def recorded(on: Leaves, of_others: list[Array], added: list[Array]) -> tuple[Leaves, Any]:
        whole: Arrays = part.join(on, off)
        before = [*values]
        for i, value in zip(others, of_others, strict=True):
            before[i] = value
        recording = Arrays((whole.consts, weights), whole.state, Feed((before, whole.xs, added)))
        state, (ys, kept) = run(plan.having(step=step), recording)
        return smooth_part((state, ys)).split((state, ys))[0], ((state, ys), kept)

    zeros = [_zeros(plan.length, aval_of(rest.eqns[slot.equation].outvars[0])) for slot in slots]
    _, push, (result, kept) = jax.linearize(recorded, on, [values[i] for i in others], zeros, has_aux=True)
    products = [
        product_of_steps(rest.eqns[each.equation], stacked, d_given.consts[each.read], each.operand)
        for each, stacked in zip(deferred, _operands(split.derivative, deferred, kept, given.xs), strict=True)
    ]
    added = [
        typed_like(
            zero,
            functools.reduce(add_alike, [*(products[i] for i in slot.deferred), *(d_values[i] for i in slot.early)]),
        )
        for slot, zero in zip(slots, zeros, strict=True)
    ]
    tangents = d_on, [d_values[i] for i in others], added
    d_result = mapped_later(push, *tangents) if has_branches(rest) else push(*tangents)
    return result, fill_in(result, d_result)


def _operands(parts: Parts, deferred: Sequence[Deferred], kept: Leaves, fed: Leaves) -> list[Array]:
    """What each product multiplies its weights with in each step, `[C, ...]`: what the loop kept, or was fed."""
    feed = dict(zip(parts.inputs.fed, fed, strict=True))
    others = [each.of(parts.rest.eqns[each.equation])[1] for each in deferred]
    return [feed.get(other, stacked) for other, stacked in zip(others, kept, strict=True)]


def policy_within(jaxpr: Jaxpr) -> Policy:
    """What a chunk that saves its steps saves of each: all but cheap operations, or all if the step chooses."""
    return jax.checkpoint_policies.everything_saveable if chooses(jaxpr) else save_all_but_cheap


def save_all_but_cheap(prim: Primitive, *args: object, **params: object) -> bool:
    """The policy within a chunk: all is saved but what is computed again sooner than it is read.

    A transcendental function, for example `tanh`, is saved: XLA's CPU backend computes it in each fusion that reads it.
    """
    del args, params
    return prim.name not in ELEMENTWISE or prim.name in TRANSCENDENTAL


def _zeros(length: int, aval: Aval) -> Array:
    stacked = stacked_type(aval, length)
    return vary_over(place_like(jnp.zeros(stacked.shape, stacked.dtype), stacked), varying_axes(aval))


# What is put around a chunk, or a step of one.


@dataclass(frozen=True)
class InBulk:
    """The step that runs a chunk of steps.

    Attributes:
        chunk: the same, step by step.
    """

    chunk: RunChunk

    @property
    def is_loop(self) -> bool:
        """Whether XLA runs the chunk as a loop."""
        return self.chunk.is_loop

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        plan, given = self.chunk.plan, Arrays(consts, state, feed)
        split = _split_of(plan, given)
        if split is None:
            return run(plan, given)
        try:
            state, ys = run_split(plan, split, Arrays(_reads(split, consts), *map(jax.tree.leaves, (state, feed))))
        except Unproven:
            return run(plan, given)
        return jax.tree.unflatten(split.state, state), jax.tree.unflatten(split.y, ys)


def products_at_once(chunk: Step) -> Step:
    """What runs a chunk, with the products of its steps at once; unchanged if it does not run its steps one by one."""
    if isinstance(chunk, QuietSteps):
        return dataclasses.replace(chunk, inside=products_at_once)
    return InBulk(chunk) if isinstance(chunk, RunChunk) and not chunk.levels else chunk


def bytes_of_products(loop: Loop) -> int:
    """The bytes per step that chunks of a loop keep for the products that they compute at once; 0: there are none.

    These are the products (their cotangents), and what they multiply, where it is neither carried nor scanned over. The
    step of the loop closes over nothing.
    """
    split = _split_of(loop, loop.arrays)
    if split is None:
        return 0
    rest = split.derivative.rest
    equations = [(each, rest.eqns[each.equation]) for each in split.deferred]
    products = [e.outvars[0] for _, e in equations]
    operands = {id(var): var for var in (each.of(e)[1] for each, e in equations)}
    kept = [var for key, var in operands.items() if key not in set(map(id, rest.invars))]
    return sum(bytes_of(var.aval) for var in (*products, *kept, *split.derivative.early.outvars))


# Whether it pays.


PAYS = 8
"""How many times the operations of its other equations the products of a step must take, to be worth a chunk's rule.

Fitted on one half of the families of steps in `benchmarks/`, and judged by the other, of which none takes longer so.
"""

ROWS = 4
"""How many rows a product must have to pay: with fewer, a step adds to the gradient of its weights as fast."""

CACHED = 2**14
"""Elements of weights from which on their products pay with any number of rows: no inner cache holds the gradient."""

WIDE = 2**22
"""Elements of weights from which on products pay on a GPU: a step takes as long to begin a smaller one as an addition.

Measured on an H200, 128 steps of 64 rows: 2,048 x 2,048 weights take 0.73 of the time, 1,024 x 1,024 take 1.08.
"""


def products_pay(trace: Trace, plan: Plan, given: Arrays) -> bool:
    """Whether a chunk of a loop takes less time if it computes the products of its steps at once.

    It does so if the products with weights are most of a step, and have enough rows. All else takes more time in a
    chunk than step by step, and a step that chooses among values would save all that it computes. The step of the loop
    closes over nothing.
    """
    split = None if trace.branches or chooses(trace.jaxpr) else _split_of(plan, given)
    if split is None:
        return False
    early, rest, _ = split.derivative
    products = [rest.eqns[each.equation] for each in split.deferred]
    products += [equation for equation in early.eqns if equation.primitive.name in PRODUCTS]
    paying = [product for product in products if _has_rows(rest.replace(eqns=[product]))]
    of_products = count_operations(rest.replace(eqns=paying), transcendental=1)
    of_all = sum(count_operations(jaxpr, transcendental=1) for jaxpr in (early, rest))
    return of_products >= PAYS * (of_all - of_products)


def _has_rows(product: Any) -> bool:
    """Whether a product, a jaxpr of one equation, has enough rows: each reads the larger operand once."""
    operands = [atom.aval for atom in product.eqns[0].invars]
    larger, symbolic = max(map(elements, operands)), any(not isinstance(n, int) for a in operands for n in a.shape)
    if not backend.on_cpu():
        return larger >= WIDE
    return symbolic or larger >= CACHED or count_operations(product) >= 2 * ROWS * larger


def at_once(step: Step, looped: bool) -> Step:
    """What is put around a chunk that saves its steps: their products are computed at once.

    The loop over chunks saves for each chunk what its rule reads, of which the cheap part is computed again: a third to
    a half of all, where products are early. The remainder is one chunk, so it would save little. Outside of a loop, it
    would cost more: there XLA must be kept from merging the two computations.
    """
    return Checkpointed(products_at_once(step), looped, save_all_but_cheap) if looped else products_at_once(step)


def saving_step(loop: Loop) -> Step:
    """A step of a chunk that saves its steps, as the rule of the chunk differentiates it."""
    return Checkpointed(loop.step, looped=True, policy=policy_within(loop.hoisted.jaxpr))


def _reads(split: Split, consts: PyTree) -> Leaves:
    same = [*split.closed, *jax.tree.leaves(consts)]
    return [*eval_jaxpr(split.once, [], *same), *same]


@dataclass(frozen=True)
class RestOfStep:
    """A step of a chunk, without the products that were computed before. Its x is (place in the chunk, feed)."""

    forward: Forward

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        place, fed = feed.x
        leaves = Feed((place, jax.tree.leaves(fed)))
        state, y = self.forward(consts, jax.tree.leaves(state), leaves)
        split = self.forward.split
        return jax.tree.unflatten(split.state, state), jax.tree.unflatten(split.y, y)


@dataclass(frozen=True)
class AllOfStep:
    """A step in the same form that computes everything itself."""

    step: Step

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        _, fed = feed.x
        return self.step(consts, state, fed)


def without_early_products(plan: Plan, given: Arrays) -> tuple[AllOfStep, PyTree]:
    """The form of a step that has no early products."""
    return AllOfStep(plan.step), given.consts


def with_early_products(plan: Plan, given: Arrays) -> tuple[RestOfStep | AllOfStep, PyTree]:
    """The step of a chunk whose early products are computed now, and its consts; for what is not differentiated."""
    split = _split_of(plan, given)
    if split is None or not split.forward.early.outvars:
        return without_early_products(plan, given)
    reads = _reads(split, given.consts)
    try:
        early = compute_early(split.forward.early, reads, jax.tree.leaves(given.xs))
    except Unproven:
        return without_early_products(plan, given)
    return RestOfStep(Forward(split)), (reads, early)


def _split_of(plan: Plan, given: Arrays) -> Split | None:
    one = one_step(given.xs)
    # The step holds the trace of the body, which says the structures. Types are not all the same for a chunk of rows.
    key = (InBulk, plan.step, *map(jax.typeof, jax.tree.leaves((given.consts, given.state))), *jax.tree.leaves(one))
    return (plan.callee.memo or Memo())(key, lambda: products_of_step(plan.step, given.consts, given.state, one))
