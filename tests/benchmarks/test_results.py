"""Results: rows from runs, files that come back as they were, and files that are something else."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.benchmarks import results
from openelm_mlx.benchmarks.bandwidth import Bandwidth
from openelm_mlx.benchmarks.protocol import Spread, Timing
from openelm_mlx.benchmarks.results import Result, Row, default_folder, default_path, load, ratios, save, shown_command
from openelm_mlx.errors import OpenELMError
from tests.benchmarks.made import MACHINE, result, row

NAMES: dict[str, Any] = {"peer": "openelm-mlx", "model": "m", "precision": "bf16"}


# Rows.


def test_a_row_of_runs() -> None:
    timings = [Timing(36, 0.5, 101, s) for s in (4.0, 2.0, 5.0)]
    made = Row.of(timings, **NAMES)
    assert (made.prompt_tokens, made.gen_tokens) == (36, 101)
    assert made.prompt_tps == Spread(72.0, 72.0, 72.0, (72.0, 72.0, 72.0))
    assert made.generation_tps == Spread(25.0, 20.0, 50.0, (25.0, 50.0, 20.0))
    assert made.total_tps.median == 137 / 4.5
    assert (made.ceiling_tps, made.share) == (None, None)


def test_its_share_of_the_ceiling() -> None:
    timings = [Timing(50, 0.5, 100, 99 / 16)]
    facts: dict[str, Any] = {**NAMES, "weight_bytes": 1_000_000, "kv_bytes_per_token": 10_000}
    made = Row.of(timings, bandwidth=Bandwidth(80e6, "by hand"), **facts)
    assert made.ceiling_tps == 40.0  # 80e6 / (1e6 + 1e4 * (50 + 100 / 2))
    assert made.share == 0.4
    assert Row.of(timings, **facts).share is None
    assert Row.of(timings, bandwidth=Bandwidth(80e6, ""), **NAMES).share is None


def test_runs_that_were_cut_short() -> None:
    assert Row.of([Timing(36, 0.5, n, 1.0) for n in (30, 28, 31, 10)], **NAMES).gen_tokens == 28


def test_ratios_are_taken_run_by_run() -> None:
    ours = row(prompt_tps=Spread.of([10, 20]), generation_tps=Spread.of([30, 60]), total_tps=Spread.of([5, 6]))
    theirs = row(
        peer="mlx-lm", prompt_tps=Spread.of([5, 4]), generation_tps=Spread.of([10, 20]), total_tps=Spread.of([5, 3])
    )
    best = row(50.0, peer="mlx-lm", variant="float32, OpenBLAS")
    other = row(peer="mlx-lm", precision="4bit")
    made = ratios([ours, theirs, best, other], "openelm-mlx")
    assert [(r.program, r.to) for r in made] == [
        ("openelm-mlx", "mlx-lm"),
        ("openelm-mlx", "mlx-lm (float32, OpenBLAS)"),
    ]
    assert made[0].prompt.values == (2, 5)
    assert (made[0].generation.median, made[0].total.values) == (3, (1, 2))
    assert made[1].generation.values == (45 / 50,), "medians, when there are not the same numbers of runs"
    assert ratios([theirs, best], "openelm-mlx") == ()


def test_ratios_to_a_program_that_a_time_limit_stopped() -> None:
    stopped = row(50.0, peer="mlx-lm", gen_tokens=17)
    (made,) = ratios([row(gen_tokens=33), stopped, row(peer="mlx-lm", prompt_tokens=512)], "openelm-mlx")
    assert (made.gen_tokens, made.generation.values) == (33, (2,))


# Files.


def full() -> Result:
    """A result in which everything is set."""
    facts: dict[str, Any] = {"weight_bytes": 543_000_000, "kv_bytes_per_token": 30_720, "dispatches": 210}
    rows = [row(100 / 3, ceiling_tps=40.5, share=0.8, peak_memory_gb=1.25, **facts), row(7, peer="llama.cpp")]
    return result(*rows, ratios=ratios(rows, "openelm-mlx"), notes=("busy",), extra={"train": {"tokens_s": [1.5, 2]}})


def test_a_result_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "r.json"
    for made in (full(), result(bandwidth=None)):
        save(made, path)
        assert load(path) == made
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_the_time_is_utc() -> None:
    made = Result(name="x", command=(), machine={}, protocol={})
    then = datetime.fromisoformat(made.time)
    assert then.utcoffset() == datetime.now(timezone.utc).utcoffset()
    assert abs((datetime.now(timezone.utc) - then).total_seconds()) < 60


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "r.json")
    save(result(), tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load(tmp_path / "r.json") == result()


@pytest.mark.parametrize("name", ["", "file/r.json"])
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OpenELMError, match=r"cannot be written: |is no file") as error:
        save(result(), tmp_path / name)
    assert str(error.value).startswith(str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(result(notes=("old",)), tmp_path / "r.json")

    def full_disk(path: Path, value: Any) -> None:
        path.write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "write_json", full_disk)
    with pytest.raises(OpenELMError, match=r"r\.json: the result cannot be written: No space left on device"):
        save(result(), tmp_path / "r.json")
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert load(tmp_path / "r.json").notes == ("old",)


def test_names_that_are_no_text(tmp_path: Path) -> None:
    save(result(row(model="caf\udce9")), tmp_path / "r.json")
    assert load(tmp_path / "r.json").rows[0].model == "caf?"


# Files that are something else.


def changed(change: Callable[[Any], object]) -> dict[str, Any]:
    values = json.loads(json.dumps(full().to_json()))
    change(values)
    return dict(values)


WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda v: v.clear(), "not a result that this version of openelm bench wrote: version is missing"),
    (lambda v: v.update(version=2), "not a result that this version of openelm bench wrote: version is 2, not 1"),
    (lambda v: v.update(version=True), "version is True, not 1"),
    (lambda v: v.pop("rows"), "rows is missing: not a result of openelm bench"),
    (lambda v: v["rows"][1].pop("share"), "rows.1.share is missing"),
    (lambda v: v.update(rows={}), "rows must be a list, not {}"),
    (lambda v: v.update(rows=[1]), "rows.0 must be an object, not 1"),
    (lambda v: v.update(command="openelm bench"), "command must be a list, not 'openelm bench'"),
    (lambda v: v.update(command=[1]), "command.0 must be a text, not 1"),
    (lambda v: v.update(machine=None), "machine must be an object, not None"),
    (lambda v: v.update(bandwidth=5), "bandwidth must be an object, not 5"),
    (lambda v: v["bandwidth"].update(bytes_per_s="x"), "bandwidth.bytes_per_s must be a number above 0, not 'x'"),
    (lambda v: v["rows"][0].update(peer=None), "rows.0.peer must be a text, not None"),
    (lambda v: v["rows"][0].update(prompt_tokens=1.5), "rows.0.prompt_tokens must be a whole number, not 1.5"),
    (lambda v: v["rows"][0].update(dispatches=True), "rows.0.dispatches must be a whole number, not True"),
    (lambda v: v["rows"][0].update(share=10**400), "rows.0.share must be a number above 0, not 1000"),
    (lambda v: v["rows"][0].update(prompt_tps=9), "rows.0.prompt_tps.values must be a list of measurements, not None"),
    (lambda v: v["rows"][0]["total_tps"].update(values=[]), "rows.0.total_tps.values must be a list of measurements"),
    (
        lambda v: v["rows"][0]["total_tps"].update(values=[0]),
        "rows.0.total_tps.values.0 must be a number above 0",
    ),
    (
        lambda v: v["rows"][0]["total_tps"].update(values=[1, float("nan")]),
        "rows.0.total_tps.values.1 must be",
    ),
    (lambda v: v["ratios"][0].update(to=[]), "ratios.0.to must be a text, not []"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_value_is_named(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(changed(change)))
    with pytest.raises(OpenELMError) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 150


@pytest.mark.parametrize("text", ["", "[]", "3", '{"model_type": "openelm"}', "\x00"])
def test_a_foreign_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(OpenELMError, match=r"config\.json: "):
        load(tmp_path / "config.json")
    with pytest.raises(OpenELMError, match="no such file"):
        load(tmp_path / "none.json")


def test_what_a_later_version_adds_is_no_error() -> None:
    assert Result.from_json(changed(lambda v: v.update(new=1)), "x") == full()


# Names.


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/bob")
    arguments = ["bench", "--model", "/home/bob/m", "--json=/home/bob/x.json", "/home/bobby", "caf\udce9"]
    shown = ("openelm", "bench", "--model", "~/m", "--json=~/x.json", "/home/bobby", "caf�")
    assert shown_command(arguments) == shown


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/bob")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert default_folder() == Path("/home/bob/.local/share/openelm-mlx/benchmarks")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_folder() == Path("/home/bob/.local/share/openelm-mlx/benchmarks")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "openelm-mlx" / "benchmarks"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_folder() == Path("/home/bob/Library/Application Support/openelm-mlx/benchmarks")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("paper", "paper"),
        ("OpenELM-1_1B 4bit", "OpenELM-1_1B-4bit"),
        ("/home/bob/models/openelm-270m/", "openelm-270m"),
        ("..", "model"),
        ("a:b*?é", "a-b"),
    ],
)
def test_the_files_name(name: str, part: str) -> None:
    path = default_path(result(name=name), Path("results"))
    assert path == Path(f"results/apple-m2-max-macos-arm64-{part}-20250304T050607.json")
    assert re.fullmatch(r"[\w.-]+", path.name, re.ASCII)
    linux = {**MACHINE, "gpu": None, "chip": "AMD EPYC", "os": "Linux", "architecture": "x86_64"}
    assert default_path(result(machine=linux), Path()).name == "amd-epyc-linux-x86-64-quick-20250304T050607.json"
