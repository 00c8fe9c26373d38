"""Sampling against distributions worked out by hand."""

from __future__ import annotations

import io
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from openelm_mlx.errors import OpenELMError
from openelm_mlx.sampling import Sampler, heat, keep_likely, log_softmax, penalize
from openelm_mlx.settings import Sampling


def logits_of(*probabilities: float) -> mx.array:
    return mx.log(mx.array([probabilities]))


def kept(probabilities: list[float], **how: Any) -> list[int]:
    """The ids that the filters leave."""
    left = keep_likely(logits_of(*probabilities), Sampling(**how))[0]
    return [n for n, value in enumerate(left.tolist()) if value != -math.inf]  # type: ignore[arg-type]


def draw(logits: mx.array, count: int, **how: Any) -> list[int]:
    sampler = Sampler(Sampling(**how))
    tokens = [sampler(logits)[0] for _ in range(count)]
    mx.eval(tokens)
    return [int(t) for t in tokens]


class TestFilters:
    def test_top_k(self) -> None:
        p = [0.1, 0.4, 0.2, 0.3]
        assert kept(p, top_k=1) == [1]
        assert kept(p, top_k=2) == [1, 3]
        assert kept(p, top_k=3) == [1, 2, 3]
        for all_of_them in (0, 4, 5, 10**6):
            assert kept(p, top_k=all_of_them) == [0, 1, 2, 3]

    def test_top_k_keeps_those_as_likely_as_the_last(self) -> None:
        assert kept([0.2, 0.4, 0.2, 0.2], top_k=2) == [0, 1, 2, 3]
        assert kept([0.3, 0.3, 0.3, 0.1], top_k=2) == [0, 1, 2]
        assert kept([0.4, 0.4, 0.1, 0.1], top_k=2) == [0, 1]

    def test_top_p_keeps_the_token_that_crosses(self) -> None:
        p = [0.125, 0.5, 0.125, 0.25]  # exact in binary
        assert kept(p, top_p=0.4) == [1]
        assert kept(p, top_p=0.5) == [1]  # reached, not crossed
        assert kept(p, top_p=0.51) == [1, 3]
        assert kept(p, top_p=0.75) == [1, 3]
        assert len(kept(p, top_p=0.8)) == 3
        assert kept(p, top_p=0.99) == kept(p, top_p=1.0) == [0, 1, 2, 3]

    @pytest.mark.parametrize("p", [1e-9, 1e-45, 1e-300])
    def test_a_tiny_top_p_leaves_the_likeliest(self, p: float) -> None:
        assert kept([0.3, 0.6, 0.1], top_p=p) == [1]

    def test_min_p(self) -> None:
        p = [0.5, 0.26, 0.13, 0.11]
        assert kept(p, min_p=0.0) == [0, 1, 2, 3]
        assert kept(p, min_p=0.25) == [0, 1, 2]
        assert kept(p, min_p=0.5) == [0, 1]
        assert kept(p, min_p=0.53) == [0]
        assert kept(p, min_p=1.0) == [0]
        assert kept([0.4, 0.4, 0.2], min_p=1.0) == [0, 1]
        assert kept(p, min_p=1e-300) == [0, 1, 2, 3]

    def test_order_is_top_k_then_top_p_then_min_p(self) -> None:
        p = [0.4, 0.3, 0.2, 0.1]
        # Of the three that top-k leaves, the first two have 7/9 of the mass: enough for 0.75, which 0.7 of all is not.
        assert kept(p, top_p=0.75) == [0, 1, 2]
        assert kept(p, top_k=3, top_p=0.75) == [0, 1]
        # min-p compares with the likeliest, which the other filters never remove.
        assert kept(p, top_k=3, top_p=0.8, min_p=0.6) == [0, 1]
        assert kept(p, top_k=3, top_p=0.99, min_p=0.4) == [0, 1, 2]

    def test_all_equal(self) -> None:
        p = [0.25] * 4
        assert kept(p, top_k=1) == kept(p, min_p=1.0) == [0, 1, 2, 3]
        assert len(kept(p, top_p=0.5)) == 2

    @settings(max_examples=100)
    @given(
        st.lists(st.integers(1, 40), min_size=1, max_size=30),
        st.integers(0, 35),
        st.sampled_from([0.1, 0.33, 0.5, 0.77, 0.9, 1.0]),
        st.sampled_from([0.0, 0.07, 0.33, 0.8]),
    )
    def test_against_a_plain_restatement(self, weights: list[int], k: int, p: float, m: float) -> None:
        left = sorted(range(len(weights)), key=lambda i: -weights[i])
        if 0 < k < len(left):
            left = [i for i in left if weights[i] >= weights[left[k - 1]]]
        shares = [weights[i] / sum(weights[j] for j in left) for i in left]
        before = [sum(shares[:n]) for n in range(len(left))]
        ratios = [weights[i] / weights[left[0]] for i in left]
        # The boundaries themselves are tested by hand, with numbers that are exact in binary.
        assume(all(abs(mass - p) > 1e-5 for mass in before) and all(abs(ratio - m) > 1e-5 for ratio in ratios))
        left = [i for i, mass, ratio in zip(left, before, ratios, strict=True) if (p == 1 or mass < p) and ratio > m]
        found = kept([w / sum(weights) for w in weights], top_k=k, top_p=p, min_p=m)
        # Ties are alike: which of them are kept is not said.
        assert sorted(weights[i] for i in found) == sorted(weights[i] for i in left)


