"""Folders that appear whole or not at all.

A folder is written beside its place under a hidden name and renamed when it is complete. What a killed run left behind
is removed, or put back, by the next one that writes the same folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openelm_mlx.errors import OpenELMError

_LOCK = ".lock"


class OutputError(OpenELMError):
    """The output folder cannot be written, or must not be replaced."""


@contextmanager
def new_folder(out: Path, *, force: bool = False, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """A folder to fill; it becomes `out` when the block ends without an error, and vanishes otherwise.

    Args:
        out: where the folder is to be. Missing parents are made.
        force: replace an existing folder, if `ours` says that one of our runs wrote it. The old folder is moved aside,
            the new one renamed in, then the old one deleted.
        ours: whether an existing folder may be replaced.

    Raises:
        OutputError: `out` exists and may not be replaced, its place cannot be written, or the disk is full.
    """
    out = Path(os.path.realpath(out))
    aside = out.with_name(f".{out.name}.replaced")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clean_up_after_killed_runs(out, aside)
        _check_replaceable(out, force, ours)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    except OSError as e:
        raise OutputError(f"{out}: cannot be written: {e.strerror or e}") from None
    lock = _lock(partial)
    try:
        yield partial
        (partial / _LOCK).unlink()
        partial.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        _swap(partial, out, aside, force)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"{out}: the disk is full; nothing was written") from None
        raise
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(out: Path, force: bool, ours: Callable[[Path], bool]) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(f"{out}: is a file; name another output folder")
    if not force:
        raise OutputError(f"{out}: exists already; name another folder, or replace it with --force")
    if any(out.iterdir()) and not ours(out):
        raise OutputError(
            f"{out}: --force only replaces folders written by this program, and this one is not; remove it yourself"
        )


def _swap(partial: Path, out: Path, aside: Path, force: bool) -> None:
    if out.exists():
        if not force:
            raise OutputError(f"{out}: appeared while this run was writing; nothing was replaced")
        out.rename(aside)
    partial.rename(out)
    shutil.rmtree(aside, ignore_errors=True)


def _clean_up_after_killed_runs(out: Path, aside: Path) -> None:
    if aside.exists():
        if out.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:  # killed between the two renames: the old folder is still whole
            aside.rename(out)
    for stale in out.parent.glob(f".{out.name}.partial-*"):
        if not _is_locked(stale):
            shutil.rmtree(stale, ignore_errors=True)


def _lock(folder: Path) -> int:
    handle = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _is_locked(folder: Path) -> bool:
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
