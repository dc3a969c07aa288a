"""Links between the pages resolve, and the README lists all pages."""

import re
from pathlib import Path

import pytest

from forage.config.run_config import RunConfig
from forage.config.sentinel_config import RollBack, WarnOrStop

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page for folder in ("", "docs", "benchmarks") for page in (ROOT / folder).glob("*.md")
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file(page: Path):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8"))]
    local = {target for target in targets if target and not target.startswith("http")}
    assert {target for target in local if not (page.parent / target).exists()} == set()


def test_the_readme_lists_each_page_of_the_documentation():
    links = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} - links == set()


def test_the_sentinels_page_names_each_of_its_keys_with_its_default():
    page = (ROOT / "docs" / "sentinel.md").read_text(encoding="utf-8")
    assert RunConfig.model_validate({"model": {"path": "m"}}).sentinel == WarnOrStop()
    defaults = RollBack().model_dump(exclude={"kind"})
    wrong = {
        name: value
        for name, value in defaults.items()
        if not re.search(rf"`{name}` \(?{'null' if value is None else f'{value:g}'}\b", page)
    }
    assert wrong == {}
