"""Loading a model with an adapter."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from openelm_mlx import device
from openelm_mlx.adapters import AdapterError, attach_adapter, read_adapter
from openelm_mlx.loading import (
    TooLargeError,
    load,
    load_model,
    memory_needed,
    require_memory,
    start_loading,
)
from tests.adapters.made import logits, saved, trained_adapter
from tests.loading.made import CPU, PROMPT, packed_layers
from tests.support.models import golden_model


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for the folders' model, trained on bf16."""
    adapter = trained_adapter(golden_model("tiny-tied"), method="dora", precision="bf16")
    return saved(tmp_path_factory.mktemp("runs") / "run1", adapter)


class TestAdapters:
    @pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "4bit"])
    def test_the_model_runs_with_it(
        self, folders: dict[str, Path], kept: Path, precision: str, dtype: str | None
    ) -> None:
        plain, expected = load_model(folders[precision], dtype=dtype), load_model(folders[precision], dtype=dtype)
        attach_adapter(expected, read_adapter(kept), kept)
        for model in (
            load(folders[precision], adapter=str(kept), dtype=dtype)[0],
            load_model(folders[precision], adapter=kept, dtype=dtype),
        ):
            assert not model.training
            assert np.array_equal(logits(model), logits(expected))
            assert np.abs(logits(model) - logits(plain)).max() > 0.1
        assert model(mx.array([PROMPT])).dtype == plain(mx.array([PROMPT])).dtype

    @pytest.mark.skipif(not CPU, reason="a choice of the CPU backend")
    def test_packed_layers_that_stay_packed(self, folders: dict[str, Path], kept: Path) -> None:
        model = load_model(folders["4bit"], adapter=kept, cpu_weights="keep")
        assert packed_layers(model) == 4 * 4 + 1
        unpacked = load_model(folders["4bit"], adapter=kept, cpu_weights="float32")
        np.testing.assert_allclose(logits(model), logits(unpacked), atol=1e-4)

    def test_another_precision_is_noted_and_no_warning(self, folders: dict[str, Path], kept: Path) -> None:
        note = "note: the adapter was trained on bf16 weights, and the model's are 4bit"
        assert start_loading(folders["4bit"], adapter=kept).notes == (note,)
        assert start_loading(folders["bf16"], adapter=kept).notes == ()
        assert start_loading(folders["4bit"]).notes == ()

    def test_the_home_folder_is_known(
        self, folders: dict[str, Path], kept: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(kept.parent))
        assert np.array_equal(
            logits(load(folders["fp32"], adapter="~/run1")[0]), logits(load_model(folders["fp32"], adapter=kept))
        )

    def test_memory_for_it_is_asked_for(
        self, folders: dict[str, Path], kept: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stored = sum(x.nbytes for x in load_file(kept / "adapters.safetensors").values())
        needed = memory_needed(folders["fp32"]) + stored
        assert memory_needed(folders["fp32"], adapter=kept) == needed
        monkeypatch.setattr(device, "memory", lambda: device.Memory(needed - 1, "a test"))
        require_memory(folders["fp32"])
        with pytest.raises(TooLargeError):
            require_memory(folders["fp32"], adapter=kept)

    def test_it_is_looked_for_before_a_model_is_fetched(self, tmp_path: Path) -> None:
        with pytest.raises(AdapterError, match=f"{tmp_path / 'x'}: no such folder; an adapter is a folder"):
            load("nobody/no-such-model", adapter=tmp_path / "x")

    def test_one_that_does_not_fit(self, folders: dict[str, Path], tmp_path: Path) -> None:
        other = saved(tmp_path / "other", trained_adapter(golden_model("tiny-untied")))
        with pytest.raises(AdapterError, match="was trained on a model of another architecture"):
            load_model(folders["fp32"], adapter=other)
