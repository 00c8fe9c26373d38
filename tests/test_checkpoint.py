"""Model folders: which files are read, and what is said about those that cannot be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from openelm_mlx.checkpoint import check_names, open_file, open_weights, some_names, weight_files
from openelm_mlx.errors import CheckpointError
from tests.support import sources
from tests.support.sources import Tensors, write_bin, write_safetensors

X: Tensors = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
Y: Tensors = {"y": np.ones((4,), np.float32)}


def index(folder: Path, weight_map: object, name: str = "model.safetensors") -> None:
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_safetensors_come_before_bin_and_an_index_before_all(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    write_bin(tmp_path / "pytorch_model-00001-of-00002.bin", X)
    write_bin(tmp_path / "pytorch_model-00002-of-00002.bin", Y)
    assert [p.name[:19] for p in weight_files(tmp_path)] == ["pytorch_model-00001", "pytorch_model-00002"]
    write_bin(tmp_path / "pytorch_model.bin", X)
    assert weight_files(tmp_path) == [tmp_path / "pytorch_model.bin"]
    index(tmp_path, {"y": "pytorch_model-00002-of-00002.bin"}, "pytorch_model.bin")
    assert weight_files(tmp_path) == [tmp_path / "pytorch_model-00002-of-00002.bin"]
    write_safetensors(tmp_path / "model.safetensors", X)
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    write_safetensors(tmp_path / "other.safetensors", Y)
    index(tmp_path, {"y": "other.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "other.safetensors"]
    assert set(open_weights(tmp_path)) == {"y"}


def test_files_are_found_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "[a]*? 模型"
    folder.mkdir()
    write_safetensors(folder / "model-1.safetensors", X)
    assert set(open_weights(folder)) == {"x"}


def test_a_folder_without_weights_lists_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected model\*.safetensors or .*; the folder has nothing"):
        open_weights(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    with pytest.raises(CheckpointError, match=r"the folder has README.md\)"):
        open_weights(tmp_path)


@pytest.mark.parametrize("bad", ["../x.safetensors", "a/x.safetensors", "/etc/passwd", "..", ""])
def test_an_index_reaches_into_its_own_folder_only(tmp_path: Path, bad: str) -> None:
    write_safetensors(tmp_path / "x.safetensors", X)
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    write_safetensors(folder / "a" / "x.safetensors", X)
    index(folder, {"x": bad})
    with pytest.raises(CheckpointError, match=r"outside its own folder|no regular file"):
        open_weights(folder)


def test_an_index_that_is_none(tmp_path: Path) -> None:
    for value in (None, [1], {"x": 1}, "x"):
        index(tmp_path, value)
        with pytest.raises(CheckpointError, match="no weight_map"):
            open_weights(tmp_path)


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", X)
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"})
    with pytest.raises(CheckpointError, match=r"missing of 3 weight files: b.safetensors, c.safetensors"):
        open_weights(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", X)
    write_safetensors(tmp_path / "model-2.safetensors", {**X, **Y})
    with pytest.raises(CheckpointError, match=r"tensor 'x' is in model-1.safetensors and in model-2.safetensors"):
        open_weights(tmp_path)


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    write_bin(tmp_path / "a.safetensors", X)
    write_safetensors(tmp_path / "b.bin", Y)
    np.testing.assert_array_equal(np.asarray(open_file(tmp_path / "a.safetensors")["x"].read()), X["x"])
    np.testing.assert_array_equal(np.asarray(open_file(tmp_path / "b.bin")["y"].read()), Y["y"])


NOT_WEIGHTS = {
    b"": "expected a safetensors or a PyTorch file .*; found an empty file",
    b"once upon a time": r"expected a safetensors or a PyTorch file .*; found bytes .*b'once upon a time'",
    b"\x01\x02": r"found bytes that are neither \(b'\\x01\\x02' ...\)",
    b"\xff" * 8 + b"{": "found bytes that are neither",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n": "Git LFS pointer.*git lfs pull",
    b"<!DOCTYPE html><html>": "web page",
    b"PK\x03\x04 and then nothing": "cut short",
}


@pytest.mark.parametrize("content", NOT_WEIGHTS)
def test_a_file_that_is_neither_says_what_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=NOT_WEIGHTS[content]) as refusal:
        open_file(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_file(tmp_path / "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o300)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        open_weights(tmp_path)


def test_all_that_does_not_fit_is_listed() -> None:
    expected = {f"a{n}": (2, 3) for n in range(40)} | {"same": (1,)}
    found = {f"b{n}": (2, 3) for n in range(30)} | {"same": (1,)} | {f"a{n}": (3, 2) for n in range(20)}
    with pytest.raises(CheckpointError) as refusal:
        check_names("here", found, expected)
    first, missing, unexpected, wrong = str(refusal.value).splitlines()
    assert first == "here: the tensors do not fit the config"
    assert missing == "  missing (20): " + "; ".join(f"a{n}" for n in range(20, 40))
    assert unexpected == "  unexpected (30): " + "; ".join(f"b{n}" for n in range(30))
    assert wrong == "  wrong shape (20): " + "; ".join(f"a{n} is (3, 2), not (2, 3)" for n in range(20))
    check_names("here", expected, expected)


def test_names_from_a_file_do_not_reach_the_terminal_raw() -> None:
    with pytest.raises(CheckpointError) as refusal:
        check_names("here", {"\x1b]0;owned\x07\n": (1,)}, {})
    assert r"'\x1b]0;owned\x07\n'" in str(refusal.value)
    assert some_names(["\x1b[31m", "a"]) == r"'\x1b[31m', a"


def test_long_lists_of_examples_are_counted() -> None:
    assert some_names([]) == "nothing"
    assert some_names(f"n{i:02d}" for i in range(15)).endswith("n11 and 3 more")


def test_a_whole_folder(tmp_path: Path) -> None:
    folder = sources.hf(tmp_path / "hf", shards=3)
    found = open_weights(folder)
    assert {name: t.shape for name, t in found.items()} == sources.shapes(sources.config())


def test_a_pipe_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        open_file(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no regular file"):
        open_file(Path("/dev/zero"))
