"""What a step must keep of its carry, leaf by leaf: the comparison, and a cure for each difference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import AbstractValue, ShapedArray

from .._avals import (
    Array,
    Aval,
    DType,
    PyTree,
    TreeDef,
    describe_leaf,
    describe_node,
    describe_static,
    dtype_of,
    is_key,
    is_weak,
    same_sharding,
    same_type,
    same_types,
    shape_of,
    spec_parts,
    type_of,
    varying_axes,
)
from .._errors import BodyFault, CarryFault, Cure, Fault, PluginFault, Row, accepts
from .._loop.loop import Body
from .._loop.run import is_last_trace
from .._tree import (
    KeyPath,
    Root,
    are_same,
    children,
    holds_arrays,
    is_number,
    is_static,
    leaves_with_path,
    metadata,
    named_roots,
    path_str,
)
from ..carries._base import AbstractCarry, describe_class, describe_error, is_carry, parts_of
from .registered import REGISTER
from .signature import Convention


class Difference(NamedTuple):
    """A row of the table, what fixes it, and whether the given leaf was weakly typed."""

    row: Row
    cures: tuple[Cure, ...] = ()
    given_is_weak: bool = False

    @classmethod
    def of(cls, leaf: str, expected: str, came: str, note: str, cure: str, kind: str) -> Difference:
        """One that a cure of this kind fixes."""
        return cls(Row(leaf, expected, came, note), (Cure(f"{leaf}: {cure}", kind, leaf),))


def agree(given: PyTree, returned: PyTree) -> bool:
    """Whether two trees have the same structure and types: chex decides on structures, shapes and dtypes.

    It does not look at shardings, manual axes and leaves that are not arrays: these are compared here.
    """
    given_tree: TreeDef
    given_leaves, given_tree = jax.tree.flatten(given)
    returned_leaves, returned_tree = jax.tree.flatten(returned)
    # The comparisons beside chex's hold the promise where a program has called `chex.disable_asserts`.
    if not holds("assert_trees_all_equal_structs", given, returned) or given_tree != returned_tree:
        return False
    types = list[tuple[AbstractValue, AbstractValue]]()
    for a, b in zip(given_leaves, returned_leaves, strict=True):
        type_a, type_b = type_of(a), type_of(b)
        if type_a is not None and type_b is not None:
            types.append((type_a, type_b))
        elif not _same_leaf(a, b):
            return False
    return _types_agree(tuple(types))


@functools.lru_cache(maxsize=1024)
def _types_agree(types: tuple[tuple[AbstractValue, AbstractValue], ...]) -> bool:
    """Whether the types of each pair are equal. chex is asked once for the same types: the call takes some time."""
    arrays = [pair for pair in types if isinstance(pair[0], ShapedArray)]
    given, returned = [a for a, _ in arrays], [b for _, b in arrays]
    are_equal = holds("assert_trees_all_equal_shapes_and_dtypes", given, returned)
    return are_equal and all(same_types(a, b) for a, b in types)


def holds(assertion: str, *trees: PyTree, **tolerance: float) -> bool:
    """Whether an assertion of chex, by its name, holds. The first call loads chex: an import of treescan does not."""
    import chex

    try:
        getattr(chex, assertion)(*trees, **tolerance)
    except AssertionError:
        return False
    return True


def _same_leaf(given: object, returned: object) -> bool:
    if holds_arrays(returned):  # the body may have changed the object that it was given
        return False
    if same_type(given, returned):
        return True
    return is_static(given) and is_static(returned) and are_same(given, returned)


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
            yield from _metadata_differences(leaf, given, returned)


def _child_differences(
    root: str, path: KeyPath, given: dict[KeyPath, PyTree], returned: dict[KeyPath, PyTree]
) -> Iterator[Difference]:
    for key in dict.fromkeys((*given, *returned)):
        leaf = path_str(root, (*path, *key))
        if key not in returned:
            cure = "return every part of {the_carry}, changed or not."
            yield Difference.of(leaf, describe_node(given[key]), "(missing)", "", cure, "missing")
        elif key not in given:
            cure = f"{{the_carry}} keeps its structure. Start from an {{init}} that has it{_OR_IN_Y}."
            yield Difference.of(leaf, "(not there)", describe_node(returned[key]), "", cure, "extra")
        else:
            yield from find_differences(root, (*path, *key), given[key], returned[key])


def _metadata_differences(leaf: str, given: PyTree, returned: PyTree) -> Iterator[Difference]:
    """One row for each field that differs; one for the whole metadata if its fields are not attributes."""
    kind = type(given).__name__
    cure = (
        f"the fields of {kind} that are not leaves must be the same in every step. If a field has to change, make it "
        "a leaf. Otherwise return it unchanged."
    )
    inner = {getattr(path[0], "name", getattr(path[0], "key", None)) for path, _ in children(given) or ()}
    before, after = getattr(given, "__dict__", {}), getattr(returned, "__dict__", {})
    names = [
        name
        for name in dict.fromkeys((*before, *after))
        if name not in inner and not _same_value(before.get(name), after.get(name))
    ]
    names = [name for name in names if not name.startswith("_")] or names  # private ones only if no other differs
    rows = list[Row]()
    for name in names:
        old, new = before.get(name), after.get(name)
        note = "static number" if is_number(old) and is_number(new) else "metadata"
        rows.append(Row(f"{leaf}.{name}", describe_static(old), describe_static(new), note))
    whole = [f"{kind} {describe_static(metadata(node))}" for node in (given, returned)]
    for row in rows or [Row(leaf, whole[0], whole[1], "metadata")]:
        yield Difference(row, (Cure(f"{leaf}: {cure}", "metadata", leaf),))


def _same_value(given: object, returned: object) -> bool:
    try:
        return given is returned or bool(given == returned)
    except Exception:  # the value's own `==` decides, and it has no answer
        return False


def _node_difference(leaf: str, given: PyTree, returned: PyTree) -> Difference:
    kind, cure = "container", "return the same kind of container, with the same parts, as {init} has there."
    if given is None:
        kind = "none"
        cure = "{init} has None there. Start from an array of the type that the {step} returns (`jnp.zeros`)."
    elif returned is None:
        kind = "returned none"
        cure = "the {step} returned None. Return an array of the type that was given, changed or not."
        if children(given) is not None:
            cure = "the {step} returned None, as methods such as `append` and `update` do. Return the whole of it."
        elif is_static(given):
            cure = "a leaf that is not an array must be the same in every {unit}. Return it unchanged."
    elif isinstance(given, tuple) and hasattr(given, "_replace"):
        kind = "named tuple"
        cure = f"build the same class in the {{step}} as in {{init}}, for example with `{leaf}._replace(...)`."
    elif isinstance(returned, tuple) and hasattr(returned, "_replace"):
        kind = "plain tuple"
        cure = f"build the same class in the {{step}} as in {{init}}, a plain {type(given).__name__} here."
    return Difference.of(leaf, describe_node(given), describe_node(returned), "structure", cure, kind)


def _leaf_difference(leaf: str, start: str, given: object, returned: object) -> Difference:
    expected, came = describe_leaf(given), describe_leaf(returned)
    if is_static(given):
        cure = "a leaf that is not an array must be the same in every {unit}. Return it unchanged."
        cure = (
            f"{type(returned).__name__} holds arrays now, but is not a pytree. {REGISTER}"
            if holds_arrays(returned)
            else cure
        )
        return Difference.of(leaf, expected, came, "static", cure, "static")
    if is_static(returned):
        cure = f"return an array; {came} is not a value that JAX can carry."
        cure = f"{type(returned).__name__} is not a pytree. {REGISTER}" if holds_arrays(returned) else cure
        return Difference.of(leaf, expected, came, "static", cure, "static")
    explained = list(_explain_types(leaf, start, given, returned))
    cures = tuple(Cure(f"{leaf}: {cure}", kind, leaf) for _, kind, cure in explained)
    note = ", ".join(note for note, _, _ in explained)
    return Difference(Row(leaf, expected, came, note), cures, given_is_weak=is_weak(given))


def _explain_types(leaf: str, start: str, given: object, returned: object) -> Iterator[tuple[str, str, str]]:
    """How the types of two leaves differ: for each way a note, the kind of its cure, and the cure."""
    name, given_dtype, dtype = leaf.rsplit(".", 1)[-1], dtype_of(given), dtype_of(returned)
    given_shape, shape = shape_of(given), shape_of(returned)
    if given_dtype is not None and is_key(given) and dtype == np.uint32:
        cure = f"the {{step}} returned a key's raw data. Return the typed key, `jax.random.wrap_key_data({name})`."
        yield "key data", "key data", cure
        return
    reshaped = False
    if given_shape is not None and shape is not None and (reshaped := given_shape != shape):
        is_raw = dtype == np.uint32 and given_shape[-1:] == (2,)
        is_split = given_dtype == dtype and (is_key(given) or is_raw) and len(shape) == len(given_shape) + 1
        cure = _SPLIT.format(name) if is_split else _shape_cure(given_shape, shape)
        yield _shape_note(given_shape, shape), "shape", cure
    if given_dtype != dtype:
        cure = f"Return a value of dtype {given_dtype}."
        if isinstance(given_dtype, np.dtype):
            cure = f"Cast it back, `{name}.astype(jnp.{given_dtype})`, or start from {dtype}."
            lost = _lost(given_dtype, dtype)
            cure = f"Start from {dtype}: a cast back to {given_dtype} would {lost}." if lost else cure
        yield "dtype", "dtype", f"the {{step}} returned {dtype}. {cure}"
    elif not reshaped:
        note, cure = _placement(name, start, jax.typeof(given), jax.typeof(returned))
        yield note, note, cure


def _lost(kept: DType, dtype: DType) -> str:
    """What a cast to the dtype that is kept would do to a number, beside a loss of precision; nothing else: ""."""
    if jnp.issubdtype(dtype, jnp.complexfloating) and not jnp.issubdtype(kept, jnp.complexfloating):
        return "drop the imaginary part"
    if kept == np.bool_:
        return "keep only whether it is zero"
    if jnp.issubdtype(dtype, jnp.inexact) and not jnp.issubdtype(kept, jnp.inexact):
        return "lose fractions"
    return ""


def _shape_note(given: tuple[int, ...], returned: tuple[int, ...]) -> str:
    if len(given) != len(returned):
        return f"rank: {len(given)} -> {len(returned)}"
    changed = [f"axis {i}: {a} -> {b}" for i, (a, b) in enumerate(zip(given, returned, strict=True)) if a != b]
    return ", ".join(changed)


_OR_IN_Y = ", or return it in y"
_SPLIT = (
    "{{a_carry}} keeps its shape. If the {{step}} splits a key, carry one of the two: "
    "`{0}, now = jax.random.split({0})`. "
    "Or let {{init}} have `treescan.carries.keys(...)` there, which gives each {{unit}} a key of its own."
)
_STACKED = " If new entries are outputs, return them in y, which is stacked over the {unit}s."
_WRITTEN = (
    " To read new entries in later {unit}s, start from an array of the final size and write into it with "
    "`.at[i].set(...)`."
)


def _shape_cure(given: tuple[int, ...], returned: tuple[int, ...]) -> str:
    grown = [(a, b) for a, b in zip(given, returned, strict=False) if a != b] if len(given) == len(returned) else []
    if [b - a for a, b in grown] == [1]:
        return f"{{a_carry}} cannot grow.{_STACKED}{_WRITTEN}"
    wanted, had = (f"[{','.join(map(str, shape))}]" for shape in (returned, given))
    says = f"{{a_carry}} keeps its shape. Start from an {{init}} of shape {wanted}, or return {had}."
    if len(grown) == 1 and grown[0][0] != 1 and grown[0][0] < grown[0][1]:  # from 1, it may be broadcast
        says += f" That fails again if it grows in each {{unit}}.{_STACKED}{_WRITTEN}"
    return says


def _of_carry_alone(cure: Cure) -> Cure:
    """The cure for a body that returns no y."""
    return cure._replace(text=cure.text.replace(_STACKED, "").replace(_OR_IN_Y, ""))


def _placement(name: str, start: str, given: Aval, returned: Aval) -> tuple[str, str]:
    """Equal shapes and dtypes: the types differ in manual axes, sharding or memory space."""
    varying_in, varying_out = varying_axes(given), varying_axes(returned)
    if axes := tuple(sorted(varying_out - varying_in)):
        cure = f"Let {{init}} vary too: `jax.lax.pcast({start}, {axes}, to='varying')`."
        return "manual axes", f"the {{step}} returned a value that varies over {axes}. {cure}"
    if axes := tuple(sorted(varying_in - varying_out)):
        return "manual axes", (
            f"the {{step}} returned a value that no longer varies over {axes}. Let it vary again before it is "
            f"returned: `jax.lax.pcast({name}, {axes}, to='varying')`; or start from an {{init}} that does not vary."
        )
    if not same_sharding(given, returned):
        return "sharding", (
            f"{{a_carry}} keeps its sharding. Reshard what is returned, `jax.sharding.reshard({name}, "
            f"{_spec(given)})`, or start from an {{init}} that is sharded as `{_spec(returned)}`."
        )
    return "type", "return a value of the type that was given."


def _spec(aval: Aval) -> str:
    return f"jax.P({', '.join(map(repr, spec_parts(aval.sharding.spec)))})"


_T = TypeVar("_T")


@jtu.register_static
class _Place:
    """Replaces a custom carry while a returned tree is compared. It is equal to everything that the body may return."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Place)

    def __hash__(self) -> int:
        return hash(_Place)


