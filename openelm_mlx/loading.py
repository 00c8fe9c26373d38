"""From a name or a folder to a model that is ready to run."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx import device, files
from openelm_mlx.checkpoint import PROVENANCE, check_names, generation_eos, open_weights
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.cpu import halves, layers, unpacking
from openelm_mlx.dtypes import parse_dtype, precision_name
from openelm_mlx.errors import CheckpointError, ConfigError, OpenELMError
from openelm_mlx.model import OpenELM
from openelm_mlx.quantize import apply_config
from openelm_mlx.safetensorsfile import is_safetensors
from openelm_mlx.settings import CPU_WEIGHTS
from openelm_mlx.trees import flat

if TYPE_CHECKING:
    from openelm_mlx.rawtensor import RawTensor
    from openelm_mlx.tokenizer import Tokenizer

_FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "F64": mx.float32}
"""What tensors of these stored dtypes are read as."""

FLOAT16_LIMIT = 3072
"""Model width from which activations leave float16's range (the 3B's do: it then writes ``<unk>`` and nothing else)."""


class TooLargeError(OpenELMError):
    """A model does not fit into this machine's memory."""


def load(
    name_or_path: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: str | mx.Dtype | None = None,
    revision: str | None = None,
    cpu_weights: str | None = None,
) -> tuple[OpenELM, Tokenizer | None]:
    """Load a model folder, or a Hugging Face repository by name, and its tokenizer.

    Converted folders (this project's, mlx-lm's) and unconverted Hugging Face ones load alike.

    Args:
        name_or_path: a folder, or a Hub name such as ``mlx-community/OpenELM-270M-Instruct``.
        adapter: folder of a LoRA or DoRA adapter, such as one that ``openelm finetune`` made, to run the model with. It
            need not have been trained on weights of the same precision.
        dtype: what to compute in: ``bfloat16``, ``float16`` or ``float32``. By default what is stored, except that an
            unconverted checkpoint is cast to bfloat16, and that a CPU computes in float32.
        revision: branch, tag or commit of a Hub repository.
        cpu_weights: what a CPU does with packed (4- and 8-bit) layers: ``float32`` unpacks them, eight times the
            memory of 4 bits and a hundred times the speed; ``keep`` computes on them as they are. By default they are
            unpacked when memory allows. Other backends always keep them.

    Returns:
        The model and its tokenizer; None instead of the tokenizer when the folder has none.

    Raises:
        OpenELMError: the folder, its config, weights, tokenizer or the adapter cannot be used; the message says which
            and why.
    """
    from openelm_mlx import hub
    from openelm_mlx.tokenizer import Tokenizer

    if adapter is not None:
        check_adapter(adapter)  # before a download
    folder = hub.resolve(name_or_path, revision=revision)
    weights = start_loading(folder, adapter=adapter, dtype=dtype, cpu_weights=cpu_weights)
    tokenizer = Tokenizer.from_folder(folder)  # takes a while, in which the weights are read
    return weights.finished(), tokenizer


def load_model(
    folder: Path,
    *,
    adapter: str | Path | None = None,
    dtype: str | mx.Dtype | None = None,
    cpu_weights: str | None = None,
) -> OpenELM:
    """Load the model of a local folder; see :func:`load`."""
    return start_loading(folder, adapter=adapter, dtype=dtype, cpu_weights=cpu_weights).finished()


@dataclass(frozen=True)
class Loading:
    """A model whose weights are being read while the caller does something else."""

    folder: Path
    _model: OpenELM
    notes: tuple[str, ...] = ()
    """Lines for the person about what was loaded; nothing is wrong."""

    def finished(self) -> OpenELM:
        """Wait for the last of the weights.

        Raises:
            CheckpointError: they cannot be read.
        """
        with _as_checkpoint_errors(self.folder):
            evaluate(self._model)
        return self._model


def start_loading(
    folder: Path,
    *,
    adapter: str | Path | None = None,
    dtype: str | mx.Dtype | None = None,
    cpu_weights: str | None = None,
) -> Loading:
    """Check a local folder and begin to read its weights; see :func:`load`."""
    values = read_model_config(folder)
    config = _with_generation_eos(config_of(values, folder / "config.json"), folder)
    tensors = open_weights(folder)
    target = _compute_dtype(values, tensors, dtype)
    model = build(config, values.get("quantization"), tensors, folder)
    with _as_checkpoint_errors(folder):
        model.load_weights(list(_arrays(tensors, target).items()))
        make_ready(model, target, cpu_weights=cpu_weights, keep_bfloat16=dtype is None)
        note = _adapted(model, files.expand(adapter), precision_of(values, tensors)) if adapter is not None else None
        _read_ahead(model)
    return Loading(folder, model, (note,) if note else ())


def check_adapter(folder: str | Path) -> None:
    """Refuse a folder that is no adapter; what is in its files is not looked at.

    Raises:
        AdapterError: it is something else.
    """
    from openelm_mlx.adapters import check_folder

    check_folder(files.expand(folder))


