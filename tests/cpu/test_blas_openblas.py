"""What blas.py finds in NumPy's wheel, and how many threads it takes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from openelm_mlx.cpu import blas
from tests.cpu.compiled import NEEDED
from tests.cpu.starts import COMPUTE, PRINT, has_openblas, line_of, plain, start
from tests.support.cli import environment

pytestmark = NEEDED


class TestOpenBlas:
    """What NumPy's wheel brings."""

    @pytest.fixture
    def numpy(self, tmp_path: Path) -> Path:
        """A NumPy that Python finds first, and its folder of libraries."""
        (tmp_path / "site/numpy").mkdir(parents=True)
        (tmp_path / "site/numpy/__init__.py").touch()
        (tmp_path / "site/numpy.libs").mkdir()
        return tmp_path / "site/numpy.libs"

    @staticmethod
    def line(numpy: Path, code: str = PRINT, **values: str) -> str:
        return line_of(code, PYTHONPATH=f"{numpy.parent}{os.pathsep}{environment()['PYTHONPATH']}", **values)

    def test_none(self, numpy: Path) -> None:
        (numpy / "libopenblas.so.0").touch()
        assert self.line(numpy) == plain("this NumPy brings no OpenBLAS")

    def test_garbage(self, numpy: Path) -> None:
        (numpy / "libscipy_openblas64_-0.so").write_bytes(b"garbage")
        assert self.line(numpy).startswith(plain("NumPy's OpenBLAS cannot be used: ").removesuffix(")"))

    def test_another_library(self, numpy: Path, library_file: Path) -> None:
        shutil.copy(library_file, numpy / "libscipy_openblas64_-0.so")
        found = self.line(numpy)
        assert found.startswith(plain("NumPy's OpenBLAS cannot be used: ").removesuffix(")"))
        assert "scipy_cblas_sgemm64_" in found

    def test_no_numpy(self) -> None:
        hidden = "import sys; sys.modules['numpy'] = None; "
        assert line_of(hidden + PRINT) == plain("there is no NumPy")
        stub = "import sys, types; sys.modules['numpy'] = types.ModuleType('numpy'); "
        assert line_of(stub + PRINT) == plain("there is no NumPy")

    @pytest.mark.parametrize("choice", ["auto", "shim", "preload"])
    def test_no_openblas_anywhere(self, numpy: Path, tmp_path: Path, choice: str) -> None:
        (tmp_path / "libopenblas.so.0").write_bytes(b"garbage")  # found before the system's
        path = f"{numpy.parent}{os.pathsep}{environment()['PYTHONPATH']}"
        done = start(
            "import openelm_mlx, mlx.core as mx; print((mx.ones((2, 3)) @ mx.ones((3, 2))).tolist())\n" + PRINT,
            PYTHONPATH=path, LD_LIBRARY_PATH=str(tmp_path), OPENELM_BLAS=choice,
        )  # fmt: skip
        why = "this NumPy brings no OpenBLAS"
        because = "" if choice == "preload" else f"; no compiled fast path: {why}"
        missing = f"MLX's own, slow (no libopenblas.so.0; on Debian: apt-get install libopenblas0-pthread{because})"
        assert done.stdout.splitlines() == ["[[3.0, 3.0], [3.0, 3.0]]", missing]
        said = {
            "auto": "",
            "shim": f"OPENELM_BLAS=shim: {why}\n",
            "preload": "OPENELM_BLAS=preload: libopenblas.so.0 cannot be loaded; using MLX's own BLAS\n",
        }
        assert done.stderr == said[choice]

    @pytest.mark.skipif(not has_openblas(), reason="no OpenBLAS is installed")
    def test_another_that_was_there_first(self, full_cache: Path) -> None:
        """MLX then uses that one, and the line says nothing else."""
        expected = plain("another library with a cblas_sgemm was loaded first")
        values = {"LD_PRELOAD": "libopenblas.so.0", "XDG_CACHE_HOME": str(full_cache)}
        assert line_of(COMPUTE + PRINT, **values) == expected


class TestThreads:
    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Six cores, nothing set."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
        self.limit = tmp_path / "cpu.max"
        monkeypatch.setattr(blas, "_CPU_LIMIT", self.limit)
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)

    def test_the_cores_that_may_be_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert blas.usable_threads() == 6
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
        assert blas.usable_threads() == 1
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(200)))
        assert blas.usable_threads() == 32

    @pytest.mark.parametrize(
        ("openblas", "openmp", "expected"),
        [
            ("3", None, 3),
            (None, "2", 2),
            ("3", "2", 3),
            ("64", None, 6),
            (None, "4,3,2", 4),
            (" 2 ", None, 2),
            ("", "2", 2),
            ("0", "2", 2),
            ("-1", None, 6),
            ("many", "2", 2),
            ("1.5", None, 6),
            ("²", None, 6),
            ("9" * 5000, None, 6),
        ],
    )
    def test_what_the_environment_says(
        self, openblas: str | None, openmp: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in (("OPENBLAS_NUM_THREADS", openblas), ("OMP_NUM_THREADS", openmp)):
            if value is not None:
                monkeypatch.setenv(name, value)
        assert blas.usable_threads() == expected

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("200000 100000\n", 2),
            ("150000 100000\n", 2),
            ("50000 100000\n", 1),
            ("1000000 100000\n", 6),
            ("max 100000\n", 6),
            ("", 6),
            ("x y\n", 6),
            ("5\n", 6),
        ],
    )
    def test_what_a_container_may_use(self, text: str, expected: int) -> None:
        self.limit.write_text(text)
        assert blas.usable_threads() == expected

    def test_they_reach_both_libraries(self, full_cache: Path) -> None:
        """In a process that really may use one core, and in one that says so itself."""
        code = f"""
import os
CHANGE
{PRINT}
import ctypes
from openelm_mlx.cpu import blas
print(ctypes.CDLL(str(blas._numpy_openblas())).scipy_openblas_get_num_threads64_())
before = len(os.listdir("/proc/self/task"))
{COMPUTE.replace("import openelm_mlx, ", "import ")}
"""
        one = "compiled fast path over NumPy's OpenBLAS, 1 thread"
        pinned = code.replace("CHANGE", "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])")
        assert line_of(pinned, XDG_CACHE_HOME=str(full_cache)) == f"{one}\n1"
        told = code.replace("CHANGE", "")
        assert line_of(told, XDG_CACHE_HOME=str(full_cache), OPENBLAS_NUM_THREADS="1") == f"{one}\n1"

    def test_numpys_own_products_keep_theirs(self, full_cache: Path) -> None:
        self.limit.write_text("100000 100000\n")
        code = f"""
from pathlib import Path
from openelm_mlx.cpu import blas
from tests.cpu.compiled import openblas_threads
before = openblas_threads()
blas._CPU_LIMIT = Path({str(self.limit)!r})
print(blas.load())
{COMPUTE.replace("import openelm_mlx, ", "import ")}
print(openblas_threads() == before)
"""
        expected = "compiled fast path over NumPy's OpenBLAS, 1 thread\nTrue"
        assert line_of(code, XDG_CACHE_HOME=str(full_cache), OPENELM_BLAS="none") == expected
