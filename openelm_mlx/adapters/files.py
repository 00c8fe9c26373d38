"""Adapters in folders: ``adapters.safetensors`` and ``adapter_config.json``, in mlx-lm's form.

Stock mlx-lm loads what is written here (but see `openelm_mlx.finetune.mlxlm` on embeddings), and what its own tuner
wrote is read. Our own facts stand under the key ``openelm_mlx``.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx import files
from openelm_mlx.adapters.attaching import adapter_tensors, attach
from openelm_mlx.adapters.config import KINDS, LINEARS, AdapterConfig, AdapterError, positive_number, rank_number
from openelm_mlx.adapters.layers import EMBEDDINGS, PARTS, shape_of
from openelm_mlx.checkpoint import some_names
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import CheckpointError, OpenELMError
from openelm_mlx.safetensorsfile import read_safetensors
from openelm_mlx.version import __version__
from openelm_mlx.writer import write_json

TENSORS = "adapters.safetensors"
CONFIG = "adapter_config.json"
OWN = "openelm_mlx"
"""The key of adapter_config.json under which our own facts stand."""


@dataclass(frozen=True)
class Adapter:
    """An adapter outside a model."""

    config: AdapterConfig
    tensors: dict[str, mx.array]
    """``lora_a``, ``lora_b`` and DoRA's ``m`` by full name (``transformer.layers.0.attn.qkv_proj.lora_a``); float32."""
    base: dict[str, Any] | None = None
    """The architecture of the model it was made for, as :func:`architecture` tells it; None if that is not known."""
    precision: str | None = None
    """What that model's weights were stored in, as far as known: ``bf16``, ``4bit``, ..."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Further facts on where it comes from: kept, not used."""
    from_mlx_lm: bool = False
    """Whether mlx-lm's tuner wrote it, which means something else by an adapter of tied embeddings."""

    @property
    def paths(self) -> list[str]:
        """The layers it is for."""
        return list(dict.fromkeys(name.rpartition(".")[0] for name in self.tensors))


def architecture(config: OpenELMConfig) -> dict[str, Any]:
    """What has to be equal in two models for an adapter of one to fit the other."""
    return {
        "model_dim": config.model_dim,
        "num_transformer_layers": config.num_transformer_layers,
        "head_dim": config.head_dim,
        "num_query_heads": list(config.num_query_heads),
        "num_kv_heads": list(config.num_kv_heads),
        "ffn_dims": list(config.ffn_dims),
        "ffn_with_glu": config.ffn_with_glu,
        "normalize_qk_projections": config.normalize_qk_projections,
        "vocab_size": config.vocab_size,
        "share_input_output_layers": config.share_input_output_layers,
    }


_LARGEST_SIZE = 1 << 31


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_SIZE


_SIZE = (_is_size, "a whole number above 0")
_SIZES = (lambda value: isinstance(value, list) and all(map(_is_size, value)), "a list of whole numbers above 0")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_BASE_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_dim": _SIZE,
    "num_transformer_layers": _SIZE,
    "head_dim": _SIZE,
    "num_query_heads": _SIZES,
    "num_kv_heads": _SIZES,
    "ffn_dims": _SIZES,
    "ffn_with_glu": _FLAG,
    "normalize_qk_projections": _FLAG,
    "vocab_size": _SIZE,
    "share_input_output_layers": _FLAG,
}
"""What :func:`architecture` gives: whether a value can be that, and what it has to be in words."""


def save_adapter(folder: Path, adapter: Adapter) -> None:
    """Write an adapter's two files into an existing folder.

    To keep an older adapter safe from a killed run, write into :func:`openelm_mlx.atomic.new_folder`'s.
    """
    tensors = {name: value.astype(mx.float32) for name, value in adapter.tensors.items()}
    mx.save_safetensors(str(folder / TENSORS), tensors, metadata={"format": "mlx"})
    write_json(folder / CONFIG, adapter_json(adapter))


