"""CoreNet's adapter checkpoints; `python -m tests.golden` compares their logits with CoreNet's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import yaml

from openelm_mlx.adapters import AdapterError, read_adapter
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.transfer import import_adapter
from tests.finetune.adapters_made import Array, names_of
from tests.golden.adapters import write_checkpoint
from tests.golden.checkpoints import BUNDLED, Checkpoint, weights_module
from tests.support.models import converted_folder
from tests.support.torch_writer import save_torch

QKV = "layers.0.attn.qkv_proj"


def golden_checkpoint(where: Path, case: str = "tiny-tied-lora", **changes: Any) -> tuple[Path, Path]:
    golden = json.loads((BUNDLED / f"{case}-seed0.json").read_text())
    return write_checkpoint(BUNDLED, {**golden, "layers": 4, **changes}, where)


def base_weights(case: str = "tiny-tied", seed: int = 0) -> dict[str, Array]:
    return {name: make() for name, (_, make) in Checkpoint(BUNDLED, case, seed).tensors.items()}


def lora(layer: str = QKV, rank: int = 4, name: str = "lora", rows: int = 128, columns: int = 128) -> dict[str, Array]:
    rng = np.random.default_rng(5)
    return {
        f"{layer}.lora_A.{name}.weight": rng.normal(size=(rank, columns)).astype(np.float32),
        f"{layer}.lora_B.{name}.weight": rng.normal(size=(rows, rank)).astype(np.float32),
    }


def checkpoint(folder: Path, tensors: dict[str, Array]) -> Path:
    save_torch(tensors, folder / "adapter.pt")
    return folder / "adapter.pt"


def yaml_for(folder: Path, **regexes: dict[str, Any]) -> Path:
    common = {"adapter_name": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "use_rslora": False}
    config = [{"regex": f".*{r}.*", "module_type": "linear", "params": {**common, **p}} for r, p in regexes.items()]
    (folder / "adapter.yaml").write_text(yaml.safe_dump({"model": {"lora": {"use_lora": True, "config": config}}}))
    return folder / "adapter.yaml"


def update(folder: Path, layer: str) -> Array:
    """What our adapter adds to a layer's weight, ``(out, in)``."""
    adapter = read_adapter(folder)
    a, b = (np.asarray(adapter.tensors[f"transformer.{layer}.{part}"]) for part in ("lora_a", "lora_b"))
    return adapter.config.scale * (a @ b).T


def test_the_config_and_alpha_say_the_same(tmp_path: Path, tied: Path) -> None:
    file, config = golden_checkpoint(tmp_path / "corenet")
    import_adapter(file, tmp_path / "a", tied, config=config)
    import_adapter(file, tmp_path / "b", tied, alpha=8)
    a, b = read_adapter(tmp_path / "a"), read_adapter(tmp_path / "b")
    assert all(mx.array_equal(t, b.tensors[name]).item() for name, t in a.tensors.items())
    assert (a.config.rank, a.config.alpha, a.config.dropout) == (4, 8, 0.1)
    assert (b.config.rank, b.config.alpha, b.config.dropout) == (4, 8, 0)
    assert a.config.targets == ("qkv_proj", "out_proj", "proj_1", "proj_2")
    assert a.origin["imported_from"] == {"form": "corenet", "file": str(file)}


def test_dora(tmp_path: Path, tied: Path) -> None:
    file, config = golden_checkpoint(tmp_path / "corenet", "tiny-tied-dora")
    import_adapter(file, tmp_path / "ours", tied, config=config)
    adapter = read_adapter(tmp_path / "ours")
    assert adapter.config.method == "dora"
    name = f"{QKV}.lora_magnitude_vector.lora"
    expected = 1 + 0.5 * weights_module(BUNDLED).uniform(name, (128,), 0)
    np.testing.assert_array_equal(np.asarray(adapter.tensors[f"transformer.{QKV}.m"]), expected)


def test_layers_with_other_ranks_and_alphas(tmp_path: Path, tied: Path) -> None:
    tensors = {**lora(rank=2), **lora("layers.0.ffn.proj_1", rank=6)}
    config = yaml_for(
        tmp_path, qkv_proj={"r": 2, "lora_alpha": 12}, **{r"proj_\d": {"r": 6, "lora_alpha": 5, "use_rslora": True}}
    )
    import_adapter(checkpoint(tmp_path, tensors), tmp_path / "ours", tied, config=config)
    for layer, scale in ((QKV, 12 / 2), ("layers.0.ffn.proj_1", 5 / math.sqrt(6))):
        expected = scale * tensors[f"{layer}.lora_B.lora.weight"] @ tensors[f"{layer}.lora_A.lora.weight"]
        np.testing.assert_allclose(update(tmp_path / "ours", layer), expected, rtol=1e-4, atol=1e-4)


