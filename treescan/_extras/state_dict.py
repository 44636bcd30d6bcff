"""Converts stacks from and to checkpoints that name the arrays of each layer, for example `layers.0.w`."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeGuard, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Sharding

from .._avals import Array, PyTree, TreeDef, describe_argument, describe_leaf, exact_int, shape_of
from .._errors import Cure, Fault, LayerFault, Row, TypeMisuse, expect, verb, warn_user
from .._stacks.layer_axis import add_layer_axis, count_layers, freeze_shared, is_traced_number
from .._stacks.stack import split_layers, stacked_shardings
from .._tree import thaw_static

Ignores: TypeAlias = Callable[[str], bool]

Read: TypeAlias = Array | np.ndarray
"""An array as it was read: of JAX, or on the host."""

Layers: TypeAlias = Sequence[tuple[int, Mapping[str, Read]]]
"""The arrays of layers by their names, each layer with its number among all."""


def _is_several(tree: object) -> TypeGuard[Sequence[object]]:
    """Whether a tree may be a sequence of stacks or of layers, which has no class of its own."""
    return type(tree) in (list, tuple)


def _check_sequence(given: object, name: str) -> tuple[PyTree, ...]:
    """A sequence with one item for each stack.

    Raises:
        Fault: for a `LayerError` if it is none.
    """
    if _is_several(given) and given:
        return tuple(given)
    raise LayerFault(
        f"{{verb}}: with `order`, `{name}` must be a sequence with one item for each stack, got "
        f"{describe_argument(given)}.",
        f"Give `[{name}_0, {name}_1, ...]`, or leave `order` out for a single stack.",
    )


def _one_each(given: object, count: int, name: str) -> tuple[object, ...]:
    """What is given once for all stacks, or in a sequence with one for each.

    Raises:
        Fault: for a `LayerError` if the sequence has another length.
    """
    if not _is_several(given):
        return (given,) * count
    if len(given) != count:
        raise LayerFault(
            f"{{verb}}: there are {count} stacks, but `{name}` has {len(given)} item{'s'[: len(given) != 1]}.",
            "Give one item for each stack, or a single one for all.",
        )
    return tuple(given)


def _check_order(order: Any, layers: int, stacks: int | None) -> tuple[int, ...]:
    """For each layer, in the order of their numbers, which stack holds it.

    Args:
        order: what the user said: "turns", or the number of a stack for each layer.
        layers: how many layers there are.
        stacks: how many stacks; None: as many as `order` names.

    Raises:
        Fault: for an `ArgumentTypeError` if it is neither, for a `LayerError` if it does not fit.
    """
    if isinstance(order, str) and order == "turns":
        if stacks is None:
            raise TypeMisuse(
                '{verb}: the number of stacks is unknown. `order` is "turns", but `like` is not given.',
                "Give `like`, a sequence with one layer of each stack. Or give `order` as a sequence with the "
                "number of the stack for each layer.",
            )
        return tuple(i % stacks for i in range(layers))
    places: list[int | None] = [None]
    with contextlib.suppress(TypeError):  # it is no sequence
        places = list(map(exact_int, order))
    each = "A sequence has the number of the stack for each layer, in the order of the layers: `[0] * 3 + [1] * 58`."
    expect(None not in places, "order", '"turns" or a sequence of ints', order, each)
    of_layers = [place for place in places if place is not None]
    count = max(of_layers, default=0) + 1 if stacks is None else stacks
    if len(of_layers) != layers:
        raise LayerFault(
            f"{{verb}}: `order` has {len(of_layers)} layers, but there are {layers}.",
            "Give one item for each layer, in the order of the layers.",
        )
    wrong = sorted({place for place in of_layers if not 0 <= place < count})
    if wrong:
        raise LayerFault(
            f"{{verb}}: `order` names stack {wrong[0]}, but there are {count} stacks.",
            f"Stacks are numbered from 0 to {count - 1}.",
        )
    return tuple(of_layers)


def full_name(prefix: str, number: int, name: str) -> str:
    """What a checkpoint calls an array of a layer."""
    return ".".join(part for part in (prefix, str(number), name) if part)


def layers_by_number(state: Mapping[str, Any], prefix: str, ignores: Ignores) -> list[dict[str, Read]]:
    """For each layer its arrays by name, but for those that are ignored."""
    found: dict[int, dict[str, Read]] = {}
    pattern = re.compile(rf"{re.escape(prefix + '.' if prefix else '')}(0|[1-9]\d*)(?:\.(.+))?", re.DOTALL)
    for name, value in state.items():
        match = pattern.fullmatch(name) if isinstance(name, str) else None
        if match and not ignores(name):
            found.setdefault(int(match[1]), {})[match[2] or ""] = _as_array(name, value)
    missing = next(i for i in range(len(found) + 1) if i not in found)
    padded = [name for name in state if re.match(rf"{re.escape(prefix + '.' * bool(prefix))}0\d", str(name))]
    if padded and (not found or missing < len(found)):
        raise LayerFault(
            f"{{verb}}: the number of a layer begins with 0 in `{padded[0]}`, but numbers have no zeros in front.",
            r'Rename the arrays: `{re.sub(r"\b0+(?=\d)", "", name): array for name, array in state.items()}`.',
        )
    if not found:
        prefixes = sorted({part[1] or "" for name in state if (part := re.match(r"(?:(.*?)\.)?\d+(\.|$)", str(name)))})
        raise LayerFault(
            f"{{verb}}: no name has the form `{full_name(prefix, 0, 'w')}`.",
            f"The names that contain a number have the prefix {', '.join(map(repr, prefixes))}: pass it as `prefix`."
            if prefixes
            else "Layers are found by the numbers in their names, but no name contains a number.",
        )
    if missing < len(found):
        raise LayerFault(
            f"{{verb}}: layers are missing: there is {full_name(prefix, max(found), '')}, but not "
            f"{full_name(prefix, missing, '')}.",
            "Layers are numbered from 0. If a checkpoint has several files, read all of them.",
        )
    return [found[i] for i in range(len(found))]


def _as_array(name: str, value: Any) -> Any:
    readable = hasattr(value, "shape") or isinstance(value, bool | int | float | complex)
    try:
        array = np.asarray(value) if readable and not isinstance(value, jax.Array) else value
    except Exception as error:  # of torch: bfloat16, or with a gradient
        raise LayerFault(
            f"{{verb}}: NumPy cannot convert `{name}`: {type(error).__name__}: {error}",
            "Convert it before. A tensor of torch: `tensor.detach().float().numpy()`.",
            cause=error,
        ) from None
    if not readable or shape_of(array) is None:
        raise LayerFault(
            f"{{verb}}: `{name}` is not an array, but {describe_argument(value)}.",
            "`state` may contain arrays of NumPy or JAX, and values that NumPy can convert. Leave out all others.",
        )
    return array


def _paths(frozen: PyTree) -> list[str]:
    """The paths of the leaves, each joined by dots."""
    return [jtu.keystr(path, simple=True, separator=".") for path, _ in jtu.tree_leaves_with_path(frozen)]


def _names_of(frozen: PyTree, names: Mapping[str, str]) -> list[str]:
    """The leaves' names: their paths joined by dots, or what `names` has for these.

    Raises:
        Fault: for a `LayerError` if `names` has other leaves, or two leaves would have one name.
    """
    paths = _paths(frozen)
    _check_names(paths, names)
    own = [names.get(path, path) for path in paths]
    twice = sorted({name for name in own if own.count(name) > 1})
    if twice:
        raise LayerFault(
            f"{{verb}}: two leaves would be called {', '.join(twice)}.",
            "Give one of them another name: `names={path: name}`.",
        )
    return own


def _check_names(paths: Sequence[str], names: Mapping[str, str]) -> None:
    """Refuses names of leaves that are not there."""
    unknown = sorted(map(str, names.keys() - set(paths)))
    if unknown:
        raise LayerFault(
            f"{{verb}}: `names` has {', '.join(unknown)}, which is not in a layer.",
            f"The leaves of a layer are {', '.join(paths)}.",
        )


def _check_prefix(prefix: str) -> str:
    """The prefix, without a dot at its end."""
    before = 'It is the text before the number: `prefix="model.layers"`.'
    expect(isinstance(prefix, str), "prefix", "a string", prefix, before)
    return prefix.removesuffix(".")


def _check_mapping(names: object) -> Mapping[str, str]:
    """What the checkpoint calls leaves."""
    if names is not None and not isinstance(names, Mapping):
        raise TypeMisuse(
            f"{{verb}}: `names` must be a mapping, got {describe_leaf(names)}.",
            'It maps paths in a layer to names in the checkpoint: `{"attention.q_proj": "q.weight"}`.',
        )
    return names or {}


def _check_ignore(ignore: IgnoreLike) -> Ignores:
    """Whether a name is ignored, from what the user said: patterns, or a function."""
    if ignore is None:
        return lambda name: False
    if callable(ignore):
        return lambda name: bool(ignore(name))
    globs = [ignore] if isinstance(ignore, str) else ignore
    expect(
        isinstance(globs, list | tuple | set | frozenset) and all(isinstance(glob, str) for glob in globs),
        "ignore",
        "a pattern of names, several patterns or a function",
        ignore,
        'For example `ignore="*.rotary_emb.inv_freq"`, or a function from the whole name to a bool.',
    )
    return lambda name: any(fnmatch.fnmatchcase(name, glob) for glob in globs)


Layer = TypeVar("Layer")
Order: TypeAlias = Literal["turns"] | Sequence[int]
Names: TypeAlias = Mapping[str, str] | Sequence[Mapping[str, str] | None] | None
IgnoreLike: TypeAlias = str | Iterable[str] | Callable[[str], bool] | None
_SEVERAL = (
    'If it is a sequence of {what}, `order` must say how their layers are numbered: `order="turns"` for a pattern.'
)


class _Wanted(NamedTuple):
    """What the layers of one stack have to hold.

    Attributes:
        like: one layer, its static leaves frozen.
        names: those of its leaves.
        leaves: for each name an array of its type, in the order of messages.
        layers: the layers, each with its number among all.
    """

    like: PyTree
    names: list[str]
    leaves: dict[str, Any]
    layers: Layers


class ReadOptions(TypedDict, total=False):
    """What `layers_from_state_dict` takes by name with and without `like`."""

    prefix: str
    ignore: IgnoreLike
    shardings: PyTree


class ReadDicts(ReadOptions, total=False):
    """What it takes by name without `like`."""

    names: None
    order: Sequence[int] | None


class ReadLayers(ReadOptions, total=False):
    """What it takes by name with `like`."""

    names: Names
    order: Order | None


@overload
def layers_from_state_dict(state: Mapping[str, Any], like: None = None, **options: Unpack[ReadDicts]) -> PyTree: ...
@overload
def layers_from_state_dict(state: Mapping[str, Any], like: Layer, **options: Unpack[ReadLayers]) -> Layer: ...
@verb
def layers_from_state_dict(
    state: Mapping[str, Any],
    like: PyTree = None,
    *,
    prefix: str = "layers",
    names: Names = None,
    order: Order | None = None,
    ignore: IgnoreLike = None,
    shardings: PyTree = None,
) -> PyTree:
    """Makes a stack from the layers of a flat checkpoint, whose arrays are named `{prefix}.{number}.{name}`.

    Args:
        state: all arrays by name: `{"layers.0.w": ..., "layers.1.w": ..., "head": ...}`. Names that do not begin with
            the prefix and a number are left alone.
        like: a tree with the structure and shapes of *one* layer (`jax.eval_shape(init, key)` makes one). The stack
            then has its structure; a leaf's name is its path, joined by dots (`attention.q_proj`). None: the stack is a
            dict from each name to its array. With `order` a sequence, with one layer of each stack.
        prefix: the text before the number; "" for nothing.
        names: the names of leaves in the checkpoint, if they differ from the paths: `{"attention.q_proj":
            "self_attn.q_proj.weight"}`. With `order` also a sequence of these, one for each stack.
        order: for layers of several kinds, the stack that holds each layer. "turns": the stacks take turns, as in a
            pattern of `treescan.scan_layers`. With k stacks, layer i is in stack i % k; the last period need not be
            full. Otherwise a sequence with the number of a stack for each layer: `[0] * 3 + [1] * 58`.
        ignore: names to leave out, for example buffers: a pattern such as "*.inv_freq" (as in `fnmatch`, for the whole
            name), several patterns, or a function from the name to a bool.
        shardings: for each leaf of *one* layer (a prefix tree) a `jax.sharding.NamedSharding`, a `PartitionSpec` (if a
            mesh is set) or None, as for `treescan.init_layers`; with `order` also a sequence, one for each stack. Each
            leaf is moved to its devices as soon as it is stacked.

    Returns:
        The stack, with leaves `[n, ...]` of the checkpoint's dtypes. If all arrays of a leaf are NumPy arrays, NumPy
        stacks them and they stay on the host, unless `shardings` moves them. With `order`, the stacks, in a list if
        `like` is one, otherwise in a tuple.

    Raises:
        LayerError: if layers or arrays are missing, superfluous, or of another shape than in `like`; all of them are
            listed. Also if `order` or `shardings` do not fit.

    Warns:
        UserWarning: if dtypes differ from those of `like`.

    Examples:
        >>> import numpy as np
        >>> import treescan
        >>> state = {
        ...     "layers.0.w": np.ones((2, 3)),
        ...     "layers.1.w": np.zeros((2, 3)),
        ...     "head": np.ones(3),
        ... }
        >>> print(treescan.state_dict.layers_from_state_dict(state)["w"].shape)
        (2, 2, 3)
    """
    prefix, ignores = _check_prefix(prefix), _check_ignore(ignore)
    maps = 'It maps names to arrays: `{"layers.0.w": w0, "layers.1.w": w1}`.'
    expect(isinstance(state, Mapping), "state", "a mapping", state, maps)
    layers = list(enumerate(layers_by_number(state, prefix, ignores)))
    if order is None:
        return _stacked([_wanted(layers, like, _check_mapping(names))], (shardings,), prefix, like)[0]
    likes = None if like is None else _check_sequence(like, "like")
    places = _check_order(order, len(layers), None if likes is None else len(likes))
    parts = _several(layers, likes, names, places)
    stacks = _stacked(parts, _one_each(shardings, len(parts), "shardings"), prefix, like)
    return stacks if isinstance(like, list) else tuple(stacks)


@verb
def layers_to_state_dict(
    stacked: PyTree, *, prefix: str = "layers", names: Names = None, order: Order | None = None
) -> dict[str, Array]:
    """Returns the arrays of a stack under the names of a flat checkpoint: the inverse of `layers_from_state_dict`.

    Args:
        stacked: any pytree of arrays whose first axis is the layers, `[n, ...]`. Other leaves are left out. With
            `order` a sequence of such stacks.
        prefix: the text before the number; "" for nothing.
        names: the names of leaves in the checkpoint, if they differ from the paths: `{"attention.q_proj": "q.weight"}`.
            With `order` also a sequence of these, one for each stack.
        order: how the layers of several stacks are numbered, as for `layers_from_state_dict`.

    Returns:
        A dict from names, `{prefix}.{number}.{name}`, to arrays `[...]`, n of them for each leaf. NumPy arrays stay
        NumPy arrays.

    Raises:
        LayerError: if the leaves have different numbers of layers, two of them would have one name, or `order`
            does not fit the stacks.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(
        ...     sorted(
        ...         treescan.state_dict.layers_to_state_dict({"w": jnp.zeros((2, 3))})
        ...     )
        ... )
        ['layers.0.w', 'layers.1.w']
    """
    prefix = _check_prefix(prefix)
    if order is None:
        try:
            layers = _layers_of(stacked, "stacked", _check_mapping(names))
        except Fault as fault:
            if _is_several(stacked):
                fault.cures = (*fault.cures, Cure(_SEVERAL.format(what="stacks")))
            raise
    else:
        stacks = _check_sequence(stacked, "stacked")
        own = _names_of_each(names, stacks)
        each = [_layers_of(stack, f"stacked[{i}]", own[i]) for i, stack in enumerate(stacks)]
        counts = list(map(len, each))
        places = _check_order(order, sum(counts), len(stacks))
        wanted = [places.count(i) for i in range(len(stacks))]
        if wanted != counts:
            raise LayerFault(
                "{verb}: the numbers of layers in the stacks do not match `order`.",
                '"turns" means the first layer of each stack, then the second of each, and so on. So only the first '
                "stacks may have one layer more. For another order, give a sequence with the number of the stack for "
                "each layer.",
                header=("stack", "by order", "is"),
                rows=[Row(f"stacked[{i}]", *map(str, both)) for i, both in enumerate(zip(wanted, counts, strict=True))],
            )
        following = list(map(iter, each))
        layers = [next(following[place]) for place in places]
    return {full_name(prefix, i, name): leaf for i, layer in enumerate(layers) for name, leaf in layer.items()}


def _layers_of(stacked: PyTree, root: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """For each layer of a stack its arrays by name."""
    frozen = freeze_shared(stacked)
    count = count_layers(frozen, root)
    own = _names_of(frozen, names)
    stacks = dict(zip(own, jax.tree.leaves(frozen), strict=True))
    on_host = {name: leaf for name, leaf in stacks.items() if isinstance(leaf, np.ndarray)}
    shared = {name: leaf for name, leaf in stacks.items() if is_traced_number(leaf)}
    on_device = {name: leaf for name, leaf in stacks.items() if name not in on_host | shared}
    layers: list[dict[str, Any]] = split_layers(on_device) if on_device else [{} for _ in range(count)]
    for number, layer in enumerate(layers):
        layer.update({name: np.asarray(leaf[number]) for name, leaf in on_host.items() if name not in shared})
        layer.update(shared)
    return [{name: layer[name] for name in own} for layer in layers]


def _names_of_each(names: Names, stacks: Sequence[PyTree]) -> list[Mapping[str, str]]:
    """What each of several stacks calls its leaves. A single mapping is about the leaves of all."""
    if _is_several(names):
        return [_check_mapping(each) for each in _one_each(names, len(stacks), "names")]
    names, known = _check_mapping(names), [_paths(freeze_shared(stack)) for stack in stacks]
    _check_names([path for each in known for path in each], names)
    return [{path: name for path, name in names.items() if path in own} for own in known]


def _several(layers: Layers, likes: tuple[PyTree, ...] | None, names: Names, places: Sequence[int]) -> list[_Wanted]:
    """What is wanted of several stacks, with the layers of each."""
    count = max(places) + 1 if likes is None else len(likes)
    each = [[layer for layer, place in zip(layers, places, strict=True) if place == i] for i in range(count)]
    empty = [i for i, of_stack in enumerate(each) if not of_stack]
    if empty:
        raise LayerFault(
            f"{{verb}}: stack {empty[0]} of {count} has no layers: the checkpoint has {len(layers)}.",
            "A stack has at least one layer. Leave out empty stacks, in `like` and in `order`.",
        )
    if likes is None:
        return [_wanted(of_stack, None, _check_mapping(names)) for of_stack in each]
    return list(map(_wanted, each, likes, _names_of_each(names, likes)))


def _wanted(layers: Layers, like: PyTree, names: Mapping[str, str]) -> _Wanted:
    """What each layer of a stack must have."""
    if like is None:
        if names:
            raise TypeMisuse(
                "{verb}: `names` renames the leaves of `like`, but there is no `like`.",
                "Give a tree of one layer, or rename the keys of the dict that you get.",
            )
        first = layers[0][1]
        alone = list(first) == [""]  # a layer is one array
        return _Wanted(first[""] if alone else dict(first), sorted(first), dict(first), list(layers))
    frozen = freeze_shared(like)
    own = _names_of(frozen, names)
    return _Wanted(frozen, own, dict(zip(own, jax.tree.leaves(frozen), strict=True)), list(layers))


def _stacked(parts: Sequence[_Wanted], shardings: Sequence[PyTree], prefix: str, like: PyTree) -> list[PyTree]:
    """The stacks, once every layer is found to have what is wanted.

    Raises:
        Fault: for a `LayerError` that lists all that differs.
    """
    rows = [row for part in parts for row in _differences(part, prefix)]
    if rows:
        raise LayerFault(
            "{verb}: the checkpoint's layers do not fit.",
            "`like` describes one layer (by default, the first layer). `names` maps its paths to names in the "
            "checkpoint, and `ignore` lists the names to leave out. If arrays have another layout, for example "
            "torch's transposed weights, convert them before or after stacking.",
            *([_SEVERAL.format(what="a layer of each of several stacks")] * (len(parts) == 1 and _is_several(like))),
            header=("name", "expected", "is"),
            rows=rows,
        )
    _warn_of_dtypes(parts, prefix)
    return [_join_all(part, of_stack) for part, of_stack in zip(parts, shardings, strict=True)]


def _differences(part: _Wanted, prefix: str) -> list[Row]:
    """Where a layer has something else than what is wanted, another shape, or a dtype that the first has not."""
    first = part.layers[0][1]
    rows: list[Row] = []
    for number, layer in part.layers:
        for name in dict.fromkeys((*part.leaves, *layer)):
            want, value, of_first = part.leaves.get(name), layer.get(name), first.get(name)
            path = full_name(prefix, number, name)
            shapes = _shape(want, "(nothing)"), _shape(value, "(missing)")
            if want is None or value is None:
                rows.append(Row(path, *shapes))
            elif tuple(np.shape(value)) != shape_of(want):
                rows.append(Row(path, *shapes, "shape"))
            elif of_first is not None and value.dtype != of_first.dtype:
                rows.append(Row(path, str(of_first.dtype), str(value.dtype), "dtype"))
    return rows


def _shape(value: object, none: str) -> str:
    """A shape for a message; what it has for None."""
    return none if value is None else f"[{','.join(map(str, shape_of(value) or ()))}]"


def _warn_of_dtypes(parts: Sequence[_Wanted], prefix: str) -> None:
    """Warns if `like` has other dtypes, because the stack keeps those of the checkpoint."""
    found: list[str] = []
    for part in parts:
        number, first = part.layers[0]
        for name, leaf in part.leaves.items():
            wanted = getattr(leaf, "dtype", first[name].dtype)  # that of the given array: JAX makes 32 bits of 64
            if wanted != first[name].dtype:
                found.append(f"{full_name(prefix, number, name)} is {first[name].dtype}, not {wanted}")
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        warn_user(
            f"The dtypes of the checkpoint differ from those of `like`: {'; '.join(found[:3])}{more}. The stack "
            "keeps the dtypes of the checkpoint. Cast the stack, or give a `like` with the same dtypes.",
            UserWarning,
        )


def _join_all(part: _Wanted, shardings: PyTree) -> PyTree:
    """The stack of one kind of layers."""
    structure: TreeDef = jax.tree.structure(part.like)
    places: Sequence[Sharding | None] = [None] * len(part.names)
    if shardings is not None:
        first = part.layers[0][1]
        types = jax.tree.unflatten(structure, [first[name] for name in part.names])
        places = stacked_shardings(jax.eval_shape(lambda: types), shardings).leaves
    leaves = [
        _join([layer[name] for _, layer in part.layers], place) for name, place in zip(part.names, places, strict=True)
    ]
    whole = add_layer_axis(thaw_static(jax.tree.unflatten(structure, leaves)), None)
    return {name: whole[name] for name in part.like} if type(whole) is dict else whole  # which JAX has sorted


def _join(leaves: Sequence[Read], place: Sharding | None) -> Read:
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        whole: Read = jnp.stack(list(map(jnp.asarray, leaves)))
    else:
        whole = np.stack(leaves)
    return whole if place is None else jax.device_put(whole, place)
