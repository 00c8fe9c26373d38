"""PEFT's form of an adapter: ``adapter_model.safetensors`` and ``adapter_config.json``.

Matrices are transposed against ours: ``lora_A.weight`` is ``(rank, in)``, ``lora_B.weight`` ``(out, rank)``,
``lora_embedding_A`` ``(rank, vocab_size)``, ``lora_embedding_B`` ``(model_dim, rank)`` (peft/tuners/lora/layer.py).
PEFT applies DoRA to embeddings too, with one magnitude for each of the `model_dim` columns, taken over the whole
vocabulary (DoraEmbeddingLayer in peft/tuners/lora/dora.py). Ours have plain LoRA there, which is the same thing where
the magnitudes are the adapted columns' own norms.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx import files
from openelm_mlx.adapters import Adapter, AdapterError
from openelm_mlx.adapters.config import positive_number, rank_number
from openelm_mlx.adapters.patterns import layer_pattern
from openelm_mlx.checkpoint import open_file
from openelm_mlx.errors import CheckpointError, OpenELMError
from openelm_mlx.finetune.basemodel import BaseModel
from openelm_mlx.finetune.forms import Update, assembled, difference, target_names
from openelm_mlx.layer_paths import EMBEDDING
from openelm_mlx.rawtensor import RawTensor

TENSORS = "adapter_model.safetensors"
OLD_TENSORS = "adapter_model.bin"
CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."
_PART = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(?:\.weight)?")
_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
_EMBEDDING_NAMES = {"lora_a": "lora_embedding_A", "lora_b": "lora_embedding_B"}

_NUMBER, _FLAG = (int, float), (bool,)
_READ: dict[str, tuple[Any, tuple[type, ...], str]] = {
    "r": (8, (int,), "a whole number"),
    "lora_alpha": (8, _NUMBER, "a number"),
    "lora_dropout": (0.0, _NUMBER, "a number"),
    "use_rslora": (False, _FLAG, "true or false"),
    "use_dora": (False, _FLAG, "true or false"),
    "rank_pattern": ({}, (dict,), "an object"),
    "alpha_pattern": ({}, (dict,), "an object"),
    "bias": ("none", (str,), "text"),
    "init_lora_weights": (True, (bool, str), "true, false or a name"),
}
"""What is read from adapter_config.json: PEFT's default, what it may be, and that in words."""

_SAYS_NOTHING = frozenset(
    (
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors' names say it
        *("inference_mode", "megatron_core", "qalora_group_size"),
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config", "velora_config"),  # of the training alone
    )
)
"""Other keys that do not change what the adapter does. Those that are not here do, or may, if they have a value."""

_KEEPS_THE_BASE = (True, False, "true", "gaussian", "eva", "orthogonal", "mica")
"""Ways of initializing that leave the base's weights alone. The others subtract something from them."""

_MAGNITUDE_TOLERANCE = 1e-3
"""Relative: what rounding the base to bfloat16 can do to a column's norm."""


def to_peft(adapter: Adapter, base: BaseModel | None) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """An adapter's tensors by PEFT's names, and its adapter_config.json.

    Args:
        adapter: any.
        base: the model it is for; needed for DoRA with an embedding adapter.

    Raises:
        AdapterError: `base` is needed and missing, or quantized.
    """
    config = adapter.config
    tensors: dict[str, mx.array] = {}
    for name, value in adapter.tensors.items():
        path, _, part = name.rpartition(".")
        theirs = _EMBEDDING_NAMES if path == EMBEDDING else _NAMES
        tensors[f"{_PREFIX}{path}.{theirs[part]}"] = value.astype(mx.float32).T
    if config.method == "dora" and EMBEDDING in adapter.paths:
        tensors[f"{_PREFIX}{EMBEDDING}.{_NAMES['m']}"] = _column_norms(adapter, base)
    layers = adapter.base["num_transformer_layers"] if adapter.base else None
    return tensors, {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base.hub_name if base else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(target_names(adapter.paths, layers)),
        "task_type": "CAUSAL_LM",
        "use_dora": config.method == "dora",
        "use_rslora": config.rslora,
    }


