"""``python likelier.py BASE PAIRS [ADAPTER]``: how often the chosen response is the likelier one of a pair."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from openelm_mlx.adapters import attach_adapter, read_adapter  # before MLX: it chooses the BLAS
from openelm_mlx.finetune.data.batches import batch_of
from openelm_mlx.finetune.data.dataset import open_data
from openelm_mlx.finetune.losses import Arrays, evaluated_states
from openelm_mlx.finetune.preferences import response_logps
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.finetune.step import written_out
from openelm_mlx.loading import load_model
from openelm_mlx.tokenizer import Tokenizer


def main(base: str, data: str, adapter: str | None = None) -> None:
    """Print the share."""
    model, tokenizer = load_model(Path(base), dtype="float32", cpu_weights="float32"), Tokenizer.from_folder(Path(base))
    assert tokenizer is not None
    if adapter is not None:
        attach_adapter(model, read_adapter(Path(adapter)), Path(adapter))
    model.eval()
    settings = Settings(data=data, objective="dpo", raw=True, valid_fraction=0)
    examples = open_data(settings, tokenizer, 1024, lambda line: None).train.examples
    likelier = 0
    for pair in examples:
        batch = Arrays.of(batch_of([[row] for row in pair.rows]), fill_up=False)
        hidden = evaluated_states(model, batch, on_cpu=written_out(model))
        found: Any = response_logps(model, hidden, batch, lambda *_: None).tolist()
        likelier += found[0] > found[1]
    print(f"{likelier} of {len(examples)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
