"""The published question sets: where the hub keeps them, and how many questions they have.

A table and nothing else; ``prepare.py`` fetches them. Counts are those of the published training
and test files of Search-R1; a set without a count there is taken as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forage.errors import UserError

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
MERGED = "PeterJinGo/nq_hotpotqa_train"

TEST_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The seven sets that published results are reported on."""


@dataclass(frozen=True, slots=True)
class BenchmarkPart:
    """One split of a set as the hub has it, and its published number of questions by source."""

    hub_id: str
    config: str | None
    hub_split: str
    counts: dict[str, int] = field(default_factory=dict)


# Where a set's test answers are hidden, the field tests on its dev split.
_PARTS: dict[tuple[str, str], BenchmarkPart] = {
    ("nq", "train"): BenchmarkPart(FLASHRAG, "nq", "train", {"nq": 79_168}),
    ("hotpotqa", "train"): BenchmarkPart(FLASHRAG, "hotpotqa", "train", {"hotpotqa": 90_447}),
    ("triviaqa", "train"): BenchmarkPart(FLASHRAG, "triviaqa", "train"),
    ("2wikimultihopqa", "train"): BenchmarkPart(FLASHRAG, "2wikimultihopqa", "train"),
    ("musique", "train"): BenchmarkPart(FLASHRAG, "musique", "train"),
    ("nq", "test"): BenchmarkPart(FLASHRAG, "nq", "test", {"nq": 3_610}),
    ("triviaqa", "test"): BenchmarkPart(FLASHRAG, "triviaqa", "test", {"triviaqa": 11_313}),
    ("popqa", "test"): BenchmarkPart(FLASHRAG, "popqa", "test", {"popqa": 14_267}),
    ("hotpotqa", "test"): BenchmarkPart(FLASHRAG, "hotpotqa", "dev", {"hotpotqa": 7_405}),
    ("2wikimultihopqa", "test"): BenchmarkPart(
        FLASHRAG, "2wikimultihopqa", "dev", {"2wikimultihopqa": 12_576}
    ),
    ("musique", "test"): BenchmarkPart(FLASHRAG, "musique", "dev", {"musique": 2_417}),
    ("bamboogle", "test"): BenchmarkPart(FLASHRAG, "bamboogle", "test", {"bamboogle": 125}),
    ("search-r1", "train"): BenchmarkPart(
        MERGED, None, "train", {"nq": 79_168, "hotpotqa": 90_447}
    ),
    ("search-r1", "test"): BenchmarkPart(
        MERGED,
        None,
        "test",
        {
            **{"nq": 3_610, "triviaqa": 11_313, "popqa": 14_267, "hotpotqa": 7_405},
            **{"2wikimultihopqa": 12_576, "musique": 2_417, "bamboogle": 125},
        },
    ),
}


def published(name: str, split: str) -> BenchmarkPart:
    """The part of a set; raises ``UserError`` that names what there is."""
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
    """``"nq,hotpotqa"`` as names, each once; ``"seven"`` is all test sets."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError("name at least one set, for example: forage data prepare nq,hotpotqa")
    every = [known for name in names for known in (TEST_SETS if name == "seven" else (name,))]
    return list(dict.fromkeys(every))
