"""Preferences: two responses to a prompt, of which one is preferred; from records to tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from openelm_mlx.finetune.data.encoding import Encoder, cut
from openelm_mlx.finetune.data.formats import BadRecord, Chat, Completion, messages_of, text_of
from openelm_mlx.finetune.data.records import kind
from openelm_mlx.finetune.data.types import Encoded, Pair
from openelm_mlx.tokenizer import Tokenizer

RESPONSES = ("chosen", "rejected")
_NEEDED = "preferences need prompt, chosen and rejected (--objective dpo)"

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Preference:
    """A prompt with each of two responses."""

    chosen: Completion | Chat
    rejected: Completion | Chat

    @property
    def empty(self) -> bool:
        """Whether a response has no text."""
        return any(not text.strip() for text in (*_said(self.chosen), *_said(self.rejected)))

    @property
    def texts(self) -> tuple[str, ...]:
        """All that people wrote in it."""
        return *self.chosen.texts, *self.rejected.texts


def _said(response: Completion | Chat) -> tuple[str, ...]:
    if isinstance(response, Completion):
        return (response.completion,)
    return tuple(m["content"] for m in response.messages[response.given :] if m["role"] == "assistant")


def preference_of(values: Mapping[str, Any]) -> Preference:
    """The preference a record stands for. Keys beyond prompt, chosen and rejected are left aside.

    Responses are text, or lists of messages. The prompt is text, a list of messages, or the first turns that both lists
    share, as in UltraFeedback and in TRL's conversational form; where they share a user's turn, a prompt of text beside
    them is left aside.

    Raises:
        BadRecord: a key is missing, or a value is not what it should be; the message names it.
    """
    missing = [key for key in RESPONSES if key not in values]
    if missing:
        raise BadRecord(f"has no {missing[0]!r}; {_NEEDED}")
    prompt, (chosen, rejected) = values.get("prompt"), (values[key] for key in RESPONSES)
    if isinstance(chosen, str) and isinstance(rejected, str):
        if "prompt" not in values:
            raise BadRecord(f"has no 'prompt'; {_NEEDED}")
        before = text_of("prompt", prompt)
        return Preference(Completion(before, chosen), Completion(before, rejected))
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise BadRecord(
            f"'chosen' and 'rejected' must be both text or both lists of messages, not {kind(chosen)} and "
            f"{kind(rejected)}"
        )
    return _of_messages(prompt, *(messages_of(key, values[key], empty_turns=True) for key in RESPONSES))


def _of_messages(prompt: object, chosen: Messages, rejected: Messages) -> Preference:
    if prompt is None or isinstance(prompt, str):
        shared = _shared(chosen, rejected)
        given = chosen[:shared]
        if isinstance(prompt, str) and not any(m["role"] == "user" for m in given):
            given = [*given, {"role": "user", "content": prompt}]
    else:
        given = messages_of("prompt", prompt)
        whole = all(m[: len(given)] == given for m in (chosen, rejected))  # the prompt is written in them again
        shared = len(given) if whole else 0
    if not given:
        raise BadRecord("'chosen' and 'rejected' do not begin with the same turns, and there is no 'prompt'")
    responses = [(key, m[shared:]) for key, m in zip(RESPONSES, (chosen, rejected), strict=True)]
    for key, turns in responses:
        if not turns or turns[0]["role"] != "assistant":
            raise BadRecord(f"{key!r}: a turn of the assistant must follow the prompt, or the turns that both share")
    return Preference(*(Chat((*given, *turns), given=len(given)) for _, turns in responses))


def _shared(chosen: Messages, rejected: Messages) -> int:
    """How many turns both begin with, a last one of each left to be told apart."""
    most = min(len(chosen), len(rejected)) - 1
    return next((n for n in range(most) if chosen[n] != rejected[n]), most)


class PairEncoder:
    """Makes tokens of preferences, both responses after the same prompt; see :class:`Encoder`.

    Args:
        tokenizer: the model's.
        raw: leave its chat template aside.
        max_prompt: most tokens of a prompt. A longer one loses its beginning, as with TRL and the alignment handbook,
            but for the token that begins every text.
    """

    unit = "pair"

    def __init__(self, tokenizer: Tokenizer, *, raw: bool, max_prompt: int) -> None:
        self._encoder = Encoder(tokenizer, raw=raw)
        self._bos = tokenizer.bos_token_id
        self._max_prompt = max_prompt
        self.eos = self._encoder.eos

    def read(self, values: Mapping[str, Any]) -> Preference:
        """The preference of a record."""
        return preference_of(values)

    def encode(self, example: Preference, where: str) -> Pair | None:
        """The tokens of both; None where one has no text.

        Raises:
            OpenELMError: as for :class:`Encoder`.
        """
        if example.empty:
            return None
        found = [
            self._encoder.encode(response, f"{where} ({name})")
            for name, response in zip(RESPONSES, (example.chosen, example.rejected), strict=True)
        ]
        if found[0] is None or found[1] is None:
            return None
        lost = max(self._prompt_of(row) for row in found if row) - self._max_prompt
        return Pair(self._shortened(found[0]), self._shortened(found[1]), where, max(0, lost))

    def cut(self, pair: Pair, max_length: int) -> Pair | None:
        """The pair with both cut at their ends; None when nothing would be left of a response."""
        chosen, rejected = cut(pair.chosen, max_length), cut(pair.rejected, max_length)
        if chosen is None or rejected is None:
            return None
        return Pair(chosen, rejected, pair.where, pair.prompt_lost)

    @staticmethod
    def _prompt_of(row: Encoded) -> int:
        return int(np.argmax(row.learn))

    def _shortened(self, row: Encoded) -> Encoded:
        over = self._prompt_of(row) - self._max_prompt
        if over <= 0:
            return row
        kept = np.arange(len(row.ids)) >= over
        if row.ids[0] == self._bos:
            kept[over], kept[0] = False, True
        return Encoded(row.ids[kept], row.learn[kept], row.where)
