"""New tokenizers: SentencePiece BPE of the kind Llama 2's is, trained on texts."""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from rich.filesize import decimal

from openelm_mlx import files
from openelm_mlx.atomic import new_folder
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.corpus import TextSource, find_corpus, require_outside, texts_of
from openelm_mlx.finetune.data.records import DataError
from openelm_mlx.finetune.data.sample import Sample
from openelm_mlx.finetune.tokenizer_options import LONGEST_LINE, TokenizerOptions
from openelm_mlx.outputs import require_apart
from openelm_mlx.progress import SILENT, Progress
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import of_sentencepiece
from openelm_mlx.version import __version__
from openelm_mlx.writer import write_json

_FACTS = "openelm_mlx.json"
"""How a tokenizer was made; a folder with it may be replaced."""
_WRITTEN = {"tokenizer.model", "tokenizer.json", "tokenizer_config.json", _FACTS}

_MEASURED = 1_000_000
"""Characters, about, that are tokenized to tell how long tokens are."""

_LIKE_LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "add_dummy_prefix": True,
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": -1,
}
"""What the model file of Llama 2's tokenizer says of its training."""


class TokenizerTrainingError(OpenELMError):
    """No tokenizer can be made of these texts with these options."""


@dataclass(frozen=True)
class Trained:
    """A tokenizer and what it was made from."""

    folder: Path
    tokenizer: Tokenizer
    texts: int
    nbytes: int
    """Of all the texts, in UTF-8 and without the ends of lines."""
    sampled: int
    """Bytes of them that were learned from."""
    measured: int
    """Bytes of those that were tokenized for what follows."""
    bytes_per_token: float
    tokens_per_word: float
    """Words are what white space parts."""


def train_tokenizer(
    data: str, out: str | Path, options: TokenizerOptions, *, force: bool = False, progress: Progress = SILENT
) -> Trained:
    """Make a tokenizer's folder from texts: tokenizer.model, and the tokenizer.json with the same ids.

    The same texts and options give the same files.

    Args:
        data: a file or folder, several with commas; of a folder with train and valid files, those to train on.
        out: the folder to make.
        options: how it is trained.
        force: replace a folder that was written here before.
        progress: told what is being done.

    Raises:
        OpenELMError: nothing was written; the message says why.
    """
    out = files.expand(out)
    sources = _sources(data)
    for path in (path for source in sources for path in source.files):
        require_apart(path, out)
    require_outside(out, data)
    with new_folder(out, force=force, ours=is_ours) as folder:
        texts, sample = _read(sources, options, progress)
        lines = sample.texts
        if not lines:
            raise DataError(f"{data}: has no text")
        progress.say(f"training {options.vocab_size:,} ids on {decimal(sample.nbytes)} of text")
        tokenizer = Tokenizer(of_sentencepiece(out / "tokenizer.model", _trained_model(lines, options)))
        tokenizer.save(folder)
        facts = {"tool_version": __version__, **asdict(options), "texts": texts, "bytes": sample.nbytes}
        write_json(folder / _FACTS, facts)
    return Trained(out, tokenizer, texts, sample.added, sample.nbytes, *_measured(tokenizer, lines))


def is_ours(folder: Path) -> bool:
    """Whether a tokenizer was trained into this folder, and nothing else is in it."""
    names = {p.name for p in folder.iterdir() if not p.name.startswith(".openelm-mlx-")}
    return _FACTS in names and names <= _WRITTEN


def _sources(data: str) -> Sequence[TextSource]:
    sources = find_corpus(data, None, None).train
    if any(source.weight != 1 for source in sources):
        raise DataError(f"--data: {data}: a tokenizer learns from all texts alike; leave the weights out")
    return sources


def _read(sources: Sequence[TextSource], options: TokenizerOptions, progress: Progress) -> tuple[int, Sample]:
    """The number of texts, and the lines to learn from."""
    sample = Sample(options.max_bytes, options.seed)
    sizes = [sum(path.stat().st_size for path in source.files) for source in sources]
    texts = 0
    for number, source in enumerate(sources):
        for record, part in texts_of(source, options.text_key):
            if record.problem:
                raise DataError(f"{record.where}: {record.problem}")
            texts += 1
            for line in _lines(record.values["text"]):
                sample.add(line)
            progress.bytes_read(int(sum(sizes[:number]) + part * sizes[number]), sum(sizes))
    return texts, sample


def _lines(text: str) -> Iterator[str]:
    """The lines of a text as SentencePiece can take them: not too long, without its reserved characters.

    They are in Unicode's form NFC, as new models get their texts. The end of a line is never part of a piece.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for line in unicodedata.normalize("NFC", text).replace("\0", " ").replace("▅", " ").splitlines():
        while len(line) > LONGEST_LINE:
            at = line.rfind(" ", 1, LONGEST_LINE)
            at = LONGEST_LINE if at < 0 else at
            yield line[:at]
            line = line[at:].removeprefix(" ")  # SentencePiece puts one before each line
        if line.strip():
            yield line


def _trained_model(lines: Sequence[str], options: TokenizerOptions) -> bytes:
    """The model file that SentencePiece makes of the lines.

    It trains in a thread of its own: Python hears of Ctrl-C only between its own steps.
    """
    outcome: list[bytes | BaseException] = []

    def train() -> None:
        try:
            outcome.append(_sentencepiece(lines, options))
        except BaseException as error:
            outcome.append(error)

    thread = Thread(target=train, name="sentencepiece", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    (found,) = outcome
    if isinstance(found, RuntimeError):
        raise TokenizerTrainingError(_explained(str(found), options)) from None
    if isinstance(found, BaseException):
        raise found
    return found


def _sentencepiece(lines: Sequence[str], options: TokenizerOptions) -> bytes:
    import sentencepiece  # type: ignore[import-untyped,unused-ignore]

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=options.vocab_size,
        character_coverage=options.character_coverage,
        minloglevel=3,  # what it would tell are hundreds of lines on stderr; errors are raised all the same
        **_LIKE_LLAMA,
    )
    return model.getvalue()


def _explained(message: str, options: TokenizerOptions) -> str:
    """SentencePiece's errors with the option that is to be changed."""
    if large := re.search(r"too high .*value <= (\d+)", message):
        return (
            f"--vocab-size {options.vocab_size:,} is too large for these texts: {int(large[1]):,} is the largest that "
            "works; give a smaller one, or more text"
        )
    if small := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"--vocab-size {options.vocab_size:,} is too small: 3 special tokens, 256 bytes and the characters of "
            f"these texts make {int(small[1]):,}; give a larger one, or a --character-coverage below "
            f"{options.character_coverage:g}"
        )
    return f"SentencePiece cannot train on these texts: {' '.join(message.split())}"


def _measured(tokenizer: Tokenizer, lines: Sequence[str]) -> tuple[int, float, float]:
    """Bytes tokenized, bytes a token and tokens a word, of lines from all over the texts."""
    every = max(1, round(sum(len(line) for line in lines) / _MEASURED))
    chosen = lines[::every]
    tokens = sum(len(tokenizer.encode(line, add_bos=False)) for line in chosen)
    nbytes, words = (sum(len(count(line)) for line in chosen) for count in (str.encode, str.split))
    return nbytes, nbytes / tokens, tokens / words
