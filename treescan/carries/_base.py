"""The contract of a custom carry, and trees that contain custom carries."""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, Self, TypeVar, cast

import jax

from .._avals import Array, PyTree, TreeDef, describe_node
from .._errors import PluginFault, TypeMisuse, expect, explain, named_options

Seen_co = TypeVar("Seen_co", covariant=True)
Returned_contra = TypeVar("Returned_contra", contravariant=True)
CarryT = TypeVar("CarryT", bound="AbstractCarry[Any, Any]")


class AbstractCarry(abc.ABC, Generic[Seen_co, Returned_contra]):
    """A carry that stores one thing in the loop and shows another to the body.

    Put an instance into `init`, anywhere in the tree. It may contain other carries. Subclasses are frozen
    pytrees: a frozen dataclass under `jax.tree_util.register_dataclass`, a `chex.dataclass(frozen=True)`, an equinox
    module. Their array leaves are the loop's state; a leaf that `write` passes on as the same object is a constant of
    the loop. So hyperparameters may be leaves too, traced and differentiated. Everything else is static.

    A subclass is either abstract or final: do not derive from a class that can be instantiated. Its hooks are pure, and
    are called once, in the trace of the body. An exception that they raise reaches the user as a `PluginError`.

    Masks, resets and `compact` need only `rows`. In `mask_scan`, leaves with rows keep their value for a row that is
    not valid, are restored when a row is reset, and move with their rows. Leaves that all rows share keep their value
    in steps in which no row is valid, and are never reset.

    Type parameters:
        Seen_co: what the body sees in the carry's place.
        Returned_contra: what it returns there.

    Raises:
        PluginError: at construction, if a hook is missing.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses a class without all of its hooks."""
        if inspect.isabstract(cls):
            missing = " and ".join(f"`{name}`" for name in sorted(cls.__abstractmethods__))
            fault = PluginFault(
                f"`{cls.__qualname__.rsplit('<locals>.', 1)[-1]}` cannot be a carry: it does not define {missing}.",
                "A carry defines `read(self)`, what the body sees, and `write(self, returned, valid)`, the next carry.",
                describe_class(cls),
            )
            raise explain(fault, "") from None
        return super().__new__(cls)

    @abc.abstractmethod
    def read(self) -> Seen_co:
        """What the body sees in this place."""

    @abc.abstractmethod
    def write(self, returned: Returned_contra, valid: Array | None) -> Self:
        """The next carry, of the same structure, shapes and dtypes.

        Args:
            returned: what the body returned in this place.
            valid: in a loop with rows, those that take this step, bool[*batch]; elsewhere None. Leaves with rows can
                ignore it, because the values of invalid rows are not kept. Leaves that all rows share must leave
                out the values of invalid rows. The number of valid rows may be 0, so do not divide by it.
        """

    def rows(self) -> int | Mapping[str, Any] | None:
        """Where the batch shape of `mask_scan` starts in the leaves.

        Returns:
            The axis (0 if it leads), None for leaves that all rows share, or a mapping from the names of fields to
            these. A field that contains a tree may have a prefix tree of these. A field that is not named has axis 0. A
            carry inside this one uses its own `rows`, unless it has None here.
        """
        return 0


def is_carry(node: object) -> bool:
    """Whether a node of a tree is a custom carry."""
    return isinstance(node, AbstractCarry)


@named_options
def as_seen(carry: AbstractCarry[Seen_co, Any]) -> Seen_co:
    """Returns a carry, typed as what the body sees in its place, so that `init` has the type of the body's carry.

    Args:
        carry: the carry, which is returned unchanged.

    Examples:
        >>> import jax
        >>> from treescan.carries import Keys, as_seen
        >>> # To a type checker this is a dict[str, Array].
        >>> init = {"rng": as_seen(Keys(jax.random.key(0)))}
        >>> type(init["rng"]).__name__
        'Keys'
    """
    return cast(Any, carry)


