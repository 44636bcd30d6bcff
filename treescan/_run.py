"""What all verbs share: checks the arguments, makes the plan, runs it, and puts static leaves back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._arguments import (
    check_key,
    check_keywords,
    check_length,
    check_name,
    check_reverse,
    check_unroll,
    infer_length,
    resolve_axes,
)
from ._chunk_arguments import check_chunks
from ._loop import Body
from ._mask_arguments import RowFlags
from ._transforms.axes import static_axes
from ._transforms.body import check_callable, takes_keyword
from ._transforms.conventions import Convention
from ._transforms.masking import MaskPlan
from ._transforms.pipeline import Given, Plan, execute
from ._tree import freeze_static, thaw_static
from ._types import Array, Axes, PyTree, RematLike, Save
from .carries._registry import Adopted, adopt


def run_verb(
    convention: Convention,
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    lower: int | None = None,
    rows: Callable[[int], RowFlags] | None = None,
    mask: MaskPlan | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array | None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    name: str | None = None,
    lowering: tuple[tuple[str, Any], ...] = (),
) -> tuple[Any, Any]:
    """Runs a verb.

    Args:
        convention: how the verb calls the body, and what the body returns.
        f: the body.
        init: the carry that the first step is given.
        xs: what is scanned over.
        length: the number of steps.
        lower: the first index of `fori`.
        rows: for a masked scan what checks the lengths, the mask and the resets, given the number of steps.
        mask: the axes and the fill of a masked scan.
        reverse: as for `treescan.scan`.
        unroll: as for `treescan.scan`.
        in_axes: as for `treescan.scan`.
        out_axes: as for `treescan.scan`.
        key: as for `treescan.scan`.
        remat: as for `treescan.scan`.
        save: as for `treescan.scan`.
        truncate: as for `treescan.scan`.
        name: as for `treescan.scan`.
        lowering: further keyword arguments of `jax.lax.scan`.
    """
    body, alive = body_of(f, convention)
    adopted = adopt(init)
    key = check_key(key)
    frozen_init, frozen_xs = freeze_static(adopted.init), freeze_static(xs)
    axes = resolve_axes(in_axes, frozen_xs)
    steps = infer_length(frozen_xs, check_length(length), axes)
    plan = plan_loop(
        convention,
        steps,
        reverse=reverse,
        unroll=unroll,
        in_axes=axes,
        out_axes=out_axes,
        name=name,
        frozen=frozen_init is not adopted.init or frozen_xs is not xs,
        custom=adopted.custom,
        sees_valid=check_body(body, convention, keyed=key is not None, masked=mask is not None),
        chunks=check_chunks(remat, save, truncate),
        mask=mask,
        lowering=lowering,
    )
    result = execute(body, plan, Given(frozen_init, frozen_xs, key, *(rows(steps) if rows else RowFlags()), lower))
    del alive
    return restored(result, plan, adopted) if plan.frozen or adopted.back else result


def plan_loop(
    convention: Convention,
    length: int,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    out_axes: Axes = 0,
    name: str | None = None,
    **known: Any,
) -> Plan:
    """The plan of a loop. What is named here is as the user gave it, and is checked; `known` are fields of the plan."""
    return Plan(
        convention,
        length,
        reverse=check_reverse(reverse),
        unroll=check_unroll(unroll, length),
        out_axes=None if type(out_axes) is int and out_axes == 0 else static_axes("out_axes", out_axes),
        name=check_name(name),
        **known,
    )


def body_of(f: Callable[..., Any], convention: Convention) -> tuple[Body, Callable[..., Any]]:
    """A body's handle, and the function that it refers to: that of an equal body may be another object."""
    check_callable(f, convention.call)
    body = Body.of(f)
    return body, body.function


def restored(result: tuple[PyTree, PyTree], plan: Plan, adopted: Adopted) -> tuple[PyTree, PyTree]:
    """The result with static leaves and values of registered types in their places."""
    state, ys = result
    if plan.frozen:
        state = thaw_static(state)
    return adopted.restore(state), (adopted.restore(ys) if plan.convention.stacks else ys)


def check_body(body: Body, convention: Convention, *, keyed: bool, masked: bool = False) -> bool:
    """Holds a body's parameters against what it will be passed; returns whether it takes `valid`."""
    sees_valid = masked and takes_keyword(body, "valid")
    passed = {"key": "the option `key`"} if keyed else {}
    passed |= {"valid": "mask_scan"} if sees_valid else {}
    check_keywords(body, passed, convention)
    return sees_valid
