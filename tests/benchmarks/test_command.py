"""``openelm bench`` as a person runs it, on models small enough to take no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.benchmarks import results
from openelm_mlx.benchmarks.suite import stored_precision, subject_of
from openelm_mlx.convert.job import convert
from openelm_mlx.errors import OpenELMError
from tests.support import sources
from tests.support.cli import Done, environment, finish, modules_of, run, run_apart, start
from tests.support.models import converted_folder, hf_folder

QUICK = ("--prompt-tokens", "5", "--gen-tokens", "4", "--repeats", "2", "--protocol", "quick")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_folder(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("openelm_mlx.benchmarks.bandwidth.NBYTES", 1 << 22)
    monkeypatch.setattr("openelm_mlx.benchmarks.bandwidth._SECONDS", 0.01)
    return tmp_path / "data"


@pytest.fixture
def small_window(tmp_path: Path) -> Path:
    """A model whose window has 64 tokens."""
    source = sources.hf(tmp_path / "hf", sources.weights(sources.config(), seed=3))
    return convert(source, tmp_path / "small", precision="fp32").folder


def bench(folder: Path, *arguments: str | Path) -> Done:
    return run("bench", "--model", folder, *QUICK, *arguments)


@pytest.mark.slow
class TestMeasuring:
    @pytest.fixture(scope="class")
    @staticmethod
    def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
        """One run with all that can be asked for, in a process of its own."""
        place = tmp_path_factory.mktemp("kept")
        options = ("--compare", "mlx-lm,llama.cpp", "--plot", place / "b.png", "--json", place / "b.json")
        env = environment(XDG_DATA_HOME=str(place / "data"))
        return run_apart("bench", "--model", folder, *QUICK, *options, "--save-to", place / "kept", env=env), place

    def test_it_ends_well(self, done: tuple[Done, Path]) -> None:
        assert done[0].status == 0, done[0].err

    def test_the_result_is_whole(self, done: tuple[Done, Path], folder: Path) -> None:
        result = results.load(done[1] / "b.json")
        rows = {row.program: row for row in result.rows}
        assert {"openelm-mlx", "mlx-lm"} <= rows.keys()
        ours = rows["openelm-mlx"]
        assert (ours.precision, ours.prompt_tokens, ours.gen_tokens) == ("fp32", 5, 4)
        assert len(ours.generation_tps.values) == 2
        assert ours.weight_bytes == rows["mlx-lm"].weight_bytes  # float32 in both
        assert ours.dispatches and rows["mlx-lm"].dispatches and ours.dispatches < rows["mlx-lm"].dispatches
        assert ours.ceiling_tps and ours.share == ours.generation_tps.median / ours.ceiling_tps
        assert {r.to for r in result.ratios} == rows.keys() - {"openelm-mlx"}
        assert result.protocol["tasks"][0]["prompt_tokens"] == 5
        assert result.command[:2] == ("openelm", "bench")
        assert any("llama.cpp: left out" in note for note in result.notes)

    def test_the_peers_agree(self, done: tuple[Done, Path]) -> None:
        notes = results.load(done[1] / "b.json").notes
        assert any("mlx-lm generates all 4 tokens as openelm-mlx does" in note for note in notes)

    def test_what_is_printed(self, done: tuple[Done, Path]) -> None:
        out = done[0].out
        for words in ("machine", "reads", "generation tok/s", "mlx-lm", "times as fast", "left out", "kept in"):
            assert words in out
        assert "loading" in done[0].err  # the progress

    def test_the_plot(self, done: tuple[Done, Path]) -> None:
        assert (done[1] / "b.png").read_bytes().startswith(b"\x89PNG")

    def test_what_is_stored_is_named_by_the_machine(self, done: tuple[Done, Path]) -> None:
        (stored,) = (done[1] / "kept").iterdir()
        result = results.load(stored)
        assert stored == results.default_path(result, done[1] / "kept", dated=False)
        assert not (done[1] / "data").exists()  # --json took its place


def test_results_go_to_the_data_folder(folder: Path, data_folder: Path) -> None:
    done = bench(folder, "--quiet")
    assert (done.status, done.err) == (0, "")
    (kept,) = (data_folder / "openelm-mlx" / "benchmarks").iterdir()
    assert f"kept in {kept}" in done.out
    assert results.load(kept).rows


def test_or_to_another(folder: Path, tmp_path: Path) -> None:
    assert bench(folder, "--out", tmp_path / "out").status == 0
    assert len(list((tmp_path / "out").iterdir())) == 1


@pytest.mark.slow
def test_several_lengths(folder: Path, tmp_path: Path) -> None:
    assert (
        run("bench", "--model", folder, *QUICK[2:], "--prompt-tokens", "5,9", "--json", tmp_path / "b.json").status == 0
    )
    assert [row.prompt_tokens for row in results.load(tmp_path / "b.json").rows] == [5, 9]


@pytest.mark.slow
class TestAgainst:
    @pytest.fixture(scope="class")
    @staticmethod
    def now(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("now") / "now.json"
        assert bench(folder, "--json", path).status == 0
        return path

    @staticmethod
    def faster(now: Path, then: Path, factor: float) -> Path:
        """A result of this machine whose speeds are those of `now`, times a factor."""
        values = json.loads(now.read_text())
        for row in values["rows"]:
            for speed in ("prompt_tps", "generation_tps", "total_tps"):
                spread = row[speed]
                row[speed] = {k: [x * factor for x in v] if k == "values" else v * factor for k, v in spread.items()}
        then.write_text(json.dumps(values))
        return then

    @pytest.mark.parametrize(
        ("factor", "options", "status"),
        [(1e6, (), 1), (1e-6, (), 0), (2.0, ("--threshold", "0.999"), 0), (2.0, ("--threshold", "1"), 2)],
    )
    def test_a_slowdown_is_status_1(
        self, folder: Path, now: Path, tmp_path: Path, factor: float, options: tuple[str, ...], status: int
    ) -> None:
        done = bench(folder, "--against", self.faster(now, tmp_path / "then.json", factor), *options)
        assert done.status == status
        assert ("SLOWER" in done.out) == (status == 1)

    def test_a_wrong_file_is_refused_before_anything_is_measured(self, folder: Path, tmp_path: Path) -> None:
        wrong = tmp_path / "wrong.json"
        wrong.write_text("{}")
        done = bench(folder, "--against", wrong)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(f"error: {wrong}: ") and done.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_place_that_cannot_be_written_is_refused_first(folder: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "folder").mkdir()
    done = bench(folder, option, tmp_path / "folder")
    assert (done.status, done.out) == (2, "")
    assert done.err == f"error: {tmp_path / 'folder'}: is no file, and will not be replaced; name another one\n"


def test_a_device_is_left_alone(tmp_path: Path) -> None:
    import os
    import stat

    os.mkfifo(tmp_path / "fifo")
    assert run("bench", "dispatches", "--model", "OpenELM-270M", "--json", tmp_path / "fifo").status == 2
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_it_measured_and_says_so(folder: Path, tmp_path: Path) -> None:
    import signal

    process = start(
        "bench", "--model", folder, *QUICK[2:], "--prompt-tokens", "5,6,7,8,9", "--json", tmp_path / "b.json"
    )
    assert process.stderr
    while b"(3 of 5)" not in (line := process.stderr.readline()):
        assert line, "it ended"
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.status == 130
    result = results.load(tmp_path / "b.json")
    assert [row.prompt_tokens for row in result.rows] == [5, 6]
    assert "interrupted: 2 of 5 tasks were measured" in result.notes
    assert "2 of 5 tasks" in done.out


def test_explain(folder: Path, tmp_path: Path) -> None:
    done = run("bench", "--model", folder, "--explain", "--json", tmp_path / "e.json")
    assert done.status == 0, done.err
    assert "matrix products" in done.out and "One decode step" in done.out
    (found,) = json.loads((tmp_path / "e.json").read_text())
    assert found["precision"] == "fp32" and found["parts"]


@pytest.mark.slow
def test_norms_of_one_model(folder: Path, tmp_path: Path) -> None:
    done = run("bench", "norms", "--model", folder, "--json", tmp_path / "v.json")
    assert done.status == 0, done.err
    assert "tokens/s" in done.out
    found = json.loads((tmp_path / "v.json").read_text())
    assert found["model"] == str(folder) and found["precision"] == "fp32"


def test_dispatches(tmp_path: Path) -> None:
    done = run("bench", "dispatches", "--model", "OpenELM-270M", "--precision", "4bit", "--json", tmp_path / "d.json")
    assert done.status == 0, done.err
    (found,) = json.loads((tmp_path / "d.json").read_text())
    assert (found["model"], found["precision"]) == ("OpenELM-270M", "4bit")
    assert found["ours"]["total"] < found["mlx_lm"]["total"]
    assert str(found["ours"]["total"]) in done.out


def test_families_are_chosen_by_name() -> None:
    done = run("bench", "families", "--only", "MobiLlama-0.5B")
    assert done.status == 0
    assert "left out" in done.out  # this one cannot be run through mlx-lm, which needs no time to be said
    assert run("bench", "families", "--only", "nonsense").err.startswith("error: no family named 'nonsense'")


def test_it_imports_no_other_framework(folder: Path, tmp_path: Path) -> None:
    done, modules = modules_of(tmp_path / "modules", "bench", "--model", folder, "--explain")
    assert done.status == 0, done.err
    assert {"transformers", "mlx_lm", "torch", "matplotlib"} & modules == set()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "--random-weights"), "--model"),
        (("bench", "--model", "OpenELM-270M"), "--random-weights"),
        (("bench", "--model", "x", "--random-weights"), "OpenELM-270M"),
        (("bench", "--model", "OpenELM-270M", "--random-weights", "--precision", "3bit"), "3bit"),
        (("bench", "--model", "/nonexistent/x"), "/nonexistent/x"),
        (("bench", "--repeats", "3", "train"), "--repeats stands before train"),
        (("bench", "--repeats", "0", "estimate"), "--repeats stands before estimate"),
        (("bench", "--threshold", "0.5", "estimate"), "--threshold stands before estimate"),
        (("bench", "--model", "x", "--compare", ""), "names nothing"),
        (("bench", "--model", "x", "--threshold", "0.5"), "--threshold goes with --against"),
        (("bench", "--model", "x", "--threshold", "nan", "--against", "x"), "--threshold must be"),
        (("bench", "estimate", "--json", "/dev/full"), "/dev/full: is no file"),
        (("bench", "estimate", "--json", "/dev/null/x"), "/dev/null/x: cannot be written"),
        (("bench", "train", "--model", "x", "--json", "/"), "/: is no file"),
        (("bench", "train", "--random-weights"), "--model"),
        (("bench", "train", "--model", "OpenELM-270M", "--random-weights", "--method", "x"), "lora, dora, full"),
        (("bench", "dispatches", "--model", "x"), "'x'"),
        (("bench", "dispatches", "--precision", "x"), "'x'"),
        (("bench", "families", "--precision", "x"), "'x'"),
    ],
)
def test_refusals_are_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert said in done.err


def test_runs_keep_to_a_models_window(small_window: Path, tmp_path: Path) -> None:
    """Of 64 tokens; the paper's protocol generates 1,024."""
    done = run("bench", "--model", small_window, "--repeats", "1", "--json", tmp_path / "b.json", "--quiet")
    assert done.status == 0, done.err
    (row,) = results.load(tmp_path / "b.json").rows
    assert (row.prompt_tokens, row.gen_tokens) == (36, 28)
    assert f"note: {small_window}: 28 tokens are generated instead of 1024, as its window has 64" in done.out


