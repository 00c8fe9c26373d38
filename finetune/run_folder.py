"""A run's folder: what lies where, and writing it so that a killed run loses nothing it had said was saved."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import yaml

from openelm_mlx import files
from openelm_mlx.atomic import new_folder
from openelm_mlx.errors import CheckpointError, OpenELMError
from openelm_mlx.finetune.metrics import FILE as METRICS
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.safetensorsfile import read_safetensors
from openelm_mlx.trees import Tensors
from openelm_mlx.writer import write_json

CONFIG, ENVIRONMENT, PLOT = "config.yaml", "environment.json", "loss.png"
CHECKPOINTS, BEST, REFERENCE = "checkpoints", "best", "reference.safetensors"
_WEIGHTS, _OPTIMIZER, _STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{6,})")


class RunError(OpenELMError):
    """A run's folder is missing something, or was changed."""


@dataclass
class State:
    """How far a run is; with the weights and the optimizer's tensors, all that it goes on from."""

    step: int = 0
    """Updates made."""
    position: dict[str, Any] = field(default_factory=dict)
    """Of the next batch in the training data."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl when this was saved: what follows will be written again."""
    validated: int = -1
    """The step after which was validated last; -1 for never."""
    best_loss: float | None = None
    """The lowest validation loss so far."""
    best_step: int | None = None
    """The step it was found at."""
    stale: int = 0
    """Validations since then."""


@dataclass(frozen=True)
class Checkpoint:
    """A run at one of its steps."""

    state: State
    weights: Tensors
    """The trained parameters by name."""
    optimizer: Tensors


