"""Compiling blas.c and keeping the library: whatever fails, MLX computes right and one line says with what."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openelm_mlx.cpu import blas
from tests.cpu.compiled import NEEDED
from tests.cpu.starts import COMPUTE, FAST, PRINT, Compilers, libraries, line_of, plain, start
from tests.support.cli import environment, run_apart

pytestmark = NEEDED


class TestCompiling:
    def test_by_the_real_compiler_for_this_user_alone(self, cache: Path) -> None:
        done = start(COMPUTE + PRINT, XDG_CACHE_HOME=str(cache), OPENELM_BLAS="shim")
        assert (done.stdout, done.stderr) == (f"{FAST}\n", "")
        (library,) = libraries(cache)
        assert library.stat().st_mode & 0o777 == library.parent.stat().st_mode & 0o777 == 0o700

    def test_once(self, cache: Path, compilers: Compilers) -> None:
        path = compilers.working
        for _ in range(3):
            assert line_of(PATH=path, XDG_CACHE_HOME=str(cache)) == FAST
        assert compilers.calls == 1

    @pytest.mark.parametrize("name", ["gcc", "clang"])
    def test_by_another_name(self, cache: Path, compilers: Compilers, name: str) -> None:
        path = compilers.of(f'cp "{compilers.library}" "$out"', name)
        assert line_of(PATH=path, XDG_CACHE_HOME=str(cache)) == FAST

    @pytest.mark.parametrize(
        ("processes", "slow"), [(6, True), pytest.param(2, False, marks=pytest.mark.slow, id="the real compiler")]
    )
    def test_by_several_processes_at_once(self, cache: Path, compilers: Compilers, processes: int, slow: bool) -> None:
        changed = {"PATH": compilers.of(f'sleep 0.5; cp "{compilers.library}" "$out"')} if slow else {}
        running = [
            subprocess.Popen(
                [sys.executable, "-c", PRINT],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment(XDG_CACHE_HOME=str(cache), OPENELM_BLAS="shim", **changed),
            )
            for _ in range(processes)
        ]
        assert [process.communicate()[0] for process in running] == [f"{FAST}\n"] * processes
        assert compilers.calls > 1 or not slow, "one after the other"
        assert len(libraries(cache)) == 1

    def test_anew_for_another_processor_or_source(
        self, cache: Path, compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setenv("PATH", compilers.working)
        info = tmp_path / "cpuinfo"
        monkeypatch.setattr(blas, "_CPU_INFO", info)

        def with_info(flags: str, mhz: int) -> Path:
            info.write_text(f"processor\t: 0\nmodel\t\t: 17\nmodel name\t: X\nflags\t\t: {flags}\ncpu MHz\t\t: {mhz}\n")
            return blas._library()

        first = with_info("avx avx2", 2000)
        assert with_info("avx avx2", 3000) == first, "its clock is no kind of processor"
        assert with_info("avx avx2 avx512f", 2000) != first
        info.unlink()
        assert blas._library() != first
        (tmp_path / "blas.c").write_text("int x;")
        monkeypatch.setattr(blas, "_SOURCE", tmp_path / "blas.c")
        blas._library()
        assert len(libraries(cache)) == compilers.calls == 4


WRONG = """
#define cblas_sgemm right
#include "SOURCE"
#undef cblas_sgemm
void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                 int ldb, float beta, float *c, int ldc) {
    right(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    if (THOSE) c[0] += 1;
}
"""


class TestCompilersThatFail:
    def test_none(self, cache: Path, compilers: Compilers) -> None:
        expected = plain("there is no C compiler (cc)")
        assert line_of(COMPUTE + PRINT, PATH=compilers.none, XDG_CACHE_HOME=str(cache)) == expected
        assert libraries(cache) == []

    def test_none_is_needed_for_what_is_there(self, full_cache: Path, compilers: Compilers) -> None:
        assert line_of(COMPUTE + PRINT, PATH=compilers.none, XDG_CACHE_HOME=str(full_cache)) == FAST

    @pytest.mark.parametrize(
        ("script", "why"),
        [
            ("echo 'x.c:1: error: no stdio.h' >&2; echo terminated. >&2; exit 1", "x.c:1: error: no stdio.h"),
            ("exit 3", "status 3"),
            ("kill -9 $$", "status -9"),
            ("printf '\\377\\376' >&2; exit 1", "\ufffd\ufffd"),
        ],
    )  # fmt: skip
    def test_it_says_why(self, cache: Path, compilers: Compilers, script: str, why: str) -> None:
        path = compilers.of(script)
        assert line_of(PATH=path, XDG_CACHE_HOME=str(cache)) == plain(f"{path}/cc failed: {why}")
        assert libraries(cache) == []

    def test_who_asks_for_the_fast_path_is_told_on_standard_error(self, cache: Path, compilers: Compilers) -> None:
        done = start(PRINT, PATH=compilers.none, XDG_CACHE_HOME=str(cache), OPENELM_BLAS="shim")
        why = "there is no C compiler (cc)"
        assert (done.stdout, done.stderr) == (f"{plain(why)}\n", f"OPENELM_BLAS=shim: {why}\n")

    def test_one_that_cannot_be_run(self, cache: Path, compilers: Compilers) -> None:
        path = compilers.of("")
        Path(path, "cc").write_bytes(b"\x7fELF no more")
        assert line_of(PATH=path, XDG_CACHE_HOME=str(cache)) == plain(f"{path}/cc cannot be run: Exec format error")

    def test_one_that_hangs_is_cut_off(
        self, cache: Path, compilers: Compilers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = compilers.of("exec sleep 60")
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(blas, "_COMPILE_SECONDS", 0.2)
        with pytest.raises(blas.Unavailable, match=rf"^{path}/cc took more than 0.2 s$"):
            blas.load()
        assert libraries(cache) == []

    @pytest.mark.parametrize("script", ['echo garbage > "$out"', 'cp /bin/true "$out"', ": writes nothing"])
    def test_one_that_writes_something_else(self, cache: Path, compilers: Compilers, script: str) -> None:
        """It is noticed, and kept from every later start."""
        found = line_of(COMPUTE + PRINT, PATH=compilers.of(script), XDG_CACHE_HOME=str(cache))
        name = plain(f"{cache}/openelm-mlx/blas-").removesuffix(")")
        assert found.startswith(name)
        assert ".so cannot be loaded: " in found
        assert libraries(cache) == []
        assert line_of(PATH=compilers.working, XDG_CACHE_HOME=str(cache)) == FAST

    @pytest.mark.parametrize("those", ["tb == 112 && m < 9", "tb == 111", "m > 9"])
    def test_one_that_computes_wrong(self, cache: Path, compilers: Compilers, tmp_path: Path, those: str) -> None:
        """In any of the ways a product can go."""
        source = tmp_path / "wrong.c"
        source.write_text(WRONG.replace("THOSE", those).replace("SOURCE", str(blas._SOURCE)))
        library = tmp_path / "wrong.so"
        flags = [x for x in blas._FLAGS if not x.startswith("-O")]
        subprocess.run(["cc", "-O1", *flags, str(source), "-o", str(library)], check=True)
        path = compilers.of(f'cp "{library}" "$out"')
        assert line_of(PATH=path, XDG_CACHE_HOME=str(cache)) == plain("its products came out wrong")
        assert libraries(cache) == []


class TestWhatLiesInTheCache:
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
            lambda content: content[: len(content) // 2],
            lambda content: content[:-1],
            lambda content: b"",
            lambda content: content[:-32],
            lambda content: Path("/bin/true").read_bytes(),
        ],
        ids=["one bit", "half", "one byte short", "empty", "no digest", "another program"],
    )
    def test_what_is_not_whole_is_made_anew(
        self, full_cache: Path, compilers: Compilers, spoil: Callable[[bytes], bytes]
    ) -> None:
        (library,) = libraries(full_cache)
        whole = library.read_bytes()
        library.write_bytes(spoil(whole))
        assert line_of(PATH=compilers.working, XDG_CACHE_HOME=str(full_cache)) == FAST
        assert library.read_bytes() == whole
        assert compilers.calls == 1

    def test_nothing_is_run_from_what_is_not_whole_without_a_compiler(
        self, full_cache: Path, compilers: Compilers
    ) -> None:
        (library,) = libraries(full_cache)
        library.write_bytes(library.read_bytes() + b"x")
        expected = plain("there is no C compiler (cc)")
        assert line_of(PATH=compilers.none, XDG_CACHE_HOME=str(full_cache)) == expected

    def test_a_folder_in_the_librarys_place(self, full_cache: Path, compilers: Compilers) -> None:
        (library,) = libraries(full_cache)
        library.unlink()
        library.mkdir()
        expected = plain(f"{library} cannot be written: Is a directory")
        assert line_of(PATH=compilers.working, XDG_CACHE_HOME=str(full_cache)) == expected
        assert libraries(full_cache) == [library]

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
    def test_a_folder_that_others_can_write(self, full_cache: Path, compilers: Compilers, mode: int) -> None:
        folder = full_cache / "openelm-mlx"
        folder.chmod(mode)
        expected = plain(f"others can write the cache folder {folder}")
        assert line_of(PATH=compilers.working, XDG_CACHE_HOME=str(full_cache)) == expected
        folder.chmod(0o755)
        assert line_of(PATH=compilers.working, XDG_CACHE_HOME=str(full_cache)) == FAST

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    def test_a_folder_of_someone_else(self, full_cache: Path, compilers: Compilers) -> None:
        os.chown(full_cache / "openelm-mlx", 12345, -1)
        expected = plain(f"others can write the cache folder {full_cache}/openelm-mlx")
        assert line_of(PATH=compilers.working, XDG_CACHE_HOME=str(full_cache)) == expected


def mounts(options: str) -> Callable[[Path, str], str]:
    """Runs code where a folder is mounted with such options; needs the right to."""

    def run(folder: Path, code: str) -> str:
        script = (
            f'mount --bind "{folder}" "{folder}" && mount -o remount,bind,{options} "{folder}" && exec "$0" -c "$1"'
        )
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, sys.executable, code],
            env=environment(XDG_CACHE_HOME=str(folder), OPENELM_BLAS="auto"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        assert done.stderr == ""
        return done.stdout.removesuffix("\n")

    return run


class TestPlaces:
    """Where the cache folder is, or why it is not."""

    def test_under_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for values in ({"XDG_CACHE_HOME": f"{tmp_path}/file"}, {"HOME": f"{tmp_path}/file"}):
            assert line_of(COMPUTE + PRINT, **values).startswith(plain("no cache folder: [Errno 20] Not a direc")[:-1])

    def test_where_nothing_can_be_made(self) -> None:
        for values in ({"XDG_CACHE_HOME": "/proc"}, {"HOME": "/proc"}, {"HOME": "/dev/null"}):
            assert line_of(**values).startswith(plain("no cache folder: [Errno ").removesuffix(")"))

    @pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
    def test_read_only(self, cache: Path, full_cache: Path, tmp_path: Path) -> None:
        empty = tmp_path / "empty"
        empty.mkdir()
        read_only = mounts("ro")
        assert read_only(empty, PRINT).startswith(plain("no cache folder: [Errno 30] Read-only").removesuffix(")"))
        (empty / "openelm-mlx").mkdir(mode=0o700)
        expected = plain(f"the cache folder {empty}/openelm-mlx cannot be written: Read-only file system")
        assert read_only(empty, PRINT) == expected
        assert read_only(full_cache, PRINT) == FAST
        (library,) = libraries(full_cache)
        garbage = b"garbage"
        library.write_bytes(garbage + hashlib.sha256(garbage).digest())
        assert f"{library} cannot be loaded: " in read_only(full_cache, PRINT)

    @pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
    def test_where_nothing_can_be_run(self, full_cache: Path) -> None:
        before = libraries(full_cache)
        folder = full_cache / "openelm-mlx"
        expected = plain(f"nothing can be run from the cache folder {folder} (mounted noexec)")
        assert mounts("noexec")(full_cache, PRINT) == expected
        assert libraries(full_cache) == before

    def test_a_full_disk(self, cache: Path, compilers: Compilers) -> None:
        limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); {PRINT}"
        path = compilers.of(f'head -c 4096 "{compilers.library}" > "$out"')
        found = line_of(limited, PATH=path, XDG_CACHE_HOME=str(cache))
        assert found.startswith(plain(f"{cache}/openelm-mlx/blas-").removesuffix(")"))
        assert found.endswith(".so cannot be written: File too large)")
        assert libraries(cache) == []

    @pytest.mark.parametrize("value", ["", "relative/cache", "~/x"])
    def test_the_home_folders_where_no_other_is_named(
        self, tmp_path: Path, compilers: Compilers, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        assert line_of(PATH=compilers.working, HOME=str(tmp_path), XDG_CACHE_HOME=value) == FAST
        assert len(libraries(tmp_path / ".cache")) == 1
        assert list((tmp_path / "here").iterdir()) == []

    @pytest.mark.parametrize("name", ["a b", "模型 é", 'it\'s "$HOME"', "new\nline"])
    def test_its_name_may_be_any(self, tmp_path: Path, compilers: Compilers, name: str) -> None:
        assert line_of(PATH=compilers.working, HOME=str(tmp_path / name)) == FAST
        assert len(libraries(tmp_path / name / ".cache")) == 1

    def test_no_home_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import pwd

        def unknown(_: int) -> None:
            raise KeyError

        for name in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", unknown)
        with pytest.raises(blas.Unavailable, match="no cache folder: Could not determine home directory"):
            blas.load()


def test_inspect_says_it(cache: Path, full_cache: Path, compilers: Compilers, tmp_path: Path) -> None:
    for path, folder, expected in (
        (compilers.none, tmp_path / "another", plain("there is no C compiler (cc)")),
        (compilers.none, full_cache, FAST),
    ):
        values = environment(PATH=path, XDG_CACHE_HOME=str(folder), OPENELM_BLAS="auto")
        done = run_apart("inspect", "OpenELM-270M", env=values)
        assert (done.status, done.err) == (0, "")
        (line,) = [x for x in done.out.splitlines() if x.startswith("BLAS ")]
        assert line.removeprefix("BLAS").strip() == expected
