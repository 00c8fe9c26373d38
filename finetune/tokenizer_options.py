"""What can be chosen for a new tokenizer. Imports nothing heavy, so that ``openelm tokenizer --help`` is quick."""

from __future__ import annotations

from dataclasses import dataclass

from openelm_mlx.errors import OpenELMError
from openelm_mlx.settings import whole_number

LONGEST_LINE = 1000
"""Characters. Texts are cut into lines no longer than this, since SentencePiece leaves out those over 4,192 bytes."""


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """How a tokenizer is trained.

    Raises:
        OpenELMError: a value is out of its range.
    """

    vocab_size: int
    """Ids in all: the pieces learned, 256 bytes and three special tokens among them."""
    character_coverage: float = 0.99995
    """Part of the texts' characters that get an id of their own; the rarest others are written as bytes. Llama 2's."""
    max_bytes: int = 100_000_000
    """Most text that is learned from; of more, a random sample. The memory needed is about six times as much, and
    far more for languages that put no spaces between words."""
    seed: int = 0
    """Decides which texts are in the sample."""
    text_key: str = "text"
    """The key of the text in JSON records, and the column of Parquet files."""

    def __post_init__(self) -> None:
        whole_number("--vocab-size", self.vocab_size, 1)
        whole_number("--max-bytes", self.max_bytes, 4 * LONGEST_LINE)  # or there may be no line that fits
        whole_number("--seed", self.seed, 0)
        if not 0.98 <= self.character_coverage <= 1:  # SentencePiece's own limits
            raise OpenELMError(f"--character-coverage must be from 0.98 to 1, not {self.character_coverage!r}")
