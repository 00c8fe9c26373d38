"""The shapes of other families, and running them: tiny ones, through mlx-lm's own code and ours."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from openelm_mlx.benchmarks.families import Family, FamilyResult, families, lines, measure_families, select
from openelm_mlx.benchmarks.families_worker import (
    build,
    do,
    load_family,
    load_ours,
    norm_layers,
)
from openelm_mlx.benchmarks.protocol import Protocol, Spread
from openelm_mlx.benchmarks.trainers.onmlx import parameters as parameter_count
from openelm_mlx.device import Memory
from openelm_mlx.errors import OpenELMError
from tests.support.models import converted_folder, golden_config
from tests.support.tokenizers_made import MODEL

FAMILIES = {family.name: family for family in families()}
QUICK = Protocol(prompt_tokens=5, gen_tokens=4, repeats=2)

PUBLISHED = {
    "OpenELM-270M": 271_527_168,  # the golden layer-wise scaling's, as the next three
    "OpenELM-450M": 457_179_136,
    "OpenELM-1_1B": 1_079_891_456,
    "OpenELM-3B": 3_036_647_424,
    "OLMo-1B": 4.71e9 / 4,  # model.safetensors on the Hub, float32
    "MobiLlama-1B": (4.78e9 + 0.262e9) / 4,  # likewise
    "MobiLlama-0.5B": 1.07e9 / 2,  # its chat model, bfloat16
    "Phi-1.5": 2.84e9 / 2,  # model.safetensors, float16
    "Phi-2": 2.78e9,
    "Phi-3-mini": 3_821_079_552,  # Keras' presets
    "Qwen2-0.5B": 0.494e9,
}
NORMS = {
    "OpenELM-270M": 16 * 4 + 1,
    "OpenELM-450M": 20 * 4 + 1,
    "OpenELM-1_1B": 113,  # OpenELM's paper gives this one and OLMo's
    "OpenELM-3B": 36 * 4 + 1,
    "OLMo-1B": 33,
    "MobiLlama-1B": 22 * 2 + 1,
    "Phi-1.5": 24 + 1,  # one for attention and feed-forward network, which run side by side
    "Phi-2": 32 + 1,
    "Phi-3-mini": 32 * 2 + 1,
    "Qwen2-0.5B": 24 * 2 + 1,
}


def tiny(module: str = "llama", **changes: Any) -> Family:
    """A family that runs in no time."""
    configs: dict[str, dict[str, Any]] = {
        "llama": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "rms_norm_eps": 1e-5,
            "vocab_size": 100,
            "tie_word_embeddings": False,
        },
        "olmo": {
            "d_model": 64,
            "n_layers": 3,
            "n_heads": 2,
            "mlp_hidden_size": None,
            "mlp_ratio": 8,
            "vocab_size": 100,
            "embedding_size": 128,
            "weight_tying": True,
        },
        "openelm": golden_config("tiny-tied").to_dict(),
    }
    config = {"model_type": module, **configs[module], **changes}
    return Family(name=f"tiny-{module}", module=module, config=config, source="made up", parameters=1)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The jobs that would have been given to processes."""
    given: list[dict[str, Any]] = []

    def filled(result: FamilyResult, job: dict[str, Any], protocol: Protocol) -> FamilyResult:
        given.append(job | {"protocol": dataclasses.asdict(protocol)})
        return result

    monkeypatch.setattr("openelm_mlx.benchmarks.families._filled", filled)
    return given


# The data file.


def test_all_families_are_there() -> None:
    assert FAMILIES.keys() == PUBLISHED.keys()
    assert all(family.source.startswith("https://huggingface.co/") for family in FAMILIES.values())
    sizes = [family.parameters for family in families()]
    assert sizes == sorted(sizes)


def test_recorded_parameters_are_the_published_ones() -> None:
    for name, family in FAMILIES.items():
        assert family.parameters == pytest.approx(PUBLISHED[name], rel=0.002), name


def test_mlx_lms_models_have_the_recorded_parameters_and_norms() -> None:
    """Built without taking memory: nothing is evaluated."""
    before = mx.get_active_memory()
    for name, norms in NORMS.items():
        model = build(FAMILIES[name])
        assert parameter_count(model) == FAMILIES[name].parameters, name
        assert norm_layers(model) == norms, name
    assert mx.get_active_memory() - before < 1e6


def test_what_is_left_out_differs_as_it_says() -> None:
    """MobiLlama-0.5B: as many parameters as mlx-lm's llama has of its shapes, with one feed-forward network for all."""
    family = FAMILIES["MobiLlama-0.5B"]
    model: Any = build(family)
    shared = sum(parameter_count(layer.mlp) for layer in model.layers[1:])
    assert parameter_count(model) - shared == family.parameters
    assert family.config == FAMILIES["MobiLlama-1B"].config
    assert [name for name, f in FAMILIES.items() if f.left_out] == ["MobiLlama-0.5B"]


def test_select() -> None:
    assert select() == families()
    assert [f.name for f in select(["Phi-2", "OLMo-1B"])] == ["Phi-2", "OLMo-1B"]
    with pytest.raises(OpenELMError, match=r"no family named 'GPT-5'; there are OpenELM-270M, .*Phi-3-mini"):
        select(["GPT-5"])


# Models to run.


