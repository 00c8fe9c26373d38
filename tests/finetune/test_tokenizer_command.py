"""``openelm tokenizer train``: what it prints, and who takes what it makes."""

from __future__ import annotations

import inspect
import json
import random
import re
import signal
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.filesize import decimal
from sentencepiece import SentencePieceProcessor

import openelm_mlx
from openelm_mlx.finetune.tokenizer_command import train
from openelm_mlx.finetune.tokenizer_options import TokenizerOptions
from tests.finetune.test_tokenizer_training import TEXTS, save
from tests.support import sources
from tests.support.cli import modules_of, run, run_apart, start


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return save(tmp_path / "texts.jsonl", TEXTS)


def arguments(data: Path, out: Path, *more: str) -> list[str]:
    return ["tokenizer", "train", "--data", str(data), "--vocab-size=450", "--out", str(out), *more]


def test_what_it_prints(data: Path, tmp_path: Path) -> None:
    # In a process of its own: SentencePiece would write past Python's sys.stderr.
    done = run_apart(*arguments(data, tmp_path / "out"))
    assert done.status == 0
    size = decimal(sum(len(line.encode()) for text in TEXTS for line in text.splitlines() if line.strip()))
    assert done.err == f"training 450 ids on {size} of text\n"
    first, second = done.out.splitlines()
    assert first == f"{tmp_path / 'out'}: 450 ids, learned from {size} in {len(TEXTS)} texts"
    assert re.fullmatch(rf"on {size} of that: \d\.\d\d bytes a token, \d\.\d\d tokens a word", second)


def test_a_sample_is_told(data: Path, tmp_path: Path) -> None:
    big = save(tmp_path / "big.jsonl", [" ".join(TEXTS)] * 40)
    done = run(*arguments(big, tmp_path / "out", "--max-bytes=100000"))
    assert re.search(r"450 ids, learned from (99|100)\.\d kB of the [\d.]+ kB in 40 texts", done.out), done.err


def test_quiet(data: Path, tmp_path: Path) -> None:
    done = run_apart(*arguments(data, tmp_path / "out", "--quiet"))
    assert (done.status, done.out, done.err) == (0, "", "")


def test_force(data: Path, tmp_path: Path) -> None:
    for more, status in (((), 0), ((), 2), (("--force",), 0)):
        assert run(*arguments(data, tmp_path / "out", *more)).status == status


@pytest.mark.parametrize("change", [{"vocab_size": 32_000}, {"seed": -1}, {"text_key": "body"}])
def test_refusals_are_one_line(change: dict[str, Any], data: Path, tmp_path: Path) -> None:
    more = [f"--{name.replace('_', '-')}={value}" for name, value in change.items()]
    done = run_apart(*arguments(data, tmp_path / "out", *more))
    assert done.status == 2
    assert [line for line in done.err.splitlines() if not line.startswith("training ")] == [done.err.splitlines()[-1]]
    assert done.err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_every_option_arrives(data: Path, tmp_path: Path) -> None:
    save(data, TEXTS, key="body")
    given: dict[str, Any] = {"character_coverage": 0.99, "max_bytes": 5000, "seed": 7, "text_key": "body"}
    more = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    done = run(*arguments(data, tmp_path / "out", *more))
    assert done.status == 0, done.err
    stored = json.loads((tmp_path / "out" / "openelm_mlx.json").read_text())
    assert {f.name: stored[f.name] for f in fields(TokenizerOptions)} == {"vocab_size": 450, **given}


def test_defaults_are_the_options_own() -> None:
    parameters = inspect.signature(train).parameters
    for field in fields(TokenizerOptions)[1:]:
        assert parameters[field.name].default is getattr(TokenizerOptions, field.name)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    done, modules = modules_of(tmp_path / "modules", "tokenizer", "train", "--help")
    assert done.status == 0
    assert {"mlx", "numpy", "sentencepiece", "tokenizers"} & modules == set()


def test_convert_takes_it(data: Path, tmp_path: Path) -> None:
    assert run(*arguments(data, tmp_path / "tok")).status == 0
    source = sources.hf(tmp_path / "hf", tokenizer=False)
    done = run("convert", source, "--tokenizer", tmp_path / "tok", "--out", tmp_path / "model")
    assert done.status == 0, done.err
    _, tokenizer = openelm_mlx.load(tmp_path / "model")
    assert tokenizer is not None
    pieces = SentencePieceProcessor(str(tmp_path / "tok" / "tokenizer.model"))
    assert tokenizer.encode("a chat, 🙂") == [1, *pieces.encode("a chat, 🙂")]


def test_a_new_model_takes_it(data: Path, tmp_path: Path) -> None:
    assert run(*arguments(data, tmp_path / "tok")).status == 0
    sizes = "{model_dim: 32, num_transformer_layers: 1, head_dim: 16, num_gqa_groups: 1, max_context_length: 32, "
    (tmp_path / "sizes.yaml").write_text(sizes + "qkv_multipliers: [1, 1], ffn_multipliers: [1, 1]}")
    given = ["--tokenizer", tmp_path / "tok", "--config", tmp_path / "sizes.yaml", "--data", data]
    more = ["--steps=1", "--min-tokens=2", "--valid-fraction=0", "--no-plot", "--quiet"]
    done = run("finetune", "--init", "random", *map(str, given), "--out", tmp_path / "run", *more)
    assert done.status == 0, done.err
    model, tokenizer = openelm_mlx.load(tmp_path / "run")
    assert tokenizer is not None
    assert model.config.vocab_size == tokenizer.vocab_size == 450


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_can_be_stopped_while_sentencepiece_works(number: int, status: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    letters = "".join(chr(0x4E00 + min(int(rng.expovariate(0.003)), 2999)) for _ in range(1_500_000))
    (tmp_path / "texts.txt").write_text(letters)
    process = start(
        "tokenizer", "train", "--data", tmp_path / "texts.txt", "--vocab-size=9000", "--out", tmp_path / "out"
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"training ")
        time.sleep(0.5)
        begun = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=20) == status
        assert time.monotonic() - begun < 1
    finally:
        process.kill()
        process.communicate()
    assert [p.name for p in tmp_path.iterdir()] == ["texts.txt"]
