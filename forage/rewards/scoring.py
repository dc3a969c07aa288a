"""The reward of an episode: the published outcome table with its format and retrieval terms.

Called by the scheduler on each finished episode (``Score``), and by evaluation. It reads what the
policy wrote: prompts are never looked at, and observations neither, with one published exception.
The retrieval term asks whether a search brought a golden answer up, so it reads the passages that
the environment showed; it is computed only when ``retrieval_score`` is above 0.
"""

from __future__ import annotations

import re

from forage.config import RewardConfig
from forage.rewards.answers import cover_match, exact_match, f1_score
from forage.rewards.format import is_format_valid
from forage.types import Episode, Reward, Status

# What the environment writes around passages. Left in, "Doc 1" would hold the golden answer "1".
_INFORMATION_TAG = re.compile(r"</?information>")
_PASSAGE_HEAD = re.compile(r"^Doc \d+\(Title: ", re.MULTILINE)


def score_episode(episode: Episode, config: RewardConfig) -> Reward:
    """The reward and its parts, each 0 to 1: em, cover_em, f1, has_answer, format_valid, retrieved.

    ``retrieved`` is there when ``config.retrieval_score`` is above 0. An episode that the engine
    failed scores 0: the policy did not get to finish it.
    """
    golden_answers = episode.question.golden_answers
    answer = episode.answer
    has_answer = answer is not None
    prediction = answer or ""
    parts = {
        "em": float(has_answer and exact_match(prediction, golden_answers)),
        "cover_em": float(has_answer and cover_match(prediction, golden_answers)),
        "f1": f1_score(prediction, golden_answers) if has_answer else 0.0,
        "has_answer": float(has_answer),
        "format_valid": float(is_format_valid(episode.turns)),
    }
    if config.retrieval_score > 0:
        parts["retrieved"] = float(_is_retrieved(episode))
    if episode.status is Status.ENGINE_FAILED:
        return Reward(0.0, parts)
    value = table_score(
        correctness=parts[config.answer],
        has_answer=has_answer,
        is_format_valid=bool(parts["format_valid"]),
        is_retrieved=bool(parts.get("retrieved", 0.0)),
        config=config,
    )
    return Reward(value, parts)


def table_score(
    correctness: float,
    has_answer: bool,
    is_format_valid: bool,
    is_retrieved: bool,
    config: RewardConfig,
) -> float:
    """One row of Search-R1's table (https://arxiv.org/abs/2505.15117), from S, F and R.

    With a correctness between 0 and 1 (F1) the score lies that far between the row of a wrong
    answer and the row of a right one, so a better answer never earns less.
    """
    structure = config.structure_score
    valid_but_wrong = structure + (config.retrieval_score if is_retrieved else 0.0)
    if not has_answer:
        return valid_but_wrong if is_format_valid else 0.0
    right = 1.0 if is_format_valid else 1.0 - structure
    wrong = valid_but_wrong if is_format_valid else config.final_format_score
    return correctness * right + (1.0 - correctness) * wrong


def _is_retrieved(episode: Episode) -> bool:
    """Whether a search brought up passages that hold some golden answer, both normalised."""
    for turn in episode.turns:
        if not turn.passage_ids_K:  # no search, or one that found nothing
            continue
        shown = _PASSAGE_HEAD.sub("", _INFORMATION_TAG.sub("\n", turn.observation))
        if cover_match(shown, episode.question.golden_answers):
            return True
    return False
