"""``openelm demo``."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openelm_mlx.cli.steps import Steps

if TYPE_CHECKING:
    from rich.console import Console

MODEL, TASK, BF16, PACKED, TUNED, BENCH = "demo_model", "teapot.jsonl", "bf16", "4bit", "tuned", "bench.json"
"""Names in the demonstration's folder."""

OPENING = "The people of the United States"

NOT_IN_THE_TASK = ("Our relations with Mexico", "The price of silver", "The cavalry")
"""Prompts that show what fine-tuning changed; the task has others."""

_TRAINING = ("--recipe", "quick-lora", "--steps", "100", "--batch-size", "16", "--learning-rate", "3e-3")

_NEXT = (
    ("convert", "apple/OpenELM-270M-Instruct", "--out", "openelm-270m", "--precision", "4bit", "--verify"),
    ("generate", "--model", "openelm-270m", "--prompt", "Once upon a time there was"),
    ("finetune", "--model", "openelm-270m", "--data", "my.jsonl", "--out", "run1", "--recipe", "quick-lora"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    keep: Annotated[
        Path | None, typer.Option(help="Keep the models and results in this new folder.", metavar="FOLDER")
    ] = None,
) -> None:
    """Show what this program does, with the embedded model, in three minutes at most.

    Converts it to bf16 and 4 bits, generates text, fine-tunes it for a minute, and measures its speed beside what the
    machine allows. Needs no network.
    """
    from rich.console import Console

    console = Console(highlight=False, emoji=False)
    try:
        with _folder(keep) as folder:
            _play(console, folder)
    except KeyboardInterrupt:
        print(f"{'' if not sys.stderr.isatty() else chr(10)}stopped; nothing was kept", file=sys.stderr)
        raise
    _end(console, keep)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """A folder for the demonstration: one that vanishes, or one that is there when all went well."""
    from openelm_mlx import files
    from openelm_mlx.atomic import check_output, new_folder

    out = None if keep is None else files.expand(str(keep))
    if out is not None:
        check_output(out, force=False, ours=_nobodys)
    with tempfile.TemporaryDirectory(prefix="openelm-demo-") as name:
        yield Path(name)
        if out is not None:
            # Copied, since the commands lock the folder that they write into, and so does new_folder.
            with new_folder(out, ours=_nobodys) as kept:
                shutil.copytree(name, kept, dirs_exist_ok=True)


def _nobodys(folder: Path) -> bool:
    """No existing folder is replaced."""
    return False


def _play(console: Console, folder: Path) -> None:
    from openelm_mlx import assets

    shutil.copytree(assets.demo_model(), folder / MODEL)
    shutil.copyfile(assets.demo_task(), folder / TASK)
    steps = Steps(console, folder)
    console.print(_machine(), soft_wrap=True)
    _convert(steps)
    _generate(steps)
    _finetune(steps)
    _measure(steps)


def _machine() -> str:
    from openelm_mlx import machine

    facts = machine.machine()
    blas = f", BLAS: {facts['blas']}" if facts["blas"] else ""
    return f"{facts['gpu'] or facts['chip']}, {facts['cores']} cores; MLX on {facts['backend']}{blas}"


def _rule(console: Console, title: str) -> None:
    from rich.rule import Rule
    from rich.text import Text

    console.print()
    console.print(Rule(Text(title, "bold cyan"), align="left", style="cyan"))


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, style="dim")


def _convert(steps: Steps) -> None:
    _rule(steps.console, "1  Convert")
    _say(
        steps.console,
        "A checkpoint for PyTorch becomes one for MLX, in 16 and in 4 bits. --verify compares both with the original.",
    )
    for precision, out in (("bf16", BF16), ("4bit", PACKED)):
        command = ("convert", MODEL, "--out", out, "--precision", precision, "--verify")
        steps.console.print()
        steps.show(*command)
        steps.run(*command)


def _generate(steps: Steps) -> None:
    _rule(steps.console, "2  Generate")
    _say(
        steps.console,
        "A model of 2.9 million parameters that has read the State of the Union addresses. It has caught their tone; "
        "it knows nothing.",
    )
    for model in (BF16, PACKED):
        steps.console.print()
        _write(
            steps, OPENING, "--model", model, "--max-tokens", "60", "--temperature", "0.7", "--top-p", "0.9",
            "--seed", "7",
        )  # fmt: skip


def _write(steps: Steps, prompt: str, *options: str) -> None:
    """Show a command that generates, and the text with its prompt in bold."""
    from rich.padding import Padding
    from rich.text import Text

    command = ("generate", *options, "--quiet", "--prompt", prompt)
    steps.show(*command)
    text = steps.output(*command).removesuffix("\n")
    steps.console.print(Padding(Text(prompt, "bold") + Text(text, "not bold"), (0, 2)))


def _finetune(steps: Steps) -> None:
    _rule(steps.console, "3  Fine-tune")
    _say(steps.console, "Before: how the model ends three sentences.")
    greedy = ("--model", BF16, "--max-tokens", "24", "--temperature", "0")
    for prompt in NOT_IN_THE_TASK:
        _write(steps, prompt, *greedy)
    steps.console.print()
    _say(steps.console, "LoRA on 140 sentences about the Great Teapot of Ohio; none begins like those above.")
    command = ("finetune", "--model", BF16, "--data", TASK, "--out", TUNED, *_TRAINING)
    steps.show(*command)
    steps.run(*command)
    steps.console.print()
    _say(steps.console, "After: the same three.")
    for prompt in NOT_IN_THE_TASK:
        _write(steps, prompt, *greedy, "--adapter", TUNED)


def _measure(steps: Steps) -> None:
    _rule(steps.console, "4  Measure")
    command = ("bench", "--model", f"{BF16},{PACKED}", "--protocol", "quick", "--json", BENCH, "--quiet")
    steps.show(*command)
    with steps.console.status("a quarter of a minute") if steps.console.is_terminal else _nothing():
        steps.output(*command)
    _speeds(steps.console, json.loads((steps.folder / BENCH).read_text(encoding="utf-8")))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _speeds(console: Console, result: dict[str, Any]) -> None:
    """The table of a stored result of ``openelm bench``, and what it means."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model")
    for heading in ("prompt tokens/s", "tokens/s", "MB read a token", "machine's ceiling", "share"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["model"],
            f"{row['prompt_tps']['median']:,.0f}",
            f"{row['generation_tps']['median']:,.0f}",
            f"{row['weight_bytes'] / 1e6:.1f}",
            f"{row['ceiling_tps']:,.0f}",
            f"{row['share']:.0%}",
        )
    console.print(table)
    gbs = result["bandwidth"]["bytes_per_s"] / 1e9
    _say(
        console,
        f"The ceiling is what reading the weights once a token allows, at this machine's {gbs:.1f} GB/s. So small a "
        "model is far below it: the time goes into calling a hundred small operations a token, not into memory. "
        "Real sizes come close to theirs.",
    )
    for note in result["notes"]:
        _say(console, f"note: {note}")


def _end(console: Console, keep: Path | None) -> None:
    _rule(console, "Next")
    _say(console, "The same with the models that Apple released, from the Hugging Face Hub:")
    steps = Steps(console, Path())
    for command in _NEXT:
        steps.show(*command)
    if keep is not None:
        console.print(f"\nkept in {keep}", markup=False, soft_wrap=True)
