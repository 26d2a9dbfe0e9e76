"""What the pages point to exists: files, tests and settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal.config import SETTINGS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if not link.startswith("http")]
    assert links or page.name == "settings.md"
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    missing = [name for name in re.findall(r"`(test_\w+)`", page.read_text()) if f"def {name}" not in sources]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_settings_exist(page: Path) -> None:
    sections = {key.partition(".")[0] for key in SETTINGS if "." in key}
    named = {
        key for key in re.findall(r"\b([a-z]+\.[a-z_0-9]+)=", page.read_text()) if key.partition(".")[0] in sections
    }
    assert named - set(SETTINGS) == set()
