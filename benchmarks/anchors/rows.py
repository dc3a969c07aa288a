"""The rows of the table, in its order, and the measurement of one of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.anchors import (
    bm25,
    build,
    dense,
    encoder,
    engine,
    grpo,
    http,
    learning,
    sampling,
    scale,
)
from benchmarks.anchors.bench import Bench
from benchmarks.anchors.figure import RowRecord
from benchmarks.anchors.machine import Conditions
from benchmarks.anchors.side import MissingSideError


@dataclass(frozen=True, slots=True)
class Row:
    """What a row compares, for the page, and the function that measures it."""

    title: str
    measure: Callable[[Bench], None]


ROWS = {
    "grpo": Row(
        "A GRPO step with search, demo's model, 96 episodes, searches without delay, compared with "
        "TRL's `GRPOTrainer` with `tools=` and with `rollout_func`, in one and two processes.",
        grpo.measure,
    ),
    "learning": Row(
        "Forward and backward of a step's micro-batches, as a share of the rate at which this "
        "machine multiplies matrices of the same shapes and type.",
        learning.measure,
    ),
    "sampling": Row(
        "Sampling with SmolLM2-135M: multi-turn episodes with search, 16 in flight, compared with "
        "`generate` on one batch of all that are in flight and with a vLLM server.",
        sampling.measure,
    ),
    "engine": Row(
        "The engine with the demo's model, compared with `generate` called turn by turn on one "
        "batch of all that are in flight; searches take 50 to 200 ms.",
        engine.measure,
    ),
    "bm25": Row(
        "BM25 searches in process, compared with bm25s (numba) and tantivy on the same words.",
        bm25.measure,
    ),
    "http": Row("BM25 over HTTP, as a share of the same index searched in process.", http.measure),
    "build": Row("Building an index of a corpus file, compared with tantivy.", build.measure),
    "dense": Row(
        "The dense service, compared with a server of Search-R1's design: FastAPI, a flat FAISS "
        "index, E5, each request encoded and searched alone. And with encoder and index alone.",
        dense.measure,
    ),
    "encoder": Row(
        "Encoders on a CPU in int8, compared with torch, and the recall that int8 loses.",
        encoder.measure,
    ),
    "scale": Row(
        "Seconds per episode of a GRPO step with more episodes, relative to 96 episodes.",
        scale.measure,
    ),
}


def measured(row: Row, folder: Path, is_quick: bool, num_rounds: int) -> RowRecord:
    """Measures a row; what stops it becomes the row's text in the table."""
    size = f"{'quick' if is_quick else 'full'} size"
    conditions, bench = Conditions(size), Bench(folder, is_quick, num_rounds)
    failure = ""
    try:
        row.measure(bench)
    except MissingSideError as missing:
        failure = str(missing)
    except Exception as error:  # one row must not end the others
        traceback.print_exc()
        failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return RowRecord(bench.figures, bench.sides, conditions.ended(), failure)
