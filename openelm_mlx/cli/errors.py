"""How a command ends: one line for a refusal, and the exit codes that shells expect."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from openelm_mlx.device import explain_missing_mlx
from openelm_mlx.errors import OpenELMError

REFUSED = 2
INTERRUPTED = 130
TERMINATED = 143


@contextmanager
def ending_well() -> Iterator[None]:
    """Turn refusals, Ctrl-C, SIGTERM and a closed pipe into their exit codes; cleaning up runs in every case."""
    signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = _warn
    try:
        yield
        sys.stdout.flush()
    except OpenELMError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(REFUSED)
    except ImportError as e:
        line = explain_missing_mlx(e)
        if line is None and e.name:
            raise
        print(f"error: {line or e}", file=sys.stderr)
        sys.exit(REFUSED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has left (`| head`). Point stdout elsewhere, or Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _terminate(signum: int, frame: FrameType | None) -> None:
    sys.exit(TERMINATED)
