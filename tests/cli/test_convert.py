"""`openelm convert`: every option reaches the conversion, and what is said where."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import sources
from tests.support.cli import MAIN, environment, run, run_apart
from tests.support.sources import TOKENS
from tests.support.tokenizers_made import MODEL


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sources.hf(tmp_path / "hf")


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def test_the_result_is_one_line_on_stdout(tmp_path: Path, source: Path) -> None:
    done = run_apart("convert", source, "--out", tmp_path / "out", "--precision", "4bit", "--group-size", "32")
    assert done.status == 0
    size = sum(x for x in json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["metadata"].values())
    assert done.out == f"{tmp_path / 'out'}: 2 layers, 4bit, groups of 32, {size / 1e6:,.1f} MB\n"
    assert done.err == ""


def test_a_preset_is_called_by_its_name(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openelm_mlx.config import OpenELMConfig

    monkeypatch.setattr(OpenELMConfig, "preset_name", "OpenELM-tiny")
    assert ": OpenELM-tiny, bf16, " in run("convert", source, "--out", tmp_path / "out").out


def test_precision_and_group_size(tmp_path: Path, source: Path) -> None:
    assert run("convert", source, "-o", tmp_path / "a").status == 0
    assert "quantization" not in config_of(tmp_path / "a")
    assert config_of(tmp_path / "a")["torch_dtype"] == "bfloat16"
    assert run("convert", source, "-o", tmp_path / "b", "--precision", "8bit").status == 0
    assert config_of(tmp_path / "b")["quantization"]["group_size"] == 64
    assert run("convert", source, "-o", tmp_path / "c", "--precision", "4bit", "--group-size", "32").status == 0
    entry = config_of(tmp_path / "c")["quantization"]
    assert (entry["bits"], entry["group_size"]) == (4, 32)
    for wrong in (("--precision", "5bit"), ("--group-size", "48")):
        done = run("convert", source, "-o", tmp_path / "d", *wrong)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith("error: ")


def test_fp16_is_warned_about(tmp_path: Path, source: Path) -> None:
    done = run("convert", source, "--out", tmp_path / "out", "--precision", "fp16")
    assert done.status == 0
    assert done.err.startswith("warning: float16: OpenELM was trained in bfloat16")
    assert done.err.count("\n") == 1


def test_kept_layers_are_said(tmp_path: Path, source: Path) -> None:
    done = run("convert", source, "--out", tmp_path / "out", "--precision", "4bit")
    assert done.err == "kept in full precision: layer 0 attn.out_proj (width is no multiple of group size 64)\n"


def test_config_tokenizer_and_padding_rows(tmp_path: Path) -> None:
    pt = sources.corenet(tmp_path / "run", vocab_size=TOKENS + 28)
    (tmp_path / "run" / "openelm.yaml").rename(tmp_path / "x.yaml")
    with_config = ("convert", pt, "--config", tmp_path / "x.yaml", "--tokenizer", MODEL)
    assert run("convert", pt, "--tokenizer", MODEL, "--out", tmp_path / "a").status == 2
    done = run(*with_config, "--out", tmp_path / "a")
    assert done.status == 0, done.err
    assert done.err == "dropped 28 padding rows of the embedding (528 -> 500); --keep-padding-rows keeps them\n"
    assert config_of(tmp_path / "a")["vocab_size"] == TOKENS
    assert (tmp_path / "a" / "tokenizer.model").exists()
    kept = run(*with_config, "--keep-padding-rows", "--out", tmp_path / "b")
    assert (kept.status, kept.err) == (0, "")
    assert config_of(tmp_path / "b")["vocab_size"] == TOKENS + 28


def test_tokenizer_none(tmp_path: Path, source: Path) -> None:
    assert run("convert", source, "--tokenizer", "none", "--out", tmp_path / "out").status == 0
    assert list((tmp_path / "out").glob("tokenizer*")) == []


def test_force(tmp_path: Path, source: Path) -> None:
    assert run("convert", source, "--out", tmp_path / "out").status == 0
    again = ("convert", source, "--out", tmp_path / "out", "--precision", "fp32")
    refused = run(*again)
    assert refused.status == 2
    assert "replace it with --force" in refused.err
    assert run(*again, "--force").status == 0
    assert config_of(tmp_path / "out")["torch_dtype"] == "float32"


def test_a_revision_goes_with_a_hub_name(tmp_path: Path, source: Path) -> None:
    done = run("convert", source, "--out", tmp_path / "out", "--revision", "v1")
    assert done.status == 2
    assert "has no revision 'v1'" in done.err


def test_verify_prints_its_figures(tmp_path: Path, source: Path) -> None:
    done = run("convert", source, "--out", tmp_path / "out", "--precision", "fp32", "--verify")
    assert done.out.splitlines()[1:] == [
        "verified on 64 tokens against the source in float32:",
        "  logit difference  max 0, mean 0",
        "  KL divergence     0 nats a token",
        "  top-1 agreement   100.0%",
        done.out.splitlines()[-1],
    ]
    match = re.fullmatch(r"  perplexity        ([\d.]+) before, ([\d.]+) after", done.out.splitlines()[-1])
    assert match
    assert float(match[1]) == float(match[2]) > 1
    coarse = run("convert", source, "--out", tmp_path / "b", "--precision", "4bit", "--verify", "--quiet")
    assert coarse.out.startswith("verified on 64 tokens")
    assert "max 0," not in coarse.out


@pytest.mark.parametrize("quiet", ["--quiet", "-q"])
def test_quiet(tmp_path: Path, source: Path, quiet: str) -> None:
    done = run("convert", source, "--out", tmp_path / "out", "--precision", "4bit", quiet)
    assert (done.status, done.out, done.err) == (0, "", "")
    assert run("convert", source, "--out", tmp_path / "out", quiet).err.startswith("error: ")


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    """Not as markup or emoji codes, and not wrapped."""
    out = tmp_path / (":dog: [red]x[/red]" + "long" * 30)
    substitute = tmp_path / ":cat: [b]" / "tokenizer"
    substitute.mkdir(parents=True)
    (substitute / "tokenizer.model").write_bytes(MODEL.read_bytes())
    (substitute / "chat_template.jinja").write_text("{{ messages }}")
    done = run("convert", sources.hf(tmp_path / "hf"), "--out", out, "--tokenizer", substitute)
    assert done.out.startswith(f"{out}: ")
    assert done.err == (f"tokenizer: the chat template of {substitute} was dropped: it was not made for this model\n")


def on_a_terminal(*arguments: str | Path, before: str = "") -> tuple[int, str]:
    """Exit status, and all that a person sees on a terminal of 120 columns."""
    parent, child = pty.openpty()
    command = [sys.executable, "-c", f"{before}\n{MAIN}", *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=child, stdout=child, stderr=child, env=environment(TERM="xterm", NO_COLOR="1")
    )
    os.close(child)
    seen = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # how Linux says that the other side is closed
            break
        if not piece:
            break
        seen += piece
    os.close(parent)
    return process.wait(timeout=60), seen.decode()


SLOW = """
import time
from openelm_mlx.rawtensor import RawTensor
read = RawTensor.read
def slowly(self):
    time.sleep(0.05)
    return read(self)
RawTensor.read = slowly
"""


def test_a_bar_with_bytes_on_a_terminal(tmp_path: Path, source: Path) -> None:
    total = sum(4 * x.size for x in sources.weights(sources.config()).values())
    status, seen = on_a_terminal("convert", source, "--out", tmp_path / "out", before=SLOW)
    assert status == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert "converting" in plain
    assert f"/{total / 1000:.1f} kB" in plain
    assert plain.rstrip().endswith(" MB"), "the bar is gone, the result stays"
    _, silent = on_a_terminal("convert", source, "--out", tmp_path / "quiet", "--quiet", before=SLOW)
    assert silent == ""


def test_the_bar_leaves_a_download_its_own(tmp_path: Path, source: Path) -> None:
    """Nothing takes over the terminal before the conversion itself begins."""
    before = """
import sys
from openelm_mlx import hub
resolve = hub.resolve
def loud(*a, **k):
    sys.stderr.write("\\rFetching 50%")
    assert sys.stderr is sys.__stderr__, "redirected"
    return resolve(*a, **k)
hub.resolve = loud
"""
    status, seen = on_a_terminal("convert", source, "--out", tmp_path / "out", before=before)
    assert status == 0
    assert seen.startswith("\rFetching 50%")
