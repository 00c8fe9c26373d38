"""``openelm adapter``: adapters to and from other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from openelm_mlx.finetune.choices import FORMS

if TYPE_CHECKING:
    from openelm_mlx.adapters import Adapter

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Carry adapters to PEFT and mlx-lm, and from PEFT and CoreNet.",
)

Out = Annotated[str, typer.Option("--out", "-o", help="The folder to make.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace a folder that an earlier export or import wrote.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


@app.command("export")
def export(
    adapter: Annotated[str, typer.Argument(help="An adapter's folder, or a run's.")],
    form: Annotated[
        str, typer.Option("--format", help=f"Whose form to write: {' or '.join(FORMS)}.", show_default=False)
    ],
    out: Out,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model it was trained on, a folder or a Hub name: checked against the adapter. Some adapters of "
            "the embedding need it."
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write an adapter as PEFT or mlx-lm reads it.

    What openelm finetune writes is in mlx-lm's form already; an adapter of tied embeddings is the exception, and gets
    an untied copy of its model beside it.
    """
    from openelm_mlx.finetune.transfer import export_adapter

    lines: list[str] = []
    written = export_adapter(adapter, out, form, model=model, force=force, say=lines.append)
    if not quiet:
        print(f"{out}: {_summary(written)}, for {form}", *lines, sep="\n")


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="A folder that PEFT wrote, or a .pt checkpoint of CoreNet's.")],
    out: Out,
    model: Annotated[
        str, typer.Option(help="The model it is for: a folder, or a Hugging Face Hub name.", show_default=False)
    ],
    alpha: Annotated[
        float | None, typer.Option(help="lora_alpha of a CoreNet checkpoint, which does not hold it.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="CoreNet's YAML of the training, instead of --alpha.")] = None,
    any_base: Annotated[
        bool,
        typer.Option(
            "--any-base", help="Take a CoreNet checkpoint even if the base weights in it are not the model's."
        ),
    ] = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Make an adapter of what PEFT or CoreNet wrote: LoRA or DoRA."""
    from openelm_mlx.cli.byte_bar import byte_bar
    from openelm_mlx.finetune.transfer import import_adapter

    lines: list[str] = []
    with byte_bar("comparing", quiet=quiet) as progress:
        adapter = import_adapter(
            source,
            out,
            model,
            alpha=alpha,
            config=config,
            any_base=any_base,
            force=force,
            say=lines.append,
            progress=progress.bytes_read,
        )
    if not quiet:
        print(f"{out}: {_summary(adapter)}", *lines, sep="\n")


@app.command("show")
def show(adapter: Annotated[str, typer.Argument(help="An adapter's folder, or a run's.")]) -> None:
    """Show what an adapter is: method, rank, layers, size, and the model it is for."""
    from openelm_mlx import files
    from openelm_mlx.adapters import read_adapter

    folder = files.expand(adapter)
    print(*_lines(read_adapter(folder), folder), sep="\n")


_NAMES = {"lora": "LoRA", "dora": "DoRA"}


def _summary(adapter: Adapter) -> str:
    return f"{_NAMES[adapter.config.method]} of rank {adapter.config.rank} on {len(adapter.paths)} layers"


def _lines(adapter: Adapter, folder: Path) -> list[str]:
    from openelm_mlx.layer_paths import grouped

    config, base = adapter.config, adapter.base
    count, nbytes = (sum(getattr(t, of) for t in adapter.tensors.values()) for of in ("size", "nbytes"))
    scale = f"times {config.scale:g}, which is alpha / {'sqrt(rank)' if config.rslora else 'rank'}"
    first, *others = grouped(sorted(adapter.paths))
    lines = [
        f"adapter     {folder}",
        f"method      {_NAMES[config.method]}, dropout {config.dropout:g}",
        f"rank        {config.rank}",
        f"alpha       {config.alpha:g} ({scale})",
        f"layers      {first}",
        *(f"            {line}" for line in others),
        f"parameters  {count:,} ({nbytes / 1e6:,.1f} MB)",
    ]
    if base:
        precision = f", trained on {adapter.precision} weights" if adapter.precision else ""
        tied = ", embeddings tied" if base["share_input_output_layers"] else ""
        lines += [
            f"model       {base['num_transformer_layers']} layers, width {base['model_dim']}, vocabulary "
            f"{base['vocab_size']:,}{tied}{precision}"
        ]
    return lines
