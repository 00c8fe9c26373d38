"""Files that people name: absent is one thing, unreadable another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openelm_mlx.errors import ConfigError, OpenELMError
from openelm_mlx.files import expand, is_there, read, read_json


def test_there_and_absent(tmp_path: Path) -> None:
    assert not is_there(tmp_path / "x", ConfigError)
    (tmp_path / "x").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert is_there(tmp_path / "x", ConfigError)
    assert is_there(tmp_path / "link", ConfigError)


@pytest.mark.parametrize("kind", ["broken link", "loop", "folder", "pipe"])
def test_what_is_no_file_is_not_taken_for_absent(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokenizer_config.json"
    if kind == "broken link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"tokenizer_config.json: (is no regular file|cannot be looked at)"):
        is_there(path, ConfigError)


def test_reading_stops_at_the_largest_size(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read(tmp_path / "x", ConfigError, 5) == b"12345"
    with pytest.raises(ConfigError, match="too large"):
        read(tmp_path / "x", ConfigError, 4)
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "y", ConfigError)
    with pytest.raises(ConfigError, match="no regular file"):
        read(Path("/dev/zero"), ConfigError)


def test_json_objects(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ConfigError, match="no such file"):
        read_json(path, ConfigError)
    with pytest.raises(ConfigError, match="is no regular file"):
        read_json(tmp_path, ConfigError)
    bad = {b"[1]": "a JSON object is needed, not a list", b"{": "not readable as JSON", b"\xff": "not readable as JSON"}
    for content, message in {**bad, b"[" * 200_000: "not readable as JSON"}.items():
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_json(path, ConfigError)
    path.write_bytes('{"é": 1}'.encode())
    assert read_json(path, ConfigError) == {"é": 1}


def test_a_home_that_is_not_known() -> None:
    assert expand("~") == Path.home()
    with pytest.raises(OpenELMError, match="~nobody-of-this-name/x"):
        expand("~nobody-of-this-name/x")
