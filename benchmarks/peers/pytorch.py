"""PyTorch: a plain decoder with the same shapes, in float32 and bfloat16.

Runs in a Python that has PyTorch, and need not have anything else of ours: this file imports nothing that does.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openelm_mlx.benchmarks.peers.base import (
    Absent,
    Contender,
    Description,
    Job,
    LeftOut,
    Paths,
    Run,
    packed_bits,
    process_peak_gb,
)
from openelm_mlx.benchmarks.peers.clock import timed
from openelm_mlx.config import OpenELMConfig

if TYPE_CHECKING:
    from openelm_mlx.benchmarks.models import Subject

NAME = "pytorch"
OLDEST = (2, 5)
"""The first version whose attention takes grouped heads."""


def contenders(subject: Subject, backend: str, paths: Paths) -> list[Contender | Absent]:
    """float32 and bfloat16."""
    python = paths.torch_python or (Path(sys.executable) if find_spec("torch") else None)
    if python is None:
        return [Absent(NAME, "no path of a Python that has it given")]
    if not python.is_file():
        return [Absent(NAME, f"{python}: no such program")]
    if bits := packed_bits(subject):
        return [Absent(NAME, f"no {bits}-bit layers in plain PyTorch")]
    # A Python in a virtual environment is a link, and finds its packages by where the link lies.
    return [
        Contender(peer=NAME, variant=dtype, dtype=dtype, python=str(python.absolute()))
        for dtype in ("float32", "bfloat16")
    ]


class Decoder:
    """OpenELM as functions of a dict of tensors, which has Hugging Face's names. Batch of one."""

    def __init__(self, torch: Any, config: OpenELMConfig, weights: dict[str, Any]) -> None:
        self.torch, self.config = torch, config
        self.F = torch.nn.functional
        self.weights = {name.removeprefix("transformer."): value for name, value in weights.items()}
        embedding = self.weights["token_embeddings.weight"]
        self.head = embedding if config.share_input_output_layers else self.weights["lm_head.weight"]
        self.like: dict[str, Any] = {"dtype": embedding.dtype, "device": embedding.device}
        window, D = config.max_context_length, config.head_dim
        frequencies = config.rope_freq_constant ** -(torch.arange(0, D, 2) / D)
        angles = torch.outer(torch.arange(window), torch.cat([frequencies, frequencies]))  # (window, D)
        self.cos, self.sin = angles.cos().to(**self.like), angles.sin().to(**self.like)
        self.cache = [
            (torch.zeros(H_kv, window, D, **self.like), torch.zeros(H_kv, window, D, **self.like))
            for H_kv in config.num_kv_heads
        ]

    def __call__(self, ids: Any, start: int) -> Any:
        """Logits ``(V,)`` after ``(L,)`` ids that stand at position `start` and later; keys and values are kept."""
        x = self.weights["token_embeddings.weight"][ids]
        for layer in range(self.config.num_transformer_layers):
            x = x + self._attention(layer, self._norm(f"layers.{layer}.attn_norm", x), start)
            x = x + self._ffn(layer, self._norm(f"layers.{layer}.ffn_norm", x))
        return self.F.linear(self._norm("norm", x[-1]), self.head)

    def _norm(self, name: str, x: Any) -> Any:
        return self.F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _attention(self, layer: int, x: Any, start: int) -> Any:
        L, end, at = x.shape[0], start + x.shape[0], f"layers.{layer}.attn"
        H, H_kv = self.config.num_query_heads[layer], self.config.num_kv_heads[layer]
        qkv = self.F.linear(x, self.weights[f"{at}.qkv_proj.weight"]).view(L, H + 2 * H_kv, -1).transpose(0, 1)
        q, k, v = qkv.split([H, H_kv, H_kv])
        if self.config.normalize_qk_projections:
            q, k = self._norm(f"{at}.q_norm", q), self._norm(f"{at}.k_norm", k)
        keys, values = self.cache[layer]
        keys[:, start:end], values[:, start:end] = self._rope(k, start, end), v
        out = self.F.scaled_dot_product_attention(
            self._rope(q, start, end)[None],
            keys[None, :, :end],
            values[None, :, :end],
            is_causal=L > 1,
            enable_gqa=H_kv != H,
        )
        return self.F.linear(out[0].transpose(0, 1).reshape(L, -1), self.weights[f"{at}.out_proj.weight"])

    def _rope(self, x: Any, start: int, end: int) -> Any:
        first, second = x.chunk(2, dim=-1)
        rotated = self.torch.cat([-second, first], dim=-1)
        return x * self.cos[start:end] + rotated * self.sin[start:end]

    def _ffn(self, layer: int, x: Any) -> Any:
        y = self.F.linear(x, self.weights[f"layers.{layer}.ffn.proj_1.weight"])
        if self.config.ffn_with_glu:
            gate, up = y.chunk(2, dim=-1)
            y = self.F.silu(gate) * up
        else:
            y = self.F.silu(y)
        return self.F.linear(y, self.weights[f"layers.{layer}.ffn.proj_2.weight"])


