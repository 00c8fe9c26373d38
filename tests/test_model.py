"""The decoder against stock mlx-lm's own OpenELM, with every kind of cache, and inside mlx-lm's generators."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from openelm_mlx.cache import make_cache
from openelm_mlx.generation import generate_tokens
from openelm_mlx.loading import parameter_shapes
from openelm_mlx.model import OpenELM
from tests.support.models import GLU_CASES, golden_config, golden_model, greedy_reference
from tests.support.tokenizers_made import byte_level_folder

PROMPT = [(7 * n * n + 3) % 250 for n in range(40)]
CHUNKS = (1, 9, 1, 16, 1, 12)


@pytest.fixture(scope="module")
def mlx_lm() -> Any:
    """The modules of mlx-lm that are used here; it takes seconds to import."""
    names = {"cache": "models.cache", "generate": "generate", "openelm": "models.openelm"}
    return SimpleNamespace(**{key: import_module(f"mlx_lm.{name}") for key, name in names.items()})


@pytest.fixture(scope="module")
def tokenizer(mlx_lm: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level tokenizer as mlx-lm loads it."""
    return import_module("mlx_lm.utils").load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def stock(mlx_lm: Any, ours: OpenELM) -> Any:
    """mlx-lm's model with the same weights."""
    theirs = mlx_lm.openelm.Model(mlx_lm.openelm.ModelArgs.from_dict(ours.config.to_dict()))
    theirs.update(ours.parameters())
    return theirs


def run(
    model: Any, cache: Sequence[Any] | None, chunks: Sequence[int] = CHUNKS, prompt: Sequence[int] = PROMPT
) -> mx.array:
    """All logits of the prompt, fed in chunks."""
    parts, start = [], 0
    for n in chunks:
        parts.append(model(mx.array([list(prompt[start : start + n])]), cache=cache))
        mx.eval(parts[-1])
        start += n
    return mx.concatenate(parts, axis=1)


def distance(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape
    return float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max())


def whole(model: Any, prompt: Sequence[int] = PROMPT) -> mx.array:
    return model(mx.array([list(prompt)]))


class TestAgainstMlxLm:
    @pytest.mark.parametrize("case", GLU_CASES)
    def test_logits(self, mlx_lm: Any, case: str) -> None:
        ours = golden_model(case)
        logits = whole(ours)
        assert logits.dtype == mx.float32
        assert distance(logits, whole(stock(mlx_lm, ours))) <= 1e-5
        assert float(mx.abs(logits).max()) > 0.5  # the comparison is of something

    @pytest.mark.parametrize("case", GLU_CASES)
    def test_bfloat16_is_as_close_to_float32(self, mlx_lm: Any, case: str) -> None:
        """Rounding differs from operation to operation; on the same rounded weights neither may be worse for it."""
        ours = golden_model(case)
        ours.set_dtype(mx.bfloat16)
        theirs = whole(stock(mlx_lm, ours))
        logits = whole(ours)
        assert logits.dtype == mx.bfloat16
        ours.set_dtype(mx.float32)
        exact = whole(ours)
        errors = [float(mx.sqrt(mx.square(x.astype(mx.float32) - exact).mean())) for x in (logits, theirs)]
        assert 0 < errors[0] <= 1.1 * errors[1] < 0.05

    @pytest.mark.parametrize("case", GLU_CASES)
    def test_parameter_names(self, mlx_lm: Any, case: str) -> None:
        ours = golden_model(case)
        theirs = mlx_lm.openelm.Model(mlx_lm.openelm.ModelArgs.from_dict(ours.config.to_dict()))
        assert parameter_shapes(ours) == parameter_shapes(theirs)

    def test_settings_that_are_seldom_used(self, mlx_lm: Any) -> None:
        import dataclasses

        config = dataclasses.replace(golden_config("tiny-tied"), rms_norm_eps=0.3, rope_freq_constant=50)
        ours = OpenELM(config)
        ours.update(golden_model("tiny-tied").parameters())
        assert distance(whole(ours), whole(stock(mlx_lm, ours))) <= 1e-5
        assert distance(whole(ours), whole(golden_model("tiny-tied"))) > 0.01


