"""The fuse job: a finished folder that says what it is, loads everywhere, and is compared with what it came from."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as stock_load

from openelm_mlx import device
from openelm_mlx.adapters import Adapter
from openelm_mlx.atomic import OutputError
from openelm_mlx.convert.job import convert
from openelm_mlx.errors import CheckpointError, ConfigError, OpenELMError
from openelm_mlx.finetune.fuse import fuse
from openelm_mlx.loading import load, load_model, memory_needed, stored_precision
from openelm_mlx.progress import Progress
from tests.adapters.made import LINEARS_AND_EMBEDDING, logits, saved, trained_adapter
from tests.support import sources
from tests.support.tokenizers_made import ZEPHYR


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model with a tokenizer, a chat template and a generation_config.json, by precision; read only."""
    root = tmp_path_factory.mktemp("bases")
    source = sources.hf(root / "hf")
    (source / "chat_template.jinja").write_text(ZEPHYR)
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    return {p: convert(source, root / p, precision=p, group_size=32).folder for p in ("fp32", "bf16", "4bit")} | {
        "unconverted": source
    }


@pytest.fixture(scope="module")
def adapter(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of all linears, trained on bf16."""
    made = trained_adapter(load_model(bases["bf16"]), precision="bf16")
    return saved(tmp_path_factory.mktemp("run") / "run1", made)


@pytest.fixture(scope="module")
def of_embedding(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DoRA adapter of all linears and the embedding."""
    made = trained_adapter(load_model(bases["bf16"]), method="dora", targets=LINEARS_AND_EMBEDDING)
    return saved(tmp_path_factory.mktemp("run") / "run2", made)


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


@pytest.mark.parametrize("base", ["fp32", "bf16", "4bit", "unconverted"])
def test_the_result_does_what_the_adapter_does(
    bases: dict[str, Path], of_embedding: Path, base: str, tmp_path: Path
) -> None:
    result = fuse(bases[base], of_embedding, tmp_path / "out", precision="fp32")
    model, tokenizer = load(result.folder, dtype="float32")
    with_adapter, before = load(bases[base], adapter=of_embedding, dtype="float32")
    np.testing.assert_allclose(logits(model), logits(with_adapter), atol=1e-4)
    assert tokenizer is not None
    assert before is not None
    assert tokenizer.encode("Once upon") == before.encode("Once upon")
    assert tokenizer.eos_token_ids == before.eos_token_ids
    assert result.effect is not None
    assert result.effect.max_difference < 1e-4
    assert result.effect.mean_effect > 0.1
    assert (result.layers, result.adapter.method, result.precision) == (9, "dora", "fp32")
    assert result.nbytes == sum(t.nbytes for t in sources.written(result.folder).values())


@pytest.mark.parametrize("requantize", [False, True])
def test_it_loads_in_stock_mlx_lm(bases: dict[str, Path], of_embedding: Path, requantize: bool, tmp_path: Path) -> None:
    folder = fuse(bases["4bit"], of_embedding, tmp_path / "out", requantize=requantize).folder
    theirs, _ = stock_load(folder)
    theirs.set_dtype(mx.float32)
    np.testing.assert_allclose(logits(theirs), logits(load_model(folder)), atol=1e-4)


@pytest.mark.parametrize("base", ["bf16", "unconverted"])
def test_files_that_go_along(bases: dict[str, Path], adapter: Path, base: str, tmp_path: Path) -> None:
    folder = fuse(bases[base], adapter, tmp_path / "out").folder
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in bases["bf16"].iterdir()}
    for name in names - {"config.json", "model.safetensors", "model.safetensors.index.json"}:
        after, before = (place / name for place in (folder, bases["bf16"]))
        if name.endswith(".json"):
            assert json.loads(after.read_text()) == json.loads(before.read_text()), name
        else:
            assert after.read_bytes() == before.read_bytes(), name
    ours, its = (
        {key: value for key, value in config_of(place).items() if key not in ("openelm_mlx", "torch_dtype")}
        for place in (folder, bases["bf16"])
    )
    assert ours == its


