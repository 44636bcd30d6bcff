"""What a loop hands on unchanged is not copied: with any `remat`, it costs no memory to return it."""

from typing import Any

import jax
from handed_on import BYTES, PROGRAMS, Program
from thin import by_turns

from treescan import Remat

REMATS: dict[str, Any] = {
    "none": None,
    "step": "step",
    "segment": Remat(levels=2, segment=3),  # two steps are left over
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
