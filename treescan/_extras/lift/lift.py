"""`lift`: `flax.linen.scan` for functions of plain dicts of variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ..._avals import PyTree, describe_argument, describe_node, dtype_of, shape_of
from ..._body.call import check_callable
from ..._body.signature import LIFT, annotated
from ..._errors import GROUP_WORDS, BodyFault, Misuse, TypeMisuse, explain, verb
from ..._loop.loop import Body
from ..._tree import leaves_with_path
from ..._types import Axes, ProgressLike, RematLike, Save
from .groups import (
    CollectionRoles,
    Collections,
    Filter,
    Groups,
    GroupStep,
    In,
    Out,
    Rngs,
    Roles,
    State,
    StepInputs,
    check_axes_of,
    check_filter,
    check_hook,
    check_split,
    merged,
    quoted,
    run_groups,
    transformed,
)

MetadataFn: TypeAlias = Callable[[PyTree, int, bool], PyTree]
Lifted: TypeAlias = Callable[..., tuple[tuple[PyTree, PyTree], Collections]]

BROADCAST, CARRY = "variable_broadcast", "variable_carry"


class LiftedInputs(NamedTuple):
    """The x of a record of `check_finite`: collections and keys by their names, as `fn` receives them."""

    variables: Collections
    rngs: Collections
    args: tuple[PyTree, ...]


def _as_passed(carry: PyTree, x: StepInputs) -> tuple[PyTree, LiftedInputs]:
    variables = merged(Groups({}, {}, x.variables))
    return carry, LiftedInputs(variables, {**x.rngs.shared, **x.rngs.split}, x.args)


_CONVENTION = dataclasses.replace(LIFT, records=_as_passed)


@dataclass(frozen=True, eq=False)
class _Call:
    """The user's function, in the terms of groups."""

    function: Callable[..., object]
    collections: CollectionRoles
    data_transform: Callable[..., object] | None

    def __call__(
        self, groups: Groups, rngs: Rngs, carry: PyTree, args: tuple[PyTree, ...]
    ) -> tuple[PyTree, PyTree, Groups]:
        variables, keys = transformed(self.data_transform, merged(groups), {**rngs.shared, **rngs.split})
        carry, y, updates = self._typed(variables, keys, carry, *args)
        found, left = self.collections.group(updates, out=True)
        only_read = [name for name in left if self.collections.is_only_read(name)]
        if left:
            says = f"collections without a role: {quoted(left)}."
            cure = "Name each in `variable_axes`, `variable_broadcast` or `variable_carry`, or do not return it."
            if only_read:
                says = f"{quoted(only_read)}, but `In` in `variable_axes` makes it read-only."
                cure = "Do not return it, or give it an int instead of `In`."
            raise BodyFault(f"{{body}} returned {says}", cure)
        return carry, y, found._replace(carried={**groups.carried, **found.carried})

    def _typed(self, *given: PyTree) -> tuple[PyTree, PyTree, Mapping[str, PyTree]]:
        """Calls the function, under one scope of the axis names in its annotations."""
        body = Body.of(self.function)
        with annotated(body) as scope:
            if scope:
                scope.check_inputs(given)
            match out := self.function(*given):
                case ((carry, y), Mapping() as updates) if all(isinstance(name, str) for name in updates):
                    if scope:
                        scope.check_outputs(out, (("returned carry", "y"), "updates"))
                    return carry, y, updates
                case _:
                    pass
        raise BodyFault(
            f"{{body}} must return a pair ((carry, y), variables), but returned {describe_node(out)}.",
            "Write `return (carry, y), {}`, with the dict from names to the collections that changed, as "
            "`module.apply(..., mutable=[...])` of flax returns it.",
        )


