"""Prints a map of the package: which functions run in a first call of a verb, in which order, and what each does.

Run it in a process of its own: what an earlier call has traced does not run again.
"""

import argparse
import ast
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import treescan

PACKAGE = Path(treescan.__file__).parent

for module in pkgutil.walk_packages(treescan.__path__, "treescan."):  # what is loaded late would be entered as it loads
    if not module.name.startswith(("treescan.integrations", "treescan.__main__")):
        importlib.import_module(module.name)

SHOWN = (
    "_verbs/scan.py:scan",
    "_verbs/mask_scan.py:mask_scan",
    "_verbs/prepare.py:run_scan",
    "_verbs/prepare.py:prepare",
    "_program/program.py:execute",
    "_transforms/call.py:Call.lay",
    "_rows/find_rows.py:FindRows.__call__",
    "_trace/hoist.py:hoist",
    "_body/call.py:CallBody.__call__",
    "_body/carry.py:check_carry",
    "_rows/mask.py:Mask.__call__",
    "_rows/fill.py:KeepRows.__call__",
    "_rows/skip.py:Skip.__call__",
    "_program/nest.py:run_nested",
    "_program/plan.py:plan",
    "_loop/chunk.py:run_chunked",
    "_loop/run.py:run",
    "_faster/in_place.py:InPlace.__call__",
    "_faster/writing.py:write_chunks",
    "_faster/saved.py:push_forward",
    "_rows/mask.py:Masked.__call__",
    "_program/nest.py:finish",
    "_verbs/prepare.py:restored",
)
"""The functions that carry the story. The others check arguments, read trees, or are asked whether there is work."""


class Walk(NamedTuple):
    """What runs in one call.

    Attributes:
        functions: those of the package, as `file:name`, in the order in which they are first entered.
        calls: how many calls are made there.
    """

    functions: dict[str, None]
    calls: int

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {name.partition(":")[0] for name in self.functions}


def walked(call: Callable[[], object]) -> Walk:
    """What runs in a call."""
    found: dict[str, None] = {}
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            calls += 1
            if not code.co_name.startswith("<"):
                file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
                found.setdefault(f"{file}:{code.co_qualname}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(found, calls)


def walks() -> dict[str, Walk]:
    """A first call of `scan`, of `mask_scan`, and of the gradient of `mask_scan`, each with a body of its own."""
    xs, h, lengths = jnp.ones((40, 4, 3)), jnp.zeros((4, 3)), jnp.array([40, 3, 9, 20])

    def body() -> Callable[[Any, Any], Any]:
        return lambda h, x: (jnp.tanh(h + x), h)

    calls = {
        "`scan`": lambda f: treescan.scan(f, h, xs),
        "`mask_scan`": lambda f: treescan.mask_scan(f, h, xs, lengths=lengths),
        "its gradient": lambda f: jax.grad(lambda h: treescan.mask_scan(f, h, xs, lengths=lengths)[0].sum())(h),
    }
    return {name: walked(lambda call=call: call(body())) for name, call in calls.items()}


def does(function: str) -> str:
    """The first sentence about a function, or about its class."""
    file, _, name = function.partition(":")
    tree: Any = ast.parse((PACKAGE / file).read_text())
    said = None
    for part in name.split("."):
        found = [node for node in tree.body if getattr(node, "name", None) == part]
        tree = found[-1]  # after its overloads
        said = ast.get_docstring(tree) or said
    assert said, function
    return said.split("\n\n")[0].replace("\n", " ")


def page() -> str:
    """The map, as a table in the order of `mask_scan`, with how many files and calls each verb takes."""
    found = walks()
    shown = {verb: [name for name in walk.functions if name in SHOWN] for verb, walk in found.items()}
    orders = {verb: {name: n for n, name in enumerate(names, 1)} for verb, names in shown.items()}
    order = list(dict.fromkeys([SHOWN[0], *shown["`mask_scan`"], *shown["its gradient"]]))
    assert sorted(order) == sorted(SHOWN), "a function that is shown does not run"
    lines = [
        "| function, and what it does | " + " | ".join(found) + " |",
        "|---|" + "--:|" * len(found),
        *(
            f"| `{name.replace(':', ' ')}`<br>{does(name)} "
            f"| {' | '.join(str(orders[verb].get(name, '')) for verb in found)} |"
            for name in order
        ),
        f"| files that it enters | {' | '.join(str(len(walk.files)) for walk in found.values())} |",
        f"| calls of functions, about | {' | '.join(f'{50 * round(walk.calls / 50):,}' for walk in found.values())} |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", action="store_true", help="only how many files and calls each verb makes")
    if parser.parse_args().counts:
        for verb, walk in walks().items():
            print(f"{verb}: {len(walk.files)} files, {walk.calls} calls")  # noqa: T201
    else:
        print(page(), end="")  # noqa: T201
