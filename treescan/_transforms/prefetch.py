"""Runs a block over a stack, and gathers the next layer's weights while a layer is computed.

The loop carries the gathered weights of the layer that it runs next, and gathers those of the following layer, which do
not depend on what the layer computes. JAX would save the carry of each step for the gradient, that is, the whole stack
of gathered weights. So the loop has its own rule for reverse mode: a loop in the other direction, which gathers early
too, and recomputes each layer from its input.

The last step gathers its own layer again, because no layer follows. The gradient starts with that one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from .._avals import Array, LeafAxes, PyTree, TreeDef, describe_node, exact_int
from .._errors import ArgumentError, Fault, Misuse, expect
from .._loop.loop import Feed, Loop, Memo, Step, is_untraced
from .._loop.run import run
from .._trace.hoist import Hoisted, lifted, smooth_part, traced, zeros_like
from .._tree import Static, merge, same_structure, split, thaw_static
from .._types import Remat
from .axes import scan_over_axes
from .checkpoint import SaveDecisions
from .nest import finish, run_nested
from .refuse import once_only
from .remat import Recompute
from .transform import Stage, Transform


@dataclass(frozen=True)
class Gather:
    """Gathers one layer.

    Attributes:
        function: maps a layer to a gathered one; None: each of its arrays becomes whole on each device.
    """

    function: Callable[[PyTree], PyTree] | None = None

    @classmethod
    def of(cls, prefetch: Any) -> Gather | None:
        """What the user said.

        Raises:
            Fault: for an `ArgumentError` if it is neither 1, a function nor None.
        """
        if prefetch is None:
            return None
        if callable(prefetch):
            return cls(prefetch)
        cure = (
            "1 gathers the weights of the next layer on all devices while the current layer is computed. A function "
            "gathers them in its own way, and returns the layer."
        )
        kinds = "1, a function of one layer, or None"
        expect(exact_int(prefetch) == 1, "prefetch", kinds, prefetch, cure, error=ArgumentError)
        return cls()

    def __call__(self, layer: PyTree) -> PyTree:
        """The gathered layer; static leaves are frozen in both."""
        if self.function is None:
            return jax.tree.map(_whole, layer)
        given = thaw_static(layer)
        gathered = self.function(given)
        if not same_structure(given, gathered):
            raise Misuse(
                "{call}: `prefetch` must return a layer with the structure that it was given, but returned "
                f"{describe_node(gathered)}.",
                "Return the same layer with its weights gathered. Shapes and dtypes may change.",
            )
        nodes = jax.tree.leaves(layer, is_leaf=lambda node: isinstance(node, Static))
        pairs = zip(nodes, jax.tree.leaves(gathered), strict=True)
        return jax.tree.unflatten(
            jax.tree.structure(layer), [leaf for node, leaf in pairs if not isinstance(node, Static)]
        )


def _whole(leaf: Any) -> Any:
    """An array whole on each device of the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise Misuse(
            "{call}: `prefetch=1` gathers the weights on the devices of a mesh, but no mesh is set.",
            "Call it under `jax.set_mesh(mesh)`. Or give a function: `prefetch=lambda layer: "
            "jax.lax.with_sharding_constraint(layer, whole)`, where `whole` is a sharding.",
        )
    if AxisType.Manual in mesh.axis_types:
        raise Misuse(
            "{call}: `prefetch=1` gathers whole arrays, but within a `jax.shard_map` each device has only its part.",
            'Give a function that gathers them: `prefetch=lambda layer: jax.lax.all_gather(layer, "data", '
            "tiled=True)`.",
        )
    spec = PartitionSpec(*[None] * leaf.ndim)
    if AxisType.Explicit in mesh.axis_types:
        leaf = jax.sharding.reshard(leaf, spec)
    return jax.lax.with_sharding_constraint(leaf, spec) if AxisType.Auto in mesh.axis_types else leaf


@dataclass(frozen=True)
class GatherFirst:
    """The step that gathers its own layer before it runs. Its x is a tuple that begins with the layer."""

    step: Step
    gather: Gather

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        layer, *others = feed.x
        return self.step(consts, state, feed._replace(x=(self.gather(layer), *others)))


