"""What to expect on Apple's chips: estimates from bytes and kernels, fitted to the paper's figures; no measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from openelm_mlx.benchmarks.dispatches import count_mlx_lm, count_ours
from openelm_mlx.benchmarks.protocol import PROTOCOLS
from openelm_mlx.benchmarks.published import published
from openelm_mlx.benchmarks.roofline import mean_context
from openelm_mlx.benchmarks.table import aligned, number
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.loading import kv_bytes_per_token
from openelm_mlx.summary import summarize

CHIPS: Mapping[str, float] = MappingProxyType(
    {"M1": 68.25, "M2": 100.0, "M4": 120.0, "M2 Pro": 200.0, "M4 Pro": 273.0, "M2 Max": 400.0, "M3 Ultra": 819.0}
)
"""Memory bandwidth in GB/s, from Apple's technical specifications."""

_FITTED_TO = ("OpenELM-270M", "OpenELM-3B")
_FITTED_ON = "M2 Max"


@dataclass(frozen=True)
class Fit:
    """A token's time as bytes over a part of the bandwidth, plus a time for every kernel."""

    share: float
    """Part of the chip's bandwidth that reading weights reaches."""
    kernel_s: float
    """Seconds that a kernel costs beside its reading."""

    def tokens_per_s(self, nbytes: float, kernels: int, bandwidth: float) -> float:
        """Tokens a second for so many bytes and kernels a token, at `bandwidth` bytes a second."""
        return 1 / (nbytes / (self.share * bandwidth) + kernels * self.kernel_s)


@dataclass(frozen=True)
class Estimate:
    """One size in one precision."""

    model: str
    precision: str
    nbytes: float
    """Weights and keys and values read for a token, in the middle of the paper's protocol."""
    kernels: int
    tokens_per_s: dict[str, float]
    """By chip."""


@cache
def fit() -> Fit:
    """The two unknowns from the paper's two bf16 figures.

    The paper's were measured with Apple's own MLX port on the MLX of its time; it is taken to start the kernels that
    mlx-lm's model does.
    """
    (a, t), (b, u) = (_point(name) for name in _FITTED_TO)
    (bytes_a, kernels_a), (bytes_b, kernels_b) = a, b
    bandwidth = CHIPS[_FITTED_ON] * 1e9
    # t = bytes_a x + kernels_a y and u = bytes_b x + kernels_b y, where x is seconds a byte.
    determinant = bytes_a * kernels_b - bytes_b * kernels_a
    x = (t * kernels_b - u * kernels_a) / determinant
    y = (bytes_a * u - bytes_b * t) / determinant
    return Fit(share=1 / (x * bandwidth), kernel_s=y)


def _point(name: str) -> tuple[tuple[float, int], float]:
    config = OpenELMConfig.preset(name)
    (figure,) = [f for f in published(name, "bf16") if _FITTED_ON in f.machine]
    return (_bytes(name, "bf16"), count_mlx_lm(config).total), 1 / figure.generation_tps


def _bytes(name: str, precision: str) -> float:
    paper = PROTOCOLS["paper"]
    context = mean_context(paper.prompt_tokens, paper.gen_tokens)
    sizes = summarize(name)
    return sizes.bytes_by_precision[precision] + context * kv_bytes_per_token(sizes.config, 2)


def estimates(names: Iterable[str], precisions: Iterable[str]) -> list[Estimate]:
    """Estimates for sizes by name, in ``bf16`` or ``4bit``."""
    fitted, wanted = fit(), list(precisions)
    found = []
    for name in names:
        config = OpenELMConfig.preset(name)
        for precision in wanted:
            nbytes, kernels = _bytes(name, precision), count_ours(config, precision).total
            speeds = {chip: fitted.tokens_per_s(nbytes, kernels, rate * 1e9) for chip, rate in CHIPS.items()}
            found.append(Estimate(name, precision, nbytes, kernels, speeds))
    return found


def lines(found: Iterable[Estimate]) -> list[str]:
    """A table for people: tokens a second by chip."""
    fitted = fit()
    rows = [("model", "precision", "MB/token", "kernels", *CHIPS)]
    rows += [
        (e.model, e.precision, f"{e.nbytes / 1e6:,.0f}", str(e.kernels), *(number(x) for x in e.tokens_per_s.values()))
        for e in found
    ]
    return [
        "ESTIMATES of generated tokens/s, not measurements: bytes a token over "
        f"{fitted.share:.0%} of the chip's bandwidth, plus {fitted.kernel_s * 1e6:.1f} us a kernel,",
        f"which is what the paper's bf16 figures of the 270M and the 3B on an {_FITTED_ON} amount to with mlx-lm's",
        "kernels; the table has ours, which are fewer. MB/token includes keys and values halfway through a run",
        *aligned(rows, left=(0, 1)),
    ]
