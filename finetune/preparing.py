"""What a run needs before it starts: model, data and plan, looked at in the order in which they can be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from openelm_mlx import device, hub, plotting
from openelm_mlx.adapters import attach, count_parameters
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.finetune import loggers, memory
from openelm_mlx.finetune.data.batches import Batches
from openelm_mlx.finetune.data.dataset import Data, Dataset, Progress, open_data
from openelm_mlx.finetune.data.types import Batch
from openelm_mlx.finetune.optimizer import warmup_steps
from openelm_mlx.finetune.results import adapter_config
from openelm_mlx.finetune.settings import Settings, SettingsError
from openelm_mlx.finetune.trainer import Plan
from openelm_mlx.finetune.watching import Watcher
from openelm_mlx.loading import (
    config_of,
    kv_bytes_per_token,
    load_model,
    memory_needed,
    read_model_config,
    stored_precision,
)
from openelm_mlx.model import OpenELM
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.trees import trainable

_FEW = 100
"""Updates below which the default learning rate gets nowhere."""


@dataclass(frozen=True)
class Base:
    """The model to start from, not yet loaded."""

    folder: Path
    config: OpenELMConfig
    tokenizer: Tokenizer
    dtype: str
    parameters: int
    trained: int
    """How many of them, or beside them, will be trained."""


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    settings: Settings
    base: Path
    model: OpenELM
    tokenizer: Tokenizer
    data: Data
    train: Batches
    valid: list[Batch]
    plan: Plan
    precision: str


def open_base(settings: Settings) -> Base:
    """The model that the settings name, checked to fit them; its weights are not read.

    Raises:
        OpenELMError: there is none, it has no tokenizer, or cannot be trained so.
    """
    if settings.model is None:
        raise SettingsError("name a model: --model FOLDER or HUB-NAME")
    folder = hub.resolve(settings.model, revision=settings.revision)
    values = read_model_config(folder)
    config = config_of(values, folder / "config.json")
    if settings.method == "full" and values.get("quantization"):
        raise SettingsError(
            f"{folder}: packed weights cannot be trained; use a bf16 or fp32 model, or --method lora, which leaves "
            "them alone"
        )
    skeleton = OpenELM(config)  # nothing of it is computed
    parameters = sum(p.size for p in trainable(skeleton).values())
    trained = parameters if settings.method == "full" else count_parameters(skeleton, adapter_config(settings))
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise SettingsError(
            f"{folder}: has no tokenizer; convert the model again with --tokenizer FILE, FOLDER or HUB-NAME"
        )
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device.backend() == "cpu" else "bfloat16"
    return Base(folder, config, tokenizer, dtype, parameters, trained)


def read_data(
    settings: Settings, base: Base, say: Callable[[str], None], reading: Progress | None
) -> tuple[Data, Batches, list[Batch]]:
    """All of a run's data, its training batches, and the batches to validate on.

    Raises:
        OpenELMError: the data cannot be read, or the tokenizer is another model's.
    """
    length = min(settings.max_length, base.config.max_context_length)
    data = open_data(settings, base.tokenizer, length, say, reading)
    _check_ids(base, data)
    train = _batches(settings, data.train, length, shuffle=True)
    return data, train, evaluated(settings, data.valid, length, settings.eval_batches)


def _check_ids(base: Base, data: Data) -> None:
    """Refuse the tokenizer of another model: an id that no embedding belongs to would be read from anywhere."""
    for dataset in (data.train, data.valid, data.test):
        for example in dataset.examples if dataset else ():
            highest = int(example.ids.max())
            if highest >= base.config.vocab_size:
                raise SettingsError(
                    f"{base.folder}: its tokenizer is not the model's: {example.where} has the token {highest}, and "
                    f"the model has {base.config.vocab_size}; convert the model again with its own --tokenizer"
                )


def _batches(settings: Settings, dataset: Dataset, length: int, *, shuffle: bool) -> Batches:
    s = settings
    return Batches(
        dataset.examples,
        batch_size=s.batch_size,
        pack=dataset.plain if s.packing == "auto" else s.packing == "on",
        row_length=length,
        shuffle_window=s.shuffle_window,
        seed=s.seed,
        shuffle=shuffle,
    )


def evaluated(settings: Settings, dataset: Dataset | None, length: int, most: int = 0) -> list[Batch]:
    """The batches of a data set that is evaluated, of examples up to `length`; the first `most` unless that is 0."""
    if dataset is None:
        return []
    return list(islice(_batches(settings, dataset, length, shuffle=False).epoch(0), most or None))


def plan_of(settings: Settings, train: Batches) -> Plan:
    """When what happens in the run.

    Raises:
        SettingsError: its warm-up would be longer than it.
    """
    plan = Plan.of(settings, train)
    if warmup_steps(plan.steps, settings) > plan.steps:
        raise SettingsError(
            f"warmup_steps ({settings.warmup_steps}) are more than the run's {plan.steps} updates; give fewer "
            "--warmup-steps"
        )
    return plan


def prepare(settings: Settings, watcher: Watcher, reading: Progress | None, *, force: bool) -> Prepared:
    """Everything that a run needs, the model loaded and with its adapters.

    Raises:
        OpenELMError: something is missing or wrong, or (unless `force`) the run would not fit into memory.
    """
    if settings.plot and not plotting.possible():
        watcher.say("note: there will be no loss.png without matplotlib: pip install 'openelm-mlx[plots]'")
    loggers.require(settings)
    base = open_base(settings)
    data, train, valid = read_data(settings, base, watcher.say, reading)
    plan = plan_of(settings, train)
    if not force:
        memory.require(bytes_needed(settings, base, train), settings)
    watcher.say(f"loading {settings.model}")
    model = load_model(base.folder, dtype=base.dtype, cpu_weights="float32" if device.backend() == "cpu" else None)
    if settings.method == "full":
        model.unfreeze()
    else:
        attach(model, adapter_config(settings), seed=settings.seed)
    share = base.trained / base.parameters
    watcher.say(f"training {base.trained:,} parameters ({share:.2%}), updates: {plan.steps:,}")
    if plan.steps < _FEW and settings.highest_rate <= Settings(method=settings.method).highest_rate:
        watcher.say(
            f"note: {plan.steps} updates are few at this learning rate; with few examples give more --epochs, and "
            "--learning-rate 1e-3 to an adapter"
        )
    return Prepared(
        settings, base.folder, model, base.tokenizer, data, train, valid, plan, stored_precision(base.folder)
    )


def bytes_needed(settings: Settings, base: Base, train: Batches) -> memory.Estimate:
    """Least memory of the run."""
    cpu_weights = "float32" if device.backend() == "cpu" else None
    item = 4 if base.dtype == "float32" else 2
    window = kv_bytes_per_token(base.config, item) * base.config.max_context_length
    return memory.estimate(
        base.config,
        replace(settings, batch_size=min(settings.batch_size, train.most_rows)),
        weight_bytes=memory_needed(base.folder, base.dtype, cpu_weights) - window,
        trained=base.trained,
        item=item,
        length=train.longest_row,
    )
