"""Names and signatures of the integrations are those of flax: what a release of flax changes is seen here."""

import inspect
from typing import Any

import pytest
from flax import linen as nn, nnx

from treescan.integrations.flax import scan
from treescan.integrations.nnx import scan as nnx_scan

pytestmark = pytest.mark.quick


class Cell(nn.Module):
    def __call__(self, h: Any, x: Any) -> Any:
        return h + x, h


def test_modules_are_named_by_flax_s_transform() -> None:
    assert scan(Cell).__name__ == nn.scan(Cell).__name__ == "ScanCell"


MODES = [] if hasattr(nnx, "set_graph_mode") else ["graph", "graph_updates"]


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        (scan, nn.scan, ["remat", "save", "progress", "check_finite"]),
        (nnx_scan, nnx.scan, [*MODES, "remat", "progress", "check_finite"]),
    ],
    ids=["linen", "nnx"],
)
def test_the_signature_is_flax_s_and_a_few_more(ours: Any, theirs: Any, more: list[str]) -> None:
    own, flax_s = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    assert [name for name in own if name not in more] == list(flax_s)
    assert all(own[name].kind is inspect.Parameter.KEYWORD_ONLY for name in more)
    for name, parameter in flax_s.items():
        if name != "f":
            assert own[name].kind == parameter.kind, name
            default = own[name].default
            assert default == parameter.default or (not default and not parameter.default), name
