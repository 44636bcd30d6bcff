"""Key paths, prefix trees, static leaves and other parts of trees; and short reprs, with types in place of elements."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ._avals import PyTree, TreeDef, describe_leaf, describe_node
from ._text import escaped, table_of

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys that lead from a tree's root to a leaf."""

_T = TypeVar("_T")

_ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@dataclass(frozen=True)
class Root:
    """A key at which the rendered path starts again, with the name that the user knows.

    Attributes:
        name: what is rendered in place of all that leads here.
        numbered: whether numbers right below are left out too: those of lists that only the package knows.
        axes: the option that gives the axes of what lies below, where it is neither `in_axes` nor `out_axes`.
    """

    name: str
    numbered: bool = False
    axes: str | None = None

    def __str__(self) -> str:
        return f".{self.name}"


def named_roots(kind: Any, **roots: Root) -> None:
    """Registers a NamedTuple, some of whose fields are roots."""
    keys = [roots.get(field, jtu.GetAttrKey(field)) for field in kind._fields]

    def with_keys(node: Iterable[PyTree]) -> tuple[list[tuple[Hashable, PyTree]], None]:
        return list(zip(keys, node, strict=True)), None

    jtu.register_pytree_with_keys(kind, with_keys, lambda _, parts: kind(*parts), lambda node: (tuple(node), None))


def path_str(root: str, path: KeyPath) -> str:
    """Renders a key path as the user would write it: `carry.cache["k"][0]`."""
    for i, key in enumerate(path):
        if isinstance(key, Root):
            below = path[i + 1 :]
            if key.numbered:
                below = tuple(itertools.dropwhile(lambda key: isinstance(key, jtu.SequenceKey), below))
            return path_str(key.name, below)
    return root + "".join(_key_str(key) for key in path)


def _key_str(key: object) -> str:
    match key:
        case jtu.GetAttrKey(name=name):
            return f".{name}"
        case jtu.SequenceKey(idx=index) | jtu.FlattenedIndexKey(key=index):
            return f"[{index}]"
        case jtu.DictKey(key=value):
            return f"[{json.dumps(value) if isinstance(value, str) else repr(value)}]"
        case _:
            return str(key)


def leaves_with_path(root: str, tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path, in the order of `jax.tree.leaves`."""
    return [(path_str(root, path), leaf) for path, leaf in jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def map_leaves(function: Callable[..., object], tree: PyTree, *others: Iterable[object]) -> PyTree:
    """A tree with what a function makes of each leaf, and of what other lists have in its place."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [function(*each) for each in zip(leaves, *others, strict=True)])


def children(tree: PyTree) -> list[tuple[KeyPath, PyTree]] | None:
    """The direct children of a node with their keys, or None if `tree` is a leaf."""
    if jtu.all_leaves([tree]):
        return None
    return jtu.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]


def metadata(node: PyTree) -> object:
    """What a container holds beside its children: the fields of a registered class that are no leaves."""
    structure: TreeDef = jax.tree.structure(node)
    data = structure.node_data()
    return None if data is None or isinstance(node, dict | tuple | list) else data[1]


_LEAF: TreeDef = jax.tree.structure(0)


class PrefixMismatch(Exception):
    """A prefix tree does not fit its tree. The message names the first place."""


def broadcast_prefix(prefix: PyTree, tree: PyTree, root: str) -> list[Any]:
    """One value of `prefix` for each leaf of `tree`; `None` in a prefix is a value, not an empty tree.

    Raises:
        PrefixMismatch: if `prefix` is not a tree prefix of `tree`, whose root is called `root`.
    """
    values: list[Any] = []

    def spread(value: object, subtree: PyTree) -> None:
        values.extend([value] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(spread, prefix, tree, is_leaf=lambda leaf: leaf is None)
    except (ValueError, TypeError):
        raise PrefixMismatch(_where_off(prefix, tree, root, ())) from None
    return values


def _where_off(prefix: PyTree, tree: PyTree, root: str, path: KeyPath) -> str:
    """Walks a prefix and its tree to the first node at which they differ."""
    here = path_str(root, path)
    parts, wholes = children(prefix) if prefix is not None else None, children(tree)
    if parts is None:
        return ""
    if wholes is None or type(prefix) is not type(tree):
        return f"{here} is {describe_node(tree)}, but it has {describe_node(prefix)} there"
    given, there = dict(parts), dict(wholes)
    for key in there:
        if key not in given:
            return f"it has no entry for {path_str(root, (*path, *key))}"
    for key in given:
        if key not in there:
            return f"there is no {path_str(root, (*path, *key))}"
    return next(filter(None, (_where_off(given[key], there[key], root, (*path, *key)) for key in given)), "")


@dataclass(frozen=True)
class Prefix:
    """A prefix tree whose leaves are static: hashable, so that a Step may hold it. Equal ones have the same leaves."""

    leaves: tuple[Any, ...] = field(compare=False)
    structure: TreeDef
    was: tuple[Hashable, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "was", tuple(map(exact, self.leaves)))

    @classmethod
    def of(cls, tree: PyTree) -> Prefix:
        """Takes a prefix tree apart; `None` counts as a leaf."""
        if tree is None or jtu.all_leaves([tree]):
            return cls((tree,), _LEAF)
        leaves, structure = jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)
        return cls(tuple(leaves), structure)

    @functools.cached_property
    def tree(self) -> PyTree:
        """The prefix tree."""
        return jax.tree.unflatten(self.structure, self.leaves)

    def spread(self, tree: PyTree, root: str) -> list[Any]:
        """One value for each leaf of `tree`; see `broadcast_prefix`."""
        return broadcast_prefix(self.tree, tree, root)


