"""Makes the sample files beside it with the real PyTorch (2.13 made the committed ones): python make_samples.py

`expected.npz` has every tensor as "<file>/<path.to.it>"; bfloat16, which numpy lacks, as float32.
"""

import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

torch: Any = importlib.import_module("torch")
HERE = Path(__file__).parent


def plain() -> Any:
    """A state dict with every dtype that is read, a scalar and an empty tensor."""
    kinds = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    floats = torch.randn(3, 5, dtype=torch.float64)
    tensors = OrderedDict((kind, (floats * 50).abs().floor().remainder(3).to(getattr(torch, kind))) for kind in kinds)
    for kind in kinds[:4]:
        tensors[kind] = floats.to(getattr(torch, kind))
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5), torch.empty(0, 4)
    return tensors


def views() -> Any:
    """Tensors that are windows into others' storage, and parameters."""
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    half = torch.randn(4, 6).to(torch.bfloat16)
    tagged = torch.nn.Parameter(torch.randn(3))
    tagged.note = "an attribute"
    return {
        "whole": base,
        "transposed": base.t(),
        "first": base[:2],
        "second": base[2:5],
        "steps": base[1::2, 1:7:3],
        "row_of_column": base[:, 3],
        "half_transposed": half.t(),
        "permuted": torch.arange(24, dtype=torch.int32).reshape(2, 3, 4).permute(2, 0, 1),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "tagged_parameter": tagged,
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "no_grad_needed": torch.randn(2, requires_grad=True),
    }


def training() -> Any:
    """What CoreNet saves to resume a training run (corenet/utils/checkpoint_utils.py, get_training_state)."""
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    average = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return {
        "iterations": 7,
        "epoch": 0,
        "model_state_dict": model.state_dict(),
        "optim_state_dict": optimizer.state_dict(),
        "best_metric": float("inf"),
        "is_interval_ckpt": False,
        "gradient_scaler_state_dict": torch.amp.GradScaler("cpu").state_dict(),
        "ema_state_dict": average.state_dict(),
    }


def tensors_of(obj: Any, path: str) -> dict[str, Any]:
    if torch.is_tensor(obj):
        values = obj.detach()
        return {path: (values.float() if values.dtype == torch.bfloat16 else values).numpy()}
    items = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, list) else ()
    found: dict[str, Any] = {}
    for key, value in items:
        found |= tensors_of(value, f"{path}{'.' if not path.endswith('/') else ''}{key}")
    return found


def main() -> None:
    torch.manual_seed(0)
    samples = {"plain": plain(), "views": views(), "training": training()}
    expected: dict[str, Any] = {}
    for name, obj in samples.items():
        torch.save(obj, HERE / f"{name}.pt")
        expected |= tensors_of(obj, f"{name}/")
    torch.save(samples["plain"], HERE / "protocol4.pt", pickle_protocol=4)
    torch.save(samples["plain"], HERE / "legacy.pt", _use_new_zipfile_serialization=False)
    np.savez_compressed(HERE / "expected.npz", **expected)


if __name__ == "__main__":
    main()
