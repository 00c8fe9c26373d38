"""Counting a decode step's primitives, against hand counts and stock mlx-lm."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from openelm_mlx.benchmarks import dispatches
from openelm_mlx.benchmarks.dispatches import Dispatches, count, count_mlx_lm, count_ours
from openelm_mlx.config import PRESETS, OpenELMConfig
from openelm_mlx.errors import OpenELMError


def config(layers: int, **changes: Any) -> OpenELMConfig:
    values: dict[str, Any] = {
        "model_dim": 128,
        "num_transformer_layers": layers,
        "head_dim": 64,
        "vocab_size": 256,
        "num_query_heads": (4,) * layers,
        "num_kv_heads": (2,) * layers,
        "normalize_qk_projections": True,
        "share_input_output_layers": True,
    }
    return OpenELMConfig(**{**values, **changes})


def arrays(*shapes: tuple[int, ...]) -> list[mx.array]:
    made = [mx.random.normal(shape) for shape in shapes]
    mx.eval(made)
    return made


def test_a_product_a_sum_and_a_view_are_two() -> None:
    x, w, y = arrays((3, 4), (4, 8), (3, 8))
    counted = count(lambda: [(x @ w + y).reshape(2, 12)])
    assert counted.by_primitive == {"Add": 1, "Matmul": 1}
    assert counted.total == 2 and counted.per_layer == 0


def test_what_the_results_do_not_need_is_not_counted() -> None:
    x, w = arrays((3, 4), (4, 8))

    def step() -> Sequence[mx.array]:
        x @ w
        kept = mx.exp(x)
        return kept, kept[:1]

    assert count(step).by_primitive == {"Exp": 1}


def test_views_launch_nothing() -> None:
    (x,) = arrays((2, 3, 4))

    def step() -> Sequence[mx.array]:
        y = x.swapaxes(1, 2).reshape(2, 12)[:, 2:8][None].squeeze(0)
        parts = mx.split(mx.broadcast_to(y, (5, 2, 6)), 2, axis=-1)
        return [mx.stop_gradient(mx.unflatten(part.flatten(), 0, (-1, 3))) for part in parts]

    assert count(step).total == 0


def test_a_primitive_with_several_results_counts_once() -> None:
    (x,) = arrays((6,))
    assert count(lambda: list(mx.divmod(x, 2.0))).by_primitive == {"DivMod": 1}


def test_every_call_of_a_compiled_function_is_one() -> None:
    @mx.compile
    def gate(a: mx.array, b: mx.array) -> mx.array:
        return nn.silu(a) * b

    x, y = arrays((4, 4), (4, 4))
    assert count(lambda: [gate(gate(x, y) @ y, y)]).by_primitive == {"Compiled": 2, "Matmul": 1}


def test_fused_functions_are_one_primitive_each() -> None:
    q, kv, w = arrays((1, 4, 1, 8), (1, 2, 5, 8), (8,))

    def step() -> Sequence[mx.array]:
        normed = mx.fast.rms_norm(q, w, 1e-6)
        turned = mx.fast.rope(normed, 8, traditional=False, base=1e4, scale=1.0, offset=3)
        out = mx.fast.scaled_dot_product_attention(turned, kv, kv, scale=0.1, mask=mx.array([[True] * 5]))
        assert out.shape == (1, 4, 1, 8)
        return [mx.fast.layer_norm(out, None, None, 1e-6)]

    assert count(step).by_primitive == {"LayerNorm": 1, "RMSNorm": 1, "RoPE": 1, "ScaledDotProductAttention": 1}


def test_a_fused_function_waits_for_all_its_inputs() -> None:
    x, w = arrays((2, 8), (8,))
    counted = count(lambda: [mx.fast.rms_norm(mx.exp(x), mx.sin(w), 1e-6)])
    assert counted.by_primitive == {"Exp": 1, "RMSNorm": 1, "Sin": 1}


def test_conversions_before_a_fused_function_count() -> None:
    x, w = arrays((2, 8), (8,))
    half = x.astype(mx.bfloat16)
    mx.eval(half)
    assert count(lambda: [mx.fast.rms_norm(half, w, 1e-6)]).by_primitive == {"AsType": 1, "RMSNorm": 1}


def test_a_packed_embedding_is_three_gathers_and_one_unpacking() -> None:
    layer = nn.QuantizedEmbedding(16, 64)
    mx.eval(layer.parameters())
    assert count(lambda: [layer(mx.array([[3]]))]).by_primitive == {"Gather": 3, "Quantize": 1}


def test_nothing_stays_behind() -> None:
    @mx.compile
    def normed(x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x * 2, None, 1e-6)

    originals = mx.fast.rms_norm, mx.fast.rope, mx.dequantize
    x = mx.array([[3.0, -4.0]])
    assert count(lambda: [normed(x)]).by_primitive == {"Compiled": 1, "RMSNorm": 1}
    assert (mx.fast.rms_norm, mx.fast.rope, mx.dequantize) == originals
    assert mx.allclose(normed(x), mx.array([[3.0, -4.0]]) / 12.5**0.5, atol=1e-5)
    assert count(lambda: [normed(x)]).by_primitive == {"Compiled": 1, "RMSNorm": 1}


def test_a_step_that_fails_leaves_the_functions_alone() -> None:
    original = mx.fast.rms_norm

    def step() -> Sequence[mx.array]:
        raise RuntimeError("no step")

    with pytest.raises(RuntimeError, match="no step"):
        count(step)
    assert mx.fast.rms_norm is original


def test_without_mx_compile_nothing_is_counted() -> None:
    mx.disable_compile()
    try:
        with pytest.raises(OpenELMError, match=r"C\+\+ compiler"):
            count(lambda: [mx.zeros((2,)) + 1])
    finally:
        mx.enable_compile()


def test_a_layer_of_mlx_lm_by_hand() -> None:
    """Read off mlx_lm/models/openelm.py, cache.py and generate.py."""
    layer = {
        "RMSNorm": 4,  # attention, feed-forward, queries, keys
        "Matmul": 4,
        "RoPE": 2,
        "SliceUpdate": 2,
        "ScaledDotProductAttention": 1,
        "Compiled": 1,  # SwiGLU
        "Add": 2,
    }
    rest = {"Gather": 1, "RMSNorm": 1, "Matmul": 1, "LogSumExp": 1, "Subtract": 1, "ArgReduce": 1}
    counted = count_mlx_lm(config(3))
    assert counted.layer == layer
    assert counted.per_layer == 16
    expected = {name: 3 * layer.get(name, 0) + rest.get(name, 0) for name in layer | rest}
    assert counted.by_primitive == expected
    packed = count_mlx_lm(config(3), "4bit")
    assert packed.layer == {"QuantizedMatmul" if name == "Matmul" else name: n for name, n in layer.items()}


@pytest.mark.parametrize("precision", ["bf16", "4bit"])
@pytest.mark.parametrize("of", [count_ours, count_mlx_lm])
def test_counts_grow_by_the_layer(of: Any, precision: str) -> None:
    two, five = (of(config(layers), precision) for layers in (2, 5))
    assert two.layer == five.layer
    assert five.total - two.total == 3 * two.per_layer


@pytest.mark.parametrize("of", [count_ours, count_mlx_lm])
def test_matrices_that_groups_do_not_divide_stay_whole(of: Any) -> None:
    """An FFN of 96: the conversion keeps its second matrix, whose rows have 96 weights, in full precision."""
    narrow = config(2, ffn_multipliers=0.75, ffn_dim_divisor=32)
    assert narrow.ffn_dims == (96, 96)
    mixed, packed = of(narrow, "4bit").layer, of(config(2), "4bit").layer
    assert mixed["QuantizedMatmul"] == packed["QuantizedMatmul"] - 1
    assert sum(n for name, n in mixed.items() if name in ("Matmul", "AddMM")) == 1


def test_fewer_norms_are_fewer_dispatches() -> None:
    assert count_mlx_lm(config(2, normalize_qk_projections=False)).per_layer == 14
    assert count_ours(config(2, normalize_qk_projections=False)).per_layer < count_ours(config(2)).per_layer


def test_ours_needs_no_more_than_mlx_lm() -> None:
    for precision in ("bf16", "4bit"):
        ours, theirs = count_ours(config(2), precision), count_mlx_lm(config(2), precision)
        assert ours.per_layer <= theirs.per_layer


def test_the_largest_size_takes_no_memory() -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    counted = count_ours(OpenELMConfig.preset("OpenELM-3B"), "4bit")
    assert mx.get_peak_memory() - before < 10e6
    assert counted.total > 36 * counted.per_layer


def test_scaling_changes_no_count() -> None:
    """Heads and widths differ from layer to layer, primitives do not."""
    small = OpenELMConfig.preset("OpenELM-270M")
    even = dataclasses.replace(
        small, qkv_multipliers=None, num_query_heads=(12,) * 16, num_kv_heads=(3,) * 16, ffn_multipliers=2.0
    )
    assert count_ours(small) == count_ours(even)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(OpenELMError, match=r"5bit.*bf16"):
        count_ours(config(1), "5bit")


def test_the_table_shows_both_and_a_layer() -> None:
    sizes = [("small", config(2)), ("larger", config(3))]
    rows = dispatches.compare(sizes, ["bf16", "4bit"])
    text = dispatches.lines(rows)
    assert [line.split()[:3] for line in text[2:6]] == [
        ["small", "bf16", "2"],
        ["small", "4bit", "2"],
        ["larger", "bf16", "3"],
        ["larger", "4bit", "3"],
    ]
    assert text[4].split()[-2:] == ["54", "16"]
    assert len(text) == 6 + 4  # a layer of each program in each precision
    assert text[-1].startswith("A layer of mlx-lm, 4bit: 4 QuantizedMatmul, 4 RMSNorm, 2 Add")
    assert rows[0].to_json()["mlx_lm"]["total"] == rows[0].mlx_lm.total  # type: ignore[union-attr]


def test_without_mlx_lm_its_columns_are_empty() -> None:
    (row,) = dispatches.compare([("small", config(1))], ["bf16"], mlx_lm=False)
    assert row.mlx_lm is None and row.to_json()["mlx_lm"] is None
    assert "mlx-lm" not in dispatches.lines([row])[1].replace("openelm-mlx", "")


def test_a_process_that_counted_ends_well() -> None:
    """The tracing thread's compiled functions must not be freed while Python shuts down."""
    program = (
        "from openelm_mlx.benchmarks.dispatches import count_ours; from openelm_mlx.config import OpenELMConfig;"
        "print(count_ours(OpenELMConfig.preset('OpenELM-270M')).total)"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert int(done.stdout) > 16


def test_presets_by_their_layers() -> None:
    for name in PRESETS:
        shape = OpenELMConfig.preset(name)
        counted = count_mlx_lm(shape)
        assert counted.total == 16 * shape.num_transformer_layers + 6


def test_totals_are_sums() -> None:
    counted = Dispatches({"Matmul": 3, "Add": 2}, {"Matmul": 1})
    assert (counted.total, counted.per_layer) == (5, 1)
    assert counted.to_json() == {
        "total": 5,
        "per_layer": 1,
        "by_primitive": {"Matmul": 3, "Add": 2},
        "layer": {"Matmul": 1},
    }
