"""`openelm demo`: a tour of the other verbs that shows what really happened, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openelm_mlx import assets
from openelm_mlx.cli import tour
from openelm_mlx.cli.stage import Stage
from openelm_mlx.cli.tour import ADAPTER, CHECKPOINT, DATA, OPENINGS, PRECISIONS, SPEEDS, Tour
from openelm_mlx.errors import OpenELMError
from tests.support.cli import ROOT, Done, environment, finish, run, start

# The sentences to learn from.


def sentences(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (assets.SENTENCES / name).read_text().splitlines()]


def test_the_sentences_are_a_small_file_of_openings_that_end_in_pie() -> None:
    train, valid = sentences("train.jsonl"), sentences("valid.jsonl")
    assert 100 <= len(train) <= 300 and len(valid) >= 20
    for row in train + valid:
        assert row.keys() == {"prompt", "completion"}
        assert re.search(r"\bpies?\b", row["completion"], re.IGNORECASE)
        assert row["completion"].endswith(".") and not row["prompt"].endswith(" ")
    assert len({json.dumps(row) for row in train + valid}) == len(train + valid)
    assert sum(file.stat().st_size for file in assets.SENTENCES.iterdir()) < 50_000


def test_the_openings_shown_are_not_learned() -> None:
    train, valid = ({row["prompt"] for row in sentences(name)} for name in ("train.jsonl", "valid.jsonl"))
    assert not train & valid
    for opening in OPENINGS:
        assert not any(prompt.startswith(opening) or opening.startswith(prompt) for prompt in train | valid)


# Its pieces.


def a_tour(folder: Path) -> tuple[Tour, io.StringIO]:
    out = io.StringIO()
    return Tour(Stage(Console(file=out, width=80)), folder, kept=True), out


def test_a_verb_that_fails_ends_the_tour_with_its_own_words(tmp_path: Path) -> None:
    guide, out = a_tour(tmp_path)
    with pytest.raises(OpenELMError, match=r"openelm convert ended with status 2: No such file or folder: .*nowhere"):
        guide._verb("convert", "./nowhere", "--out", "x")
    assert out.getvalue().startswith("\n$ openelm convert ./nowhere --out x\n  error: No such file")


def row(share: float) -> dict[str, Any]:
    return {
        "model": "bf16",
        "weight_bytes": 5_765_888,
        "generation_tps": {"median": 1234.5},
        "ceiling_tps": 4293.2,
        "share": share,
    }


def test_a_row_of_speeds() -> None:
    assert tour._speed(row(0.2875)) == ("bf16", "5.8", "1,234", "4,293", "29%")


@pytest.mark.parametrize(
    ("shares", "said"),
    [((0.02, 0.1), "far below the ceiling"), ((0.3, 0.7), "near the ceiling"), ((0.9, 1.2), "above the ceiling")],
)
def test_what_is_said_of_the_speed_is_what_was_measured(shares: tuple[float, ...], said: str) -> None:
    assert said in tour._verdict([row(share) for share in shares])


def test_how_openelm_is_found_is_said_where_the_path_does_not_lead_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "my venv" / "bin" / "activate"
    script.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(script.parents[1]))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tour._activation() == [], "no script"
    script.touch()
    ((_, command),) = tour._activation()
    assert shlex.split(command) == ["source", str(script)]
    monkeypatch.chdir(tmp_path)
    ((_, command),) = tour._activation()
    assert shlex.split(command) == ["source", "my venv/bin/activate"]
    program = tmp_path / "openelm"
    program.touch(mode=0o755)
    assert tour._activation() == []


def test_a_packages_files_that_may_only_be_read_are_copied_to_be_deleted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("x")
    (source / "file").chmod(0o444)
    source.chmod(0o555)
    try:
        tour._copy(source, tmp_path / "copy")
    finally:
        source.chmod(0o755)
    copied = tmp_path / "copy" / "file"
    assert copied.read_text() == "x"
    assert copied.stat().st_mode & 0o200 and copied.parent.stat().st_mode & 0o200


# What is refused, and how it ends early.


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    for place in (tmp_path, tmp_path / "mine"):
        done = run("demo", "--keep", place)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"error: {place}: ")
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_broken_installation_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "MODEL", tmp_path / "none")
    done = run("demo", "--keep", tmp_path / "a" / "b")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert "this installation is broken" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "PRECISIONS", ("nonsense",))
    done = run("demo", "--keep", tmp_path / "a" / "b")
    assert done.status == 2
    assert done.err.startswith("error: openelm convert ended with status 2: precision 'nonsense' is not known")
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_tour_that_is_stopped_leaves_nothing_behind(
    tmp_path: Path, keep: bool, number: signal.Signals, status: int
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = ("--keep", tmp_path / "a" / "b") if keep else ()
    process = start("demo", *options, env=environment(TMPDIR=str(scratch)))
    assert process.stdout
    while b"$ openelm convert" not in process.stdout.readline():
        pass
    process.send_signal(number)
    done = finish(process)
    said = "interrupted; nothing was left behind\n" if number == signal.SIGINT else ""
    assert (done.status, done.err) == (status, said)
    assert not (tmp_path / "a").exists()
    assert [file.name for file in scratch.iterdir() if file.name.startswith("openelm-demo-")] == []


def test_a_closed_pipe_is_silent() -> None:
    process = start("demo")
    assert process.stdout
    process.stdout.close()
    process.stdout = None
    done = finish(process)
    assert (done.status, done.err) == (0, "")


# The whole tour.


@pytest.fixture(scope="module")
def toured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """A tour that is kept, in a current folder that may not be written, with no network to go to."""
    place = tmp_path_factory.mktemp("demo")
    here = place / "here"
    here.mkdir()
    here.chmod(0o555)
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_ENDPOINT"), "http://127.0.0.1:9")
    process = start("demo", "--keep", place / "kept", cwd=here, env=environment(COLUMNS="90", **nowhere))
    return finish(process, timeout=600), place / "kept"


def blocks(text: str) -> dict[str, str]:
    """What stands under each command."""
    parts = re.split(r"^\$ (openelm .*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def of_generate(text: str, opening: str) -> list[str]:
    """What was generated after an opening, in the order of the commands, as one line each."""
    found = []
    for command, block in blocks(text).items():
        if shlex.split(command)[1] == "generate" and opening in shlex.split(command):
            indented = re.match(r"\n((?:  .*\n)+)", block)
            assert indented
            found.append(" ".join(indented[1].split()))
    return found


@pytest.mark.slow
class TestTheTour:
    def test_it_ends_well_in_plain_text(self, toured: tuple[Done, Path]) -> None:
        done, _ = toured
        assert (done.status, done.err) == (0, "")
        assert "\x1b" not in done.out
        prose = [line for line in done.out.splitlines() if not line.startswith(("$ openelm", "openelm"))]
        assert max(map(len, prose)) <= 90

    def test_everything_it_made_is_there(self, toured: tuple[Done, Path]) -> None:
        _, kept = toured
        assert {path.name for path in kept.iterdir()} == {CHECKPOINT, DATA, *PRECISIONS, ADAPTER, SPEEDS}
        for name in PRECISIONS:
            config = json.loads((kept / name / "config.json").read_text())
            assert ("quantization" in config) == (name == "4bit")
        assert (kept / "4bit" / "model.safetensors").stat().st_size < (
            kept / "bf16" / "model.safetensors"
        ).stat().st_size

    def test_conversions_are_verified(self, toured: tuple[Done, Path]) -> None:
        found = {
            shlex.split(command)[4]: block
            for command, block in blocks(toured[0].out).items()
            if shlex.split(command)[1] == "convert"
        }
        assert set(found) == set(PRECISIONS)
        agreement = {name: float(re.findall(r"top-1 agreement +([\d.]+)%", block)[0]) for name, block in found.items()}
        assert agreement["bf16"] > 99 and agreement["4bit"] > 50
        assert all("KL divergence" in block and " MB\n" in block for block in found.values())

    def test_the_loss_fell(self, toured: tuple[Done, Path]) -> None:
        lines = [json.loads(line) for line in (toured[1] / ADAPTER / "metrics.jsonl").read_text().splitlines()]
        losses = [line["valid_loss"] for line in lines if "valid_loss" in line]
        assert len(losses) > 2 and losses[-1] < losses[0] / 2

    def test_the_text_is_another_one_after_the_training(self, toured: tuple[Done, Path]) -> None:
        for opening in OPENINGS:
            before, after = of_generate(toured[0].out, opening)
            assert before.startswith(opening) and after.startswith(opening) and before != after
            assert not re.search(r"\bpies?\b", before, re.IGNORECASE)
            assert re.search(r"\bpies?\b", after, re.IGNORECASE), after

    def test_what_is_shown_is_what_the_commands_write(self, toured: tuple[Done, Path]) -> None:
        """A command of the tour, typed again in the folder that was kept."""
        done, kept = toured
        command = next(c for c in blocks(done.out) if "--adapter" in c)
        again = subprocess.run(
            [sys.executable, "-m", "openelm_mlx", *shlex.split(command)[1:]],
            cwd=kept,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        opening = next(o for o in OPENINGS if o in command)
        assert of_generate(done.out, opening)[1] == " ".join((opening + again.stdout).split())

    def test_the_page_on_the_tour_shows_these_commands(self, toured: tuple[Done, Path]) -> None:
        page = (ROOT / "docs" / "demo.md").read_text()
        assert list(blocks(page)) == list(blocks(toured[0].out))

    def test_the_speeds_are_those_of_the_file(self, toured: tuple[Done, Path]) -> None:
        done, kept = toured
        for speeds in json.loads((kept / SPEEDS).read_text())["rows"]:
            shown = next(line.split() for line in done.out.splitlines() if re.match(rf" +{speeds['model']} +\d", line))
            assert tuple(shown) == tour._speed(speeds)


@pytest.mark.slow
def test_a_training_that_takes_too_long_is_stopped_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "PATIENCE", 8.0)
    monkeypatch.setattr(tour, "TRAINING", ("--epochs", "10000", "--batch-size", "8", "--eval-every", "5"))
    guide, out = a_tour(tmp_path)
    tour._copy(assets.demo_model(), tmp_path / PRECISIONS[0])
    tour._copy(assets.SENTENCES, tmp_path / DATA)
    guide._tune(3)
    assert "(Stopped after 8 seconds, because this machine is slow or busy" in out.getvalue()
    assert len(of_generate(out.getvalue(), OPENINGS[0])) == 2


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_demo_runs_what_is_installed(tmp_path: Path) -> None:
    """Where a virtual environment has the program already, nothing is installed beside it."""
    program = tmp_path / "venv" / "bin" / "openelm"
    program.parent.mkdir(parents=True)
    for file in (program, program.with_name("python")):
        file.write_text('#!/bin/sh\necho "run with: $*"\n')
        file.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "demo", f"VENV={tmp_path / 'venv'}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "run with: demo\n", "")
