"""How a command ends: one line for a refusal, and the exit codes that shells expect."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType

from openelm_mlx.device import explain_missing_mlx
from openelm_mlx.errors import OpenELMError

REFUSED = 2
INTERRUPTED = 130


def exit_status(run: Callable[[], object]) -> int:
    """Run a command; refusals, Ctrl-C, SIGTERM and a closed pipe become exit statuses, and cleaning up is done."""
    _open_missing_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _terminate)
    warnings.showwarning = _warn
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 has no sign for every character
    try:
        status = _status_of(run)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has left (`| head`)
        status = 0
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG)
        _refuse(f"the output cannot be written: {e.strerror}" if full else f"{e.strerror or e}")
        status = REFUSED
    else:
        return status
    # Point stdout elsewhere, or Python complains again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def _status_of(run: Callable[[], object]) -> int:
    try:
        run()
    except OpenELMError as e:
        _refuse(str(e))
        return REFUSED
    except OSError as e:
        if e.filename is None:  # more likely than not our own output
            raise
        _refuse(f"{e.filename}: {e.strerror or e}")
        return REFUSED
    except RuntimeError as e:
        if "temp_directory_path" not in str(e):  # MLX writes and compiles small programs there
            raise
        _refuse("TMPDIR names no folder that can be written to, and MLX needs one")
        return REFUSED
    except ImportError as e:
        line = explain_missing_mlx(e)
        if line is None and e.name:
            raise
        _refuse(line or str(e))
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # which typer turned into a failure
            raise e.__context__ from None
        return e.code if isinstance(e.code, int) else 0
    return 0


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _refuse(message: str) -> None:
    # Names of files and words of templates get here, and must not steer a terminal.
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    print(f"error: {shown}", file=sys.stderr)


def _open_missing_streams() -> None:
    """Give a process that was started with a standard stream closed an empty one.

    Else the next file opened takes its number, and what is meant for stderr may go there, or to stdout.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
