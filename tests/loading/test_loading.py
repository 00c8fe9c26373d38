"""Loading: every kind of folder gives the same model, dtypes follow the rules, memory is asked for first."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from openelm_mlx import device
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.cpu import halves, unpacking
from openelm_mlx.dtypes import parse_dtype
from openelm_mlx.errors import CheckpointError, ConfigError, OpenELMError
from openelm_mlx.generation import generate_tokens
from openelm_mlx.loading import (
    TooLargeError,
    kv_bytes_per_token,
    load,
    load_model,
    memory_needed,
    require_memory,
    stored_precision,
)
from openelm_mlx.model import OpenELM
from tests.loading.made import CPU, PROMPT, dtypes, equal, packed_layers, parameters
from tests.support.models import converted_folder, golden_config, golden_model, greedy_reference
from tests.support.tokenizers_made import byte_level_folder
from tests.support.torch_writer import save_torch


class TestDtypes:
    @pytest.fixture
    def on_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "backend", lambda: "cuda")

    @pytest.mark.skipif(not CPU, reason="a rule of the CPU backend")
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "4bit"])
    def test_a_cpu_computes_in_float32(self, folders: dict[str, Path], precision: str) -> None:
        model = load_model(folders[precision])
        assert model(mx.array([PROMPT])).dtype == mx.float32
        assert dtypes(load_model(folders[precision], dtype="float32")) == {mx.float32}
        kept = precision == "bf16" and halves.possible()
        assert dtypes(model) == ({mx.float32, mx.bfloat16} if kept else {mx.float32})
        assert model.transformer.norm.weight.dtype == mx.float32

    @pytest.mark.usefixtures("on_gpu")
    @pytest.mark.parametrize(
        ("precision", "expected"), [("fp32", mx.float32), ("bf16", mx.bfloat16), ("4bit", mx.bfloat16)]
    )
    def test_elsewhere_what_is_stored(self, folders: dict[str, Path], precision: str, expected: mx.Dtype) -> None:
        assert dtypes(load_model(folders[precision])) - {mx.uint32} == {expected}

    @pytest.mark.usefixtures("on_gpu")
    def test_an_unconverted_checkpoint_becomes_bfloat16(self, source: Path) -> None:
        assert dtypes(load_model(source)) == {mx.bfloat16}

    @pytest.mark.parametrize("dtype", ["bfloat16", "bf16", mx.bfloat16, "float32", "fp32", mx.float32])
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "4bit"])
    def test_what_is_asked_for(self, folders: dict[str, Path], precision: str, dtype: Any) -> None:
        assert dtypes(load_model(folders[precision], dtype=dtype)) - {mx.uint32} == {parse_dtype(dtype)}

    def test_packed_layers_stay_packed_in_16_bits(self, folders: dict[str, Path]) -> None:
        model = load_model(folders["4bit"], dtype="bf16")
        assert packed_layers(model) == 4 * 4 + 1
        assert mx.isfinite(model(mx.array([PROMPT]))).all()

    @pytest.mark.parametrize("dtype", ["int4", "float64", "", mx.int32, mx.uint32, mx.complex64])
    def test_unknown_ones(self, folders: dict[str, Path], dtype: Any) -> None:
        with pytest.raises(OpenELMError, match=r"cannot hold a model; use one of bf16, bfloat16"):
            load_model(folders["fp32"], dtype=dtype)

    def test_float16_is_warned_about(self, folders: dict[str, Path]) -> None:
        with pytest.warns(UserWarning, match="prefer bf16 for computing"):
            model = load_model(folders["fp32"], dtype="float16")
        assert dtypes(model) == {mx.float16}

    @pytest.mark.usefixtures("on_gpu")
    def test_float16_that_is_stored_is_warned_about(self, folders: dict[str, Path]) -> None:
        with pytest.warns(UserWarning, match="prefer bf16 for computing"):
            assert dtypes(load_model(folders["fp16"])) == {mx.float16}

    @staticmethod
    def wide(folder: Path, dtype: Any) -> Path:
        """One layer as wide as the 3B's, stored in `dtype`."""
        config = OpenELMConfig(
            model_dim=3072,
            num_transformer_layers=1,
            head_dim=2,
            num_query_heads=(1,),
            num_kv_heads=(1,),
            ffn_multipliers=0.001,
            ffn_dim_divisor=1,
            vocab_size=4,
            share_input_output_layers=True,
        )
        folder.mkdir()
        tensors = {n: p.astype(dtype) for n, p in parameters(OpenELM(config)).items()}
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        (folder / "config.json").write_text(json.dumps({**config.to_dict(), "openelm_mlx": {}}))
        return folder

    def test_float16_is_refused_at_the_3bs_width(self, tmp_path: Path) -> None:
        folder = self.wide(tmp_path / "wide", mx.bfloat16)
        with pytest.raises(OpenELMError, match=r"width 3072 \(OpenELM-3B\) in float16 overflows.*Use bf16"):
            load_model(folder, dtype="fp16")
        load_model(folder, dtype="bf16")

    @pytest.mark.usefixtures("on_gpu")
    def test_float16_that_is_stored_is_refused_at_the_3bs_width(self, tmp_path: Path) -> None:
        folder = self.wide(tmp_path / "wide", mx.float16)
        with pytest.raises(OpenELMError, match=r"width 3072 \(OpenELM-3B\) in float16 overflows"):
            load_model(folder)
        load_model(folder, dtype="bf16")


