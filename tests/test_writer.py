"""The files that are written, read back by the safetensors library and by MLX."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors import safe_open

from openelm_mlx.writer import SHARD_BYTES, TensorSpec, plan_shards, write_json, write_weights

SPECS = [
    TensorSpec("matrix", mx.float32, (3, 5)),
    TensorSpec("half", mx.float16, (7,)),
    TensorSpec("brain", mx.bfloat16, (2, 3)),
    TensorSpec("packed", mx.uint32, (4, 2)),
    TensorSpec("scalar", mx.float32, ()),
    TensorSpec("empty", mx.float32, (0, 4)),
    TensorSpec('naïve "name"', mx.float32, (1,)),
]


def array_for(spec: TensorSpec, seed: int = 0) -> mx.array:
    values = np.random.default_rng(seed).integers(0, 1000, spec.shape)
    return mx.array(values).astype(spec.dtype)


def write(folder: Path, specs: list[TensorSpec] = SPECS, limit: int = SHARD_BYTES) -> dict[str, mx.array]:
    arrays = {spec.name: array_for(spec, n) for n, spec in enumerate(specs)}
    write_weights(folder, specs, arrays.values(), limit=limit)
    return arrays


def test_the_safetensors_library_reads_the_same(tmp_path: Path) -> None:
    arrays = write(tmp_path)
    names = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint32: "U32"}
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "mlx"}
        assert set(file.keys()) == set(arrays)
        for spec in SPECS:
            part = file.get_slice(spec.name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (names[spec.dtype], spec.shape)
            if spec.dtype != mx.bfloat16:  # unknown to numpy
                np.testing.assert_array_equal(file.get_tensor(spec.name), np.asarray(arrays[spec.name]))


def test_mlx_reads_the_same(tmp_path: Path) -> None:
    arrays = write(tmp_path)
    loaded = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(loaded, dict)
    for spec in SPECS:
        assert (loaded[spec.name].dtype, loaded[spec.name].shape) == (spec.dtype, spec.shape)
        assert mx.array_equal(loaded[spec.name], arrays[spec.name])


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    x = mx.arange(24, dtype=mx.float32).reshape(4, 6)
    views = {
        "transposed": x.T,
        "columns": x[:, 1:4],
        "every other": x[::2],
        "a column": x[:, 2],
        "row": mx.broadcast_to(x[0], (3, 6)),
    }
    write_weights(tmp_path, [TensorSpec(n, v.dtype, v.shape) for n, v in views.items()], views.values())
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        for name, view in views.items():
            np.testing.assert_array_equal(file.get_tensor(name), np.asarray(view))


def test_the_data_begins_aligned(tmp_path: Path) -> None:
    for n in range(9):
        folder = tmp_path / str(n)
        folder.mkdir()
        write(folder, [TensorSpec("x" * n, mx.float32, (2,))])
        length = struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])[0]
        assert length % 8 == 0


def test_shards_keep_to_the_limit_and_the_index_says_where_everything_is(tmp_path: Path) -> None:
    specs = [TensorSpec(f"t{n}", mx.float32, (r, 10)) for n, r in enumerate((3, 2, 5, 1, 12, 1, 4))]
    arrays = write(tmp_path, specs, limit=200)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    # 120 + 80 | 200 | 40 | 480: larger than a shard, alone | 40 + 160
    assert files == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    found = {}
    for file in files:
        with safe_open(tmp_path / file, framework="numpy") as shard:
            held = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        assert sum(x.nbytes for x in held.values()) <= 200 or len(held) == 1
        for name, x in held.items():
            np.testing.assert_array_equal(x, np.asarray(arrays[name]))
            found[name] = file
    assert index["weight_map"] == found
    assert set(found) == set(arrays)


def test_one_file_has_an_index_too(tmp_path: Path) -> None:
    write(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {spec.name: "model.safetensors" for spec in SPECS}


def test_a_shard_is_at_most_a_gigabyte() -> None:
    specs = [TensorSpec(f"t{n}", mx.bfloat16, (1000, 100_000)) for n in range(12)]
    assert [len(shard) for shard in plan_shards(specs)] == [5, 5, 2]
    assert plan_shards([]) == [[]]


def test_one_tensor_is_taken_at_a_time(tmp_path: Path) -> None:
    """When the next tensor is asked for, the one before it is in the file already, and no file is open twice."""
    specs = [TensorSpec(f"t{n}", mx.float32, (300_000,)) for n in range(4)]
    seen: list[int] = []

    def arrays() -> Iterator[mx.array]:
        for spec in specs:
            seen.append(sum(p.stat().st_size for p in tmp_path.iterdir()))
            yield array_for(spec)

    write_weights(tmp_path, specs, arrays(), limit=2_400_000)
    assert [size // 1_200_000 for size in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "t: fewer tensors"),
        ([mx.zeros((2, 2)), mx.zeros((1,))], "more tensors"),
        ([mx.zeros((4,))], "t: got"),
        ([mx.zeros((2, 2), mx.float16)], "t: got"),
    ],
)
def test_what_was_not_planned_is_not_written(tmp_path: Path, made: list[mx.array], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        write_weights(tmp_path, [TensorSpec("t", mx.float32, (2, 2))], made)


def test_json_is_readable_by_people(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"name": "é", "list": [1]})
    assert (tmp_path / "x.json").read_bytes().decode() == '{\n  "name": "é",\n  "list": [\n    1\n  ]\n}\n'
