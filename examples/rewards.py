"""Custom rewards by import path: ``reward.functions`` in a recipe (docs/rewards.md).

Run the command in a directory from which the path can be imported: ``examples.rewards:short`` from
the root of the project.
"""

from forage.types import Episode, Reward


def short(episode: Episode) -> float:
    """1 for an answer of no more than five words."""
    return float(episode.answer is not None and len(episode.answer.split()) <= 5)


async def found_early(episode: Episode) -> Reward:
    """1 if the first search found a gold passage; also records how many it found."""
    gold = set(episode.question.gold_passage_ids)
    num_gold = len(gold & set(episode.turns[0].passage_ids_K))
    return Reward(float(num_gold > 0), {"num_gold": float(num_gold)})