def copied(tree: PyTree) -> PyTree:
    """The leaves of a tree in containers of their own: a body may change those that it is given."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(tree))


def read_carries(state: PyTree, root: str) -> PyTree:
    """What the body sees of the state. `root` is the body's own name for it."""
    nodes, outer = jax.tree.flatten(state, is_leaf=is_carry)
    seen = [call_hook(state, root, i, "read", node.read) if is_carry(node) else node for i, node in enumerate(nodes)]
    return jax.tree.unflatten(outer, seen)


def without_carries(given: PyTree, returned: PyTree) -> tuple[PyTree, PyTree]:
    """Both trees without their custom carries, as far as the returned tree has these places, for a comparison."""
    if is_carry(given):
        return _Place(), _Place()
    mine, theirs = children(given), children(returned)
    if mine is None or theirs is None or type(given) is not type(returned):
        return given, returned
    there = dict(theirs)
    pairs = {key: without_carries(child, there[key]) if key in there else (child, None) for key, child in mine}
    seconds = [pairs[key][1] if key in pairs else child for key, child in theirs]
    return _rebuild(given, [pairs[key][0] for key, _ in mine]), _rebuild(returned, seconds)


def _rebuild(node: PyTree, parts: list[PyTree]) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(node, is_leaf=lambda part: part is not node), parts)


