"""The worker process, through its own stdin and stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.peers.base import Contender, Job
from tests.benchmarks.fakes import SUBJECT, FakeBench
from tests.support.cli import environment
from tests.support.models import converted_folder, golden_model, greedy_reference

HEAVY = {"mlx_lm", "transformers", "torch"}


def lines(*commands: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(command).encode() + b"\n" for command in commands)


def load(contender: Contender, subject: Subject) -> dict[str, Any]:
    job = Job(contender, subject.to_json(), subject.config().to_dict(), "cpu")
    return {"command": "load", "job": job.to_json()}


def run(ids: list[int], gen_tokens: int, time_limit: float | None = None) -> dict[str, Any]:
    return {"command": "run", "ids": ids, "gen_tokens": gen_tokens, "time_limit": time_limit}


def worker(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *(arguments or ("-m", "openelm_mlx.benchmarks.worker"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    )


def gone(process_id: int) -> bool:
    """Whether a process has ended, though its parent may not have asked."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        pass
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return sys.platform == "linux"


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_our_peer_answers_and_imports_no_other(tmp_path: Path) -> None:
    subject = Subject(name="tiny", folder=converted_folder(tmp_path / "tiny"))
    prompt = [5, 17, 300, 2, 41]
    process = worker(
        "-c", "from openelm_mlx.benchmarks.worker import main; main(); import sys; print(*sys.modules, file=sys.stderr)"
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(
        lines(
            load(Contender(peer="openelm-mlx"), subject),
            run(prompt, 12),
            run(prompt, 12, time_limit=1e-9),
            run([9999], 4),
            {"command": "describe"},
        )
    )
    process.stdin.flush()
    loaded, whole, limited, wrong, described = (json.loads(process.stdout.readline()) for _ in range(5))
    process.stdin.close()  # an idle worker then ends by itself
    modules = set(process.stderr.read().decode().split())
    assert process.wait(timeout=20) == 0
    process.stdout.close()
    process.stderr.close()

    assert loaded == {"value": None}
    expected = greedy_reference(golden_model("tiny-tied"), prompt, 12)
    assert whole["value"]["tokens"] == expected
    timing = whole["value"]["timing"]
    assert (timing["prompt_tokens"], timing["gen_tokens"]) == (5, 12)
    assert timing["prompt_s"] > 0 and timing["gen_s"] > 0
    assert whole["value"]["peak_memory_gb"] > 0
    assert limited["value"]["tokens"] == expected[:2]
    assert limited["value"]["timing"]["gen_tokens"] == 2
    assert "has the id 9999" in wrong["refused"]
    assert (described["value"]["dtype"], described["value"]["vocab_size"]) == ("float32", 512)
    assert {"mlx", "openelm-mlx"} == set(described["value"]["versions"])
    assert "mlx.core" in modules
    assert HEAVY & modules == set()


FAKE_PEER = """
import os, sys, types
fake = types.ModuleType("fake")
class Loud:
    def __init__(self, job):
        print("a library says something")
        os.write(1, b"and so does C code")
        assert sys.stdin.read() == ""
    def run(self, **request):
        raise RuntimeError("it broke\\nin the middle")
fake.load = Loud
sys.modules["openelm_mlx.benchmarks.peers.fake"] = fake
from openelm_mlx.benchmarks import peers
peers.PEERS["fake"] = "fake"
from openelm_mlx.benchmarks.worker import main
main()
"""


def test_prints_stay_out_of_the_answers_and_a_defect_ends_the_worker() -> None:
    process = worker("-c", FAKE_PEER)
    out, err = process.communicate(lines(load(Contender(peer="fake"), SUBJECT), run([1], 2)), timeout=20)
    assert out == b'{"value": null}\n'
    assert b"a library says something" in err and b"and so does C code" in err
    assert err.endswith(b"RuntimeError: it broke\nin the middle\n")
    assert process.returncode == 1


def test_a_worker_whose_parent_is_gone_ends_with_all_it_started(tmp_path: Path) -> None:
    fake = FakeBench(tmp_path)
    process = worker()
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write(lines(load(fake.contender("sleepy", before="time.sleep(600)"), SUBJECT), run([1, 2], 8)))
    process.stdin.flush()
    eventually(lambda: len(fake.calls()) == 1)
    process.stdin.close()
    assert process.wait(timeout=20) != 0
    eventually(lambda: gone(int(fake.calls()[0][1])))
    process.stdout.close()
    process.stderr.close()


def test_an_unknown_model_is_refused_in_words(tmp_path: Path) -> None:
    job = load(Contender(peer="openelm-mlx"), SUBJECT)
    job["job"]["subject"] = {**job["job"]["subject"], "preset": None, "folder": str(tmp_path / "none")}
    process = worker()
    out, err = process.communicate(lines(job), timeout=20)
    assert json.loads(out) == {"refused": f"{tmp_path / 'none'}: no such folder"}, err


def test_nothing_but_the_standard_library_is_needed_to_start() -> None:
    code = (
        "import sys; before = {*sys.modules}; import openelm_mlx.benchmarks.worker; print(*({*sys.modules} - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    others = {name.partition(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    assert others == {"openelm_mlx"}
