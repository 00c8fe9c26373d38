"""Generation with models whose next token is known: ids, ends, windows, text, counts and pipelining."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openelm_mlx.cache import make_cache
from openelm_mlx.errors import OpenELMError
from openelm_mlx.generation import GenerationResponse, as_ids, encode_prompt, generate, generate_tokens, stream_generate
from openelm_mlx.model import OpenELM
from tests.support.models import ByteTokenizer, FakeModel, golden_model, greedy_reference, mixing, script

VOCAB = 260
EOS = ByteTokenizer.EOS


def fake(**options: Any) -> FakeModel:
    return FakeModel(mixing(VOCAB), vocab_size=VOCAB, **options)


def says(text: str | bytes, *more: int, prompt: int = 2, **options: Any) -> FakeModel:
    """A model that writes a text (and further ids) after a prompt of `prompt` ids."""
    raw = text.encode() if isinstance(text, str) else text
    return FakeModel(script(*raw, *more, prompt=prompt), **options)


def stream(model: FakeModel, prompt: Any = "x", max_tokens: int = 64, **options: Any) -> list[GenerationResponse]:
    return list(stream_generate(model, ByteTokenizer(), prompt, max_tokens, **options))  # type: ignore[arg-type]


def text_of(responses: Sequence[GenerationResponse]) -> str:
    return "".join(r.text for r in responses)


@pytest.fixture(scope="module")
def real() -> OpenELM:
    return golden_model("tiny-tied")


class TestIds:
    @pytest.mark.parametrize("count", [1, 2, 3, 20])
    def test_they_follow_the_model(self, count: int) -> None:
        model, prompt = fake(), [5, 6, 7]
        assert list(generate_tokens(model, prompt, count)) == model.continuation(prompt, count)

    def test_as_a_real_model_without_a_cache(self, real: OpenELM) -> None:
        prompt = [3, 1, 4, 1, 5, 9, 2, 6]
        assert list(generate_tokens(real, prompt, 12, eos_token_ids=())) == greedy_reference(real, prompt, 12)

    def test_they_are_plain_integers(self) -> None:
        assert {type(t) for t in generate_tokens(fake(), [1], 3)} == {int}

    @pytest.mark.parametrize(
        "prompt",
        [
            (5, 6, 7),
            range(5, 8),
            np.array([5, 6, 7]),
            [np.int32(5), np.int64(6), 7],
            mx.array([5, 6, 7]),
        ],
    )
    def test_kinds_of_prompt(self, prompt: Any) -> None:
        model = fake()
        expected = model.continuation([5, 6, 7], 4)
        assert list(generate_tokens(model, prompt, 4)) == expected
        assert [r.token for r in stream(fake(), prompt, 4)] == expected

    @pytest.mark.parametrize(
        "prompt",
        [[True], [1.0], ["1"], [[1, 2]], np.array([[1, 2]]), np.array([1.0]), mx.array([[1]]), [None], [1, {}]],
    )
    def test_what_is_no_id(self, prompt: Any) -> None:
        with pytest.raises(OpenELMError, match="token ids, which are integers, not"):
            list(generate_tokens(fake(), prompt, 4))
        with pytest.raises(OpenELMError, match="token ids, which are integers, not"):
            stream(fake(), prompt)

    @pytest.mark.parametrize("prompt", [[], (), np.array([], int), mx.array([], mx.int32)])
    def test_an_empty_prompt(self, prompt: Any) -> None:
        for call in (lambda: list(generate_tokens(fake(), prompt, 4)), lambda: stream(fake(), prompt)):
            with pytest.raises(OpenELMError, match="the prompt is empty"):
                call()

    @pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
    def test_ids_outside_the_vocabulary(self, token: int) -> None:
        with pytest.raises(OpenELMError, match=f"has the id {token}; the model's vocabulary has ids 0 to 259"):
            list(generate_tokens(fake(), [1, token], 4))

    def test_a_seed_repeats_and_options_reach_the_sampler(self, real: OpenELM) -> None:
        def run(**options: Any) -> list[int]:
            return list(generate_tokens(real, [1, 2, 3], 10, eos_token_ids=(), **options))

        hot = run(temperature=2.0, seed=1)
        assert hot == run(temperature=2.0, seed=1)
        assert hot != run(temperature=2.0, seed=2)
        greedy = run()
        assert hot != greedy
        for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            assert run(temperature=2.0, seed=1, **narrow) == greedy
        assert run(repetition_penalty=1000.0) != greedy
        assert len(set(run(repetition_penalty=1000.0))) == 10


class TestCount:
    def test_zero(self) -> None:
        model = fake()
        assert list(generate_tokens(model, [1], 0)) == []
        (response,) = stream(model, "x", 0)
        assert (response.text, response.token, response.finish_reason, response.window_full) == (
            "",
            None,
            "length",
            False,
        )
        assert response.logprob is None
        assert model.calls == []

    @pytest.mark.parametrize("count", [-1, 2.5, True, "3", None])
    def test_what_is_no_count(self, count: Any) -> None:
        for call in (lambda: list(generate_tokens(fake(), [1], count)), lambda: stream(fake(), "x", count)):
            with pytest.raises(OpenELMError, match="max_tokens must be a whole number, 0 or more"):
                call()

    @pytest.mark.parametrize("step", [0, -3, 1.5])
    def test_what_is_no_prefill_step(self, step: Any) -> None:
        for call in (
            lambda: list(generate_tokens(fake(), [1], 3, prefill_step=step)),
            lambda: stream(fake(), "x", 3, prefill_step=step),
        ):
            with pytest.raises(OpenELMError, match="prefill_step must be a whole number, 1 or more"):
                call()


class TestEos:
    def test_ends_and_is_not_yielded(self) -> None:
        model = FakeModel(script(5, 6, 9, 7), eos=(9,))
        assert list(generate_tokens(model, [1], 10)) == [5, 6]
        assert list(generate_tokens(model, [1], 10, eos_token_ids=[6])) == [5]
        assert list(generate_tokens(model, [1], 4, eos_token_ids=())) == [5, 6, 9, 7]

    def test_at_once(self) -> None:
        model = FakeModel(script(9), eos=(9,))
        assert list(generate_tokens(model, [1], 10)) == []
        (response,) = stream(FakeModel(script(EOS, prompt=2)))
        assert (response.text, response.token, response.generation_tokens, response.finish_reason) == (
            "",
            EOS,
            0,
            "stop",
        )

    @pytest.mark.parametrize("token", [EOS, 200, 65])
    def test_the_union_of_tokenizer_and_config(self, token: int) -> None:
        tokenizer, model = ByteTokenizer(eos=(EOS, 200)), says("ab", token, *b"cd", eos=(65,))
        responses = list(stream_generate(model, tokenizer, "x", 10))  # type: ignore[arg-type]
        assert text_of(responses) == "ab"
        assert (responses[-1].finish_reason, responses[-1].generation_tokens) == ("stop", 2)

    def test_ignored(self) -> None:
        responses = stream(says("ab", EOS, *b"cd", eos=(EOS,)), max_tokens=5, ignore_eos=True)
        assert text_of(responses) == "abcd"
        assert (responses[-1].finish_reason, responses[-1].generation_tokens) == ("length", 5)

    def test_at_the_last_token_it_is_a_stop(self) -> None:
        responses = stream(says("ab", EOS), max_tokens=3)
        assert (responses[-1].finish_reason, responses[-1].window_full) == ("stop", False)


class TestWindow:
    def test_a_longer_prompt_is_an_error_with_both_numbers(self) -> None:
        for call in (
            lambda: list(generate_tokens(fake(window=8), [1] * 9, 4)),
            lambda: stream(fake(window=8), [1] * 9),
        ):
            with pytest.raises(OpenELMError, match="the prompt has 9 tokens; the model's window is 8"):
                call()

    def test_a_prompt_of_exactly_the_window(self) -> None:
        model = fake(window=8)
        assert list(generate_tokens(model, [1] * 8, 4)) == []
        (response,) = stream(model, [1] * 8)
        assert (response.finish_reason, response.window_full, response.token) == ("length", True, None)

    def test_generation_stops_there(self) -> None:
        model = fake(window=8)
        assert list(generate_tokens(model, [1] * 5, 100)) == model.continuation([1] * 5, 3)
        responses = stream(fake(window=8), [1] * 5, 100)
        assert [r.window_full for r in responses] == [False, False, True]
        assert responses[-1].finish_reason == "length"

    def test_a_count_that_ends_before_it(self) -> None:
        responses = stream(fake(window=8), [1] * 5, 2)
        assert (responses[-1].finish_reason, responses[-1].window_full) == ("length", False)

    def test_a_stop_string_at_its_edge_is_a_stop(self) -> None:
        responses = stream(says("abc", window=5), max_tokens=9, stop=["bc"])
        assert (text_of(responses), responses[-1].finish_reason, responses[-1].window_full) == ("a", "stop", False)

    def test_nothing_is_computed_past_it(self) -> None:
        model, cache = fake(window=8), make_cache(fake())
        assert len(list(generate_tokens(model, [1] * 5, 100, cache=cache))) == 3
        assert cache[0].offset == 8
        assert sum(length for length, _ in model.calls) == 8
        model = fake(window=8)
        assert len(list(generate_tokens(model, [1] * 5, 100))) == 3
        assert sum(length for length, _ in model.calls) == 7  # nobody's cache: nothing follows the last token

    def test_cached_tokens_count(self) -> None:
        model, cache = fake(window=8), make_cache(fake())
        list(generate_tokens(model, [1] * 4, 1, cache=cache))
        assert len(list(generate_tokens(model, [1] * 2, 100, cache=cache))) == 1
        with pytest.raises(OpenELMError, match="the prompt has 2 tokens and 8 cached ones; the model's window is 8"):
            list(generate_tokens(model, [1] * 2, 100, cache=cache))


class TestPipelining:
    def test_the_model_is_one_step_ahead_and_no_more(self) -> None:
        model = fake()
        ahead = []
        for n, _ in enumerate(generate_tokens(model, [1, 2, 3], 4), 1):
            ahead.append(len(model.calls) - n)
        assert ahead == [1, 1, 1, 0]

    def test_one_token_takes_one_call(self) -> None:
        model = fake()
        assert len(list(generate_tokens(model, [1, 2, 3], 1))) == 1
        assert len(model.calls) == 1


class TestPrefill:
    @pytest.mark.parametrize("step", [1, 2, 3, 5, 8, 512])
    @pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 9, 10, 15, 16, 17])
    def test_chunks_cover_the_prompt_once(self, length: int, step: int) -> None:
        model, prompt = fake(), [(7 * n) % 50 for n in range(length)]
        assert list(generate_tokens(model, prompt, 2, prefill_step=step)) == model.continuation(prompt, 2)
        chunks = model.calls[:-1]
        assert sum(n for n, _ in chunks) == length
        assert len(chunks) == math.ceil(length / step)
        assert all(0 < n <= step for n, _ in chunks)

    def test_the_head_is_asked_for_one_position(self, real: OpenELM, monkeypatch: pytest.MonkeyPatch) -> None:
        shapes: list[int] = []
        head = OpenELM.head

        def seen(self: OpenELM, x: mx.array) -> mx.array:
            shapes.append(x.shape[1])
            return head(self, x)

        monkeypatch.setattr(OpenELM, "head", seen)
        list(generate_tokens(real, list(range(20)), 3, prefill_step=8, eos_token_ids=()))
        assert shapes == [1] * 5

    def test_heads_of_earlier_chunks_are_never_computed(self, real: OpenELM, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their graph is built and dropped: a head that cannot be evaluated goes unnoticed."""
        calls, head = 0, OpenELM.head

        def counted(self: OpenELM, x: mx.array) -> mx.array:
            nonlocal calls
            calls += 1
            return head(self, x) if calls > 2 else mx.zeros((1, 1, 2**30)) @ mx.zeros((2**30, 2**20))  # petabytes

        monkeypatch.setattr(OpenELM, "head", counted)
        tokens = list(generate_tokens(real, list(range(20)), 3, prefill_step=8, eos_token_ids=()))
        monkeypatch.undo()
        assert tokens == greedy_reference(real, list(range(20)), 3)

    @pytest.mark.parametrize("step", [1, 7, 64])
    def test_chunks_equal_one_pass_on_a_real_model(self, real: OpenELM, step: int) -> None:
        prompt = [(n * n) % 500 for n in range(21)]
        whole = [r.logprobs for r in self._responses(real, prompt, 512)]
        parts = [r.logprobs for r in self._responses(real, prompt, step)]
        for a, b in zip(whole, parts, strict=True):
            assert a is not None
            assert b is not None
            assert mx.abs(a - b).max() < 2e-4

    @staticmethod
    def _responses(model: OpenELM, prompt: list[int], step: int) -> list[GenerationResponse]:
        tokenizer: Any = ByteTokenizer()
        return list(stream_generate(model, tokenizer, prompt, 3, prefill_step=step, ignore_eos=True))


