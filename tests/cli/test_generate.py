"""`openelm generate`: every option does something, and only the text reaches standard output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from openelm_mlx import device
from openelm_mlx.loading import load, memory_needed, start_loading
from tests.cli.generating import PROMPT, as_json, generate, tokens
from tests.support import sources
from tests.support.cli import Done, environment, finish, run, run_apart, start
from tests.support.tokenizers_made import ZEPHYR

KEYS = {
    "text", "tokens", "prompt_tokens", "generation_tokens", "prompt_tps", "generation_tps", "time_to_first_token_s",
    "peak_memory_gb", "finish_reason", "backend", "compute_dtype", "blas",
}  # fmt: skip


def changed(model: Path, to: Path, **values: Any) -> Path:
    """A copy of the model with other values in its config.json."""
    shutil.copytree(model, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | values))
    return to


@pytest.fixture
def chat_model(model: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(model, tmp_path / "chat"))
    (copy / "chat_template.jinja").write_text(ZEPHYR)
    return copy


# What is printed where.


def test_text_goes_to_stdout_and_figures_to_stderr(model: Path, greedy: list[int]) -> None:
    done = generate(model)
    _, tokenizer = load(model)
    assert tokenizer is not None
    start_ = tokenizer.encode(PROMPT)
    assert done.out == tokenizer.decode([*start_, *greedy]).removeprefix(tokenizer.decode(start_)) + "\n"
    assert done.err.startswith(f"prompt: {len(start_)} tokens, ")
    for part in ("tokens/s · generation: 12 tokens, ", "first token after ", "peak memory "):
        assert part in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("quiet", ["--quiet", "-q"])
def test_quiet_leaves_the_text_alone(model: Path, quiet: str) -> None:
    done = generate(model, quiet)
    assert (done.out, done.err) == (generate(model).out, "")


def test_json_is_one_object_with_the_documented_keys(model: Path, greedy: list[int]) -> None:
    done = generate(model, "--json")
    values = json.loads(done.out)
    assert set(values) == KEYS
    assert values["text"] == generate(model).out[:-1]
    assert values["tokens"] == greedy
    assert (values["prompt_tokens"], values["generation_tokens"], values["finish_reason"]) == (6, 12, "length")
    for key in ("prompt_tps", "generation_tps", "time_to_first_token_s", "peak_memory_gb"):
        assert values[key] > 0
    assert values["prompt_tps"] == pytest.approx(6 / values["time_to_first_token_s"])
    assert values["backend"] == device.backend()
    assert done.err == ""


def test_in_a_process_of_its_own(model: Path, greedy: list[int]) -> None:
    done = run_apart("generate", "--model", model, "-p", PROMPT, "--max-tokens", "12", "--json")
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out)["tokens"] == greedy


# The prompt.


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_a_dash_reads_the_prompt_from_stdin(model: Path, greedy: list[int], ending: bytes) -> None:
    assert tokens(model, prompt="-", stdin=PROMPT.encode() + ending) == greedy


def test_only_one_newline_at_the_end_is_the_terminals(model: Path) -> None:
    counts = [as_json(model, prompt="-", stdin=b"Once" + b"\n" * n)["prompt_tokens"] for n in (0, 1, 2, 3)]
    assert counts[0] == counts[1] < counts[2] < counts[3]


def test_stdin_is_utf8_whatever_the_locale(model: Path) -> None:
    prompt = "é 模型 🙂"
    command = ("generate", "--model", model, "--prompt", "-", "--max-tokens", "5", "--json")
    latin = environment(PYTHONIOENCODING="latin-1")
    done = run_apart(*command, stdin=prompt.encode(), env=latin)
    assert done.status == 0, done.err
    assert json.loads(done.out)["tokens"] == tokens(model, prompt=prompt, tokens=5)
    done = run_apart(*command, stdin=b"caf\xe9", env=latin)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: standard input is not UTF-8 text: ")
    assert done.err.count("\n") == 1


def test_an_empty_prompt_begins_with_bos(model: Path) -> None:
    assert as_json(model, prompt="")["prompt_tokens"] == 1


def test_max_tokens(model: Path, greedy: list[int]) -> None:
    for n in (1, 5):
        assert tokens(model, tokens=n) == greedy[:n]


def test_the_prompt_is_a_turn_where_there_is_a_template(chat_model: Path, model: Path, greedy: list[int]) -> None:
    plain = as_json(chat_model)["prompt_tokens"]
    assert plain > as_json(model)["prompt_tokens"]
    assert as_json(chat_model, "--system", "Be brief.")["prompt_tokens"] > plain
    assert tokens(chat_model, "--raw") == greedy
    assert tokens(chat_model) != greedy


def test_a_system_turn_needs_a_template(model: Path, chat_model: Path) -> None:
    without = generate(model, "--system", "Be brief.")
    assert (without.status, without.err) == (2, "error: --system needs a chat template, and this model has none\n")
    raw = generate(chat_model, "--system", "Be brief.", "--raw")
    assert (raw.status, raw.err) == (2, "error: --system needs a chat template, and --raw skips it\n")


# Sampling. Each of these fails when the option is not passed on.


HOT = ("--temperature", "1.5", "--seed", "1")


def test_temperature_and_seed(model: Path, greedy: list[int]) -> None:
    hot = tokens(model, *HOT)
    assert hot != greedy
    for spelled in ("--temp", "-t"):
        assert tokens(model, spelled, "1.5", "--seed", "1") == hot
    assert tokens(model, "--temperature", "1.5", "--seed", "2") != hot
    assert tokens(model, "--temperature", "0.001", "--seed", "1") == greedy
    assert len({tuple(tokens(model, "-t", "1.5")) for _ in range(3)}) > 1, "without a seed it varies"


def test_the_filters_narrow_the_choice(model: Path, greedy: list[int]) -> None:
    hot = tokens(model, *HOT)
    for option, value in (("--top-k", "1"), ("--top-p", "0.0001"), ("--min-p", "1")):
        assert tokens(model, *HOT, option, value) == greedy, option
    for option, value in (("--top-k", "3"), ("--top-p", "0.3"), ("--min-p", "0.3")):
        assert tokens(model, *HOT, option, value) not in (hot, greedy), option


def test_repetition_penalty_and_its_context(model: Path) -> None:
    many = 58
    free = tokens(model, tokens=many)
    assert len(set(free)) < many
    assert len(set(tokens(model, "--repetition-penalty", "1000", tokens=many))) == many
    narrow = tokens(model, "--repetition-penalty", "1000", "--repetition-context-size", "3", tokens=many)
    assert len(set(narrow)) < many
    assert narrow != free
    assert all(token not in narrow[max(0, n - 3) : n] for n, token in enumerate(narrow))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--top-k", "-1"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--repetition-context-size", "0"),
        ("--seed", "-1"),
        ("--stop", ""),
    ],
)
def test_values_out_of_range_are_refused_before_anything_is_loaded(tmp_path: Path, option: str, value: str) -> None:
    done = generate(tmp_path / "no such model", option, value)
    assert (done.status, done.out) == (2, "")
    assert option.removeprefix("--").replace("-", "_").split("_")[0] in done.err
    assert "No such file" not in done.err


# Ending.


def test_stop_strings_end_before_themselves(model: Path) -> None:
    text = generate(model).out[:-1]
    done = generate(model, "--stop", "ok")
    assert done.out == text.partition("ok")[0] + "\n"
    assert done.out != text + "\n"
    both = generate(model, "--stop", "never seen", "--stop", "\x10�")
    assert both.out == text.partition("\x10�")[0] + "\n"
    assert as_json(model, "--stop", "ok")["finish_reason"] == "stop"


def test_end_of_sequence_and_ignoring_it(model: Path, greedy: list[int], tmp_path: Path) -> None:
    ends = changed(model, tmp_path / "ends", eos_token_id=greedy[3])
    values = as_json(ends)
    assert (values["tokens"], values["finish_reason"]) == (greedy[:3], "stop")
    values = as_json(ends, "--ignore-eos")
    assert (values["tokens"], values["finish_reason"]) == (greedy, "length")


def test_a_full_window_is_said_once(model: Path) -> None:
    line = "the model's window of 64 tokens is full\n"
    done = generate(model, tokens=500)
    assert done.err.count(line) == 1
    assert line not in done.out
    assert line in generate(model, "--quiet", tokens=500).err
    with_json = generate(model, "--json", tokens=500)
    assert with_json.err == line
    values = json.loads(with_json.out)
    assert values["prompt_tokens"] + values["generation_tokens"] == 64
    assert values["finish_reason"] == "length"
    assert line not in generate(model, tokens=20).err


def test_a_prompt_longer_than_the_window(model: Path) -> None:
    done = generate(model, prompt="é模" * 60)
    assert (done.status, done.out) == (2, "")
    assert "the model's window is 64: shorten the prompt" in done.err


# The model.


def test_dtype(model: Path) -> None:
    assert as_json(model)["compute_dtype"] == "float32"
    assert as_json(model, "--dtype", "bfloat16")["compute_dtype"] == "bfloat16"
    done = generate(model, "--dtype", "float16", "--quiet")
    assert done.status == 0
    assert done.err.startswith("warning: float16: ")
    assert "dtype int8 cannot hold a model" in generate(model, "--dtype", "int8").err


@pytest.mark.skipif(device.backend() != "cpu", reason="a choice of the CPU backend")
def test_what_becomes_of_packed_weights(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []

    def noted(*arguments: Any, **options: Any) -> Any:
        loading = start_loading(*arguments, **options)
        loaded.append(sum(isinstance(m, nn.QuantizedLinear) for m in loading.finished().modules()))
        return loading

    monkeypatch.setattr("openelm_mlx.loading.start_loading", noted)
    by_default, unpacked, kept = (
        tokens(packed, *o) for o in ((), ("--cpu-weights", "float32"), ("--cpu-weights", "keep"))
    )
    assert by_default == unpacked == kept
    assert len(set(kept)) > 3
    assert loaded == [0, 0, 9]


def test_unknown_cpu_weights_are_refused_in_one_line(model: Path, packed: Path) -> None:
    for folder in (model, packed):
        done = generate(folder, "--cpu-weights", "int8")
        assert (done.status, done.out) == (2, "")
        assert done.err == "error: cpu_weights must be one of float32, keep, not 'int8'\n"


@pytest.mark.skipif(device.backend() != "cpu", reason="a choice of the CPU backend")
def test_unpacked_weights_that_do_not_fit_are_refused(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = memory_needed(packed, cpu_weights="float32")
    monkeypatch.setattr(device, "memory", lambda: device.Memory(needed - 1, "a test"))
    done = generate(packed, "--cpu-weights", "float32")
    assert (done.status, done.out) == (2, "")
    assert f"needs {needed / 1e9:.2f} GB to run" in done.err
    assert done.err.count("\n") == 1
    for options in ((), ("--cpu-weights", "keep"), ("--cpu-weights", "float32", "--force")):
        assert generate(packed, *options).status == 0


@pytest.mark.skipif(device.backend() != "cpu", reason="MLX compiles on a CPU")
@pytest.mark.parametrize(
    "compilers",
    [
        pytest.param((), id="none"),
        pytest.param(("cc", "as", "ld"), id="ours"),
        pytest.param(("g++", "as", "ld"), id="MLX's", marks=pytest.mark.slow),
    ],
)
def test_without_compilers(model: Path, greedy: list[int], tmp_path: Path, compilers: tuple[str, ...]) -> None:
    """Neither ours nor MLX's own: nothing that either compiled before is found."""
    for name in ("bin", "tmp", "cache"):
        (tmp_path / name).mkdir()
    for name in compilers:
        found = shutil.which(name)
        if not found:
            pytest.skip(f"no {name}")
        (tmp_path / "bin" / name).symlink_to(found)
    places = {
        name: str(tmp_path / folder)
        for name, folder in (("PATH", "bin"), ("TMPDIR", "tmp"), ("XDG_CACHE_HOME", "cache"))
    }
    done = run_apart(
        "generate", "--model", model, "-p", PROMPT, "--max-tokens", "12", "--json", env=environment(**places)
    )
    assert (done.status, done.err) == (0, "")
    values = json.loads(done.out)
    assert values["tokens"] == greedy
    if sys.platform == "linux":
        assert ("no compiled fast path: " in values["blas"]) == ("cc" not in compilers)
        assert any((tmp_path / "tmp").iterdir()) == ("g++" in compilers)


