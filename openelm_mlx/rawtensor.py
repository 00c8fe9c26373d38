"""A tensor that is still in its file: the common currency of the checkpoint readers.

A reader (``torchfile``, the safetensors reader) parses a file's directory and hands out :class:`RawTensor` objects;
the bytes are read when, and only when, :meth:`RawTensor.read` is called. So listing a 12 GB checkpoint costs
kilobytes, and converting it holds one tensor at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openelm_mlx.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np
    import numpy.typing as npt

# safetensors' dtype names -> (bytes an element, numpy's little-endian name of the stored bits).
# BF16 is unknown to numpy and travels as its 16 bits; BOOL as bytes, because a stored byte may be neither 0 nor 1.
_DTYPES: dict[str, tuple[int, str]] = {
    "F64": (8, "<f8"),
    "F32": (4, "<f4"),
    "F16": (2, "<f2"),
    "BF16": (2, "<u2"),
    "I64": (8, "<i8"),
    "I32": (4, "<i4"),
    "I16": (2, "<i2"),
    "I8": (1, "|i1"),
    "U64": (8, "<u8"),
    "U32": (4, "<u4"),
    "U16": (2, "<u2"),
    "U8": (1, "|u1"),
    "BOOL": (1, "|u1"),
}

ITEMSIZE: dict[str, int] = {name: size for name, (size, _) in _DTYPES.items()}
"""Bytes an element takes in the file, by dtype name."""

# One read returns at most 2 GiB on Linux and refuses more on macOS.
_CHUNK = 1 << 30


@dataclass(frozen=True)
class RawTensor:
    """Where a tensor's bytes lie in a file; nothing is read until :meth:`read`.

    Raises :class:`~openelm_mlx.errors.CheckpointError` for a dtype, a shape or strides that cannot be.
    """

    path: Path
    """The file."""
    offset: int
    """Absolute byte offset of element 0 in the file."""
    dtype: str
    """safetensors' name: F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8 or BOOL."""
    shape: tuple[int, ...]
    """Dimensions; () is a scalar."""
    strides: tuple[int, ...] | None = None
    """Elements (not bytes) from one index to the next, by dimension; None is row-major without gaps."""

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise CheckpointError(f"{self.path}: dtype {self.dtype!r} is not one of {', '.join(ITEMSIZE)}")
        if self.offset < 0 or any(n < 0 for n in self.shape):
            raise CheckpointError(f"{self.path}: a tensor has offset {self.offset} and shape {self.shape}")
        if self.strides is not None and (len(self.strides) != len(self.shape) or any(n < 0 for n in self.strides)):
            raise CheckpointError(f"{self.path}: a tensor of shape {self.shape} has strides {self.strides}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes an element takes in the file."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements (in the file's dtype, without the gaps that strides may leave)."""
        return self.size * self.itemsize

    @property
    def span(self) -> int:
        """Bytes of the file from element 0 to the end of the farthest element."""
        if self.strides is None or self.size == 0:
            return self.nbytes
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    def read(self) -> mx.array:
        """Read the tensor into memory.

        Returns an array of :attr:`shape`, in the file's dtype except that F64 becomes float32 (MLX computes float64
        on the CPU alone, and no weight needs it).

        The bytes are read into a buffer, not mapped: a file that shrinks under the reader is then an error and not
        a SIGBUS, and nothing lingers in resident memory. Raises :class:`~openelm_mlx.errors.CheckpointError` if the
        file cannot be opened or ends before the tensor does.
        """
        import mlx.core as mx
        import numpy as np

        values = self._strided(np)
        if self.dtype == "BF16":
            return mx.array(values).view(mx.bfloat16)
        if self.dtype == "F64":
            return mx.array(values.astype(np.float32))
        if self.dtype == "BOOL":
            return mx.array(values != 0)
        return mx.array(values)

    def _strided(self, np: Any) -> npt.NDArray[np.generic]:
        """The stored bits, row-major, as numpy knows them."""
        flat = self._bytes(np).view(_DTYPES[self.dtype][1])
        if self.strides is None or self.size == 0:
            return flat.reshape(self.shape)
        steps = tuple(step * self.itemsize for step in self.strides)
        view = np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)
        # Not ascontiguousarray, which makes a scalar one-dimensional.
        return np.array(view, order="C")

    def _bytes(self, np: Any) -> npt.NDArray[np.uint8]:
        """The bytes from element 0 to the end of the farthest element."""
        buffer: Any = np.empty(self.span, dtype=np.uint8)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                view, done = memoryview(buffer), 0
                while done < self.span:
                    count = file.readinto(view[done : done + _CHUNK])
                    if not count:
                        raise CheckpointError(
                            f"{self.path}: the file changed or was truncated: a tensor lies in bytes {self.offset} to "
                            f"{self.offset + self.span}, but the file ends at {self.offset + done}; copy or download "
                            "it again"
                        )
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot read the file: {error.strerror or error}") from error
        return buffer
