"""Prints ten questions of each kind that ``forage questions`` proposed, kept and dropped ones.

For a directory that the command has written to, it needs nothing else. A new directory gets the
questions of a scripted writer about a generated encyclopedia: it knows the facts, and lies in 0.3
of what it writes and 0.1 of what it reads, so a column says which answers are true::

    python -m benchmarks.example_questions runs/examples
"""

from __future__ import annotations

import asyncio
import json
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from benchmarks.questions_of_world import Mistaken
from forage.commands.cli import main
from forage.data.world.encyclopedia import write_world
from forage.questions.candidate import NOTHING, Candidate, Kind, Split
from forage.questions.candidate_journal import CANDIDATES_FILE, CandidateJournal
from forage.questions.make_questions import Wanted, make_questions, open_draws
from forage.questions.quotas import Kept
from forage.retrieval.index.index import open_index
from tests.questions.chat_server import chat_server

NUM_ARTICLES = 400
LIES = (0.3, 0.1)
COUNTS = "--train 140 --dev 30 --test 30"
TRUTH_FILE = "true.json"
NUM_SHOWN, NUM_KEPT = 10, 5
GROUPS = {
    "Single passage": (Kind.SINGLE,),
    "Multi-hop": (Kind.MULTI_HOP,),
    "Comparison": (Kind.COMPARISON,),
    "Yes or no": (Kind.YES_NO,),
    "Numbers and dates": (Kind.NUMBER, Kind.DATE),
    "Unanswerable": (Kind.UNANSWERABLE,),
}


class Dated(Mistaken):
    """Asks for the year, too, that an article states."""

    def proposed(self, prompt: str, titles: list[str], texts: list[str]) -> str:
        wanted = re.search(r'The answer is "(\d{4})"\.', prompt)
        if not wanted:
            return super().proposed(prompt, titles, texts)
        question = f"Which year does the article about {titles[0]} name?"
        return self._written(question, wanted[1], {titles[0]})


def write_questions_of_world(out: Path) -> None:
    """Runs the command on a generated encyclopedia, and writes down the true answers."""
    world = write_world(out / "world", NUM_ARTICLES, seed=0)
    writer = Dated(world, *LIES)
    with chat_server(writer) as server:
        argv = f"questions {out}/world/corpus.jsonl --out {out} {COUNTS}"
        argv += f" --endpoint {server.url} --served-model scripted"
        assert main(argv.split()) == 0
    (out / TRUTH_FILE).write_text(json.dumps(writer.answers))


def ended(out: Path) -> list[Candidate]:
    """The candidates of a run as they ended, near-duplicates included."""
    with (out / CANDIDATES_FILE).open(encoding="utf-8") as lines:
        settings = json.loads(next(lines))["settings"]
    counts = {split: int(settings[split]) for split in Split}
    wanted = Wanted(counts, seed=int(settings["seed"]))
    kept = Kept(counts, float(settings["max_overlap"]))
    with open_index(out / "index") as index, CandidateJournal(out, settings) as journal:
        pools = open_draws(index.store, wanted)
        asyncio.run(make_questions(pools, wanted, None, journal, kept))
    return kept.offered


def examples(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first ones kept, the first one that each check dropped, then each check's second."""
    kept = [one for one in candidates if one.dropped is None][:NUM_KEPT]
    by_check: dict[str, list[Candidate]] = {}
    for one in candidates:
        if one.dropped is not None:
            by_check.setdefault(one.dropped, []).append(one)
    in_turn = [one for row in zip_longest(*by_check.values()) for one in row if one is not None]
    return [*kept, *in_turn[: NUM_SHOWN - len(kept)]]


def table(candidates: Sequence[Candidate], truth: dict[str, str] | None) -> Iterator[str]:
    """The rows of one kind."""
    names = ["end", "question", "answer", *(["true"] if truth is not None else []), "documents"]
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for one in candidates:
        end = "kept" if one.dropped is None else f"`{one.dropped}`"
        cells = [one.question or f"(no question: {one.detail})", " / ".join(one.answers)]
        if truth is not None:
            fact = truth.get(one.question)
            is_true = one.answers == (NOTHING if fact == "unknown" else fact,)
            cells.append("" if fact is None else "yes" if is_true else "no")
        cells.append(", ".join(Path(name).stem for name in one.documents))
        yield f"| {end} | {' | '.join(map(cell, cells))} |"


def cell(text: str) -> str:
    """A text on one line of a table, cut to 160 characters."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 160 else f"{text[:159]}…"


def run() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="DIR")
    out = parser.parse_args().out
    if not (out / CANDIDATES_FILE).exists():
        write_questions_of_world(out)
    truth = None
    if (out / TRUTH_FILE).exists():
        truth = json.loads((out / TRUTH_FILE).read_text())
    candidates = ended(out)
    for title, kinds in GROUPS.items():
        group = [one for one in candidates if one.kind in kinds]
        num_kept = sum(one.dropped is None for one in group)
        print(f"\n**{title}**: {num_kept} of {len(group)} candidates kept.\n")
        print("\n".join(table(examples(group), truth)))


if __name__ == "__main__":
    run()
