"""CoreNet's checkpoints of LoRA and DoRA: the base's weights and the adapter's in one ``.pt`` file.

Names (corenet/third_party/modeling/lora.py): ``layers.0.attn.qkv_proj.base_layer.weight``, ``.lora_A.lora.weight``
``(rank, in)``, ``.lora_B.lora.weight`` ``(out, rank)``, ``.lora_magnitude_vector.lora`` ``(out,)``, and of the
embedding ``.lora_embedding_A.lora`` ``(rank, vocab_size)`` and ``.lora_embedding_B.lora`` ``(model_dim, rank)``;
``lora`` is the adapter's name. The strength, ``lora_alpha``, is in the training config alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_mlx import files
from openelm_mlx.adapters import Adapter, AdapterError
from openelm_mlx.adapters.config import positive_number
from openelm_mlx.adapters.patterns import layer_pattern
from openelm_mlx.checkpoint import open_file
from openelm_mlx.config import MAX_PADDING_ROWS
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.basemodel import BaseModel
from openelm_mlx.finetune.forms import Update, assembled, difference
from openelm_mlx.layer_paths import EMBEDDING, HEAD
from openelm_mlx.rawtensor import RawTensor

_PART = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)\.([^.]+?)(?:\.weight)?"
)
_MAX_YAML_BYTES = 1_000_000


@dataclass(frozen=True)
class Strength:
    """What CoreNet's config says of some layers' updates."""

    alpha: float
    rslora: bool = False
    dropout: float = 0.0
    rank: int | None = None
    """None: not said."""
    pattern: re.Pattern[str] = re.compile("")
    """The beginning of these layers' names matches it; by default any."""


