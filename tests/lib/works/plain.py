"""The plain meaning of each verb: Python's `for`, one step at a time, with the verb's own parameters.

These are written to be read, and are slow. Options that change the cost and no value (`unroll`, `remat`, `chunk`,
`compact`, `name`) are taken and not looked at: that they change nothing is what the table shows.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Body = Callable[..., Any]


# Trees.


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | float | int)


def spread(prefix: Any, tree: Any) -> list[Any]:
    """What a prefix tree says of each leaf."""
    nodes = jax.tree.map(
        lambda value, node: [value] * len(jax.tree.leaves(node)), prefix, tree, is_leaf=lambda leaf: leaf is None
    )
    return [value for values in jax.tree.leaves(nodes, is_leaf=lambda node: type(node) is list) for value in values]


def each(function: Callable[..., Any], tree: Any, *prefixes: Any) -> Any:
    """The function of every array, with what each prefix tree says of it."""
    leaves, structure = jax.tree.flatten(tree)
    said = [spread(prefix, tree) for prefix in prefixes]
    return structure.unflatten(
        [function(leaf, *of) if is_array(leaf) else leaf for leaf, *of in zip(leaves, *said, strict=True)]
    )


def at(tree: Any, axes: Any, position: int) -> Any:
    """One step of each leaf, along its axis; None: the whole leaf."""
    return each(lambda leaf, axis: leaf if axis is None else jnp.take(leaf, position, axis=axis), tree, axes)


def steps_in(xs: Any, axes: Any) -> int | None:
    sizes = [
        leaf.shape[axis] for leaf, axis in zip(jax.tree.leaves(xs), spread(axes, xs), strict=True) if axis is not None
    ]
    return sizes[0] if sizes else None


def keyword(key: Any, number: int) -> dict[str, Any]:
    return {} if key is None else {"key": jax.random.fold_in(key, number)}


def kept(ys: Sequence[Any], last: Any, save: Any, out_axes: Any) -> Any:
    """What `save` leaves of the outputs, leaf by leaf. `ys` are in the order of positions, `last` ran last."""
    structure, kinds = jax.tree.structure(last), spread(save, last)
    found = []
    for n, (kind, axis) in enumerate(zip(kinds, spread(out_axes, last), strict=True)):
        steps = [jax.tree.leaves(y)[n] for y in ys]
        if isinstance(kind, range | np.ndarray):
            found.append(stack([steps[position] for position in kind], jax.tree.leaves(last)[n], axis))
        elif kind == "last":
            found.append(jax.tree.leaves(last)[n])
        elif kind is None:
            found.append(None)
        else:
            every = 1 if kind == "all" else kind
            some = steps[every - 1 :: every]
            found.append(some[0] if axis is None else stack(some, jax.tree.leaves(last)[n], axis))
    return jax.tree.unflatten(structure, found)


def stack(leaves: Sequence[Any], like: Any, axis: int) -> Any:
    """The leaves along an axis, of which there may be none."""
    return jnp.stack(leaves, axis) if leaves else jnp.take(jnp.expand_dims(like, axis), np.array([], int), axis=axis)


def crosses(before: int | None, now: int, truncate: int | None) -> bool:
    """Whether two steps that run one after the other lie in different stretches of `truncate`."""
    return truncate is not None and before is not None and before // truncate != now // truncate


# Options of strangers.


def by_options(options: Iterable[Any], carry: Any, position: int) -> Any:
    """The carry that a body is given: as each option leaves it, the last one first."""
    for option in reversed(list(options)):
        carry = option.plainly(carry, position)
    return carry


# scan, fold, accumulate, fori.


def scan(
    f: Body, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, *, in_axes: Any = 0,
    out_axes: Any = 0, key: Any = None, save: Any = "all", truncate: int | None = None, offset: int = 0,
    options: Any = (), **costs: Any,
) -> tuple[Any, Any]:  # fmt: skip
    count = length if length is not None else steps_in(xs, in_axes)
    assert count is not None
    carry, ys, before = init, {}, offset - 1 if offset else None
    for position in reversed(range(count)) if reverse else range(count):
        if crosses(before, offset + position, truncate):
            carry = each(jax.lax.stop_gradient, carry)
        carry = by_options(options, carry, position)
        carry, ys[position] = f(carry, at(xs, in_axes, position), **keyword(key, offset + position))
        before = offset + position
    last = ys[0 if reverse else count - 1]
    return carry, kept([ys[position] for position in range(count)], last, save, out_axes)


def fold(f: Body, init: Any, xs: Any = None, length: int | None = None, **options: Any) -> Any:
    return scan(lambda carry, x, **keys: (f(carry, x, **keys), ()), init, xs, length, **options)[0]


def accumulate(f: Body, init: Any, xs: Any = None, length: int | None = None, **options: Any) -> Any:
    def step(carry: Any, x: Any, **keys: Any) -> tuple[Any, Any]:
        carry = f(carry, x, **keys)
        return carry, carry

    return scan(step, init, xs, length, **options)[1]


def fori(
    lower: Any, upper: Any, f: Body, init: Any, *, max_length: int | None = None, reverse: bool = False,
    key: Any = None, options: Any = (), **costs: Any,
) -> Any:  # fmt: skip
    first, end = int(lower), int(upper)
    indices = range(first, end if max_length is None else min(end, first + max_length))
    carry = init
    for i in reversed(indices) if reverse else indices:
        carry = f(jnp.asarray(i), by_options(options, carry, i - first), **keyword(key, i - first))
    return carry


# while_scan.


class Ended(NamedTuple):
    carry: Any
    ys: Any
    steps: Any
    stopped: Any


def while_scan(
    cond: Callable[[Any], Any], f: Body, init: Any, xs: Any = None, *, max_length: int | None = None, fill: Any = 0,
    reverse: bool = False, in_axes: Any = 0, out_axes: Any = 0, key: Any = None, save: Any = "all",
    offset: int = 0, options: Any = (), **costs: Any,
) -> Ended:  # fmt: skip
    most = max_length if max_length is not None else steps_in(xs, in_axes)
    assert most is not None
    carry, ys, last, steps = init, {}, None, 0
    for position in reversed(range(most)) if reverse else range(most):
        if not cond(carry):
            break
        carry = by_options(options, carry, position)
        carry, last = f(carry, at(xs, in_axes, position), **keyword(key, offset + position))
        ys[position], steps = last, steps + 1
    if last is None:  # no step is taken
        last = f(carry, at(xs, in_axes, 0), **keyword(key, 0))[1]
        last = each(lambda leaf, value: jnp.full_like(leaf, value), last, fill)
    empty = each(lambda leaf, value: jnp.full_like(leaf, value), last, fill)
    outputs = kept([ys.get(position, empty) for position in range(most)], last, save, out_axes)
    return Ended(carry, outputs, jnp.asarray(steps, jnp.int32), jnp.asarray(not cond(carry)))


# mask_scan.


def row_of(tree: Any, axes: Any, row: tuple[int, ...]) -> Any:
    """A row's share of each leaf; of one without rows, all."""
    return each(lambda leaf, axis: leaf if axis is None else leaf[(slice(None),) * axis + row], tree, axes)


