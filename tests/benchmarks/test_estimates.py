"""Estimates: the fit goes through the figures it is fitted to, and the rest follows from it by hand."""

from __future__ import annotations

import pytest

from openelm_mlx.benchmarks import estimates
from openelm_mlx.benchmarks.dispatches import count_mlx_lm, count_ours
from openelm_mlx.benchmarks.estimates import CHIPS, Fit
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import OpenELMError
from tests.support.cli import run

M2_MAX = 400e9
# 36 + 1024 / 2 positions of 16,128 and 83,968 bytes, beside the weights in bf16.
BYTES = {"OpenELM-270M": 271_527_168 * 2 + 548 * 16_128, "OpenELM-3B": 3_036_647_424 * 2 + 548 * 83_968}
PUBLISHED = {"OpenELM-270M": 212.40, "OpenELM-3B": 33.96}


def test_the_fit_gives_back_the_papers_figures() -> None:
    for name, figure in PUBLISHED.items():
        kernels = count_mlx_lm(OpenELMConfig.preset(name)).total
        assert estimates.fit().tokens_per_s(BYTES[name], kernels, M2_MAX) == pytest.approx(figure)


def test_it_is_physically_possible() -> None:
    assert 0.3 < estimates.fit().share < 1
    assert 0 < estimates.fit().kernel_s < 100e-6


def test_a_speed_by_hand() -> None:
    # 1 GB at half of 100 GB/s is 20 ms, and 500 kernels of 10 us are 5 ms.
    assert Fit(share=0.5, kernel_s=10e-6).tokens_per_s(1e9, 500, 100e9) == pytest.approx(1 / 0.025)


def test_estimates_use_our_kernels() -> None:
    (found,) = estimates.estimates(["OpenELM-270M"], ["bf16"])
    assert found.nbytes == BYTES["OpenELM-270M"]
    assert found.kernels == count_ours(OpenELMConfig.preset("OpenELM-270M")).total
    assert found.tokens_per_s["M2 Max"] > PUBLISHED["OpenELM-270M"]  # fewer kernels, the same bytes
    speeds = [found.tokens_per_s[chip] for chip in sorted(CHIPS, key=lambda c: CHIPS[c])]
    assert speeds == sorted(speeds)


def test_the_command() -> None:
    done = run("bench", "estimate", "--model", "OpenELM-270M")
    assert done.status == 0
    assert done.out.startswith("ESTIMATES")
    assert [line.split()[:2] for line in done.out.splitlines()[-2:]] == [
        ["OpenELM-270M", "bf16"],
        ["OpenELM-270M", "4bit"],
    ]


def test_an_unknown_size() -> None:
    with pytest.raises(OpenELMError, match="no preset"):
        estimates.estimates(["x"], ["bf16"])