class RunFolder:
    """The folder of a run, which exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, settings: Settings, environment: Mapping[str, Any], *, force: bool) -> RunFolder:
        """Make the folder of a new run.

        Raises:
            OutputError: there is one already, or it cannot be written.
        """
        with new_folder(path, force=force, ours=holds_only_a_run) as folder:
            (folder / CONFIG).write_text(_yaml(settings), encoding="utf-8")
            write_json(folder / ENVIRONMENT, environment)
            (folder / METRICS).touch()
            (folder / CHECKPOINTS).mkdir()
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run.

        Raises:
            RunError: there is none.
        """
        if not is_run(path):
            found = "is not the folder of a run (no config.yaml with metrics.jsonl)" if path.exists() else "no such run"
            raise RunError(f"{path}: {found}; start one with: openelm finetune --out {path}")
        return cls(path)

    @property
    def metrics(self) -> Path:
        """The file with a line for each update and validation."""
        return self.path / METRICS

    def settings(self) -> Settings:
        """The settings the run was started with."""
        from openelm_mlx.finetune.recipes import load

        return Settings.from_mapping(load(self.path / CONFIG), str(self.path / CONFIG))

    def change_settings(self, settings: Settings) -> None:
        """Let the run go on with other settings."""
        new = self.path / f".{CONFIG}.new"
        new.write_text(_yaml(settings), encoding="utf-8")
        _sync(new)
        new.replace(self.path / CONFIG)

    def environment(self) -> dict[str, Any]:
        """What environment.json says."""
        return files.read_json(self.path / ENVIRONMENT, RunError)

    # Metrics

    def begin_metrics(self, length: int) -> None:
        """Forget what stands behind `length` bytes of the metrics: it is going to be written again."""
        with self.metrics.open("ab") as f:
            if f.tell() > length:
                f.truncate(length)

    def add_metrics(self, metrics: Mapping[str, Any]) -> int:
        """Add a line; the file's length with it."""
        line = json.dumps(metrics) + "\n"
        try:
            with self.metrics.open("a", encoding="utf-8") as f:
                f.write(line)
                return f.tell()
        except OSError as e:
            raise RunError(f"{self.metrics}: cannot be written: {e.strerror or e}; {self.way_on()}") from None

    def way_on(self) -> str:
        """What to do about a run that had to end."""
        return f"go on with: openelm finetune --resume {shlex.quote(str(self.path))}"

    # What preferences are compared with

    def save_reference(self, tensors: Tensors) -> None:
        """Keep what the model before training says, whole or not at all.

        Raises:
            RunError: it cannot be written.
        """
        new = self.path / f".new-{REFERENCE}"
        _write_tensors(new, tensors)
        new.replace(self.path / REFERENCE)

    def reference(self) -> Tensors | None:
        """What :meth:`save_reference` kept; None if nothing.

        Raises:
            OpenELMError: it is damaged.
        """
        path = self.path / REFERENCE
        return _read_tensors(path) if files.is_there(path, CheckpointError) else None

    # Checkpoints

    def save(self, checkpoint: Checkpoint, keep: int) -> Path:
        """Write a checkpoint whole or not at all; older ones than the last `keep` are deleted after that."""
        place = self.path / CHECKPOINTS / _name(checkpoint.state.step)
        _sync(self.metrics)  # the checkpoint tells its length
        with new_folder(place, force=True, ours=_any) as folder:
            _write_tensors(folder / _WEIGHTS, checkpoint.weights)
            _write_tensors(folder / _OPTIMIZER, checkpoint.optimizer)
            write_json(folder / _STATE, asdict(checkpoint.state))
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
        for old in _by_step(self.path / BEST)[:-1]:  # a checkpoint before this one may have gone on from them
            if old.name != _name(checkpoint.state.best_step or 0):
                shutil.rmtree(old, ignore_errors=True)
        return place

    def checkpoints(self) -> list[Path]:
        """The checkpoints there are, the oldest first."""
        return _by_step(self.path / CHECKPOINTS)

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step."""
        return _is_checkpoint(self.path / CHECKPOINTS / _name(step))

    def last(self) -> Checkpoint | None:
        """The newest checkpoint; None when the run had not come as far as one.

        Raises:
            RunError: it is damaged.
        """
        places = self.checkpoints()
        if not places:
            return None
        place = places[-1]
        try:
            return Checkpoint(_read_state(place), _read_tensors(place / _WEIGHTS), _read_tensors(place / _OPTIMIZER))
        except (OpenELMError, TypeError) as e:
            raise RunError(f"{place}: damaged ({e}); delete it to go on from the one before") from None

    def save_best(self, weights: Tensors, state: State) -> None:
        """Keep the weights of the best validation so far.

        Those before stay until the next checkpoint is there: a run that goes on from the last one needs them.
        """
        with new_folder(self.path / BEST / _name(state.step), force=True, ours=_any) as folder:
            _write_tensors(folder / _WEIGHTS, weights)
            write_json(folder / _STATE, asdict(state))

    def best(self, step: int) -> Tensors:
        """The weights of the validation after `step`, which was the best.

        Raises:
            RunError: they are not there, or damaged.
        """
        place = self.path / BEST / _name(step)
        try:
            return _read_tensors(place / _WEIGHTS)
        except OpenELMError as e:
            raise RunError(f"{place}: the best weights cannot be read ({e})") from None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return all((folder / name).is_file() for name in (CONFIG, METRICS))


_OWN = (CONFIG, ENVIRONMENT, METRICS, PLOT, CHECKPOINTS, BEST, REFERENCE, "tensorboard", "wandb", "wandb-id")
_RESULTS = re.compile(
    r"adapters\.safetensors|adapter_config\.json|config\.json|generation_config\.json|chat_template\.jinja"
    r"|model.*\.safetensors|model\.safetensors\.index\.json|(tokenizer|special_tokens).*\.(json|model)|\..*"
)
"""Names that a run gives what it makes, and hidden ones."""


def holds_only_a_run(folder: Path) -> bool:
    """Whether a folder is that of a run, and nothing else lies in it: then it may be replaced."""
    names = [p.name for p in folder.iterdir()]
    return is_run(folder) and all(name in _OWN or _RESULTS.fullmatch(name) for name in names)


def _any(folder: Path) -> bool:
    # What stands in a checkpoint's place in a run's own folder is a damaged one.
    return True


def _is_checkpoint(folder: Path) -> bool:
    return (folder / _STATE).is_file()


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _by_step(folder: Path) -> list[Path]:
    found = {int(m[1]): p for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))} if folder.is_dir() else {}
    return [found[step] for step in sorted(found) if _is_checkpoint(found[step])]


def _yaml(settings: Settings) -> str:
    return yaml.safe_dump(settings.to_mapping(), sort_keys=False, allow_unicode=True)


def _read_state(folder: Path) -> State:
    path = folder / _STATE
    values = files.read_json(path, RunError)
    state = State(**values)
    whole = [name for name in ("step", "metrics_bytes", "stale") if not _is_whole(values.get(name, 0), 0)]
    whole += [name for name in ("validated", "best_step") if not _is_whole(values.get(name) or 0, -1)]
    if whole or not isinstance(state.position, dict) or not isinstance(state.best_loss, (int, float, type(None))):
        raise RunError(f"{path}: {whole[0] if whole else 'position or best_loss'} is not what a run writes")
    return state


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _write_tensors(path: Path, tensors: Tensors) -> None:
    try:
        mx.save_safetensors(str(path), tensors or {"empty": mx.zeros(1)})
    except RuntimeError as e:  # MLX's word for a full disk, too
        raise RunError(f"{path}: cannot be written (is the disk full?): {e}") from None
    _sync(path)


def _read_tensors(path: Path) -> Tensors:
    if not files.is_there(path, CheckpointError):
        raise CheckpointError(f"{path}: no such file")
    return {name: tensor.read() for name, tensor in read_safetensors(path).items()}


def _sync(path: Path) -> None:
    """Bring a file to the disk: a rename may get there before the data it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
