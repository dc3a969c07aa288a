"""How well a policy is, read from a step's episodes: what goes wrong long before exact match falls.

Computed by the loop after each step, logged under ``health/``, and watched by ``sentinel.py``. What
only the trainer knows (entropy, the gradient's norm) is in its own metrics. Nothing here decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from forage.rewards.answers import normalize_answer
from forage.rewards.format import is_reasoning_broken
from forage.types import Episode, Origin, Status

_NGRAM = 4


def vitals(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over the episodes that the engine finished; what nothing is known of is left out.

    ``health/correct_logprob`` is the mean log-probability (nats) of the tokens of correct episodes,
    as they were sampled: its decay announces collapse (https://arxiv.org/abs/2512.04220).
    """
    finished = [episode for episode in episodes if episode.status is not Status.ENGINE_FAILED]
    if not finished:
        return {}
    metrics = {
        "health/format_breaks": fmean(
            any(is_reasoning_broken(turn.sampled) for turn in episode.turns) for episode in finished
        ),
        "health/repetition": fmean(_repetition(episode) for episode in finished),
        "health/empty_answers": fmean(_has_empty_answer(episode) for episode in finished),
    }
    correct = [e for e in finished if e.reward is not None and e.reward.parts.get("em") == 1.0]
    logprobs = list(chain.from_iterable(s.logprobs_T for e in correct for s in e.segments))
    if logprobs:
        metrics["health/correct_logprob"] = fmean(logprobs)
    return metrics


def _repetition(episode: Episode) -> float:
    """Share of the episode's sampled runs of four tokens that had come before in it, 0 to 1.

    Tokens ``1 2 3 4 1 2 3 4``: five runs, of which the last repeats the first, hence 1/5.
    """
    sampled = [s.token_ids_T for s in episode.segments if s.origin is Origin.SAMPLED]
    runs = [ids[i : i + _NGRAM] for ids in sampled for i in range(len(ids) - _NGRAM + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def _has_empty_answer(episode: Episode) -> bool:
    return episode.answer is not None and not normalize_answer(episode.answer)
