"""The preview of a batch, against what it should say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from openelm_mlx.finetune.data.preview import preview
from openelm_mlx.finetune.data.types import Batch
from openelm_mlx.tokenizer import Tokenizer
from tests.support.tokenizers_made import DATA, byte_level_json

END, START, STOP = 256, 257, 258  # <|endoftext|>, <|im_start|>, <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_json()))
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    made = Tokenizer.from_folder(folder)
    assert made is not None
    return made


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_bos=False)


def batch(rows: list[list[int]], documents: tuple[tuple[int, ...], ...], learned: dict[int, int]) -> Batch:
    count = sum(map(len, documents))
    return Batch(
        ids=np.array(rows, np.int32),
        documents=documents,
        places=np.array(list(learned), np.int32),
        targets=np.array(list(learned.values()), np.int32),
        where=tuple(f"my.jsonl:{n + 1}" for n in range(count)),
    )


def test_token_by_token(tokenizer: Tokenizer) -> None:
    a, b, hi, newline = (ids(tokenizer, text)[0] for text in ("a", "b", "hi", "\n"))
    first = [END, a, newline, hi]  # learns: hi, <|im_end|>
    second = [END, START, b]  # learns: b
    made = batch([first + second + [0], [END, a] + [0] * 6], ((4, 3), (2,)), {2: hi, 3: STOP, 5: b, 9: hi})
    assert preview(made, tokenizer) == [
        "rows      2 of 8 tokens, filled with 2 to 7",
        "examples  3, packed: none sees another in its row",
        "inputs    9, and 7 of padding (43.8% of the batch)",
        "learned   4 tokens (44.4% of the inputs have one to learn after them)",
        "",
        "row 1, my.jsonl:1: 4 inputs, 2 tokens learned",
        "  position       id  token  learns to predict",
        "         0      256  <BOS>",
        f"         1  {a:7}  'a'",
        f"         2  {newline:7}  '\\n'   'hi' ({hi})",
        f"         3  {hi:7}  'hi'   <EOS> (258)",
        "",
        "row 1, my.jsonl:2: 3 inputs, 1 tokens learned",
        "  position       id  token      learns to predict",
        "         0      256  <BOS>",
        f"         1      257  <control>  'b' ({b})",
        f"         2  {b:7}  'b'",
        "  padding: 1, not learned and seen by nothing",
        "",
        "row 2, my.jsonl:3: 2 inputs, 1 tokens learned",
        "  position       id  token  learns to predict",
        "         0      256  <BOS>",
        f"         1  {a:7}  'a'    'hi' ({hi})",
        "  padding: 6, not learned and seen by nothing",
    ]


def test_a_batch_that_is_full_and_not_packed(tokenizer: Tokenizer) -> None:
    a = ids(tokenizer, "a")[0]
    lines = preview(batch([[a, a], [a, a]], ((2,), (2,)), {0: a, 3: a}), tokenizer)
    assert lines[:3] == [
        "rows      2 of 2 tokens, filled with 2",
        "examples  2",
        "inputs    4, and 0 of padding (0.0% of the batch)",
    ]
    assert not any("padding:" in line for line in lines)


def test_parts_of_characters_and_control_characters_are_escaped(tokenizer: Tokenizer) -> None:
    row = ids(tokenizer, "é\x1b\u2028")
    text = "\n".join(preview(batch([row], ((len(row),),), {0: row[1]}), tokenizer))
    assert f"b'\\xc3'  b'\\xa9' ({row[1]})" in text
    assert "'\\x1b'" in text
    assert text.replace("\n", "").isprintable()


def test_a_space_that_belongs_to_a_token_is_seen() -> None:
    made = Tokenizer.from_file(DATA / "tokenizer.model")
    row = made.encode("the model")
    lines = preview(batch([row], ((len(row),),), {}), made)
    assert [line.split(maxsplit=2)[2] for line in lines[7:]] == ["<BOS>", "' the'", "' model'"]
