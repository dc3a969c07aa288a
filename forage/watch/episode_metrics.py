"""What a step's episodes say as numbers: rewards, calls of tools, failures, and shares by hops.

The loop logs them at each step, and under ``eval/`` for the arms that it plays in between;
docs/metrics.md explains each. What foretells a collapse is ``vitals.py``'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from forage.types import Episode, Status


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