@dataclass(frozen=True)
class GatherLeaves:
    """Gathers a layer that comes as the leaves which are its own and those which all layers share.

    Attributes:
        gather: gathers the layer.
        structure: of the layer.
        axes: for each leaf None if all layers share it.
    """

    gather: Gather
    structure: TreeDef
    axes: LeafAxes

    def __call__(self, own: Sequence[Array], shared: Sequence[Array]) -> list[Array]:
        """The layer's own leaves, gathered."""
        of_all = [axis is None for axis in self.axes]
        leaves = merge(of_all, shared, own)
        gathered = jax.tree.leaves(self.gather(jax.tree.unflatten(self.structure, leaves)))
        return split(of_all, gathered)[1]


EACH_LAYER = Remat(levels=1)


@dataclass(frozen=True)
class Prefetch(Transform):
    """`prefetch`: gathers the next layer while one is computed.

    Attributes:
        gather: gathers the weights of one layer.
        axes: for each leaf of xs the axis of the layers, None for what all share; None as a whole: axis 0 for all.
    """

    gather: Gather
    axes: LeafAxes | None
    stage: ClassVar[Stage] = Stage.FED

    def __call__(self, loop: Loop) -> Loop:
        return dataclasses.replace(loop, runner=self.run)

    @staticmethod
    def no_forward_mode() -> Fault:
        """The error for forward mode of a loop that gathers early."""
        return Misuse(
            "{verb} over {body}: this is forward mode, but JAX differentiates a loop with `prefetch` only in reverse "
            "mode, like any function with a `jax.custom_vjp`.",
            "Leave `prefetch` out there. `jax.grad`, `jax.vmap`, and forward mode of a gradient work with it.",
        )

    def run(self, loop: Loop) -> tuple[PyTree, PyTree]:
        """Runs a loop whose x is a tuple that begins with the layer: its state, and its outputs, not finished yet."""
        loop, axes, gather = dataclasses.replace(loop, runner=None, finish=()), self.axes, self.gather
        if is_untraced(loop) or loop.length == 1:
            loop = dataclasses.replace(loop, step=GatherFirst(loop.step, gather))
            return run_nested(Recompute(EACH_LAYER)(loop if axes is None else scan_over_axes(loop, axes)))
        layers, structure = jax.tree.flatten(loop.xs.x[0])
        of_layers = (0,) * len(layers) if axes is None else axes[: len(layers)]
        gathers = GatherLeaves(gather, structure, of_layers)
        shared = [leaf for leaf, axis in zip(layers, of_layers, strict=True) if axis is None]
        loop = loop if axes is None else scan_over_axes(loop, axes)
        leaves, structure = jax.tree.flatten(loop.xs.x)
        count = len(layers) - len(shared)
        stack, others = leaves[:count], leaves[count:]
        types = jax.eval_shape(lambda stack, shared: _all_gathered(gathers, stack, shared), stack, shared)
        xs = loop.xs._replace(x=jax.tree.unflatten(structure, [*types, *others]))
        loop = lifted(traced(dataclasses.replace(loop, xs=xs)))
        _refuse_to_repeat(loop.trace)
        layer = _Layer(loop.step, gathers, structure)
        both = _BothWays(layer, dataclasses.replace(loop, step=layer.step, consts=None, state=None, xs=Feed(None)))
        own = xs._replace(x=others)
        return finish(loop, *both.run(_Operands(loop.consts, shared, stack, loop.state, own)))


def _all_gathered(gathers: GatherLeaves, stack: list[Array], shared: list[Array]) -> list[Array]:
    """All layers gathered, for their types."""
    length = stack[0].shape[0]
    gathered = gathers([leaf[0] for leaf in stack], shared)
    return [jax.lax.broadcast(leaf, (length,)) for leaf in gathered]


def _refuse_to_repeat(hoisted: Hoisted) -> None:
    if hoisted.refs:
        raise Misuse(
            "{verb} over {body}: `prefetch` does not support a block that closes over a mutable array (a `Ref`).",
            "Pass its value in x instead, or leave the option out.",
        )
    if hoisted.once_only:
        raise once_only("`prefetch` recomputes each {unit} in the gradient", "Leave `prefetch` out")


class _Operands(NamedTuple):
    """The arrays of the loop.

    Attributes:
        consts: what the step reads in all layers.
        shared: the leaves of a layer that all share.
        stack: the other leaves, `[n, ...]`.
        state: what the first layer is given.
        own: what each layer is fed beside its weights, `[n, ...]`.
    """

    consts: PyTree
    shared: list[Array]
    stack: list[Array]
    state: list[Array]
    own: Feed


