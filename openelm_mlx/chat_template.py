"""Chat templates: messages to text, with the control tokens of the template kept apart from what people wrote.

A template's own control tokens (``</s>``, ``<|im_end|>``) must become their ids; the same characters inside a message
must stay text, or a message could end its own turn. So before rendering every special token's text inside the messages
is broken by a character that occurs nowhere else; after rendering, whatever special token is still whole is the
template's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from openelm_mlx.errors import TokenizerError

if TYPE_CHECKING:
    import jinja2

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True)
class SpecialToken:
    """A control token as tokenizer.json's ``added_tokens`` lists it."""

    content: str
    id: int
    lstrip: bool = False
    """It takes in the white space before it."""
    rstrip: bool = False
    """It takes in the white space after it."""
    single_word: bool = False
    """It counts only where no letter, digit or underscore touches it."""

    @property
    def pattern(self) -> str:
        text = re.escape(self.content)
        return rf"(?<!\w){text}(?!\w)" if self.single_word else text


def checked_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with every content as one string (a list of text parts is joined).

    Raises:
        TokenizerError: there is none, or one lacks a role or content that is text; the message says which, from 0.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TokenizerError(f"messages must be a list of {{'role', 'content'}}, not {type(messages).__name__}")
    checked = [_checked_message(index, message) for index, message in enumerate(messages)]
    if not checked:
        raise TokenizerError("there are no messages: a chat needs at least one")
    return checked


def _checked_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TokenizerError(f"message {index} must be {{'role', 'content'}}, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise TokenizerError(f"message {index} must have a role that is a string, not {role!r}")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = "".join(_part_text(index, part) for part in content)
    if not isinstance(content, str):
        raise TokenizerError(f"message {index} must have content that is text, not {type(content).__name__}")
    return {**message, "content": content}


def _part_text(index: int, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TokenizerError(f"message {index} has a content part that is not text ({kind}); only text is supported")


def render(template: str, messages: list[dict[str, Any]], **variables: object) -> str:
    """The text `template` makes of `messages`; `variables` are further names it may use.

    Raises:
        TokenizerError: jinja2 cannot read the template, or it fails on these messages.
    """
    import jinja2

    try:
        # Hugging Face's templates test `tools is not none`, which an undefined name would pass.
        return _compile(template).render(messages=messages, **{"tools": None, "documents": None, **variables})
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except Exception as error:  # a template is a program and may fail in any way
        reason = str(error) or type(error).__name__
    raise TokenizerError(
        f"the chat template failed: {reason}; change the messages, give another template, or use raw text"
    )


_LARGEST_NUMBER = 10_000
"""Above what templates count; its powers still fit in memory."""


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks a reply for training; for the text it means nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox, without the arithmetic that fills the memory: ``'a' * 3000000000``, ``'%2000000000d' % 1``."""

        intercepted_binops = frozenset(("*", "**", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            numbers = all(isinstance(x, (int, float)) for x in (left, right))
            small = numbers and all(abs(x) < _LARGEST_NUMBER for x in (left, right))
            if not small and (operator != "%" or isinstance(left, str)):
                raise TemplateError(f"chat templates may not use {operator} on text, or on numbers this large")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _to_json(
    value: object,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes ``<`` and ``>`` for web pages."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


class Shield:
    """Breaks special tokens inside messages, and afterwards splits the rendered text at the whole ones.

    Args:
        specials: the control tokens.
        used: all text in which the breaking character must not occur (messages, template).
    """

    def __init__(self, specials: Iterable[SpecialToken], used: Iterable[str]) -> None:
        ordered = sorted((token for token in specials if token.content), key=lambda token: -len(token.content))
        self._ids = {token.content: token for token in ordered}
        singles = [token.content for token in ordered if len(token.content) == 1]
        marks = _unused_characters(1 + len(singles), [*used, *self._ids])
        self._marks = marks
        self.mark = marks[0]
        """The breaking character."""
        # A token of one character cannot be broken: a character of its own stands for it.
        self._hide = str.maketrans(dict(zip(singles, marks[1:], strict=True)))
        self._mend = str.maketrans({self.mark: "", **dict(zip(marks[1:], singles, strict=True))})
        self._whole = re.compile("|".join(f"({token.pattern})" for token in ordered) or r"(?!)")
        # Tested at every character, so that tokens overlapping in the text are all broken.
        self._begin = re.compile(f"(?=({'|'.join(map(re.escape, self._ids)) or '(?!)'})).", re.DOTALL)
        edges = [re.escape(content[:n]) for content in self._ids for n in range(1, len(content))]
        self._ends_open = re.compile(rf"(?:{'|'.join(dict.fromkeys(edges)) or '(?!)'})\Z")
        edges = [re.escape(content[n:]) for content in self._ids for n in range(1, len(content))]
        self._begins_open = re.compile("|".join(dict.fromkeys(edges)) or "(?!)")

    def fits(self, used: Iterable[str]) -> bool:
        """Whether none of its breaking characters occurs in these texts."""
        return not any(mark in text for text in used for mark in self._marks)

    def protect(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with no special token whole in any of their strings."""
        return [
            {**_mapped(message, self.broken), "content": self._guarded(self.broken(message["content"]))}
            for message in messages
        ]

    def broken(self, text: str) -> str:
        """`text` with every special token's text broken after its first character."""
        return self._begin.sub(lambda match: match[0] + self.mark, text.translate(self._hide))

    def _guarded(self, content: str) -> str:
        """`content` kept from completing a special token together with what the template puts beside it."""
        before = self.mark if self._begins_open.match(content) else ""
        after = self.mark if self._ends_open.search(content[-self._longest() :]) else ""
        return before + content + after

    def _longest(self) -> int:
        return max(map(len, self._ids), default=1)

    def mended(self, text: str) -> str:
        """`text` as the people wrote it."""
        return text.translate(self._mend)

    def split(self, rendered: str) -> list[str | int]:
        """The rendered text as pieces of plain text (mended, possibly empty) and ids of control tokens."""
        parts: list[str | int] = []
        at, strip_next = 0, False
        for match in self._whole.finditer(rendered):
            token = self._ids[match[0]]
            parts.append(self._trimmed(rendered[at : match.start()], strip_next, token.lstrip))
            parts.append(token.id)
            at, strip_next = match.end(), token.rstrip
        parts.append(self._trimmed(rendered[at:], strip_next, False))
        return parts

    def _trimmed(self, text: str, left: bool, right: bool) -> str:
        text = text.lstrip() if left else text
        return self.mended(text.rstrip() if right else text)


def all_strings(value: object) -> Iterable[str]:
    """Every string inside a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from all_strings(key)
            yield from all_strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from all_strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


def _unused_characters(count: int, texts: Iterable[str]) -> list[str]:
    used = set().union(*texts)
    found: list[str] = []
    for block in _PRIVATE_USE:
        for code in block:
            if len(found) == count:
                return found
            if chr(code) not in used:
                found.append(chr(code))
    raise TokenizerError("the messages use every private-use character there is, which no chat can need")
