"""Building and loading blas.c: the matrix product that stands between MLX's CPU backend and NumPy's own OpenBLAS.

Runs before ``mlx.core`` is imported, at every start: standard library only, and no more work than finding two files.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("blas.c")

_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread")

_COMPILE_SECONDS = 120
_MOST_THREADS = 32
"""More do not make memory faster."""

_DIGEST = hashlib.sha256().digest_size

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_CPU_INFO = Path("/proc/cpuinfo")


bfloat16_alpha: float | None = None
"""What tells our ``cblas_sgemm`` that B holds bfloat16 weights; see blas.c. None while it is not loaded."""


class Unavailable(Exception):
    """The fast path cannot be had here; the message says why in a few words."""


def load() -> str:
    """Put our ``cblas_sgemm`` where MLX will find it; what it stands on, in a few words.

    Raises:
        Unavailable: NumPy brings no OpenBLAS, there is no C compiler, or the result cannot be kept or used.
    """
    openblas = _numpy_openblas()
    try:
        below = ctypes.CDLL(str(openblas))
        functions = [
            ctypes.cast(function, ctypes.c_void_p)
            for function in (
                below.scipy_cblas_sgemm64_,
                below.scipy_openblas_get_num_threads64_,
                below.scipy_openblas_set_num_threads64_,
            )
        ]
    except (OSError, AttributeError) as e:
        raise Unavailable(f"NumPy's OpenBLAS cannot be used: {e}") from None
    library, threads = _library(), usable_threads()
    try:
        ours = ctypes.CDLL(str(library))
        ours.openelm_blas_setup(*functions, threads)
    except (OSError, AttributeError) as e:
        _discard(library)
        raise Unavailable(f"{library} cannot be loaded: {e}") from None
    if not _is_right(ours):
        _discard(library)
        raise Unavailable("its products came out wrong")
    everyone = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # from here on every library loaded later finds it
    if _address(ctypes.CDLL(None).cblas_sgemm) != _address(everyone.cblas_sgemm):
        raise Unavailable("another library with a cblas_sgemm was loaded first")
    global bfloat16_alpha
    bfloat16_alpha = ctypes.c_float.in_dll(ours, "openelm_bfloat16_alpha").value
    return f"compiled fast path over NumPy's OpenBLAS, {threads} thread{'s'[: threads > 1]}"


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _discard(library: Path) -> None:
    """Forget what a compiler made, however whole it is: the next start may find a better compiler."""
    with suppress(OSError):
        library.unlink()


def usable_threads() -> int:
    """Threads a product may use: the cores this process may run on, less where the environment or a container says."""
    most = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "").partition(",")[0].strip()  # OpenMP allows a number for each level
        if value.isdecimal() and len(value) < 10 and int(value) > 0:
            return min(int(value), most)
    try:
        quota, period = _CPU_LIMIT.read_text().split()
        return min(max(1, ceil(int(quota) / int(period))), most)
    except (OSError, ValueError):  # no such file, or the word "max": no limit
        return most


def _numpy_openblas() -> Path:
    """The OpenBLAS in NumPy's wheel, found without importing NumPy."""
    try:
        spec = importlib.util.find_spec("numpy")
    except (ImportError, ValueError):  # something else goes by its name
        spec = None
    if spec is None or not spec.origin:
        raise Unavailable("there is no NumPy")
    found = sorted((Path(spec.origin).parents[1] / "numpy.libs").glob("libscipy_openblas64_*"))
    if not found:
        raise Unavailable("this NumPy brings no OpenBLAS")
    return found[0]


def _library() -> Path:
    """The compiled library from the user's cache; made, or made anew, when it is not there or not what was written."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    folder = _cache_folder()
    try:
        source = _SOURCE.read_bytes()
    except OSError as e:
        raise Unavailable(f"{_SOURCE} cannot be read: {e.strerror}") from None
    # -march=native: a home folder that several machines share needs one library for each kind of processor.
    key = hashlib.sha256(b"\0".join([source, *map(str.encode, _FLAGS), _processor()])).hexdigest()
    library = folder / f"blas-{key[:16]}.so"
    if _is_whole(library):
        return library
    if compiler is None:
        raise Unavailable("there is no C compiler (cc)")
    _compile(compiler, library)
    return library


def _cache_folder() -> Path:
    """A folder that only this user can write: what lies in it is run."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # A relative one is to be ignored, says the XDG Base Directory Specification.
        folder = (Path(base) if base.startswith("/") else Path.home() / ".cache") / "openelm-mlx"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status, mounted = folder.stat(), os.statvfs(folder)
    except (OSError, RuntimeError) as e:  # RuntimeError: there is no home folder
        raise Unavailable(f"no cache folder: {e}") from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(f"others can write the cache folder {folder}")
    if mounted.f_flag & os.ST_NOEXEC:
        raise Unavailable(f"nothing can be run from the cache folder {folder} (mounted noexec)")
    return folder


def _processor() -> bytes:
    """What -march=native looks at."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(
        [platform.machine(), *sorted({x for x in lines if x.partition("\t")[0].strip() in kinds})]
    ).encode()


def _is_whole(library: Path) -> bool:
    """Whether a cached library ends with the digest of what comes before, as :func:`_compile` wrote it."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _compile(compiler: str, library: Path) -> None:
    """Compile beside its place and rename: two processes that do so at once do no harm."""
    import tempfile  # here: not needed at any later start

    try:
        handle, name = tempfile.mkstemp(suffix=".so", prefix=".blas-", dir=library.parent)
    except OSError as e:
        raise Unavailable(f"the cache folder {library.parent} cannot be written: {e.strerror}") from None
    os.close(handle)
    made = Path(name)
    try:
        _run(compiler, made)
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        made.chmod(0o700)
        made.replace(library)
    except OSError as e:
        raise Unavailable(f"{library} cannot be written: {e.strerror or e}") from None
    finally:
        made.unlink(missing_ok=True)


def _run(compiler: str, made: Path) -> None:
    import subprocess  # here: not needed at any later start

    try:
        done = subprocess.run(
            [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            timeout=_COMPILE_SECONDS,
            check=False,
        )
    except OSError as e:
        raise Unavailable(f"{compiler} cannot be run: {e.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{compiler} took more than {_COMPILE_SECONDS} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise Unavailable(f"{compiler} failed: {lines[0]}")


def _is_right(ours: ctypes.CDLL) -> bool:
    """A small product through each of the three ways: ours for few rows, both layouts of B, and OpenBLAS's for many."""
    k, n = 37, 3
    for rows, transposed in ((2, True), (2, False), (100, True)):
        a = [[float(i - j) for j in range(k)] for i in range(rows)]
        b = [[float(i * j + 1) for j in range(k)] for i in range(n)]
        stored = b if transposed else [[b[i][j] for i in range(n)] for j in range(k)]
        c = (ctypes.c_float * (rows * n))()
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        ours.cblas_sgemm(
            101, 111, 112 if transposed else 111, rows, n, k, one, _floats(a), k, _floats(stored),
            k if transposed else n, zero, c, n,
        )  # fmt: skip
        if list(c) != [sum(x * y for x, y in zip(u, v, strict=True)) for u in a for v in b]:
            return False
    return True


def _floats(rows: list[list[float]]) -> ctypes.Array[ctypes.c_float]:
    flat = [x for row in rows for x in row]
    return (ctypes.c_float * len(flat))(*flat)
