"""Any callable is a body: what it returns, how it is told apart from others, and when it is traced again."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import operator
import weakref
from typing import NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float
from loops import array
from oracle import assert_bitwise
from thin import all_pairs, everyday, parametrize

import treescan
from scripts import printed

pytestmark = pytest.mark.quick

XS = array(4)
TRACES = []


def step(carry, x):
    TRACES.append(None)
    return carry + 2 * x, carry * x


def scaled(scale, carry, x):
    TRACES.append(None)
    return carry + scale * x, carry * x


class Cell:
    """Hashed by identity, as objects are."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, carry, x):
        return scaled(self.scale, carry, x)

    def method(self, carry, x):
        return self(carry, x)


class ByValue(Cell):
    def __eq__(self, other):
        return type(other) is type(self) and other.scale == self.scale

    def __hash__(self):
        return hash(self.scale)


class Slots:
    """No weak references."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, carry, x):
        return scaled(self.scale, carry, x)


@dataclasses.dataclass(eq=True)
class HoldsArrays:
    """No hash, and an `==` without a truth value."""

    scale: jax.Array

    def __call__(self, carry, x):
        return scaled(self.scale[0], carry, x)


@flax.struct.dataclass
class Struct:
    scale: jax.Array

    def __call__(self, carry, x):
        return scaled(self.scale, carry, x)


@jax.custom_jvp
def with_jvp(carry, x):
    return step(carry, x)


@with_jvp.defjvp
def _(primals, tangents):
    return with_jvp(*primals), jax.tree.map(lambda t: 10 * t, with_jvp(*tangents))


@jax.custom_vjp
def with_vjp(carry, x):
    return step(carry, x)


with_vjp.defvjp(lambda c, x: (step(c, x), x), lambda x, t: (t[0] * 3, t[1] * x))

BODIES = {
    "function": step,
    "partial": functools.partial(scaled, 2.0),
    "jax partial of an array": jax.tree_util.Partial(scaled, jnp.float32(2)),
    "bound method": Cell(2.0).method,
    "object": Cell(2.0),
    "object by value": ByValue(2.0),
    "slots": Slots(2.0),
    "unhashable": HoldsArrays(jnp.full(1, 2.0)),
    "flax struct": Struct(jnp.float32(2)),
    "jitted": jax.jit(step),
    "checkpointed": jax.checkpoint(step),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "wrapped": functools.wraps(step)(lambda *args: step(*args)),
}
VERBS = {"scan": treescan.scan, "mask_scan": functools.partial(treescan.mask_scan, lengths=4)}
GRID = list(itertools.product(BODIES, VERBS, ["eager", "jit", "disable_jit"]))


@pytest.mark.parametrize(("body", "verb", "context"), everyday(all_pairs(GRID)))
def test_any_callable_is_a_body(body, verb, context):
    def run(xs):
        return VERBS[verb](BODIES[body], jnp.float32(1), xs)

    with jax.disable_jit(context == "disable_jit"):
        for _ in range(2):
            actual = (jax.jit(run) if context == "jit" else run)(XS)
    expected = jax.lax.scan(lambda c, x: (c + 2 * x, c * x), jnp.float32(1), XS)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)


@parametrize("body", {"operator": operator.add, "jnp": jnp.add, "max": max})
def test_builtins_fold(body):
    with jax.disable_jit(body is max):
        assert_bitwise(treescan.fold(body, jnp.float32(0.1), XS), functools.reduce(body, XS, jnp.float32(0.1)))


# What a body returns.


class Pair(NamedTuple):
    carry: jax.Array
    y: jax.Array


PAIRS = {"tuple": lambda c, y: (c, y), "list": lambda c, y: [c, y], "namedtuple": Pair}


@parametrize("make", PAIRS)
@pytest.mark.parametrize("disable", [False, True])
def test_any_pair_will_do(make, disable):
    """In the container that lax.scan gives, where its release does not refuse it."""
    with jax.disable_jit(disable):
        actual = treescan.scan(lambda c, x: make(c + x, c), 0.0, XS)
        assert_bitwise(tuple(actual), jax.lax.scan(lambda c, x: (c + x, c), 0.0, XS))
        with contextlib.suppress(TypeError):  # without jit, lax.scan gives a tuple
            assert disable or type(actual) is type(jax.lax.scan(lambda c, x: make(c + x, c), 0.0, XS))


# Which bodies are the same, and when.


def traces(call):
    TRACES.clear()
    call()
    return len(TRACES)


RUNS = {name: lambda body, verb=verb: verb(body, jnp.float32(1), XS)[0] for name, verb in VERBS.items()}


@parametrize("run", RUNS)
@pytest.mark.parametrize("kind", [ByValue, Slots, HoldsArrays])
def test_a_mutated_body_that_does_not_hash_by_identity_is_never_stale(run, kind):
    number = functools.partial(jnp.full, 1) if kind is HoldsArrays else float
    body, scales = kind(number(2.0)), (2.0, 3.0, 2.0, 4.0, 3.0)
    # A plain reference is shared by all who ask for one, with the hash of this moment.
    plain = weakref.ref(body) if kind is ByValue else None
    assert plain is None or hash(plain) == hash(body)
    seen = []
    for scale in scales:
        body.scale = number(scale)
        seen.append(float(run(body)))
    assert seen == [float(run(Slots(scale))) for scale in scales]


def test_a_mutated_body_that_hashes_by_identity_is_the_same_function_to_jax():
    def before_and_after(run):
        body = Cell(2.0)
        first, body.scale = run(body), 3.0
        return float(first), float(run(body))

    lax = before_and_after(lambda body: jax.lax.scan(body, jnp.float32(1), XS)[0])
    assert all(before_and_after(run) == lax == (lax[0],) * 2 for run in RUNS.values())


@parametrize("run", RUNS)
def test_equal_bodies_share_one_trace(run):
    first, second, other = ByValue(5.0), ByValue(5.0), ByValue(6.0)
    assert [traces(lambda b=b: run(b)) for b in (first, second, other, first)] == [1, 0, 1, 0]
    assert run(first) == run(second) != run(other)


DIFFERENT = {
    "objects": Cell,
    "methods": lambda scale: Cell(scale).method,
    "closures": lambda scale: lambda c, x: scaled(scale, c, x),
}


@parametrize("make", DIFFERENT)
def test_different_bodies_do_not_share_a_trace(make):
    for scale, run in itertools.product((5.0, 6.0), RUNS.values()):
        assert run(make(scale)) == run(Slots(scale))


@parametrize("run", RUNS)
def test_an_equal_body_outlives_the_first(run):
    first, second = ByValue(7.0), ByValue(7.0)
    first.itself = first  # only the collector frees it
    before = run(first)
    del first
    gc.collect()
    assert run(second) == before == run(Slots(7.0))


@parametrize("run", RUNS)
def test_an_equal_body_is_in_use_while_the_first_dies(run):
    """The handle that both share refers to the first; the second's call must not depend on it."""

    others = []

    class Dying(ByValue):
        def __call__(self, carry, x):
            others.clear()
            gc.collect()
            return super().__call__(carry, x)

    first, second = Dying(7.0), Dying(7.0)
    run(first)
    others.append(first)  # its last reference goes in the second's call
    del first
    assert treescan.scan(second, jnp.ones(3), XS)[0].shape == (3,)
    assert run(second) == run(Slots(7.0))


