"""Arrays and trees of them without their elements: types, weak types, shardings.

The only file that handles names that differ between the oldest and the newest supported release of JAX.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import jax.typing
import numpy as np
from jax.core import AbstractValue, ShapedArray, Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike

Aval: TypeAlias = ShapedArray
"""The type of an array: its shape, dtype, weak type, and sharding."""

DType: TypeAlias = np.dtype[Any]
"""A dtype: NumPy's, or one of JAX's own, which typed keys have, and which JAX annotates in the same way."""

AxisSpec: TypeAlias = str | tuple[str, ...] | None
"""How one axis is sharded: over which axes of the mesh."""

PyTree: TypeAlias = Any
"""Any tree of containers that JAX knows, with arrays or scalars as leaves."""

Leaves: TypeAlias = list[Any]
"""The leaves of a tree, in order: arrays, or what stands for them, as tracers, types or tangents do."""

TreeDef: TypeAlias = Any
"""A tree's structure, `jax.tree_util.PyTreeDef`: a compiled class without a static type."""

LeafAxes: TypeAlias = tuple[int | None, ...]
"""One axis for each leaf of a tree, or None."""


def describe_leaf(leaf: object) -> str:
    """A leaf's type as JAX prints it (`float32[8,128]`, weak types with a leading `~`); its value if it is static."""
    if leaf is None:
        return "None"
    try:
        return str(jax.typeof(leaf))
    except TypeError:
        return _describe_value(leaf)


def _describe_value(value: object) -> str:
    """The name of a function or class, the beginning of the repr of anything else: never an address."""
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"`{name.rsplit('<locals>.', 1)[-1]}`"
    text = repr(value)
    if " at 0x" in text or "Tracer(" in text:
        return f"a {type(value).__qualname__}"
    return text if len(text) <= 40 else f"{text[:37]}..."


def describe_static(value: object) -> str:
    """A value that is no array: a function by its name, anything else by its repr, without addresses."""
    if callable(value) and isinstance(getattr(value, "__qualname__", None), str):
        return _describe_value(value)
    text = re.sub(r"(?: object)? at 0x[0-9a-f]+", "", repr(value))
    return text if len(text) <= 200 else f"{text[:197]}..."


def describe_node(node: PyTree) -> str:
    """A container by its kind and size, a leaf by its type."""
    if node is None or jtu.all_leaves([node]):
        return describe_leaf(node)
    name = type(node).__name__
    size = len(jtu.tree_leaves(node, is_leaf=lambda part: part is not node))
    return f"{name} of {size}" if name in ("tuple", "list", "dict", "OrderedDict", "defaultdict") else name


def describe_argument(value: object) -> str:
    """An argument as it appears in a message, whether traced or not: arrays by type, scalars by value."""
    if isinstance(value, jax.Array | np.ndarray):
        return describe_leaf(value)
    if isinstance(value, bool | int | float | complex | str):
        return repr(value)
    return describe_node(value)


def describe_traced(value: object) -> str:
    """An argument that must not be traced."""
    return f"a traced {describe_leaf(value)}" if isinstance(value, Tracer) else describe_argument(value)


def is_weak(leaf: object) -> bool:
    """Whether a leaf has a weak type, as Python scalars have."""
    return bool(getattr(type_of(leaf), "weak_type", False))


def same_type(given: object, returned: object) -> bool:
    """Whether a returned leaf may take the place of a given one: equal types, weak or not, as `lax.scan` asks."""
    if given is returned:
        return True
    a, b = type_of(given), type_of(returned)
    return a is not None and b is not None and same_types(a, b)


def same_types(a: object, b: object) -> bool:
    """Whether two types are equal, weak or not.

    Shardings count where the mesh axes are explicit; they are part of the type only there.
    """
    if a == b or not isinstance(a, ShapedArray):  # a mutable reference, for example: lax.scan knows what is wrong
        return True
    return (
        isinstance(b, ShapedArray)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and varying_axes(a) == varying_axes(b)
        and same_sharding(a, b)
        and getattr(a, "memory_space", None) == getattr(b, "memory_space", None)
    )


