"""The roofline of decoding: bytes that a token makes the machine read, and the speed that its bandwidth allows.

At batch 1 every weight is read once for each token and used for one multiplication, so reading is what bounds decoding
(Williams, Waterman and Patterson 2009, "Roofline"): tokens a second <= bandwidth / bytes read a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.benchmarks.bandwidth import Bandwidth
from openelm_mlx.trees import flat


@dataclass(frozen=True)
class Roofline:
    """What bounds a model's decoding on a machine."""

    weight_bytes: int
    """Bytes of weights read for one token; see :func:`weight_bytes_per_token`."""
    kv_bytes_per_token: int
    """Bytes of keys and values that one position takes over all layers, all of which are read for every later token."""
    bandwidth: Bandwidth
    """Of the machine."""

    def bytes_read(self, context: float) -> float:
        """Bytes read for a token that attends to `context` positions, its own included."""
        return self.weight_bytes + self.kv_bytes_per_token * context

    def ceiling_tps(self, context: float) -> float:
        """Most tokens a second at `context` positions."""
        return self.bandwidth.bytes_per_s / self.bytes_read(context)

    def generation_ceiling(self, prompt_tokens: int, gen_tokens: int) -> float:
        """Most tokens a second over a whole generation, as its speed is measured: over the tokens after the first."""
        return self.ceiling_tps(mean_context(prompt_tokens, gen_tokens))


def mean_context(prompt_tokens: int, gen_tokens: int) -> float:
    """Positions that a decode step attends to, on average over a generation.

    The first token comes of the prompt; step i of the `gen_tokens` - 1 others attends to `prompt_tokens` + i.
    """
    return prompt_tokens + gen_tokens / 2


def weight_bytes_per_token(model: nn.Module) -> int:
    """Bytes of the parameters that one decoded token reads, from the arrays as they are (packed ones as packed).

    Every layer is read whole. The embedding table is read whole when it is the output head too, else one row of it;
    other tables (of positions) give one row. Holds for any decoder whose layers are all used for every token: this
    project's, mlx-lm's and others of `mlx.nn`, also after layers were replaced.
    """
    tables = [path for path, layer in model.named_modules() if callable(getattr(layer, "as_linear", None))]
    arrays = list(flat(model.parameters()).items())
    head = _tied_table(arrays, tables)
    total = 0
    for name, array in arrays:
        one_row = _owner(name) in tables and _owner(name) != head
        total += array.nbytes // array.shape[0] if one_row else array.nbytes
    return total


def _tied_table(arrays: Sequence[tuple[str, mx.array]], tables: Collection[str]) -> str | None:
    """Path of the embedding table if it is also the output head; None if there is a matrix of its own for that.

    The matrix of a head stands outside the list of layers and has a row for every token.
    """
    rows = {_owner(name): array.shape[0] for name, array in arrays if _owner(name) in tables}
    if not rows:
        return None
    vocabulary = max(rows, key=lambda path: rows[path])
    for name, array in arrays:
        in_list = any(part.isdigit() for part in name.split("."))
        if not in_list and _owner(name) not in tables and array.ndim == 2 and array.shape[0] == rows[vocabulary]:
            return None
    return vocabulary


def _owner(name: str) -> str:
    """Path of the layer that a parameter belongs to."""
    return name.rpartition(".")[0]
