"""torchfile: real files by PyTorch 2.13 value for value, what is found in them, and chance damage."""

from __future__ import annotations

import io
import os
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openelm_mlx.errors import CheckpointError
from openelm_mlx.rawtensor import ITEMSIZE, RawTensor
from openelm_mlx.torchfile import find_state_dict, read_torch, sniff
from tests.support.torch_writer import BF16, Lazy, bf16, save_torch

DATA = Path(__file__).parent / "data" / "torch"


def tensors_of(obj: Any, path: str = "") -> dict[str, RawTensor]:
    if isinstance(obj, RawTensor):
        return {path: obj}
    items = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, list) else ()
    found: dict[str, RawTensor] = {}
    for key, value in items:
        found |= tensors_of(value, f"{path}.{key}".lstrip("."))
    return found


def values(tensor: RawTensor) -> np.ndarray[Any, Any]:
    array = tensor.read()
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


# --- real files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "views", "training", "protocol4"])
def test_every_value_of_a_real_file(name: str) -> None:
    stored = np.load(DATA / "expected.npz")
    source = "plain" if name == "protocol4" else name
    expected = {key.split("/", 1)[1]: stored[key] for key in stored.files if key.startswith(f"{source}/")}
    found = tensors_of(read_torch(DATA / f"{name}.pt"))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        want = expected[key].astype(np.float32) if tensor.dtype == "F64" else expected[key]
        got = values(tensor)
        assert got.shape == want.shape and got.dtype == want.dtype, key
        np.testing.assert_array_equal(got, want, err_msg=key)


def test_dtypes_are_kept_and_f64_becomes_float32() -> None:
    tensors = tensors_of(read_torch(DATA / "plain.pt"))
    names = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    assert [tensors[name].dtype for name in names] == [
        "F64",
        "F32",
        "F16",
        "BF16",
        "I64",
        "I32",
        "I16",
        "I8",
        "U8",
        "BOOL",
    ]
    assert tensors["bfloat16"].read().dtype == mx.bfloat16
    assert tensors["float64"].read().dtype == mx.float32
    assert tensors["bool"].read().dtype == mx.bool_


