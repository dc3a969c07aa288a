"""The loop in ten lines, with a custom reward and search, as in docs/library.md.

First generate a world to search: ``forage data world --size 300 --out world``.
"""

import json
from pathlib import Path

import forage

model = str(Path(forage.__file__).parent / "warm" / "model")  # the small one that ships with Forage
passages = [json.loads(line) for line in Path("world/corpus.jsonl").read_text().splitlines()]


def search(query: str) -> list[dict[str, str]]:
    words = set(query.lower().split())
    return sorted(passages, key=lambda row: -len(words & set(row["contents"].lower().split())))


def reward(episode: forage.Episode) -> float:
    return float(episode.answer in episode.question.golden_answers) - 0.1 * episode.num_searches


data = {"train": "world/train.jsonl", "test": "world/test.jsonl"}
trainer = {"num_steps": 2, "questions_per_step": 4, "group_size": 2}
config = {"model": {"path": model}, "data": data, "trainer": trainer}
run = forage.Run(config, reward=reward, search=search)
for step in run:
    print(step.number, step.metrics["reward/mean"], step.episodes[0].answer)
