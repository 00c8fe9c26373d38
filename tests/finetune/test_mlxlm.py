"""mlx-lm's form, against stock mlx-lm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx.adapters import LINEARS, AdapterError, read_adapter, save_adapter
from openelm_mlx.finetune.transfer import export_adapter
from openelm_mlx.loading import load_model
from openelm_mlx.tokenizer import Tokenizer
from tests.finetune.adapters_made import (
    EMBEDDING,
    EVERYTHING,
    PROMPT,
    Array,
    distance,
    golden,
    logits,
    names_of,
    random_adapter,
)
from tests.support.models import converted_folder
from tests.support.tokenizers_made import MODEL


def kept(folder: Path, case: str = "tiny-tied", **settings: Any) -> Path:
    folder.mkdir()
    save_adapter(folder, random_adapter(golden(case), **settings))
    return folder


def in_mlxlm(model: Path, adapter: Path) -> Array:
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model as their_load

    loaded, _ = their_load(model)
    loaded.set_dtype(mx.float32)
    with_adapter: Any = load_adapters(loaded, str(adapter))
    with_adapter.eval()
    return np.asarray(with_adapter(mx.array([PROMPT]))[0].astype(mx.float32))


def in_ours(model: Path, adapter: Path) -> Array:
    loaded = load_model(model, dtype="float32")
    return logits(loaded, read_adapter(adapter))


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_linear_targets(tmp_path: Path, tied: Path, method: str) -> None:
    adapter = kept(tmp_path / "ours", method=method, targets=LINEARS, rslora=True)
    lines: list[str] = []
    export_adapter(adapter, tmp_path / "theirs", "mlx-lm", say=lines.append)
    assert lines == []
    assert names_of(tmp_path / "theirs") == {"adapters.safetensors", "adapter_config.json"}
    expected = in_ours(tied, adapter)
    assert distance(in_mlxlm(tied, tmp_path / "theirs"), expected) <= 2e-5
    assert distance(expected, logits(golden())) > 0.1


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_embedding_that_is_tied(tmp_path: Path, tied: Path, method: str) -> None:
    adapter = kept(tmp_path / "ours", method=method, targets=EVERYTHING)
    out = tmp_path / "theirs"
    lines: list[str] = []
    export_adapter(adapter, out, "mlx-lm", model=tied, say=lines.append)
    (line,) = lines
    assert line.endswith(f"a copy of the model: mlx_lm.load('{out / 'base'}', adapter_path='{out}')")
    expected = in_ours(tied, adapter)
    assert distance(in_mlxlm(out / "base", out), expected) <= 2e-5
    if method == "lora":  # why the copy is needed
        assert distance(in_mlxlm(tied, out), expected) > 0.1


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_embedding_that_is_tied_and_packed(tmp_path: Path, packed: Path, method: str) -> None:
    adapter = kept(tmp_path / "ours", method=method, targets=EVERYTHING, alpha=1)
    out = tmp_path / "theirs"
    export_adapter(adapter, out, "mlx-lm", model=packed)
    values = json.loads((out / "base" / "config.json").read_text())
    assert values["share_input_output_layers"] is False
    assert (values["quantization"].get(EMBEDDING) is False) is (method == "dora")
    expected = in_ours(packed, adapter)
    # The embedding's unpacked values are rounded to bfloat16.
    assert distance(in_mlxlm(out / "base", out), expected) <= (1e-5 if method == "lora" else 0.03)
    assert distance(expected, logits(load_model(packed, dtype="float32"))) > 0.1


def test_a_layer_kept_out_of_the_packing(tmp_path: Path, packed: Path) -> None:
    """The head is packed or not as the embedding was."""
    base = Path(shutil.copytree(packed, tmp_path / "base"))
    values = json.loads((base / "config.json").read_text())
    values["quantization"][EMBEDDING] = False
    (base / "config.json").write_text(json.dumps(values))
    tensors: dict[str, Any] = dict(mx.load(str(base / "model.safetensors")))  # type: ignore[arg-type]
    for part in ("scales", "biases"):
        del tensors[f"{EMBEDDING}.{part}"]
    tensors[f"{EMBEDDING}.weight"] = golden().transformer.token_embeddings.weight
    mx.save_safetensors(str(base / "model.safetensors"), tensors)
    adapter = kept(tmp_path / "ours", targets=("token_embeddings",))
    export_adapter(adapter, tmp_path / "theirs", "mlx-lm", model=base)
    assert distance(in_ours(tmp_path / "theirs" / "base", tmp_path / "theirs"), in_ours(base, adapter)) <= 1e-5


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_embedding_that_is_not_tied(tmp_path: Path, untied: Path, method: str) -> None:
    adapter = kept(tmp_path / "ours", "tiny-untied", method=method, targets=(*EVERYTHING, "lm_head"))
    out = tmp_path / "theirs"
    export_adapter(adapter, out, "mlx-lm", model=untied)
    assert names_of(out) == {"adapters.safetensors", "adapter_config.json"}
    assert distance(in_mlxlm(untied, out), in_ours(untied, adapter)) <= 2e-5


def test_what_needs_the_model(tmp_path: Path) -> None:
    tied_one = kept(tmp_path / "a", targets=EVERYTHING)
    with pytest.raises(AdapterError, match=r"tied output head as well.*give the base with --model, and an untied copy"):
        export_adapter(tied_one, tmp_path / "out", "mlx-lm")
    with_dora = kept(tmp_path / "b", "tiny-untied", targets=EVERYTHING, method="dora")
    with pytest.raises(AdapterError, match=r"applies DoRA to the embedding too.*give the base with --model"):
        export_adapter(with_dora, tmp_path / "out", "mlx-lm")
    plain = kept(tmp_path / "c", "tiny-untied", targets=EVERYTHING)
    export_adapter(plain, tmp_path / "out", "mlx-lm")
    assert read_adapter(tmp_path / "out").base == read_adapter(plain).base


def test_the_copy_has_the_tokenizer_and_tells_where_it_is_from(tmp_path: Path) -> None:
    base = converted_folder(tmp_path / "base", "bf16", tokenizer=MODEL)
    (base / "generation_config.json").write_text('{"eos_token_id": 2}')
    export_adapter(kept(tmp_path / "ours", targets=EVERYTHING), tmp_path / "out", "mlx-lm", model=base)
    copy = tmp_path / "out" / "base"
    theirs, ours = Tokenizer.from_folder(copy), Tokenizer.from_folder(base)
    assert theirs and ours
    assert theirs.encode("Once upon a time") == ours.encode("Once upon a time")
    assert (copy / "generation_config.json").read_text() == '{"eos_token_id": 2}'
    before, after = (json.loads((f / "config.json").read_text())["openelm_mlx"] for f in (base, copy))
    assert after == {**before, "untied_by": after["untied_by"]}
