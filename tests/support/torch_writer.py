"""Writes what ``torch.save`` writes, without torch: for tests that need CoreNet's ``.pt`` or Hugging Face's ``.bin``.

    save_torch(OrderedDict(weight=np.ones((2, 3), np.float32), scale=BF16(bits)), path)

The pickle uses protocol 2 and the names that torch emits; a storage is one entry of the zip, aligned to 64 bytes.
Tensors are written one after the other, and a :class:`Lazy` one is made when its turn comes: a file may be far larger
than memory.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Our dtype name -> (torch's storage class, numpy's dtype of the stored bits).
_STORAGES: dict[str, tuple[str, str]] = {
    "F64": ("DoubleStorage", "<f8"),
    "F32": ("FloatStorage", "<f4"),
    "F16": ("HalfStorage", "<f2"),
    "BF16": ("BFloat16Storage", "<u2"),
    "I64": ("LongStorage", "<i8"),
    "I32": ("IntStorage", "<i4"),
    "I16": ("ShortStorage", "<i2"),
    "I8": ("CharStorage", "|i1"),
    "U8": ("ByteStorage", "|u1"),
    "BOOL": ("BoolStorage", "|b1"),
}
_NAMES = {np.dtype(bits): name for name, (_, bits) in _STORAGES.items() if name != "BF16"}
_ALIGNMENT = 64


@dataclass(frozen=True)
class BF16:
    """A bfloat16 tensor by its bits (uint16), since numpy has no such dtype."""

    bits: Array


@dataclass(frozen=True)
class Lazy:
    """A tensor that is made when it is written. BF16 is made as its bits (uint16)."""

    shape: tuple[int, ...]
    dtype: str  # a key of _STORAGES
    make: Callable[[], Array]


def bf16(values: Array) -> BF16:
    """Float values as bfloat16, rounded to nearest, ties to even (no NaN)."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return BF16(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def save_torch(obj: object, path: Path, *, prefix: str | None = None) -> None:
    """Write nested dicts, lists, tuples, numbers, text, None and tensors (ndarray, BF16, Lazy) as ``torch.save`` does.

    An OrderedDict is written as one (torch's own state dicts are), and its ``_metadata`` attribute with it. ``prefix``
    is the folder inside the zip; the default is the file's stem, as in torch.
    """
    pickler = _Pickler()
    data = pickler.dump(obj)
    folder = prefix or path.stem
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _write_entry(archive, f"{folder}/data.pkl", data)
        _write_entry(archive, f"{folder}/byteorder", b"little")
        for key, tensor in enumerate(pickler.tensors):
            _write_tensor(archive, f"{folder}/data/{key}", tensor)
        _write_entry(archive, f"{folder}/version", b"3\n")


def _as_lazy(tensor: Array | BF16 | Lazy) -> Lazy:
    if isinstance(tensor, Lazy):
        return tensor
    if isinstance(tensor, BF16):
        return Lazy(tensor.bits.shape, "BF16", lambda: tensor.bits)
    return Lazy(tensor.shape, _NAMES[tensor.dtype.newbyteorder("<")], lambda: tensor)


def _write_tensor(archive: zipfile.ZipFile, name: str, tensor: Lazy) -> None:
    values = np.asarray(tensor.make())
    bits = np.dtype(_STORAGES[tensor.dtype][1])
    if values.shape != tensor.shape or values.dtype != bits:
        raise ValueError(f"{name}: made {values.dtype} {values.shape}, announced {bits} {tensor.shape}")
    _write_entry(archive, name, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _write_entry(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    """One stored entry whose data begins at a multiple of 64: an extra field "FB" fills the gap, as torch's does."""
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.file_size = len(data)
    large = len(data) > 1 << 30  # then zipfile adds an extra field of 20 bytes for 64-bit sizes
    assert archive.fp is not None
    start = archive.fp.tell() + 30 + len(name.encode()) + 4 + (20 if large else 0)
    padding = -start % _ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=large) as entry:
        entry.write(data)


class _Pickler:
    """Just enough of a pickler: no memo, so shared objects are written twice."""

    def __init__(self) -> None:
        self._out = bytearray()
        self.tensors: list[Lazy] = []

    def dump(self, obj: object) -> bytes:
        self._out += b"\x80\x02"
        self._any(obj)
        self._out += b"."
        return bytes(self._out)

    def _any(self, obj: Any) -> None:
        if obj is None or isinstance(obj, bool):
            self._out += {None: b"N", True: b"\x88", False: b"\x89"}[obj]
        elif isinstance(obj, int):
            self._int(obj)
        elif isinstance(obj, float):
            self._out += struct.pack(">cd", b"G", obj)
        elif isinstance(obj, str):
            raw = obj.encode()
            self._out += struct.pack("<cI", b"X", len(raw)) + raw
        elif isinstance(obj, tuple):
            self._tuple(obj)
        elif isinstance(obj, list):
            self._out += b"]("
            self._all(*obj)
            self._out += b"e"
        elif isinstance(obj, dict):
            self._dict(obj)
        elif isinstance(obj, np.ndarray | BF16 | Lazy):
            self._tensor(_as_lazy(obj))
        else:
            raise TypeError(f"cannot write a {type(obj).__name__}")

    def _all(self, *items: object) -> None:
        for item in items:
            self._any(item)

    def _int(self, n: int) -> None:
        if 0 <= n < 256:
            self._out += struct.pack("<cB", b"K", n)
        elif -(2**31) <= n < 2**31:
            self._out += struct.pack("<ci", b"J", n)
        else:
            raw = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
            self._out += struct.pack("<cB", b"\x8a", len(raw)) + raw

    def _tuple(self, items: tuple[Any, ...]) -> None:
        self._out += b"("
        self._all(*items)
        self._out += b"t"

    def _dict(self, items: dict[Any, Any]) -> None:
        ordered = isinstance(items, OrderedDict)
        if ordered:
            self._global("collections", "OrderedDict")
            self._out += b")R"
        else:
            self._out += b"}"
        self._out += b"("
        for key, value in items.items():
            self._all(key, value)
        self._out += b"u"
        if ordered and hasattr(items, "_metadata"):
            self._any({"_metadata": items._metadata})
            self._out += b"b"

    def _global(self, module: str, name: str) -> None:
        self._out += f"c{module}\n{name}\n".encode()

    def _tensor(self, tensor: Lazy) -> None:
        storage, key = _STORAGES[tensor.dtype][0], str(len(self.tensors))
        self.tensors.append(tensor)
        numel = math.prod(tensor.shape)
        steps = tuple(math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape)))
        self._global("torch._utils", "_rebuild_tensor_v2")
        self._out += b"(("
        self._any("storage")
        self._global("torch", storage)
        self._all(key, "cpu", numel)
        self._out += b"tQ"
        self._all(0, tensor.shape, steps, False, OrderedDict())
        self._out += b"tR"
