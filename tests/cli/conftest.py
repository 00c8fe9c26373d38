"""A small model with a tokenizer, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from openelm_mlx.convert.job import convert
from openelm_mlx.generation import generate_tokens
from openelm_mlx.loading import load
from tests.cli.generating import PROMPT
from tests.support import sources


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder (float32, untied, window of 64) that writes something different at every step."""
    root = tmp_path_factory.mktemp("model")
    changes = {"share_input_output_layers": False}
    source = sources.hf(root / "hf", sources.weights(sources.config(**changes), seed=3), **changes)
    return convert(source, root / "model", precision="fp32").folder


@pytest.fixture(scope="session")
def greedy(model: Path) -> list[int]:
    """The greedy continuation of the prompt, from the Python API."""
    loaded, tokenizer = load(model)
    assert tokenizer is not None
    return list(generate_tokens(loaded, tokenizer.encode(PROMPT), 12))


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same kind of model in 4 bits."""
    root = tmp_path_factory.mktemp("packed")
    changes = {"share_input_output_layers": False}
    source = sources.hf(root / "hf", sources.weights(sources.config(**changes), seed=3), **changes)
    return convert(source, root / "model", precision="4bit", group_size=32).folder