def test_a_prompt_that_fills_the_window_is_refused_before_anything_is_measured(
    small_window: Path, tmp_path: Path
) -> None:
    done = run("bench", "--model", small_window, "--prompt-tokens", "10,63", "--json", tmp_path / "b.json")
    assert (done.status, done.out) == (2, "")
    assert done.err == (
        f"error: {small_window}: a prompt of 63 tokens leaves no room in the window of 64; give fewer --prompt-tokens\n"
    )
    assert not (tmp_path / "b.json").exists()


@pytest.mark.slow
def test_without_a_model_the_embedded_one_is_measured(tmp_path: Path) -> None:
    done = run_apart("bench", *QUICK, "--json", tmp_path / "b.json", "--quiet")
    assert (done.status, done.err) == (0, "")
    assert [(row.model, row.precision) for row in results.load(tmp_path / "b.json").rows] == [
        ("embedded model", "bf16")
    ]
    done = run_apart("bench", *QUICK, "--json", tmp_path / "b.json")
    assert done.err.startswith("no model named: using the embedded one")


class TestSubjects:
    @pytest.mark.parametrize(("precision", "told"), [("bf16", "bf16"), ("4bit", "4bit"), ("fp32", "fp32")])
    def test_a_folders_precision(self, tmp_path: Path, precision: str, told: str) -> None:
        assert stored_precision(converted_folder(tmp_path / "m", precision)) == told

    def test_an_unconverted_folder_does_not_say(self, tmp_path: Path) -> None:
        assert subject_of(str(hf_folder(tmp_path / "hf")), random_weights=False, precision=None).precision == "stored"

    def test_a_folder_has_its_own_precision(self, folder: Path) -> None:
        with pytest.raises(OpenELMError, match="--random-weights"):
            subject_of(str(folder), random_weights=False, precision="4bit")

    def test_a_folder_named_like_a_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        made: Any = converted_folder(tmp_path / "OpenELM-270M")
        assert subject_of("OpenELM-270M", random_weights=False, precision=None).folder == Path(made.name)
