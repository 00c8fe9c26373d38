"""Small checkpoints in every layout that the converter reads, written by other libraries than ours."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import yaml
from safetensors.numpy import save_file

from tests.support.tokenizers_made import MODEL
from tests.support.torch_writer import BF16, bf16, save_torch

Array = npt.NDArray[Any]
Tensors = dict[str, Array | BF16]

TOKENS = 500
"""Ids of tests/data/tokenizer/tokenizer.model."""

TINY: dict[str, Any] = {
    "num_transformer_layers": 2,
    "model_dim": 64,
    "head_dim": 16,
    "num_gqa_groups": 2,
    "vocab_size": TOKENS,
    "max_context_length": 64,
    "normalize_qk_projections": True,
    "share_input_output_layers": True,
    "ffn_multipliers": [1.0, 2.0],
    "qkv_multipliers": [0.5, 1.0],
    "ffn_dim_divisor": 16,
}
"""Two layers of width 64 with 2 and 4 heads and feed-forward widths 64 and 128."""


def config(**changes: Any) -> dict[str, Any]:
    """:data:`TINY` with changes, as a Hugging Face config."""
    return {"model_type": "openelm", **TINY, **changes}


def shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a two-layer config like :data:`TINY`, worked out by hand for it (Hugging Face's names)."""
    D, h, rows = c["model_dim"], c["head_dim"], c["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"transformer.token_embeddings.weight": (rows, D)}
    for i, (q, kv, ffn) in enumerate(((D // 2 // h, D // 4 // h, D), (D // h, D // 2 // h, 2 * D))):
        p = f"transformer.layers.{i}."
        found |= {f"{p}attn.qkv_proj.weight": ((q + 2 * kv) * h, D), f"{p}attn.out_proj.weight": (D, q * h)}
        found |= {f"{p}attn.{x}_norm.weight": (h,) for x in "qk"} if c["normalize_qk_projections"] else {}
        found |= {f"{p}ffn.proj_1.weight": (2 * ffn, D), f"{p}ffn.proj_2.weight": (D, ffn)}
        found |= {f"{p}attn_norm.weight": (D,), f"{p}ffn_norm.weight": (D,)}
    found["transformer.norm.weight"] = (D,)
    return found if c["share_input_output_layers"] else {**found, "lm_head.weight": (rows, D)}


def weights(c: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Random float32 tensors for a config, under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    return {
        name: (1 + 0.1 * rng.standard_normal(shape) if len(shape) == 1 else 0.2 * rng.standard_normal(shape)).astype(
            np.float32
        )
        for name, shape in shapes(c).items()
    }


def as_float(x: Array | BF16) -> Array:
    """The values of a tensor as float32."""
    if isinstance(x, BF16):
        return (x.bits.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def mixed(tensors: Mapping[str, Array]) -> Tensors:
    """The tensors in float32, float16 and bfloat16 by turns."""
    turns: tuple[Callable[[Array], Array | BF16], ...] = (lambda x: x, lambda x: x.astype(np.float16), bf16)
    return {name: turns[n % 3](x) for n, (name, x) in enumerate(tensors.items())}


def write_safetensors(path: Path, tensors: Mapping[str, Array | BF16]) -> None:
    """By the safetensors library; by MLX where there are bfloat16 tensors, which the library takes in other forms."""
    if not any(isinstance(x, BF16) for x in tensors.values()):
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, path, metadata={"format": "pt"})
        return
    arrays = {
        name: mx.array(x.bits).view(mx.bfloat16) if isinstance(x, BF16) else mx.array(x) for name, x in tensors.items()
    }
    with path.open("wb") as file:  # MLX would add the ending .safetensors to a path
        mx.save_safetensors(file, arrays)


def written(folder: Path) -> dict[str, mx.array]:
    """The tensors of a model.safetensors, as MLX itself reads it."""
    arrays = mx.load(str(folder / "model.safetensors"))
    assert isinstance(arrays, dict)
    return arrays


def write_bin(path: Path, tensors: Mapping[str, Array | BF16]) -> None:
    """As ``torch.save`` writes a state dict."""
    save_torch(OrderedDict(tensors), path, prefix="archive")


def hf(
    folder: Path,
    tensors: Mapping[str, Array | BF16] | None = None,
    *,
    torch: bool = False,
    shards: int = 1,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """A Hugging Face folder: safetensors or ``.bin``, whole or in shards with an index."""
    folder.mkdir(parents=True)
    c = config(**changes)
    tensors = weights(c) if tensors is None else tensors
    stem, suffix, write = (
        ("pytorch_model", ".bin", write_bin) if torch else ("model", ".safetensors", write_safetensors)
    )
    if shards == 1:
        write(folder / f"{stem}{suffix}", tensors)
    else:
        files = {name: f"{stem}-{n % shards + 1:05d}-of-{shards:05d}{suffix}" for n, name in enumerate(tensors)}
        for file in set(files.values()):
            write(folder / file, {name: x for name, x in tensors.items() if files[name] == file})
        index = {"metadata": {"total_size": 1}, "weight_map": files}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(c))
    if tokenizer:
        (folder / "tokenizer.model").write_bytes(MODEL.read_bytes())
    return folder


def corenet_names(tensors: Mapping[str, Array | BF16]) -> Tensors:
    """The same tensors under CoreNet's names."""
    return {
        "classifier.weight" if name == "lm_head.weight" else name.removeprefix("transformer."): x
        for name, x in tensors.items()
    }


def corenet(
    folder: Path,
    tensors: Mapping[str, Array | BF16] | None = None,
    *,
    name: str = "checkpoint.pt",
    wrap: Callable[[OrderedDict[str, Any]], object] = lambda state: state,
    yaml_name: str | None = "openelm.yaml",
    **changes: Any,
) -> Path:
    """A CoreNet ``.pt``, with its YAML beside it unless `yaml_name` is None; returns the path of the ``.pt``."""
    folder.mkdir(parents=True, exist_ok=True)
    c = {**TINY, **changes}
    tensors = weights(c) if tensors is None else tensors
    save_torch(wrap(OrderedDict(corenet_names(tensors))), folder / name, prefix="archive")
    if yaml_name:
        section = {"name": "general_gpt", "general_gpt": {"model_name": "tiny", **c}}
        (folder / yaml_name).write_text(yaml.safe_dump({"model": {"language_modeling": section}}))
    return folder / name
