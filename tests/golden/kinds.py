"""Telling golden files apart by their keys, and checking each kind. Later kinds join `KINDS`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.loading import parameter_shapes
from openelm_mlx.model import OpenELM
from tests.golden import adapters, inference, preferences, training
from tests.golden.checkpoints import LAYOUTS, Checkpoint, weights_module


@dataclass(frozen=True)
class Outcome:
    """One line of the report."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Kind:
    """A kind of golden file: how to know it, and how to check it."""

    name: str
    recognises: Callable[[Any], bool]
    check: Callable[[Path, Any], Iterator[Outcome]]


def check_inference(path: Path, golden: dict[str, Any]) -> Iterator[Outcome]:
    """Convert the case from both layouts and compare the results with the file."""
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory(prefix="openelm-golden-") as tmp:
            checkpoint = Checkpoint(path.parent, golden["case"], golden["seed"])
            source = checkpoint.write(layout, Path(tmp) / "source")
            deviation = inference.measure(source, Path(tmp) / "converted", golden, path.with_suffix(".npz"))
            yield Outcome(f"{path.stem} {layout}", deviation.ok, str(deviation))


def check_scaling(path: Path, golden: dict[str, Any]) -> Iterator[Outcome]:
    """Sizes from the ranges, for every case whose ranges are known."""
    module = weights_module(path.parent)
    for name, sizes in golden.items():
        config = OpenELMConfig.from_dict({**module.COMMON, **module.CASES[name]})
        found = {
            "num_query_heads": list(config.num_query_heads),
            "num_kv_heads": list(config.num_kv_heads),
            "ffn_multipliers": list(config.ffn_multipliers),  # type: ignore[arg-type]
            "ffn_dims": list(config.ffn_dims),
            "parameters": sum(map(prod, parameter_shapes(OpenELM(config)).values())),
        }
        wrong = [key for key, value in sizes.items() if found[key] != value]
        yield Outcome(
            f"{path.stem} {name}", not wrong, f"differs in {', '.join(wrong)}" if wrong else "all sizes equal"
        )


def check_adapter(path: Path, golden: dict[str, Any]) -> Iterator[Outcome]:
    """Import CoreNet's adapter checkpoint and compare the logits on its base with the file."""
    with tempfile.TemporaryDirectory(prefix="openelm-golden-") as tmp:
        whole, cached = adapters.deviation(path, golden, Path(tmp))
    ok = max(whole, cached) <= inference.LOGITS_TOLERANCE
    yield Outcome(path.stem, ok, f"logits {whole:.1e}, cached {cached:.1e}")


def check_training(path: Path, golden: dict[str, Any]) -> Iterator[Outcome]:
    """Train as CoreNet did and compare losses and gradient norms with the file."""
    with tempfile.TemporaryDirectory(prefix="openelm-golden-") as tmp:
        deviation = training.run(golden, path.parent, Path(tmp) / "source")
    yield Outcome(path.stem, deviation.ok, str(deviation))


def check_preferences(path: Path, golden: dict[str, Any]) -> Iterator[Outcome]:
    """Compare the log-probabilities and losses of pairs with the file."""
    with tempfile.TemporaryDirectory(prefix="openelm-golden-") as tmp:
        deviation = preferences.run(golden, path.parent, Path(tmp))
    yield Outcome(path.stem, deviation.ok, str(deviation))


def _is_adapter(golden: Any, *, dora: bool) -> bool:
    return isinstance(golden, dict) and {"tensors", "lora_config"} <= golden.keys() and golden.get("dora") is dora


def _is_training(golden: Any) -> bool:
    return isinstance(golden, dict) and {"mode", "losses", "gradient_norms"} <= golden.keys()


def _is_preferences(golden: Any) -> bool:
    return isinstance(golden, dict) and {"policy_seed", "reference_seed", "pairs"} <= golden.keys()


def _is_inference(golden: Any) -> bool:
    return isinstance(golden, dict) and {"prompt", "greedy", "probe_logits"} <= golden.keys()


def _is_scaling(golden: Any) -> bool:
    return isinstance(golden, dict) and all(isinstance(v, dict) and "ffn_dims" in v for v in golden.values())


KINDS = (
    Kind("inference", _is_inference, check_inference),
    Kind("scaling", _is_scaling, check_scaling),
    Kind("lora", partial(_is_adapter, dora=False), check_adapter),
    Kind("dora", partial(_is_adapter, dora=True), check_adapter),
    Kind("train", _is_training, check_training),
    Kind("dpo", _is_preferences, check_preferences),
)


def kind_of(golden: Any) -> Kind | None:
    """The kind of a golden file's content; None if there is no check for it yet."""
    return next((kind for kind in KINDS if kind.recognises(golden)), None)


def check_folder(folder: Path, only: str | None = None) -> Iterator[Outcome | str]:
    """Check every JSON file of a folder; a plain string is a file that no kind recognises."""
    for path in sorted(folder.glob("*.json")):
        golden = json.loads(path.read_text())
        kind = kind_of(golden)
        if kind is None:
            yield f"{path.stem}: no check for this kind of file yet"
        elif only in (None, kind.name):
            yield from kind.check(path, golden)
