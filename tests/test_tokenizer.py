"""Tokenizers from every kind of file: ids, BOS and EOS, decoding, saving; and the real one behind a network mark."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import sentencepiece  # type: ignore[import-untyped,unused-ignore]
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.errors import ConfigError, TokenizerError
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import TokenizerSource
from tests.support.tokenizers_made import CHATML, DATA, MODEL, ZEPHYR, added, byte_level_json, write_folder

SENTENCEPIECE = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))
SMALL = Tokenizer.from_file(MODEL)
BYTES = Tokenizer(TokenizerSource("made", json.dumps(byte_level_json())))


def loaded(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


# Ids


@given(st.text())
def test_ids_are_sentencepieces_with_bos_once(text: str) -> None:
    assert SMALL.encode(text, add_bos=False) == SENTENCEPIECE.encode(text)
    assert SMALL.encode(text) == [1, *SENTENCEPIECE.encode(text)]


@given(st.lists(st.sampled_from(["<s>", "</s>", "<unk>", "a", " ", "<|im_end|>", "<|endoftext|>", "\n"]), max_size=8))
def test_special_tokens_in_text_are_text(parts: list[str]) -> None:
    text = "".join(parts)
    assert {0, 1, 2}.isdisjoint(SMALL.encode(text, add_bos=False))
    assert {256, 257, 258}.isdisjoint(BYTES.encode(text))
    assert BYTES.decode(BYTES.encode(text)) == text


def test_added_tokens_that_are_not_special_are_vocabulary() -> None:
    specials = [added(256, "<|end|>"), added(257, "<think>", special=False), added(258, "éé", special=False)]
    tokenizer = Tokenizer(TokenizerSource("made", json.dumps(byte_level_json(specials))))
    ids = tokenizer.encode("a<think>éé<|end|>")
    assert ids[1:3] == [257, 258]
    assert tokenizer.decode([*ids, 256]) == "a<think>éé<|end|>"
    assert tokenizer.token_bytes(258) == "éé".encode()
    assert tokenizer.token_bytes(256) == b""


def test_a_vocabulary_that_reaches_a_control_token_by_text_is_taken_in_halves() -> None:
    parsed = byte_level_json()
    parsed["model"] |= {"ignore_merges": True}
    parsed["pre_tokenizer"] |= {"use_regex": False}
    tokenizer = Tokenizer(TokenizerSource("made", json.dumps(parsed)))
    assert 258 not in tokenizer.encode("<|im_end|>")
    assert tokenizer.decode(tokenizer.encode("<|im_end|>")) == "<|im_end|>"


def test_truncation_in_the_file_is_not_obeyed() -> None:
    assert len(BYTES.encode("123456789")) == 9


def test_half_surrogates_are_replaced() -> None:
    assert SMALL.encode("a\ud83d") == SMALL.encode("a\ufffd")
    assert SMALL.encode("\ud83d\ude42") == SMALL.encode("🙂")


# Text


@given(st.text())
def test_decoding_equals_both_libraries(text: str) -> None:
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == SENTENCEPIECE.decode(ids) == SMALL._encoder.decode(ids, skip_special_tokens=True)
    assert SMALL.decode(ids) == text.replace("▁", " ")
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == BYTES._encoder.decode(ids, skip_special_tokens=True) == text


@given(st.lists(st.integers(-2, 502), max_size=20), st.lists(st.integers(-2, 502), max_size=20))
def test_streaming_any_ids_equals_decoding_them(prompt: list[int], ids: list[int]) -> None:
    prompt = [*prompt, *SMALL.encode("e.", add_bos=False)]  # a prompt of complete characters
    stream = SMALL.stream(prompt)
    text = "".join(map(stream.add, ids)) + stream.finish()
    assert SMALL.decode(prompt) + text == SMALL.decode(prompt + ids)


def test_leading_space_of_generated_text() -> None:
    ids = SENTENCEPIECE.encode("Alice was")
    assert [SMALL.stream(prompt).add(ids[0]) for prompt in ([], [1], [1, ids[0]])] == ["Alice", "Alice", " Alice"]
    assert SMALL.stream([1, ids[0]], strip_leading_space=True).add(ids[0]) == "Alice"


def test_the_unknown_token_is_visible_and_control_tokens_are_not() -> None:
    assert SMALL.decode([1, 0, 2, 0]) == "<unk><unk>"
    assert SMALL.decode([10**6, -1]) == ""


# BOS and EOS


def test_bos_and_eos_of_a_sentencepiece_model() -> None:
    assert (SMALL.bos_token_id, SMALL.eos_token_id, SMALL.eos_token_ids) == (1, 2, frozenset({2}))
    assert (SMALL.vocab_size, SMALL.adds_bos, SMALL.chat_template) == (500, True, None)


def test_a_lone_json_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "renamed.model"
    path.write_text("\n " + SMALL._source.json_text, encoding="utf-8")
    tokenizer = Tokenizer.from_file(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.adds_bos) == (1, frozenset({2}), True)
    path.write_text(json.dumps(byte_level_json()), encoding="utf-8")
    tokenizer = Tokenizer.from_file(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.adds_bos) == (None, None, False)
    with pytest.raises(TokenizerError, match="no BOS token"):
        tokenizer.encode("x", add_bos=True)


def test_configuration_in_all_its_shapes(tmp_path: Path) -> None:
    parsed = byte_level_json()
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "add_bos_token": None}
    folder = write_folder(tmp_path, tokenizer=parsed, tokenizer_config=config)
    tokenizer = loaded(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.adds_bos) == (257, frozenset({258}), False)
    write_folder(tmp_path, tokenizer_config=config | {"add_bos_token": True}, config={"eos_token_id": 7})
    write_folder(tmp_path, generation_config={"eos_token_id": [8, 9]})
    tokenizer = loaded(folder)
    assert tokenizer.encode("") == [257]
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.eos_token_ids == {258, 7, 8, 9}
    write_folder(
        tmp_path, tokenizer_config={"bos_token": None}, special_tokens_map={"eos_token": {"content": "<|im_end|>"}}
    )
    assert (loaded(folder).bos_token_id, loaded(folder).eos_token_id) == (None, 258)


def test_a_configuration_silent_about_bos_leaves_what_the_tokenizer_says(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tokenizer=MODEL.read_bytes(), tokenizer_config={"model_max_length": 9})
    assert (loaded(folder).bos_token_id, loaded(folder).eos_token_id) == (1, 2)
    write_folder(folder, tokenizer_config={"bos_token": None})
    assert (loaded(folder).bos_token_id, loaded(folder).encode("")) == (None, [])


def test_the_post_processor_decides_about_bos_when_the_configuration_is_silent(tmp_path: Path) -> None:
    parsed = json.loads(SMALL._source.json_text)
    folder = write_folder(tmp_path, tokenizer=parsed, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    assert loaded(folder).adds_bos
    write_folder(folder, tokenizer=parsed | {"post_processor": None})
    assert not loaded(folder).adds_bos


def test_tokenizer_json_is_preferred_to_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", tokenizer=MODEL.read_bytes(), tokenizer_config={"eos_token": "<unk>"})
    assert loaded(folder).encode("Alice") == SMALL.encode("Alice")
    assert (loaded(folder).bos_token_id, loaded(folder).eos_token_id) == (1, 0)
    write_folder(folder, tokenizer=byte_level_json())
    assert loaded(folder).vocab_size == BYTES.vocab_size


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(write_folder(tmp_path, config={"eos_token_id": 2})) is None


def test_chat_template_of_the_folder(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from the list"}]
    folder = write_folder(tmp_path, tokenizer=byte_level_json(), tokenizer_config={"chat_template": named})
    assert loaded(folder).chat_template == "from the list"
    write_folder(folder, tokenizer_config={"chat_template": "from the configuration"})
    assert loaded(folder).chat_template == "from the configuration"
    write_folder(folder, chat_template=CHATML)
    assert loaded(folder).chat_template == CHATML


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html>", "a web page"),
        (b'{"model":', "not readable as JSON"),
        (b'{"a": 1}', "without a 'model'"),
        (b'{"model": {"type": "strange"}}', "the tokenizers library cannot read it"),
        (b"\x80\x02}q\x00", r"found data beginning with b'\\x80"),
        (MODEL.read_bytes()[:999], "expected a SentencePiece model"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(TokenizerError, match=named) as caught:
        Tokenizer.from_file(path)
    assert str(path) in str(caught.value)


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.from_file(tmp_path / "absent")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*decoder WordPiece"):
        loaded(
            write_folder(
                tmp_path,
                tokenizer=byte_level_json() | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            )
        )
    write_folder(tmp_path, tokenizer=byte_level_json(), config={"eos_token_id": "2"})
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id"):
        loaded(tmp_path)
    write_folder(tmp_path, tokenizer_config=[])
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: a JSON object is needed, not a list"):
        loaded(tmp_path)


# Saving


def test_saving_and_reading_again_changes_nothing(tmp_path: Path) -> None:
    named = SMALL.with_chat_template(ZEPHYR)
    named.save(tmp_path / "a")
    again = loaded(tmp_path / "a")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "a" / "tokenizer.model").read_bytes() == MODEL.read_bytes()
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": ZEPHYR,
    }
    assert again.encode("Alice </s>") == SMALL.encode("Alice </s>")
    assert again.chat_template == ZEPHYR
    again.with_chat_template(None).save(tmp_path / "b")
    assert loaded(tmp_path / "b").chat_template is None


def test_the_template_stays_where_it_was_and_other_keys_are_kept(tmp_path: Path) -> None:
    config = {"bos_token": "<|im_start|>", "model_max_length": 2048, "auto_map": {"x": "y"}, "add_eos_token": True}
    folder = write_folder(tmp_path / "a", tokenizer=byte_level_json(), tokenizer_config=config, chat_template=CHATML)
    loaded(folder).save(tmp_path / "b")
    assert (tmp_path / "b" / "chat_template.jinja").read_text(encoding="utf-8") == CHATML
    written = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["model_max_length"] == 2048
    assert not {"auto_map", "chat_template"} & set(written)
    assert written["add_eos_token"] is False
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "x"}]
    write_folder(tmp_path / "c", tokenizer=byte_level_json(), tokenizer_config={"chat_template": named})
    loaded(tmp_path / "c").save(tmp_path / "b")
    assert not (tmp_path / "b" / "chat_template.jinja").exists()
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"] == named


def test_transformers_reads_the_same_ids_from_what_is_saved(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, at import
        transformers = importlib.import_module("transformers")
    text = " Alice  was reading.\nhello é🙂 "
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " hi\n\n<b>user</b> é🙂 "}]
    SMALL.with_chat_template(ZEPHYR).save(tmp_path / "small")
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    made = write_folder(tmp_path / "made", tokenizer=byte_level_json() | {"truncation": None}, tokenizer_config=config)
    loaded(made).save(tmp_path / "bytes")
    loaded(made).with_chat_template(None).save(tmp_path / "bos")
    for name in ("small", "bytes", "bos"):
        ours, theirs = loaded(tmp_path / name), transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert theirs.encode(text) == ours.encode(text)
        assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)
        if ours.chat_template:
            rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert rendered == ours.render_chat(messages)
            expected = theirs.encode(rendered, add_special_tokens=False)
            assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == expected
            assert ours.encode_chat(messages) == [*([1] if name == "small" else []), *expected]


# The real tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Llama 2's tokenizer.json and tokenizer.model, built from an npm package."""
    script, npm = DATA / "make_llama_tokenizer.py", shutil.which("npm")
    if npm is None:
        pytest.skip("npm is missing; it fetches the vocabulary")
    pytest.importorskip("google.protobuf", reason="the script needs protobuf")
    work = tmp_path_factory.mktemp("llama")
    subprocess.run([npm, "pack", "llama-tokenizer-js@1.2.2", "--pack-destination", str(work)], check=True, cwd=work)
    package = work / "llama-tokenizer-js-1.2.2.tgz"
    subprocess.run([sys.executable, str(script), "--npm", str(package), "--out", str(work / "out")], check=True)
    return work / "out"


