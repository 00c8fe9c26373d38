"""What a command's options come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.benchmarks import models
from openelm_mlx.benchmarks.choices import (
    PEER_NAMES,
    SUITES,
    check_nothing_for_a_verb,
    check_together,
    lengths,
    names,
    plan,
)
from openelm_mlx.benchmarks.protocol import PROTOCOLS, WINDOW, Protocol
from openelm_mlx.config import PRESETS
from openelm_mlx.convert.choices import PRECISIONS
from openelm_mlx.errors import OpenELMError

NOTHING: dict[str, Any] = {
    "model": None,
    "random_weights": False,
    "precision": None,
    "compare": None,
    "protocol": None,
    "prompt_tokens": None,
    "gen_tokens": None,
    "repeats": None,
    "time_limit": None,
}


def planned(suite: str | None = None, **options: Any) -> Any:
    return plan(suite, **{**NOTHING, **options})


def test_the_precisions_are_the_converters() -> None:
    assert set(models.PRECISIONS) == set(PRECISIONS)


def test_the_papers_protocol() -> None:
    assert PROTOCOLS["paper"] == Protocol(prompt_tokens=36, gen_tokens=1024, repeats=5, dry_run=True)


def test_a_model_alone() -> None:
    found = planned(model="folder")
    assert [(c.model, c.random_weights, c.precision) for c in found.cases] == [("folder", False, None)]
    assert found.cases[0].protocols == (PROTOCOLS["paper"],)
    assert (found.name, found.peers) == ("folder", ())


def test_a_folders_name_may_have_a_comma(tmp_path: Path) -> None:
    folder = tmp_path / "one,two"
    folder.mkdir()
    assert [c.model for c in planned(model=str(folder)).cases] == [str(folder)]
    assert [c.model for c in planned(model=f"{folder}x").cases] == [str(tmp_path / "one"), "twox"]


def test_everything_changes_something() -> None:
    found = planned(
        model="OpenELM-3B",
        random_weights=True,
        precision="bf16,4bit",
        compare="mlx-lm, corenet",
        protocol="quick",
        prompt_tokens="36,512",
        gen_tokens=7,
        repeats=2,
        time_limit=1.5,
    )
    assert [(c.random_weights, c.precision) for c in found.cases] == [(True, "bf16"), (True, "4bit")]
    for case in found.cases:
        assert [p.prompt_tokens for p in case.protocols] == [36, 512]
        assert all((p.gen_tokens, p.repeats, p.time_limit, p.dry_run) == (7, 2, 1.5, False) for p in case.protocols)
    assert found.peers == ("mlx-lm", "corenet")


def test_random_weights_are_bf16_by_default() -> None:
    assert [c.precision for c in planned(model="OpenELM-270M", random_weights=True).cases] == ["bf16"]


def test_the_suite_of_the_paper() -> None:
    found = planned("paper")
    assert [(c.model, c.precision) for c in found.cases] == [(m, p) for m in PRESETS for p in ("bf16", "4bit")]
    assert all(c.random_weights and c.protocols == (PROTOCOLS["paper"],) for c in found.cases)


def test_a_suite_can_be_narrowed() -> None:
    found = planned("mlx-lm", precision="4bit", repeats=1, prompt_tokens="9", compare="corenet")
    assert [(c.model, c.precision) for c in found.cases] == [("OpenELM-270M", "4bit")]
    assert [(p.prompt_tokens, p.repeats) for p in found.cases[0].protocols] == [(9, 1)]
    assert found.peers == ("corenet",)


@pytest.mark.parametrize("suite", SUITES)
def test_suites_are_possible(suite: str) -> None:
    assert SUITES[suite].models and set(SUITES[suite].peers) <= set(PEER_NAMES)
    for case in planned(suite).cases:
        assert case.model in PRESETS and case.precision in PRECISIONS
        assert all(p.prompt_tokens + p.gen_tokens <= WINDOW for p in case.protocols)


@pytest.mark.parametrize(
    ("suite", "options", "said"),
    [
        (None, {}, "--model"),
        ("nonsense", {}, "paper"),
        ("paper", {"model": "x"}, "--model"),
        ("paper", {"random_weights": True}, "--random-weights"),
        ("paper", {"precision": "fp32"}, "fp32"),
        (None, {"model": "x", "protocol": "nonsense"}, "paper, quick"),
        (None, {"model": "x", "compare": "nonsense"}, "mlx-lm"),
        (None, {"model": "x", "compare": ","}, "names nothing"),
        (None, {"model": "x", "prompt_tokens": "x"}, "--prompt-tokens"),
        (None, {"model": "x", "prompt_tokens": "0"}, "prompt_tokens"),
        (None, {"model": "x", "gen_tokens": 1}, "gen_tokens"),
        (None, {"model": "x", "repeats": 0}, "repeats"),
        (None, {"model": "x", "time_limit": 0.0}, "time_limit"),
        (None, {"model": "x", "time_limit": float("nan")}, "time_limit"),
        (None, {"model": "x", "prompt_tokens": "1500", "gen_tokens": 600}, "window of 2048"),
    ],
)
def test_what_makes_no_sense_is_refused(suite: str | None, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OpenELMError, match=said):
        planned(suite, **options)


@pytest.mark.parametrize(
    ("given", "peers", "said"),
    [
        ({"explain", "repeats"}, (), "--repeats"),
        ({"explain", "plot"}, (), "--plot"),
        ({"corenet"}, (), "--compare corenet"),
        ({"corenet"}, ("mlx-lm",), "--compare corenet"),
        ({"llama_bench"}, (), "--llama-bench"),
        ({"torch_python"}, ("corenet",), "--torch-python goes with --compare pytorch"),
        ({"json_file", "out"}, (), "--json"),
    ],
)
def test_options_that_would_change_nothing(given: set[str], peers: tuple[str, ...], said: str) -> None:
    with pytest.raises(OpenELMError, match=said):
        check_together(given, peers)


def test_options_that_go_together() -> None:
    check_together({"explain", "model", "random_weights", "precision", "json_file", "quiet"}, ())
    check_together({"compare", "corenet", "gguf"}, ("corenet", "llama.cpp"))


def test_options_before_a_verb() -> None:
    with pytest.raises(OpenELMError, match="--random-weights stands before train"):
        check_nothing_for_a_verb({"random_weights"}, "train")
    check_nothing_for_a_verb((), "train")


def test_lists() -> None:
    assert names(" a, b,a,,") == ("a", "b")
    assert lengths("36,512") == (36, 512)
