"""Types of other packages as carries: `register_carry`, and entry points of distributions."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from .._avals import PyTree, describe_node
from .._errors import PluginFault, PluginWarning, Row, TypeMisuse, named_options, warn_user
from .._tree import leaves_with_path
from ._base import AbstractCarry, describe_class, describe_error, describe_function, is_carry

GROUP = "treescan.carries"
"""The group of entry points in which distributions declare custom carries, each named after a package."""

_PLAIN: frozenset[type] = frozenset((dict, list, tuple, type(None), bool, int, float, complex, str, np.ndarray))
_OWN = frozenset(("builtins", "collections", "jax", "jaxlib", "numpy", "treescan"))
Value = TypeVar("Value")


class Adoption(NamedTuple):
    """How values of a registered type become carries and back."""

    kind: type
    to_carry: Callable[[Any], AbstractCarry[Any, Any]]
    from_carry: Callable[[Any], PyTree]


@dataclass
class Plugin:
    """An entry point: a module whose import registers carries, or a callable that does.

    Attributes:
        package: the package whose types it is for; the name of the entry point.
        value: what it refers to, `module` or `module:callable`.
        distribution: the name and version of the distribution that declares it.
        fault: why it failed to load, or None.
        loaded: whether it was loaded.
    """

    package: str
    value: str
    distribution: str
    entry: importlib.metadata.EntryPoint = field(repr=False)
    fault: str | None = None
    loaded: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)


_adoptions: dict[type, Adoption] = {}
_plain: set[type] = set(_PLAIN)
_known: weakref.WeakKeyDictionary[type, Adoption | bool] = weakref.WeakKeyDictionary()  # True: a carry; False: neither
_plugins: list[Plugin] | None = None
_lock = threading.RLock()


@named_options
def register_carry(
    kind: type[Value], to_carry: Callable[[Value], AbstractCarry[Any, Any]], from_carry: Callable[[Any], Value]
) -> None:
    """Registers how treescan carries values of a type that you do not own.

    If an `init` contains such a value, a carry replaces it during the scan, and the caller receives a value of the type
    again. This includes subclasses, unless they are registered themselves: the most specific class counts.

    Args:
        kind: the type.
        to_carry: makes a carry from a value. Called once per scan, before the loop.
        from_carry: makes a value from the final carry (in `accumulate`, from all carries, with leaves `[T, ...]`).

    Raises:
        ArgumentTypeError: if `kind` is not a class, or a function is not callable.
        PluginError: if the type is registered already, or is a carry itself.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import Window, register_carry
        >>> class Lags:  # a type of another package, which is no pytree
        ...     def __init__(self, values):
        ...         self.values = values
        >>> register_carry(
        ...     Lags,
        ...     lambda lags: Window(lags.values),
        ...     lambda carry: Lags(carry.values),
        ... )
        >>> final = treescan.fold(
        ...     lambda last, x: x + last[-1],
        ...     Lags(jnp.zeros(2)),
        ...     jnp.array([1.0, 2.0, 3.0]),
        ... )
        >>> print(type(final).__name__, final.values)
        Lags [3. 6.]
    """
    _check_registration(kind, to_carry, from_carry)
    with _lock:
        before = _adoptions.get(kind)
        # A module that is imported again may register again.
        if before is not None and not _same_place(before.to_carry, to_carry):
            raise PluginFault(
                f"{{verb}} got `{kind.__module__}.{kind.__qualname__}`, which is registered already.",
                f"First by {describe_function(before.to_carry)}.",
                f"Now by {describe_function(to_carry)}.",
                "A type can only be registered once. Remove one of the two, or register a subclass of your own.",
            )
        _adoptions[kind] = Adoption(kind, to_carry, from_carry)
        _forget()


def _check_registration(kind: object, to_carry: object, from_carry: object) -> None:
    if not isinstance(kind, type):
        raise TypeMisuse(
            f"{{verb}} needs a class as its first argument, but got {describe_node(kind)}.",
            "`register_carry(SomeType, to_carry, from_carry)` registers a type, not one of its values.",
        )
    for name, function in (("to_carry", to_carry), ("from_carry", from_carry)):
        if not callable(function):
            raise TypeMisuse(
                f"{{verb}} needs a function as `{name}`, but got {describe_node(function)}.",
                "`to_carry` makes a carry from a value, `from_carry` a value from the final carry.",
            )
    if kind in _PLAIN or issubclass(kind, jax.Array):
        raise TypeMisuse(
            f"{{verb}} got `{kind.__name__}`, whose values every scan carries unchanged.",
            "Register a class of your own, for example a subclass of this one.",
        )
    if issubclass(kind, AbstractCarry):
        raise PluginFault(
            f"{{verb}} got `{kind.__name__}`, which is a custom carry itself.",
            "A custom carry needs no registration: put it in an `init`.",
        )


def _same_place(first: object, second: object) -> bool:
    places = [(getattr(f, "__module__", None), getattr(f, "__qualname__", None)) for f in (first, second)]
    return first is second or (places[0] == places[1] and None not in places[0] and "<" not in str(places[0][1]))


def _forget() -> None:
    """What was found out about types is asked for again."""
    _known.clear()
    _plain.clear()
    _plain.update(_PLAIN)


def kind_of(node: object) -> Adoption | bool:
    """How a node of an `init` is adopted; True for a carry, False for anything else."""
    kind = type(node)
    if kind in _plain:
        return False
    found = _known.get(kind)
    if found is None:
        if issubclass(kind, AbstractCarry):
            found = True
        else:
            _load_for(kind)
            found = next((_adoptions[base] for base in kind.__mro__ if base in _adoptions), False)
        _known[kind] = found
        if not found and kind.__module__.split(".")[0] in ("jax", "jaxlib", "numpy"):
            _plain.add(kind)  # arrays and tracers: faster to find than in a table of weak references
    return found


class Adopted(NamedTuple):
    """An `init` whose values of registered types have become carries.

    Attributes:
        init: the tree.
        custom: the classes of the custom carries in it, of those that they hold too. They are part of what a program is
            kept under: JAX takes two registered dataclasses with equal fields for the same structure.
        back: the adoption of each node, nodes counted with carries as leaves; empty if nothing was adopted.
    """

    init: PyTree
    custom: tuple[type, ...] = ()
    back: tuple[Adoption | None, ...] = ()

    def restore(self, final: PyTree) -> PyTree:
        """The final carry with values of the registered types in their places."""
        if not self.back:
            return final
        nodes, outer = jax.tree.flatten(final, is_leaf=is_carry)
        pairs = enumerate(zip(nodes, self.back, strict=True))
        name = "the final carry"
        back = [_convert(how, "from_carry", node, name, final, i) for i, (node, how) in pairs]
        return jax.tree.unflatten(outer, back)


def adopt(init: PyTree, root: str = "init") -> Adopted:
    """Finds the custom carries of an `init`, called `root`, and makes carries of values of registered types.

    Raises:
        Fault: for a `PluginError` if `to_carry` fails or returns something else than a carry.
    """
    nodes, outer = jax.tree.flatten(init, is_leaf=_is_special)
    if _plain.issuperset(map(type, nodes)):
        return Adopted(init)
    kinds = list(map(kind_of, nodes))
    if any(type(node) not in _plain and _makes_carries(node) for node in nodes):
        named = leaves_with_path(root, init, is_leaf=_is_special)
        rows = [Row(path, "a custom carry", f"`{node.__name__}`") for path, node in named if _makes_carries(node)]
        raise TypeMisuse(
            "{call} was given functions that make carries, instead of carries.",
            f"Call it: `{rows[0].came.strip('`')}(...)` at {rows[0].leaf}.",
            rows=rows,
        )
    if not any(kinds):
        return Adopted(init)
    adoptions = tuple(kind if isinstance(kind, Adoption) else None for kind in kinds)
    if not any(adoptions):
        return Adopted(init, _classes(nodes))
    made = [
        _convert(how, "to_carry", node, root, init, i)
        for i, (node, how) in enumerate(zip(nodes, adoptions, strict=True))
    ]
    return Adopted(jax.tree.unflatten(outer, made), _classes(made), adoptions)


def _makes_carries(node: object) -> bool:
    """Whether a leaf is a function, or a class, of this package that makes a carry: `keys` in place of `keys(key)`."""
    module = getattr(node, "__module__", None) or ""
    return callable(node) and module.startswith(f"{__package__}.") and not is_carry(node)


def _classes(nodes: list[PyTree]) -> tuple[type, ...]:
    found: list[type] = []

    def note(node: object) -> bool:
        if is_carry(node):
            kind = type(node)
            found.append(kind)
            if jax.tree_util.all_leaves([node]):
                raise PluginFault(
                    f"{{call}}: the custom carry `{kind.__name__}` is not a pytree, so it has no leaves to carry.",
                    "Register its class: `@jax.tree_util.register_dataclass` above `@dataclass(frozen=True)`.",
                    describe_class(kind),
                )
        return False

    jax.tree.leaves([node for node in nodes if is_carry(node)], is_leaf=note)
    return tuple(found)


def _is_special(node: object) -> bool:
    return type(node) not in _plain and kind_of(node) is not False


def _convert(how: Adoption | None, name: str, node: PyTree, root: str, tree: PyTree, index: int) -> PyTree:
    """What `to_carry` or `from_carry` makes of the node that is at an index of a tree; None: it is not adopted."""
    if how is None:
        return node
    function: Callable[[PyTree], PyTree] = getattr(how, name)
    to, called, is_leaf = how.kind, f"`{how.kind.__name__}`", is_carry
    if name == "to_carry":
        to, called, is_leaf = AbstractCarry, "custom carry", _is_special
    try:
        value = function(node)
        says, cause = f"returned {describe_node(value)}, which is not a {called}", None
        if isinstance(value, to):
            return value
    except Exception as error:
        says, cause = f"failed. {describe_error(error)}", error
    path, _ = leaves_with_path(root, tree, is_leaf=is_leaf)[index]
    raise PluginFault(
        f"{{call}}: `{name}` of the registered type `{how.kind.__name__}`, called for {path}, {says}.",
        f"It is {describe_function(function)}.",
        describe_class(how.kind),
        cause=cause,
    )


def discovers() -> bool:
    """Whether installed distributions are asked for carries: unless the environment has `TREESCAN_PLUGINS=0`."""
    return os.environ.get("TREESCAN_PLUGINS", "1") != "0"


def plugins() -> list[Plugin]:
    """All that is declared, in the order of packages and distributions; read once."""
    global _plugins
    with _lock:
        if _plugins is None:
            entries = importlib.metadata.entry_points(group=GROUP)
            found = [Plugin(entry.name, entry.value, _distribution(entry), entry) for entry in entries]
            _plugins = sorted(found, key=lambda plugin: (plugin.package, plugin.distribution, plugin.value))
        return _plugins


def _distribution(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed distribution"


def _load_for(kind: type) -> None:
    """Loads what is declared for the package of a type and those of its bases, before its first value is carried."""
    packages = {base.__module__.split(".")[0] for base in kind.__mro__} - _OWN
    if not packages or not discovers():
        return
    for plugin in plugins():
        if plugin.package in packages:
            load(plugin)


def load(plugin: Plugin) -> None:
    """Loads a plugin unless it was tried before. One that fails warns, and harms nobody."""
    with plugin.lock:  # not `_lock`: another thread may import the plugin at this time, which registers
        if plugin.loaded or plugin.fault is not None:
            return
        plugin.loaded = True  # before: what it imports may carry values of the same package
        before = set(_adoptions)
        try:
            made = plugin.entry.load()
            if not isinstance(made, types.ModuleType):
                made()
        except (Exception, SystemExit) as error:
            plugin.loaded, plugin.fault = False, f"{type(error).__name__}: {error}".strip()
            with _lock:
                for kind in _adoptions.keys() - before:
                    if _is_of(plugin, _adoptions[kind]):
                        del _adoptions[kind]
            warn_user(
                f"treescan could not load the carries for `{plugin.package}` that the distribution "
                f"{plugin.distribution} declares ({plugin.value}), and ignores them. {plugin.fault}",
                PluginWarning,
            )
        _forget()


def _is_of(plugin: Plugin, how: Adoption) -> bool:
    """Whether a plugin that failed has registered a type, or a module whose import failed: it would do so again.

    Modules that it has imported stay, and another thread may register at the same time. What these did is theirs.
    """
    module = getattr(how.to_carry, "__module__", None)
    return module is not None and (module == plugin.value.partition(":")[0].strip() or module not in sys.modules)