@pytest.mark.network
@pytest.mark.parametrize("name", ["", "tokenizer.json", "tokenizer.model"])
def test_the_real_tokenizer(llama: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(llama / name) if name else loaded(llama)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (32000, 1, frozenset({2}))
    for case in json.loads((DATA / "llama2_tokenizer.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(case["text"], add_bos=False) == case["ids"]
        assert tokenizer.encode(case["text"]) == [1, *case["ids"]]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    chat = tokenizer.with_chat_template(ZEPHYR)
    for case in json.loads((DATA / "zephyr_chat.json").read_text(encoding="utf-8")):
        assert chat.render_chat(case["messages"], add_generation_prompt=case["add_generation_prompt"]) == case["text"]
        assert chat.encode_chat(case["messages"]) == case["ids_with_bos"]


@pytest.mark.network
def test_the_real_model_file_converts_to_the_ids_of_sentencepiece(llama: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(llama / "tokenizer.model"))
    tokenizer = Tokenizer.from_file(llama / "tokenizer.model")

    @given(st.one_of(st.text(), st.lists(st.integers(259, 31999).map(processor.id_to_piece), max_size=30).map("".join)))
    def check(text: str) -> None:
        assert tokenizer.encode(text, add_bos=False) == processor.encode(text)

    check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens": [1, 2]}, "must be a list of objects"),
        ({"added_tokens": 5}, "must be a list of objects"),
        ({"added_tokens": [{"id": 0, "content": "", "special": True}]}, "has no text"),
    ],
)
def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    Tokenizer.from_file(MODEL).save(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text()) | change
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_an_id_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    Tokenizer.from_file(MODEL).save(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["model"]["vocab"]["zzz"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(TokenizerError, match="which no vocabulary reaches"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_json_nested_without_end_is_refused(tmp_path: Path, name: str) -> None:
    Tokenizer.from_file(MODEL).save(tmp_path)
    (tmp_path / name).write_text('{"a":' * 100_000)
    with pytest.raises(TokenizerError, match="not readable as JSON"):
        Tokenizer.from_folder(tmp_path)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    Tokenizer.from_file(MODEL).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="cannot be read as text"):
        Tokenizer.from_folder(tmp_path)


def test_a_pipe_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.model")
    with pytest.raises(TokenizerError, match="no regular file"):
        Tokenizer.from_file(tmp_path / "tokenizer.model")