class TestUnconverted:
    """Hugging Face's layouts, as they are: each gives the golden weights."""

    @staticmethod
    def tensors(source: Path) -> dict[str, Any]:
        return dict(load_file(source / "model.safetensors"))

    @staticmethod
    def check(source: Path) -> None:
        assert equal(load_model(source, dtype="float32"), golden_model("tiny-tied"))

    def shards(self, source: Path, suffix: str) -> None:
        tensors, stem = self.tensors(source), "model" if suffix == "safetensors" else "pytorch_model"
        (source / "model.safetensors").unlink()
        names = sorted(tensors)
        weight_map: dict[str, str] = {}
        for number, part in enumerate((names[:9], names[9:10], names[10:]), 1):
            file = f"{stem}-{number:05d}-of-00003.{suffix}"
            if suffix == "safetensors":
                save_file({n: tensors[n] for n in part}, source / file)
            else:
                save_torch(OrderedDict((n, tensors[n]) for n in part), source / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (source / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))

    def test_safetensors(self, source: Path) -> None:
        self.check(source)

    @pytest.mark.parametrize("suffix", ["safetensors", "bin"])
    def test_shards(self, source: Path, suffix: str) -> None:
        self.shards(source, suffix)
        self.check(source)

    def test_a_missing_shard(self, source: Path) -> None:
        self.shards(source, "bin")
        (source / "pytorch_model-00002-of-00003.bin").unlink()
        with pytest.raises(CheckpointError, match=r"missing of 3 weight files: pytorch_model-00002-of-00003\.bin"):
            load_model(source)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
    def test_torch_whatever_the_file_is_called(self, source: Path, name: str) -> None:
        tensors = self.tensors(source)
        (source / "model.safetensors").unlink()
        save_torch(OrderedDict(tensors), source / name)
        self.check(source)

    def test_safetensors_that_are_called_bin(self, source: Path) -> None:
        (source / "model.safetensors").rename(source / "pytorch_model.bin")
        self.check(source)

    def test_float64(self, source: Path) -> None:
        tensors = {n: t.astype(np.float64) for n, t in self.tensors(source).items()}
        save_file(tensors, source / "model.safetensors")
        self.check(source)

    def test_it_generates(self, source: Path) -> None:
        tokens = list(generate_tokens(load_model(source, dtype="float32"), PROMPT, 8, eos_token_ids=()))
        assert tokens == greedy_reference(golden_model("tiny-tied"), PROMPT, 8)


class TestMisfits:
    def test_all_are_listed(self, source: Path) -> None:
        tensors = TestUnconverted.tensors(source)
        del tensors["transformer.norm.weight"], tensors["transformer.layers.3.attn.q_norm.weight"]
        tensors["lm_head.weight"] = np.zeros((2, 2), np.float32)
        tensors["transformer.layers.0.ffn.proj_1.bias"] = np.zeros(2, np.float32)
        tensors["transformer.layers.1.ffn_norm.weight"] = np.zeros(7, np.float32)
        save_file(tensors, source / "model.safetensors")
        with pytest.raises(CheckpointError) as e:
            load_model(source)
        found = [line.split(": ", 1) for line in str(e.value).splitlines()]
        assert [(kind, sorted(names.split("; "))) for kind, names in found] == [
            (str(source), ["the tensors do not fit the config"]),
            ("  missing (2)", ["transformer.layers.3.attn.q_norm.weight", "transformer.norm.weight"]),
            ("  unexpected (2)", ["lm_head.weight", "transformer.layers.0.ffn.proj_1.bias"]),
            ("  wrong shape (1)", ["transformer.layers.1.ffn_norm.weight is (7,), not (128,)"]),
        ]

    def test_packed_weights_without_their_config(self, folders: dict[str, Path], tmp_path: Path) -> None:
        config = json.loads((folders["4bit"] / "config.json").read_text())
        del config["quantization"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folders["4bit"] / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"unexpected \(34\): .*\.scales"):
            load_model(tmp_path)

    def test_a_scale_that_is_missing(self, folders: dict[str, Path], tmp_path: Path) -> None:
        tensors = dict(mx.load(str(folders["4bit"] / "model.safetensors")))  # type: ignore[arg-type]
        del tensors["transformer.layers.0.ffn.proj_1.scales"]
        mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
        (tmp_path / "config.json").write_bytes((folders["4bit"] / "config.json").read_bytes())
        with pytest.raises(CheckpointError, match=r"unexpected \(1\): transformer.layers.0.ffn.proj_1.biases"):
            load_model(tmp_path)