def adapter_json(adapter: Adapter) -> dict[str, Any]:
    """adapter_config.json: mlx-lm's keys, which are enough for it, and ours."""
    config = adapter.config
    own = {
        "tool_version": __version__,
        "adapter": {**asdict(config), "targets": list(config.targets)},
        "base": adapter.base,
        "base_precision": adapter.precision,
        **adapter.origin,
    }
    return {
        "fine_tune_type": config.method,
        "num_layers": adapter.base["num_transformer_layers"] if adapter.base else -1,
        "lora_parameters": {
            "rank": config.rank,
            "scale": config.scale,
            "dropout": config.dropout,
            "keys": adapter.paths,
        },
        OWN: own,
    }


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder, of ours or of mlx-lm's tuner.

    Raises:
        AdapterError: there is none, its files are broken or contradict each other, or a number in it is not finite.
    """
    check_folder(folder)
    values = files.read_json(folder / CONFIG, AdapterError)
    own = _object(values, OWN, OWN, folder / CONFIG)
    config = _config(values, own or {}, folder / CONFIG)
    base = _base(own or {}, folder / CONFIG)
    try:
        tensors = {name: t.read().astype(mx.float32) for name, t in read_safetensors(folder / TENSORS).items()}
    except CheckpointError as e:
        raise AdapterError(str(e)) from None
    strange = [name for name in tensors if name.rpartition(".")[2] not in PARTS]
    if strange or not tensors:
        found = f"holds {strange[0]!r}, which is no part of an adapter" if strange else "holds no tensors"
        raise AdapterError(f"{folder / TENSORS}: {found}")
    check_finite(tensors, folder / TENSORS)
    precision = (own or {}).get("base_precision")
    known = ("tool_version", "adapter", "base", "base_precision")
    return Adapter(
        config,
        tensors,
        base,
        precision if isinstance(precision, str) else None,
        {key: value for key, value in (own or {}).items() if key not in known},
        from_mlx_lm=own is None,
    )


def check_finite(tensors: Mapping[str, mx.array], where: str | Path) -> None:
    """Refuse NaN and infinity in an adapter's tensors; `where` names it.

    Raises:
        AdapterError: a tensor has one; the message names the first such.
    """
    finite = {name: mx.isfinite(value).all() for name, value in tensors.items()}
    mx.eval(finite)
    for name, ok in finite.items():
        if not bool(ok):
            raise AdapterError(f"{where}: {name} has NaN or infinity in it, so the adapter is damaged")


def check_folder(folder: Path) -> None:
    """Refuse a folder that has not an adapter's two files; see :func:`read_adapter`."""
    if not folder.is_dir():
        raise AdapterError(f"{folder}: {'is a file' if folder.exists() else 'no such folder'}; an adapter is a folder")
    missing = [name for name in (CONFIG, TENSORS) if not files.is_there(folder / name, AdapterError)]
    if missing:
        raise AdapterError(f"{folder}: is no adapter: {' and '.join(missing)} not there{_hint(folder)}")


def bytes_needed(folder: Path) -> int:
    """Bytes that an adapter's tensors take in memory; 0 where there is nothing that can be read."""
    try:
        return sum(4 * t.size for t in read_safetensors(folder / TENSORS).values())
    except CheckpointError:  # which reading it will tell
        return 0


def _hint(folder: Path) -> str:
    if (folder / "adapter_model.safetensors").is_file():
        return "; it holds a PEFT adapter: openelm adapter import makes it ours"
    if (folder / "config.json").is_file():
        return "; it holds a whole model: use it with --model"
    if (folder / "checkpoints").is_dir():
        return f"; it is a run that has not ended: openelm finetune --resume {folder}"
    return ""


def _object(values: Mapping[str, Any], key: str, name: str, path: Path) -> dict[str, Any] | None:
    """The object under a key; None if there is none."""
    value = values.get(key)
    if value is not None and not isinstance(value, dict):
        raise AdapterError(f"{path}: {name} must be an object, not {reprlib.repr(value)}")
    return value