def test_an_output_head_of_its_own(tmp_path: Path, untied: Path) -> None:
    tensors = {**base_weights("tiny-untied"), **lora("classifier", rows=320, columns=96)}
    tensors["classifier.base_layer.weight"] = tensors.pop("classifier.weight")
    import_adapter(checkpoint(tmp_path, tensors), tmp_path / "ours", untied, alpha=8)
    assert read_adapter(tmp_path / "ours").paths == ["lm_head"]


def test_padding_of_the_vocabulary_is_left_out(tmp_path: Path, tied: Path) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(4, 576)).astype(np.float32), rng.normal(size=(128, 4)).astype(np.float32)
    embedding = np.concatenate([base_weights()["token_embeddings.weight"], np.zeros((64, 128), np.float32)])
    tensors = {
        "token_embeddings.base_layer.weight": embedding,
        "token_embeddings.lora_embedding_A.lora": a,
        "token_embeddings.lora_embedding_B.lora": b,
    }
    import_adapter(checkpoint(tmp_path, tensors), tmp_path / "ours", tied, alpha=4)
    adapter = read_adapter(tmp_path / "ours")
    np.testing.assert_array_equal(np.asarray(adapter.tensors["transformer.token_embeddings.lora_a"]), a[:, :512].T)
    np.testing.assert_array_equal(np.asarray(adapter.tensors["transformer.token_embeddings.lora_b"]), b.T)