def test_they_are_recognised_by_content(tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_bytes((DATA / "plain.pt").read_bytes())
    assert (sniff(tmp_path / "weights.txt"), sniff(DATA / "legacy.pt")) == ("zip", "legacy")


def test_views_share_one_storage() -> None:
    tensors = tensors_of(read_torch(DATA / "views.pt"))
    assert tensors["second"].offset - tensors["first"].offset == 2 * 8 * 4
    assert tensors["first"].offset == tensors["transposed"].offset
    assert tensors["transposed"].strides == (1, 8) and tensors["first"].strides is None
    assert tensors["steps"].nbytes == 6 * 4 and tensors["steps"].span == (2 * 16 + 3 + 1) * 4


def test_a_training_checkpoint_keeps_its_numbers() -> None:
    checkpoint: Any = read_torch(DATA / "training.pt")
    assert (checkpoint["iterations"], checkpoint["epoch"], checkpoint["best_metric"]) == (7, 0, float("inf"))
    assert checkpoint["is_interval_ckpt"] is False
    group = checkpoint["optim_state_dict"]["param_groups"][0]
    assert group["betas"] == (0.9, 0.95) and group["foreach"] is None and group["params"] == [0, 1]
    state, where = find_state_dict(checkpoint)
    assert where == "model_state_dict" and list(state) == ["0.weight", "1.weight"]
    assert type(checkpoint["model_state_dict"]) is dict


# --- the writer -------------------------------------------------------------------------------------------------------


def everything() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    state: OrderedDict[str, Any] = OrderedDict()
    for kind in ("f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"):
        state[f"a.{kind}"] = (rng.normal(size=(3, 4)) * 3).astype(kind)
    state["b"] = bf16(rng.normal(size=(2, 5)))
    state["scalar"] = np.array(1.5, np.float32)
    state["empty"] = np.zeros((0, 3), np.float32)
    state["lazy"] = Lazy((2, 2), "F32", lambda: np.eye(2, dtype=np.float32))
    state["lazy_b"] = Lazy((2,), "BF16", lambda: np.array([0x3F80, 0xC000], np.uint16))
    state["turned"] = np.arange(6, dtype=np.float32).reshape(2, 3).T
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return {"model_state_dict": state, "numbers": [0, 255, -1, 2**31, -(2**70), 0.5, None, True, (1, "x"), {}]}


def as_floats(item: Any) -> np.ndarray[Any, Any]:
    made = item.make() if isinstance(item, Lazy) else item.bits if isinstance(item, BF16) else item
    is_bf16 = isinstance(item, BF16) or (isinstance(item, Lazy) and item.dtype == "BF16")
    return (made.astype(np.uint32) << 16).view(np.float32) if is_bf16 else np.asarray(made)


@pytest.mark.parametrize("prefix", [None, "archive", "a name/with ünicode"])
def test_what_the_writer_writes_is_read_back(tmp_path: Path, prefix: str | None) -> None:
    written = everything()
    save_torch(written, tmp_path / "pytorch_model.bin", prefix=prefix)
    read: Any = read_torch(tmp_path / "pytorch_model.bin")
    assert read["numbers"] == written["numbers"]
    for key, tensor in read["model_state_dict"].items():
        np.testing.assert_array_equal(values(tensor), as_floats(written["model_state_dict"][key]), err_msg=key)
        assert tensor.offset % 64 == 0, key


def test_the_writer_rounds_to_nearest_even() -> None:
    floats = np.array([1.0, 1.00390625, 1.01171875, -3.14159, 1e-40], np.float32)
    want = np.array(mx.array(floats).astype(mx.bfloat16).view(mx.uint16))
    np.testing.assert_array_equal(bf16(floats).bits, want)


@pytest.mark.reference
def test_torch_reads_what_the_writer_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    written = everything()
    save_torch(written, tmp_path / "x.pt")
    for options in ({}, {"mmap": True}):
        read = torch.load(tmp_path / "x.pt", weights_only=True, **options)
        assert read["numbers"] == written["numbers"]
        assert read["model_state_dict"]._metadata == {"": {"version": 1}}
        for key, item in written["model_state_dict"].items():
            tensor = read["model_state_dict"][key]
            got = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            np.testing.assert_array_equal(got, as_floats(item), err_msg=key)


def test_opening_reads_no_storage(tmp_path: Path) -> None:
    path = tmp_path / "large.pt"
    save_torch({"w": np.ones((4 << 20,), np.float32)}, path)
    tracemalloc.start()
    try:
        tensors, _ = find_state_dict(read_torch(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert tensors["w"].nbytes == 16 << 20


def test_a_tensor_that_is_gone_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    save_torch({"w": np.ones((64, 64), np.float32)}, path)
    tensor = find_state_dict(read_torch(path))[0]["w"]
    os.truncate(path, tensor.offset + 100)
    with pytest.raises(CheckpointError, match=r"x\.pt: the file changed or was truncated: a tensor lies in bytes"):
        tensor.read()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"x\.pt: cannot read the file"):
        tensor.read()


@pytest.mark.parametrize(
    ("offset", "dtype", "shape", "strides"),
    [(0, "F8", (1,), None), (-1, "F32", (1,), None), (0, "F32", (-1,), None), (0, "F32", (2,), (1, 1))],
)
def test_a_raw_tensor_that_cannot_be(offset: int, dtype: str, shape: Any, strides: Any) -> None:
    with pytest.raises(CheckpointError):
        RawTensor(Path("x"), offset, dtype, shape, strides)


def test_a_raw_tensor_in_every_dtype(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(16)))
    for dtype, size in ITEMSIZE.items():
        tensor = RawTensor(tmp_path / "x", 0, dtype, (2, 1, 8 // size), None)
        assert tensor.read().shape == tensor.shape and tensor.nbytes == tensor.span == 16
    assert np.array(RawTensor(tmp_path / "x", 0, "BOOL", (3,)).read()).tolist() == [False, True, True]


# --- finding the state dict -------------------------------------------------------------------------------------------

W = RawTensor(Path("x.pt"), 0, "F32", (1,))
V = RawTensor(Path("x.pt"), 4, "F32", (1,))


@pytest.mark.parametrize(
    ("obj", "where"),
    [
        ({"w": W}, ""),
        ({"model_state_dict": {"w": W}, "ema_state_dict": {"w": V}, "epoch": 1}, "model_state_dict"),
        ({"model_state_dict": {}, "ema_state_dict": {"w": W}}, "ema_state_dict"),
        ({"ema_state_dict": {"w": W}, "step": V}, "ema_state_dict"),
        ({"state_dict": {"w": W}}, "state_dict"),
        ({"model": {"w": W}, "optimizer": {"state": {0: {"exp_avg": V}}}}, "model"),
        ({"module": {"module.w": W}}, "module"),
        ({"state": {"model": {"w": W}}}, "state.model"),
        ({"model_state_dict": {"module.w": W}}, "model_state_dict"),
        ({"module._orig_mod.w": W}, ""),
    ],
)
def test_the_state_dict_is_found(obj: object, where: str) -> None:
    assert find_state_dict(obj) == ({"w": W}, where)


def test_a_prefix_of_some_names_only_stays() -> None:
    assert find_state_dict({"module.w": W, "v": V})[0] == {"module.w": W, "v": V}


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ({"epoch": 1, "weights": {"w": W}}, r"no state dict in it: its keys are 'epoch' \(int\), 'weights' \(dict\)"),
        ({"model_state_dict": {"w": W, "n": 3}}, r"model_state_dict has tensors, and also .*: 'n' \(int\)"),
        ({"w": W, 7: V}, r"its top level has tensors, and also .*: '7' \(RawTensor\)"),
        ([W], "it is a list"),
        ({}, "its keys are none"),
        ({"state": {0: {"exp_avg": W}}, "param_groups": []}, "no state dict"),
        ({str(n): n for n in range(500)}, "and 488 more"),
    ],
)
def test_no_state_dict(obj: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"f.pt: .*{message}"):
        find_state_dict(obj, "f.pt")


# --- chance -----------------------------------------------------------------------------------------------------------

WHOLE = (DATA / "training.pt").read_bytes()
with zipfile.ZipFile(io.BytesIO(WHOLE)) as _archive:
    ENTRIES = {name.split("/", 1)[1]: _archive.read(name) for name in _archive.namelist()}
CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4)), max_size=6)
SETTINGS = settings(max_examples=150, database=None)


def mutate(data: bytes, changes: list[tuple[float, bytes]], keep: float) -> bytes:
    mutated = bytearray(data)
    for place, replacement in changes:
        at = int(place * len(mutated))
        mutated[at : at + len(replacement)] = replacement
    return bytes(mutated[: int(keep * len(mutated))])


def read_all(path: Path) -> None:
    """Succeeds or raises CheckpointError."""
    try:
        for found in tensors_of(read_torch(path)).values():
            found.read()
    except CheckpointError as error:
        assert str(path) in str(error)


@SETTINGS
@given(changes=CHANGES, keep=st.just(1.0) | st.floats(0, 1))
def test_any_damage_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, bytes]], keep: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    path.write_bytes(mutate(WHOLE, changes, keep))
    read_all(path)


@SETTINGS
@given(changes=CHANGES, keep=st.just(1.0) | st.floats(0, 1))
def test_any_damage_to_the_pickle(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[float, bytes]], keep: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in ENTRIES.items():
            archive.writestr(f"x/{name}", mutate(data, changes, keep) if name == "data.pkl" else data)
    read_all(path)
