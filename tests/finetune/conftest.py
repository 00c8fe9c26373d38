"""Models that several tests of adapters use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.finetune.runs import LONG, train, write_data
from tests.support.models import converted_folder
from tests.support.tokenizers_made import MODEL


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied golden model as a float32 folder."""
    return converted_folder(tmp_path_factory.mktemp("tied") / "base")


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untied one."""
    return converted_folder(tmp_path_factory.mktemp("untied") / "base", case="tiny-untied")


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied one in 4 bits."""
    return converted_folder(tmp_path_factory.mktemp("packed") / "base", "4bit")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer."""
    return converted_folder(tmp_path_factory.mktemp("model") / "base", tokenizer=MODEL)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve lines of text."""
    return write_data(tmp_path_factory.mktemp("data") / "my.jsonl")


@pytest.fixture(scope="session")
def unbroken(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    train(model, data, out, *LONG)
    return out
