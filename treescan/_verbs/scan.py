"""`scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from .._body.conventions import SCAN
from .._checks.arguments import check_options
from .._errors import explain, verb
from .._types import Array, Axes, Carry, FiniteCheck, KeyedBody, Options, ProgressLike, PyTree, RematLike, Save, X, Y
from .run import run_scan

_ACCEPTED = frozenset(Options.__annotations__) | {"length"}


@overload
def scan(
    f: Callable[[Carry, X], tuple[Carry, Y]],
    init: Carry,
    xs: X,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    name: str | None = None,
    progress: ProgressLike = None,
    check_finite: FiniteCheck = False,
) -> tuple[Carry, Y]: ...
@overload
def scan(
    f: Callable[[Carry, None], tuple[Carry, Y]],
    init: Carry,
    xs: None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    name: str | None = None,
    progress: ProgressLike = None,
    check_finite: FiniteCheck = False,
) -> tuple[Carry, Y]: ...
@overload
def scan(
    f: KeyedBody[Carry, X, Y],
    init: Carry,
    xs: X,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    name: str | None = None,
    progress: ProgressLike = None,
    check_finite: FiniteCheck = False,
) -> tuple[Carry, Y]: ...
@overload
def scan(
    f: KeyedBody[Carry, None, Y],
    init: Carry,
    xs: None = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    name: str | None = None,
    progress: ProgressLike = None,
    check_finite: FiniteCheck = False,
) -> tuple[Carry, Y]: ...
@verb
def scan(
    f: Callable[..., Any],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    *,
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    key: Array | None = None,
    remat: RematLike | None = None,
    save: Save = "all",
    truncate: int | None = None,
    name: str | None = None,
    progress: ProgressLike = None,
    check_finite: FiniteCheck = False,
    **unknown: Any,
) -> tuple[Any, Any]:
    """Scans a function over the steps of `xs`, carrying state from step to step.

    The same program as `jax.lax.scan`, with which it shares its first six parameters: without further options both
    trace to the same jaxpr. What it adds are checks, in the one trace that runs anyway, whose errors speak of the
    body's own names, and the options below.

    `_split_transpose` is an experiment of JAX, and is passed on to `jax.lax.scan`. With it the gradient of the loop is
    split into a scan, for the carry, and a map, for what each step reads. It may take more memory, and JAX may change
    or remove it.

    Args:
        f: the body, `f(carry, x) -> (carry, y)`. It may be annotated with jaxtyping types, which are then checked.
        init: the carry that the first step is given: any pytree of arrays and scalars. A leaf that is neither (a
            function, a string) stays outside of the loop; the body sees it in its place and returns it as it came.
        xs: what is scanned over: any pytree whose leaves are `[T, ...]`, or None for a loop that consumes nothing.
        length: the number of steps T; needed without xs, and must agree with them otherwise.
        reverse: run from step T-1 to step 0. Each y is at the position of its x.
        unroll: how many steps are compiled into one round of the loop; 0 or True unrolls the whole loop.
        in_axes: for each leaf of xs (a prefix tree) the axis that is scanned over, counted from the end if negative.
            None gives the leaf whole to every step. Axes other than 0 cost a transposed copy of the leaf.
        out_axes: for each leaf of ys (a prefix tree) where the axis of the steps is. Axes other than 0 cost a
            transposed copy.
        key: a PRNG key. The body is then given `key=jax.random.fold_in(key, position)` with the step's position in
            xs, the same in reverse.
        remat: what the gradient recomputes instead of saving it. None: nothing. "auto": the plan that is expected to be
            the fastest, which saves no more than None. "step": each step, so that of all that
            is computed in one only the carry is saved, T of them. "nested": chunks of about sqrt(T) steps, and in
            these each step, so that about 2 sqrt(T) carries are saved, for one more evaluation of each step. A
            `treescan.Remat` says what is saved of a step, has more levels, fits a budget of bytes or moves carries to
            another memory.
        save: what is kept of ys (a prefix tree of y). "all"; "last": of the last step that runs, without an axis of
            steps, 0 if there is no step; a number k: of the positions k-1, 2k-1 and so on, in reverse too; None:
            nothing, and None is in its place. What is not kept takes no memory, and is not computed where nothing
            else needs it.
        truncate: cut the gradient of the carry between stretches of so many steps, at the positions that are multiples
            of it, in reverse too: truncated backpropagation through time. Leaves of the carry that no step changes,
            weights say, are constants of the loop and are not cut.
        name: how profilers name the loop (a `jax.named_scope`).
        progress: show how far the loop has come: True, the label of the bar, or a `treescan.Progress`. The loop is cut
            into chunks, at most 100, and reports after each: no step has a branch, and the gradient reports nothing.
            Under `jax.vmap` there is one bar for all elements.
        check_finite: look at the carry after each step. Where a leaf becomes NaN or infinite, a `NonFiniteError` names
            the leaf, the first such step, the rows and the operation, and `treescan.last_nonfinite()` has the carry
            and x of that step. Under a transformation of JAX it is JAX's runtime error with this text. An infinity that
            the carry had before the step is let through. "backward" looks at the cotangents of the carry instead, in
            reverse mode: a NaN or an infinity that the gradient makes on its way back through a step.

    Returns:
        The last step's carry, and ys, the outputs of all steps, stacked to `[T, ...]`.

    Raises:
        ArgumentError: if an argument is out of range, in conflict with another or does not fit xs.
        BodyError: if `f` is not callable, does not return a pair, or lacks a keyword.
        CarryError: if the returned carry differs from the given one in structure, shape, dtype or sharding.
        NonFiniteError: if `check_finite` finds something.
        SignatureError: if a jaxtyping annotation of the body does not hold.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(total, x):
        ...     return total + x, total * x
        >>> total, products = treescan.scan(step, 0.0, jnp.array([1.0, 2.0, 3.0]))
        >>> print(total, products)
        6.0 [0. 2. 9.]
    """
    try:
        check_options(unknown, _ACCEPTED, {})
        lowering = (("_split_transpose", True),) if _split_transpose else ()
        return run_scan(
            SCAN,
            f,
            init,
            xs,
            length,
            reverse=reverse,
            unroll=unroll,
            in_axes=in_axes,
            out_axes=out_axes,
            key=key,
            remat=remat,
            save=save,
            truncate=truncate,
            name=name,
            progress=progress,
            check_finite=check_finite,
            lowering=lowering,
        )
    except Exception as error:
        explained = explain(error, "scan", f, init)
    raise explained
