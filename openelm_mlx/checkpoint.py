"""Reading a model folder: its config, its weight files, and that they fit each other.

Hugging Face's and mlx-lm's layouts: ``model.safetensors`` or shards with an index, or ``pytorch_model.bin`` likewise.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from openelm_mlx import files
from openelm_mlx.errors import CheckpointError, ConfigError
from openelm_mlx.rawtensor import RawTensor
from openelm_mlx.safetensorsfile import read_safetensors

GENERATION = "generation_config.json"

PROVENANCE = "openelm_mlx"
"""The key of config.json under which a conversion's own facts are kept."""

_LISTED = 12
"""File or tensor names that a message about something else gives as examples."""


def generation_eos(folder: Path) -> tuple[int, ...]:
    """The end-of-sequence ids of ``generation_config.json``; none when there is no such file.

    Raises:
        ConfigError: the file is broken.
    """
    path = folder / GENERATION
    if not files.is_there(path, ConfigError):
        return ()
    return token_ids(path, "eos_token_id", files.read_json(path, ConfigError).get("eos_token_id"))


def copy_generation(source: Path, folder: Path) -> None:
    """Give a model folder that is being written the ``generation_config.json`` of its source, if that has one.

    Raises:
        ConfigError: something else than a file is there.
    """
    path = source / GENERATION
    if files.is_there(path, ConfigError):
        shutil.copyfile(path, folder / GENERATION)


def token_ids(path: Path, key: str, value: object) -> tuple[int, ...]:
    """What a config says under a key for one token id or several."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigError(f"{path}: {key} must be a token id, not {token!r}")
    return tuple(ids)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model folder, safetensors preferred; none when it has none.

    Raises:
        CheckpointError: an index is broken, or names a file that is missing.
    """
    for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        index = folder / f"{stem}{suffix}.index.json"
        single = folder / f"{stem}{suffix}"
        if files.is_there(index, CheckpointError):
            return _indexed_files(index)
        if files.is_there(single, CheckpointError):
            return [single]
        if found := sorted(folder.glob(f"{stem}*{suffix}")):
            return found
    return []


def some_files(folder: Path) -> str:
    """The first names in a folder, for a message."""
    try:
        return some_names(p.name for p in folder.iterdir())
    except OSError as e:
        raise CheckpointError(f"{folder}: cannot be read: {e.strerror or e}") from None


def some_names(names: Iterable[str]) -> str:
    """The first of these names, for a message."""
    names = sorted(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(_shown, names[:_LISTED])) + more if names else "nothing"


def _shown(name: str) -> str:
    # A file may hold any name; one with control characters must not reach a terminal as it is.
    return name if name.isprintable() else ascii(name)


def _indexed_files(index: Path) -> list[Path]:
    weight_map = files.read_json(index, ConfigError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index}: no weight_map of tensor names to files")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: names {name!r}, a file outside its own folder")
    if not names:
        raise CheckpointError(f"{index}: its weight_map names no file")
    missing = [n for n in names if not files.is_there(index.parent / n, CheckpointError)]
    if missing:
        raise CheckpointError(
            f"{index.parent}: missing of {len(names)} weight files: {', '.join(map(_shown, missing))}"
        )
    return [index.parent / n for n in names]


def open_weights(folder: Path) -> dict[str, RawTensor]:
    """Every tensor of a model folder by name, as places in files; nothing is read yet."""
    files = weight_files(folder)
    if not files:
        raise CheckpointError(
            f"{folder}: no weights found (expected model*.safetensors or pytorch_model*.bin; the folder has "
            f"{some_files(folder)})"
        )
    tensors: dict[str, RawTensor] = {}
    for path in files:
        for name, tensor in open_file(path).items():
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name!r} is in {tensors[name].path.name} and in {path.name}")
            tensors[name] = tensor
    return tensors


def open_file(path: Path) -> dict[str, RawTensor]:
    """The tensors of one weight file, whatever its name says it is.

    Raises:
        CheckpointError: it is neither a safetensors file nor one that ``torch.save`` wrote, or it is damaged.
    """
    from openelm_mlx.torchfile import find_state_dict, read_torch, sniff

    if not files.is_there(path, CheckpointError):  # reading a pipe or a device need never end
        raise CheckpointError(f"{path}: no such file")
    kind = sniff(path)
    if kind == "safetensors":
        return read_safetensors(path)
    if kind in ("unknown", "empty"):
        found = "an empty file" if kind == "empty" else f"bytes that are neither ({_beginning(path)!r} ...)"
        raise CheckpointError(f"{path}: expected a safetensors or a PyTorch file (.pt, .bin); found {found}")
    return find_state_dict(read_torch(path), path)[0]


def _beginning(path: Path) -> bytes:
    with path.open("rb") as f:
        return f.read(16)


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
    names = [_shown(n) for n in names]
    return [f"  {kind} ({len(names)}): " + "; ".join(names)] if names else []
