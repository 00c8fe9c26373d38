"""The command as a whole: start-up, help, errors, and how it ends."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx import generation, loading
from openelm_mlx.cli import VERBS
from openelm_mlx.cli.generate import generate as generate_command
from openelm_mlx.convert import job
from openelm_mlx.convert.command import convert as convert_command
from openelm_mlx.errors import OpenELMError
from openelm_mlx.settings import Sampling
from openelm_mlx.version import __version__
from tests.support import sources
from tests.support.cli import MAIN, environment, finish, modules_of, run, run_apart, start

HEAVY = {"mlx", "mlx.core", "numpy", "tokenizers", "huggingface_hub", "yaml", "transformers", "torch", "mlx_lm"}


def test_help_lists_the_verbs_and_imports_nothing_heavy(tmp_path: Path) -> None:
    done, modules = modules_of(tmp_path / "modules", "--help")
    assert done.status == 0
    assert all(verb in done.out for verb in VERBS)
    assert done.err == ""
    assert HEAVY & modules == set()
    assert "openelm_mlx.cli" in modules


def test_without_arguments_there_is_help() -> None:
    done = run()
    assert "Usage: openelm" in done.out + done.err
    assert all(verb in done.out + done.err for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verbs_help(verb: str) -> None:
    done = run(verb, "--help")
    assert done.status == 0
    assert f"Usage: openelm {verb}" in done.out


def test_a_verbs_help_imports_nothing_heavy(tmp_path: Path) -> None:
    for verb in VERBS:
        _, modules = modules_of(tmp_path / verb, verb, "--help")
        assert HEAVY & modules == set()


def test_the_verbs_import_no_other_framework(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    verbs: list[tuple[str | Path, ...]] = [
        ("generate", "--model", model, "--prompt", "Once", "--max-tokens", "3"),
        ("convert", model, "--out", out, "--precision", "4bit", "--verify"),
        ("inspect", model),
    ]
    for arguments in verbs:
        done, modules = modules_of(tmp_path / "modules", *arguments)
        assert done.status == 0, done.err
        assert {"transformers", "mlx_lm", "torch", "matplotlib"} & modules == set()
        assert "mlx.core" in modules


def test_the_installed_command() -> None:
    script = Path(sys.executable).with_name("openelm")
    assert script.exists(), "not installed: pip install -e '.[dev]'"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout == f"openelm-mlx {__version__}\n"


def test_version() -> None:
    assert run("--version").out == f"openelm-mlx {__version__}\n"
    assert run("--version").status == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["--nonsense"], "--nonsense"),
        (["generate", "--nonsense"], "--nonsense"),
        (["generate", "--model", "x"], "--prompt"),
        (["generate"], "--prompt"),
        (["generate", "--model", "x", "--prompt", "x", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "--model", "x", "--prompt", "x", "--seed", "x"], "--seed"),
        (["convert", "x"], "--out"),
        (["inspect", "a", "extra"], "extra"),
    ],
)
def test_wrong_usage_is_status_2_and_named(arguments: list[str], named: str) -> None:
    """The words are typer's, and differ from version to version."""
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert named.lower() in done.err.partition("Error")[2].lower()
    assert "Traceback" not in done.err


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    verbs: list[tuple[str | Path, ...]] = [
        ("convert", tmp_path, "--out", tmp_path / "out"),
        ("generate", "--model", tmp_path, "--prompt", "x"),
        ("inspect", tmp_path),
    ]
    for arguments in verbs:
        done = run_apart(*arguments)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(f"error: {tmp_path}: ")
        assert done.err.count("\n") == 1


# The defaults are those of the Python API.


def option_defaults(command: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(command).parameters.items()}


def test_generates_defaults_are_the_apis() -> None:
    api = {**option_defaults(generation.stream_generate), **option_defaults(loading.load)}
    cli = option_defaults(generate_command)
    shared = (cli.keys() & api.keys()) - {"model", "prompt", "stop"}
    assert {n: cli[n] for n in shared} == {n: api[n] for n in shared}
    assert shared >= {f.name for f in Sampling.__dataclass_fields__.values()} | {"max_tokens", "ignore_eos", "dtype"}


def test_converts_defaults_are_the_apis() -> None:
    api, cli = option_defaults(job.convert), option_defaults(convert_command)
    names = {"verify": "verify_logits"}
    shared = {n: names.get(n, n) for n in cli if n not in ("source", "out", "quiet")}
    assert {n: cli[n] for n in shared} == {n: api[other] for n, other in shared.items()}


