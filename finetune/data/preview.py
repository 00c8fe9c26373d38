"""A batch for people: token by token, which are learned and from where."""

from __future__ import annotations

from collections.abc import Iterator

from openelm_mlx.finetune.data.types import Batch, Ids
from openelm_mlx.tokenizer import Tokenizer


def preview(batch: Batch, tokenizer: Tokenizer, *, pairs: bool = False) -> list[str]:
    """The batch in lines: first what it holds, then each input token and, where one is learned, the token after it.

    Text is in quotes with what cannot be seen escaped; ``b'...'`` is part of a character. With `pairs` every two rows
    are a pair's responses.
    """
    return [*_summary(batch, pairs=pairs), *_tokens(batch, tokenizer)]


def _summary(batch: Batch, *, pairs: bool) -> list[str]:
    rows, length = batch.ids.shape
    lengths = [sum(row) for row in batch.documents]
    fill = f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
    held = f"examples  {len(batch.where)}{', packed: none sees another in its row' if batch.packed else ''}"
    if pairs:
        held = f"pairs     {len(batch.where) // 2}, a row for each response: one chosen, one rejected"
    trained, padding = len(batch.targets), batch.ids.size - batch.tokens
    return [
        f"rows      {rows} of {length} tokens, filled with {fill}",
        held,
        f"inputs    {batch.tokens}, and {padding} of padding ({padding / batch.ids.size:.1%} of the batch)",
        f"learned   {trained} tokens ({trained / batch.tokens:.1%} of the inputs have one to learn after them)",
    ]


def _tokens(batch: Batch, tokenizer: Tokenizer) -> Iterator[str]:
    length = batch.ids.shape[1]
    learned = dict(zip(batch.places.tolist(), batch.targets.tolist(), strict=True))
    where = iter(batch.where)
    for number, (row, sizes) in enumerate(zip(batch.ids, batch.documents, strict=True)):
        start = 0
        for size in sizes:
            first = number * length + start
            targets = [learned.get(first + n) for n in range(size)]
            yield ""
            yield f"row {number + 1}, {next(where)}: {size} inputs, {size - targets.count(None)} tokens learned"
            yield from _document(row[start : start + size], targets, tokenizer)
            start += size
        if start < length:
            yield f"  padding: {length - start}, not learned and seen by nothing"


def _document(ids: Ids, targets: list[int | None], tokenizer: Tokenizer) -> Iterator[str]:
    shown = [_shown(token, tokenizer) for token in ids.tolist()]
    width = max(map(len, (*shown, "token")))
    yield f"  position       id  {'token':{width}}  learns to predict"
    for position, (token, text, target) in enumerate(zip(ids.tolist(), shown, targets, strict=True)):
        line = f"  {position:8}  {token:7}  {text:{width}}"
        yield line.rstrip() if target is None else f"{line}  {_shown(target, tokenizer)} ({target})"


def _shown(token: int, tokenizer: Tokenizer) -> str:
    spelled = tokenizer.token_bytes(token)
    if not spelled:
        known = "BOS" if token == tokenizer.bos_token_id else "EOS" if token in tokenizer.eos_token_ids else "control"
        return f"<{known}>"
    try:
        return repr(spelled.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(spelled)