@dataclass(frozen=True)
class _Layer:
    """One layer of the loop.

    Attributes:
        step: runs it.
        gathers: gathers its weights.
        structure: of the step's x.
    """

    step: Step
    gathers: GatherLeaves
    structure: TreeDef

    def run(
        self, consts: PyTree, weights: Sequence[Array], state: list[Array], own: Feed
    ) -> tuple[list[Array], PyTree]:
        """The next state and y, from gathered weights."""
        return self.step(consts, state, own._replace(x=jax.tree.unflatten(self.structure, [*weights, *own.x])))

    def gathered(self, stack: Sequence[Array], number: Any, shared: Sequence[Array]) -> list[Array]:
        """The gathered weights of the layer with this number."""
        return self.gathers(_layer_at(stack, number), shared)


def _layer_at(stack: Sequence[Array], number: Any) -> list[Array]:
    return [jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False) for leaf in stack]


@dataclass(frozen=True)
class _Forwards:
    """The step of the loop: its state is (state, gathered weights), its x (the number of the next layer, own feed).

    Attributes:
        layer: runs and gathers.
        saves: whether the outputs are (the state that the layer was given, what the layer decided, y).
    """

    layer: _Layer
    saves: bool

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        (inner, shared, stack), (before, weights), (number, own) = consts, state, feed.x
        following = self.layer.gathered(stack, number, shared)
        if not self.saves:
            after, y = self.layer.run(inner, weights, before, own)
            return (after, following), y
        (after, y), decided = pull_later(self.layer.run, (inner, weights, before, own))
        return (after, following), (before, decided, y)


@dataclass(frozen=True)
class _Backwards:
    """The step of the gradient.

    Its state is (cotangents of the state, sums of those of consts and of shared leaves, gathered weights), its x
    (number, number of the layer that comes next here, state that the layer was given, what it decided, own feed,
    cotangents of y). Its outputs are the cotangents of the layer's weights and of its own feed. All these are lists of
    what has any.
    """

    layer: _Layer

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        (inner, shared, stack), (d_state, d_inner, d_shared, weights) = consts, state
        number, next_number, before, decided, own, d_y = feed.x
        following = self.layer.gathered(stack, next_number, shared)
        inputs = (inner, weights, before, own)
        d_consts, d_weights, d_before, d_own = decided.pull(inputs, [*d_state, *d_y])
        parts = (_layer_at(stack, number), shared)
        d_layer, d_of_all = _pull(self.layer.gathers, parts, jax.tree.leaves(d_weights))
        sums = _add(d_inner, d_consts), _add(d_shared, d_of_all)
        return (jax.tree.leaves(d_before), *sums, following), (jax.tree.leaves(d_layer), jax.tree.leaves(d_own))


def _pull(function: Any, inputs: tuple[Any, ...], cotangents: list[Array]) -> Any:
    """The cotangents of inputs, None for those that have none, from those of the outputs that have any."""
    part = smooth_part(inputs)
    on, off = part.split(inputs)

    def outputs(on: list[Array]) -> list[Array]:
        out = function(*part.join(on, off))
        return smooth_part(out).split(out)[0]

    return part.join(jax.vjp(outputs, on)[1](cotangents)[0], [None] * len(off))


def _add(sums: list[Array], more: PyTree) -> list[Array]:
    return [jnp.add(a, b) for a, b in zip(sums, jax.tree.leaves(more), strict=True)]


