"""The documentation says what is true now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_command_line_page_is_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "docs/make_cli.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    targets = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert targets
    assert [f"{page.name}: {link}" for page, link in targets if not (page.parent / link).exists()] == []