class TestTemperature:
    @pytest.mark.parametrize(
        ("temperature", "filters"), [(1.0, {}), (0.5, {}), (2.0, {"top_k": 3}), (0.7, {"min_p": 0.3})]
    )
    def test_frequencies(self, temperature: float, filters: dict[str, Any]) -> None:
        p, n = [0.4, 0.1, 0.3, 0.2], 1500
        left = kept(p, **filters)
        powered = np.array([x ** (1 / temperature) if i in left else 0 for i, x in enumerate(p)])
        expected = powered / powered.sum() * n
        found = np.bincount(draw(logits_of(*p), n, temperature=temperature, seed=7, **filters), minlength=4)
        assert found[expected == 0].sum() == 0
        some = expected > 0
        chi_square = ((found - expected)[some] ** 2 / expected[some]).sum()
        assert chi_square < 16.3  # 0.1% of right samplers exceed this at three degrees of freedom

    def test_zero_is_greedy_and_takes_the_first_of_equals(self) -> None:
        assert draw(logits_of(0.2, 0.5, 0.3), 3) == [1] * 3
        assert draw(mx.zeros((1, 9)), 2) == [0, 0]

    @pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-41, 1e-300])
    def test_nearly_zero_is_nearly_greedy(self, temperature: float) -> None:
        logits = mx.array([[-3.0, 40.0, 39.0, -1e4]])
        assert draw(logits, 20, temperature=temperature, seed=0) == [1] * 20

    @pytest.mark.parametrize("temperature", [1e6, 1e38, 1e300])
    def test_very_hot_is_uniform_over_what_the_filters_leave(self, temperature: float) -> None:
        logits = mx.array([[5.0, 9.0, 1.0, 2.0]])
        found = np.bincount(draw(logits, 400, temperature=temperature, top_k=2, seed=0), minlength=4)
        assert found[2] == found[3] == 0
        assert 140 < found[0] < 260

    def test_heat_is_division(self) -> None:
        out = mx.softmax(heat(logits_of(0.5, 0.3, 0.2), 0.5), axis=-1)
        expected = np.array([0.25, 0.09, 0.04]) / 0.38
        np.testing.assert_allclose(np.asarray(out)[0], expected, rtol=1e-5)


class TestRepetition:
    def test_by_hand(self) -> None:
        logits = mx.array([[2.0, -2.0, 4.0, -4.0, 0.0]])
        out = penalize(logits, mx.array([0, 1, 4]), 2.0)
        assert out.tolist() == [[1.0, -4.0, 4.0, -4.0, 0.0]]
        assert logits.tolist() == [[2.0, -2.0, 4.0, -4.0, 0.0]]

    def test_a_token_that_occurs_often_counts_once(self) -> None:
        out = penalize(mx.array([[2.0, -2.0]]), mx.array([0, 1, 0, 1, 0]), 2.0)
        assert out.tolist() == [[1.0, -4.0]]

    def test_below_one_makes_likelier(self) -> None:
        assert penalize(mx.array([[2.0, -2.0]]), mx.array([0, 1]), 0.5).tolist() == [[4.0, -1.0]]

    def test_it_reaches_the_choice_and_the_log_probabilities(self) -> None:
        sampler = Sampler(Sampling(repetition_penalty=2.0), [1])
        token, logprobs = sampler(mx.array([[2.0, 3.0, 1.0]]))
        assert int(token) == 0
        penalized = np.array([2.0, 1.5, 1.0])
        np.testing.assert_allclose(np.asarray(logprobs)[0], penalized - np.log(np.exp(penalized).sum()), atol=1e-6)

    def test_generated_tokens_are_recent_too(self) -> None:
        sampler, logits = Sampler(Sampling(repetition_penalty=10.0)), mx.array([[3.0, 2.0, 1.0]])
        assert [int(sampler(logits)[0]) for _ in range(3)] == [0, 1, 2]

    def test_only_the_last_ones_are_recent(self) -> None:
        how = Sampling(repetition_penalty=10.0, repetition_context_size=2)
        logits = mx.array([[5.0, 4.0, 3.0, 2.0]])
        sampler = Sampler(how, [0, 1, 2])
        # 1, 2 recent: 0; then 2, 0: 1; then 0, 1: 2; then 1, 2: 0 again.
        assert [int(sampler(logits)[0]) for _ in range(4)] == [0, 1, 2, 0]

    def test_without_it_nothing_is_remembered(self) -> None:
        assert draw(mx.array([[3.0, 2.0]]), 3) == [0, 0, 0]


