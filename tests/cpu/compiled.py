"""blas.c as a compiler makes it, called through ctypes, and products whose results are known exactly."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from openelm_mlx.cpu import blas
from tests.support.cli import environment

ROW_MAJOR, COLUMN_MAJOR = 101, 102
PLAIN, TRANSPOSED = 111, 112

Array = npt.NDArray[np.float32]
Gemm = Callable[..., None]

_INTS, _LONGS = (ctypes.c_int,), (ctypes.c_int64,)
_MATRIX, _FLOAT = (ctypes.c_void_p,), (ctypes.c_float,)
GEMM64 = ctypes.CFUNCTYPE(
    None, *_INTS * 3, *_LONGS * 3, *_FLOAT, *_MATRIX, *_LONGS, *_MATRIX, *_LONGS, *_FLOAT, *_MATRIX, *_LONGS
)
"""OpenBLAS's gemm with 64-bit sizes."""


def can_be_made() -> bool:
    """Whether this machine has what the fast path needs."""
    if sys.platform != "linux" or not shutil.which("cc"):
        return False
    try:
        return bool(openblas().scipy_cblas_sgemm64_)
    except (blas.Unavailable, OSError, AttributeError):
        return False


def openblas() -> Any:
    """The OpenBLAS inside NumPy's wheel."""
    return ctypes.CDLL(str(blas._numpy_openblas()))


def openblas_threads() -> int:
    """How many threads NumPy's products have."""
    return int(openblas().scipy_openblas_get_num_threads64_())


NEEDED = pytest.mark.skipif(not can_be_made(), reason="needs Linux, cc, and the OpenBLAS of NumPy's wheel")


class Library:
    """A library of its own: each copy of the file has its own threads."""

    def __init__(self, file: Path, threads: int, gemm: Any = None) -> None:
        below = openblas()
        self._gemm = below.scipy_cblas_sgemm64_ if gemm is None else gemm  # kept alive
        functions = (self._gemm, below.scipy_openblas_get_num_threads64_, below.scipy_openblas_set_num_threads64_)
        library = ctypes.CDLL(str(file))
        library.openelm_blas_setup(*(ctypes.cast(f, ctypes.c_void_p) for f in functions), threads)
        self.bfloat16_alpha = ctypes.c_float.in_dll(library, "openelm_bfloat16_alpha").value
        self.sgemm: Any = library.cblas_sgemm
        self.sgemm.restype = None
        self.sgemm.argtypes = [
            *_INTS * 6, *_FLOAT, *_MATRIX, *_INTS, *_MATRIX, *_INTS, *_FLOAT, *_MATRIX, *_INTS,
        ]  # fmt: skip


@dataclass(frozen=True)
class Product:
    """``alpha A (m, k) B (k, n) + beta C`` as it lies in memory.

    Behind every row there are `gap` numbers more, and the first row begins `past` numbers past a multiple of 64 bytes.
    All that is not theirs is NaN: whoever reads it beside A and B spoils the result, and beside C it must stay.
    """

    a: Array
    b: Array
    c: Array
    alpha: float = 1
    beta: float = 0
    transposed_a: bool = False
    transposed_b: bool = True
    order: int = ROW_MAJOR
    gap: int = 0
    past: int = 0

    @staticmethod
    def of_integers(m: int, n: int, k: int, **how: Any) -> Product:
        """Small whole numbers: every sum is exact in float32, in whatever order it is made."""
        rng = np.random.default_rng(m + 31 * n + 17 * k)
        a, b, c = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((m, k), (k, n), (m, n)))
        return Product(a, b, c, **how)

    def expected(self) -> npt.NDArray[np.float64]:
        """Worked out in float64, by NumPy."""
        out = self.alpha * (self.a.astype(np.float64) @ self.b.astype(np.float64))
        return out + self.beta * self.c if self.beta else out

    def through(self, library: Library) -> Array:
        """The result of `library`, checked not to write where it must not."""
        return self.laid_out()(library)

    def laid_out(self) -> Callable[[Library], Array]:
        """What :meth:`through` does, on arrays that stay at their places from call to call."""
        (m, k), n = self.a.shape, self.b.shape[1]
        a, b = self._stored(self.a, self.transposed_a), self._stored(self.b, self.transposed_b)
        # Nobody may read C where it is multiplied by 0.
        c = self._stored(self.c if self.beta else np.full_like(self.c, np.nan), False)
        before = c.copy()

        def run(library: Library) -> Array:
            c[:] = before
            library.sgemm(
                self.order, TRANSPOSED if self.transposed_a else PLAIN, TRANSPOSED if self.transposed_b else PLAIN,
                m, n, k, self.alpha, a.ctypes.data, a.shape[1], b.ctypes.data, b.shape[1], self.beta, c.ctypes.data,
                c.shape[1],
            )  # fmt: skip
            width = c.shape[1] - self.gap
            assert np.array_equal(c[:, width:], before[:, width:], equal_nan=True), "written beyond the rows of C"
            out = c[:, :width].copy()
            return out if self.order == ROW_MAJOR else out.T

        return run

    def _stored(self, matrix: Array, transposed: bool) -> Array:
        if transposed != (self.order == COLUMN_MAJOR):
            matrix = matrix.T
        rows, width = matrix.shape[0], matrix.shape[1] + self.gap
        room = np.full(rows * width + 64, np.nan, np.float32)
        first = -room.ctypes.data // 4 % 16 + 16 + self.past
        buffer = room[first : first + rows * width].reshape(rows, width)
        buffer[:, : matrix.shape[1]] = matrix
        return buffer

    def __str__(self) -> str:
        (m, k), n = self.a.shape, self.b.shape[1]
        letters = ("T" if self.transposed_a else "N") + ("T" if self.transposed_b else "N")
        return f"m={m} n={n} k={k} {letters} order={self.order} {self.alpha}, {self.beta} {self.gap=} {self.past=}"


def check(library: Library, product: Product, expected: npt.NDArray[np.float64] | None = None) -> None:
    """The product comes out exactly."""
    found = product.through(library)
    assert np.array_equal(found, product.expected() if expected is None else expected), str(product)


def apart(code: str, library_file: Path) -> list[str]:
    """Run in a process of its own: the words printed."""
    done = subprocess.run(
        [sys.executable, "-u", "-W", "ignore", "-c", code, str(library_file)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(OPENBLAS_NUM_THREADS="1"),
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout.split()


START = """
import ctypes, mmap, os, sys, threading, time
from pathlib import Path
import numpy as np
from tests.cpu.compiled import GEMM64, Library, Product, check, openblas, openblas_threads
library = Library(Path(sys.argv[1]), 4)
small, large, larger = (Product.of_integers(3, n, 500) for n in (40, 700, 1500))
blocks = Product.of_integers(90, 700, 500)
answers = {id(p): p.expected() for p in (small, large, larger, blocks)}
def right(p):
    check(library, p, answers[id(p)])
def threads():
    return set(os.listdir("/proc/self/task"))
"""