class TestBase:
    """The base weights in the checkpoint against the model's."""

    def said(self, tmp_path: Path, base: Path, tensors: dict[str, Array], **options: Any) -> str:
        lines: list[str] = []
        file = checkpoint(tmp_path, tensors)
        import_adapter(file, tmp_path / "ours", base, alpha=8, say=lines.append, **options)
        (line,) = lines
        return line

    def test_the_same(self, tmp_path: Path, tied: Path) -> None:
        line = self.said(tmp_path, tied, {**base_weights(), **lora()})
        assert line == "base weights: those of the model; largest difference 0"

    def test_in_bfloat16(self, tmp_path: Path) -> None:
        base = converted_folder(tmp_path / "base", "bf16")
        line = self.said(tmp_path, base, {**base_weights(), **lora()})
        assert line.startswith("base weights: those of the model; largest difference 0.00")

    def test_packed(self, tmp_path: Path, packed: Path) -> None:
        line = self.said(tmp_path, packed, {**base_weights(), **lora()})
        assert line.startswith("base weights: those of the model (it is quantized); largest difference 0.0")

    def test_none(self, tmp_path: Path, tied: Path) -> None:
        assert self.said(tmp_path, tied, lora()) == "base weights: the checkpoint holds none to compare"

    def test_progress(self, tmp_path: Path, tied: Path) -> None:
        tensors = base_weights()
        steps: list[tuple[int, int]] = []
        self.said(tmp_path, tied, {**tensors, **lora()}, progress=lambda *step: steps.append(step))
        total = sum(t.nbytes for t in tensors.values())
        assert (len(steps), steps[-1], steps == sorted(steps)) == (len(tensors), (total, total), True)

    @pytest.mark.parametrize("precision", ["fp32", "4bit"])
    def test_another_model(self, tmp_path: Path, tied: Path, packed: Path, precision: str) -> None:
        base = tied if precision == "fp32" else packed
        tensors = {**base_weights(seed=1), **lora()}
        count = f"{len(tensors) - 2}"
        message = rf"another model than .*/base: \d+ of {count} base weights differ by more than rounding.*--any-base"
        with pytest.raises(AdapterError, match=message):
            import_adapter(checkpoint(tmp_path, tensors), tmp_path / "ours", base, alpha=8)
        assert names_of(tmp_path) == {"adapter.pt"}
        assert "differ by more than rounding" in self.said(tmp_path, base, tensors, any_base=True)

    def test_one_weight_that_was_trained_too(self, tmp_path: Path, tied: Path) -> None:
        weights = base_weights()
        weights["layers.2.attn_norm.weight"] = weights["layers.2.attn_norm.weight"] * np.float32(1.02)
        with pytest.raises(AdapterError, match=r"1 of \d+ base weights differ .*transformer\.layers\.2\.attn_norm"):
            import_adapter(checkpoint(tmp_path, {**weights, **lora()}), tmp_path / "ours", tied, alpha=8)

    def test_not_a_number(self, tmp_path: Path, tied: Path) -> None:
        weights = base_weights()
        weights["norm.weight"] = np.full(128, np.nan, np.float32)
        with pytest.raises(AdapterError, match=r"1 of \d+ base weights differ .*transformer\.norm by up to nan"):
            import_adapter(checkpoint(tmp_path, {**weights, **lora()}), tmp_path / "ours", tied, alpha=8)

    def test_another_size(self, tmp_path: Path, tied: Path) -> None:
        tensors = {"layers.0.ffn_norm.weight": np.ones(96, np.float32), **lora()}
        with pytest.raises(AdapterError, match=r"ffn_norm \(96,\), and .*/base has \(128,\)"):
            import_adapter(checkpoint(tmp_path, tensors), tmp_path / "ours", tied, alpha=8)
        tensors = {"layers.0.extra.weight": np.ones(96, np.float32), **lora()}
        with pytest.raises(AdapterError, match="has no such weight"):
            import_adapter(checkpoint(tmp_path, tensors), tmp_path / "ours", tied, alpha=8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (base_weights(), "holds no LoRA or DoRA tensors; to convert a whole model: openelm convert"),
        ({**lora(), **lora("layers.1.attn.out_proj", name="other")}, "several adapters: lora, other"),
        ({f"{QKV}.lora_A.lora.weight": np.ones((4, 128), np.float32)}, "qkv_proj has lora_A, not lora_A and lora_B"),
        ({**lora(), f"{QKV}.lora_B.lora.weight": np.ones((128, 3), np.float32)}, "no matrices A and B of one rank"),
        ({**lora(), f"{QKV}.lora_B.lora.weight": np.ones(128, np.float32)}, "no matrices A and B of one rank"),
        (lora("layers.7.attn.qkv_proj"), r"not have: transformer\.layers\.7\.attn\.qkv_proj"),
        (lora(columns=96), r"qkv_proj\.lora_a is \(96, 4\), not \(128, 4\)"),
        (lora("token_embeddings"), "token_embeddings has lora_A, lora_B, not lora_embedding_A"),
        (
            {
                "token_embeddings.lora_embedding_A.lora": np.ones((4, 512), np.float32),
                "token_embeddings.lora_embedding_B.lora": np.ones((128, 4), np.float32),
                "token_embeddings.lora_magnitude_vector.lora": np.ones(128, np.float32),
            },
            "token_embeddings has lora_embedding_A, lora_embedding_B, lora_magnitude_vector, not",
        ),
        (
            {
                **lora(),
                f"{QKV}.lora_magnitude_vector.lora": np.ones(128, np.float32),
                **lora("layers.1.ffn.proj_1", rows=448),
            },
            r"some layers have DoRA magnitudes and others none: transformer\.layers\.1\.ffn\.proj_1",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_checkpoints_that_are_refused(tmp_path: Path, tied: Path, tensors: dict[str, Array], message: str) -> None:
    file = checkpoint(tmp_path, tensors)
    with pytest.raises(OpenELMError, match=message) as e:
        import_adapter(file, tmp_path / "out", tied, alpha=8)
    assert str(e.value).startswith(str(file))
    assert names_of(tmp_path) == {"adapter.pt"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "not readable as YAML"),
        ("model: {lora: {use_lora: true}}", r"has no section model\.lora\.config"),
        ("- 1", r"has no section model\.lora\.config"),
        (
            "model: {lora: {config: [{regex: .*, params: {r: 4}}]}}",
            r"model\.lora\.config is broken: KeyError: 'lora_alpha'",
        ),
        ("model: {lora: {config: [{regex: '(', params: {r: 4, lora_alpha: 8}}]}}", r"model\.lora\.config is broken"),
        ("model: {lora: {config: [1]}}", r"model\.lora\.config is broken"),
        ("model: {lora: {config: [{regex: .*, params: {r: 4, lora_alpha: much}}]}}", "is broken: ValueError"),
        ("model: {lora: {config: [{regex: .*, params: {r: 3, lora_alpha: 8}}]}}", "has rank 4, but the config says 3"),
        (
            "model: {lora: {config: [{regex: .*out.*, params: {r: 4, lora_alpha: 8}}]}}",
            "for which the config has no entry",
        ),
    ],
    ids=lambda value: value[:60],
)
def test_configs_that_are_refused(tmp_path: Path, tied: Path, text: str, message: str) -> None:
    (tmp_path / "corenet.yaml").write_text(text)
    with pytest.raises(AdapterError, match=message):
        import_adapter(checkpoint(tmp_path, lora()), tmp_path / "out", tied, config=tmp_path / "corenet.yaml")
    assert names_of(tmp_path) == {"adapter.pt", "corenet.yaml"}


def test_the_strength_has_to_be_given_once(tmp_path: Path, tied: Path) -> None:
    file, config = golden_checkpoint(tmp_path / "corenet")
    message = r"--alpha, or CoreNet's YAML with --config, and not both"
    with pytest.raises(OpenELMError, match=message):
        import_adapter(file, tmp_path / "out", tied)
    with pytest.raises(OpenELMError, match=message):
        import_adapter(file, tmp_path / "out", tied, alpha=8, config=config)