class TestSeed:
    def test_repeatable(self) -> None:
        logits = mx.zeros((1, 1000))
        first = draw(logits, 20, temperature=1.0, seed=3)
        assert draw(logits, 20, temperature=1.0, seed=3) == first
        assert draw(logits, 20, temperature=1.0, seed=4) != first
        assert len(set(first)) > 15  # each step draws anew

    def test_independent_of_the_global_state(self) -> None:
        logits = mx.zeros((1, 1000))
        mx.random.seed(1)
        first = draw(logits, 5, temperature=1.0, seed=3)
        mx.random.seed(2)
        assert draw(logits, 5, temperature=1.0, seed=3) == first

    @pytest.mark.parametrize("seed", [None, 3])
    def test_leaves_the_global_state_alone(self, seed: int | None) -> None:
        mx.random.seed(1)
        expected = mx.random.uniform(shape=(4,)).tolist()
        mx.random.seed(1)
        draw(mx.zeros((1, 10)), 5, temperature=1.0, seed=seed)
        assert mx.random.uniform(shape=(4,)).tolist() == expected

    def test_without_one_every_run_differs(self) -> None:
        logits = mx.zeros((1, 100_000))
        assert draw(logits, 5, temperature=1.0) != draw(logits, 5, temperature=1.0)

    @pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
    def test_the_whole_range(self, seed: int) -> None:
        assert len(draw(mx.zeros((1, 4)), 2, temperature=1.0, seed=seed)) == 2


def test_log_probabilities_come_before_filters_and_temperature() -> None:
    logits = mx.array([[1.0, 2.0, 3.0]], mx.bfloat16)
    _, logprobs = Sampler(Sampling(temperature=0.3, top_k=1, top_p=0.1, min_p=0.9, seed=0))(logits)
    x = np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(np.asarray(logprobs)[0], x - np.log(np.exp(x).sum()), atol=1e-6)
    assert logprobs.dtype == mx.float32


def graph(x: mx.array) -> str:
    """The operations that an array waits for."""
    text = io.StringIO()
    mx.export_to_dot(text, x)
    return text.getvalue()


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.7, "seed": 0}, {"repetition_penalty": 1.5}, {"temperature": 1.0, "seed": 0, "top_k": 3}],
)
def test_the_token_needs_no_log_probabilities(how: dict[str, Any]) -> None:
    """They are made for those who look at them."""
    token, logprobs = Sampler(Sampling(**how), [1])(mx.array([[1.0, 2.0, 3.0, 0.5]]) * 2)
    assert "LogSumExp" in graph(logprobs)
    assert "LogSumExp" not in graph(token)
    mx.eval(token)
    assert "LogSumExp" in graph(logprobs), "and are not made along with it"
    penalized = np.array([2.0, 4 / how.get("repetition_penalty", 1), 6.0, 1.0])
    expected = penalized - np.log(np.exp(penalized).sum())
    np.testing.assert_allclose(np.asarray(logprobs)[0], expected, atol=1e-6)


@pytest.mark.parametrize("size", [1, 30, 1e4])
@pytest.mark.parametrize("shift", [0, -500, 1e5])
def test_log_softmax(size: float, shift: float) -> None:
    """In float64, for logits whose exponentials float32 cannot hold."""
    logits = (np.random.default_rng(0).normal(size=(2, 3, 700)) * size + shift).astype(np.float32)
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    found = np.asarray(log_softmax(mx.array(logits)))
    np.testing.assert_allclose(found, expected, atol=1e-7 * (abs(shift) + 5 * size) + 1e-6)


def test_log_softmax_of_what_cannot_be() -> None:
    assert log_softmax(mx.array([-math.inf, 0.0, -math.inf])).tolist() == [-math.inf, 0.0, -math.inf]
    assert mx.isnan(log_softmax(mx.array([math.nan, 0.0]))).all()


NOT_NUMBERS = [math.nan, "1", None, [1], True]


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("temperature", [-0.1, math.inf, *NOT_NUMBERS]),
            ("top_k", [-1, 2.5, math.inf, *NOT_NUMBERS]),
            ("top_p", [0, -0.5, 1.01, math.inf, *NOT_NUMBERS]),
            ("min_p", [-0.1, 1.01, math.inf, *NOT_NUMBERS]),
            ("repetition_penalty", [0, -1, math.inf, 1e-300, 1e300, *NOT_NUMBERS]),
            ("repetition_context_size", [0, -1, 1.5, math.inf, *NOT_NUMBERS]),
            ("seed", [-1, 2**64, 1.5, math.nan, "1", True]),
        ],
    )
    def test_out_of_range(self, name: str, values: list[Any]) -> None:
        for value in values:
            with pytest.raises(OpenELMError) as e:
                Sampling(**{name: value})
            assert str(e.value).startswith(f"{name} must be ")
            assert str(e.value).endswith(f"not {value!r}")

    def test_edges_are_allowed(self) -> None:
        Sampling(temperature=0, top_k=0, top_p=1, min_p=1, repetition_penalty=1, repetition_context_size=1, seed=0)
        Sampling(temperature=5, top_p=1e-9, min_p=0, seed=2**64 - 1)