def test_where_it_comes_from(bases: dict[str, Path], adapter: Path, of_embedding: Path, tmp_path: Path) -> None:
    once = fuse(bases["4bit"], adapter, tmp_path / "once").folder
    before, after = config_of(bases["4bit"])["openelm_mlx"], config_of(once)["openelm_mlx"]
    assert after == {**before, "precision": "bf16", "fused": after["fused"]}
    (fused,) = after["fused"]
    assert (fused["base"], fused["base_precision"], fused["adapter"]) == (str(bases["4bit"]), "4bit", str(adapter))
    assert fused["adapter_sha256"] == hashlib.sha256((adapter / "adapters.safetensors").read_bytes()).hexdigest()
    assert (fused["method"], fused["rank"], fused["alpha"], fused["adapter_trained_on"]) == ("lora", 4, 16.0, "bf16")
    twice = config_of(fuse(once, adapter, tmp_path / "twice").folder)["openelm_mlx"]
    assert [f["base"] for f in twice["fused"]] == [str(bases["4bit"]), str(once)]
    plain = config_of(fuse(bases["unconverted"], adapter, tmp_path / "plain").folder)["openelm_mlx"]
    assert (plain["source"], plain["source_kind"], plain["precision"]) == (
        str(bases["unconverted"]),
        "huggingface",
        "fp32",
    )
    assert stored_precision(tmp_path / "plain") == "fp32"
    packed = config_of(fuse(bases["4bit"], adapter, tmp_path / "packed", requantize=True).folder)
    assert packed["openelm_mlx"]["precision"] == "4bit" == stored_precision(tmp_path / "packed")


