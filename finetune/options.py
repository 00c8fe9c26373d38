"""The settings as options of a command: each is a flag with its help and its default."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from openelm_mlx.finetune.settings import Settings

_GIVEN = "given"

_TYPES: dict[str, Any] = {"bool": bool | None, "int": int | None, "float": float | None}
"""None is what was not given, whatever the default: a recipe's value may stand in its place."""


def add_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of Settings, after its own.

    Its parameter ``given`` gets those that were on the command line, by the names of their fields; they are checked
    where Settings are made of them.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != _GIVEN]
    options = [_option(f) for f in dataclasses.fields(Settings)]
    names = [option.name for option in options]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        told = {name: values.pop(name) for name in names}
        command(**values, **{_GIVEN: {name: value for name, value in told.items() if value is not None}})

    everything = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
    wrapper.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in everything}
    return wrapper


def _option(f: dataclasses.Field[Any]) -> inspect.Parameter:
    kind, flag = str(f.type).partition(" ")[0], f"--{f.name.replace('_', '-')}"
    choices = f.metadata.get("choices")
    if kind == "bool":
        flag += f"/--no-{flag[2:]}"
    option = typer.Option(
        flag,
        help=f.metadata["help"],
        metavar="|".join(choices) if choices else "NAMES" if kind.startswith("tuple") else None,
        show_default=_default(f),
        rich_help_panel=f.metadata["panel"],
    )
    annotation = Annotated[_TYPES.get(kind, str | None), option]  # type: ignore[valid-type]
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default(f: dataclasses.Field[Any]) -> str | bool:
    """As it is typed; False is to show none."""
    if f.default is None or f.default is False:
        return False
    if f.default is True:
        return "on"
    if isinstance(f.default, tuple):
        return ",".join(f.default)
    return f"{f.default:g}" if isinstance(f.default, float) else str(f.default)
