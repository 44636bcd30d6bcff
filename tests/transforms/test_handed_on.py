"""What a loop hands on or reads unchanged is not copied: with any `remat`, it costs no memory."""

from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
from handed_on import BYTES, LOOPS, PROGRAMS, H, Loop, N, Program, T, read_by_hand, read_in_steps
from thin import by_turns, parametrize

from treescan import Remat, while_scan

REMATS: dict[str, Any] = {
    "none": None,
    "step": "step",
    "chunk": Remat(levels=2, chunk=3),  # two steps are left over
    "auto": "auto",
}
WITHOUT_AUTO = ("while_scan", "scan_layers", "fold_layers", "pattern")  # how the names of what refuses it begin
CASES = [(verb, remat) for verb in PROGRAMS for remat in REMATS if remat != "auto" or not verb.startswith(WITHOUT_AUTO)]


def temporary(function: Any, given: Any, *, donates: bool) -> float:
    """The temporary memory of a program, in sizes of the array; it may write results over what is donated."""
    donated = (0,) if donates else ()
    compiled: Any = jax.jit(function, donate_argnums=donated).lower(given).compile()
    return compiled.memory_analysis().temp_size_in_bytes / BYTES


def forward(program: Program, remat: Any, *, on: bool) -> Any:
    return lambda given: program.run(given, remat, on)


def gradient(program: Program, remat: Any, *, on: bool) -> Any:
    def loss(given: Any) -> Any:
        h, arrays = program.run(given, remat, on)
        return (h**2).sum(), (h, arrays)

    return jax.grad(loss, has_aux=True)


@by_turns(21, case={f"{verb} {remat}": (verb, remat) for verb, remat in CASES})
def test_handing_on_takes_no_memory(case: tuple[str, str]) -> None:
    verb, remat = case
    program, plan = PROGRAMS[verb], REMATS[remat]
    given = program.given()
    control = temporary(forward(program, plan, on=False), given, donates=False)
    # Without donation, XLA may write the copy to the result itself, so that it does not show.
    assert temporary(forward(program, plan, on=True), given, donates=True) <= control + 0.1
    if remat == "none" and verb.endswith(("state", "state, rest")):
        return  # without `remat`, stacks of states are carried, and so are their gradients
    control = temporary(gradient(program, plan, on=False), given, donates=False)
    assert temporary(gradient(program, plan, on=True), given, donates=False) <= control + 0.1


READ_WITH = {"step": "step", "chunk": Remat(levels=2, chunk=3)}
WAYS = {"closed over": False, "carried": True}
"""Whether an array is in the carry."""


def squares(function: Any) -> Any:
    return lambda *args: (function(*args) ** 2).sum()


def memory_of_gradient(function: Any, w: jax.Array) -> float:
    """The temporary memory of the gradient in h alone, in sizes of the array."""
    return hlo.Program(jax.grad(squares(function)), H, w).temp_bytes / w.nbytes


@by_turns(4, loop=LOOPS, remat=READ_WITH, carried=WAYS)
def test_reading_an_array_that_is_not_differentiated_takes_no_memory(loop: Loop, remat: Any, carried: bool) -> None:
    """JAX before 0.12 returned a copy of it from each branch, to the gradient."""
    w = jnp.full((T, N, N), 0.01)
    control = memory_of_gradient(read_by_hand, w)
    assert memory_of_gradient(lambda h, w: read_in_steps(loop, h, w, remat, carried), w) <= control + 0.1


def test_chunks_that_are_left_out_together_take_no_memory_either() -> None:
    steps = 24
    w = jnp.full((steps, N, N), 0.01)

    def run(h: Any, w: Any) -> Any:
        def goes_on(h: Any) -> Any:
            return h.sum() < 1e9

        def step(h: Any, i: Any) -> Any:
            return jnp.tanh(h @ w[i]), None

        return while_scan(goes_on, step, h, jnp.arange(steps), remat=Remat(levels=2, chunk=2))[0]

    assert memory_of_gradient(run, w) < 0.3


@parametrize("loop", {name: LOOPS[name] for name in ("mask_scan, chunk", "while_scan")})
def test_an_array_may_begin_with_nan(loop: Loop) -> None:
    w = jnp.full((T + 1, N, N), 0.01).at[0].set(jnp.nan)  # no step reads that part

    def run(h: Any) -> Any:
        return squares(lambda h: loop(lambda h, i: jnp.tanh(h @ w[i + 1]), h, "step"))(h)

    assert np.isfinite(jax.jit(jax.grad(run))(H)).all()
