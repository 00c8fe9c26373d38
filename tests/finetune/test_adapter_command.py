"""``openelm adapter``: what it prints, what it refuses, and which folders it replaces."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.adapters import read_adapter, save_adapter
from openelm_mlx.finetune.choices import FORMS
from tests.finetune.adapters_made import EVERYTHING, golden, names_of, random_adapter
from tests.finetune.test_corenet import base_weights, checkpoint, lora
from tests.support.cli import modules_of, run


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return kept(tmp_path / "ours")


def kept(folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    save_adapter(folder, random_adapter(golden(), **settings))
    return folder


def test_show(tmp_path: Path) -> None:
    folder = kept(tmp_path / "ours", method="dora", rslora=True, targets=EVERYTHING, layers="1-3", dropout=0.05)
    done = run("adapter", "show", folder)
    assert (done.status, done.err) == (0, "")
    count = sum(t.size for t in read_adapter(folder).tensors.values())
    assert done.out.splitlines() == [
        f"adapter     {folder}",
        "method      DoRA, dropout 0.05",
        "rank        4",
        "alpha       8 (times 4, which is alpha / sqrt(rank))",
        "layers      transformer.token_embeddings",
        "            layers 1-3 attn.out_proj",
        "            layers 1-3 attn.qkv_proj",
        "            layers 1-3 ffn.proj_1",
        "            layers 1-3 ffn.proj_2",
        f"parameters  {count:,} ({4 * count / 1e6:.1f} MB)",
        "model       4 layers, width 128, vocabulary 512, embeddings tied, trained on fp32 weights",
    ]


def test_show_of_what_says_less(adapter: Path) -> None:
    values = json.loads((adapter / "adapter_config.json").read_text())
    del values["openelm_mlx"]  # as mlx-lm's tuner writes it
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    done = run("adapter", "show", adapter)
    assert "alpha       8 (times 2, which is alpha / rank)" in done.out.splitlines()
    assert "model" not in done.out


def test_show_of_something_else(tmp_path: Path, tied: Path) -> None:
    done = run("adapter", "show", tied)
    assert done.status == 2
    assert done.err.startswith(f"error: {tied}: is no adapter")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["openelm_mlx"].update(base={"num_transformer_layers": "x"}),
        lambda v: v["openelm_mlx"]["base"].update(model_dim=None),
        lambda v: v["lora_parameters"].update(rank=10**400),
    ],
    ids=["layers", "width", "rank"],
)
def test_a_config_that_cannot_be(adapter: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((adapter / "adapter_config.json").read_text())
    change(values)
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    for arguments in (("show", adapter), ("export", adapter, "--format", "peft", "--out", tmp_path / "out")):
        done = run("adapter", *arguments)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(f"error: {adapter / 'adapter_config.json'}: ")
        assert done.err.count("\n") == 1


@pytest.mark.parametrize("form", FORMS)
def test_export(adapter: Path, tmp_path: Path, tied: Path, form: str) -> None:
    out = tmp_path / "theirs"
    done = run("adapter", "export", adapter, "--format", form, "--out", out, "--model", tied)
    assert (done.status, done.err) == (0, "")
    assert done.out == f"{out}: LoRA of rank 4 on 16 layers, for {form}\n"
    assert run("adapter", "export", adapter, "--format", form, "--out", tmp_path / "b", "--quiet").out == ""


def test_export_says_what_mlxlm_needs(tmp_path: Path, tied: Path) -> None:
    folder = kept(tmp_path / "ours", targets=("token_embeddings",))
    out = tmp_path / "theirs"
    done = run("adapter", "export", folder, "--format", "mlx-lm", "--out", out, "--model", tied)
    assert done.status == 0
    first, second = done.out.splitlines()
    assert first == f"{out}: LoRA of rank 4 on 1 layers, for mlx-lm"
    assert second.endswith(f"mlx_lm.load('{out}/base', adapter_path='{out}')")


def test_import(tmp_path: Path, adapter: Path, tied: Path) -> None:
    run("adapter", "export", adapter, "--format", "peft", "--out", tmp_path / "peft")
    done = run("adapter", "import", tmp_path / "peft", "--model", tied, "--out", tmp_path / "back")
    assert (done.status, done.err) == (0, "")
    assert done.out == f"{tmp_path / 'back'}: LoRA of rank 4 on 16 layers\n"
    file = checkpoint(tmp_path, {**base_weights(), **lora()})
    done = run("adapter", "import", file, "--model", tied, "--out", tmp_path / "c", "--alpha", "8")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"{tmp_path / 'c'}: LoRA of rank 4 on 1 layers",
        "base weights: those of the model; largest difference 0",
    ]


def test_a_run_folder_is_an_adapter(tmp_path: Path, adapter: Path) -> None:
    (adapter / "checkpoints").mkdir()
    (adapter / "metrics.jsonl").write_text("")
    assert run("adapter", "show", adapter).status == 0
    assert run("adapter", "export", adapter, "--format", "peft", "--out", tmp_path / "peft").status == 0


class TestReplacing:
    @pytest.mark.parametrize("form", FORMS)
    def test_a_folder_written_here_with_force_alone(self, adapter: Path, tmp_path: Path, form: str) -> None:
        export = ("adapter", "export", adapter, "--format", form, "--out", tmp_path / "out")
        assert run(*export).status == 0
        done = run(*export)
        assert (done.status, "exists already" in done.err) == (2, True)
        assert run(*export, "--force").status == 0

    @pytest.mark.parametrize("name", ["metrics.jsonl", "README.md"])
    def test_no_run_and_nothing_with_other_files(self, adapter: Path, tmp_path: Path, name: str) -> None:
        run_folder = Path(shutil.copytree(adapter, tmp_path / "run"))
        (run_folder / name).write_text("")
        before = names_of(run_folder)
        done = run("adapter", "export", adapter, "--format", "peft", "--out", run_folder, "--force")
        assert (done.status, "--force only replaces folders written by this program" in done.err) == (2, True)
        assert names_of(run_folder) == before

    def test_no_adapter_of_another_program(self, adapter: Path, tmp_path: Path) -> None:
        export = ("adapter", "export", adapter, "--format", "peft", "--out", tmp_path / "peft")
        run(*export)
        (tmp_path / "peft" / "openelm_mlx.json").unlink()  # as PEFT writes it
        assert run(*export, "--force").status == 2

    def test_not_what_is_being_read(self, adapter: Path, tmp_path: Path, tied: Path) -> None:
        done = run("adapter", "export", adapter, "--format", "peft", "--out", adapter, "--force")
        assert done.status == 2
        assert done.err == (
            f"error: {adapter}: holds the source itself, which replacing it would delete; name another folder\n"
        )
        assert read_adapter(adapter)
        with_base = kept(tmp_path / "e", targets=EVERYTHING)
        out = tmp_path / "out"
        run("adapter", "export", with_base, "--format", "mlx-lm", "--out", out, "--model", tied)
        done = run("adapter", "export", adapter, "--format", "peft", "--out", out, "--model", out / "base", "--force")
        assert (done.status, "which replacing it would delete" in done.err) == (2, True)


@pytest.mark.parametrize("form", FORMS)
def test_what_contradicts_itself_is_not_exported(tmp_path: Path, tied: Path, form: str) -> None:
    folder = kept(tmp_path / "ours", targets=EVERYTHING, method="dora")
    adapter = read_adapter(folder)
    half = {name: t for name, t in adapter.tensors.items() if name != "transformer.layers.0.ffn.proj_1.m"}
    save_adapter(folder, replace(adapter, tensors=half))
    export = ("adapter", "export", folder, "--format", form, "--out", tmp_path / "out")
    done = run(*export)
    assert done.err == f"error: {folder}: transformer.layers.0.ffn.proj_1 has lora_a, lora_b, not lora_a, lora_b, m\n"
    assert "missing (1): transformer.layers.0.ffn.proj_1.m" in run(*export, "--model", tied).err


@pytest.mark.parametrize("form", FORMS)
def test_an_embedding_that_mlxlm_trained_needs_the_model(tmp_path: Path, tied: Path, untied: Path, form: str) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    save_adapter(folder, random_adapter(golden("tiny-untied"), targets=EVERYTHING))
    values = json.loads((folder / "adapter_config.json").read_text())
    del values["openelm_mlx"]
    (folder / "adapter_config.json").write_text(json.dumps(values))
    export = ("adapter", "export", folder, "--format", form, "--out", tmp_path / "out")
    assert "changes the output head too if that is tied; give the model with --model" in run(*export).err
    assert run(*export, "--model", untied).status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "{ours}", "--format", "gguf"], "format must be one of peft, mlx-lm, not 'gguf'"),
        (["export", "{tmp}/none", "--format", "peft"], "{tmp}/none: no such folder"),
        (["export", "{ours}", "--format", "peft", "--model", "{untied}"], "{ours}: was trained on a model of another"),
        (["import", "{tmp}/none", "--model", "{tied}"], "{tmp}/none: no such file or folder"),
        (["import", "{ours}", "--model", "{tied}"], "adapter_config.json has no peft_type; mlx-lm's need no import"),
        (["import", "{tied}", "--model", "{tied}"], "has no adapter_config.json, so it is no adapter of PEFT's"),
        (["import", "{ours}/adapters.safetensors", "--model", "{tied}"], "give lora_alpha with --alpha, or CoreNet's"),
        (["import", "{ours}/adapter_config.json", "--model", "{tied}", "--alpha", "8"], "expected a safetensors or"),
        (["import", "{peft}", "--model", "{tied}", "--alpha", "8"], "--alpha is for CoreNet's checkpoints"),
        (["import", "{peft}", "--model", "{tied}", "--any-base"], "--any-base is for CoreNet's checkpoints"),
        (["import", "{peft}", "--model", "{tied}/none"], "none"),
        (["import", "{peft}", "--model", "{untied}"], "transformer.layers.3.attn.qkv_proj"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_one_line_and_no_folder(
    tmp_path: Path, adapter: Path, tied: Path, untied: Path, arguments: list[str], message: str
) -> None:
    places = {"ours": adapter, "tmp": tmp_path, "tied": tied, "untied": untied, "peft": tmp_path / "peft"}
    run("adapter", "export", adapter, "--format", "peft", "--out", tmp_path / "peft")
    before = names_of(tmp_path)
    done = run("adapter", *(a.format(**places) for a in arguments), "--out", tmp_path / "out")
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert message.format(**places) in done.err
    assert names_of(tmp_path) == before


def test_nothing_heavy_for_help(tmp_path: Path) -> None:
    for verb in ("export", "import", "show"):
        done, modules = modules_of(tmp_path / "modules", "adapter", verb, "--help")
        assert done.status == 0
        assert not {"mlx.core", "numpy", "yaml", "rich.progress"} & modules


def test_no_other_framework(tmp_path: Path, adapter: Path, tied: Path) -> None:
    out = tmp_path / "peft"
    for arguments in (
        ("adapter", "export", adapter, "--format", "peft", "--out", out),
        ("adapter", "import", out, "--out", tmp_path / "back", "--model", tied),
        ("adapter", "show", tmp_path / "back"),
    ):
        done, modules = modules_of(tmp_path / "modules", *arguments)
        assert done.status == 0, done.err
        assert not {"torch", "transformers", "mlx_lm", "peft"} & modules
