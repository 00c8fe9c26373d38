"""Text to token ids and back.

A tokenizer.json is run by the ``tokenizers`` library; a SentencePiece ``tokenizer.model`` is converted to one in memory
(`openelm_mlx.sentencepiece_json`). Decoding is this package's own and works on bytes (`openelm_mlx.detokenizer`). What
is given as text is always text: ``</s>`` in a prompt or in a chat message never becomes a control token.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from openelm_mlx import hub
from openelm_mlx.chat_replies import Exchange, exchanges, turn_end
from openelm_mlx.chat_template import Shield, SpecialToken, all_strings, checked_messages, render
from openelm_mlx.detokenizer import Detokenizer, parse_decoder
from openelm_mlx.errors import TokenizerError
from openelm_mlx.tokenizer_files import (
    TokenizerSource,
    continuing_json,
    joining_json,
    read_file,
    read_folder,
    text_tokenizer,
    write_folder,
)

_LARGEST_ID = 1 << 24
"""Ids index a table; a damaged file must not make it fill the memory."""

_Before = Literal["nothing", "control", "text"]
"""What a text comes after, which decides whether it gets a dummy prefix (a space at its beginning)."""


class Tokenizer:
    """A model's tokenizer. Make one with :meth:`from_folder` or :meth:`from_file`.

    Raises:
        TokenizerError: the files cannot be used; also from the methods, where their docstrings say so.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source
        self._parsed: dict[str, Any] = json.loads(source.json_text)
        self._encoder = text_tokenizer(source.json_text, source.name)
        try:
            self._decoder = parse_decoder(self._parsed.get("decoder"))
        except TokenizerError as error:
            raise TokenizerError(f"{source.name}: {error}") from None
        self._ids: dict[str, int] = self._encoder.get_vocab(with_added_tokens=True)
        if max(self._ids.values(), default=0) > _LARGEST_ID:
            raise TokenizerError(f"{source.name}: has the id {max(self._ids.values())}, which no vocabulary reaches")
        self._added: list[dict[str, Any]] = self._parsed.get("added_tokens") or []
        self._specials = self._special_tokens()
        self._shield = Shield(self._specials, ())
        self.bos_token_id: int | None = self._id_of(source.bos)
        """The id put before a text, None when there is none."""
        self.eos_token_id: int | None = self._id_of(source.eos)
        """The tokenizer's own end-of-text id, None when there is none."""
        self.eos_token_ids: frozenset[int] = source.stop_ids | _present(self.eos_token_id)
        """Every id that ends generation."""
        self.vocab_size: int = 1 + max(self._ids.values(), default=-1)
        """The number of ids, added tokens included."""
        self.adds_bos: bool = self._adds_bos()
        """Whether :meth:`encode` puts BOS first when not told otherwise."""

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a model folder, or None when it has neither tokenizer.json nor tokenizer.model.

        tokenizer.json is preferred. tokenizer_config.json, special_tokens_map.json, chat_template.jinja, config.json
        and generation_config.json are read where present.

        Raises:
            TokenizerError: a file is not what its name promises or of an unsupported kind.
        """
        source = read_folder(Path(folder))
        return None if source is None else cls(source)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """The tokenizer of a lone tokenizer.json or tokenizer.model, told apart by content.

        Raises:
            TokenizerError: the file is neither (the message says what was found), or of an unsupported kind.
        """
        return cls(read_file(Path(path)))

    @classmethod
    def named(cls, name: str) -> Tokenizer:
        """The tokenizer of a file, a folder or a Hub repository.

        Raises:
            OpenELMError: there is none.
        """
        path = hub.resolve(name, weights=False)
        tokenizer = cls.from_folder(path) if path.is_dir() else cls.from_file(path)
        if tokenizer is None:
            raise TokenizerError(f"{name}: has neither tokenizer.json nor tokenizer.model")
        return tokenizer

    @property
    def chat_template(self) -> str | None:
        """The jinja template that makes a prompt of messages."""
        return self._source.chat_template

    @property
    def eos_token(self) -> str | None:
        """How the tokenizer's own end-of-text token is written."""
        return self._known(self._source.eos)

    def with_chat_template(self, template: str | None) -> Tokenizer:
        """The same tokenizer with another chat template, or with none."""
        # A list of named templates in the configuration would hide the new one when saved.
        config = {key: value for key, value in self._source.config.items() if key != "chat_template"}
        other = copy.copy(self)
        other._source = dataclasses.replace(self._source, chat_template=template, template_in_file=False, config=config)
        return other

    # Text to ids

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The ids of a text; BOS comes first, once, when `add_bos` is true.

        Left out, `add_bos` is the tokenizer's own habit (:attr:`adds_bos`). Special tokens written in the text are
        text. Half surrogate pairs, which are no characters, are taken as U+FFFD.

        Raises:
            TokenizerError: BOS is asked for and the tokenizer has none.
        """
        ids = self._encode_text(text, "nothing")
        if self.adds_bos if add_bos is None else add_bos:
            if self.bos_token_id is None:
                raise TokenizerError(f"{self._source.name}: this tokenizer has no BOS token to add")
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that goes on where another one ended: no BOS, and no space that is not in it.

        A space that parts the two belongs to whichever has it. The ids of both together need not be those of the joined
        text, where a token may reach over the seam; they are what a model is given and then has to say.
        """
        return self._encode_text(text, "text")

    def render_chat(self, messages: Iterable[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text the chat template makes of the messages (each with ``role`` and ``content``).

        Raises:
            TokenizerError: there is no template, it fails, or a message is malformed (the message says which).
        """
        return self._render(self._template(), checked_messages(messages), add_generation_prompt)

    def encode_chat(self, messages: Iterable[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """The ids of a chat: the template's control tokens as ids, everything inside a message as text.

        BOS comes first, once, when the tokenizer adds one or the template writes one. Contents may be strings or lists
        of text parts.

        Raises:
            TokenizerError: there is no template, it fails, or a message is malformed (the message says which).
        """
        template, checked = self._template(), checked_messages(messages)
        shield = self._shield_for([template, *all_strings(checked)])
        rendered = self._render(template, shield.protect(checked), add_generation_prompt)
        return self._begun(self._encode_parts(shield.split(rendered), "nothing"))

    def encode_replies(self, messages: Iterable[Mapping[str, Any]]) -> list[tuple[list[int], list[int]]]:
        """The ids of a chat up to its last reply: for each reply in turn what comes before it, and what is said.

        What is said is the reply with the token that ends its turn; the rest of what the template puts after it comes
        before the next one. Ids begin anew where a reply does, so what comes before the first one is exactly
        :meth:`encode_chat` of the messages before it, with the prompt to reply.

        Raises:
            TokenizerError: as for :meth:`encode_chat`, or the template does not write a reply after what it writes
                without it, so that where it begins cannot be told.
        """
        template, checked = self._template(), checked_messages(messages)
        shield = self._shield_for([template, *all_strings(checked)])
        protected = shield.protect(checked)
        pairs: list[tuple[list[int], list[int]]] = []
        before: list[int] = []
        for exchange in exchanges(protected, lambda part, prompt: self._render(template, part, prompt)):
            if not pairs:
                before = self._begun(self._encode_parts(shield.split(exchange.prompt), "nothing"))
            said, rest = self._said(shield, exchange, "control" if self._ends_in_control(before) else "text")
            pairs.append((before, said))
            before = rest
        return pairs

    # Ids to text

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for: none for control tokens and for ids outside the vocabulary."""
        table = self._bytes
        return table[token] if 0 <= token < len(table) else b""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. Bytes that are no UTF-8 become U+FFFD; the unknown token shows as its name."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text[1:] if self._decoder.strips_space and text.startswith(" ") else text

    def stream(self, prompt_ids: Iterable[int] = (), *, strip_leading_space: bool = False) -> Detokenizer:
        """A reader for ids that come one at a time after `prompt_ids`; see `openelm_mlx.detokenizer.Detokenizer`."""
        return Detokenizer(
            self.token_bytes,
            prompt_ids,
            strips_space=self._decoder.strips_space,
            strip_leading_space=strip_leading_space,
        )

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder` so that this package and mlx-lm read the same ids from it.

        Writes tokenizer.json and tokenizer_config.json, and tokenizer.model and chat_template.jinja where the source
        had them. Files of these names are overwritten, and a chat_template.jinja of before is removed.
        """
        write_folder(
            Path(folder),
            dataclasses.replace(self._source, bos=self._known(self._source.bos), eos=self._known(self._source.eos)),
            unk=self._unk_token() or self._known(self._config_token("unk_token")),
            add_bos=self.adds_bos,
        )

    # Inside

    def _shield_for(self, used: list[str]) -> Shield:
        """The last shield if it does for these texts: making one takes longer than a short chat does."""
        shield = self._shield
        if not shield.fits(used):
            shield = self._shield = Shield(self._specials, used)
        return shield

    def _begun(self, ids: list[int]) -> list[int]:
        """The ids with BOS first, where this tokenizer adds one and the template did not."""
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def _said(self, shield: Shield, exchange: Exchange, before: _Before) -> tuple[list[int], list[int]]:
        """The ids of a reply with the end of its turn, and of what follows up to the next reply."""
        parts = shield.split(exchange.reply + exchange.following)
        end = turn_end(shield.split(exchange.reply), self.eos_token_ids)
        if end is not None:
            return self._encode_parts(parts[: end + 1], before), self._encode_parts(parts[end + 1 :], "control")
        # Nothing but white space ends the turn, and that is the template's.
        bare = self._encode_parts(shield.split(exchange.reply.rstrip()), before)
        if not exchange.following:
            return bare, []
        ids = self._encode_parts(parts, before)
        count = next((n for n, (a, b) in enumerate(zip(bare, ids, strict=False)) if a != b), len(bare))
        return ids[:count], ids[count:]

    def _ends_in_control(self, ids: list[int]) -> bool:
        return not self._control_ids.isdisjoint(ids[-1:])

    def _encode_parts(self, parts: Iterable[str | int], before: _Before) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                before = "control"
            else:
                ids += self._encode_text(part, before)
        return ids

    def _encode_text(self, text: str, before: _Before) -> list[int]:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text
        ids: list[int] = self._plain_ids(text, before)
        if self._control_ids.isdisjoint(ids):
            return ids
        # A vocabulary that reaches a control token by way of ordinary text (some Unigram models): take it in halves.
        shield = Shield(self._specials, [text])
        halves = shield.broken(text).split(shield.mark)
        ids = [
            token
            for n, half in enumerate(halves)
            for token in self._plain_ids(shield.mended(half), "text" if n else before)
        ]
        if self._control_ids.isdisjoint(ids):
            return ids
        raise TokenizerError(f"{self._source.name}: this vocabulary turns the text {text[:40]!r} into control tokens")

    def _plain_ids(self, text: str, before: _Before) -> list[int]:
        encoder = self._encoder if before == "nothing" else self._continuing if before == "control" else self._joining
        return list(encoder.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _continuing(self) -> Any:
        """The encoder of text that follows a control token."""
        return self._edited(continuing_json(self._parsed))

    @cached_property
    def _joining(self) -> Any:
        """The encoder of text that follows other text."""
        return self._edited(joining_json(self._parsed))

    def _edited(self, parsed: dict[str, Any] | None) -> Any:
        return self._encoder if parsed is None else text_tokenizer(json.dumps(parsed), self._source.name)

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        """Ids no text may become. The unknown token is what text outside the vocabulary rightly becomes."""
        return frozenset(token.id for token in self._specials) - _present(self._id_of(self._unk_token()))

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for piece, token in self._ids.items():
            table[token] = self._decoder.piece_bytes(piece)
        for added in self._added:
            table[self._ids[added["content"]]] = (
                b"" if added.get("special") else self._decoder.added_bytes(added["content"])
            )
        unk, unk_id = self._unk_token(), self._id_of(self._unk_token())
        if unk is not None and unk_id is not None and unk_id not in {self.bos_token_id, self.eos_token_id}:
            table[unk_id] = unk.encode("utf-8")
        return table

    def _special_tokens(self) -> list[SpecialToken]:
        """The control tokens, with the ids the library gives them: it does not obey the ones written in the file."""
        flags = ("lstrip", "rstrip", "single_word")
        return [
            SpecialToken(
                added["content"], self._ids[added["content"]], **{flag: bool(added.get(flag)) for flag in flags}
            )
            for added in self._added
            if added.get("special") and added["content"]
        ]

    def _adds_bos(self) -> bool:
        if self.bos_token_id is None:
            return False
        if self._source.add_bos is not None:
            return self._source.add_bos
        return list(self._encoder.encode("", add_special_tokens=True).ids)[:1] == [self.bos_token_id]

    def _template(self) -> str:
        if self._source.chat_template is None:
            raise TokenizerError(
                f"{self._source.name}: this tokenizer has no chat template; give raw text instead of messages, "
                "or give a template"
            )
        return self._source.chat_template

    def _render(self, template: str, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        names = {"bos_token": self._source.bos, "eos_token": self._source.eos}
        names |= {key: self._config_token(key) for key in ("unk_token", "pad_token")}
        given = {key: token for key, token in names.items() if token is not None}
        return render(template, messages, add_generation_prompt=add_generation_prompt, **given)

    def _unk_token(self) -> str | None:
        model = self._parsed["model"]
        if isinstance(model.get("unk_token"), str):
            return str(model["unk_token"])
        unk_id = model.get("unk_id")
        return str(model["vocab"][unk_id][0]) if isinstance(unk_id, int) else None

    def _config_token(self, key: str) -> str | None:
        value = self._source.config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else None

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._ids.get(token)

    def _known(self, token: str | None) -> str | None:
        return token if self._id_of(token) is not None else None


def _present(token: int | None) -> frozenset[int]:
    return frozenset() if token is None else frozenset((token,))