def same_sharding(a: Aval, b: Aval) -> bool:
    """Whether two types agree in the shardings over explicit mesh axes, where both have a mesh."""
    mesh_a, mesh_b = a.sharding.mesh, b.sharding.mesh
    explicit = AxisType.Explicit in (*mesh_a.axis_types, *mesh_b.axis_types)
    return mesh_a.empty or mesh_b.empty or not explicit or bool(a.sharding == b.sharding)


def promoted(given: ArrayLike, returned: object) -> tuple[ArrayLike, bool]:
    """What `lax.scan` makes of an init whose step returns another type, and whether it changed.

    This concerns weakly typed ones, and those without a mesh, where what is returned has one with explicit axes: from
    JAX 0.12 on, `jnp.zeros_like` has none outside of `jax.set_mesh`, and `lax.scan` takes the two for equal.
    """
    if _has_no_mesh(given, type_of(returned)):
        return jax.sharding.reshard(given, jax.typeof(returned).sharding), True
    if not is_weak(given) or same_type(given, returned):
        return given, False
    return jax.lax.convert_element_type(given, jnp.result_type(given, returned)), True


def _has_no_mesh(given: object, returned: object) -> bool:
    """Whether a value has no mesh, and what is returned in its place is split over one with explicit axes."""
    mesh: AbstractMesh | None = getattr(getattr(returned, "sharding", None), "mesh", None)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return False
    return bool(jax.typeof(given).sharding.mesh.empty)


def varying_axes(aval: object) -> frozenset[str]:
    """The manual mesh axes over which a value of this type varies, inside of `jax.shard_map`."""
    manual = getattr(aval, "manual_axis_type", None)  # jax >= 0.10
    axes = getattr(aval, "vma", frozenset[str]()) if manual is None else manual.varying
    return frozenset(axes or ())


def vary_over(leaf: Array, axes: frozenset[str]) -> Array:
    """Makes a value vary over further manual mesh axes."""
    missing = tuple(sorted(axes - varying_axes(jax.typeof(leaf)))) if axes else ()
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf


def is_sharded(leaf: object) -> bool:
    """Whether a value is sharded along any of its axes, where shardings are part of the type."""
    spec = (leaf if isinstance(leaf, ShapedArray) else jax.typeof(leaf)).sharding.spec
    parts = tuple(getattr(spec, "partitions", spec))  # as `spec_parts`: each leaf is asked for this many times
    return parts.count(None) < len(parts)


def parts_of(leaf: object) -> tuple[AxisSpec, ...]:
    """How each axis of a value is sharded, where shardings are part of the type."""
    return spec_parts(_sharding(leaf).spec)


def spec_parts(spec: PartitionSpec | Sequence[AxisSpec]) -> tuple[AxisSpec, ...]:
    """What a PartitionSpec says of each axis; newer releases refuse to iterate one with reduced axes."""
    return tuple(getattr(spec, "partitions", spec))


def place_like(value: Array, struct: Aval | jax.ShapeDtypeStruct) -> Array:
    """Gives a value the manual axes and the explicit sharding of a type, a `jax.ShapeDtypeStruct` for example."""
    sharding = getattr(struct, "sharding", None)
    if sharding is not None and is_explicit(sharding):
        value = shard(value, sharding)
    return vary_over(value, varying_axes(struct))


def stacked_type(aval: Aval | jax.ShapeDtypeStruct, length: int) -> jax.ShapeDtypeStruct:
    """The type of a stack of so many arrays, which is not sharded along its new axis."""
    own = getattr(aval, "sharding", None)
    if own is None or not is_explicit(own):
        return jax.ShapeDtypeStruct((length, *aval.shape), aval.dtype)
    stacked = NamedSharding(own.mesh, PartitionSpec(None, *spec_parts(own.spec)))
    return jax.ShapeDtypeStruct((length, *aval.shape), aval.dtype, sharding=stacked)


