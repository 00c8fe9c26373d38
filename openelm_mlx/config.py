"""OpenELMConfig: what a model is made of, from any of the dialects its configs are written in.

The keys are those of the Hugging Face release (``configuration_openelm.py`` beside Apple's weights). Sizes may be given
as layer-wise scaling ranges (CoreNet), as expanded lists (Hugging Face, MLX) or both, in which case they must agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from openelm_mlx.errors import ConfigError
from openelm_mlx.scaling import make_divisible, query_heads, spread

Multipliers = float | tuple[float, ...]

_RELEASED = {
    "head_dim": 64,
    "num_gqa_groups": 4,
    "normalize_qk_projections": True,
    "share_input_output_layers": True,
    "ffn_multipliers": (0.5, 4.0),
    "qkv_multipliers": (0.5, 1.0),
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "OpenELM-270M": MappingProxyType({**_RELEASED, "num_transformer_layers": 16, "model_dim": 1280}),
        "OpenELM-450M": MappingProxyType({**_RELEASED, "num_transformer_layers": 20, "model_dim": 1536}),
        "OpenELM-1_1B": MappingProxyType({**_RELEASED, "num_transformer_layers": 28, "model_dim": 2048}),
        "OpenELM-3B": MappingProxyType({**_RELEASED, "num_transformer_layers": 36, "model_dim": 3072, "head_dim": 128}),
    }
)
"""The four released sizes, by CoreNet's names (`gpt_configs` in general_gpt.py)."""

ACTIVATIONS = ("swish", "silu")
NORMS = ("rms_norm",)

MAX_PADDING_ROWS = 128
"""Surplus embedding rows taken for CoreNet's padding; its vocabulary was padded to a multiple of 128 (32,128)."""

_SIZES = ("vocab_size", "num_transformer_layers", "model_dim", "head_dim")
_WHOLE = (*_SIZES, "max_context_length", "ffn_dim_divisor", "rope_max_length")
_LARGEST = 1 << 24
"""Above every size that makes sense, and small enough that no matrix's side leaves 32 bits unnoticed."""
_MOST_LAYERS = 4096
_REAL = ("rope_freq_constant", "rms_norm_eps")
_FLAGS = ("ffn_with_glu", "normalize_qk_projections", "share_input_output_layers")


