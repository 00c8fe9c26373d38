"""Looking through texts before training on them: how much there is, and what to validate on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from openelm_mlx.finetune.data.corpus import Corpus, TextSource, held_out, texts_of
from openelm_mlx.finetune.data.dataset import Progress
from openelm_mlx.finetune.data.records import DataError, Record
from openelm_mlx.finetune.data.streaming import TextFilter, TextStream, pieces
from openelm_mlx.finetune.data.types import Encoded
from openelm_mlx.finetune.settings import Settings

_SAMPLED = 1 << 24
"""Characters of a source that are tokenized to tell how many tokens it has."""

_SURVEYED = 1 << 28
"""Characters of a source that are looked through for texts to validate on."""

_KEPT = 500
"""Most texts kept for validation."""


@dataclass(frozen=True)
class Survey:
    """What looking through sources found."""

    texts: int
    """For training."""
    tokens: int
    """Of all of them, estimated where not all were looked at."""
    exact: bool
    kept: list[Encoded]
    """Texts for validation."""


def survey(
    sources: Sequence[TextSource], settings: Settings, filter: TextFilter, progress: Progress | None = None
) -> Survey:
    """Look through the beginning of each source: how much there is, and (by `valid_fraction`) what to validate on.

    Args:
        sources: of the training data.
        settings: of the run.
        filter: makes tokens of texts.
        progress: told how far it is, of a hundred a source.

    Raises:
        DataError: there is nothing to train on.
    """
    texts, tokens, exact = 0, 0.0, True
    kept: list[Encoded] = []
    for number, source in enumerate(sources):
        look = _Look(settings, filter, kept)
        for record, part in texts_of(source, settings.text_key):
            look.at(record)
            look.part = part
            if progress:
                progress(int(100 * (number + part)), 100 * len(sources))
            if look.characters >= _SURVEYED:
                break
        if not look.texts:
            raise DataError(f"{source.name}: no text is left to train on; {filter.left_out() or 'there is none'}")
        texts, tokens = texts + look.texts, tokens + look.tokens_in_all
        exact = exact and look.part == 1 and look.sampled == look.characters
    if progress:
        progress(1, 1)
    return Survey(texts, round(tokens), exact, kept)


class _Look:
    def __init__(self, settings: Settings, filter: TextFilter, kept: list[Encoded]) -> None:
        self._s, self._filter, self._kept = settings, filter, kept
        self.texts = self.characters = self.sampled = self.tokens = 0
        self.part = 0.0

    def at(self, record: Record) -> None:
        text = self._filter.text(record)
        if text is None:
            return
        if held_out(text, self._s.seed, self._s.valid_fraction):
            encoded = self._filter.encode(text, record.where) if len(self._kept) < _KEPT else None
            self._kept.extend([encoded] if encoded else [])
            return
        if self.sampled < _SAMPLED:
            encoded = self._filter.encode(text, record.where)
            self.sampled += len(text)
            if encoded is None:
                return
            self.tokens += len(encoded.ids) - 1
        self.texts += 1
        self.characters += len(text)

    @property
    def tokens_in_all(self) -> float:
        return self.tokens / max(self.sampled, 1) * self.characters / max(self.part, 1e-9)


def open_stream(
    settings: Settings,
    corpus: Corpus,
    filter: TextFilter,
    length: int,
    say: Callable[[str], None],
    progress: Progress | None,
) -> tuple[TextStream, list[Encoded], list[Encoded]]:
    """The training data, and the texts to validate and to test on, in pieces.

    Args:
        settings: of the run.
        corpus: its files.
        filter: makes tokens of texts.
        length: most inputs of a row.
        say: told what was found, one fact a line.
        progress: told how far looking through the data is.

    Raises:
        DataError: a file cannot be read, or there is nothing to train on.
    """
    own = corpus.valid is None and settings.valid_fraction > 0
    looked = survey(corpus.train, settings if own else replace(settings, valid_fraction=0.0), filter, progress)
    about = "" if looked.exact else "about "
    for source in corpus.train if len(corpus.train) > 1 else ():
        share = source.weight / sum(s.weight for s in corpus.train)
        say(f"train: {share:.0%} from {source.name}, files: {len(source.files):,}")
    names = ", ".join(s.name for s in corpus.train)
    say(f"train: {looked.texts:,} texts, {about}{looked.tokens:,} tokens ({names})")
    if line := filter.left_out():
        say(f"train: {line}")
    valid = looked.kept if own else _all(corpus.valid, settings, filter)
    test = _all(corpus.test, settings, filter)
    for name, texts in (("valid", valid), ("test", test)):
        if texts:
            say(f"{name}: {len(texts):,} texts, {sum(len(t.ids) - 1 for t in texts):,} tokens")
    if own and not valid:
        say("valid: too few texts to keep some of them; --valid names a file to validate on")
    stream = TextStream(
        corpus.train,
        settings,
        filter,
        length,
        looked.tokens,
        keep=partial(held_out, seed=settings.seed, fraction=settings.valid_fraction) if own else lambda text: False,
    )
    return stream, _cut(valid, length), _cut(test, length)


def _all(source: TextSource | None, settings: Settings, filter: TextFilter) -> list[Encoded]:
    if source is None:
        return []
    texts = [(filter.text(record), record.where) for record, _ in texts_of(source, settings.text_key)]
    found = [filter.encode(text, where) for text, where in texts if text is not None]
    if not any(found):
        raise DataError(f"{source.name}: no text is left; {filter.left_out() or 'there is none'}")
    return [encoded for encoded in found if encoded is not None]


def _cut(texts: Sequence[Encoded], length: int) -> list[Encoded]:
    return [piece for text in texts for piece in pieces(text, length)]
