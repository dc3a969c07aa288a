"""Real passages and questions, and as many more passages made of the real ones' sentences.

The real ones come with Forage (``forage real``) and, where they are present, from ../shared/data.
A made passage has as many sentences as a random real one, each drawn from all real sentences, so
words are as frequent as in real text, but none is rarer than its sentence.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.anchors.side import ROOT
from forage.data.corpus import parse_contents, write_corpus
from forage.types import Passage

SHARED = ROOT.parent / "shared" / "data"
_REAL = ROOT / "forage" / "real"
_SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z\"'(])")


def real_passages() -> list[Passage]:
    """Each distinct real passage, in the order of the files."""
    texts: dict[str, str] = {}
    with gzip.open(_REAL / "corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts |= dict(_title_and_text(line) for line in lines)
    for folder in ("real_text", "multihop"):
        file = SHARED / folder / "corpus.jsonl"
        if file.exists():
            with file.open(encoding="utf-8") as lines:
                texts |= dict(_title_and_text(line) for line in lines)
    squad = SHARED / "xquad.en.json"
    if squad.exists():
        for article in json.loads(squad.read_text(encoding="utf-8"))["data"]:
            title = article.get("title", "")
            texts |= {each["context"]: title for each in article["paragraphs"]}
    return [Passage(f"p{n}", title, text) for n, (text, title) in enumerate(texts.items())]


def _title_and_text(line: str) -> tuple[str, str]:
    title, text = parse_contents(json.loads(line)["contents"])
    return text, title


def passages(num_passages: int) -> Iterator[Passage]:
    """The real passages, and made ones up to ``num_passages``; the same ones each time."""
    real = real_passages()[:num_passages]
    yield from real
    sentences = [sentence for each in real for sentence in _SENTENCE_END.split(each.text)]
    lengths = [len(_SENTENCE_END.split(each.text)) for each in real]
    chance = random.Random(0)
    for number in range(len(real), num_passages):
        drawn = chance.choices(sentences, k=chance.choice(lengths))
        yield Passage(f"p{number}", chance.choice(real).title, " ".join(drawn))


def write_passages(folder: Path, num_passages: int) -> Path:
    """A corpus file of ``num_passages``, kept for the next run."""
    corpus = folder / f"passages-{num_passages}.jsonl"
    if not corpus.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = corpus.with_suffix(".tmp")
        write_corpus(unfinished, passages(num_passages))
        unfinished.rename(corpus)
    return corpus


def composition(num_passages: int) -> str:
    """How many passages are real, for the page."""
    num_real = min(num_passages, len(real_passages()))
    if num_real == num_passages:
        return f"{num_passages:,} real passages"
    return (
        f"{num_passages:,} passages ({num_real:,} real, the others made of their sentences, "
        "shuffled)"
    )


def questions(num_questions: int) -> list[str]:
    """Real questions of all files, shuffled once."""
    asked: list[str] = []
    for name in ("train", "dev"):
        with gzip.open(_REAL / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            asked += [json.loads(line)["question"] for line in lines]
    for file in (SHARED / "nq_open.dev.jsonl", SHARED / "multihop" / "train.jsonl"):
        if file.exists():
            with file.open(encoding="utf-8") as lines:
                asked += [json.loads(line)["question"] for line in lines]
    asked = list(dict.fromkeys(asked))
    random.Random(0).shuffle(asked)
    return [asked[number % len(asked)] for number in range(num_questions)]
