"""Results made by hand."""

from __future__ import annotations

from typing import Any

from openelm_mlx.benchmarks.bandwidth import Bandwidth
from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.benchmarks.results import Result, Row

MACHINE: dict[str, Any] = {
    "chip": "Apple M2 Max",
    "cores": 12,
    "memory_bytes": 68_719_476_736,
    "gpu": "Apple M2 Max",
    "os": "macOS",
    "os_version": "14.4.1",
    "architecture": "arm64",
    "python": "3.12.1",
    "versions": {"openelm-mlx": "0.1.0", "mlx": "0.32.4", "mlx-lm": None},
    "backend": "metal",
    "blas": None,
    "load_average": [1.5, 1.25, 1.0],
    "power": {"source": "AC Power", "mode": "automatic", "thermal": "no warning"},
    "environment": {},
}


def row(speed: float = 100.0, **changes: Any) -> Row:
    """A row whose prompt, generation and total speed are `speed`, `speed` and half of it."""
    values: dict[str, Any] = {
        "peer": "openelm-mlx",
        "model": "OpenELM-270M",
        "precision": "bf16",
        "prompt_tokens": 36,
        "gen_tokens": 128,
        "prompt_tps": Spread.of([speed]),
        "generation_tps": Spread.of([speed]),
        "total_tps": Spread.of([speed / 2]),
    }
    return Row(**{**values, **changes})


def result(*rows: Row, **changes: Any) -> Result:
    """A result with these rows."""
    values: dict[str, Any] = {
        "name": "quick",
        "command": ("openelm", "bench"),
        "time": "2025-03-04T05:06:07+00:00",
        "machine": MACHINE,
        "protocol": {"prompt_tokens": 36, "gen_tokens": 128},
        "bandwidth": Bandwidth(400e9, "a product"),
        "rows": rows,
    }
    return Result(**{**values, **changes})
