"""Bytes and ceilings, against sums made by hand."""

from __future__ import annotations

import math
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from openelm_mlx import device
from openelm_mlx.benchmarks import bandwidth
from openelm_mlx.benchmarks.bandwidth import Bandwidth, read_bandwidth
from openelm_mlx.benchmarks.models import fill_randomly
from openelm_mlx.benchmarks.roofline import Roofline, mean_context, weight_bytes_per_token
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.cpu import unpacking
from openelm_mlx.model import OpenELM

V, D, HEAD = 320, 128, 32


def config(**changes: Any) -> OpenELMConfig:
    """Two layers: 2 query heads and 1 key-value head, 128 wide inside."""
    values: dict[str, Any] = {
        "model_dim": D,
        "num_transformer_layers": 2,
        "head_dim": HEAD,
        "vocab_size": V,
        "num_query_heads": (2, 2),
        "num_kv_heads": (1, 1),
        "ffn_multipliers": 1.0,
        "ffn_dim_divisor": 64,
        "normalize_qk_projections": True,
        "share_input_output_layers": True,
    }
    return OpenELMConfig(**{**values, **changes})


LAYER = D * HEAD * (2 + 2 * 1) + HEAD * 2 * D + D * 2 * D + D * D
"""Weights of a layer's four matrices."""
NORMS = 2 * (2 * D + 2 * HEAD) + D


def packed(weights: int) -> int:
    """Bytes in 4 bits, with a 16-bit scale and bias for each 64."""
    return weights // 2 + weights // 64 * 4


def model(precision: str, **changes: Any) -> OpenELM:
    made = OpenELM(config(**changes))
    fill_randomly(made, precision)
    return made


@pytest.mark.parametrize(("precision", "item"), [("fp32", 4), ("bf16", 2)])
def test_a_tied_table_counts_whole_and_once(precision: str, item: int) -> None:
    assert weight_bytes_per_token(model(precision)) == item * (2 * LAYER + NORMS + V * D)


@pytest.mark.parametrize(("precision", "item"), [("fp32", 4), ("bf16", 2)])
def test_an_untied_table_gives_one_row(precision: str, item: int) -> None:
    untied = model(precision, share_input_output_layers=False)
    assert weight_bytes_per_token(untied) == item * (2 * LAYER + NORMS + V * D + D)


def test_packed_arrays_count_as_packed() -> None:
    assert weight_bytes_per_token(model("4bit")) == 2 * packed(LAYER) + packed(V * D) + 2 * NORMS
    untied = model("4bit", share_input_output_layers=False)
    assert weight_bytes_per_token(untied) == 2 * packed(LAYER) + packed(V * D) + packed(D) + 2 * NORMS


def test_after_the_layers_were_replaced() -> None:
    unpacked = model("4bit")
    unpacking.unpack(unpacked)
    assert weight_bytes_per_token(unpacked) == 4 * (2 * LAYER + V * D) + 2 * NORMS


def test_a_matrix_as_tall_as_the_vocabulary_is_no_head_when_it_is_in_a_layer() -> None:
    tied = model("bf16", vocab_size=2 * D)  # proj_1 has 2 * 128 rows, too
    assert weight_bytes_per_token(tied) == 2 * (2 * LAYER + NORMS + 2 * D * D)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "4bit"])
def test_mlx_lms_openelm_has_the_same_bytes(tied: bool, precision: str) -> None:
    from mlx_lm.models.openelm import Model, ModelArgs

    own = config(share_input_output_layers=tied)
    theirs = Model(ModelArgs.from_dict(own.to_dict()))
    fill_randomly(theirs, precision)
    ours = model(precision, share_input_output_layers=tied)
    assert weight_bytes_per_token(theirs) == weight_bytes_per_token(ours)


@pytest.mark.parametrize("tied", [True, False])
def test_another_family(tied: bool) -> None:
    from mlx_lm.models.qwen2 import Model, ModelArgs

    made = Model(
        ModelArgs(
            model_type="qwen2", hidden_size=64, num_hidden_layers=1, intermediate_size=128, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-6, vocab_size=200, tie_word_embeddings=tied,
        )
    )  # fmt: skip
    attention = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    assert weight_bytes_per_token(made) == 4 * (layer + 64 + 200 * 64 + (0 if tied else 64))


def test_a_table_of_positions_gives_one_row() -> None:
    from mlx_lm.models.gpt2 import Model, ModelArgs

    made = Model(
        ModelArgs(
            model_type="gpt2", n_ctx=32, n_embd=16, n_head=2, n_layer=1, n_positions=32, layer_norm_epsilon=1e-5,
            vocab_size=100,
        )
    )  # fmt: skip
    layer = 16 * 64 + 64 + 64 * 16 + 16 + 3 * (16 * 16 + 16) + (16 * 16 + 16) + 2 * 2 * 16
    assert weight_bytes_per_token(made) == 4 * (layer + 2 * 16 + 100 * 16 + 16)


def test_a_model_without_a_table() -> None:
    assert weight_bytes_per_token(nn.Linear(8, 4, bias=True)) == 4 * (8 * 4 + 4)


# Ceilings.


def test_the_ceiling_at_a_context() -> None:
    roofline = Roofline(weight_bytes=1000, kv_bytes_per_token=10, bandwidth=Bandwidth(66_000.0, "by hand"))
    assert roofline.ceiling_tps(0) == 66
    assert roofline.ceiling_tps(10) == 60


@pytest.mark.parametrize(("prompt", "generated"), [(1, 2), (36, 128), (36, 1024), (2000, 48)])
def test_the_ceiling_of_a_generation_is_that_of_all_its_bytes(prompt: int, generated: int) -> None:
    roofline = Roofline(weight_bytes=1_000_000, kv_bytes_per_token=700, bandwidth=Bandwidth(5e9, "by hand"))
    # The first token comes of the prompt. The step that gives token n + 1 reads what n tokens and the prompt left.
    seconds = sum((1_000_000 + 700 * (prompt + n)) / 5e9 for n in range(1, generated))
    assert math.isclose(roofline.generation_ceiling(prompt, generated), (generated - 1) / seconds, rel_tol=1e-12)
    contexts = [prompt + n for n in range(1, generated)]
    assert mean_context(prompt, generated) == sum(contexts) / len(contexts)


# The measurement.


def test_the_bandwidth_is_a_plausible_one() -> None:
    measured = read_bandwidth(1 << 22)
    assert 1e7 < measured.bytes_per_s < 1e14
    assert measured.how.endswith(" over 4 MB")


def test_the_measurement_on_a_gpu_runs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_SECONDS", 0.01)
    monkeypatch.setattr(device, "backend", lambda: "metal")
    measured = read_bandwidth(1 << 18)
    assert 1e6 < measured.bytes_per_s < 1e14
    assert measured.how.startswith("MLX, bfloat16 ")


def test_less_is_read_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "backend", lambda: "cpu")
    monkeypatch.setattr(device, "memory", lambda: device.Memory(1 << 23, "by hand"))
    assert read_bandwidth().how.endswith(" over 2 MB")


def test_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 3.0, 3.0, 5.0, 10.0, 14.0, 14.0, 20.0])  # kinds of 3 and 2 s, then of 4 and 6 s
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(bandwidth, "_TRIES", 2)
    monkeypatch.setattr(bandwidth, "_SECONDS", 100.0)
    assert bandwidth._fastest({"a": lambda: mx.array(0), "b": lambda: None}) == ("a", 2.0)
