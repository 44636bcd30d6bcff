"""`associative_scan` against a Python loop over each row, over random programs: values and all kinds of derivatives."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from oracle import assert_close

import treescan
from treescan import associative_scan

pytestmark = pytest.mark.quick

EVERYDAY, ALL = (0, 7, 11), range(40)


def affine(w: Any, before: Any, here: Any) -> Any:
    """`y = a x + b`, one after the other; the order counts."""
    (a, b), (c, d) = before, here
    return c * a, c * b + d


def with_weight(w: Any, before: Any, here: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y + w * x * y, before, here)


def harmonic(w: Any, before: Any, here: Any) -> Any:
    """It has no value at zero."""
    return jax.tree.map(lambda x, y: x * y / (x + y), before, here)


OPERATORS = (affine, with_weight, harmonic)


class Program(NamedTuple):
    """A call, and what a loop is told of its rows."""

    operator: Any
    options: dict[str, Any]
    elements: Any  # leaves [T, B, ...]
    init: Any
    valid: Any  # bool[T, B]
    starts: Any  # bool[T, B], where segments begin in time
    packed: Any = None


def program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    pick, flip = (lambda *each: each[rng.integers(len(each))]), (lambda p=0.5: rng.random() < p)
    steps, rows, width = pick(0, 1, 2, 5, 8), 3, 2
    options: dict[str, Any] = {"reverse": flip(), "fill": pick(0, -1.5, "hold")}
    kind = pick("none", "lengths", "mask", "packed") if steps else pick("none", "lengths")
    valid, starts, packed = np.ones((steps, rows), bool), np.zeros((steps, rows), bool), None
    if kind == "lengths":
        lengths = np.array([steps, 0, rng.integers(steps + 1)])
        valid, options["lengths"] = np.arange(steps)[:, None] < lengths, lengths
    if kind == "mask":
        valid = rng.random((steps, rows)) < 0.6
        options["mask"] = valid
    if kind == "packed":
        counts = list(rng.integers(0, steps + 1, 4))
        packed = treescan.pack([np.zeros((c, width)) for c in counts], rows=rows + 1, length=steps)
        rows, valid, starts = rows + 1, np.asarray(packed.mask), np.asarray(packed.resets)
    elif flip() and steps:
        starts = rng.random((steps, rows)) < 0.4
        options["resets"] = starts
    options["time_axis"] = 0 if packed is not None else pick(0, 0, 1)
    elements = tuple(rng.uniform(0.2, 1.2, (steps, rows, *more)).astype("f") for more in ((width,), (width,)))
    init = tuple(rng.uniform(0.2, 1.2, (rows, *leaf.shape[2:])).astype("f") for leaf in elements) if flip() else None
    return Program(OPERATORS[seed % 3], options, elements, init, valid, starts, packed)


def called(which: Program, w: Any, elements: Any, init: Any) -> Any:
    """The call, whose padding is NaN."""
    options, valid = dict(which.options), jnp.asarray(which.valid)[..., None]
    elements = jax.tree.map(lambda leaf: jnp.where(valid, leaf, jnp.nan), elements)
    if which.packed is not None:
        elements = which.packed._replace(data=elements)
    if options["time_axis"]:
        elements = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), elements)
        options |= {name: options[name].T for name in ("mask", "resets") if name in options}
    last, ys = associative_scan(lambda before, here: which.operator(w, before, here), elements, init, **options)
    return last, jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), ys) if options["time_axis"] else ys


def looped(which: Program, w: Any, elements: Any, init: Any) -> Any:
    """The law: each row by itself, its valid steps in the order of the run."""
    (steps, rows), reverse, fill = which.valid.shape, which.options["reverse"], which.options["fill"]

    def number(value: float) -> Any:
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape[2:], value, leaf.dtype), elements)

    blank = number(0 if fill == "hold" else fill)
    lasts, outs = [], []
    for row in range(rows):
        start = None if init is None else jax.tree.map(lambda leaf, row=row: leaf[row], init)
        order = [t for t in range(steps) if which.valid[t, row]][:: -1 if reverse else 1]
        y, before, done = start, None, {}
        for t in order:
            begins = before is not None and which.starts[before if reverse else t, row]
            y = start if begins else y
            here = jax.tree.map(lambda leaf, t=t, row=row: leaf[t, row], elements)
            y = here if y is None else which.operator(w, y, here)
            done[t], before = y, t
        lasts.append(blank if y is None else y)
        held = number(0)
        ys = []
        for t in range(steps)[:: -1 if reverse else 1]:
            held = done.get(t, held)
            ys.append(held if fill == "hold" else done.get(t, blank))
        outs.append(ys[:: -1 if reverse else 1])
    if which.packed is not None:
        index = zip(*map(np.asarray, which.packed.index), strict=True)
        none = [blank if init is None else jax.tree.map(lambda leaf, row=row: leaf[row], init) for row in range(rows)]
        lasts = [outs[r][start if reverse else start + n - 1] if n else none[r] for r, start, n in index]
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    ys = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), stack(list(map(stack, outs)))) if steps else elements
    return stack(lasts), ys


def everything(function: Any, which: Program, weights: Any, *, first: bool) -> dict[str, Any]:
    """A value, its gradient and jvp; unless those of `first` order are enough, also hvp and a mapped gradient."""

    def loss(w: Any, elements: Any, init: Any) -> Any:
        leaves = jax.tree.leaves(function(which, w, elements, init))
        return sum(jnp.sum(weight * jnp.sin(leaf)) for weight, leaf in zip(weights, leaves, strict=True))

    given = jnp.float32(0.3), *jax.tree.map(jnp.asarray, (which.elements, which.init))
    ones = jax.tree.map(jnp.ones_like, given)
    gradient = jax.grad(loss, (0, 1, 2))
    found = {"value": function(which, *given), "jvp": jax.jvp(loss, given, ones)[1]}
    if first:
        return found | {"gradient": gradient(*given)}
    twice = jax.tree.map(lambda leaf: jnp.stack([leaf, 1.5 * leaf]), given)
    return found | {"gradient and hvp": jax.jvp(gradient, given, ones), "vmap": jax.vmap(gradient)(*twice)}


def check(seed: int, *, first: bool = False) -> None:
    which = program(seed)
    rng = np.random.default_rng(seed + 1000)
    given = jnp.float32(0.3), which.elements, which.init
    shapes = jax.eval_shape(lambda *given: jax.tree.leaves(looped(which, *given)), *given)
    weights = [rng.normal(size=shape.shape).astype("f") for shape in shapes]
    mine, wanted = (jax.jit(lambda f=f: everything(f, which, weights, first=first))() for f in (called, looped))
    for name, expected in wanted.items():
        print(name, seed, which.operator.__name__, which.options)  # of what fails
        assert_close(mine[name], expected, rtol=2e-4)


@pytest.mark.parametrize("seed", EVERYDAY)
def test_is_the_loop(seed: int) -> None:
    check(seed, first=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL[::8])
def test_is_the_loop_in_more_programs(seed: int) -> None:
    for each in range(seed, seed + 8):
        check(each)


@pytest.mark.parametrize("reverse", [False, True])
def test_without_rows_it_is_the_function_of_jax(reverse: bool) -> None:
    xs = jnp.arange(14.0).reshape(7, 2) / 10
    matrices = jnp.stack([jnp.cos(xs), -jnp.sin(xs), jnp.sin(xs), jnp.cos(xs)], -1).reshape(7, 2, 2, 2)
    last, ys = associative_scan(jnp.matmul, matrices, reverse=reverse)
    want = jax.lax.associative_scan(jnp.matmul, matrices, reverse=reverse)
    np.testing.assert_array_equal(ys, want)
    np.testing.assert_array_equal(last, want[0 if reverse else -1])


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_infinite_stays_in_its_segment(reverse: bool) -> None:
    """Also on the way back: a product that overflows is the derivative of the next."""
    xs = jnp.array([1e30, 1e30, 2.0, 3.0, 1e30, 1e30])
    resets = jnp.array([1, 0, 1, 0, 1, 0], bool)

    def middle(xs: Any) -> Any:
        _, ys = associative_scan(jnp.multiply, xs[:, None], resets=resets[:, None], reverse=reverse)
        return ys[2 if reverse else 3, 0]

    value, slope = jax.jit(jax.value_and_grad(middle))(xs)
    assert value == 6
    np.testing.assert_array_equal(slope, [0, 0, 3, 2, 0, 0])


def test_pairs_that_nobody_asked_for_add_nothing_to_the_gradient_of_a_weight() -> None:
    """Products of neighbouring segments, and of padding, are infinite or NaN."""
    xs = jnp.array([[1e30, 2.0, 1e30, 3.0], [4.0, 5.0, jnp.nan, jnp.nan], [jnp.nan] * 4]).T
    resets = jnp.array([[1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]], bool).T

    def total(w: Any) -> Any:
        _, ys = associative_scan(lambda x, y: w * x * y, xs, lengths=jnp.array([4, 2, 0]), resets=resets)
        return ys[1, 1] + ys[3, 0] / 1e30

    for derivative in jax.grad, jax.jacfwd, lambda f: lambda w: jax.grad(f)(w) + jax.grad(jax.grad(f))(w):
        np.testing.assert_allclose(jax.jit(derivative(total))(1.0), 23, rtol=1e-6)


NAN = jnp.nan


def power_mean(w: Any) -> Any:
    """Its derivative by w is NaN for a pair with a 0."""
    return lambda before, here: (before**w * here**w) ** (1 / w)


def root(w: Any) -> Any:
    """Its derivative is infinite for two zeros."""
    return lambda before, here: jnp.sqrt(w * before**2 / w + here**2)


def product(w: Any) -> Any:
    return lambda before, here: w * before * here


def of_each(w: Any, xs: Any, lengths: Any) -> Any:
    return jax.vmap(lambda xs, length: associative_scan(product(w), xs, lengths=length)[0])(xs, lengths)


# The function of a weight, and its derivative at 2.
NEVER_ASKED = {
    "no row has a step": (lambda w: associative_scan(product(w), jnp.full((4, 2), NAN), lengths=jnp.zeros(2, int)), 0),
    "nor with init": (lambda w: associative_scan(product(w), jnp.full((4, 2), NAN), 1.0, lengths=jnp.zeros(2, int)), 0),
    "one step": (lambda w: associative_scan(root(w), jnp.zeros((2, 1)), lengths=jnp.array([1])), 0),
    "segments of one step": (
        lambda w: associative_scan(power_mean(w), jnp.array([[0.0], [5.0]] * 4), resets=jnp.ones((8, 1), bool)),
        0,
    ),
    "steps with gaps": (
        lambda w: associative_scan(
            power_mean(w), jnp.array([[0.0], [NAN], [5.0], [2.0]]), mask=jnp.array([[1], [0], [1], [0]], bool),
            resets=jnp.array([[1], [1], [1], [0]], bool), reverse=True,
        ),
        0,
    ),
    "an element of a vmap": (lambda w: of_each(w, jnp.array([[1, 2, NAN], [NAN] * 3]), jnp.array([2, 0])), 2),
    "and none of them": (lambda w: of_each(w, jnp.full((2, 3), NAN), jnp.zeros(2, int)), 0),
}  # fmt: skip


@pytest.mark.parametrize("case", NEVER_ASKED)
def test_an_operator_that_is_asked_for_nothing_adds_nothing_to_the_gradient_of_a_weight(case: str) -> None:
    function, right = NEVER_ASKED[case]

    def total(w: Any) -> Any:
        return sum(map(jnp.sum, jax.tree.leaves(function(w))))

    for derivative in jax.grad(total), jax.jacfwd(total), jax.jit(jax.grad(total)):
        np.testing.assert_allclose(derivative(2.0), right, atol=1e-6)
    mapped = jax.grad(lambda ws: jnp.sum(jax.vmap(total)(ws)))(jnp.full(3, 2.0))
    np.testing.assert_allclose(mapped, np.full(3, right), atol=1e-6)
    np.testing.assert_allclose(
        jax.grad(lambda w: jax.vmap(total, axis_size=2, in_axes=None)(w)[0])(2.0), right, atol=1e-6
    )
    np.testing.assert_allclose(jax.grad(jax.grad(total))(2.0), 0, atol=1e-6)


@pytest.mark.devices
@pytest.mark.parametrize("lengths", [[0, 3, 0, 1, 0, 0, 2, 0], [0] * 8], ids=["some", "none"])
@pytest.mark.parametrize("init", [None, 1.5])
@pytest.mark.parametrize("checked", [True, False])
def test_a_device_without_a_step_adds_nothing_to_the_gradient_of_a_weight(
    lengths: list[int], init: Any, checked: bool
) -> None:
    """They have NaN alone. Where types do not say what varies, they cannot ask other devices: there they have zeros."""
    mesh, counts = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)), jnp.array(lengths)
    xs = jnp.where(jnp.arange(4)[:, None] < counts[None], 1.0 + jnp.arange(32.0).reshape(4, 8), NAN if checked else 0.0)

    def last(w: Any, xs: Any, lengths: Any) -> Any:
        return associative_scan(product(w), xs, init, lengths=lengths)[0]

    specs = {"in_specs": (P(), P(None, "d"), P("d")), "out_specs": P("d"), "check_vma": checked}
    spread = jax.shard_map(last, mesh=mesh, **specs)
    got, right = (jax.jit(jax.grad(lambda w, f=f: jnp.sum(f(w, xs, counts))))(1.1) for f in (spread, last))
    np.testing.assert_allclose(got, right, rtol=1e-6)
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))):
        xs, counts = (jax.sharding.reshard(leaf, spec) for leaf, spec in ((xs, P(None, "d")), (counts, P("d"))))
        np.testing.assert_allclose(jax.jit(jax.grad(lambda w: jnp.sum(last(w, xs, counts))))(1.1), right, rtol=1e-6)


def test_the_sequences_of_a_pack_have_their_own_inits() -> None:
    sequences, inits = [np.arange(1.0, n + 1) for n in (3, 0, 2)], [10.0, 20.0, 30.0]
    packed = treescan.pack([s.astype("f") for s in sequences], rows=1, init=[np.float32(i) for i in inits])
    last, ys = jax.jit(lambda packed: associative_scan(jnp.add, packed))(packed)
    np.testing.assert_array_equal(last, [16, 20, 33])
    own = treescan.unpack(ys, packed)
    np.testing.assert_array_equal(np.concatenate(own), [11, 13, 16, 31, 33])


def test_other_dtypes_and_a_batch_of_two_axes() -> None:
    xs = jnp.arange(24).reshape(4, 2, 3) % 5
    lengths = jnp.array([[4, 0, 2], [1, 3, 4]])
    last, ys = jax.jit(lambda xs: associative_scan(jnp.maximum, xs, lengths=lengths, fill=-1))(xs)
    for i in np.ndindex(2, 3):
        own = np.maximum.accumulate(np.asarray(xs)[(slice(int(lengths[i])), *i)])
        np.testing.assert_array_equal(ys[(slice(None), *i)], [*own, *[-1] * (4 - len(own))])
        assert last[i] == (own[-1] if len(own) else -1)
    assert (last.dtype, ys.dtype) == (xs.dtype, xs.dtype)


@pytest.mark.devices
def test_rows_that_are_spread_over_devices() -> None:
    mesh = jax.make_mesh((4, 2), ("rows", "width"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    xs = jnp.linspace(0.2, 1.2, 9 * 8 * 2).reshape(9, 8, 2)
    lengths, resets = jnp.array([9, 0, 3, 5, 9, 1, 6, 7]), (jnp.arange(72) % 5 == 0).reshape(9, 8)

    def run(xs: Any) -> Any:
        def loss(w: Any, xs: Any) -> Any:
            padded = jnp.where(jnp.arange(9)[:, None, None] < lengths[None, :, None], xs, jnp.nan)
            found = associative_scan(
                lambda x, y: x + y + w * x * y, padded, jnp.ones_like(xs[0]), lengths=lengths, resets=resets
            )
            return sum(jnp.sum(jnp.sin(each)) for each in found), found

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(0.3, xs)

    want = jax.jit(run)(xs)
    with jax.set_mesh(mesh):
        spread = jax.device_put(xs, jax.sharding.NamedSharding(mesh, jax.P(None, "rows", "width")))
        assert_close(jax.device_get(jax.jit(run)(spread)), jax.device_get(want), rtol=1e-4)
