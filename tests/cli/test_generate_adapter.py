"""``openelm generate --adapter``."""

from __future__ import annotations

from pathlib import Path

import pytest

from openelm_mlx import device
from openelm_mlx.generation import generate_tokens
from openelm_mlx.loading import load, memory_needed
from tests.adapters.made import saved, trained_adapter
from tests.cli.generating import PROMPT, generate, tokens


@pytest.fixture(scope="session")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the model, and for the same in 4 bits."""
    made = trained_adapter(load(model)[0], precision="fp32")
    return saved(tmp_path_factory.mktemp("run") / "run1", made)


def test_an_adapter(model: Path, adapter: Path, greedy: list[int]) -> None:
    loaded, tokenizer = load(model, adapter=adapter)
    assert tokenizer is not None
    expected = list(generate_tokens(loaded, tokenizer.encode(PROMPT), 12))
    assert expected != greedy
    assert tokens(model, "--adapter", str(adapter)) == expected


def test_an_adapter_of_another_precision_is_noted_on_stderr(model: Path, packed: Path, adapter: Path) -> None:
    note = "note: the adapter was trained on fp32 weights, and the model's are 4bit\n"
    done = generate(packed, "--adapter", str(adapter), "--quiet")
    assert (done.status, done.err) == (0, note)
    assert note.strip() not in done.out
    assert generate(packed, "--adapter", str(adapter), "--json").err == note
    assert generate(model, "--adapter", str(adapter), "--quiet").err == ""


def test_adapters_that_cannot_be_used(model: Path, adapter: Path, tmp_path: Path) -> None:
    for wrong, message in (
        (tmp_path / "x", "no such folder; an adapter is a folder"),
        (model, "it holds a whole model: use it with --model"),
    ):
        done = generate(tmp_path / "no such model", "--adapter", str(wrong))
        assert (done.status, done.out) == (2, "")
        assert message in done.err
        assert done.err.count("\n") == 1


def test_an_adapter_counts_for_memory(model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enough_without = memory_needed(model)
    monkeypatch.setattr(device, "memory", lambda: device.Memory(enough_without, "a test"))
    assert generate(model).status == 0
    done = generate(model, "--adapter", str(adapter))
    assert (done.status, done.out) == (2, "")
    assert "--force to try" in done.err
    assert generate(model, "--adapter", str(adapter), "--force").status == 0
