"""The matrix of loops and transforms that the tests share, and readers of jaxprs."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.testing as npt
import pytest

import treescan

Scan = Callable[..., Any]


# Loops: bodies whose carry depends on x, over pytrees of every kind.


class State(NamedTuple):
    h: jax.Array
    c: jax.Array


class Case(NamedTuple):
    """A body, with an init, and xs for a number of steps."""

    body: Callable[..., Any]
    init: Any
    make_xs: Callable[[int], Any]


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, shape), jnp.float32)


def scalar_body(carry, x):
    carry = jnp.sin(carry + x)
    return carry, carry * x


def named_body(state, x):
    h = jnp.tanh(state.h * x["a"] + state.c)
    return State(h, state.c + jnp.sum(x["b"] * h, keepdims=True)), {"out": (h, x["a"])}


def nested_body(carry, x):
    (a, nothing), rest = carry["left"], carry["right"]
    x0, (x1,) = x
    b = jnp.sin(rest[0] * jnp.mean(x1) + a)
    return {"left": (a + 0.5 * jnp.cos(x0), nothing), "right": [b], "weights": carry["weights"]}, [
        b @ carry["weights"],
        None,
        (x0 * jnp.mean(b),),
    ]


def no_carry_body(carry, x):
    return carry, {"square": x * x, "sum": jnp.sum(jnp.sin(x))}


def no_ys_body(carry, x):
    return (carry[0] * jnp.cos(x), carry[1] + jnp.dot(x, carry[0])), None


def no_xs_body(carry, x):
    assert x is None
    return jnp.sin(2 * carry), carry


def counting_body(carry, x):
    step, total = carry
    return (step + 1, total * jnp.cos(x["f"]) + x["i"].astype(jnp.float32)), (step * x["i"], total)


CASES = {
    "scalar": Case(scalar_body, array(), lambda n: array(n, seed=1)),
    "namedtuple": Case(
        named_body, State(array(3), array(1)), lambda n: {"a": array(n, 3, seed=1), "b": array(n, 3, seed=2)}
    ),
    "nested": Case(
        nested_body,
        {"left": (array(), None), "right": [array(4)], "weights": array(4, 2)},
        lambda n: (array(n, seed=1), (array(n, 2, 2, seed=2),)),
    ),
    "no_carry": Case(no_carry_body, None, lambda n: array(n, 3)),
    "no_ys": Case(no_ys_body, (array(2), array()), lambda n: array(n, 2, seed=1)),
    "no_xs": Case(no_xs_body, array(3), lambda n: None),
    "integers": Case(
        counting_body, (jnp.int32(0), array()), lambda n: {"f": array(n), "i": jnp.arange(n, dtype=jnp.int32)}
    ),
}


# Transforms: each calls `run(init, xs)` in its own way, and returns a tree to compare.


def is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)


def loss_of(run: Callable[..., Any], *args: Any) -> tuple[Callable[..., jax.Array], list[Any]]:
    """A scalar function of all the floating leaves of `args`, in which every output counts with its own weight."""
    leaves, treedef = jax.tree.flatten(args)
    where = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

    def loss(floats: list[Any]) -> jax.Array:
        given = list(leaves)
        for i, leaf in zip(where, floats, strict=True):
            given[i] = leaf
        outs = [out for out in jax.tree.leaves(run(*jax.tree.unflatten(treedef, given))) if is_inexact(out)]
        return sum((jnp.sum(jnp.sin((k + 2) * out)) for k, out in enumerate(outs)), start=jnp.float32(0))

    return loss, [leaves[i] for i in where]


def eager(run, init, xs):
    return run(init, xs)


def jit(run, init, xs):
    return jax.jit(run)(init, xs)


def vmap(run, init, xs):
    def stack(leaf):
        return jnp.stack([leaf, leaf + leaf, leaf * leaf])

    return jax.vmap(run)(*jax.tree.map(stack, (init, xs)))


def grad(run, init, xs):
    loss, floats = loss_of(run, init, xs)
    return jax.value_and_grad(loss)(floats)


def jvp(run, init, xs):
    loss, floats = loss_of(run, init, xs)
    return jax.jvp(loss, (floats,), ([jnp.cos(leaf) for leaf in floats],))


def grad_of_grad(run, init, xs):
    loss, floats = loss_of(run, init, xs)

    def norm(leaves):
        return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss)(leaves))

    return jax.grad(norm)(floats)


def disable_jit(run, init, xs):
    with jax.disable_jit():
        return run(init, xs)


TRANSFORMS = {t.__name__: t for t in (eager, jit, vmap, grad, jvp, grad_of_grad, disable_jit)}


# Verbs with each of their options, over a body of which every option's own works.

LENGTH = 5


def plain(carry, x):
    h = jnp.sin(carry["h"] + x)
    return {"h": h, "w": carry["w"]}, h * 2


def keyed(carry, x, *, key):
    h = jnp.sin(carry["h"] + x + jax.random.uniform(key))
    return {"h": h, "w": carry["w"]}, h * 2


def masked(carry, x, *, valid):
    h = jnp.sin(carry["h"] + jnp.where(valid[:, None], x, 0.0))
    return {"h": h, "w": carry["w"]}, h * 2


def whole(carry, x):
    h = jnp.sin(carry["h"] + x[0] + x[1])
    return {"h": h, "w": carry["w"]}, h * 2


def folded(carry, x):
    return {"h": jnp.sin(carry["h"] + x), "w": carry["w"]}


def indexed(i, carry):
    return {"h": jnp.sin(carry["h"] + i.astype(jnp.float32)), "w": carry["w"]}


def layered(layer, x):
    h = jnp.sin(x["h"] + layer)
    return {"h": h, "w": x["w"]}, h * 2


def layered_fold(layer, x):
    return layered(layer, x)[0]


def layered_with_own(layer, x, own, scale, power, *, key):
    h = jnp.sin(x["h"] + layer * scale**power + own + jax.random.uniform(key))
    return {"h": h, "w": x["w"]}, h * 2


class Option(NamedTuple):
    """A verb with one of its options: `call(body)` runs it on `body`, and on `arrays()` unless told otherwise."""

    body: Callable[..., Any]
    run: Callable[..., Any]
    consts: int | tuple[int, ...]  # of the loops that run the body, in the jaxpr: the unchanged weights among them
    traces: int = 1  # of the body

    def call(self, body: Callable[..., Any], init: Any = None, xs: Any = None) -> Any:
        given = arrays()
        return self.run(body, given[0] if init is None else init, given[1] if xs is None else xs)


ROWS = 3


def arrays() -> tuple[Any, Any]:
    """An init whose weights `w` (of a shape that nothing else has) no body changes, and xs."""
    return {"h": array(ROWS, 2), "w": array(ROWS, 7)}, array(LENGTH, ROWS, 2, seed=1)


def over(verb: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda body, init, xs: verb(body, init, xs, **options)


def _with_whole_leaf(body, init, xs):
    return treescan.scan(body, init, (xs, array(ROWS, 2, seed=2)), in_axes=(0, None))


def _over_the_last_axis(body, init, xs):
    return treescan.scan(body, init, jnp.moveaxis(xs, 0, -1), in_axes=-1)


def _over_indices(**options: Any) -> Callable[..., Any]:
    return lambda body, init, xs: treescan.fori(0, LENGTH, body, init, **options)


def _batch_first(body, init, xs):
    mask = np.arange(LENGTH) < LENGTHS[:, None]
    return treescan.mask_scan(body, init, jnp.swapaxes(xs, 0, 1), mask=mask, time_axis=1)


def _over_padded(body, init, xs):
    return treescan.mask_scan(body, init, treescan.Padded(xs, jnp.asarray(LENGTHS)))


def _over_packed(body, init, xs):
    index = treescan.pack([np.zeros(LENGTH)]).index
    return treescan.mask_scan(body, init, treescan.Packed(xs, jnp.asarray(MASK), jnp.asarray(RESETS), index))


def over_pattern(verb: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Two blocks by turns, the first of which has one turn more."""
    return lambda body, init, xs: verb((body, body), init, (xs[: LENGTH // 2 + 1], xs[LENGTH // 2 + 1 :]), **options)


def _over_layers_with_own(body, init, xs):
    key, own, scale = jax.random.key(0), array(LENGTH, ROWS, 2, seed=2), array(2, seed=3)[None]
    return treescan.scan_layers(body, init, xs, own, args=(scale, 2), key=key)


LENGTHS = np.array([2, 0, 5])
MASK = np.arange(LENGTH)[:, None] % 2 < np.array([1, 2, 0])
RESETS = np.arange(LENGTH)[:, None] == np.array([1, 1, 3])
SHARED = {"carry_axes": {"h": 0, "w": None}}

# Consts: the weights are one; the key, a leaf given whole, and the good pair (a leaf for each of state and x) add.
# A loop that writes its outputs where they stay reads x and the mask there, from where its chunk begins: three more.
OPTIONS = {
    "scan": Option(plain, over(treescan.scan), 1),
    "reverse": Option(plain, over(treescan.scan, reverse=True), 1),
    "unroll": Option(plain, over(treescan.scan, unroll=2), 1),
    "in_axes": Option(plain, _over_the_last_axis, 1),
    "in_axes_none": Option(whole, _with_whole_leaf, 2),
    "out_axes": Option(plain, over(treescan.scan, out_axes=1), 1),
    "key": Option(keyed, over(treescan.scan, key=jax.random.key(0)), 2),
    "raw_key": Option(keyed, over(treescan.scan, key=jax.random.PRNGKey(0)), 2),
    "name": Option(plain, over(treescan.scan, name="cell"), 1),
    "fold": Option(folded, over(treescan.fold), 1),
    "accumulate": Option(folded, over(treescan.accumulate), 1),
    "fori": Option(indexed, _over_indices(), 1),
    "lengths": Option(plain, over(treescan.mask_scan, lengths=LENGTHS), 3),
    "mask": Option(plain, over(treescan.mask_scan, mask=MASK), 3),
    "mask_reverse": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, reverse=True), 3),
    "valid": Option(masked, over(treescan.mask_scan, lengths=LENGTHS), 3),
    "mask_key": Option(keyed, over(treescan.mask_scan, lengths=LENGTHS, key=jax.random.key(0)), 4),
    "fill": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, fill=-1), 3),
    "fill_nan": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, fill=float("nan")), 3),
    "carry_axes_none": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, **SHARED), 3),
    "chunk": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=2), 6),
    "unskipped": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=0), 3),
    "compact": Option(
        plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=2, compact=True, **SHARED), (3, 6), traces=3
    ),
    "resets": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, resets=RESETS), 4),
    "resets_alone": Option(plain, over(treescan.mask_scan, resets=RESETS, reverse=True), 2),
    "hold": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, fill="hold"), 3),
    "time_axis": Option(plain, _batch_first, 3),
    "padded": Option(plain, _over_padded, 3),
    "packed": Option(plain, _over_packed, 4),
    "remat_step": Option(plain, over(treescan.scan, remat="step"), 1),
    "remat_nested": Option(plain, over(treescan.scan, remat="nested"), 1),
    "fold_remat": Option(folded, over(treescan.fold, remat="nested"), 1),
    "accumulate_remat": Option(folded, over(treescan.accumulate, remat="step"), 1),
    "scan_layers": Option(layered, over(treescan.scan_layers), 1),
    "layers_of_all_kinds": Option(layered_with_own, _over_layers_with_own, 3),
    "fold_layers": Option(layered_fold, over(treescan.fold_layers, reverse=True, remat="step"), 1),
    "pattern": Option(layered, over_pattern(treescan.scan_layers), 1, traces=2),
    "pattern_reverse": Option(layered, over_pattern(treescan.scan_layers, reverse=True, remat="step"), 1, traces=2),
    "pattern_remat": Option(layered_fold, over_pattern(treescan.fold_layers, remat="nested"), 1, traces=2),
    "pattern_remat_one": Option(layered, over_pattern(treescan.scan_layers, remat=(None, "step")), 1, traces=2),
    "mask_remat_step": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=2, remat="step"), 3),
    "mask_remat_nested": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=1, remat="nested"), 3),
}


