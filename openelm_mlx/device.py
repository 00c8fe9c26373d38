"""Which backend, which dtype, how much memory: the one place that asks.

`preload` is this package's single import-time act: MLX's Linux CPU wheel links an unoptimised reference BLAS, and a
faster one loaded into the process first takes its place.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx

BLAS_VARIABLE = "OPENELM_BLAS"
BLAS_CHOICES = ("auto", "shim", "preload", "none")
OPENBLAS = "libopenblas.so.0"

_blas = "MLX's own"


def preload() -> None:
    """Load a fast BLAS before ``mlx.core``, so that MLX's CPU backend uses it. Linux only; never fails.

    There is one fast path, `openelm_mlx.cpu.blas`, and a plain one, the system's OpenBLAS. ``OPENELM_BLAS=auto``
    (default) takes the first of them that is there; ``shim`` and ``preload`` each ask for one and warn when it is not;
    ``none`` leaves MLX alone. A BLAS loaded after ``mlx.core`` has no effect; :func:`blas` then says so.
    """
    global _blas
    choice = os.environ.get(BLAS_VARIABLE, "auto")
    if choice not in BLAS_CHOICES:
        print(f"{BLAS_VARIABLE}={choice}: expected {', '.join(BLAS_CHOICES)}; using auto", file=sys.stderr)
        choice = "auto"
    if sys.platform != "linux" or choice == "none":
        return
    if "mlx.core" in sys.modules:
        _blas = "MLX's own, slow (mlx was imported before openelm_mlx, too late to load another)"
        return
    why = "" if choice == "preload" else _load_shim()
    if why is None:
        return
    if choice == "shim":
        print(f"{BLAS_VARIABLE}=shim: {why}", file=sys.stderr)
    if not _load_openblas(why) and choice == "preload":
        print(f"{BLAS_VARIABLE}=preload: {OPENBLAS} cannot be loaded; using MLX's own BLAS", file=sys.stderr)


def _load_shim() -> str | None:
    """Why the fast path cannot be had; None when it is loaded."""
    global _blas
    from openelm_mlx.cpu import blas

    try:
        _blas = blas.load()
    except blas.Unavailable as e:
        return str(e)
    return None


def _load_openblas(why_not_fast: str) -> bool:
    global _blas
    because = f"; no compiled fast path: {why_not_fast}" if why_not_fast else ""
    try:
        ctypes.CDLL(OPENBLAS, ctypes.RTLD_GLOBAL)
    except OSError:
        _blas = f"MLX's own, slow (no {OPENBLAS}; on Debian: apt-get install libopenblas0-pthread{because})"
        return False
    _blas = f"OpenBLAS ({OPENBLAS}, loaded before mlx{because})"
    return True


def blas() -> str:
    """One line on the BLAS behind MLX's CPU backend."""
    return _blas


def explain_missing_mlx(error: ImportError) -> str | None:
    """One line for an import that failed because MLX, or a backend of it, is not installed; None for other errors."""
    if (error.name or "").split(".")[0] != "mlx" and "libmlx" not in str(error):
        return None
    return (
        "MLX has no backend here: pip install 'openelm-mlx[cpu]' (or [cuda12] or [cuda13] for an NVIDIA GPU on Linux; "
        f"on an Apple-silicon Mac plain openelm-mlx brings it). The import failed with: {error}"
    )


def keep_resident() -> None:
    """Let MLX keep a model's memory wired on a Mac, so that macOS does not page weights out between tokens."""
    if backend() != "metal":
        return
    import mlx.core as mx

    limit = mx.device_info().get("max_recommended_working_set_size")
    if limit:
        mx.set_wired_limit(int(limit))


def settle_for_training() -> None:
    """Let freed memory be used again quickly, and on a GPU not kept without end; for the rest of the process.

    A training step asks for the same gigabytes again and again. On Linux, the C library by default hands large blocks
    back to the system at once, and getting them again, page by page, takes longer than the arithmetic done on them. On
    a GPU MLX keeps freed buffers of every size there was: batches of many shapes would fill the memory with them.
    """
    if backend() != "cpu":
        import mlx.core as mx

        limit = mx.device_info().get("max_recommended_working_set_size") or mx.device_info().get("memory_size")
        if limit:
            mx.set_cache_limit(int(limit) // _CACHED)
    elif sys.platform == "linux":
        _keep_freed_memory()


_CACHED = 8
"""One part in so many of a GPU's memory may hold buffers that are free."""

_MALLOC_OPTIONS = ((-1, (1 << 31) - 1), (-3, 1 << 30), (-4, 0))
"""malloc.h's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_MMAP_MAX: never give back, and nothing in a map of its own."""


def _keep_freed_memory() -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return
    for option, value in _MALLOC_OPTIONS:
        mallopt(option, value)


def backend() -> str:
    """``metal``, ``cuda`` or ``cpu``: where MLX computes by default."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def compute_dtype(stored: mx.Dtype) -> mx.Dtype:
    """The dtype to compute in for weights stored in `stored`.

    float32 on a CPU, where MLX has no fast 16-bit matrix product; the stored one elsewhere.
    """
    import mlx.core as mx

    return mx.float32 if backend() == "cpu" else stored


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Limit, use and details of a container's memory, in control groups of version 2 and 1."""


@dataclass(frozen=True)
class Memory:
    """Bytes a model may take, and where the figure comes from."""

    available: int
    source: str

    def __str__(self) -> str:
        return f"{self.available / 1e9:.2f} GB ({self.source})"


def too_little(needed: float) -> Memory | None:
    """The memory there is, if it is known and has not these many bytes."""
    there = memory()
    return there if there and needed > there.available else None


def memory() -> Memory | None:
    """Memory a model can be loaded into; None where nothing tells."""
    if backend() != "cpu":
        import mlx.core as mx

        limit = mx.device_info().get("max_recommended_working_set_size") or mx.device_info().get("memory_size")
        return Memory(int(limit), "the GPU's recommended working set") if limit else None
    figures = [f for f in (_meminfo_available(), _cgroup_available()) if f]
    return min(figures, key=lambda m: m.available) if figures else _physical()


def _meminfo_available() -> Memory | None:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return Memory(int(line.split()[1]) * 1024, "memory available now")
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_available() -> Memory | None:
    for limit_file, used_file, stat_file in _CGROUP_FILES:
        try:
            limit = int((_CGROUP / limit_file).read_text())  # the word "max" where there is none
            used = int((_CGROUP / used_file).read_text())
            stat = dict(line.split() for line in (_CGROUP / stat_file).read_text().splitlines())
            # Cached files count as used, the model's own after a first load among them, but give way when needed.
            cached = int(stat["inactive_file"]) + int(stat["active_file"])
        except (OSError, ValueError, KeyError):
            continue
        return Memory(min(max(limit - used + cached, 0), limit), "this container's memory limit")
    return None


def _physical() -> Memory | None:
    try:
        return Memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "physical memory")
    except (OSError, ValueError):
        return None
