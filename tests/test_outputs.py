"""What an output folder must be, before any work is done for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from openelm_mlx.atomic import OutputError
from openelm_mlx.outputs import is_our_model, require_apart, require_room
from openelm_mlx.writer import TensorSpec


@pytest.mark.parametrize(
    ("config", "ours"), [('{"openelm_mlx": {}}', True), ("{}", False), ("{", False), ("[]", False), (None, False)]
)
def test_whose_a_model_folder_is(tmp_path: Path, config: str | None, ours: bool) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert is_our_model(tmp_path) == ours


def test_an_output_that_holds_its_source(tmp_path: Path) -> None:
    source = tmp_path / "a" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for out in (source, tmp_path / "a", tmp_path / "link", tmp_path / "link" / "source"):
        with pytest.raises(OutputError, match="holds the source itself"):
            require_apart(source, out)
    for out in (source / "out", tmp_path / "b", tmp_path / "a" / "other"):
        require_apart(source, out)


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [TensorSpec("a", mx.float32, (500, 1000)), TensorSpec("b", mx.bfloat16, (1000, 1000))]
    usage = shutil.disk_usage(tmp_path)
    for free, enough in ((4_000_000, True), (3_999_999, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if enough:
            require_room(tmp_path / "not" / "there", needed)
            continue
        with pytest.raises(OutputError, match=r"needs 4\.0 MB, and the disk has 4\.0 MB free"):
            require_room(tmp_path / "not" / "there", needed)
