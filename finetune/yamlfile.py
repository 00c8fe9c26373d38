"""Small YAML files of the form ``name: value``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openelm_mlx import files
from openelm_mlx.finetune.settings import SettingsError

_LARGEST = 1 << 20
"""Bytes of such a file."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The values in a file.

    Raises:
        SettingsError: it cannot be read, or is no YAML of that form; the message has file and line.
    """
    import yaml

    data = files.read(path, SettingsError, _LARGEST)
    try:
        text = data.decode("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except Exception as e:  # besides YAMLError, whatever PyYAML's constructors raise
        mark = getattr(e, "problem_mark", None)
        place = path if mark is None else f"{path}:{mark.line + 1}"
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        raise SettingsError(f"{place}: not readable as YAML: {problem}") from None
    if not isinstance(values, dict) or not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"{path}: has no settings: lines such as `rank: 16` are needed")
    seen: set[str] = set()
    for key, _ in root.value:
        if key.value in seen:  # PyYAML takes the last one, without a word
            raise SettingsError(f"{path}:{key.start_mark.line + 1}: {key.value} is set a second time")
        seen.add(str(key.value))
    return values
