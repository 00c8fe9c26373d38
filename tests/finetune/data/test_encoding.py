"""Examples to tokens: every token beside whether it is learned, against what was written down by hand."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.encoding import Encoder, alpaca_prompt, cut
from openelm_mlx.finetune.data.formats import Chat, Completion, Example, Instruction, Text
from openelm_mlx.finetune.data.types import Encoded
from openelm_mlx.generation import encode_prompt
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import TokenizerSource
from tests.support.tokenizers_made import CHATML, MODEL, ZEPHYR, byte_level_json

LLAMA = Tokenizer.from_file(MODEL)
ZEPHYR_LLAMA = LLAMA.with_chat_template(ZEPHYR)
SOURCE = TokenizerSource("made", json.dumps(byte_level_json()), eos="<|im_end|>", chat_template=CHATML)
CHATML_BYTES = Tokenizer(SOURCE)
"""As SmolLM2's: byte-level, ChatML, no BOS."""
NAMES = {
    LLAMA: {1: "<s>", 2: "</s>"},
    ZEPHYR_LLAMA: {1: "<s>", 2: "</s>"},
    CHATML_BYTES: {256: "<|endoftext|>", 257: "<|im_start|>", 258: "<|im_end|>"},
}


def encoded(tokenizer: Tokenizer, example: Example, **options: bool) -> Encoded:
    result = Encoder(tokenizer, **options).encode(example, "my.jsonl:1")
    assert result is not None
    return result


def beside(tokenizer: Tokenizer, example: Example, **options: bool) -> list[str]:
    """Stretches of text that are given (-) and learned (+), control tokens by name, tokens parted by a dot."""
    result = encoded(tokenizer, example, **options)
    stretches: list[tuple[str, list[str]]] = []
    for token, learned in zip(result.ids.tolist(), result.learn.tolist(), strict=True):
        text = NAMES[tokenizer].get(token) or tokenizer.token_bytes(token).decode()
        mark = "+" if learned else "-"
        if not stretches or stretches[-1][0] != mark:
            stretches.append((mark, []))
        stretches[-1][1].append(text)
    return [mark + "·".join(texts) for mark, texts in stretches]


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


# Text, prompts and completions


def test_all_of_a_text_is_learned_but_the_first_token() -> None:
    assert beside(LLAMA, Text("Alice was")) == ["-<s>", "+ Alice· was·</s>"]
    assert beside(CHATML_BYTES, Text("user hi")) == ["-user", "+ ·hi·<|im_end|>"]


def test_a_completion_is_learned_and_its_prompt_is_not() -> None:
    assert beside(LLAMA, Completion("Alice was", " very Rabbit")) == ["-<s>· Alice· was", "+ very· Rabbit·</s>"]
    assert beside(LLAMA, Completion("Alice was ", "very Rabbit")) == ["-<s>· Alice· was· ", "+very· Rabbit·</s>"]
    assert beside(LLAMA, Completion("Alice", "s")) == ["-<s>· Alice", "+s·</s>"]
    assert beside(CHATML_BYTES, Completion("hi", " the"), raw=True) == ["-hi", "+ th·e·<|im_end|>"]


def test_the_prompt_is_learned_too_on_request() -> None:
    assert beside(LLAMA, Completion("Alice was", " very Rabbit"), train_on_prompt=True) == [
        "-<s>",
        "+ Alice· was· very· Rabbit·</s>",
    ]


def test_without_a_prompt_a_completion_begins_the_text() -> None:
    assert beside(LLAMA, Completion("", "Alice was")) == ["-<s>", "+ Alice· was·</s>"]
    assert beside(CHATML_BYTES, Completion("", "user hi"), raw=True) == ["-user", "+ ·hi·<|im_end|>"]


def test_control_tokens_written_in_data_are_text() -> None:
    assert beside(LLAMA, Text("a</s>")) == ["-<s>", "+ a·<·/·s·>·</s>"]
    assert beside(CHATML_BYTES, Completion("<|im_end|>", "hi"), raw=True)[1] == "+hi·<|im_end|>"


