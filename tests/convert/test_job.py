"""A conversion from end to end: padding rows, what is recorded, and that nothing is left half done."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from openelm_mlx import files, writer
from openelm_mlx.atomic import OutputError
from openelm_mlx.convert import job
from openelm_mlx.convert.job import Result, convert
from openelm_mlx.errors import CheckpointError, ConfigError, OpenELMError
from openelm_mlx.outputs import is_our_model
from openelm_mlx.progress import Progress
from openelm_mlx.version import __version__
from tests.support import sources
from tests.support.cli import Done, finish, run_apart, start
from tests.support.sources import TOKENS, written
from tests.support.tokenizers_made import MODEL


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in written(folder).items()}


# Padding rows.


def padded(source: Path, out: Path, **options: Any) -> tuple[Result, list[str]]:
    lines: list[str] = []
    return convert(source, out, **{"tokenizer": str(MODEL), **options}, progress=Progress(say=lines.append)), lines


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "4bit"])
def test_padding_rows_of_corenet_are_dropped(tmp_path: Path, tied: bool, precision: str) -> None:
    changes: dict[str, Any] = {"vocab_size": TOKENS + 128, "share_input_output_layers": tied}
    tensors = sources.weights(sources.config(**changes))
    source = sources.corenet(tmp_path / "run", tensors, **changes)
    result, lines = padded(source, tmp_path / "out", precision=precision)
    assert lines[0] == "dropped 128 padding rows of the embedding (628 -> 500); --keep-padding-rows keeps them"
    found = written(tmp_path / "out")
    names = ["transformer.token_embeddings.weight", *([] if tied else ["lm_head.weight"])]
    for name in names:
        assert found[name].shape[0] == TOKENS
        if precision == "fp32":
            np.testing.assert_array_equal(np.asarray(found[name]), tensors[name][:TOKENS])
    assert ("lm_head.weight" in found) is not tied
    assert result.config.vocab_size == TOKENS
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == TOKENS


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (TOKENS + 128, {"keep_padding_rows": True}),
        (TOKENS + 128, {"tokenizer": "none"}),
        (TOKENS + 129, {}),  # more than padding can be
        (TOKENS, {}),
    ],
)
def test_padding_rows_that_are_kept(tmp_path: Path, rows: int, options: dict[str, Any]) -> None:
    source = sources.corenet(tmp_path / "run", vocab_size=rows)
    result, lines = padded(source, tmp_path / "out", **options)
    note = f"note: the tokenizer ({MODEL}) has {TOKENS} ids for {rows} embedding rows; is it this model's?"
    assert lines == ([note] if rows > TOKENS + 128 else [])
    assert result.config.vocab_size == rows
    assert shapes_in(tmp_path / "out")["transformer.token_embeddings.weight"] == (rows, 64)


def test_one_padding_row_is_dropped(tmp_path: Path) -> None:
    result, _ = padded(sources.corenet(tmp_path / "run", vocab_size=TOKENS + 1), tmp_path / "out")
    assert result.config.vocab_size == TOKENS


def test_rows_of_a_hugging_face_source_are_kept(tmp_path: Path) -> None:
    result, lines = padded(sources.hf(tmp_path / "hf", vocab_size=TOKENS + 12), tmp_path / "out")
    assert lines == []
    assert result.config.vocab_size == TOKENS + 12


@pytest.mark.parametrize("layout", [sources.hf, sources.corenet])
def test_a_tokenizer_with_more_ids_than_rows(tmp_path: Path, layout: Any) -> None:
    source = layout(tmp_path / "source", vocab_size=TOKENS - 1)
    with pytest.raises(CheckpointError, match=r"has 500 ids, but the model's embedding only 499 rows"):
        padded(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What is recorded.


@pytest.mark.parametrize("shards", [1, 3])
def test_provenance(tmp_path: Path, shards: int) -> None:
    source = sources.hf(tmp_path / "hf", shards=shards)
    convert(source, tmp_path / "out", precision="8bit")
    recorded = json.loads((tmp_path / "out" / "config.json").read_text())["openelm_mlx"]
    files = sorted(source.glob("*.safetensors"))
    assert len(files) == shards
    assert recorded == {
        "tool_version": __version__,
        "source": str(source),
        "source_commit": None,
        "source_kind": "huggingface",
        "source_sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files},
        "precision": "8bit",
        "tokenizer": "the source folder",
    }


def test_the_hash_is_of_the_whole_file(tmp_path: Path) -> None:
    """Larger than what is read at a time."""
    (tmp_path / "x").write_bytes(np.random.default_rng(0).bytes(9_000_001))
    expected = hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert files.sha256(tmp_path / "x", Event()) == expected


def test_generation_config_is_copied(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "hf")
    convert(source, tmp_path / "without")
    assert not (tmp_path / "without" / "generation_config.json").exists()
    content = b'{ "eos_token_id": [2, 7],\n "by": "hand" }'
    (source / "generation_config.json").write_bytes(content)
    convert(source, tmp_path / "with")
    assert (tmp_path / "with" / "generation_config.json").read_bytes() == content


def test_the_result_says_what_was_made(tmp_path: Path) -> None:
    result = convert(sources.hf(tmp_path / "hf"), tmp_path / "out", precision="4bit", group_size=32)
    assert result.folder == tmp_path / "out"
    assert result.nbytes == sum(x.nbytes for x in written(tmp_path / "out").values())
    assert (result.precision.name, result.verification) == ("4bit", None)


def test_the_files_of_a_folder(tmp_path: Path) -> None:
    convert(sources.hf(tmp_path / "hf"), tmp_path / "out")
    assert listing(tmp_path / "out") == [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


def test_a_home_folder_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sources.hf(tmp_path / "hf")
    result = convert("~/hf", "~/out", verify_logits=True)
    assert result.folder == tmp_path / "out"
    assert is_our_model(tmp_path / "out")


# What exists already.


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sources.hf(tmp_path / "hf")


def precision_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["openelm_mlx"]["precision"])


def test_force_replaces_a_conversion_and_nothing_else(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    convert(source, out)
    with pytest.raises(OutputError, match="exists already; name another folder, or replace it with --force"):
        convert(source, out, precision="fp32")
    assert precision_of(out) == "bf16"
    convert(source, out, precision="fp32", force=True)
    assert precision_of(out) == "fp32"
    theirs = sources.hf(tmp_path / "theirs")
    before = listing(theirs)
    with pytest.raises(OutputError, match="--force only replaces folders written by this program"):
        convert(source, theirs, force=True)
    assert listing(theirs) == before
    assert listing(tmp_path) == ["hf", "out", "theirs"]


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"{}", b'{"model_type": "openelm"}'])
def test_what_is_no_conversion(tmp_path: Path, content: bytes | None) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / "folder" / "config.json").write_bytes(content)
    assert not is_our_model(tmp_path / "folder")
    assert not is_our_model(tmp_path / "missing")


def test_the_source_is_never_replaced(tmp_path: Path, source: Path) -> None:
    """Not by itself, and not by a folder that holds it: both would be deleted while they are read."""
    full = convert(source, tmp_path / "full", precision="fp32").folder
    shutil.copytree(source, full / "inside")
    (tmp_path / "link").symlink_to(full)
    for of, out in (
        (full, full),
        (full / "inside", full),
        (full / "model.safetensors", full),
        (full, tmp_path / "link"),
    ):
        with pytest.raises(OutputError, match="holds the source itself"):
            convert(of, out, force=True)
    assert precision_of(full) == "fp32"
    convert(full / "inside", full / "inside" / "deeper")
    assert precision_of(full / "inside" / "deeper") == "bf16"


def test_out_may_be_a_link_to_a_folder(tmp_path: Path, source: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "model")
    convert(source, tmp_path / "out")
    convert(source, tmp_path / "out", precision="fp32", force=True)
    assert (tmp_path / "out").is_symlink()
    assert precision_of(tmp_path / "disk" / "model") == "fp32"


# Failures in the middle.


def fails_at(error: BaseException, after: int) -> Progress:
    calls = iter(range(10_000))

    def bytes_read(done: int, total: int) -> None:
        if next(calls) == after:
            raise error

    return Progress(bytes_read=bytes_read)


@pytest.mark.parametrize("error", [CheckpointError("boom"), KeyboardInterrupt(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failure_in_the_middle(tmp_path: Path, source: Path, error: BaseException, after: int) -> None:
    with pytest.raises((OpenELMError, KeyboardInterrupt)):
        convert(source, tmp_path / "out", progress=fails_at(error, after))
    assert listing(tmp_path) == ["hf"]
    convert(source, tmp_path / "out", precision="fp32")
    with pytest.raises((OpenELMError, KeyboardInterrupt)):
        convert(source, tmp_path / "out", force=True, progress=fails_at(error, after))
    assert listing(tmp_path) == ["hf", "out"]
    assert precision_of(tmp_path / "out") == "fp32"


def test_an_interrupt_does_not_wait_for_the_hash_of_a_large_file(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(path: Path, stop: Any) -> str:
        assert stop.wait(20), "never told to stop"
        return ""

    monkeypatch.setattr(job, "sha256", endless)
    start_ = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", progress=fails_at(KeyboardInterrupt(), 3))
    assert time.monotonic() - start_ < 10


def test_too_little_room_is_said_at_once(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=100_000))
    with pytest.raises(OutputError, match=r"out: needs 0.4 MB, and the disk has 0.1 MB free"):
        convert(source, tmp_path / "a" / "b" / "out", precision="fp32")
    assert listing(tmp_path) == ["hf"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_fills_up(small_disk: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small_disk / "other").write_bytes(bytes(700_000))
    with pytest.raises(OutputError, match="MB free"):
        convert(source, small_disk / "out", precision="fp32")
    # Somebody else fills it after that was looked at.
    monkeypatch.setattr(job, "require_room", lambda out, written: (small_disk / "more").write_bytes(bytes(300_000)))
    with pytest.raises(OutputError, match="out: the disk is full; nothing was written"):
        convert(source, small_disk / "out", precision="fp32")
    assert listing(small_disk) == ["more", "other"]


# Signals, in a process of its own that is slowed down.

SLOW = """
import time
DELAY = 0.3
from openelm_mlx.rawtensor import RawTensor
read = RawTensor.read
def slowly(self):
    time.sleep(DELAY)
    return read(self)
