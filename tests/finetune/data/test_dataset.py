"""A run's data: what is read for what, what is kept for validation, and what is counted."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.dataset import Data, Dataset, open_data
from openelm_mlx.finetune.data.records import DataError
from openelm_mlx.finetune.data.splitting import keep_for_validation
from openelm_mlx.finetune.data.types import Encoded
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.tokenizer import Tokenizer
from tests.support.tokenizers_made import MODEL, ZEPHYR

SMALL = Tokenizer.from_file(MODEL)


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def opened(
    data: Path | str, *, tokenizer: Tokenizer = SMALL, max_length: int = 64, **settings: Any
) -> tuple[Data, list[str]]:
    lines: list[str] = []
    return open_data(Settings(data=str(data), **settings), tokenizer, max_length, lines.append), lines


def texts(dataset: Dataset | None) -> list[str]:
    assert dataset is not None
    return [SMALL.decode(example.ids.tolist()) for example in dataset.examples]


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": f"text {n}"} for n in range(count)]


# Which files


@pytest.mark.parametrize("valid", ["valid.jsonl", "validation.json", "val.jsonl", "dev.jsonl"])
def test_a_folder_has_a_file_for_each_split(tmp_path: Path, valid: str) -> None:
    for name in ("train.jsonl", valid, "test.jsonl"):
        write(tmp_path / name, {"text": name})
    write(tmp_path / "notes.jsonl", {"text": "not read"})
    data, _ = opened(tmp_path)
    assert [texts(part) for part in (data.train, data.valid, data.test)] == [["train.jsonl"], [valid], ["test.jsonl"]]
    assert data.train.examples[0].where == f"{tmp_path}/train.jsonl:1"


def test_a_file_that_is_named_is_taken_instead_of_the_folders(tmp_path: Path) -> None:
    for name in ("train", "valid", "other"):
        write(tmp_path / f"{name}.jsonl", {"text": name})
    data, _ = opened(tmp_path, valid=str(tmp_path / "other.jsonl"), test=str(tmp_path / "valid.jsonl"))
    assert [texts(part) for part in (data.train, data.valid, data.test)] == [["train"], ["other"], ["valid"]]
    data, _ = opened(tmp_path / "train.jsonl", valid=str(tmp_path / "valid.jsonl"))
    assert (texts(data.valid), data.test) == (["valid"], None)


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "my.jsonl", {"text": "a"})
    assert texts(opened("~/my.jsonl")[0].train) == ["a"]


# Keeping some for validation


def test_a_part_is_kept_that_depends_on_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", *numbered(200))
    data, lines = opened(path)
    train, valid = texts(data.train), texts(data.valid)
    assert (len(train), len(valid)) == (190, 10)
    assert sorted(train + valid) == sorted(r["text"] for r in numbered(200))
    assert [texts(part) for part in (opened(path)[0].train, opened(path)[0].valid)] == [train, valid]
    assert texts(opened(path, seed=1)[0].valid) != valid
    assert lines[1] == f"valid: 10 examples, {data.valid.report.tokens if data.valid else 0} tokens, " + (
        f"{data.valid.report.learned if data.valid else 0} of them learned (kept from {path})"
    )
    assert (data.train.report.examples, data.train.report.tokens) == (190, sum(len(e.ids) for e in data.train.examples))


@pytest.mark.parametrize(
    ("count", "fraction", "kept"),
    [(19, 0.05, 0), (20, 0.05, 1), (20, 0.001, 1), (39, 0.05, 1), (40, 0.05, 2), (3, 0.5, 1), (1100, 0.5, 500)],
)
def test_how_many_are_kept(tmp_path: Path, count: int, fraction: float, kept: int) -> None:
    data, lines = opened(write(tmp_path / "my.jsonl", *numbered(count)), valid_fraction=fraction)
    assert len(data.valid.examples if data.valid else []) == kept
    assert len(data.train.examples) == count - kept
    assert any("too few different examples" in line for line in lines) == (kept == 0)


def test_none_are_kept_for_a_fraction_of_nothing(tmp_path: Path) -> None:
    data, lines = opened(write(tmp_path / "my.jsonl", *numbered(100)), valid_fraction=0)
    assert data.valid is None
    assert len(lines) == 1


def made(contents: list[int]) -> list[Encoded]:
    import numpy as np

    return [
        Encoded(np.array([1, c, 2], dtype=np.int32), np.array([False, True, True]), f"my.jsonl:{n}")
        for n, c in enumerate(contents, 1)
    ]


@given(st.lists(st.integers(0, 30), max_size=120), st.floats(0.001, 0.5), st.integers(0, 3))
def test_nothing_trained_on_is_validated_on(contents: list[int], fraction: float, seed: int) -> None:
    examples = made(contents)
    train, kept = keep_for_validation(examples, fraction, seed)
    assert not {e.ids[1] for e in train} & {e.ids[1] for e in kept}
    assert Counter(e.where for e in train + kept) == Counter(e.where for e in examples)
    most = max(int(fraction * len(examples)), len(examples) >= 20)
    assert len(kept) <= most
    if len(set(contents)) == len(contents):
        assert len(kept) == most
    for part in (train, kept):
        assert [e.where for e in part] == sorted((e.where for e in part), key=lambda w: int(w.split(":")[1]))


def test_their_order_in_the_file_does_not_matter() -> None:
    forth, back = (keep_for_validation(made(list(contents)), 0.2, 0)[1] for contents in (range(50), range(49, -1, -1)))
    assert sorted(e.ids[1] for e in forth) == sorted(e.ids[1] for e in back)


# What is counted


def test_everything_left_out_or_changed_is_counted(tmp_path: Path) -> None:
    long = "Alice was very tired. " * 20
    path = write(
        tmp_path / "my.jsonl",
        {"text": "Alice"},
        {"text": ""},
        {"text": long},
        {"prompt": long, "completion": "yes"},
        {"prompt": "Alice", "completion": " was" * 40},
        {"text": "Alice"},
        {"text": 7},
        {"prompt": "Alice</s>", "completion": "was"},
        {"text": "Alice"},
        "words",
    )
    data, lines = opened(path, max_length=16, skip_bad_lines=True, valid_fraction=0)
    whole = len(SMALL.encode(long)) + 1, len(SMALL.encode("Alice")) + 40 + 1
    tokens = [len(e.ids) for e in data.train.examples]
    learned = sum(int(e.learn.sum()) for e in data.train.examples)
    assert (len(tokens), max(tokens)) == (6, 16)
    assert lines == [
        f"train: 6 examples, {sum(tokens)} tokens, {learned} of them learned ({path})",
        "train: 1 record left out, with no text to learn",
        "train: 1 example left out, as the prompt alone fills 16 tokens (--max-length)",
        f"train: 2 bad lines left out, the first: {path}:7: 'text' must be text, not a number",
        f"train: 2 examples cut to 16 tokens (--max-length), {sum(whole) - 32} tokens lost",
        "train: 2 examples the same as an earlier one",
        "train: 1 example with </s> written out, which is learned as text: the end is marked without it, and messages "
        "get their template from the model",
    ]
    assert dataclasses.asdict(data.train.report) == {
        "split": "train", "source": str(path), "max_length": 16, "examples": 6, "tokens": sum(tokens),
        "learned": learned, "empty": 1, "dropped": 1, "cut": 2, "lost": sum(whole) - 32, "duplicates": 2,
        "spelled": 1, "eos": "</s>", "unit": "example", "shortened": 0, "same": 0,
        "bad": 2, "first_bad": f"{path}:7: 'text' must be text, not a number",
    }  # fmt: skip


def test_examples_that_are_in_two_files_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *numbered(5))
    write(tmp_path / "valid.jsonl", *numbered(2), {"text": "other"})
    write(tmp_path / "test.jsonl", {"text": "another"})
    _, lines = opened(tmp_path)
    assert lines[-1] == "valid: 2 of these are in the training data too"
    assert len(lines) == 4


def test_plain_text_is_told_from_the_rest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *numbered(30))
    data, _ = opened(path)
    assert data.train.plain
    assert data.valid is not None
    assert data.valid.plain
    assert not opened(write(path, *numbered(30), {"prompt": "a", "completion": "b"}))[0].train.plain


def test_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", *({"text": "some words " * 20} for _ in range(1000)))
    told: list[tuple[int, int]] = []
    open_data(Settings(data=str(path)), SMALL, 64, lambda line: None, lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {path.stat().st_size}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]
    assert len(told) == 5


# Refusals that concern the model


def test_messages_without_a_template_end_reading_even_where_bad_lines_do_not(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path = write(tmp_path / "my.jsonl", {"text": "a"}, {"messages": turns})
    for skip in (False, True):
        with pytest.raises(DataError) as caught:
            opened(path, skip_bad_lines=skip)
        assert str(caught.value).startswith(f"{path}:2: messages need a chat template, and the model has none; ")
        assert "skip-bad-lines" not in str(caught.value)
    assert len(opened(path, tokenizer=SMALL.with_chat_template(ZEPHYR))[0].train.examples) == 2


def test_messages_that_the_template_refuses_are_a_bad_line(tmp_path: Path) -> None:
    strict = SMALL.with_chat_template(
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no system') }}{% endif %}" + ZEPHYR
    )
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path = write(tmp_path / "my.jsonl", {"messages": turns}, {"messages": [{"role": "system", "content": "a"}, *turns]})
    with pytest.raises(DataError, match=r"my\.jsonl:2: the chat template failed: no system.*; --skip-bad-lines counts"):
        opened(path, tokenizer=strict)
    assert opened(path, tokenizer=strict, skip_bad_lines=True)[0].train.report.bad == 1


# Hub data sets


def test_without_the_library_a_hub_data_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError) as caught:
        opened("hf:someone/words")
    assert str(caught.value) == (
        "hf:someone/words: Hub data sets need the package datasets: pip install 'openelm-mlx[data]'"
    )


@pytest.mark.reference
def test_a_hub_data_set_gives_its_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        # A column that some rows lack is null in them.
        write(tmp_path / "words" / "train.jsonl", {"prompt": "a", "completion": "b"}, {"text": "Alice"})
        write(tmp_path / "words" / "validation.jsonl", {"text": "was"})
        data, lines = opened(f"hf:{tmp_path / 'words'}")
        assert len(data.train.examples) == 2
        assert texts(data.valid) == ["was"]
        assert data.train.examples[1].where == f"hf:{tmp_path / 'words'} (train) row 2"
        with pytest.raises(OpenELMError, match="datasets cannot load it"):
            opened(f"hf:{tmp_path / 'absent'}")
        assert lines[0].startswith("train: 2 examples")
