"""The compiled matrix product, compilers that fail, and caches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from openelm_mlx.cpu import blas
from tests.cpu.compiled import Library
from tests.cpu.starts import Compilers


@pytest.fixture(scope="session")
def library_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the real compiler makes of blas.c."""
    made = tmp_path_factory.mktemp("compiled") / "blas.so"
    compiler = shutil.which("cc")
    assert compiler
    blas._run(compiler, made)
    return made


@pytest.fixture(scope="session")
def library_with(library_file: Path) -> Callable[[int], Library]:
    """The library with so many threads."""
    made: dict[int, Library] = {}

    def with_threads(threads: int) -> Library:
        if threads not in made:
            own = library_file.with_name(f"blas-{threads}.so")
            shutil.copy(library_file, own)
            made[threads] = Library(own, threads)
        return made[threads]

    return with_threads


@pytest.fixture
def compilers(tmp_path: Path, library_file: Path) -> Compilers:
    return Compilers(tmp_path / "compilers", library_file)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A user's cache folder, empty."""
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def full_cache(cache: Path, compilers: Compilers) -> Path:
    """A cache folder with the library."""
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("PATH", compilers.working)
        machine.setenv("XDG_CACHE_HOME", str(cache))
        blas._library()
    compilers.log.unlink()
    return cache
