"""LoRA and DoRA: the layers, putting them into a model, the files they are kept in, and fusing."""

from openelm_mlx.adapters.attaching import (
    adapter_tensors,
    adapters_of,
    attach,
    count_parameters,
    detach,
    switched_off,
)
from openelm_mlx.adapters.config import LINEARS, METHODS, AdapterConfig, AdapterError, find_targets
from openelm_mlx.adapters.files import (
    Adapter,
    adapter_from,
    architecture,
    attach_adapter,
    check_fits,
    check_folder,
    precision_note,
    read_adapter,
    save_adapter,
)

__all__ = [
    "LINEARS",
    "METHODS",
    "Adapter",
    "AdapterConfig",
    "AdapterError",
    "adapter_from",
    "adapter_tensors",
    "adapters_of",
    "architecture",
    "attach",
    "attach_adapter",
    "check_fits",
    "check_folder",
    "count_parameters",
    "detach",
    "find_targets",
    "precision_note",
    "read_adapter",
    "save_adapter",
    "switched_off",
]