def types_of(function: Callable[..., PyTree], *given: Any) -> PyTree:
    """The types of what a function returns: those of `jax.eval_shape`, with their shardings."""
    traced = jax.jit(lambda *given: function(*given)).trace(*given)  # of a step, JAX would print all that it holds
    return with_shardings(traced.out_info, traced.jaxpr.out_avals)


def with_shardings(types: PyTree, avals: Sequence[Aval]) -> PyTree:
    """The types that a trace of JAX returns, with the shardings that it found.

    JAX leaves them out if an axis of the mesh is automatic, also where another one is explicit. Of a value that varies
    over a third, manual axis, the type then does not say of which mesh: JAX fails in an assertion if it is given that.
    """
    if len({kind for aval in avals for kind in aval.sharding.mesh.axis_types}) < 2:
        return types
    leaves, structure = jax.tree.flatten(types)
    pairs = zip(leaves, avals, strict=True)
    return jax.tree.unflatten(structure, [_with_sharding(leaf, aval.sharding) for leaf, aval in pairs])


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    kinds = {*sharding.mesh.axis_types}
    return leaf.update(sharding=sharding) if AxisType.Auto in kinds and len(kinds) > 1 else leaf


def is_explicit(sharding: NamedSharding) -> bool:
    """Whether a sharding is part of the type of an array, as it is over the explicit axes of a mesh."""
    return AxisType.Explicit in sharding.mesh.axis_types


def on_automatic_axes(function: Callable[..., Array], parts: Sequence[AxisSpec], *given: Array) -> Array:
    """Calls a function of arrays that JAX cannot give a type where axes of the mesh are explicit, a gather for example.

    Args:
        function: JAX spreads it over the devices by itself.
        parts: how the axes of its result are sharded.
        given: its arguments.
    """
    mesh = next((sharding.mesh for sharding in map(_sharding, given) if is_explicit(sharding)), None)
    if mesh is None:
        return function(*given)
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    sharding = NamedSharding(mesh, PartitionSpec(*parts))
    spread: Any = jax.sharding.auto_axes(function, axes=axes, out_sharding=sharding)
    return spread(*given)


def _sharding(leaf: object) -> NamedSharding:
    return (leaf if isinstance(leaf, ShapedArray) else jax.typeof(leaf)).sharding


