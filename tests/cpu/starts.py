"""Starting Python processes on machines that lack something, and what they say about the BLAS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from openelm_mlx.cpu import blas
from tests.support.cli import environment


def has_openblas() -> bool:
    """Whether the system has an OpenBLAS of its own."""
    import ctypes

    try:
        ctypes.CDLL("libopenblas.so.0")
    except OSError:
        return False
    return True


PRINT = "from openelm_mlx import device; print(device.blas())"
COMPUTE = """
import openelm_mlx, numpy, mlx.core as mx
rng = numpy.random.default_rng(0)
for m, n, k in ((1, 300, 400), (3, 300, 400), (100, 30, 40)):
    a, b = (rng.integers(-4, 5, shape).astype("float32") for shape in ((m, k), (n, k)))
    assert (numpy.asarray(mx.array(a) @ mx.array(b).T) == a @ b.T).all()
"""
FAST = ""
"""The line where it can."""
if sys.platform == "linux":
    FAST = f"compiled fast path over NumPy's OpenBLAS, {blas.usable_threads()} threads".replace(
        " 1 threads", " 1 thread"
    )


def plain(why: str) -> str:
    """The line where the fast path cannot be had."""
    library = "libopenblas.so.0"
    found = f"OpenBLAS ({library}, loaded before mlx"
    if not has_openblas():
        found = f"MLX's own, slow (no {library}; on Debian: apt-get install libopenblas0-pthread"
    return f"{found}; no compiled fast path: {why})"


def line_of(code: str = PRINT, **values: str) -> str:
    """What :func:`openelm_mlx.device.blas` says in a new process; nothing may be said on standard error."""
    done = start(code, **values)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.removesuffix("\n")


def start(code: str, **values: str) -> subprocess.CompletedProcess[str]:
    removed = ("OPENELM_BLAS", "XDG_CACHE_HOME")
    inherited = {k: v for k, v in environment().items() if k not in removed}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=inherited | values, check=False
    )


class Compilers:
    """Folders for PATH that hold a compiler `cc` and nothing else."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self.library, self.log = folder, library, folder / "log"
        self.none = str(self._new("none"))

    def _new(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir(parents=True)
        return made

    def of(self, script: str, name: str = "cc") -> str:
        """One that does what the script says; `$out` is the file to write."""
        cc = self._new(f"compiler {len(list(self.folder.iterdir()))}") / name
        cc.write_text(f'#!/bin/sh\nPATH=/usr/bin:/bin\nfor out; do :; done\necho >> "{self.log}"\n{script}\n')
        cc.chmod(0o755)
        return str(cc.parent)

    @property
    def working(self) -> str:
        """One that works, and is quick about it."""
        return self.of(f'cp "{self.library}" "$out"')

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def libraries(cache: Path) -> list[Path]:
    """All that lies in our part of the cache."""
    return sorted((cache / "openelm-mlx").iterdir())
