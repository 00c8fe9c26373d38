"""The files of a tokenizer: finding and reading them in a model folder, and writing them again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openelm_mlx.checkpoint import generation_eos, token_ids
from openelm_mlx.errors import TokenizerError
from openelm_mlx.files import is_there, parse_json, read, read_json


@dataclass(frozen=True)
class TokenizerSource:
    """What the files say, before anything is built from it."""

    name: str
    """The file the tokenizer came from, for messages."""
    json_text: str
    """The tokenizer.json (converted, when the source was a SentencePiece model)."""
    config: dict[str, Any] = field(default_factory=dict)
    """The tokenizer_config.json as it was."""
    bos: str | None = None
    eos: str | None = None
    add_bos: bool | None = None
    """None: whatever the tokenizer.json's post-processor does."""
    stop_ids: frozenset[int] = frozenset()
    """Ids besides `eos` that end generation (from config.json and generation_config.json)."""
    chat_template: str | None = None
    template_in_file: bool = False
    """The template is a chat_template.jinja, not part of tokenizer_config.json."""
    sentencepiece: bytes | None = None
    """The tokenizer.model, when there was one."""


def read_folder(folder: Path) -> TokenizerSource | None:
    """What the folder's tokenizer files say, or None when it has neither tokenizer.json nor tokenizer.model.

    Raises:
        TokenizerError: a file is not what its name promises.
    """
    path, model = folder / "tokenizer.json", folder / "tokenizer.model"
    if not is_there(path, TokenizerError):
        path = model
    if not is_there(path, TokenizerError):
        return None
    lone = read_file(path)
    config = _read_json(folder / "tokenizer_config.json")
    fallback = _read_json(folder / "special_tokens_map.json")
    named = {**fallback, **{key: value for key, value in config.items() if value is not None or key not in fallback}}
    template, in_file = find_template(folder, config)
    add_bos = config.get("add_bos_token")
    return TokenizerSource(
        name=str(path),
        json_text=lone.json_text,
        config=config,
        bos=_token_text(named, "bos_token", lone.bos),
        eos=_token_text(named, "eos_token", lone.eos),
        add_bos=add_bos if isinstance(add_bos, bool) else lone.add_bos,
        stop_ids=_stop_ids(folder),
        chat_template=template,
        template_in_file=in_file,
        sentencepiece=read(model, TokenizerError) if is_there(model, TokenizerError) else lone.sentencepiece,
    )


def read_file(path: Path) -> TokenizerSource:
    """A lone tokenizer.json or SentencePiece model; which one it is, is seen from its content.

    BOS and EOS are those of the SentencePiece model; beside a tokenizer.json they are ``<s>`` and ``</s>`` where it has
    such special tokens.

    Raises:
        TokenizerError: the file cannot be read, or is neither.
    """
    data = read(path, TokenizerError)
    if data.lstrip().startswith(b"{"):
        return _from_json(path, data)
    if (found := _not_a_model(data)) is not None:
        raise TokenizerError(f"{path}: found {found}; expected a tokenizer.json or a SentencePiece tokenizer.model")
    return of_sentencepiece(path, data)


def _from_json(path: Path, data: bytes) -> TokenizerSource:
    parsed = parse_json(path, data, TokenizerError)
    if not isinstance(parsed.get("model"), dict):
        raise TokenizerError(f"{path}: found JSON without a 'model'; expected a tokenizer.json")
    specials = {token["content"] for token in _added_tokens(path, parsed) if token.get("special")}
    bos, eos = (text if text in specials else None for text in ("<s>", "</s>"))
    return TokenizerSource(name=str(path), json_text=data.decode("utf-8"), bos=bos, eos=eos)


def _added_tokens(path: Path, parsed: dict[str, Any]) -> list[dict[str, Any]]:
    added = parsed.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise TokenizerError(f"{path}: 'added_tokens' must be a list of objects")
    for token in added:
        if not isinstance(token.get("content"), str) or not token["content"]:
            raise TokenizerError(f"{path}: an added token has no text: {token!r}")
    return added


def of_sentencepiece(path: Path, data: bytes) -> TokenizerSource:
    """What a SentencePiece model says that is, or will be, the file `path`.

    Raises:
        TokenizerError: it is none, or of a kind that is not supported.
    """
    from openelm_mlx.sentencepiece_json import sentencepiece_to_json, special_pieces

    try:
        text = sentencepiece_to_json(data)
        bos, eos = special_pieces(data)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    return TokenizerSource(name=str(path), json_text=text, bos=bos, eos=eos, add_bos=True, sentencepiece=data)


def _not_a_model(data: bytes) -> str | None:
    """What the data is when it is plainly no SentencePiece model, for the message."""
    if not data:
        return "an empty file"
    if data.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer (fetch the file itself with `git lfs pull`)"
    if data.lstrip()[:1] == b"<":
        return "a web page"
    return None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, TokenizerError) if is_there(path, TokenizerError) else {}


def _token_text(config: dict[str, Any], key: str, guess: str | None) -> str | None:
    """The token named in the configuration (null: there is none), or the guess when it says nothing about it."""
    value = config.get(key, guess)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def own_chat_template(folder: Path) -> str | None:
    """The chat template that lies in a model folder, which need not have a tokenizer; None when there is none."""
    return find_template(folder, _read_json(folder / "tokenizer_config.json"))[0]


