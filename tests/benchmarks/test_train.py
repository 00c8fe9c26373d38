"""``openelm bench train``: trainers in turn, in processes of their own, and what is told of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx import device
from openelm_mlx.benchmarks import results
from openelm_mlx.benchmarks.models import Subject
from openelm_mlx.benchmarks.train import Report, Trained, lines, measure
from openelm_mlx.benchmarks.trainers.base import About, Step, Training, Tuner, TuningJob
from openelm_mlx.errors import OpenELMError
from tests.support.cli import Done, environment, run
from tests.support.models import converted_folder

SMALL = Training(batch_size=2, seq_length=32, steps=2, rank=4)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU every kernel of a compiled step costs its first user half a second of a C++ compiler's time."""
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject("tiny", folder=converted_folder(tmp_path_factory.mktemp("train") / "tiny"))


# Measuring.


@pytest.mark.slow
def test_they_take_turns_step_by_step(subject: Subject) -> None:
    said: list[str] = []
    report = measure(subject, SMALL, ["mlx-lm"], progress=said.append)
    assert [line.partition(": ")[0] for line in said if "loading" not in line] == ["openelm-mlx", "mlx-lm"] * 3
    own, other = report.programs
    assert [len(p.steps) for p in report.programs] == [2, 2]
    assert own.first.loss == pytest.approx(other.first.loss, rel=1e-5)  # the same weights and data
    assert other.steps[-1].loss < other.first.loss and own.steps[-1].loss < own.first.loss
    assert all(step.targets == 64 for p in report.programs for step in p.steps)
    assert other.about.versions["mlx-lm"]
    if device.backend() == "cpu":
        assert other.about.blas == "MLX's own"


@pytest.mark.slow
def test_compiled_steps_have_the_same_losses(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses() -> list[float]:
        return [s.loss for p in measure(subject, SMALL, ["mlx-lm"]).programs for s in (p.first, *p.steps)]

    plain = losses()
    monkeypatch.delenv("MLX_DISABLE_COMPILE")
    assert losses() == pytest.approx(plain, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a BLAS is chosen on Linux")
def test_ragged_data_and_the_same_blas(subject: Subject) -> None:
    training = Training(batch_size=2, seq_length=64, steps=3, ragged=(4, 24))
    report = measure(subject, training, ["mlx-lm-sorted"])
    own, other = report.programs
    assert other.tuner.variant == "float32, same BLAS, sorted"
    assert own.about.blas == other.about.blas == device.blas()
    assert own.useful > 0.75 > other.useful  # packed rows, and rows padded to 32


@pytest.mark.slow
def test_what_mlx_lm_cannot_do_is_a_note(tmp_path: Path) -> None:
    subject = Subject("tiny", folder=converted_folder(tmp_path / "tiny", case="tiny-no-glu"))
    said: list[str] = []
    report = measure(subject, SMALL, ["mlx-lm"], progress=said.append)
    assert [p.tuner.name for p in report.programs] == ["openelm-mlx"]
    assert report.notes[0].startswith("mlx-lm: left out: its process ended with status 1: ")
    assert report.notes[0] in said


def test_what_cannot_be_trained_here_is_an_error(tmp_path: Path) -> None:
    subject = Subject("tiny", folder=converted_folder(tmp_path / "tiny", "4bit"))
    with pytest.raises(OpenELMError, match="tiny: packed weights cannot be trained"):
        measure(subject, Training(method="full"))


def worker(*lines: dict[str, Any]) -> list[dict[str, Any]]:
    said = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    command = [sys.executable, "-m", "openelm_mlx.benchmarks.train_worker"]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()}
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **options) as process:
        assert process.stdin and process.stdout
        process.stdin.write(said)
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in lines]
        process.stdin.close()  # an idle worker then ends by itself
        assert process.wait(timeout=20) in (0, -9)
    return answers


def test_the_worker_answers_step_by_step(subject: Subject) -> None:
    config = subject.config().to_dict()
    job = TuningJob(Tuner(peer="openelm-mlx"), subject.to_json(), config, device.backend(), SMALL).to_json()
    about, first, second = worker({"command": "load", "job": job}, {"command": "step"}, {"command": "step"})
    assert About(**about["value"]).trained > 0
    assert Step(**first["value"]).loss > Step(**second["value"]).loss
    wrong = {**job, "subject": {**job["subject"], "folder": "/nonexistent/x"}}
    assert worker({"command": "load", "job": wrong}) == [{"refused": "/nonexistent/x: no such folder"}]


