"""Data files with something wrong in them: each gives its one clear line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from openelm_mlx.finetune.data.dataset import open_data
from openelm_mlx.finetune.data.records import DataError
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.tokenizer import Tokenizer
from tests.finetune.data.malformed import GOOD, MALFORMED, SKIP, Malformed
from tests.support.tokenizers_made import MODEL

SMALL = Tokenizer.from_file(MODEL)


def refusal(settings: Settings) -> str:
    with pytest.raises(DataError) as caught:
        open_data(settings, SMALL, 64, lambda line: None)
    return str(caught.value)


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.name)
def test_the_line_names_the_place_and_what_is_wrong(case: Malformed, tmp_path: Path) -> None:
    path = tmp_path / case.name
    path.write_bytes(case.data)
    said = refusal(Settings(data=str(path)))
    pattern = re.escape(case.message).replace(r"\*", r".+")
    assert re.fullmatch(re.escape(str(path)) + pattern, said), said
    assert "\n" not in said


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.name)
def test_bad_lines_can_be_counted_instead_and_what_ends_a_file_cannot(case: Malformed, tmp_path: Path) -> None:
    path = tmp_path / case.name
    path.write_bytes(case.data)
    settings = Settings(data=str(path), skip_bad_lines=True, valid_fraction=0)
    if not case.skippable:
        assert "skip-bad-lines" not in refusal(settings)
        return
    if GOOD in case.data:
        lines: list[str] = []
        data = open_data(settings, SMALL, 64, lines.append)
        assert (len(data.train.examples), data.train.report.bad) == (2, 1)
        problem = re.escape(case.message.removesuffix(SKIP)).replace(r"\*", r".+")
        assert re.search(rf"1 bad line left out, the first: .*{re.escape(case.name)}{problem}$", "\n".join(lines), re.M)
    else:
        assert "no example is left for train" in refusal(settings)


def test_there_are_enough_of_them() -> None:
    assert len({case.name for case in MALFORMED}) == len(MALFORMED) >= 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "there is no data: name a file, a folder or hf:NAME with --data"),
        ("absent.jsonl", "absent.jsonl: no such file"),
        ("empty-folder", "empty-folder: has no file to train on: train.jsonl or train.json, or either with .gz"),
        ("twice", "twice: has train.jsonl and train.json.gz, and only one file can be train"),
        ("valid-twice", "valid-twice: has valid.jsonl and validation.jsonl, and only one file can be valid"),
        ("hf:", "hf:: names no data set; write hf:NAME, or hf:NAME:CONFIG"),
    ],
)
def test_data_that_is_not_there(
    data: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "empty-folder/notes.txt",
        "twice/train.jsonl",
        "twice/train.json.gz",
        "valid-twice/train.jsonl",
        "valid-twice/valid.jsonl",
        "valid-twice/validation.jsonl",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(GOOD)
    assert refusal(Settings(data=data)) == message


def test_a_file_to_validate_on_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    settings = Settings(data=str(tmp_path), valid=str(tmp_path))
    assert refusal(settings) == f"{tmp_path}: is a folder; name a file to validate on"
    settings = Settings(data=str(tmp_path), test=str(tmp_path / "absent"))
    assert refusal(settings) == f"{tmp_path / 'absent'}: no such file"
    (tmp_path / "valid.jsonl").write_bytes(GOOD + b"{}\n")
    assert refusal(Settings(data=str(tmp_path))).startswith(f"{tmp_path / 'valid.jsonl'}:3: is an empty object")


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").symlink_to(tmp_path / "absent")
    assert "is no regular file but a link that leads to none" in refusal(Settings(data=str(tmp_path)))
