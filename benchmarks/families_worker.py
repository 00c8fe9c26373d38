"""One family, measured in a process of its own: builds the model, runs it, prints its figures as one line of JSON."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx import device, loading
from openelm_mlx.benchmarks import norms
from openelm_mlx.benchmarks.families import Family
from openelm_mlx.benchmarks.models import PRECISIONS, fill_randomly, random_model
from openelm_mlx.benchmarks.peers.base import OURS
from openelm_mlx.benchmarks.peers.onmlx import measure
from openelm_mlx.benchmarks.peers.ours import pieces
from openelm_mlx.benchmarks.protocol import Protocol, prompt_ids
from openelm_mlx.benchmarks.roofline import weight_bytes_per_token
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import OpenELMError
from openelm_mlx.model import OpenELM

WARM_UP = 2
"""Tokens of the run that does not count, which compiles and fills caches."""


def build(family: Family) -> nn.Module:
    """mlx-lm's model of this family's shapes. Nothing is evaluated, so it takes no memory.

    Raises:
        ImportError: mlx-lm has no such module.
    """
    module = _import(family.module)
    model = module.Model(module.ModelArgs.from_dict(family.config))
    return _RunnableOlmo(model) if family.module == "olmo" else model


def _import(name: str) -> Any:
    # mlx-lm's olmo ends the process if the package hf_olmo is not installed, but uses nothing of it: a model of random
    # weights has no tokenizer. An empty module answers the question, and saves importing torch where it is installed.
    import mlx_lm.models

    asked = name == "olmo" and "hf_olmo" not in sys.modules
    if asked:
        sys.modules["hf_olmo"] = ModuleType("hf_olmo")
    try:
        return importlib.import_module(f"{mlx_lm.models.__name__}.{name}")
    finally:
        if asked:
            del sys.modules["hf_olmo"]


class _RunnableOlmo(nn.Module):
    """mlx-lm's OLMo, with the two things repaired that stop it: seen in mlx-lm 0.31.3 and 0.32.2.

    With a tied output head it returns its caches beside the logits. And it adds the mask to the attention scores, where
    mlx-lm's caches hand out the word "causal".
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.olmo = model

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        out = self.olmo(ids, cache)
        return out[0] if isinstance(out, tuple) else out

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        return self.olmo.layers

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches, with masks of numbers."""
        from mlx_lm.models.cache import KVCache

        embedding = self.olmo.model.transformer.wte
        dtype = embedding.scales.dtype if "scales" in embedding else embedding.weight.dtype
        caches: list[Any] = [KVCache() for _ in self.layers]
        for cache in caches:
            cache.make_mask = partial(_added_mask, cache, dtype)
        return caches


def _added_mask(cache: Any, dtype: mx.Dtype, length: int, **_: Any) -> mx.array | None:
    """``(L, offset + L)``: 0 where attention may look, minus infinity elsewhere; None for one position."""
    if length == 1:
        return None
    seen = mx.arange(cache.offset, cache.offset + length)[:, None] >= mx.arange(cache.offset + length)
    return mx.where(seen, 0, -mx.inf).astype(dtype)


def norm_layers(model: nn.Module) -> int:
    """Norm layers of a model, whatever their kind and whether or not they have weights."""
    return sum(type(module).__name__.endswith("Norm") for module in model.modules())


def load_family(family: Family, precision: str) -> nn.Module:
    """mlx-lm's model of this family, filled with random weights: ``mlx_lm.generate.generate_step`` can drive it.

    Raises:
        OpenELMError: it does not fit in memory.
    """
    _require_memory(family, precision, PRECISIONS[precision][0])
    model = build(family)
    fill_randomly(model, precision)
    model.eval()
    return model


def load_ours(family: Family, precision: str) -> OpenELM:
    """Our model of an OpenELM's shapes, made ready as for everyone.

    Raises:
        OpenELMError: it does not fit in memory.
    """
    dtype = loading.target_dtype(PRECISIONS[precision][0], None)
    _require_memory(family, precision, dtype)
    return random_model(OpenELMConfig.from_dict(family.config), precision)


def _require_memory(family: Family, precision: str, dtype: mx.Dtype) -> None:
    # Packing starts from unpacked weights, so both are there for a moment; a CPU may keep packed ones packed.
    stored, bits = PRECISIONS[precision]
    needed = family.parameters * (stored.size + bits / 8 if bits else max(stored.size, dtype.size))
    if memory := device.too_little(needed):
        raise OpenELMError(
            f"needs {needed / 1e9:.1f} GB, and there are {memory.available / 1e9:.1f} GB ({memory.source}); "
            "choose smaller families or a smaller precision"
        )


def do(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job of :func:`openelm_mlx.benchmarks.families.measure_families`; what comes back fills a `FamilyResult`."""
    protocol = Protocol(**job["protocol"])
    if job["peer"] == OURS:
        return _ours(Family(**job["family"]), job["precision"], protocol)
    if "family" in job:
        model = load_family(Family(**job["family"]), job["precision"])
        return _theirs(model, protocol)
    from mlx_lm import load
    from mlx_lm.utils import get_total_parameters

    model = load(job["checkpoint"])[0]
    return {"parameters": int(get_total_parameters(model))} | _theirs(model, protocol)


def _ours(family: Family, precision: str, protocol: Protocol) -> dict[str, Any]:
    model = load_ours(family, precision)
    config = model.config
    ids = prompt_ids(protocol.prompt_tokens, config.vocab_size)
    speeds = _speeds(protocol, lambda n: pieces(model, ids, n))
    # By the architecture: how many modules the running model makes of its norms is its own affair.
    return {"norm_layers": norms.norm_layers(config), "weight_bytes": weight_bytes_per_token(model), **speeds}


def _theirs(model: nn.Module, protocol: Protocol) -> dict[str, Any]:
    from mlx_lm.generate import generate_step, generation_stream, wired_limit

    table = next(m for m in model.modules() if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding)))
    ids = mx.array(prompt_ids(protocol.prompt_tokens, table.weight.shape[0]))
    stream: Any = generation_stream
    speeds = _speeds(
        protocol,
        lambda n: ([int(token)] for token, _ in generate_step(ids, model, max_tokens=n)),
        stream,
        wired_limit(model, [stream]),  # as mlx-lm generates text
    )
    return {"norm_layers": norm_layers(model), "weight_bytes": weight_bytes_per_token(model), **speeds}


def _speeds(
    protocol: Protocol,
    start: Callable[[int], Iterator[list[int]]],
    stream: Any = None,
    around: AbstractContextManager[None] | None = None,
) -> dict[str, list[float]]:
    """Tokens a second of the prompt and after it, run by run.

    Args:
        protocol: what is run.
        start: a number of tokens -> the tokens as they come.
        stream: what MLX computes them on; None: its default one.
        around: what all runs happen inside.
    """
    with around or nullcontext():
        measure(start(WARM_UP), protocol.prompt_tokens, WARM_UP, None, stream)
        runs = [
            measure(
                start(protocol.gen_tokens), protocol.prompt_tokens, protocol.gen_tokens, protocol.time_limit, stream
            )
            for _ in range(protocol.repeats)
        ]
    return {
        "prompt": [run.timing.prompt_tps for run in runs],
        "generation": [run.timing.generation_tps for run in runs],
    }


def main() -> None:
    """Do the job given as JSON on the command line."""
    try:
        figures = do(json.loads(sys.argv[1]))
    except OpenELMError as e:
        sys.exit(str(e))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
