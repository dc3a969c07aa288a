"""One comparison of the page: Forage's rounds, the anchor's rounds, and the ratio to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """What was compared, and one value per round of each side.

    ``unit`` decides which is better: more of "queries/s", fewer of "s". ``is_most`` marks an aim
    that must not be exceeded. ``is_difference`` compares the anchor's value minus Forage's instead
    of a ratio. ``missing`` says why there are no values.
    """

    what: str
    anchor: str
    unit: str
    aim: float | None
    ours: Sequence[float] = ()
    theirs: Sequence[float] = ()
    is_most: bool = False
    is_difference: bool = False
    missing: str = ""

    @property
    def ratios(self) -> list[float]:
        """How many times as good Forage was (or how much worse, if a difference), by round."""
        pairs = zip(self.ours, self.theirs, strict=True)
        if self.is_difference:
            return [theirs - ours for ours, theirs in pairs]
        if self.is_rate:
            return [ours / theirs for ours, theirs in pairs]
        return [theirs / ours for ours, theirs in pairs]

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def is_reached(self) -> bool | None:
        """Whether the median ratio reaches the aim; None without an aim or without values."""
        if self.aim is None or not self.ours:
            return None
        return self.ratio <= self.aim if self.is_most else self.ratio >= self.aim


@dataclass(frozen=True, slots=True)
class SideRecord:
    """A side as it ran: its settings in words, and what its process reported about itself."""

    name: str
    settings: str
    found: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowRecord:
    """A row's last measurement, as ``anchors.json`` keeps it."""

    figures: Sequence[Figure]
    sides: Sequence[SideRecord]
    conditions: Mapping[str, str]
    """Date, commit, processor, size (quick or full), load, the share that other programs used."""
    failure: str = ""


def record_of(tree: Mapping[str, Any]) -> RowRecord:
    """The record that ``asdict`` turned into ``tree``."""
    figures = [Figure(**each) for each in tree["figures"]]
    sides = [SideRecord(**each) for each in tree["sides"]]
    return RowRecord(figures, sides, tree["conditions"], tree["failure"])


def tree_of(record: RowRecord) -> dict[str, Any]:
    return asdict(record)