def test_a_revision_goes_with_a_hub_name(model: Path) -> None:
    done = generate(model, "--revision", "v1")
    assert (done.status, done.out) == (2, "")
    assert "is a local folder, so it has no revision 'v1'" in done.err


def test_a_model_that_does_not_fit_is_refused_with_both_figures(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = memory_needed(model)
    monkeypatch.setattr(device, "memory", lambda: device.Memory(needed - 1, "a test"))
    monkeypatch.setattr("openelm_mlx.loading.load_model", None)  # would be called
    done = generate(model)
    assert (done.status, done.out) == (2, "")
    gb = f"{needed / 1e9:.2f} GB"
    assert f"needs {gb} to run, and there are {gb} (a test)" in done.err
    assert "--force to try" in done.err
    monkeypatch.undo()
    monkeypatch.setattr(device, "memory", lambda: device.Memory(needed - 1, "a test"))
    assert generate(model, "--force").status == 0
    monkeypatch.setattr(device, "memory", lambda: device.Memory(needed, "a test"))
    assert generate(model).status == 0


def test_without_a_tokenizer_it_says_what_is_missing(tmp_path: Path) -> None:
    source = sources.hf(tmp_path / "hf", tokenizer=False)
    assert run("convert", source, "--out", tmp_path / "out", "--tokenizer", "none").status == 0
    done = generate(tmp_path / "out")
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        f"error: {tmp_path / 'out'}: has no tokenizer (no tokenizer.json or tokenizer.model), so no text can be "
        "generated; convert it again with --tokenizer FILE, FOLDER or HUB-NAME\n"
    )


