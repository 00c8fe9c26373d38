"""Everything a fine-tuning run can be told: one schema for recipes, config.yaml, flags and Python.

Imports nothing heavy: ``openelm finetune --help`` is made of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openelm_mlx.errors import OpenELMError

METHODS = ("lora", "dora", "full")
SCHEDULES = ("constant", "linear", "cosine")
INITS = ("model", "random")
OBJECTIVES = ("next-token", "dpo")
DPO_LOSSES = ("sigmoid", "hinge")
PACKING = ("auto", "on", "off", "stream")
DTYPES = ("auto", "bfloat16", "float32")

ADAPTER_ONLY = ("rank", "alpha", "dropout", "rslora", "targets", "layers")
"""Settings that mean nothing when the whole model is trained."""

STREAM_ONLY = ("text_key", "nfc", "min_characters", "min_tokens")
"""Settings of texts that are read while training."""

DPO_ONLY = ("dpo_loss", "beta", "max_prompt")
"""Settings of preferences."""

NEXT_TOKEN_ONLY = ("train_on_prompt", "z_loss", "packing")
"""Settings that mean nothing for preferences: their responses alone are learned, and each lies in a row of its own."""

NEW_ONLY = ("config", "tokenizer", "uniform")
"""Settings of a model that begins with random weights."""

CHANGEABLE = (
    "epochs",
    "steps",
    "learning_rate",
    "final_learning_rate",
    "max_grad_norm",
    "eval_every",
    "eval_batches",
    "save_every",
    "keep",
    "patience",
    "plot",
    "tensorboard",
    "wandb",
)
"""Settings that a run can go on with others of."""

_REPORTING = ("save_every", "keep", "plot", "tensorboard", "wandb")
"""Those of them that losses do not depend on."""


class SettingsError(OpenELMError):
    """A setting is unknown, of the wrong kind or out of its range."""


def _setting(panel: str, default: Any, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"panel": panel, "help": help, **limits})


_data = partial(_setting, "Model and data")
_preferences = partial(_setting, "Preferences")
_new = partial(_setting, "New model")
_stream = partial(_setting, "Streamed text")
_method = partial(_setting, "Method")
_batch = partial(_setting, "Batches")
_training = partial(_setting, "Training")
_optimizer = partial(_setting, "Optimizer")
_saving = partial(_setting, "Validation and checkpoints")
_record = partial(_setting, "Records")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run's settings. Field names are the keys of a recipe and, with dashes, the flags.

    Raises:
        SettingsError: a value is of the wrong kind or out of its range; the message names it.
    """

    model: str | None = _data(None, "Model folder, or a Hugging Face Hub name.")
    revision: str | None = _data(None, "Branch, tag or commit of a Hub model.")
    data: str | None = _data(
        None,
        "A .json or .jsonl file (.gz too), a folder with train, valid and test files, or hf:NAME. Streamed: text and "
        "Parquet files too, folders of them, and several with weights, books=0.7,web.jsonl=0.3.",
    )
    valid: str | None = _data(None, "File to validate on, instead of the data folder's or of a part of the data.")
    test: str | None = _data(None, "File to evaluate at the end, instead of the data folder's.")
    valid_fraction: float = _data(
        0.05,
        "Part of the data to validate on when there is no file for it, 500 examples at most; 0 is none.",
        least=0,
        most=0.5,
    )

    objective: str = _preferences(
        "next-token",
        "What is learned: each next token, or with dpo which of two responses to a prompt is preferred.",
        choices=OBJECTIVES,
    )
    dpo_loss: str = _preferences("sigmoid", "Loss of a pair's margin.", choices=DPO_LOSSES)
    beta: float = _preferences(
        0.1, "What a margin is multiplied by: higher keeps the model nearer to what it was.", above=0, most=1000
    )
    max_prompt: int = _preferences(512, "Most tokens of a pair's prompt; longer ones lose their beginning.", least=1)

    init: str = _new(
        "model", "Weights to begin with: a model's, or random ones, with the recipe from-scratch.", choices=INITS
    )
    config: str | None = _new(
        None, "Its sizes: a YAML or JSON file with the keys of config.json, or a released size such as OpenELM-270M."
    )
    tokenizer: str | None = _new(None, "Its tokenizer: a folder, a tokenizer.model or a Hub name.")
    uniform: bool = _new(False, "Equal layers instead, with as many parameters in all.")

    text_key: str = _stream("text", "Key of the text in JSON records, or column in Parquet files.")
    nfc: bool = _stream(False, "Normalize texts to Unicode's form NFC.")
    min_characters: int = _stream(0, "Leave out texts of fewer characters.", least=0)
    min_tokens: int = _stream(0, "Leave out texts of fewer tokens.", least=0)

    method: str = _method("lora", "What is trained.", choices=METHODS)
    rank: int = _method(8, "Rank of an adapter's update.", least=1)
    alpha: float = _method(16.0, "Strength of the update: it is multiplied by alpha / rank.", above=0)
    dropout: float = _method(0.0, "Part of its inputs that the update does not see.", least=0, below=1)
    rslora: bool = _method(False, "Multiply the update by alpha / sqrt(rank).")
    targets: tuple[str, ...] = _method(
        ("qkv_proj", "out_proj", "proj_1", "proj_2"),
        "Layers to adapt: names (token_embeddings too) or regular expressions for whole paths.",
    )
    layers: str = _method("all", "Which decoder layers to adapt: all, 8-15, 0,2,12-15 or last-4.")

    dtype: str = _training(
        "auto", "What to compute in; auto is bfloat16 on a GPU and float32 on a CPU.", choices=DTYPES
    )
    max_length: int = _batch(
        1024, "Most tokens of an example, and of a packed row; never more than the model's window.", least=2
    )
    packing: str = _batch(
        "auto",
        "Put several examples into a row, apart from each other; auto does so for plain text. With stream texts are "
        "read while training, and cut into rows.",
        choices=PACKING,
    )
    shuffle_window: int = _batch(1024, "Examples among which those of a batch are chosen by length.", least=1)
    raw: bool = _data(False, "Leave the model's chat template aside: prompts and completions are plain text.")
    train_on_prompt: bool = _data(False, "Learn prompts too, not only completions.")
    skip_bad_lines: bool = _data(False, "Count lines that cannot be read instead of ending there.")

    epochs: float = _training(3.0, "Times through the data, unless --steps says when to end.", above=0, most=100_000)
    steps: int | None = _training(None, "Updates to make.", least=1)
    batch_size: int = _batch(4, "Rows of a batch.", least=1)
    accumulation: int = _batch(1, "Batches an update is made of.", least=1)
    gradient_checkpointing: bool = _training(
        False, "Compute layers again in the backward pass: less memory, more time."
    )

    learning_rate: float | None = _optimizer(
        None,
        "Highest learning rate; by default 2e-4, and 2e-5 where the whole model is trained; for preferences 5e-5 and "
        "5e-6.",
        above=0,
    )
    final_learning_rate: float | None = _optimizer(
        None, "Learning rate at the end; by default 0, and a tenth of the highest for a new model.", least=0
    )
    schedule: str = _optimizer("cosine", "How the learning rate falls.", choices=SCHEDULES)
    warmup_ratio: float = _optimizer(
        0.05,
        "Part of all updates in which the learning rate rises, unless --warmup-steps is given.",
        least=0,
        most=1,
    )
    warmup_steps: int | None = _optimizer(None, "Updates in which the learning rate rises.", least=0)
    beta1: float = _optimizer(0.9, "AdamW: decay of the mean gradient.", least=0, below=1)
    beta2: float = _optimizer(0.95, "AdamW: decay of the mean squared gradient.", least=0, below=1)
    eps: float = _optimizer(1e-8, "AdamW: added to the root of the latter.", above=0)
    weight_decay: float = _optimizer(0.1, "AdamW: decoupled weight decay.", least=0)
    decay_exclude: tuple[str, ...] = _optimizer(
        ("norm", "bias"), "Parameters without weight decay: those with one of these in their path."
    )
    max_grad_norm: float = _optimizer(1.0, "Gradients are scaled down to this norm; 0 is off.", least=0)

    eval_every: int | None = _saving(None, "Updates between validations; by default ten in a run.", least=1)
    eval_batches: int = _saving(0, "Batches to validate on; 0 is all.", least=0)
    save_every: int | None = _saving(None, "Updates between checkpoints; by default as for validations.", least=1)
    keep: int = _saving(2, "Checkpoints to keep, besides the best.", least=1)
    patience: int = _saving(0, "End when so many validations in a row brought nothing better; 0 is off.", least=0)

    z_loss: float = _training(
        0.0, "Penalty on the square of the logits' logarithmic sum, as in PaLM: keeps logits small.", least=0
    )
    seed: int = _training(0, "Of initialization, order and dropout.", least=0, most=2**64 - 1)
    plot: bool = _record(True, "Draw loss.png at the end (needs matplotlib).")
    tensorboard: bool = _record(False, "Write TensorBoard's event files too.")
    wandb: str | None = _record(None, "Weights & Biases project to log to.")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _checked(f, getattr(self, f.name)))
        if self.learning_rate is None:  # config.yaml has what it was
            usual = 5e-5 if self.objective == "dpo" else 2e-4
            object.__setattr__(self, "learning_rate", usual / 10 if self.method == "full" else usual)
        if self.final_learning_rate is None:
            object.__setattr__(self, "final_learning_rate", self.highest_rate / 10 if self.init == "random" else 0.0)
        if self.lowest_rate > self.highest_rate:
            raise SettingsError(
                f"final_learning_rate ({self.final_learning_rate}) is above learning_rate ({self.learning_rate})"
            )
        if self.init == "random" and self.method != "full":
            raise SettingsError(f"method {self.method} adapts a model, and random weights are none; use method full")
        if self.init == "random" and not self.streams:
            raise SettingsError(f"packing {self.packing}: a new model learns from streamed text, packing stream")
        if self.objective == "dpo" and self.packing in ("on", "stream"):
            raise SettingsError(f"packing {self.packing}: the responses of preferences lie in rows of their own")
        if self.steps is not None and self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise SettingsError(f"warmup_steps ({self.warmup_steps}) is above steps ({self.steps})")

    @property
    def highest_rate(self) -> float:
        """The learning rate, never None."""
        assert self.learning_rate is not None
        return self.learning_rate

    @property
    def lowest_rate(self) -> float:
        """The learning rate at the end, never None."""
        assert self.final_learning_rate is not None
        return self.final_learning_rate

    @property
    def streams(self) -> bool:
        """Whether texts are read while training."""
        return self.packing == "stream"

    @property
    def subject(self) -> str:
        """The model to start from, or the sizes of a new one, as they are named."""
        return str(self.config if self.init == "random" else self.model)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str | None = None) -> Settings:
        """Settings by name; `where` names the recipe or config.yaml that they are from in messages.

        Raises:
            SettingsError: a key is unknown, or a value is wrong.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        try:
            for key in values:
                if key not in known:
                    raise SettingsError(f"unknown setting {key!r}; there are {', '.join(known)}")
            return cls(**values)
        except SettingsError as e:
            raise e if where is None else SettingsError(f"{where}: {e}") from None

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """The settings a resumed run goes on with. A number of epochs replaces one of updates, and the reverse.

        Raises:
            SettingsError: a setting is not :data:`CHANGEABLE`, or a value is wrong.
        """
        fixed = [name for name in changes if name not in CHANGEABLE]
        if fixed:
            raise SettingsError(
                f"{', '.join(fixed)}: a run keeps what it was started with, but for {', '.join(CHANGEABLE)}; "
                "start a new run with --out"
            )
        values = self.to_mapping()
        if "epochs" in changes and "steps" not in changes:
            values["steps"] = None
        return Settings.from_mapping({**values, **changes})

    def differences(self, other: Settings) -> list[str]:
        """What losses depend on and is different, for people."""
        mine, theirs = self.to_mapping(), other.to_mapping()
        return [
            f"{name} is {mine[name]}, was {theirs[name]}"
            for name in CHANGEABLE
            if name not in _REPORTING and mine[name] != theirs[name]
        ]

    def to_mapping(self) -> dict[str, Any]:
        """As plain values for YAML; :meth:`from_mapping` reads them back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def _checked(f: dataclasses.Field[Any], value: Any) -> Any:
    """The value in its field's type, if it has one that is meant so."""
    kind, limits = str(f.type), f.metadata
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple"):
        return _names(f.name, value)
    if kind.startswith("bool"):
        if not isinstance(value, bool):
            raise SettingsError(f"{f.name} must be true or false, not {value!r}")
        return value
    if kind.startswith("str"):
        return _text(f.name, value, limits)
    return _number(f.name, kind, value, limits)


