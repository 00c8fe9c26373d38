"""PEFT's form, against its formulas in numpy; test_peft_library.py has PEFT itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from openelm_mlx.adapters import LINEARS, Adapter, AdapterError, read_adapter, save_adapter
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.transfer import export_adapter, import_adapter
from tests.finetune.adapters_made import (
    EMBEDDING,
    EVERYTHING,
    Array,
    distance,
    golden,
    logits,
    merged,
    names_of,
    peft_weights,
    random_adapter,
)
from tests.support.torch_writer import save_torch

PREFIX = "base_model.model."


def kept(folder: Path, adapter: Adapter) -> Path:
    folder.mkdir()
    save_adapter(folder, adapter)
    return folder


def exported(tmp_path: Path, adapter: Adapter, model: Path | None = None) -> tuple[dict[str, Array], dict[str, Any]]:
    export_adapter(kept(tmp_path / "ours", adapter), tmp_path / "peft", "peft", model=model)
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    return tensors, json.loads((tmp_path / "peft" / "adapter_config.json").read_text())


def peft_folder(folder: Path, tensors: dict[str, Array], **config: Any) -> Path:
    """As PEFT writes it."""
    folder.mkdir()
    save_file({n: np.ascontiguousarray(t) for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_rslora": False, "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return folder


def some_tensors(rank: int = 4, layer: str = "transformer.layers.0.attn.qkv_proj") -> dict[str, Array]:
    """A LoRA of a layer that maps 128 to 128."""
    rng = np.random.default_rng(3)
    return {
        f"{PREFIX}{layer}.lora_A.weight": rng.normal(scale=0.25, size=(rank, 128)).astype(np.float32),
        f"{PREFIX}{layer}.lora_B.weight": rng.normal(scale=0.25, size=(128, rank)).astype(np.float32),
    }


class TestExport:
    @pytest.mark.parametrize(
        "settings",
        [
            {"targets": LINEARS},
            {"targets": LINEARS, "rslora": True, "alpha": 3.5},
            {"targets": LINEARS, "method": "dora"},
            {"targets": EVERYTHING},
            {"targets": EVERYTHING, "method": "dora"},
        ],
        ids=str,
    )
    def test_peft_would_compute_the_same(self, tmp_path: Path, tied: Path, settings: dict[str, Any]) -> None:
        model = golden()
        adapter = random_adapter(model, **settings)
        tensors, config = exported(tmp_path, adapter, tied)
        theirs = logits(merged(model, peft_weights(model, tensors, config)))
        ours = logits(model, adapter)
        assert distance(ours, theirs) <= 1e-4
        assert distance(ours, logits(golden())) > 0.1

    def test_names_and_shapes(self, tmp_path: Path) -> None:
        adapter = random_adapter(golden(), targets=EVERYTHING, layers="0")
        tensors, _ = exported(tmp_path, adapter)
        assert {name.removeprefix(PREFIX): t.shape for name, t in tensors.items()} == {
            "transformer.token_embeddings.lora_embedding_A": (4, 512),
            "transformer.token_embeddings.lora_embedding_B": (128, 4),
            "transformer.layers.0.attn.qkv_proj.lora_A.weight": (4, 128),
            "transformer.layers.0.attn.qkv_proj.lora_B.weight": (128, 4),
            "transformer.layers.0.attn.out_proj.lora_A.weight": (4, 64),
            "transformer.layers.0.attn.out_proj.lora_B.weight": (128, 4),
            "transformer.layers.0.ffn.proj_1.lora_A.weight": (4, 128),
            "transformer.layers.0.ffn.proj_1.lora_B.weight": (128, 4),
            "transformer.layers.0.ffn.proj_2.lora_A.weight": (4, 64),
            "transformer.layers.0.ffn.proj_2.lora_B.weight": (128, 4),
        }

    def test_magnitudes(self, tmp_path: Path) -> None:
        adapter = random_adapter(golden(), method="dora", targets=("out_proj",), layers="1")
        tensors, config = exported(tmp_path, adapter)
        name = f"{PREFIX}transformer.layers.1.attn.out_proj.lora_magnitude_vector"
        np.testing.assert_array_equal(
            tensors[name], np.asarray(adapter.tensors["transformer.layers.1.attn.out_proj.m"])
        )
        assert config["use_dora"] is True

    def test_config(self, tmp_path: Path) -> None:
        _, config = exported(tmp_path, random_adapter(golden(), targets=LINEARS, dropout=0.1, rslora=True))
        assert config == {
            "alpha_pattern": {},
            "auto_mapping": None,
            "base_model_name_or_path": None,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "layers_pattern": None,
            "layers_to_transform": None,
            "lora_alpha": 8,
            "lora_dropout": 0.1,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": 4,
            "rank_pattern": {},
            "revision": None,
            "target_modules": ["qkv_proj", "out_proj", "proj_1", "proj_2"],
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": True,
        }

    def test_a_part_of_the_layers_is_named_by_paths(self, tmp_path: Path) -> None:
        _, config = exported(tmp_path, random_adapter(golden(), targets=("proj_2", "token_embeddings"), layers="1,3"))
        paths = [f"transformer.layers.{n}.ffn.proj_2" for n in (1, 3)]
        assert sorted(config["target_modules"]) == sorted([*paths, "token_embeddings"])

    def test_the_base_is_named_if_it_came_from_the_hub(self, tmp_path: Path, tied: Path) -> None:
        values = json.loads((tied / "config.json").read_text())
        values["openelm_mlx"] |= {"source": "apple/OpenELM-270M", "source_commit": "c0ffee"}
        base = tmp_path / "base"
        base.mkdir()
        for file in tied.iterdir():
            (base / file.name).symlink_to(file)
        (base / "config.json").unlink()
        (base / "config.json").write_text(json.dumps(values))
        _, config = exported(tmp_path, random_adapter(golden()), base)
        assert config["base_model_name_or_path"] == "apple/OpenELM-270M"

    def test_dora_with_an_embedding_needs_the_model(self, tmp_path: Path, packed: Path) -> None:
        adapter = random_adapter(golden(), targets=EVERYTHING, method="dora")
        folder = kept(tmp_path / "ours", adapter)
        with pytest.raises(AdapterError, match=r"DoRA to the embedding too.*none is given.*--model"):
            export_adapter(folder, tmp_path / "peft", "peft")
        with pytest.raises(AdapterError, match=r"is quantized: give the unquantized base"):
            export_adapter(folder, tmp_path / "peft", "peft", model=packed)
        assert names_of(tmp_path) == {"ours"}


class TestImport:
    @pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"method": "dora"}], ids=str)
    def test_there_and_back(self, tmp_path: Path, tied: Path, settings: dict[str, Any]) -> None:
        adapter = random_adapter(golden(), targets=EVERYTHING, dropout=0.25, **settings)
        exported(tmp_path, adapter, tied)
        import_adapter(tmp_path / "peft", tmp_path / "back", tied)
        back = read_adapter(tmp_path / "back")
        assert back.config == adapter.config
        assert back.base == adapter.base
        assert back.tensors.keys() == adapter.tensors.keys()
        assert all(mx.array_equal(t, back.tensors[name]).item() for name, t in adapter.tensors.items())

    @pytest.mark.parametrize("rslora", [False, True])
    @pytest.mark.parametrize("dora", [False, True])
    def test_ranks_and_alphas_that_differ(self, tmp_path: Path, tied: Path, rslora: bool, dora: bool) -> None:
        first, second = "transformer.layers.0.attn.qkv_proj", "transformer.layers.0.ffn.proj_1"
        tensors = some_tensors(2, first) | some_tensors(6, second)
        if dora:
            for layer in (first, second):
                tensors[f"{PREFIX}{layer}.lora_magnitude_vector"] = np.linspace(0.5, 2, 128, dtype=np.float32)
        folder = peft_folder(
            tmp_path / "peft",
            tensors,
            use_rslora=rslora,
            use_dora=dora,
            r=6,
            lora_alpha=3,
            rank_pattern={r"layers\.\d+\.attn.qkv_proj": 2},
            alpha_pattern={"qkv_proj": 16},
        )
        import_adapter(folder, tmp_path / "ours", tied)
        adapter = read_adapter(tmp_path / "ours")
        assert adapter.config.rank == 6
        of = {first: (16, 2), second: (3, 6)}
        config = {"use_rslora": rslora, "use_dora": dora, "lora_alpha": 0, "r": 0, "of": of}
        model = golden()
        theirs = logits(merged(model, peft_weights(model, tensors, config)))
        assert distance(logits(model, adapter), theirs) <= 1e-4

    def test_magnitudes_that_are_named_weight(self, tmp_path: Path, tied: Path) -> None:
        layer = f"{PREFIX}transformer.layers.0.attn.qkv_proj"
        magnitudes = np.linspace(1, 2, 128, dtype=np.float32)
        tensors = {**some_tensors(), f"{layer}.lora_magnitude_vector.weight": magnitudes}
        import_adapter(peft_folder(tmp_path / "peft", tensors, use_dora=True), tmp_path / "ours", tied)
        ours = read_adapter(tmp_path / "ours").tensors["transformer.layers.0.attn.qkv_proj.m"]
        np.testing.assert_array_equal(np.asarray(ours), magnitudes)

    def test_an_old_bin_file(self, tmp_path: Path, tied: Path) -> None:
        folder = peft_folder(tmp_path / "peft", some_tensors())
        (folder / "adapter_model.safetensors").unlink()
        save_torch(some_tensors(), folder / "adapter_model.bin")
        import_adapter(folder, tmp_path / "ours", tied)
        ours = read_adapter(tmp_path / "ours").tensors["transformer.layers.0.attn.qkv_proj.lora_a"]
        assert ours.shape == (128, 4)

    def test_copies_of_base_weights_may_lie_beside_it(self, tmp_path: Path, tied: Path) -> None:
        weight = np.asarray(golden().transformer.token_embeddings.weight)
        tensors = {**some_tensors(), f"{PREFIX}{EMBEDDING}.weight": weight}
        import_adapter(peft_folder(tmp_path / "peft", tensors), tmp_path / "ours", tied)
        assert read_adapter(tmp_path / "ours").paths == ["transformer.layers.0.attn.qkv_proj"]
        tensors = {**some_tensors(), f"{PREFIX}{EMBEDDING}.base_layer.weight": weight + np.float32(0.01)}
        with pytest.raises(AdapterError, match=r"a weight of its own that differs from the model's by up to 0\.01;"):
            import_adapter(peft_folder(tmp_path / "changed", tensors), tmp_path / "out", tied)

    def test_trained_magnitudes_of_an_embedding_are_refused(self, tmp_path: Path, tied: Path, packed: Path) -> None:
        adapter = random_adapter(golden(), targets=EVERYTHING, method="dora", alpha=0.01)
        tensors, config = exported(tmp_path, adapter, tied)
        with pytest.raises(AdapterError, match="because the model given is quantized"):
            import_adapter(tmp_path / "peft", tmp_path / "out", packed)
        tensors[f"{PREFIX}{EMBEDDING}.lora_magnitude_vector"] *= np.float32(1.01)
        folder = peft_folder(tmp_path / "trained", tensors, **config)
        with pytest.raises(AdapterError, match=r"embedding's DoRA magnitudes were trained;.*merge_and_unload"):
            import_adapter(folder, tmp_path / "out", tied)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"peft_type": "IA3"}, r"peft_type is 'IA3'; only LORA"),
            ({"bias": "all"}, r"bias is 'all', but OpenELM has no biases"),
            ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], for which an adapter here has no"),
            ({"target_parameters": ["x"]}, "target_parameters is"),
            ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
            ({"layer_replication": [[0, 2]]}, "layer_replication is"),
            ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
            ({"lora_bias": True}, "lora_bias is True"),
            ({"a_later_invention": {"of": "somebody"}}, "a_later_invention is"),
            ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base's"),
            ({"r": "four"}, "r must be a whole number, not 'four'"),
            ({"r": True}, "r must be a whole number, not True"),
            ({"lora_alpha": [8]}, "lora_alpha must be a number"),
            ({"use_dora": 1}, "use_dora must be true or false, not 1"),
            ({"rank_pattern": [1]}, "rank_pattern must be an object"),
            ({"r": 10**400}, "r must be at most 1048576, not 1000"),
            ({"lora_alpha": 10**400}, "lora_alpha must be a number above 0, not 1000"),
            ({"lora_alpha": -4}, "lora_alpha must be a number above 0, not -4"),
            (
                {"alpha_pattern": {"qkv_proj": "much"}},
                "alpha_pattern of 'qkv_proj' must be a number above 0, not 'much'",
            ),
            ({"alpha_pattern": {"qkv_proj": 0}}, "alpha_pattern of 'qkv_proj' must be a number above 0, not 0"),
            ({"alpha_pattern": {"qkv_proj": -5}}, "alpha_pattern of 'qkv_proj' must be a number above 0, not -5"),
            ({"alpha_pattern": {"x": 10**400}}, "alpha_pattern of 'x' must be a number above 0, not 1000"),
            ({"rank_pattern": {"qkv_proj": 0}}, "rank_pattern of 'qkv_proj' must be a whole number, 1 or more, not 0"),
            ({"rank_pattern": {"(.+)+!": 4}}, r"rank_pattern: '\(\.\+\)\+!' repeats a group that has a repetition"),
            ({"alpha_pattern": {"(.+)+!": 4}}, r"alpha_pattern: '\(\.\+\)\+!' repeats a group that has a repetition"),
            ({"alpha_pattern": {"x" * 201: 4}}, "alpha_pattern: 'x+...' is too long"),
            ({"alpha_pattern": {"(": 3}}, r"alpha_pattern: '\(' is neither a layer's name nor a regular expression"),
            ({"r": 8}, "qkv_proj has rank 4, but the config says 8"),
            ({"lora_alpha": 0}, "alpha must be a number above 0"),
            ({"lora_dropout": 1.5}, "dropout must be a number from 0 to below 1"),
            ({"use_dora": True}, "qkv_proj has lora_A, lora_B, not lora_A, lora_B, lora_magnitude_vector"),
        ],
        ids=lambda value: str(value)[:60],
    )
    def test_configs_that_are_refused(self, tmp_path: Path, tied: Path, config: dict[str, Any], message: str) -> None:
        folder = peft_folder(tmp_path / "peft", some_tensors(), **config)
        with pytest.raises(OpenELMError, match=message) as e:
            import_adapter(folder, tmp_path / "out", tied)
        assert str(e.value).startswith(str(folder))
        assert names_of(tmp_path) == {"peft"}

    def test_what_says_nothing_is_no_hindrance(self, tmp_path: Path, tied: Path) -> None:
        folder = peft_folder(
            tmp_path / "peft",
            some_tensors(),
            init_lora_weights="eva",
            eva_config={"rho": 2},
            target_modules=["qkv_proj"],
            megatron_core="megatron.core",
            qalora_group_size=16,
            loftq_config={},
            modules_to_save=None,
            peft_version="0.18.0",
            use_qalora=False,
        )
        assert import_adapter(folder, tmp_path / "ours", tied).config.rank == 4

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({f"{PREFIX}transformer.layers.0.attn.qkv_proj.lora_A.weight": None}, r"has lora_B, not lora_A, lora_B"),
            ({f"{PREFIX}lm_head.weight": (512, 128)}, r"lm_head\.weight', which is no part of a LoRA"),
            ({f"{PREFIX}transformer.layers.0.attn.qkv_proj.bias": (128,)}, r"qkv_proj\.bias', which is no part"),
            (
                {f"{PREFIX}transformer.layers.0.attn.qkv_proj.lora_B.weight": (128, 3)},
                r"no matrices A and B of one rank",
            ),
            ({f"{PREFIX}transformer.layers.0.attn.qkv_proj.lora_B.weight": (64, 4)}, r"is \(4, 64\), not \(4, 128\)"),
            ({"transformer.layers.0.attn.qkv_proj.lora_A.weight": (4, 128)}, r"which is no part of a LoRA or DoRA"),
            (
                {
                    f"{PREFIX}transformer.layers.9.attn.qkv_proj.lora_A.weight": (4, 128),
                    f"{PREFIX}transformer.layers.9.attn.qkv_proj.lora_B.weight": (128, 4),
                },
                r"not have: transformer\.layers\.9\.attn\.qkv_proj",
            ),
            ({f"{PREFIX}{EMBEDDING}.lora_A.weight": (4, 512)}, r"token_embeddings has lora_A, not lora_embedding_A"),
        ],
        ids=str,
    )
    def test_tensors_that_are_refused(
        self, tmp_path: Path, tied: Path, changes: dict[str, tuple[int, ...] | None], message: str
    ) -> None:
        tensors = some_tensors()
        for name, shape in changes.items():
            if shape is None:
                del tensors[name]
            else:
                tensors[name] = np.ones(shape, np.float32)
        with pytest.raises(AdapterError, match=message):
            import_adapter(peft_folder(tmp_path / "peft", tensors), tmp_path / "out", tied)
        assert names_of(tmp_path) == {"peft"}

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_numbers_that_are_not_finite(self, tmp_path: Path, tied: Path, value: float) -> None:
        tensors = some_tensors()
        tensors[f"{PREFIX}transformer.layers.0.attn.qkv_proj.lora_B.weight"][3, 1] = value
        folder = peft_folder(tmp_path / "peft", tensors)
        with pytest.raises(AdapterError, match=r"layers\.0\.attn\.qkv_proj\.lora_b has NaN or infinity in it"):
            import_adapter(folder, tmp_path / "out", tied)
        assert names_of(tmp_path) == {"peft"}

    def test_an_embeddings_magnitudes_that_are_not_finite(self, tmp_path: Path, tied: Path) -> None:
        tensors, config = exported(tmp_path, random_adapter(golden(), targets=EVERYTHING, method="dora"), tied)
        tensors[f"{PREFIX}{EMBEDDING}.lora_magnitude_vector"][5] = np.nan
        folder = peft_folder(tmp_path / "damaged", tensors, **config)
        with pytest.raises(AdapterError, match=r"token_embeddings\.m has NaN or infinity in it"):
            import_adapter(folder, tmp_path / "out", tied)

    def test_an_embedding_of_another_vocabulary(self, tmp_path: Path, tied: Path, untied: Path) -> None:
        adapter = random_adapter(golden(), targets=("token_embeddings",), method="dora")
        exported(tmp_path, adapter, tied)
        with pytest.raises(AdapterError, match=r"token_embeddings\.lora_a is \(512, 4\), not \(320, 4\)"):
            import_adapter(tmp_path / "peft", tmp_path / "out", untied)

    def test_no_tensors_at_all(self, tmp_path: Path, tied: Path) -> None:
        folder = peft_folder(tmp_path / "peft", {})
        with pytest.raises(AdapterError, match="holds no LoRA or DoRA tensors"):
            import_adapter(folder, tmp_path / "out", tied)
        (folder / "adapter_model.safetensors").unlink()
        with pytest.raises(AdapterError, match=r"adapter_model\.bin: no such file"):
            import_adapter(folder, tmp_path / "out", tied)