def batch_of(rows: dict[tuple[int, ...], Any], axes: Any, batch: tuple[int, ...]) -> Any:
    """The rows put together; a leaf without rows is any row's."""
    trees = list(rows.values())
    leaves = zip(*[jax.tree.leaves(tree) for tree in trees], strict=True)

    def together(of: Sequence[Any], axis: int | None) -> Any:
        if axis is None or not is_array(of[0]):
            return of[0]
        shape = jnp.shape(of[0])
        return jnp.stack(of, axis).reshape(*shape[:axis], *batch, *shape[axis:])

    found = [together(of, axis) for of, axis in zip(leaves, spread(axes, trees[0]), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), found)


def without_rows(tree: Any, axes: Any, shared: Any) -> Any:
    """The tree with its leaves that have no rows taken from `shared`."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shared), spread(axes, tree), strict=True)
    return jax.tree.unflatten(jax.tree.structure(tree), [b if axis is None else a for a, b, axis in pairs])


def valid_steps(lengths: Any, mask: Any, resets: Any, count: int, time_axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Which steps are valid and which begin a segment, bool[T, *batch]."""
    begins = None if resets is None else np.moveaxis(np.asarray(resets), time_axis, 0)
    if lengths is not None:
        ends = np.clip(np.asarray(lengths), 0, count)
        valid = np.arange(count).reshape(-1, *[1] * ends.ndim) < ends
    elif mask is not None:
        valid = np.moveaxis(np.asarray(mask), time_axis, 0)
    else:
        assert begins is not None
        valid = np.ones_like(begins)
    return valid, np.zeros_like(valid) if begins is None else begins & valid


