"""Four loops that stop when they are done, with `treescan.while_scan`.

They are a square root by Newton's method, a root finder with a tolerance, a
solver of differential equations that chooses its step sizes, and greedy
decoding that ends at a token. Each is differentiated, or mapped over several
problems. All gradients are compared with exact ones.

    python examples/early_exit.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import treescan

TEXT = Path(__file__).parent / "data" / "romeo_and_juliet.txt"
Scalar = Float[Array, ""]


def newton_sqrt(a: Scalar) -> treescan.types.WhileResult[Scalar, None]:
    """The square root of a positive number."""

    def off(x: Scalar) -> Array:
        return jnp.abs(x * x - a) > 1e-6 * a

    def step(x: Scalar, _: None) -> tuple[Scalar, None]:
        return (x + a / x) / 2, None

    return treescan.while_scan(off, step, a, max_length=40)


def find_root(
    f: Callable[[Scalar], Scalar], guess: Scalar, tolerance: float
) -> treescan.types.WhileResult[Scalar, Scalar]:
    """A root of f, by Newton's method. The ys are the errors before steps."""

    def step(x: Scalar, _: None) -> tuple[Scalar, Scalar]:
        value, slope = jax.jvp(f, (x,), (jnp.ones_like(x),))
        return x - value / slope, jnp.abs(value)

    return treescan.while_scan(
        lambda x: jnp.abs(f(x)) > tolerance, step, guess, max_length=30
    )


class Solution(NamedTuple):
    """The carry of a solver: t, y, and the next step size to try."""

    t: Scalar
    y: Scalar
    h: Scalar


def solve(
    slope: Callable[[Scalar], Scalar],
    start: Scalar,
    end: float,
    tolerance: Scalar,
) -> treescan.types.WhileResult[Solution, None]:
    """dy/dt = slope(y) from t = 0 to `end`, by Heun's method.

    The difference from Euler's method sets the next step size.
    """

    def step(now: Solution, _: None) -> tuple[Solution, None]:
        h = jnp.minimum(now.h, end - now.t)
        first = slope(now.y)
        second = slope(now.y + h * first)
        error = jnp.abs(h * (second - first)) / 2
        taken = error <= tolerance
        stretch = jnp.clip(
            0.9 * jnp.sqrt(tolerance / jnp.maximum(error, 1e-9)), 0.2, 3.0
        )
        return Solution(
            t=jnp.where(taken, now.t + h, now.t),
            y=jnp.where(taken, now.y + h * (first + second) / 2, now.y),
            h=h * jax.lax.stop_gradient(stretch),
        ), None

    begin = Solution(
        jnp.zeros_like(start), start, jnp.full_like(start, end / 10)
    )
    return treescan.while_scan(
        lambda now: now.t < end * (1 - 1e-6), step, begin, max_length=1000
    )


class Letters(NamedTuple):
    """How often each character follows each pair of characters."""

    alphabet: str
    counts: Int[Array, "letters letters letters"]


def read_letters(text: str) -> Letters:
    """Counts the characters of a text."""
    alphabet = "".join(sorted(set(text)))
    numbers = np.array([alphabet.index(letter) for letter in text])
    counts = np.zeros((len(alphabet),) * 3, np.int32)
    np.add.at(counts, (numbers[:-2], numbers[1:-1], numbers[2:]), 1)
    return Letters(alphabet, jnp.asarray(counts))


def decode(
    letters: Letters, prompt: Int[Array, " 2"], end: int
) -> treescan.types.WhileResult[Int[Array, " 2"], Int[Array, ""]]:
    """Appends the likeliest letter after the last two, until `end`. The ys
    are the letters.
    """

    def step(
        last: Int[Array, " 2"], _: None
    ) -> tuple[Int[Array, " 2"], Int[Array, ""]]:
        letter = jnp.argmax(letters.counts[last[0], last[1]]).astype(
            last.dtype
        )
        return jnp.stack([last[1], letter]), letter

    return treescan.while_scan(
        lambda last: last[1] != end, step, prompt, max_length=60, fill=end
    )


def main() -> None:
    """Runs all four."""
    numbers = jnp.array([1e-3, 2.0, 1e6])
    roots = jax.vmap(newton_sqrt)(numbers)
    slopes = jax.vmap(jax.grad(lambda a: newton_sqrt(a).carry))(numbers)
    print("Newton's square root")
    for a, root, steps, slope in zip(
        numbers, roots.carry, roots.steps, slopes, strict=True
    ):
        print(
            f"  sqrt({a:g}) = {root:.6g} in {steps} steps; "
            f"slope {slope:.6g}, exactly {0.5 / np.sqrt(a):.6g}"
        )

    def crossing(k: Scalar) -> Scalar:
        return find_root(
            lambda x: jnp.cos(x) - k * x, jnp.ones(()), 1e-6
        ).carry

    k = jnp.float32(1.5)
    x, slope = jax.value_and_grad(crossing)(k)
    print("\nwhere cos x = 1.5 x")
    print(
        f"  x = {x:.6f}; dx/dk = {slope:.6f}, "
        f"by the implicit function theorem {-x / (jnp.sin(x) + k):.6f}"
    )

    def grown(rate: Scalar, tolerance: Scalar) -> tuple[Scalar, Array]:
        ended = solve(
            lambda y: rate * y * (1 - y), jnp.float32(0.01), 10.0, tolerance
        )
        return ended.carry.y, ended.steps

    rate, tolerances = jnp.float32(1.0), jnp.array([1e-2, 1e-3, 1e-4])
    solver = jax.vmap(
        jax.value_and_grad(grown, has_aux=True), in_axes=(None, 0)
    )
    (ys, steps), slopes = jax.jit(solver)(rate, tolerances)
    exact, exact_slope = jax.value_and_grad(
        lambda r: 1 / (1 + 99 * jnp.exp(-10 * r))
    )(rate)
    print("\nlogistic growth, with adaptive steps")
    for tolerance, y, n, slope in zip(
        tolerances, ys, steps, slopes, strict=True
    ):
        off, slope_off = abs(y - exact), abs(slope - exact_slope)
        print(
            f"  tolerance {tolerance:g}: {n} steps, off by {off:.1e}, "
            f"and its gradient by {slope_off:.1e}"
        )

    letters = read_letters(TEXT.read_text())
    prompts = ["Th", "ni", "sw", "Ca"]
    encoded = jnp.array(
        [
            [letters.alphabet.index(letter) for letter in prompt]
            for prompt in prompts
        ]
    )
    written = jax.jit(
        jax.vmap(
            lambda prompt: decode(
                letters, prompt, letters.alphabet.index(" ")
            )
        )
    )(encoded)
    print("\ngreedy decoding, until the word ends")
    for prompt, word, n, stopped in zip(
        prompts, written.ys, written.steps, written.stopped, strict=True
    ):
        end = "ended" if stopped else "cut off"
        rest = "".join(letters.alphabet[i] for i in word[:n]).rstrip()
        print(f"  {prompt}{rest} ({n} letters, {end})")


if __name__ == "__main__":
    main()
