"""Model folders that tests of loading use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import converted_folder, hf_folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A converted folder a precision; read only."""
    root = tmp_path_factory.mktemp("models")
    with pytest.warns(UserWarning, match="float16"):
        made = {"fp16": converted_folder(root / "fp16", "fp16")}
    return made | {p: converted_folder(root / p, p) for p in ("fp32", "bf16", "4bit", "8bit")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An unconverted folder that a test may change."""
    return hf_folder(tmp_path / "source")
