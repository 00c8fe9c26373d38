"""openelm_mlx.hub against a real HTTP server on the loopback interface; each client is a process of its own."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx import hub
from openelm_mlx.errors import OpenELMError
from openelm_mlx.hub import HubError, resolve
from tests.support.hub_server import HubServer, client_env

# Reads calls of resolve (and "find_tokenizer"), prints what became of each: {"path": ...} or {"error": ...}.
CLIENT = """
import json, sys
from openelm_mlx.hub import HubError, find_tokenizer, resolve
assert "huggingface_hub" not in sys.modules, "imported before it is needed"
answers = []
for name, options in json.load(sys.stdin):
    if name == "find_tokenizer":
        lines = []
        found = find_tokenizer(lines.append)
        answers.append({"found": found and [str(found[0]), found[1]], "lines": lines})
        continue
    try:
        answers.append({"path": str(resolve(name, **options))})
    except HubError as error:
        answers.append({"error": str(error), "reason": error.reason})
json.dump(answers, sys.stdout)
"""

Call = tuple[str, dict[str, object]]


def run_client(env: dict[str, str], calls: Sequence[Call]) -> tuple[list[dict[str, Any]], str]:
    """What became of each call, and what was written to stderr. stdout holds the answers and nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", CLIENT],
        input=json.dumps(calls),
        env=env,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers, done.stderr


def write(folder: Path, **files: str) -> Path:
    """A folder of small files; ``__`` in a name stands for the dot."""
    for name, content in files.items():
        file = folder / name.replace("__", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


def names(folder: str) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in Path(folder).rglob("*") if not file.is_dir()}


MODEL = {"config__json": "{}", "modeling_openelm__py": "boom()", "README__md": "hello"}
SAFETENSORS = {**MODEL, "model__safetensors": "weights", "model__safetensors__index__json": "{}"}
TOKENIZER = {"tokenizer__model": "pieces", "tokenizer_config__json": "{}", "chat_template__jinja": "{{ messages }}"}


@pytest.fixture
def repositories(tmp_path: Path) -> dict[str, dict[str, Path]]:
    both = write(tmp_path / "both", **SAFETENSORS, **TOKENIZER, pytorch_model__bin="pickle", training_args__bin="x")
    write(both / "original", params__json="{}", consolidated__safetensors="the same again")
    return {
        "org/both": {"main": both, "v1": write(tmp_path / "v1", **SAFETENSORS)},
        "org/bin": {"main": write(tmp_path / "bin", **MODEL, pytorch_model__bin="pickle", optimizer__bin="x")},
        "org/empty": {"main": write(tmp_path / "empty", **MODEL)},
        "org/gated": {"main": write(tmp_path / "gated", **SAFETENSORS)},
        hub.TOKENIZER_SOURCES[1]: {"main": write(tmp_path / "tokens", **TOKENIZER, **SAFETENSORS)},
    }


@pytest.fixture
def server(repositories: dict[str, dict[str, Path]]) -> Iterator[tuple[HubServer, str]]:
    running = HubServer(repositories, gated={"org/gated"})
    with running as url:
        yield running, url


def test_only_the_wanted_files_are_downloaded(server: tuple[HubServer, str], tmp_path: Path) -> None:
    running, url = server
    answers, _ = run_client(
        client_env(url, tmp_path / "home"),
        [
            ("org/both", {}),
            ("org/both", {"revision": "v1"}),
            ("org/bin", {}),
            (hub.TOKENIZER_SOURCES[1], {"weights": False}),
        ],
    )
    both, v1, binary, tokens = (answer["path"] for answer in answers)
    weights = {"config.json", "model.safetensors", "model.safetensors.index.json"}
    tokenizer = {"tokenizer.model", "tokenizer_config.json", "chat_template.jinja"}
    assert names(both) == weights | tokenizer
    assert names(v1) == weights
    assert Path(v1).name == running.commit("org/both", "v1") != Path(both).name
    assert names(binary) == {"config.json", "pytorch_model.bin"}
    assert names(tokens) == tokenizer | weights - {"model.safetensors"}
    assert (Path(binary) / "pytorch_model.bin").read_text() == "pickle"
    assert not [asked for asked in running.requests if asked.endswith((".py", ".md", "training_args.bin"))]


def test_every_refusal_is_one_clear_line(server: tuple[HubServer, str], tmp_path: Path) -> None:
    _, url = server
    answers, _ = run_client(
        client_env(url, tmp_path / "home"),
        [
            ("org/nothing", {}),
            ("org/both", {"revision": "v9"}),
            ("org/gated", {}),
            ("org/empty", {}),
            ("no/such name", {}),
        ],
    )
    missing, revision, gated, empty, invalid = (answer["error"] for answer in answers)
    assert missing.startswith(f"org/nothing is neither a folder here nor a repository on {url}")
    assert "hf auth login" in missing
    assert revision == f"org/both has no revision 'v9': its branches and tags are on {url}/org/both/tree/main."
    assert gated.startswith(f"org/gated is gated: accept its licence on {url}/org/gated")
    assert "hf auth login" in gated
    assert "org/empty holds no weights" in empty
    assert "'no/such name' is neither a file or folder here nor a possible Hub name" in invalid
    assert not [answer for answer in answers if "\n" in answer["error"]]


