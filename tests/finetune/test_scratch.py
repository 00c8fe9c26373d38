"""``openelm finetune --init random``: new models, trained by the command."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import mlx.core as mx
import pytest

import openelm_mlx
from openelm_mlx.trees import flat
from tests.finetune.runs import metrics, started, updates, wait_for
from tests.support.cli import run

TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer"
SIZES = """
model_dim: 48
num_transformer_layers: 3
head_dim: 16
num_gqa_groups: 1
qkv_multipliers: [0.5, 1.0]
ffn_multipliers: [0.5, 2.0]
ffn_dim_divisor: 16
max_context_length: 64
normalize_qk_projections: true
share_input_output_layers: true
"""


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SIZES)
    return tmp_path / "small.yaml"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(12):
        verse = f"Alice was reading a book about the white rabbit, number {n}. " * (4 + n)
        (folder / f"{n}.txt").write_text(verse)
    return folder


def arguments(sizes: Path, texts: Path, out: Path, *more: str) -> list[str]:
    given = ["--config", sizes, "--tokenizer", TOKENIZER, "--data", texts, "--out", out]
    few = ["--min-tokens=10", "--batch-size=2", "--learning-rate=0.01", "--valid-fraction=0.2", "--no-plot", "--quiet"]
    return ["finetune", "--init", "random", *map(str, given), *few, *more]


def test_it_learns_and_makes_an_ordinary_model(sizes: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run(*arguments(sizes, texts, out, "--steps=60", "--eval-every=20"))
    assert done.status == 0, done.err
    losses = [line["valid_loss"] for line in metrics(out) if "valid_loss" in line]
    assert losses[0] > 5
    assert losses[-1] < 1.5
    model, tokenizer = openelm_mlx.load(out)
    assert tokenizer is not None
    assert openelm_mlx.generate(model, tokenizer, "Alice was", max_tokens=12).startswith(" reading a book")
    assert model.config.num_query_heads == (2, 3, 3)
    assert model.config.vocab_size == tokenizer.vocab_size
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    told = json.loads((out / "config.json").read_text())["openelm_mlx"]
    assert (told["source"], told["source_kind"]) == (str(sizes), "new")


def test_it_loads_in_stock_mlx_lm(sizes: Path, texts: Path, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    out = tmp_path / "run"
    assert run(*arguments(sizes, texts, out, "--steps=2")).status == 0
    ours, _ = openelm_mlx.load(out, dtype="float32")
    stock = load_model(out)[0]
    ids = mx.array([[1, 5, 9, 33, 2, 77]])
    assert float(mx.abs(stock(ids).astype(mx.float32) - ours(ids)).max()) < 1e-4


@pytest.mark.slow
def test_killed_and_resumed_it_ends_as_if_it_never_had(sizes: Path, texts: Path, tmp_path: Path) -> None:
    more = ("--steps=60", "--save-every=7", "--eval-every=20", "--shuffle-window=3")
    assert run(*arguments(sizes, texts, tmp_path / "whole", *more)).status == 0
    out = tmp_path / "killed"
    with started(*arguments(sizes, texts, out, *more)) as process:
        wait_for(out, 25)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    done = run("finetune", "--resume", out, "--quiet")
    assert done.status == 0, done.err
    assert metrics(out) == metrics(tmp_path / "whole")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_runs_folder_is_not_made_among_texts(sizes: Path, texts: Path) -> None:
    done = run(*arguments(sizes, texts, texts / "run", "--steps=1"))
    assert done.status == 2
    assert (
        done.err == f"error: {texts / 'run'}: lies in {texts}, all files of which are trained on; name another --out\n"
    )
    assert not (texts / "run").exists()
    (texts / "0.txt").rename(texts / "train.txt")
    assert run(*arguments(sizes, texts, texts / "run", "--steps=1")).status == 0, "of a folder with splits only those"


def test_uniform_has_equal_layers_and_as_many_parameters(sizes: Path, texts: Path, tmp_path: Path) -> None:
    sizes_of = {}
    for name, more in (("scaled", ()), ("equal", ("--uniform",))):
        assert run(*arguments(sizes, texts, tmp_path / name, "--steps=1", *more)).status == 0
        model, _ = openelm_mlx.load(tmp_path / name)
        sizes_of[name] = (model.config.ffn_dims, sum(p.size for p in flat(model.parameters()).values()))
    assert len(set(sizes_of["scaled"][0])) == 3
    assert len(set(sizes_of["equal"][0])) == 1
    assert sizes_of["equal"][1] == pytest.approx(sizes_of["scaled"][1], rel=0.05)


def test_the_seed_decides(sizes: Path, texts: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(*arguments(sizes, texts, tmp_path / name, "--steps=2", f"--seed={seed}")).status == 0
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b") != metrics(tmp_path / "c")


def test_z_loss_keeps_logits_small(sizes: Path, texts: Path, tmp_path: Path) -> None:
    losses = {}
    for z in (0, 0.5):
        assert run(*arguments(sizes, texts, tmp_path / f"z{z}", "--steps=1", f"--z-loss={z}")).status == 0
        losses[z] = updates(metrics(tmp_path / f"z{z}"))[0]["loss"]
    assert losses[0.5] > losses[0] + 5


def test_streamed_text_for_a_model_that_there_is(model: Path, texts: Path, tmp_path: Path) -> None:
    given = ["--model", model, "--data", texts, "--out", tmp_path / "run", "--packing", "stream", "--max-length", "32"]
    done = run("finetune", *map(str, given), "--steps=3", "--no-plot", "--quiet", "--min-characters=5")
    assert done.status == 0, done.err
    assert (tmp_path / "run" / "adapters.safetensors").exists()


def test_a_dry_run_shows_what_would_be_done(sizes: Path, texts: Path, tmp_path: Path) -> None:
    done = run(*arguments(sizes, texts, tmp_path / "run", "--dry-run", "--epochs=3"))
    assert "updates " in done.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--config": None}, "a new model needs its sizes: --config"),
        ({"--tokenizer": None}, "a new model needs a tokenizer: --tokenizer"),
        ({"--data": None}, "there is no data: name a file or a folder with --data"),
        ({"--config": "absent.yaml"}, "absent.yaml: no such file"),
        ({"--data": "absent.txt"}, "absent.txt: no such file"),
        ({"--max-length": "2"}, None),
        ({"--min-tokens": "100000"}, "no text is left to train on"),
        ({"--text-key": "body", "--data": "{tmp}/lines.jsonl"}, "lines.jsonl:1: has no 'body', but 'text'"),
        ({"--config": "{tmp}/odd.yaml"}, "odd.yaml: has the key 'model_dimm'; there are"),
        ({"--config": "{tmp}/bos.yaml"}, "bos.yaml: bos_token_id is 77, and the tokenizer's is 1; leave it out"),
        ({"--config": "{tmp}/few.yaml"}, "vocab_size is 7, and the tokenizer has"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(
    change: dict[str, str | None], message: str | None, sizes: Path, texts: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "Alice"}\n')
    (tmp_path / "odd.yaml").write_text(SIZES + "model_dimm: 3\n")
    (tmp_path / "bos.yaml").write_text(SIZES + "bos_token_id: 77\n")
    (tmp_path / "few.yaml").write_text(SIZES + "vocab_size: 7\n")
    given = arguments(sizes, texts, tmp_path / "run", "--steps=1")
    for flag, value in change.items():
        given = [a for n, a in enumerate(given) if a != flag and given[n - 1] != flag and not a.startswith(f"{flag}=")]
        given += [flag, value.replace("{tmp}", str(tmp_path))] if value else []
    done = run(*given)
    if message is None:
        assert done.status == 0, done.err
        return
    assert done.status == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
