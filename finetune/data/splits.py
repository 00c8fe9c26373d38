"""Which records are for training, which for validation and which for the test at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openelm_mlx.files import expand
from openelm_mlx.finetune.data.hub import PREFIX, HubRecords, hub_splits
from openelm_mlx.finetune.data.records import DataError, Records
from openelm_mlx.finetune.settings import Settings

Source = Records | HubRecords
"""An iterator of records with a name, and how far it is: `done` of `total`."""

NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


@dataclass
class Splits:
    """The sources of a run's data."""

    train: Source
    valid: Source | None = None
    test: Source | None = None
    files: list[Path] = field(default_factory=list)
    """The local files among them."""

    def items(self) -> tuple[tuple[str, Source | None], ...]:
        """Each split's name and source."""
        return (("train", self.train), ("valid", self.valid), ("test", self.test))


def find_splits(settings: Settings) -> Splits:
    """Where the settings' data is. A file named for validation or test is taken instead of the data folder's.

    Raises:
        DataError: no data is named, something is not there, or a folder has two files for one split or none to train
            on.
    """
    if settings.data is None:
        raise DataError("there is no data: name a file, a folder or hf:NAME with --data")
    files: dict[str, Path] = {}
    sources: dict[str, Source] = {}
    if settings.data.startswith(PREFIX):
        sources.update(_of_hub(settings.data))
    else:
        path = expand(settings.data)
        files = _of_folder(path) if path.is_dir() else {"train": path}
    for split, named in (("valid", settings.valid), ("test", settings.test)):
        if named is not None:
            files[split] = expand(named)
            sources.pop(split, None)
    for split, file in files.items():
        if file.is_dir():
            raise DataError(f"{file}: is a folder; name a file to {'validate' if split == 'valid' else split} on")
        sources[split] = Records(file)
    return Splits(sources["train"], sources.get("valid"), sources.get("test"), list(files.values()))


def in_folder(folder: Path, endings: Sequence[str]) -> dict[str, list[Path]]:
    """What is in a folder under the names of each split, with any of the endings."""
    return {
        split: [p for name in names for ending in endings if os.path.lexists(p := folder / f"{name}{ending}")]
        for split, names in NAMES.items()
    }


def _of_folder(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for split, there in in_folder(folder, _ENDINGS).items():
        if len(there) > 1:
            raise DataError(f"{folder}: has {' and '.join(p.name for p in there)}, and only one file can be {split}")
        if there:
            found[split] = there[0]
    if "train" not in found:
        raise DataError(f"{folder}: has no file to train on: train.jsonl or train.json, or either with .gz")
    return found


def _of_hub(data: str) -> dict[str, Source]:
    loaded = hub_splits(data)
    found: dict[str, Source] = {}
    for split, names in NAMES.items():
        there = [name for name in names if name in loaded]
        if len(there) > 1:
            raise DataError(f"{data}: has the splits {' and '.join(there)}, and only one can be {split}")
        if there:
            found[split] = loaded[there[0]]
    if "train" not in found:
        raise DataError(f"{data}: has no split train, only {', '.join(loaded)}; save what you want of it as a file")
    return found
