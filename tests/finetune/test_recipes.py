"""Recipes: those that come with the package, those of one's own, and what is laid over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune import recipes
from openelm_mlx.finetune.settings import Settings, SettingsError


def write(folder: Path, text: str | bytes) -> Path:
    file = folder / "mine.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


INSTRUCT = {
    "270m": (5, 2e-5, "hinge"),
    "450m": (8, 3e-5, "hinge"),
    "1.1b": (5, 5e-5, "sigmoid"),
    "3b": (10, 1e-4, "hinge"),
}
"""Epochs, learning rate and loss, from the table in CoreNet's projects/openelm/README-instruct.md."""


def test_names() -> None:
    assert recipes.names() == [
        "commonsense-dora",
        "commonsense-lora",
        "from-scratch",
        *(f"instruct-dpo-{size}" for size in sorted(INSTRUCT)),
        "quick-lora",
    ]


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_commonsense_is_corenets(method: str) -> None:
    # projects/openelm/peft_configs/openelm_lora_270M.yaml
    corenet: dict[str, Any] = {
        "method": method,
        "rank": 32,
        "alpha": 32,
        "dropout": 0.1,
        "rslora": False,
        "targets": ("token_embeddings", "qkv_proj", "out_proj", "proj_1", "proj_2"),
        "layers": "all",
        "max_length": 2048,
        "batch_size": 8,
        "accumulation": 2,
        "steps": 4375,
        "schedule": "cosine",
        "learning_rate": 0.0003,
        "final_learning_rate": 0.00003,
        "warmup_steps": 1000,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0,
        "max_grad_norm": 1.0,
        "raw": True,
        "train_on_prompt": True,
    }
    settings = recipes.resolve(f"commonsense-{method}", {})
    assert {name: getattr(settings, name) for name in corenet} == corenet


def test_the_published_figures_are_quoted() -> None:
    text = recipes.find("commonsense-lora").read_text()
    for figure in (
        "boolq 62.14",
        "piqa 50.05",
        "siqa 42.02",
        "hellaswag 24.84",
        "winogrande 49.88",
        "arc-easy 26.60",
        "arc-challenge 24.57",
        "obqa 28.00",
    ):
        assert figure in text


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_say_what_they_are_and_leave_model_and_data_open(name: str) -> None:
    assert recipes.find(name).read_text().startswith("# ")
    assert recipes.load(name).keys().isdisjoint({"model", "data", "valid", "test"})


def test_a_file_of_ones_own_and_a_runs_config(tmp_path: Path) -> None:
    assert recipes.load(write(tmp_path, "rank: 16\nlayers: last-4\n")) == {"rank": 16, "layers": "last-4"}
    settings = Settings(rank=3, packing="off", targets=("proj_1",), wandb="p")
    config = write(tmp_path, yaml.safe_dump(settings.to_mapping()))
    assert recipes.resolve(str(config), {}) == settings


def test_what_is_given_lies_over_the_recipe_and_that_over_the_defaults() -> None:
    assert recipes.resolve(None, {}) == Settings()
    settings = recipes.resolve("commonsense-lora", {"rank": 4, "targets": "proj_1,proj_2", "raw": False})
    assert (settings.rank, settings.targets, settings.raw) == (4, ("proj_1", "proj_2"), False)
    assert (settings.alpha, settings.seed) == (32, 0)


def test_epochs_given_replace_the_recipes_steps() -> None:
    settings = recipes.resolve("quick-lora", {"epochs": 2.0})
    assert (settings.epochs, settings.steps) == (2.0, None)
    both = recipes.resolve("quick-lora", {"epochs": 2.0, "steps": 70})
    assert (both.epochs, both.steps) == (2.0, 70)


def test_what_is_given_is_refused_by_its_name_alone() -> None:
    for recipe in (None, "quick-lora"):
        with pytest.raises(SettingsError, match=r"^rank must be at least 1, not 0$"):
            recipes.resolve(recipe, {"rank": 0})
        with pytest.raises(SettingsError, match=r"^unknown setting 'ranks'; there are model"):
            recipes.resolve(recipe, {"ranks": 1})


def test_an_adapters_settings_are_refused_for_the_whole_model() -> None:
    with pytest.raises(SettingsError, match=r"^rank, layers: of an adapter, and method full trains the whole model"):
        recipes.resolve(None, {"method": "full", "layers": "all", "rank": 8})
    assert recipes.resolve("quick-lora", {"method": "full"}).method == "full"