def parametrize(argument: str, values: dict[str, Any]) -> Any:
    """One test for each value, named by its key."""
    return pytest.mark.parametrize(argument, values.values(), ids=values)


def all_pairs(grid: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few rows of a grid in which any two values that meet in one of its rows meet."""
    pairs = {combination: set(itertools.combinations(enumerate(map(repr, combination)), 2)) for combination in grid}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(grid, key=lambda combination: len(pairs[combination] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


def everyday(rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The rows as parameters: slow are those of which every value was in a row before."""
    seen: set[tuple[int, str]] = set()
    params = []
    for row in rows:
        values = set(enumerate(map(repr, row)))
        params.append(pytest.param(*row, marks=pytest.mark.slow if values <= seen else ()))
        seen |= values
    return params


def by_turns(turns: int, **dimensions: Mapping[str, Any] | Sequence[Any]) -> Any:
    """One test for each combination; one in so many of them, of each value, is for every day, the others are slow."""
    named = [
        list(values.items()) if isinstance(values, Mapping) else [(getattr(v, "__name__", str(v)), v) for v in values]
        for values in dimensions.values()
    ]
    params = []
    for places in itertools.product(*(range(len(values)) for values in named)):
        row = [values[place] for values, place in zip(named, places, strict=True)]
        marks = pytest.mark.slow if sum(places) % turns else ()
        params.append(pytest.param(*(value for _, value in row), marks=marks, id="-".join(name for name, _ in row)))
    return pytest.mark.parametrize(tuple(dimensions), params)


def slow(*rows: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


# Comparisons.


def assert_bitwise(actual: Any, expected: Any) -> None:
    """Equal structures, types, weak types and bits."""
    chex.assert_trees_all_equal_structs(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        npt.assert_array_equal(as_numpy(a), as_numpy(b))


def as_numpy(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def python_scan(body: Scan, init: Any, xs: Any, length: int, reverse: bool = False) -> tuple[Any, Any]:
    """The loop that `lax.scan` stands for; at least one step."""
    carry, ys = init, [None] * length
    for i in range(length)[::-1] if reverse else range(length):
        carry, ys[i] = body(carry, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)


# Traces and compilations.


class Counted:
    """A body that counts how often it runs, which under JAX is how often it is traced."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.calls = 0

        @functools.wraps(body)
        def function(*args: Any, **keywords: Any) -> Any:
            self.calls += 1
            return body(*args, **keywords)

        self.body = function

    def traces(self, call: Callable[[Callable[..., Any]], Any]) -> int:
        """How often the body is traced in `call(body)`."""
        before = self.calls
        jax.block_until_ready(call(self.body))
        return self.calls - before


_compile_events: list[str] = []


def _note(event: str, duration: float, **_: Any) -> None:
    if event.startswith("/jax/core/compile/"):
        _compile_events.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)  # for good: jax 0.8.2 has no way to take it back


def compilations(call: Callable[[], Any]) -> list[str]:
    """The traces, lowerings and compilations that JAX itself reports during a call."""
    before = len(_compile_events)
    jax.block_until_ready(call())
    return _compile_events[before:]


# Jaxprs.


def subjaxprs(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from subjaxprs(item)
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif hasattr(value, "eqns"):
        yield value


def equations(jaxpr: Any, name: str | None = None) -> Iterator[Any]:
    """The equations of a primitive, or all, in a jaxpr and all that it calls."""
    for eqn in jaxpr.eqns:
        if name in (None, eqn.primitive.name):
            yield eqn
        for value in eqn.params.values():
            for sub in subjaxprs(value):
                yield from equations(sub, name)


def num_consts(eqn: Any) -> int:
    """How many operands a scan equation reads in every step and changes in none."""
    if "num_consts" in eqn.params:  # up to jax 0.10
        return eqn.params["num_consts"]
    return len(eqn.params["ft_in"].unpack()[0])


def shapes(eqn: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The shapes of a scan equation's constants, and of all that it carries or scans over."""
    all_shapes = [var.aval.shape for var in eqn.invars]
    return all_shapes[: num_consts(eqn)], all_shapes[num_consts(eqn) :]