@pytest.mark.parametrize("tied", [True, False])
def test_olmo_reads_a_prompt_at_once_as_it_reads_it_token_by_token(tied: bool) -> None:
    """For one token mlx-lm's code needs no mask, so that the one added here is held against its own attention."""
    model: Any = load_family(tiny("olmo", weight_tying=tied), "fp32")
    ids = [5, 17, 80, 3, 41, 99]
    single, at_once = model.make_cache(), model.make_cache()
    expected = [model(mx.array([[i]]), cache=single)[0, 0] for i in ids]
    parts = [model(mx.array([part]), cache=at_once)[0] for part in (ids[:4], ids[4:])]
    assert mx.allclose(mx.concatenate(parts), mx.stack(expected), rtol=1e-4, atol=1e-5)
    assert mx.abs(expected[-1]).max() > 1e-3


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", mx.bfloat16), ("4bit", mx.bfloat16)])
def test_olmos_mask_keeps_the_models_dtype(precision: str, dtype: mx.Dtype) -> None:
    model: Any = load_family(tiny("olmo"), precision)
    assert model(mx.array([[1, 2, 3]]), cache=model.make_cache()).dtype == dtype


def test_a_family_too_large_for_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openelm_mlx.device.memory", lambda: Memory(int(3e9), "tested"))
    refusals = [(load_family, "Phi-2", "bf16", "5.6"), (load_ours, "OpenELM-3B", "4bit", "7.6")]
    for load, name, precision, needed in refusals:
        with pytest.raises(OpenELMError, match=rf"^needs {needed} GB, and there are 3.0 GB \(tested\); choose smaller"):
            load(FAMILIES[name], precision)


# Measuring.


def test_families_are_measured_each_in_its_process() -> None:
    left_out = dataclasses.replace(tiny(), name="odd", left_out="it is odd")
    llama, odd = measure_families(QUICK, precision="fp32", chosen=[tiny(), left_out])
    assert (llama.name, llama.peer, llama.precision, llama.norm_layers) == ("tiny-llama", "mlx-lm", "fp32", 5)
    for speed in (llama.prompt, llama.generation):
        assert speed and len(speed.values) == QUICK.repeats and speed.least > 0
    # Two layers of four 64 x 64 and three 64 x 128 matrices, five norms, the head, one row of the embedding.
    assert llama.weight_bytes == 4 * (2 * (4 * 64 * 64 + 3 * 64 * 128) + 5 * 64 + 100 * 64 + 64)
    assert odd == FamilyResult("odd", "mlx-lm", "fp32", 1, left_out="it is odd")


def test_openelm_runs_through_mlx_lms_code_and_ours(jobs: list[dict[str, Any]]) -> None:
    results = list(measure_families(QUICK, precision="fp32", chosen=[tiny("openelm")]))
    assert [r.peer for r in results] == ["mlx-lm", "openelm-mlx"]
    theirs, ours = (do(job) for job in jobs)
    assert theirs["norm_layers"] == ours["norm_layers"] == 4 * 4 + 1
    assert theirs["weight_bytes"] == ours["weight_bytes"] == 681_344 * 4
    assert len(ours["prompt"]) == len(ours["generation"]) == len(theirs["generation"]) == QUICK.repeats


def test_a_checkpoint_runs_with_its_own_weights(jobs: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = converted_folder(tmp_path / "model", "4bit", tokenizer=MODEL)
    [result] = measure_families(QUICK, precision="fp32", chosen=[], checkpoints=[str(folder)])
    assert (result.name, result.precision) == (str(folder), "stored")
    figures = do(jobs[0])
    assert (figures["parameters"], figures["norm_layers"]) == (681_344, 17)


def test_a_family_that_breaks_is_a_result_that_says_why() -> None:
    broken = dataclasses.replace(tiny("openelm"), config={"model_type": "openelm", "vocab_size": 100})
    _, ours = measure_families(QUICK, precision="fp32", chosen=[broken])
    assert ours.left_out and ours.left_out.startswith("the config has no ")
    assert (ours.prompt, ours.generation, ours.weight_bytes) == (None, None, None)


def test_an_unknown_precision() -> None:
    with pytest.raises(OpenELMError, match="precision 'int3' is not known; use one of bf16, "):
        list(measure_families(QUICK, precision="int3", chosen=[]))


def test_lines() -> None:
    spread = Spread.of([19.0, 20.0, 22.0])
    olmo = FamilyResult("OLMo-1B", "mlx-lm", "fp32", 1_176_764_416, 33, 4_707_057_664, spread, spread, note="repaired")
    ours = FamilyResult("OpenELM-270M", "openelm-mlx", "fp32", 271_527_168, 65, 1_086_108_672, spread, spread)
    gone = FamilyResult("Phi-2", "mlx-lm", "fp32", 2_779_683_840, left_out="needs 11.1 GB")
    assert lines([olmo, ours, gone, olmo]) == [
        "family        through      precision  parameters  norms  MB/token  prompt tok/s  generation tok/s",
        "OLMo-1B       mlx-lm       fp32           1.177B     33   4,707.1          20.0  20.0 (19.0-22.0)",
        "OpenELM-270M  openelm-mlx  fp32           0.272B     65   1,086.1          20.0  20.0 (19.0-22.0)",
        "OLMo-1B       mlx-lm       fp32           1.177B     33   4,707.1          20.0  20.0 (19.0-22.0)",
        "Phi-2 (mlx-lm): left out: needs 11.1 GB",
        "OLMo-1B: repaired",
    ]
    assert lines([]) == []
