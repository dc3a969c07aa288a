"""Published results to show beside an evaluation, and what differs in how they were made.

``published.yaml`` holds the figures and their origins. Those of the sets that an evaluation has
questions of can stand beside it. Nothing here draws tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

import yaml

from forage.data.published.benchmarks import published
from forage.evaluation.fingerprint import Protocol, answers_text
from forage.evaluation.summary import ArmSummary


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """One row of a published table: exact match by data source, and ``average`` over all seven."""

    model: str
    method: str
    origin: str
    em: dict[str, float]
    average: float

    def average_over(self, sources: Sequence[str]) -> float:
        """The plain mean over some of the sets."""
        return fmean(self.em[source] for source in sources)


@dataclass(frozen=True, slots=True)
class ResultOrigin:
    """Where the figures were read."""

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class SharedProtocol:
    """How the published figures were made, as far as their authors say."""

    retriever: str
    corpus: str
    num_passages: int
    topk: int
    max_turns: int
    prompt: str
    trained_on: str


@dataclass(frozen=True, slots=True)
class Literature:
    """The whole file: the sets' names in tables, in order, and the results on them."""

    names: dict[str, str]
    protocol: SharedProtocol
    origins: dict[str, ResultOrigin]
    results: tuple[PublishedResult, ...]


@dataclass(frozen=True, slots=True)
class ProtocolRow:
    """One point of the protocol, in the published results and here."""

    name: str
    there: str
    here: str
    differs: bool


@cache
def literature() -> Literature:
    """The content of ``published.yaml``."""
    text = (resources.files("forage.evaluation") / "published.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text)
    names: dict[str, str] = tree["names"]
    return Literature(
        names=names,
        protocol=SharedProtocol(**tree["protocol"]),
        origins={key: ResultOrigin(**row) for key, row in tree["origins"].items()},
        results=tuple(
            PublishedResult(
                model=row["model"],
                method=row["method"],
                origin=row["origin"],
                em=dict(zip(names, row["em"], strict=True)),
                average=row["average"],
            )
            for row in tree["results"]
        ),
    )


def shared_sources(arm: ArmSummary) -> list[str]:
    """The published sets that the evaluation has questions of, in the order of the tables."""
    return [source for source in literature().names if source in arm.by_source]


def protocol_rows(protocol: Protocol, arm: ArmSummary) -> list[ProtocolRow]:
    """How the published figures were made, and how these, point by point."""
    there = literature().protocol
    retriever = protocol.retriever or "the server does not say"
    passages = "size unknown"
    if protocol.num_passages is not None:
        passages = f"{protocol.num_passages:,} passages"
    topk = str(protocol.topk)
    if not protocol.searches:
        retriever = passages = topk = "none"
    is_corpus_alike = protocol.num_passages is not None and (
        abs(protocol.num_passages / there.num_passages - 1) < 0.01
    )
    template = "search-r1 (its rules in other words)"
    return [
        ProtocolRow(
            "retriever",
            there.retriever,
            retriever,
            not (protocol.retriever or "").lower().startswith("e5"),
        ),
        ProtocolRow(
            "corpus",
            f"{there.corpus}, about {there.num_passages / 1e6:.0f} million passages",
            passages,
            not is_corpus_alike,
        ),
        ProtocolRow("passages a search", str(there.topk), topk, topk != str(there.topk)),
        ProtocolRow(
            "prompt",
            there.prompt,
            template if protocol.prompt == "search-r1" else protocol.prompt,
            True,
        ),
        ProtocolRow(
            "searches at most",
            f"{there.max_turns} (SkyRL's row: 3 turns)",
            str(protocol.max_turns),
            protocol.max_turns != there.max_turns,
        ),
        ProtocolRow(
            "answers",
            "one a question",
            answers_text(protocol),
            protocol.num_samples > 1 or protocol.num_candidates > 1,
        ),
        *_method_rows(protocol),
        _questions_row(arm),
    ]


def _method_rows(protocol: Protocol) -> list[ProtocolRow]:
    if protocol.method == "search":
        return []
    return [ProtocolRow("method", "that of each row", protocol.method, True)]


def _questions_row(arm: ArmSummary) -> ProtocolRow:
    names = literature().names
    there: list[str] = []
    here: list[str] = []
    for source in shared_sources(arm):
        there.append(f"{names[source]} {published(source, 'test').counts[source]:,}")
        here.append(f"{names[source]} {arm.by_source[source].num_questions:,}")
    return ProtocolRow("questions", ", ".join(there), ", ".join(here), there != here)
