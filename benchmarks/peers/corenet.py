"""Apple's own MLX port of OpenELM, `mlx_examples/open_elm` of a CoreNet checkout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openelm_mlx.benchmarks.peers.base import (
    Absent,
    Contender,
    Description,
    Job,
    Paths,
    Run,
    load_openblas,
    packed_bits,
)
from openelm_mlx.benchmarks.peers.mlxlm import with_openblas

if TYPE_CHECKING:
    import mlx.core as mx

    from openelm_mlx.benchmarks.models import Subject

NAME = "corenet"
PORT = Path("mlx_examples", "open_elm")

TOKENS_PER_EVAL = 8
"""Tokens that `generate` in the port's inference.py lets the lazy graph grow to."""


def contenders(subject: Subject, backend: str, paths: Paths) -> list[Contender | Absent]:
    """Stock, and in float32 with OpenBLAS."""
    if paths.corenet is None:
        return [Absent(NAME, "no path of a CoreNet checkout given")]
    if not (paths.corenet / PORT / "open_elm.py").is_file():
        return [Absent(NAME, f"{paths.corenet}: no CoreNet checkout, there is no {PORT / 'open_elm.py'}")]
    path = str(paths.corenet.resolve())
    stock: Contender | Absent = Contender(peer=NAME, path=path)
    if packed_bits(subject):
        # open_elm.load_model refuses any other version, and the tied head reads the table as a plain matrix.
        stock = Absent(NAME, "its packed models need MLX 0.10.0")
    return [stock, *with_openblas(NAME, backend, path)]


class CoreNet:
    """The port's model with our weights, and its generation loop."""

    def __init__(self, job: Job) -> None:
        blas = load_openblas() if job.contender.openblas else None
        import mlx.core as mx

        from openelm_mlx.benchmarks.peers.onmlx import STOCK_BLAS, to_float32

        self.job, self.blas = job, blas or STOCK_BLAS
        assert job.contender.path
        sys.path.append(job.contender.path)
        self.inference = import_module("mlx_examples.open_elm.inference")
        self.model = self._model(job)
        if job.contender.dtype == "float32":
            to_float32(self.model)
        self.model.eval()
        mx.eval(self.model.parameters())

    def _model(self, job: Job) -> Any:
        from openelm_mlx.benchmarks.models import fill_randomly

        open_elm = self.inference.open_elm
        # Its configs are known by name and expand ranges; this one has the sizes already.
        shapes = open_elm.GPTConfig(**_plain(job.config))
        shapes.num_query_heads, shapes.num_kv_heads = job.config["num_query_heads"], job.config["num_kv_heads"]
        shapes.ffn_multipliers = job.config["ffn_multipliers"]
        open_elm.GPTConfig.from_name = lambda **_: shapes
        model = open_elm.OpenELM(job.subject["name"], shapes.vocab_size, shapes.max_context_length)
        if job.folder is not None:
            model.load_weights(list(_weights(job.folder).items()))
        else:
            fill_randomly(model, job.subject["precision"])
        return model

    def describe(self) -> Description:
        """The dtype is that of the logits."""
        import mlx.core as mx

        from openelm_mlx.benchmarks.peers.onmlx import description

        return description(self.model, self.model(mx.array([[0]])).dtype, self.job, self.blas)

    def run(self, ids: Sequence[int], gen_tokens: int, time_limit: float | None) -> Run:
        """One generation."""
        from openelm_mlx.benchmarks.peers.onmlx import measure

        return measure(self._pieces(ids, gen_tokens), len(ids), gen_tokens, time_limit)

    def _pieces(self, ids: Sequence[int], gen_tokens: int) -> Iterator[list[int]]:
        """Tokens as `generate` in the port's inference.py has them computed: the first, then up to each eighth."""
        import mlx.core as mx

        waiting: list[Any] = []
        stream = self.inference.generate_token(mx.array([list(ids)]), self.model)
        for n in range(1, gen_tokens + 1):
            waiting.append(next(stream))
            if n == 1 or n % TOKENS_PER_EVAL == 0 or n == gen_tokens:
                mx.eval(waiting)
                yield [int(token.item()) for token in waiting]
                waiting = []


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that its GPTConfig takes as they are; sizes by layer are put in their place later."""
    names = ("vocab_size", "max_context_length", "num_transformer_layers", "model_dim", "head_dim", "ffn_with_glu")
    more = ("ffn_dim_divisor", "normalize_qk_projections", "share_input_output_layers", "rope_freq_constant")
    return {name: config[name] for name in names + more}


def _weights(folder: Path) -> dict[str, mx.array]:
    """A folder's weights by CoreNet's names: as stored, packed ones unpacked to float32."""
    from openelm_mlx.benchmarks.peers.onmlx import to_float32
    from openelm_mlx.checkpoint import open_weights
    from openelm_mlx.loading import build, config_of, read_model_config
    from openelm_mlx.trees import flat

    values, tensors = read_model_config(folder), open_weights(folder)
    quantization = values.get("quantization")
    model = build(config_of(values, folder / "config.json"), quantization, tensors, folder)
    model.load_weights([(name, tensor.read()) for name, tensor in tensors.items()])
    if quantization:
        to_float32(model)
    return {
        name.removeprefix("transformer.").replace("lm_head.", "classifier."): value
        for name, value in flat(model.parameters()).items()
    }


load = CoreNet
