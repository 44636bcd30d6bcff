"""Converts stacks from and to checkpoints that name the arrays of each layer, for example `layers.0.w`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._avals import describe_argument, describe_leaf, shape_of
from .._errors import ArgumentTypeError, Fault, LayerError, Row, explain, verb
from .._tree import KeyPath, thaw_static
from .._types import Array, PyTree
from .boxes import add_layer_axis
from .shared import freeze_shared, is_traced_number
from .stack import count_layers, split_layers

Layer = TypeVar("Layer")
_PREFIX = "layers"


@overload
def layers_from_state_dict(
    state: Mapping[str, Any], like: None = None, *, prefix: str = _PREFIX, names: None = None
) -> Any: ...
@overload
def layers_from_state_dict(
    state: Mapping[str, Any], like: Layer, *, prefix: str = _PREFIX, names: Mapping[str, str] | None = None
) -> Layer: ...
@verb
def layers_from_state_dict(
    state: Mapping[str, Any], like: PyTree = None, *, prefix: str = _PREFIX, names: Mapping[str, str] | None = None
) -> Any:
    """Makes a stack of a flat checkpoint's layers, whose arrays are named `{prefix}.{number}.{name}`.

    Args:
        state: all arrays by name: `{"layers.0.w": ..., "layers.1.w": ..., "head": ...}`. Names that do not begin with
            the prefix and a number are left alone.
        like: a tree with the structure and shapes of *one* layer (`jax.eval_shape(init, key)` makes one). The stack
            then has its structure; a leaf's name is its path, joined by dots (`attention.q_proj`). None: the stack is a
            dict from each name to its array.
        prefix: the text before the number; "" for nothing.
        names: where the checkpoint calls a leaf something else: `{"attention.q_proj": "self_attn.q_proj.weight"}`.

    Returns:
        The stack, with leaves `[n, ...]` of the checkpoint's dtypes. Where all arrays of a leaf are NumPy's, they are
        stacked by NumPy, and stay on the host.

    Raises:
        LayerError: if layers are missing, or arrays: too few, too many, or of another shape than `like` has; all of
            them are listed.

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
        prefix = _check_texts(prefix, names)
        if not isinstance(state, Mapping):
            raise Fault(
                ArgumentTypeError,
                f"{{verb}}: `state` is a mapping, got {describe_argument(state)}.",
                'From names to arrays: `{"layers.0.w": w0, "layers.1.w": w1}`.',
            )
        layers = _by_number(state, prefix)
        wanted = _wanted(layers, like, names or {})
        _check_complete(layers, wanted, prefix)
        stacked = [_join([layer[name] for layer in layers]) for name, _ in wanted]
        if like is None:
            if [name for name, _ in wanted] == [""]:  # a layer is one array
                return stacked[0]
            return {name: leaf for (name, _), leaf in zip(wanted, stacked, strict=True)}
        whole = thaw_static(jax.tree.unflatten(jax.tree.structure(freeze_shared(like)), stacked))
        return add_layer_axis(whole, None)
    except Exception as error:
        explained = explain(error, "layers_from_state_dict")
    raise explained


@verb
def layers_to_state_dict(
    stacked: PyTree, *, prefix: str = _PREFIX, names: Mapping[str, str] | None = None
) -> dict[str, Array]:
    """The arrays of a stack, layer by layer, under the names of a flat checkpoint: undoes `layers_from_state_dict`.

    Args:
        stacked: any pytree whose arrays lead with the layers: leaves `[n, ...]`. Other leaves are left out.
        prefix: the text before the number; "" for nothing.
        names: where the checkpoint calls a leaf something else than its path: `{"attention.q_proj": "q.weight"}`.

    Returns:
        A dict from names, `{prefix}.{number}.{name}`, to arrays `[...]`, n of them for each leaf. NumPy's stay NumPy's.

    Raises:
        LayerError: if the leaves do not lead with one number of layers, or two of them would have one name.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> print(sorted(treescan.layers_to_state_dict({"w": jnp.zeros((2, 3))})))
        ['layers.0.w', 'layers.1.w']
    """
    try:
        prefix = _check_texts(prefix, names)
        frozen = freeze_shared(stacked)
        count = count_layers(frozen, "stacked")
        paths = [path for path, _ in jtu.tree_flatten_with_path(frozen)[0]]
        own = [_name(path, names or {}) for path in paths]
        _check_names(paths, names or {})
        _refuse_twice(own)
        stacks = dict(zip(own, jax.tree.leaves(frozen), strict=True))
        on_host = {name: leaf for name, leaf in stacks.items() if isinstance(leaf, np.ndarray)}
        shared = {name: leaf for name, leaf in stacks.items() if is_traced_number(leaf)}
        on_device = {name: leaf for name, leaf in stacks.items() if name not in on_host | shared}
        layers: list[dict[str, Any]] = split_layers(on_device) if on_device else [{} for _ in range(count)]
        for number, layer in enumerate(layers):
            layer.update({name: np.asarray(leaf[number]) for name, leaf in on_host.items() if name not in shared})
            layer.update(shared)
        return {_full(prefix, number, name): layer[name] for number, layer in enumerate(layers) for name in own}
    except Exception as error:
        explained = explain(error, "layers_to_state_dict")
    raise explained


def _name(path: KeyPath, names: Mapping[str, str]) -> str:
    """A leaf's name: its path joined by dots, or what `names` has for that."""
    plain = _plain(path)
    return names.get(plain, plain)


