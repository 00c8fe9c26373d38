"""Train the tests' small SentencePiece model: BPE, byte fallback, identity normalization, dummy prefix, like Llama's.

    python tests/data/tokenizer/make_model.py

The text is this project's own, but for the opening of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865, public
domain).
"""

from __future__ import annotations

import io
from pathlib import Path

import sentencepiece  # type: ignore[import-untyped,unused-ignore]

TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the
use of a book," thought Alice "without pictures or conversations?" So she was considering in her own mind (as well as
she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would
be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by
her. There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the
Rabbit say to itself, "Oh dear! Oh dear! I shall be late!"
A tokenizer cuts a text into pieces. Every piece has a number, and the model reads and writes these numbers only. Once
upon a time there was a small model that could say hello to the world and count 0 1 2 3 4 5 6 7 8 9.
def f(x):
    if x > 0:
        return x + 1
    return [f(y) for y in range(10)]
<|user|> Name a colour, please. <|assistant|> Blue is a colour; green is another = = == === ...
naïve café façade, Straße, ein schöner Tag, où êtes-vous? ¿Qué hora es? Ünïcödé.
"""


def main() -> None:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=out,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.999,
        minloglevel=2,
    )
    Path(__file__).with_name("tokenizer.model").write_bytes(out.getvalue())


if __name__ == "__main__":
    main()
