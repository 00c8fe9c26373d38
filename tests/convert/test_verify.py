"""The figures of --verify, against numpy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx import device
from openelm_mlx.convert import verify as module
from openelm_mlx.convert.job import convert
from openelm_mlx.convert.sources import open_source
from openelm_mlx.convert.verify import PASSAGE, compare, passage_ids, verify
from openelm_mlx.errors import OpenELMError
from openelm_mlx.loading import load
from tests.support import sources
from tests.support.sources import TOKENS, Array
from tests.support.tokenizers_made import MODEL


def log_softmax(x: Array) -> Array:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def reference(before: Array, after: Array, ids: list[int]) -> list[float]:
    """Maximum and mean difference, KL, agreement and both perplexities."""
    p, q = log_softmax(before), log_softmax(after)
    difference = np.abs(before.astype(np.float64) - after)
    nll = [-np.mean([x[t, ids[t + 1]] for t in range(len(ids) - 1)]) for x in (p, q)]
    kl = np.mean([sum(math.exp(a) * (a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(p, q, strict=True)])
    agreement = np.mean(before.argmax(-1) == after.argmax(-1))
    return [float(x) for x in (difference.max(), difference.mean(), kl, agreement, math.exp(nll[0]), math.exp(nll[1]))]


def figures(v: module.Verification) -> list[float]:
    return [
        v.max_difference, v.mean_difference, v.mean_kl, v.top1_agreement, v.perplexity_before, v.perplexity_after,
    ]  # fmt: skip


def test_a_case_worked_out_by_hand() -> None:
    """Two positions, two tokens: probabilities 1/2 and 1/2 before; 3/4 and 1/4, then 1/4 and 3/4 after."""
    before, after = mx.zeros((2, 2)), mx.log(mx.array([[3.0, 1.0], [1.0, 3.0]]))
    v = compare(before, after, [0, 1])
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert figures(v) == pytest.approx([math.log(3), math.log(3) / 2, kl, 0.5, 2.0, 4.0], rel=1e-5)
    assert v.tokens == 2


def test_random_logits() -> None:
    rng = np.random.default_rng(0)
    before = rng.standard_normal((7, 30)).astype(np.float32) * 4
    after = (before + rng.standard_normal((7, 30)) / 2).astype(np.float32)
    ids = [3, 9, 29, 0, 0, 17, 5]
    v = compare(mx.array(before), mx.array(after), ids)
    assert figures(v) == pytest.approx(reference(before, after, ids), rel=1e-4)
    assert 0 < v.top1_agreement < 1, "both outcomes occur"


def test_a_hopeless_model_has_an_infinite_perplexity() -> None:
    after = mx.array([[1000.0, 0.0], [0.0, 0.0]])
    assert compare(mx.zeros((2, 2)), after, [0, 1]).perplexity_after == math.inf


def test_an_exact_conversion_has_no_difference(tmp_path: Path) -> None:
    v = convert(sources.hf(tmp_path / "hf"), tmp_path / "out", precision="fp32", verify_logits=True).verification
    assert v is not None
    assert (v.max_difference, v.mean_difference, v.mean_kl, v.top1_agreement) == (0, 0, 0, 1)
    assert v.perplexity_before == v.perplexity_after > 1
    assert v.tokens == 64, "the window of this model"


@pytest.mark.parametrize("layout", [sources.hf, sources.corenet])
def test_a_known_perturbation(tmp_path: Path, layout: Callable[..., Path]) -> None:
    """Source and result differ in one norm: the figures are those of the two models' logits."""
    tensors = sources.weights(sources.config())
    other = {**tensors, "transformer.norm.weight": tensors["transformer.norm.weight"] * np.float32(1.1)}
    source = open_source(layout(tmp_path / "source", tensors))
    folders = [convert(sources.hf(tmp_path / f"hf{n}", t), tmp_path / f"out{n}", precision="fp32").folder
               for n, t in enumerate((tensors, other))]  # fmt: skip
    (before, tokenizer), (after, _) = map(load, folders)
    assert tokenizer is not None
    ids = tokenizer.encode(PASSAGE.read_text(encoding="utf-8"))[:64]
    logits, changed = (np.asarray(m(mx.array([ids]))[0]) for m in (before, after))
    v = verify(source, folders[1], tokenizer)
    assert figures(v) == pytest.approx(reference(logits, changed, ids), rel=1e-3)
    assert v.mean_kl > 0


def test_dropped_padding_rows_are_left_out_of_the_comparison(tmp_path: Path) -> None:
    tensors = sources.weights(sources.config(vocab_size=TOKENS + 28))
    tensors["transformer.token_embeddings.weight"][TOKENS:] *= 100  # would be the likeliest everywhere
    source = sources.corenet(tmp_path / "run", tensors, vocab_size=TOKENS + 28)
    v = convert(source, tmp_path / "out", precision="fp32", tokenizer=str(MODEL), verify_logits=True).verification
    assert v is not None
    assert v.max_difference < 1e-4
    assert v.top1_agreement == 1


def test_coarser_is_worse(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "hf")
    results = [convert(source, tmp_path / p, precision=p, group_size=32, verify_logits=True).verification
               for p in ("fp32", "bf16", "8bit", "4bit")]  # fmt: skip
    kls = [v.mean_kl for v in results if v is not None]
    assert len(kls) == 4
    assert 0 <= kls[0] < kls[1] < kls[2] < kls[3] < 0.5


def test_the_passage_without_a_tokenizer_is_its_bytes(tmp_path: Path) -> None:
    source = open_source(sources.hf(tmp_path / "hf", vocab_size=100, max_context_length=600))
    ids = passage_ids(source.config, None)
    assert ids == [b % 100 for b in PASSAGE.read_bytes()][:512]
    assert len(ids) == 512


def test_a_verification_that_does_not_fit_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sources.hf(tmp_path / "hf")
    size = sum(4 * x.size for x in sources.weights(sources.config()).values())
    monkeypatch.setattr(device, "memory", lambda: device.Memory(size - 1, "a test"))
    with pytest.raises(OpenELMError, match=r"--verify runs the source in float32, .* \(a test\); convert without"):
        convert(source, tmp_path / "out", verify_logits=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(device, "memory", lambda: device.Memory(size, "a test"))
    convert(source, tmp_path / "out", verify_logits=True)