def _column_norms(adapter: Adapter, base: BaseModel | None) -> mx.array:
    """The norms ``(model_dim,)`` of the adapted embedding's columns: PEFT's DoRA is plain LoRA with these."""
    if base is None or base.packed(EMBEDDING):
        found = "none is given" if base is None else f"the one of {base.folder} is quantized"
        raise AdapterError(
            "PEFT applies DoRA to the embedding too, and its magnitudes are worked out from the base's embedding, but "
            f"{found}: give the unquantized base with --model"
        )
    a, b = (adapter.tensors[f"{EMBEDDING}.{part}"].astype(mx.float32) for part in ("lora_a", "lora_b"))
    return mx.linalg.norm(base.weight(EMBEDDING) + adapter.config.scale * (a @ b), axis=0)


def from_peft(folder: Path, base: BaseModel) -> Adapter:
    """The adapter in a folder that PEFT wrote.

    Layers may differ in rank and alpha (``rank_pattern``, ``alpha_pattern``).

    Raises:
        AdapterError: it is no LoRA or DoRA, has parts that ours have not, or its files contradict each other.
    """
    path = folder / CONFIG
    config = _checked(files.read_json(path, AdapterError), path)
    file = folder / (TENSORS if files.is_there(folder / TENSORS, AdapterError) else OLD_TENSORS)
    try:
        tensors = open_file(file)
    except CheckpointError as e:
        raise AdapterError(str(e)) from None
    parts = _by_layer(tensors, base, file)
    updates = [_update(layer, found, config, file) for layer, found in parts.items()]
    if config["use_dora"]:
        updates = [_plain_embedding(u, base, file) if u.path == EMBEDDING else u for u in updates]
    adapter = assembled(
        updates,
        base.config,
        file,
        dropout=config["lora_dropout"],
        imported_from={"form": "peft", "folder": str(folder), "base_model": config.get("base_model_name_or_path")},
    )
    base.check_fit(adapter, file)
    return adapter