RawTensor.read = slowly
"""


def stopped_in_the_middle(tmp_path: Path, source: Path, number: int, *options: str) -> Done:
    """Start a slow conversion, send it a signal when it has begun to write."""
    process = start("convert", source, "--out", tmp_path / "out", *options, before=SLOW)
    for _ in range(600):
        if any(p.stat().st_size > 0 for p in tmp_path.glob(".out.partial-*/model*.safetensors")):
            break
        time.sleep(0.05)
    process.send_signal(number)
    return finish(process)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_clean_up(tmp_path: Path, source: Path, number: int, status: int) -> None:
    convert(source, tmp_path / "out", precision="fp32")
    done = stopped_in_the_middle(tmp_path, source, number, "--force")
    assert (done.status, done.out, done.err) == (status, "", "")
    assert listing(tmp_path) == ["hf", "out"]
    assert precision_of(tmp_path / "out") == "fp32"


def test_what_a_kill_leaves_is_hidden_and_the_next_run_removes_it(tmp_path: Path, source: Path) -> None:
    done = stopped_in_the_middle(tmp_path, source, signal.SIGKILL)
    assert done.status == -signal.SIGKILL
    left = set(listing(tmp_path)) - {"hf"}
    assert len(left) == 1
    assert left.pop().startswith(".out.partial-")
    convert(source, tmp_path / "out")
    assert listing(tmp_path) == ["hf", "out"]


def test_two_runs_at_once_make_one_folder(tmp_path: Path, source: Path) -> None:
    first = start("convert", source, "--out", tmp_path / "out", before=SLOW.replace("0.3", "0.1"))
    done = run_apart("convert", source, "--out", tmp_path / "out", "--precision", "fp32")
    other = finish(first)
    statuses = sorted([done.status, other.status])
    assert statuses == [0, 2]
    loser = done if done.status else other
    assert loser.err.endswith(("appeared while this run was writing; nothing was replaced\n", "--force\n"))
    assert listing(tmp_path) == ["hf", "out"]
    assert precision_of(tmp_path / "out") == ("fp32" if other.status else "bf16")


def test_a_source_that_is_written_to_meanwhile_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes and the hash recorded of it would not belong together."""
    write = writer.write_weights

    def meanwhile(*arguments: Any) -> None:
        write(*arguments)
        with (source / "model.safetensors").open("r+b") as f:
            f.seek(-8, os.SEEK_END)
            f.write(bytes(8))

    monkeypatch.setattr(job, "write_weights", meanwhile)
    with pytest.raises(CheckpointError, match="changed while it was being converted"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_generation_config_is_refused_and_not_copied(tmp_path: Path, source: Path) -> None:
    for content in ("garbage", "[]", '{"eos_token_id": [[2]]}', '{"eos_token_id": -5}'):
        (source / "generation_config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            convert(source, tmp_path / "out", tokenizer="none")
