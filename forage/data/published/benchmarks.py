"""The published question sets: where the hub keeps them, and how many questions they have.

Nothing is downloaded here; ``prepare.py`` does that. Counts are those of Search-R1's published
training and test files; for a set without a count, the number of questions is not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forage.errors import UserError

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
MERGED = "PeterJinGo/nq_hotpotqa_train"

TEST_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The seven sets on which published results are reported."""


@dataclass(frozen=True, slots=True)
class BenchmarkPart:
    """One split of a set on the hub, and its published number of questions by source."""

    hub_id: str
    config: str | None
    hub_split: str
    counts: dict[str, int] = field(default_factory=dict)


_TRAIN_COUNTS = {"nq": 79_168, "hotpotqa": 90_447}
_TEST_COUNTS = {
    **{"nq": 3_610, "triviaqa": 11_313, "popqa": 14_267, "hotpotqa": 7_405},
    **{"2wikimultihopqa": 12_576, "musique": 2_417, "bamboogle": 125},
}
_TRAIN_SETS = ("nq", "hotpotqa", "triviaqa", "2wikimultihopqa", "musique")
_DEV_SETS = ("hotpotqa", "2wikimultihopqa", "musique")
"""Sets whose test answers are hidden: the field evaluates on their dev split."""


def _flashrag(name: str, hub_split: str, published: dict[str, int]) -> BenchmarkPart:
    counts = {name: published[name]} if name in published else {}
    return BenchmarkPart(FLASHRAG, name, hub_split, counts)


_PARTS: dict[tuple[str, str], BenchmarkPart] = {
    **{(name, "train"): _flashrag(name, "train", _TRAIN_COUNTS) for name in _TRAIN_SETS},
    **{
        (name, "test"): _flashrag(name, "dev" if name in _DEV_SETS else "test", _TEST_COUNTS)
        for name in TEST_SETS
    },
    ("search-r1", "train"): BenchmarkPart(MERGED, None, "train", _TRAIN_COUNTS),
    ("search-r1", "test"): BenchmarkPart(MERGED, None, "test", _TEST_COUNTS),
}


def published(name: str, split: str) -> BenchmarkPart:
    """A split of a set; raises a ``UserError`` that lists the published sets."""
    part = _PARTS.get((name, split))
    if part is None:
        names = [known for known, known_split in _PARTS if known_split == split]
        raise UserError(
            f"there is no published set {name!r} with the split {split!r}; the sets are "
            f"{', '.join(names) or 'for the splits train and test'}; for your own files use: "
            "forage data convert"
        )
    return part


def names_of(text: str) -> list[str]:
    """The distinct names in ``"nq,hotpotqa"``; ``"seven"`` means all test sets."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError("name at least one set, for example: forage data prepare nq,hotpotqa")
    every = [known for name in names for known in (TEST_SETS if name == "seven" else (name,))]
    return list(dict.fromkeys(every))


def require_file(path: Path, sets: Sequence[str], split: Literal["train", "test"]) -> None:
    """Raises ``UserError`` with the command to run if a file of published sets is missing."""
    if sets and not path.exists():
        raise UserError(f"{path} does not exist yet; run: {prepare_command(path, sets, split)}")


def prepare_command(path: Path, sets: Sequence[str], split: Literal["train", "test"]) -> str:
    return f"forage data prepare {','.join(sets)} --split {split} --out {path}"
