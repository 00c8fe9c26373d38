"""The clock of cold starts, on small programs of known behaviour, and on the two real ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from openelm_mlx.benchmarks import startup
from openelm_mlx.benchmarks.protocol import Spread
from openelm_mlx.benchmarks.startup import Program, StartUp, cold_start, first_text, generators, lines, phases
from openelm_mlx.errors import OpenELMError
from tests.support.models import converted_folder
from tests.support.tokenizers_made import MODEL

MARK = b"==========\n"
FOREVER = "time.sleep(600)"


def program(code: str, before_text: bytes = b"", name: str = "fake") -> Program:
    return Program(name, (sys.executable, "-c", f"import os, sys, time\n{code}"), before_text)


def say(text: str) -> str:
    return f"os.write(1, {text.encode()!r})"


def test_the_clock_stops_at_the_first_text_and_the_program_is_ended(tmp_path: Path) -> None:
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    seconds = first_text(program(f"{note}; time.sleep(0.3); {say('a')}; {FOREVER}"))
    assert 0.3 <= seconds < 600
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_comes_before_the_text_does_not_stop_the_clock() -> None:
    """Even when it comes in pieces, or with something else ahead of it."""
    code = "; time.sleep(0.1); ".join(say(piece) for piece in ("a warning\n=====", "=====", "\n", "text"))
    assert first_text(program(f"{code}; {FOREVER}", MARK)) >= 0.3


def test_text_in_the_same_piece_as_what_comes_before_it() -> None:
    assert first_text(program(f"{say('==========' + chr(10) + 'text')}; {FOREVER}", MARK)) > 0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise RuntimeError('no model')", "RuntimeError: no model"),
        ("print('first\\nerror: last words', file=sys.stderr); sys.exit(2)", "error: last words"),
        ("sys.exit(3)", "it ended with status 3 and wrote no text"),
        (f"{say('==========' + chr(10))}", "it ended with status 0 and wrote no text"),
        ("os.close(1); time.sleep(0.1); sys.exit('too late')", "too late"),
    ],
)
def test_a_program_that_writes_no_text(code: str, why: str) -> None:
    with pytest.raises(OpenELMError) as e:
        first_text(program(code, MARK))
    assert str(e.value) == why


def test_a_program_that_does_not_come_to_its_text_is_ended(tmp_path: Path) -> None:
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    with pytest.raises(OpenELMError, match=r"^no text after 1 s$"):
        first_text(program(f"{note}; {FOREVER}"), time_limit=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(OpenELMError) as e:
        first_text(Program("none", (missing,)))
    assert str(e.value) == f"{missing}: No such file or directory"


def test_the_environment_favours_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LD_PRELOAD", "PYTHONPATH", "PYTHONUNBUFFERED", "OPENELM_BLAS"):
        monkeypatch.setenv(name, "")
    seen = tmp_path / "seen"
    first_text(program(f"import json; open({str(seen)!r}, 'w').write(json.dumps(dict(os.environ))); {say('a')}"))
    environment = json.loads(seen.read_text())
    assert {"LD_PRELOAD", "PYTHONPATH", "PYTHONUNBUFFERED"} & environment.keys() == set()
    assert environment["OPENELM_BLAS"] == ""  # a setting of ours that a person made
    assert environment["PATH"] == os.environ["PATH"]


def test_programs_take_turns_and_the_first_start_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def first_text(program: Program, time_limit: float) -> float:
        started.append(program.name)
        if program.name == "b" and len(started) > 3:
            raise OpenELMError("broke later")
        return float(len(started))

    monkeypatch.setattr(startup, "first_text", first_text)
    a, b = cold_start([Program("a", ()), Program("b", ())], 3)
    assert started == ["a", "b", "a", "b", "a", "a"]
    assert a == StartUp("a", Spread.of([3.0, 5.0, 6.0]))
    assert b == StartUp("b", None, "broke later")


def test_nothing_to_repeat() -> None:
    with pytest.raises(OpenELMError, match="repeats must be 1 or more, not 0"):
        cold_start([], 0)


def test_lines() -> None:
    ours, theirs = (
        StartUp("openelm generate", Spread.of([1.0, 2.0, 4.0])),
        StartUp("mlx_lm", Spread.of([4.0, 9.0, 8.0])),
    )
    assert lines([ours, theirs, StartUp("other", None, "No module named other")]) == [
        "program             first text after  against",
        "openelm generate  2.00 s (1.00-4.00)",
        "mlx_lm            8.00 s (4.00-9.00)  4.00x openelm generate",
        "other: no figure: No module named other",
    ]
    assert lines([StartUp("a", None, "x"), theirs])[-1] == "a: no figure: x"
    assert lines([]) == []


def test_the_real_programs(tmp_path: Path) -> None:
    """Both write text for the same folder; neither is only what is written before it."""
    folder = converted_folder(tmp_path / "model", tokenizer=MODEL)
    assert [p.name for p in generators(folder)] == ["openelm generate", "mlx_lm.generate"]
    for generator in generators(folder, "Once", 2):
        assert first_text(generator, 120) > 0


def test_a_folder_that_is_not_there_is_said_in_the_programs_words(tmp_path: Path) -> None:
    ours = generators(tmp_path / "none")[0]
    with pytest.raises(OpenELMError, match=r"^error: .*none") as e:
        first_text(ours)
    assert "\n" not in str(e.value)


def test_phases() -> None:
    """Without mlx-lm's, which takes seconds."""
    assert all(first_text(phase, 60) > 0 for phase in phases()[:3])
    assert "mlx_lm" in phases()[3].command[-1]
