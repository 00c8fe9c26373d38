"""Generated tokens a second that the OpenELM paper reports. No figures from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from openelm_mlx.benchmarks.table import aligned

SOURCE = "Mehta et al. 2024, OpenELM, arXiv 2404.14619"


@dataclass(frozen=True)
class Published:
    """One figure of the paper."""

    model: str
    """By its name here."""
    size: str
    """Parameters, as the paper names the model by."""
    precision: str
    machine: str
    generation_tps: float


PUBLISHED = (
    Published("OpenELM-270M", "0.27B", "bf16", "Apple M2 Max", 212.40),
    Published("OpenELM-3B", "3.04B", "bf16", "Apple M2 Max", 33.96),
    Published("OpenELM-270M", "0.27B", "4bit", "Apple M2 Max", 256.35),
    Published("OpenELM-3B", "3.04B", "4bit", "Apple M2 Max", 60.33),
    Published("OpenELM-1_1B", "1.08B", "bf16", "NVIDIA RTX 4090", 92.15),
    Published("OLMo-1B", "1.18B", "bf16", "NVIDIA RTX 4090", 203.40),
)
"""The paper's benchmarks ran in bfloat16 (section 4.3), those it calls 4-bit apart."""


def published(model: str, precision: str) -> tuple[Published, ...]:
    """The paper's figures for a model; none for most."""
    return tuple(figure for figure in PUBLISHED if (figure.model, figure.precision) == (model, precision))


def lines(figures: tuple[Published, ...] = PUBLISHED) -> list[str]:
    """For people, beside one's own table; nothing when there are no figures."""
    if not figures:
        return []
    cells = [(f.model, f.size, f.precision, f.machine, f"{f.generation_tps:.2f}") for f in figures]
    headings = ("model", "size", "precision", "machine", "generation tok/s")
    return [f"published ({SOURCE}):", *aligned([headings, *cells], left=(0, 1, 2, 3))]
