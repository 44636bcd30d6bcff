"""`flax.linen.scan` on treescan: the same arguments and variables, one trace of the body, treescan's errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
from flax.core import FrozenDict, broadcast, meta
from flax.core.lift import pack
from flax.linen.transforms import lift_transform
from flax.typing import In, Out

from ..._avals import describe_node
from ..._errors import BodyError, Fault, explain, verb
from ..._groups import Groups, Rngs, Roles, Step, run_groups
from ..._types import PyTree, RematLike, Save

Target = TypeVar("Target")


class Axes(NamedTuple):
    """The entries of `variable_axes` that go one way: filters of collections, and their axes."""

    filters: tuple[Any, ...]
    axes: tuple[int, ...]


def axes_of(variable_axes: Mapping[Any, Any], other: type) -> Axes:
    """The entries that go one way, which are all that are not of the `other`, `In` or `Out`."""
    entries = [(names, getattr(axis, "axis", axis)) for names, axis in variable_axes.items() if type(axis) is not other]
    return Axes(tuple(names for names, _ in entries), tuple(axis for _, axis in entries))


class Lifting(NamedTuple):
    """What flax says of a loop, and what more treescan takes."""

    target: Any
    into: Axes
    out: Axes
    split: tuple[bool, ...]
    roles: Roles
    data_transform: Callable[..., Any] | None
    metadata_params: Mapping[Any, Any]
    constant: bool


class _Call:
    """The lifted function, in the terms of groups. Flax keeps groups of collections by scope: tuples of dicts."""

    def __init__(self, lifting: Lifting, scope_fn: Any, repack_fn: Any, function: Any) -> None:
        self.lifting, self.scope_fn, self.repack_fn, self.function = lifting, scope_fn, repack_fn, function
        self.changed = False
        self.given: Any = None

    def __call__(
        self, groups: Groups, rngs: Rngs, carry: PyTree, args: tuple[Any, ...]
    ) -> tuple[PyTree, PyTree, Groups]:
        variables = (groups.broadcast, groups.carried, *groups.scanned)
        keys = tuple(s if split else k for s, k, split in zip(rngs.split, rngs.shared, self.lifting.split, strict=True))
        if self.lifting.data_transform is not None:
            variables, keys = self.lifting.data_transform(variables, keys)
        scope = self.scope_fn(variables, keys)
        carry, y = _pair(self.function(scope, carry, *args))
        shared, carried, *scanned = self.repack_fn(scope)
        self.changed = _changed(groups.broadcast, shared)
        for given, returned in zip(groups.carried, carried, strict=True):
            returned.update({name: tree for name, tree in given.items() if name not in returned})
        if not self.lifting.constant:
            shared = None
        return carry, y, Groups(shared, carried, tuple(scanned))

    def again(self, shared: Any, reads_keys: bool) -> Any:
        """Broadcast variables for a second trace, where flax's shows: it counts on from the keys of the first."""
        if not (self.lifting.constant and (self.changed or reads_keys)):
            return None
        return tuple({**given, **made} for given, made in zip(self.given, shared, strict=True))


def _pair(returned: Any) -> tuple[PyTree, PyTree]:
    match returned:
        case (carry, y):
            return carry, y
        case _:
            raise Fault(
                BodyError,
                f"{{body}} must return a pair (carry, y), but returned {describe_node(returned)}.",
                "Return the next carry and this step's output: `return carry, y`, with None for y if there is none.",
            )