class TestCaches:
    @pytest.mark.parametrize("case", [*GLU_CASES, "tiny-no-glu"])
    def test_ours(self, case: str) -> None:
        model = golden_model(case)
        assert distance(run(model, make_cache(model)), whole(model)) <= 2e-5

    def test_ours_across_a_growth(self) -> None:
        model = golden_model("tiny-no-qk-norm")
        prompt = [(3 * n) % 250 for n in range(270)]
        cache = make_cache(model)
        assert distance(run(model, cache, (250, 1, 10, 9), prompt), whole(model, prompt)) <= 2e-5

    @pytest.mark.parametrize("case", ["tiny-tied", "tiny-untied"])
    def test_mlx_lms_default(self, mlx_lm: Any, case: str) -> None:
        model = golden_model(case)
        cache = mlx_lm.cache.make_prompt_cache(model)
        assert [type(c).__name__ for c in cache] == ["KVCache"] * len(model.layers)
        assert distance(run(model, cache), whole(model)) <= 2e-5

    def test_rotating_within_its_size(self, mlx_lm: Any) -> None:
        model = golden_model("tiny-tied")
        cache = mlx_lm.cache.make_prompt_cache(model, max_kv_size=64)
        assert type(cache[0]).__name__ == "RotatingKVCache"
        assert distance(run(model, cache), whole(model)) <= 2e-5

    def test_rotating_beyond_its_size(self, mlx_lm: Any) -> None:
        model = golden_model("tiny-tied")
        caches = [mlx_lm.cache.make_prompt_cache(model, max_kv_size=16) for _ in range(2)]
        ours, theirs = run(model, caches[0]), run(stock(mlx_lm, model), caches[1])
        assert distance(ours, theirs) <= 1e-5
        assert distance(ours, whole(model)) > 0.01  # something was forgotten
        assert bool(mx.isfinite(ours).all())

    @pytest.mark.parametrize("bits", [4, 8])
    def test_quantized(self, mlx_lm: Any, bits: int) -> None:
        model = golden_model("tiny-tied")
        caches = [[mlx_lm.cache.QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers] for _ in range(2)]
        ours, theirs = run(model, caches[0]), run(stock(mlx_lm, model), caches[1])
        assert distance(ours, theirs) <= 1e-5
        assert 1e-4 < distance(ours, whole(model)) < (0.1 if bits == 8 else 1.0)

    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
    def test_batch_with_left_padding(self, mlx_lm: Any, dtype: mx.Dtype) -> None:
        model = golden_model("tiny-tied")
        model.set_dtype(dtype)
        rows = [PROMPT[:3], PROMPT[:8], PROMPT[10:15]]
        padding = [8 - len(row) for row in rows]
        cache = [mlx_lm.cache.BatchKVCache(padding) for _ in model.layers]
        logits = model(mx.array([[0] * n + row for n, row in zip(padding, rows, strict=True)]), cache=cache)[:, -1]
        tolerance = 2e-5 if dtype == mx.float32 else 0.05
        for _ in range(3):  # the prompt, then two tokens more
            for row, found in zip(rows, logits, strict=True):
                assert distance(found, whole(model, row)[0, -1]) <= tolerance
            tokens = [int(t) for t in logits.argmax(-1).tolist()]  # type: ignore[union-attr, arg-type]
            logits = model(mx.array(tokens)[:, None], cache=cache)[:, -1]
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]

    @pytest.mark.parametrize("kind", ["ours", "mlx-lm's"])
    def test_trimming(self, mlx_lm: Any, kind: str) -> None:
        model = golden_model("tiny-tied")
        cache = make_cache(model) if kind == "ours" else mlx_lm.cache.make_prompt_cache(model)
        run(model, cache, (10,))
        run(model, cache, (5,), [99] * 5)
        assert mlx_lm.cache.can_trim_prompt_cache(cache)
        assert mlx_lm.cache.trim_prompt_cache(cache, 5) == 5
        logits = run(model, cache, (30,), PROMPT[10:])
        assert distance(logits, whole(model)[:, 10:]) <= 2e-5

    def test_ours_can_be_saved_and_loaded_by_mlx_lm(self, mlx_lm: Any, tmp_path: Path) -> None:
        model = golden_model("tiny-tied")
        cache = make_cache(model)
        if hasattr(mlx_lm.cache.KVCache(), "meta_state"):
            pytest.skip("this mlx-lm keeps a cache's state in its older form")
        run(model, cache, (10,))
        mlx_lm.cache.save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
        loaded = mlx_lm.cache.load_prompt_cache(str(tmp_path / "cache.safetensors"))
        assert distance(run(model, loaded, (30,), PROMPT[10:]), whole(model)[:, 10:]) <= 2e-5


class TestLogitsToKeep:
    @pytest.mark.parametrize("keep", [1, 3, 40])
    def test_the_last_ones(self, keep: int) -> None:
        model = golden_model("tiny-untied")
        assert distance(model(mx.array([PROMPT]), logits_to_keep=keep), whole(model)[:, -keep:]) <= 1e-5

    def test_more_than_there_are_and_none(self) -> None:
        model = golden_model("tiny-tied")
        assert model(mx.array([[1, 2]]), logits_to_keep=5).shape == (1, 2, 512)
        assert model(mx.array([[1, 2]]), logits_to_keep=0).shape == (1, 0, 512)

    def test_with_a_cache_and_rows(self) -> None:
        model = golden_model("tiny-tied")
        ids = mx.array([PROMPT[:6], PROMPT[6:12]])
        out = model(ids, cache=make_cache(model), logits_to_keep=2)
        assert distance(out, model(ids)[:, -2:]) <= 1e-5


