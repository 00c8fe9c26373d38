"""The validation losses of several runs in one picture: ``python curves.py OUT.png RUN...``."""

from __future__ import annotations

import sys
from pathlib import Path

from openelm_mlx import plotting
from openelm_mlx.finetune.metrics import read_metrics


def main(out: Path, runs: list[Path]) -> None:
    """Draw the picture, and print the curves as a table."""
    curves = {run.name: _curve(run) for run in runs}
    with plotting.png(out, size=(7, 4)) as figure:
        axes = figure.add_subplot()
        for name, curve in curves.items():
            axes.plot(list(curve), list(curve.values()), ".-", label=f"{name}: {min(curve.values()):.3f}")
        axes.set(xlabel="update", ylabel="validation loss (nats a token)", ylim=(None, 6))
        axes.grid(alpha=0.3)
        axes.legend()
    print("| update |", " | ".join(curves), "|")
    for step in next(iter(curves.values())):
        print(f"| {step} |", " | ".join(f"{curve[step]:.4f}" for curve in curves.values()), "|")


def _curve(run: Path) -> dict[int, float]:
    return {line["step"]: line["valid_loss"] for line in read_metrics(run / "metrics.jsonl") if "valid_loss" in line}


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
