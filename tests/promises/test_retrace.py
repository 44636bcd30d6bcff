"""What `RetraceWarning` says differs from the last trace: the whole text for each kind of difference."""

import collections
import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import treescan


@pytest.fixture(autouse=True)
def _warn(monkeypatch):
    monkeypatch.setenv("TREESCAN_WARN_RETRACE", "1")
    monkeypatch.setattr("treescan._loop.retrace._seen", collections.Counter())


def said(run):
    """The texts of the warnings, this file's lines counted from where `run` begins."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert {(w.category, w.filename) for w in caught} <= {(treescan.RetraceWarning, __file__)}
    return [str(w.message).partition("\n")[0] for w in caught]


def fresh():
    """A body that was not seen before."""

    def step(carry, x):
        return jax.tree.map(lambda leaf: leaf + (0 if x is None else jnp.sum(x).astype(leaf.dtype)), carry), None

    return step


ZERO = jnp.float32(0)
ONES = jnp.ones(3)
PADDED = "Pad to a few shapes: `treescan.pad` and `treescan.repad` do."
TYPES = {
    "shape": (
        lambda f: [treescan.scan(f, ZERO, jnp.ones((3, n))) for n in (4, 5)],
        f"the shape: xs is float32[3,5], was float32[3,4]. {PADDED}",
    ),
    "dtype": (
        lambda f: [treescan.scan(f, ZERO.astype(t), ONES.astype(t)) for t in ("float32", "bfloat16")],
        "the dtype: init is bfloat16[], was float32[]; xs is bfloat16[3], was float32[3]. Cast to one dtype before "
        "the call.",
    ),
    "weak type": (
        lambda f: [treescan.scan(f, init, ONES) for init in (0.0, ZERO)],
        "the weak type: init is float32[], was ~float32[]. Pass an array in place of a Python number.",
    ),
    "structure": (
        lambda f: [treescan.scan(f, init, ONES) for init in ({"h": ZERO}, {"h": ZERO, "c": ZERO})],
        'the structure: init["c"] is there. Pass trees of one structure, with zeros in the place of what is not '
        "there yet.",
    ),
    "leaf that is gone": (
        lambda f: [treescan.scan(f, init, ONES) for init in ([ZERO, ZERO], [ZERO])],
        "the structure: init[1] is gone. Pass trees of one structure, with zeros in the place of what is not there "
        "yet.",
    ),
    "container": (
        lambda f: [treescan.scan(f, init, ONES) for init in ([ZERO], (ZERO,))],
        "the structure: containers of another type. Pass trees of one structure, with zeros in the place of what is "
        "not there yet.",
    ),
    "steps": (
        lambda f: [treescan.scan(f, ZERO, None, length=n) for n in (3, 4)],
        "the number of steps: length is 4, was 3. It is a part of the program. `treescan.fori` and "
        "`treescan.while_scan` take one that changes, up to a `max_length`.",
    ),
    "many leaves": (
        lambda f: [treescan.scan(f, [jnp.ones(n)] * 5, ONES) for n in (1, 2)],
        "the shape: init[0] is float32[2], was float32[1]; init[1] is float32[2], was float32[1]; init[2] is "
        f"float32[2], was float32[1]; and 2 more. {PADDED}",
    ),
}


@pytest.mark.parametrize("kind", TYPES)
def test_each_kind_of_difference_has_its_text(kind):
    run, expected = TYPES[kind]
    body = fresh()
    line = body.__code__.co_firstlineno
    start = f"`step` (tests/promises/test_retrace.py:{line}) is traced and compiled by `scan` for 2 sets of types. "
    texts = said(functools.partial(run, body))
    assert texts == [f"{start}What differs from the last trace is {expected}"]


def keep(carry, x):
    return carry, x


def test_a_static_value_is_named():
    texts = said(lambda: [treescan.scan(keep, (ZERO, act), ONES) for act in (jnp.sin, jnp.cos)])
    assert [text.partition("last trace is ")[2] for text in texts] == [
        "the static value: init[1] is `cos`, was `sin`. What is no array is a part of the program: pass an array "
        "where the value changes."
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
    def block(w, x):
        return x * w

    texts = said(lambda: [treescan.fold_layers(block, ZERO, jnp.ones(n)) for n in (2, 3)])
    assert [text.partition("is traced and compiled by ")[2] for text in texts] == [
        f"`fold_layers` for 2 sets of types. What differs from the last trace is the shape: layers is float32[3], was "
        f"float32[2]. {PADDED}"
    ]


def test_outer_traces_are_not_warned_of():
    def body(c, x):
        return c + jnp.sum(x)

    assert said(lambda: [jax.jit(lambda xs: treescan.fold(body, ZERO, xs))(jnp.ones(n)) for n in (2, 3, 4)]) == []


# Identity.


class Step:
    def __call__(self, carry, x):
        return carry, x

    def method(self, carry, x):
        return carry, x


def nested():
    def inner(carry, x):
        return carry, x

    return inner


STEP = Step()
IDENTITIES = {
    "lambda": (lambda: treescan.scan(lambda c, x: (c, x), ZERO, ONES), "line {lambda} makes this lambda anew each time "
               "that `<lambda>` runs"),
    "nested": (lambda: treescan.scan(nested(), ZERO, ONES), "line {inner} makes this nested function anew each time "
               "that `nested` runs"),
    "partial": (lambda: treescan.scan(functools.partial(keep), ZERO, ONES), "a new `functools.partial` is made for "
                "the call at tests/promises/test_retrace.py:{call}"),
    "method": (lambda: treescan.scan(STEP.method, ZERO, ONES), "a bound method is a new object each time that it is "
               "looked up, for the call at tests/promises/test_retrace.py:{call}"),
    "object": (lambda: treescan.scan(Step(), ZERO, ONES), "a new `Step` is made for the call at "
               "tests/promises/test_retrace.py:{call}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", IDENTITIES)
def test_a_new_identity_is_named_with_its_line(kind):
    run, expected = IDENTITIES[kind]
    call = run.__code__.co_firstlineno
    inner = nested().__code__.co_firstlineno
    places = {"{lambda}": str(call), "{call}": str(call), "{inner}": str(inner)}
    for name, line in places.items():
        expected = expected.replace(name, line)
    (text,) = said(lambda: [run() for _ in range(2)])
    _, _, rest = text.partition(" was passed as ")
    assert rest == (
        f"2 different function objects, and traced and compiled 2 times. Its identity differs from that of the last "
        f"trace: {expected}. Define the body once, outside of the code that calls the scan, or wrap that code in "
        "`jax.jit`."
    )