class TestHead:
    def test_tied_to_the_embedding(self) -> None:
        model = golden_model("tiny-tied")
        assert "lm_head" not in model
        before = whole(model)
        model.transformer.token_embeddings.weight = model.transformer.token_embeddings.weight * 2
        assert distance(whole(model), before) > 0.1

    def test_of_its_own(self) -> None:
        model = golden_model("tiny-untied")
        before = whole(model)
        model.lm_head.weight = model.lm_head.weight * 2
        assert distance(whole(model), before * 2) <= 1e-5


def test_rows_of_a_batch_are_independent() -> None:
    model = golden_model("tiny-tied")
    both = model(mx.array([PROMPT[:9], PROMPT[9:18]]))
    assert distance(both[0], whole(model, PROMPT[:9])[0]) <= 1e-5
    assert distance(both[1], whole(model, PROMPT[9:18])[0]) <= 1e-5


def test_attention_is_causal() -> None:
    model = golden_model("tiny-tied")
    changed = [*PROMPT[:20], 77, *PROMPT[21:]]
    a, b = whole(model), whole(model, changed)
    assert distance(a[:, :20], b[:, :20]) == 0
    assert distance(a[:, 20:], b[:, 20:]) > 0.01


def test_a_batch_of_one_token() -> None:
    model = golden_model("tiny-tied")
    assert distance(whole(model, [5])[0, 0], whole(model, [5, 6])[0, 0]) <= 1e-5


def test_layers_and_protocol() -> None:
    model = golden_model("tiny-untied")
    assert len(model.layers) == 3
    assert model.model_type == "openelm"
    assert model.args is model.config
    assert all(isinstance(layer, nn.Module) for layer in model.layers)


class TestMlxLmsGenerators:
    @pytest.mark.parametrize("options", [{}, {"max_kv_size": 64}, {"prefill_step_size": 7}])
    def test_generate_step(self, mlx_lm: Any, options: dict[str, Any]) -> None:
        model = golden_model("tiny-tied")
        steps = mlx_lm.generate.generate_step(mx.array(PROMPT), model, max_tokens=12, **options)
        assert [int(token) for token, _ in steps] == greedy_reference(model, PROMPT, 12)

    def test_generate_step_with_our_cache(self, mlx_lm: Any) -> None:
        model = golden_model("tiny-tied")
        steps = mlx_lm.generate.generate_step(mx.array(PROMPT), model, max_tokens=8, prompt_cache=make_cache(model))
        assert [int(token) for token, _ in steps] == greedy_reference(model, PROMPT, 8)

    def test_generate_step_with_a_quantized_cache(self, mlx_lm: Any) -> None:
        model = golden_model("tiny-tied")
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
        runs = [
            [int(token) for token, _ in mlx_lm.generate.generate_step(mx.array(PROMPT), m, max_tokens=8, **options)]
            for m in (model, stock(mlx_lm, model))
        ]
        assert runs[0] == runs[1]

    def test_stream_generate(self, mlx_lm: Any, tokenizer: Any) -> None:
        model = golden_model("tiny-tied")
        responses = list(mlx_lm.generate.stream_generate(model, tokenizer, PROMPT, max_tokens=9))
        expected = greedy_reference(model, PROMPT, 9)
        assert [r.token for r in responses] == expected
        assert responses[-1].finish_reason == "length"

    def test_batch_generate(self, mlx_lm: Any) -> None:
        model = golden_model("tiny-tied")
        prompts = [PROMPT[:4], PROMPT[5:25], PROMPT[30:32]]
        as_ids: Any = SimpleNamespace(eos_token_ids=[511], decode=str)
        response = mlx_lm.generate.batch_generate(model, as_ids, prompts, max_tokens=10)
        expected = [greedy_reference(model, prompt, 10) for prompt in prompts]
        assert response.texts == [str(tokens) for tokens in expected]

    def test_its_own_caches_in_our_generator(self, mlx_lm: Any) -> None:
        model = golden_model("tiny-tied")
        expected = greedy_reference(model, PROMPT, 10)
        for cache in (mlx_lm.cache.make_prompt_cache(model), mlx_lm.cache.make_prompt_cache(model, max_kv_size=64)):
            found = generate_tokens(model, PROMPT, 10, cache=cache, prefill_step=16, eos_token_ids=())
            assert list(found) == expected

    def test_the_fields_of_its_responses(self, mlx_lm: Any) -> None:
        import dataclasses

        from openelm_mlx.generation import GenerationResponse

        ours = [f.name for f in dataclasses.fields(GenerationResponse)]
        theirs = [f.name for f in dataclasses.fields(mlx_lm.generate.GenerationResponse)]
        assert set(theirs) <= set(ours)


def test_the_config_mlx_lm_reads_is_json() -> None:
    json.dumps(golden_model("tiny-tied").config.to_dict())
