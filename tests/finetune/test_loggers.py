"""TensorBoard and W&B: the files they leave are read back, byte by byte where their own readers are not installed."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune import loggers as module
from openelm_mlx.finetune.loggers import loggers, require, scalars
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.watching import Watchers

UPDATE = {"step": 1, "epoch": 0.5, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-4, "tokens": 7}


def test_what_figures_are_called() -> None:
    assert scalars(UPDATE) == {
        "train/epoch": 0.5,
        "train/loss": 2.5,
        "train/grad_norm": 1.0,
        "train/learning_rate": 1e-4,
        "train/tokens": 7,
    }
    assert scalars({"step": 1, "valid_loss": 2.0, "valid_tokens": 3, "perplexity": 7.4}) == {
        "valid/loss": 2.0,
        "valid/tokens": 3,
        "valid/perplexity": 7.4,
    }
    assert scalars({"step": 1, "test_loss": 2.0, "perplexity": 7.4}) == {"test/loss": 2.0, "test/perplexity": 7.4}


def test_none_unless_asked_for(tmp_path: Path) -> None:
    require(Settings())
    assert loggers(Settings(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "package", "extra"),
    [(Settings(tensorboard=True), "tensorboardX", "tensorboard"), (Settings(wandb="project"), "wandb", "wandb")],
)
def test_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, package: str, extra: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(OpenELMError, match=rf"{package}: pip install 'openelm-mlx\[{extra}\]'$") as error:
        require(settings)
    assert "\n" not in str(error.value)


def train(settings: Settings, run: Path, first: int, last: int) -> None:
    watcher = Watchers(loggers(settings, run))
    watcher.begin(first, last)
    watcher.say("a fact")
    for step in range(first, last + 1):
        watcher.step({**UPDATE, "step": step, "loss": 4.0 / step})
    watcher.validating(1, 1)
    watcher.validation({"step": last, "valid_loss": 2.0, "valid_tokens": 3, "perplexity": 7.4})
    watcher.end()


# TensorBoard.


def events(run: Path) -> list[Any]:
    """What stands in the event files, in the order they were written in: TFRecords of ``Event`` messages."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted((run / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))  # 4 bytes of checksum before and after it
            data = data[12 + length + 4 :]
    return found


def shown(run: Path, name: str) -> dict[int, float]:
    """A curve as TensorBoard shows it: a restart hides what was told of its step and later ones."""
    curve: dict[int, float] = {}
    for event in events(run):
        if event.session_log.status == 1:  # SessionLog.START
            curve = {step: value for step, value in curve.items() if step < event.step}
        curve.update((event.step, value.simple_value) for value in event.summary.value if value.tag == name)
    return curve


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    settings = Settings(tensorboard=True)
    require(settings)
    train(settings, tmp_path, 1, 4)
    assert shown(tmp_path, "train/loss") == pytest.approx({1: 4.0, 2: 2.0, 3: 4 / 3, 4: 1.0})
    assert shown(tmp_path, "train/learning_rate") == pytest.approx(dict.fromkeys(range(1, 5), 1e-4))
    assert shown(tmp_path, "valid/loss") == {4: 2.0}
    assert shown(tmp_path, "valid/perplexity") == pytest.approx({4: 7.4})


def test_a_resumed_run_goes_on_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    train(Settings(tensorboard=True), tmp_path, 1, 4)
    train(Settings(tensorboard=True), tmp_path, 3, 5)
    told = [event.step for event in events(tmp_path) if any(v.tag == "train/loss" for v in event.summary.value)]
    assert told == [1, 2, 3, 4, 3, 4, 5]
    assert shown(tmp_path, "train/loss") == pytest.approx({1: 4.0, 2: 2.0, 3: 4 / 3, 4: 1.0, 5: 0.8})
    assert shown(tmp_path, "valid/loss") == {5: 2.0}, "the evaluation at step 4 was before the restart"


# Weights & Biases.


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield wandb
    wandb.teardown()


def records(file: Path) -> list[Any]:
    """What stands in a .wandb file: seven bytes, then LevelDB's log format, of which one block is enough here."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    assert len(data) < 32768
    found, at = [], 7
    while at + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        assert kind == 1, "a whole record"
        found.append(Record.FromString(data[at + 7 : at + 7 + length]))
        at += 7 + length
    return found


def test_wandb_and_a_resumed_run_of_it(offline: Any, tmp_path: Path) -> None:
    run = tmp_path / "run1"
    run.mkdir()
    settings = Settings(wandb="my-project", rank=3)
    require(settings)
    train(settings, run, 1, 4)
    offline.teardown()  # the process that writes may do so until here
    kept = (run / module.WANDB_ID).read_text()
    (first,) = run.glob(f"wandb/offline-run-*-{kept}/run-{kept}.wandb")
    found = records(first)
    (facts,) = [record.run for record in found if record.HasField("run")]
    assert (facts.project, facts.run_id, facts.display_name) == ("my-project", kept, "run1")
    assert {update.key: update.value_json for update in facts.config.update}["rank"] == "3"
    history = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    losses = {int(line["step"]): float(line["train/loss"]) for line in history if "train/loss" in line}
    assert losses == pytest.approx({1: 4.0, 2: 2.0, 3: 4 / 3, 4: 1.0})
    assert [float(line["valid/loss"]) for line in history if "valid/loss" in line] == [2.0]
    train(settings, run, 3, 5)
    assert (run / module.WANDB_ID).read_text() == kept
    files = list(run.glob("wandb/offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{kept}.wandb"}


def test_wandb_without_a_key_is_refused_before_the_run(
    offline: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    offline.teardown()
    with pytest.raises(OpenELMError, match=r"^wandb: .*WANDB_MODE=offline$"):
        require(Settings(wandb="my-project"))
