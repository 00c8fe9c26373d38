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
from contextlib import contextmanager, suppress
from pathlib import Path

from openelm_mlx.errors import OpenELMError

_UNFINISHED = ".openelm-mlx-unfinished"
_DELETED = ".openelm-mlx-deleted"
"""Files in folders that a run had begun to write, or to delete, and that the next one may therefore delete. Without one
a hidden folder is somebody else's, whatever its name."""

Ours = Callable[[Path], bool]
"""Whether an existing folder may be replaced: one of our runs wrote it."""


class OutputError(OpenELMError):
    """The output folder cannot be written, or must not be replaced."""


def check_output(out: Path, *, force: bool | None, ours: Ours) -> None:
    """Refuse a place that :func:`new_folder` would refuse, before any work is done for it.

    `force` is None where there is no such option.

    Raises:
        OutputError: `out` exists and may not be replaced.
    """
    with _as_output_errors(out):
        if not out.exists():
            return
        if not out.is_dir():
            raise OutputError(f"{out}: is a file; name another output folder")
        if not force:
            way = "" if force is None else ", or replace it with --force"
            raise OutputError(f"{out}: exists already; name another folder{way}")
        if any(out.iterdir()) and not ours(out):
            raise OutputError(
                f"{out}: --force only replaces folders written by this program, and this one is not; remove it yourself"
            )


@contextmanager
def new_folder(out: Path, *, force: bool = False, ours: Ours) -> Iterator[Path]:
    """A folder to fill; it becomes `out` when the block ends without an error, and vanishes otherwise.

    Args:
        out: where the folder is to be; a link to a folder stays, and its target is written. Missing parents are made.
        force: replace an existing folder, if `ours` says that one of our runs wrote it. The old folder is moved aside,
            the new one renamed in, then the old one deleted.
        ours: whether an existing folder may be replaced.

    Raises:
        OutputError: `out` exists and may not be replaced, its place cannot be written, or the disk is full.
    """
    out = Path(os.path.realpath(out))
    with _as_output_errors(out), parents_of(out):
        with _one_at_a_time(out.parent):
            _clean_up_after_killed_runs(out, ours)
            check_output(out, force=force, ours=ours)
            partial = Path(tempfile.mkdtemp(prefix=_partial_prefix(out), dir=out.parent))
            (partial / _UNFINISHED).touch()
            lock = _mark_as_in_use(partial)
        try:
            yield partial
            partial.chmod(0o777 & ~_umask())  # mkdtemp makes it private
            with _one_at_a_time(out.parent):
                _swap(partial, out, force=force, ours=ours)
                (out / _UNFINISHED).unlink()
        finally:
            os.close(lock)
            shutil.rmtree(partial, ignore_errors=True)


def _partial_prefix(out: Path) -> str:
    return f".{out.name}.partial-"


def _aside(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")


def _swap(partial: Path, out: Path, *, force: bool, ours: Ours) -> None:
    """Rename the finished folder into its place, and delete the old one if there was one."""
    if not out.exists():
        partial.rename(out)
        return
    if not force:
        raise OutputError(f"{out}: appeared while this run was writing; nothing was replaced")
    check_output(out, force=force, ours=ours)
    aside = _aside(out)
    if os.path.lexists(aside):
        raise OutputError(f"{aside}: is in the way of replacing {out}, and no run of this program left it; remove it")
    try:
        out.rename(aside)
        partial.rename(out)
    except BaseException:
        with suppress(OSError):  # the old folder was not moved, or the new one is in its place already
            aside.rename(out)
        raise
    _delete(aside)


def _delete(folder: Path) -> None:
    with suppress(OSError):
        (folder / _DELETED).touch()  # should this be interrupted, the next run knows that the rest may go
    shutil.rmtree(folder, ignore_errors=True)


def _clean_up_after_killed_runs(out: Path, ours: Ours) -> None:
    aside = _aside(out)
    if (aside / _DELETED).is_file():
        _delete(aside)
    elif aside.is_dir() and ours(aside):
        if out.exists():
            _delete(aside)
        else:  # killed between the two renames: the old folder is still whole
            aside.rename(out)
    # Not glob: the name may have characters that mean something to it.
    for stale in list(out.parent.iterdir()):
        if stale.name.startswith(_partial_prefix(out)) and (stale / _UNFINISHED).is_file() and not _in_use(stale):
            _delete(stale)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold other runs off while what lies in `folder` is looked at and renamed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network drives have no locks; then it is as good as without
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _mark_as_in_use(folder: Path) -> int:
    """A lock that ends with this process, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _in_use(folder: Path) -> bool:
    """Whether a run that is still alive writes into `folder`; true where that cannot be known."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def parents_of(out: Path) -> Iterator[None]:
    """Make the folders above `out`; those that were missing go again when the block fails."""
    missing = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # not made, or somebody put something there
            for folder in missing:
                folder.rmdir()
        raise


@contextmanager
def _as_output_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutputError(f"{out}: the disk is full; nothing was written") from None
        file = f" ({e.filename})" if e.filename else ""
        raise OutputError(f"{out}: cannot be written: {e.strerror or e}{file}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