def test_the_prompts_progress_is_told() -> None:
    tokenizer: Any = ByteTokenizer()
    told: list[tuple[int, int]] = []
    model = fake()
    for step, expected in {4: [(4, 10), (8, 10), (10, 10)], 5: [(5, 10), (10, 10)], 64: [(10, 10)]}.items():
        told.clear()
        list(
            stream_generate(
                model, tokenizer, [1] * 10, 1, prefill_step=step, prompt_progress_callback=lambda *x: told.append(x)
            )
        )
        assert told == expected


class TestCache:
    def test_an_existing_one_is_continued(self) -> None:
        model, cache = fake(), make_cache(fake())
        first = list(generate_tokens(model, [1, 2, 3], 4, cache=cache))
        held = [1, 2, 3, *first]
        assert cache[0].offset == len(held)
        assert list(generate_tokens(model, [9, 8], 3, cache=cache)) == model.continuation([*held, 9, 8], 3)

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_left_early_it_holds_a_beginning_of_what_was_said(self, count: int) -> None:
        model, cache = fake(), make_cache(fake())
        tokens = generate_tokens(model, [1, 2, 3], 50, cache=cache)
        said = [next(tokens) for _ in range(count)]
        tokens.close()  # type: ignore[attr-defined]
        held = [1, 2, 3, *said]
        assert cache[0].offset == len(held)
        assert list(generate_tokens(model, [7], 3, cache=cache)) == model.continuation([*held, 7], 3)

    def test_after_an_end_of_sequence_it_holds_it(self) -> None:
        model, cache = FakeModel(script(5, 6, 9, 7), eos=(9,)), make_cache(fake())
        list(generate_tokens(model, [1], 10, cache=cache))
        keys = cache[0].keys
        assert keys is not None
        assert keys[0, 0, : cache[0].offset, 0].tolist() == [1, 5, 6, 9]

    def test_a_real_model_continues_as_if_it_were_one_prompt(self, real: OpenELM) -> None:
        cache = make_cache(real)
        first = list(generate_tokens(real, [1, 2, 3, 4], 5, cache=cache, eos_token_ids=()))
        held = [1, 2, 3, 4, *first]
        second = list(generate_tokens(real, [10, 11], 5, cache=cache, eos_token_ids=()))
        assert second == greedy_reference(real, [*held, 10, 11], 5)