def set_mesh() -> AbstractMesh | None:
    """The mesh that is set, of which an axis is explicit; None: there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if AxisType.Explicit in mesh.axis_types else None


def mesh_of(tree: PyTree) -> AbstractMesh | None:
    """The first mesh with an explicit axis that an array names in its type; None: none does."""
    seen: AbstractMesh | None = None  # arrays share their mesh, mostly one without axes
    for aval in map(jax.typeof, jax.tree.leaves(tree)):
        mesh: AbstractMesh | None = aval.sharding.mesh if isinstance(aval, ShapedArray) else seen
        if mesh is not None and mesh is not seen and AxisType.Explicit in mesh.axis_types:
            return mesh
        seen = mesh
    return None


def in_mesh(tree: PyTree, mesh: Any) -> PyTree:
    """Arrays, of which those that name no mesh are whole on all devices of this one."""
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, whole) if names_no_mesh(leaf) else leaf, tree)


def names_no_mesh(leaf: object) -> bool:
    """Whether a leaf is an array whose type names no mesh."""
    aval = jax.typeof(leaf)
    return isinstance(aval, ShapedArray) and aval.sharding.mesh.empty


def shard(value: Array, sharding: NamedSharding) -> Array:
    """A value with another sharding, where shardings are part of the type. It names its mesh, so none has to be set."""
    return value if jax.typeof(value).sharding == sharding else jax.sharding.reshard(value, sharding)


def unspread(leaf: Array, axis: int = 0) -> Array:
    """A value of which one axis is not sharded, where shardings are part of the type."""
    parts = parts_of(leaf)
    if parts[axis : axis + 1] in ((), (None,)):
        return leaf
    return shard(leaf, NamedSharding(_sharding(leaf).mesh, PartitionSpec(*parts[:axis], None, *parts[axis + 1 :])))


def first_axes(leaf: Array, count: int) -> NamedSharding:
    """The sharding of so many first axes of a value, where shardings are part of the type."""
    return NamedSharding(_sharding(leaf).mesh, PartitionSpec(*parts_of(leaf)[:count]))


def shards_of(leaf: object, axis: int) -> int:
    """Over how many devices an axis of a value is split, where shardings are part of the type."""
    names = parts_of(leaf)[axis]
    sizes = _sharding(leaf).mesh.shape
    return math.prod(sizes[name] for name in (names if isinstance(names, tuple) else (names,)) if name is not None)


def devices_of(tree: PyTree) -> int:
    """Over how many devices arrays may be split, as far as is known: only an explicit mesh says whether they are.

    They are those of the mesh that a type names, or that is set, without its manual axes. If there is none, they are
    all devices: under `jax.jit`, the types of arrays that only `in_shardings` splits name no mesh.
    """
    avals = [aval for aval in map(jax.typeof, jax.tree.leaves(tree)) if isinstance(aval, ShapedArray)]
    meshes = [*(aval.sharding.mesh for aval in avals), jax.sharding.get_abstract_mesh()]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is None:
        return jax.device_count()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in kinds if kind != AxisType.Manual)


def is_key(leaf: object) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return bool(jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key))


def is_mutable(leaf: object) -> bool:
    """Whether a leaf is a mutable array, a `Ref`."""
    return not isinstance(jax.typeof(leaf), ShapedArray)


def holds(dtype: DType, value: complex) -> bool:
    """Whether a dtype can hold a number; floating-point dtypes round."""
    if isinstance(value, int) and abs(value) > 2**64:
        return False
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return True
    if isinstance(value, complex):
        return False
    if jnp.issubdtype(dtype, jnp.floating):
        return True
    if math.isnan(value) or math.isinf(value) or value != int(value):
        return False
    if dtype == np.bool_:
        return value in (0, 1)
    limits = jnp.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def dtype_of(leaf: object) -> Any:
    """The dtype of a leaf, or None for leaves that have none."""
    return getattr(type_of(leaf), "dtype", None)


def shape_of(leaf: object) -> tuple[int, ...] | None:
    """The shape of a leaf, or None for leaves that have none."""
    return getattr(type_of(leaf), "shape", None)


def type_of(leaf: object) -> AbstractValue | None:
    """The type of a leaf; None if JAX knows none."""
    try:
        return jax.typeof(leaf)
    except TypeError:
        return None


def exact_int(value: Any) -> int | None:
    """An exact int from anything that is one; None for floats, bools, tracers and the rest."""
    if isinstance(value, bool | np.bool_ | Tracer):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def clamped(value: Array, most: int = 2**31 - 1) -> Array:
    """An int of any type as int32, between 0 and `most`: a cast alone would wrap."""
    limit = min(most, int(jnp.iinfo(value.dtype).max))
    least, largest = (np.array(bound, value.dtype) for bound in (0, limit))
    return jax.lax.clamp(least, value, largest).astype(jnp.int32)


def elements(aval: object) -> int:
    """How many elements a value of this type has; a size that is a symbol counts as 1."""
    return math.prod([size for size in getattr(aval, "shape", ()) if isinstance(size, int)])


def bytes_of(aval: Any) -> int:
    """The bytes of a value of this type; a size that is a symbol counts as 1."""
    if not hasattr(aval, "shape"):
        return 0
    each = 16 if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.dtype.itemsize
    return elements(aval) * each


def as_arrays(tree: PyTree) -> PyTree:
    """Scalars and NumPy arrays as JAX arrays, whose methods the body calls under `jax.jit` too."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf), tree)
