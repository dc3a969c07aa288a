"""Memory, startup and recall of the FAISS backends on vectors that behave like those of text.

The vectors (see ``clustered``) consist of topics of unequal size (Zipf), pages within them with
eight passages on average, and each passage's own part, all with a decaying spectrum. A query is the
vector of a passage plus noise: like a question, it is near its paragraph, then near others of the
page. The weights were chosen by comparison with MiniLM's vectors of 4,818 real sentences and
questions, searched with 1,190 real questions (generated ones in brackets, same number, 384
dimensions): score of the first, third and twentieth hit 0.67, 0.51, 0.33 (0.72, 0.48, 0.30), gap
between the third and the fourth 0.019 (0.013), effective dimensions 140 (about 100), recall@3 of
8 bits 0.996 (0.991).

Each backend is built from the same vectors on disk and searched in a separate process, through the
backend that a server uses (with a table instead of the encoder). RAM counts the process's private
memory and the pages of the mapped index file. Pages of vectors read by re-scoring are counted
separately: they belong to the page cache, which drops them when memory is needed.

    python benchmarks/dense_memory.py --rows 1000000 --dimension 768 --out DIR
    python benchmarks/dense_memory.py --rows 4000000 --dimension 768 --out DIR --no-recall
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from forage.hardware import quiet_openmp

quiet_openmp()

import numpy as np  # noqa: E402  # after the OpenMP settings

from forage.retrieval.vectors.dense import DenseBackend  # noqa: E402
from forage.retrieval.vectors.encoder import EncoderSpec  # noqa: E402
from forage.retrieval.vectors.faiss_index import build_faiss, open_faiss  # noqa: E402
from forage.retrieval.vectors.faiss_settings import (  # noqa: E402
    FaissSettings,
    FlatSettings,
    HnswSettings,
    IvfPqSettings,
    PqSettings,
    Sq8Settings,
    fit_to,
)
from forage.retrieval.vectors.vector_shards import (  # noqa: E402
    ShardLayout,
    VectorShards,
    create_vectors,
    open_vectors,
)

TOPK = 3
NUM_TOPICS, PASSAGES_PER_PAGE = 1000, 8
KINDS: dict[str, FaissSettings] = {
    "flat float32": FlatSettings(),
    "flat float16": FlatSettings(storage="float16"),
    "sq8": Sq8Settings(),
    "sq8 alone": Sq8Settings(rescore=None),
    "pq": PqSettings(),
    "ivfpq": IvfPqSettings(),
    "hnsw int8": HnswSettings(storage="int8"),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What one backend took; memory in bytes, times in seconds."""

    build_s: float
    build_peak: int
    index_file: int
    start_s: float
    first_search_s: float
    private: int
    index_pages: int
    vector_pages: int
    queries_per_s: float
    rows: list[list[int]]

    @property
    def ram(self) -> int:
        return self.private + self.index_pages


class Table:
    """An encoder that looks vectors up: each text is the number of its vector."""

    def __init__(self, vectors_BD: np.ndarray) -> None:
        self._vectors = vectors_BD
        self.spec = EncoderSpec(
            model="table",
            revision=None,
            fingerprint="",
            pooling="own",
            query_prefix="",
            passage_prefix="",
            passage_template="{text}",
            normalise=True,
            max_length=1,
            dimension=vectors_BD.shape[1],
            dtype="float32",
        )

    @property
    def dimension(self) -> int:
        return self.spec.dimension

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return self._vectors[[int(text) for text in texts]]

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        return self.encode_queries(texts)


def clustered(num_rows: int, dimension: int, seed: int) -> np.ndarray:
    """Unit vectors float32 [B, D] in pages of 8 on average; rows of a page are consecutive."""
    fixed, rng = np.random.default_rng(0), np.random.default_rng((1, seed))
    common = _directions(fixed, 1, dimension)
    topics = _directions(fixed, NUM_TOPICS, dimension)
    weights = 1 / np.arange(1, NUM_TOPICS + 1)
    sizes = rng.geometric(1 / PASSAGES_PER_PAGE, size=num_rows)
    page = np.repeat(np.arange(num_rows), sizes)[:num_rows]
    num_pages = int(page[-1]) + 1
    topic = rng.choice(NUM_TOPICS, size=num_pages, p=weights / weights.sum())[page]
    pages = _directions(rng, num_pages, dimension)
    spread = rng.uniform(0.4, 1.3, size=(num_rows, 1)).astype(np.float32)
    vectors = 0.15 * common + 0.3 * topics[topic] + 0.6 * pages[page]
    vectors += 0.7 * spread * _directions(rng, num_rows, dimension)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _directions(rng: np.random.Generator, num_rows: int, dimension: int) -> np.ndarray:
    """Random vectors of unit length on average; their components shrink as i to the -0.3."""
    spectrum = np.arange(1, dimension + 1, dtype=np.float32) ** -0.3
    return rng.standard_normal((num_rows, dimension), dtype=np.float32) * (
        spectrum / np.linalg.norm(spectrum)
    )


