"""Results and gradients against those of a loop that is written by hand."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from loops import loss_of


def derived(run: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The results, and the gradient of a function of them all, of each floating leaf of `args`."""
    loss, floats = loss_of(run, *args)
    return jax.tree.map(jnp.asarray, run(*args)), jax.grad(loss)(floats)


compiled_and_derived = functools.partial(jax.jit, static_argnums=0)(derived)


def masked_by_hand(body: Callable[..., Any], init: Any, xs: Any, mask: Any, *, reverse: bool = False) -> Any:
    """What everyone writes: each step is run, and `where` drops it. Of use as long as nothing in the padding is bad."""

    def step(carry: Any, given: Any) -> tuple[Any, Any]:
        x, valid = given

        def keep(new: Any, old: Any) -> Any:
            return jnp.where(valid.reshape(valid.shape + (1,) * (new.ndim - valid.ndim)), new, old)

        new, y = body(carry, x)
        return jax.tree.map(keep, new, carry), jax.tree.map(lambda leaf: keep(leaf, jnp.zeros_like(leaf)), y)

    return jax.lax.scan(step, init, (xs, jnp.asarray(mask)), reverse=reverse)
