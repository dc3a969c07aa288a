"""The metrics of a step, built in one place: what its episodes, its groups, search and engine say.

The loop adds what the trainer and the credit say, records all of it, and shows it to the sentinel;
an evaluation takes ``episode_metrics`` alone. docs/metrics.md explains each metric.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from forage.config.run_config import RunConfig
from forage.retrieval.client.client import SearchCounts
from forage.rollout.engines.engine import EngineCounters
from forage.rollout.play.groups import StepGroups
from forage.types import Episode, Status
from forage.watch.vitals import vitals


class PhaseClock:
    """Where the seconds of one step go, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """``phase`` ends now; it began where the one before it ended."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """The seconds as they are logged."""
        return {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}


class StepReport:
    """Reports one step after another; it remembers what was searched before."""

    def __init__(self, config: RunConfig) -> None:
        self._correctness = config.reward.answer
        self._has_refills = config.algorithm.dynamic_sampling is not None
        self._searches = SearchCounts()

    def of(
        self,
        groups: StepGroups,
        searches: SearchCounts,
        engine: EngineCounters,
        clock: PhaseClock,
    ) -> dict[str, float]:
        """The metrics of a step whose rollout is over; the counts are those since the start."""
        episodes = groups.episodes
        metrics = episode_metrics(episodes) | vitals(episodes, self._correctness)
        if self._has_refills:
            metrics["groups/played"] = float(len(groups.played))
            metrics["groups/learnt"] = float(len(groups.chosen))
            metrics["groups/rounds"] = float(groups.num_rounds)
        metrics |= searches.metrics_since(self._searches) | engine.metrics()
        self._searches = searches
        num_sampled = sum(episode.num_sampled_tokens for episode in episodes)
        metrics["rollout/tokens_per_s"] = num_sampled / clock.seconds["rollout"]
        return metrics


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over episodes, some by number of hops, and counts of failures."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    scored = [reward for reward in rewards if reward.failure is None]
    unscored = Counter(reward.failure for reward in rewards if reward.failure)
    turns = [turn for episode in episodes for turn in episode.turns]
    failures = Counter(turn.search_failure for turn in turns if turn.search_failure)
    calls = [call for turn in turns for call in turn.calls]
    metrics = {
        "reward/mean": fmean(reward.value for reward in scored) if scored else math.nan,
        "em/mean": fmean(reward.parts["em"] for reward in rewards),
        "searches/mean": fmean(episode.num_searches for episode in episodes),
        "tokens/sampled_mean": fmean(episode.num_sampled_tokens for episode in episodes),
        "episodes/answered": fmean(episode.status is Status.ANSWERED for episode in episodes),
        "seconds/search_wait": sum(turn.search_s for turn in turns) / len(episodes),
        "search/failures": float(sum(failures.values())),
        "judge/failures": float(sum(unscored.values())),
    }
    for name in sorted({name for reward in rewards for name in reward.parts} - {"em"}):
        metrics[f"reward/{name}"] = fmean(r.parts[name] for r in rewards if name in r.parts)
    metrics |= {f"search/failures_{kind}": float(count) for kind, count in failures.items()}
    metrics |= {f"judge/failures_{kind}": float(count) for kind, count in unscored.items()}
    for tool in sorted({call.tool for call in calls}):
        those = [call for call in calls if call.tool == tool]
        metrics[f"tools/{tool}_calls"] = len(those) / len(episodes)
        metrics[f"tools/{tool}_failures"] = float(sum(bool(call.failure) for call in those))
        metrics[f"seconds/tool_{tool}"] = sum(call.seconds for call in those) / len(episodes)
    for num_hops in sorted({e.question.num_hops for e in episodes if e.question.num_hops}):
        asked = [e for e in episodes if e.question.num_hops == num_hops]
        ems = [e.reward.parts["em"] for e in asked if e.reward is not None]
        metrics[f"em/hops_{num_hops}"] = fmean(ems)
        metrics[f"searches/hops_{num_hops}"] = fmean(e.num_searches for e in asked)
    return metrics
