"""Recall of the gold passage with BM25's analyzers: ``plain``, ``any`` and the language's own.

Takes SQuAD files (XQuAD in any of its languages) and folders with ``corpus.jsonl`` and
``dev.jsonl`` (``question``, ``gold_passage_ids``).

    python benchmarks/bm25_languages.py xquad.en.json xquad.zh.json real_text/
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from forage.retrieval.words.bm25 import BM25
from forage.retrieval.words.bm25_builder import BM25Builder

DEPTHS = (1, 3, 10)
ROUNDS = 3


def read_task(path: Path) -> tuple[list[str], list[tuple[str, set[int]]]]:
    """The texts, and each question with the rows of its gold passages."""
    texts: list[str] = []
    asked: list[tuple[str, set[int]]] = []
    if path.is_dir():
        lines = [json.loads(line) for line in (path / "corpus.jsonl").open(encoding="utf-8")]
        rows = {line["id"]: row for row, line in enumerate(lines)}
        for line in (path / "dev.jsonl").open(encoding="utf-8"):
            question = json.loads(line)
            gold = {rows[identity] for identity in question["gold_passage_ids"]}
            asked.append((question["question"], gold))
        return [line["contents"] for line in lines], asked
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            asked += [(qa["question"], {len(texts)}) for qa in paragraph["qas"]]
            texts.append(f'"{article["title"]}"\n{paragraph["context"]}')
    return texts, asked


def measure(path: Path, language: str) -> str:
    """A line of the table: recall at ``DEPTHS``, then passages added and questions per second."""
    texts, asked = read_task(path)
    builder = BM25Builder(0.9, 0.4, language)
    started = time.process_time()
    for text in texts:
        builder.add(text)
    spec = builder.analyzer
    added_s = time.process_time() - started
    seconds: list[float] = []
    found = []
    with tempfile.TemporaryDirectory() as folder:
        builder.write(Path(folder))
        engine = BM25(Path(folder), spec)
        for _ in range(ROUNDS):
            started = time.process_time()
            found = engine.search([question for question, _ in asked], max(DEPTHS))
            seconds.append(time.process_time() - started)
    ranks = [
        next((rank for rank, hit in enumerate(hits) if hit.row in gold), max(DEPTHS))
        for (_, gold), hits in zip(asked, found, strict=True)
    ]
    shares = [f"{sum(rank < depth for rank in ranks) / len(ranks):.3f}" for depth in DEPTHS]
    name = f"auto: {spec.language}" if language == "auto" else language
    rates = f"{len(texts) / added_s:.0f} | {len(asked) / min(seconds):.0f}"
    return f"| {path.name} | {name} | {' | '.join(shares)} | {rates} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tasks", type=Path, nargs="+")
    args = parser.parse_args()
    print(f"| task | language | recall at {DEPTHS} | | | passages added/s | questions/s |")
    for path in args.tasks:
        for language in ("plain", "any", "auto"):
            print(measure(path, language), flush=True)


if __name__ == "__main__":
    main()
