"""The arrays of a program: random data where steps are valid, and what the program says elsewhere."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .programs import Leaf, Program, Type

PADDING = {"nan": np.nan, "zero": 0.0, "inf": np.inf, "minus one": -1.0}


class Flags(NamedTuple):
    """Which steps are valid and which begin a segment, [T, *batch]; and the arguments that say so."""

    valid: np.ndarray
    resets: np.ndarray
    given: tuple[np.ndarray, ...]


class Element(NamedTuple):
    """The arguments of one call, flat lists."""

    init: list[Any]
    xs: list[Any]
    weights: list[Any]
    flags: Flags


def dtype_of(program: Program, kind: str) -> Any:
    wide = program.dtype == "float64"
    return jnp.dtype({"f": program.dtype, "c": "complex128" if wide else "complex64", "i": "int32", "b": "bool"}[kind])


def full_shape(program: Program, leaf: Leaf) -> tuple[int, ...]:
    shape = leaf.type.shape
    if leaf.type.rows:
        axis = leaf.axis or 0
        shape = (*shape[:axis], *program.batch, *shape[axis:])
    return (2, *shape) if leaf.custom == "window" else shape


def row_axis(program: Program, leaf: Leaf) -> int | None:
    """Where the batch shape starts in an array."""
    return None if not leaf.type.rows else (leaf.axis or 0) + (leaf.custom == "window")


def random_array(rng: np.random.Generator, program: Program, kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    if kind.kind == "i":
        return rng.integers(0, 4, shape).astype(np.int32)
    values = rng.uniform(0.5, 2, shape) if kind.positive else rng.normal(size=shape) * 0.8
    if kind.kind == "c":
        values = values + 0.8j * rng.normal(size=shape)
    return np.asarray(values).astype(dtype_of(program, kind.kind))


def random_flags(rng: np.random.Generator, program: Program) -> Flags:
    shape = (program.steps, *program.batch)
    steps, resets = program.steps, np.zeros(shape, bool)
    lead = np.arange(steps).reshape(-1, *(1 for _ in program.batch))
    if program.verb == "while_scan":
        batch = program.batch if program.by_rows else ()
        limit = np.asarray(rng.choice([steps, max(steps - 1, 0), 0, *rng.integers(0, steps + 1, 3)], batch), np.int32)
        order = lead[::-1] if program.option("reverse") else lead
        return Flags(np.array(np.broadcast_to(order < limit, shape)), resets, (limit,))
    if "resets" in program.flags:
        resets = rng.random(shape) < rng.choice([0.15, 0.4])
    if "lengths" in program.flags:
        lengths = rng.choice([0, min(1, steps), steps, *rng.integers(0, steps + 1, 4)], program.batch).astype(np.int32)
        if rng.random() < 0.1:
            lengths = np.zeros_like(lengths)
        valid, first = lead < lengths, [np.asarray(lengths, np.int32)]
    elif "mask" in program.flags:
        valid = rng.random(shape) < rng.choice([0.3, 0.7, 0.9])
        if program.batch:
            valid &= rng.random(program.batch) < 0.8
        first = [valid]
    else:
        valid, first = np.ones(shape, bool), []
    given = first + ([resets] if "resets" in program.flags else [])
    return Flags(np.broadcast_to(valid, shape), resets, tuple(given))


def _spoil(rng: np.random.Generator, program: Program, kind: Type, array: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """The array with padding where `bad`, which broadcasts."""
    if program.padding == "random" or kind.kind == "b":
        return array
    value = -1 if kind.kind == "i" else PADDING[program.padding]
    return np.where(bad, np.asarray(value, array.dtype), array)


def _expand(flags: np.ndarray, axis: int, rank: int, batch: int) -> np.ndarray:
    """[*batch] flags for an array in which the batch starts at an axis."""
    return flags.reshape((1,) * axis + flags.shape + (1,) * (rank - axis - batch))


def element(rng: np.random.Generator, program: Program, shared: Element | None = None) -> Element:
    """Arguments; those that are not mapped are of `shared`."""
    flags = random_flags(rng, program)
    valid, n = flags.valid, len(program.batch)
    some = valid.any(axis=0)
    none = not valid.any()
    init, xs, weights = [], [], []
    for i, leaf in enumerate(program.carry):
        array = random_array(rng, program, leaf.type, full_shape(program, leaf))
        if program.verb == "while_scan" and i == len(program.carry) - 1:
            array = -flags.given[0] if program.by_rows else np.zeros((), np.int32)
        own = leaf.mapped or shared is None
        if leaf.type.rows and not leaf.custom and program.verb == "mask_scan" and leaf.mapped:
            array = _spoil(rng, program, leaf.type, array, _expand(~some, leaf.axis or 0, array.ndim, n))
        init.append(array if own else shared.init[i])
    for i, leaf in enumerate(program.xs):
        array = _x(rng, program, leaf, valid)
        xs.append(array if leaf.mapped or shared is None else shared.xs[i])
    for i, leaf in enumerate(program.weights):
        array = random_array(rng, program, leaf.type, leaf.type.shape)
        if none and leaf.mapped and program.verb == "mask_scan":
            array = _spoil(rng, program, leaf.type, array, np.ones((), bool))
        weights.append(array if leaf.mapped or shared is None else shared.weights[i])
    return Element(init, xs, weights, flags)


def _x(rng: np.random.Generator, program: Program, leaf: Leaf, valid: np.ndarray) -> np.ndarray:
    n, shape = len(program.batch), full_shape(program, leaf)
    if program.verb == "fori":
        return np.arange(program.steps, dtype=np.int32)
    if leaf.whole:
        array = random_array(rng, program, leaf.type, shape)
        bad = (
            _expand(~valid.any(axis=0), leaf.axis or 0, array.ndim, n) if leaf.type.rows else np.array(not valid.any())
        )
        return _spoil(rng, program, leaf.type, array, bad) if leaf.mapped else array
    array = random_array(rng, program, leaf.type, (program.steps, *shape))
    if leaf.type.rows:
        bad = _expand_steps(~valid, leaf.axis or 0, array.ndim)
    else:
        bad = ~valid.any(axis=tuple(range(1, valid.ndim)))
        bad = bad.reshape(-1, *(1 for _ in shape))
    return _spoil(rng, program, leaf.type, array, bad) if leaf.mapped else array


def _expand_steps(flags: np.ndarray, axis: int, rank: int) -> np.ndarray:
    steps, batch = flags.shape[0], flags.shape[1:]
    return flags.reshape((steps,) + (1,) * axis + batch + (1,) * (rank - 1 - axis - len(batch)))
