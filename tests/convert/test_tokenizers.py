"""Which tokenizer a conversion takes, and what it writes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Library

from openelm_mlx import hub
from openelm_mlx.convert.job import Result, convert
from openelm_mlx.errors import OpenELMError, TokenizerError
from openelm_mlx.loading import load
from openelm_mlx.progress import Progress
from tests.support import sources
from tests.support.tokenizers_made import CHATML, MODEL, ZEPHYR, byte_level_json, write_folder

TEXTS = ["Once upon a time", "  two  spaces", "é 模型 🙂", "</s> is text", ""]
PIECES = SentencePieceProcessor(model_file=str(MODEL))


def converted(source: Path, out: Path, tokenizer: str | None = None) -> tuple[Result, list[str]]:
    lines: list[str] = []
    return convert(source, out, tokenizer=tokenizer, progress=Progress(say=lines.append)), lines


def read(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    return values


def assert_ids_equal(folder: Path) -> None:
    """The written tokenizer.json, run by the tokenizers library, and our own reading give SentencePiece's ids."""
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.encode_special_tokens = True
    _, ours = load(folder)
    assert ours is not None
    for text in TEXTS:
        expected = PIECES.encode(text)
        assert library.encode(text, add_special_tokens=False).ids == expected
        assert ours.encode(text) == [1, *expected]


def test_the_source_folders_own(tmp_path: Path) -> None:
    result, lines = converted(sources.hf(tmp_path / "hf"), tmp_path / "out")
    assert lines == []
    assert (result.folder / "tokenizer.model").read_bytes() == MODEL.read_bytes()
    assert (read(result.folder)["bos_token"], read(result.folder)["eos_token"]) == ("<s>", "</s>")
    assert_ids_equal(result.folder)
    recorded = json.loads((result.folder / "config.json").read_text())["openelm_mlx"]
    assert recorded["tokenizer"] == "the source folder"


@pytest.mark.parametrize("kind", ["model", "json", "folder", "renamed"])
def test_a_named_one(tmp_path: Path, kind: str) -> None:
    made, _ = converted(sources.hf(tmp_path / "other"), tmp_path / "made")
    (tmp_path / "pieces.bin").write_bytes(MODEL.read_bytes())
    wanted = {
        "model": MODEL,
        "json": made.folder / "tokenizer.json",
        "folder": tmp_path / "other",
        "renamed": tmp_path / "pieces.bin",
    }[kind]
    result, _ = converted(sources.hf(tmp_path / "hf", tokenizer=False), tmp_path / "out", str(wanted))
    assert_ids_equal(result.folder)
    assert (result.folder / "tokenizer.model").exists() is (kind != "json")
    assert (read(result.folder)["bos_token"], read(result.folder)["eos_token"]) == ("<s>", "</s>")
    recorded = json.loads((result.folder / "config.json").read_text())["openelm_mlx"]
    assert recorded["tokenizer"] == str(wanted)


def test_a_named_one_wins_over_the_folders_own(tmp_path: Path) -> None:
    named = write_folder(tmp_path / "named", tokenizer=byte_level_json())
    result, _ = converted(sources.hf(tmp_path / "hf"), tmp_path / "out", str(named))
    assert (result.folder / "tokenizer.json").read_text() == (named / "tokenizer.json").read_text()
    assert not (result.folder / "tokenizer.model").exists()


def test_none(tmp_path: Path) -> None:
    result, lines = converted(sources.hf(tmp_path / "hf"), tmp_path / "out", "none")
    assert lines == []
    assert [p.name for p in result.folder.glob("*token*")] == []
    assert load(result.folder)[1] is None
    recorded = json.loads((result.folder / "config.json").read_text())["openelm_mlx"]
    assert recorded["tokenizer"] is None


def test_a_folder_called_none_can_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "none", tokenizer=MODEL.read_bytes())
    result, _ = converted(sources.hf(tmp_path / "hf", tokenizer=False), tmp_path / "out", "./none")
    assert_ids_equal(result.folder)


