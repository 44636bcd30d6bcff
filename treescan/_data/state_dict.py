"""Converts stacks from and to checkpoints that name the arrays of each layer, for example `layers.0.w`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._avals import describe_argument, shape_of
from .._errors import ArgumentTypeError, Cure, Fault, LayerError, Row, explain, verb, warn_user
from .._tree import thaw_static
from .._types import Array, PyTree
from .boxes import add_layer_axis
from .checkpoint_names import (
    check_ignore,
    check_mapping,
    check_names,
    check_prefix,
    full_name,
    layers_by_number,
    leaf_name,
    plain_name,
    refuse_twice,
)
from .layer_order import check_counts, check_order, check_sequence, is_several, one_each
from .shardings import stacked_shardings
from .shared import freeze_shared, is_traced_number
from .stack import count_layers, split_layers

Layer = TypeVar("Layer")
Order: TypeAlias = Literal["turns"] | Sequence[int]
Ignore: TypeAlias = str | Iterable[str] | Callable[[str], bool] | None
_PREFIX = "layers"
_SEVERAL = (
    'If it is a sequence of {what}, `order` must say how their layers are numbered: `order="turns"` for a pattern.'
)


class _Wanted(NamedTuple):
    """What the layers of one stack have to hold.

    Attributes:
        like: one layer, its static leaves frozen; None: a dict of what the first layer has.
        leaves: the names, and of what shape, where that is known.
        layers: the layers, each with its number among all.
    """

    like: PyTree
    leaves: list[tuple[str, Any]]
    layers: list[tuple[int, Mapping[str, Any]]]


@overload
def layers_from_state_dict(
    state: Mapping[str, Any],
    like: None = None,
    *,
    prefix: str = _PREFIX,
    names: None = None,
    order: Sequence[int] | None = None,
    ignore: Ignore = None,
    shardings: PyTree = None,
) -> Any: ...
@overload
def layers_from_state_dict(
    state: Mapping[str, Any],
    like: Layer,
    *,
    prefix: str = _PREFIX,
    names: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
    order: Order | None = None,
    ignore: Ignore = None,
    shardings: PyTree = None,
) -> Layer: ...
@verb
def layers_from_state_dict(
    state: Mapping[str, Any],
    like: PyTree = None,
    *,
    prefix: str = _PREFIX,
    names: Any = None,
    order: Any = None,
    ignore: Any = None,
    shardings: PyTree = None,
) -> Any:
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
        >>> print(treescan.layers_from_state_dict(state)["w"].shape)
        (2, 2, 3)
    """
    try:
        prefix, ignores = check_prefix(prefix), check_ignore(ignore)
        if not isinstance(state, Mapping):
            raise Fault(
                ArgumentTypeError,
                f"{{verb}}: `state` must be a mapping, got {describe_argument(state)}.",
                'It maps names to arrays: `{"layers.0.w": w0, "layers.1.w": w1}`.',
            )
        layers = list(enumerate(layers_by_number(state, prefix, ignores)))
        if order is None:
            return _stacked([_wanted(layers, like, check_mapping(names))], (shardings,), prefix, like)[0]
        likes = None if like is None else check_sequence(like, "like")
        places = check_order(order, len(layers), None if likes is None else len(likes))
        parts = _several(layers, likes, names, places)
        stacks = _stacked(parts, one_each(shardings, len(parts), "shardings"), prefix, like)
        return stacks if isinstance(like, list) else tuple(stacks)
    except Exception as error:
        explained = explain(error, "layers_from_state_dict")
    raise explained