def test_figures_of_the_comparison(bases: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    """By hand, on the same ids: the passage is the tokenizer's, cut to the model's window of 64."""
    effect = fuse(bases["4bit"], adapter, tmp_path / "out", requantize=True).effect
    assert effect is not None
    assert effect.tokens == 64
    better = fuse(bases["4bit"], adapter, tmp_path / "plain").effect
    assert better is not None
    assert 0 < better.mean_difference < better.max_difference
    assert better.mean_effect == effect.mean_effect
    assert effect.mean_difference > 5 * better.mean_difference, "4 bits take more away than 16"


def test_an_adapter_that_changes_nothing(bases: dict[str, Path], tmp_path: Path) -> None:
    made = trained_adapter(load_model(bases["fp32"]))
    still = Adapter(
        made.config,
        {n: v * (0 if n.endswith("lora_b") else 1) for n, v in made.tensors.items()},
        made.base,
        made.precision,
    )
    effect = fuse(bases["fp32"], saved(tmp_path / "a", still), tmp_path / "out").effect
    assert effect is not None
    assert (effect.max_difference, effect.mean_effect) == (0, 0)


def test_what_is_said(bases: dict[str, Path], adapter: Path, of_embedding: Path, tmp_path: Path) -> None:
    def said(base: str, adapter: Path, **options: Any) -> list[str]:
        lines: list[str] = []
        fuse(bases[base], adapter, tmp_path / "out", force=True, progress=Progress(lines.append), **options)
        assert lines.pop() == "comparing the result with the adapter on its base"
        return lines

    assert said("bf16", adapter) == []
    note = "note: the adapter was trained on bf16 weights, and the model's are 4bit"
    assert said("4bit", adapter, requantize=True) == [note]
    packed = "the base is packed (4bit): the result is bf16; --requantize packs it"
    assert said("4bit", adapter) == [note, packed]
    (line,) = said("fp32", of_embedding)
    assert line.startswith("the embedding has an update: the result's output head, tied to it so far, ")


def test_progress(bases: dict[str, Path], of_embedding: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    progress = Progress(bytes_read=lambda done, total: seen.append((done, total)))
    fuse(bases["4bit"], of_embedding, tmp_path / "out", progress=progress)
    assert len({total for _, total in seen}) == 1
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1]


def test_without_the_memory_to_compare(
    bases: dict[str, Path], adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = memory_needed(bases["fp32"], adapter=adapter)
    assert needed > memory_needed(bases["fp32"])
    monkeypatch.setattr(device, "memory", lambda: device.Memory(needed - 1, "a test"))
    lines: list[str] = []
    result = fuse(bases["fp32"], adapter, tmp_path / "out", progress=Progress(lines.append))
    assert result.effect is None
    assert lines[-1].startswith("the result is whole, but was not compared with the adapter on its base: that needs ")
    assert lines[-1].endswith(" (a test)")
    load_model(result.folder)
    monkeypatch.setattr(device, "memory", lambda: device.Memory(needed, "a test"))
    assert fuse(bases["fp32"], adapter, tmp_path / "again").effect is not None


class TestRefusals:
    """Nothing is written, and no folder is left."""

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"precision": "4bit"}, "precision '4bit' is not known; use one of bf16, fp16, fp32, or --requantize"),
            ({"precision": "bf16", "requantize": True}, "--requantize keeps the precision of the base"),
            ({"requantize": True}, "is not packed, so there is nothing to pack again"),
        ],
    )
    def test_options(
        self, bases: dict[str, Path], adapter: Path, tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(OpenELMError, match=message):
            fuse(bases["bf16"], adapter, tmp_path / "out", **options)
        assert list(tmp_path.iterdir()) == []

    def test_folders(self, bases: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        for arguments, message in (
            ((bases["bf16"], bases["bf16"], out), "it holds a whole model: use it with --model"),
            ((bases["bf16"], tmp_path / "x", out), "no such folder; an adapter is a folder"),
            ((adapter, adapter, out), "no config.json, so no model folder"),
            ((tmp_path / "x", adapter, out), "x"),
        ):
            with pytest.raises(OpenELMError, match=message):
                fuse(*arguments)
        assert list(tmp_path.iterdir()) == []

    def test_outputs(self, bases: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
        base = Path(shutil.copytree(bases["fp32"], tmp_path / "base"))
        out = fuse(base, adapter, tmp_path / "out").folder
        with pytest.raises(OutputError, match="exists already"):
            fuse(base, adapter, out)
        fuse(base, adapter, out, force=True)
        with pytest.raises(OutputError, match="holds the source itself"):
            fuse(base, adapter, base, force=True)
        run = Path(shutil.copytree(adapter, tmp_path / "out" / "run"))
        with pytest.raises(OutputError, match="holds the source itself"):
            fuse(base, run, out, force=True)
        with pytest.raises(OutputError, match="only replaces folders written by this program"):
            fuse(base, run, Path(shutil.copytree(adapter, tmp_path / "foreign")), force=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "foreign", "out"]

    def test_a_full_disk(
        self, bases: dict[str, Path], adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(OutputError, match=r"needs 0\.\d MB, and the disk has 0\.0 MB free"):
            fuse(bases["bf16"], adapter, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_damage_that_shows_on_the_way(self, bases: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
        base = Path(shutil.copytree(bases["fp32"], tmp_path / "base"))
        tensors = sources.written(base)
        mx.eval(tensors)
        name = "transformer.layers.1.ffn.proj_2.weight"
        tensors[name] = mx.where(mx.arange(tensors[name].shape[1]) == 5, mx.inf, tensors[name])
        mx.save_safetensors(str(base / "model.safetensors"), tensors)
        with pytest.raises(CheckpointError, match=rf"{name}: it has NaN or infinity"):
            fuse(base, adapter, tmp_path / "out")
        (base / "generation_config.json").write_text("{")
        with pytest.raises(ConfigError, match=r"generation_config\.json: not readable as JSON"):
            fuse(base, adapter, tmp_path / "out")
        assert [p.name for p in tmp_path.iterdir()] == ["base"]
