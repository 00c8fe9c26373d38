"""A new model: its sizes from a file or by name, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

from openelm_mlx import files
from openelm_mlx.config import PRESETS, OpenELMConfig
from openelm_mlx.errors import ConfigError
from openelm_mlx.finetune.settings import Settings, SettingsError
from openelm_mlx.finetune.yamlfile import read_yaml
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.uniform import uniform


def new_config(settings: Settings, tokenizer: Tokenizer) -> OpenELMConfig:
    """The sizes that the settings ask for. Vocabulary, BOS and EOS are the tokenizer's where the file has none.

    Raises:
        SettingsError: no config is named, or it cannot be read.
        ConfigError: the sizes do not fit together, or the vocabulary is smaller than the tokenizer's.
    """
    named = settings.config
    if named is None:
        raise SettingsError(
            "a new model needs its sizes: --config with a YAML or JSON file (model_dim, num_transformer_layers, "
            f"head_dim, ...), or one of {', '.join(PRESETS)}"
        )
    values = dict(PRESETS[named]) if named in PRESETS else read_yaml(files.expand(named))
    own = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    try:
        config = OpenELMConfig.from_dict({**own, **_known(values)})
    except ConfigError as e:
        raise ConfigError(f"{named}: {e}") from None
    if config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{named}: vocab_size is {config.vocab_size:,}, and the tokenizer has {tokenizer.vocab_size:,} ids; "
            "leave it out to have as many"
        )
    for key in ("bos_token_id", "eos_token_id"):
        if getattr(config, key) != own[key]:
            raise ConfigError(
                f"{named}: {key} is {getattr(config, key)}, and the tokenizer's is {own[key]}; leave it out"
            )
    return uniform(config) if settings.uniform else config


def _known(values: dict[str, object]) -> dict[str, object]:
    """Refuse a misspelt key, which would silently leave a default in its place."""
    known = {*OpenELMConfig.__dataclass_fields__, "model_type", "architectures"}
    for key in values:
        if key not in known:
            raise ConfigError(f"has the key {key!r}; there are {', '.join(sorted(known))}")
    return values


def tokenizer_of(settings: Settings) -> Tokenizer:
    """The tokenizer of the new model.

    Raises:
        OpenELMError: none is named, or there is none of that name.
    """
    if settings.tokenizer is None:
        raise SettingsError(
            "a new model needs a tokenizer: --tokenizer with a folder, a tokenizer.model or a Hub name; "
            "`openelm tokenizer train` makes one of your text"
        )
    return Tokenizer.named(settings.tokenizer)


def files_of_new(settings: Settings) -> dict[str, Path]:
    """The files a new model depends on, by name."""
    named = {"config": settings.config, "tokenizer": settings.tokenizer}
    found: dict[str, Path] = {}
    for name, value in named.items():
        path = files.expand(value) if value else None
        if path is None or not path.exists():
            continue
        inside = [p for p in sorted(path.iterdir()) if p.is_file()] if path.is_dir() else [path]
        found.update({f"{name}: {p.name}": p for p in inside})
    return found
