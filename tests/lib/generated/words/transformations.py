"""The letters of a word: each makes of a function of floats to a list of arrays another one.

`given` is a dict of floats all the way through. What a derivative is taken by, and in which direction, is made of the
arrays themselves, so that letters may follow each other in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jax.sharding import Mesh, PartitionSpec

import treescan

from .bodies import COUNT
from .verbs import Run

FACTORS = (1.0, 0.8, -0.7)
NAMES = ("w", "h", "x")


def floats(leaves: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]


def loss(leaves: Any) -> Any:
    """A number in which all entries count, none as much as its neighbour."""
    total = jnp.zeros(())
    for leaf in floats(leaves):
        weights = jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape)
        total = total + jnp.sum(leaf * weights) / np.sqrt(leaf.size + 1)
    return total


def direction(tree: Any) -> Any:
    def of(leaf: Any) -> Any:
        still = jnp.where(jnp.isfinite(leaf), 0, 0).astype(leaf.dtype)  # it varies over a mesh as the leaf does
        return still + jnp.sin(jnp.arange(1, leaf.size + 1, dtype=leaf.dtype)).reshape(leaf.shape)

    return jax.tree.map(of, tree)


def scaled(given: Any, by: Any, names: Any = NAMES) -> Any:
    return {name: leaf * jnp.asarray(by).astype(leaf.dtype) if name in names else leaf for name, leaf in given.items()}


# Maps.


def vmap(run: Run, names: tuple[str, ...], axis: str) -> Run:
    """Over elements of some arguments; of none, what is mapped is used after the loop."""

    def mapped(given: Any) -> list[Any]:
        factors = jnp.asarray(FACTORS[:COUNT])
        elements = {name: leaf[None] * factors.astype(leaf.dtype).reshape(-1, *[1] * leaf.ndim) if name in names else leaf
                    for name, leaf in given.items()}  # fmt: skip
        axes = {name: 0 if name in names else None for name in given}

        def one(given: Any, factor: Any) -> list[Any]:
            leaves = run(given)
            if names:
                return leaves
            return [leaf * factor.astype(leaf.dtype) if floats(leaf) else leaf for leaf in leaves]

        return jax.vmap(one, in_axes=(axes, 0), axis_name=axis)(elements, factors)

    return mapped


def lax_map(run: Run) -> Run:
    return lambda given: lax.map(lambda by: run(scaled(given, by)), jnp.asarray(FACTORS))


# Derivatives.


def grad(run: Run, names: tuple[str, ...] = NAMES) -> Run:
    def gradient(given: Any) -> list[Any]:
        own = {name: given[name] for name in names}
        return jax.tree.leaves(jax.value_and_grad(lambda own: loss(run(given | own)))(own))

    return gradient


def jvp(run: Run, names: tuple[str, ...] = NAMES) -> Run:
    def tangents(given: Any) -> list[Any]:
        own = {name: given[name] for name in names}
        return jax.tree.leaves(jax.jvp(lambda own: floats(run(given | own)), (own,), (direction(own),)))

    return tangents


def vjp_of_some(run: Run) -> Run:
    def pulled(given: Any) -> list[Any]:
        out, pull = jax.vjp(lambda given: floats(run(given))[1::2] or floats(run(given)), given)
        return [*out, *jax.tree.leaves(pull(direction(out)))]

    return pulled


def linearize(run: Run) -> Run:
    def linearized(given: Any) -> list[Any]:
        out, push = jax.linearize(lambda given: floats(run(given)), given)
        return [*out, *push(direction(given)), *push(scaled(direction(given), 0.5))]

    return linearized


def hessian(run: Run) -> Run:
    """Along two directions: of the weights and the init, and of x."""

    def second(given: Any) -> list[Any]:
        along = direction(given)

        def of(s: Any) -> Any:
            moved = {name: leaf + s[int(name == "x")].astype(leaf.dtype) * along[name] for name, leaf in given.items()}
            return loss(run(moved))

        return [jax.hessian(of)(jnp.zeros(2, given["h"].dtype))]

    return second


def linear_transpose(run: Run) -> Run:
    def transposed(given: Any) -> list[Any]:
        own = {"h": given["h"], "x": given["x"]}

        def function(own: Any) -> Any:
            return floats(run({"w": given["w"], **own}))

        return jax.tree.leaves(jax.linear_transpose(function, own)(direction(function(own))))

    return transposed


# What a user puts around a loop.


def custom_jvp(run: Run) -> Run:
    own = jax.custom_jvp(lambda given: floats(run(given)))
    own.defjvp(lambda primals, tangents: jax.jvp(lambda given: floats(run(given)), primals, tangents))
    return own


def custom_vjp(run: Run) -> Run:
    own = jax.custom_vjp(lambda given: floats(run(given)))
    own.defvjp(
        lambda given: jax.vjp(lambda given: floats(run(given)), given), lambda pull, cotangents: pull(cotangents)
    )
    return own


def loop_as_rule(run: Run) -> Run:
    """A function whose rule runs the loop on tangents, as that of an implicit solve does."""

    def of(weights: Any, own: Any) -> list[Any]:
        return floats(run({"w": weights, **own}))

    def with_rule(given: Any) -> list[Any]:
        weights, own = given["w"], {"h": given["h"], "x": given["x"]}
        function = jax.custom_jvp(lambda weights, own: of(weights, own))
        function.defjvp(lambda p, t: (of(*p), of(p[0], t[1])))
        return jax.tree.leaves(jax.value_and_grad(lambda own: loss(function(weights, own)))(own))

    return with_rule


def checkpoint(run: Run) -> Run:
    return jax.checkpoint(run)


# Within other loops and branches.


def in_scan(run: Run) -> Run:
    """In a loop whose carry depends on the results."""

    def outer(given: Any) -> list[Any]:
        def step(carry: Any, by: Any) -> Any:
            leaves = run(scaled(given, by) | {"h": carry})
            return jnp.tanh(carry + 0.01 * loss(leaves).astype(carry.dtype)), leaves

        last, leaves = lax.scan(step, given["h"], jnp.asarray(FACTORS[:2]))
        return [last, *leaves]

    return outer


def in_own_scan(run: Run, by_hand: bool, **options: Any) -> Run:
    """The same in a loop of the library."""

    def outer(given: Any) -> list[Any]:
        def step(carry: Any, by: Any) -> Any:
            leaves = run(given | {"h": carry * by.astype(carry.dtype)})
            return jnp.tanh(carry + 0.01 * loss(leaves).astype(carry.dtype)), leaves

        of = lax.scan if by_hand else functools.partial(treescan.scan, **options)
        last, leaves = of(step, given["h"], jnp.asarray(FACTORS[:2]))
        return [last, *leaves]

    return outer


def in_own_while(run: Run, by_hand: bool) -> Run:
    """In a `while_scan` that takes two of three steps."""

    def outer(given: Any) -> list[Any]:
        def step(carry: Any, _: Any = None) -> Any:
            count, h = carry
            return (count + 1, jnp.tanh(h + 0.01 * loss(run(given | {"h": h})).astype(h.dtype))), None

        if by_hand:
            return [lax.scan(step, (0, given["h"]), length=2)[0][1]]
        return [treescan.while_scan(lambda carry: carry[0] < 2, step, (0, given["h"]), max_length=3).carry[1]]

    return outer


def in_cond(run: Run) -> Run:
    def outer(given: Any) -> list[Any]:
        return lax.cond(jnp.sum(given["h"]) > -99, run, lambda given: run(scaled(given, 0.5)), given)

    return outer


def in_while_loop(run: Run) -> Run:
    """It is not differentiated in reverse, by hand either."""

    def outer(given: Any) -> list[Any]:
        def step(state: Any) -> Any:
            count, h = state
            return count + 1, jnp.tanh(h + 0.01 * loss(run(given | {"h": h})).astype(h.dtype))

        return [lax.while_loop(lambda state: state[0] < 2, step, (0, given["h"]))[1]]

    return outer


def sharded(run: Run, split: tuple[str, ...], *, check: bool = True) -> Run:
    """On one device: some arguments are split over rows or weights, and others are the same everywhere."""

    def outer(given: Any) -> list[Any]:
        mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
        specs = {name: (PartitionSpec(None, "d") if name == "x" else PartitionSpec("d")) if name in split else PartitionSpec() for name in given}  # fmt: skip

        def local(given: Any) -> list[Any]:
            return [leaf[None] for leaf in run(given)]

        return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("d"), check_vma=check)(given)

    return outer


# What surrounds a whole program.


def compiled(run: Run) -> Run:
    return lambda given: jax.jit(run).lower(given).compile()(given)


def exported(run: Run) -> Run:
    def outer(given: Any) -> list[Any]:
        return jax.export.export(jax.jit(run))(given).call(given)

    return outer


def checked(run: Run) -> Run:
    def outer(given: Any) -> list[Any]:
        error, leaves = checkify.checkify(run, errors=checkify.float_checks)(given)
        if error.get() is not None:
            raise FloatingPointError(error.get().splitlines()[0])
        return leaves

    return outer


def within(context: Callable[[], Any], run: Run) -> Run:
    def outer(given: Any) -> list[Any]:
        with context():
            return jax.block_until_ready(run(given))

    return outer


SPLITS = {"shard_map": ("h", "x"), "shard_map x": ("x",), "shard_map w": ("w", "h", "x")}
INNER: dict[str, Callable[..., Run]] = {
    "jit": jax.jit,
    **{f"grad {name}": functools.partial(grad, names=(name,)) for name in NAMES},
    "grad": grad,
    **{f"jvp {name}": functools.partial(jvp, names=(name,)) for name in NAMES},
    "jvp": jvp,
    "vjp of some": vjp_of_some,
    "linearize": linearize,
    "hessian": hessian,
    "checkpoint": checkpoint,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "linear_transpose": linear_transpose,
    "loop as rule": loop_as_rule,
    "in scan": in_scan,
    "in map": lax_map,
    "in cond": in_cond,
    "in while_loop": in_while_loop,
    **{name: functools.partial(sharded, split=split) for name, split in SPLITS.items()},
    "shard_map without vma": functools.partial(sharded, split=("h", "x"), check=False),
}
OF_LIBRARY: dict[str, Callable[..., Run]] = {
    "in treescan.scan": in_own_scan,
    "in treescan.scan, remat": functools.partial(in_own_scan, remat="step"),
    "in treescan.while_scan": in_own_while,
}
MAPS = {f"vmap {'-'.join(names) or 'none'}": names for names in (("w",), ("h",), ("x",), NAMES, ())}
OUTER: dict[str, Callable[..., Run]] = {
    "AOT": compiled,
    "export": exported,
    "checkify": checked,
    "debug_nans": lambda run: within(lambda: jax.debug_nans(True), run),
    "disable_jit": lambda run: within(jax.disable_jit, run),
}
LETTERS = (*INNER, *OF_LIBRARY, *MAPS, *OUTER)
KEEP_LINEAR = ("jit", "checkpoint", "in cond", "in map", "shard_map", "shard_map x", "shard_map without vma", *MAPS)
"""What leaves a linear function linear."""
SECOND, REVERSE = ("hessian",), ("grad", "vjp of some", "hessian", "custom_vjp", "linear_transpose", "loop as rule", "linearize")  # fmt: skip


def spelled(word: tuple[str, ...], run: Run, *, by_hand: bool) -> Run:
    """The function under a word, whose first letter is the outermost."""
    axes = iter(("i", "j", "k", "l", "m"))
    for letter in reversed(word):
        if letter in MAPS:
            run = vmap(run, MAPS[letter], next(axes))
        elif letter in OF_LIBRARY:
            run = OF_LIBRARY[letter](run, by_hand)
        else:
            run = {**INNER, **OUTER}[letter](run)
    return run
