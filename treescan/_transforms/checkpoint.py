"""Applies `jax.checkpoint` to steps and chunks, as a `Remat` says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .._avals import is_key
from .._loop.loop import Feed, Loop, Step
from .._loop.rewrite import is_rewriting
from .._loop.sizes import divide
from .._remat import Remat
from .._trace.hoist import Hoisted, merge
from .._trace.smooth import is_smooth
from .._types import PyTree
from .refuse import refuse_symbolic

_CARRY = "treescan carry"

_PRODUCTS = frozenset({"mul", "square", "integer_pow"})
_OF_ONE_ARRAY = frozenset({"add", "sub", "neg", "broadcast_in_dim", "reshape", "squeeze", "transpose"})


@dataclass(frozen=True)
class Checkpointed:
    """A step of which the gradient saves only the inputs, and what the policy selects.

    Attributes:
        step: the inner step.
        looped: whether a loop runs it, where nothing can be merged with the first computation. Elsewhere that has to
            be forbidden to the compiler, or it would save everything after all.
        policy: what else is saved, as for `jax.checkpoint`.
        offload: the memory kind where the state that goes in is kept; None: where it is.
    """

    step: Step
    looped: bool
    policy: Callable[..., Any] | None = None
    offload: str | None = None

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        step, policy = self.step, self.policy
        if policy is not None:
            policy = RealOnly(policy)
        if self.offload is not None and self.looped:
            step, policy = _Named(step), _offloading(policy, self.offload)
        return checkpoint(step, prevent_cse=not self.looped, policy=policy)(consts, state, feed)


def is_remat3() -> bool:
    """Whether JAX's flag `jax_remat3` is on: a new `jax.checkpoint`, which will become the default."""
    return bool(getattr(jax.config, "jax_remat3", False))


def checkpoint(
    function: Callable[..., Any], *, prevent_cse: bool, policy: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`jax.checkpoint`, also under `jax_remat3`, where JAX fails on a result without a cotangent within a loop."""
    if not is_remat3():
        return jax.checkpoint(function, prevent_cse=prevent_cse, policy=policy)

    def with_cotangents(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(function(*args))
        smooth = jax.lax.optimization_barrier([leaf for leaf in leaves if is_smooth(leaf)])
        others = [leaf for leaf in leaves if not is_smooth(leaf)]
        return jax.tree.unflatten(structure, merge(list(map(is_smooth, leaves)), smooth, others))

    return jax.checkpoint(with_cotangents, prevent_cse=prevent_cse, policy=policy)


@dataclass(frozen=True)
class RealOnly:
    """A policy that saves what another does, but no complex number: JAX cannot save one by a policy.

    JAX rounds saved values with `reduce_precision`, which accepts only real numbers
    (`TypeError: reduce_precision does not accept dtype complex64`, in JAX 0.8 to 0.10 at least).
    """

    policy: Callable[..., Any]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        return False if _may_be_complex(prim, avals, params) else self.policy(prim, *avals, **params)


_COMPLEX_OF_REAL = frozenset({"complex", "eig", "fft", "io_callback", "pure_callback", "schur"})


def _may_be_complex(prim: Any, avals: tuple[Any, ...], params: dict[str, Any]) -> bool:
    """Whether a primitive may return complex numbers: from complex inputs, by a parameter, or from real inputs."""
    types = (*(aval.dtype for aval in avals), *(params.get(name) for name in _DTYPES))
    return prim.name in _COMPLEX_OF_REAL or any(_is_complex(dtype) for dtype in types)


_DTYPES = ("new_dtype", "dtype", "preferred_element_type")


def _is_complex(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


@dataclass(frozen=True)
class _Named:
    """A step that names its incoming state, so that policies can refer to it."""

    step: Step

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        named = [leaf if is_key(leaf) else checkpoint_name(leaf, _CARRY) for leaf in jax.tree.leaves(state)]
        return self.step(consts, jax.tree.unflatten(jax.tree.structure(state), named), feed)


def _offloading(policy: Callable[..., Any] | None, kind: str) -> Callable[..., Any]:
    """A policy, and the incoming state moved to another memory."""
    moves = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[_CARRY], offload_src="device", offload_dst=kind
    )

    def both(prim: Any, *args: Any, **params: Any) -> Any:
        return (
            moves(prim, *args, **params)
            if policy is None or params.get("name") == _CARRY
            else policy(prim, *args, **params)
        )

    return both


@dataclass(frozen=True)
class RematChunk:
    """What is put around a chunk that the gradient recomputes.

    Attributes:
        offload: the memory kind where the state that goes in is kept; None: where it is.
        inside: what is put around the chunk before that; None: nothing.
    """

    offload: str | None = None
    inside: Callable[[Step], Step] | None = None
    recomputes = True

    def __call__(self, step: Step, looped: bool) -> Step:
        step = step if self.inside is None else self.inside(step)
        return Checkpointed(step, looped, offload=self.offload)


def save_costly(prim: Any, *avals: Any, **params: Any) -> bool:
    """The default policy of recomputed chunks: it saves everything that is not cheap to compute again.

    Products are not saved, as their derivative needs their factors, nor are cheap functions of one array: as many
    arrays are saved as without, or fewer. Of `tanh` that is its result, and not one minus it as well.
    """
    del params
    arrays = sum(aval.ndim > 0 for aval in avals)
    return prim.name not in _PRODUCTS and not (prim.name in _OF_ONE_ARRAY and arrays == 1)


def checkpoint_steps(loop: Loop, remat: Remat) -> Loop:
    """Saves the carry of each step and what the policy selects. The gradient computes the rest again."""
    return dataclasses.replace(loop, step=checkpoint_step(loop.step, remat, looped=_stays_a_loop(loop)))


def checkpoint_step(step: Step, remat: Remat, *, looped: bool) -> Step:
    """The same for a step by itself."""
    if remat.policy is jax.checkpoint_policies.everything_saveable and not (remat.offload and levels_in(remat) == 1):
        return step
    policy = remat.policy if callable(remat.policy) else None
    return Checkpointed(step, looped, policy, remat.offload if levels_in(remat) == 1 else None)


def _stays_a_loop(loop: Loop) -> bool:
    """Whether XLA runs the steps as a loop. It removes a loop of one step, and would then save everything."""
    single = isinstance(loop.length, int) and loop.length == 1
    return loop.unroll is not True and loop.unroll == 1 and not single


def levels_in(remat: Remat) -> int:
    return remat.levels or (2 if remat.segment else 1)


def remat_sizes(length: int, remat: Remat | None) -> tuple[int, ...]:
    """The ascending sizes of the chunks that the gradient recomputes."""
    if remat is None or levels_in(remat) == 1:
        return ()
    refuse_symbolic(length, "remat")
    return divide(length, levels_in(remat), remat.segment)


def saves_whole_steps(trace: Hoisted, remat: Remat) -> bool:
    """Whether the chunks of a plan save whole steps. Then the products of these steps are computed at once."""
    whole = remat.policy is jax.checkpoint_policies.everything_saveable and levels_in(remat) > 1
    return whole and is_rewriting() and not (trace.effects or trace.refs or trace.reverse_rule)
