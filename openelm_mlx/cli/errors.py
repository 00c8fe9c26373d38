"""How a command ends: one line for a refusal, and the exit codes that shells expect."""

from __future__ import annotations

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
TERMINATED = 143


def exit_status(run: Callable[[], object]) -> int:
    """Run a command; refusals, Ctrl-C, SIGTERM and a closed pipe become exit statuses, and cleaning up is done."""
    signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = _warn
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 has no sign for every character
    try:
        status = _status_of(run)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has left (`| head`)
        status = 0
    except OSError as e:
        if e.filename is not None:
            raise
        print(f"error: the output cannot be written: {e.strerror or e}", file=sys.stderr)
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
        print(f"error: {e}", file=sys.stderr)
        return REFUSED
    except ImportError as e:
        line = explain_missing_mlx(e)
        if line is None and e.name:
            raise
        print(f"error: {line or e}", file=sys.stderr)
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


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(TERMINATED)
