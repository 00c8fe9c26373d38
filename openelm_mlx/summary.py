"""What `openelm inspect` knows of a model, without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from openelm_mlx import files
from openelm_mlx.checkpoint import PROVENANCE, open_weights
from openelm_mlx.config import PRESETS, OpenELMConfig
from openelm_mlx.errors import TokenizerError
from openelm_mlx.loading import config_of, kv_bytes_per_token, parameter_shapes, read_model_config
from openelm_mlx.model import OpenELM
from openelm_mlx.quantize import Quantization, uniform_plan

_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_GROUP_SIZE = 64


@dataclass(frozen=True)
class LayerSummary:
    """Sizes of one decoder layer."""

    layer: int
    query_heads: int
    kv_heads: int
    ffn_dim: int
    parameters: int


@dataclass(frozen=True)
class Summary:
    """Sizes and facts of a model."""

    name: str
    """The folder, or the preset's name."""
    preset: str | None
    """The released size it is, if any."""
    config: OpenELMConfig
    """Its architecture."""
    layers: tuple[LayerSummary, ...]
    """One entry a decoder layer."""
    parameters: int
    """All parameters, tied ones once."""
    embedding_parameters: int
    """Those of the embedding table."""
    bytes_by_precision: dict[str, int]
    """Bytes of the weights at each precision (packed ones with groups of 64)."""
    kv_bytes_per_token: int
    """Bytes of keys and values a position takes, in 16 bits."""
    stored_bytes: int | None = None
    """Bytes of the weight files' tensors; None for a preset."""
    stored_dtypes: dict[str, int] = field(default_factory=dict)
    """Bytes of the stored tensors by dtype."""
    quantization: dict[str, Any] | None = None
    """config.json's entry."""
    provenance: dict[str, Any] | None = None
    """What the conversion recorded."""
    tokenizer: str | None = None
    """The tokenizer file, if there is one."""


def summarize(name_or_path: str | Path, revision: str | None = None) -> Summary:
    """Sizes of a model folder, of a Hub name (at a branch, tag or commit), or of a preset's name.

    Raises:
        OpenELMError: there is no such model, or its files do not fit together.
    """
    if name_or_path in PRESETS and not _is_here(str(name_or_path)):
        return _sizes(str(name_or_path), OpenELMConfig.preset(str(name_or_path)))
    from openelm_mlx import hub

    return _of_folder(hub.resolve(name_or_path, revision=revision))


def _is_here(name: str) -> bool:
    # By listing: a Mac's disk also finds the folder openelm-270m under the name OpenELM-270M.
    try:
        return any(entry.name == name for entry in Path().iterdir())
    except OSError:
        return False


def _of_folder(folder: Path) -> Summary:
    values = read_model_config(folder)
    tensors = open_weights(folder)
    dtypes: dict[str, int] = {}
    for t in tensors.values():
        dtypes[t.dtype] = dtypes.get(t.dtype, 0) + t.nbytes
    tokenizers = [n for n in ("tokenizer.json", "tokenizer.model") if files.is_there(folder / n, TokenizerError)]
    return _sizes(
        str(folder),
        config_of(values, folder / "config.json"),
        stored_bytes=sum(dtypes.values()),
        stored_dtypes=dtypes,
        quantization=values.get("quantization"),
        provenance=values.get(PROVENANCE),
        tokenizer=tokenizers[0] if tokenizers else None,
    )


def _sizes(name: str, config: OpenELMConfig, **facts: Any) -> Summary:
    model = OpenELM(config)
    shapes = parameter_shapes(model)
    sizes = {n: prod(s) for n, s in shapes.items()}
    layers = tuple(
        LayerSummary(
            i,
            config.num_query_heads[i],
            config.num_kv_heads[i],
            config.ffn_dims[i],
            sum(n for key, n in sizes.items() if key.startswith(f"transformer.layers.{i}.")),
        )
        for i in range(config.num_transformer_layers)
    )
    total = sum(sizes.values())
    by_precision = {key: total * item for key, item in _ITEM_BYTES.items()}
    by_precision |= {f"{bits}bit": _packed_bytes(model, shapes, bits) for bits in (8, 4)}
    return Summary(
        name=name,
        preset=config.preset_name,
        config=config,
        layers=layers,
        parameters=total,
        embedding_parameters=sizes["transformer.token_embeddings.weight"],
        bytes_by_precision=by_precision,
        kv_bytes_per_token=kv_bytes_per_token(config, 2),
        **facts,
    )


def _packed_bytes(model: OpenELM, shapes: dict[str, tuple[int, ...]], bits: int) -> int:
    """Weights in `bits`, a 16-bit scale and bias a group; what cannot be packed stays in 16 bits."""
    plan = uniform_plan(model, Quantization(bits, _GROUP_SIZE))
    total = 0
    for name, shape in shapes.items():
        packed = plan.get(name.removesuffix(".weight"))
        total += prod(shape) * bits // 8 + prod(shape) // _GROUP_SIZE * 4 if packed else prod(shape) * 2
    return total