def write_vectors(directory: Path, num_rows: int, dimension: int) -> VectorShards:
    """float16 shards, one seed each; existing shards are kept."""
    layout = ShardLayout(
        num_rows=num_rows, dimension=dimension, dtype="float16", rows_per_shard=16_384
    )
    vectors = create_vectors(directory, layout)
    for shard in vectors.missing():
        vectors.write(shard, clustered(len(layout.rows(shard)), dimension, shard))
    return vectors


def make_queries(vectors: VectorShards, num_queries: int) -> np.ndarray:
    """Vectors of passages, rotated by noise of half to one and a half their length."""
    rng = np.random.default_rng(2)
    rows = rng.integers(len(vectors), size=num_queries)
    length = rng.uniform(0.5, 1.5, size=(num_queries, 1)).astype(np.float32)
    noise = length * _directions(rng, num_queries, vectors.layout.dimension)
    queries = vectors.gather(rows) + noise
    return queries / np.linalg.norm(queries, axis=1, keepdims=True)


def build(directory: Path, settings: FaissSettings, path: Path) -> tuple[float, int]:
    """Seconds and peak bytes of a build in this process."""
    vectors = open_vectors(directory)
    started = time.perf_counter()
    build_faiss(vectors, settings, path)
    return time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def search(
    directory: Path, settings: FaissSettings, path: Path, queries: np.ndarray
) -> tuple[float, float, int, int, int, float, list[list[int]]]:
    """Startup, memory and answers of the backend in this process.

    A mapped index is ready as soon as it is open; an exhaustive search then reads the whole file,
    from disk unless it is in the page cache.
    """
    before = private_bytes()
    started = time.perf_counter()
    index = open_faiss(path, settings)
    has_second_look = getattr(settings, "rescore", None) is not None
    vectors = open_vectors(directory) if has_second_look else None
    backend = DenseBackend(Table(queries), index, settings, vectors)
    start_s = time.perf_counter() - started
    started = time.perf_counter()
    backend.search(["0"], TOPK)
    first_s = time.perf_counter() - started
    started = time.perf_counter()
    found: list[list[int]] = []
    for first in range(0, len(queries), 64):
        block = [str(number) for number in range(first, min(first + 64, len(queries)))]
        found += [[hit.row for hit in hits] for hits in backend.search(block, TOPK)]
    rate = len(queries) / (time.perf_counter() - started)
    private = private_bytes() - before
    mapped = mapped_bytes(path), mapped_bytes(directory)
    return start_s, first_s, private, *mapped, rate, found


def private_bytes() -> int:
    """Memory of this process that is not backed by a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux says RssAnon")


def mapped_bytes(path: Path) -> int:
    """Pages of a file, or of the files of a directory, that this process has mapped in."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            is_inside = len(fields) > 5 and fields[5].startswith(str(path))
        elif is_inside and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total


def run(out: Path, name: str, settings: FaissSettings, queries: np.ndarray) -> Result:
    """Builds and searches one backend, each in a fresh process."""
    path = out / f"{name.replace(' ', '-')}.faiss"
    context = multiprocessing.get_context("spawn")
    directory = out / "vectors"
    with context.Pool(1) as pool:
        build_s, build_peak = pool.apply(build, (directory, settings, path))
    with context.Pool(1) as pool:
        start_s, first_s, private, index_pages, vector_pages, rate, rows = pool.apply(
            search, (directory, settings, path, queries)
        )
    file_bytes = os.path.getsize(path)
    path.unlink()
    return Result(
        build_s,
        build_peak,
        file_bytes,
        start_s,
        first_s,
        private,
        index_pages,
        vector_pages,
        rate,
        rows,
    )


def recall(found: list[list[int]], exact: list[list[int]]) -> float:
    """The share of the exact best that was found."""
    pairs = zip(found, exact, strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["flat float32", "sq8", "sq8 alone", "pq"]
    )
    parser.add_argument("--no-recall", action="store_true", help="few queries, no comparison")
    parser.add_argument("--out", type=Path, required=True, help="for vectors; kept")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    vectors = write_vectors(args.out / "vectors", args.rows, args.dimension)
    queries = make_queries(vectors, 64 if args.no_recall else args.queries)
    float32_bytes = args.rows * args.dimension * 4
    print(f"{args.rows} x {args.dimension}: {float32_bytes / 1e9:.3f} GB in float32")
    exact: list[list[int]] | None = None
    for name in args.kinds:
        result = run(args.out, name, fit_to(KINDS[name], args.rows, args.dimension), queries)
        if name == "flat float32":
            exact = result.rows
        line = {key: value for key, value in asdict(result).items() if key != "rows"}
        line |= {"ram_of_float32": round(result.ram / float32_bytes, 4)}
        if exact is not None and not args.no_recall:
            line |= {f"recall@{TOPK}": round(recall(result.rows, exact), 4)}
        print(name, json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
