"""Runs of ``openelm finetune`` that are killed, stopped by signals, or met by a second process."""

from __future__ import annotations

import fcntl
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.finetune.runs import LONG, arguments, listing, metrics, refused, started, train, updates, wait_for
from tests.support.cli import finish, run


@pytest.mark.slow
class TestStopping:
    def test_killed_at_random_moments_it_ends_as_if_it_never_had(
        self, unbroken: Path, model: Path, data: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "run"
        moments = random.Random()
        seed = moments.randrange(1 << 30)
        moments.seed(seed)
        given = arguments(model, data, out, *LONG)
        for first in (2, 9, 16):
            with started(*given) as process:
                wait_for(out, first + moments.randrange(6))
                time.sleep(moments.random() * 0.02)
                process.kill()
                assert process.wait() == -signal.SIGKILL, seed
            given = ["finetune", "--resume", str(out), "--quiet"]
        assert run(*given).status == 0
        assert metrics(out) == metrics(unbroken), seed
        assert (out / "adapters.safetensors").read_bytes() == (unbroken / "adapters.safetensors").read_bytes(), seed
        assert listing(out) == listing(unbroken)
        assert listing(out / "best") == listing(unbroken / "best")
        assert listing(out / "checkpoints") == listing(unbroken / "checkpoints")

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_saves_and_it_goes_on(
        self, number: signal.Signals, unbroken: Path, model: Path, data: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "run"
        with started(*arguments(model, data, out, *LONG)) as process:
            wait_for(out, 9)
            process.send_signal(number)
            done = finish(process, timeout=300)
        assert done.status == 128 + number
        assert done.err == f"stopped and saved; go on with: openelm finetune --resume {out}\n"
        saved = int(listing(out / "checkpoints")[-1].removeprefix("step-"))
        assert updates(metrics(out))[-1]["step"] == saved
        assert run("finetune", "--resume", out, "--quiet").status == 0
        assert metrics(out) == metrics(unbroken)

    def test_a_signal_is_heard_at_once(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        with started(*(a for a in arguments(model, data, out, *LONG) if a != "--quiet")) as process:
            wait_for(out, 3)
            process.send_signal(signal.SIGTERM)
            done = finish(process, timeout=300)
        assert done.status == 143
        said = done.err.index("stopping after this update (again to stop at once)\n")
        assert said < done.err.index("stopped and saved; ")

    def test_a_second_process_is_refused(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=1")
        with (out / "metrics.jsonl").open() as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            assert "another process is training this run" in refused("finetune", "--resume", out)
            assert "another process is training this run" in refused(
                *arguments(model, data, out, "--steps=1", "--force")
            )
        assert run("finetune", "--resume", out, "--quiet").status == 0

    def test_a_run_that_is_over_stays_as_it_is(self, unbroken: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        shutil.copytree(unbroken, out)
        assert run("finetune", "--resume", out, "--quiet").status == 0
        for name in ("metrics.jsonl", "adapters.safetensors", "config.yaml"):
            assert (out / name).read_bytes() == (unbroken / name).read_bytes()
