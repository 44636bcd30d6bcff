"""What `RetraceWarning` says differs from the last trace: the whole text for each kind of difference."""

import collections
import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import treescan

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _warn(monkeypatch):
    monkeypatch.setenv("TREESCAN_WARN_RETRACE", "1")
    monkeypatch.setattr("treescan._loop.retraces._seen", collections.Counter())


def warned(run):
    """The warnings: each is about a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert {(w.category, w.filename) for w in caught} <= {(treescan.RetraceWarning, __file__)}
    return caught


def said(run):
    """The texts of the warnings."""
    return [str(w.message).partition("\n")[0] for w in warned(run)]


def fresh():
    """A body that was not seen before."""

    def step(carry, x):
        return jax.tree.map(lambda leaf: leaf + (0 if x is None else jnp.sum(x).astype(leaf.dtype)), carry), None

    return step


ZERO = jnp.float32(0)
ONES = jnp.ones(3)
PADDED = "Pad to a few shapes: `treescan.pad` and `treescan.repad` do."
ALIKE = "Pass trees with the same structure, with zeros for the parts that do not exist yet."
TYPES = {
    "shape": (
        lambda f: [treescan.scan(f, ZERO, jnp.ones((3, n))) for n in (4, 5)],
        f"the shape changed: xs is float32[3,5], was float32[3,4]. {PADDED}",
    ),
    "dtype": (
        lambda f: [treescan.scan(f, ZERO.astype(t), ONES.astype(t)) for t in ("float32", "bfloat16")],
        "the dtype changed: init is bfloat16[], was float32[]; xs is bfloat16[3], was float32[3]. Cast to one dtype "
        "before the call.",
    ),
    "weak type": (
        lambda f: [treescan.scan(f, init, ONES) for init in (0.0, ZERO)],
        "the weak type changed: init is float32[], was ~float32[]. Pass an array instead of a Python number.",
    ),
    "structure": (
        lambda f: [treescan.scan(f, init, ONES) for init in ({"h": ZERO}, {"h": ZERO, "c": ZERO})],
        f'the structure changed: init["c"] is there. {ALIKE}',
    ),
    "leaf that is gone": (
        lambda f: [treescan.scan(f, init, ONES) for init in ([ZERO, ZERO], [ZERO])],
        f"the structure changed: init[1] is gone. {ALIKE}",
    ),
    "container": (
        lambda f: [treescan.scan(f, init, ONES) for init in ([ZERO], (ZERO,))],
        f"the structure changed: containers of another type. {ALIKE}",
    ),
    "steps": (
        lambda f: [treescan.scan(f, ZERO, None, length=n) for n in (3, 4)],
        "the number of steps changed: length is 4, was 3. It is compiled into the program. `treescan.fori` and "
        "`treescan.while_scan` accept a number that changes, up to a `max_length`.",
    ),
    "many leaves": (
        lambda f: [treescan.scan(f, [jnp.ones(n)] * 5, ONES) for n in (1, 2)],
        "the shape changed: init[0] is float32[2], was float32[1]; init[1] is float32[2], was float32[1]; init[2] is "
        f"float32[2], was float32[1]; and 2 more. {PADDED}",
    ),
}


@pytest.mark.parametrize("kind", TYPES)
def test_each_kind_of_difference_has_its_text(kind):
    run, expected = TYPES[kind]
    body = fresh()
    line = body.__code__.co_firstlineno
    start = f"`scan` traced and compiled `step` (tests/promises/test_retrace.py:{line}) for 2 sets of types. "
    texts = said(functools.partial(run, body))
    assert texts == [f"{start}Since the last trace, {expected}"]


def test_a_static_value_is_named():
    texts = said(lambda: [treescan.scan(keep, (ZERO, act), ONES) for act in (jnp.sin, jnp.cos)])
    assert [text.partition("last trace, ")[2] for text in texts] == [
        "the static value changed: init[1] is `cos`, was `sin`. A value that is not an array is compiled into the "
        "program. If it changes, pass an array."
    ]


def test_types_are_counted_by_verb_and_warned_of_at_powers_of_two():
    def body(c, x):
        return c + jnp.sum(x)

    def run():
        for n in (*range(1, 10), 3, 4, 1):
            treescan.fold(body, ZERO, jnp.ones(n))
        treescan.accumulate(body, ZERO, ONES)

    counts = [text.partition(" sets of types")[0].rpartition(" for ")[2] for text in said(run)]
    assert counts == ["2", "4", "8"]


def test_layers_are_warned_of():
    block = lambda w, x: x * w  # noqa: E731
    texts = said(lambda: [treescan.fold_layers(block, ZERO, jnp.ones(n)) for n in (2, 3)])
    assert [text.partition(") for ")[2] for text in texts] == [
        f"2 sets of types. Since the last trace, the shape changed: layers is float32[3], was float32[2]. {PADDED}"
    ]


def test_outer_traces_are_not_warned_of():
    def body(c, x):
        return c + jnp.sum(x)

    assert said(lambda: [jax.jit(lambda xs: treescan.fold(body, ZERO, xs))(jnp.ones(n)) for n in (2, 3, 4)]) == []
    own = jax.jit(lambda n, xs: treescan.mask_scan(lambda c, x: (c, x), n, xs, lengths=2))
    assert said(lambda: [own(jnp.float32(n), jnp.ones(n)) for n in (2, 3, 4)]) == []


# Identity.


def keep(carry, x):
    return carry, x


class Step:
    def __call__(self, carry, x):
        return carry, x

    method = __call__


def nested():
    def inner(carry, x):
        return carry, x

    return inner


STEP = Step()
IDENTITIES = {
    "lambda": (lambda: treescan.scan(lambda c, x: (c, x), ZERO, ONES), "line {lambda} creates a new lambda each time "
               "that `<lambda>` runs"),
    "nested": (lambda: treescan.scan(nested(), ZERO, ONES), "line {inner} creates a new nested function each time "
               "that `nested` runs"),
    "partial": (lambda: treescan.scan(functools.partial(keep), ZERO, ONES), "the call at "
                "tests/promises/test_retrace.py:{call} creates a new `functools.partial`"),
    "method": (lambda: treescan.scan(STEP.method, ZERO, ONES), "the call at tests/promises/test_retrace.py:{call} "
               "looks up a bound method, which is a new object each time"),
    "object": (lambda: treescan.scan(Step(), ZERO, ONES), "the call at "
               "tests/promises/test_retrace.py:{call} creates a new `Step`"),
}  # fmt: skip


@pytest.mark.parametrize("kind", IDENTITIES)
def test_a_new_identity_is_named_with_its_line(kind):
    run, expected = IDENTITIES[kind]
    call = run.__code__.co_firstlineno
    expected = expected.format(**{"lambda": call, "call": call, "inner": nested().__code__.co_firstlineno})
    (warning,) = warned(lambda: [run() for _ in range(2)])
    assert warning.lineno == call
    _, _, rest = str(warning.message).partition("\n")[0].partition(" was passed as ")
    assert rest == (
        f"2 different function objects, so it was traced and compiled 2 times. The last call passed a new object: "
        f"{expected}. Define the body once, outside of the code that calls the scan, or wrap that code in "
        "`jax.jit`."
    )


def test_new_identities_are_warned_of_at_powers_of_two():
    texts = said(lambda: [treescan.scan(lambda c, x: (c + x, x), ZERO, ONES) for _ in range(9)])
    counts = [text.partition(" different function objects")[0].rpartition(" ")[2] for text in texts]
    assert counts == ["2", "4", "8"]


def test_every_verb_warns_of_new_identities():
    for run in (
        lambda: treescan.accumulate(lambda c, x: c + x, ZERO, ONES),
        lambda: treescan.fori(0, 3, lambda i, c: c, ONES),
        lambda: treescan.mask_scan(lambda c, x: (c, x), ZERO, ONES, lengths=2),
    ):
        assert said(run) == []
        assert "2 different function objects" in said(run)[0]


def test_the_warning_of_a_second_trace_points_at_the_call():
    """An init that is promoted makes JAX trace the body again."""

    def run():
        return treescan.scan(lambda total, x: (total + x, x), 0, ONES)

    assert [warning.lineno for warning in warned(run)] == [run.__code__.co_firstlineno + 1]


def test_nothing_is_warned_of_unless_asked_for(monkeypatch):
    monkeypatch.delenv("TREESCAN_WARN_RETRACE")
    assert said(lambda: [treescan.scan(lambda c, x: (c + x, x), 0, ONES) for _ in range(3)]) == []