def write_carries(state: PyTree, returned: PyTree, valid: Array | None, root: str) -> PyTree:
    """The next state, from a returned tree that was found to fit it.

    Raises:
        Fault: for a `PluginError` if a carry fails to write, or is another kind of carry afterwards.
    """
    nodes, outer = jax.tree.flatten(state, is_leaf=is_carry)
    parts = parts_of(outer, returned)
    assert parts is not None

    def write(index: int, node: AbstractCarry[Any, Any], part: PyTree) -> AbstractCarry[Any, Any]:
        new = call_hook(state, root, index, "write", lambda: node.write(part, valid), part)
        if type(node) is not type(new) or not agree(node, new):
            _check_written(node, new, _path_of(state, root, index))
        return new

    pairs = enumerate(zip(nodes, parts, strict=True))
    return jax.tree.unflatten(outer, [write(i, node, part) if is_carry(node) else part for i, (node, part) in pairs])


def _check_written(old: AbstractCarry[Any, Any], new: object, path: str) -> None:
    """Compares a written carry with the one before; a weakly typed leaf may change once, as lax.scan lets it."""
    name, differences = type(old).__name__, list(find_differences(path, (), old, new))
    if differences and all(difference.given_is_weak for difference in differences) and not is_last_trace():
        return
    raise PluginFault(
        f"{{verb}} over {{body}}: `{name}.write` changed the type of the custom carry at {path}.",
        f"`{name}.write` must return a `{name}` with the same structure, static fields, shapes and dtypes as before. "
        "Either the method does not, or it was given a value from the body that does not fit.",
        describe_class(type(old)),
        header=("leaf", "before", "written"),
        rows=[difference.row for difference in differences],
    )