def test_the_cache_serves_offline(server: tuple[HubServer, str], tmp_path: Path) -> None:
    running, url = server
    env = client_env(url, tmp_path / "home")
    calls: list[Call] = [("org/both", {}), ("org/both", {"revision": "v1"}), ("org/bin", {})]
    tokens_only: Call = (hub.TOKENIZER_SOURCES[1], {"weights": False})
    online, _ = run_client(env, [*calls, tokens_only])
    running.requests.clear()
    offline, _ = run_client(
        {**env, "HF_HUB_OFFLINE": "1"}, [*calls, tokens_only, ("org/gated", {}), (hub.TOKENIZER_SOURCES[1], {})]
    )
    assert offline[:4] == online
    absent, partial = offline[4:]
    assert absent["error"].startswith("org/gated is not, or not completely, in the cache")
    assert "HF_HUB_OFFLINE" in absent["error"]
    assert partial["reason"] in ("offline and not in the cache", "no weights")
    assert running.requests == []


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path) -> None:
    with HubServer({}) as url:
        pass  # nobody listens on that port any more
    (answer, search), _ = run_client(client_env(url, tmp_path), [("org/name", {}), ("find_tokenizer", {})])
    assert answer["error"].startswith(f"{url} cannot be reached, or the connection broke")
    assert "HF_ENDPOINT" in answer["error"]
    assert "\n" not in answer["error"]
    assert search["found"] is None
    assert search["lines"] == [
        f"tokenizer: {name} is not available (cannot be reached)" for name in hub.TOKENIZER_SOURCES
    ]


def test_a_broken_connection_is_resumed(tmp_path: Path) -> None:
    # Larger than the pieces of 10 MiB in which the client writes: what it has not written it asks for again.
    content = "".join(f"{number} " for number in range(3_000_000))
    folder = write(tmp_path / "model", config__json="{}", model__safetensors=content)
    running = HubServer({"org/name": {"main": folder}}, cut={"model.safetensors"})
    with running as url:
        # A recent huggingface_hub goes on by itself; an older one gives up, and goes on when it is asked again.
        first, again = run_client(client_env(url, tmp_path / "home"), [("org/name", {}), ("org/name", {})])[0]
    if "error" in first:
        assert first["reason"] == "cannot be reached"
    assert (Path(again["path"]) / "model.safetensors").read_text() == content
    gets = [asked for asked in running.requests if asked.startswith("GET") and "model.safetensors" in asked]
    assert len(gets) == 2
    assert int(gets[1].partition("bytes=")[2].rstrip("-")) > 0


def test_the_tokenizer_comes_from_the_first_source_there_is(server: tuple[HubServer, str], tmp_path: Path) -> None:
    _, url = server
    (search,), _ = run_client(client_env(url, tmp_path / "home"), [("find_tokenizer", {})])
    folder, name = search["found"]
    first, second = hub.TOKENIZER_SOURCES[:2]
    assert name == second
    assert "tokenizer.model" in names(folder)
    assert "model.safetensors" not in names(folder)
    assert search["lines"] == [
        f"tokenizer: {first} is not available (no such repository)",
        f"tokenizer: taken from {second}",
    ]


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_goes_to_stderr_unless_quiet(server: tuple[HubServer, str], tmp_path: Path, quiet: bool) -> None:
    _, url = server
    # tqdm draws only on a terminal; this setting makes it draw anyway.
    env = client_env(url, tmp_path / "home", TQDM_POSITION="-1")
    _, stderr = run_client(env, [("org/both", {"quiet": quiet})])
    assert ("Fetching" in stderr) is not quiet


def test_a_local_path_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model", config__json="{}")
    for path in ("model", "./model", str(tmp_path / "model" / "config.json")):
        assert hub.resolve(path) == Path(path)
    assert hub.resolve(Path("model")) == Path("model")
    with pytest.raises(hub.HubError, match="model is a local folder, so it has no revision 'v1'"):
        hub.resolve("model", revision="v1")


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "model", config__json="{}")
    assert hub.resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    "path",
    ["./model", "../org/model", "/models/name", "~/models", "a\\b", "models/org/name", "org/name/", "name.pt"]
    + [f"org/pytorch_model{ending}" for ending in (".bin", ".safetensors", ".json", ".model", ".yaml", ".SAFETENSORS")],
)
def test_a_path_never_goes_to_the_network(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_snapshot", None)  # would be called
    absolute = Path(path).expanduser().absolute()
    with pytest.raises(OpenELMError) as refusal:
        hub.resolve(path)
    assert str(refusal.value) == f"No such file or folder: {absolute}."
    with pytest.raises(OpenELMError, match="No such file or folder"):
        hub.resolve(Path(path))


def test_other_names_that_are_not_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "OpenELM-270M-4bit", config__json="{}")
    with pytest.raises(hub.HubError, match=r"Similar names there: OpenELM-270M-4bit\."):
        hub.resolve(tmp_path / "OpenELM-270M-4bits")
    with pytest.raises(hub.HubError, match="web address"):
        hub.resolve("https://huggingface.co/apple/OpenELM-270M")
    with pytest.raises(hub.HubError, match="is empty"):
        hub.resolve("")


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    """No real full disk here: the system's error, as Python and as the storage client report it."""
    python = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    storage = RuntimeError("Data processing error: No space left on device (os error 28)")
    wrapped = OSError("could not move the file")
    wrapped.__cause__ = python
    for error in (python, storage, wrapped):
        assert str(hub._explain(error, "org/name", None)).startswith("The disk is full: org/name does not fit")
    locked = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))
    assert "cannot be written" in str(hub._explain(locked, "org/name", None))
    unknown = hub._explain(KeyError("surprise"), "org/name", None)
    assert str(unknown) == "Downloading org/name failed (KeyError: 'surprise')."


def test_a_bare_name_is_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a network that cannot be reached: most often it is a folder whose name was mistyped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openelm-270m").mkdir()
    with pytest.raises(
        HubError, match=r"No such file or folder: .*/openelm-27m\. Similar.*openelm-270m.*named with its"
    ):
        resolve("openelm-27m")
