"""Opening a checkpoint, whatever it comes in: one reader a format, chosen by looking inside."""

from __future__ import annotations

from pathlib import Path

from openelm_mlx.checkpoint import open_file, open_weights, some_files, weight_files
from openelm_mlx.convert.sources.common import Source, open_named
from openelm_mlx.errors import CheckpointError

__all__ = ["Source", "open_source"]


def open_source(path: Path, config_file: Path | None = None) -> Source:
    """Open a Hugging Face folder or a CoreNet checkpoint; no tensor is read, but all names and shapes are checked.

    Args:
        path: a model folder, or one ``.pt``, ``.bin`` or ``.safetensors`` file.
        config_file: CoreNet's YAML or a config.json to use instead of what lies beside the weights.

    Raises:
        CheckpointError: what was found is none of these, or its tensors do not fit the config.
        ConfigError: the config is missing or contradicts itself.
    """
    if not path.is_dir():
        return open_named(path, open_file(path), config_file)
    if weight_files(path):
        return open_named(path, open_weights(path), config_file)
    checkpoints = sorted(path.glob("*.pt"))
    if len(checkpoints) == 1:
        return open_named(checkpoints[0], open_file(checkpoints[0]), config_file)
    raise CheckpointError(
        f"{path}: expected config.json with model*.safetensors or pytorch_model*.bin (Hugging Face), or one .pt file "
        f"(CoreNet); found {some_files(path)}"
    )