def call_hook(state: PyTree, root: str, index: int, hook: str, call: Callable[[], _T], *returned: PyTree) -> _T:
    """Calls a hook of the carry that is the `index`-th node of the state, with what was returned in its place."""
    try:
        return call()
    except Fault:
        raise
    except Exception as error:
        node = jax.tree.leaves(state, is_leaf=is_carry)[index]
        parameters = _HOOKS[hook]
        if not accepts(getattr(node, hook), len(parameters)):
            raise PluginFault(
                f"{{verb}} over {{body}}: `{type(node).__name__}.{hook}` of the custom carry at "
                f"{_path_of(state, root, index)} cannot be called with ({', '.join(parameters)}).",
                f"Write it as `def {hook}({', '.join(('self', *parameters))}): ...`.{_WRITE * (hook == 'write')}",
                describe_class(type(node)),
                cause=error,
            ) from None
        raise PluginFault(
            f"{{verb}} over {{body}}: `{type(node).__name__}.{hook}` failed for the custom carry at "
            f"{_path_of(state, root, index)}.",
            describe_error(error),
            *(f"The body returned {describe_node(part)} there.{_ask(node, part)}" for part in returned),
            describe_class(type(node)),
            cause=error,
        ) from None


_HOOKS = {"read": (), "write": ("returned", "valid"), "rows": ()}
_WRITE = " In a masked scan, `valid` is bool[*batch]; else it is None."
_ASK = " Return the value to write to the carry, not the carry itself."
_ASK_NEW = " If that is what the {step} read there, return the new value in its place."


