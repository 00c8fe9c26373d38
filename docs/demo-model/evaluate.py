"""Held-out perplexity of a model, beside which n-gram models can be put: ``python evaluate.py MODEL VALID.jsonl``.

Each text is a document of its own, as in openelm_mlx.benchmarks.ngrams: BOS is context and not predicted, EOS is
predicted. Windows overlap by half, so that every token but a text's first ones has at least half a window before it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import openelm_mlx  # first: it chooses the BLAS before MLX is loaded


def main(folder: Path, texts: Path) -> None:
    """Measure, and print a line."""
    import mlx.core as mx
    import mlx.nn as nn

    model, tokenizer = openelm_mlx.load(folder)
    assert tokenizer is not None
    window = model.config.max_context_length
    total, count, nbytes = 0.0, 0, 0
    for line in texts.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        nbytes += len(text.encode())
        seen = 1  # tokens predicted so far, and BOS
        for start in range(0, max(1, len(ids) - window // 2 - 1), window // 2):
            part = mx.array(ids[start : start + window + 1])
            losses = nn.losses.cross_entropy(model(part[None, :-1])[0].astype(mx.float32), part[1:])
            new = losses[seen - start - 1 :]
            total, count, seen = total + float(new.sum()), count + new.size, start + len(part)
        assert seen == len(ids)
    nats = total / count
    bits = total / math.log(2) / nbytes
    print(f"{count:,} tokens: {nats:.4f} nats a token, perplexity {math.exp(nats):.2f}, {bits:.4f} bits a byte")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
