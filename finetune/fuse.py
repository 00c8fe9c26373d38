"""Fusing an adapter into its base: one job, from two folders to a finished model folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openelm_mlx import files, hub
from openelm_mlx.adapters import Adapter, AdapterConfig, check_folder, precision_note, read_adapter
from openelm_mlx.adapters.files import TENSORS
from openelm_mlx.adapters.fusing import Fusion
from openelm_mlx.atomic import check_output, new_folder
from openelm_mlx.checkpoint import PROVENANCE, copy_generation, generation_eos
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.dtypes import parse_dtype
from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.effect import Effect, measure, not_enough_memory
from openelm_mlx.outputs import is_our_model, require_apart, require_room
from openelm_mlx.progress import SILENT, Progress
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.version import __version__
from openelm_mlx.writer import write_json, write_weights

PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Result:
    """What was made."""

    folder: Path
    config: OpenELMConfig
    precision: str
    nbytes: int
    adapter: AdapterConfig
    layers: int
    """Layers that had an adapter."""
    effect: Effect | None
    """None where there was not the memory to compare."""


def fuse(
    model: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    precision: str | None = None,
    requantize: bool = False,
    revision: str | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Result:
    """Make a plain model of a base and an adapter: a folder that this package and mlx-lm load.

    Args:
        model: the base: a folder, converted or not, packed or not, or a Hub name.
        adapter: the adapter's folder; a run's will do.
        out: the folder to make.
        precision: ``bf16``, ``fp16`` or ``fp32``; None keeps the base's, and is ``bf16`` where that is packed.
        requantize: pack again what was packed, as it was. The rounding takes something of the adapter away.
        revision: branch, tag or commit of a Hub base.
        force: replace a folder that this program wrote.
        progress: where to tell what happens.

    Raises:
        OpenELMError: nothing was fused and nothing written; the message says why.
    """
    out, kept = files.expand(out), files.expand(adapter)
    _check_precision(precision, requantize)
    check_output(out, force=force, ours=is_our_model)
    check_folder(kept)  # now, not after the download of a base
    base = hub.resolve(model, revision=revision, quiet=progress.quiet)
    for source in (base, kept):
        require_apart(source, out)
    loaded = read_adapter(kept)
    fusion = Fusion(
        base, loaded, kept, dtype=None if precision is None else parse_dtype(precision), requantize=requantize
    )
    generation_eos(base)  # it will be copied, so it has to be sound
    tokenizer = Tokenizer.from_folder(base)
    specs = fusion.specs()
    require_room(out, specs)
    _tell(fusion, loaded, progress.say)
    with new_folder(out, force=force, ours=is_our_model) as folder:
        total, done = fusion.nbytes_read, 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress.bytes_read(done, total)

        write_weights(folder, specs, fusion.arrays(count))
        provenance = _provenance(fusion, loaded, base, str(model), kept, str(adapter))
        write_json(folder / "config.json", {**fusion.config_json(), PROVENANCE: provenance})
        if tokenizer:
            tokenizer.save(folder)
        copy_generation(base, folder)
    return Result(
        folder=out,
        config=fusion.config,
        precision=fusion.precision,
        nbytes=sum(spec.nbytes for spec in specs),
        adapter=loaded.config,
        layers=len(loaded.paths),
        effect=_effect(base, loaded, kept, out, tokenizer, progress.say),
    )


def _check_precision(precision: str | None, requantize: bool) -> None:
    if precision is not None and requantize:
        raise OpenELMError("--requantize keeps the precision of the base; leave --precision out, or --requantize")
    if precision is not None and precision not in PRECISIONS:
        raise OpenELMError(
            f"precision {precision!r} is not known; use one of {', '.join(PRECISIONS)}, or --requantize to pack the "
            "result as the base is"
        )


def _tell(fusion: Fusion, adapter: Adapter, say: Callable[[str], None]) -> None:
    if note := precision_note(adapter, fusion.base_precision):
        say(note)
    if fusion.unties:
        say("the embedding has an update: the result's output head, tied to it so far, gets the base's weight alone")
    if fusion.base_precision.endswith("bit") and fusion.precision != fusion.base_precision:
        say(f"the base is packed ({fusion.base_precision}): the result is {fusion.precision}; --requantize packs it")


def _provenance(
    fusion: Fusion, adapter: Adapter, base: Path, base_name: str, folder: Path, name: str
) -> dict[str, Any]:
    """What the base's config.json said of its origin, and what was fused into it."""
    commit = hub.commit_of(base)
    unknown = {
        "tool_version": __version__,
        "source": base_name,
        "source_commit": commit,
        "source_kind": "huggingface",
    }
    before = fusion.values.get(PROVENANCE) or unknown
    earlier = before.get("fused")
    fused = {
        "tool_version": __version__,
        "base": base_name,
        "base_commit": commit,
        "base_precision": fusion.base_precision,
        "adapter": name,
        "adapter_sha256": files.sha256(folder / TENSORS),
        "adapter_trained_on": adapter.precision,
        **asdict(adapter.config),
        "origin": adapter.origin,
    }
    return {
        **before,
        "precision": fusion.precision,
        "fused": [*(earlier if isinstance(earlier, list) else []), fused],
    }


def _effect(
    base: Path, adapter: Adapter, where: Path, out: Path, tokenizer: Tokenizer | None, say: Callable[[str], None]
) -> Effect | None:
    if why := not_enough_memory(base, where, out):
        say(f"the result is whole, but was not compared with the adapter on its base: {why}")
        return None
    say("comparing the result with the adapter on its base")
    return measure(base, adapter, where, out, tokenizer)