@verb
def lift(
    fn: Callable[..., Any],
    *,
    variable_axes: Mapping[Any, int | In | Out] | None = None,
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    split_rngs: Mapping[Any, bool] | None = None,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    data_transform: Callable[..., Any] | None = None,
    metadata_fn: Callable[[PyTree, int, bool], PyTree] | None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    progress: ProgressLike = None,
    check_finite: bool = False,
) -> Lifted:
    """Turns a function of one step, with variables in named collections, into a function of all steps.

    The arguments are those of `flax.linen.scan`, for plain dicts and without a framework. Each collection has one role.
    It is *scanned* over (each step receives its slice, and the slices that steps return are stacked), *carried* from
    step to step, or *broadcast* (all steps share it). If several arguments name a collection, broadcast comes first,
    then carry, then axes.

    Args:
        fn: `fn(variables, rngs, carry, *args) -> ((carry, y), updates)`. It is traced once.
        variable_axes: for each scanned collection, the axis to scan over and to stack along. `In(axis)` for collections
            that are only read, `Out(axis)` for those that are only returned.
        variable_broadcast: the collections that all steps share. A step may make or change them, but only from
            constants, shared keys and other broadcast values. The trace is checked for that; they are computed once.
        variable_carry: the collections that are carried. They must exist before the loop, with the types that they
            keep.
        split_rngs: for each stream of keys, True if each step has its own key, `jax.random.split(key, T)[i]`, and False
            if all steps share one. Every stream that is passed must be named.
        in_axes: a prefix of args: the axis to scan over, or None if every step receives the whole argument.
        out_axes: a prefix of y: the axis to stack along, or None for an output that is the same in every step.
        length: the number of steps T. Not needed if anything is scanned over.
        reverse: whether the last step comes first.
        unroll: as for `treescan.scan`.
        data_transform: `data_transform(variables, rngs) -> (variables, rngs)`, called within each step before `fn`:
            the place for sharding constraints.
        metadata_fn: `metadata_fn(collection, axis, added) -> collection`, for metadata that names axes. It is called on
            each scanned collection before the loop, with `added` False, and on each stacked one after it, with `added`
            True.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`.
        progress: as for `treescan.scan`. `show` receives the carry.
        check_finite: as for `treescan.scan`, of the carry and the carried collections. In the record, `carry` has the
            fields `variables` (the carried collections) and `carry`, and `x` has the fields `variables` (the scanned
            collections), `rngs` and `args`.

    Returns:
        `run(variables, rngs, carry, *args) -> ((carry, ys), updates)`. The updates hold the collections that `fn`
        returned: stacked, carried to the end, or computed once.

    Raises:
        ArgumentError: for collections, streams or axes that do not fit.
        ArgumentTypeError: for filters and axes of the wrong type.
        BodyError: if `fn` does not return this structure, or returns collections without a role, broadcast values that
            vary, or carried variables that did not exist before the loop.
        CarryError: if the carry or a carried collection changes its structure or types.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: if a jaxtyping annotation of `fn` does not hold.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(variables, rngs, carry, x):
        ...     carry = jnp.tanh(carry @ variables["params"]["w"] + x)
        ...     return (carry, carry.sum()), {
        ...         "calls": {"n": variables["calls"]["n"] + 1}
        ...     }
        >>> run = treescan.lifting.lift(
        ...     step, variable_broadcast="params", variable_carry="calls"
        ... )
        >>> variables = {"params": {"w": jnp.eye(2)}, "calls": {"n": jnp.int32(0)}}
        >>> (carry, ys), updates = run(variables, {}, jnp.zeros(2), jnp.ones((3, 2)))
        >>> print(ys.shape, updates)
        (3,) {'calls': {'n': Array(3, dtype=int32)}}
    """
    try:
        check_callable(fn, LIFT.call)
        check_hook("data_transform", data_transform)
        check_hook("metadata_fn", metadata_fn)
        collections = CollectionRoles(
            check_filter(BROADCAST, variable_broadcast),
            check_filter(CARRY, variable_carry),
            check_axes_of({} if variable_axes is None else variable_axes),
            check_split({} if split_rngs is None else split_rngs),
        )
        roles = Roles(
            collections.numbers(out=False), collections.numbers(out=True), in_axes, out_axes, length, reverse, unroll,
            remat, save, progress=progress, check_finite=check_finite, convention=_CONVENTION,
        )  # fmt: skip
        step = GroupStep(_Call(fn, collections, data_transform), fn)
    except Exception as error:
        failure = explain(error, "lift", fn)
    else:

        def run(
            variables: Mapping[str, PyTree], rngs: Mapping[str, PyTree] | None, carry: PyTree, *args: PyTree
        ) -> tuple[tuple[PyTree, PyTree], Collections]:
            return _run(step, collections, roles, metadata_fn, variables, rngs, carry, *args)

        return verb(run)
    raise failure