def restarts(valid: np.ndarray, begins: np.ndarray, row: tuple[int, ...], position: int, reverse: bool) -> bool:
    """Whether the row's init is put back before this step: in reverse, where the step that runs before it begins."""
    if not reverse:
        return bool(begins[(position, *row)])
    later = [t for t in range(position + 1, len(valid)) if valid[(t, *row)]]
    return bool(later) and bool(begins[(later[0], *row)])


def steps_of_segment(valid: np.ndarray, begins: np.ndarray, row: tuple[int, ...]) -> list[int]:
    """How many valid steps of a row's segment are before each step, in time."""
    counts, count = [], 0
    for t in range(len(valid)):
        count = 0 if valid[(t, *row)] and begins[(t, *row)] else count
        counts.append(count)
        count += bool(valid[(t, *row)])
    return counts


def mask_scan(
    f: Body, init: Any, xs: Any = None, *, lengths: Any = None, mask: Any = None, resets: Any = None,
    reset_to: Any = None, time_axis: int = 0, length: int | None = None, fill: Any = 0, carry_axes: Any = 0,
    x_axes: Any = 0, y_axes: Any = 0, reverse: bool = False, in_axes: Any = None, out_axes: Any = None, key: Any = None,
    save: Any = "all", truncate: int | None = None, offset: int = 0, tells_first: bool = False,
    options: Any = (), **costs: Any,
) -> tuple[Any, Any]:  # fmt: skip
    in_axes = time_axis if in_axes is None else in_axes
    out_axes = time_axis if out_axes is None else out_axes
    count = length if length is not None else steps_in(xs, in_axes)
    assert count is not None
    whole = each(lambda leaf, axis: axis is None, xs, in_axes)  # has no rows, unless `x_axes` is a tree
    if not isinstance(x_axes, tuple):
        x_axes = jax.tree.map(lambda is_whole: None if is_whole else x_axes, whole)
    lengths = None if lengths is None else np.asarray(lengths) - offset
    valid, begins = valid_steps(lengths, mask, resets, count, time_axis)
    batch = valid.shape[1:]
    rows = list(np.ndindex(*batch))
    states = {row: row_of(init, carry_axes, row) for row in rows}
    starts, before = dict(states), dict.fromkeys(rows)
    if reset_to is not None:
        starts = {row: row_of(reset_to, carry_axes, row) for row in rows}
    outputs: dict[int, dict[tuple[int, ...], Any]] = {}
    for position in reversed(range(count)) if reverse else range(count):
        running = [row for row in rows if valid[(position, *row)]]
        outputs[position], was = {}, dict(states)
        for row in running:
            state = was[row]
            counts = steps_of_segment(valid, begins, row)
            earlier = offset + counts[before[row]] if before[row] is not None else offset - 1 if offset else None
            if crosses(earlier, offset + counts[position], truncate):
                state = each(jax.lax.stop_gradient, state)
            begun = restarts(valid, begins, row, position, reverse)
            if begun:
                state = without_rows(starts[row], carry_axes, state)
            x = row_of(at(xs, in_axes, position), x_axes, row)
            told = {"first": jnp.asarray(begun or (before[row] is None and not offset))} if tells_first else {}
            state = by_options(options, state, position)
            states[row], outputs[position][row] = f(state, x, **keyword(key, offset + position), **told)
            before[row] = position
        if running:
            states = {row: without_rows(state, carry_axes, states[running[0]]) for row, state in states.items()}
    order = range(count)[::-1] if reverse else range(count)
    some = next((y for step in outputs.values() for y in step.values()), None)
    if some is None:  # no step of any row is valid
        first = each(lambda leaf, axis: leaf if axis is None else one_step(leaf, axis), xs, in_axes)
        x = row_of(at(first, in_axes, 0), x_axes, rows[0])
        told = {"first": jnp.asarray(True)} if tells_first else {}
        types = jax.eval_shape(lambda: f(states[rows[0]], x, **keyword(key, 0), **told)[1])
        some = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), types)
    empty = each(lambda leaf, value: jnp.full_like(leaf, 0 if value == "hold" else value), some, fill)
    ys, lasts = _filled(outputs, rows, order, fill, empty, y_axes)
    together = [batch_of(ys[position], y_axes, batch) for position in range(count)]
    return batch_of(states, carry_axes, batch), kept(together, batch_of(lasts, y_axes, batch), save, out_axes)


