"""``openelm convert``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from openelm_mlx.convert.choices import DEFAULT_GROUP_SIZE, DEFAULT_PRECISION, GROUP_SIZES, PRECISIONS

if TYPE_CHECKING:
    from openelm_mlx.convert.job import Result
    from openelm_mlx.convert.verify import Verification

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _one_of(choices: Sequence[object]) -> str:
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}."


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A folder, a .pt/.bin/.safetensors file, or a Hugging Face Hub name.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The MLX folder to make.", show_default=False)],
    precision: Annotated[str, typer.Option("--precision", help=_one_of(PRECISIONS))] = DEFAULT_PRECISION,
    group_size: Annotated[
        int, typer.Option(help=f"Weights that share a scale when packed: {_one_of(GROUP_SIZES)}")
    ] = DEFAULT_GROUP_SIZE,
    config: Annotated[
        str | None, typer.Option(help="CoreNet's YAML, or a config.json, for a checkpoint without one.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.model or tokenizer.json, a folder, a Hub name, or 'none'.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")] = None,
    keep_padding_rows: Annotated[
        bool,
        typer.Option("--keep-padding-rows", help="Keep the embedding rows of a CoreNet checkpoint that no token uses."),
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare source and result on a built-in passage.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that an earlier conversion wrote.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Convert a PyTorch checkpoint of OpenELM to MLX weights.

    Reads Hugging Face folders and repositories, and CoreNet's .pt checkpoints. The result loads in `openelm generate`
    and in mlx-lm.
    """
    from openelm_mlx.cli.byte_bar import byte_bar
    from openelm_mlx.convert.job import convert as run

    with byte_bar("converting", quiet=quiet) as progress:
        result = run(
            source,
            out,
            precision=precision,
            group_size=group_size,
            config=config,
            tokenizer=tokenizer,
            revision=revision,
            keep_padding_rows=keep_padding_rows,
            verify_logits=verify,
            force=force,
            progress=progress,
        )
    if not quiet:
        print(_summary(result))
    if result.verification:
        print(_verification(result.verification))


def _summary(result: Result) -> str:
    config = result.config
    name = config.preset_name or f"{config.num_transformer_layers} layers"
    packed = result.precision.default
    detail = f", groups of {packed.group_size}" if packed else ""
    return f"{result.folder}: {name}, {result.precision.name}{detail}, {result.nbytes / 1e6:,.1f} MB"


def _verification(v: Verification) -> str:
    return (
        f"verified on {v.tokens} tokens against the source in float32:\n"
        f"  logit difference  max {v.max_difference:.3g}, mean {v.mean_difference:.3g}\n"
        f"  KL divergence     {v.mean_kl:.3g} nats a token\n"
        f"  top-1 agreement   {100 * v.top1_agreement:.1f}%\n"
        f"  perplexity        {v.perplexity_before:.3f} before, {v.perplexity_after:.3f} after"
    )
