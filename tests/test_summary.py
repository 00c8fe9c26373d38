"""What is said of a model before it is loaded, against the files that the converter writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openelm_mlx.config import PRESETS
from openelm_mlx.errors import OpenELMError
from openelm_mlx.summary import Summary, summarize
from tests.golden.checkpoints import BUNDLED
from tests.support.models import converted_folder, hf_folder
from tests.support.tokenizers_made import byte_level_folder

GOLDEN = json.loads((BUNDLED / "layer_wise_scaling.json").read_text())
CASES = {
    "OpenELM-270M": "openelm-270m",
    "OpenELM-450M": "openelm-450m",
    "OpenELM-1_1B": "openelm-1.1b",
    "OpenELM-3B": "openelm-3b",
}


def tensor_bytes(folder: Path) -> int:
    """Bytes of all tensors, by the files' own headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        total += len(raw) - 8 - length
    return total


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    found, sizes = summarize(name), GOLDEN[CASES[name]]
    assert found.name == found.preset == name
    assert found.parameters == sizes["parameters"]
    assert [x.query_heads for x in found.layers] == sizes["num_query_heads"]
    assert [x.kv_heads for x in found.layers] == sizes["num_kv_heads"]
    assert [x.ffn_dim for x in found.layers] == sizes["ffn_dims"]
    assert found.embedding_parameters == 32000 * found.config.model_dim
    last_norm = found.config.model_dim
    assert sum(x.parameters for x in found.layers) + found.embedding_parameters + last_norm == found.parameters
    assert found.bytes_by_precision["fp32"] == 4 * found.parameters
    assert found.bytes_by_precision["bf16"] == found.bytes_by_precision["fp16"] == 2 * found.parameters
    assert (found.stored_bytes, found.tokenizer, found.quantization, found.provenance) == (None,) * 4


def test_a_layer_by_hand() -> None:
    layer = summarize("OpenELM-270M").layers[0]
    d, h, h_kv, width, head_dim = 1280, 12, 3, 768, 64
    attention = d * (h + 2 * h_kv) * head_dim + h * head_dim * d + 2 * head_dim
    assert (layer.query_heads, layer.kv_heads, layer.ffn_dim) == (h, h_kv, width)
    assert layer.parameters == attention + 3 * d * width + 2 * d


def test_kv_bytes_by_hand() -> None:
    heads = sum(GOLDEN["openelm-270m"]["num_kv_heads"])
    assert summarize("OpenELM-270M").kv_bytes_per_token == 2 * heads * 64 * 2  # keys and values, 16 bits


@pytest.mark.parametrize("precision", ["fp32", "bf16", "4bit", "8bit"])
@pytest.mark.parametrize("case", ["tiny-tied", "tiny-no-glu"])
def test_sizes_are_those_of_the_files(precision: str, case: str, tmp_path: Path) -> None:
    folder = converted_folder(tmp_path / "m", precision, case=case, group_size=64)
    found = summarize(folder)
    assert found.stored_bytes == tensor_bytes(folder) == sum(found.stored_dtypes.values())
    # The summary of any precision foretells all of them.
    assert found.bytes_by_precision[precision] == found.stored_bytes
    assert found.parameters == GOLDEN[case]["parameters"]


def test_all_precisions_of_an_uneven_case(tmp_path: Path) -> None:
    """Width 96 is no multiple of 64: most layers stay in 16 bits, and the sizes say so."""
    folder = converted_folder(tmp_path / "m", "fp32", case="tiny-untied")
    sizes = summarize(folder).bytes_by_precision
    assert sizes["4bit"] == sizes["8bit"] == sizes["bf16"]


class TestFacts:
    @pytest.fixture
    def found(self, tmp_path: Path) -> Summary:
        tokenizer = byte_level_folder(tmp_path / "tokenizer")
        return summarize(str(converted_folder(tmp_path / "m", "4bit", tokenizer=tokenizer)))

    def test_of_a_packed_folder(self, found: Summary) -> None:
        assert found.preset is None
        assert found.tokenizer == "tokenizer.json"
        assert found.quantization is not None
        assert (found.quantization["bits"], found.quantization["group_size"]) == (4, 32)
        assert found.provenance is not None
        assert found.provenance["precision"] == "4bit"
        assert set(found.stored_dtypes) == {"U32", "BF16"}

    def test_of_an_unconverted_folder(self, tmp_path: Path) -> None:
        found = summarize(hf_folder(tmp_path / "m"))
        assert (found.provenance, found.quantization, found.tokenizer) == (None,) * 3
        assert found.stored_dtypes == {"F32": 681344 * 4}


def test_a_folder_called_like_a_preset_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_folder(tmp_path / "OpenELM-3B")
    assert summarize("OpenELM-3B").config.model_dim == 3072
    monkeypatch.chdir(tmp_path)
    assert summarize("OpenELM-3B").config.model_dim == 128


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(OpenELMError, match="nowhere"):
        summarize(tmp_path / "nowhere")
