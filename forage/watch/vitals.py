"""How healthy a policy is, read from a step's episodes: what decays long before exact match falls.

Computed by the loop after each step, logged under ``health/``, and watched by ``sentinel.py``. What
only the trainer knows (entropy, the gradient's norm) is in its own metrics. Nothing here decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from forage.rewards.answers import normalize_answer
from forage.rewards.format import is_reasoning_broken
from forage.types import ActionKind, Episode, Origin, Status

_NGRAM = 4


def vitals(episodes: Sequence[Episode], correctness: str = "em") -> dict[str, float]:
    """Means over the episodes that the engine finished; a metric without any value is left out.

    ``health/correct_logprob`` is the mean log-probability (nats) of the tokens of correct episodes,
    as they were sampled: its decay announces collapse (https://arxiv.org/abs/2512.04220).
    ``correctness`` is the part of the reward that says how right an answer is.
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
    repeated = [again for episode in finished for again in _are_repeated(episode)]
    if repeated:
        metrics["health/repeated_searches"] = fmean(repeated)
    misranked = _are_misranked(finished, correctness)
    if misranked:
        metrics["health/misranked"] = fmean(misranked)
    correct = [e for e in finished if e.reward is not None and e.reward.parts.get("em") == 1.0]
    logprobs = list(chain.from_iterable(s.logprobs_T for e in correct for s in e.segments))
    if logprobs:
        metrics["health/correct_logprob"] = fmean(logprobs)
    return metrics


def _repetition(episode: Episode) -> float:
    """Share of the episode's sampled runs of four tokens that had come before in their turn.

    Tokens ``1 2 3 4 1 2 3 4`` in one turn: five runs, of which the last repeats the first, hence
    1/5. What a turn has in common with another is none: each says anew what is wanted.
    """
    sampled = [s.token_ids_T for s in episode.segments if s.origin is Origin.SAMPLED]
    runs = [[ids[i : i + _NGRAM] for i in range(len(ids) - _NGRAM + 1)] for ids in sampled]
    num_runs = sum(map(len, runs))
    return 1.0 - sum(len(set(of_turn)) for of_turn in runs) / num_runs if num_runs else 0.0


def _are_repeated(episode: Episode) -> list[bool]:
    """For each search of the episode, whether it had asked the same before."""
    queries = [
        normalize_answer(turn.argument) for turn in episode.turns if turn.kind is ActionKind.SEARCH
    ]
    return [query in queries[:i] for i, query in enumerate(queries)]


def _are_misranked(episodes: Sequence[Episode], correctness: str) -> list[bool]:
    """For each pair of a better and a worse answer to a question, whether the worse earned as much.

    That is 1 less the share of pairs that the reward puts in order (the area under its curve),
    with ties counted as errors: the advantages of a group do not tell them apart, either.
    """
    scored: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for episode in episodes:
        reward = episode.reward
        if reward is not None and reward.failure is None and correctness in reward.parts:
            scored[episode.question.id].append((reward.parts[correctness], reward.value))
    return [
        worse_reward >= reward
        for those in scored.values()
        for right, reward in those
        for worse, worse_reward in those
        if worse < right
    ]


def _has_empty_answer(episode: Episode) -> bool:
    return episode.answer is not None and not normalize_answer(episode.answer)