def test_without_any_nothing_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_tokenizer", lambda report, objection: None)
    with pytest.raises(TokenizerError) as refusal:
        converted(sources.hf(tmp_path / "hf", tokenizer=False), tmp_path / "out")
    for way in ("--tokenizer (a tokenizer.model or tokenizer.json, a folder, or a Hub name)", "--tokenizer none"):
        assert way in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_the_first_of_the_hubs_that_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one that is, hub.find_tokenizer tells (it has tests of its own); here, that it is used and recorded."""
    there = write_folder(tmp_path / "there", tokenizer=MODEL.read_bytes())
    monkeypatch.setattr(hub, "find_tokenizer", lambda report, objection: (there, "org/tokens"))
    result, _ = converted(sources.hf(tmp_path / "hf", tokenizer=False), tmp_path / "out")
    assert_ids_equal(result.folder)
    recorded = json.loads((result.folder / "config.json").read_text())["openelm_mlx"]
    assert recorded["tokenizer"] == "org/tokens"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (b"hello", "SentencePiece"),
        (b"{}", "without a 'model'"),
        (b"version https://git-lfs", "Git LFS pointer"),
    ],
)
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        converted(sources.hf(tmp_path / "hf"), tmp_path / "out", str(tmp_path / "tokenizer.model"))
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "hf", tokenizer=False)
    with pytest.raises(TokenizerError, match=r"hf: has neither tokenizer.json nor tokenizer.model"):
        converted(source, tmp_path / "out", str(source))
    with pytest.raises(OpenELMError, match="No such file or folder"):
        converted(source, tmp_path / "out", str(tmp_path / "missing.model"))
    assert not (tmp_path / "out").exists()


# Chat templates: the model's own stays, a substitute's goes.


def template_of(folder: Path) -> str | None:
    tokenizer = load(folder)[1]
    assert tokenizer is not None
    return tokenizer.chat_template


def template_files(place: str, template: str) -> dict[str, object]:
    """For write_folder: the template as a file of its own, or in the configuration."""
    return {"chat_template": template} if place == "jinja" else {"tokenizer_config": {"chat_template": template}}


@pytest.mark.parametrize("place", ["jinja", "config"])
def test_the_models_own_template_stays(tmp_path: Path, place: str) -> None:
    source = sources.hf(tmp_path / "hf")
    own: dict[str, object] = (
        {"chat_template": ZEPHYR} if place == "jinja" else {"tokenizer_config": {"chat_template": ZEPHYR}}
    )
    write_folder(source, **own)
    substitute = write_folder(tmp_path / "other", tokenizer=MODEL.read_bytes(), chat_template=CHATML)
    for n, (wanted, expected) in enumerate(((None, 0), (str(MODEL), 0), (str(substitute), 1))):
        result, lines = converted(source, tmp_path / f"out{n}", wanted)
        assert template_of(result.folder) == ZEPHYR
        assert len([line for line in lines if "the chat template of" in line and "was dropped" in line]) == expected


@pytest.mark.parametrize("place", ["jinja", "config"])
def test_a_substitutes_template_is_dropped_and_that_is_said(tmp_path: Path, place: str) -> None:
    own: dict[str, object] = (
        {"chat_template": CHATML} if place == "jinja" else {"tokenizer_config": {"chat_template": CHATML}}
    )
    substitute = write_folder(tmp_path / "other", tokenizer=MODEL.read_bytes(), **own)
    result, lines = converted(sources.hf(tmp_path / "hf", tokenizer=False), tmp_path / "out", str(substitute))
    assert template_of(result.folder) is None
    assert not (result.folder / "chat_template.jinja").exists()
    assert lines == [
        f"tokenizer: the chat template of {substitute} was dropped: it was not made for this model",
    ]


def test_the_same_template_is_not_said_to_be_dropped(tmp_path: Path) -> None:
    source = write_folder(sources.hf(tmp_path / "hf", tokenizer=False), chat_template=ZEPHYR)
    substitute = write_folder(tmp_path / "other", tokenizer=MODEL.read_bytes(), chat_template=ZEPHYR)
    result, lines = converted(source, tmp_path / "out", str(substitute))
    assert template_of(result.folder) == ZEPHYR
    assert lines == []