class PyTorch:
    """The decoder with random weights or a folder's, and a greedy loop."""

    def __init__(self, job: Job) -> None:
        if find_spec("torch") is None:
            raise LeftOut(f"{sys.executable} has no torch")
        self.torch = torch = import_module("torch")
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
            raise LeftOut(f"PyTorch {'.'.join(map(str, OLDEST))} or newer is needed, there is {torch.__version__}")
        self.config = OpenELMConfig.from_dict(job.config)
        self.device = "cpu" if job.backend == "cpu" else "cuda" if torch.cuda.is_available() else "mps"
        like = {"dtype": getattr(torch, str(job.contender.dtype)), "device": self.device}
        weights = _random(torch, self.config, like) if job.folder is None else _read(job.folder, like)
        self.model = Decoder(torch, self.config, weights)

    def describe(self) -> Description:
        """The BLAS is named as PyTorch's build names it."""
        like, weights = self.model.like, dict(self.model.weights)
        if not self.config.share_input_output_layers:
            del weights["token_embeddings.weight"]  # one row of it is read
        size = sum(w.numel() * w.element_size() for w in weights.values())
        blas = re.search(r"BLAS_INFO=(\w+)", self.torch.__config__.show())
        on_cpu = f"{blas[1] if blas else 'not told'}, {self.torch.get_num_threads()} threads"
        return Description(
            dtype=str(like["dtype"]).removeprefix("torch."),
            weight_bytes=size,
            kv_bytes_per_token=2 * sum(self.config.num_kv_heads) * self.config.head_dim * like["dtype"].itemsize,
            vocab_size=self.config.vocab_size,
            blas=on_cpu if self.device == "cpu" else f"PyTorch's {self.device} kernels",
            versions={NAME: self.torch.__version__},
        )

    def run(self, ids: Sequence[int], gen_tokens: int, time_limit: float | None) -> Run:
        """One generation; every token is read before the next step begins."""
        cuda = self.torch.cuda if self.device == "cuda" else None
        if cuda:
            cuda.reset_peak_memory_stats()
        with self.torch.inference_mode():
            timing, tokens = timed(self._pieces(ids, gen_tokens), len(ids), gen_tokens, time_limit)
        peak = cuda.max_memory_allocated() / 1e9 if cuda else process_peak_gb(resource.RUSAGE_SELF)
        return Run(timing, tokens, peak)

    def _pieces(self, ids: Sequence[int], gen_tokens: int) -> Iterator[list[int]]:
        start, following = 0, self.torch.tensor(list(ids), device=self.device)
        for _ in range(gen_tokens):
            chosen = self.model(following, start).argmax(keepdim=True)
            start, following = start + len(following), chosen
            yield [int(chosen)]


def _random(torch: Any, config: OpenELMConfig, like: dict[str, Any]) -> dict[str, Any]:
    """Small random matrices, and norms of ones."""
    torch.manual_seed(0)

    def matrix(*shape: int) -> Any:
        return torch.empty(*shape, **like).normal_(std=0.02)

    D, M = config.head_dim, config.model_dim
    weights = {"token_embeddings.weight": matrix(config.vocab_size, M), "norm.weight": torch.ones(M, **like)}
    if not config.share_input_output_layers:
        weights["lm_head.weight"] = matrix(config.vocab_size, M)
    sizes = zip(config.num_query_heads, config.num_kv_heads, config.ffn_dims, strict=True)
    for layer, (H, H_kv, width) in enumerate(sizes):
        at = f"layers.{layer}"
        weights |= {f"{at}.{norm}.weight": torch.ones(M, **like) for norm in ("attn_norm", "ffn_norm")}
        if config.normalize_qk_projections:
            weights |= {f"{at}.attn.{norm}.weight": torch.ones(D, **like) for norm in ("q_norm", "k_norm")}
        weights[f"{at}.attn.qkv_proj.weight"] = matrix((H + 2 * H_kv) * D, M)
        weights[f"{at}.attn.out_proj.weight"] = matrix(M, H * D)
        weights[f"{at}.ffn.proj_1.weight"] = matrix(2 * width if config.ffn_with_glu else width, M)
        weights[f"{at}.ffn.proj_2.weight"] = matrix(M, width)
    return weights


def _read(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """A folder's safetensors files."""
    if find_spec("safetensors") is None:
        raise LeftOut(f"{sys.executable} has no safetensors to read the weights with")
    load_file = import_module("safetensors.torch").load_file
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise LeftOut(f"{folder}: no model*.safetensors")
    return {name: value.to(**like) for file in files for name, value in load_file(file).items()}


load = PyTorch
