"""The description of the package on an index: README.md without links that lead nowhere there.

hatchling calls this while it builds the package. Links to files of the repository become absolute if `[project.urls]`
has a `Source`, and plain text if it has none; what is only a list of links is then left out.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

REFERENCE = re.compile(r"^\[([\w-]+)\]: (?!https?:)(\S+)\n?", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]+)\](?:\((?!https?:)([^)]+)\)|\[([\w-]+)\])")
ONLY_LINKS = re.compile(r"<!-- links -->.*?<!-- /links -->\n+", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
TITLE = re.compile(r'^```python title="[^"]*"$', re.MULTILINE)


def description(readme: str, source: str | None, version: str) -> str:
    """README.md as an index shows it."""
    targets = dict(REFERENCE.findall(readme))

    def absolute(link: re.Match[str]) -> str:
        image, text, target, name = link.groups()
        target = target or targets.get(name)
        if target is None:
            return link[0]  # brackets that are no link
        kind = "raw" if image else "blob"
        if source is not None:
            return f"{image}[{text}]({source}/{kind}/v{version}/{target})"
        return "" if image else text

    if source is None:
        readme = ONLY_LINKS.sub("", readme)
    prose = re.split(r"(^```.*?^```$)", TITLE.sub("```python", COMMENT.sub("", readme)), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if n % 2 else LINK.sub(absolute, REFERENCE.sub("", part)) for n, part in enumerate(prose))


class Readme(MetadataHookInterface):  # type: ignore[misc]
    """The hook that pyproject.toml names."""

    def update(self, metadata: dict) -> None:  # type: ignore[type-arg]
        """Sets the description."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = description(readme, metadata.get("urls", {}).get("Source"), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
