"""``openelm fuse``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from openelm_mlx.finetune.effect import Effect
    from openelm_mlx.finetune.fuse import Result

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def fuse(
    model: Annotated[
        str, typer.Option(help="The adapter's base: a model folder, or a Hugging Face Hub name.", show_default=False)
    ],
    adapter: Annotated[
        str, typer.Option(help="Folder of a LoRA or DoRA adapter; a run's folder will do.", show_default=False)
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The model folder to make.", show_default=False)],
    precision: Annotated[
        str | None,
        typer.Option(help="bf16, fp16 or fp32. By default that of the base, and bf16 where the base is packed."),
    ] = None,
    requantize: Annotated[
        bool,
        typer.Option(
            "--requantize",
            help="Pack the result as the base is packed. The rounding takes something of the adapter away; how much "
            "is printed.",
        ),
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub base.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model folder that this program wrote.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
) -> None:
    """Make one model of a base and an adapter.

    The result runs as fast as the base and needs no adapter. It loads in `openelm generate` and in mlx-lm.
    """
    from openelm_mlx.cli.byte_bar import byte_bar
    from openelm_mlx.finetune.fuse import fuse as run

    with byte_bar("fusing", quiet=quiet) as progress:
        result = run(
            model,
            adapter,
            out,
            precision=precision,
            requantize=requantize,
            revision=revision,
            force=force,
            progress=progress,
        )
    if not quiet:
        print(_summary(result))
    if result.effect:
        print(_effect(result.effect))


def _summary(result: Result) -> str:
    a = result.adapter
    name = result.config.preset_name or f"{result.config.num_transformer_layers} layers"
    return (
        f"{result.folder}: {name}, {result.precision}, {result.nbytes / 1e6:,.1f} MB; with {a.method} of rank {a.rank} "
        f"in {result.layers} {'matrix' if result.layers == 1 else 'matrices'}"
    )


def _effect(e: Effect) -> str:
    percent = 100 * e.mean_difference / e.mean_effect if e.mean_effect else None
    share = "" if percent is None else f"; the difference is {percent:{'.2g' if percent < 10 else ',.0f'}}% of that"
    return (
        f"compared with the adapter on its base, on {e.tokens} tokens, in float32:\n"
        f"  logit difference      max {e.max_difference:.3g}, mean {e.mean_difference:.3g}\n"
        f"  the adapter's effect  mean {e.mean_effect:.3g}{share}"
    )