def _adapted(model: OpenELM, folder: Path, precision: str) -> str | None:
    """Put the adapter of a folder into a model of this precision; what to say about that."""
    from openelm_mlx import adapters

    adapter = adapters.read_adapter(folder)
    adapters.attach_adapter(model, adapter, folder)
    return adapters.precision_note(adapter, precision)


@contextmanager
def _as_checkpoint_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:  # MLX's word for a file that shrank, or memory that ran out
        raise CheckpointError(f"{folder}: the weights cannot be loaded: {e}") from None


def make_ready(model: OpenELM, dtype: mx.Dtype, *, cpu_weights: str | None = None, keep_bfloat16: bool = False) -> None:
    """Bring a filled model to the dtype it computes in, and to the form its backend is fast with; in place.

    Weights that are lazy stay so; see :func:`evaluate`.

    Args:
        model: filled with its weights, which may be lazy.
        dtype: to compute in.
        cpu_weights: see :func:`load`.
        keep_bfloat16: whether a CPU that computes in float32 may leave bfloat16 matrices as they are, where it can
            multiply them so: see :mod:`openelm_mlx.cpu.halves`.
    """
    if cpu_weights not in (None, *CPU_WEIGHTS):
        raise OpenELMError(f"cpu_weights must be one of {', '.join(CPU_WEIGHTS)}, not {cpu_weights!r}")
    if dtype == mx.float16:
        check_float16(model.config, "computing")
    on_cpu = device.backend() == "cpu"
    if on_cpu and _unpacks(model, dtype, cpu_weights):
        unpacking.unpack(model)
    if on_cpu and dtype == mx.float32:
        if keep_bfloat16:
            halves.keep(model)
        layers.speed_up(model)
    cast(model, dtype)
    device.keep_resident()
    model.eval()


_READ_AHEAD = 1 << 28
"""Bytes of weights that are read while the caller does something else. Meanwhile they are there twice, as stored and as
they will be."""


def _read_ahead(model: OpenELM) -> None:
    left = _READ_AHEAD
    for parameter in _parameters(model):
        left -= parameter.nbytes
        if left < 0:
            return
        mx.async_eval(parameter)


def evaluate(model: nn.Module) -> None:
    """Make lazy weights real, one at a time: there are never two copies of the whole model."""
    for parameter in _parameters(model):
        mx.eval(parameter)


def _parameters(model: nn.Module) -> list[mx.array]:
    return list(flat(model.parameters()).values())


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder; an error that helps when the path is something else."""
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder")
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: is a file, not a model folder; convert it first: openelm convert {folder} --out DIR"
        )
    path = folder / "config.json"
    if not files.is_there(path, ConfigError):
        raise CheckpointError(f"{folder}: no config.json, so no model folder")
    values = files.read_json(path, ConfigError)
    for key in ("quantization", PROVENANCE):
        if not isinstance(values.get(key, {}), dict):
            raise ConfigError(f"{path}: {key} must be an object, not {values[key]!r}")
    return values


def config_of(values: dict[str, Any], path: Path) -> OpenELMConfig:
    """The architecture that a config.json, read from `path`, describes; an error names the file."""
    try:
        return OpenELMConfig.from_dict(values)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None


def _with_generation_eos(config: OpenELMConfig, folder: Path) -> OpenELMConfig:
    """The config with the end-of-sequence ids of generation_config.json beside its own."""
    union = tuple(dict.fromkeys([*config.eos_token_ids, *generation_eos(folder)]))
    return config if union == config.eos_token_ids else dataclasses.replace(config, eos_token_id=union)


def build(
    config: OpenELMConfig, quantization: dict[str, Any] | None, tensors: dict[str, RawTensor], where: Path
) -> OpenELM:
    """The model for a checkpoint, not yet filled; its tensors' names and shapes are checked."""
    model = OpenELM(config)
    if quantization:
        apply_config(model, quantization, tensors.keys())
    check_names(where, {n: t.shape for n, t in tensors.items()}, parameter_shapes(model))
    return model


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in the model's order."""
    return {name: tuple(p.shape) for name, p in flat(model.parameters()).items()}


