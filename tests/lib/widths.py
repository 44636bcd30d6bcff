"""Which lines are wider than a terminal."""

import re
from collections.abc import Iterator

from treescan._text import WIDTH

# Why a line may be wider, by what it looks like.
WIDER = {"an address that cannot be broken": re.compile(r"\s*(# )?\S*https?://\S+")}


def too_wide(code: str) -> Iterator[str]:
    for line in code.splitlines():
        if len(line) > WIDTH and not any(pattern.fullmatch(line) for pattern in WIDER.values()):
            yield line
