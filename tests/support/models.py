"""Small models for tests: real ones, made by the real converter from the golden weights, and a fake one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.convert.job import convert
from openelm_mlx.detokenizer import Detokenizer
from openelm_mlx.model import OpenELM
from tests.golden.checkpoints import BUNDLED, Checkpoint, weights_module

GLU_CASES = ("tiny-tied", "tiny-untied", "tiny-no-qk-norm")


def golden_config(case: str) -> OpenELMConfig:
    """The config of a golden case, from its scaling ranges."""
    module = weights_module(BUNDLED)
    return OpenELMConfig.from_dict({**module.COMMON, **module.CASES[case]})


def golden_model(case: str, seed: int = 0) -> OpenELM:
    """A golden case as a float32 model, filled without going through files."""
    model = OpenELM(golden_config(case))
    names = {"classifier.weight": "lm_head.weight"}
    tensors = Checkpoint(BUNDLED, case, seed).tensors
    model.load_weights([(names.get(n, f"transformer.{n}"), mx.array(make())) for n, (_, make) in tensors.items()])
    return model


def hf_folder(folder: Path, case: str = "tiny-tied") -> Path:
    """An unconverted checkpoint in Hugging Face's layout, float32."""
    return Checkpoint(BUNDLED, case, 0).write("hf", folder)


def converted_folder(
    folder: Path,
    precision: str = "fp32",
    *,
    case: str = "tiny-tied",
    group_size: int = 32,
    tokenizer: Path | str = "none",
) -> Path:
    """A model folder as the converter writes it."""
    source = hf_folder(folder.with_name(f"{folder.name}-source"), case)
    return convert(source, folder, precision=precision, group_size=group_size, tokenizer=str(tokenizer)).folder


def greedy_reference(model: OpenELM, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens by running the whole sequence anew each time: no cache, no generator."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(mx.array([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


class FakeConfig:
    """What generation asks of a config."""

    def __init__(self, vocab_size: int, window: int, eos: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.max_context_length = window
        self.eos_token_ids = eos


class FakeModel:
    """A model whose next token is a function of all ids so far; the ids travel through the cache as its keys.

    The next token's logit is 5, all others are 0. `calls` records the lengths and `logits_to_keep` of every call.
    """

    def __init__(
        self,
        following: Callable[[list[int]], int],
        *,
        vocab_size: int = 260,
        window: int = 64,
        eos: tuple[int, ...] = (),
    ) -> None:
        self.following = following
        self.config = FakeConfig(vocab_size, window, eos)
        self.layers = [object()]
        self.calls: list[tuple[int, int | None]] = []

    def __call__(self, ids: mx.array, cache: Sequence[Any], logits_to_keep: int | None = None) -> mx.array:
        self.calls.append((ids.shape[1], logits_to_keep))
        as_keys = ids.reshape(1, 1, -1, 1).astype(mx.float32)
        keys, _ = cache[0].update_and_fetch(as_keys, as_keys)
        history = [int(i) for i in keys.flatten().tolist()]
        kept = ids.shape[1] if logits_to_keep is None else min(logits_to_keep, ids.shape[1])
        logits = mx.zeros((1, kept, self.config.vocab_size))
        for row in range(kept):
            logits[0, row, self.following(history[: len(history) - kept + row + 1])] = 5
        return logits

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """What should follow."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(self.following(ids))
        return ids[len(prompt) :]


def mixing(vocab_size: int) -> Callable[[list[int]], int]:
    """A rule whose next token depends on the value and place of every id so far."""

    def following(ids: list[int]) -> int:
        return sum((place + 3) * (token + 1) for place, token in enumerate(ids)) % vocab_size

    return following


def script(*tokens: int, prompt: int = 1) -> Callable[[list[int]], int]:
    """A rule that says these tokens after a prompt of `prompt` ids, then 0."""

    def following(ids: list[int]) -> int:
        place = len(ids) - prompt
        return tokens[place] if 0 <= place < len(tokens) else 0

    return following


class ByteTokenizer:
    """Ids 0 to 255 are bytes; 256 begins a text and 257 ends it, and both are silent."""

    BOS, EOS = 256, 257

    def __init__(self, eos: Iterable[int] = (EOS,)) -> None:
        self.eos_token_ids = frozenset(eos)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def encode(self, text: str) -> list[int]:
        return [self.BOS, *text.encode()]

    def encode_chat(self, messages: Iterable[Any]) -> list[int]:
        return [self.BOS, *b"|".join(f"{m['role']}:{m['content']}".encode() for m in messages)]

    def stream(self, prompt_ids: Iterable[int] = (), *, strip_leading_space: bool = False) -> Detokenizer:
        return Detokenizer(self.token_bytes, prompt_ids, strip_leading_space=strip_leading_space)