def test_every_option_has_a_help_text() -> None:
    for command in (generate_command, convert_command):
        for name, hint in typing.get_type_hints(command, include_extras=True).items():
            if name != "return":
                if not hasattr(hint, "__metadata__"):  # Python 3.10 wraps it in Optional where the default is None
                    hint = typing.get_args(hint)[0]
                assert hint.__metadata__[0].help, name


# How a command ends.


def test_a_closed_pipe_is_silent(tmp_path: Path, model: Path) -> None:
    """Whether the reader leaves before the first byte or after it, and whatever the verb."""
    commands: list[tuple[str | Path, ...]] = [
        ("generate", "--model", model, "--prompt", "Once", "--max-tokens", "40", "--ignore-eos", "--quiet"),
        ("inspect", model),
        ("inspect", model, "--json"),
        ("convert", model, "--out", tmp_path / "out"),
        ("--help",),
    ]
    for arguments in commands:
        process = start(*arguments)
        assert process.stdout
        process.stdout.close()
        process.stdout = None
        done = finish(process)
        assert (done.status, done.err) == (0, ""), arguments


def test_a_reader_that_leaves_after_one_byte(model: Path) -> None:
    process = start("generate", "--model", model, "--prompt", "Once", "--max-tokens", "40", "--quiet")
    assert process.stdout
    assert len(os.read(process.stdout.fileno(), 1)) == 1
    process.stdout.close()
    process.stdout = None
    done = finish(process)
    assert (done.status, done.err) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written(model: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = finish(start("inspect", model, stdout=full))
    assert (done.status, done.err) == (2, "error: the output cannot be written: No space left on device\n")


def test_a_terminal_that_is_not_utf8(tmp_path: Path) -> None:
    done = run_apart("inspect", sources_named(tmp_path / "模型"), env=environment(PYTHONIOENCODING="ascii"))
    assert (done.status, done.err) == (0, "")
    assert f"{tmp_path}/??" in done.out


def sources_named(folder: Path) -> Path:
    return sources.hf(folder, tokenizer=False)


def test_a_missing_backend_is_one_line(tmp_path: Path) -> None:
    """As on a Linux machine where no extra was installed."""
    block = "import sys; sys.modules['mlx'] = None"
    done = run_apart("inspect", tmp_path, before=block)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: MLX has no backend here: pip install 'openelm-mlx[cpu]'")
    assert done.err.count("\n") == 1


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what is meant for people is made short."""
    from openelm_mlx import summary

    def broken(name: str, revision: str | None) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(summary, "summarize", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        run("inspect", tmp_path)
    monkeypatch.setattr(summary, "summarize", lambda name, revision: Path("/no/such").stat())
    assert run("inspect", tmp_path).err == "error: /no/such: No such file or directory\n"
    monkeypatch.setattr(summary, "summarize", lambda name, revision: (_ for _ in ()).throw(OpenELMError("a refusal")))
    assert run("inspect", tmp_path).err == "error: a refusal\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed(model: Path, closed: str) -> None:
    """Nothing meant for one stream may end up in another, and no model file may take its number."""
    command = f'"$0" -c "$1" generate --model "$2" --prompt once --max-tokens 3 {closed}'
    whole, done = (
        subprocess.run(
            ["sh", "-c", line, sys.executable, MAIN, str(model)], env=environment(), capture_output=True, check=False
        )
        for line in (command.removesuffix(closed), command)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (b"" if ">&-" in closed.replace("2>&-", "") else whole.stdout)
    assert (b"prompt: " in done.stderr) is ("2>&-" not in closed)


def test_a_file_that_may_not_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openelm_mlx import summary

    def forbidden(name: str, revision: str | None) -> None:
        raise PermissionError(13, "Permission denied", "x/model.safetensors")

    monkeypatch.setattr(summary, "summarize", forbidden)
    assert run("inspect", tmp_path).err == "error: x/model.safetensors: Permission denied\n"


def test_what_files_say_does_not_steer_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from openelm_mlx import summary

    def hostile(name: str, revision: str | None) -> None:
        raise OpenELMError("a\x1b[31mb\nc é")

    monkeypatch.setattr(summary, "summarize", hostile)
    assert run("inspect", tmp_path).err == "error: a\\x1b[31mb\nc é\n"
