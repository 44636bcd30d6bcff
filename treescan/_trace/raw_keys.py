"""Loops under JAX's key-reuse checker (`jax_debug_key_reuse`): their keys travel as numbers.

A mask selects between a key and another one, a checkpoint computes a step again: both count as a second use of the key,
though no step draws from it twice. The checker knows keys only by their type. So a step makes its keys from numbers,
and the checker sees what the body does with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from .._avals import PyTree, is_key
from .._loop.feed import Feed
from .._loop.loop import Loop, Step
from .._loop.run import checks_key_reuse
from .._tree import map_leaves

Impls = tuple[Any, ...]
"""For each leaf of a tree the implementation of its keys; None: it holds none."""


def with_raw_keys(loop: Loop) -> Loop:
    """The loop with numbers in place of keys. If the checker is off, or there are no keys, it does not change."""
    trees = [(turn.consts, turn.state, turn.xs) for turn in loop.each]
    if not checks_key_reuse() or not any(map(_is_key, jax.tree.leaves(trees))):
        return loop
    turns, of_state = list[Loop](), impls_of(loop.state)
    for turn, given in zip(loop.each, trees, strict=True):
        step, (consts, state, xs) = _WithKeys(turn.step, *map(impls_of, given)), map(raw, given)
        turns.append(turn.having(step=step, consts=consts, state=state, xs=xs))
    return loop.with_turns(turns).finished(lambda state: keys_of(state, of_state))


def raw(tree: PyTree) -> PyTree:
    """A tree with numbers in place of keys, if the checker is on."""
    return as_numbers(tree) if checks_key_reuse() else tree


def as_numbers(tree: PyTree) -> PyTree:
    """A tree with numbers in place of keys."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


@dataclass(frozen=True)
class _WithKeys:
    """The step that makes keys of numbers, for its consts, its state and what it is fed."""

    step: Step
    consts: Impls
    state: Impls
    feed: Impls

    def __call__(self, consts: PyTree, state: PyTree, feed: Feed) -> tuple[PyTree, PyTree]:
        given = keys_of(consts, self.consts), keys_of(state, self.state), keys_of(feed, self.feed)
        known = dict(zip(map(id, jax.tree.leaves(given[1])), jax.tree.leaves(state), strict=True))
        new, y = self.step(*given)
        # A key that is handed on is the same object again, so that the loop can tell that it does not change.
        return jax.tree.map(lambda leaf: known.get(id(leaf), raw(leaf)), new), y


def impls_of(tree: PyTree) -> Impls:
    """How to make keys again of what `as_numbers` returns."""
    return tuple(jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in jax.tree.leaves(tree))


def keys_of(tree: PyTree, impls: Impls) -> PyTree:
    """The tree with its keys, from one with numbers in their places."""

    def key_of(leaf: Any, impl: Any) -> Any:  # what takes the place of a leaf, for example its number, is handed on
        return leaf if impl is None or not hasattr(leaf, "dtype") else jax.random.wrap_key_data(leaf, impl=impl)

    return map_leaves(key_of, tree, impls)


def _is_key(leaf: object) -> bool:
    return hasattr(leaf, "dtype") and is_key(leaf)
