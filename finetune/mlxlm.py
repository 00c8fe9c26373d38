"""mlx-lm's form of an adapter, which is ours, and the one place where mlx-lm means something else by it.

An adapter of the embedding changes a tied output head too in mlx-lm (LoRAEmbedding.as_linear in
mlx_lm/tuner/lora.py), and with DoRA it gives the embedding magnitudes, if it is not quantized (mlx_lm/tuner/dora.py).
With a copy of the base that is untied and whose embedding is not quantized, and with magnitudes that do nothing, mlx-lm
computes what we compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.adapters import Adapter, AdapterError
from openelm_mlx.checkpoint import PROVENANCE, copy_generation
from openelm_mlx.dtypes import STORED
from openelm_mlx.errors import CheckpointError
from openelm_mlx.finetune.basemodel import BaseModel
from openelm_mlx.layer_paths import EMBEDDING, HEAD
from openelm_mlx.rawtensor import RawTensor
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.version import __version__
from openelm_mlx.writer import TensorSpec, write_json, write_weights


def needs_own_base(adapter: Adapter, base: BaseModel | None) -> bool:
    """Whether mlx-lm computes something else with the adapter on its base, and right with a copy by `write_base`.

    Raises:
        AdapterError: it does, or magnitudes have to be worked out from the base, and no base is given.
    """
    if EMBEDDING not in adapter.paths:
        return False
    facts = adapter.base or {}
    tied = base.config.share_input_output_layers if base else facts.get("share_input_output_layers", True)
    if base is None and tied:
        raise AdapterError(
            "mlx-lm adds the embedding's adapter to the tied output head as well, which gives other logits than the "
            "ones trained; give the base with --model, and an untied copy of it is written beside the adapter"
        )
    if base is None and adapter.config.method == "dora":
        raise AdapterError(
            "mlx-lm applies DoRA to the embedding too, and its magnitudes are worked out from the base's embedding; "
            "give the base with --model"
        )
    return bool(tied) or (base is not None and _unpacks(adapter, base))


def _unpacks(adapter: Adapter, base: BaseModel) -> bool:
    return adapter.config.method == "dora" and base.packed(EMBEDDING)


def to_mlxlm(adapter: Adapter, base: BaseModel | None) -> Adapter:
    """The adapter as mlx-lm has to be given it, for the copy of the base if :func:`needs_own_base` says so."""
    if EMBEDDING not in adapter.paths:
        return adapter
    facts = {**adapter.base, "share_input_output_layers": False} if adapter.base else None
    tensors = dict(adapter.tensors)
    if adapter.config.method == "dora" and base is not None:
        a, b = tensors[f"{EMBEDDING}.lora_a"], tensors[f"{EMBEDDING}.lora_b"]
        rows = base.weight(EMBEDDING).astype(_float(base, EMBEDDING)) + adapter.config.scale * (a @ b)
        tensors[f"{EMBEDDING}.m"] = mx.linalg.norm(rows, axis=1)
    return dataclasses.replace(adapter, tensors=tensors, base=facts)


def write_base(base: BaseModel, adapter: Adapter, folder: Path) -> None:
    """Write a copy of a model into an existing, empty folder, for mlx-lm to load with an adapter of the embedding.

    The output head becomes a matrix of its own, with the embedding's values. For DoRA a quantized embedding, though not
    the head, is written in floating point.

    Raises:
        CheckpointError: the weights cannot be read, or are stored in a dtype that cannot be written.
    """
    written = _unpacked(base) if _unpacks(adapter, base) else _copied(base)
    if base.config.share_input_output_layers:
        own = {f"{HEAD}{n.removeprefix(EMBEDDING)}": t for n, t in base.tensors.items() if n.startswith(EMBEDDING)}
        written |= {name: (_spec(base, name, tensor), tensor.read) for name, tensor in own.items()}
    write_weights(folder, [spec for spec, _ in written.values()], (read() for _, read in written.values()))
    write_json(folder / "config.json", _config(base, adapter))
    if tokenizer := Tokenizer.from_folder(base.folder):
        tokenizer.save(folder)
    copy_generation(base.folder, folder)


_Written = dict[str, tuple[TensorSpec, Callable[[], mx.array]]]


def _copied(base: BaseModel) -> _Written:
    return {name: (_spec(base, name, tensor), tensor.read) for name, tensor in base.tensors.items()}


def _unpacked(base: BaseModel) -> _Written:
    """All tensors as they are, but the embedding in floating point."""
    name, dtype, shape = f"{EMBEDDING}.weight", _float(base, EMBEDDING), base.shape(EMBEDDING)
    assert shape is not None
    others = {n: item for n, item in _copied(base).items() if not n.startswith(f"{EMBEDDING}.")}
    return {name: (TensorSpec(name, dtype, shape), lambda: base.weight(EMBEDDING).astype(dtype)), **others}


def _spec(base: BaseModel, name: str, tensor: RawTensor) -> TensorSpec:
    if tensor.dtype not in STORED:
        raise CheckpointError(f"{base.folder}: {name} is stored as {tensor.dtype}, which cannot be copied; convert it")
    return TensorSpec(name, STORED[tensor.dtype], tensor.shape)


def _float(base: BaseModel, path: str) -> mx.Dtype:
    """What a layer's weight is in floating point: as stored, or as its scales are."""
    return STORED[base.tensors[f"{path}.{'scales' if base.packed(path) else 'weight'}"].dtype]


def _config(base: BaseModel, adapter: Adapter) -> dict[str, Any]:
    values = {**base.values, "share_input_output_layers": False}
    values[PROVENANCE] = {**base.values.get(PROVENANCE, {}), "untied_by": __version__}
    if quantization := values.get("quantization"):
        tied = base.config.share_input_output_layers and EMBEDDING in quantization
        own = {HEAD: quantization[EMBEDDING]} if tied else {}
        unpacked = {EMBEDDING: False} if _unpacks(adapter, base) else {}
        values["quantization"] = {**quantization, **own, **unpacked}
    return values