def _names(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and v for v in value):
        raise SettingsError(f"{name} must be a list of names, not {value!r}")
    return tuple(value)


def _text(name: str, value: Any, limits: Mapping[str, Any]) -> str:
    if isinstance(value, bool) and name == "packing":  # YAML 1.1 takes on and off for true and false
        value = "on" if value else "off"
    if name == "layers" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise SettingsError(f"{name} must be text, not {value!r}")
    if not value:
        raise SettingsError(f"{name} is empty")
    choices = limits.get("choices")
    if choices and value not in choices:
        raise SettingsError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return value


def _number(name: str, kind: str, value: Any, limits: Mapping[str, Any]) -> int | float:
    if isinstance(value, str) and kind.startswith("float"):
        with contextlib.suppress(ValueError):
            value = float(value)  # YAML 1.1 takes 2e-4, without a point, for text
    whole = kind.startswith("int")
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not _finite(value):
        raise SettingsError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    for limit, wrong, word in (
        ("least", lambda x: value < x, "at least"),
        ("above", lambda x: value <= x, "above"),
        ("most", lambda x: value > x, "at most"),
        ("below", lambda x: value >= x, "below"),
    ):
        if limit in limits and wrong(limits[limit]):
            raise SettingsError(f"{name} must be {word} {limits[limit]}, not {value!r}")
    return value if whole else float(value)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
