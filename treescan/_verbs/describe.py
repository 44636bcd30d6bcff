"""`describe` shows what a call of a verb would do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from .._avals import describe_argument
from .._describe.description import Description
from .._describe.gather import gather
from .._errors import LAYER_WORDS, STEP_WORDS, WHILE_WORDS, ArgumentError, Fault, explain, verb
from .._transforms.program import Taken, take
from .fold import accumulate, fold
from .fori import fori
from .layers import fold_layers, scan_layers
from .mask_scan import mask_scan
from .prepare_layers import explain_traced
from .scan import scan
from .while_scan import while_scan


class _Verb(NamedTuple):
    """The words for a verb's body and init in messages, and where they are among its arguments."""

    words: Mapping[str, str] = STEP_WORDS
    body: int = 0

    def body_and_init(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, Any]:
        """The body and the init among the arguments of a call."""
        names = (("f", "block"), ("init", "x"))
        return tuple(  # type: ignore[return-value]
            args[place] if place < len(args) else next((options[name] for name in own if name in options), None)
            for place, own in enumerate(names, self.body)
        )


_VERBS: dict[Callable[..., Any], _Verb] = {
    scan: _Verb(),
    fold: _Verb(),
    accumulate: _Verb(),
    fori: _Verb(body=2),
    mask_scan: _Verb(),
    while_scan: _Verb(WHILE_WORDS, body=1),
    scan_layers: _Verb(LAYER_WORDS),
    fold_layers: _Verb(LAYER_WORDS),
}


@verb
def describe(verb: Callable[..., Any], /, *args: Any, **options: Any) -> Description:
    """Shows what a call of a verb would do, from its arguments. The body is traced, and nothing is run.

    Args:
        verb: one of `treescan.scan`, `fold`, `accumulate`, `fori`, `mask_scan`, `while_scan`, `scan_layers` and
            `fold_layers`.
        *args: what the verb would be called with. Types with shapes (`jax.ShapeDtypeStruct`) will do for arrays in
            `init`, `xs` and `layers`.
        **options: its options.

    Returns:
        The description, to be printed: the leaves of the carry, of x, of y and what the body closes over; what each
        step saves for the gradient, line by line; what the gradient needs, under the call's own `remat` and under
        others; and findings, each with a code that `python -m treescan explain` says more about.

    Raises:
        ArgumentError: if it is none of these verbs, if the number of steps is symbolic, and as the verb itself.
        BodyError: as the verb itself.
        CarryError: as the verb itself.
        LayerError: as the verb itself.
        SignatureError: as the verb itself.

    Examples:
        >>> import jax.numpy as jnp
        >>> import treescan
        >>> def step(h, x):
        ...     return jnp.tanh(h + x), None
        >>> description = treescan.describe(
        ...     treescan.scan, step, jnp.zeros((8, 64)), jnp.ones((1000, 8, 64))
        ... )
        >>> print(description.carry[0].type, description.plan.evaluations)
        float32[8,64] 1
    """
    name, known = getattr(verb, "__name__", "describe"), _known(verb)
    try:
        if known is None:
            raise _no_verb(verb)
        call = functools.partial(_take, verb, args, options)
        with jax.disable_jit(False):
            return gather(name, known.words["unit"], call(), options.get("remat"), lambda remat: call(remat=remat))
    except Exception as error:
        known = known or _Verb()
        explained = explain(explain_traced(error), name, *known.body_and_init(args, options), known.words)
    raise explained


def _known(verb: Any) -> _Verb | None:
    try:
        return _VERBS.get(verb)
    except TypeError:  # it has no hash
        return None


def _take(verb: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any], **other: Any) -> Taken:
    return take(verb, *args, **{**options, **other})


def _no_verb(verb: Any) -> Fault:
    named = ", ".join(f"`{known.__name__}`" for known in _VERBS)
    return Fault(
        ArgumentError,
        f"the first argument of `describe` must be one of {named}, got {describe_argument(verb)}.",
        "Pass the verb, and then the arguments of its call: `treescan.describe(treescan.scan, step, init, xs)`.",
    )
