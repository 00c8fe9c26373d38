"""A small model with a tokenizer, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from openelm_mlx.convert.job import convert
from tests.support import sources


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder (float32, untied, window of 64) that writes something different at every step."""
    root = tmp_path_factory.mktemp("model")
    changes = {"share_input_output_layers": False}
    source = sources.hf(root / "hf", sources.weights(sources.config(**changes), seed=3), **changes)
    return convert(source, root / "model", precision="fp32").folder
