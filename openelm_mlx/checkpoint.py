"""Reading a model folder: its config, its weight files, and that they fit each other.

Hugging Face's and mlx-lm's layouts: ``model.safetensors`` or shards with an index, or ``pytorch_model.bin`` likewise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from openelm_mlx.errors import CheckpointError, ConfigError
from openelm_mlx.rawtensor import RawTensor
from openelm_mlx.safetensorsfile import is_safetensors, read_safetensors

PROVENANCE = "openelm_mlx"
"""The key of config.json under which a conversion's own facts are kept."""

_LISTED = 12
"""Names listed of each kind of mismatch before the rest is counted."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; a ConfigError that names the file and the place otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: not readable as JSON: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is needed, not a {type(value).__name__}")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, safetensors preferred.

    Raises:
        CheckpointError: there are none, or an index names one that is missing.
    """
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = folder / f"{stem}{suffix}.index.json"
        single = folder / f"{stem}{suffix}"
        if index.is_file():
            return _indexed_files(index)
        if single.is_file():
            return [single]
        if found := sorted(folder.glob(f"{stem}*{suffix}")):
            return found
    names = sorted(p.name for p in folder.iterdir())[:_LISTED]
    raise CheckpointError(
        f"{folder}: no weights found (expected model*.safetensors or pytorch_model*.bin; the folder has "
        f"{', '.join(names) or 'nothing'})"
    )


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: no weight_map of tensor names to files")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: names {name!r}, a file outside its own folder")
    missing = [n for n in names if not (index.parent / n).is_file()]
    if missing:
        raise CheckpointError(f"{index.parent}: missing of {len(names)} weight files: {', '.join(missing)}")
    return [index.parent / n for n in names]


def open_weights(folder: Path) -> dict[str, RawTensor]:
    """Every tensor of a model folder by name, as places in files; nothing is read yet."""
    tensors: dict[str, RawTensor] = {}
    for path in weight_files(folder):
        for name, tensor in open_file(path).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name!r} is in {tensors[name].path.name} and in {path.name}")
            tensors[name] = tensor
    return tensors


def open_file(path: Path) -> dict[str, RawTensor]:
    """The tensors of one weight file, whatever its name says it is."""
    if is_safetensors(path):
        return read_safetensors(path)
    from openelm_mlx.torchfile import find_state_dict, read_torch

    return find_state_dict(read_torch(path), path)[0]


def check_names(
    where: str | Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Every expected tensor is there with its shape, and nothing else; otherwise one error that lists all of them."""
    problems = [
        *_listed("missing", (n for n in expected if n not in found)),
        *_listed("unexpected", (n for n in found if n not in expected)),
        *_listed(
            "wrong shape",
            (f"{n} is {found[n]}, not {expected[n]}" for n in expected if n in found and found[n] != expected[n]),
        ),
    ]
    if problems:
        raise CheckpointError(f"{where}: the tensors do not fit the config\n" + "\n".join(problems))


def _listed(kind: str, names: Iterable[str]) -> list[str]:
    names = list(names)
    return [f"  {kind} ({len(names)}): " + "; ".join(names)] if names else []
