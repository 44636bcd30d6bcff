"""The innermost step: calls the user's body, with the keywords it takes, and checks what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.tree_util as jtu

from .._avals import describe_argument, describe_leaf, describe_node
from .._errors import BodyError, Fault, Row
from .._loop import Body, Feed, keeps_named_pairs, wrapped_parameters
from .._tree import is_static, leaves_with_path, thaw_static
from .._types import Array, PyTree, TreeDef
from .carries import read_carries, without_carries, write_carries
from .invariance import check_carry
from .signature import Signature, signature_of

Kind = Literal["scan", "fold", "accumulate", "fori"]
"""What the verb's body takes and returns; the name of the verb whose convention it is."""


@dataclass(frozen=True)
class CallBody:
    """The step that calls the body. Its consts are the loop's key, folded for each step with its position, or None.

    Attributes:
        body: the body.
        kind: the convention that the body follows.
        sees_valid: whether the body takes `valid`.
        frozen: whether the state or xs hold static leaves, which the body sees in their place.
        custom: the classes of the custom carries that the state holds.
    """

    body: Body
    kind: Kind = "scan"
    sees_valid: bool = False
    frozen: bool = False
    custom: tuple[type, ...] = ()

    def __call__(self, consts: Array | None, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        # A body may change the containers that it is given: the carry that it returns is compared with another copy.
        given = jtu.tree_unflatten(jtu.tree_structure(state), jtu.tree_leaves(state))
        carry, x = (thaw_static(given), thaw_static(feed.x)) if self.frozen else (given, feed.x)
        unchanged = thaw_static(state) if self.frozen else state
        keywords: dict[str, Any] = {}
        if consts is not None and feed.position is not None:
            keywords["key"] = jax.random.fold_in(consts, feed.position)
        if self.sees_valid:
            keywords["valid"] = feed.valid
        returned, y, structure = self._call(carry, x, keywords, unchanged, feed.valid)
        if self.frozen:  # the check has found the static leaves equal: the state keeps the ones that it had
            leaves = zip(jtu.tree_leaves(returned), jtu.tree_leaves(unchanged), strict=True)
            arrays = [leaf for leaf, given in leaves if not is_static(given)]
            returned = jtu.tree_unflatten(jtu.tree_structure(state), arrays)
        return (returned, y) if structure is None else jtu.tree_unflatten(structure, (returned, y))

    def _call(
        self, carry: PyTree, x: PyTree, keywords: dict[str, Any], given: PyTree, valid: Array | None
    ) -> tuple[PyTree, PyTree, TreeDef | None]:
        """The next carry, y, and the pair's container where the body chose another than a tuple: the result has it."""
        function = self.body.function
        signature = self.body.memo(Signature, lambda: signature_of(self.body))
        name = carry_name(self.body, self.kind)
        if self.custom:
            carry = read_carries(carry, name)
        first, second = (x, carry) if self.kind == "fori" else (carry, x)
        with signature.scope() as scope:
            if scope:
                scope.check_inputs(first, second)
            out = function(first, second, **keywords)
            returned, y = _split(self.kind, out, given)
            kept, new = without_carries(given, returned) if self.custom else (given, returned)
            check_carry(self.body, name, kept, new, y, out)
            if self.custom:
                returned = write_carries(given, returned, valid, name)
                y = returned if self.kind == "accumulate" else y
            if scope:
                scope.check_outputs(out, name, pair=self.kind == "scan")
            check_arrays(y)
        return returned, y, _container(out) if self.kind == "scan" else None


def carry_name(body: Body, kind: Kind) -> str:
    """The body's own name for its carry."""
    names = body.names
    place = 1 if kind == "fori" else 0
    return names[place] if len(names) > place else "carry"


def _split(kind: Kind, out: Any, carry: PyTree) -> tuple[PyTree, PyTree]:
    """The next carry and y, by the verb's convention."""
    if kind == "scan":
        return _pair(out, carry)
    _refuse_pair(kind, out, carry)
    return out, (out if kind == "accumulate" else None)


def _pair(out: Any, carry: PyTree) -> tuple[PyTree, PyTree]:
    """Any container of two parts passes for a pair, as with lax.scan; where that fails, it is told in these terms."""
    if isinstance(out, tuple | list):
        parts: list[Any] = list(out)
    else:
        parts = [] if jtu.all_leaves([out]) else _children(out)
    if len(parts) == 2 and (isinstance(out, tuple | list) or _same_structure(carry, parts[0])):
        return parts[0], parts[1]
    raise Fault(
        BodyError,
        f"{{body}} must return a pair (carry, y), but returned {describe_node(out)}.",
        _pair_cure(out, carry),
    )


def _container(out: Any) -> TreeDef | None:
    """The structure of a pair alone, its halves as leaves; None for a tuple, and for what lax.scan does not take."""
    if type(out) is tuple or (isinstance(out, tuple) and not keeps_named_pairs()):
        return None
    return jtu.tree_structure(out, is_leaf=lambda node: node is not out)


def _children(out: Any) -> list[Any]:
    return jtu.tree_leaves(out, is_leaf=lambda node: node is not out)


def _pair_cure(out: Any, carry: PyTree) -> str:
    if out is None:
        return "Return the next carry and this step's output: `return carry, y`."
    if _same_structure(carry, out):
        return (
            "What it returned has the structure of the carry. Return `carry, None` if there is no output to stack, or "
            "call `treescan.fold`, whose body returns the carry alone."
        )
    return "Return the next carry and this step's output: `return carry, y`, with None for y if there is none."


def _refuse_pair(kind: Kind, out: Any, carry: PyTree) -> None:
    """Says it when a body written for scan is given to a verb whose body returns the carry alone."""
    is_pair = isinstance(out, tuple) and len(out) == 2
    if is_pair and not _same_structure(carry, out) and _same_structure(carry, out[0]):
        raise Fault(
            BodyError,
            f"{{body}} must return the next carry alone, but returned {describe_node(out)}.",
            f"A body of `{kind}` returns no y: `return carry`. To stack an output over the steps, call `scan`.",
        )


def _same_structure(carry: PyTree, other: PyTree) -> bool:
    """Whether a tree has the structure of a carry; in the places of custom carries, anything may stand."""
    carry, other = without_carries(carry, other)
    structure: TreeDef = jtu.tree_structure(carry)
    return bool(structure == jtu.tree_structure(other))


def check_arrays(y: PyTree) -> None:
    """Refuses outputs that cannot be stacked."""
    if any(map(is_static, jtu.tree_leaves(y))):
        named = leaves_with_path("y", y)
        raise Fault(
            BodyError,
            "{body} returned outputs that are no arrays.",
            "y is stacked over the steps. Return what is the same in all of them some other way than through the scan.",
            header=("leaf", "expected", "is"),
            rows=[Row(path, "an array", describe_leaf(leaf), "") for path, leaf in named if is_static(leaf)],
        )


def takes_keyword(body: Body, name: str) -> bool:
    """Whether a body has a parameter of this name behind its first two, or passes it on to what it wraps."""
    own = body.parameters or ()
    passes_on = any(p.kind is p.VAR_KEYWORD for p in own)
    return _names_keyword(own, name) or (passes_on and _names_keyword(wrapped_parameters(body.function), name))


def _names_keyword(parameters: Iterable[inspect.Parameter], name: str) -> bool:
    later = (p for i, p in enumerate(parameters) if i > 1 or p.kind is p.KEYWORD_ONLY)
    return any(p.name == name and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) for p in later)


def check_callable(function: Any, call: str) -> None:
    """Refuses what cannot be called, and shows a `call` that works."""
    if not callable(function):
        raise Fault(
            BodyError,
            f"{{verb}} needs a function as its body, but got {describe_argument(function)}.",
            f"Pass the step function in its place: `treescan.{call}`.",
        )