def same_structure(tree: PyTree, other: PyTree) -> bool:
    """Whether two trees have one structure, whatever their leaves."""
    structure: TreeDef = jax.tree.structure(tree)
    return bool(structure == jax.tree.structure(other))


_known_arrays: set[type] = set()  # types of leaves that were seen not to be static: `isinstance` of a tracer is slow


def is_static(leaf: object) -> bool:
    """Whether a leaf is neither an array nor a scalar: such a leaf stays outside the loop."""
    if type(leaf) in _known_arrays:
        return False
    if isinstance(leaf, np.ndarray | np.generic):  # of texts, objects, dates or records?
        return leaf.dtype.kind in "OSUMm" or leaf.dtype.names is not None
    if not isinstance(leaf, _ARRAY_LIKE):
        try:
            jax.typeof(leaf)
        except TypeError:
            return True
    _known_arrays.add(type(leaf))
    return False


class _Itself:
    """A value that is equal to nothing but itself."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def exact(value: object) -> Hashable:
    """What a static value is now, as part of the key of a cache: its type, and all that it holds.

    Of two values these are equal if no program can tell the values apart. `==` is too little: 1, 1.0 and True are
    equal, and so are 0.0 and -0.0, `Decimal("1")` and `Decimal("1.000")`, and an object and itself after it was
    changed. It is too much for a NaN. Functions, classes, modules and arrays of JAX are themselves, as they are to JAX.
    What cannot be read, or has too many parts, is equal to nothing: it is traced again.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind in _NUMBERS:
        return kind, value
    try:
        return _exact(value, (), itertools.count())
    except Exception:  # the user's own attributes, `repr` or hash
        return _Itself(object())


_ATOMS = frozenset({str, bytes, type(None), type, types.FunctionType, types.ModuleType, type(jax.jit(abs))})
"""Types of which `==` alone says whether two values are the same."""

_NUMBERS = frozenset({bool, int})

_MOST_EXACT = 4096


class _TooMany(Exception):
    pass


