"""``openelm tokenizer``: new tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from openelm_mlx.finetune.tokenizer_options import TokenizerOptions

if TYPE_CHECKING:
    from openelm_mlx.finetune.tokenizer_training import Trained

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@app.callback()
def tokenizer() -> None:
    """Make tokenizers for new models."""


@app.command("train")
def train(
    data: Annotated[
        str,
        typer.Option(
            help="Texts: a file (.txt, .md, .jsonl, .json, any of them with .gz, or .parquet) or a folder of them; "
            "several with commas. Of a folder with train and valid files, train.",
            show_default=False,
        ),
    ],
    vocab_size: Annotated[
        int, typer.Option(help="Ids in all, the 256 bytes and 3 special tokens among them.", show_default=False)
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder to make.", show_default=False)],
    character_coverage: Annotated[
        float,
        typer.Option(help="Part of the texts' characters that get an id of their own. Other ones are several bytes."),
    ] = TokenizerOptions.character_coverage,
    max_bytes: Annotated[
        int, typer.Option(help="Most text to learn from; of more, a random sample is taken.")
    ] = TokenizerOptions.max_bytes,
    seed: Annotated[int, typer.Option(help="Decides which texts are in the sample.")] = TokenizerOptions.seed,
    text_key: Annotated[
        str, typer.Option(help="The key of the text in JSON records, and the column of Parquet files.")
    ] = TokenizerOptions.text_key,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that this command wrote.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
) -> None:
    """Train a SentencePiece tokenizer of the kind that OpenELM's is.

    The folder goes to `openelm finetune --init random --tokenizer`. The same texts and options make the same files.
    """
    from openelm_mlx.cli.byte_bar import byte_bar
    from openelm_mlx.finetune.tokenizer_training import train_tokenizer

    options = TokenizerOptions(
        vocab_size=vocab_size,
        character_coverage=character_coverage,
        max_bytes=max_bytes,
        seed=seed,
        text_key=text_key,
    )
    with byte_bar("reading", quiet=quiet) as progress:
        trained = train_tokenizer(data, out, options, force=force, progress=progress)
    if not quiet:
        print(_summary(trained))


def _summary(t: Trained) -> str:
    from rich.filesize import decimal

    of = "" if t.sampled == t.nbytes else f"{decimal(t.sampled)} of the "
    texts = f"{decimal(t.nbytes)} in {t.texts:,} {'text' if t.texts == 1 else 'texts'}"
    lengths = f"{t.bytes_per_token:.2f} bytes a token, {t.tokens_per_word:.2f} tokens a word"
    return (
        f"{t.folder}: {t.tokenizer.vocab_size:,} ids, learned from {of}{texts}\n"
        f"on {decimal(t.measured)} of that: {lengths}"
    )