def test_a_file_is_no_model(tmp_path: Path) -> None:
    pt = sources.corenet(tmp_path / "run")
    done = generate(pt)
    assert done.status == 2
    assert f"convert it first: openelm convert {pt} --out DIR" in done.err


# Ctrl-C.

SLOW = """
import time
from pathlib import Path
import openelm_mlx
from openelm_mlx.sampling import Sampler
call, calls = Sampler.__call__, []
def slowly(self, logits):
    calls.append(1)
    if len(calls) == 6:
        Path(MARK).touch()
    time.sleep(0.05)
    return call(self, logits)
Sampler.__call__ = slowly
"""
SLOW_LOADING = """
import time
from pathlib import Path
import openelm_mlx.loading
def slowly(*_, **__):
    Path(MARK).touch()
    time.sleep(30)
openelm_mlx.loading.start_loading = slowly
"""


def interrupted(tmp_path: Path, slow: str, *arguments: str | Path) -> Done:
    mark = tmp_path / "mark"
    process = start("generate", *arguments, before=slow.replace("MARK", repr(str(mark))))
    for _ in range(600):
        if mark.exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    return finish(process)


def test_ctrl_c_ends_with_the_partial_text(tmp_path: Path, model: Path) -> None:
    whole = generate(model, tokens=50).out
    done = interrupted(tmp_path, SLOW, "--model", model, "--prompt", PROMPT, "--max-tokens", "50")
    assert done.status == 130
    assert done.out.endswith("\n")
    assert 2 < len(done.out) < len(whole)
    assert whole.startswith(done.out[:-1])
    assert done.err.startswith("prompt: 6 tokens")
    assert "Traceback" not in done.err