class TestText:
    @pytest.mark.parametrize(
        ("stop", "expected"),
        [
            (["lo w"], "hel"),
            ("lo w", "hel"),
            (["xyz", "wor"], "hello "),
            (["h"], ""),
            (["none"], "hello world"),
            (["d"], "hello worl"),
        ],
    )
    def test_stop_strings_over_tokens(self, stop: Any, expected: str) -> None:
        responses = stream(says("hello world", EOS), stop=stop)
        assert text_of(responses) == expected
        assert responses[-1].finish_reason == "stop"
        assert all("lo w" not in text_of(responses[:n]) for n in range(len(responses)) if stop == ["lo w"])

    def test_nothing_is_generated_after_one(self) -> None:
        responses = stream(says("abcdef"), stop=["c"])
        assert [r.token for r in responses] == list(b"abc")

    def test_a_beginning_of_a_stop_string_is_let_out_at_the_end(self) -> None:
        responses = stream(says("abcd"), max_tokens=3, stop=["cx"])
        assert text_of(responses) == "abc"
        assert responses[-1].finish_reason == "length"
        assert text_of(stream(says("abc", EOS), stop=["cx"])) == "abc"

    def test_a_stop_string_completed_by_the_last_flush(self) -> None:
        responses = stream(says(b"ab\xe2", EOS), stop=["\ufffd"])
        assert (text_of(responses), responses[-1].finish_reason) == ("ab", "stop")

    @settings(max_examples=100)
    @given(st.lists(st.integers(0, 255), min_size=1, max_size=30))
    def test_pieces_make_the_whole(self, tokens: list[int]) -> None:
        responses = stream(says(bytes(tokens)), max_tokens=len(tokens), ignore_eos=True)
        assert text_of(responses) == bytes(tokens).decode("utf-8", "replace")
        assert [r.token for r in responses] == tokens

    def test_a_character_over_several_tokens_comes_whole(self) -> None:
        responses = stream(says("é🙂", EOS))
        assert [r.text for r in responses] == ["", "é", "", "", "", "🙂", ""]

    def test_a_character_begun_by_the_prompt(self) -> None:
        responses = stream(says(b"\x82\xac!", prompt=1), [0xE2], 3)
        assert text_of(responses) == "€!"

    def test_a_leading_space_stays_in_raw_text_and_goes_in_chat(self) -> None:
        chat = [{"role": "user", "content": "x"}]
        length = len(ByteTokenizer().encode_chat(chat))
        assert text_of(stream(says("  hi", EOS))) == "  hi"
        assert text_of(stream(says("  hi", EOS, prompt=length), chat)) == " hi"
        assert text_of(stream(says("  hi", EOS, prompt=3), [1, 2, 3])) == "  hi"

    def test_generate_is_the_stream_joined(self) -> None:
        tokenizer: Any = ByteTokenizer()
        options: dict[str, Any] = {"stop": ["wor"], "temperature": 0.0}
        assert generate(says("hello world"), tokenizer, "x", 20, **options) == "hello "


