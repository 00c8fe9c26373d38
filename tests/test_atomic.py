"""Folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from openelm_mlx.atomic import OutputError, check_output, new_folder
from tests.support.cli import environment

NAMES = ["plain", "two words", "模型-é", "[ab]*?", "a[!b]c", ".hidden", "100%{x}'\"$"]


def ours(folder: Path) -> bool:
    return (folder / "ours").exists()


def make(out: Path, text: str = "new", *, force: bool = False) -> None:
    with new_folder(out, force=force, ours=ours) as folder:
        (folder / "ours").write_text(text)


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def old_folder(out: Path) -> Path:
    make(out, "old")
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_appears_under_any_name(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    with new_folder(out, ours=ours) as folder:
        assert not out.exists()
        assert folder.parent == tmp_path, "another file system could not be renamed from"
        (folder / "file").write_text("x")
    assert listing(tmp_path) == [name]
    assert (out / "file").read_text() == "x"


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        make(tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert os.umask(before) == before, "the process's own umask was changed"


def test_missing_parents_are_made_and_go_again_on_failure(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b" / "out")
    assert listing(tmp_path / "a" / "b") == ["out"]
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "c" / "d" / "out", ours=ours):
        raise ZeroDivisionError
    assert listing(tmp_path) == ["a"]


def test_parents_with_something_else_in_them_stay(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "c" / "d" / "out", ours=ours):
        (tmp_path / "c" / "note").write_text("mine")
        raise ZeroDivisionError
    assert listing(tmp_path / "c") == ["note"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(tmp_path / "out", ours=ours) as folder:
        (folder / "half").write_text("x")
        raise error
    assert listing(tmp_path) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    out = old_folder(tmp_path / "out")
    with pytest.raises(error), new_folder(out, force=True, ours=ours):
        raise error
    assert listing(tmp_path) == ["out"]
    assert (out / "ours").read_text() == "old"


def test_force_replaces_what_is_ours(tmp_path: Path) -> None:
    out = old_folder(tmp_path / "out")
    make(out, force=True)
    assert listing(tmp_path) == ["out"]
    assert (out / "ours").read_text() == "new"


def test_what_exists_is_refused(tmp_path: Path) -> None:
    out = old_folder(tmp_path / "out")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    cases = [(out, False, "exists already"), (tmp_path / "theirs", True, "not; remove it yourself")]
    cases += [(tmp_path / "file", force, "is a file") for force in (True, False)]
    for place, force, message in cases:
        with pytest.raises(OutputError, match=message):
            check_output(place, force=force, ours=ours)
        with pytest.raises(OutputError, match=message), new_folder(place, force=force, ours=ours):
            raise AssertionError("the block ran")
    assert listing(tmp_path) == ["file", "out", "theirs"]


def test_a_command_without_force_does_not_advise_it(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as refusal:
        check_output(tmp_path, force=None, ours=ours)
    assert str(refusal.value) == f"{tmp_path}: exists already; name another folder"


def test_an_empty_folder_is_replaced_with_force_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(OutputError, match="exists already"):
        make(out)
    make(out, force=True)
    assert (out / "ours").read_text() == "new"


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "disk" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(target)
    make(link)
    assert link.is_symlink()
    assert (target / "ours").read_text() == "new"
    make(link, "newer", force=True)
    assert link.is_symlink()
    assert (target / "ours").read_text() == "newer"
    assert listing(tmp_path / "disk") == ["target"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"cannot be written: File exists \(.*file\)"):
        make(tmp_path / "file" / "out")
    with pytest.raises(OutputError, match="cannot be written: File name too long"):
        make(tmp_path / ("x" * 250))
    with pytest.raises(OutputError, match=r"cannot be written: .*\(/proc"):
        make(Path("/proc/out"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written: Permission denied"):
        make(tmp_path / "out")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said(tmp_path: Path, code: int) -> None:
    with pytest.raises(OutputError, match="out: the disk is full; nothing was written"), new_folder(
        tmp_path / "out", ours=ours
    ) as folder:  # fmt: skip
        raise OSError(code, os.strerror(code), str(folder / "file"))
    assert listing(tmp_path) == []


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="appeared while this run was writing"), new_folder(out, ours=ours):
        make(out, "theirs")
    assert listing(tmp_path) == ["out"]
    assert (out / "ours").read_text() == "theirs"


def test_somebody_elses_folder_that_appears_meanwhile_is_not_replaced_with_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OutputError, match="remove it yourself"), new_folder(out, force=True, ours=ours):
        out.mkdir()
        (out / "thesis.txt").write_text("x")
    assert listing(tmp_path) == ["out"]
    assert listing(out) == ["thesis.txt"]


def test_leftovers_of_a_killed_run_are_removed_and_others_stay(tmp_path: Path) -> None:
    for name in NAMES:
        for left in (f".{name}.partial-k8x2", ".plan.partial-z", f"{name}.partial-z"):
            (tmp_path / left).mkdir(exist_ok=True)
            (tmp_path / left / ".openelm-mlx-unfinished").touch()
        (tmp_path / f".{name}.partial-file").write_text("not a folder")
        make(tmp_path / name)
        assert not (tmp_path / f".{name}.partial-k8x2").exists()
        assert (tmp_path / f".{name}.partial-file").exists()
        assert (tmp_path / ".plan.partial-z").exists()
        assert (tmp_path / f"{name}.partial-z").exists()


def test_an_interrupt_between_the_renames_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = old_folder(tmp_path / "out")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(out, force=True)
    assert listing(tmp_path) == ["out"]
    assert (out / "ours").read_text() == "old"


KILLED_BETWEEN = """
import os, signal, sys
from pathlib import Path
from openelm_mlx.atomic import new_folder
rename = Path.rename
def killed(self, target):
    if ".partial-" in self.name:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = killed