@verb
def layers_to_state_dict(
    stacked: PyTree,
    *,
    prefix: str = _PREFIX,
    names: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
    order: Order | None = None,
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
        >>> print(sorted(treescan.layers_to_state_dict({"w": jnp.zeros((2, 3))})))
        ['layers.0.w', 'layers.1.w']
    """
    try:
        prefix = check_prefix(prefix)
        if order is None:
            return _named(prefix, _layers_of_one(stacked, check_mapping(names)))
        stacks = check_sequence(stacked, "stacked")
        own = _names_of_each(names, [_paths(freeze_shared(stack)) for stack in stacks])
        each = [
            _layers_of(stack, f"stacked[{i}]", of_stack)
            for i, (stack, of_stack) in enumerate(zip(stacks, own, strict=True))
        ]
        counts = list(map(len, each))
        places = check_order(order, sum(counts), len(stacks))
        check_counts(places, counts)
        following = list(map(iter, each))
        return _named(prefix, [next(following[place]) for place in places])
    except Exception as error:
        explained = explain(error, "layers_to_state_dict")
    raise explained


def _named(prefix: str, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        full_name(prefix, number, name): leaf for number, layer in enumerate(layers) for name, leaf in layer.items()
    }


def _paths(frozen: PyTree) -> list[Any]:
    return [path for path, _ in jtu.tree_flatten_with_path(frozen)[0]]


def _layers_of_one(stacked: PyTree, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The same of what is to be a single stack; where it may be several, the cure for these is given too."""
    try:
        return _layers_of(stacked, "stacked", names)
    except Fault as fault:
        if is_several(stacked):
            fault.cures = (*fault.cures, Cure(_SEVERAL.format(what="stacks")))
        raise


def _layers_of(stacked: PyTree, root: str, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """For each layer of a stack its arrays by name."""
    frozen = freeze_shared(stacked)
    count = count_layers(frozen, root)
    paths = _paths(frozen)
    own = [leaf_name(path, names) for path in paths]
    check_names(paths, names)
    refuse_twice(own)
    stacks = dict(zip(own, jax.tree.leaves(frozen), strict=True))
    on_host = {name: leaf for name, leaf in stacks.items() if isinstance(leaf, np.ndarray)}
    shared = {name: leaf for name, leaf in stacks.items() if is_traced_number(leaf)}
    on_device = {name: leaf for name, leaf in stacks.items() if name not in on_host | shared}
    layers: list[dict[str, Any]] = split_layers(on_device) if on_device else [{} for _ in range(count)]
    for number, layer in enumerate(layers):
        layer.update({name: np.asarray(leaf[number]) for name, leaf in on_host.items() if name not in shared})
        layer.update(shared)
    return [{name: layer[name] for name in own} for layer in layers]


def _names_of_each(names: Any, paths: Sequence[Sequence[Any]]) -> list[Mapping[str, str]]:
    """What each of several stacks calls its leaves. A single mapping is about the leaves of all."""
    if is_several(names):
        return [check_mapping(each) for each in one_each(names, len(paths), "names")]
    names = check_mapping(names)
    check_names([path for each in paths for path in each], names)
    known = [set(map(plain_name, each)) for each in paths]
    return [{path: name for path, name in names.items() if path in own} for own in known]


def _several(
    layers: Sequence[tuple[int, Mapping[str, Any]]], likes: tuple[PyTree, ...] | None, names: Any, places: Sequence[int]
) -> list[_Wanted]:
    """What is wanted of several stacks, with the layers of each."""
    count = max(places) + 1 if likes is None else len(likes)
    each = [[layer for layer, place in zip(layers, places, strict=True) if place == i] for i in range(count)]
    empty = [i for i, of_stack in enumerate(each) if not of_stack]
    if empty:
        raise Fault(
            LayerError,
            f"{{verb}}: stack {empty[0]} of {count} has no layers: the checkpoint has {len(layers)}.",
            "A stack has at least one layer. Leave out empty stacks, in `like` and in `order`.",
        )
    if likes is None:
        own = [check_mapping(names)] * count
        return [_wanted(of_stack, None, of_names) for of_stack, of_names in zip(each, own, strict=True)]
    own = _names_of_each(names, [_paths(freeze_shared(like)) for like in likes])
    return [_wanted(*parts) for parts in zip(each, likes, own, strict=True)]


def _wanted(layers: Sequence[tuple[int, Mapping[str, Any]]], like: PyTree, names: Mapping[str, str]) -> _Wanted:
    """What each layer of a stack must have."""
    if like is None:
        if names:
            raise Fault(
                ArgumentTypeError,
                "{verb}: `names` renames the leaves of `like`, but there is no `like`.",
                "Give a tree of one layer, or rename the keys of the dict that you get.",
            )
        return _Wanted(None, [(name, None) for name in layers[0][1]], list(layers))
    frozen = freeze_shared(like)
    leaves = jtu.tree_flatten_with_path(frozen)[0]
    check_names([path for path, _ in leaves], names)
    wanted = [(leaf_name(path, names), leaf) for path, leaf in leaves]
    refuse_twice([name for name, _ in wanted])
    return _Wanted(frozen, wanted, list(layers))


def _stacked(parts: Sequence[_Wanted], shardings: Sequence[PyTree], prefix: str, like: PyTree) -> list[Any]:
    """The stacks, once every layer is found to have what is wanted.

    Raises:
        Fault: for a `LayerError` that lists all that differs.
    """
    rows = [row for part in parts for row in _differences(part, prefix)]
    if rows:
        raise Fault(
            LayerError,
            "{verb}: the checkpoint's layers do not fit.",
            "`like` describes one layer (by default, the first layer). `names` maps its paths to names in the "
            "checkpoint, and `ignore` lists the names to leave out. If arrays have another layout, for example "
            "torch's transposed weights, convert them before or after stacking.",
            *(
                [_SEVERAL.format(what="a layer of each of several stacks")]
                if len(parts) == 1 and is_several(like)
                else []
            ),
            header=("name", "expected", "is"),
            rows=rows,
        )
    _warn_of_dtypes(parts, prefix)
    return [_join_all(part, of_stack) for part, of_stack in zip(parts, shardings, strict=True)]


def _differences(part: _Wanted, prefix: str) -> list[Row]:
    """Where a layer has something else than what is wanted, or another shape."""
    first = part.layers[0][1]
    expected = {name: (first.get(name) if leaf is None else leaf) for name, leaf in part.leaves}
    rows: list[Row] = []
    for number, layer in part.layers:
        for name in dict.fromkeys((*expected, *layer)):
            row = _compare(expected.get(name), layer.get(name), first.get(name))
            rows.extend([] if row is None else [Row(full_name(prefix, number, name), *row)])
    return rows


def _compare(expected: Any, value: Any, of_first: Any) -> tuple[str, str, str] | None:
    """How an array differs from what is expected in its place, None being nothing; dtypes are as in the first layer."""
    if expected is None or value is None:
        return (_shape(expected) or "(nothing)", _shape(value) or "(missing)", "")
    if tuple(np.shape(value)) != shape_of(expected):
        return _shape(expected), _shape(value), "shape"
    if of_first is not None and value.dtype != of_first.dtype:
        return str(of_first.dtype), str(value.dtype), "dtype"
    return None


def _shape(value: Any) -> str:
    """A shape for a message; empty for None."""
    return "" if value is None else f"[{','.join(map(str, shape_of(value) or ()))}]"


def _warn_of_dtypes(parts: Sequence[_Wanted], prefix: str) -> None:
    """Warns if `like` has other dtypes, because the stack keeps those of the checkpoint."""
    found: list[str] = []
    for part in parts:
        number, first = part.layers[0]
        for name, leaf in part.leaves:
            wanted = getattr(leaf, "dtype", first[name].dtype)  # that of the given array: JAX makes 32 bits of 64
            if leaf is not None and wanted != first[name].dtype:
                found.append(f"{full_name(prefix, number, name)} is {first[name].dtype}, not {wanted}")
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        warn_user(
            f"The dtypes of the checkpoint differ from those of `like`: {'; '.join(found[:3])}{more}. The stack "
            "keeps the dtypes of the checkpoint. Cast the stack, or give a `like` with the same dtypes.",
            UserWarning,
        )


def _join_all(part: _Wanted, shardings: PyTree) -> Any:
    """The stack of one kind of layers."""
    names = [name for name, _ in part.leaves]
    alone = part.like is None and names == [""]  # a layer is one array
    first = part.layers[0][1]
    like = (first[""] if alone else {name: first[name] for name in names}) if part.like is None else part.like
    if part.like is None and not alone:
        names = sorted(names)  # as JAX orders the leaves of a dict
    places: Sequence[Any] = [None] * len(names)
    if shardings is not None:
        types = jax.tree.unflatten(jax.tree.structure(like), [first[name] for name in names])
        places = stacked_shardings(jax.eval_shape(lambda: types), shardings, "{verb}").leaves
    leaves = [
        _join([layer[name] for _, layer in part.layers], place) for name, place in zip(names, places, strict=True)
    ]
    whole = thaw_static(jax.tree.unflatten(jax.tree.structure(like), leaves))
    if part.like is not None:
        return add_layer_axis(whole, None)
    return whole if alone else {name: whole[name] for name, _ in part.leaves}


def _join(leaves: Sequence[Any], place: Any) -> Any:
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        whole: Any = jnp.stack(list(map(jnp.asarray, leaves)))
    else:
        whole = np.stack(leaves)
    return whole if place is None else jax.device_put(whole, place)
