"""Writes the bytes that `plan_remat` predicts and those that XLA plans: `python scripts/plan_bytes.py`.

The table goes to benchmarks/results/plan_bytes.md. It takes some minutes, in which each gradient is compiled.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

import jax  # noqa: E402
from plan_bytes import cases  # noqa: E402

TABLE = ROOT / "benchmarks" / "results" / "plan_bytes.md"


def main() -> None:
    """Compiles all cases and writes the table."""
    lines = [f"Megabytes beside arguments and results; jax {jax.__version__} on {jax.devices()[0].platform}.", ""]
    lines += ["| gradient | plan | predicted | compiled | ratio |", "|---|---|--:|--:|--:|"]
    ratios = list[float]()
    for case in cases():
        predicted, compiled = case.predicted, case.compiled
        ratios.append(predicted / compiled)
        cells = (f"{predicted / 1e6:.3f}", f"{compiled / 1e6:.3f}", f"{ratios[-1]:.2f}")
        lines.append(f"| {case.name} | `{case.remat!r}` | {' | '.join(cells)} |")
    lines += ["", f"{len(ratios)} plans; ratios from {min(ratios):.2f} to {max(ratios):.2f}."]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
