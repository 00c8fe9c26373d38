"""What every reader gives: a config, and tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from openelm_mlx.checkpoint import check_names, some_names
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import CheckpointError
from openelm_mlx.loading import parameter_shapes
from openelm_mlx.model import OpenELM
from openelm_mlx.rawtensor import RawTensor


@dataclass(frozen=True)
class Source:
    """An opened checkpoint. No tensor is in memory."""

    kind: str
    """``huggingface`` or ``corenet``."""
    folder: Path
    """Where a tokenizer and a generation config may lie beside the weights."""
    files: tuple[Path, ...]
    """The weight files."""
    config: OpenELMConfig
    """Its architecture."""
    tensors: Mapping[str, RawTensor]
    """Hugging Face name -> place in a file, in the model's order."""


def open_named(path: Path, tensors: Mapping[str, RawTensor], config_file: Path | None) -> Source:
    """Recognise a checkpoint by its tensors' names, read its config, and check that the two fit."""
    from openelm_mlx.convert.sources import corenet, huggingface

    folder = path if path.is_dir() else path.parent
    files = tuple(sorted({t.path for t in tensors.values()}))
    for reader in (huggingface, corenet):
        if reader.recognises(tensors):
            named = reader.rename(tensors)
            config = reader.read_config(folder, config_file, named)
            return _checked(Source(reader.KIND, folder, files, config, named), path)
    raise CheckpointError(
        f"{path}: these are not OpenELM's tensors (found {some_names(tensors)}; expected "
        "transformer.token_embeddings.weight as in Hugging Face's release, or token_embeddings.weight as in CoreNet's)"
    )


def _checked(source: Source, path: Path) -> Source:
    expected = parameter_shapes(OpenELM(source.config))
    check_names(path, {n: t.shape for n, t in source.tensors.items()}, expected)
    for name, tensor in source.tensors.items():
        if tensor.dtype not in ("F32", "F16", "BF16", "F64"):
            raise CheckpointError(f"{path}: tensor {name!r} is {tensor.dtype}; weights are floating-point numbers")
    return replace(source, tensors={name: source.tensors[name] for name in expected})
