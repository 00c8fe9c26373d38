"""Reading metrics.jsonl: whole, cut off by a kill, damaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.metrics import read_metrics

FIRST = '{"step": 1, "loss": 2.5}\n'


def read(tmp_path: Path, text: str) -> list[dict[str, float]]:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    return read_metrics(path)


def test_every_line_in_order(tmp_path: Path) -> None:
    assert read(tmp_path, FIRST + '\n{"step": 1, "valid_loss": 2}\n') == [
        {"step": 1, "loss": 2.5},
        {"step": 1, "valid_loss": 2},
    ]
    assert read(tmp_path, "") == []
    assert math.isnan(read(tmp_path, '{"step": 1, "loss": NaN}\n')[0]["loss"])


def test_a_line_cut_off_anywhere_is_passed_over(tmp_path: Path) -> None:
    last = '{"step": 2, "loss": 2.25}'
    for end in range(len(last)):
        assert read(tmp_path, FIRST + last[:end]) == [{"step": 1, "loss": 2.5}], last[:end]
    assert read(tmp_path, FIRST + last)[1:] == [{"step": 2, "loss": 2.25}], "only its line end is missing"


@pytest.mark.parametrize("line", ['{"step": 2, "lo', "[1]", "3", "null", "\x00\x00"])
def test_another_broken_line_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(OpenELMError, match=r"metrics\.jsonl:2: is no JSON object") as error:
        read(tmp_path, f"{FIRST}{line}\n{FIRST}")
    assert "\n" not in str(error.value)
    with pytest.raises(OpenELMError, match=r"metrics\.jsonl:2: is no JSON object"):
        read(tmp_path, f"{FIRST}{line}\n")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OpenELMError, match="no such file"):
        read_metrics(tmp_path / "metrics.jsonl")
