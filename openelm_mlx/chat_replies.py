"""Where the replies of a chat begin and end in the text that its template makes, for training on them.

A template says nothing about that. But what it writes for the messages before a reply, with the prompt to reply, is
what a model is given when it is to make that reply; where the text of the messages up to the reply goes on from there,
the reply begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from openelm_mlx.errors import TokenizerError


@dataclass(frozen=True)
class Exchange:
    """A reply in the text of its chat."""

    prompt: str
    """All the text before the reply: what a model is given."""
    reply: str
    """What the template writes for the reply, the end of its turn included."""
    following: str
    """The text between the reply and the next one; nothing after the last."""


def exchanges(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]], bool], str]) -> list[Exchange]:
    """The replies of a chat, in order; messages after the last one are left aside.

    Args:
        messages: each with a ``role``; those of the role ``assistant`` are replies.
        render: makes the text of some messages, with the prompt to reply where the second argument is true.

    Raises:
        TokenizerError: a reply is the first message, or the template writes earlier messages differently once later
            ones are there.
    """
    places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if places[:1] == [0]:
        raise TokenizerError("message 0 is a reply, and there is nothing before it that it replies to")
    prompts = [render(messages[:n], True) for n in places]
    wholes = [render(messages[: n + 1], False) for n in places]
    for n, (place, prompt, whole) in enumerate(zip(places, prompts, wholes, strict=True)):
        later = prompts[n + 1 : n + 2]
        if not whole.startswith(prompt) or not all(text.startswith(whole) for text in later):
            raise TokenizerError(
                f"the chat template does not write message {place} after what it writes without it, so it cannot be "
                "told where that reply begins or ends; give the model another chat template"
            )
    nexts = [*prompts[1:], *wholes[-1:]]
    return [
        Exchange(prompt, whole[len(prompt) :], after[len(whole) :])
        for prompt, whole, after in zip(prompts, wholes, nexts, strict=True)
    ]


def turn_end(reply: Sequence[str | int], ends: Collection[int]) -> int | None:
    """Which part of a reply ends its turn; None when no control token does.

    Args:
        reply: pieces of text and ids of control tokens.
        ends: ids that end generation. The first of them ends the turn, or else the last control token.
    """
    controls = [n for n, part in enumerate(reply) if isinstance(part, int)]
    return next((n for n in controls if reply[n] in ends), controls[-1] if controls else None)
