"""Adapters between folders: out to other programs' forms, and in from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx import files
from openelm_mlx.adapters import Adapter, AdapterError, read_adapter, save_adapter
from openelm_mlx.adapters.files import CONFIG, OWN, TENSORS
from openelm_mlx.adapters.layers import PARTS
from openelm_mlx.atomic import check_output, new_folder
from openelm_mlx.checkpoint import some_files
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune import corenet, mlxlm, peft
from openelm_mlx.finetune.basemodel import BaseModel
from openelm_mlx.finetune.choices import FORMS
from openelm_mlx.layer_paths import EMBEDDING
from openelm_mlx.outputs import require_apart
from openelm_mlx.version import __version__
from openelm_mlx.writer import write_json

BASE = "base"
"""The folder beside an adapter for mlx-lm that holds a copy of its model."""

_FACTS = "openelm_mlx.json"
"""Our own facts in a folder for PEFT, whose older versions refuse keys that they do not know in its config."""
_WRITTEN = {TENSORS, CONFIG, peft.TENSORS, _FACTS, BASE}


def export_adapter(
    source: str | Path,
    out: str | Path,
    form: str,
    *,
    model: str | Path | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Adapter:
    """Write an adapter as another program reads it.

    Args:
        source: an adapter's folder, or a run's.
        out: the folder to make.
        form: ``peft`` or ``mlx-lm``.
        model: the model it is for, a folder or a Hub name. Needed for some adapters of the embedding; where it is
            given, the adapter has to fit it.
        force: replace a folder that was written here before.
        say: gets what the person should know.

    Returns:
        What was written.

    Raises:
        OpenELMError: nothing was written; the message says why.
    """
    if form not in FORMS:
        raise OpenELMError(f"format must be one of {', '.join(FORMS)}, not {form!r}")
    source, out = files.expand(source), files.expand(out)
    check_output(out, force=force, ours=is_ours)
    adapter = read_adapter(source)
    base = None if model is None else BaseModel.open(model)
    for read in (source, *([base.folder] if base else [])):
        require_apart(read, out)
    if base:
        base.check_fit(adapter, source)
    else:
        _require_sense(adapter, source)
    if form == "peft":
        _write_peft(adapter, base, out, force)
        return adapter
    own_base = mlxlm.needs_own_base(adapter, base)
    written = mlxlm.to_mlxlm(adapter, base)
    with new_folder(out, force=force, ours=is_ours) as folder:
        save_adapter(folder, written)
        if base and own_base:
            (folder / BASE).mkdir()
            mlxlm.write_base(base, adapter, folder / BASE)
    if own_base:
        say(
            "mlx-lm adds an embedding's adapter to a tied output head as well, and has no DoRA of a quantized one, so "
            f"this one goes with a copy of the model: mlx_lm.load({str(out / BASE)!r}, adapter_path={str(out)!r})"
        )
    return written


def _require_sense(adapter: Adapter, source: Path) -> None:
    """What can be said against an adapter without its model."""
    if adapter.from_mlx_lm and EMBEDDING in adapter.paths:
        raise AdapterError(
            f"{source}: mlx-lm trained an update of {EMBEDDING}, which changes the output head too if that is tied; "
            "give the model with --model"
        )
    for path in adapter.paths:
        found = [part for part in PARTS if f"{path}.{part}" in adapter.tensors]
        wanted = ["lora_a", "lora_b", *(["m"] if adapter.config.method == "dora" and path != EMBEDDING else [])]
        if found != wanted:
            raise AdapterError(f"{source}: {path} has {', '.join(found)}, not {', '.join(wanted)}")


def _write_peft(adapter: Adapter, base: BaseModel | None, out: Path, force: bool) -> None:
    tensors, config = peft.to_peft(adapter, base)
    facts = {"tool_version": __version__, "base": adapter.base, "base_precision": adapter.precision, **adapter.origin}
    with new_folder(out, force=force, ours=is_ours) as folder:
        mx.save_safetensors(str(folder / peft.TENSORS), tensors, metadata={"format": "pt"})
        write_json(folder / peft.CONFIG, config)
        write_json(folder / _FACTS, facts)


def import_adapter(
    source: str | Path,
    out: str | Path,
    model: str | Path,
    *,
    alpha: float | None = None,
    config: str | Path | None = None,
    any_base: bool = False,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Adapter:
    """Make an adapter of ours from PEFT's folder or CoreNet's checkpoint.

    Args:
        source: a folder with PEFT's adapter_config.json, or a ``.pt`` of CoreNet's.
        out: the folder to make.
        model: the model it is for, a folder or a Hub name.
        alpha: lora_alpha of a CoreNet checkpoint.
        config: CoreNet's YAML, which has it; one of the two is needed.
        any_base: take a CoreNet checkpoint even if its base weights are not the model's.
        force: replace a folder that was written here before.
        say: gets what the person should know.
        progress: gets the bytes of base weights compared, and all of them.

    Raises:
        OpenELMError: nothing was written; the message says why.
    """
    source, out = files.expand(source), files.expand(out)
    check_output(out, force=force, ours=is_ours)
    is_corenet = _is_corenet(source)
    for_corenet = {"alpha": alpha is not None, "config": config is not None, "any-base": any_base}
    if not is_corenet and any(for_corenet.values()):
        given = ", ".join(f"--{name}" for name, there in for_corenet.items() if there)
        raise OpenELMError(f"{source}: {given} is for CoreNet's checkpoints; PEFT's say it themselves")
    strengths = _strengths(source, alpha, config) if is_corenet else []
    base = BaseModel.open(model)
    for read in (source, base.folder):
        require_apart(read, out)
    if is_corenet:
        adapter = corenet.from_corenet(source, base, strengths, any_base=any_base, say=say, progress=progress)
    else:
        adapter = peft.from_peft(source, base)
    with new_folder(out, force=force, ours=is_ours) as folder:
        save_adapter(folder, adapter)
    return adapter


def _is_corenet(source: Path) -> bool:
    """Whether it is a file, and so CoreNet's, or a folder of PEFT's; anything else is refused."""
    if not source.exists():
        raise AdapterError(f"{source}: no such file or folder")
    if not source.is_dir():
        return True
    config = source / peft.CONFIG
    if not files.is_there(config, AdapterError):
        raise AdapterError(
            f"{source}: has no {peft.CONFIG}, so it is no adapter of PEFT's (it has {some_files(source)}); of CoreNet "
            "give the .pt file itself"
        )
    if "peft_type" not in files.read_json(config, AdapterError):
        raise AdapterError(
            f"{source}: is no adapter of PEFT's: {peft.CONFIG} has no peft_type; mlx-lm's need no import"
        )
    return False


def _strengths(source: Path, alpha: float | None, config: str | Path | None) -> list[corenet.Strength]:
    if (alpha is None) == (config is None):
        raise OpenELMError(
            f"{source}: a CoreNet checkpoint does not say how strong its updates are; give lora_alpha with --alpha, or "
            "CoreNet's YAML with --config, and not both"
        )
    if alpha is not None:
        return [corenet.Strength(alpha)]
    assert config is not None
    return corenet.read_strengths(files.expand(config))


def is_ours(folder: Path) -> bool:
    """Whether an export or import wrote this folder, and nothing else is in it: that of a run is never replaced."""
    names = {p.name for p in folder.iterdir() if not p.name.startswith(".openelm-mlx-")}
    if not names <= _WRITTEN:
        return False
    return _FACTS in names or OWN in _json(folder / CONFIG)


def _json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path, AdapterError)
    except AdapterError:
        return {}
