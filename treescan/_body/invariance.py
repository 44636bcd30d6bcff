"""Checks that a step returns a carry of the structure and the types that it was given."""

from __future__ import annotations

import jax

from .._avals import shape_of
from .._errors import BodyError, CarryError, Fault
from .._loop.body import Body
from .._loop.retrace import warn_second_trace
from .._loop.run import is_last_trace
from .._types import PyTree, TreeDef
from .conventions import Convention
from .differences import agree, find_differences, one_of_a_kind

_HEADER = ("leaf", "given", "returned")


def check_carry(
    body: Body, convention: Convention, root: str, given: PyTree, returned: PyTree, y: PyTree, out: PyTree
) -> None:
    """Compares a returned carry with the given one, leaf by leaf, inside of the trace that runs anyway.

    A weakly typed leaf may change its type in the first trace: lax.scan then promotes the init and traces again.

    Args:
        body: the body, to be named in warnings.
        convention: what the body is to return.
        root: the body's own name for its carry.
        given: the carry as the body saw it.
        returned: the carry as the body returned it.
        y: the other half of the pair, or a layer's state, to tell whether the two may be swapped.
        out: all that the body returned, to tell whether it is a carry that happens to be a pair.

    Raises:
        Fault: for a `CarryError` that lists all the leaves that differ, or a `BodyError` if the body may have
            returned the carry alone.
    """
    if agree(given, returned):
        return
    rows = list(find_differences(root, (), given, returned))
    if not rows:  # structures that compare as different without a visible difference: JAX accepts them too
        return
    weak = [row for row in rows if row.given_is_weak]
    if weak and not is_last_trace():
        warn_second_trace(body.function, [(row.row.leaf, row.row.expected, row.row.came) for row in weak])
        return
    name = convention.carry
    if _fits(given, out) and not convention.stateful:
        raise Fault(
            BodyError,
            f"{{body}} must return a pair ({name}, y). What it returned has the type of {{the_carry}} itself; as a "
            "pair, its first item differs from {the_carry}.",
            f"If it is the next {name}, return `{name}, None`, which stacks no output{convention.or_alone}.",
            f"If it is the pair, its first item must be the whole of the next {name}.",
            header=_HEADER,
            rows=[row.row for row in rows],
        )
    swapped: tuple[str, ...] = ()
    if _fits(given, y) and not _same_shapes(given, returned) and not _is_given(given, y):
        swapped = (
            f"The second item that it returned has {{the_carry}}'s type. If the two are swapped, return "
            f"`{name}, {'state' if convention.stateful else 'y'}`, the next {root} first.",
        )
    raise Fault(
        CarryError,
        "{body} returned {a_carry} that differs from the one it was given.",
        *swapped,
        *one_of_a_kind(rows),
        header=_HEADER,
        rows=[row.row for row in rows],
        carry_root=root,
    )


def _same_shapes(given: PyTree, returned: PyTree) -> bool:
    """Whether the first item is a carry, but for its dtypes."""
    structure: TreeDef = jax.tree.structure(given)
    same = bool(structure == jax.tree.structure(returned))
    return same and all(
        shape_of(a) == shape_of(b) for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(returned), strict=True)
    )


def _is_given(given: PyTree, y: PyTree) -> bool:
    """Whether y is the carry that the body was given: an output as good as any."""
    return all(a is b for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(y), strict=True))


def _fits(given: PyTree, y: PyTree) -> bool:
    """Whether y has the carry's structure and types (a carry without leaves fits by chance)."""
    return bool(jax.tree.leaves(given)) and agree(given, y)