@named_options
def carry_of(value: Any, kind: type[CarryT]) -> CarryT:
    """Returns a part of a final carry, typed as the custom carry that it is. The inverse of `as_seen`.

    Args:
        value: a part of the carry that a verb returned.
        kind: the class of the carry.

    Raises:
        ArgumentTypeError: if there is no such carry.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import Moments, carry_of, moments
        >>> final = treescan.fold(
        ...     lambda seen, x: x, moments(), jnp.array([1.0, 2.0, 6.0])
        ... )
        >>> print(carry_of(final, Moments).mean)
        3.0
    """
    cure = "It is the class, `carry_of(final, Ema)`, and comes second."
    expect(isinstance(kind, type), "kind", "a class of carries", kind, cure)
    if isinstance(value, kind):
        return value
    cure = "Pass the part of the final carry that is at the place of the custom carry in `init`."
    if is_carry(value):
        cure = f"Ask for the class that `init` has there, `{type(value).__name__}`, or pass another part."
    raise TypeMisuse(
        f"{{verb}} was asked for a carry of class {kind.__name__}, but got {describe_node(value)}.",
        cure,
    )


@named_options
def read_tree(tree: PyTree) -> PyTree:
    """Returns what a body sees of a tree: each custom carry is replaced by what it shows.

    Args:
        tree: any pytree, for example a final carry, or the contents of a carry that wraps others.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> from treescan.carries import ema, read_tree, running_sum
        >>> init = {"mean": ema(0.0, decay=0.5), "sum": running_sum()}
        >>> final = treescan.fold(
        ...     lambda seen, x: {"mean": x, "sum": x}, init, jnp.array([1.0, 1.0])
        ... )
        >>> print(read_tree(final))
        {'mean': Array(0.75, dtype=float32), 'sum': Array(2., dtype=float32)}
    """
    return jax.tree.map(lambda node: node.read() if is_carry(node) else node, tree, is_leaf=is_carry)


@named_options
def write_tree(tree: PyTree, returned: PyTree, valid: Array | None = None) -> PyTree:
    """Returns a tree after one step, for carries that wrap others: returned values are written to the carries in it.

    Args:
        tree: what was read by `read_tree`.
        returned: what the body returned in its place: the same structure, with any values in the places of custom
            carries.
        valid: as for `AbstractCarry.write`.

    Raises:
        ArgumentTypeError: if the structures differ.

    Examples:
        >>> from treescan.carries import read_tree, running_sum, write_tree
        >>> tree = {"h": 1.0, "sum": running_sum()}
        >>> print(read_tree(write_tree(tree, {"h": 2.0, "sum": 3.0})))
        {'h': 2.0, 'sum': Array(3., dtype=float32)}
    """
    nodes, outer = jax.tree.flatten(tree, is_leaf=is_carry)
    parts = parts_of(outer, returned)
    if parts is None:
        raise TypeMisuse(
            f"{{verb}} got {describe_node(returned)}, whose structure differs from that of the tree to write to, "
            f"{describe_node(tree)}.",
            "Return the structure that `read_tree` returns, with any values in the places of custom carries.",
        )
    pairs = zip(nodes, parts, strict=True)
    return jax.tree.unflatten(outer, [node.write(part, valid) if is_carry(node) else part for node, part in pairs])


def parts_of(outer: TreeDef, tree: PyTree) -> list[PyTree] | None:
    """What is in a tree where a structure has its leaves; None if it has another structure above them."""
    try:
        return outer.flatten_up_to(tree)
    except ValueError:
        return None


def describe_class(kind: type) -> str:
    """A class, where it is defined, and the distribution that brings it."""
    return f"`{kind.__qualname__.rsplit('<locals>.', 1)[-1]}` is defined in {origin(kind.__module__)}."


def describe_function(function: Callable[..., object]) -> str:
    """A function, where it is defined, and the distribution that brings it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__).rsplit("<locals>.", 1)[-1]
    return f"`{name}` of {origin(getattr(function, '__module__', None) or type(function).__module__)}"


@functools.cache
def origin(module: str) -> str:
    """A module, and the distribution that brings it, if one does."""
    package = module.split(".")[0]
    if package == __name__.split(".")[0]:
        return f"`{module}`, a part of treescan"
    # One that is installed in place, editable, declares no packages: then it is known by its name, if at all.
    for name in importlib.metadata.packages_distributions().get(package, (package,)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"`{module}`, from the installed distribution {name} {importlib.metadata.version(name)}"
    return f"`{module}`, which is not part of an installed distribution"


def describe_error(error: Exception) -> str:
    """What a hook raised, in one line: the rest of a long message is in the cause."""
    text = " ".join(str(error).partition("\n\n")[0].split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
