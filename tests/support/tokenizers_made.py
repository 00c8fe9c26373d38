"""Small tokenizers for tests: the SentencePiece model in tests/data, and byte-level ones built on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
MODEL = DATA / "tokenizer.model"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""


def added(number: int, content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    """An entry of a tokenizer.json's ``added_tokens``."""
    base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, "special": special, **base, **flags}


def byte_level_json(specials: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json: 256 bytes, a few merges, and ChatML's special tokens (256 to 258)."""
    from tokenizers import pre_tokenizers

    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [["h", "i"], ["Ġ", "t"], ["Ġt", "h"], ["u", "s"], ["e", "r"], ["us", "er"], ["Ċ", "Ċ"]]
    if specials is None:
        specials = [added(256 + n, text) for n, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))]
    vocab |= {token["content"]: token["id"] for token in specials}
    first = len(vocab)
    vocab |= {left + right: first + n for n, (left, right) in enumerate(merges)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": None, "fuse_unk": False},
    }


def write_folder(folder: Path, **files: object) -> Path:
    """Write files named by keyword (``tokenizer_config`` is tokenizer_config.json) into a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name == "chat_template":
            (folder / "chat_template.jinja").write_text(str(content), encoding="utf-8")
        elif isinstance(content, bytes):
            (folder / f"{name}.model").write_bytes(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def byte_level_folder(folder: Path) -> Path:
    """The byte-level tokenizer as files that transformers, and so mlx-lm, load."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    return write_folder(folder, tokenizer=byte_level_json(), tokenizer_config=config, config={"model_type": "openelm"})