def _ask(node: AbstractCarry[Any, Any], part: PyTree) -> str:
    """The advice where a body returned a carry, or perhaps what it was shown of one."""
    if is_carry(part):
        return _ASK
    return (
        _ASK_NEW if type(part) not in (tuple, list, dict) and children(part) and type(part) is type(node.read()) else ""
    )


def _path_of(state: PyTree, root: str, index: int) -> str:
    return leaves_with_path(root, state, is_leaf=is_carry)[index][0]


_HEADER = ("leaf", "given", "returned")


def check_carry(convention: Convention, root: str, given: PyTree, returned: PyTree, y: PyTree, out: PyTree) -> None:
    """Compares a returned carry with the given one, leaf by leaf, inside of the trace that runs anyway.

    A weakly typed leaf may change its type in the first trace: lax.scan then promotes the init and traces again.

    Args:
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
    if any(row.given_is_weak for row in rows) and not is_last_trace():
        return  # JAX promotes them, and traces the body once more
    name = convention.carry
    if _fits(given, out) and not convention.stateful:
        raise BodyFault(
            f"{{body}} must return a pair ({name}, y). What it returned has the type of {{the_carry}} itself; as a "
            "pair, its first item differs from {the_carry}.",
            f"If it is the next {name}, return `{name}, None`, which stacks no output{convention.or_alone}.",
            f"If it is the pair, its first item must be the whole of the next {name}.",
            header=_HEADER,
            rows=[row.row for row in rows],
        )
    found = one_of_a_kind(rows)
    cures: list[str | Cure] = [*(found if convention.pair else map(_of_carry_alone, found))]
    shapes, new_shapes = ([shape_of(leaf) for leaf in jax.tree.leaves(tree)] for tree in (given, returned))
    structure: TreeDef = jax.tree.structure(given)
    is_carry_but_for_dtypes = structure == jax.tree.structure(returned) and shapes == new_shapes
    if _fits(given, y) and not is_carry_but_for_dtypes:
        second = "state" if convention.stateful else "y"
        cures.insert(
            0,
            f"Did you return `({second}, {name})`? The second item that it returned has {{the_carry}}'s type. If the "
            f"two are swapped, return `{name}, {second}`, the next {root} first.",
        )
    raise CarryFault(
        "{body} returned {a_carry} that differs from the one it was given.",
        *cures,
        header=_HEADER,
        rows=[row.row for row in rows],
        carry_root=root,
    )


def _fits(given: PyTree, y: PyTree) -> bool:
    """Whether y has the carry's structure and types (a carry without leaves fits by chance)."""
    return bool(jax.tree.leaves(given)) and agree(given, y)