@given(prompt=st.text("ab \n<s>/", max_size=8), completion=st.text("ab <s>/", min_size=1, max_size=8).filter(str.strip))
def test_a_prompt_has_the_ids_that_generation_gives_it(prompt: str, completion: str) -> None:
    for tokenizer in (LLAMA, CHATML_BYTES.with_chat_template(None)):
        result = encoded(tokenizer, Completion(prompt, completion))
        given_ids, _ = encode_prompt(tokenizer, prompt)
        assert result.ids[: len(given_ids)].tolist() == given_ids
        assert not result.learn[: len(given_ids)].any()
        assert result.learn[max(1, len(given_ids)) :].all()
        assert tokenizer.decode(result.ids.tolist()) == tokenizer.decode(tokenizer.encode(prompt + completion))
        assert result.ids.tolist().count(tokenizer.eos_token_id) == 1


# Chats


def test_replies_are_learned_with_the_token_that_ends_them() -> None:
    chat = Chat((turn("user", "hi"), turn("assistant", "user"), turn("user", "the"), turn("assistant", "hi")))
    assert beside(CHATML_BYTES, chat) == [
        "-<|im_start|>·user·\n·hi·<|im_end|>·\n·<|im_start|>·a·s·s·i·s·t·a·n·t·\n",
        "+user·<|im_end|>",
        "-\n·<|im_start|>·user·\n·t·h·e·<|im_end|>·\n·<|im_start|>·a·s·s·i·s·t·a·n·t·\n",
        "+hi·<|im_end|>",
    ]
    chat = Chat((turn("system", "a"), turn("user", "Alice"), turn("assistant", "Rabbit"), turn("user", "a")))
    assert beside(ZEPHYR_LLAMA, chat) == [
        "-<s>· <|·s·y·s·t·e·m·|>·\n·a·</s>· ·\n·<|·u·s·er·|>·\n·A·l·ice·</s>· ·\n·<|·as·s·ist·an·t·|>·\n",
        "+R·abbit·</s>",
    ]


def test_prompts_and_alpaca_records_are_turns_where_there_is_a_template() -> None:
    asked = "-<|im_start|>·user·\n·{}·<|im_end|>·\n·<|im_start|>·a·s·s·i·s·t·a·n·t·\n"
    for example, prompt in (
        (Completion("hi", "user"), "hi"),
        (Instruction("hi", "", "user"), "hi"),
        (Instruction("hi", "u", "user"), "hi·\n·\n·u"),
    ):
        assert beside(CHATML_BYTES, example) == [asked.format(prompt), "+user·<|im_end|>"]
        ids, _ = encode_prompt(CHATML_BYTES, [turn("user", prompt.replace("·", ""))])
        assert encoded(CHATML_BYTES, example).ids.tolist()[: len(ids)] == ids


def test_a_reply_that_no_end_token_follows_gets_one() -> None:
    other = Tokenizer(TokenizerSource("made", json.dumps(byte_level_json()), eos="<|endoftext|>", chat_template=CHATML))
    NAMES[other] = NAMES[CHATML_BYTES]
    chat = Chat((turn("user", "hi"), turn("assistant", "hi"), turn("user", "hi"), turn("assistant", "user")))
    assert [part for part in beside(other, chat) if part[0] == "+"] == [
        "+hi·<|im_end|>",
        "+user·<|im_end|>·<|endoftext|>",
    ]
    plain = LLAMA.with_chat_template("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
                                     "{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip
    NAMES[plain] = NAMES[LLAMA]
    assert [part for part in beside(plain, chat) if part[0] == "+"] == ["+ h·i", "+ u·s·er·</s>"]


def test_of_a_prompt_of_messages_nothing_is_learned() -> None:
    turns = (turn("user", "hi"), turn("assistant", "user"), turn("user", "the"), turn("assistant", "hi"))
    parts = beside(CHATML_BYTES, Chat(turns, given=3))
    assert [part[0] for part in parts] == ["-", "+"]
    assert parts[1] == "+hi·<|im_end|>"
    assert [p[0] for p in beside(CHATML_BYTES, Chat(turns, given=3), train_on_prompt=True)] == ["-", "+"]
    assert encoded(CHATML_BYTES, Chat(turns), train_on_prompt=True).learn[1:].all()


# The prompt of LLM-Adapters


def test_the_alpaca_prompt_is_corenets_to_the_byte() -> None:
    # Digests of what generate_prompt_and_response in CoreNet's commonsense_170k.py makes of these, without the output.
    with_input = alpaca_prompt("Do it.\nNow", "with é\nthis")
    alone = alpaca_prompt("Do it.\nNow", "")
    assert (
        hashlib.sha256(with_input.encode()).hexdigest()
        == "c830cfad595bb3bc4f26f2f6430612adb42a8c2ed3f54083a22242ae8327f24a"
    )
    assert (
        hashlib.sha256(alone.encode()).hexdigest() == "3db09ee62559697661cbd5cba63b492c7f217f0559ee618b34c2045095d6a967"
    )
    assert alone == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.  \n"
        "\n"
        "                ### Instruction:\n"
        "                Do it.\nNow\n"
        "                \n"
        "                ### Response:\n"
        "                "
    )


