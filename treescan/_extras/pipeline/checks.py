"""Refuses what is no pipeline: an axis that is not one of devices, and micro-batches and layers that do not fit it."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType

from ..._avals import PyTree, describe_leaf, shape_of, shards_of, varying_axes
from ..._errors import LayerFault, Misuse, Row, expect
from ..._stacks.layer_axis import count_layers
from ..._tree import leaves_with_path


def check_axis(name: Any) -> str:
    """The axis of the stages, if devices run this program along it, each its own."""
    cure = 'It names the axis of the mesh along which the stages are, for example `axis_name="stage"`.'
    expect(isinstance(name, str), "axis_name", "the name of one mesh axis", name, cure)
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(name) == AxisType.Manual:
        return str(name)
    manual = [axis for axis, kind in kinds.items() if kind == AxisType.Manual]
    if name in kinds and manual:
        axes = ", ".join(map(repr, (*manual, name)))
        raise Misuse(
            f"{{call}}: the mesh axis {name!r} is not manual in this `jax.shard_map`, so no device runs its own stage.",
            f"Name it among the manual axes, `jax.shard_map(..., axis_names={{{axes}}})`, or leave `axis_names` out: "
            "all axes are then manual.",
        )
    raise Misuse(
        f"{{call}}: this `jax.shard_map` has no axis {name!r}. Its manual axes are {', '.join(map(repr, manual))}."
        if manual
        else "{call} was called outside of a `jax.shard_map`, so no device runs its own stage.",
        "Call it in a function that each device runs with its own layers: "
        f"`jax.shard_map(lambda params, xs: treescan.pipeline(stage, params, xs, axis_name={name!r}), mesh=mesh, "
        f"in_specs=(jax.P({name!r}), jax.P()), out_specs=jax.P())`.",
    )


def check_places(params: PyTree, xs: PyTree, axis: str) -> None:
    """Refuses layers that all stages share, and micro-batches that they do not, where types say what varies."""
    if axis not in varying_axes(jax.typeof(jax.lax.axis_index(axis))):
        return

    def varies(leaf: Any) -> bool:
        return axis in varying_axes(jax.typeof(leaf))

    layers = leaves_with_path("params", params)
    if layers and not any(varies(leaf) for _, leaf in layers):
        raise LayerFault(
            "{call}: all stages were given the same layers, so each micro-batch would run through them on each stage.",
            f"Split the first axis of the stack: `jax.shard_map(..., in_specs=(jax.P({axis!r}), ...))`.",
            rows=[Row(path, f"varies over {axis!r}", describe_leaf(leaf)) for path, leaf in layers],
        )
    others = [(path, leaf) for path, leaf in leaves_with_path("xs", xs) if varies(leaf)]
    if others:
        raise Misuse(
            "{call}: stages were given different micro-batches, of which only those of the first stage would run.",
            f"Give all micro-batches to each stage: leave {axis!r} out of the `in_specs` of xs. Shard other axes.",
            rows=[Row(path, f"the same along {axis!r}", describe_leaf(leaf)) for path, leaf in others],
        )


def count_micro_batches(xs: PyTree, stages: int, rounds: int) -> int:
    """How many micro-batches there are, which all leaves of xs lead with."""
    named = leaves_with_path("xs", xs)
    says = "Each leaf of xs leads with the micro-batches, `[M, ...]`: `batch.reshape(M, size, ...)` cuts a batch."
    sizes = [(shape_of(leaf) or (None,))[0] for _, leaf in named]
    if None in sizes or len(set(sizes)) != 1 or not sizes[0]:
        counts = ["none" if size is None else str(size) for size in sizes]
        raise Misuse(
            "{call}: there are no micro-batches."
            if not any(sizes)
            else "{call}: the leaves of xs do not have the same number of micro-batches.",
            says,
            header=("leaf", "micro-batches", "is"),
            rows=[Row(path, n, describe_leaf(leaf)) for (path, leaf), n in zip(named, counts, strict=True)],
        )
    split = [Row(path, "not sharded", describe_leaf(leaf), "axis 0") for path, leaf in named if shards_of(leaf, 0) > 1]
    if split:
        cure = "Shard an axis within a micro-batch, `[M, rows, ...]`: devices run micro-batches one after the other."
        raise Misuse("{call}: micro-batches are on different devices.", cure, rows=split)
    assert sizes[0] is not None
    count = sizes[0]
    if rounds > 1 and count % stages:
        raise Misuse(
            f"{{call}}: {count} micro-batches are no multiple of the {stages} stages, which more than one round needs: "
            "a micro-batch comes back to the first stage when the others of its group have passed it.",
            f"Cut the batch into {-(-count // stages) * stages} micro-batches, or leave `rounds` out.",
        )
    return count


def count_of_round(params: PyTree, rounds: int) -> int:
    """How many layers a device runs in a round."""
    count = count_layers(params, "params")
    if count % rounds or not count:
        raise LayerFault(
            f"{{call}}: a device has {count} layers, which is no multiple of {rounds} rounds.",
            "`treescan.to_stages(stack, stages, rounds)` puts the layers in the order of the devices, and says if "
            "their number does not fit. Split its first axis over the stages.",
            header=("leaf", "layers", "is"),
            rows=[Row(path, str(len(leaf)), describe_leaf(leaf)) for path, leaf in leaves_with_path("params", params)],
        )
    return count // rounds