class StateAndY(NamedTuple):
    """What a step returns beside its carry where layers have a state."""

    state: PyTree
    y: PyTree


named_roots(StateAndY, state=Root("state"), y=Root("y"))

_OF_STATE = {
    "an {init}": "an initial state",
    "{init}": "state",
    "{the_carry}": "the state",
    "{a_carry}": "a state",
}


def split_state(convention: Convention, out: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    """The next carry, the layer's new state, and y.

    Raises:
        Fault: for a `BodyError` if the block returned something else.
    """
    parts = ("x", "state", "y") if convention.pair else ("x", "state")
    if isinstance(out, tuple | list) and not hasattr(out, "_fields") and len(out) == len(parts):
        carry, state, *y = out
        return carry, state, y[0] if y else None
    of_other = "(x, state)" if convention.pair else "(x, state, y)"
    raise BodyFault(
        f"{{body}} must return ({', '.join(parts)}), but returned {describe_node(out)}.",
        f"With `state=`, each layer returns its new state after x: `return {', '.join(parts)}`. Return the parts "
        "that do not change, too.",
        f"A block of `treescan.{convention.other}` returns {of_other}.",
    )


class OwnState(NamedTuple):
    """The state of one layer, as its block is given it.

    Attributes:
        name: the block's own name for it.
        given: the state; its static leaves are thawed.
        seen: what the block sees: in the place of a custom carry what it shows.
        custom: whether there may be custom carries.
    """

    name: str
    given: PyTree
    seen: PyTree
    custom: bool

    @classmethod
    def read(cls, body: Body, given: PyTree, place: int, custom: bool) -> OwnState:
        """The state that is to be a body's argument in this place."""
        name = body.names[place] if len(body.names) > place else "state"
        seen = copied(given)
        return cls(name, given, read_carries(seen, name) if custom else seen, custom)

    def written(self, returned: PyTree) -> PyTree:
        """The new state, once it was compared with the one that the block was given, leaf by leaf.

        Raises:
            Fault: for a `CarryError` that lists all the leaves that differ.
        """
        kept, new = without_carries(self.given, returned) if self.custom else (self.given, returned)
        differences = [] if agree(kept, new) else list(find_differences(self.name, (), kept, new))
        if not differences:  # or structures that compare as different without a visible difference
            return write_carries(self.given, returned, None, self.name) if self.custom else returned
        raise CarryFault(
            "{body} returned a state that differs from the one it was given.",
            *(Cure(_of_state(text), kind, leaf) for text, kind, leaf in one_of_a_kind(differences)),
            header=_HEADER,
            rows=[difference.row for difference in differences],
        )


def _of_state(text: str) -> str:
    for words, of_state in _OF_STATE.items():
        text = text.replace(words, of_state)
    return text
