"""Updating an index after a share of its documents changed, compared with building it again.

The documents are generated, with the word frequencies of natural text, in a folder of Markdown
files; ``--corpus`` takes one file of JSON lines instead. Each round changes, adds and removes
documents. Both run in one process whose loops are compiled, one after the other; the last index is
compared with the build on ``--queries`` queries.

    python -m benchmarks.index_update --passages 100000 --share 0.01
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from forage.commands.cli import main as forage
from forage.retrieval.index.index import open_index

_VOCABULARY, _WORDS, _PASSAGES_PER_FILE = 200_000, 100, 10


class World:
    """Documents of passages, as a folder or as a file of lines."""

    def __init__(self, place: Path, num_passages: int, is_corpus: bool) -> None:
        self.place, self._is_corpus = place, is_corpus
        shares = np.cumsum((np.arange(_VOCABULARY) + 3.7) ** -1.05)
        self._shares = shares / shares[-1]
        self._draw = np.random.default_rng(0)
        self._size = 1 if is_corpus else _PASSAGES_PER_FILE
        self.texts = {f"d{at:06d}": self._text() for at in range(num_passages // self._size)}
        self._next = len(self.texts)

    def _text(self) -> str:
        words = np.searchsorted(self._shares, self._draw.random(_WORDS * self._size))
        return " ".join(f"w{number:x}" for number in words)

    def write(self, names: list[str]) -> None:
        """Writes the documents, of which ``names`` changed."""
        if self._is_corpus:
            rows = ({"id": name, "contents": text} for name, text in self.texts.items())
            self.place.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return
        self.place.mkdir(exist_ok=True)
        for name in names:
            path = self.place / f"{name}.md"
            if name in self.texts:
                path.write_text(f"# {name}\n\n{self.texts[name]}\n")
            else:
                path.unlink()

    def change(self, share: float, seed: int) -> None:
        """Replaces most of a share of the documents, removes and adds some."""
        names = random.Random(seed).sample(sorted(self.texts), round(share * len(self.texts)))
        removed, replaced = names[: len(names) // 10], names[len(names) // 10 :]
        added = [f"d{self._next + at:06d}" for at in range(len(removed))]
        self._next += len(added)
        for name in removed:
            del self.texts[name]
        self.texts |= {name: self._text() for name in (*replaced, *added)}
        self.write([*names, *added])


def timed(*options: str) -> float:
    started = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):
        assert forage(["index", *options]) == 0
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--corpus", action="store_true", help="a file of lines, not a folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = World(folder / "docs", args.passages, args.corpus)
        world.write(list(world.texts))
        made = ("--corpus", str(world.place), "--language", "plain")
        made += () if args.corpus else ("--size", str(_WORDS), "--overlap", "0")
        updated, rebuilt = folder / "updated", folder / "rebuilt"
        timed(*made, "--out", str(updated))
        ratios: list[float] = []
        for number in range(args.rounds):
            world.change(args.share, number)
            build_s = timed(*made, "--out", str(rebuilt), "--overwrite")
            update_s = timed("--corpus", str(world.place), "--out", str(updated), "--update")
            ratios.append(update_s / build_s)
            print(f"build {build_s:.2f} s, update {update_s:.2f} s: {ratios[-1]:.1%}", flush=True)
        texts = random.Random(0).sample(sorted(world.texts.values()), args.queries)
        queries = [" ".join(text.split()[:5]) for text in texts]
        with open_index(updated) as one, open_index(rebuilt) as other:
            assert one.id == other.id
            assert one.search(queries, 10) == other.search(queries, 10)
        print(f"median {np.median(ratios):.1%}; {args.queries} queries have equal hits and scores")


if __name__ == "__main__":
    logging.disable(logging.INFO)
    main()
