"""What an evaluation found: figures with intervals, for each arm, overall and by hops.

Scored episodes come in, an ``EvaluationSummary`` goes out: to a JSON file, to the terminal's
before/after table, to the report. Nothing here plays, scores or reads files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from forage.evaluation.statistics import Interval, bootstrap_interval, paired_difference
from forage.types import Episode, Status

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class SliceSummary:
    """Figures over some episodes.

    ``answered`` and ``gold_recall`` are fractions; the latter is the share of a question's gold
    passages that some search of the episode returned, averaged over the questions that name any
    (None where none does). ``failures`` counts failed searches by kind, and episodes that the
    engine failed under ``engine_failed``.
    """

    num_questions: int
    em: Interval
    cover_em: Interval
    f1: Interval
    mean_searches: float
    mean_sampled_tokens: float
    answered: float
    gold_recall: float | None
    failures: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "num_questions": self.num_questions,
            "em": _interval_to_json(self.em),
            "cover_em": _interval_to_json(self.cover_em),
            "f1": _interval_to_json(self.f1),
            "mean_searches": self.mean_searches,
            "mean_sampled_tokens": self.mean_sampled_tokens,
            "answered": self.answered,
            "gold_recall": self.gold_recall,
            "failures": dict(self.failures),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``; raises ``KeyError`` or ``TypeError``."""
        return cls(
            num_questions=row["num_questions"],
            em=_interval_from_json(row["em"]),
            cover_em=_interval_from_json(row["cover_em"]),
            f1=_interval_from_json(row["f1"]),
            mean_searches=row["mean_searches"],
            mean_sampled_tokens=row["mean_sampled_tokens"],
            answered=row["answered"],
            gold_recall=row["gold_recall"],
            failures=dict(row["failures"]),
        )


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """One arm: all its questions, and those of each number of hops (where the source says)."""

    overall: SliceSummary
    by_hops: dict[int, SliceSummary]


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """A policy's evaluation, by arm in the order that they were played."""

    arms: dict[str, ArmSummary]

    def to_json(self) -> dict[str, Any]:
        return {
            "arms": {
                arm: {
                    "overall": summary.overall.to_json(),
                    "by_hops": {str(n): s.to_json() for n, s in summary.by_hops.items()},
                }
                for arm, summary in self.arms.items()
            }
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``; raises ``KeyError`` or ``TypeError``."""
        return cls(
            {
                arm: ArmSummary(
                    SliceSummary.from_json(summary["overall"]),
                    {int(n): SliceSummary.from_json(s) for n, s in summary["by_hops"].items()},
                )
                for arm, summary in row["arms"].items()
            }
        )

    def slices(self) -> list[tuple[str, int | None, SliceSummary]]:
        """(arm, hops or None for all, figures), in the order that tables and charts show them."""
        rows: list[tuple[str, int | None, SliceSummary]] = []
        for arm, summary in self.arms.items():
            rows.append((arm, None, summary.overall))
            rows.extend((arm, hops, part) for hops, part in summary.by_hops.items())
        return rows


def summarise(
    episodes_by_arm: Mapping[str, Sequence[Episode]], num_resamples: int = 1000, seed: int = 0
) -> EvaluationSummary:
    """The figures of scored episodes; raises ``ValueError`` for an arm without episodes."""
    arms: dict[str, ArmSummary] = {}
    for arm, episodes in episodes_by_arm.items():
        if not episodes:
            raise ValueError(f"arm {arm} has no episodes to summarise")
        hops = sorted({n for e in episodes if (n := e.question.num_hops) is not None})
        arms[arm] = ArmSummary(
            overall=_summarise_slice(episodes, num_resamples, seed),
            by_hops={
                n: _summarise_slice(
                    [e for e in episodes if e.question.num_hops == n], num_resamples, seed
                )
                for n in hops
            },
        )
    return EvaluationSummary(arms)


def em_gain(
    before: Sequence[Episode], after: Sequence[Episode], num_resamples: int = 1000, seed: int = 0
) -> Interval:
    """Paired interval of the growth in exact match; raises ``ValueError`` if questions differ."""
    by_id = {episode.question.id: part_of(episode, "em") for episode in before}
    ids = [episode.question.id for episode in after]
    if len(by_id) != len(before) or set(ids) != set(by_id) or len(ids) != len(by_id):
        raise ValueError(
            "a gain needs one episode for each question, the same ones before and after"
        )
    return paired_difference(
        [by_id[question_id] for question_id in ids],
        [part_of(episode, "em") for episode in after],
        num_resamples,
        seed,
    )


def part_of(episode: Episode, name: str) -> float:
    """A part of an episode's reward."""
    assert episode.reward is not None, f"the episode of {episode.question.id} has not been scored"
    assert name in episode.reward.parts, f"the reward of {episode.question.id} has no part {name}"
    return episode.reward.parts[name]


def gold_recall(episode: Episode) -> float | None:
    """Share of the question's gold passages that some search returned; None if it names none."""
    gold = set(episode.question.gold_passage_ids)
    if not gold:
        return None
    seen = {passage_id for turn in episode.turns for passage_id in turn.passage_ids_K}
    return len(gold & seen) / len(gold)


def before_after_table(before: EvaluationSummary, after: EvaluationSummary) -> Table:
    """The terminal's table: exact match, F1 and searches of both, for the slices in both."""
    from rich.table import Table

    table = Table(title="Before and after reinforcement learning", title_justify="left")
    table.add_column("arm")
    table.add_column("hops", justify="right")
    table.add_column("questions", justify="right")
    table.add_column("EM before", justify="right")
    table.add_column("EM after", justify="right", style="bold")
    table.add_column("F1", justify="right")
    table.add_column("searches", justify="right")
    earlier = {(arm, hops): part for arm, hops, part in before.slices()}
    for arm, hops, now in after.slices():
        then = earlier.get((arm, hops))
        if then is None:
            continue
        if hops is None and table.row_count:
            table.add_section()
        table.add_row(
            arm.replace("_", " ") if hops is None else "",
            "all" if hops is None else str(hops),
            str(now.num_questions),
            _interval_text(then.em),
            _interval_text(now.em),
            f"{then.f1.mean:.2f} → {now.f1.mean:.2f}",
            f"{then.mean_searches:.2f} → {now.mean_searches:.2f}",
        )
    table.caption = "In brackets: 95 % bootstrap intervals."
    table.caption_justify = "left"
    return table


def summary_table(summary: EvaluationSummary) -> Table:
    """The terminal's table of one evaluation, by arm and by hops."""
    from rich.table import Table

    table = Table(title="Evaluation", title_justify="left")
    for name in ("arm", "hops", "questions", "EM", "cover EM", "F1", "searches", "answered"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm, hops, part in summary.slices():
        if hops is None and table.row_count:
            table.add_section()
        table.add_row(
            arm.replace("_", " ") if hops is None else "",
            "all" if hops is None else str(hops),
            str(part.num_questions),
            _interval_text(part.em),
            f"{part.cover_em.mean:.2f}",
            f"{part.f1.mean:.2f}",
            f"{part.mean_searches:.2f}",
            f"{part.answered:.2f}",
        )
    table.caption = "In brackets: 95 % bootstrap intervals."
    table.caption_justify = "left"
    return table


def _summarise_slice(episodes: Sequence[Episode], num_resamples: int, seed: int) -> SliceSummary:
    recalls = [recall for e in episodes if (recall := gold_recall(e)) is not None]

    def interval(name: str) -> Interval:
        return bootstrap_interval([part_of(e, name) for e in episodes], num_resamples, seed)

    return SliceSummary(
        num_questions=len(episodes),
        em=interval("em"),
        cover_em=interval("cover_em"),
        f1=interval("f1"),
        mean_searches=fmean(e.num_searches for e in episodes),
        mean_sampled_tokens=fmean(e.num_sampled_tokens for e in episodes),
        answered=fmean(e.status is Status.ANSWERED for e in episodes),
        gold_recall=fmean(recalls) if recalls else None,
        failures=_count_failures(episodes),
    )


def _count_failures(episodes: Sequence[Episode]) -> dict[str, int]:
    counts = Counter(
        turn.search_failure.value for e in episodes for turn in e.turns if turn.search_failure
    )
    counts.update(e.status.value for e in episodes if e.status is Status.ENGINE_FAILED)
    return dict(sorted(counts.items()))


def _interval_text(interval: Interval) -> str:
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _interval_to_json(interval: Interval) -> list[float]:
    return [interval.mean, interval.low, interval.high]


def _interval_from_json(row: Sequence[float]) -> Interval:
    mean, low, high = row
    return Interval(mean, low, high)