def check_float16(config: OpenELMConfig, doing: str) -> None:
    """Refuse float16 for the 3B, and warn about it elsewhere."""
    if config.model_dim >= FLOAT16_LIMIT:
        raise OpenELMError(
            f"float16: {doing} a model of width {config.model_dim} (OpenELM-3B) in float16 overflows: its activations "
            "exceed 65504 and the output is <unk> only. Use bf16, which has float32's range"
        )
    warnings.warn(
        f"float16: OpenELM was trained in bfloat16, whose range float16 lacks; prefer bf16 for {doing}", stacklevel=3
    )


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Bring every floating parameter to `dtype`, in place; nothing is evaluated yet. Half-precision layers stay."""
    for layer in model.modules():
        if isinstance(layer, halves.KINDS):
            continue
        for name, value in layer.items():
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                layer[name] = value.astype(dtype)


def memory_needed(
    folder: Path,
    dtype: str | mx.Dtype | None = None,
    cpu_weights: str | None = None,
    adapter: str | Path | None = None,
) -> int:
    """Least bytes a model folder's weights and an adapter take when loaded so (as :func:`load` means it), and a full
    cache.

    Packed layers count as packed unless `cpu_weights` is ``float32``: by default a CPU unpacks them only where there
    is room.
    """
    values = read_model_config(folder)
    config, tensors = config_of(values, folder / "config.json"), open_weights(folder)
    item = _compute_dtype(values, tensors, dtype).size
    halved = dtype is None and device.backend() == "cpu" and halves.possible()
    # Matrices alone stay in bfloat16: not norms, nor the scales of packed layers.
    as_stored = {
        name
        for name, t in tensors.items()
        if t.dtype not in _FLOATS
        or (halved and t.dtype == "BF16" and halves.fits(t.shape) and name.endswith(".weight"))
    }
    weights = sum(t.nbytes if name in as_stored else t.size * item for name, t in tensors.items())
    if cpu_weights == "float32" and device.backend() == "cpu" and values.get("quantization"):
        weights += unpacking.float32_bytes(build(config, values["quantization"], tensors, folder))
    if adapter is not None:
        from openelm_mlx.adapters.files import bytes_needed

        weights += bytes_needed(files.expand(adapter))
    return weights + kv_bytes_per_token(config, item) * config.max_context_length


def kv_bytes_per_token(config: OpenELMConfig, item_bytes: int) -> int:
    """Bytes of keys and values that one position takes over all layers."""
    return 2 * sum(config.num_kv_heads) * config.head_dim * item_bytes


def require_memory(
    folder: Path,
    dtype: str | mx.Dtype | None = None,
    cpu_weights: str | None = None,
    adapter: str | Path | None = None,
) -> None:
    """Refuse a model that will not fit, before loading it so, with both figures.

    Raises:
        TooLargeError: it does not fit.
    """
    needed = memory_needed(folder, dtype, cpu_weights, adapter)
    if memory := device.too_little(needed):
        raise TooLargeError(
            f"{folder}: needs {needed / 1e9:.2f} GB to run, and there are {memory}; "
            "use a smaller precision (openelm convert --precision 4bit), or --force to try"
        )


def _compute_dtype(values: dict[str, Any], tensors: dict[str, RawTensor], wanted: str | mx.Dtype | None) -> mx.Dtype:
    """The dtype that :func:`load` computes in, for a folder's config.json and tensors."""
    converted = PROVENANCE in values or "quantization" in values
    return target_dtype(stored_dtype(tensors) if converted else mx.bfloat16, wanted)


def target_dtype(stored: mx.Dtype, wanted: str | mx.Dtype | None) -> mx.Dtype:
    """The dtype to compute in for weights stored in `stored`, unless another one is wanted."""
    return device.compute_dtype(stored) if wanted is None else parse_dtype(wanted)


def precision_of(values: dict[str, Any], tensors: dict[str, RawTensor]) -> str:
    """What a folder's weights are stored in, in a word: ``bf16``, ``fp16``, ``fp32``, ``4bit``, ``8bit``, ..."""
    if values.get("quantization"):
        return f"{values['quantization'].get('bits')}bit"
    return precision_name(stored_dtype(tensors))


def stored_precision(folder: Path) -> str:
    """What a local model folder's weights are stored in; see :func:`precision_of`."""
    return precision_of(read_model_config(folder), open_weights(folder))


def stored_dtype(tensors: dict[str, RawTensor]) -> mx.Dtype:
    """The dtype that the largest of the floating tensors is stored in."""
    floats = [t for t in tensors.values() if t.dtype in _FLOATS]
    return _FLOATS[max(floats, key=lambda t: t.nbytes).dtype] if floats else mx.bfloat16


def _unpacks(model: OpenELM, dtype: mx.Dtype, cpu_weights: str | None) -> bool:
    """Whether packed layers become float32 ones on a CPU."""
    if cpu_weights is not None:
        return cpu_weights == "float32"
    if dtype != mx.float32:
        return False
    memory = device.memory()
    packed = sum(parameter.nbytes for parameter in _parameters(model))
    return memory is None or unpacking.float32_bytes(model) + packed < memory.available


def _mlx_reads(path: Path) -> bool:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:  # a name in another encoding, which MLX cannot take
        return False
    return True


def _arrays(tensors: dict[str, RawTensor], dtype: mx.Dtype) -> dict[str, mx.array]:
    """The tensors' values: lazy and as stored where MLX reads the file itself, read and cast to `dtype` elsewhere."""
    arrays: dict[str, mx.array] = {}
    for path in sorted({t.path for t in tensors.values()}):
        own = {n: t for n, t in tensors.items() if t.path == path}
        if is_safetensors(path) and _mlx_reads(path) and all(t.dtype != "F64" for t in own.values()):
            arrays |= dict(mx.load(str(path), format="safetensors"))  # type: ignore[arg-type]  # a dict for this format
            continue
        for name, tensor in own.items():
            values = tensor.read()
            arrays[name] = values.astype(dtype) if mx.issubdtype(values.dtype, mx.floating) else values
            mx.eval(arrays[name])
    return arrays
