"""safetensors files as byte ranges: the same tensors as the library finds, and the same files refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from openelm_mlx.errors import CheckpointError
from openelm_mlx.safetensorsfile import is_safetensors, read_safetensors
from tests.support.sources import write_safetensors
from tests.support.torch_writer import bf16


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(start: int, end: int, shape: object = (1,), dtype: object = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_every_dtype_that_the_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        str(np.dtype(d)): rng.integers(0, 2 if d is bool else 100, (3, 4)).astype(d)
        for d in (np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.uint32, bool)
    }
    tensors |= {"scalar": np.asarray(np.float32(3)), "none": np.zeros((0, 3), np.float32)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"a": "b"})
    assert is_safetensors(tmp_path / "x.safetensors")
    found = read_safetensors(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    for name, expected in tensors.items():
        assert found[name].shape == expected.shape
        np.testing.assert_array_equal(np.asarray(found[name].read()), expected)


def test_bfloat16(tmp_path: Path) -> None:
    x = bf16(np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32))
    write_safetensors(tmp_path / "x", {"x": x})
    found = read_safetensors(tmp_path / "x")["x"]
    assert found.dtype == "BF16"
    np.testing.assert_array_equal(np.asarray(found.read().view(mx.uint16)), x.bits)


def test_the_name_of_the_file_does_not_matter(tmp_path: Path) -> None:
    save_file({"x": np.ones(3, np.float32)}, tmp_path / "weights.pt")
    assert is_safetensors(tmp_path / "weights.pt")
    (tmp_path / "text.safetensors").write_text("hello, this is no such file")
    assert not is_safetensors(tmp_path / "text.safetensors")


FOUR = b"\0\0\x80?"

LIES = {
    "a header longer than the file": (entry(0, 4), FOUR, 5000, "no safetensors file, or cut short"),
    "an endless header": (entry(0, 4), FOUR, 2**63, "no safetensors file, or cut short"),
    "no header": (b"", FOUR, 0, "no safetensors file, or cut short"),
    "a header that is cut": ({"x": entry(0, 4)}, FOUR, 9, "header is broken"),
    "no JSON": (b"{ this is not JSON }", FOUR, None, "header is broken"),
    "not UTF-8": (b'{"\xff\xfe":1}', FOUR, None, "header is broken"),
    "deeply nested": (b'{"x":' * 60_000, b"", None, "header is broken"),
    "a list": ([1, 2], FOUR, None, "is not an object"),
    "one name twice": (b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{}}', FOUR, None, "one name"),
    "an entry that is a number": ({"x": 1}, FOUR, None, "tensor 'x' has a broken header entry"),
    "an entry without a dtype": ({"x": {"shape": [1], "data_offsets": [0, 4]}}, FOUR, None, "broken header entry"),
    "a dtype that is a list": ({"x": entry(0, 4, dtype=[])}, FOUR, None, "has dtype"),
    "an unknown dtype": ({"x": entry(0, 4, dtype="F7")}, FOUR, None, "has dtype 'F7'"),
    "a shape that is a number": ({"x": entry(0, 4, shape=1)}, FOUR, None, "broken header entry"),
    "a shape of text": ({"x": entry(0, 4, shape="1")}, FOUR, None, "does not take bytes"),
    "a shape of fractions": ({"x": entry(0, 4, shape=[1.0])}, FOUR, None, "does not take bytes"),
    "a negative shape": ({"x": entry(0, 4, shape=[-1, -1])}, FOUR, None, "does not take bytes"),
    "NaN in a shape": (b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', FOUR, None, "does not take bytes"),
    "a shape of true": ({"x": entry(0, 4, shape=[True])}, FOUR, None, "does not take bytes"),
    "three offsets": ({"x": {**entry(0, 4), "data_offsets": [0, 2, 4]}}, FOUR, None, "broken header entry"),
    "a shape too large": ({"x": entry(0, 4, shape=[2])}, FOUR, None, "does not take bytes 0 to 4"),
    "an overflowing shape": ({"x": entry(0, 4, shape=[2**33, 2**31 + 1])}, FOUR, None, "does not take bytes"),
    "offsets the wrong way": ({"x": entry(4, 0, shape=[0])}, FOUR, None, "does not take bytes"),
    "negative offsets": ({"x": entry(-4, 0)}, FOUR, None, "does not take bytes"),
    "a tensor beyond the end": ({"x": entry(0, 8, shape=[2])}, FOUR, None, "cut short"),
    "a gap": ({"x": entry(4, 8)}, FOUR * 2, None, "leaves out or shares bytes"),
    "an overlap": ({"x": entry(0, 8, shape=[2]), "y": entry(4, 8)}, FOUR * 2, None, "leaves out or shares bytes"),
    "the same bytes twice": ({"x": entry(0, 4), "y": entry(0, 4)}, FOUR, None, "leaves out or shares bytes"),
    "bytes after the end": ({"x": entry(0, 4)}, FOUR * 2, None, "4 bytes follow the last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_as_by_the_library(lie: str, tmp_path: Path) -> None:
    header, data, length, message = LIES[lie]
    path = write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message) as refusal:
        read_safetensors(path)
    assert str(refusal.value).startswith(f"{path}: ")
    with pytest.raises((SafetensorError, UnicodeDecodeError)), safe_open(path, framework="numpy"):
        pass


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_file_cut_anywhere_is_refused(kept: int, tmp_path: Path) -> None:
    save_file({"x": np.ones(100, np.float32)}, tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="cut short"):
        read_safetensors(tmp_path / "cut")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_safetensors(tmp_path / "x")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_safetensors(tmp_path)
