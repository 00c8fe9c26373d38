"""Recipes: settings in a YAML file, by the name of one that comes with the package or by its path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openelm_mlx import files
from openelm_mlx.finetune.settings import ADAPTER_ONLY, Settings, SettingsError

FOLDER = Path(__file__).with_suffix("")

_LARGEST = 1 << 20
"""Bytes of a recipe."""


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find(name_or_path: str | Path) -> Path:
    """The file of a recipe.

    Raises:
        SettingsError: there is neither such a recipe nor such a file.
    """
    if str(name_or_path) in names():
        return FOLDER / f"{name_or_path}.yaml"
    path = files.expand(name_or_path)
    if not files.is_there(path, SettingsError):
        raise SettingsError(f"{path}: neither a recipe nor a file; the recipes are {', '.join(names())}")
    return path


def load(name_or_path: str | Path) -> dict[str, Any]:
    """The values in a recipe, or in a run's config.yaml.

    Raises:
        SettingsError: there is none, or it is no YAML of the form ``name: value``; the message has file and line. Also
            if a name is none of a setting or a value is wrong.
    """
    path = find(name_or_path)
    values = _parse(path, files.read(path, SettingsError, _LARGEST))
    Settings.from_mapping(values, str(path))
    return values


def resolve(recipe: str | Path | None, overrides: Mapping[str, Any]) -> Settings:
    """The settings of a run: the defaults, over them a recipe's, over these what was given by hand.

    A number of epochs given by hand replaces the recipe's number of steps.

    Raises:
        SettingsError: as for :func:`load`, or what was given is wrong, or means nothing to the method.
    """
    values = load(recipe) if recipe is not None else {}
    if overrides.get("epochs") is not None and overrides.get("steps") is None:
        values.pop("steps", None)
    settings = Settings.from_mapping({**values, **overrides})
    idle = [name for name in ADAPTER_ONLY if name in overrides] if settings.method == "full" else []
    if idle:
        raise SettingsError(f"{', '.join(idle)}: of an adapter, and method full trains the whole model instead of one")
    return settings


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    import yaml

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