class TestWrongPlaces:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere: no such folder"):
            load_model(tmp_path / "nowhere")
        with pytest.raises(OpenELMError, match="nowhere"):
            load(tmp_path / "nowhere")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "m.pt").write_bytes(b"x")
        for call in (load_model, load):
            with pytest.raises(
                CheckpointError, match=r"m.pt: is a file, not a model folder; convert it first: openelm"
            ):
                call(tmp_path / "m.pt")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no config.json, so no model folder"):
            load_model(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[]", "3", ""])
    def test_a_config_that_is_none(self, source: Path, text: str) -> None:
        (source / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config.json: "):
            load_model(source)

    def test_no_weights(self, source: Path) -> None:
        (source / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no weights found .*config.json"):
            load_model(source)


class TestLoad:
    def test_with_and_without_a_tokenizer(self, folders: dict[str, Path], tmp_path: Path) -> None:
        model, tokenizer = load(str(folders["fp32"]))
        assert isinstance(model, OpenELM)
        assert tokenizer is None
        made = converted_folder(tmp_path / "m", tokenizer=byte_level_folder(tmp_path / "tokenizer"))
        _, tokenizer = load(made)
        assert tokenizer is not None
        assert tokenizer.decode(tokenizer.encode("hi there")) == "hi there"

    def test_the_same_as_load_model(self, folders: dict[str, Path]) -> None:
        assert equal(load(folders["bf16"], dtype="bf16")[0], load_model(folders["bf16"], dtype="bf16"))

    def test_it_is_ready_to_run(self, folders: dict[str, Path]) -> None:
        assert not load_model(folders["fp32"]).training


@pytest.mark.skipif(not CPU, reason="the CPU backend unpacks")
class TestUnpacking:
    @pytest.mark.parametrize("precision", ["4bit", "8bit"])
    def test_same_values(self, folders: dict[str, Path], precision: str) -> None:
        model = load_model(folders[precision])
        stored = dict(mx.load(str(folders[precision] / "model.safetensors")))  # type: ignore[arg-type]
        assert packed_layers(model) == 0
        for path in (p.removesuffix(".scales") for p in stored if p.endswith(".scales")):
            scales, biases = (stored[f"{path}.{n}"].astype(mx.float32) for n in ("scales", "biases"))
            expected = mx.dequantize(stored[f"{path}.weight"], scales, biases, 32, int(precision[0]))
            assert mx.array_equal(parameters(model)[f"{path}.weight"], expected)

    def test_no_room_keeps_them_packed(self, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        unpacked = load_model(folders["4bit"])
        total = sum(p.nbytes for p in parameters(unpacked).values())
        stored = (folders["4bit"] / "model.safetensors").stat().st_size
        monkeypatch.setattr(device, "memory", lambda: device.Memory(total, "a test"))
        packed = load_model(folders["4bit"])
        assert packed_layers(packed) == 17
        monkeypatch.setattr(device, "memory", lambda: device.Memory(total + stored, "a test"))
        assert packed_layers(load_model(folders["4bit"])) == 0
        monkeypatch.setattr(device, "memory", lambda: None)
        assert packed_layers(load_model(folders["4bit"])) == 0
        ids = mx.array([PROMPT])
        assert mx.abs(packed(ids) - unpacked(ids)).max() < 1e-4
        assert greedy_reference(packed, PROMPT, 10) == greedy_reference(unpacked, PROMPT, 10)

    @pytest.mark.parametrize("precision", ["4bit", "8bit"])
    def test_as_asked_for(self, folders: dict[str, Path], precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever the memory: who asks for it knows."""
        folder = folders[precision]
        for available, by_default in ((1 << 40, 0), (1, 17)):
            monkeypatch.setattr(device, "memory", lambda available=available: device.Memory(available, "a test"))
            assert packed_layers(load_model(folder)) == by_default
            assert packed_layers(load_model(folder, cpu_weights=None)) == by_default
            assert packed_layers(load_model(folder, cpu_weights="float32")) == 0
            assert packed_layers(load_model(folder, cpu_weights="keep")) == 17
            assert packed_layers(load(folder, cpu_weights="keep")[0]) == 17
        assert packed_layers(load_model(folder, dtype="bf16", cpu_weights="float32")) == 0
        assert packed_layers(load_model(folder, dtype="bf16", cpu_weights="keep")) == 17

    @pytest.mark.parametrize("precision", ["4bit", "8bit"])
    def test_both_give_the_same_tokens(self, folders: dict[str, Path], precision: str) -> None:
        kept, unpacked = (load_model(folders[precision], cpu_weights=how) for how in ("keep", "float32"))
        assert float(mx.abs(kept(mx.array([PROMPT])) - unpacked(mx.array([PROMPT]))).max()) < 1e-4
        tokens = [list(generate_tokens(model, PROMPT, 20, eos_token_ids=())) for model in (kept, unpacked)]
        assert tokens[0] == tokens[1]
        assert len(set(tokens[0])) > 1

    def test_layers_that_are_not_packed_are_as_ever(self, folders: dict[str, Path]) -> None:
        for how in ("float32", "keep"):
            assert equal(load_model(folders["bf16"], cpu_weights=how), load_model(folders["bf16"]))

    @pytest.mark.parametrize("how", ["", "Float32", "bf16", "none", 32])
    def test_anything_else_is_refused(self, folders: dict[str, Path], how: Any) -> None:
        for precision in ("4bit", "fp32"):
            with pytest.raises(OpenELMError, match=rf"^cpu_weights must be one of float32, keep, not {how!r}$"):
                load_model(folders[precision], cpu_weights=how)

    def test_memory_for_them(self, folders: dict[str, Path]) -> None:
        cache = kv_bytes_per_token(golden_config("tiny-tied"), 4) * 2048
        # What is stored is packed, and the norms: with scales of 16 bits, which become 32.
        stored = dict(mx.load(str(folders["4bit"] / "model.safetensors")))  # type: ignore[arg-type]
        packed = sum(t.nbytes if t.dtype == mx.uint32 else 2 * t.nbytes for t in stored.values())
        for how in (None, "keep"):
            assert memory_needed(folders["4bit"], cpu_weights=how) == packed + cache
        unpacked = sum(p.nbytes for n, p in parameters(load_model(folders["4bit"])).items() if "norm" not in n)
        assert memory_needed(folders["4bit"], cpu_weights="float32") == packed + unpacked + cache

    def test_memory_that_does_not_suffice_for_them(
        self, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        needed = memory_needed(folders["4bit"], cpu_weights="float32")
        monkeypatch.setattr(device, "memory", lambda: device.Memory(needed - 1, "a test"))
        require_memory(folders["4bit"])
        require_memory(folders["4bit"], cpu_weights="keep")
        with pytest.raises(TooLargeError, match=rf"needs {needed / 1e9:.2f} GB to run"):
            require_memory(folders["4bit"], cpu_weights="float32")
        monkeypatch.setattr(device, "memory", lambda: device.Memory(needed, "a test"))
        require_memory(folders["4bit"], cpu_weights="float32")

    def test_elsewhere_they_stay_packed(self, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "backend", lambda: "metal")
        monkeypatch.setattr(device, "keep_resident", lambda: None)
        for how in (None, "float32", "keep"):
            assert packed_layers(load_model(folders["4bit"], cpu_weights=how)) == 17
            assert memory_needed(folders["4bit"], cpu_weights=how) == memory_needed(folders["4bit"])

    def test_bytes_foretold(self, folders: dict[str, Path]) -> None:
        packed = load_model(folders["4bit"], dtype="bf16")
        layers = {n.removesuffix(".scales") for n in parameters(packed) if n.endswith(".scales")}
        plain = parameters(load_model(folders["4bit"]))
        assert unpacking.float32_bytes(packed) == sum(plain[f"{path}.weight"].nbytes for path in layers)


def test_end_of_sequence_ids_are_those_of_both_configs(source: Path) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_model(source).config.eos_token_ids == (2, 7)
    (source / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(OpenELMError, match="eos_token_id"):
        load_model(source)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "4bit", "8bit"])
def test_what_a_folder_is_stored_in(folders: dict[str, Path], precision: str) -> None:
    assert stored_precision(folders[precision]) == precision
