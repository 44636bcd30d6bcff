"""The matrix of loops and transforms that the tests share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxprs import num_consts
from oracle import is_inexact

import treescan
from treescan._cpu.rows import written

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


def grad(run, init, xs):
    loss, floats = loss_of(run, init, xs)
    return jax.value_and_grad(loss)(floats)


def disable_jit(run, init, xs):
    with jax.disable_jit():
        return run(init, xs)


TRANSFORMS = {t.__name__: t for t in (eager, jit, grad, disable_jit)}


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


def over_indices(**options: Any) -> Callable[..., Any]:
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
SHARED = {"row_axes": {"carry": {"h": 0, "w": None}}}

# How many consts the order of the rows is: newer releases of JAX write it into the equation that reads it.
_ORDERED = jax.make_jaxpr(lambda c: jax.lax.scan(lambda c, _: (written(c), None), c, length=2))(np.zeros((3, 2), "f"))
ORDER = sum(num_consts(eqn) for eqn in _ORDERED.jaxpr.eqns if eqn.primitive.name == "scan")

# Consts: the weights are one; the key, a leaf given whole, and the good pair (a leaf for each of state and x) add.
# A loop that writes its outputs in place reads x and the mask there, from where its chunk begins: three more. Its body
# treats rows independently, so it needs no good pair: two less, but for `compact`. A keyed body chooses the larger of
# two numbers, so each leaf that is selected for padded rows is written first.
OPTIONS = {
    "scan": Option(plain, over(treescan.scan), 1),
    "reverse": Option(plain, over(treescan.scan, reverse=True), 1),
    "unroll": Option(plain, over(treescan.scan, unroll=2), 1),
    "in_axes": Option(plain, _over_the_last_axis, 1),
    "in_axes_none": Option(whole, _with_whole_leaf, 2),
    "out_axes": Option(plain, over(treescan.scan, out_axes=1), 1),
    "key": Option(keyed, over(treescan.scan, key=jax.random.key(0)), 2),
    "raw_key": Option(keyed, over(treescan.scan, key=jax.random.PRNGKey(0)), 2),
    "fold": Option(folded, over(treescan.fold), 1),
    "accumulate": Option(folded, over(treescan.accumulate), 1),
    "fori": Option(indexed, over_indices(), 1),
    "lengths": Option(plain, over(treescan.mask_scan, lengths=LENGTHS), 3),
    "mask": Option(plain, over(treescan.mask_scan, mask=MASK), 3),
    "valid": Option(masked, over(treescan.mask_scan, lengths=LENGTHS), 3),
    "mask_key": Option(keyed, over(treescan.mask_scan, lengths=LENGTHS, key=jax.random.key(0)), 4 + 2 * ORDER),
    "fill_nan": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, fill=float("nan")), 3),
    "row_axes_none": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, **SHARED), 3),
    "chunk": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=2), 4),
    "unskipped": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=0), 3),
    "compact": Option(
        plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=2, compact=True, **SHARED), (1, 4), traces=3
    ),
    "resets": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, resets=RESETS), 4),
    "resets_alone": Option(plain, over(treescan.mask_scan, resets=RESETS, reverse=True), 2),
    "hold": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, fill="hold"), 3),
    "time_axis": Option(plain, _batch_first, 3),
    "padded": Option(plain, _over_padded, 3),
    "packed": Option(plain, _over_packed, 4),
    "remat_step": Option(plain, over(treescan.scan, remat="step"), 1),
    "remat_nested": Option(plain, over(treescan.scan, remat="nested"), 1),
    "scan_layers": Option(layered, over(treescan.scan_layers), 1),
    "layers_of_all_kinds": Option(layered_with_own, _over_layers_with_own, 3),
    "fold_layers": Option(layered_fold, over(treescan.fold_layers, reverse=True, remat="step"), 1),
    "pattern": Option(layered, over_pattern(treescan.scan_layers), 1),
    "pattern_reverse": Option(layered, over_pattern(treescan.scan_layers, reverse=True, remat="step"), 1),
    "pattern_remat": Option(layered_fold, over_pattern(treescan.fold_layers, remat="nested"), 1),
    "pattern_remat_one": Option(layered, over_pattern(treescan.scan_layers, remat=(None, "step")), 1),
    "mask_remat_step": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=2, remat="step"), 3),
    "mask_remat_nested": Option(plain, over(treescan.mask_scan, lengths=LENGTHS, chunk=1, remat="nested"), 3),
}
