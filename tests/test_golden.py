"""The golden cases through the real converter (`python -m tests.golden` runs any folder of them)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.checkpoints import BUNDLED
from tests.golden.kinds import Outcome, check_folder


def failures(folder: Path) -> list[Outcome | str]:
    outcomes = list(check_folder(folder))
    assert outcomes
    return [o for o in outcomes if not (isinstance(o, Outcome) and o.ok)]


def test_tiny_cases_in_both_layouts() -> None:
    assert failures(BUNDLED) == []


@pytest.mark.slow
def test_270m_in_both_layouts() -> None:
    assert failures(BUNDLED / "large") == []


def test_a_wrong_value_is_a_miss(tmp_path: Path) -> None:
    import json

    golden = json.loads((BUNDLED / "tiny-tied-seed0.json").read_text())
    golden["probe_logits"][1][5] += 1e-4
    (tmp_path / "tiny-tied-seed0.json").write_text(json.dumps(golden))
    assert len(failures(tmp_path)) == 2  # one a layout
