"""What a run needs before it starts: model, data and plan, looked at in the order in which they can be refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from openelm_mlx import device, plotting
from openelm_mlx.adapters import attach
from openelm_mlx.dtypes import parse_dtype, precision_name
from openelm_mlx.finetune import loggers, memory
from openelm_mlx.finetune.base import Base, open_base
from openelm_mlx.finetune.data.dataset import Progress
from openelm_mlx.finetune.data.types import Stream
from openelm_mlx.finetune.feed import Feed, read_data
from openelm_mlx.finetune.initialization import initialize
from openelm_mlx.finetune.optimizer import warmup_steps
from openelm_mlx.finetune.results import adapter_config
from openelm_mlx.finetune.settings import Settings, SettingsError
from openelm_mlx.finetune.trainer import Plan
from openelm_mlx.finetune.watching import Watcher
from openelm_mlx.loading import cast, kv_bytes_per_token, load_model, memory_needed, stored_precision
from openelm_mlx.model import OpenELM
from openelm_mlx.tokenizer import Tokenizer

_FEW = 100
"""Updates below which the default learning rate gets nowhere."""


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    settings: Settings
    base: Path | None
    """The model's folder; None for a new one."""
    model: OpenELM
    tokenizer: Tokenizer
    feed: Feed
    plan: Plan
    precision: str


def plan_of(settings: Settings, train: Stream) -> Plan:
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
    feed = read_data(settings, base, watcher.say, reading)
    plan = plan_of(settings, feed.train)
    if not force:
        memory.require(bytes_needed(settings, base, feed.train), settings)
    model = (
        _new(settings, base, watcher) if base.folder is None else _loaded(settings, base.folder, base.dtype, watcher)
    )
    share = base.trained / base.config.parameters
    watcher.say(f"training {base.trained:,} parameters ({share:.2%}), updates: {plan.steps:,}")
    if settings.init == "model" and plan.steps < _FEW and settings.highest_rate <= _usual_rate(settings):
        rate = "3e-4" if settings.objective == "dpo" else "1e-3"
        watcher.say(
            f"note: {plan.steps} updates are few at this learning rate; with few examples give more --epochs, and "
            f"--learning-rate {rate} to an adapter"
        )
    precision = precision_name(parse_dtype(base.dtype)) if base.folder is None else stored_precision(base.folder)
    return Prepared(settings, base.folder, model, base.tokenizer, feed, plan, precision)


def _usual_rate(settings: Settings) -> float:
    return Settings(method=settings.method, objective=settings.objective).highest_rate


def _loaded(settings: Settings, folder: Path, dtype: str, watcher: Watcher) -> OpenELM:
    watcher.say(f"loading {settings.model}")
    model = load_model(folder, dtype=dtype, cpu_weights="float32" if device.backend() == "cpu" else None)
    if settings.method == "full":
        model.unfreeze()
    else:
        attach(model, adapter_config(settings), seed=settings.seed)
    return model


def _new(settings: Settings, base: Base, watcher: Watcher) -> OpenELM:
    config = base.config
    watcher.say(
        f"a new model of {config.num_transformer_layers} layers, {config.model_dim} wide: query heads "
        f"{_range(config.num_query_heads)}, feed-forward widths {_range(config.ffn_dims)}, "
        f"vocabulary {config.vocab_size:,}"
    )
    model = OpenELM(config)
    initialize(model, settings.seed)
    cast(model, parse_dtype(base.dtype))
    return model


def _range(values: tuple[int, ...]) -> str:
    return f"{values[0]} to {values[-1]}" if len(set(values)) > 1 else str(values[0])


def bytes_needed(settings: Settings, base: Base, train: Stream) -> memory.Estimate:
    """Least memory of the run."""
    item = 4 if base.dtype == "float32" else 2
    return memory.estimate(
        base.config,
        replace(settings, batch_size=train.most_rows),
        weight_bytes=base.config.parameters * item if base.folder is None else _weight_bytes(base.folder, base, item),
        trained=base.trained,
        item=item,
        length=train.longest_row,
    )


def _weight_bytes(folder: Path, base: Base, item: int) -> int:
    window = kv_bytes_per_token(base.config, item) * base.config.max_context_length
    return memory_needed(folder, base.dtype, "float32" if device.backend() == "cpu" else None) - window
