"""The innermost step: it calls the user's body, explains how that may fail, and checks what it returns."""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu

from .._avals import Array, PyTree, TreeDef, describe_argument, describe_leaf, describe_node, dtype_of, shape_of
from .._errors import BodyFault, Fault, LayerFault, Misuse, Row, TreescanError
from .._flax import holds, module_classes, variable_classes
from .._loop.feed import Consts, Feed, Keyword
from .._loop.loop import Body, wrapped_parameters
from .._loop.run import keeps_named_pairs
from .._tree import holds_arrays, is_static, leaves_with_path, same_structure, thaw_static
from .carry import OwnState, StateAndY, check_carry, copied, read_carries, split_state, without_carries, write_carries
from .registered import REGISTER
from .signature import SCAN, Convention, annotated
from .traced import note_block, rename

_P = ParamSpec("_P")
_T = TypeVar("_T")


def call_user(function: Callable[_P, _T], *arguments: _P.args, **keywords: _P.kwargs) -> _T:
    """Calls a function of the user's.

    Raises:
        Fault: for a `BodyError` if it changes a module of flax that belongs to another trace.
    """
    if "flax" not in sys.modules:
        return function(*arguments, **keywords)
    from .modules import call_watched

    return call_watched(function, *arguments, **keywords)


def call_body(
    body: Body, convention: Convention, arguments: Sequence[PyTree], keywords: Mapping[str, Array | None]
) -> PyTree:
    """Calls a body.

    Raises:
        Fault: as `call_user`; also if the body fails because it receives a list in place of a layer or a step.
    """
    try:
        return call_user(body.function, *arguments, **keywords)
    except (Fault, TreescanError):
        raise
    except Exception as error:
        _check_order(body, convention, arguments, keywords, error)
        names = names_of_arguments(body, convention, len(arguments))
        rename(error, (*zip(names, arguments, strict=True), *keywords.items()))
        if convention.takes[:2] == ("layer", "x"):
            note_block(error)
        place = 0 if convention.spread else 1  # of the layer, or of x, which may be a list of what could be stacked
        value: PyTree = arguments[place] if len(arguments) > place != convention.place else None
        if not are_alike(value):
            raise
        kind, items, names = type(value).__name__, len(value), body.names
        fault, root, one = (LayerFault, "layers", "layer") if convention.spread else (Misuse, "xs", "step")
        advice = (
            f"Did you forget `treescan.stack`? `{root}` is one tree, and each {one} receives a slice of all {items} "
            f"items. If each item is a {one}, pass `treescan.stack({root})`."
        )
        if convention.verb == "stream":
            advice = f"`source` is one tree, a {kind} of {items}. If each item is a part, pass `iter(source)`."
        if not isinstance(error, TypeError | AttributeError) or not re.search(rf"\b{kind}\b", str(error)):
            error.add_note(advice)
            raise
        name = names[place] if len(names) > place else convention.takes[place]
        raise fault(
            f"{{call}}: `{name}` is a {kind} of {items} trees of the same types, and the {{step}} failed with it: "
            f"{type(error).__name__}: {error}",
            advice,
            cause=error,
        ) from None


def _check_order(
    body: Body,
    convention: Convention,
    arguments: Sequence[PyTree],
    keywords: Mapping[str, Array | None],
    error: Exception,
) -> None:
    """Refuses a block that fails with (layer, x) and runs with (x, layer)."""
    if convention.takes[:2] != ("layer", "x") or not isinstance(error, TypeError | AttributeError):
        return
    layer, x, *others = arguments
    try:
        call_user(body.function, x, layer, *others, **keywords)
    except Exception:
        return
    raise LayerFault(
        f"{{call}}: the {{step}} failed with (layer, x), but runs with (x, layer): {type(error).__name__}: {error}",
        "A block takes its layer first: `def block(layer, x)`. In the call, x comes before the layers: "
        f"`treescan.{convention.call}`.",
        cause=error,
    ) from None


