"""The schema of a run: what each setting takes, what it refuses and how it says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.adapters import AdapterConfig
from openelm_mlx.finetune.settings import ADAPTER_ONLY, Settings, SettingsError

NAMES = [f.name for f in dataclasses.fields(Settings)]

ACCEPTED: list[tuple[str, list[Any]]] = [
    ("model", [None, "openelm-270m"]),
    ("data", [None, "my.jsonl", "hf:org/name"]),
    ("wandb", [None, "project"]),
    ("valid_fraction", [0, 0.5]),
    ("method", ["lora", "dora", "full"]),
    ("rank", [1, 4096]),
    ("alpha", [1e-9, 64]),
    ("dropout", [0, 0.999]),
    ("targets", [("proj_1",), ("a", "b")]),
    ("dtype", ["auto", "bfloat16", "float32"]),
    ("max_length", [2, 2048]),
    ("packing", ["auto", "on", "off", "stream"]),
    ("init", ["model"]),
    ("objective", ["next-token", "dpo"]),
    ("dpo_loss", ["sigmoid", "hinge"]),
    ("beta", [1e-9, 5]),
    ("max_prompt", [1, 512]),
    ("warmup_ratio", [0, 1]),
    ("min_characters", [0, 200]),
    ("min_tokens", [0, 256]),
    ("z_loss", [0, 1e-4]),
    ("shuffle_window", [1]),
    ("epochs", [0.01, 100]),
    ("steps", [None, 1]),
    ("batch_size", [1]),
    ("accumulation", [1]),
    ("learning_rate", [1e-12, 1]),
    ("final_learning_rate", [0, 2e-4]),
    ("schedule", ["constant", "linear", "cosine"]),
    ("warmup_steps", [None, 0]),
    ("beta1", [0, 0.999]),
    ("beta2", [0, 0.999]),
    ("eps", [1e-30]),
    ("weight_decay", [0, 1]),
    ("decay_exclude", [(), ("norm",)]),
    ("max_grad_norm", [0, 5]),
    ("eval_every", [None, 1]),
    ("eval_batches", [0]),
    ("save_every", [None, 1]),
    ("keep", [1]),
    ("patience", [0, 3]),
    ("seed", [0, 2**64 - 1]),
    *((name, [True, False]) for name in ("rslora", "raw", "train_on_prompt", "skip_bad_lines", "plot", "tensorboard")),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED for value in values])
def test_values_up_to_the_limits_are_taken(name: str, value: Any) -> None:
    assert getattr(Settings(**{name: value}), name) == value


REFUSED: list[tuple[str, Any, str]] = [
    ("model", 3, "model must be text, not 3"),
    ("model", "", "model is empty"),
    ("data", ["a", "b"], "data must be text, not ['a', 'b']"),
    ("wandb", True, "wandb must be text, not True"),
    ("valid_fraction", -0.1, "valid_fraction must be at least 0, not -0.1"),
    ("valid_fraction", 0.6, "valid_fraction must be at most 0.5, not 0.6"),
    ("method", "qlora", "method must be one of lora, dora, full, not 'qlora'"),
    ("rank", 0, "rank must be at least 1, not 0"),
    ("rank", 8.0, "rank must be a whole number, not 8.0"),
    ("rank", True, "rank must be a whole number, not True"),
    ("rank", "8", "rank must be a whole number, not '8'"),
    ("rank", None, "rank must be a whole number, not None"),
    ("alpha", 0, "alpha must be above 0, not 0"),
    ("alpha", float("inf"), "alpha must be a number, not inf"),
    ("alpha", 10**400, f"alpha must be a number, not 1{'0' * 400}"),
    ("dropout", 1, "dropout must be below 1, not 1"),
    ("dropout", -0.1, "dropout must be at least 0, not -0.1"),
    ("rslora", 1, "rslora must be true or false, not 1"),
    ("targets", 5, "targets must be a list of names, not 5"),
    ("targets", ["a", 5], "targets must be a list of names, not ['a', 5]"),
    ("decay_exclude", [""], "decay_exclude must be a list of names, not ['']"),
    ("layers", True, "layers must be text, not True"),
    ("dtype", "float16", "dtype must be one of auto, bfloat16, float32, not 'float16'"),
    ("max_length", 1, "max_length must be at least 2, not 1"),
    ("packing", "yes", "packing must be one of auto, on, off, stream, not 'yes'"),
    ("objective", "ppo", "objective must be one of next-token, dpo, not 'ppo'"),
    ("dpo_loss", "ipo", "dpo_loss must be one of sigmoid, hinge, not 'ipo'"),
    ("beta", 0, "beta must be above 0, not 0"),
    ("beta", 1e30, "beta must be at most 1000, not 1e+30"),
    ("max_prompt", 0, "max_prompt must be at least 1, not 0"),
    ("warmup_ratio", -0.1, "warmup_ratio must be at least 0, not -0.1"),
    ("warmup_ratio", 1.1, "warmup_ratio must be at most 1, not 1.1"),
    ("init", "zeros", "init must be one of model, random, not 'zeros'"),
    ("min_characters", -1, "min_characters must be at least 0, not -1"),
    ("min_tokens", -1, "min_tokens must be at least 0, not -1"),
    ("z_loss", -1e-4, "z_loss must be at least 0, not -0.0001"),
    ("shuffle_window", 0, "shuffle_window must be at least 1, not 0"),
    ("raw", "yes", "raw must be true or false, not 'yes'"),
    ("train_on_prompt", None, "train_on_prompt must be true or false, not None"),
    ("epochs", 0, "epochs must be above 0, not 0"),
    ("epochs", "many", "epochs must be a number, not 'many'"),
    ("epochs", float("nan"), "epochs must be a number, not nan"),
    ("steps", 0, "steps must be at least 1, not 0"),
    ("batch_size", 0, "batch_size must be at least 1, not 0"),
    ("accumulation", 0, "accumulation must be at least 1, not 0"),
    ("learning_rate", 0, "learning_rate must be above 0, not 0"),
    ("learning_rate", "2e-400", "learning_rate must be above 0, not 0.0"),
    ("final_learning_rate", -1e-5, "final_learning_rate must be at least 0, not -1e-05"),
    ("schedule", "step", "schedule must be one of constant, linear, cosine, not 'step'"),
    ("warmup_steps", -1, "warmup_steps must be at least 0, not -1"),
    ("beta1", 1, "beta1 must be below 1, not 1"),
    ("beta2", -0.1, "beta2 must be at least 0, not -0.1"),
    ("eps", 0, "eps must be above 0, not 0"),
    ("weight_decay", -1, "weight_decay must be at least 0, not -1"),
    ("max_grad_norm", -1, "max_grad_norm must be at least 0, not -1"),
    ("eval_every", 0, "eval_every must be at least 1, not 0"),
    ("eval_batches", -1, "eval_batches must be at least 0, not -1"),
    ("save_every", 0, "save_every must be at least 1, not 0"),
    ("keep", 0, "keep must be at least 1, not 0"),
    ("patience", -1, "patience must be at least 0, not -1"),
    ("seed", -1, "seed must be at least 0, not -1"),
    ("seed", 2**64, f"seed must be at most {2**64 - 1}, not {2**64}"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_values_beyond_the_limits_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        Settings(**{name: value})
    assert str(refusal.value) == message


def test_every_limit_is_tested() -> None:
    limited = {f.name for f in dataclasses.fields(Settings) if f.metadata.keys() - {"panel", "help"}}
    assert limited <= {name for name, _, _ in REFUSED}
    assert limited <= {name for name, _ in ACCEPTED}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"learning_rate": 1e-5, "final_learning_rate": 1e-4},
            "final_learning_rate (0.0001) is above learning_rate (1e-05)",
        ),
        ({"steps": 10, "warmup_steps": 11}, "warmup_steps (11) is above steps (10)"),
        (
            {"objective": "dpo", "packing": "on"},
            "packing on: the responses of preferences lie in rows of their own",
        ),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        Settings(**values)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("packing: on", "packing", "on"),
        ("packing: off", "packing", "off"),
        ("learning_rate: 2e-4", "learning_rate", 2e-4),
        ("layers: 3", "layers", "3"),
        ("layers: 0,2,12-15", "layers", "0,2,12-15"),
        ("alpha: 32", "alpha", 32.0),
        ("targets: qkv_proj, proj_1", "targets", ("qkv_proj", "proj_1")),
        ("targets: [qkv_proj, 'layers\\.[0-3]\\..*']", "targets", ("qkv_proj", r"layers\.[0-3]\..*")),
    ],
)
def test_what_yaml_makes_of_a_value_is_taken_as_meant(line: str, name: str, value: Any) -> None:
    given_ = Settings.from_mapping(yaml.safe_load(line), "my.yaml")
    assert getattr(given_, name) == value
    assert type(getattr(given_, name)) is type(value)


def test_messages_name_the_file() -> None:
    with pytest.raises(SettingsError, match=r"my\.yaml: rank must be at least 1, not 0"):
        Settings.from_mapping({"rank": 0}, "my.yaml")
    with pytest.raises(SettingsError, match=r"my\.yaml: unknown setting 'lora_rank'; there are model, .*, rank, "):
        Settings.from_mapping({"lora_rank": 8}, "my.yaml")
    with pytest.raises(SettingsError, match=r"^unknown setting 3;"):
        Settings.from_mapping({3: 8})  # type: ignore[dict-item]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "rank": st.integers(1, 512),
            "alpha": st.floats(1e-3, 1e3),
            "eps": st.floats(1e-12, 1e-3),
            "targets": st.lists(st.sampled_from(["qkv_proj", "token_embeddings"]), min_size=1),
            "model": st.none() | st.text("abc/-:' ", min_size=1),
            "packing": st.sampled_from(["auto", "on", "off"]),
            "layers": st.sampled_from(["all", "3", "0,2", "8-15"]),
            "plot": st.booleans(),
            "steps": st.none() | st.integers(1, 10**6),
        },
    )
)
def test_settings_come_back_from_yaml(values: dict[str, Any]) -> None:
    settings = Settings(**values)
    text = yaml.safe_dump(settings.to_mapping())
    assert Settings.from_mapping(yaml.safe_load(text), "config.yaml") == settings


def test_the_defaults_of_an_adapter_are_the_librarys() -> None:
    settings, adapter = Settings(), AdapterConfig()
    for name in (*ADAPTER_ONLY, "method"):
        assert getattr(settings, name) == getattr(adapter, name), name


def test_every_setting_says_what_it_is() -> None:
    for f in dataclasses.fields(Settings):
        assert f.metadata["help"].endswith("."), f.name
        assert "[" not in f.metadata["help"], f.name  # the help page would read it as markup


def test_the_learning_rate_depends_on_the_method() -> None:
    assert (Settings().highest_rate, Settings(method="full").highest_rate) == (2e-4, 2e-5)
    assert Settings(method="full", learning_rate=1e-3).highest_rate == 1e-3
    assert Settings(method="dora").to_mapping()["learning_rate"] == 2e-4
    assert Settings(objective="dpo").highest_rate == 5e-5
    assert Settings(objective="dpo", method="full").highest_rate == 5e-6


class TestChanged:
    def test_what_may_be(self) -> None:
        settings = Settings(steps=10, rank=4).changed({"epochs": 2, "patience": 3})
        assert (settings.steps, settings.epochs, settings.patience, settings.rank) == (None, 2, 3, 4)

    def test_what_may_not_be(self) -> None:
        with pytest.raises(SettingsError, match=r"^rank, seed: a run keeps what it was started with"):
            Settings().changed({"rank": 4, "steps": 2, "seed": 1})

    def test_differences_are_what_losses_depend_on(self) -> None:
        changed = Settings().changed({"steps": 5, "keep": 9})
        assert changed.differences(Settings()) == ["steps is 5, was None"]
