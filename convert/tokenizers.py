"""Finding the tokenizer for a conversion: Apple's OpenELM repositories carry none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openelm_mlx import hub
from openelm_mlx.errors import TokenizerError
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import own_chat_template

NONE = "none"
"""The value of ``--tokenizer`` that asks for a model without one."""


@dataclass(frozen=True)
class Found:
    """A tokenizer as it will be written, and where it came from."""

    tokenizer: Tokenizer
    origin: str


def find_tokenizer(folder: Path, wanted: str | None, rows: int, report: Callable[[str], None]) -> Found | None:
    """The tokenizer for a checkpoint of `rows` embedding rows; None if none is wanted.

    In order: `wanted` (a file, folder or Hub name), the checkpoint's own folder, the first of a short list of Hub
    repositories that carry the Llama tokenizer whose ids all have a row. The chat template is the checkpoint's own: one
    that comes with another tokenizer was written for another model.

    Raises:
        TokenizerError: none was found; the message gives the ways to name one.
    """
    if wanted == NONE:
        return None
    if wanted is None and (own := Tokenizer.from_folder(folder)):
        return Found(own, "the source folder")
    found = Found(Tokenizer.named(wanted), wanted) if wanted else _from_hub(rows, report)
    template = own_chat_template(folder)
    if found.tokenizer.chat_template not in (None, template):
        report(f"tokenizer: the chat template of {found.origin} was dropped: it was not made for this model")
    return Found(found.tokenizer.with_chat_template(template), found.origin)


def _from_hub(rows: int, report: Callable[[str], None]) -> Found:
    def too_large(folder: Path) -> str | None:
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.vocab_size if tokenizer else 0
        return f"{ids} ids for {rows} embedding rows" if ids > rows else None

    found = hub.find_tokenizer(report, too_large)
    tokenizer = Tokenizer.from_folder(found[0]) if found else None
    if found is None or tokenizer is None:
        raise TokenizerError(
            "no tokenizer: the source has none and no Hub repository could be reached. OpenELM uses the Llama 2 "
            "tokenizer; name one with --tokenizer (a tokenizer.model or tokenizer.json, a folder, or a Hub name), or "
            "convert without one with --tokenizer none"
        )
    return Found(tokenizer, found[1])
