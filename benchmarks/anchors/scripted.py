"""Multi-turn episodes with search whose lengths are fixed, so that every engine does equal work.

Prompts and observations are real questions and passages. Each turn samples a number of tokens drawn
once per turn, as unequal as those of a trained policy; what is sampled does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.anchors.passages import questions, real_passages

NUM_TURNS = (2, 4)
SHORTEST_TURN, LONGEST_TURN = 8, 64
OBSERVATION_TOKENS = 180
MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Script:
    """An episode: prompt, length of each turn, and the observation after each but the last."""

    key: str
    prompt: list[int]
    lengths: Sequence[int]
    observations: Sequence[list[int]]

    @property
    def num_sampled(self) -> int:
        return sum(self.lengths)


def scripts(model: Path, number: int, num_episodes: int) -> list[Script]:
    """The episodes of round ``number``; no two rounds share a prompt that a server could cache."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    first = number * num_episodes
    asked = questions(first + num_episodes)[first:]
    passages, chance = real_passages(), random.Random(number)
    found: list[Script] = []
    for place, question in enumerate(asked):
        num_turns = chance.randint(*NUM_TURNS)
        drawn = (round(chance.lognormvariate(3.2, 0.5)) for _ in range(num_turns))
        lengths = [min(max(length, SHORTEST_TURN), LONGEST_TURN) for length in drawn]
        texts = [chance.choice(passages).text for _ in range(num_turns - 1)]
        seen = [
            tokenizer.encode(f"\n<information>{text}</information>\n")[:OBSERVATION_TOKENS]
            for text in texts
        ]
        prompt = tokenizer.encode(
            "Answer the question. Think first, and search by writing a query between <search> and "
            f"</search>. Give the answer between <answer> and </answer>.\nQuestion: {question}\n"
        )
        found.append(Script(f"{number}/{place}", prompt, lengths, seen))
    return found


def in_words() -> str:
    return (
        f"episodes of {NUM_TURNS[0]} to {NUM_TURNS[1]} turns of {SHORTEST_TURN} to {LONGEST_TURN} "
        f"sampled tokens, observations of up to {OBSERVATION_TOKENS} tokens of real passages"
    )
