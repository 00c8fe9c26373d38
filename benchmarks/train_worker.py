"""The worker process that a trainer runs in; its commands and answers are lines of JSON, as `worker.py` has them.

``{"command": "load", "job": ...}`` comes first and is answered with what the trainer says of itself; each ``{"command":
"step"}`` after it with what the next step was. The trainer's own loop is what runs: it stands still until it is asked.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TextIO

from openelm_mlx.benchmarks import trainers, worker
from openelm_mlx.benchmarks.trainers.base import Loaded, Step, TuningJob
from openelm_mlx.errors import OpenELMError


def main() -> None:
    """Run as a worker."""
    worker.run(serve)


class Ended(Exception):
    """Nobody asks any more."""


def serve(next_line: worker.NextLine, answers: TextIO) -> None:
    """Answer commands until there is None, or the trainer cannot go on."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    def wait() -> bytes:
        line = next_line()
        if line is None:
            raise Ended
        return line

    def turn(step: Step) -> None:
        say({"value": dataclasses.asdict(step)})
        wait()

    try:
        job = TuningJob.from_json(json.loads(wait())["job"])
        loaded: Loaded = trainers.trainer(job.contender.peer).load(job)
        say({"value": dataclasses.asdict(loaded.about())})
        wait()
        loaded.run(turn)
    except OpenELMError as e:
        say({"refused": str(e)})
    except Ended:
        pass


if __name__ == "__main__":
    main()