class TestResponses:
    def test_counts_and_reasons(self) -> None:
        responses = stream(says("abcd", EOS), max_tokens=10)
        assert [r.generation_tokens for r in responses] == [1, 2, 3, 4, 4]
        assert [r.finish_reason for r in responses] == [None] * 4 + ["stop"]
        assert {r.prompt_tokens for r in responses} == {2}
        assert not any(r.from_draft or r.window_full for r in responses)

    def test_speeds(self) -> None:
        responses = stream(says("abcd", EOS), max_tokens=4)
        for r in responses:
            figures = (r.prompt_tps, r.generation_tps, r.peak_memory, r.time_to_first_token)
            assert all(math.isfinite(x) and x >= 0 for x in figures)
            assert r.prompt_tps == pytest.approx(2 / r.time_to_first_token)
        assert responses[0].generation_tps == 0
        assert all(r.generation_tps > 0 for r in responses[1:])
        assert len({r.time_to_first_token for r in responses}) == 1
        assert responses[0].time_to_first_token > 0

    def test_log_probability(self) -> None:
        (response,) = stream(says("a"), max_tokens=1)
        expected = 5 - math.log(math.exp(5) + 259)  # one logit of 5, the others 0
        assert response.logprob == pytest.approx(expected, abs=1e-5)
        assert response.logprobs is not None
        assert response.logprobs.shape == (260,)
        assert float(mx.exp(response.logprobs).sum()) == pytest.approx(1, abs=1e-5)

    def test_log_probability_of_a_real_model(self, real: OpenELM) -> None:
        tokenizer: Any = ByteTokenizer()
        prompt = [1, 2, 3]
        (response,) = stream_generate(real, tokenizer, prompt, 1)
        logits = np.asarray(real(mx.array([prompt]))[0, -1]).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert response.logprobs is not None
        np.testing.assert_allclose(np.asarray(response.logprobs), logprobs, atol=1e-4)
        assert response.token == logprobs.argmax()
        assert response.logprob == pytest.approx(logprobs.max(), abs=1e-4)