def test_bodies_that_live_until_python_ends_go_without_a_word():
    """A script's own functions are such bodies."""
    imports = "import jax.numpy as jnp\nfrom treescan import scan"
    printed("-c", f"{imports}\ndef step(c, x):\n    return c + x, c\nscan(step, 0.0, jnp.ones(3))")


def test_one_body_for_two_verbs():
    """The same function may be fold's and accumulate's, and scan's with other options: nothing is mixed up."""

    def body(c, x):
        return c + x

    total = treescan.fold(body, jnp.float32(0), XS)
    assert_bitwise(treescan.accumulate(body, jnp.float32(0), XS)[-1], total)
    assert_bitwise(treescan.fori(0, 4, body, jnp.int32(0)), jnp.int32(6))
    assert_bitwise(treescan.accumulate(body, jnp.float32(0), XS, reverse=True)[0], treescan.fold(body, 0.0, XS[::-1]))


# Wrapped bodies: what counts is the function that is called, not the one that it wraps.


def test_a_wrapper_has_parameters_of_its_own():
    def keyed(c, x, *, key):
        return c + x, jax.random.uniform(key)

    @functools.wraps(keyed)
    def binds(c, x):
        return keyed(c, x, key=jax.random.key(0))

    @functools.wraps(lambda c, x: (c + x, c))
    def draws(c, x, *, key):
        return c + jax.random.uniform(key), x

    @functools.wraps(keyed)
    def passes(*args, **kwargs):
        return keyed(*args, **kwargs)

    treescan.scan(binds, 0.0, XS)
    treescan.scan(draws, 0.0, XS, key=jax.random.key(1))
    treescan.scan(passes, 0.0, XS, key=jax.random.key(1))

    def masked(c, x, *, valid):
        return c + jnp.where(valid, x, 0).sum(), valid

    xs, lengths, passes = jnp.ones((3, 2)), jnp.array([3, 1]), functools.wraps(masked)(lambda *a, **k: masked(*a, **k))
    total, seen = treescan.mask_scan(passes, 0.0, xs, lengths=lengths, row_axes={"carry": None})
    assert total == 4
    assert_bitwise(seen, jnp.array([[1, 1], [1, 0], [1, 0]], bool))


def test_an_old_carry_as_output_is_no_swapped_pair():
    for body in (lambda c, x: ((c + x).astype(jnp.bfloat16), c), lambda c, x: (jnp.append(c, x), c)):
        with pytest.raises(treescan.errors.CarryError):
            treescan.scan(body, jnp.ones(1), XS)


def test_a_static_call_has_no_self():
    class Step:
        @staticmethod
        def __call__(h, x, valid):
            return h + jnp.where(valid, x, jnp.nan), None

    carry, _ = treescan.mask_scan(Step(), jnp.zeros(2), jnp.ones((3, 2)), lengths=jnp.array([1, 3]))
    assert carry.tolist() == [1, 3]
    with pytest.raises(treescan.errors.BodyError, match="needs the keyword `valid`"):
        treescan.fold(Step(), 0.0, jnp.ones(3))


def test_of_a_wrapper_that_takes_anything_nothing_is_concluded():
    """As flax.nnx wraps bodies: what is called takes (carry, x), what it claims to wrap takes something else."""

    def other(w: Float[Array, "a b"], h: Float[Array, " a"], x, *, rate):
        raise AssertionError

    @functools.wraps(other)
    def adapted(*args, **kwargs):
        carry, x = args
        return carry + x, x

    class Adapter:
        def __init__(self):
            functools.update_wrapper(self, other)

        def __call__(self, *args):
            return adapted(*args)

    for body in (Adapter(), adapted):
        assert treescan.scan(body, 0.0, XS)[0] == jnp.sum(XS)
