"""`Description`: what `describe` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._errors import explain, verb as keeps_its_frame
from .._html import page
from .facts import Facts
from .plot import plot_plans
from .sections import headline, sections
from .text import print_text, rich_text, text_of


@dataclass(frozen=True, repr=False)
class Description(Facts):
    """What a call of a verb does, without running it: what `treescan.describe` returns. Print it.

    In a notebook it is a table. Bytes are those of the types that the body sees: under `jax.vmap` of one element, and
    of all devices together.

    Attributes:
        verb: the name of the verb.
        body: the body, with its file and line; of several blocks each.
        unit: what a step is called: "step", "layer" or "period".
        steps: the number of steps; of a pattern, the periods.
        at_most: whether the loop may end earlier.
        reverse: whether the last step runs first.
        carry: the leaves of the carry. A leaf has `path`, `type`, `bytes`, `sharding`, and whether it `changes`.
        x: what one step is given of what is scanned over.
        y: what one step returns beside the carry.
        constants: the values that all steps share, and what the body closes over.
        saved: what each step saves for the gradient if nothing is recomputed: for each line of the body its `place`,
            the `operations`, the `types` and the `bytes`.
        tiers: the numbers of rows for which the body is made, with `compact`.
        plans: what the gradient needs: of this call first, then under other values of `remat` that the verb takes. A
            plan has `remat`, the `sizes` of its chunks, `bytes`, `evaluations` of each step, and, where there is no
            gradient, a `refusal`.
        plan: the first of them.
        forward_bytes: what the loop needs beside its arguments and results; None where the call cannot run.
        result_bytes: what its results take.
        operations: of one step, where a function such as `tanh` counts as a hundred.
        flops: of one step, where it counts as one.
        findings: what one would want to change: the `code` of each, what it `says`, and its `cure`.
    """

    def __str__(self) -> str:
        return text_of(headline(self), sections(self))

    def __repr__(self) -> str:
        codes = ", ".join(dict.fromkeys(finding.code for finding in self.findings))
        return f"<Description of {headline(self)}; findings: {codes or 'none'}>"

    def __rich__(self) -> Any:
        return rich_text(str(self))

    def _repr_html_(self) -> str:
        return page(headline(self), sections(self))

    def show(self) -> None:
        """Prints it, in colours if `rich` is installed and a terminal shows them."""
        print_text(str(self))

    @keeps_its_frame
    def plot(self, ax: Any = None) -> Any:
        """Draws what the gradient needs under each plan, with matplotlib.

        Args:
            ax: matplotlib's axes to draw in; None: new ones.

        Returns:
            The axes.

        Raises:
            ArgumentError: if matplotlib is not installed, or no plan has a gradient.
        """
        try:
            return plot_plans(headline(self), self.plans, ax)
        except Exception as error:
            explained = explain(error, "Description.plot")
        raise explained