def are_alike(trees: PyTree) -> bool:
    """Whether it is a list or a tuple of trees of one structure, shapes and dtypes, which could be stacked."""
    if type(trees) not in (list, tuple) or len(trees) < 2:
        return False
    leaves, structures = zip(*map(jax.tree.flatten, trees), strict=True)
    types = [[(shape_of(leaf), dtype_of(leaf)) for leaf in each] for each in leaves]
    return bool(leaves[0]) and all(each == structures[0] for each in structures) and all(t == types[0] for t in types)


class Shared(NamedTuple):
    """The values that all steps share.

    Attributes:
        key: the loop's PRNG key, folded for each step with its position.
        args: further positional arguments of the body.
        offset: int32[], the position of the first step, for the key; None: 0.
    """

    key: Array | None = None
    args: tuple[PyTree, ...] = ()
    offset: Array | None = None


@dataclass(frozen=True)
class CallBody:
    """The step that calls the body. Its `Consts.inner` are the values that all steps share, or None.

    Attributes:
        body: the body.
        convention: how it is called, and what it returns.
        sees_valid: whether the body takes `valid`.
        keyword: another keyword that the body takes, or None.
        frozen: whether the state, xs or consts hold static leaves, which the body sees in their place.
        custom: the classes of the custom carries that the state holds.
    """

    body: Body
    convention: Convention = SCAN
    sees_valid: bool = False
    keyword: Keyword | None = None
    frozen: bool = False
    custom: tuple[type, ...] = ()

    def __call__(self, consts: Consts | None, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        """The next carry and y, in the container of the pair where the body chose another than a tuple."""
        convention, thaw = self.convention, thaw_static if self.frozen else _unchanged
        shared: Shared | None = None if consts is None else consts.inner
        key, args, offset = shared or Shared()
        keywords: dict[str, Array | None] = {}
        if key is not None and feed.position is not None:
            position = feed.position if offset is None else offset + feed.position
            keywords["key"] = jax.random.fold_in(key, position)
        if self.sees_valid and feed.valid is not None:
            keywords["valid"] = feed.valid
        if self.keyword is not None and (value := self.keyword.slot.of(feed)) is not None:
            keywords[self.keyword.slot.name] = value
        # The carry that the body returns is compared with another copy than it is given.
        given, carry, x, args = thaw(state), thaw(copied(state)), thaw(feed.x), args and thaw(copied(args))
        others = (*x, *args) if convention.spread else (x,)
        name = carry_name(self.body, convention)
        if self.custom:
            carry = read_carries(carry, name)
        place, own = convention.place, None
        if convention.stateful:
            last = len(x) - 1
            own = OwnState.read(self.body, others[last], last + 1, bool(self.custom))
            others = (*others[:last], own.seen, *others[last + 1 :])
        with annotated(self.body) as scope:
            arguments = (*others[:place], carry, *others[place:])
            if scope:
                scope.check_inputs(arguments)
            modules = None
            if holds(others, variable_classes()):
                from .modules import Watched

                modules = Watched.of(names_of(self.body, len(arguments), place), others)
            out = call_body(self.body, convention, arguments, keywords)
            if modules is not None:
                modules.refuse_changes(out, lambda others: self._again(given, others, keywords))
            returned, new_state, y = _split_result(convention, out, given, x[1:] if convention.spread else ())
            kept, new = without_carries(given, returned) if self.custom else (given, returned)
            check_carry(convention, name, kept, new, y if own is None else new_state, out)
            if self.custom:
                returned = write_carries(given, returned, feed.valid, name)
                y = returned if convention.stacks else y
            new_state = None if own is None else own.written(new_state)
            if scope:
                scope.check_outputs(out, self._names_of_outputs(name, own))
            check_arrays(y, name if convention.stacks else None)
        if self.frozen:
            returned = _frozen_as(state, given, returned)
        if own is not None:
            y = StateAndY(_frozen_as(feed.x[-1], own.given, new_state) if self.frozen else new_state, y)
        keeps = convention.pair and not convention.spread  # a pair of layers' is always a tuple
        structure = _container(out) if keeps else None
        return (returned, y) if structure is None else jtu.tree_unflatten(structure, (returned, y))

    def _names_of_outputs(self, name: str, state: OwnState | None) -> str | tuple[str, ...]:
        """The names of the parts that the body returns."""
        own = () if state is None else (f"returned {state.name}",)
        names = (f"returned {name}", *own, *(("y",) if self.convention.pair else ()))
        return names if len(names) > 1 else names[0]

    def _again(self, given: PyTree, others: tuple[PyTree, ...], keywords: Mapping[str, Array | None]) -> PyTree:
        """Calls the body once more, with other values beside its carry, which is copied."""
        carry, place = copied(given), self.convention.place
        if self.custom:
            carry = read_carries(carry, carry_name(self.body, self.convention))
        return self.body.function(*others[:place], carry, *others[place:], **keywords)


def _unchanged(tree: PyTree) -> PyTree:
    return tree


def names_of(body: Body, count: int, place: int) -> tuple[str, ...]:
    """The names of so many arguments, but for that of the carry."""
    names = (*body.names[:count], *(f"args[{i}]" for i in range(len(body.names), count)))
    return (*names[:place], *names[place + 1 :])


def names_of_arguments(body: Body, convention: Convention, count: int) -> tuple[str, ...]:
    """The names of so many arguments."""
    place = convention.place
    others = names_of(body, count, place)
    return (*others[:place], carry_name(body, convention), *others[place:])[:count]


def carry_name(body: Body, convention: Convention) -> str:
    """The body's own name for its carry."""
    names = body.names
    return names[convention.place] if len(names) > convention.place else convention.carry


def _split_result(
    convention: Convention, out: PyTree, carry: PyTree, own: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree, PyTree]:
    """The next carry, a layer's state and y, by the verb's convention; `own` is what a layer is given as xs."""
    if isinstance(out, types.GeneratorType | types.CoroutineType):
        word = "yield" if isinstance(out, types.GeneratorType) else "async"
        raise BodyFault(f"{{body}} is no plain function: it has `{word}`.", "Write it with `def` and `return`.")
    if convention.stateful:
        return split_state(convention, out)
    if convention.pair:
        returned, y = _pair(convention, out, carry)
        return returned, None, y
    _refuse_pair(convention, out, carry, own)
    return out, None, (out if convention.stacks else None)


def _frozen_as(frozen: PyTree, given: PyTree, returned: PyTree) -> PyTree:
    """A returned tree with the static leaves of the given one frozen, as which the check has found them equal."""
    leaves = zip(jtu.tree_leaves(returned), jtu.tree_leaves(given), strict=True)
    return jtu.tree_unflatten(jtu.tree_structure(frozen), [leaf for leaf, old in leaves if not is_static(old)])


def _pair(convention: Convention, out: PyTree, carry: PyTree) -> tuple[PyTree, PyTree]:
    """Any container of two parts counts as a pair, as in lax.scan. Otherwise the error is about a pair."""
    listed = isinstance(out, tuple | list)
    parts = list(out) if listed else jtu.tree_leaves(out, is_leaf=lambda node: node is not out)
    if len(parts) == 2 and (listed or _same_structure(carry, parts[0])):
        return parts[0], parts[1]
    name = convention.carry
    cure = f"Return the next {name} and this {{unit}}'s output: `return {name}, y`"
    if _same_structure(carry, out) and out is not None and not any(map(is_static, jtu.tree_leaves(out))):
        cure = (
            f"What it returned has the structure of {{the_carry}}. Return `{name}, None` if there is no output to "
            f"stack{convention.or_alone}"
        )
    elif out is not None:
        cure = f"{cure}, with None for y if there is none"
    says = f"{{body}} must return a pair ({name}, y), but returned {describe_node(out)}."
    raise BodyFault(says, f"{cure}.")


def _container(out: PyTree) -> TreeDef | None:
    """The structure of a pair alone, its halves as leaves; None for a tuple, and for what lax.scan does not take."""
    if type(out) is tuple or (isinstance(out, tuple) and not keeps_named_pairs()):
        return None
    return jtu.tree_structure(out, is_leaf=lambda node: node is not out)


def _refuse_pair(convention: Convention, out: PyTree, carry: PyTree, own: tuple[PyTree, ...]) -> None:
    """Refuses a pair from a body that should return only the carry, for example a body written for `scan`."""
    is_pair = isinstance(out, tuple) and len(out) == 2
    if is_pair and not _same_structure(carry, out) and any(_same_structure(carry, half) for half in out):
        name = convention.carry
        is_state = any(same_structure(each, half) for each in own for half in out)
        raise BodyFault(
            f"{{body}} must return the next {name} alone, but returned {describe_node(out)}.",
            *["If the other is the layer's new state, for example its cache: pass `state=` in place of `xs`."]
            * is_state,
            f"A body of `{convention.verb}` returns no y: `return {name}`. To stack an output over the {{unit}}s, call "
            f"`{convention.other}`.",
        )


def _same_structure(carry: PyTree, other: PyTree) -> bool:
    """Whether a tree has the structure of a carry; where it has custom carries, anything goes."""
    return same_structure(*without_carries(carry, other))


def check_arrays(y: PyTree, carry: str | None = None) -> None:
    """Refuses outputs that cannot be stacked. `carry` is the body's own name for them where they are its carry."""
    if not any(map(is_static, jtu.tree_leaves(y))):
        return
    says = "{body} returned outputs that are not arrays."
    cures = ["Outputs are stacked over the {unit}s, so they must be arrays. Keep other values out of the scan."]
    if carry:
        says = "{call} stacks {the_carry} after each {step}, but it holds leaves that are not arrays."
        cures = [
            "Let the {step} close over such leaves, and keep them out of {init}. Or call `treescan.scan`, which "
            "carries it: its body returns the values to stack as y."
        ]
    if any(map(holds_arrays, jtu.tree_leaves(y))):
        cures.insert(0, REGISTER)
    if holds(y, module_classes()):  # of equinox, whose functions are leaves
        model = "To stack the arrays of a model, return `eqx.filter(model, eqx.is_array)` as y, in place of the model."
        cures.insert(1 if carry else 0, model)
    named = leaves_with_path(carry or "y", y)
    rows = [Row(path, "an array", describe_leaf(leaf)) for path, leaf in named if is_static(leaf)]
    raise BodyFault(says, *cures, rows=rows)


def takes_keyword(body: Body, name: str, positional: int = 2) -> bool:
    """Whether a body has a parameter of this name behind its first ones, or passes it on to what it wraps."""
    own = body.parameters or ()
    if _names_keyword(own, name, positional):
        return True
    passes_on = bool(own) and own[-1].kind is inspect.Parameter.VAR_KEYWORD
    return passes_on and _names_keyword(wrapped_parameters(body.function), name, positional)


def needs_keyword(body: Body, name: str) -> bool:
    """Whether a body has a parameter of this name without a default."""
    return any(p.name == name and p.default is p.empty for p in body.parameters or ())


def _names_keyword(parameters: Iterable[inspect.Parameter], name: str, positional: int) -> bool:
    for i, p in enumerate(parameters):
        if p.name == name and (p.kind is p.KEYWORD_ONLY or (i >= positional and p.kind is p.POSITIONAL_OR_KEYWORD)):
            return True
    return False


def check_callable(function: object, call: str) -> None:
    """Refuses a body that cannot be called, and shows a correct `call`."""
    if not callable(function):
        raise BodyFault(
            f"{{verb}} needs a function as its body, but got {describe_argument(function)}.",
            f"Pass the {{step}} function there: `treescan.{call}`.",
        )
    if isinstance(function, type) and any("__call__" in vars(kind) for kind in function.__mro__):
        raise BodyFault(
            f"{{verb}} got the class `{function.__name__}` as its body.",
            f"Pass an instance: `{function.__name__}(...)`.",
        )
