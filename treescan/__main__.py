"""Commands of an installed treescan.

`python -m treescan` prints the versions that a report of a bug needs, `--version` only that of treescan.
`python -m treescan explain CarryError` explains an error, `explain` alone lists all of them.
`python -m treescan plugins` lists the custom carries of installed distributions.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import textwrap
import warnings
from pathlib import Path

from . import __version__
from ._errors import PUBLIC, TreescanError
from ._text import WIDTH, table
from .carries._registry import GROUP, discovers, load, plugins


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit status: 1 if a plugin failed.
    """
    parser = argparse.ArgumentParser("python -m treescan")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        dest="command", metavar="command", description="Without a command: the versions that a report of a bug needs."
    )
    kinds = {kind.__name__: kind for kind in (TreescanError, *PUBLIC)}
    explaining = commands.add_parser("explain", help="says what an error or a warning means, and what to do about it")
    explaining.add_argument("name", nargs="?", help=f"one of {', '.join(kinds)}; without it, they are listed")
    commands.add_parser(
        "plugins", help="lists the custom carries that installed distributions declare, and what failed to load and why"
    )
    parsed = parser.parse_args(arguments)
    if parsed.command == "explain" and parsed.name is None:
        rows = [(name, (kind.__doc__ or "").splitlines()[0]) for name, kind in kinds.items()]
        print(table(("name", "says"), rows))  # noqa: T201, a program for a terminal
        return 0
    if parsed.command == "explain":
        name = parsed.name.removeprefix("treescan.").removeprefix("errors.")  # as a traceback prints it
        known = {kind.lower(): kind for kind in kinds}
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, 1)
            cure = f"did you mean {known[near[0]]}?" if near else f"choose from {', '.join(kinds)}"
            explaining.error(f"there is no {name}: {cure}")
        print(section(known[name.lower()], "errors.md"))  # noqa: T201, a program for a terminal
        return 0
    if parsed.command == "plugins":
        return _list_plugins()
    print(_versions())  # noqa: T201, a program for a terminal
    return 0


def _versions() -> str:
    """treescan, Python, what treescan depends on or works with, and the devices, each on a line."""
    import jax

    lines = [f"python {platform.python_version()}, {platform.platform()}"]
    for name in ("treescan", "jax", "jaxlib", "numpy", "chex", "jaxtyping", "beartype", "flax", "equinox"):
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    kinds = collections.Counter(device.device_kind for device in jax.devices())
    lines.append("devices: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items()))
    lines += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("TREESCAN_")]
    return "\n".join(lines)


def _list_plugins() -> int:
    """Loads every plugin and lists them; the exit status."""
    found = plugins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of plugins that fail, which the list names
        for plugin in found:
            # A dotted name is no package, and no value ever asks for its carries.
            if "." not in plugin.package and importlib.util.find_spec(plugin.package) is not None:
                load(plugin)
    parts = [f"No installed distribution declares custom carries (entry points in the group `{GROUP}`)."]
    if found:
        states = ["failed" if p.fault else "loads" if p.loaded else "package not installed" for p in found]
        rows = [(p.package, p.distribution, p.value, state) for p, state in zip(found, states, strict=True)]
        failed = [p for p in found if p.fault]
        parts = [table(("package", "distribution", "entry point", "state"), rows)]
        parts += [f"  {p.distribution}, {p.value}:\n{textwrap.indent(str(p.fault), '    ')}" for p in failed]
        if not discovers():
            parts.append("  Scans do not load them: the environment has TREESCAN_PLUGINS=0.")
    print("\n\n".join(parts))  # noqa: T201, a program for a terminal
    return 1 if any(plugin.fault for plugin in found) else 0


_HERE = Path(__file__).parent


_FOLDERS = (_HERE, _HERE.parent / "docs")  # in a wheel, in a checkout


_FENCE = re.compile(r"^(```\w+[^\n]*\n.*?^```)$", re.MULTILINE | re.DOTALL)


_ITEM = re.compile(r"^(?=- )", re.MULTILINE)


def section(title: str, page_name: str) -> str:
    """What a page says about one error or warning, without what only a browser uses, its lines wrapped."""
    path = next(path for folder in _FOLDERS if (path := folder / page_name).exists())
    _, text = path.read_text(encoding="utf-8").split(f"\n## {title}\n")
    text = re.sub(r"<!--.*?-->\n", "", text.split("\n## ")[0])
    shown = [f"{title}\n{'=' * len(title)}"]
    for number, part in enumerate(_FENCE.split(text)):
        if number % 2:  # code or output: the name of its file in place of what marks a block
            head, *lines, _ = part.splitlines()
            named = re.search(r'title="(.*)"', head)
            shown.append("\n".join([f"# {named[1]}", *lines] if named else lines))
            continue
        for paragraph in filter(None, map(str.strip, part.split("\n\n"))):
            plain = re.sub(r"\*\*|\[([^]]*)\]\([^)]*\)", lambda link: link[1] or "", paragraph)
            shown.append("\n".join(map(_wrapped, filter(None, _ITEM.split(plain)))))
    return "\n\n".join(shown)


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    text = " ".join(text.split())
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # who reads it, for example `head`, has enough; Python would flush once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
