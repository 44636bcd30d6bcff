"""What a program means: a Python loop over steps and rows, each row by itself, and the chain rule by hand.

No padding is touched and no loop of the library is used. The body is compiled once for a single row.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from treescan.carries import read_tree, write_tree

from .data import Element, dtype_of, full_shape, row_axis
from .programs import Program


class Place(NamedTuple):
    """Where a leaf's rows are; None: it has none."""

    axis: int | None
    batch: int

    def index(self, row: tuple[int, ...]) -> tuple[Any, ...]:
        if self.axis is None:
            return (...,)
        return (*(slice(None),) * self.axis, *(slice(i, i + 1) for i in row))


def wide(array: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    return array.astype(np.float64)


def inexact(array: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(array), jnp.inexact)


class Step:
    """One step of one row, and its vjp, compiled. Leaves: of the carry, of x, weights; then the key."""

    def __init__(self, program: Program, make_body: Any, make_init: Any) -> None:
        like = carry_types(program.replace(batch=(1,) * len(program.batch)))
        structure = jax.tree.structure(jax.eval_shape(make_init, like))

        def step(init_leaves: list[Any], x: list[Any], weights: list[Any], position: Any) -> Any:
            carry = jax.tree.unflatten(structure, init_leaves)
            keywords: dict[str, Any] = {}
            if program.keyed:
                keywords["key"] = jax.random.fold_in(jax.random.key(7), position)
            if program.valid:
                keywords["valid"] = jnp.ones((1,) * len(program.batch), bool)
            seen = tuple(read_tree(part) for part in carry)
            new, ys = make_body(*weights)(seen, tuple(x), **keywords)
            written = tuple(write_tree(old, part) for old, part in zip(carry, new, strict=True))
            leaves = jax.tree.leaves(written)
            if program.verb == "accumulate":
                ys = leaves
            return [jnp.asarray(a) for a in leaves], [jnp.asarray(a) for a in ys]

        def pull(init_leaves: Any, x: Any, weights: Any, position: Any, cots: Any) -> Any:
            inputs = [*init_leaves, *x, *weights]
            n, m = len(init_leaves), len(init_leaves) + len(program.xs)

            def outputs(floats: Any) -> Any:
                left = iter(floats)
                merged = [next(left) if inexact(a) else a for a in inputs]
                new, ys = step(merged[:n], merged[n:m], merged[m:], position)
                return [a for a in (*new, *ys) if inexact(a)]

            return jax.vjp(outputs, [a for a in inputs if inexact(a)])[1](cots)[0]

        self.forward, self.pull = jax.jit(step), jax.jit(pull)


def carry_types(program: Program) -> list[Any]:
    return [jax.ShapeDtypeStruct(full_shape(program, x), dtype_of(program, x.type.kind)) for x in program.carry]


class Record(NamedTuple):
    step: int
    row: tuple[int, ...]
    inputs: Any
    reset: bool
    cut: bool
    cut_all: bool
    first: bool  # of the rows that are valid in this step


class Plain:
    """The loop over one element."""

    def __init__(self, program: Program, names: dict[str, Any]) -> None:
        self.program, self.names = program, names
        self.step = Step(program, names["make_body"], names["make_init"])
        n = len(program.batch)
        self.rows = list(itertools.product(*map(range, program.batch)))
        places, fixed = [], []
        examples = jax.eval_shape(names["make_init"], carry_types(program))
        for leaf, example in zip(program.carry, examples, strict=True):  # each field of a custom carry
            fields = jax.tree.leaves(example)
            axis = row_axis(program, leaf)
            places.append([Place(axis if np.ndim(field) else axis if not n and leaf.type.rows else None, n)
                           if not leaf.custom or np.ndim(field) or not n else Place(None, n) for field in fields])  # fmt: skip
            fixed.append([leaf.fixed] * len(fields))
        self.carry = [place for group in places for place in group]
        self.fixed = [is_fixed for group in fixed for is_fixed in group]
        self.xs = [Place(row_axis(program, leaf), n) for leaf in program.xs]
        self.ys = [Place(leaf.axis, n) for leaf in program.ys]
        if program.verb == "accumulate":
            self.ys = list(self.carry)

    def order(self) -> list[int]:
        steps = list(range(self.program.steps))
        return steps[::-1] if self.program.option("reverse") else steps

    def leaves(self, element: Element) -> list[np.ndarray]:
        if not any(leaf.custom for leaf in self.program.carry):
            return [np.asarray(a) for a in element.init]
        return [np.asarray(a) for a in jax.tree.leaves(self.names["make_init"]([jnp.asarray(a) for a in element.init]))]

    def run(self, element: Element) -> tuple[list[Any], list[Any], list[Record]]:
        """Final leaves, ys for each position (a dict from (step, row)), and what happened."""
        program, (valid, resets, _) = self.program, element.flags
        rows, init = self.rows, self.leaves(element)
        state = [np.array(leaf) for leaf in init]
        starts = [np.asarray(leaf * self.of_init(leaf)).astype(leaf.dtype) for leaf in init]
        ys: dict[Any, list[np.ndarray]] = {}
        records, before = [], dict.fromkeys(rows)
        any_valid = valid.any(axis=tuple(range(1, valid.ndim)))
        stretches, of_all = self._stretches(valid, resets), self._stretches(any_valid, np.zeros_like(any_valid))
        before_all = None
        for t in self.order():
            shared = [np.array(leaf) for leaf in state]
            first = True
            for row in rows:
                if not valid[(t, *row)]:
                    continue
                last = before[row]
                flag = t if not program.option("reverse") else last
                reset = flag is not None and bool(resets[(flag, *row)])
                cut = last is not None and stretches[(last, *row)] != stretches[(t, *row)]
                carry = []
                for leaf, new, place in zip(starts, shared, self.carry, strict=True):
                    source = leaf if reset and place.axis is not None else new
                    carry.append(source[place.index(row)])
                x = [(np.asarray(a) if leaf.whole else np.asarray(a)[t])[place.index(row)]
                     for a, place, leaf in zip(element.xs, self.xs, program.xs, strict=True)]  # fmt: skip
                inputs = (carry, x, element.weights, np.int32(t))
                new, out = self.step.forward(*inputs)
                for leaf, value, place in zip(state, new, self.carry, strict=True):
                    if place.axis is not None or first:
                        leaf[place.index(row)] = np.asarray(value)
                ys[(t, row)] = [np.asarray(a) for a in out]
                cut_all = before_all is not None and of_all[before_all] != of_all[t]
                records.append(Record(t, row, inputs, reset, cut, cut_all, first))
                before[row], first = t, False
            before_all = before_all if first else t
        return state, ys, records

    def of_init(self, leaf: Any) -> float:
        """How much of a leaf of `init` a segment begins from."""
        return 0.5 if self.program.reset_to and inexact(leaf) else 1

    def _stretches(self, valid: np.ndarray, resets: np.ndarray) -> np.ndarray:
        """The stretch of `truncate` in which each step lies, by the valid steps of its segment that are before it."""
        begins = np.maximum.accumulate(np.where(resets & valid, np.cumsum(valid, 0) - 1, 0), 0)
        return (np.cumsum(valid, 0) - 1 - begins) // int(self.program.option("truncate") or valid.shape[0] + 1)

    # Outputs.

    def _places(self, element: Element, number: int) -> list[tuple[Any, tuple[int, ...], int | None]]:
        """For each entry of an output: (its index in the leaf, the row, the step that it comes from, or None)."""
        program, valid, place = self.program, element.flags.valid, self.ys[number]
        keep = program.save[number] if program.save else "all"
        fill = program.fill[number] if program.fill else 0
        shared = place.axis is None and bool(program.batch)  # of the first row that is valid
        seen = valid.any(axis=tuple(range(1, valid.ndim)), keepdims=True) if shared else valid
        source, last = np.full(seen.shape, -1), np.full(seen.shape[1:], -1)
        for t in self.order():  # the last valid step so far, or -1
            last = np.where(seen[t], t, last)
            source[t] = last
        keep = 1 if keep == "all" else keep
        positions = [None] if keep == "last" else keep
        if not isinstance(keep, str | range):
            positions = range(program.steps)[keep - 1 :: keep]
        found = []
        for (at, t), row in itertools.product(enumerate(positions), self.rows[:1] if shared else self.rows):
            step = int(last[row] if t is None else source[(t, *row)])
            taken = step >= 0 and (t is None or fill == "hold" or seen[(t, *row)])
            lead = () if t is None else (at,)
            index = (*lead, *place.index(row))
            if shared and taken:
                row = next(r for r in self.rows if valid[(step, *r)])
            found.append((index, row, step if taken else None))
        return found

    def kept(self) -> list[int]:
        program = self.program
        if program.verb == "accumulate":
            return list(range(len(self.carry)))
        return [i for i, keep in enumerate(program.save) if keep is not None]

    def stacked(self, element: Element, ys: Any, types: list[Any]) -> list[np.ndarray]:
        """Outputs as the verb lays them out; `types` are those of the arrays that are wanted."""
        results = []
        for number, kind in zip(self.kept(), types, strict=True):
            fill = self.program.fill[number] if self.program.fill else 0
            array = np.full(kind.shape, 0 if fill == "hold" else fill, np.dtype(kind.dtype))
            for index, row, step in self._places(element, number):
                if step is not None:
                    array[index] = ys[(step, row)][number]
            results.append(array)
        return results

    def gradient(self, element: Element, records: list[Record], cots: tuple[list[Any], list[Any]]) -> tuple[Any, ...]:
        """Of init (its leaves), xs and weights, for cotangents of the final leaves and of the outputs that are kept."""
        program = self.program
        init = self.leaves(element)
        to_state = [wide(c) if inexact(leaf) else None for leaf, c in zip(init, cots[0], strict=True)]
        to_init = [None if not inexact(leaf) else np.zeros_like(wide(leaf)) for leaf in init]
        to_xs = [np.zeros_like(wide(a)) if inexact(a) else None for a in element.xs]
        to_weights = [np.zeros_like(wide(a)) if inexact(a) else None for a in element.weights]
        to_ys: dict[Any, dict[int, Any]] = {}
        for number, cot in zip(self.kept(), cots[1], strict=True):
            if cot is None:
                continue
            for index, row, step in self._places(element, number):
                if step is not None:
                    at = to_ys.setdefault((step, row), {})
                    at[number] = at.get(number, 0) + wide(cot[index])
        for t, group in itertools.groupby(reversed(records), key=lambda record: record.step):
            group = list(group)
            shared = [None if c is None or p.axis is not None else np.zeros_like(c)
                      for c, p in zip(to_state, self.carry, strict=True)]  # fmt: skip
            for record in group:
                (carry, x, weights, position), row = record.inputs, record.row
                of_ys = to_ys.get((t, row), {})
                out, new_cots = self._types(record), []
                for leaf, c, place in zip(out[0], to_state, self.carry, strict=True):
                    if c is not None:
                        part = c[place.index(row)] if place.axis is not None or record.first else np.zeros_like(c)
                        new_cots.append(np.asarray(part).astype(leaf.dtype))
                for number, leaf in enumerate(out[1]):
                    if inexact(leaf):
                        part = of_ys.get(number, 0)
                        new_cots.append(np.broadcast_to(np.asarray(part), leaf.shape).astype(leaf.dtype))
                found = iter(self.step.pull(carry, x, weights, position, new_cots))
                for i, place in enumerate(self.carry):
                    if to_state[i] is None:
                        continue
                    g = wide(next(found))
                    if place.axis is None:
                        shared[i] += g
                    elif record.reset:
                        to_init[i][place.index(row)] += self.of_init(init[i]) * g
                        to_state[i][place.index(row)] = 0
                    else:
                        to_state[i][place.index(row)] = 0 if record.cut and not self.fixed[i] else g
                for i, (place, leaf) in enumerate(zip(self.xs, program.xs, strict=True)):
                    if to_xs[i] is not None:
                        index = place.index(row) if leaf.whole else (t, *place.index(row))
                        to_xs[i][index] += wide(next(found))
                for i in range(len(weights)):
                    if to_weights[i] is not None:
                        to_weights[i] += wide(next(found))
            for i, g in enumerate(shared):
                if g is not None:
                    to_state[i] = np.zeros_like(g) if group[0].cut_all and not self.fixed[i] else g
        for i, c in enumerate(to_state):
            if c is not None:
                to_init[i] += c
        return to_init, to_xs, to_weights

    def _types(self, record: Record) -> Any:
        if not hasattr(self, "_known"):
            self._known = jax.eval_shape(self.step.forward, *record.inputs)
        return self._known
