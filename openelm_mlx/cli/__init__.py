"""``openelm <verb>``: one table of verbs, each imported when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from openelm_mlx._links import check_links

VERBS = {
    "adapter": "openelm_mlx.finetune.adapter_command",
    "bench": "openelm_mlx.benchmarks.command",
    "convert": "openelm_mlx.convert.command",
    "demo": "openelm_mlx.cli.demo",
    "finetune": "openelm_mlx.finetune.command",
    "fuse": "openelm_mlx.finetune.fuse_command",
    "generate": "openelm_mlx.cli.generate",
    "inspect": "openelm_mlx.cli.inspect",
    "tokenizer": "openelm_mlx.finetune.tokenizer_command",
}
"""Verb -> the module whose `app` it is. These modules import nothing heavy before they run."""


class _Verbs(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in VERBS:
            return None
        try:
            module = import_module(VERBS[name])
        except ModuleNotFoundError:
            check_links(Path(__file__).parents[1])
            raise
        command = typer.main.get_command(module.app)
        command.name = name
        return command


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from openelm_mlx.version import __version__

        print(f"openelm-mlx {__version__}")
        raise typer.Exit


@app.callback()
def openelm(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    """Convert, run and fine-tune Apple's OpenELM language models on MLX."""


def main() -> None:
    """The command line's entry point."""
    from openelm_mlx.cli.errors import exit_status

    sys.exit(exit_status(lambda: app(prog_name="openelm")))
