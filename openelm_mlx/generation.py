"""Generating text: prefill in chunks, then one token a step, the next dispatched before the last is read."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from openelm_mlx.cache import make_cache
from openelm_mlx.errors import OpenELMError
from openelm_mlx.sampling import Sampler
from openelm_mlx.settings import DEFAULT_MAX_TOKENS, Sampling, whole_number
from openelm_mlx.stopping import StopStrings

if TYPE_CHECKING:
    from openelm_mlx.tokenizer import Tokenizer

PREFILL_STEP = 512
"""Prompt tokens per forward pass: large enough for full matrix products, small enough for a small memory peak."""

Progress = Callable[[int, int], None]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class GenerationResponse:
    """One piece of generated text. The fields up to `finish_reason` are those of mlx-lm's class of this name."""

    text: str
    """The text that became complete with this token; often empty, for example inside a multi-byte character."""
    token: int | None
    """The token's id; None if none was generated."""
    logprobs: mx.array | None
    """Log-probabilities the token was chosen from, ``(V,)``."""
    from_draft: bool
    """Whether a draft model proposed the token."""
    prompt_tokens: int
    """Tokens of the prompt."""
    prompt_tps: float
    """Prompt tokens a second, over the time to the first token."""
    generation_tokens: int
    """Tokens generated so far; an end-of-sequence token does not count."""
    generation_tps: float
    """Tokens a second after the first one; 0 before there is a second."""
    peak_memory: float
    """Most memory MLX has held, in GB (1e9 bytes)."""
    finish_reason: str | None = None
    """``stop`` (end of sequence or stop string) or ``length`` in the last response, None before."""
    time_to_first_token: float = 0.0
    """Seconds from the call to the first token."""
    window_full: bool = False
    """Whether generation ended because the model's window is full."""

    @property
    def logprob(self) -> float | None:
        """Log-probability of the token."""
        return None if self.logprobs is None or self.token is None else float(self.logprobs[self.token])


