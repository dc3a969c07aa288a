"""docs/algorithms.md describes each estimator and each loss of the settings."""

from pathlib import Path

from forage.config.run_config import RunConfig
from forage.settings import kinds_of, models_at

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_page_has_a_row_or_a_section_for_each_estimator_and_each_loss() -> None:
    text = PAGE.read_text(encoding="utf-8")
    algorithm = models_at([RunConfig], "algorithm")
    for key in ("advantage", "loss", "token_losses", "aggregate"):
        section = text.partition(f"(`{key}`)\n")[2].partition("\n## ")[0]
        for kind in kinds_of(models_at(algorithm, key)):
            assert f"\n### `{kind}`\n" in section or f"\n| `{kind}` |" in section
