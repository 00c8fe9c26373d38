"""Export and import against PEFT itself, on a PyTorch module with OpenELM's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx.adapters import LINEARS, adapters_of, attach_adapter, read_adapter, save_adapter
from openelm_mlx.finetune.transfer import export_adapter, import_adapter
from tests.finetune.adapters_made import EMBEDDING, EVERYTHING, Array, golden, random_adapter

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore"),  # PEFT's and PyTorch's own
]

SETTINGS: list[dict[str, Any]] = [
    {"targets": LINEARS},
    {"targets": LINEARS, "rslora": True},
    {"targets": LINEARS, "method": "dora"},
    {"targets": EVERYTHING},
    {"targets": EVERYTHING, "rslora": True},
    {"targets": EVERYTHING, "method": "dora"},
    {"targets": ("proj_1", "token_embeddings"), "layers": "1,3"},
]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def torch_module(torch: Any) -> Any:
    """The golden model's projections and embedding under their names, with nothing between them."""
    root = torch.nn.Module()
    for path, layer in golden().named_modules():
        if not hasattr(layer, "weight") or layer.weight.ndim != 2:
            continue
        rows, columns = layer.weight.shape
        made = torch.nn.Embedding(rows, columns) if path == EMBEDDING else torch.nn.Linear(columns, rows, bias=False)
        made.weight = torch.nn.Parameter(torch.from_numpy(np.array(layer.weight)))
        where, names = root, path.split(".")
        for name in names[:-1]:
            if not hasattr(where, name):
                where.add_module(name, torch.nn.Module())
            where = getattr(where, name)
        where.add_module(names[-1], made)
    root.prepare_inputs_for_generation = None  # asked for, not used
    return root.eval()


def outputs(torch: Any, peft_model: Any, adapter_folder: Path) -> dict[str, tuple[Array, Array]]:
    """Layer -> what PEFT's and what our layer make of the same inputs; for all layers that have an adapter in ours."""
    model = golden()
    attach_adapter(model, read_adapter(adapter_folder), adapter_folder)
    rng = np.random.default_rng(7)
    found: dict[str, tuple[Array, Array]] = {}
    for path, layer in adapters_of(model).items():
        theirs = peft_model.base_model.model.get_submodule(path)
        width = layer.base.weight.shape[1]
        x: Any = np.arange(512) if path == EMBEDDING else rng.normal(size=(5, width)).astype(np.float32)
        with torch.no_grad():
            expected = theirs(torch.from_numpy(x)).numpy()
        found[path] = (expected, np.asarray(layer(mx.array(x))))
    return found


def assert_same(found: dict[str, tuple[Array, Array]]) -> None:
    for path, (theirs, ours) in found.items():
        assert np.abs(theirs - ours).max() <= 2e-5 * max(1, np.abs(theirs).max()), path


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_peft_loads_what_was_exported(
    torch: Any, peft: Any, tmp_path: Path, tied: Path, settings: dict[str, Any]
) -> None:
    (tmp_path / "ours").mkdir()
    adapter = random_adapter(golden(), **settings)
    save_adapter(tmp_path / "ours", adapter)
    export_adapter(tmp_path / "ours", tmp_path / "peft", "peft", model=tied)
    loaded = peft.PeftModel.from_pretrained(torch_module(torch), str(tmp_path / "peft")).eval()
    assert_same(outputs(torch, loaded, tmp_path / "ours"))
    with_adapter = {n.split(".lora_")[0] for n in loaded.base_model.model.state_dict() if ".lora_" in n}
    assert with_adapter == set(adapter.paths)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_peft_saved_is_imported(
    torch: Any, peft: Any, tmp_path: Path, tied: Path, settings: dict[str, Any]
) -> None:
    layers = settings.get("layers")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=12,
        target_modules=list(settings["targets"]),
        use_dora=settings.get("method") == "dora",
        use_rslora=settings.get("rslora", False),
        rank_pattern={"proj_1": 5, r"layers\.0\.attn\.qkv_proj": 2},
        alpha_pattern={"proj_1": 7},
        layers_to_transform=[int(n) for n in layers.split(",")] if layers else None,
        layers_pattern="layers" if layers else None,
    )
    model = peft.get_peft_model(torch_module(torch), config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude_vector" in name and "token_embeddings" not in name:
                parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.4))
            elif "lora_" in name and "magnitude" not in name:
                parameter.normal_(std=0.25)
        if config.use_dora and "token_embeddings" in settings["targets"]:
            embedding = model.base_model.model.transformer.token_embeddings
            adapted = embedding.get_base_layer().weight + embedding.get_delta_weight("default")
            embedding.lora_magnitude_vector["default"].weight.copy_(adapted.norm(dim=0))
    model.save_pretrained(str(tmp_path / "peft"))
    import_adapter(tmp_path / "peft", tmp_path / "ours", tied)
    assert_same(outputs(torch, model, tmp_path / "ours"))


def test_an_embedding_saved_along_is_no_hindrance(torch: Any, peft: Any, tmp_path: Path, tied: Path) -> None:
    root = torch_module(torch)
    root.get_input_embeddings = lambda: root.transformer.token_embeddings
    root.get_output_embeddings = lambda: None
    model = peft.get_peft_model(root, peft.LoraConfig(r=4, target_modules=["token_embeddings", "qkv_proj"])).eval()
    model.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=True)
    import_adapter(tmp_path / "peft", tmp_path / "ours", tied)
    assert len(read_adapter(tmp_path / "ours").paths) == 5