with new_folder(Path(sys.argv[1]), force=True, ours=lambda p: True) as folder:
    (folder / "ours").write_text("new")
"""


def test_a_kill_between_the_renames_is_healed(tmp_path: Path) -> None:
    out = old_folder(tmp_path / "out")
    done = subprocess.run([sys.executable, "-c", KILLED_BETWEEN, str(out)], env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    with pytest.raises(OutputError, match="exists already"):
        make(out)  # the old folder is back in its place, and so in the way
    assert (out / "ours").read_text() == "old"
    assert listing(tmp_path) == ["out"]


def test_a_kill_before_the_old_folder_is_deleted_is_cleaned_up(tmp_path: Path) -> None:
    out = old_folder(tmp_path / "out")
    make(tmp_path / ".out.replaced", "older")
    make(out, force=True)
    assert listing(tmp_path) == ["out"]
    assert (out / "ours").read_text() == "new"


WRITING = """
import sys
from pathlib import Path
from openelm_mlx.atomic import new_folder
with new_folder(Path(sys.argv[1]), ours=lambda p: True) as folder:
    (folder / "ours").write_text("theirs")
    print(folder, flush=True)
    sys.stdin.readline()
"""


def test_the_folder_of_a_run_that_is_alive_stays_and_of_a_dead_one_goes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(out)],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with other:
        assert other.stdout
        partial = Path(other.stdout.readline().strip())
        make(out)
        assert (partial / "ours").read_text() == "theirs"
        other.kill()
    assert partial.exists()
    make(out, force=True)
    assert listing(tmp_path) == ["out"]


def test_many_runs_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    """Each may win, lose or be refused; none may fail in another way, and nothing is left over."""
    out = old_folder(tmp_path / "out")
    errors: list[BaseException] = []

    def work(number: int) -> None:
        for _ in range(20):
            try:
                make(out, str(number), force=True)
            except BaseException as e:
                errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert listing(tmp_path) == ["out"]
    assert (out / "ours").read_text() in "0123"


def test_a_file_system_without_locks_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".out.partial-unknown").mkdir()
    make(tmp_path / "out")
    make(tmp_path / "out", "newer", force=True)
    # Whether its run is alive cannot be known, so it stays.
    assert listing(tmp_path) == [".out.partial-unknown", "out"]


def test_folders_that_only_look_like_ours_are_never_deleted(tmp_path: Path) -> None:
    for name in (".out.replaced", ".out.partial-backup"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("x")
    make(tmp_path / "out")
    with pytest.raises(OutputError, match="is in the way"):
        make(tmp_path / "out", force=True)
    assert listing(tmp_path) == [".out.partial-backup", ".out.replaced", "out"]
    assert (tmp_path / ".out.replaced" / "thesis.txt").read_text() == "x"
    assert (tmp_path / ".out.partial-backup" / "thesis.txt").read_text() == "x"
    assert (tmp_path / "out" / "ours").exists()