def test_the_worker_chooses_its_blas_before_mlx_comes() -> None:
    code = "import sys; import openelm_mlx.benchmarks.train_worker; print(*sys.modules)"
    env = {**environment(), device.BLAS_VARIABLE: "none"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert {"mlx.core", "mlx_lm", "numpy"} & {*done.stdout.split()} == set()


# Telling.


def trained(tuner: Tuner, *steps: tuple[int, int, float], memory: float) -> Trained:
    """A program whose steps had such numbers of targets, lengths of their two rows, and seconds."""
    about = About(10, 1000, "float32", "a BLAS", {"mlx": "1"})
    first, *rest = (Step(6.5 - n / 4, t, 2, length, s, memory, 2 * memory) for n, (t, length, s) in enumerate(steps))
    return Trained(tuner, about, first, tuple(rest))


FULL = Report(
    Subject("folder/m", precision="fp32"),
    "cpu",
    Training(batch_size=2, seq_length=32, steps=3, rank=4),
    (
        trained(Tuner(peer="openelm-mlx"), *[(64, 32, s) for s in (9.0, 2.0, 1.0, 1.0)], memory=1.0),
        trained(Tuner(peer="mlx-lm"), *[(64, 32, s) for s in (9.0, 2.0, 4.0, 2.0)], memory=2.0),
    ),
    ("something",),
)
RAGGED = Report(
    FULL.subject,
    "cpu",
    Training(batch_size=2, seq_length=64, steps=2, ragged=(5, 65)),
    (
        trained(Tuner(peer="openelm-mlx"), (1, 64, 1.0), (128, 64, 1.0), (120, 64, 1.0), memory=1.0),
        trained(Tuner(peer="mlx-lm"), (1, 32, 1.0), (40, 32, 1.0), (100, 64, 2.0), memory=1.0),
    ),
    (),
)


def test_speeds_are_those_of_all_steps_but_the_first() -> None:
    own, other = FULL.programs
    assert (own.tokens_per_s, other.tokens_per_s) == (48.0, 24.0)
    assert own.by_step.values == (32.0, 64.0, 64.0)
    assert (own.useful, own.new_shapes) == (1.0, 0)
    packed, padded = RAGGED.programs
    assert (packed.tokens_per_s, packed.useful) == (124.0, 248 / 256)
    assert padded.tokens_per_s == pytest.approx(140 / 3) and padded.useful == 140 / 192
    assert (packed.new_shapes, padded.new_shapes) == (0, 1)


def test_a_report_in_words() -> None:
    assert lines(FULL) == [
        "folder/m (fp32), LoRA of rank 4, on cpu: 3 steps of 2 x 32 tokens",
        "trained 10 of 1,000 parameters",
        "",
        "program      tokens/s      step by step  targets  rows filled  MLX GB  process GB            loss",
        "openelm-mlx      48.0  64.0 (32.0-64.0)      192         100%    1.00        2.00  6.500 -> 5.750",
        "mlx-lm           24.0  32.0 (16.0-32.0)      192         100%    2.00        4.00  6.500 -> 5.750",
        "",
        "tokens/s are targets (tokens of the data to be predicted, no padding) over the time of all steps but the",
        "first, update included",
        "openelm-mlx: float32, a BLAS",
        "mlx-lm: float32, a BLAS",
        "openelm-mlx is 2.00 times as fast as mlx-lm (step by step 2.00, 1.00 to 4.00), with 0.50 times the memory "
        "(0.50 of the process)",
        "note: something",
    ]


def test_a_ragged_report_in_words() -> None:
    said = lines(RAGGED)
    assert said[0].endswith("2 steps of 2 rows, sequences of 5 to 65 tokens (ours packed into 2 x 64 tokens)")
    assert "new shapes" in said[3]
    assert "openelm-mlx is 2.66 times as fast as mlx-lm, with 1.00 times the memory (1.00 of the process)" in said


def test_a_report_is_kept_like_other_results(tmp_path: Path) -> None:
    results.save(FULL.result(["openelm", "bench", "train"]), tmp_path / "r.json")
    kept = results.load(tmp_path / "r.json")
    assert (kept.name, kept.notes) == ("train-m-lora", ("something",))
    assert kept.protocol["seq_length"] == 32 and kept.machine["chip"]
    own, other = kept.extra["training"]["programs"]
    assert (own["tokens_per_s"], other["program"], len(own["steps"])) == (48.0, "mlx-lm", 3)
    (ratio,) = kept.extra["training"]["ratios"]
    assert (ratio["to"], ratio["tokens_per_s"], ratio["peak_memory"]) == ("mlx-lm", 2.0, 0.5)
    assert ratio["by_step"]["values"] == [1.0, 4.0, 2.0]
    assert RAGGED.result([]).name == "train-m-lora-ragged"
    assert "by_step" not in RAGGED.result([]).extra["training"]["ratios"][0]


# The command.


def bench(subject: Subject, *options: str | Path) -> Done:
    small = ("--batch-size", "2", "--seq-length", "32", "--steps", "1")
    return run("bench", "train", "--model", str(subject.folder), *small, *options)


def test_the_command_keeps_what_it_tells(subject: Subject, tmp_path: Path) -> None:
    done = bench(subject, "--json", tmp_path / "r.json", "--save-to", tmp_path, "--ragged", "4-16", "--rank", "2")
    assert done.status == 0, done.err
    assert "sequences of 4 to 16 tokens" in done.out and "step 1 of 1" in done.err
    kept = results.load(tmp_path / "r.json")
    assert (kept.protocol["ragged"], kept.protocol["rank"]) == ([4, 16], 2)
    (stored,) = tmp_path.glob("*-train-tiny-lora-ragged.json")
    assert f"stored in {stored}" in done.out
    assert results.load(stored) == kept


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "dora"])
def test_methods(subject: Subject, method: str) -> None:
    done = bench(subject, "--method", method, "--quiet")
    assert (done.status, done.err) == (0, "")
    assert {"full": "all weights", "dora": "DoRA of rank 8"}[method] in done.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--method", "x"), "method must be one of lora, dora, full"),
        (("--compare", "x"), "--compare x: there is no such trainer; there are mlx-lm, mlx-lm-blas, mlx-lm-sorted"),
        (("--compare", "mlx-lm-sorted"), "mlx-lm-sorted goes with --ragged"),
        (("--ragged", "20"), "--ragged 20: expected two lengths, such as 20-256"),
        (("--ragged", "20-256"), "from 2 to 33"),
    ],
)
def test_refusals_are_one_line(subject: Subject, options: tuple[str, ...], said: str) -> None:
    done = bench(subject, *options)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert said in done.err
