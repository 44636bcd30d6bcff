"""How two carries differ, leaf by leaf and in the user's paths, and a cure for each difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from .._avals import (
    describe_leaf,
    describe_node,
    dtype_of,
    is_key,
    is_weak,
    same_sharding,
    same_type,
    shape_of,
    spec_parts,
    varying_axes,
)
from .._errors import Cure, Row
from .._tree import KeyPath, children, is_static, metadata, path_str
from .._types import PyTree, TreeDef

_MISSING, _EXTRA = "(missing)", "(not there)"


class Difference(NamedTuple):
    """A row of the table, what fixes it, and whether the given leaf was weakly typed."""

    row: Row
    cures: tuple[Cure, ...] = ()
    given_is_weak: bool = False


def agree(given: PyTree, returned: PyTree) -> bool:
    """Whether two trees have the same structure and types."""
    given_tree: TreeDef
    given_leaves, given_tree = jax.tree.flatten(given)
    returned_leaves, returned_tree = jax.tree.flatten(returned)
    if given_tree != returned_tree:
        return False
    return all(a is b or _same_leaf(a, b) for a, b in zip(given_leaves, returned_leaves, strict=True))


def _same_leaf(given: Any, returned: Any) -> bool:
    if same_type(given, returned):
        return True
    if not (is_static(given) and is_static(returned)):
        return False
    try:
        return bool(given == returned)
    except Exception:  # the leaf's own `==` decides, and it has no answer
        return False


def one_of_a_kind(differences: list[Difference]) -> list[Cure]:
    """The cures, each kind of them once: for the first of the leaves that it fixes."""
    cures: dict[tuple[str, ...], Cure] = {}
    for row, of_leaf, _ in differences:
        for cure in of_leaf:
            types = (row.expected, row.came) if cure.kind == "shape" else ()
            cures.setdefault((cure.kind, *types), cure)
    return list(cures.values())


def find_differences(root: str, path: KeyPath, given: PyTree, returned: PyTree) -> Iterator[Difference]:
    """Walks two trees side by side.

    Args:
        root: the name of the trees' root.
        path: how far the walk has come.
        given: what the body was given there.
        returned: what it returned there.
    """
    given_children, returned_children = children(given), children(returned)
    leaf = path_str(root, path)
    if given_children is None and returned_children is None:
        if not _same_leaf(given, returned):
            yield _leaf_difference(leaf, path_str("{init}", path), given, returned)
    elif given_children is None or returned_children is None or type(given) is not type(returned):
        yield _node_difference(leaf, given, returned)
    else:
        below = list(_child_differences(root, path, dict(given_children), dict(returned_children)))
        yield from below
        if not below and metadata(given) != metadata(returned):
            yield _metadata_difference(leaf, given, returned)


def _child_differences(
    root: str, path: KeyPath, given: dict[KeyPath, Any], returned: dict[KeyPath, Any]
) -> Iterator[Difference]:
    for key, child in given.items():
        if key in returned:
            yield from find_differences(root, (*path, *key), child, returned[key])
        else:
            yield _absent(root, (*path, *key), child, missing=True)
    for key, child in returned.items():
        if key not in given:
            yield _absent(root, (*path, *key), child, missing=False)


def _absent(root: str, path: KeyPath, child: PyTree, *, missing: bool) -> Difference:
    leaf, what = path_str(root, path), describe_node(child)
    if missing:
        text = f"{leaf}: return every part of {{the_carry}}, changed or not."
        return Difference(Row(leaf, what, _MISSING, ""), (Cure(text, "missing", leaf),))
    text = f"{leaf}: {{the_carry}} keeps its structure. Start from an {{init}} that has it, or return it in y."
    return Difference(Row(leaf, _EXTRA, what, ""), (Cure(text, "extra", leaf),))


def _metadata_difference(leaf: str, given: PyTree, returned: PyTree) -> Difference:
    row = Row(
        leaf, f"{type(given).__name__} {metadata(given)}", f"{type(returned).__name__} {metadata(returned)}", "metadata"
    )
    text = (
        f"{leaf}: the fields of {type(given).__name__} that are not leaves must be the same in every step. If a "
        "field has to change, make it a leaf. Otherwise return it unchanged."
    )
    return Difference(row, (Cure(text, "metadata", leaf),))


def _node_difference(leaf: str, given: PyTree, returned: PyTree) -> Difference:
    row = Row(leaf, describe_node(given), describe_node(returned), "structure")
    if given is None:
        text, kind = (
            "{init} has None there. Start from an array of the type that the {step} returns (`jnp.zeros`).",
            "none",
        )
    elif returned is None:
        text, kind = (
            "the {step} returned None. Return an array of the type that was given, changed or not.",
            "returned none",
        )
    elif isinstance(given, tuple) and hasattr(given, "_replace"):
        text, kind = (
            f"build the same class in the {{step}} as in {{init}}, for example with `{leaf}._replace(...)`.",
            "named tuple",
        )
    elif isinstance(returned, tuple) and hasattr(returned, "_replace"):
        text, kind = (
            f"build the same class in the {{step}} as in {{init}}, a plain {type(given).__name__} here.",
            "plain tuple",
        )
    else:
        text, kind = "return the same kind of container, with the same parts, as {init} has there.", "container"
    return Difference(row, (Cure(f"{leaf}: {text}", kind, leaf),))


def _leaf_difference(leaf: str, start: str, given: Any, returned: Any) -> Difference:
    expected, came = describe_leaf(given), describe_leaf(returned)
    if is_static(given) or is_static(returned):
        cure = f"{leaf}: return an array; {came} is not a value that JAX can carry."
        if is_static(given):
            cure = f"{leaf}: a leaf that is not an array must be the same in every {{unit}}. Return it unchanged."
        return Difference(Row(leaf, expected, came, "static"), (Cure(cure, "static", leaf),))
    note, cures = _explain_types(leaf, start, given, returned)
    return Difference(Row(leaf, expected, came, note), cures, given_is_weak=is_weak(given))


def _explain_types(leaf: str, start: str, given: Any, returned: Any) -> tuple[str, tuple[Cure, ...]]:
    given_dtype, dtype = dtype_of(given), dtype_of(returned)
    given_shape, shape = shape_of(given), shape_of(returned)
    if given_dtype is not None and is_key(given) and dtype == np.uint32:
        wrapped = f"jax.random.wrap_key_data({leaf.rsplit('.', 1)[-1]})"
        text = f"{leaf}: the {{step}} returned a key's raw data. Return the typed key, `{wrapped}`."
        return "key data", (Cure(text, "key data", leaf),)
    explained: list[tuple[str, Cure]] = []
    if given_shape != shape and given_shape is not None and shape is not None:
        cure = Cure(_shape_cure(leaf, given_shape, shape), "shape", leaf)
        explained.append((_shape_note(given_shape, shape), cure))
    if given_dtype != dtype:
        explained.append(("dtype", Cure(_dtype_cure(leaf, given_dtype, dtype), "dtype", leaf)))
    if not explained:
        note, text = _placement(leaf, start, jax.typeof(given), jax.typeof(returned))
        explained.append((note, Cure(text, note, leaf)))
    return ", ".join(note for note, _ in explained), tuple(cure for _, cure in explained)


def _shape_note(given: tuple[int, ...], returned: tuple[int, ...]) -> str:
    if len(given) != len(returned):
        return f"rank: {len(given)} -> {len(returned)}"
    changed = [f"axis {i}: {a} -> {b}" for i, (a, b) in enumerate(zip(given, returned, strict=True)) if a != b]
    return ", ".join(changed)


def _shape_cure(leaf: str, given: tuple[int, ...], returned: tuple[int, ...]) -> str:
    if len(given) == len(returned) and [b - a for a, b in zip(given, returned, strict=True) if a != b] == [1]:
        return (
            f"{leaf}: {{a_carry}} cannot grow. Return the new entries in y, which is stacked over the {{unit}}s, or "
            "start from an array of the final size and write into it with `.at[i].set(...)`."
        )
    wanted, had = (f"[{','.join(map(str, shape))}]" for shape in (returned, given))
    return f"{leaf}: {{a_carry}} keeps its shape. Start from an {{init}} of shape {wanted}, or return {had}."


def _dtype_cure(leaf: str, given: Any, returned: Any) -> str:
    if not isinstance(given, np.dtype):
        return f"{leaf}: the {{step}} returned {returned}. Return a value of dtype {given}."
    cast = f"{leaf.rsplit('.', 1)[-1]}.astype(jnp.{given})"
    return f"{leaf}: the {{step}} returned {returned}. Cast it back, `{cast}`, or start from {returned}."


def _placement(leaf: str, start: str, given: Any, returned: Any) -> tuple[str, str]:
    """Equal shapes and dtypes: the types differ in manual axes, sharding or memory space."""
    varying_in, varying_out = varying_axes(given), varying_axes(returned)
    if varying_out - varying_in:
        axes = tuple(sorted(varying_out - varying_in))
        cure = f"jax.lax.pcast({start}, {axes}, to='varying')"
        return (
            "manual axes",
            f"{leaf}: the {{step}} returned a value that varies over {axes}. Let {{init}} vary too: `{cure}`.",
        )
    if varying_in - varying_out:
        axes = tuple(sorted(varying_in - varying_out))
        cure = f"jax.lax.pcast({leaf.rsplit('.', 1)[-1]}, {axes}, to='varying')"
        return "manual axes", (
            f"{leaf}: the {{step}} returned a value that no longer varies over {axes}. Let it vary again before it is "
            f"returned: `{cure}`; or start from an {{init}} that does not vary."
        )
    if not same_sharding(given, returned):
        cure = f"jax.sharding.reshard({leaf.rsplit('.', 1)[-1]}, {_spec(given)})"
        return "sharding", (
            f"{leaf}: {{a_carry}} keeps its sharding. Reshard what is returned, `{cure}`, or start from an {{init}} "
            f"that is sharded as `{_spec(returned)}`."
        )
    return "type", f"{leaf}: return a value of the type that was given."


def _spec(aval: Any) -> str:
    return f"jax.P({', '.join(map(repr, spec_parts(aval.sharding.spec)))})"
