"""What makes a run repeatable, for environment.json: programs, machine, command line, model and data."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import openelm_mlx
from openelm_mlx import files
from openelm_mlx.checkpoint import PROVENANCE
from openelm_mlx.errors import CheckpointError
from openelm_mlx.finetune.settings import CHANGEABLE, Settings
from openelm_mlx.machine import machine, without_home

_HIDDEN = "***"
_SECRET_OPTION = re.compile(r"-{1,2}(?:\w+[-_])*(?:token|key|secret|password|credentials?)", re.IGNORECASE)
_SECRET = re.compile(r"\b(?:hf|sk|ghp|github_pat|wandb)[_-]\w{16,}|(?<=://)[^/@\s]+(?=@)")
"""Keys as the Hub and others make them, and what stands before the host in an address."""


def environment(
    arguments: Sequence[str],
    *,
    folder: Path | None,
    model: Mapping[str, Path],
    data: Iterable[Path],
    settings: Settings,
) -> dict[str, Any]:
    """Plain values for JSON. Files are read whole for their SHA-256, which takes seconds for a large model.

    Args:
        arguments: the command line; what looks like a secret in it is left out.
        folder: of the base model; None for a new one.
        model: the files that the model depends on, by name.
        data: the files that examples come from.
        settings: of the run.

    Raises:
        CheckpointError: the model's config.json cannot be read.
        OSError: another file cannot be read.
    """
    return {
        "command": command_line(arguments),
        "machine": machine(),
        "source": _source(),
        "model": {
            "path": folder and without_home(str(folder)),
            "provenance": folder and files.read_json(folder / "config.json", CheckpointError).get(PROVENANCE),
            "files": {name: _fingerprint(path) for name, path in model.items()},
        },
        "data": {without_home(str(path)): _fingerprint(path) for path in data},
        "settings": settings.to_mapping(),
    }


def changed_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not what it was, so that a resumed run would be another one: files by content, settings by value.

    Where files lie is of no matter. Settings that a run may go on with others of are left out.
    """
    models = (before["model"]["files"], now["model"]["files"])
    changed = [name for name in sorted({*models[0], *models[1]}) if models[0].get(name) != models[1].get(name)]
    old, new = list(before["data"].values()), now["data"]
    if len(old) != len(new):
        changed.append("the number of data files")
    changed += [path for (path, value), was in zip(new.items(), old, strict=False) if value != was]
    settings = (before["settings"], now["settings"])
    fixed = [name for name in settings[1] if name not in (*CHANGEABLE, *_PLACES)]
    return changed + [f"{name} in config.yaml" for name in fixed if settings[0].get(name) != settings[1][name]]


_PLACES = ("model", "revision", "config", "tokenizer", "data", "valid", "test")


def changed_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is different and may change the last digits of a resumed run's losses, a line each."""
    old, new = _what_computes(before["machine"]), _what_computes(now["machine"])
    return [
        f"{name} is {new.get(name)}, was {old.get(name)}" for name in {**old, **new} if old.get(name) != new.get(name)
    ]


def command_line(arguments: Sequence[str]) -> str:
    """A command line to copy, without secrets and without the home folder's name."""
    shown = []
    hide = False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        secret = _SECRET_OPTION.fullmatch(option) is not None
        if hide:
            argument = _HIDDEN
        elif secret and equals:
            argument = f"{option}={_HIDDEN}"
        hide = secret and not equals
        shown.append(_SECRET.sub(_HIDDEN, without_home(shlex.quote(argument))))  # a quoted ~ is no home folder
    return " ".join(shown)


def _what_computes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values["versions"], **{name: values[name] for name in ("chip", "gpu", "backend", "blas")}}


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": files.sha256(path)}


def _source() -> dict[str, Any] | None:
    """The commit of the checkout that this package runs from, and whether it was changed since; None without one."""
    root = Path(openelm_mlx.__file__).parents[1]
    if not (root / ".git").exists():  # git would take any repository around a virtual environment for it
        return None
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
    return {"commit": commit.strip(), "changed": bool(changes)} if commit is not None else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")
