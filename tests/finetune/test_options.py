"""The options of a command that takes settings: all of them, and what is given arrives."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from openelm_mlx.finetune import recipes
from openelm_mlx.finetune.options import add_options
from openelm_mlx.finetune.settings import DPO_ONLY, NEW_ONLY, STREAM_ONLY, Settings

FIELDS = dataclasses.fields(Settings)

app = typer.Typer()
told: list[tuple[str, dict[str, Any]]] = []


@app.command()
@add_options
def tune(
    given: dict[str, Any],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder to make.")] = "run",
) -> None:
    """Tune a model."""
    told.append((out, given))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})


def given(*arguments: str) -> dict[str, Any]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return told.pop()[1]


def test_the_help_shows_every_setting_its_help_and_its_default() -> None:
    page = run("--help").output
    for f in FIELDS:
        line = next(line for line in page.splitlines() if line.startswith(f"│ --{f.name.replace('_', '-')} "))
        assert f.metadata["help"] in line
        assert ("[default: " in line) == (f.default is not None and f.default is not False), f.name
        assert f.metadata["panel"] in page
    for shown in ("[default: (0.05)]", "[default: (norm,bias)]", "[default: (16)]", "[default: (lora)]"):
        assert shown in page
    assert "lora|dora|full" in page
    assert "The folder to make." in page
    assert "Tune a model." in page


def test_nothing_given_is_nothing() -> None:
    assert run().exit_code == 0
    assert told.pop() == ("run", {})


VALUES: dict[str, str] = {
    "bool": "",
    "int": "7",
    "int | None": "7",
    "float": "0.25",
    "float | None": "0.25",
    "str": "",
    "str | None": "some/name",
    "tuple[str, ...]": "proj_1, norm",
}


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_each_option_arrives_by_its_fields_name(f: dataclasses.Field[Any]) -> None:
    flag = f"--{f.name.replace('_', '-')}"
    if str(f.type) == "bool":
        assert given(flag) == {f.name: True}
        assert given(f"--no-{flag[2:]}") == {f.name: False}
        return
    text = f.metadata["choices"][-1] if "choices" in f.metadata else VALUES[str(f.type)] or "last-4"
    arrived = given(flag, text, "-o", "there")
    assert arrived.keys() == {f.name}
    expected = (
        tuple(part.strip() for part in text.split(",")) if "tuple" in str(f.type) else type(arrived[f.name])(text)
    )
    # With a learning rate that no value given for its end is above, and what the setting means something to.
    around = {"learning_rate": 1, **({"packing": "stream"} if f.name in STREAM_ONLY else {})}
    around |= {"init": "random"} if f.name in NEW_ONLY else {}
    around |= {"objective": "dpo"} if f.name in DPO_ONLY else {}
    assert getattr(recipes.resolve(None, {**around, **arrived}), f.name) == expected


def test_several_together_and_the_commands_own() -> None:
    assert run("-o", "x", "--rank", "4", "--no-plot", "--learning-rate", "1e-5", "--packing", "off").exit_code == 0
    assert told.pop() == ("x", {"rank": 4, "plot": False, "learning_rate": 1e-5, "packing": "off"})


def test_an_empty_list_can_be_given() -> None:
    assert recipes.resolve(None, given("--decay-exclude", "")).decay_exclude == ()


@pytest.mark.parametrize(
    "arguments", [["--rank", "four"], ["--learning-rate", "fast"], ["--ranks", "4"], ["--given", "x"]]
)
def test_what_is_no_option_or_no_number_is_a_wrong_use(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2
    assert told == []


def test_the_options_need_nothing_heavy() -> None:
    code = (
        "import sys, openelm_mlx.finetune.options, openelm_mlx.finetune.recipes\n"
        "print([m for m in ('mlx', 'numpy', 'yaml', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
