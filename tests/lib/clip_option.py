"""An option as a stranger writes it: it clips what the gradient hands from step to step."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from treescan.options import Around, Option


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def clipped(most, leaf):
    return leaf


clipped.defvjp(lambda most, leaf: (leaf, None), lambda most, _, cotangent: (jnp.clip(cotangent, -most, most),))


@dataclass(frozen=True)
class Clip(Option):
    most: float

    def __call__(self, step, consts, state, feed):
        return step(consts, jax.tree.map(functools.partial(clipped, self.most), state), feed)


@dataclass(frozen=True)
class ClipRows(Clip):
    around = Around.MASK


@dataclass(frozen=True)
class ClipOnce(Clip):
    around = Around.REMAT
