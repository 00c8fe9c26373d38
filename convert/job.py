"""One conversion, from an opened source to a finished folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from openelm_mlx import hub
from openelm_mlx.atomic import check_output, new_folder
from openelm_mlx.checkpoint import PROVENANCE, copy_generation, generation_eos
from openelm_mlx.config import MAX_PADDING_ROWS, OpenELMConfig
from openelm_mlx.convert.choices import DEFAULT_GROUP_SIZE, DEFAULT_PRECISION, check_precision
from openelm_mlx.convert.precision import Precision, converted, plan_precision, specs
from openelm_mlx.convert.sources import Source, open_source
from openelm_mlx.convert.tokenizers import Found, find_tokenizer
from openelm_mlx.convert.verify import Verification, require_memory_to_verify, verify
from openelm_mlx.dtypes import dtype_name
from openelm_mlx.errors import CheckpointError
from openelm_mlx.files import expand, sha256
from openelm_mlx.layer_paths import EMBEDDING, HEAD, grouped
from openelm_mlx.outputs import is_our_model, require_apart, require_room
from openelm_mlx.progress import SILENT, Progress
from openelm_mlx.version import __version__
from openelm_mlx.writer import TensorSpec, write_json, write_weights

_ROWS = (f"{EMBEDDING}.weight", f"{HEAD}.weight")


@dataclass(frozen=True)
class Result:
    """What a conversion made."""

    folder: Path
    config: OpenELMConfig
    precision: Precision
    nbytes: int
    verification: Verification | None


def convert(
    source: str | Path,
    out: str | Path,
    *,
    precision: str = DEFAULT_PRECISION,
    group_size: int = DEFAULT_GROUP_SIZE,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    keep_padding_rows: bool = False,
    verify_logits: bool = False,
    force: bool = False,
    progress: Progress = SILENT,
) -> Result:
    """Convert a PyTorch checkpoint of OpenELM to an MLX folder that this package and mlx-lm load.

    Args:
        source: a folder, a checkpoint file, or a Hub name.
        out: the folder to make.
        precision: ``bf16``, ``fp16``, ``fp32``, ``4bit`` or ``8bit``.
        group_size: weights that share a scale when packed: 32, 64 or 128.
        config: CoreNet's YAML, or a config.json, instead of the one beside the weights.
        tokenizer: a ``tokenizer.model`` or ``tokenizer.json``, a folder, a Hub name, or ``none``.
        revision: branch, tag or commit of a Hub source.
        keep_padding_rows: keep embedding rows that no token uses.
        verify_logits: compare source and result on a built-in passage afterwards.
        force: replace a folder that an earlier conversion wrote.
        progress: where to tell what happens.

    Raises:
        OpenELMError: nothing was converted and nothing written; the message says why.
    """
    out = expand(out)
    check_precision(precision, group_size)
    check_output(out, force=force, ours=is_our_model)  # now, not after the download of a source
    place = hub.resolve(source, revision=revision, quiet=progress.quiet)
    require_apart(place, out)
    opened = open_source(place, expand(config) if config else None)
    before = _stamps(opened)
    if opened.kind == "huggingface":
        generation_eos(opened.folder)  # it will be copied, so it has to be sound
    plan = plan_precision(opened.config, precision, group_size)
    if verify_logits:
        require_memory_to_verify(opened)
    found = find_tokenizer(
        opened.folder, None if tokenizer is None else str(tokenizer), opened.config.vocab_size, progress.say
    )
    shapes, target = _without_padding(opened, found, keep_padding_rows, progress.say)
    for layers in grouped(plan.kept):
        progress.say(f"kept in full precision: {layers} (width is no multiple of group size {group_size})")
    written = list(specs(shapes, plan))
    require_room(out, written)
    with new_folder(out, force=force, ours=is_our_model) as folder:
        hashes = _write(folder, opened, shapes, plan, written, progress)
        if _stamps(opened) != before:
            raise CheckpointError(f"{place}: changed while it was being converted; convert it again")
        provenance = {
            "tool_version": __version__,
            "source": str(source),
            "source_commit": hub.commit_of(place),
            "source_kind": opened.kind,
            "source_sha256": hashes,
            "precision": precision,
            "tokenizer": found.origin if found else None,
        }
        write_json(folder / "config.json", _config_json(target, plan, provenance))
        _write_tokenizer(folder, opened, found)
    nbytes = sum(s.nbytes for s in written)
    if verify_logits:
        progress.say("comparing the result with its source")
    checked = verify(opened, out, found.tokenizer if found else None) if verify_logits else None
    return Result(out, target, plan, nbytes, checked)


def _write(
    folder: Path,
    source: Source,
    shapes: dict[str, tuple[int, ...]],
    plan: Precision,
    written: list[TensorSpec],
    progress: Progress,
) -> dict[str, str]:
    """Write the weights; hash the source files meanwhile, in a second thread. Returns file name -> SHA-256."""
    total = sum(t.nbytes for t in source.tensors.values())
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress.bytes_read(done, total)

    progress.bytes_read(0, total)
    stop = Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        hashes = {p.name: pool.submit(sha256, p, stop) for p in source.files}
        try:
            write_weights(folder, written, converted(source.tensors, shapes, plan, count))
            return {name: future.result() for name, future in hashes.items()}
        except BaseException:
            stop.set()  # leaving the pool waits for its thread
            raise


def _stamps(source: Source) -> list[tuple[int, int, int]]:
    """What tells that a source file was written to meanwhile: then its bytes and its hash need not belong together."""
    return [(s.st_ino, s.st_size, s.st_mtime_ns) for s in (path.stat() for path in source.files)]


def _without_padding(
    source: Source, found: Found | None, keep: bool, say: Callable[[str], None]
) -> tuple[dict[str, tuple[int, ...]], OpenELMConfig]:
    """The shapes to write and their config: CoreNet's padding rows are dropped when a tokenizer says how many."""
    shapes = {name: t.shape for name, t in source.tensors.items()}
    rows = source.config.vocab_size
    if found is None:
        return shapes, source.config
    ids = found.tokenizer.vocab_size
    if ids > rows:
        raise CheckpointError(
            f"the tokenizer ({found.origin}) has {ids} ids, but the model's embedding only {rows} rows: "
            "it belongs to another model; name the right one with --tokenizer"
        )
    surplus = rows - ids
    if surplus > MAX_PADDING_ROWS:
        say(f"note: the tokenizer ({found.origin}) has {ids} ids for {rows} embedding rows; is it this model's?")
    if keep or source.kind != "corenet" or not 0 < surplus <= MAX_PADDING_ROWS:
        return shapes, source.config
    say(f"dropped {surplus} padding rows of the embedding ({rows} -> {ids}); --keep-padding-rows keeps them")
    shapes |= {name: (ids, *shapes[name][1:]) for name in _ROWS if name in shapes}
    return shapes, dataclasses.replace(source.config, vocab_size=ids)


def _config_json(config: OpenELMConfig, plan: Precision, provenance: dict[str, Any]) -> dict[str, Any]:
    values = {**config.to_dict(), "torch_dtype": dtype_name(plan.dtype)}
    if quantization := plan.to_config():
        values["quantization"] = quantization
    return {**values, PROVENANCE: provenance}


def _write_tokenizer(folder: Path, source: Source, found: Found | None) -> None:
    if found:
        found.tokenizer.save(folder)
    if source.kind == "huggingface":
        copy_generation(source.folder, folder)
