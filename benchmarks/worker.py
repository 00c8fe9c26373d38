"""The worker process that a peer runs in: commands are lines of JSON on stdin, answers lines of JSON on stdout.

``{"command": "load", "job": ...}``, ``{"command": "run", "ids": ..., "gen_tokens": ..., "time_limit": ...}`` (a short
one warms up) and ``{"command": "describe"}`` are answered by ``{"value": ...}``, or by ``{"refused": why}`` when the
peer cannot. Anything else that goes wrong ends the process, with a traceback on stderr. So does the end of stdin:
nothing outlives the process that asks. Imports nothing but the standard library before a job is loaded, because a peer
chooses its BLAS before MLX comes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from openelm_mlx.benchmarks.peers import peer
from openelm_mlx.benchmarks.peers.base import Job, Loaded
from openelm_mlx.errors import OpenELMError

GRACE = 0.5
"""Seconds that a busy worker has to end by itself once nobody asks any more."""


NextLine = Callable[[], "bytes | None"]
"""Waits for the next command; None at the end of stdin."""


def main() -> None:
    """Run as a worker."""
    run(serve)


def run(serve: Callable[[NextLine, TextIO], None]) -> None:
    """Take stdin and stdout for the commands and answers alone, then let `serve` answer until stdin ends."""
    commands, answers = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:  # noqa: PTH123  # a device
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    sys.stdout = sys.stderr  # nor, written late, behind the line that says why a worker ended
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands, lines), daemon=True).start()
    serve(lines.get, answers)


def serve(next_line: NextLine, answers: TextIO) -> None:
    """Answer commands until there is None."""
    loaded: Loaded | None = None
    while (line := next_line()) is not None:
        request = json.loads(line)
        command, value = request.pop("command"), None
        try:
            if command == "load":
                job = Job.from_json(request["job"])
                loaded = peer(job.contender.peer).load(job)
            else:
                assert loaded is not None
                done = loaded.run(**request) if command == "run" else loaded.describe()
                value = dataclasses.asdict(done)
            answer: dict[str, Any] = {"value": value}
        except OpenELMError as e:
            answer = {"refused": str(e)}
        print(json.dumps(answer), file=answers, flush=True)


def _read(commands: int, lines: queue.SimpleQueue[bytes | None]) -> None:
    """Pass lines on; at their end, end the process, with whatever it started."""
    rest = b""
    while piece := os.read(commands, 1 << 16):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            lines.put(line)
    lines.put(None)
    time.sleep(GRACE)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
