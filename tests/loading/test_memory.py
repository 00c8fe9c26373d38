"""Loading: memory is asked for first, and there are never two copies of a model."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from openelm_mlx import device
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert.job import convert
from openelm_mlx.cpu import halves
from openelm_mlx.errors import CheckpointError, OpenELMError
from openelm_mlx.loading import (
    TooLargeError,
    kv_bytes_per_token,
    load_model,
    memory_needed,
    require_memory,
    start_loading,
)
from openelm_mlx.model import OpenELM
from tests.loading.made import CPU, dtypes, equal, packed_layers, parameters
from tests.support import sources
from tests.support.models import golden_config, golden_model
from tests.support.torch_writer import save_torch


class TestReadingAhead:
    """Weights are read while the caller does something else, so many bytes of them."""

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "4bit"])
    def test_finished_is_the_model(self, folders: dict[str, Path], precision: str) -> None:
        loading = start_loading(folders[precision])
        assert loading.folder == folders[precision]
        model = loading.finished()
        assert equal(model, load_model(folders[precision]))
        assert loading.finished() is model
        assert not model.training

    def test_options_reach_it(self, folders: dict[str, Path]) -> None:
        model = start_loading(folders["4bit"], dtype="bf16", cpu_weights="keep").finished()
        assert (packed_layers(model), dtypes(model)) == (17, {mx.bfloat16, mx.uint32})

    def test_what_is_wrong_is_said_at_once(self, folders: dict[str, Path], tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no such folder"):
            start_loading(tmp_path / "nowhere")
        with pytest.raises(OpenELMError, match="cannot hold a model"):
            start_loading(folders["fp32"], dtype="int4")

    @pytest.mark.parametrize("ahead", [0, 1 << 20, 1 << 28])
    def test_bytes(self, folders: dict[str, Path], ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("openelm_mlx.loading._READ_AHEAD", ahead)
        mx.clear_cache()
        before = mx.get_active_memory()
        loading = start_loading(folders["fp32"], dtype="float32")
        mx.synchronize()
        read, size = mx.get_active_memory() - before, 681344 * 4
        angles = 2 * 2048 * 16 * 4  # a CPU's
        largest = 512 * 128 * 4
        assert min(ahead, size) - largest <= read <= min(ahead, size) + angles + 100_000, read
        loading.finished()
        assert mx.get_active_memory() - before >= size

    def test_a_file_that_shrinks_meanwhile(
        self, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("openelm_mlx.loading._READ_AHEAD", 0)
        folder = Path(shutil.copytree(folders["fp32"], tmp_path / "model"))
        loading = start_loading(folder)
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(100_000)
        with pytest.raises(CheckpointError, match=rf"^{folder}: the weights cannot be loaded: "):
            loading.finished()


class TestMemory:
    def test_needed_by_hand(self, folders: dict[str, Path]) -> None:
        config = golden_config("tiny-tied")
        parameters_, window = 681344, 2048
        kv_heads = 1 + 2 + 2 + 2
        assert kv_bytes_per_token(config, 4) == 2 * kv_heads * 32 * 4
        for dtype, item in (("fp32", 4), ("bf16", 2)):
            needed = parameters_ * item + 2 * kv_heads * 32 * item * window
            assert memory_needed(folders["fp32"], dtype) == memory_needed(folders["bf16"], dtype) == needed

    def test_packed_layers_count_as_packed(self, folders: dict[str, Path]) -> None:
        cache = kv_bytes_per_token(golden_config("tiny-tied"), 2) * 2048
        stored = dict(mx.load(str(folders["4bit"] / "model.safetensors")))  # type: ignore[arg-type]
        assert memory_needed(folders["4bit"], "bf16") == sum(t.nbytes for t in stored.values()) + cache

    def test_by_default_in_the_dtype_that_loading_takes(
        self, source: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if CPU:
            cache = kv_bytes_per_token(golden_config("tiny-tied"), 4) * 2048
            monkeypatch.setattr(halves, "possible", lambda: False)
            assert memory_needed(folders["bf16"]) == memory_needed(folders["bf16"], "fp32")
            monkeypatch.setattr(halves, "possible", lambda: True)  # matrices can stay as they are, norms do not
            norms = sum(p.size for n, p in parameters(golden_model("tiny-tied")).items() if "norm" in n)
            assert memory_needed(folders["bf16"]) == 681344 * 2 + norms * 2 + cache
            assert memory_needed(folders["fp32"]) == 681344 * 4 + cache
        monkeypatch.setattr(device, "backend", lambda: "metal")
        assert memory_needed(folders["bf16"]) == memory_needed(folders["bf16"], "bf16")
        assert memory_needed(folders["fp32"]) == memory_needed(folders["fp32"], "fp32")
        assert memory_needed(source) == memory_needed(source, "bf16")  # float32 on disk, cast when loaded

    @pytest.mark.skipif(not CPU, reason="elsewhere everything stays as it is stored")
    @pytest.mark.parametrize("vocab_size", [400, 401])
    def test_it_is_what_loading_takes(self, tmp_path: Path, vocab_size: int) -> None:
        """An odd vocabulary's table cannot stay in bfloat16."""
        source = sources.hf(
            tmp_path / "hf", sources.weights(sources.config(vocab_size=vocab_size)), vocab_size=vocab_size
        )
        folder = convert(source, tmp_path / "bf16", precision="bf16", tokenizer="none").folder
        model = load_model(folder)
        cache = kv_bytes_per_token(model.config, 4) * model.config.max_context_length
        assert memory_needed(folder) == sum(p.nbytes for p in parameters(model).values()) + cache

    def test_refused_with_both_figures(self, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        needed = memory_needed(folders["bf16"], "bf16")
        monkeypatch.setattr(device, "memory", lambda: device.Memory(needed - 1, "what a test allows"))
        with pytest.raises(TooLargeError) as e:
            require_memory(folders["bf16"], "bf16")
        figures = (f"{needed / 1e9:.2f} GB to run", f"{(needed - 1) / 1e9:.2f} GB (what a test allows)", "--force")
        assert all(figure in str(e.value) for figure in figures)
        monkeypatch.setattr(device, "memory", lambda: device.Memory(needed, "what a test allows"))
        require_memory(folders["bf16"], "bf16")
        monkeypatch.setattr(device, "memory", lambda: None)
        require_memory(folders["bf16"], "bf16")


class TestPeakMemory:
    """Of a model of some 60 MB in float32, whose largest tensor is a small part of it."""

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls) -> OpenELMConfig:
        return OpenELMConfig(
            model_dim=512,
            num_transformer_layers=8,
            head_dim=64,
            num_query_heads=(8,) * 8,
            num_kv_heads=(2,) * 8,
            ffn_multipliers=2.0,
            vocab_size=1000,
            share_input_output_layers=True,
        )

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, config: OpenELMConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        root = tmp_path_factory.mktemp("large")
        tensors = {n: np.asarray(p) for n, p in parameters(OpenELM(config)).items()}
        for name in ("safetensors", "bin"):
            (root / name).mkdir()
            (root / name / "config.json").write_text(json.dumps(config.to_dict()))
        save_file(tensors, root / "safetensors" / "model.safetensors")
        save_torch(OrderedDict(tensors), root / "bin" / "pytorch_model.bin")
        made = {name: root / name for name in ("safetensors", "bin")}
        for precision in ("bf16", "4bit"):
            made[precision] = convert(
                root / "safetensors", root / precision, precision=precision, tokenizer="none"
            ).folder
        return made

    @pytest.mark.parametrize(
        ("kind", "dtype"),
        [
            ("safetensors", "bf16"),
            ("safetensors", "fp32"),
            ("bf16", "fp32"),
            ("bf16", "bf16"),
            ("4bit", "fp32"),
            ("4bit", "bf16"),
            ("bin", "bf16"),
            ("bin", "fp32"),
        ],
    )
    def test_never_two_copies(
        self, made: dict[str, Path], kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ahead = 8 << 20
        monkeypatch.setattr("openelm_mlx.loading._READ_AHEAD", ahead)
        held, peak, size, largest = self.measure(made[kind], dtype)
        assert held >= size  # nothing is left for later
        packed = 0.15 * size if kind == "4bit" else 0
        assert peak < size + packed + ahead + 3 * largest, f"{peak / 1e6:.1f} MB for {size / 1e6:.1f} MB"

    @staticmethod
    def measure(folder: Path, dtype: str) -> tuple[int, int, int, int]:
        """Bytes held after loading, peak while loading, bytes of the model, and of its largest tensor in float32."""
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        model = load_model(folder, dtype=dtype)
        held, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
        sizes = [p.nbytes for p in parameters(model).values()]
        return held, peak, sum(sizes), max(p.size for p in parameters(model).values()) * 4
