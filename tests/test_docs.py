"""The documentation says what is true now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from openelm_mlx.finetune.recipes import names

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


def test_the_flags_and_recipes_on_the_fine_tuning_page_exist() -> None:
    page = (ROOT / "docs" / "finetune.md").read_text()
    rows = "\n".join(line for line in (ROOT / "docs" / "cli.md").read_text().splitlines() if line.startswith("| `-"))
    known = set(re.findall(r"`(--[a-z0-9-]+)`", rows))
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)", page)) - {"--logdir"}  # which is TensorBoard's
    assert len(named) > 20
    assert named - known == set()
    section = page.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    cells = [
        line.split("|")[1] for line in section.splitlines() if line.startswith("| `") and "-" in line.split("|")[1]
    ]
    named_recipes = set(re.findall(r"`([a-z][^`]+)`", "".join(cells)))
    assert named_recipes | set(re.findall(r"--recipe ([a-z][a-z0-9.-]+)(?![\w./])", page)) == set(names())


def test_the_demonstration_models_recipe_is_the_one_told() -> None:
    steps = re.findall(r"^steps: (\d+)$", (ROOT / "docs" / "demo-model" / "recipe.yaml").read_text(), re.MULTILINE)
    assert f"{int(*steps):,} updates" in (ROOT / "docs" / "demo-model.md").read_text()


def test_the_sections_that_pages_point_to_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    missing = []
    for page in pages:
        for link, section in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
            target = page.parent / link if link else page
            if section not in _sections(target.read_text()):
                missing.append(f"{page.name}: {link}#{section}")
    assert missing == []


def _sections(page: str) -> set[str]:
    """As GitHub names a page's headings in addresses."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