def _run(
    step: GroupStep,
    collections: CollectionRoles,
    roles: Roles,
    metadata_fn: MetadataFn | None,
    variables: Mapping[str, PyTree],
    rngs: Mapping[str, PyTree] | None,
    carry: PyTree,
    *args: PyTree,
) -> tuple[tuple[PyTree, PyTree], Collections]:
    try:
        groups, left = collections.group(_checked("variables", variables), out=False)
        keys, unsaid = collections.rngs(_checked("rngs", {} if rngs is None else rngs))
        _check_keys(keys)
        for what, names, where in (
            ("variables", left, "`variable_axes`, `variable_broadcast` or `variable_carry`"),
            ("rngs", unsaid, "`split_rngs`, whether each step has its own key or all share one"),
        ):
            if names:
                raise Misuse(
                    f"{{call}}: `{what}` has names without a role: {quoted(names)}.",
                    f"Name each in {where}, or leave it out of `{what}`.",
                )
        scanned = _with_metadata(groups.scanned, roles.scanned_in, metadata_fn, added=False)
        carry, ys, found = run_groups(step, roles, groups._replace(scanned=scanned), keys, carry, args)
        stacked = _with_metadata(found.scanned, roles.scanned_out, metadata_fn, added=True)
        updates = merged(found._replace(scanned=stacked))
    except Exception as error:
        failure = explain(error, "lift", step.function, State((), carry), GROUP_WORDS)
    else:
        return (carry, ys), updates
    raise failure


def _with_metadata(
    groups: Sequence[Collections], axes: tuple[int, ...], metadata_fn: MetadataFn | None, *, added: bool
) -> tuple[Collections, ...]:
    if metadata_fn is None:
        return tuple(groups)
    found: list[Collections] = []
    for group, axis in zip(groups, axes, strict=True):
        found.append({name: metadata_fn(tree, axis, added) for name, tree in group.items()})
        lost = [name for name, tree in found[-1].items() if tree is None]
        if lost:
            raise TypeMisuse(
                f"{{call}}: `metadata_fn` returned None for {quoted(lost)}.",
                "`metadata_fn(collection, axis, added)` returns the collection, with other metadata or unchanged.",
            )
    return tuple(found)


def _check_keys(rngs: Rngs) -> None:
    for split, keys in ((False, rngs.shared), (True, rngs.split)):
        for path, leaf in leaves_with_path("rngs", keys):
            dtype, rank = dtype_of(leaf), len(shape_of(leaf) or ())
            typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
            if not (typed or dtype == jnp.uint32) or (split and rank != (0 if typed else 1)):
                one = "one PRNG key" if split else "a PRNG key"
                raise TypeMisuse(
                    f"{{call}}: {path} must be {one}, got {describe_argument(leaf)}.",
                    "Make it with `jax.random.key(seed)`. If `split_rngs` is True for it, each step's key is split "
                    "from it.",
                )


def _checked(what: str, given: object) -> Mapping[str, PyTree]:
    if not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        raise TypeMisuse(  # not by `expect`: these values may be traced, so the text does not say whether they are
            f"{{call}}: `{what}` must be a dict from names to values, got {describe_argument(given)}.",
            "Call the function that `lift` returns as `run(variables, rngs, carry, *args)`, and pass `{}` if there are "
            "none.",
        )
    return given