def _checked(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """PEFT's config with the defaults of what is read from it; refused if it describes anything but LoRA or DoRA."""
    defaults = {key: default for key, (default, _, _) in _READ.items()}
    config = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA (DoRA too) is read")
    for key, (_, kinds, wanted) in _READ.items():
        if not isinstance(config[key], kinds) or (isinstance(config[key], bool) and bool not in kinds):
            raise AdapterError(f"{path}: {key} must be {wanted}, not {config[key]!r}")
    if config["bias"] != "none":
        raise AdapterError(f"{path}: bias is {config['bias']!r}, but OpenELM has no biases; only 'none' is read")
    if config["init_lora_weights"] not in _KEEPS_THE_BASE:
        raise AdapterError(
            f"{path}: init_lora_weights is {config['init_lora_weights']!r}, which changes the base's weights too; "
            "save it with path_initial_model_for_weight_conversion to make it a plain LoRA"
        )
    for key, value in config.items():
        if key not in _READ and key not in _SAYS_NOTHING and value:
            raise AdapterError(f"{path}: {key} is {value!r}, for which an adapter here has no place")
    try:
        return {
            **config,
            "r": rank_number("r", config["r"]),
            "lora_alpha": positive_number("lora_alpha", config["lora_alpha"]),
            "rank_pattern": _patterns("rank_pattern", config["rank_pattern"], rank_number),
            "alpha_pattern": _patterns("alpha_pattern", config["alpha_pattern"], positive_number),
        }
    except OpenELMError as e:
        raise AdapterError(f"{path}: {e}") from None


def _patterns(key: str, values: Mapping[str, Any], number: Callable[[str, Any], float]) -> dict[re.Pattern[str], float]:
    """As PEFT matches them: at the end of a path, after a dot (get_pattern_key in peft/utils/other.py)."""
    found: dict[re.Pattern[str], float] = {}
    for pattern, value in values.items():
        try:
            compiled = layer_pattern(pattern, r"(.*\.)?({})$")
        except OpenELMError as e:
            raise OpenELMError(f"{key}: {e}") from None
        found[compiled] = number(f"{key} of {pattern!r}", value)
    return found


def _by_layer(tensors: Mapping[str, RawTensor], base: BaseModel, file: Path) -> dict[str, dict[str, mx.array]]:
    """Layer -> ``lora_A`` and so on. Copies of base weights, which PEFT can put beside them, are only compared."""
    found: dict[str, dict[str, mx.array]] = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix(_PREFIX)
        match = _PART.fullmatch(ours)
        if match and ours != name:
            found.setdefault(match[1], {})[match[2]] = tensor.read()
            continue
        layer = ours.removesuffix(".weight").removesuffix(".base_layer")
        if base.shape(layer) != tensor.shape:
            raise AdapterError(f"{file}: holds {name!r}, which is no part of a LoRA or DoRA adapter of this model")
        gap, same = difference(base.weight(layer), tensor.read(), packed=base.packed(layer))
        if not same:
            raise AdapterError(
                f"{file}: holds {name!r}, a weight of its own that differs from the model's by up to {gap:.3g}; an "
                "adapter here has only low-rank updates"
            )
    return found


def _update(layer: str, parts: dict[str, mx.array], config: Mapping[str, Any], file: Path) -> Update:
    kind = "lora_embedding_" if layer == EMBEDDING else "lora_"
    wanted = [f"{kind}A", f"{kind}B", *(["lora_magnitude_vector"] if config["use_dora"] else [])]
    if sorted(parts) != sorted(wanted):
        raise AdapterError(f"{file}: {layer} has {', '.join(sorted(parts))}, not {', '.join(wanted)}")
    a, b = parts[wanted[0]], parts[wanted[1]]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise AdapterError(f"{file}: {layer}: {a.shape} and {b.shape} are no matrices A and B of one rank")
    rank = _by_pattern(config["rank_pattern"], layer, config["r"])
    if a.shape[0] != rank:
        raise AdapterError(f"{file}: {layer} has rank {a.shape[0]}, but the config says {rank}")
    alpha = _by_pattern(config["alpha_pattern"], layer, config["lora_alpha"])
    return Update(layer, a.T, b.T, alpha, config["use_rslora"], parts.get("lora_magnitude_vector"))


def _by_pattern(patterns: Mapping[re.Pattern[str], float], layer: str, default: float) -> float:
    """The value of the first pattern that matches."""
    for pattern, value in patterns.items():
        if pattern.match(layer):
            return value
    return default


def _plain_embedding(update: Update, base: BaseModel, file: Path) -> Update:
    """The embedding's update without its magnitudes, if they do nothing."""
    a, b, magnitudes = update.a, update.b, update.magnitudes
    finite = all(bool(mx.isfinite(x).all()) for x in (a, b, magnitudes) if x is not None)
    if (a.shape[0], b.shape[1]) != base.shape(EMBEDDING) or not finite:
        return update  # and will be refused as such
    adapted = base.weight(EMBEDDING) + update.scale * (a.astype(mx.float32) @ b.astype(mx.float32))
    norms = mx.linalg.norm(adapted, axis=0)
    if (
        magnitudes is None
        or magnitudes.shape != norms.shape
        or not bool((mx.abs(magnitudes - norms) <= _MAGNITUDE_TOLERANCE * norms).all())
    ):
        quantized = ", or seem so because the model given is quantized" if base.packed(EMBEDDING) else ""
        raise AdapterError(
            f"{file}: its embedding's DoRA magnitudes were trained{quantized}; an embedding here has LoRA only. Merge "
            "it in PEFT (merge_and_unload) and convert the result"
        )
    return dataclasses.replace(update, magnitudes=None)