def _base(own: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    base = _object(own, "base", f"{OWN}.base", path)
    if base is None:
        return None
    for key, (ok, wanted) in _BASE_KINDS.items():
        if not ok(base.get(key)):
            found = f"not {reprlib.repr(base[key])}" if key in base else "and is not there"
            raise AdapterError(f"{path}: {OWN}.base.{key} must be {wanted}, {found}")
    return base


def _config(values: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> AdapterConfig:
    method = values.get("fine_tune_type", "lora")
    if method == "full":
        raise AdapterError(f"{path}: fine_tune_type is full: these are whole weights, not an adapter")
    given = _object(own, "adapter", f"{OWN}.adapter", path)
    parameters = values.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterError(f"{path}: has no lora_parameters (rank, scale, dropout)")
    try:
        rank = rank_number("lora_parameters.rank", parameters["rank"])
        scale = positive_number("lora_parameters.scale", parameters["scale"])
        targets = _names("lora_parameters.keys", parameters.get("keys") or list(LINEARS))
        dropout = parameters.get("dropout", 0.0)
        config = AdapterConfig(method=method, rank=rank, alpha=scale * rank, dropout=dropout, targets=targets)
        if given is None:
            return config
        ours = _own_config(given)
    except KeyError as e:
        raise AdapterError(f"{path}: describes no adapter: it has no {e}") from None
    except OpenELMError as e:
        raise AdapterError(f"{path}: describes no adapter: {e}") from None
    for name in ("method", "rank", "scale"):
        a, b = getattr(config, name), getattr(ours, name)
        if a != b and not (name == "scale" and math.isclose(a, b, rel_tol=1e-6)):
            raise AdapterError(f"{path}: contradicts itself: {name} is {a} for mlx-lm, and {b} under {OWN}")
    return ours


def _own_config(given: Mapping[str, Any]) -> AdapterConfig:
    unknown = set(given) - {f.name for f in fields(AdapterConfig)}
    if unknown:
        raise OpenELMError(f"{OWN}.adapter has an unknown key {min(unknown)!r}")
    targets = _names(f"{OWN}.adapter.targets", given["targets"])
    try:
        return AdapterConfig(**{**given, "targets": targets})
    except OpenELMError as e:
        raise OpenELMError(f"{OWN}.adapter: {e}") from None


def _names(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise OpenELMError(f"{name} must be a list of layers' names, not {reprlib.repr(value)}")
    return tuple(value)


def precision_note(adapter: Adapter, precision: str) -> str | None:
    """One line for the person when the adapter was trained on weights of another precision than the model's."""
    if adapter.precision in (None, precision):
        return None
    return f"note: the adapter was trained on {adapter.precision} weights, and the model's are {precision}"


def attach_adapter(model: nn.Module, adapter: Adapter, where: str | Path) -> None:
    """Put a kept adapter into a model, in place; `where` names it in messages.

    Raises:
        AdapterError: it is for another architecture, or its tensors do not fit the layers or its own rank.
    """
    check_fits(model, adapter, where)
    attach(model, adapter.config, paths=adapter.paths)
    model.load_weights(list(adapter.tensors.items()), strict=False)
    model.eval()


def check_fits(model: nn.Module, adapter: Adapter, where: str | Path) -> None:
    """Refuse an adapter that does not fit a model, which need not be filled; see :func:`attach_adapter`."""
    if adapter.base is not None:
        _check_base(architecture(model.config), adapter.base, where)
    layers = dict(model.named_modules())
    unknown = [path for path in adapter.paths if not isinstance(layers.get(path), KINDS)]
    if unknown:
        raise AdapterError(f"{where}: is for layers that the model does not have: {some_names(unknown)}")
    embeddings = [path for path in adapter.paths if isinstance(layers[path], EMBEDDINGS)]
    if adapter.from_mlx_lm and embeddings and model.config.share_input_output_layers:
        raise AdapterError(
            f"{where}: mlx-lm trained an update of {embeddings[0]} that changes the tied output head too, which here "
            "it would not; run it with mlx-lm, or fuse it there (mlx_lm.fuse)"
        )
    expected = _expected(layers, adapter)
    found = {name: tuple(value.shape) for name, value in adapter.tensors.items()}
    wrong = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "wrong shape": [
            f"{name} is {found[name]}, not {shape}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ],
    }
    problems = [f"{kind} ({len(names)}): {some_names(names)}" for kind, names in wrong.items() if names]
    if problems:
        raise AdapterError(
            f"{where}: its tensors do not fit the model and rank {adapter.config.rank}: {'; '.join(problems)}"
        )


def _expected(layers: dict[str, nn.Module], adapter: Adapter) -> dict[str, tuple[int, ...]]:
    expected: dict[str, tuple[int, ...]] = {}
    for path in adapter.paths:
        rows, columns = shape_of(layers[path])
        rank = adapter.config.rank
        is_embedding = isinstance(layers[path], EMBEDDINGS)
        expected[f"{path}.lora_a"] = (rows if is_embedding else columns, rank)
        expected[f"{path}.lora_b"] = (rank, columns if is_embedding else rows)
        if adapter.config.method == "dora" and not is_embedding:
            expected[f"{path}.m"] = (rows,)
    return expected


def _check_base(model: dict[str, Any], base: dict[str, Any], where: str | Path) -> None:
    different = [f"{key} is {base[key]}, not {model[key]}" for key in model if key in base and model[key] != base[key]]
    if different:
        raise AdapterError(f"{where}: was trained on a model of another architecture: {'; '.join(different)}")


def adapter_from(model: nn.Module, config: AdapterConfig, *, precision: str | None = None, **origin: Any) -> Adapter:
    """The adapter that a model holds."""
    return Adapter(config, adapter_tensors(model), architecture(model.config), precision, origin)