def read_strengths(path: Path) -> list[Strength]:
    """The section ``model.lora.config`` of CoreNet's YAML.

    Raises:
        AdapterError: the file is no YAML, or has no such section.
    """
    import yaml

    data = files.read(path, AdapterError, _MAX_YAML_BYTES)
    try:
        values = yaml.safe_load(data.decode("utf-8"))
    except Exception as e:  # besides YAMLError, whatever PyYAML's constructors raise
        raise AdapterError(f"{path}: not readable as YAML: {' '.join(str(e).split())}") from None
    for key in ("model", "lora", "config"):
        values = values.get(key) if isinstance(values, dict) else None
    if not isinstance(values, list) or not values:
        raise AdapterError(f"{path}: has no section model.lora.config, so it is no CoreNet config of an adapter")
    try:
        return [_strength(entry["regex"], entry["params"]) for entry in values]
    except OpenELMError as e:
        raise AdapterError(f"{path}: model.lora.config is broken: {e}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise AdapterError(f"{path}: model.lora.config is broken: {type(e).__name__}: {e}") from None


def _strength(regex: str, params: Mapping[str, Any]) -> Strength:
    return Strength(
        positive_number("lora_alpha", float(params["lora_alpha"])),
        bool(params.get("use_rslora", False)),
        float(params.get("lora_dropout", 0.0)),
        int(params["r"]),
        layer_pattern(regex),
    )


def from_corenet(
    file: Path,
    base: BaseModel,
    strengths: list[Strength],
    *,
    any_base: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Adapter:
    """The adapter in a CoreNet checkpoint.

    Args:
        file: the ``.pt``.
        base: the model it is for. The base weights in the checkpoint are compared with its own.
        strengths: alpha by layer; the first one whose pattern matches counts.
        any_base: take it even if those weights differ.
        say: gets a line about what was found.
        progress: gets the bytes of base weights compared, and all of them.

    Raises:
        AdapterError: there is no adapter in it, it does not fit the model, or its base weights are others.
        CheckpointError: the file cannot be read.
    """
    found: dict[str, dict[str, RawTensor]] = {}
    weights: dict[str, RawTensor] = {}
    names: set[str] = set()
    for name, tensor in open_file(file).items():
        if match := _PART.fullmatch(name):
            found.setdefault(_path(match[1]), {})[match[2]] = tensor
            names.add(match[3])
        else:
            weights[_path(name.removesuffix(".weight").removesuffix(".base_layer"))] = tensor
    if len(names) > 1:
        raise AdapterError(f"{file}: holds several adapters: {', '.join(sorted(names))}; only one can be read")
    if not found:
        raise AdapterError(f"{file}: holds no LoRA or DoRA tensors; to convert a whole model: openelm convert")
    updates = [_update(path, parts, base, strengths, file) for path, parts in found.items()]
    dropouts = {_strength_for(path, strengths, file).dropout for path in found}
    adapter = assembled(
        updates,
        base.config,
        file,
        dropout=dropouts.pop() if len(dropouts) == 1 else 0.0,
        imported_from={"form": "corenet", "file": str(file)},
    )
    base.check_fit(adapter, file)
    _compare(weights, base, file, any_base, say, progress)
    return adapter


def _path(name: str) -> str:
    return HEAD if name == "classifier" else f"transformer.{name}"


def _update(path: str, parts: dict[str, RawTensor], base: BaseModel, strengths: list[Strength], file: Path) -> Update:
    kind = "lora_embedding_" if path == EMBEDDING else "lora_"
    magnitudes = parts.get("lora_magnitude_vector") if path != EMBEDDING else None
    if set(parts) - {"lora_magnitude_vector" if magnitudes else ""} != {f"{kind}A", f"{kind}B"}:
        raise AdapterError(f"{file}: {path} has {', '.join(sorted(parts))}, not {kind}A and {kind}B")
    a, b = parts[f"{kind}A"], parts[f"{kind}B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise AdapterError(f"{file}: {path}: {a.shape} and {b.shape} are no matrices A and B of one rank")
    strength = _strength_for(path, strengths, file)
    if strength.rank not in (None, a.shape[0]):
        raise AdapterError(f"{file}: {path} has rank {a.shape[0]}, but the config says {strength.rank}")
    inputs = a.read().T
    if path == EMBEDDING and _is_padded((a.shape[1],), base):
        inputs = inputs[: base.config.vocab_size]
    return Update(path, inputs, b.read().T, strength.alpha, strength.rslora, magnitudes.read() if magnitudes else None)


def _strength_for(path: str, strengths: list[Strength], file: Path) -> Strength:
    name = path.removeprefix("transformer.")
    for strength in strengths:
        if strength.pattern.match(name):
            return strength
    raise AdapterError(f"{file}: has an adapter of {name}, for which the config has no entry")


def _is_padded(shape: tuple[int, ...], base: BaseModel) -> bool:
    """Whether the first dimension is the vocabulary and some padding."""
    return len(shape) > 0 and 0 < shape[0] - base.config.vocab_size <= MAX_PADDING_ROWS


def _compare(
    weights: Mapping[str, RawTensor],
    base: BaseModel,
    file: Path,
    any_base: bool,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Refuse a checkpoint whose base weights are not the model's."""
    if not weights:
        say("base weights: the checkpoint holds none to compare")
        return
    done, total = 0, sum(t.nbytes for t in weights.values())
    found: dict[str, tuple[float, bool]] = {}
    for path, tensor in weights.items():
        found[path] = _difference(path, tensor, base, file)
        done += tensor.nbytes
        progress(done, total)
    others = sum(not same for _, same in found.values())
    where = max(found, key=lambda path: (math.isnan(found[path][0]), found[path][0]))
    largest = found[where][0]
    if others and not any_base:
        raise AdapterError(
            f"{file}: was trained on another model than {base.folder}: {others} of {len(found)} base weights differ by "
            f"more than rounding, {where} by up to {largest:.3g}; name the right one with --model, or take it all the "
            "same with --any-base"
        )
    verdict = f"{others} of {len(found)} differ by more than rounding" if others else "those of the model"
    quantized = " (it is quantized)" if any(base.packed(path) for path in found) else ""
    at = "" if largest == 0 else f", in {where}"
    say(f"base weights: {verdict}{quantized}; largest difference {largest:.3g}{at}")


def _difference(path: str, tensor: RawTensor, base: BaseModel, file: Path) -> tuple[float, bool]:
    shape, rows = base.shape(path), tensor.shape[:1]
    if path in (EMBEDDING, HEAD) and _is_padded(tensor.shape, base):
        rows = (base.config.vocab_size,)
    if shape != (*rows, *tensor.shape[1:]):
        what = "has no such weight" if shape is None else f"has {shape}"
        raise AdapterError(f"{file}: its base has a weight {path} {tensor.shape}, and {base.folder} {what}")
    return difference(base.weight(path), tensor.read()[: rows[0]], packed=base.packed(path))