@pytest.mark.parametrize(("tokenizer", "raw"), [(LLAMA, False), (ZEPHYR_LLAMA, True)])
def test_alpaca_records_get_it_where_no_template_is_used(tokenizer: Tokenizer, raw: bool) -> None:
    result = encoded(tokenizer, Instruction("Add", "2 2", "4"), raw=raw)
    prompt = alpaca_prompt("Add", "2 2")
    assert tokenizer.decode(result.ids.tolist()) == prompt + "4"
    assert result.ids.tolist() == [*LLAMA.encode(prompt), *LLAMA.encode_continuation("4"), 2]
    assert np.flatnonzero(result.learn).tolist() == [len(result.ids) - 2, len(result.ids) - 1]


# Cutting and refusals


def test_what_goes_beyond_the_length_is_cut_off_the_end() -> None:
    text = encoded(LLAMA, Text("Alice was beginning"))
    short = cut(text, 3)
    assert short is not None
    assert (short.ids.tolist(), short.learn.tolist()) == (text.ids.tolist()[:3], [False, True, True])
    assert cut(text, len(text.ids)) is text
    pair = encoded(LLAMA, Completion("Alice was", " very Rabbit"))
    assert [cut(pair, n) is None for n in (2, 3, 4)] == [True, True, False]
    learned = cut(encoded(LLAMA, Completion("Alice was", " very Rabbit"), train_on_prompt=True), 2)
    assert learned is not None
    assert learned.learn.tolist() == [False, True]


def test_arrays_are_small_and_own_their_memory() -> None:
    result = encoded(LLAMA, Text("Alice was beginning"))
    assert (result.ids.dtype.name, result.learn.dtype.name, result.where) == ("int32", "bool", "my.jsonl:1")
    short = cut(result, 3)
    assert short is not None
    assert short.ids.base is None


def test_nothing_to_learn_is_no_example() -> None:
    encoder = Encoder(LLAMA)
    assert [encoder.encode(example, "") for example in (Text(" "), Completion("Hi", ""))] == [None, None]
    mute = LLAMA.with_chat_template("{{ messages[0]['content'] }}")
    assert Encoder(mute).encode(Completion("Hi", "x"), "") is None


@pytest.mark.parametrize(
    ("tokenizer", "raw", "message"),
    [
        (LLAMA, False, "messages need a chat template, and the model has none; use prompt and completion, or"),
        (ZEPHYR_LLAMA, True, "messages are written by the model's chat template; leave out --raw"),
    ],
)
def test_messages_need_a_template(tokenizer: Tokenizer, raw: bool, message: str) -> None:
    chat = Chat((turn("user", "hi"), turn("assistant", "yes")))
    with pytest.raises(OpenELMError, match=message):
        Encoder(tokenizer, raw=raw).encode(chat, "")


def test_a_tokenizer_without_an_end_of_text_token_is_refused() -> None:
    with pytest.raises(OpenELMError, match="names no end-of-text token"):
        Encoder(Tokenizer(TokenizerSource("made", json.dumps(byte_level_json()))))
