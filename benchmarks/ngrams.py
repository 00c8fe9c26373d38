"""How well counting words does: perplexities of n-gram models, to put a trained model's beside.

    python -m openelm_mlx.benchmarks.ngrams TOKENIZER TRAIN VALID [--order 5]

The models are of the same tokens as the trained one's. Each text is a document of its own: BOS is context and not
predicted, EOS is predicted. Perplexities can be compared between models with one tokenizer, bits per byte between all.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openelm_mlx.benchmarks.kneser_ney import KneserNey
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.corpus import find_corpus, texts_of
from openelm_mlx.tokenizer import Tokenizer

ORDERS = (1, 5)
"""Tokens in the longest grams of the models measured."""


@dataclass(frozen=True)
class Documents:
    """Texts as tokens."""

    ids: list[list[int]]
    """Of each text: BOS, its tokens, EOS."""
    nbytes: int
    """Of the texts in UTF-8."""

    @property
    def predicted(self) -> int:
        """Tokens that have something before them."""
        return sum(len(ids) - 1 for ids in self.ids)


@dataclass(frozen=True)
class Measured:
    """What an n-gram model makes of texts that it was not made from."""

    order: int
    loss: float
    """Nats a predicted token, in the mean."""
    bits_per_byte: float
    """Of the texts in UTF-8."""

    @property
    def perplexity(self) -> float:
        """Of a token."""
        return math.exp(self.loss)


def measure(train: Documents, valid: Documents, vocab_size: int, orders: Sequence[int] = ORDERS) -> Iterator[Measured]:
    """Make a model of each order from `train`, and measure it on `valid`.

    Raises:
        OpenELMError: there are no texts.
    """
    for order in orders:
        model = KneserNey(train.ids, order=order, vocab_size=vocab_size)
        nats = -sum(float(model.log_probabilities(ids).sum()) for ids in valid.ids)
        yield Measured(order, nats / valid.predicted, nats / math.log(2) / valid.nbytes)


def read_documents(path: str, tokenizer: Tokenizer, key: str = "text") -> Documents:
    """The texts of a file or folder, as `openelm finetune` finds them there.

    Raises:
        OpenELMError: it cannot be read, has no text, or the tokenizer no end-of-text token.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise OpenELMError("the tokenizer names no end-of-text token")
    begin = [eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    ids, nbytes = [], 0
    for source in find_corpus(path, None, None).train:
        for record, _ in texts_of(source, key):
            if record.problem:
                raise OpenELMError(f"{record.where}: {record.problem}")
            ids.append([*begin, *tokenizer.encode(record.values["text"], add_bos=False), eos])
            nbytes += len(record.values["text"].encode("utf-8", "surrogatepass"))
    if not nbytes:
        raise OpenELMError(f"{path}: has no text")
    return Documents(ids, nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 2 if something is refused."""
    parser = argparse.ArgumentParser(prog="python -m openelm_mlx.benchmarks.ngrams", description=__doc__)
    parser.add_argument("tokenizer", help="a file, a folder or a Hub name")
    parser.add_argument("train", help="what the models are made from: a file or folder of texts")
    parser.add_argument("valid", help="what they are measured on")
    parser.add_argument("--order", type=int, default=ORDERS[-1], help="tokens in the longest grams (%(default)s)")
    parser.add_argument("--text-key", default="text", help="of the text in JSON records (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        tokenizer = Tokenizer.named(given.tokenizer)
        train, valid = (read_documents(path, tokenizer, given.text_key) for path in (given.train, given.valid))
        print(f"train: {len(train.ids):,} texts, {train.predicted:,} tokens")
        print(f"valid: {len(valid.ids):,} texts, {valid.predicted:,} tokens, {valid.nbytes:,} bytes")
        print(f"{'order':>5} {'perplexity':>11} {'nats/token':>11} {'bits/byte':>10}")
        for m in measure(train, valid, tokenizer.vocab_size, sorted({ORDERS[0], given.order})):
            print(f"{m.order:>5} {m.perplexity:>11.2f} {m.loss:>11.4f} {m.bits_per_byte:>10.4f}", flush=True)
    except OpenELMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
