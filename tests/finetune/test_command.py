"""``openelm finetune`` as a person runs it: results and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from openelm_mlx import device
from openelm_mlx.adapters import read_adapter
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.safetensorsfile import read_safetensors
from tests.finetune.data.malformed import MALFORMED, Malformed
from tests.finetune.runs import arguments, listing, metrics, refused, train, updates, write_data
from tests.support.cli import run
from tests.support.models import converted_folder, golden_config
from tests.support.tokenizers_made import MODEL


class TestARun:
    def test_folder(self, unbroken: Path) -> None:
        expected = [
            "adapter_config.json",
            "adapters.safetensors",
            "best",
            "checkpoints",
            "config.yaml",
            "environment.json",
            "metrics.jsonl",
        ]
        assert listing(unbroken) == expected
        assert listing(unbroken / "checkpoints") == ["step-000020", "step-000024"]
        assert len(listing(unbroken / "best")) == 1

    def test_metrics(self, unbroken: Path) -> None:
        lines = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
        training = [line for line in lines if "loss" in line]
        assert [line["step"] for line in training] == list(range(1, 25))
        keys = ["step", "epoch", "loss", "grad_norm", "learning_rate", "tokens", "seen"]
        keys += ["seconds", "tokens_per_s", "memory_gb"]
        assert all(list(line) == keys for line in training)
        validations = [line for line in lines if "valid_loss" in line]
        assert [line["step"] for line in validations] == [0, 6, 12, 18, 24]
        assert all(list(line) == ["step", "valid_loss", "valid_tokens", "perplexity"] for line in validations)
        assert len({line["valid_tokens"] for line in validations}) == 1
        assert len(training) + len(validations) == len(lines)
        assert validations[-1]["valid_loss"] < validations[0]["valid_loss"]
        assert training[0]["learning_rate"] == pytest.approx(0.003)
        assert training[-1]["learning_rate"] < 1e-4

    def test_the_adapter_is_the_best_one(self, unbroken: Path) -> None:
        (best,) = (unbroken / "best").iterdir()
        losses = {line["step"]: line["valid_loss"] for line in metrics(unbroken) if "valid_loss" in line}
        step = min(losses, key=lambda s: losses[s])
        assert best.name == f"step-{step:06d}"
        adapter = read_adapter(unbroken)
        kept = read_safetensors(best / "weights.safetensors")
        assert {n: t.read().tolist() for n, t in kept.items()} == {n: t.tolist() for n, t in adapter.tensors.items()}

    def test_its_config_is_a_recipe(self, unbroken: Path, tmp_path: Path) -> None:
        values = yaml.safe_load((unbroken / "config.yaml").read_text())
        assert Settings.from_mapping(values).steps == 24
        out = tmp_path / "again"
        done = run("finetune", "--recipe", str(unbroken / "config.yaml"), "--steps", "2", "--out", out, "--quiet")
        assert done.status == 0, done.err
        settings = yaml.safe_load((out / "config.yaml").read_text())
        assert settings == {**values, "steps": 2}
        assert updates(metrics(out))[0]["loss"] == updates(metrics(unbroken))[0]["loss"]

    def test_what_is_said(self, model: Path, data: Path, tmp_path: Path) -> None:
        given = [
            a for a in arguments(model, data, tmp_path / "run", "--steps=2", "--valid", str(data)) if a != "--quiet"
        ]
        done = run(*given, "--test", data, "--plot")
        assert done.status == 0, done.err
        assert re.search(r"training [\d,]+ parameters \(.*%\), updates: 2\n", done.err)
        lines = done.out.splitlines()
        assert lines[0] == f"{tmp_path / 'run'}: updates: 2"
        assert re.fullmatch(r"validation loss \d\.\d{4} before, \d\.\d{4} after update 2 \(kept\)", lines[1])
        assert re.fullmatch(r"test loss \d\.\d{4}, perplexity [\d.]+", lines[2])
        assert lines[3] == f"try it: openelm generate --model {model} --adapter {tmp_path / 'run'} --prompt ..."
        assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
        last = metrics(tmp_path / "run")[-1]
        assert list(last) == ["step", "test_loss", "test_tokens", "perplexity"]
        assert last["test_loss"] == metrics(tmp_path / "run")[-2]["valid_loss"]

    def test_of_the_whole_model(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=2", "--method=full", "--learning-rate=1e-3")
        assert not (out / "adapters.safetensors").exists()
        done = run("generate", "--model", out, "--prompt", "Alice", "--max-tokens", "2", "--raw")
        assert done.status == 0, done.err
        resumed = run("finetune", "--resume", out, "--quiet")
        assert resumed.status == 0, resumed.err


class TestRefusals:
    @pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.name)
    def test_malformed_data(self, case: Malformed, model: Path, tmp_path: Path) -> None:
        path = tmp_path / case.name
        path.write_bytes(case.data)
        out = tmp_path / "out" / "run"
        out.parent.mkdir()
        said = refused(*arguments(model, path, out), out=out)
        assert re.fullmatch(re.escape(str(path)) + re.escape(case.message).replace(r"\*", ".+"), said)

    def test_the_tokenizer_of_another_model(self, data: Path, tmp_path: Path) -> None:
        base = converted_folder(tmp_path / "base", case="tiny-no-glu")
        shutil.copy(MODEL, base / "tokenizer.model")
        said = refused(*arguments(base, data, tmp_path / "run"), out=tmp_path / "run")
        size = golden_config("tiny-no-glu").vocab_size
        assert re.search(rf"its tokenizer is not the model's: .*my\.jsonl:\d+ has the token \d+, .* has {size};", said)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (["--targets", "qkv"], "'qkv' matches no layer"),
            (["--layers", "9"], "9"),
            (["--steps", "5", "--warmup-steps", "6"], "warmup_steps (6)"),
            (["--epochs", "1", "--warmup-steps", "60"], "warmup_steps (60) are more than the run's 6 updates"),
            (["--final-learning-rate", "1"], "final_learning_rate (1.0) is above learning_rate"),
            (["--rank", "0"], "rank must be at least 1"),
            (["--recipe", "none"], "none"),
        ],
    )
    def test_settings(self, given: list[str], message: str, model: Path, data: Path, tmp_path: Path) -> None:
        assert message in refused(*arguments(model, data, tmp_path / "run"), *given, out=tmp_path / "run")

    def test_a_model_that_is_not_there(self, data: Path, tmp_path: Path) -> None:
        assert "absent" in refused(*arguments(tmp_path / "absent", data, tmp_path / "run"), out=tmp_path / "run")

    def test_packed_weights_cannot_be_trained(self, packed: Path, data: Path, tmp_path: Path) -> None:
        said = refused(*arguments(packed, data, tmp_path / "run", "--method=full"), out=tmp_path / "run")
        assert "packed weights cannot be trained" in said

    def test_too_little_memory(self, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "memory", lambda: device.Memory(1 << 20, "memory available now"))
        said = refused(*arguments(model, data, tmp_path / "run", "--steps=1"), out=tmp_path / "run")
        assert re.search(r"fine-tuning so needs 0\.\d\d GB \(weights .*\), and there are 0\.00 GB", said)
        train(model, data, tmp_path / "run", "--steps=1", "--force")

    def test_an_existing_folder(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        out.mkdir()
        (out / "note").write_text("mine")
        assert "exists already" in refused(*arguments(model, data, out))
        assert "not" in refused(*arguments(model, data, out, "--force"))
        assert listing(out) == ["note"]

    def test_resume(self, unbroken: Path, tmp_path: Path) -> None:
        assert "no such run" in refused("finetune", "--resume", tmp_path / "absent")
        assert "is not the folder of a run" in refused("finetune", "--resume", tmp_path)
        said = refused("finetune", "--resume", unbroken, "--recipe", "quick-lora", "--out", "x")
        assert said == "--resume goes on with a run in its own folder; leave out --out, --recipe"
        said = refused("finetune", "--resume", unbroken, "--rank", "4", "--no-plot")
        assert said.startswith("rank: a run keeps what it was started with, but for epochs, steps, learning_rate, ")

    def test_changed_data_cannot_be_resumed(self, model: Path, tmp_path: Path) -> None:
        data, out = write_data(tmp_path / "my.jsonl"), tmp_path / "run"
        train(model, data, out, "--steps=1")
        write_data(data, 13)
        assert "my.jsonl changed since the run began" in refused("finetune", "--resume", out, "--quiet")

    def test_changed_settings_cannot_be_resumed(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=1")
        text = (out / "config.yaml").read_text()
        (out / "config.yaml").write_text(text.replace("rank: 8", "rank: 3"))
        assert "rank in config.yaml changed since the run began" in refused("finetune", "--resume", out, "--quiet")


class TestWhatARunDependsOn:
    def test_names_are_of_no_matter(
        self, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(data.parent)
        train(Path(os.path.relpath(model)), Path(data.name), tmp_path / "run", "--steps=1")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(data.parent))
        done = run("finetune", "--resume", "run", "--quiet")
        assert done.status == 0, done.err

    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
    def test_another_model(self, name: str, model: Path, data: Path, tmp_path: Path) -> None:
        base = tmp_path / "base"
        shutil.copytree(model, base)
        train(base, data, tmp_path / "run", "--steps=1")
        values = json.loads((base / name).read_text())
        (base / name).write_text(json.dumps({**values, "rms_norm_eps": 1e-2}))
        assert f"run: {name} changed since the run began" in refused("finetune", "--resume", tmp_path / "run", "-q")

    @pytest.mark.parametrize(("before", "after"), [("alpha: 16.0", "alpha: 99.0"), ("seed: 0", "seed: 9")])
    def test_an_edited_config(self, before: str, after: str, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=1")
        text = (out / "config.yaml").read_text()
        assert before in text
        (out / "config.yaml").write_text(text.replace(before, after))
        said = refused("finetune", "--resume", out, "-q")
        assert f"{before.partition(':')[0]} in config.yaml changed since the run began" in said

    @pytest.mark.parametrize(
        ("file", "text", "message"),
        [
            ("environment.json", "{}", "environment.json: is not what a run writes"),
            ("metrics.jsonl", "no line\n", "metrics.jsonl:1: is no JSON object"),
            ("checkpoints/step-000002/state.json", '{"step": "24"}', "step is not what a run writes"),
            ("checkpoints/step-000002/state.json", '{"step": 2, "position": null}', "position or best_loss is not"),
            ("checkpoints/step-000002/state.json", '{"metrics_bytes": -7}', "metrics_bytes is not what"),
        ],
    )
    def test_broken_files(self, file: str, text: str, message: str, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=2")
        (out / file).write_text(text)
        assert message in refused("finetune", "--resume", out, "-q", "--steps=3")

    def test_lines_that_are_gone_are_missed(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=2")
        (out / "metrics.jsonl").write_text("")
        done = run("finetune", "--resume", out, "--steps=3")
        assert done.status == 0
        assert "metrics.jsonl is shorter than it was: lines of earlier updates are lost\n" in done.err

    def test_fewer_updates_than_there_are(self, model: Path, data: Path, tmp_path: Path) -> None:
        train(model, data, tmp_path / "run", "--steps=2")
        said = refused("finetune", "--resume", tmp_path / "run", "--steps=1", "-q")
        assert said.endswith("run: 2 updates are made already, and 1 were asked for")


class TestForce:
    """What a run reads, and what it did not write, is never replaced by it."""

    @pytest.mark.parametrize("place", ["model", "data"])
    def test_what_lies_inside(self, place: str, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=1")
        base, lines = model, data
        if place == "model":
            base = Path(shutil.copytree(model, out / "checkpoints" / "base"))
        else:
            lines = Path(shutil.copy(data, out / "checkpoints"))
        assert "holds the source itself" in refused(*arguments(base, lines, out, "--force"))
        assert (out / "adapters.safetensors").exists()

    def test_the_run_that_is_the_model(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=1", "--method=full")
        assert "holds the source itself" in refused(*arguments(out, data, out, "--force"))
        assert (out / "model.safetensors").exists()

    def test_somebodys_file(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=1")
        (out / "notes.txt").write_text("mine")
        assert "--force only replaces folders" in refused(*arguments(model, data, out, "--force"))
        (out / "notes.txt").unlink()
        train(model, data, out, "--steps=1", "--force")


class TestOtherSettings:
    def test_a_longer_run(self, model: Path, data: Path, tmp_path: Path) -> None:
        out, whole = tmp_path / "run", tmp_path / "whole"
        flat = ("--schedule=constant", "--warmup-steps=0", "--save-every=2")
        train(model, data, whole, *flat, "--steps=5")
        train(model, data, out, *flat, "--steps=3")
        done = run("finetune", "--resume", out, "--steps", "5")
        assert done.status == 0, done.err
        assert "note: steps is 5, was 3: from here on it is another run than it would have been\n" in done.err
        assert metrics(out) == metrics(whole)
        assert yaml.safe_load((out / "config.yaml").read_text())["steps"] == 5

    def test_epochs_replace_steps(self, model: Path, data: Path, tmp_path: Path) -> None:
        train(model, data, tmp_path / "run", "--steps=2")
        assert run("finetune", "--resume", tmp_path / "run", "--epochs", "0.5").status == 0
        settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
        assert (settings["epochs"], settings["steps"]) == (0.5, None)
        assert len(updates(metrics(tmp_path / "run"))) == 3

    def test_a_lower_learning_rate(self, model: Path, data: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train(model, data, out, "--steps=2", "--save-every=1")
        done = run("finetune", "--resume", out, "--steps=4", "--learning-rate=0.001", "--keep=1", "-q")
        assert (done.status, done.err) == (0, "")
        assert updates(metrics(out))[-1]["learning_rate"] < 0.001
        assert len(listing(out / "checkpoints")) == 1

    def test_without_any_nothing_is_said(self, model: Path, data: Path, tmp_path: Path) -> None:
        train(model, data, tmp_path / "run", "--steps=2")
        assert "note:" not in run("finetune", "--resume", tmp_path / "run").err


class TestDryRun:
    def test_shows_a_batch_and_makes_nothing(self, model: Path, data: Path, tmp_path: Path) -> None:
        done = run(*arguments(model, data, tmp_path / "run", "--steps=7", "--dry-run"))
        assert done.status == 0, done.err
        assert "updates     7\n" in done.out
        assert "<EOS> (2)" in done.out
        assert not (tmp_path / "run").exists()
