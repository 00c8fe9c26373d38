"""A trained run as a PyTorch checkpoint in Hugging Face's layout, bfloat16: ``python pack.py RUN FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openelm_mlx  # first: it chooses the BLAS before MLX is loaded
from openelm_mlx.atomic import new_folder
from openelm_mlx.checkpoint import PROVENANCE
from openelm_mlx.trees import flat


def main(run: Path, out: Path) -> None:
    """Write the checkpoint, its tokenizer and the run's record."""
    import mlx.core as mx

    model, tokenizer = openelm_mlx.load(run)
    assert tokenizer is not None
    config = json.loads((run / "config.json").read_text())
    del config[PROVENANCE]
    with new_folder(out, force=True, ours=lambda _: True) as folder:
        weights = {name: value.astype(mx.bfloat16) for name, value in flat(model.parameters()).items()}
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=2) + "\n")
        tokenizer.save(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
