"""The golden cases through the real converter (`python -m tests.golden` runs any folder of them)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from openelm_mlx import device
from tests.cpu.compiled import can_be_made
from tests.cpu.starts import has_openblas
from tests.golden.checkpoints import BUNDLED
from tests.golden.kinds import Outcome, check_folder
from tests.support.cli import ROOT, environment


def failures(folder: Path) -> list[Outcome | str]:
    outcomes = list(check_folder(folder))
    assert outcomes
    return [o for o in outcomes if not (isinstance(o, Outcome) and o.ok)]


def test_tiny_cases_in_both_layouts() -> None:
    assert failures(BUNDLED) == []


@pytest.mark.skipif(sys.platform != "linux" or device.backend() != "cpu", reason="has one BLAS")
@pytest.mark.parametrize("choice", ["shim", "preload", "none"])
def test_tiny_cases_with_every_blas(choice: str) -> None:
    """The choice is of the process: each takes one of its own."""
    if (choice == "shim" and not can_be_made()) or (choice == "preload" and not has_openblas()):
        pytest.skip("this machine has not got it")
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden", str(BUNDLED), "--only", "inference"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(OPENELM_BLAS=choice),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith("\n8 passed, 0 failed\n")


@pytest.mark.slow
def test_270m_in_both_layouts() -> None:
    assert failures(BUNDLED / "large") == []


def test_a_wrong_value_is_a_miss(tmp_path: Path) -> None:
    import json

    golden = json.loads((BUNDLED / "tiny-tied-seed0.json").read_text())
    golden["probe_logits"][1][5] += 1e-4
    (tmp_path / "tiny-tied-seed0.json").write_text(json.dumps(golden))
    assert len(failures(tmp_path)) == 2  # one a layout
