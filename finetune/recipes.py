"""Recipes: settings in a YAML file, by the name of one that comes with the package or by its path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openelm_mlx import files
from openelm_mlx.finetune.settings import (
    ADAPTER_ONLY,
    DPO_ONLY,
    NEW_ONLY,
    NEXT_TOKEN_ONLY,
    STREAM_ONLY,
    Settings,
    SettingsError,
)
from openelm_mlx.finetune.yamlfile import read_yaml

FOLDER = Path(__file__).with_suffix("")

FROM_SCRATCH = "from-scratch"
"""The recipe under every run that begins with random weights."""


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
    values = read_yaml(path)
    Settings.from_mapping(_with_defaults(values), str(path))
    return values


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Over from-scratch, if they are a new model's."""
    return {**(read_yaml(find(FROM_SCRATCH)) if values.get("init") == "random" else {}), **values}


def resolve(recipe: str | Path | None, overrides: Mapping[str, Any]) -> Settings:
    """The settings of a run: the defaults, over them a recipe's, over these what was given by hand.

    A run from random weights has :data:`FROM_SCRATCH` in place of the defaults. A number of epochs given by hand
    replaces the recipe's number of steps, and so for the warm-up.

    Raises:
        SettingsError: as for :func:`load`, or what was given is wrong, or means nothing to the method.
    """
    values = load(recipe) if recipe is not None else {}
    if overrides.get("init") is not None:
        values["init"] = overrides["init"]
    values = _with_defaults(values)
    if overrides.get("epochs") is not None and overrides.get("steps") is None:
        values.pop("steps", None)
    if overrides.get("warmup_ratio") is not None:
        values.pop("warmup_steps", None)
    settings = Settings.from_mapping({**values, **overrides})
    _refuse_idle(settings, overrides)
    return settings


def _refuse_idle(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse what was given by hand and would change nothing."""
    for names, idle, why in (
        (
            ADAPTER_ONLY,
            settings.method == "full",
            "of an adapter, and method full trains the whole model",
        ),
        (STREAM_ONLY, not settings.streams, "of texts that are streamed: --packing stream, or a new model"),
        (DPO_ONLY, settings.objective != "dpo", "of preferences: --objective dpo"),
        (NEXT_TOKEN_ONLY, settings.objective == "dpo", "means nothing with --objective dpo: leave it out"),
        (("warmup_ratio",), settings.warmup_steps is not None, "--warmup-steps says how many: leave one out"),
        (NEW_ONLY, settings.init != "random", "of a new model: --init random"),
        (("raw", "train_on_prompt"), settings.streams, "of prompts and completions, and streamed texts have none"),
        (("model", "revision"), settings.init == "random", "a new model has random weights: leave it out"),
    ):
        told = [name for name in names if given.get(name) is not None]
        if idle and told:
            raise SettingsError(f"{', '.join(told)}: {why}")