def one_step(leaf: Any, axis: int) -> Any:
    """A leaf of xs as if there were one step."""
    return jnp.zeros([1 if n == axis % leaf.ndim else size for n, size in enumerate(leaf.shape)], leaf.dtype)


def _filled(
    outputs: dict[int, dict[tuple[int, ...], Any]], rows: Sequence[tuple[int, ...]], order: Iterable[int], fill: Any,
    empty: Any, y_axes: Any,
) -> tuple[dict[int, dict[tuple[int, ...], Any]], dict[tuple[int, ...], Any]]:  # fmt: skip
    """Every row's output at every position, `fill` where it has none; and each row's last, in the order of the run."""
    held = dict.fromkeys(rows, empty)
    filled: dict[int, dict[tuple[int, ...], Any]] = {}
    for position in order:
        step = outputs[position]
        for row, y in step.items():
            held[row] = y
        if step:
            held = {row: without_rows(y, y_axes, next(iter(step.values()))) for row, y in held.items()}
        shown = {row: held[row] if row in step else _choose(fill, held[row], empty) for row in rows}
        if step:
            shown = {row: without_rows(y, y_axes, next(iter(step.values()))) for row, y in shown.items()}
        filled[position] = shown
    return filled, held


def _choose(fill: Any, held: Any, empty: Any) -> Any:
    leaves = zip(jax.tree.leaves(held), jax.tree.leaves(empty), spread(fill, held), strict=True)
    return jax.tree.unflatten(jax.tree.structure(held), [old if kind == "hold" else new for old, new, kind in leaves])


# linear_scan, which is a mask_scan of one body.