REFUSED: list[tuple[str | bytes, str]] = [
    ("", ": has no settings: lines such as `rank: 16` are needed"),
    ("# nothing\n", ": has no settings"),
    ("- rank\n- 8\n", ": has no settings"),
    ("rank 8\n", ": has no settings"),
    ("rank: 8\nalpha: [1\n", ":3: not readable as YAML: expected ',' or ']', but got '<stream end>'"),
    ("rank: 8\n\tlayers: all\n", ":2: not readable as YAML: "),
    ("rank: 8\nalpha: 2\nrank: 16\n", ":3: rank is set a second time"),
    ("rank: *other\n", ":1: not readable as YAML: found undefined alias 'other'"),
    ("model: !!python/object:os.system x\n", ":1: not readable as YAML: could not determine a constructor"),
    ("rank: 8\n---\nrank: 9\n", ":2: not readable as YAML: but found another document"),
    (b"rank: 8\nmodel: \xff\n", ": not readable as YAML: 'utf-8' codec can't decode byte 0xff"),
    ("model: a\x07b\n", ": not readable as YAML: "),
    ("revision: 2024-99-99\n", ": not readable as YAML: month must be in 1..12"),
    ("revision: 2024-01-02\n", ": revision must be text, not datetime.date(2024, 1, 2)"),
    ("[" * 600, ": not readable as YAML: "),
    ("? {a: 1}\n: 2\n", ":1: not readable as YAML: found unhashable key"),
    ("3: 2\n", ": unknown setting 3; there are model, "),
    ("rnak: 8\n", ": unknown setting 'rnak'; there are model, "),
    ("rank: eight\n", ": rank must be a whole number, not 'eight'"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_file_that_is_no_recipe_is_refused_in_a_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError) as refusal:
        recipes.resolve(file, {})
    assert str(refusal.value).startswith(f"{file}{message}")
    assert "\n" not in str(refusal.value)


def test_a_recipe_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refusal:
        recipes.load("slow-lora")
    assert str(refusal.value) == (
        "slow-lora: neither a recipe nor a file; the recipes are commonsense-dora, commonsense-lora, from-scratch, "
        "instruct-dpo-1.1b, instruct-dpo-270m, instruct-dpo-3b, instruct-dpo-450m, quick-lora"
    )
    with pytest.raises(OpenELMError, match="is no regular file"):
        recipes.load(tmp_path)


@pytest.mark.parametrize("size", INSTRUCT)
def test_instruct_is_corenets(size: str) -> None:
    # projects/openelm/instruction_tuning/openelm-instruct.yaml, and Hugging Face's Trainer where that says nothing
    corenet: dict[str, Any] = {
        "method": "full",
        "objective": "dpo",
        "beta": 0.01,
        "batch_size": 8,
        "accumulation": 2,
        "gradient_checkpointing": True,
        "schedule": "cosine",
        "max_length": 1024,
        "max_prompt": 512,
        "warmup_ratio": 0.1,
        "warmup_steps": None,
        "final_learning_rate": 0,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0,
        "max_grad_norm": 1.0,
        "eval_every": 100,
        "save_every": 100,
    }
    settings = recipes.resolve(f"instruct-dpo-{size}", {})
    assert {name: getattr(settings, name) for name in corenet} == corenet
    assert (settings.epochs, settings.learning_rate, settings.dpo_loss) == INSTRUCT[size]


def test_a_warm_up_given_as_a_part_replaces_the_recipes_updates() -> None:
    settings = recipes.resolve("commonsense-lora", {"warmup_ratio": 0.2})
    assert (settings.warmup_ratio, settings.warmup_steps) == (0.2, None)


def test_from_scratch_is_corenets() -> None:
    # projects/openelm/pretraining_configs/openelm_270M.yaml, but for what depends on the size of an update
    corenet: dict[str, Any] = {
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decay_exclude": ("norm", "bias"),
        "max_grad_norm": 1.0,
        "z_loss": 1e-4,
        "schedule": "cosine",
        "nfc": True,
        "min_characters": 200,
        "min_tokens": 256,
        "max_length": 2048,
    }
    settings = recipes.resolve(None, {"init": "random", "learning_rate": 0.0053})
    assert {name: getattr(settings, name) for name in corenet} == corenet
    assert settings.final_learning_rate == pytest.approx(0.00053)
    assert settings.method == "full"
    assert settings.streams


def test_a_recipe_of_ones_own_lies_over_from_scratch(tmp_path: Path) -> None:
    settings = recipes.resolve(write(tmp_path, "init: random\nmin_tokens: 7\n"), {"nfc": False})
    assert (settings.min_tokens, settings.nfc, settings.min_characters, settings.z_loss) == (7, False, 200, 1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"uniform": True}, "uniform: of a new model: --init random"),
        ({"config": "small.yaml"}, "config: of a new model: --init random"),
        ({"min_tokens": 3}, "min_tokens: of texts that are streamed: --packing stream, or a new model"),
        (
            {"init": "random", "raw": True},
            "raw: of prompts and completions, and streamed texts have none",
        ),
        ({"beta": 0.1}, "beta: of preferences: --objective dpo"),
        ({"dpo_loss": "hinge", "max_prompt": 9}, "dpo_loss, max_prompt: of preferences: --objective dpo"),
        (
            {"objective": "dpo", "train_on_prompt": False, "z_loss": 1e-4},
            "train_on_prompt, z_loss: means nothing with --objective dpo: leave it out",
        ),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "warmup_ratio: --warmup-steps says how many: leave one out"),
        ({"init": "random", "model": "m"}, "model: a new model has random weights: leave it out"),
        ({"init": "random", "rank": 3}, "rank: of an adapter, and method full trains the whole model"),
        (
            {"init": "random", "method": "lora"},
            "method lora adapts a model, and random weights are none; use method full",
        ),
        (
            {"init": "random", "packing": "on"},
            "packing on: a new model learns from streamed text, packing stream",
        ),
    ],
)
def test_what_means_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        recipes.resolve(None, given)
    assert str(refusal.value) == message