class TestPrompts:
    def test_text_is_encoded_with_its_beginning(self) -> None:
        tokenizer: Any = ByteTokenizer()
        assert encode_prompt(tokenizer, "ab") == ([256, 97, 98], False)

    def test_messages_are_a_chat(self) -> None:
        tokenizer: Any = ByteTokenizer()
        ids, chat = encode_prompt(tokenizer, [{"role": "user", "content": "a"}])
        assert chat
        assert bytes(ids[1:]) == b"user:a"

    def test_one_message_alone(self) -> None:
        tokenizer: Any = ByteTokenizer()
        prompt: Any = {"role": "user", "content": "a"}
        with pytest.raises(OpenELMError, match="a chat is a list of messages"):
            encode_prompt(tokenizer, prompt)

    def test_messages_mixed_with_ids(self) -> None:
        with pytest.raises(OpenELMError, match=r"integers, not \{'role'"):
            stream(fake(), [1, {"role": "user", "content": "a"}])

    def test_no_tokenizer(self) -> None:
        none: Any = None
        with pytest.raises(OpenELMError, match="the model folder has no tokenizer"):
            list(stream_generate(fake(), none, "x"))

    @pytest.mark.parametrize("option", [{"temperature": math.nan}, {"top_p": 0.0}, {"seed": -1}, {"stop": [""]}])
    def test_options_out_of_range(self, option: dict[str, Any]) -> None:
        with pytest.raises(OpenELMError):
            stream(fake(), "x", **option)


