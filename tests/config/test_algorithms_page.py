"""docs/algorithms.md has the table of keys, defaults and kinds that the settings give."""

from pathlib import Path

from pydantic import BaseModel

from forage.config.run_config import RunConfig
from forage.config.settings_text import keys_of
from forage.settings import kinds_of, models_at

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_page_has_the_table_of_keys_as_the_settings_give_it() -> None:
    """To renew the table, put what ``key_table`` gives in its place."""
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join(key_table(RunConfig, "algorithm"))
    assert text.endswith(table + "\n"), table


def test_the_page_has_a_section_for_each_estimator_and_each_loss() -> None:
    text = PAGE.read_text(encoding="utf-8")
    algorithm = models_at([RunConfig], "algorithm")
    for key in ("advantage", "loss"):
        for kind in kinds_of(models_at(algorithm, key)):
            assert f"\n### `{kind}`\n" in text


def key_table(root: type[BaseModel], section: str) -> list[str]:
    """A section as a table in Markdown: each key once, with the kinds that have it."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for key in keys_of(root, section)[1:]:
        if not key.path.endswith(".kind"):
            path = key.path.removeprefix(f"{section}.")
            kinds.setdefault((path, key.default), []).extend([key.kind] if key.kind else [])
    rows = [
        f"| `{path}` | {default} | {', '.join(dict.fromkeys(names))} |"
        for (path, default), names in kinds.items()
    ]
    return ["| key | default | read by the kinds |", "|---|---|---|", *rows]
