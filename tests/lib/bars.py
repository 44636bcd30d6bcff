"""A meter that notes what it is told, what each bar was told, and the loop that the tests of bars share."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import treescan
from treescan.meters import Progress

LOG = []
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Recorder(treescan.meters.AbstractProgressMeter):
    """Notes what it is told, with the number of the bar."""

    def init(self, label, total):
        bar = next(_numbers)
        LOG.append((bar, "init", label, total))
        return bar

    def step(self, bar, done, shown):
        LOG.append((bar, "step", done, dict(shown)))

    def close(self, bar):
        LOG.append((bar, "close"))


def noted(log, run):
    """What a call adds to a list while it runs, and the result."""
    jax.effects_barrier()
    log.clear()
    result = jax.block_until_ready(run())
    jax.effects_barrier()
    return list(log), result


def bars(run):
    """What each bar was told, in the order in which they began: its total, (steps done, shown), whether it closed."""
    found = {}
    for bar, kind, *rest in noted(LOG, run)[0]:
        if kind == "init":
            found[bar] = (rest[1], [], [])
        elif kind == "step":
            assert not found[bar][2], "told after it was closed"
            found[bar][1].append(tuple(rest))
        else:
            found[bar][2].append("close")
    assert all(closed == ["close"] for _, _, closed in found.values())
    return [(total, steps) for total, steps, _ in found.values()]


def steps_of(run):
    """The steps that the only bar was told of, and its total."""
    ((total, steps),) = bars(run)
    return total, [done for done, _ in steps]


def progress(updates=4, **options):
    return Progress("loop", updates=updates, meter=Recorder(), **options)


def labels():
    """Those of the bars, in the order in which they began."""
    return [entry[2] for entry in LOG if entry[1] == "init"]


T, D = 12, 3
W = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (D, D)), jnp.float32)
H = jnp.linspace(0.1, 1, D)
BATCH = jnp.stack([H, H * 2, H / 2])
XS = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (T, D)), jnp.float32)


def step(carry, x):
    h = jnp.tanh(carry["h"] @ W + x)
    return {"h": h, "n": carry["n"] + 1}, h * 2


def init(h=H):
    return {"h": h, "n": jnp.int32(0)}


def _without_jit(function):
    with jax.disable_jit():
        return function(H)


TRANSFORMS = {  # of a loss of h
    "vmap": lambda f: jax.vmap(f)(BATCH),
    "jvp": lambda f: jax.jvp(f, (H,), (H,)),
    "grad": lambda f: jax.grad(f)(H),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(H),
    "vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(f)))(BATCH),
    "grad of vmap": lambda f: jax.jit(jax.grad(lambda b: jnp.sum(jax.vmap(f)(b))))(BATCH),
    "grad of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f)))(H),
    "eager grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f))(H),
    "vmap of grad of checkpoint": lambda f: jax.jit(jax.vmap(jax.grad(jax.checkpoint(f))))(BATCH),
    "grad of checkpoint in a loss": lambda f: jax.grad(jax.checkpoint(lambda h: jnp.sin(f(jnp.sin(h)))))(H),
    "hessian": lambda f: jax.jit(jax.hessian(f))(H),
    "grad without jit": lambda f: _without_jit(jax.grad(f)),
}