def _exact(value: object, around: tuple[object, ...], count: Iterator[int]) -> Hashable:
    """What a part of the values `around` is now; see `exact`."""
    kind = type(value)
    if kind in _ATOMS or isinstance(value, type):
        return value
    if kind in _NUMBERS:
        return kind, value
    if isinstance(value, float | complex | np.generic):  # 0.0 is not -0.0, and NaN is NaN
        return kind, repr(value)
    if isinstance(value, jax.Array):
        return _Itself(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return kind, value.dtype, value.shape, hashlib.sha256(value.tobytes()).digest()
    for depth, other in enumerate(around):
        if other is value:
            return kind, depth
    if next(count) > _MOST_EXACT:
        raise _TooMany
    told, parts = _parts_of(value, kind)
    around = (*around, value)
    inner = [_exact(part, around, count) for part in parts]
    return kind, told, frozenset(inner) if isinstance(value, set | frozenset) else tuple(inner)


_OF_LIBRARIES = frozenset({*sys.stdlib_module_names, "jax", "jaxlib", "numpy"})
"""The types of these have attributes that are computed when they are first asked for."""


def _parts_of(value: Any, kind: type[Any]) -> tuple[Hashable, Iterable[object]]:
    """What a value says of itself by `==`, and the parts that say the rest."""
    hashes: Any = kind.__hash__
    by_itself = hashes is object.__hash__
    if isinstance(value, _CONTAINERS):
        items: Any = value.items() if isinstance(value, dict) else value
        items = (value.func, value.args, value.keywords) if isinstance(value, functools.partial) else items
        return _Itself(value) if by_itself else None, (*items, *contents_of(value).items())
    owner = getattr(value, "__self__", None) if callable(value) else None
    if owner is not None and not isinstance(owner, type | types.ModuleType):  # a bound method
        return _Itself(owner), (getattr(value, "__func__", value.__name__), owner)
    is_known = kind.__module__.partition(".")[0] in _OF_LIBRARIES
    if by_itself:
        return _Itself(value), (getattr(value, "__wrapped__", None),) if is_known else contents_of(value).items()
    if "__dataclass_fields__" in vars(kind):
        # One that can change after a program was made of it is compared as it is then, too: the program reads it.
        live = value if hashes is not None and not kind.__dataclass_params__.frozen else None
        return live, [getattr(value, name) for name in _compared(kind)]
    if hasattr(kind, "__dataclass_fields__"):  # a class with more attributes than that of which it is made
        return None, contents_of(value).items()
    if hashes is not None:
        written = repr(value) if is_known else _written_in_c(value, kind)
        return (value, written), () if is_known else contents_of(value).items()
    if _written_in_c(value, kind):
        raise TypeError(kind)  # what it holds is not to be seen, and can change
    return None, contents_of(value).items()


_CONTAINERS = (tuple, list, dict, set, frozenset, collections.deque, functools.partial)

_fields: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _compared(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass that count when two are compared."""
    if kind not in _fields:
        _fields[kind] = tuple([field.name for field in dataclasses.fields(kind) if field.compare])
    return _fields[kind]


def _written_in_c(value: object, kind: Any) -> str:
    """What a type of C in which a value may hide something writes of it; nothing if there is none."""
    while kind.__base__ not in (object, None):
        kind = kind.__base__
    return "" if {"__dict__", "__slots__"} & vars(kind).keys() else kind.__repr__(value)


@jtu.register_static
@dataclass(frozen=True)
class Static:
    """Holds a static value, for example a leaf: a node without leaves whose value is part of the tree's structure.

    Two are equal if no program can tell their values apart, as they were when these were given: see `exact`. One whose
    value has no hash is equal to itself alone: the value can change, and a cache would return another object for it.
    """

    value: Any
    code: int = field(init=False)
    was: Hashable = field(init=False)

    def __post_init__(self) -> None:
        was = exact(self.value)
        try:
            hash(self.value)
            code = hash(was)
        except Exception:
            was, code = _Itself(object()), id(self)
        object.__setattr__(self, "was", was)
        object.__setattr__(self, "code", code)  # as the value was: a cache may hold it when it has changed

    def __hash__(self) -> int:
        return self.code

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Static) or self.code != other.code:
            return False
        try:
            return bool(self.was == other.was)
        except Exception:  # an `==` of the user's
            return False


def kin(key: Hashable) -> int:
    """A hash of what the key of a cache says, but for which functions and objects are in it.

    Of functions it says where they were written, and of objects that are equal to themselves alone which type they
    have. So calls that make them anew have keys of one kin.
    """
    kind = type(key)
    if isinstance(key, Static):
        return kin(key.was)
    if isinstance(key, types.FunctionType):
        return hash(key.__code__)
    if isinstance(key, _Itself):
        return hash(type(key.value))
    if isinstance(key, tuple):
        return hash((kind, *map(kin, key)))
    if "__dataclass_fields__" in vars(kind) and kind.__hash__ is not object.__hash__:
        return hash((kind, *(kin(getattr(key, name)) for name in _compared(kind))))
    return hash(key)


def are_same(value: object, other: object) -> bool:
    """Whether no program can tell two static values apart, of which caches and loops may take one for the other."""
    return value is other or exact(value) == exact(other)


def contents_of(value: object) -> dict[str, object]:
    """The attributes that an instance of a user's class holds; of functions, classes and modules, nothing."""
    if isinstance(value, type | types.FunctionType | types.ModuleType):
        return {}
    of_each = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    slots = (name for names in of_each for name in ((names,) if isinstance(names, str) else names))
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


_MOST_PARTS = 200


def holds_arrays(leaf: object) -> bool:
    """Whether a static leaf is an object among whose parts are arrays: JAX sees neither these nor their changes.

    What can be called is a function to its users, and may close over arrays. Of a large object some parts are seen.
    """
    if not is_static(leaf) or callable(leaf):
        return False
    waiting, seen = [*contents_of(leaf).values()], {id(leaf)}
    while waiting and len(seen) < _MOST_PARTS:
        part = waiting.pop()
        if isinstance(part, jax.Array | np.ndarray) and not is_static(part):
            return True
        if isinstance(part, str | bytes | int | float) or callable(part):
            continue
        if id(part) not in seen:
            inner = part if isinstance(part, dict | list | tuple) else contents_of(part)
            waiting += itertools.islice(inner.values() if isinstance(inner, dict) else inner, _MOST_PARTS)
        seen.add(id(part))
    return False


def freeze_static(tree: PyTree, *, scalars: bool = False) -> PyTree:
    """Replaces the static leaves of a tree by nodes that hold them; a tree without any comes back unchanged.

    Args:
        tree: any tree.
        scalars: whether Python's own numbers count as static too.
    """
    leaves = jax.tree.leaves(tree)
    if not scalars and _known_arrays.issuperset(map(type, leaves)):
        return tree
    return freeze_leaves(tree, [is_static(leaf) or (scalars and is_number(leaf)) for leaf in leaves])


def is_number(leaf: object) -> bool:
    """Whether a leaf is one of Python's own numbers or flags."""
    return type(leaf) in (bool, int, float, complex)


def freeze_leaves(tree: PyTree, static: list[bool]) -> PyTree:
    """Replaces those of a tree's leaves that are marked; a tree without any comes back unchanged."""
    if not any(static):
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    frozen = [Static(leaf) if is_one else leaf for leaf, is_one in zip(leaves, static, strict=True)]
    return jax.tree.unflatten(treedef, frozen)


def holds_static(tree: PyTree) -> bool:
    """Whether a tree holds nodes in place of static leaves."""
    return any(map(_is_frozen, jax.tree.leaves(tree, is_leaf=_is_frozen)))


def _is_frozen(node: object) -> bool:
    return isinstance(node, Static)


def thaw_static(tree: PyTree) -> PyTree:
    """Restores the static leaves."""
    return jax.tree.map(lambda node: node.value if _is_frozen(node) else node, tree, is_leaf=_is_frozen)


def merge(flags: Sequence[bool], on: Iterable[_T], off: Iterable[_T]) -> list[_T]:
    """One list of two, each flag telling which of them is next."""
    first, second = iter(on), iter(off)
    return [next(first if flag else second) for flag in flags]


def split(flags: Sequence[bool], values: Iterable[_T]) -> tuple[list[_T], list[_T]]:
    """The values that are flagged, and the others."""
    parts: tuple[list[_T], list[_T]] = [], []
    for flag, value in zip(flags, values, strict=True):
        parts[not flag].append(value)
    return parts


def replaced(flags: Sequence[bool], values: Iterable[_T], new: Iterable[_T]) -> list[_T]:
    """The values, those that are flagged replaced."""
    return merge(flags, new, split(flags, values)[1])


class Part(NamedTuple):
    """Which leaves of a tree have a tangent."""

    structure: TreeDef
    on: tuple[bool, ...]

    def split(self, tree: PyTree) -> tuple[list[Any], list[Any]]:
        """The leaves that have one, and the others."""
        return split(self.on, jax.tree.leaves(tree))

    def join(self, on: Sequence[object], off: Sequence[object]) -> PyTree:
        """The tree of both."""
        return jax.tree.unflatten(self.structure, merge(self.on, on, off))


class Shown(str):
    """What is shown in place of a leaf."""

    __slots__ = ()
    __repr__ = str.__str__


def short_repr(name: str, **fields: object) -> str:
    """`Padded(data=float32[5,3,2], lengths=int32[3])`."""
    return f"{name}({', '.join(f'{field}={describe_tree(value)}' for field, value in fields.items())})"


def describe_tree(tree: PyTree) -> str:
    """A tree with the types of its arrays in their places; few numbers by their values, where these are known."""
    try:
        return repr(jax.tree.map(lambda leaf: Shown(_numbers(leaf) or describe_leaf(leaf)), tree))
    except Exception:  # a class of the user's that its own repr or constructor fails for
        return describe_node(tree)


_FEW = 12


def _numbers(leaf: object) -> str | None:
    """The values of an array of few numbers in at most two axes, on one line, if they are there."""
    if not isinstance(leaf, jax.Array | np.ndarray) or isinstance(leaf, Tracer):
        return None
    if not 0 < leaf.size <= _FEW or leaf.ndim >= (2 if leaf.dtype == bool else 3):
        return None
    try:
        return " ".join(map(str.strip, str(np.asarray(leaf)).splitlines()))
    except Exception:  # deleted, spread over hosts, or a PRNG key
        return None


def short_html(name: str, **fields: object) -> str:
    """A short repr for notebooks: a table with a row for each leaf."""
    rows = [
        (path, _numbers(leaf) or describe_leaf(leaf))
        for field, value in fields.items()
        for path, leaf in leaves_with_path(field, value) or [(field, value)]
    ]
    return f"<div><b>{escaped(name)}</b>{table_of(rows)}</div>"
