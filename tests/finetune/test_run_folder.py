"""A run's folder: checkpoints whole or not at all, the best kept, and damage named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from openelm_mlx.atomic import OutputError
from openelm_mlx.finetune.run_folder import Checkpoint, RunError, RunFolder, State
from openelm_mlx.finetune.settings import Settings
from tests.finetune.runs import listing


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", Settings(data="my.jsonl", rank=5), {"command": "x"}, force=False)


def checkpoint(step: int, **state: Any) -> Checkpoint:
    value = mx.array([float(step)])
    return Checkpoint(State(step=step, **state), {"a.lora_a": value}, {"mean.a.lora_a": value})


def test_settings_and_environment_come_back(folder: RunFolder) -> None:
    again = RunFolder.open(folder.path)
    assert again.settings() == Settings(data="my.jsonl", rank=5)
    assert again.environment() == {"command": "x"}
    assert again.last() is None


def test_the_last_checkpoint_comes_back(folder: RunFolder) -> None:
    for step in (3, 12):
        folder.save(checkpoint(step, metrics_bytes=step), keep=2)
    last = folder.last()
    assert last is not None
    assert last.state == State(step=12, metrics_bytes=12)
    assert (last.weights["a.lora_a"].item(), last.optimizer["mean.a.lora_a"].item()) == (12, 12)


def test_so_many_are_kept(folder: RunFolder) -> None:
    for step in (1, 2, 3, 999_999, 1_000_000):
        folder.save(checkpoint(step), keep=3)
    assert [p.name for p in folder.checkpoints()] == ["step-000003", "step-999999", "step-1000000"]


def test_weights_without_parameters_can_be_saved(folder: RunFolder) -> None:
    folder.save(Checkpoint(State(step=1), {"a": mx.ones(1)}, {}), keep=1)
    last = folder.last()
    assert last is not None and last.weights.keys() == {"a"}


def test_the_best_that_a_checkpoint_knows_stays_until_the_next(folder: RunFolder) -> None:
    def best(step: int) -> State:
        state = State(step=step, best_step=step)
        folder.save_best({"a": mx.array([float(step)])}, state)
        return state

    best(1)
    folder.save(checkpoint(1, best_step=1), keep=1)
    best(4)
    best(6)
    assert folder.best(1)["a"].item() == 1, "a run that was killed now goes on from step 1"
    folder.save(checkpoint(6, best_step=6), keep=1)
    assert listing(folder.path / "best") == ["step-000006"]
    assert folder.best(6)["a"].item() == 6
    folder.save(checkpoint(9, best_step=6), keep=1)
    assert folder.best(6)["a"].item() == 6
    with pytest.raises(RunError, match="step-000004: the best weights cannot be read"):
        folder.best(4)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_there(folder: RunFolder, name: str, damage: str) -> None:
    for step in (1, 2):
        folder.save(checkpoint(step), keep=2)
    path = folder.path / "checkpoints" / "step-000002" / name
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "other": b'{"x": 1}'}[damage])
    with pytest.raises(RunError, match=r"step-000002: damaged \(.*\); delete it to go on from the one before"):
        folder.last()
    shutil.rmtree(path.parent)
    last = folder.last()
    assert last is not None and last.state.step == 1


def test_a_full_disk_leaves_the_checkpoint_before(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are put where the disk is full: /dev/full."""
    folder.save(checkpoint(1), keep=1)
    save = mx.save_safetensors

    def into_a_full_disk(path: str, tensors: dict[str, mx.array]) -> None:
        Path(path).symlink_to("/dev/full")
        save(path, tensors)

    monkeypatch.setattr(mx, "save_safetensors", into_a_full_disk)
    with pytest.raises(RunError, match=r"cannot be written \(is the disk full\?\): .*Unable to write"):
        folder.save(checkpoint(2), keep=1)
    assert listing(folder.path / "checkpoints") == ["step-000001"]
    last = folder.last()
    assert last is not None and last.state.step == 1


def test_a_full_disk_for_metrics(folder: RunFolder) -> None:
    folder.metrics.unlink()
    folder.metrics.symlink_to("/dev/full")
    with pytest.raises(RunError, match="No space left on device; go on with: openelm finetune --resume"):
        folder.add_metrics({"step": 1})


def test_metrics_are_cut_to_what_the_checkpoint_knows(folder: RunFolder) -> None:
    first = folder.add_metrics({"step": 1})
    folder.add_metrics({"step": 2})
    with folder.metrics.open("a") as f:
        f.write('{"step": 3, "lo')
    folder.begin_metrics(first)
    assert folder.metrics.read_text() == '{"step": 1}\n'
    assert folder.add_metrics({"step": 2}) == 2 * first


def test_an_earlier_run_is_replaced_only_if_asked(folder: RunFolder) -> None:
    with pytest.raises(OutputError, match="exists already"):
        RunFolder.create(folder.path, Settings(), {}, force=False)
    folder.save(checkpoint(1), keep=1)
    assert RunFolder.create(folder.path, Settings(), {}, force=True).last() is None


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl"])
def test_what_is_no_run(folder: RunFolder, missing: str) -> None:
    (folder.path / missing).unlink()
    with pytest.raises(RunError, match="is not the folder of a run"):
        RunFolder.open(folder.path)
    with pytest.raises(RunError, match="no such run"):
        RunFolder.open(folder.path / "absent")