@dataclass(frozen=True, kw_only=True)
class OpenELMConfig:
    """The architecture of one OpenELM decoder. Immutable; every list has one entry a layer after construction.

    Raises:
        ConfigError: a value is missing, of the wrong kind, unknown by name, or contradicts another; the message names
            the key and, for layer-wise values, the layer.
    """

    model_dim: int
    """Width D of the residual stream."""
    num_transformer_layers: int
    """Number of decoder layers."""
    head_dim: int
    """Width of one attention head, the same in every layer."""
    vocab_size: int = 32000
    """Rows of the embedding table."""
    max_context_length: int = 2048
    """The window: positions the model was trained on."""
    num_gqa_groups: int | None = None
    """Query heads that share one key-value head; None: read off the two lists of heads."""
    qkv_multipliers: Multipliers | None = None
    """alpha: one number, a (first, last) range, or one entry a layer. None when the heads are given instead."""
    num_query_heads: tuple[int, ...] = ()
    """Query heads of each layer."""
    num_kv_heads: tuple[int, ...] = ()
    """Key-value heads of each layer."""
    ffn_multipliers: Multipliers = 4.0
    """beta: one number, a (first, last) range, or one entry a layer; expanded to one a layer."""
    ffn_dim_divisor: int = 256
    """Feed-forward widths are multiples of this."""
    ffn_with_glu: bool = True
    """Gated (SwiGLU) feed-forward network, or a plain two-layer one."""
    activation_fn_name: str = "swish"
    """Activation of the feed-forward network."""
    normalization_layer_name: str = "rms_norm"
    """Normalization layer."""
    normalize_qk_projections: bool = False
    """RMSNorm on queries and keys, per head, before RoPE."""
    share_input_output_layers: bool = False
    """Tied embeddings: the output head is the embedding table."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    rope_freq_constant: float = 10000
    """Base of the rotary frequencies."""
    rope_max_length: int = 4096
    """Positions CoreNet's table of sines covers; twice the window."""
    initializer_range: float = 0.02
    """Kept for Hugging Face; not used here."""
    bos_token_id: int | None = 1
    """Beginning-of-sequence id."""
    eos_token_id: int | tuple[int, ...] | None = 2
    """End-of-sequence id, or several."""

    def __post_init__(self) -> None:
        self._check_scalars()
        self._set("qkv_multipliers", _frozen(self.qkv_multipliers))
        self._set("eos_token_id", _frozen(self.eos_token_id))
        self._set("ffn_multipliers", self._expand("ffn_multipliers", self.ffn_multipliers))
        self._set("num_query_heads", self._resolve_query_heads())
        self._set("num_kv_heads", self._resolve_kv_heads())
        for layer, (h, h_kv) in enumerate(zip(self.num_query_heads, self.num_kv_heads, strict=True)):
            if h % h_kv:
                raise ConfigError(f"layer {layer}: {h} query heads cannot share {h_kv} key-value heads evenly")
            for key, width in (("heads", h * self.head_dim), ("feed-forward network", self.ffn_dims[layer])):
                if width > _LARGEST:
                    raise ConfigError(f"layer {layer}: the {key} would be {width:,} wide; at most {_LARGEST:,} can be")

    # ---- construction ------------------------------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str, **changes: Any) -> OpenELMConfig:
        """One of the released sizes: ``OpenELM-270M``, ``OpenELM-450M``, ``OpenELM-1_1B``, ``OpenELM-3B``.

        `changes` override single fields, for example ``vocab_size=32128``.
        """
        if name not in PRESETS:
            raise ConfigError(f"no preset named {name!r}; there are {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OpenELMConfig:
        """Read a ``config.json`` of Hugging Face, mlx-lm or this project. Keys it does not know are left alone."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"a config is an object with keys and values, not {values!r}")
        kind = values.get("model_type")
        if kind not in (None, "openelm"):
            raise ConfigError(f"the config is for another kind of model: its model_type is {kind!r}, not 'openelm'")
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in values.items() if k in known and v is not None}
        missing = [k for k in _SIZES if k not in fields]
        if missing:
            raise ConfigError(f"the config has no {', '.join(missing)}")
        for key in ("num_query_heads", "num_kv_heads"):
            if key in fields and not isinstance(fields[key], Sequence):
                fields[key] = (fields[key],) * _whole("num_transformer_layers", fields["num_transformer_layers"])
        if "num_kv_heads" not in fields:
            fields.setdefault("num_gqa_groups", 1)  # the default of configuration_openelm.py
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """The Hugging Face keys, lists expanded to one entry a layer, as mlx-lm needs them."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        values = {k: v for k, v in values.items() if v is not None}
        return {"model_type": "openelm", "architectures": ["OpenELMForCausalLM"], **values}

    # ---- derived -----------------------------------------------------------------------------------------------

    @property
    def ffn_dims(self) -> tuple[int, ...]:
        """Feed-forward width of each layer."""
        assert isinstance(self.ffn_multipliers, tuple)
        return tuple(make_divisible(m * self.model_dim, self.ffn_dim_divisor) for m in self.ffn_multipliers)

    @property
    def parameters(self) -> int:
        """All parameters of the model, tied ones once."""
        total = self.vocab_size * self.model_dim * (1 if self.share_input_output_layers else 2) + self.model_dim
        for h, h_kv, width in zip(self.num_query_heads, self.num_kv_heads, self.ffn_dims, strict=True):
            attention = (2 * h + 2 * h_kv) * self.head_dim * self.model_dim
            norms = 2 * self.model_dim + (2 * self.head_dim if self.normalize_qk_projections else 0)
            total += attention + norms + width * self.model_dim * (3 if self.ffn_with_glu else 2)
        return total

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids."""
        if self.eos_token_id is None:
            return ()
        return self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)

    @property
    def preset_name(self) -> str | None:
        """The released size with these layers, whatever its vocabulary; None if it is none of them."""
        for name in PRESETS:
            p = OpenELMConfig.preset(name)
            same = ("model_dim", "head_dim", "num_query_heads", "num_kv_heads", "ffn_dims", *_FLAGS)
            if all(getattr(p, key) == getattr(self, key) for key in same):
                return name
        return None

    # ---- checks ------------------------------------------------------------------------------------------------

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_scalars(self) -> None:
        for key in _WHOLE:
            _whole(key, getattr(self, key))
        for key in _REAL:
            value = getattr(self, key)
            if not _is_number(value) or not 0 < value < 1e30:  # within float32
                raise ConfigError(f"{key} must be a positive number, not {value!r}")
        for key in _FLAGS:
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(f"{key} must be true or false, not {getattr(self, key)!r}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for RoPE, not {self.head_dim}")
        if self.activation_fn_name not in ACTIVATIONS:
            raise ConfigError(f"activation {self.activation_fn_name!r} is not known; known: {', '.join(ACTIVATIONS)}")
        if self.normalization_layer_name not in NORMS:
            raise ConfigError(f"norm {self.normalization_layer_name!r} is not known; known: {', '.join(NORMS)}")
        if self.num_gqa_groups is not None:
            _whole("num_gqa_groups", self.num_gqa_groups)
        eos = self.eos_token_id if isinstance(self.eos_token_id, (list, tuple)) else (self.eos_token_id,)
        for key, token in (("bos_token_id", self.bos_token_id), *(("eos_token_id", token) for token in eos)):
            if token is not None and (isinstance(token, bool) or not isinstance(token, int) or token < 0):
                raise ConfigError(f"{key} must be a token id, not {token!r}")

    def _expand(self, key: str, value: Any) -> tuple[float, ...]:
        """A number, a (first, last) range or a full list -> one multiplier a layer."""
        layers = self.num_transformer_layers
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        if not all(_is_number(v) and 0 < v < 1e6 for v in values):
            raise ConfigError(f"{key} must be positive numbers, not {value!r}")
        if not isinstance(value, Sequence):
            return (value,) * layers
        # CoreNet and Hugging Face take two entries for the range, of two layers too. Equal ones are a number expanded.
        if len(value) == layers and not (layers == 2 and value[0] != value[1]):
            return tuple(value)
        if len(value) == 2:
            return spread(value[0], value[1], layers)
        raise ConfigError(f"{key} has {len(value)} entries; a range of 2 or one for each of {layers} layers is needed")

    def _resolve_query_heads(self) -> tuple[int, ...]:
        given = self._head_list("num_query_heads")
        if self.qkv_multipliers is None:
            if not given:
                raise ConfigError("neither num_query_heads nor qkv_multipliers is given")
            return given
        groups = self.num_gqa_groups or self._groups_of(given)
        expanded = self._expand("qkv_multipliers", self.qkv_multipliers)
        scaled = query_heads(expanded, self.model_dim, self.head_dim, groups)
        return self._agree("num_query_heads", given, scaled, "qkv_multipliers")

    def _resolve_kv_heads(self) -> tuple[int, ...]:
        given = self._head_list("num_kv_heads")
        if self.num_gqa_groups is None:
            if not given:
                raise ConfigError("neither num_kv_heads nor num_gqa_groups is given")
            return given
        for layer, h in enumerate(self.num_query_heads):
            if h % self.num_gqa_groups:
                raise ConfigError(
                    f"layer {layer}: {h} query heads are no multiple of num_gqa_groups {self.num_gqa_groups}"
                )
        scaled = tuple(h // self.num_gqa_groups for h in self.num_query_heads)
        return self._agree("num_kv_heads", given, scaled, "num_gqa_groups")

    def _groups_of(self, query: tuple[int, ...]) -> int:
        kv = self._head_list("num_kv_heads")
        groups = {h // h_kv for h, h_kv in zip(query, kv, strict=False)}
        return groups.pop() if len(groups) == 1 else 1

    def _head_list(self, key: str) -> tuple[int, ...]:
        heads = getattr(self, key)
        if not isinstance(heads, Sequence) or isinstance(heads, str):
            raise ConfigError(f"{key} must be a list with one entry a layer, not {heads!r}")
        if heads and len(heads) != self.num_transformer_layers:
            raise ConfigError(f"{key} has {len(heads)} entries for {self.num_transformer_layers} layers")
        for layer, h in enumerate(heads):
            _whole(f"{key}, layer {layer},", h)
        return tuple(heads)

    @staticmethod
    def _agree(key: str, given: tuple[int, ...], scaled: tuple[int, ...], source: str) -> tuple[int, ...]:
        for layer, (a, b) in enumerate(zip(given, scaled, strict=False)):
            if a != b:
                raise ConfigError(f"layer {layer}: {key} says {a}, but {source} gives {b}")
        return scaled


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a positive whole number, not {value!r}")
    most = _MOST_LAYERS if key == "num_transformer_layers" else _LARGEST
    if value > most:
        raise ConfigError(f"{key} must be at most {most:,}, not {value:,}")
    return value
