"""Without a model a command takes the embedded one, and says so on standard error alone."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from openelm_mlx import assets, load
from openelm_mlx.errors import OpenELMError
from tests.cli.generating import PROMPT, generate
from tests.support.cli import ROOT, modules_of, run

LINE = "no model named: using the embedded one, a tiny OpenELM trained on the addresses of the presidents of the "
SHORT = ("--prompt", "The people of", "--max-tokens", "8")


def test_generate_says_so_in_one_line_and_writes_the_embedded_models_text() -> None:
    done, named = (run("generate", *model, *SHORT) for model in ((), ("--model", assets.demo_model())))
    assert done.status == 0, done.err
    assert done.out == named.out != "\n"
    line, figures = done.err.splitlines()
    assert line.startswith(LINE) and figures.startswith("prompt: ")
    assert LINE not in named.err


def test_quiet_leaves_the_line_out() -> None:
    assert run("generate", *SHORT, "--quiet").err == ""


def test_json_is_nothing_but_json() -> None:
    done = run("generate", *SHORT, "--json")
    assert json.loads(done.out)["generation_tokens"] == 8
    assert done.err.startswith(LINE) and done.err.count("\n") == 1


def test_a_model_that_is_named_wins(model: Path, greedy: list[int]) -> None:
    done = generate(model, "--json")
    assert json.loads(done.out)["tokens"] == greedy
    assert done.err == ""
    assert run("generate", "--model", "", "--prompt", PROMPT).err.startswith("error: The name of the model is empty")


def test_inspect_shows_the_embedded_model() -> None:
    done = run("inspect", "--json")
    values = json.loads(done.out)
    assert values["name"] == str(assets.demo_model())
    assert 1e6 < values["parameters"] < 5e6
    assert done.err.startswith(LINE) and done.err.count("\n") == 1
    assert f"model         {assets.demo_model()}" in run("inspect").out


def test_a_broken_installation_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "MODEL", tmp_path)
    (tmp_path / "config.json").touch()
    for arguments in (("generate", "--prompt", "x"), ("inspect",), ("bench",)):
        done = run(*arguments)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"error: {tmp_path}: model.safetensors, tokenizer.model of the embedded")
        assert "install openelm-mlx again, or name another model" in done.err
    with pytest.raises(OpenELMError, match="broken"):
        assets.demo_model()


def test_python_names_its_model() -> None:
    assert inspect.signature(load).parameters["name_or_path"].default is inspect.Parameter.empty


def test_the_embedded_model_brings_no_other_framework(tmp_path: Path) -> None:
    done, modules = modules_of(tmp_path / "modules", "generate", *SHORT)
    assert done.status == 0, done.err
    assert {"transformers", "mlx_lm", "torch", "huggingface_hub", "rich.progress"} & modules == set()


def test_the_embedded_model_is_small_and_has_what_a_checkpoint_has() -> None:
    folder = assets.demo_model()
    assert folder.is_relative_to(ROOT)
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json", "README.md"} <= names
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8e6
