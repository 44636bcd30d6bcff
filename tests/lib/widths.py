"""Which lines are wider than a terminal."""

import re
from collections.abc import Iterator

from treescan._text import WIDTH

ADDRESS = re.compile(r"\s*(# )?\S*https?://\S+")  # cannot be broken


def too_wide(code: str) -> Iterator[str]:
    for line in code.splitlines():
        if len(line) > WIDTH and not ADDRESS.fullmatch(line):
            yield line
