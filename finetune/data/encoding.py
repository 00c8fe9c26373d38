"""Examples to tokens, and which of them are learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from openelm_mlx.errors import OpenELMError
from openelm_mlx.finetune.data.formats import Chat, Completion, Example, Instruction, Text, example_of
from openelm_mlx.finetune.data.types import Encoded
from openelm_mlx.tokenizer import Tokenizer

_INDENT = " " * 16
_INTRODUCTION = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context. Write a response that appropriately completes the"
_ALONE = ". Write a response that appropriately completes the"

Part = tuple[list[int], bool]
"""Ids, and whether they are what the model should say."""


def alpaca_prompt(instruction: str, input: str) -> str:
    """The prompt of LLM-Adapters as CoreNet makes it, with its indentation: what comes before a record's output.

    Source: CoreNet's corenet/data/datasets/language_modeling/commonsense_170k.py.
    """
    blank = f"\n{_INDENT}\n"
    task = f"{_INDENT}### Instruction:\n{_INDENT}{instruction}{blank}"
    answer = f"{_INDENT}### Response:\n{_INDENT}"
    if input:
        return f"{_INTRODUCTION}{_WITH_INPUT} request. \n\n{task}{_INDENT}### Input:\n{_INDENT}{input}{blank}{answer}"
    return f"{_INTRODUCTION}{_ALONE} request.  \n\n{task}{answer}"


class Form(Protocol):
    """What is read and encoded as examples: texts that are learned, or preferences."""

    unit: str
    """What an example is called."""
    eos: str
    """How the token that ends examples is written."""

    def read(self, values: Mapping[str, Any]) -> Any:
        """The example of a record, which has `texts`.

        Raises:
            BadRecord: the record is none.
        """

    def encode(self, example: Any, where: str) -> Any:
        """Its tokens, at whatever length; None when there is nothing to learn.

        Raises:
            OpenELMError: it cannot be encoded.
        """

    def cut(self, item: Any, max_length: int) -> Any:
        """The tokens without what goes beyond; None when nothing to learn would be left."""


class Encoder:
    """Makes tokens of examples.

    Args:
        tokenizer: the model's.
        raw: leave its chat template aside.
        train_on_prompt: learn everything after the first token.

    Raises:
        OpenELMError: the tokenizer has no end-of-text token.
    """

    unit = "example"

    def __init__(self, tokenizer: Tokenizer, *, raw: bool = False, train_on_prompt: bool = False) -> None:
        if tokenizer.eos_token_id is None or tokenizer.eos_token is None:
            raise OpenELMError(
                "the model's tokenizer names no end-of-text token (eos_token), which every example has to end in; "
                "convert the model again with --tokenizer"
            )
        self._tokenizer = tokenizer
        self._eos: int = tokenizer.eos_token_id
        self.eos = tokenizer.eos_token
        """How the token that ends examples is written."""
        self._raw = raw
        self._train_on_prompt = train_on_prompt

    def read(self, values: Mapping[str, Any]) -> Example:
        """The example of a record."""
        return example_of(values)

    def cut(self, encoded: Encoded, max_length: int) -> Encoded | None:
        """:func:`cut`."""
        return cut(encoded, max_length)

    def encode(self, example: Example, where: str) -> Encoded | None:
        """The tokens of an example, at whatever length; None when there is nothing in it to learn.

        Raises:
            OpenELMError: messages, and no chat template to write them with.
            TokenizerError: the template fails on these messages.
        """
        if example.empty:
            return None
        parts = self._parts(example)
        ids = [token for part, _ in parts for token in part]
        learn = [said or self._train_on_prompt for part, said in parts for _ in part]
        learn[:1] = [False] * len(learn[:1])  # nothing comes before the first, from which to predict it
        if not any(learn):
            return None
        return Encoded(np.array(ids, dtype=np.int32), np.array(learn, dtype=np.bool_), where)

    def _parts(self, example: Example) -> list[Part]:
        if isinstance(example, Text):
            return [([*self._tokenizer.encode(example.text), self._eos], True)]
        if isinstance(example, Chat):
            self._require_template()
            return self._chat(example)
        if self._raw or self._tokenizer.chat_template is None:
            return self._completion(*_plain(example))
        prompt, completion = _turns(example)
        user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}
        return self._chat(Chat((user, assistant)))

    def _completion(self, prompt: str, completion: str) -> list[Part]:
        given = self._tokenizer.encode(prompt)
        if prompt:
            said = self._tokenizer.encode_continuation(completion)
        else:
            said = self._tokenizer.encode(completion, add_bos=False)
        return [(given, False), ([*said, self._eos], True)]

    def _chat(self, chat: Chat) -> list[Part]:
        replies = [n for n, message in enumerate(chat.messages) if message["role"] == "assistant"]
        parts: list[Part] = []
        for place, (before, said) in zip(replies, self._tokenizer.encode_replies(chat.messages), strict=True):
            parts += [(before, False), (said, place >= chat.given)]
        if parts[-1][0][-1:] and parts[-1][0][-1] not in self._tokenizer.eos_token_ids:
            parts.append(([self._eos], True))
        return parts

    def _require_template(self) -> None:
        if self._raw:
            raise OpenELMError("messages are written by the model's chat template; leave out --raw")
        if self._tokenizer.chat_template is None:
            raise OpenELMError(
                "messages need a chat template, and the model has none; use prompt and completion, or put a "
                "chat_template.jinja into the model folder"
            )


def _plain(example: Completion | Instruction) -> tuple[str, str]:
    if isinstance(example, Completion):
        return example.prompt, example.completion
    return alpaca_prompt(example.instruction, example.input), example.output


def _turns(example: Completion | Instruction) -> tuple[str, str]:
    if isinstance(example, Completion):
        return example.prompt, example.completion
    return "\n\n".join(part for part in (example.instruction, example.input) if part), example.output


def cut(encoded: Encoded, max_length: int) -> Encoded | None:
    """The example without what goes beyond `max_length` tokens; None when nothing learned would be left."""
    if len(encoded.ids) > max_length:
        encoded = Encoded(encoded.ids[:max_length].copy(), encoded.learn[:max_length].copy(), encoded.where)
    return encoded if encoded.learn.any() else None
