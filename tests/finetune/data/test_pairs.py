"""Preferences from records to batches: the tokens of both responses, what is cut or left out, and what is refused."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.finetune.data.batches import Batches
from openelm_mlx.finetune.data.dataset import Data, open_data
from openelm_mlx.finetune.data.formats import BadRecord
from openelm_mlx.finetune.data.pairs import PairEncoder, preference_of
from openelm_mlx.finetune.data.preview import preview
from openelm_mlx.finetune.data.records import DataError
from openelm_mlx.finetune.data.types import Encoded, Item, Pair
from openelm_mlx.finetune.settings import Settings
from openelm_mlx.tokenizer import Tokenizer
from tests.finetune.data.test_encoding import CHATML_BYTES, LLAMA, NAMES, ZEPHYR_LLAMA, turn

NEEDED = "preferences need prompt, chosen and rejected (--objective dpo)"


def pair_of(tokenizer: Tokenizer, record: dict[str, Any], max_prompt: int = 512, *, raw: bool = False) -> Pair:
    encoder = PairEncoder(tokenizer, raw=raw, max_prompt=max_prompt)
    pair = encoder.encode(encoder.read(record), "my.jsonl:1")
    assert pair is not None
    return pair


def beside(tokenizer: Tokenizer, row: Encoded) -> tuple[str, str]:
    """What is given and what is learned, as text."""
    parts = ["", ""]
    for token, learned in zip(row.ids.tolist(), row.learn.tolist(), strict=True):
        parts[learned] += NAMES[tokenizer].get(token) or tokenizer.token_bytes(token).decode()
    return parts[0], parts[1]


def record(prompt: str = "Alice was", chosen: str = " very Rabbit", rejected: str = " a Rabbit") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def user(text: str) -> dict[str, Any]:
    return turn("user", text)


def assistant(text: str) -> dict[str, Any]:
    return turn("assistant", text)


def test_text_is_encoded_as_prompts_and_completions_are() -> None:
    pair = pair_of(LLAMA, record())
    assert beside(LLAMA, pair.chosen) == ("<s> Alice was", " very Rabbit</s>")
    assert beside(LLAMA, pair.rejected) == ("<s> Alice was", " a Rabbit</s>")
    assert (pair.where, pair.chosen.where, pair.rejected.where) == (
        "my.jsonl:1",
        "my.jsonl:1 (chosen)",
        "my.jsonl:1 (rejected)",
    )
    assert pair.prompt_lost == 0


CHATML = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "the<|im_end|>", "user<|im_end|>"

FORMS: dict[str, dict[str, Any]] = {
    "text with a template": record("hi", "the", "user"),
    "UltraFeedback": {
        "prompt": "hi",
        "chosen": [user("hi"), assistant("the")],
        "rejected": [user("hi"), assistant("user")],
    },
    "TRL, the prompt in both": {
        "chosen": [user("hi"), assistant("the")],
        "rejected": [user("hi"), assistant("user")],
    },
    "TRL, the prompt alone": {
        "prompt": [user("hi")],
        "chosen": [assistant("the")],
        "rejected": [assistant("user")],
    },
    "the prompt alone and in both": {
        "prompt": [user("hi")],
        "chosen": [user("hi"), assistant("the")],
        "rejected": [user("hi"), assistant("user")],
    },
    "a prompt of text, replies as messages": {
        "prompt": "hi",
        "chosen": [assistant("the")],
        "rejected": [assistant("user")],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_templates_tokens(form: str) -> None:
    pair = pair_of(CHATML_BYTES, FORMS[form])
    prompt, chosen, rejected = CHATML
    assert beside(CHATML_BYTES, pair.chosen) == (prompt, chosen)
    assert beside(CHATML_BYTES, pair.rejected) == (prompt, rejected)
    assert CHATML_BYTES.encode_chat([user("hi")]) == pair.chosen.ids[: int(pair.chosen.learn.argmax())].tolist()


def test_the_template_that_instruct_was_made_with() -> None:
    pair = pair_of(ZEPHYR_LLAMA, FORMS["UltraFeedback"])
    assert ZEPHYR_LLAMA.encode_chat([user("hi")]) == pair.chosen.ids[: int(pair.chosen.learn.argmax())].tolist()
    for row, text in zip(pair.rows, ("the", "user"), strict=True):
        assert ZEPHYR_LLAMA.decode(row.ids[row.learn].tolist()).strip() == text
        assert row.ids[-1] == 2
        assert row.ids[row.learn].tolist().count(2) == 1


def test_earlier_replies_belong_to_the_prompt() -> None:
    shared = [turn("system", "er"), user("hi"), assistant("hi"), user("th")]
    pair = pair_of(CHATML_BYTES, {"chosen": [*shared, assistant("the")], "rejected": [*shared, assistant("user")]})
    given, learned = beside(CHATML_BYTES, pair.chosen)
    assert learned == "the<|im_end|>"
    assert "assistant\nhi<|im_end|>" in given
    assert beside(CHATML_BYTES, pair.rejected) == (given, "user<|im_end|>")


def test_raw_leaves_the_template_aside() -> None:
    pair = pair_of(CHATML_BYTES, record("hi", " the", " user"), raw=True)
    assert beside(CHATML_BYTES, pair.chosen) == ("hi", " the<|im_end|>")


@pytest.mark.parametrize(
    ("max_prompt", "given"),
    [(8, "<s> Alice was very very Rabbit"), (6, "<s> Alice was very very Rabbit"), (3, "<s> very Rabbit"), (1, "<s>")],
)
def test_a_long_prompt_loses_its_beginning_but_for_bos(max_prompt: int, given: str) -> None:
    pair = pair_of(LLAMA, record("Alice was very very Rabbit"), max_prompt)
    assert beside(LLAMA, pair.chosen) == (given, " very Rabbit</s>")
    assert beside(LLAMA, pair.rejected) == (given, " a Rabbit</s>")
    assert pair.prompt_lost == max(0, 6 - max_prompt)


def test_without_bos_it_loses_all_of_it() -> None:
    pair = pair_of(CHATML_BYTES, record("abcd", " the", " user"), 2, raw=True)
    assert beside(CHATML_BYTES, pair.chosen) == ("cd", " the<|im_end|>")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, f"has no 'chosen'; {NEEDED}"),
    ({"text": "a"}, f"has no 'chosen'; {NEEDED}"),
    ({"prompt": "a", "chosen": "b"}, f"has no 'rejected'; {NEEDED}"),
    ({"chosen": "a", "rejected": "b"}, f"has no 'prompt'; {NEEDED}"),
    (record(prompt=None), "'prompt' must be text, not null"),  # type: ignore[arg-type]
    (record(prompt=[user("hi")]), "'prompt' must be text, not an array"),  # type: ignore[arg-type]
    (
        {"prompt": "a", "chosen": "b", "rejected": [assistant("c")]},
        "'chosen' and 'rejected' must be both text or both lists of messages, not a string and an array",
    ),
    ({"prompt": "a", "chosen": None, "rejected": None}, "'chosen' must be a list of messages, not null"),
    ({"chosen": [], "rejected": [assistant("c")]}, "'chosen': there are no messages: a chat needs at least one"),
    (
        {"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]},
        "'chosen' and 'rejected' do not begin with the same turns, and there is no 'prompt'",
    ),
    (
        {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]},
        "'chosen': a turn of the assistant must follow the prompt, or the turns that both share",
    ),
    (
        {"chosen": [user("a"), user("b")], "rejected": [user("a"), assistant("d")]},
        "'chosen': a turn of the assistant must follow the prompt, or the turns that both share",
    ),
    (
        {"prompt": 3, "chosen": [assistant("b")], "rejected": [assistant("d")]},
        "'prompt' must be a list of messages, not a number",
    ),
    (
        {"prompt": "a", "chosen": [turn("bot", "b")], "rejected": [assistant("d")]},
        "'chosen': message 0 has the role 'bot'; there are system, user, assistant, tool",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_what_is_no_preference_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRecord) as caught:
        preference_of(values)
    assert str(caught.value) == message


def opened(
    folder: Path, records: list[dict[str, Any]], max_length: int = 64, **settings: Any
) -> tuple[Data, list[str]]:
    path = folder / "my.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    lines: list[str] = []
    chosen = Settings(**{"data": str(path), "objective": "dpo", "valid_fraction": 0, **settings})
    return open_data(chosen, LLAMA, max_length, lines.append), lines


def test_what_is_left_out_or_cut_is_counted(tmp_path: Path) -> None:
    long = " very" * 20
    records = [
        record(),
        record(),  # the same once more
        record(chosen=" a Rabbit"),  # nothing to tell apart
        record(chosen=long + " a", rejected=long + " Rabbit"),  # nor here, once both are cut
        record(rejected=" "),
        record(chosen=long),
        record("Alice" + long, " was", " a"),
        {"prompt": "a", "chosen": "b"},
    ]
    data, lines = opened(tmp_path, records, 12, max_prompt=9, skip_bad_lines=True)
    path = tmp_path / "my.jsonl"
    assert lines == [
        f"train: 4 pairs, {sum(len(p.ids) for p in data.train.examples)} tokens, "
        f"{sum(int(p.learn.sum()) for p in data.train.examples)} of them learned ({path})",
        "train: 1 record left out, with no text to learn",
        "train: 2 pairs left out, whose responses nothing tells apart",
        f"train: 1 bad line left out, the first: {path}:8: has no 'rejected'; {NEEDED}",
        "train: 1 prompt without their beginning, too long for --max-prompt",
        f"train: 1 pair cut to 12 tokens (--max-length), {len(LLAMA.encode('Alice was' + long)) + 1 - 12} tokens lost",
        "train: 1 pair the same as an earlier one",
    ]
    with pytest.raises(DataError, match="no pair is left for train: 1 pair left out, as the prompt alone fills 4"):
        opened(tmp_path, [record("Alice was very")], 4)


def test_pairs_kept_for_validation_are_kept_whole(tmp_path: Path) -> None:
    records = [record(f"Alice {n % 30}", f" was {n}", f" very {n}") for n in range(40)] + [record("Alice 3")] * 2
    data, lines = opened(tmp_path, records, valid_fraction=0.2)
    assert data.valid is not None
    assert len(data.valid.examples) == 8
    assert all(isinstance(p, Pair) for p in (*data.train.examples, *data.valid.examples))
    kept = {p.where for p in data.valid.examples}
    assert not kept & {p.where for p in data.train.examples}
    assert lines[-1].startswith("valid: 8 pairs, ")
    everything, _ = opened(tmp_path, records, valid=str(tmp_path / "my.jsonl"))
    assert everything.valid is not None
    assert len(everything.valid.examples) == 42


def pairs(tmp_path: Path, count: int = 10) -> list[Item]:
    made = [
        record(f"Alice was {'very ' * (n % 4)}{n}:", f" a{' Rabbit' * (n % 3)}", f" very {n}") for n in range(count)
    ]
    return opened(tmp_path, made)[0].train.examples


def batches(examples: list[Item], seed: int = 3) -> Batches:
    return Batches(examples, batch_size=3, pack=False, row_length=64, shuffle_window=6, seed=seed)


def test_a_batch_has_both_rows_of_its_pairs_side_by_side(tmp_path: Path) -> None:
    examples = pairs(tmp_path)
    stream = batches(examples)
    assert (stream.batches_of(0), stream.most_rows) == (4, 6)
    seen = []
    for batch in stream.epoch(0):
        names = [where.removesuffix(")").rsplit(" (", 1) for where in batch.where]
        assert [kind for _, kind in names] == ["chosen", "rejected"] * (len(names) // 2)
        assert [place for place, _ in names[::2]] == [place for place, _ in names[1::2]]
        assert not batch.packed
        assert batch.ids.shape[1] <= stream.longest_row
        seen += [place for place, _ in names[::2]]
        rows = [row for place, _ in names[::2] for e in examples if e.where == place for row in e.rows]
        for number, row in enumerate(rows):
            size = len(row.ids) - 1
            assert batch.documents[number] == (size,)
            assert batch.ids[number, :size].tolist() == row.ids[:-1].tolist()
            mine = batch.places // batch.ids.shape[1] == number
            assert batch.targets[mine].tolist() == row.ids[row.learn].tolist()
    assert sorted(seen) == sorted(e.where for e in examples)


def test_their_order_is_of_seed_and_epoch_and_a_position_brings_it_back(tmp_path: Path) -> None:
    examples = pairs(tmp_path)
    first, other = batches(examples), batches(examples, seed=4)
    told = [batch.where for batch in islice(first, 9)]
    assert told != [batch.where for batch in islice(other, 9)]
    resumed = batches(examples)
    for _ in range(6):
        next(resumed)
    again = batches(examples)
    again.seek(resumed.position)
    assert [batch.where for batch in islice(again, 3)] == told[6:]


def test_the_preview_shows_both_rows(tmp_path: Path) -> None:
    lines = preview(next(batches(pairs(tmp_path, 3))), LLAMA, pairs=True)
    assert lines[1] == "pairs     3, a row for each response: one chosen, one rejected"
    shown = [line.split(": ")[0].rsplit("/", 1)[1] for line in lines if line.startswith("row ")]
    assert [name.rsplit(" ", 1)[1] for name in shown] == ["(chosen)", "(rejected)"] * 3
