"""Prints a map of the package: which files a first call of a verb enters, in which order, and what each of them is.

Run it in a process of its own: what an earlier call has traced is not entered again.
"""

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import treescan

PACKAGE = Path(treescan.__file__).parent

for module in pkgutil.walk_packages(treescan.__path__, "treescan."):  # what is loaded late would be entered as it loads
    if not module.name.startswith(("treescan.integrations", "treescan.__main__")):
        importlib.import_module(module.name)


def entered(call: Callable[[], object]) -> tuple[dict[str, str], int]:
    """The files that a call enters, in this order, each with its first function; and how many calls are made there."""
    first: dict[str, str] = {}
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            count += 1
            if not code.co_name.startswith("<"):
                first.setdefault(Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return first, count


def walks() -> dict[str, tuple[dict[str, str], int]]:
    """A first call of `scan`, of `mask_scan`, and of the gradient of `mask_scan`, each with a body of its own."""
    xs, h, lengths = jnp.ones((40, 4, 3)), jnp.zeros((4, 3)), jnp.array([40, 3, 9, 20])

    def body() -> Callable[[Any, Any], Any]:
        return lambda h, x: (jnp.tanh(h + x), h)

    calls = {
        "`scan`": lambda f: treescan.scan(f, h, xs),
        "`mask_scan`": lambda f: treescan.mask_scan(f, h, xs, lengths=lengths),
        "its gradient": lambda f: jax.grad(lambda h: treescan.mask_scan(f, h, xs, lengths=lengths)[0].sum())(h),
    }
    return {name: entered(lambda call=call: call(body())) for name, call in calls.items()}


def page() -> str:
    """The map, as a table in the order of `mask_scan`, with how many files and calls each verb takes."""
    found = walks()
    numbers = {name: {file: n for n, file in enumerate(files, 1)} for name, (files, _) in found.items()}
    order = list(dict.fromkeys([*found["`mask_scan`"][0], *found["its gradient"][0], *found["`scan`"][0]]))
    functions = {file: name for files, _ in reversed(found.values()) for file, name in files.items()}
    lines = [
        "| file | enters at | " + " | ".join(found) + " |",
        "|---|---|" + "--:|" * len(found),
        *(
            f"| `{file}` | `{functions[file]}` | {' | '.join(str(numbers[name].get(file, '')) for name in found)} |"
            for file in order
        ),
        f"| files | | {' | '.join(str(len(files)) for files, _ in found.values())} |",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", action="store_true", help="only how many files and calls each verb makes")
    if parser.parse_args().counts:
        for verb, (files, calls) in walks().items():
            print(f"{verb}: {len(files)} files, {calls} calls")  # noqa: T201
    else:
        print(page(), end="")  # noqa: T201
