"""Examples of `linear_scan`: a recurrence of rows of unequal length, whose factors come from what is given."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treescan

from . import plain
from .example import Form, Given, T, Verb, has
from .rows import GIVEN, LENGTHS, MASK, RESETS, VALID, B, lengths_by_weights

FORMS = {
    "lengths": Form("lengths", how=has("lengths")),
    "mask": Form("lengths", {"mask": MASK}),
    "traced lengths": Form("lengths", how=has("traced")),
    "Padded": Form("lengths", how=has("padded")),
    "resets": Form("resets", {"resets": RESETS}),
    "reset_to": Form("reset_to", {"resets": RESETS, "reset_to": "another state"}),
    "no init": Form("init", how=has("no init")),
    "reverse": Form("reverse", {"reverse": True}),
    "matrix": Form("matrix", {"matrix": True}),
    "time_axis": Form("time_axis", {"time_axis": 1}),
    "fill": Form("fill", {"fill": 7}),
    'fill="hold"': Form("fill", {"fill": "hold"}),
    'save="last"': Form("save", {"save": "last"}),
    "save=None": Form("save", {"save": None}),
    "remat=2": Form("remat", {"remat": 2}, free=True),
    'method="chunked"': Form("method", {"method": "chunked"}, free=True),
    'method="parallel"': Form("method", {"method": "parallel"}, free=True),
    "a number": Form("a", how=has("number")),
}


def _factors(given: Given, options: Mapping[str, Any], how: frozenset[str]) -> Any:
    """What a is `[T, B, D]`, or `[T, B, D, D]`: of weights alone where the program is to be linear in the rest."""
    weights = jnp.tanh(given["w"])
    if "matrix" in options:
        own = weights[None, None]
        return own if "linear" in how else own * jnp.cos(jnp.sum(given["a"], -1))[..., None, None]
    if "number" in how:
        return 0.5 if "linear" in how else jnp.sum(weights) / 4
    own = weights[:1][None]
    return own if "linear" in how else own * jnp.cos(given["a"])


def program(lib: Any, options: Mapping[str, Any], how: frozenset[str], given: Given) -> Any:
    """The last state and all states; NaN where no step is valid, in a and in b."""
    passed, axis = dict(options), options.get("time_axis", 0)
    for name in ("mask", "resets"):
        if name in passed:
            passed[name] = np.moveaxis(passed[name], 0, axis)
    if "traced" in how:
        passed["lengths"] = lengths_by_weights(given)
    elif {"lengths", "padded"} & how:
        passed["lengths"] = LENGTHS
    a, b = _factors(given, options, how), given["a"] + given["b"]
    good = MASK if "mask" in options else VALID if {"lengths", "padded"} & how else np.ones((T, B), bool)
    with jax.debug_nans(False):  # what the user has in the padding
        b = jnp.where(good[..., None], b, jnp.nan)
        a = a if jnp.ndim(a) != 3 or a.shape[0] == 1 else jnp.where(good[..., None], a, jnp.nan)
    a, b = (leaf if jnp.ndim(leaf) == 0 else jnp.moveaxis(leaf, 0, axis) for leaf in (a, b))
    init = None if "no init" in how else given["h"]
    if "reset_to" in passed:
        passed["reset_to"] = 2 * given["h"]
    if "padded" in how and lib is not plain:
        b = treescan.Padded(b, jnp.asarray(passed.pop("lengths")))
    return lib.linear_scan(a, b, init, **passed)


VERBS = {"linear_scan": Verb(program, FORMS, GIVEN)}
