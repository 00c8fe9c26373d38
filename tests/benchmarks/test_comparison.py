"""A slowdown is seen from the threshold on, and rows and machines that do not fit are named."""

from __future__ import annotations

import pytest

from openelm_mlx.benchmarks.comparison import compare, lines
from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.errors import OpenELMError
from tests.benchmarks.made import MACHINE, result, row


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.05, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("then", [1.0, 51.0, 0.63, 212.4, 1103.0, 1 / 3])
def test_exactly_the_threshold_is_no_slowdown(then: float, threshold: float) -> None:
    at = then * (1 - threshold)
    assert compare(result(row(at)), result(row(then)), threshold).slowdowns == ()
    below = compare(result(row(at * 0.9999)), result(row(then)), threshold)
    assert [c.speed for c in below.slowdowns] == ["prompt", "generation", "total"]


def test_medians_count_and_each_speed_for_itself() -> None:
    old = row(generation_tps=Spread.of([100, 100, 100]))
    new = row(generation_tps=Spread.of([10, 85, 300]), prompt_tps=Spread.of([1, 200, 200]))
    compared = compare(result(new), result(old))
    assert [(c.speed, c.ratio, c.slower) for c in compared.changes] == [
        ("prompt", 2.0, False),
        ("generation", 0.85, True),
        ("total", 1.0, False),
    ]
    assert [(c.now, c.then) for c in compared.slowdowns] == [(85, 100)]
    assert compared.notes == ()


def test_only_rows_of_the_same_kind_are_compared() -> None:
    others = [
        row(peer="mlx-lm"), row(variant="x"), row(model="OpenELM-3B"), row(precision="4bit"), row(prompt_tokens=512),
        row(gen_tokens=1024),
    ]  # fmt: skip
    compared = compare(result(row(), *others[:3]), result(row(50.0), *others[3:]))
    assert [(c.row, c.ratio) for c in compared.changes] == [(row(), 2.0)] * 3
    assert compared.notes == (
        "only in the new result: mlx-lm, OpenELM-270M bf16, 36+128 tokens",
        "only in the new result: openelm-mlx (x), OpenELM-270M bf16, 36+128 tokens",
        "only in the new result: openelm-mlx, OpenELM-3B bf16, 36+128 tokens",
        "only in the old result: openelm-mlx, OpenELM-270M 4bit, 36+128 tokens",
        "only in the old result: openelm-mlx, OpenELM-270M bf16, 512+128 tokens",
        "only in the old result: openelm-mlx, OpenELM-270M bf16, 36+1024 tokens",
    )


def test_nothing_in_common() -> None:
    with pytest.raises(OpenELMError, match=r"no row in common .* of the older one: openelm bench --model x$"):
        compare(result(row()), result(row(gen_tokens=1024), command=("openelm", "bench", "--model", "x")))
    with pytest.raises(OpenELMError, match="no row in common"):
        compare(result(row()), result(command=()))


@pytest.mark.parametrize("threshold", [-0.1, 1.0, 10.0, float("nan")])
def test_thresholds_that_make_no_sense(threshold: float) -> None:
    with pytest.raises(OpenELMError, match="threshold"):
        compare(result(row()), result(row()), threshold)


def test_another_machine_is_a_note() -> None:
    other = {**MACHINE, "chip": "Apple M4", "gpu": "Apple M4", "environment": {"OPENBLAS_CORETYPE": "Haswell"}}
    compared = compare(result(row(), machine=other), result(row()))
    assert compared.notes == (
        "not the same chip: now Apple M4, then Apple M2 Max",
        "not the same gpu: now Apple M4, then Apple M2 Max",
        "not the same environment: now OPENBLAS_CORETYPE=Haswell, then none",
    )
    assert "not the same blas: now unknown, then x" in compare(
        result(row()), result(row(), machine={**MACHINE, "blas": "x"})
    ).notes  # fmt: skip


def test_the_lines() -> None:
    new, old = result(row(generation_tps=Spread.of([85]))), result(row(), row(peer="mlx-lm"))
    assert lines(compare(new, old)) == [
        "model         precision  program      tokens  speed       then tok/s  now tok/s  now/then  verdict",
        "OpenELM-270M  bf16       openelm-mlx  36+128  prompt           100.0      100.0     1.000  ok",
        "OpenELM-270M  bf16       openelm-mlx  36+128  generation       100.0       85.0     0.850  SLOWER",
        "OpenELM-270M  bf16       openelm-mlx  36+128  total             50.0       50.0     1.000  ok",
        "",
        "note: only in the old result: mlx-lm, OpenELM-270M bf16, 36+128 tokens",
        "1 of 3 speeds fell by more than 10%",
    ]
    assert lines(compare(new, new, 0.025))[-1] == "no speed fell by more than 2.5%"
