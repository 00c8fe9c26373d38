"""The shapes a record may have, told apart by its keys, and the examples they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openelm_mlx.chat_template import checked_messages
from openelm_mlx.errors import OpenELMError, TokenizerError
from openelm_mlx.finetune.data.records import kind

ROLES = ("system", "user", "assistant", "tool")
SHAPES = "text; prompt and completion; messages; instruction and output (and input)"

_SHAPES = (("text",), ("prompt", "completion"), ("messages",), ("instruction", "output"))


class BadRecord(OpenELMError):
    """A record is of no known shape, or one of its values is not what the shape needs."""


@dataclass(frozen=True)
class Text:
    """Plain text, all of it learned."""

    text: str

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn."""
        return not self.text.strip()

    @property
    def texts(self) -> tuple[str, ...]:
        """All that people wrote in it."""
        return (self.text,)


@dataclass(frozen=True)
class Completion:
    """What a model should say after a prompt."""

    prompt: str
    completion: str

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn."""
        return not self.completion.strip()

    @property
    def texts(self) -> tuple[str, ...]:
        """All that people wrote in it."""
        return self.prompt, self.completion


@dataclass(frozen=True)
class Instruction:
    """An Alpaca record: a task, perhaps what it is to be done with, and what a model should say."""

    instruction: str
    input: str
    output: str

    @property
    def empty(self) -> bool:
        """Whether there is nothing to learn."""
        return not self.output.strip()

    @property
    def texts(self) -> tuple[str, ...]:
        """All that people wrote in it."""
        return self.instruction, self.input, self.output


@dataclass(frozen=True)
class Chat:
    """Turns of a chat; those of the assistant are learned."""

    messages: tuple[dict[str, Any], ...]
    """Each with ``role`` and ``content``, a string."""
    given: int = 0
    """The number of messages at the beginning of which nothing is learned."""

    @property
    def empty(self) -> bool:
        """Never: a chat has replies, and none is empty."""
        return False

    @property
    def texts(self) -> tuple[str, ...]:
        """All that people wrote in it."""
        return tuple(message["content"] for message in self.messages)


Example = Text | Completion | Instruction | Chat


def example_of(values: Mapping[str, Any]) -> Example:
    """The example a record stands for. Keys beyond those of its shape are left aside.

    Raises:
        BadRecord: the keys are those of no shape or of several, or a value is not what it should be; the message names
            the keys.
    """
    whole = [keys for keys in _SHAPES if all(key in values for key in keys)]
    if len(whole) > 1:
        raise BadRecord(
            f"has keys of several shapes ({'; '.join(' and '.join(keys) for keys in whole)}); leave those of one"
        )
    if not whole:
        raise BadRecord(_no_shape(values))
    keys = whole[0]
    if keys == ("messages",):
        return _chat("messages", values["messages"])
    if keys == ("prompt", "completion") and not isinstance(values["prompt"], str):
        return _messages_pair(values["prompt"], values["completion"])
    texts = [text_of(key, values[key]) for key in keys]
    if keys == ("text",):
        return Text(*texts)
    if keys == ("prompt", "completion"):
        return Completion(*texts)
    return Instruction(texts[0], text_of("input", values.get("input", "")), texts[1])


def _no_shape(values: Mapping[str, Any]) -> str:
    if "chosen" in values and "rejected" in values:
        return "is a preference, 'chosen' and 'rejected'; --objective dpo learns those"
    for keys in _SHAPES:
        missing = [key for key in keys if key not in values]
        if len(missing) < len(keys):
            there = next(key for key in keys if key in values)
            return f"has {there!r} but no {missing[0]!r}"
    if not values:
        return f"is an empty object; the shapes there are: {SHAPES}"
    shown = ", ".join(repr(key) for key in list(values)[:8]) + (", ..." if len(values) > 8 else "")
    return f"has none of the keys needed, but {shown}; the shapes there are: {SHAPES}"


def text_of(key: str, value: object) -> str:
    """The text that a key holds.

    Raises:
        BadRecord: it is no text.
    """
    if not isinstance(value, str):
        raise BadRecord(f"{key!r} must be text, not {kind(value)}")
    return value


def _messages_pair(prompt: object, completion: object) -> Chat:
    """TRL's conversational prompts and completions: two lists of messages."""
    if not isinstance(prompt, Sequence) or isinstance(completion, str):
        raise BadRecord(
            "'prompt' and 'completion' must be both text or both lists of messages, "
            f"not {kind(prompt)} and {kind(completion)}"
        )
    given = messages_of("prompt", prompt)
    said = _chat("completion", completion)
    return Chat((*given, *said.messages), given=len(given))


def _chat(key: str, value: object) -> Chat:
    messages = messages_of(key, value)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord(f"{key!r} has no turn of the assistant, so there is nothing to learn")
    return Chat(tuple(messages))


def messages_of(key: str, value: object, *, empty_turns: bool = False) -> list[dict[str, Any]]:
    """The messages that a key holds; turns of the assistant may be without text where `empty_turns` says so.

    Raises:
        BadRecord: they are no messages.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRecord(f"{key!r} must be a list of messages, not {kind(value)}")
    try:
        messages = checked_messages(value)
    except TokenizerError as e:
        raise BadRecord(f"{key!r}: {e}") from None
    for n, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise BadRecord(f"{key!r}: message {n} has the role {message['role']!r}; there are {', '.join(ROLES)}")
        if not empty_turns and message["role"] == "assistant" and not message["content"].strip():
            raise BadRecord(f"{key!r}: message {n}, a turn of the assistant, is empty")
    return messages
