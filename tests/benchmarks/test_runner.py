"""Several peers in turns: what is measured, in which order, and what happens when one fails."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openelm_mlx import device
from openelm_mlx.benchmarks import peers, runner
from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.peers.base import Contender, Description, Paths
from openelm_mlx.benchmarks.protocol import Protocol, Timing, prompt_ids
from openelm_mlx.cpu import halves
from openelm_mlx.errors import OpenELMError
from tests.benchmarks.fakes import SUBJECT, FakeBench
from tests.benchmarks.test_worker import eventually, gone
from tests.support.cli import environment
from tests.support.models import converted_folder, golden_model, greedy_reference

SHORT = Protocol(prompt_tokens=6, gen_tokens=20, repeats=2, dry_run=False)


class Watched(runner.Worker):
    """A worker that notes, before it is closed, its process id, and what libraries and variables it has."""

    seen: dict[int, tuple[str, bytes]]

    def close(self) -> None:
        there = Path(f"/proc/{self._process.pid}")
        facts = (there / "maps").read_text(), (there / "environ").read_bytes()
        self.seen[self._process.pid] = facts
        super().close()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[str, bytes]]:
    """Process ids of all workers that were closed -> their maps and environment."""
    if sys.platform != "linux":
        pytest.skip("looks into /proc")
    Watched.seen = {}
    monkeypatch.setattr(runner, "Worker", Watched)
    return Watched.seen


@pytest.fixture
def fake(tmp_path: Path) -> FakeBench:
    return FakeBench(tmp_path)


# What is measured.


def test_ours_and_stock_mlx_lm_say_the_same_on_the_same_folder(
    tmp_path: Path, seen: dict[int, tuple[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(device.BLAS_VARIABLE, raising=False)
    subject = Subject(name="tiny", folder=converted_folder(tmp_path / "tiny"))
    contenders = [Contender(peer="openelm-mlx"), Contender(peer="mlx-lm")]
    result = runner.run(contenders, subject, SHORT)

    assert result.notes == []
    ours, stock = result.outcomes
    expected = greedy_reference(golden_model("tiny-tied"), prompt_ids(6, 512), 20)
    assert ours.tokens == stock.tokens == expected
    for outcome in (ours, stock):
        assert [(t.prompt_tokens, t.gen_tokens) for t in outcome.timings] == [(6, 20)] * 2
        assert (outcome.description.dtype, outcome.description.vocab_size) == ("float32", 512)
        assert outcome.description.weight_bytes == 2_725_376  # 681,344 parameters, tied
        assert outcome.peak_memory_gb > 0.0027
    assert "mlx-lm" in stock.description.versions
    assert runner.agreement(result.outcomes) == ["tiny: mlx-lm generates all 20 tokens as openelm-mlx does"]
    (_, our_variables), (stock_libraries, stock_variables) = seen.values()
    assert "too late" not in ours.description.blas
    assert b"OPENELM_BLAS=none" not in our_variables
    assert stock.description.blas == "MLX's own"
    assert b"OPENELM_BLAS=none" in stock_variables
    assert "/libopenblas" not in stock_libraries  # NumPy brings one of another name, for itself


# In which order.


def test_peers_take_turns(fake: FakeBench) -> None:
    contenders = [fake.contender("a"), fake.contender("b")]
    said: list[str] = []
    protocol = dataclasses.replace(SHORT, repeats=3, dry_run=True)
    result = runner.run(contenders, SUBJECT, protocol, progress=said.append)

    warm, whole = runner.WARM_UP_TOKENS - 1, 19
    before = [("a", whole), ("a", warm), ("b", warm)]  # the dry run is the first one's
    assert fake.turns() == before + [("a", whole), ("b", whole)] * 3
    assert result.notes == []
    assert [outcome.contender for outcome in result.outcomes] == contenders
    assert [len(outcome.timings) for outcome in result.outcomes] == [3, 3]
    assert result.outcomes[1].timings[0].generation_tps == pytest.approx(20)
    assert said[-1] == "llama.cpp (b): run 3 of 3: prompt 500.0, generation 20.0 tokens/s"


def test_the_dry_run_is_the_first_models_alone(fake: FakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = [SUBJECT, dataclasses.replace(SUBJECT, name="again")]
    program = Path(str(fake.contender("only").path))
    protocol = dataclasses.replace(SHORT, repeats=1, dry_run=True)
    paths = Paths(llama_bench=program, gguf=fake.gguf)
    said: list[str] = []
    result = runner.compare(subjects, ["corenet", "llama.cpp"], protocol, paths=paths, progress=said.append)
    assert [steps for _, steps in fake.turns()] == [19, 7, 19, 7, 19]
    assert [outcome.subject.name for outcome in result.outcomes] == ["270M", "again"]
    assert result.notes == ["corenet: left out: no path of a CoreNet checkout given"]
    assert said.count(result.notes[0]) == 1


def test_peers_too_large_together_are_loaded_anew(fake: FakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory", lambda: device.Memory(350_000_000, "this test"))  # room for one process
    contenders = [fake.contender("a"), fake.contender("b")]
    result = runner.run(contenders, SUBJECT, SHORT)
    assert result.notes == ["270M: the peers do not fit into memory together, so each is loaded anew for every repeat"]
    assert fake.turns() == [("a", 7), ("a", 19), ("b", 7), ("b", 19)] * 2
    assert len({outcome.timings[1] for outcome in result.outcomes}) == 1


def test_memory_that_peers_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SUBJECT.config()
    stock, ours = Contender(peer="mlx-lm"), Contender(peer="openelm-mlx")
    weights = 271_527_168

    def needed(contender: Contender, precision: str, backend: str = "cpu") -> float:
        return runner.memory_needed(contender, dataclasses.replace(SUBJECT, precision=precision), config, backend)

    assert 2 * weights < needed(stock, "bf16") < 3.8 * weights
    monkeypatch.setattr(halves, "possible", lambda: True)  # bfloat16 weights stay as they are on a CPU
    assert needed(ours, "bf16") == needed(stock, "bf16")
    monkeypatch.setattr(halves, "possible", lambda: False)  # they become float32
    assert needed(ours, "bf16") > needed(stock, "bf16") + 2 * weights
    assert needed(ours, "bf16", "metal") == needed(stock, "bf16", "metal")
    assert weights / 2 < needed(stock, "4bit") < needed(stock, "8bit") < needed(stock, "bf16")
    assert needed(dataclasses.replace(stock, dtype="float32"), "4bit") == needed(ours, "bf16")
    folder = Subject(name="tiny", folder=converted_folder(tmp_path / "tiny"))
    of_folder = runner.memory_needed(stock, folder, folder.config(), "cpu")
    assert 300e6 + 2_725_376 < of_folder < 310e6  # stored in float32, and a process of its own


# When one fails.


def test_a_peer_that_fails_in_the_middle_is_a_line(fake: FakeBench, seen: dict[int, tuple[str, bytes]]) -> None:
    counted = f"sys.exit('no more') if open({str(fake.log)!r}).read().count('fragile') > 2 else None"
    contenders = [fake.contender("a"), fake.contender("fragile", before=counted), fake.contender("b")]
    result = runner.run(contenders, SUBJECT, SHORT)
    assert [outcome.contender.variant for outcome in result.outcomes] == ["a", "b"]
    assert [len(outcome.timings) for outcome in result.outcomes] == [2, 2]
    assert result.notes == [
        "llama.cpp (fragile): left out: 270M: llama-bench ended with status 1: no more",
    ]
    assert len(seen) == 3 and all(gone(pid) for pid in seen)


def test_a_process_that_crashes_is_a_line_with_its_last_words(fake: FakeBench, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho first >&2; echo Illegal instruction >&2; exit 132\n")
    broken.chmod(0o755)
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -11 $$\n")
    killed.chmod(0o755)
    contenders = [
        Contender(peer="pytorch", python=str(broken)),
        Contender(peer="pytorch", variant="two", python=str(killed)),
        Contender(peer="pytorch", variant="three", python=str(tmp_path / "none")),
        fake.contender("a"),
    ]
    result = runner.run(contenders, SUBJECT, SHORT)
    assert result.notes == [
        "pytorch: left out: 270M: its process ended with status 132: Illegal instruction",
        "pytorch (two): left out: 270M: its process ended with signal 11",
        f"pytorch (three): left out: 270M: {tmp_path / 'none'}: cannot be run: No such file or directory",
    ]
    assert len(result.outcomes) == 1


def test_a_peer_that_hangs_is_a_line_and_leaves_nothing(fake: FakeBench) -> None:
    contenders = [fake.contender("sleepy", before="time.sleep(600)"), fake.contender("a")]
    result = runner.run(contenders, SUBJECT, dataclasses.replace(SHORT, repeats=1), timeout=1.5)
    assert result.notes == ["llama.cpp (sleepy): left out: 270M: no answer within 1.5 seconds"]
    assert [outcome.contender.variant for outcome in result.outcomes] == ["a"]
    eventually(lambda: gone(int(fake.calls()[0][1])))


def test_a_python_without_pytorch_is_a_line() -> None:
    if "torch" in sys.modules or peers.peer("pytorch").find_spec("torch"):
        pytest.skip("this Python has it")
    result = runner.run([Contender(peer="pytorch", dtype="float32", python=sys.executable)], SUBJECT, SHORT)
    assert result.notes == [f"pytorch: left out: 270M: {sys.executable} has no torch"]


ENDLESS = """
import sys
from pathlib import Path
from openelm_mlx.benchmarks import runner
from openelm_mlx.benchmarks.protocol import Protocol
from tests.benchmarks.fakes import SUBJECT, FakeBench
fake = FakeBench(Path(sys.argv[1]))
contenders = [fake.contender("a"), fake.contender("sleepy", before="time.sleep(600)")]
runner.run(contenders, SUBJECT, Protocol(gen_tokens=20, dry_run=False), progress=lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_its_parent(fake: FakeBench, tmp_path: Path, how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    eventually(lambda: len(fake.calls()) == 2)
    workers = [int(call[1]) for call in fake.calls()]
    parents = [line for pid in workers[1:] if (line := parent_of(pid))]
    parent.send_signal(how)
    _, err = parent.communicate(timeout=20)
    assert parent.returncode != 0
    eventually(lambda: all(gone(pid) for pid in [*workers, *parents]))
    if how == signal.SIGINT:
        assert err.decode().strip().endswith("KeyboardInterrupt")


def parent_of(process_id: int) -> int | None:
    """A worker's id, by that of the program it runs; None where the system does not tell."""
    status = Path(f"/proc/{process_id}/status")
    if not status.exists():
        return None
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("PPid:"))


def test_names_and_models_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(OpenELMError, match="no peer 'vllm'"):
        runner.compare([SUBJECT], ["vllm"], SHORT)
    with pytest.raises(OpenELMError, match="no such folder"):
        runner.compare([Subject(name="x", folder=tmp_path / "x")], ["openelm-mlx"], SHORT)


# What people read.


def outcome(peer: str, tokens: list[int], *, folder: Path | None = Path("x")) -> runner.Outcome:
    said = Description("float32", 1, 1, 512, "none", {})
    timings = [Timing(10, 0.5, 5, s) for s in (1.0, 2.0, 4.0)]
    subject = Subject(name="tiny", folder=folder, preset=None if folder else "OpenELM-270M")
    return runner.Outcome(Contender(peer=peer), subject, said, timings, tokens, 1.0)


def test_agreement_is_told_to_the_token() -> None:
    told = runner.agreement(
        [outcome("a", [1, 2, 3, 4]), outcome("b", [1, 2, 9, 4]), outcome("c", [1, 2, 3]), outcome("d", [])]
    )
    assert told == [
        "tiny: b generates the first 2 of 4 tokens as a does",
        "tiny: c generates all 3 tokens as a does",
    ]
    assert runner.agreement([outcome("a", [1], folder=None), outcome("b", [2], folder=None)]) == []


def test_lines_give_medians_and_spreads() -> None:
    result = runner.Result([outcome("a", [1, 2])], ["b: left out: why"])
    first, last = runner.lines(result)
    assert " ".join(first.split()) == (
        "tiny a prompt 20.00 (20.00 to 20.00) generation 2.00 (1.00 to 4.00) total 6.00 (3.33 to 10.00) tokens/s"
    )
    assert last == "b: left out: why"


# Comparisons with the originals.


@pytest.mark.reference
@pytest.mark.parametrize("case", ["tiny-tied", "tiny-untied", "tiny-no-qk-norm"])
def test_pytorch_says_what_we_say(tmp_path: Path, case: str) -> None:
    pytest.importorskip("torch")
    agree_with("pytorch", tmp_path, case, Paths())


@pytest.mark.reference
@pytest.mark.parametrize("case", ["tiny-tied", "tiny-untied", "tiny-no-glu"])
def test_corenets_port_says_what_we_say(tmp_path: Path, case: str) -> None:
    if "CORENET" not in os.environ:
        pytest.skip("CORENET names no checkout of Apple's CoreNet")
    agree_with("corenet", tmp_path, case, Paths(corenet=Path(os.environ["CORENET"])))


def agree_with(name: str, tmp_path: Path, case: str, paths: Paths) -> None:
    """In float32 the tokens are those of the whole sequence run anew each time."""
    subject = Subject(name=case, folder=converted_folder(tmp_path / case, case=case))
    result = runner.compare([subject], [name], SHORT, paths=paths)
    assert result.notes == []
    assert result.outcomes
    vocab = subject.config().vocab_size
    expected = greedy_reference(golden_model(case), prompt_ids(6, vocab), 20)
    for one in result.outcomes:
        assert len(one.tokens) == 20
        if one.description.dtype == "float32":
            assert one.tokens == expected