def generate_tokens(
    model: Any,
    ids: Sequence[int],
    max_tokens: int = DEFAULT_MAX_TOKENS,
    *,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    top_p: float = Sampling.top_p,
    min_p: float = Sampling.min_p,
    repetition_penalty: float = Sampling.repetition_penalty,
    repetition_context_size: int = Sampling.repetition_context_size,
    seed: int | None = None,
    eos_token_ids: Collection[int] | None = None,
    cache: Sequence[Any] | None = None,
    prefill_step: int = PREFILL_STEP,
) -> Iterator[int]:
    """Generate ids without a tokenizer.

    Args:
        model: the model.
        ids: the prompt (integers of any kind, or a one-dimensional array); not part of the output.
        max_tokens: most ids to generate; fewer when an end-of-sequence id comes or the window is full.
        temperature, top_k, top_p, min_p, repetition_penalty, repetition_context_size, seed: see
            :class:`openelm_mlx.settings.Sampling`.
        eos_token_ids: ids that end generation, and are not yielded. None: those of config.json
            and generation_config.json; empty: never.
        cache: caches to continue from and extend, one a layer; `ids` follow what they hold. Afterwards, or when the
            iterator is left early, they hold old, prompt and generated ids (an end-of-sequence id included).
        prefill_step: prompt tokens per forward pass.

    Raises:
        OpenELMError: the prompt is empty, has ids outside the vocabulary, or is longer than the window, or an option
            is out of its range. Raised when the first id is asked for.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        repetition_context_size=repetition_context_size,
        seed=seed,
    )
    eos = set(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
    caches = make_cache(model) if cache is None else cache
    prompt = as_ids(ids)
    limit = min(whole_number("max_tokens", max_tokens, 0), room_in_window(model, prompt, caches))
    for token, _ in _steps(model, prompt, limit, sampling, caches, prefill_step, feed_last=cache is not None):
        if token in eos:
            return
        yield token


def stream_generate(
    model: Any,
    tokenizer: Tokenizer,
    prompt: Prompt,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    *,
    temperature: float = Sampling.temperature,
    top_k: int = Sampling.top_k,
    top_p: float = Sampling.top_p,
    min_p: float = Sampling.min_p,
    repetition_penalty: float = Sampling.repetition_penalty,
    repetition_context_size: int = Sampling.repetition_context_size,
    seed: int | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    cache: Sequence[Any] | None = None,
    prefill_step: int = PREFILL_STEP,
    prompt_progress_callback: Progress | None = None,
) -> Iterator[GenerationResponse]:
    """Generate text piece by piece; the pieces' `text`, joined, is the whole.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        prompt: raw text, ids, or a list of chat messages, which goes through the tokenizer's chat template.
        max_tokens: most tokens to generate.
        temperature, top_k, top_p, min_p, repetition_penalty, repetition_context_size, seed: see
            :class:`openelm_mlx.settings.Sampling`.
        stop: strings that end the text before them, however they are split over tokens.
        ignore_eos: go on after end-of-sequence tokens, as benchmarks do.
        cache: caches to continue from and extend, one a layer; see :func:`generate_tokens`.
        prefill_step: prompt tokens per forward pass.
        prompt_progress_callback: called with the prompt tokens read so far, and all of them, after each pass
            (mlx-lm's name for it).

    Yields:
        One :class:`GenerationResponse` a token; the last one has a finish reason.

    Raises:
        OpenELMError: there is no tokenizer or no chat template, the prompt is empty or longer than the window, or an
            option is out of its range.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        repetition_context_size=repetition_context_size,
        seed=seed,
    )
    ids, chat = encode_prompt(tokenizer, prompt)
    caches = make_cache(model) if cache is None else cache
    room = room_in_window(model, ids, caches)
    limit = min(whole_number("max_tokens", max_tokens, 0), room)
    eos = frozenset() if ignore_eos else frozenset(tokenizer.eos_token_ids) | set(model.config.eos_token_ids)
    text, stops = tokenizer.stream(ids, strip_leading_space=chat), StopStrings(stop)
    clock = _Clock(len(ids))
    if limit <= 0:
        yield clock.response("", None, None, "length", window_full=room <= 0)
        return
    steps = _steps(
        model,
        ids,
        limit,
        sampling,
        caches,
        prefill_step,
        feed_last=cache is not None,
        progress=prompt_progress_callback,
    )
    for token, logprobs in steps:
        ended = token in eos
        clock.tick(counts=not ended)
        piece, stopped = stops.feed("" if ended else text.add(token))
        last = clock.generated == limit
        if ended or stopped or last:
            if not stopped:
                rest, stopped = stops.feed(text.finish())
                piece += rest + stops.flush()
            full = last and not stopped and limit == room
            reason = "stop" if ended or stopped else "length"
            yield clock.response(piece, token, logprobs, reason, window_full=full)
            return
        yield clock.response(piece, token, logprobs)


def generate(
    model: Any, tokenizer: Tokenizer, prompt: Prompt, max_tokens: int = DEFAULT_MAX_TOKENS, **options: Any
) -> str:
    """The whole text that :func:`stream_generate` yields; takes the same options."""
    return "".join(r.text for r in stream_generate(model, tokenizer, prompt, max_tokens, **options))


def encode_prompt(tokenizer: Tokenizer | None, prompt: Prompt) -> tuple[list[int], bool]:
    """The ids of a prompt, and whether it is a chat."""
    if tokenizer is None:
        raise OpenELMError(
            "the model folder has no tokenizer, so text cannot be read or written; convert it again with --tokenizer, "
            "or use generate_tokens with ids"
        )
    if isinstance(prompt, str):
        return tokenizer.encode(prompt), False
    if isinstance(prompt, Mapping):
        raise OpenELMError("the prompt is one message; a chat is a list of messages")
    if isinstance(prompt, (bytes, bytearray)):
        raise OpenELMError("the prompt is bytes; decode them to text first")
    if not isinstance(prompt, Iterable):
        raise OpenELMError(f"a prompt is text, a list of messages, or token ids, not {prompt!r}")
    items: Any = prompt if hasattr(prompt, "tolist") else list(prompt)  # an iterator can be read only once
    messages = [item for item in items if isinstance(item, Mapping)]
    if messages and len(messages) == len(items):
        return tokenizer.encode_chat(messages), True
    return as_ids(items), False


