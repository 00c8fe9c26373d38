"""environment.json: what a run was made with, and no secrets."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import openelm_mlx
from openelm_mlx.errors import CheckpointError
from openelm_mlx.finetune.base import files_of_folder
from openelm_mlx.finetune.environment import changed_inputs, changed_machine, command_line, environment
from openelm_mlx.finetune.settings import Settings
from tests.support.models import converted_folder


def of_run(
    folder: Path, data: Sequence[Path] = (), settings: Settings | None = None, arguments: Sequence[str] = ()
) -> dict[str, Any]:
    model = files_of_folder(folder)
    return environment(arguments, folder=folder, model=model, data=data, settings=settings or Settings())


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("HOME", str(tmp_path))
    converted_folder(tmp_path / "model")
    (tmp_path / "my.jsonl").write_bytes(b"abc")
    arguments = ["openelm", "finetune", "--data", str(tmp_path / "my.jsonl")]
    return of_run(tmp_path / "model", [tmp_path / "my.jsonl"], Settings(), arguments)


def test_what_is_told(told: dict[str, Any], tmp_path: Path) -> None:
    assert told == json.loads(json.dumps(told))
    assert told["command"] == "openelm finetune --data ~/my.jsonl"
    assert told["machine"]["versions"]["numpy"] == np.__version__
    assert told["machine"]["python"] == sys.version.split()[0]
    assert told["data"] == {
        # FIPS 180-2, appendix B.1
        "~/my.jsonl": {"bytes": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    }
    assert told["model"]["path"] == "~/model"
    assert told["model"]["provenance"]["tool_version"]
    weights = tmp_path / "model" / "model.safetensors"
    done = subprocess.run(["sha256sum", weights], capture_output=True, text=True, check=True)
    sum_of_weights = done.stdout.split()[0]
    assert told["model"]["files"].keys() == {"config.json", "model.safetensors", "model.safetensors.index.json"}
    assert told["model"]["files"]["model.safetensors"] == {"bytes": weights.stat().st_size, "sha256": sum_of_weights}
    assert told["settings"]["rank"] == 8
    del told["model"]["provenance"]  # as it stands in the model's config.json
    assert str(tmp_path) not in json.dumps(told)


def test_the_commit_that_runs(told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def source() -> Any:
        return of_run(tmp_path / "model", [], Settings())["source"]

    package = tmp_path / "checkout" / "openelm_mlx" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.setattr(openelm_mlx, "__file__", str(package))
    git = ["git", "-C", str(tmp_path / "checkout"), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    assert source() is None
    subprocess.run([*git, "init", "-q"], check=True)
    assert source() is None, "no commit yet"
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert source() == {"commit": head, "changed": False}
    package.write_text("x = 1\n")
    assert source() == {"commit": head, "changed": True}
    nested = tmp_path / "checkout" / "venv" / "openelm_mlx" / "__init__.py"
    nested.parent.mkdir(parents=True)
    monkeypatch.setattr(openelm_mlx, "__file__", str(nested))
    assert source() is None, "somebody else's repository around it is not ours"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--data", "/home/bob/x.jsonl", "--out=/home/bob/a b"], "--data ~/x.jsonl '--out=~/a b'"),
        (["openelm", "finetune", "--data", "a b.jsonl"], "openelm finetune --data 'a b.jsonl'"),
        (["--token", "abc", "--rank", "8"], "--token '***' --rank 8"),
        (["--hf-token=abc", "x"], "'--hf-token=***' x"),
        (["--api_key", "--odd", "x"], "--api_key '***' x"),
        (["--max-tokens", "5", "--tokenizer", "t"], "--max-tokens 5 --tokenizer t"),
        (["--model", "hf_AbCdEfGhIjKlMnOpQrStUv"], "--model ***"),
        (["--data=https://bob:hunter2@example.org/x"], "--data=https://***@example.org/x"),
        (["--revision", "0123456789abcdef0123456789abcdef01234567"],
         "--revision 0123456789abcdef0123456789abcdef01234567"),
    ],
)  # fmt: skip
def test_a_command_line_without_secrets(monkeypatch: pytest.MonkeyPatch, arguments: list[str], shown: str) -> None:
    monkeypatch.setenv("HOME", "/home/bob")
    assert command_line(arguments) == shown


def test_what_changed_since(told: dict[str, Any], tmp_path: Path) -> None:
    assert changed_inputs(told, told) == changed_machine(told, told) == []
    (tmp_path / "my.jsonl").write_bytes(b"abd")
    (tmp_path / "new.jsonl").write_bytes(b"abc")
    data = [tmp_path / "my.jsonl", tmp_path / "new.jsonl"]
    now = of_run(tmp_path / "model", data, Settings(rank=9, epochs=9, data="elsewhere"))
    assert changed_inputs(told, now) == ["the number of data files", "~/my.jsonl", "rank in config.yaml"]
    other = copy.deepcopy(told)
    other["model"]["files"]["model.safetensors"]["sha256"] = "0"
    other["data"] = {"/elsewhere/my.jsonl": told["data"]["~/my.jsonl"]}
    other["machine"]["versions"]["mlx"] = "9.9"
    assert changed_inputs(told, other) == ["model.safetensors"]
    assert changed_machine(told, other) == [f"mlx is 9.9, was {told['machine']['versions']['mlx']}"]
    other["machine"]["load_average"] = [99.0, 1.0, 1.0]
    assert len(changed_machine(told, other)) == 1, "load changes no result"


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        of_run(tmp_path, [], Settings())