@dataclass(frozen=True, eq=False)
class _BothWays:
    """The loop and its rule for reverse mode.

    Attributes:
        layer: runs and gathers.
        like: how the loop runs, without arrays.
    """

    layer: _Layer
    like: Loop

    def run(self, operands: _Operands) -> tuple[list[Array], PyTree]:
        """The last state, and ys."""
        rule = jax.custom_vjp(lambda operands: self._forwards(operands, saves=False)[:2])
        rule.defvjp(self._forwards_saving, self._backwards)
        return rule(operands)

    def _forwards(self, operands: _Operands, *, saves: bool) -> tuple[list[Array], PyTree, list[Array]]:
        """The last state, the outputs, and the gathered weights of the last layer."""
        consts, shared, stack, state, own = operands
        first, following = self._order(reverse=self.like.reverse)
        weights = self.layer.gathered(stack, first, shared)
        loop = self._loop(_Forwards(self.layer, saves), (consts, shared, stack), (state, weights), (following, own))
        (state, weights), ys = run(loop)
        return state, ys, weights

    def _forwards_saving(self, operands: _Operands) -> tuple[Any, Any]:
        state, (states, decided, ys), weights = self._forwards(operands, saves=True)
        return (state, ys), (operands, states, decided, weights)

    def _backwards(self, saved: Any, cotangents: Any) -> tuple[_Operands]:
        operands, states, decided, weights = saved
        consts, shared, stack, _, own = operands
        smooth = [[leaf for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0] for tree in cotangents]
        d_state, d_ys = smooth
        sums = [[zeros_like(leaf) for leaf in smooth_part(tree).split(tree)[0]] for tree in (consts, shared)]
        _, following = self._order(reverse=not self.like.reverse)
        xs = jnp.arange(self.like.length), following, states, decided, own, d_ys
        loop = self._loop(_Backwards(self.layer), (consts, shared, stack), (d_state, *sums, weights), xs)
        (d_state, *sums, _), (d_stack, d_own) = run(dataclasses.replace(loop, reverse=not loop.reverse))
        part = smooth_part(operands)
        each = [*sums[0], *sums[1], *d_stack, *d_state, *d_own]  # in the order of the operands
        return (part.join(each, [None] * part.on.count(False)),)

    def _order(self, *, reverse: bool) -> tuple[int, Array]:
        """The number of the first layer, and for each that of the next one, or its own if it is the last."""
        numbers, last = jnp.arange(self.like.length), self.like.length - 1
        return (last, jnp.maximum(numbers - 1, 0)) if reverse else (0, jnp.minimum(numbers + 1, last))

    def _loop(self, step: Step, consts: PyTree, state: PyTree, xs: PyTree) -> Loop:
        return dataclasses.replace(self.like, step=step, consts=consts, state=state, xs=Feed(xs), memo=Memo())


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Decided:
    """A derivative in reverse mode that is evaluated later, in another loop, from the same inputs.

    Attributes:
        leaves: what it needs beside its inputs, that is, what the function decided.
        places: for each leaf of the derivative, its place among the leaves of the inputs; None: it is in `leaves`.
        structure: of the derivative.
    """

    leaves: list[Any]
    places: tuple[int | None, ...]
    structure: Any

    def pull(self, inputs: tuple[Any, ...], cotangents: list[Any]) -> Any:
        """The cotangents of the inputs, None for those that have none, from those of the outputs that have any."""
        given, decided, part = jax.tree.leaves(inputs), iter(self.leaves), smooth_part(inputs)
        leaves = [next(decided) if place is None else given[place] for place in self.places]
        (cots,) = jax.tree.unflatten(self.structure, leaves)(cotangents)
        return part.join(cots, [None] * part.on.count(False))

    def tree_flatten(self) -> tuple[Any, Any]:
        """The leaves, and the rest."""
        return (self.leaves,), (self.places, self.structure)

    @classmethod
    def tree_unflatten(cls, rest: Any, leaves: Any) -> Decided:
        """From the leaves, and the rest."""
        return cls(*leaves, *rest)


def pull_later(function: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, Decided]:
    """What a function returns, and its derivative, which computes the function again and decides nothing again."""
    part = smooth_part(inputs)
    on, off = part.split(inputs)

    def outputs(on: list[Any]) -> tuple[list[Any], list[Any]]:
        out = function(*part.join(on, off))
        structure.append(smooth_part(out))
        return structure[-1].split(out)

    structure: list[Any] = []
    checkpointed = jax.checkpoint(outputs, prevent_cse=False, policy=SaveDecisions())
    smooth, pull, others = jax.vjp(checkpointed, on, has_aux=True)
    leaves, derivative = jax.tree.flatten(pull)
    # JAX hands on the inputs that the derivative reads as the objects that they are. Anything else has to be saved.
    given = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(inputs))}
    places = tuple(given.get(id(leaf)) for leaf in leaves)
    kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return structure[-1].join(smooth, others), Decided(kept, places, derivative)