def test_ids_of_any_integers() -> None:
    found = as_ids([np.uint8(3), 4, np.int64(5)])
    assert found == [3, 4, 5]
    assert {type(i) for i in found} == {int}


def test_random_token_sequences_through_a_long_prompt() -> None:
    """Prompts, chunks, counts and caches drawn at random, against the rule itself."""
    rng = random.Random(0)
    for _ in range(30):
        model, cache = fake(window=200), make_cache(fake())
        history: list[int] = []
        for _ in range(rng.randint(1, 3)):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            count = rng.randint(1, 6)
            out = list(generate_tokens(model, prompt, count, cache=cache, prefill_step=rng.randint(1, 6)))
            assert out == model.continuation([*history, *prompt], count)
            history = [*history, *prompt, *out]


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", {"role": "user", "content": "x"}])
def test_what_is_no_prompt_is_refused_in_words(prompt: Any) -> None:
    tokenizer: Any = ByteTokenizer()
    with pytest.raises(OpenELMError, match="prompt"):
        list(stream_generate(fake(), tokenizer, prompt, 1))


def test_an_iterator_of_ids_is_a_prompt() -> None:
    tokenizer: Any = ByteTokenizer()
    responses = list(stream_generate(fake(), tokenizer, iter([1, 2, 3]), 1))  # type: ignore[arg-type]
    assert responses[-1].prompt_tokens == 3


def test_caches_of_another_model_are_refused() -> None:
    with pytest.raises(OpenELMError, match="caches for a model of"):
        list(generate_tokens(fake(), [1], 1, cache=[]))
