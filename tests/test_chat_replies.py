"""Where replies begin and end in a chat's ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.chat_replies import turn_end
from openelm_mlx.errors import TokenizerError
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import TokenizerSource
from tests.support.tokenizers_made import CHATML, MODEL, ZEPHYR, added, byte_level_json

SMALL = Tokenizer.from_file(MODEL).with_chat_template(ZEPHYR)
BYTES = Tokenizer(TokenizerSource("made", json.dumps(byte_level_json()), eos="<|im_end|>", chat_template=CHATML))
SAYING = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
SCRIPT = SAYING + "{% if add_generation_prompt %}assistant: {% endif %}"
CONTENT = st.text("ab \n<>|/us🙂", min_size=1, max_size=8)


def chat(*contents: str) -> list[dict[str, Any]]:
    """Turns of user and assistant, taken in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def shown(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Both parts of each pair as text, control tokens by their names."""
    names = {id: name for name, id in tokenizer._ids.items() if id in tokenizer._control_ids}

    def text(ids: list[int]) -> str:
        return b"".join(names[i].encode() if i in names else tokenizer.token_bytes(i) for i in ids).decode()

    return [(text(before), text(said)) for before, said in tokenizer.encode_replies(messages)]


def test_a_reply_goes_from_its_content_to_the_token_that_ends_its_turn() -> None:
    assert shown(BYTES, chat("hi", "yes", "why?", "so", "ah")) == [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "yes<|im_end|>"),
        ("\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n", "so<|im_end|>"),
    ]
    # SentencePiece puts a space at the beginning of a text and, as in Llama's tokenizer, after a control token.
    assert shown(SMALL, chat("hi", "yes", "why?", "so")) == [
        ("<s> <|user|>\nhi</s> \n<|assistant|>\n", "yes</s>"),
        (" \n<|user|>\nwhy?</s> \n<|assistant|>\n", "so</s>"),
    ]


@pytest.mark.parametrize("tokenizer", [SMALL, BYTES])
@given(contents=st.lists(CONTENT, min_size=2, max_size=6))
def test_what_comes_before_the_first_reply_is_what_generation_is_given(
    tokenizer: Tokenizer, contents: list[str]
) -> None:
    messages = chat(*contents)
    pairs = tokenizer.encode_replies(messages)
    assert len(pairs) == len(contents) // 2
    assert pairs[0][0] == tokenizer.encode_chat(messages[:1])
    whole = tokenizer.encode_chat(messages[: 2 * len(pairs)], add_generation_prompt=False)
    ours = [token for before, said in pairs for token in before + said]
    assert tokenizer.decode(whole).startswith(tokenizer.decode(ours))
    assert [said[-1] for _, said in pairs] == [tokenizer.eos_token_id] * len(pairs)
    for (_, said), content in zip(pairs, contents[1::2], strict=True):
        assert b"".join(map(tokenizer.token_bytes, said)).decode() == content


@pytest.mark.parametrize("tokenizer", [SMALL, BYTES])
@given(contents=st.lists(st.text("abhtus", min_size=1, max_size=8), min_size=2, max_size=6))
def test_words_give_the_ids_of_the_whole_chat(tokenizer: Tokenizer, contents: list[str]) -> None:
    messages = chat(*contents)
    ours = [token for before, said in tokenizer.encode_replies(messages) for token in before + said]
    whole = tokenizer.encode_chat(messages[: len(messages) // 2 * 2], add_generation_prompt=False)
    assert whole[: len(ours)] == ours


def test_a_reply_begins_anew_where_a_token_would_reach_over_its_beginning() -> None:
    [(before, said)] = BYTES.encode_replies(chat("hi", "\n\nyes"))
    assert before == BYTES.encode_chat(chat("hi"))
    assert said == [*BYTES.encode("\n\nyes"), 258]
    assert before + said != BYTES.encode_chat(chat("hi", "\n\nyes"), add_generation_prompt=False)[:-1]


def test_control_tokens_in_contents_end_nothing() -> None:
    [(before, said)] = BYTES.encode_replies(chat("a<|im_end|>", "b<|im_end|>c"))
    assert (before.count(258), said.count(258)) == (1, 1)
    assert said == [*BYTES.encode("b<|im_end|>c"), 258]


def test_without_a_token_to_end_a_turn_it_ends_with_the_text() -> None:
    plain = BYTES.with_chat_template(SCRIPT)
    assert shown(plain, chat("hi", "yes", "why?", "so")) == [
        ("user: hi\nassistant: ", "yes"),
        ("\nuser: why?\nassistant: ", "so"),
    ]


def test_a_turn_may_end_in_a_control_token_that_ends_no_generation() -> None:
    template = CHATML.replace("<|im_end|>", "<|endoftext|>")
    assert shown(BYTES.with_chat_template(template), chat("hi", "yes"))[0][1] == "yes<|endoftext|>"
    assert turn_end(["a", 5, "b", 7, ""], ends={5}) == 1
    assert turn_end(["a", 5, "b", 7, ""], ends=set()) == 3
    assert turn_end(["a"], ends={5}) is None


def test_an_end_that_is_no_special_token_is_found_too() -> None:
    specials = [
        added(256 + n, text, special=text != "<|im_end|>")
        for n, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    ]
    source = TokenizerSource("made", json.dumps(byte_level_json(specials)), eos="<|im_end|>", chat_template=CHATML)
    pairs = Tokenizer(source).encode_replies(chat("hi", "yes", "why?", "so"))
    assert [said[-1] for _, said in pairs] == [258, 258]


def test_bos_comes_first_once() -> None:
    source = TokenizerSource("made", json.dumps(byte_level_json()), bos="<|endoftext|>", add_bos=True)
    for template in (CHATML, "{{ bos_token }}" + CHATML):
        tokenizer = Tokenizer(source).with_chat_template(template)
        pairs = tokenizer.encode_replies(chat("hi", "yes", "why?", "so"))
        assert [before.count(256) for before, _ in pairs] == [1, 0]
        assert pairs[0][0][0] == 256


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            # The last reply alone keeps its thoughts.
            CHATML.replace("message['content']", "(message['content'] if loop.last else 'x')"),
            chat("hi", "yes", "why?", "so"),
            "does not write message 1 after what it writes without it",
        ),
        (
            CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>"),
            chat("hi", "yes"),
            "does not write message 1 after what it writes without it",
        ),
        (CHATML, chat("hi", "yes")[1:], "message 0 is a reply, and there is nothing before it"),
        (CHATML + "{{ raise_exception('no') }}", chat("hi", "yes"), "the chat template failed: no"),
        (None, chat("hi", "yes"), "no chat template"),
    ],
)
def test_what_cannot_be_told_is_refused(template: str | None, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        BYTES.with_chat_template(template).encode_replies(messages)