def _plain(path: KeyPath) -> str:
    return jtu.keystr(path, simple=True, separator=".")


def _full(prefix: str, number: int, name: str) -> str:
    return ".".join(part for part in (prefix, str(number), name) if part)


def _by_number(state: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """For each layer its arrays by name."""
    found: dict[int, dict[str, Any]] = {}
    pattern = re.compile(rf"{re.escape(prefix + '.' if prefix else '')}(0|[1-9]\d*)(?:\.(.+))?", re.DOTALL)
    for name, value in state.items():
        match = pattern.fullmatch(name) if isinstance(name, str) else None
        if match:
            found.setdefault(int(match[1]), {})[match[2] or ""] = _as_array(name, value)
    if not found:
        prefixes = sorted({part[1] or "" for name in state if (part := re.match(r"(?:(.*?)\.)?\d+(\.|$)", str(name)))})
        raise Fault(
            LayerError,
            f"{{verb}}: no name is `{_full(prefix, 0, 'w')}`, or the like.",
            f"Names with a number in them have the prefix {', '.join(map(repr, prefixes))}: pass it as `prefix`."
            if prefixes
            else "Layers have numbers: without any, there is nothing to stack.",
        )
    missing = next(i for i in range(len(found) + 1) if i not in found)
    if missing < len(found):
        raise Fault(
            LayerError,
            f"{{verb}}: layers are missing: there is {_full(prefix, max(found), '')}, but not "
            f"{_full(prefix, missing, '')}.",
            "Layers are numbered from 0 on. A checkpoint in several files is one only when all are read.",
        )
    return [found[i] for i in range(len(found))]


def _as_array(name: str, value: Any) -> Any:
    readable = hasattr(value, "shape") or isinstance(value, bool | int | float | complex)
    array = np.asarray(value) if readable and not isinstance(value, jax.Array) else value
    if not readable or shape_of(array) is None:
        raise Fault(
            LayerError,
            f"{{verb}}: `{name}` is no array, but {describe_argument(value)}.",
            "Arrays of NumPy and JAX can be stacked, and what NumPy can read as one; leave all else out of `state`.",
        )
    return array


def _wanted(layers: Sequence[Mapping[str, Any]], like: PyTree, names: Mapping[str, str]) -> list[tuple[str, Any]]:
    """What each layer must have: the names, and of what shape, where that is known."""
    if like is None:
        if names:
            raise Fault(
                ArgumentTypeError,
                "{verb}: `names` says what the leaves of `like` are called, and there is no `like`.",
                "Give a tree of one layer, or rename the keys of the dict that you get.",
            )
        return [(name, None) for name in layers[0]]
    leaves = jtu.tree_flatten_with_path(freeze_shared(like))[0]
    wanted = [(_name(path, names), leaf) for path, leaf in leaves]
    _check_names([path for path, _ in leaves], names)
    _refuse_twice([name for name, _ in wanted])
    return wanted


def _check_complete(layers: Sequence[Mapping[str, Any]], wanted: Sequence[tuple[str, Any]], prefix: str) -> None:
    """Every layer has what is wanted and nothing else, in one shape."""
    first = layers[0]
    expected = {name: (first.get(name) if leaf is None else leaf) for name, leaf in wanted}
    rows: list[Row] = []
    for number, layer in enumerate(layers):
        for name in dict.fromkeys((*expected, *layer)):
            row = _compare(expected.get(name), layer.get(name), first.get(name))
            rows.extend([] if row is None else [Row(_full(prefix, number, name), *row)])
    if rows:
        raise Fault(
            LayerError,
            "{verb}: the checkpoint's layers are not what they should be.",
            "`like` says what one layer holds (without it, the first does), `names` what the checkpoint calls it. "
            "Arrays that are laid out otherwise, as torch's transposed weights, are changed before, or once stacked.",
            header=("name", "expected", "is"),
            rows=rows,
        )


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
    """A shape as it is written in a message; nothing for None."""
    return "" if value is None else f"[{','.join(map(str, shape_of(value) or ()))}]"


def _join(leaves: Sequence[Any]) -> Any:
    if any(isinstance(leaf, jax.Array) for leaf in leaves):
        return jnp.stack(list(map(jnp.asarray, leaves)))
    return np.stack(leaves)


def _refuse_twice(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Fault(
            LayerError,
            f"{{verb}}: two leaves would be called {', '.join(twice)}.",
            "Give one of them another name: `names={path: name}`.",
        )


def _check_names(paths: Sequence[KeyPath], names: Mapping[str, str]) -> None:
    unknown = sorted(map(str, names.keys() - set(map(_plain, paths))))
    if unknown:
        raise Fault(
            LayerError,
            f"{{verb}}: `names` speaks of {', '.join(unknown)}, which a layer does not have.",
            f"Its leaves are {', '.join(map(_plain, paths))}.",
        )


def _check_texts(prefix: Any, names: Any) -> str:
    """The prefix, without a dot at its end."""
    if not isinstance(prefix, str):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `prefix` is a string, got {describe_argument(prefix)}.",
            'It is the text before the number: `prefix="model.layers"`.',
        )
    if names is not None and not isinstance(names, Mapping):
        raise Fault(
            ArgumentTypeError,
            f"{{verb}}: `names` is a mapping, got {describe_leaf(names)}.",
            'From paths in a layer to names in the checkpoint: `{"attention.q_proj": "q.weight"}`.',
        )
    return prefix.removesuffix(".")