def linear_scan(
    a: Any, b: Any, init: Any = None, *, lengths: Any = None, mask: Any = None, resets: Any = None, time_axis: int = 0,
    matrix: bool = False, save: Any = "all", method: Any = None, remat: Any = None, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = (x[0] @ h if matrix else x[0] * h) + x[1]
        return h, h

    b = jnp.moveaxis(b, time_axis, 0)
    own = (*b.shape, b.shape[-1]) if matrix else b.shape
    a = jnp.broadcast_to(a if jnp.ndim(a) == 0 else jnp.moveaxis(a, time_axis, 0), own)
    if lengths is None and mask is None and resets is None:
        lengths = np.full(b.shape[1], len(b))
    mask, resets = (None if flags is None else np.moveaxis(flags, time_axis, 0) for flags in (mask, resets))
    init = jnp.zeros(b.shape[1:], b.dtype) if init is None else init
    rows = {"lengths": lengths, "mask": mask, "resets": resets}
    last, hs = mask_scan(step, init, (a, b), **rows, save="last" if save == "last" else "all", **options)
    return last, None if save is None else hs if save == "last" else jnp.moveaxis(hs, 0, time_axis)


# scan_layers and fold_layers.


def scan_layers(
    block: Any, x: Any, layers: Any, xs: Any = None, *, state: Any = None, args: tuple[Any, ...] = (),
    reverse: bool = False, in_axes: Any = 0, out_axes: Any = 0, key: Any = None, save: Any = "all", offset: int = 0,
    options: Any = (), **costs: Any,
) -> tuple[Any, ...]:  # fmt: skip
    pattern = isinstance(block, list)
    blocks, stacks = (block, layers) if pattern else ([block], [layers])
    own = (xs if pattern else [xs]) if xs is not None else [None] * len(blocks)
    states = None if state is None else list(state) if pattern else [state]
    counts = [steps_in(stack, 0) or 0 for stack in stacks]
    saves = save if isinstance(save, list) else [save] * len(blocks)
    turns = [(n, which) for n in range(max(counts)) for which in range(len(blocks)) if n < counts[which]]
    ys: list[dict[int, Any]] = [{} for _ in blocks]
    lasts: list[Any] = [None for _ in blocks]
    for number, (n, which) in reversed(list(enumerate(turns))) if reverse else enumerate(turns):
        share = () if own[which] is None else (at(own[which], in_axes, n),)
        share = (*share, at(states[which], 0, n)) if states else share
        x = by_options(options, x, n)  # each stack is fed for itself
        x, *new, lasts[which] = blocks[which](
            at(stacks[which], 0, n), x, *share, *args, **keyword(key, offset + number)
        )
        ys[which][n] = lasts[which]
        if states:
            states[which] = jax.tree.map(lambda old, one, n=n: old.at[n].set(one), states[which], new[0])
    found = [
        kept([of[n] for n in range(count)], last, keep, out_axes)
        for of, count, last, keep in zip(ys, counts, lasts, saves, strict=True)
    ]
    own_states = () if states is None else (states if pattern else states[0],)
    return x, *own_states, tuple(found) if pattern else found[0]


def fold_layers(block: Any, x: Any, layers: Any, xs: Any = None, *, state: Any = None, **options: Any) -> Any:
    def with_output(function: Body) -> Body:
        def call(*given: Any, **keys: Any) -> Any:
            returned = function(*given, **keys)
            return (returned, ()) if state is None else (*returned, ())

        return call

    blocks = [with_output(one) for one in block] if isinstance(block, list) else with_output(block)
    x_and_state = scan_layers(blocks, x, layers, xs, state=state, **options)[:-1]
    return x_and_state[0] if state is None else x_and_state


# A custom carry: the moving average of what the body returns.


def averaged(f: Body, decay: float) -> Body:
    """A body whose carry's `h` becomes the average of what it was and what the body returns."""

    def step(*given: Any, **keys: Any) -> Any:
        state = next(value for value in given if hasattr(value, "h") and hasattr(value, "n"))
        returned = f(*given, **keys)
        new = returned if hasattr(returned, "h") else returned[0]
        new = new._replace(h=decay * state.h + (1 - decay) * new.h)
        return new if hasattr(returned, "h") else (new, *returned[1:])

    return step


# lift, for collections that are named.


def names_of(said: Any) -> tuple[str, ...]:
    return (said,) if isinstance(said, str) else tuple(said or ())


def lift(
    fn: Body, *, variable_axes: Any = None, variable_broadcast: Any = (), variable_carry: Any = (),
    split_rngs: Any = None, in_axes: Any = 0, out_axes: Any = 0, length: int | None = None, reverse: bool = False,
    data_transform: Any = None, save: Any = "all", **costs: Any,
) -> Body:  # fmt: skip
    axes, split = variable_axes or {}, split_rngs or {}
    whole, carried = names_of(variable_broadcast), names_of(variable_carry)

    def run(variables: Any, rngs: Any, carry: Any, *args: Any) -> Any:
        into = {name: getattr(axis, "axis", axis) for name, axis in axes.items() if name in variables}
        counts = [steps_in(variables[name], axis) for name, axis in into.items()]
        count = length if length is not None else next(n for n in [*counts, steps_in(args, in_axes)] if n)
        shared = {name: tree for name, tree in variables.items() if name in whole}
        moved = {name: tree for name, tree in variables.items() if name in carried}
        keys = {name: jax.random.split(key, count) if split[name] else key for name, key in rngs.items()}
        ys, made, last, once = {}, {}, None, {}
        for position in reversed(range(count)) if reverse else range(count):
            own = {name: at(variables[name], axis, position) for name, axis in into.items()}
            given = (
                {**shared, **moved, **own},
                {name: key[position] if split[name] else key for name, key in keys.items()},
            )
            given = data_transform(*given) if data_transform else given
            (carry, last), updates = fn(*given, carry, *at(args, in_axes, position))
            moved |= {name: tree for name, tree in updates.items() if name in carried}
            once |= {name: tree for name, tree in updates.items() if name in whole}
            ys[position], made[position] = last, {name: tree for name, tree in updates.items() if name in axes}
        outputs = kept([ys[position] for position in range(count)], last, save, out_axes)
        places = {name: getattr(axes[name], "axis", axes[name]) for name in made[0]}
        return (carry, outputs), {**once, **moved, **kept([made[n] for n in range(count)], made[0], "all", places)}

    return run
