"""The loops at the top of the reference compute what the verbs compute: values, and gradients of all that they read."""

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import semantics
from by_hand import derived
from oracle import assert_close
from test_docs import ROOT
from thin import slow
from widths import too_wide

import treescan

SEEDS = [0, 3, *slow((1,), (2,), (4,), (5,))]  # forward with lengths, in reverse with masks; the other two are slow
STEPS, ROWS, LAYERS = 5, 3, 3
PADDING = jnp.nan


def step_of(w):
    """A body for one row and for a batch: its square root is NaN at padding, and so is its gradient."""

    def step(h, x):
        h = jnp.tanh(w * h + 0.3 * jnp.sqrt(x))
        return h, h * x

    return step


def draw(seed: int) -> tuple[np.random.Generator, Any, Any, Any, bool]:
    """Random numbers, and drawn from them: a weight, an init for each row, xs, and a direction."""
    rng = np.random.default_rng(seed)
    floats = (rng.uniform(0.2, 1.5, size) for size in ((), (ROWS,), (STEPS, ROWS)))
    return rng, *(jnp.array(drawn, jnp.float32) for drawn in floats), bool(seed % 2)


def check_mask_scan(loop: Callable[..., Any], seed: int) -> None:
    """Lengths, 0 among them, or a mask of any pattern; a fill; padding that is NaN."""
    rng, w, init, xs, reverse = draw(seed)
    lengths = rng.integers(0, STEPS + 1, ROWS)
    mask = rng.random((STEPS, ROWS)) < 0.6
    if seed % 3 == 0:
        lengths[0] = 0
        mask = np.arange(STEPS)[:, None] < lengths
    rows = {"lengths": jnp.array(lengths)} if seed % 3 == 0 else {"mask": jnp.array(mask)}
    options = {"fill": float(seed), "reverse": reverse}
    xs = jnp.where(mask, xs, PADDING)
    want = derived(lambda w, init, xs: loop(step_of(w), init, xs, mask, **options), w, init, xs)
    got = derived(lambda w, init, xs: treescan.mask_scan(step_of(w), init, xs, **rows, **options), w, init, xs)
    assert_close(got, want)


def check_resets(loop: Callable[..., Any], seed: int) -> None:
    """Each row is the loop over its own valid steps: flags at other steps have no effect."""
    rng, w, init, xs, reverse = draw(seed)
    mask = rng.random((STEPS, ROWS)) < (0.7 if seed % 3 else 2)
    resets = rng.random((STEPS, ROWS)) < 0.5
    reset_to = jnp.array(rng.uniform(-1, 1, ROWS), jnp.float32)
    xs = jnp.where(mask, xs, PADDING)

    def alone(w, init, xs, reset_to):
        last, ys = [], jnp.zeros((STEPS, ROWS))
        for b in range(ROWS):
            (valid,) = mask[:, b].nonzero()
            carry, y = loop(step_of(w), init[b], xs[valid, b], resets[valid, b], reset_to[b], reverse)
            last.append(carry)
            ys = ys.at[valid, b].set(y)
        return jnp.stack(last), ys

    def together(w, init, xs, reset_to):
        rows = {"mask": jnp.array(mask), "resets": jnp.array(resets), "reset_to": reset_to}
        return treescan.mask_scan(step_of(w), init, xs, **rows, reverse=reverse)

    assert_close(derived(together, w, init, xs, reset_to), derived(alone, w, init, xs, reset_to))


def stops(h):
    return h < 0.75


def check_while_scan(loop: Callable[..., Any], seed: int) -> None:
    """Loops that stop before the first step, in the middle, after the last step and not at all; alone, or as rows."""
    _, w, init, xs, reverse = draw(seed)
    options = {"max_length": STEPS - seed % 2, "fill": float(seed), "reverse": reverse}

    def results(run):
        def of_rows(w, init, xs):
            if loop is semantics.while_scan_of_rows:
                return tuple(run(stops, step_of(w), init, xs, **options))
            return [tuple(run(stops, step_of(w), init[b], xs[:, b], **options)) for b in range(ROWS)]

        return derived(of_rows, w, init, xs)

    assert_close(results(treescan.while_scan), results(loop))


def check_scan_layers(loop: Callable[..., Any], seed: int) -> None:
    """Layers with parameters, an input and a state of their own, and an argument that all of them share."""
    rng, scale, x, _, reverse = draw(seed)
    random = [
        {name: jnp.array(rng.normal(size=ROWS), jnp.float32) for name in ("w", "x", "state")} for _ in range(LAYERS)
    ]
    layers = [{"w": each["w"]} for each in random]
    xs, state = ([each[name] for each in random] for name in ("x", "state"))

    def block(layer, x, own, state, scale):
        x = jnp.tanh(layer["w"] * x + own + state)
        return x, state + scale * x, {"norm": jnp.sum(x * x)}

    def verb(layers, x, xs, state, scale):
        layers, xs, state = (treescan.stack(part) for part in (layers, xs, state))
        return treescan.scan_layers(block, x, layers, xs, state=state, args=(scale,), reverse=reverse)

    def plain(layers, x, xs, state, scale):
        return loop(block, x, layers, xs, state, (scale,), reverse)

    args = (layers, x, xs, state, scale)
    assert_close(derived(verb, *args), derived(plain, *args))


CHECKS = {
    semantics.mask_scan: check_mask_scan,
    semantics.resets_of_a_row: check_resets,
    semantics.while_scan: check_while_scan,
    semantics.while_scan_of_rows: check_while_scan,
    semantics.scan_layers: check_scan_layers,
}
SHOWN = {"mask_scan": "mask_scan", "resets": "mask_scan", "while_scan": "while_scan", "scan_layers": "scan_layers"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loop", CHECKS, ids=lambda loop: loop.__name__)
def test_the_verb_computes_what_its_loop_computes(loop: Callable[..., Any], seed: int) -> None:
    CHECKS[loop](loop, seed)


@pytest.mark.parametrize("section", SHOWN)
def test_a_loop_is_short_and_at_the_top_of_its_page(section: str) -> None:
    written = (ROOT / "tests" / "lib" / "semantics.py").read_text()
    (loops,) = re.findall(
        rf"^# --8<-- \[start:{section}\]\n(.*?)^# --8<-- \[end:{section}\]", written, re.MULTILINE | re.DOTALL
    )
    functions = re.findall(r"^def .*?(?=^\S|\Z)", loops, re.MULTILINE | re.DOTALL)
    assert functions
    assert all(len(function.strip().splitlines()) <= 10 for function in functions)
    assert list(too_wide(loops)) == []
    page = (ROOT / "docs" / "reference" / f"{SHOWN[section]}.md").read_text()
    assert f'--8<-- "tests/lib/semantics.py:{section}"' in page.partition("\n::: ")[0]