def test_ctrl_c_leaves_whole_json(tmp_path: Path, model: Path) -> None:
    done = interrupted(tmp_path, SLOW, "--model", model, "--prompt", PROMPT, "--max-tokens", "50", "--json")
    values = json.loads(done.out)
    assert set(values) == KEYS
    assert values["finish_reason"] == "interrupted"
    assert 2 < values["generation_tokens"] == len(values["tokens"]) < 50
    assert tokens(model, tokens=50)[: len(values["tokens"])] == values["tokens"]
    assert (done.status, done.err) == (130, "")


def test_ctrl_c_while_loading(tmp_path: Path, model: Path) -> None:
    done = interrupted(tmp_path, SLOW_LOADING, "--model", model, "--prompt", PROMPT)
    assert (done.status, done.out, done.err) == (130, "", "")


def test_text_appears_as_it_is_made(tmp_path: Path, model: Path) -> None:
    """Through a pipe too: the first piece is there while the rest is still being generated."""
    slow = SLOW.replace("MARK", repr(str(tmp_path / "mark"))).replace("0.05", "0.2")
    process = start("generate", "--model", model, "--prompt", PROMPT, "--max-tokens", "50", before=slow)
    assert process.stdout
    assert os.read(process.stdout.fileno(), 100)
    time.sleep(0.5)
    assert process.poll() is None, "all at once, at the end"
    process.kill()
    finish(process)


def test_standard_input_without_end(model: Path) -> None:
    with Path("/dev/zero").open("rb") as zeros:
        done = finish(start("generate", "--model", model, "--prompt", "-", stdin=zeros))
    assert (done.status, done.out) == (2, "")
    assert "standard input has more than 33,554,432 bytes" in done.err


def test_what_cannot_be_said_is_refused_before_the_weights_are_read(
    model: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openelm_mlx import loading

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(loading, "load_model", loaded)
    assert "this model has none" in generate(model, "--system", "x").err
    assert "--raw skips it" in generate(chat_model, "--system", "x", "--raw").err