def _changed(given: Sequence[Mapping[str, Any]], returned: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a variable that was there before is another one now, or one was made that may have been changed since.

    Parameters are made, and not changed in the same call.
    """
    for before, after in zip(given, returned, strict=True):
        for name, collection in after.items():
            there = dict(jax.tree_util.tree_leaves_with_path(before.get(name, {})))
            for path, leaf in jax.tree_util.tree_leaves_with_path(collection):
                if there.get(path, leaf if name == "params" else None) is not leaf:
                    return True
    return False


def _lift(lifting: Lifting, filters: tuple[Any, Any], rng_filters: tuple[Any, ...], function: Any) -> Any:
    """A function of a scope, of one step, as that of all steps."""

    def run(
        scope_fn: Any, repack_fn: Any, variables: tuple[Any, ...], rngs: tuple[Any, ...], init: PyTree, *args: Any
    ) -> Any:
        shared, carried, *scanned = variables
        scanned = [_remove(lifting, group, axis) for group, axis in zip(scanned, lifting.into.axes, strict=True)]
        call = _Call(lifting, scope_fn, repack_fn, function)
        call.given = shared
        keys = Rngs(
            tuple(None if split else group for group, split in zip(rngs, lifting.split, strict=True)),
            tuple(group if split else None for group, split in zip(rngs, lifting.split, strict=True)),
        )
        groups = Groups(shared, carried, tuple(scanned))
        try:
            carry, ys, out = run_groups(Step(call, lifting.target), lifting.roles, groups, keys, init, args, call.again)
        except Exception as error:
            failure = explain(error, "flax.scan", lifting.target, init)
        else:
            stacked = [_add(lifting, group, axis) for group, axis in zip(out.scanned, lifting.out.axes, strict=True)]
            return (carry, ys), (out.broadcast if lifting.constant else shared, out.carried, *stacked)
        raise failure

    return pack(
        verb(run), (*filters, *lifting.into.filters), (*filters, *lifting.out.filters), rng_filters, name="scan"
    )


def _remove(lifting: Lifting, group: PyTree, axis: int) -> PyTree:
    return meta.remove_axis(group, axis, dict(lifting.metadata_params))


def _add(lifting: Lifting, group: PyTree, axis: int) -> PyTree:
    return meta.add_axis(group, axis, dict(lifting.metadata_params))


def _plain(axes: Any) -> Any:
    """Axes with None for what flax calls broadcast."""
    return jax.tree.map(lambda axis: None if axis is broadcast else axis, axes)


def _transform(target: Any, more: Mapping[str, Any]) -> Any:
    """The transform that flax applies to functions of scopes, with what treescan takes beside flax's arguments."""

    # Flax makes the names of transformed modules, under which their parameters are stored, of that of the transform.
    def scan(
        fn: Callable[..., Any],
        variable_axes: Mapping[Any, Any] = FrozenDict(),
        variable_broadcast: Any = False,
        variable_carry: Any = False,
        split_rngs: Mapping[Any, bool] = FrozenDict(),
        in_axes: Any = 0,
        out_axes: Any = 0,
        length: int | None = None,
        reverse: bool = False,
        unroll: int | bool = 1,
        _split_transpose: bool = False,
        data_transform: Callable[..., Any] | None = None,
        metadata_params: Mapping[Any, Any] = FrozenDict(),
        check_constancy_invariants: bool = True,
    ) -> Any:
        into, out = axes_of(variable_axes, Out), axes_of(variable_axes, In)
        lowering = (("_split_transpose", True),) if _split_transpose else ()
        axes = _plain(in_axes), _plain(out_axes)
        roles = Roles(into.axes, out.axes, *axes, length, reverse, unroll, lowering=lowering, **more)
        split = tuple(map(bool, split_rngs.values()))
        lifting = Lifting(target, into, out, split, roles, data_transform, metadata_params, check_constancy_invariants)
        return _lift(lifting, (variable_broadcast, variable_carry), tuple(split_rngs), fn)

    return scan


def scan(
    target: Target,
    variable_axes: Mapping[Any, Any] = FrozenDict(),
    variable_broadcast: Any = False,
    variable_carry: Any = False,
    split_rngs: Mapping[Any, bool] = FrozenDict(),
    in_axes: Any = 0,
    out_axes: Any = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    data_transform: Callable[..., Any] | None = None,
    metadata_params: Mapping[Any, Any] = FrozenDict(),
    methods: Any = None,
    _split_transpose: bool = False,
    check_constancy_invariants: bool = True,
    *,
    remat: RematLike | None = None,
    save: Save = "all",
    name: str | None = None,
) -> Target:
    """`flax.linen.scan` on treescan.

    Arguments, names of variables and results are those of `flax.linen.scan`, for the same seeds too: checkpoints are
    interchangeable. The body is traced once where flax traces it twice: that broadcast variables do not depend on
    the loop is read off its trace. It is traced a second time where keys are used in the loop, by dropout say, or a
    broadcast variable is changed: flax counts the keys of its first trace, and results are to be equal.

    Carries may hold custom carries of `treescan.carries`. Carried collections that are not mutable stay as they are.

    Args:
        target: a Module class, or a function of a module (or modules), the carry and what is scanned over, as in
            `flax.linen.scan`, within `nn.compact` and `setup`.
        variable_axes: for filters of collections, the axis that they are scanned over and stacked along, or
            `In(axis)` or `Out(axis)` of flax.
        variable_broadcast: a filter of the collections that all steps share.
        variable_carry: a filter of the collections that are carried. They are made before the loop.
        split_rngs: for filters of streams of keys, whether each step has a key of its own.
        in_axes: a prefix of the arguments behind the carry: the axis that each is scanned over; `nn.broadcast` (or
            None) for what every step is given whole.
        out_axes: a prefix of y: where the stacked axis goes; `nn.broadcast` (or None) for what is the same in all.
        length: the number of steps. Not needed where anything is scanned over.
        reverse: whether the last step comes first.
        unroll: as for `treescan.scan`.
        data_transform: called within each step with the groups of variables and of keys, and returns both.
        metadata_params: passed on to the boxes of variables that name their axes, `nn.Partitioned` say.
        methods: the methods of a Module class that are transformed, or a dict of them with the arguments of each.
        _split_transpose: as for `jax.lax.scan`.
        check_constancy_invariants: False: broadcast variables are only read, and nothing is proven.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`: what is kept of y.
        name: as for `treescan.scan`.

    Returns:
        The transformed class or function: `(carry, *args) -> (carry, ys)`.

    Raises:
        ArgumentError: for axes and lengths that do not fit.
        BodyError: if the body returns no pair, or broadcast values that depend on the loop.
        CarryError: if the carry, or a carried collection, changes its structure or types.

    Examples:
        >>> import flax.linen as nn
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from treescan.integrations.flax import scan
        >>> cells = scan(nn.GRUCell, variable_broadcast="params", split_rngs={"params": False})
        >>> carry, xs = jnp.zeros((2, 4)), jnp.ones((5, 2, 3))
        >>> (carry, ys), variables = cells(4).init_with_output(jax.random.key(0), carry, xs)
        >>> print(ys.shape)
        (5, 2, 4)
    """
    given = {
        "variable_axes": variable_axes,
        "variable_broadcast": variable_broadcast,
        "variable_carry": variable_carry,
        "split_rngs": split_rngs,
        "in_axes": in_axes,
        "out_axes": out_axes,
        "length": length,
        "reverse": reverse,
        "unroll": unroll,
        "data_transform": data_transform,
        "metadata_params": metadata_params,
        "_split_transpose": _split_transpose,
        "check_constancy_invariants": check_constancy_invariants,
    }
    transform = _transform(target, {"remat": remat, "save": save, "name": name})
    return cast("Target", lift_transform(transform, target, methods=methods, **given))
