"""`openelm convert org/name` against a local hub, each time in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from openelm_mlx import hub
from openelm_mlx.tokenizer import Tokenizer
from tests.support import sources
from tests.support.cli import Done, environment, run_apart
from tests.support.hub_server import HubServer, client_env
from tests.support.tokenizers_made import MODEL, write_folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubServer, str]]:
    root = tmp_path_factory.mktemp("hub")
    second = hub.TOKENIZER_SOURCES[1]
    repositories = {
        "apple/OpenELM-tiny": {
            "main": sources.hf(root / "main", tokenizer=False),
            "v1": sources.hf(root / "v1", sources.weights(sources.config(), seed=1), tokenizer=False),
        },
        "org/bin": {"main": sources.hf(root / "bin", torch=True, shards=2)},
        "org/tokens": {"main": write_folder(root / "tokens", tokenizer=MODEL.read_bytes())},
        second: {"main": write_folder(root / "substitute", tokenizer=MODEL.read_bytes())},
    }
    running = HubServer(repositories)
    with running as url:
        yield running, url


def openelm(url: str, home: Path, *arguments: str | Path, **more: str) -> Done:
    return run_apart(*arguments, env={**environment(), **client_env(url, home, **more)})


def hashes(folder: Path) -> dict[str, str]:
    recorded: dict[str, str] = json.loads((folder / "config.json").read_text())["openelm_mlx"]["source_sha256"]
    return recorded


def test_a_name_a_substitute_tokenizer_and_then_offline(server: tuple[HubServer, str], tmp_path: Path) -> None:
    running, url = server
    name, home = "apple/OpenELM-tiny", tmp_path / "home"
    first = openelm(url, home, "convert", name, "--out", tmp_path / "out", "--precision", "fp32")
    assert first.status == 0, first.err
    lines = first.err.splitlines()
    assert f"tokenizer: {hub.TOKENIZER_SOURCES[0]} is not available (no such repository)" in lines
    assert f"tokenizer: taken from {hub.TOKENIZER_SOURCES[1]}" in lines
    recorded = json.loads((tmp_path / "out" / "config.json").read_text())["openelm_mlx"]
    assert recorded["source"] == name
    assert recorded["source_kind"] == "huggingface"
    assert recorded["source_commit"] == running.commit(name, "main")
    assert recorded["tokenizer"] == hub.TOKENIZER_SOURCES[1]

    asked = len(running.requests)
    offline = openelm(url, home, "convert", name, "-o", tmp_path / "again", "--precision", "fp32", HF_HUB_OFFLINE="1")
    assert offline.status == 0, offline.err
    assert len(running.requests) == asked
    for file in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes()

    shown = openelm(url, home, "inspect", name, "--json", HF_HUB_OFFLINE="1")
    assert json.loads(shown.out)["config"]["model_dim"] == 64


def test_a_revision_a_named_tokenizer_and_a_generation_from_the_hub(
    server: tuple[HubServer, str], tmp_path: Path
) -> None:
    _, url = server
    home, name = tmp_path / "home", "apple/OpenELM-tiny"
    options = ("--tokenizer", "org/tokens", "--precision", "fp32")
    done = openelm(url, home, "convert", name, "--out", tmp_path / "v1", "--revision", "v1", *options)
    assert done.status == 0, done.err
    direct = openelm(url, home, "convert", server[0].repositories[name]["v1"], "--out", tmp_path / "direct", *options)
    assert direct.status == 0, direct.err
    assert hashes(tmp_path / "v1") == hashes(tmp_path / "direct")
    assert json.loads((tmp_path / "v1" / "config.json").read_text())["openelm_mlx"]["tokenizer"] == "org/tokens"
    missing = openelm(url, home, "convert", name, "--out", tmp_path / "no", "--revision", "v9", *options)
    assert (missing.status, missing.out) == (2, "")
    assert missing.err.startswith(f"error: {name} has no revision 'v9'")
    assert not (tmp_path / "no").exists()


def test_generating_straight_from_the_hub(server: tuple[HubServer, str], tmp_path: Path) -> None:
    _, url = server
    done = openelm(url, tmp_path / "home", "generate", "--model", "org/bin", "--prompt", "Once", "--max-tokens", "3")
    assert done.status == 0, done.err
    assert "3 tokens" in done.err
    wrong = openelm(
        url, tmp_path / "home", "generate", "--model", "org/bin", "--prompt", "Once", "--revision", "v9"
    )  # fmt: skip
    assert wrong.err.startswith("error: org/bin has no revision 'v9'")


def test_without_any_tokenizer_the_ways_are_named_and_nothing_is_converted(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "hf", tokenizer=False)
    with HubServer({}) as url:
        done = openelm(url, tmp_path / "home", "convert", source, "--out", tmp_path / "out")
    assert (done.status, done.out) == (2, "")
    lines = done.err.splitlines()
    expected = [f"tokenizer: {name} is not available (no such repository)" for name in hub.TOKENIZER_SOURCES]
    assert lines[:-1] == expected
    assert lines[-1].startswith("error: no tokenizer: ")
    assert "--tokenizer none" in lines[-1]
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_not_there(server: tuple[HubServer, str], tmp_path: Path) -> None:
    _, url = server
    for verb in (("convert", "org/absent", "--out", tmp_path / "out"), ("inspect", "org/absent")):
        done = openelm(url, tmp_path / "home", *verb)
        assert done.status == 2
        assert done.err.startswith("error: org/absent is neither a folder here nor a repository on ")
        assert done.err.count("\n") == 1


def test_a_substitute_with_more_ids_than_rows_is_passed_over(tmp_path: Path) -> None:
    """As NousResearch/Llama-2-7b-hf is, whose <pad> has no row in OpenELM's embedding."""
    padded = write_folder(tmp_path / "padded", tokenizer=MODEL.read_bytes())
    Tokenizer.from_file(MODEL).save(padded)
    values = json.loads((padded / "tokenizer.json").read_text())
    last = max(values["model"]["vocab"].values())
    rows = sources.config()["vocab_size"]
    values["added_tokens"] += [
        {**values["added_tokens"][0], "id": i, "content": f"<pad{i}>"} for i in range(last + 1, rows + 1)
    ]
    (padded / "tokenizer.json").write_text(json.dumps(values))
    first, second = hub.TOKENIZER_SOURCES[:2]
    source = sources.hf(tmp_path / "hf", tokenizer=False)
    repositories = {
        first: {"main": padded},
        second: {"main": write_folder(tmp_path / "t", tokenizer=MODEL.read_bytes())},
    }
    with HubServer(repositories) as url:
        done = openelm(url, tmp_path / "home", "convert", source, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert f"tokenizer: {first} will not do ({rows + 1} ids for {rows} embedding rows)" in done.err.splitlines()
    assert f"tokenizer: taken from {second}" in done.err.splitlines()