def as_ids(prompt: Iterable[Any]) -> list[int]:
    """Token ids as plain integers, from integers of any kind or a one-dimensional array of them.

    Raises:
        OpenELMError: an item is something else; the message shows it.
    """
    items: list[Any] = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    for item in items:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise OpenELMError(f"a prompt is text, a list of messages, or token ids, which are integers, not {item!r}")
    return [operator.index(item) for item in items]


def room_in_window(model: Any, ids: Sequence[int], cache: Sequence[Any]) -> int:
    """How many tokens can follow `ids` (and what the caches hold) in the model's window.

    Raises:
        OpenELMError: the prompt is empty, has ids outside the vocabulary, or does not fit.
    """
    window, vocab = model.config.max_context_length, model.config.vocab_size
    if len(cache) != len(model.layers):
        raise OpenELMError(f"there are {len(cache)} caches for a model of {len(model.layers)} layers")
    if not ids:
        raise OpenELMError("the prompt is empty: there is no token to start from")
    for token in ids:
        if not 0 <= token < vocab:
            raise OpenELMError(f"the prompt has the id {token}; the model's vocabulary has ids 0 to {vocab - 1}")
    used = int(cache[0].offset)
    if used + len(ids) > window:
        held = f" and {used} cached ones" if used else ""
        raise OpenELMError(
            f"the prompt has {len(ids)} tokens{held}; the model's window is {window}: shorten the prompt"
        )
    return window - used - len(ids)


def _steps(
    model: Any,
    ids: list[int],
    limit: int,
    sampling: Sampling,
    cache: Sequence[Any],
    prefill_step: int,
    *,
    feed_last: bool,
    progress: Progress | None = None,
) -> Iterator[tuple[int, mx.array]]:
    """Yield (token, log-probabilities ``(V,)``), `limit` of them; `feed_last` puts the last one into the cache too."""
    step = whole_number("prefill_step", prefill_step, 1)
    if limit <= 0:
        return
    choose = Sampler(sampling, ids)
    token, logprobs = choose(_prefill(model, mx.array(ids)[None], cache, step, progress))
    mx.async_eval(token)
    for n in range(limit):
        last = n + 1 == limit
        if not last:  # the device works on the next token while this one is being read and printed
            following = choose(model(token[None], cache=cache)[:, -1])
            mx.async_eval(following[0])
        elif feed_last:
            model(token[None], cache=cache)
            mx.async_eval([c.state for c in cache])
        value = int(token)
        if progress and n == 0:
            progress(len(ids), len(ids))
        yield value, logprobs[0]
        if not last:
            token, logprobs = following


def _prefill(model: Any, ids: mx.array, cache: Sequence[Any], step: int, progress: Progress | None) -> mx.array:
    """Feed ``(1, L)`` ids in chunks; logits of the last position, ``(1, V)``."""
    length = ids.shape[1]
    rest = (length - 1) // step * step
    for start in range(0, rest, step):
        model(ids[:, start : start + step], cache=cache, logits_to_keep=1)
        mx.eval([c.state for c in cache])  # the caches alone: the logits of these chunks are never computed
        if progress:
            progress(start + step, length)
    return model(ids[:, rest:], cache=cache, logits_to_keep=1)[:, -1]


class _Clock:
    """Counts and speeds of one generation."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.generated = 0
        self._steps = 0
        self._start = time.perf_counter()
        self._first = self._last = 0.0

    def tick(self, *, counts: bool) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._steps += 1
        self.generated += counts

    def response(
        self,
        text: str,
        token: int | None,
        logprobs: mx.array | None,
        reason: str | None = None,
        *,
        window_full: bool = False,
    ) -> GenerationResponse:
        to_first = max(self._first - self._start, 0.0)
        after_first = self._last - self._first
        return GenerationResponse(
            text=text,
            token=token,
            logprobs=logprobs,
            from_draft=False,
            prompt_tokens=self.prompt_tokens,
            prompt_tps=self.prompt_tokens / to_first if to_first else 0.0,
            generation_tokens=self.generated,
            generation_tps=(self._steps - 1) / after_first if after_first else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            time_to_first_token=to_first,
            window_full=window_full,
        )
