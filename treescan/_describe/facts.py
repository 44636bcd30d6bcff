"""What a description consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Leaf:
    """One array of a call.

    Attributes:
        path: where it is, in the user's names.
        type: as JAX prints it; of what is scanned over and of outputs, that of one step.
        bytes: of that type.
        sharding: how it is spread over devices, where it is.
        changes: for a leaf of the carry, whether any step changes it.
    """

    path: str
    type: str
    bytes: int
    sharding: str | None = None
    changes: bool = True


@dataclass(frozen=True)
class Saved:
    """What each step saves for the gradient at one line of the body.

    Attributes:
        place: the line, as in `model.py:31`; "the carry" for the carry itself.
        operations: what computes it.
        types: the types of the arrays.
        bytes: of all of them.
    """

    place: str
    operations: tuple[str, ...]
    types: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What the gradient needs under one `remat`.

    Attributes:
        remat: the option.
        used: whether it is what the call says.
        sizes: the steps of the nested chunks, innermost first.
        bytes: what the gradient needs beside its arguments and results; None: it cannot be taken.
        evaluations: how often the gradient evaluates each step, the forward pass included.
        refusal: why the gradient cannot be taken.
    """

    remat: Any
    used: bool
    sizes: tuple[int, ...]
    bytes: int | None
    evaluations: int
    refusal: str | None = None


@dataclass(frozen=True)
class Finding:
    """Something in a call that is worth changing.

    Attributes:
        code: `TS001` and so on.
        says: what was found, and where.
        cure: what to do about it.
    """

    code: str
    says: str
    cure: str


@dataclass(frozen=True)
class Facts:
    """All that is known of a call; `description.Description` says of each field what it is."""

    verb: str
    body: str
    unit: str
    steps: int
    at_most: bool
    reverse: bool
    carry: tuple[Leaf, ...]
    x: tuple[Leaf, ...]
    y: tuple[Leaf, ...]
    constants: tuple[Leaf, ...]
    saved: tuple[Saved, ...]
    tiers: tuple[int, ...]
    plans: tuple[Plan, ...]
    forward_bytes: int | None
    result_bytes: int | None
    operations: int
    flops: int
    findings: tuple[Finding, ...]

    @property
    def plan(self) -> Plan:
        """What the gradient of this very call needs."""
        return self.plans[0]