def find_template(folder: Path, config: dict[str, Any]) -> tuple[str | None, bool]:
    """The chat template of a folder with this tokenizer_config.json, and whether it is a file of its own."""
    path = folder / "chat_template.jinja"
    if is_there(path, TokenizerError):
        try:
            return read(path, TokenizerError).decode("utf-8"), True
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path}: cannot be read as text ({error})") from None
    value = config.get("chat_template")
    if isinstance(value, list):
        named = [item.get("template") for item in value if isinstance(item, dict) and item.get("name") == "default"]
        value = named[0] if named else None
    return (value if isinstance(value, str) else None), False


def _stop_ids(folder: Path) -> frozenset[int]:
    path = folder / "config.json"
    return frozenset((*token_ids(path, "eos_token_id", _read_json(path).get("eos_token_id")), *generation_eos(folder)))


def write_folder(folder: Path, source: TokenizerSource, *, unk: str | None, add_bos: bool) -> None:
    """Write tokenizer.json and tokenizer_config.json, and the tokenizer.model and chat_template.jinja the source has.

    The configuration keeps the source's other keys and says what this package did with the tokenizer, so that
    transformers, which mlx-lm uses, gives the same ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(source.json_text, encoding="utf-8")
    template = source.chat_template
    config = _config_to_write(source, unk, add_bos, template)
    text = json.dumps(config, indent=2) + "\n"  # ASCII: a config may hold halves of surrogate pairs
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if source.sentencepiece is not None:
        (folder / "tokenizer.model").write_bytes(source.sentencepiece)
    jinja = folder / "chat_template.jinja"
    if template is not None and source.template_in_file:
        jinja.write_text(template, encoding="utf-8")
    else:
        jinja.unlink(missing_ok=True)  # left from before, it would win over what the configuration says


def _config_to_write(source: TokenizerSource, unk: str | None, add_bos: bool, template: str | None) -> dict[str, Any]:
    # auto_map names Python files of the source's folder, which are not copied.
    config = {key: value for key, value in source.config.items() if key not in ("auto_map", "tokenizer_file")}
    for key, token in (("bos_token", source.bos), ("eos_token", source.eos), ("unk_token", unk)):
        config.pop(key, None)
        if token is not None:
            config[key] = token
    config["add_bos_token"] = add_bos
    if config.get("add_eos_token"):
        config["add_eos_token"] = False  # this package never ends a prompt with EOS
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if template is None or source.template_in_file:
        config.pop("chat_template", None)
    elif not isinstance(config.get("chat_template"), list):
        config["chat_template"] = template
    return config


def text_tokenizer(json_text: str, name: str) -> Any:
    """A `tokenizers.Tokenizer` that takes every special token's text as text and never cuts or pads.

    Raises:
        TokenizerError: the tokenizers library cannot read it.
    """
    from tokenizers import Tokenizer

    try:
        built = Tokenizer.from_str(json_text)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{name}: the tokenizers library cannot read it: {error}") from None
    built.no_truncation()
    built.no_padding()
    built.encode_special_tokens = True
    return built


def continuing_json(parsed: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer.json for text after a control token, or None when it is the same one.

    It differs where the dummy prefix is put before the first piece of a text alone (Metaspace, ``first``).
    """

    def change(node: dict[str, Any]) -> dict[str, Any]:
        first = node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first"
        return {**node, "prepend_scheme": "never"} if first else node

    return _edited(parsed, change)


def joining_json(parsed: dict[str, Any]) -> dict[str, Any] | None:
    """The tokenizer.json for text that goes on where other text ended, or None when it is the same one.

    It has no dummy prefix (normalizer Prepend, Metaspace, ByteLevel with ``add_prefix_space``), nor what
    `openelm_mlx.sentencepiece_json` writes in place of one.
    """

    def change(node: dict[str, Any]) -> dict[str, Any] | None:
        kind, pattern = node.get("type"), node.get("pattern")
        regex = str(pattern.get("Regex", "")) if isinstance(pattern, dict) else ""
        if kind == "Prepend" or (kind == "Replace" and regex.startswith(r"\A") and node.get("content") == "▁"):
            return None
        if kind == "Replace" and regex == r"\A +| +\z":
            return {**node, "pattern": {"Regex": r" +\z"}}
        if kind == "Metaspace":
            return {**node, "prepend_scheme": "never", "add_prefix_space": False}
        if kind == "ByteLevel":
            return {**node, "add_prefix_space": False}
        return node

    return _edited(parsed, change)


def _edited(parsed: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> dict[str, Any] | None:
    """The tokenizer.json with each step of its normalizer and pre-tokenizer changed, or left out for None.

    None when nothing changes.
    """

    def edited(node: Any) -> Any:
        if isinstance(node, list):
            return [item for item in map(edited, node) if item is not None]
        if not isinstance(node, dict):
            return node
        changed = change(node)
        return None if changed is None else {key: edited(value) for key, value in changed.items()}

    steps = {key: edited(parsed.get(key)) for key in ("normalizer", "pre_tokenizer")}
    return None if all(value == parsed.get(key) for key, value in steps.items()) else {**parsed, **steps}
